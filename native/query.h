// query: rows of output from a prepared state, and what every form needs to turn sums into output.
#pragma once

#include "rows.h"

namespace linattn {
namespace LINATTN_ISA_NS {

template <class T>
static inline T dot(const T* a, const T* b, int64_t padded) {
  Vec<T> sum = {};
  for (int64_t c = 0; c < padded; c += kLanes<T>) sum += load(a + c) * load(b + c);
  return sum_lanes<T>(sum);
}

// Rows of output on their way: they are written where they belong if they are dense in the working precision
// and end on a whole vector, otherwise into a buffer first.
template <class T>
struct OutRows {
  T* data;
  int64_t row;
  bool direct;

  OutRows(const Layer& layer, OutView out, int64_t begin, T* buffer) {
    const Widths<T> w(layer);
    char* at = out.data + begin * out.row;
    direct = is_working<T>(layer.dtype) && out.col == static_cast<int64_t>(sizeof(T)) &&
             out.row % static_cast<int64_t>(sizeof(T)) == 0 && reinterpret_cast<uintptr_t>(at) % sizeof(T) == 0 &&
             w.v == w.v_pad;
    data = direct ? reinterpret_cast<T*>(at) : buffer;
    row = direct ? out.row / static_cast<int64_t>(sizeof(T)) : w.v_row;
  }
};

// The denominator's side of a block of rows.
template <class T>
struct RowScales {
  T* total;   // denominator + eps; 1 where nothing is divided
  T* factor;  // 1 / total
  T* power;   // the row's sums are kept divided by 2^power (exponential maps)

  RowScales(Arena& arena, int64_t rows)
      : total(arena.take<T>(rows)), factor(arena.take<T>(rows)), power(arena.take<T>(rows)) {}

  // total[r] holds the bare denominator.
  void close(const Layer& layer, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) {
      if (!layer.normalize) {
        total[r] = 1;
      } else if (layer.map == Map::exp && layer.eps > 0) {
        // eps is in the true units of the denominator
        total[r] += static_cast<T>(layer.eps * exact_power(static_cast<int64_t>(-power[r])));
      } else {
        total[r] += static_cast<T>(layer.eps);
      }
      factor[r] = 1 / total[r];
    }
  }
};

// The rows that a plain product can't give: 0 where denominator + eps is 0 (0 * NaN and 0 * inf would be NaN), and
// the true units of an exponential map's numerator. Then the way to the output's dtype and strides.
template <class T>
static void finish_rows(const Layer& layer, OutView out, int64_t begin, int64_t rows, const OutRows<T>& ready,
                        const RowScales<T>& scales) {
  const Widths<T> w(layer);
  for (int64_t r = 0; r < rows; ++r) {
    T* row = ready.data + r * ready.row;
    if (scales.total[r] == 0)
      for (int64_t c = 0; c < w.v; ++c) row[c] = 0;
    if (layer.map == Map::exp && !layer.normalize) {
      const int64_t power = static_cast<int64_t>(scales.power[r]), half = power / 2;
      const double first = exact_power(half), second = exact_power(power - half);
      for (int64_t c = 0; c < w.v; ++c) row[c] = static_cast<T>(static_cast<double>(row[c]) * first * second);
    }
    if (!ready.direct) store_row<T>(layer.dtype, out.data + (begin + r) * out.row, out.col, row, w.v);
  }
}

template <class T>
static void query_of(const Layer& layer, const void* prepared, View q, OutView out, int64_t begin, int64_t end,
                     void* scratch) {
  const Widths<T> w(layer);
  const Prepared<T> state(layer, const_cast<void*>(prepared));
  const int64_t most = rows_per_block<T>(kQueryRows, w.d_pad);
  Arena arena(scratch);
  T* phi = arena.take<T>(most * w.d_row);
  T* buffer = arena.take<T>(most * w.v_row);
  RowScales<T> scales(arena, most);
  for (int64_t r0 = begin; r0 < end; r0 += most) {
    const int64_t rows = min_of(most, end - r0);
    map_queries(layer, state, q, r0, rows, phi, scales.power);
    for (int64_t r = 0; r < rows; ++r) scales.total[r] = dot(phi + r * w.d_row, state.k_sum, w.d_pad);
    scales.close(layer, rows);
    const OutRows<T> ready(layer, out, r0, buffer);
    for_strips<T, kTileVectors>(w.v_pad, [&](auto vectors, int64_t c) {
      for (int64_t r = 0; r < rows; r += kTileRows)
        with_rows<kTileRows>(rows - r, [&](auto tile_rows) {
          product_tile<T, decltype(tile_rows)::value, decltype(vectors)::value>(
              w.d, phi + r * w.d_row, w.d_row, state.kv + c, w.v_row, scales.factor + r,
              ready.data + r * ready.row + c, ready.row);
        });
    });
    finish_rows(layer, out, r0, rows, ready, scales);
  }
}

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
