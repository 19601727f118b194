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
  RowScales<T> scales(arena, kChunk);
  Prepared<T> ready(layer, arena.take<char>(prepared_bytes_of<T>(layer)));
  uint8_t kept[kChunk];
  bool troubled = false;

  if (layer.map == Map::exp) {  // the scales of all keys first: they only have to be raised, no sums exist yet
    for (int64_t d = 0; d < w.d; ++d) log_scale[d] = kEmpty;
    for (int64_t c0 = 0; c0 < n_k; c0 += kChunk) {
      const int64_t keys = min_of(kChunk, n_k - c0);
      const bool some = mask.data && read_mask(mask, c0, keys, kept) < keys;
      raw_rows(layer, k, c0, keys, phi_k);
      column_exponents<T>(phi_k, w.d_row, keys, w.d_pad, some ? kept : nullptr, top);
      for (int64_t d = 0; d < w.d; ++d)
        if (top[d] > T(log_scale[d]) && !(top[d] > 2 * kExpLimit<T>)) log_scale[d] = static_cast<int32_t>(top[d]);
    }
    prepare_scales(layer, log_scale, ready.scale);
  }
  for (int64_t d = 0; d < w.d_pad; ++d) ready.k_sum[d] = 0;

  for (int64_t r0 = begin; r0 < end; r0 += kChunk) {
    const int64_t rows = min_of(kChunk, end - r0);
    map_queries(layer, ready, q, r0, rows, phi_q, scales.power, scales.dots);
    for (int64_t i = 0; i < rows * w.v_row; ++i) sums[i] = 0;
    for (int64_t r = 0; r < rows; ++r) denominators[r] = 0;

    for (int64_t c0 = 0; c0 < n_k; c0 += kChunk) {
      const int64_t keys = min_of(kChunk, n_k - c0);
      const int64_t count = mask.data ? read_mask(mask, c0, keys, kept) : keys;
      if (count == 0) continue;
      const bool some = count < keys;
      if (layer.map == Map::exp) {
        raw_rows(layer, k, c0, keys, phi_k);
        exp_keys(layer, ready.scale, phi_k, keys);
      } else {
        map_block(layer, k, c0, keys, phi_k);
      }
      Rows<T> right = rows_of<T>(layer.dtype, v, c0, keys, w.v, true, values, w.v_row);
      if (some) {
        right = copied_rows(right, keys, w, values);
        clear_masked(kept, phi_k, w.d_row, keys);
        clear_masked(kept, values, w.v_row, keys);
      }
      transpose_block(phi_k, w, keys, phi_t);
      for (int64_t r = 0; r < rows; r += kWidestRows)
        with_rows<kWidestRows>(rows - r, [&](auto tile_rows) {
          constexpr int MR = decltype(tile_rows)::value;
          for_strips<T, kTileVectors>(round_up<T>(keys), [&](auto vectors, int64_t c) {
            constexpr int NV = decltype(vectors)::value;
            product_tile<T, MR, NV>(w.d, phi_q + r * w.d_row, w.d_row, phi_t + c, kChunkRow<T>,
                                    static_cast<const T*>(nullptr), weights + r * kChunkRow<T> + c, kChunkRow<T>);
          });
          for_strips<T, kTileVectors>(w.v_pad, [&](auto vectors, int64_t c) {
            constexpr int NV = decltype(vectors)::value;
            alignas(64) T part[MR * NV * kLanes<T>];
            product_tile<T, MR, NV>(keys, weights + r * kChunkRow<T>, kChunkRow<T>, right.data + c, right.row,
                                    static_cast<const T*>(nullptr), part, NV * kLanes<T>);
            for (int i = 0; i < MR; ++i)
              add_to_state(sums + (r + i) * w.v_row + c, part + i * NV * kLanes<T>, NV * kLanes<T>);
          });
        });
      for (int64_t r = 0; r < rows; ++r)
        denominators[r] += static_cast<double>(sum_of(weights + r * kChunkRow<T>, keys));
    }

    for (int64_t r = 0; r < rows; ++r) scales.total[r] = static_cast<T>(denominators[r]);
    scales.divide(layer, rows);
    const OutRows<T> ready_rows(layer, out, r0, buffer, kChunk);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < w.v; ++c)
        ready_rows.data[r * ready_rows.row + c] = static_cast<T>(sums[r * w.v_row + c]) * scales.factor[r];
    troubled |= finish_rows(layer, out, r0, rows, ready_rows, scales, phi_q);
  }
  return troubled;
}

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
