// The matrix products everything is made of: one register tile, and the loops that sweep it.
#pragma once

#include "simd.h"

namespace linattn {
namespace LINATTN_ISA_NS {

// A tile is kTileRows x (kTileVectors * lanes) accumulators. 6 x 2 fills 16 registers (12 accumulators, 2 of b,
// 1 broadcast); with 32 registers a tile of 12 x 2 reads less of b, and 6 x 4 less of a.
constexpr int kTileRows = 6;
constexpr int kTileVectors = kVectorRegisters >= 32 ? 4 : 2;
constexpr int kTallRows = kVectorRegisters >= 32 ? 12 : 6;
constexpr int kTallVectors = 2;

template <class T, int MR, int NV>
struct Tile {
  Vec<T> at[MR][NV];

  void zero() {
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) at[i][j] = Vec<T>{};
  }

  // at: (MR, NV * lanes) += a: (MR, depth) * b: (depth, NV * lanes); a(i, p) = a[i * a_row + p * a_col]
  void multiply_add(int64_t depth, const T* a, int64_t a_row, int64_t a_col, const T* b, int64_t b_row) {
    for (int64_t p = 0; p < depth; ++p) {
      Vec<T> right[NV];
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) right[j] = load(b + j * kLanes<T>);
#pragma GCC unroll 16
      for (int i = 0; i < MR; ++i) {
        const Vec<T> left = splat(a[i * a_row]);
#pragma GCC unroll 4
        for (int j = 0; j < NV; ++j) at[i][j] += left * right[j];
      }
      a += a_col;
      b += b_row;
    }
  }

  // The triangle that a causal tile ends with: row i takes columns 0..i only, so that nothing of a later row,
  // NaN included, is ever multiplied, by zero or otherwise.
  void multiply_add_triangle(const T* a, int64_t a_row, const T* b, int64_t b_row) {
#pragma GCC unroll 16
    for (int p = 0; p < MR; ++p) {
      Vec<T> right[NV];
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) right[j] = load(b + p * b_row + j * kLanes<T>);
#pragma GCC unroll 16
      for (int i = 0; i < MR; ++i) {
        if (i < p) continue;
        const Vec<T> left = splat(a[i * a_row + p]);
#pragma GCC unroll 4
        for (int j = 0; j < NV; ++j) at[i][j] += left * right[j];
      }
    }
  }
};

// Calls body<MR>() for the `rows` (1..Max) that a sweep has left.
template <int Max, class Body>
static inline void with_rows(int64_t rows, Body&& body) {
  if constexpr (Max > 1) {
    if (rows < Max) {
      with_rows<Max - 1>(rows, body);
      return;
    }
  }
  body.template operator()<Max>();
}

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
