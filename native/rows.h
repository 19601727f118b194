// phi of blocks of keys and queries, masks, and the scales of the exponential map.
#pragma once

#include "blocks.h"
#include "maps.h"
#include "prepared.h"

namespace linattn {
namespace LINATTN_ISA_NS {

// ---- phi of a block of keys ------------------------------------------------------------------------------

static int64_t read_mask(MaskView mask, int64_t begin, int64_t rows, uint8_t* kept) {
  int64_t count = 0;
  for (int64_t r = 0; r < rows; ++r) {
    kept[r] = mask.data[(begin + r) * mask.stride] != 0;
    count += kept[r];
  }
  return count;
}

template <class T>
static void clear_masked(const uint8_t* kept, T* block, int64_t ld, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r)
    if (!kept[r])
      for (int64_t c = 0; c < ld; ++c) block[r * ld + c] = 0;
}

// The rows in `buffer`, where they may be changed.
template <class T>
static Rows<T> copied_rows(Rows<T> rows, int64_t count, const Widths<T>& w, T* buffer) {
  if (rows.data != buffer)  // else they have been copied and padded on their way in
    for (int64_t r = 0; r < count; ++r)
      __builtin_memcpy(buffer + r * w.v_row, rows.data + r * rows.row, static_cast<size_t>(w.v) * sizeof(T));
  return {buffer, w.v_row};
}

static inline double exact_power(int64_t n) {  // 2^n; 0 below the normal doubles, infinity above them
  if (n < -1022) return 0;
  if (n > 1023) return __builtin_inf();
  const uint64_t bits = static_cast<uint64_t>(n + 1023) << 52;
  double x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

static void raise_scale(const Layer& layer, StateRef state, int64_t d, int32_t to) {
  const double factor = exact_power(static_cast<int64_t>(state.log_scale[d]) - to);
  for (int64_t c = 0; c < layer.d_v; ++c) state.kv[d * layer.d_v + c] *= factor;
  state.k_sum[d] *= factor;
  state.log_scale[d] = to;
}

// Raises the scales that `top` (exponents of keys, one a feature) passes by more than the headroom.
template <class T>
static bool raise_scales(const Layer& layer, StateRef state, const T* top) {
  bool raised = false;
  for (int64_t d = 0; d < layer.features; ++d) {
    if (!(top[d] > T(kEmpty))) continue;
    if (state.log_scale[d] != kEmpty && !(top[d] > T(state.log_scale[d] + kHeadroom))) continue;
    if (top[d] > T(4 * kExpLimit)) continue;  // infinite keys: exp_shifted gives NaN
    raise_scale(layer, state, d, static_cast<int32_t>(top[d]));
    raised = true;
  }
  return raised;
}

// exp of raw keys x: (rows, d_pad), in place, with the state's scales; padding columns become 0.
template <class T>
static void exp_keys(const Layer& layer, const T* scale, T* x, int64_t rows) {
  const Widths<T> w(layer);
  for (int64_t r = 0; r < rows; ++r) {
    T* row = x + r * w.d_row;
    for (int64_t c = 0; c < w.d_pad; c += kLanes<T>)
      store(row + c, exp_shifted<T>(load(row + c), Vec<T>{} - load(scale + c)));
    for (int64_t c = w.d; c < w.d_pad; ++c) row[c] = 0;
  }
}

template <class T>
static void raw_rows(const Layer& layer, View view, int64_t begin, int64_t rows, T* block) {
  const Widths<T> w(layer);
  const Rows<T> src = rows_of<T>(layer.dtype, view, begin, rows, w.d, false, block, w.d_row);
  if (src.data != block) apply_map<T>(Map::identity, src.data, src.row, block, w.d_row, rows, w.d);
}

template <class T>
static void map_block(const Layer& layer, View view, int64_t begin, int64_t rows, T* block) {
  const Widths<T> w(layer);
  const Rows<T> src = rows_of<T>(layer.dtype, view, begin, rows, w.d, false, block, w.d_row);
  apply_map<T>(layer.map, src.data, src.row, block, w.d_row, rows, w.d);
}

// phi(q) of a block, and row_scale: the row's value is block * 2^row_scale[r] (exponential maps; otherwise 0).
template <class T>
static void map_queries(const Layer& layer, const Prepared<T>& state, View q, int64_t begin, int64_t rows, T* block,
                        T* row_scale) {
  if (layer.map != Map::exp) {
    map_block(layer, q, begin, rows, block);
    return;
  }
  const Widths<T> w(layer);
  raw_rows(layer, q, begin, rows, block);
  for (int64_t r = 0; r < rows; ++r) {
    T* row = block + r * w.d_row;
    Vec<T> best = splat(T(2.0 * kEmpty));
    for (int64_t c = 0; c < w.d_pad; c += kLanes<T>) {
      const Vec<T> n = exponent_of<T>(load(row + c)) + load(state.scale + c);
      best = (n > best) ? n : best;
    }
    row_scale[r] = max_lanes<T>(best);
    for (int64_t c = 0; c < w.d_pad; c += kLanes<T>)
      store(row + c, exp_shifted<T>(load(row + c), load(state.scale + c) - row_scale[r]));
  }
}

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
