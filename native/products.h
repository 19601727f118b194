// The matrix products everything is made of: one register tile, and the loops that sweep it.
#pragma once

#include "simd.h"

namespace linattn {
namespace LINATTN_ISA_NS {

// A tile is MR rows x NV vectors of accumulators. With 16 registers 4 x 3 is best (12 accumulators, 3 of b, 1
// broadcast: 7 loads for 12 products); what is left of a width takes 6 x 2, and 8 x 1 so that one product needn't wait
// for the last. With 32 registers, 6 x 4.
constexpr int kTileVectors = kVectorRegisters >= 32 ? 4 : 3;
template <int NV>
constexpr int kTileRows = kVectorRegisters >= 32 ? (NV >= 4   ? 6
                                                    : NV == 3 ? 8
                                                              : 12)
                                                 : (NV >= 3   ? 4
                                                    : NV == 2 ? 6
                                                              : 8);
constexpr int kWidestRows = kTileRows<kTileVectors>;  // rows of the widest tile
constexpr int kWidestTile = 16;                       // no tile has more rows

// Hides from the compiler that a value does not change, so that it computes addresses from it in the loop.
#if defined(__GNUC__) || defined(__clang__)
#define LINATTN_OPAQUE(x) __asm__("" : "+r"(x))
#else
#define LINATTN_OPAQUE(x)
#endif

template <class T, int MR, int NV>
struct Tile {
  Vec<T> at[MR][NV];

  void zero() {
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) at[i][j] = Vec<T>{};
  }

  // at: (MR, NV * lanes) += the product of one column of a, a[i * a_row] for i < MR, and one row of b
  void multiply_add_one(const T* low, const T* high, int64_t a_row, const T* b) {
    Vec<T> right[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) right[j] = load(b + j * kLanes<T>);
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
      const Vec<T> left = splat(i < 3 ? low[i * a_row] : high[(i - 3) * a_row]);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) at[i][j] += left * right[j];
    }
  }

  // at: (MR, NV * lanes) += a: (MR, depth) * b: (depth, NV * lanes)
  void multiply_add(int64_t depth, const T* a, int64_t a_row, const T* b, int64_t b_row) {
    // Rows 3, 4, 5 are reached from a second pointer, so that each address is base + stride * {0, 1, 2}. Left to
    // itself the compiler keeps one offset a row, spills them and loads them back in the loop (-15 %). Four steps a
    // turn: a turn of one step has more address arithmetic than the core can issue beside its 12 products (-6 %).
    const T* low = a;
    const T* high = a + 3 * a_row;
    int64_t p = 0;
    for (; p + 4 <= depth; p += 4) {
      LINATTN_OPAQUE(a_row);
#pragma GCC unroll 4
      for (int step = 0; step < 4; ++step) {
        multiply_add_one(low + step, high + step, a_row, b);
        b += b_row;
      }
      low += 4;
      high += 4;
    }
    for (; p < depth; ++p) {
      LINATTN_OPAQUE(a_row);
      multiply_add_one(low++, high++, a_row, b);
      b += b_row;
    }
  }

  // at: (MR, NV * lanes) += a: (depth, MR)^T * b: (depth, NV * lanes). Not unrolled: by four it ran 12 % slower.
  void multiply_add_columns(int64_t depth, const T* a, int64_t a_row, const T* b, int64_t b_row) {
    for (int64_t p = 0; p < depth; ++p) {
      multiply_add_one(a, a + 3, 1, b);
      a += a_row;
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

// Row i times factor[i].
template <class T, int MR, int NV>
static inline void emit_tile(const Tile<T, MR, NV>& tile, const T* factor, T* to, int64_t to_row) {
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) store(to + i * to_row + j * kLanes<T>, tile.at[i][j] * factor[i]);
}

template <class T, int MR, int NV>
static inline void add_tile(const Tile<T, MR, NV>& tile, T* to, int64_t to_row) {
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      T* at = to + i * to_row + j * kLanes<T>;
      store(at, load(at) + tile.at[i][j]);
    }
}

template <class T, int MR, int NV>
static inline void keep_tile(const Tile<T, MR, NV>& tile, T* to, int64_t to_row) {
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) store(to + i * to_row + j * kLanes<T>, tile.at[i][j]);
}

// The whole life of a tile is one function that is not inlined: in a larger one the register allocator spills the
// loop's counters and pointers (measured: -25 %).

// out: (MR, NV * lanes) = a: (MR, depth) b: (depth, NV * lanes), row i times factor[i]
template <class T, int MR, int NV>
[[gnu::noinline]] static void product_tile(int64_t depth, const T* a, int64_t a_row, const T* b, int64_t b_row,
                                           const T* factor, T* out, int64_t out_row) {
  Tile<T, MR, NV> tile;
  tile.zero();
  tile.multiply_add(depth, a, a_row, b, b_row);
  if (factor)
    emit_tile(tile, factor, out, out_row);
  else
    keep_tile(tile, out, out_row);
}

// to: (MR, NV * lanes) += a: (depth, MR)^T b: (depth, NV * lanes); `also`, unless it is null, the same
template <class T, int MR, int NV>
[[gnu::noinline]] static void add_outer_tile(int64_t depth, const T* a, int64_t a_row, const T* b, int64_t b_row, T* to,
                                             T* also, int64_t to_row) {
  Tile<T, MR, NV> tile;
  tile.zero();
  tile.multiply_add_columns(depth, a, a_row, b, b_row);
  add_tile(tile, to, to_row);
  if (also) add_tile(tile, also, to_row);
}

// One tile of causal output: a state's part (depth D), the keys of the chunk before the tile (depth `before`), and
// the triangle on the diagonal.
template <class T, int MR, int NV>
[[gnu::noinline]] static void causal_tile(int64_t features, const T* phi_q, int64_t q_row, const T* kv, int64_t kv_row,
                                          int64_t before, const T* weights, int64_t weights_row, const T* v,
                                          int64_t v_row, const T* factor, T* out, int64_t out_row) {
  Tile<T, MR, NV> tile;
  tile.zero();
  tile.multiply_add(features, phi_q, q_row, kv, kv_row);
  tile.multiply_add(before, weights, weights_row, v, v_row);
  tile.multiply_add_triangle(weights + before, weights_row, v + before * v_row, v_row);
  emit_tile(tile, factor, out, out_row);
}

// A compile-time number, handed to generic lambdas.
template <int N>
struct Count {
  static constexpr int value = N;
};

// Calls body(Count<n>) for the n = min(rows, Max) that a sweep takes next.
template <int Max, class Body>
static inline void with_rows(int64_t rows, Body&& body) {
  if constexpr (Max > 1) {
    if (rows < Max) {
      with_rows<Max - 1>(rows, body);
      return;
    }
  }
  body(Count<Max>{});
}

// Calls body(Count<n>, first column) over strips of n <= NV vectors that cover `padded` columns (whole vectors). A
// single vector is avoided: four are 2 + 2 where 3 is the most.
template <class T, int NV, class Body>
static inline void for_strips(int64_t padded, Body&& body) {
  const int64_t vectors = padded / kLanes<T>;
  int64_t at = 0;
  while (vectors - at >= NV && !(NV == 3 && vectors - at == 4)) {
    body(Count<NV>{}, at * kLanes<T>);
    at += NV;
  }
  if constexpr (NV > 3)
    if (vectors - at == 3) {
      body(Count<3>{}, at * kLanes<T>);
      at += 3;
    }
  if constexpr (NV > 2)
    for (; vectors - at >= 2; at += 2) body(Count<2>{}, at * kLanes<T>);
  for (; at < vectors; ++at) body(Count<1>{}, at * kLanes<T>);
}

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
