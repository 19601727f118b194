// From one matrix to all: batches, grouped heads, packed sequences, threads.
#pragma once

#include <stdint.h>

#include "kernels.h"

namespace linattn {

constexpr int kMaxAxes = 16;

// One axis of the output's batch shape, with everybody's step along it (bytes; states in whole states; 0 where an
// operand is broadcast). Axes with `keys` enumerate the states; the queries along the others share a state.
struct Axis {
  int64_t size;
  bool keys;
  int64_t q, k, v, mask, out, state;
  int64_t grad_out, dq, dk, dv;  // of gradients alone
  int64_t head = 0;              // from one projection to the next, where heads have their own
};

enum class Form : uint8_t { parallel, causal, quadratic, absorb, query, step };

struct Problem {
  Form form;
  Layer layer;
  int64_t n_q = 0, n_k = 0;
  // Packed sequences: offsets [0, ..., n], or nullptr for one sequence of n_q queries and n_k keys.
  const int64_t* cu_seqlens = nullptr;
  int64_t sequences = 1;
  Axis axes[kMaxAxes];
  int axis_count = 0;
  View q{}, k{}, v{};
  MaskView mask{};
  OutView out{};
  // The state before (kv == nullptr: empty) and after (kv == nullptr: not wanted). `after` is contiguous over
  // (sequences, key axes). absorb and step work in place: there both are the same.
  StateRef before{}, after{};
};

// Whether the quadratic order takes fewer operations; the rule of linattn.plan. again: multiply-adds that it takes in
// making features for a second time.
bool prefers_quadratic(int64_t n_q, int64_t n_k, int64_t features, int64_t d_v, int64_t groups, double again = 0);

// The same of a problem whose axes are laid, of packed sequences of the average one.
bool prefers_quadratic(const Problem& problem);

// Whether the quadratic order would make features of keys for so many blocks of queries that they are better made
// first.
bool makes_features_often(const Problem& problem);

// Runs the problem, on up to thread_count() threads. False: there was not enough memory.
bool solve(const Problem& problem, const Kernels& kernels, int threads);

// The gradient of a parallel or causal problem, whose `out` is the result. k, v, the states and their gradients have
// all key axes; the gradients of states are contiguous over (sequences, key axes), like `after`.
struct GradientProblem {
  Problem problem;
  View grad_out{};
  OutView dq{}, dk{}, dv{};
  // Of the sums kv and k_sum as they are kept: with respect to the state after, given (kv == nullptr: none), and to
  // the state before (kv == nullptr: not wanted). Their log_scale is unused; the one of exponential maps is that of
  // problem.after, which is needed with the first.
  StateRef grad_after{}, grad_before{};
};

// As solve. problem.after, if given, is the state after all keys and only read.
bool solve_gradient(const GradientProblem& problem, const Kernels& kernels, int threads);

}  // namespace linattn
