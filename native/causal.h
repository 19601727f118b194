// causal: chunks of rows. A row takes the keys before its chunk from the state and those of its chunk, up to its
// own, from a triangular product. Nothing a row computes reads a later row, so its bits don't depend on the future.
#pragma once

#include "absorb.h"
#include "query.h"

namespace linattn {
namespace LINATTN_ISA_NS {

// phi_t: (padded D, kChunk) = transposed phi: (rows, padded D); columns from `rows` up to a whole vector are 0.
template <class T>
static void transpose_block(const T* phi, const Widths<T>& w, int64_t rows, T* phi_t) {
  constexpr int64_t lanes = kLanes<T>;
  for (int64_t r = 0; r < rows; r += lanes)
    for (int64_t d = 0; d < w.d_pad; d += lanes) {
      Vec<T> square[lanes];
#pragma GCC unroll 16
      for (int64_t i = 0; i < lanes; ++i) square[i] = r + i < rows ? load(phi + (r + i) * w.d_row + d) : Vec<T>{};
      transpose_square<T>(square);
#pragma GCC unroll 16
      for (int64_t i = 0; i < lanes; ++i) store(phi_t + (d + i) * kChunkRow<T> + r, square[i]);
    }
}

// weights: (rows, kChunk) = phi_q: (rows, padded D) phi_t: (D, kChunk), columns 0..row and some beyond, unused.
template <class T>
static void causal_weights(const T* phi_q, int64_t d, int64_t q_row, const T* phi_t, int64_t rows, T* weights) {
  for (int64_t r = 0; r < rows; r += kTileRows)
    with_rows<kTileRows>(rows - r, [&](auto tile_rows) {
      constexpr int MR = decltype(tile_rows)::value;
      for_strips<T, kTileVectors>(round_up<T>(r + MR), [&](auto vectors, int64_t c) {
        product_tile<T, MR, decltype(vectors)::value>(d, phi_q + r * q_row, q_row, phi_t + c, kChunkRow<T>,
                                                      static_cast<const T*>(nullptr), weights + r * kChunkRow<T> + c,
                                                      kChunkRow<T>);
      });
    });
}

// The sum of a row's weights on the keys 0..last, vectors first: lanes beyond `last` are never read.
template <class T>
static inline T sum_to(const T* weights, int64_t last) {
  Vec<T> sum = {};
  int64_t c = 0;
  for (; c + kLanes<T> <= last + 1; c += kLanes<T>) sum += load(weights + c);
  T total = sum_lanes<T>(sum);
  for (; c <= last; ++c) total += weights[c];
  return total;
}

// Rows of this chunk before the first key that passes a scale by more than the headroom: the chunk ends there, so
// that the scale it raises touches no earlier row. x: raw keys.
template <class T>
static int64_t rows_within_headroom(const Layer& layer, StateRef state, const T* x, const uint8_t* kept, int64_t rows,
                                    T* top) {
  const Widths<T> w(layer);
  for (int64_t r = 0; r < rows; ++r) {
    if (kept && !kept[r]) continue;
    column_exponents<T>(x + r * w.d_row, w.d_pad, 1, w.d_pad, nullptr, top);
    for (int64_t d = 0; d < w.d; ++d) {
      if (!(top[d] > T(kEmpty)) || top[d] > T(4 * kExpLimit)) continue;
      if (state.log_scale[d] == kEmpty || top[d] > T(state.log_scale[d] + kHeadroom)) {
        if (r > 0) return r;
        raise_scale(layer, state, d, static_cast<int32_t>(top[d]));
      }
    }
  }
  return rows;
}

template <class T>
static void causal_of(const Layer& layer, StateRef state, const Heads& heads, int64_t begin, int64_t end,
                      void* prepared, void* scratch) {
  const Widths<T> w(layer);
  Prepared<T> ready(layer, prepared);
  Arena arena(scratch);
  T* phi_k = arena.take<T>(kChunk * w.d_row);
  T* phi_t = arena.take<T>(w.d_pad * kChunkRow<T>);
  T* phi_q = arena.take<T>(kChunk * w.d_row);
  T* weights = arena.take<T>(kChunk * kChunkRow<T>);
  T* values = arena.take<T>(kChunk * w.v_row);
  T* buffer = arena.take<T>(kChunk * w.v_row);
  T* top = arena.take<T>(w.d_pad);
  RowScales<T> scales(arena, kChunk);
  uint8_t kept[kChunk];

  prepare_of<T>(layer, state, prepared);
  for (int64_t r0 = begin, rows; r0 < end; r0 += rows) {
    rows = min_of(kChunk, end - r0);
    const bool some = heads.mask.data && read_mask(heads.mask, r0, rows, kept) < rows;
    if (layer.map == Map::exp) {
      raw_rows(layer, heads.k, r0, rows, phi_k);
      rows = rows_within_headroom<T>(layer, state, phi_k, some ? kept : nullptr, rows, top);
      prepare_of<T>(layer, state, prepared);
      exp_keys(layer, ready.scale, phi_k, rows);
    } else {
      map_block(layer, heads.k, r0, rows, phi_k);
    }
    Rows<T> v = rows_of<T>(layer.dtype, heads.v, r0, rows, w.v, true, values, w.v_row);
    if (some) {
      v = copied_rows(v, rows, w, values);
      clear_masked(kept, phi_k, w.d_row, rows);
      clear_masked(kept, values, w.v_row, rows);
    }
    transpose_block(phi_k, w, rows, phi_t);

    for (int64_t g = 0; g < heads.groups; ++g) {
      map_queries(layer, ready, heads.q[g], r0, rows, phi_q, scales.power);
      causal_weights(phi_q, w.d, w.d_row, phi_t, rows, weights);
      for (int64_t r = 0; r < rows; ++r)
        scales.total[r] = dot(phi_q + r * w.d_row, ready.k_sum, w.d_pad) + sum_to(weights + r * kChunkRow<T>, r);
      scales.close(layer, rows);
      const OutRows<T> out(layer, heads.out[g], r0, buffer);
      for_strips<T, kTileVectors>(w.v_pad, [&](auto vectors, int64_t c) {
        for (int64_t r = 0; r < rows; r += kTileRows)
          with_rows<kTileRows>(rows - r, [&](auto tile_rows) {
            causal_tile<T, decltype(tile_rows)::value, decltype(vectors)::value>(
                w.d, phi_q + r * w.d_row, w.d_row, ready.kv + c, w.v_row, r, weights + r * kChunkRow<T>, kChunkRow<T>, v.data + c,
                v.row, scales.factor + r, out.data + r * out.row + c, out.row);
          });
      });
      finish_rows(layer, heads.out[g], r0, rows, out, scales);
    }
    add_outer<T>(layer, phi_k, v, rows, state, &ready);
  }
}

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
