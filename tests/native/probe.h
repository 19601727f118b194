// The small functions of one instruction set, which the kernels hide: over whole arrays, for test_elementary.
#pragma once

#include <stdint.h>

#include "kernels.h"

namespace linattn {

template <class T>
struct Functions {
  // n is a multiple of kProbeLanes.
  void (*exp)(const T* x, T* y, int64_t n);
  void (*exp_nonpositive)(const T* x, T* y, int64_t n);
  void (*log1p_unit)(const T* x, T* y, int64_t n);
  void (*log_from_one)(const T* x, T* y, int64_t n);
  void (*sine)(const T* x, T* y, int64_t n);
  void (*cosine)(const T* x, T* y, int64_t n);
  void (*exp_shifted)(const T* x, const T* shift, T* y, int64_t n);
  void (*exponent)(const T* x, T* y, int64_t n);
  void (*phi)(Map map, const T* x, T* y, int64_t n);
  void (*minimum)(const T* a, const T* b, T* y, int64_t n);
  void (*maximum)(const T* a, const T* b, T* y, int64_t n);
  // Of the first vector.
  T (*sum_lanes)(const T* x);
  T (*max_lanes)(const T* x);
  void (*transpose)(T* square);  // lanes x lanes, in place
  int64_t lanes;
  void (*load_row)(DType dtype, const char* from, int64_t col, T* to, int64_t cols);
  void (*store_row)(DType dtype, char* to, int64_t col, const T* from, int64_t cols);
  // The projection of the first rows of x into a block of `block` numbers a row, with `room` numbers beside it.
  void (*project)(const Layer&, View x, int64_t rows, T* block, T* room);
  int64_t (*block)(const Layer&);
  int64_t (*room)(const Layer&, int64_t rows);
};

constexpr int64_t kProbeLanes = 16;

struct Probe {
  const char* name;
  Functions<float> single;
  Functions<double> wide;
  float (*widen_half)(uint16_t);
  uint16_t (*narrow_half)(float);
  float (*widen_bfloat)(uint16_t);
  uint16_t (*narrow_bfloat)(float);
};

}  // namespace linattn
