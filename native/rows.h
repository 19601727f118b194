// phi of blocks of keys and queries, masks, and the scales of the exponential map.
#pragma once

#include "blocks.h"
#include "maps.h"
#include "prepared.h"
#include "projection.h"

namespace linattn {
namespace LINATTN_ISA_NS {

// ---- phi of a block of keys ------------------------------------------------------------------------------

// Whether rows of phi(q) are kept divided by a power of two: eps and unnormalised sums are then in other units.
static inline bool has_row_powers(const Layer& layer) { return layer.map == Map::exp || layer.repair; }

// Maps whose value is never 0, however small.
static inline bool is_positive(Map map) { return map == Map::elu1 || map == Map::softplus || map == Map::sigmoid; }

// Maps whose value may be 0, or too small for T, where that of a wider type is not: squares and other products.
static inline bool may_vanish(const Layer& layer) {
  return layer.map == Map::squared_relu || (layer.projection && makes_products(layer.projection->finish));
}

// A float sum of positive values below this may have lost terms that are no normal floats.
constexpr double kLeastSum = 1.0 / (1ull << 63) / (1ull << 37);

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

// Whether `top` (exponent of a key, kEmpty for none) passes the scale of feature d by more than the headroom. Infinite
// keys pass nothing: exp_shifted gives NaN for them.
template <class T>
static inline bool passes_scale(int32_t log_scale, T top) {
  if (!(top > T(kEmpty)) || top > 2 * kExpLimit<T>) return false;
  return log_scale == kEmpty || top > T(log_scale + kHeadroom);
}

template <class T>
static bool passes_scales(const Layer& layer, const int32_t* log_scale, const T* top) {
  bool any = false;
  for (int64_t d = 0; d < layer.features; ++d) any |= passes_scale(log_scale[d], top[d]);
  return any;
}

template <class T>
static void raise_scales(const Layer& layer, StateRef state, const T* top) {
  for (int64_t d = 0; d < layer.features; ++d)
    if (passes_scale(state.log_scale[d], top[d])) raise_scale(layer, state, d, static_cast<int32_t>(top[d]));
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
static void raw_rows(const Layer& layer, View view, int64_t begin, int64_t rows, T* block, const Projection* projection,
                     Room<T> room) {
  const Widths<T> w(layer);
  const Rows<T> src = rows_before_map(layer, projection, view, begin, rows, block, room);
  if (src.data != block)
    apply_map<T, false>(Map::identity, src.data, src.row, block, w.d_row, rows, w.d, nullptr, nullptr);
}

template <class T>
static void map_block(const Layer& layer, View view, int64_t begin, int64_t rows, T* block,
                      const Projection* projection, Room<T> room) {
  const Widths<T> w(layer);
  const Rows<T> src = rows_before_map(layer, projection, view, begin, rows, block, room);
  apply_map<T, false>(layer.map, src.data, src.row, block, w.d_row, rows, w.d, nullptr, nullptr);
}

// Divides each row of a block by the power of two that brings its greatest element to 1..2, and its products with k_sum
// anew.
template <class T>
static void scale_rows(const Widths<T>& w, const Prepared<T>& state, int64_t rows, T* block, T* power, T* dots) {
  for (int64_t r = 0; r < rows; ++r) {
    T* row = block + r * w.d_row;
    T greatest = 0;
    for (int64_t d = 0; d < w.d; ++d) {
      const T size = row[d] < 0 ? -row[d] : row[d];
      if (size > greatest) greatest = size;
    }
    int exponent = 0;
    if (greatest > 0 && greatest <= Format<T>::kMost) {
      Int<T> bits;
      __builtin_memcpy(&bits, &greatest, sizeof bits);
      exponent = static_cast<int>(bits >> Format<T>::kMantissaBits) - Format<T>::kBias;
    }
    power[r] = T(exponent);
    const T half = static_cast<T>(exact_power(-exponent / 2)),
            rest = static_cast<T>(exact_power(-exponent - -exponent / 2));
    Vec<T> dot = {};
    for (int64_t c = 0; c < w.d_pad; c += kLanes<T>) {
      const Vec<T> scaled = load(row + c) * half * rest;
      store(row + c, scaled);
      dot += scaled * load(state.k_sum + c);
    }
    store(dots + r * kLanes<T>, dot);
  }
}

// phi(q) of a block; power: a row's values are block * 2^power[r] (where rows are scaled, see has_row_powers); dots:
// (rows, lanes), the products with the state's k_sum, to be summed over the lanes.
template <class T>
static void map_queries(const Layer& layer, const Prepared<T>& state, View q, int64_t begin, int64_t rows, T* block,
                        T* power, T* dots, Room<T> room) {
  const Widths<T> w(layer);
  if (layer.map != Map::exp) {
    const Rows<T> src = rows_before_map(layer, layer.query_projection, q, begin, rows, block, room);
    apply_map<T, true>(layer.map, src.data, src.row, block, w.d_row, rows, w.d, state.k_sum, dots);
    if (layer.repair) scale_rows(w, state, rows, block, power, dots);
    return;
  }
  raw_rows(layer, q, begin, rows, block, layer.query_projection, room);
  for (int64_t r = 0; r < rows; ++r) {
    T* row = block + r * w.d_row;
    Vec<T> best = splat(T(2.0 * kEmpty)), dot = {};
    for (int64_t c = 0; c < w.d_pad; c += kLanes<T>) {
      const Vec<T> n = exponent_of<T>(load(row + c)) + load(state.scale + c);
      best = (n > best) ? n : best;
    }
    power[r] = max_lanes<T>(best);
    for (int64_t c = 0; c < w.d_pad; c += kLanes<T>) {
      const Vec<T> mapped = exp_shifted<T>(load(row + c), load(state.scale + c) - power[r]);
      store(row + c, mapped);
      dot += mapped * load(state.k_sum + c);
    }
    store(dots + r * kLanes<T>, dot);
  }
}

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
