// How a call falls into units, one a state, and where the operands of each begin; states in memory.
#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <new>

#include "driver.h"
#include "threads.h"

namespace linattn {

// The number of pieces depends on the sizes alone, and partial sums are merged in their order: the same input gives
// the same bits whichever thread took which piece.
constexpr int64_t kPieces = 16;      // wanted of a whole call
constexpr int64_t kPieceRows = 256;  // pieces are multiples of it, so that they end where a block ends
constexpr double kSerialWork = 2e6;  // multiply-adds below which waking a thread costs more than it brings

inline double exact_power(int64_t n) {
  if (n < -1022) return 0;
  if (n > 1023) return __builtin_inf();
  const uint64_t bits = static_cast<uint64_t>(n + 1023) << 52;
  double x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

struct Free {
  void operator()(void* p) const { ::operator delete(p, std::align_val_t(64)); }
};
using Memory = std::unique_ptr<void, Free>;

inline Memory allocate(int64_t bytes) {
  return Memory(::operator new(static_cast<size_t>(bytes > 0 ? bytes : 1), std::align_val_t(64)));
}

inline int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Where the operands of one batch element begin.
struct Place {
  View q, k, v;
  MaskView mask;
  OutView out;
  int64_t before;  // index of the given state
  int64_t head;    // whose projection is taken
};

class Units {
 public:
  explicit Units(const Problem& p) : p_(p), features_(p.layer.features), d_v_(p.layer.d_v) {
    state_bytes_ = padded((features_ * d_v_ + features_) * 8 + (exponential() ? features_ * 4 : 0));
    for (int i = 0; i < p.axis_count; ++i) (p.axes[i].keys ? states_ : groups_) *= p.axes[i].size;
    units_ = states_ * p.sequences;
  }

  // Whether something has left the working precision's range and holds what is not finite.
  bool troubled() const { return troubled_.load(); }

 protected:
  bool exponential() const { return p_.layer.map == Map::exp; }
  bool nothing() const { return states_ == 0 || groups_ == 0 || p_.sequences == 0; }

  int64_t longest_keys() const {
    if (!p_.cu_seqlens) return p_.n_k;
    int64_t longest = 0;
    for (int64_t s = 0; s < p_.sequences; ++s) {
      const int64_t n = p_.cu_seqlens[s + 1] - p_.cu_seqlens[s];
      if (n > longest) longest = n;
    }
    return longest;
  }
  int64_t longest_queries() const { return p_.cu_seqlens ? longest_keys() : p_.n_q; }

  // Keys and queries of the whole call.
  double all_rows() const {
    return static_cast<double>(p_.n_k) * static_cast<double>(states_) +
           static_cast<double>(p_.n_q) * static_cast<double>(states_) * static_cast<double>(groups_);
  }

  // Pieces of a sequence of n rows when there are `others` to run beside it.
  static int64_t cut(int64_t n, int64_t others) {
    const int64_t wanted = (kPieces + others - 1) / others;
    const int64_t most = (n + kPieceRows - 1) / kPieceRows;
    const int64_t pieces = wanted < most ? wanted : most;
    return pieces > 0 ? pieces : 1;
  }

  struct Range {
    int64_t begin, end;
  };
  static Range piece_of(int64_t n, int64_t pieces, int64_t piece) {
    const int64_t each = ((n + pieces - 1) / pieces + kPieceRows - 1) / kPieceRows * kPieceRows;
    const int64_t begin = piece * each < n ? piece * each : n;
    return {begin, begin + each < n ? begin + each : n};
  }

  int64_t sequence_of(int64_t unit) const { return unit / states_; }
  Range rows_of(int64_t unit) const {  // of a packed sequence, or all
    if (!p_.cu_seqlens) return {0, p_.n_k};
    const int64_t s = sequence_of(unit);
    return {p_.cu_seqlens[s], p_.cu_seqlens[s + 1]};
  }
  int64_t keys_of(int64_t unit) const {
    const Range rows = rows_of(unit);
    return rows.end - rows.begin;
  }
  int64_t queries_of(int64_t unit) const { return p_.cu_seqlens ? keys_of(unit) : p_.n_q; }

  // visit(axis, index along it) for the place of a unit's group.
  template <class Visit>
  void for_axes(int64_t unit, int64_t group, Visit&& visit) const {
    int64_t key_index = unit % states_, group_index = group;
    for (int i = p_.axis_count - 1; i >= 0; --i) {
      const Axis& axis = p_.axes[i];
      int64_t& index = axis.keys ? key_index : group_index;
      visit(axis, index % axis.size);
      index /= axis.size;
    }
  }

  Place place_of(int64_t unit, int64_t group) const {
    Place at{p_.q, p_.k, p_.v, p_.mask, p_.out, 0, 0};
    for_axes(unit, group, [&](const Axis& axis, int64_t step) {
      at.q.data += step * axis.q;
      at.k.data += step * axis.k;
      at.v.data += step * axis.v;
      if (at.mask.data) at.mask.data += step * axis.mask;
      at.out.data += step * axis.out;
      at.before += step * axis.state;
      at.head += step * axis.head;
    });
    if (p_.cu_seqlens) {
      const int64_t first = rows_of(unit).begin;
      at.q.first = at.k.first = first;
      at.q.data += first * at.q.row;
      at.k.data += first * at.k.row;
      at.v.data += first * at.v.row;
      if (at.mask.data) at.mask.data += first * at.mask.stride;
      at.out.data += first * at.out.row;
      at.before += sequence_of(unit) * before_stride();
    }
    return at;
  }

  Layer layer_of(const Place& at) const {
    Layer layer = p_.layer;
    if (layer.projection) {
      layer.projection += at.head * layer.projection_step;
      layer.query_projection += at.head * layer.query_projection_step;
    }
    return layer;
  }

  // Given states of packed sequences have a leading axis of sequences.
  int64_t before_stride() const {
    int64_t stride = 1;
    for (int i = 0; i < p_.axis_count; ++i)
      if (p_.axes[i].state != 0) stride *= p_.axes[i].size;
    return stride;
  }

  // ---- states ----

  StateRef state_at(StateRef base, int64_t index) const {
    return {base.kv + index * features_ * d_v_, base.k_sum + index * features_,
            base.log_scale ? base.log_scale + index * features_ : nullptr};
  }

  StateRef state_in(void* memory) const {
    double* kv = static_cast<double*>(memory);
    double* k_sum = kv + features_ * d_v_;
    return {kv, k_sum, exponential() ? reinterpret_cast<int32_t*>(k_sum + features_) : nullptr};
  }

  void clear(StateRef state) const {
    std::memset(state.kv, 0, static_cast<size_t>(features_ * d_v_) * 8);
    std::memset(state.k_sum, 0, static_cast<size_t>(features_) * 8);
    if (state.log_scale)
      for (int64_t d = 0; d < features_; ++d) state.log_scale[d] = kEmpty;
  }

  void copy(StateRef to, StateRef from) const {
    if (to.kv == from.kv) return;
    std::memcpy(to.kv, from.kv, static_cast<size_t>(features_ * d_v_) * 8);
    std::memcpy(to.k_sum, from.k_sum, static_cast<size_t>(features_) * 8);
    if (to.log_scale) std::memcpy(to.log_scale, from.log_scale, static_cast<size_t>(features_) * 4);
  }

  void start(StateRef state, int64_t before) const {
    if (p_.before.kv)
      copy(state, state_at(p_.before, before));
    else
      clear(state);
  }

  void merge(StateRef into, StateRef other) const {
    for (int64_t d = 0; d < features_; ++d) {
      double own = 1, theirs = 1;
      if (into.log_scale) {
        const int64_t a = into.log_scale[d], b = other.log_scale[d], top = a > b ? a : b;
        own = exact_power(a - top);
        theirs = exact_power(b - top);
        into.log_scale[d] = static_cast<int32_t>(top);
      }
      double* row = into.kv + d * d_v_;
      const double* more = other.kv + d * d_v_;
      for (int64_t c = 0; c < d_v_; ++c) row[c] = row[c] * own + more[c] * theirs;
      into.k_sum[d] = into.k_sum[d] * own + other.k_sum[d] * theirs;
    }
  }

  // ---- running ----

  // A causal sequence in pieces computes the sums of all but the last twice, 1.4 times the work; its gradient takes 7
  // sweeps instead of 5, which is the same. Whole sequences are better unless they leave more of the threads idle. (So
  // the bits of a causal result depend on the thread count.)
  bool cutting_pays(int threads) const {
    const int64_t rounds = (units_ + threads - 1) / threads;
    return static_cast<double>(rounds * threads) > 1.4 * static_cast<double>(units_);
  }

  // A failed allocation in any piece ends the call with an error; no exception leaves a thread.
  template <class Run, void (Run::*piece)(int64_t)>
  static void guarded(void* self, int64_t index) {
    Run* run = static_cast<Run*>(self);
    try {
      (run->*piece)(index);
    } catch (const std::bad_alloc&) {
      run->failed_.store(true);
    }
  }

  void note(bool trouble) {
    if (trouble) troubled_.store(true, std::memory_order_relaxed);
  }

  std::atomic<bool> failed_{false}, troubled_{false};

  const Problem& p_;
  int64_t features_, d_v_, state_bytes_ = 0;
  int64_t states_ = 1, groups_ = 1;  // states of one sequence; queries that share a state
  int64_t units_ = 1;                // states of all sequences
};

}  // namespace linattn
