// absorb: state += the sums of a range of keys and values.
#pragma once

#include "rows.h"

namespace linattn {
namespace LINATTN_ISA_NS {

// ---- adding a tile to the double state -------------------------------------------------------------------

template <class T>
static inline void add_to_state(double* state, const T* tile, int64_t count) {
  for (int64_t c = 0; c < count; ++c) state[c] += static_cast<double>(tile[c]);
}

// kv: (D, d_v) += phi: (rows, D)^T v: (rows, d_v), and with `ready` the prepared copy follows.
template <class T>
static void add_outer(const Layer& layer, const T* phi, Rows<T> v, int64_t rows, StateRef state, Prepared<T>* ready) {
  const Widths<T> w(layer);
  for_strips<T, kTallVectors>(w.v_pad, [&](auto vectors, int64_t c) {
    constexpr int NV = decltype(vectors)::value;
    constexpr int64_t width = NV * kLanes<T>;
    const int64_t columns = min_of(width, w.v - c);
    for (int64_t d = 0; d < w.d; d += kTallRows) {
      with_rows<kTallRows>(w.d - d, [&](auto tall) {
        constexpr int MR = decltype(tall)::value;
        alignas(64) T sums[MR][width];
        outer_tile<T, MR, NV>(rows, phi + d, w.d_row, v.data + c, v.row, sums[0], width);
        for (int i = 0; i < MR; ++i) {
          double* row = state.kv + (d + i) * w.v + c;
          if (columns == width)
            add_to_state(row, sums[i], width);
          else
            add_to_state(row, sums[i], columns);
          if (ready) {
            T* copy = ready->kv + (d + i) * w.v_row + c;
            for (int64_t j = 0; j < columns; ++j) copy[j] = static_cast<T>(row[j]);
          }
        }
      });
    }
  });

  for (int64_t d = 0; d < w.d_pad; d += kLanes<T>) {
    Vec<T> sum = {};
    for (int64_t r = 0; r < rows; ++r) sum += load(phi + r * w.d_row + d);
    T sums[kLanes<T>];
    store(sums, sum);
    const int64_t columns = min_of(kLanes<T>, w.d - d);
    add_to_state(state.k_sum + d, sums, columns);
    if (ready)
      for (int64_t j = 0; j < columns; ++j) ready->k_sum[d + j] = static_cast<T>(state.k_sum[d + j]);
  }
}

template <class T>
static void absorb_of(const Layer& layer, StateRef state, View k, View v, MaskView mask, int64_t begin, int64_t end,
                      void* scratch) {
  const Widths<T> w(layer);
  const int64_t most = rows_per_block<T>(kFlushRows, w.d_pad);
  Arena arena(scratch);
  T* phi = arena.take<T>(most * w.d_row);
  T* values = arena.take<T>(most * w.v_row);
  T* scale = arena.take<T>(w.d_pad);
  uint8_t* kept = arena.take<uint8_t>(most);
  for (int64_t r0 = begin; r0 < end; r0 += most) {
    const int64_t rows = min_of(most, end - r0);
    const int64_t count = mask.data ? read_mask(mask, r0, rows, kept) : rows;
    if (count == 0) continue;
    const bool some = count < rows;
    if (layer.map == Map::exp) {
      raw_rows(layer, k, r0, rows, phi);
      column_exponents<T>(phi, w.d_row, rows, w.d_pad, some ? kept : nullptr, scale);
      raise_scales(layer, state, scale);
      prepare_scales(layer, state.log_scale, scale);
      exp_keys(layer, scale, phi, rows);
    } else {
      map_block(layer, k, r0, rows, phi);
    }
    Rows<T> right = rows_of<T>(layer.dtype, v, r0, rows, w.v, true, values, w.v_row);
    if (some) {
      right = copied_rows(right, rows, w, values);
      clear_masked(kept, phi, w.d_row, rows);
      clear_masked(kept, values, w.v_row, rows);
    }
    add_outer<T>(layer, phi, right, rows, state, nullptr);
  }
}

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
