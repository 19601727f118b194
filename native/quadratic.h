// quadratic: (phi(q) phi(k)^T) v in blocks of queries and keys; cheaper than the state for short sequences.
#pragma once

#include "causal.h"

namespace linattn {
namespace LINATTN_ISA_NS {

// The sum of the first `count` weights; the lanes beyond hold products with padding, which are 0 or NaN.
template <class T>
static inline T sum_of(const T* weights, int64_t count) {
  Vec<T> sum = {};
  int64_t c = 0;
  for (; c + kLanes<T> <= count; c += kLanes<T>) sum += load(weights + c);
  T total = sum_lanes<T>(sum);
  for (; c < count; ++c) total += weights[c];
  return total;
}

// weights: (rows, kChunk) = phi(q) phi(k)^T of one chunk of keys, in whole vectors.
template <class T>
static void chunk_weights(const Widths<T>& w, const T* phi_q, const T* phi_t, int64_t rows, int64_t keys, T* weights) {
  for (int64_t r = 0; r < rows; r += kWidestRows)
    with_rows<kWidestRows>(rows - r, [&](auto tile_rows) {
      constexpr int MR = decltype(tile_rows)::value;
      for_strips<T, kTileVectors>(round_up<T>(keys), [&](auto vectors, int64_t c) {
        constexpr int NV = decltype(vectors)::value;
        product_tile<T, MR, NV>(w.d, phi_q + r * w.d_row, w.d_row, phi_t + c, kChunkRow<T>,
                                static_cast<const T*>(nullptr), weights + r * kChunkRow<T> + c, kChunkRow<T>);
      });
    });
}

// Calls tile(Count<rows>, Count<vectors>, row, column) over (rows, padded d_v).
template <class T, class Body>
static void for_tiles(int64_t rows, int64_t padded, Body&& tile) {
  for_strips<T, kTileVectors>(padded, [&](auto vectors, int64_t c) {
    constexpr int NV = decltype(vectors)::value;
    for (int64_t r = 0; r < rows; r += kTileRows<NV>)
      with_rows<kTileRows<NV>>(rows - r, [&](auto tile_rows) { tile(tile_rows, vectors, r, c); });
  });
}

template <class T>
static bool quadratic_of(const Layer& layer, View q, View k, View v, MaskView mask, int64_t n_k, OutView out,
                         int64_t begin, int64_t end, void* scratch) {
  const Widths<T> w(layer);
  Arena arena(scratch);
  T* phi_k = arena.take<T>(kChunk * w.d_row);
  T* phi_t = arena.take<T>(w.d_pad * kChunkRow<T>);
  T* phi_q = arena.take<T>(kChunk * w.d_row);
  T* weights = arena.take<T>(kChunk * kChunkRow<T>);
  T* values = arena.take<T>(kChunk * w.v_row);
  T* buffer = arena.take<T>(OutRows<T>::elements(w, kChunk));
  T* top = arena.take<T>(w.d_pad);
  double* sums = arena.take<double>(kChunk * w.v_row);
  double* denominators = arena.take<double>(kChunk);
  int32_t* log_scale = arena.take<int32_t>(w.d);
  T* room = arena.take<T>(w.room(kChunk));
  RowScales<T> scales(arena, kChunk);
  Prepared<T> ready(layer, arena.take<char>(prepared_bytes_of<T>(layer)));
  uint8_t kept[kChunk];
  bool troubled = false;

  if (layer.map == Map::exp) {  // the scales of all keys first: they only have to be raised, no sums exist yet
    for (int64_t d = 0; d < w.d; ++d) log_scale[d] = kEmpty;
    for (int64_t c0 = 0; c0 < n_k; c0 += kChunk) {
      const int64_t keys = min_of(kChunk, n_k - c0);
      const bool some = mask.data && read_mask(mask, c0, keys, kept) < keys;
      raw_rows(layer, k, c0, keys, phi_k, layer.projection, room);
      column_exponents<T>(phi_k, w.d_row, keys, w.d_pad, some ? kept : nullptr, top);
      for (int64_t d = 0; d < w.d; ++d)
        if (top[d] > T(log_scale[d]) && !(top[d] > 2 * kExpLimit<T>)) log_scale[d] = static_cast<int32_t>(top[d]);
    }
    prepare_scales(layer, log_scale, ready.scale);
  }
  for (int64_t d = 0; d < w.d_pad; ++d) ready.k_sum[d] = 0;

  // phi(k), transposed, and v of the keys from c0; false: none of them takes part.
  Rows<T> right{};
  const auto load_keys = [&](int64_t c0, int64_t keys) {
    const int64_t count = mask.data ? read_mask(mask, c0, keys, kept) : keys;
    if (count == 0) return false;
    if (layer.map == Map::exp) {
      if (n_k > kChunk) raw_rows(layer, k, c0, keys, phi_k, layer.projection, room);  // else they still lie there
      exp_keys(layer, ready.scale, phi_k, keys);
    } else {
      map_block(layer, k, c0, keys, phi_k, layer.projection, room);
    }
    right = rows_of<T>(layer.dtype, v, c0, keys, w.v, true, values, w.v_row);
    if (count < keys) {
      right = copied_rows(right, keys, w, values);
      clear_masked(kept, phi_k, w.d_row, keys);
      clear_masked(kept, values, w.v_row, keys);
    }
    transpose_block(phi_k, w, keys, phi_t);
    return true;
  };
  const bool one_chunk = n_k > 0 && n_k <= kChunk && load_keys(0, n_k);

  for (int64_t r0 = begin; r0 < end; r0 += kChunk) {
    const int64_t rows = min_of(kChunk, end - r0);
    map_queries(layer, ready, q, r0, rows, phi_q, scales.power, scales.dots, room);
    const OutRows<T> ready_rows(layer, out, r0, buffer, kChunk);
    if (one_chunk) {  // nothing to carry: straight to the output (8 heads x 32: -14 %)
      chunk_weights(w, phi_q, phi_t, rows, n_k, weights);
      for (int64_t r = 0; r < rows; ++r) scales.total[r] = sum_of(weights + r * kChunkRow<T>, n_k);
      scales.divide(layer, rows);
      for_tiles<T>(rows, w.v_pad, [&](auto tile_rows, auto vectors, int64_t r, int64_t c) {
        product_tile<T, decltype(tile_rows)::value, decltype(vectors)::value>(
            n_k, weights + r * kChunkRow<T>, kChunkRow<T>, right.data + c, right.row, scales.factor + r,
            ready_rows.data + r * ready_rows.row + c, ready_rows.row);
      });
      troubled |= finish_rows(layer, out, r0, rows, ready_rows, scales, phi_q);
      continue;
    }
    for (int64_t i = 0; i < rows * w.v_row; ++i) sums[i] = 0;
    for (int64_t r = 0; r < rows; ++r) denominators[r] = 0;
    for (int64_t c0 = 0; c0 < n_k; c0 += kChunk) {
      const int64_t keys = min_of(kChunk, n_k - c0);
      if (!load_keys(c0, keys)) continue;
      chunk_weights(w, phi_q, phi_t, rows, keys, weights);
      for_tiles<T>(rows, w.v_pad, [&](auto tile_rows, auto vectors, int64_t r, int64_t c) {
        constexpr int MR = decltype(tile_rows)::value, NV = decltype(vectors)::value;
        alignas(64) T part[MR * NV * kLanes<T>];
        product_tile<T, MR, NV>(keys, weights + r * kChunkRow<T>, kChunkRow<T>, right.data + c, right.row,
                                static_cast<const T*>(nullptr), part, NV * kLanes<T>);
        for (int i = 0; i < MR; ++i)
          add_to_state(sums + (r + i) * w.v_row + c, part + i * NV * kLanes<T>, NV * kLanes<T>);
      });
      for (int64_t r = 0; r < rows; ++r)
        denominators[r] += static_cast<double>(sum_of(weights + r * kChunkRow<T>, keys));
    }

    for (int64_t r = 0; r < rows; ++r) scales.total[r] = static_cast<T>(denominators[r]);
    scales.divide(layer, rows);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < w.v; ++c)
        ready_rows.data[r * ready_rows.row + c] = static_cast<T>(sums[r * w.v_row + c]) * scales.factor[r];
    troubled |= finish_rows(layer, out, r0, rows, ready_rows, scales, phi_q);
  }
  return troubled;
}

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
