// query: rows of output from a prepared state, and what every form needs to turn sums into output.
#pragma once

#include "rows.h"

namespace linattn {
namespace LINATTN_ISA_NS {

// Rows of output on their way: they are written where they belong if they are dense in the working precision
// and end on a whole vector, otherwise into a buffer first.
template <class T>
struct OutRows {
  T* data;
  int64_t row;
  bool direct;
  T* spare;  // one row more in the buffer

  static int64_t elements(const Widths<T>& w, int64_t rows) { return (rows + 1) * w.v_row; }
  OutRows(const Layer& layer, OutView out, int64_t begin, T* buffer, int64_t rows) {
    const Widths<T> w(layer);
    spare = buffer + rows * w.v_row;
    char* at = out.data + begin * out.row;
    direct = !layer.repair && is_working<T>(layer.dtype) && out.col == static_cast<int64_t>(sizeof(T)) &&
             out.row % static_cast<int64_t>(sizeof(T)) == 0 && reinterpret_cast<uintptr_t>(at) % sizeof(T) == 0 &&
             w.v == w.v_pad;
    data = direct ? reinterpret_cast<T*>(at) : buffer;
    row = direct ? out.row / static_cast<int64_t>(sizeof(T)) : w.v_row;
  }
};

// The denominator's side of a block of rows; room for whole vectors of rows.
template <class T>
struct RowScales {
  T* dots;    // (rows, lanes): denominators, to be summed over the lanes
  T* total;   // denominator + eps; 1 where nothing is divided
  T* factor;  // 1 / total
  T* power;   // the row's sums are kept divided by 2^power (see has_row_powers)

  static int64_t elements(int64_t rows) { return round_up<T>(rows) * (kLanes<T> + 3); }
  RowScales(Arena& arena, int64_t rows)
      : dots(arena.take<T>(round_up<T>(rows) * kLanes<T>)),
        total(arena.take<T>(round_up<T>(rows))),
        factor(arena.take<T>(round_up<T>(rows))),
        power(arena.take<T>(round_up<T>(rows))) {}

  // Sums the lanes of as many rows at once as a vector has.
  void close(const Layer& layer, int64_t rows) {
    for (int64_t r = 0; r < rows; r += kLanes<T>) {
      Vec<T> square[kLanes<T>];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes<T>; ++i) square[i] = load(dots + (r + i) * kLanes<T>);
      transpose_square<T>(square);
#pragma GCC unroll 4
      for (int64_t half = kLanes<T> / 2; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int64_t i = 0; i < half; ++i) square[i] += square[i + half];
      store(total + r, square[0]);
    }
    divide(layer, rows);
  }

  // total[r] holds the bare denominator.
  void divide(const Layer& layer, int64_t rows) {
    if (!layer.normalize) {
      for (int64_t r = 0; r < rows; ++r) total[r] = 1;
    } else if (has_row_powers(layer) && layer.eps > 0) {
      // eps is in the true units of the denominator
      for (int64_t r = 0; r < rows; ++r)
        total[r] += static_cast<T>(layer.eps * exact_power(static_cast<int64_t>(-power[r])));
    } else {
      for (int64_t r = 0; r < rows; ++r) total[r] += static_cast<T>(layer.eps);
    }
    for (int64_t r = 0; r < rows; ++r) factor[r] = 1 / total[r];
  }
};

// Whether the row of output (in its own dtype) holds something not finite.
template <class T>
static bool needs_repair(const Layer& layer, const char* row, int64_t col, T* buffer) {
  load_row<T>(layer.dtype, row, col, buffer, layer.d_v);
  return !all_finite(buffer, 0, 1, layer.d_v);
}

// A denominator below this, without an eps that outweighs it, may be made of terms that have partly vanished.
constexpr double kLeastTotal = 1.0 / (1ull << 63);

// Whether phi(q) is honestly 0 in a row whose denominator is 0, or may have vanished.
template <class T>
static bool zero_is_exact(const Layer& layer, const T* phi_q, int64_t d) {
  if (layer.map != Map::relu && layer.map != Map::identity) return false;
  if (may_vanish(layer)) return false;
  for (int64_t c = 0; c < d; ++c)
    if (phi_q[c] != 0) return false;
  return true;
}

// Whether rows that are finite become infinite where halves round them.
template <class T>
static bool overflows_half(const Layer& layer, const OutRows<T>& ready, int64_t rows) {
  if (layer.dtype != DType::float16 && layer.dtype != DType::bfloat16) return false;
  const T limit = layer.dtype == DType::float16 ? T(65520) : T(0x1.ffp127);
  bool over = false;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < layer.d_v; ++c) {  // no way out, so that the compiler makes vectors of it
      const T x = ready.data[r * ready.row + c];
      over |= (x >= limit) | (x <= -limit);
    }
  return over;
}

// The rows that a plain product can't give: 0 where denominator + eps is 0 (0 * NaN and 0 * inf would be NaN), and the
// true units of an unnormalised row. Then the way to the output's dtype and strides. Returns whether rows have left the
// range of T; they hold NaN or infinity. A row counts that becomes infinite on its way out, too: else its other numbers
// would be made again, and rounded otherwise, where some later row is in trouble, and only there.
template <class T>
static bool finish_rows(const Layer& layer, OutView out, int64_t begin, int64_t rows, const OutRows<T>& ready,
                        const RowScales<T>& scales, const T* phi_q) {
  const Widths<T> w(layer);
  const T least = static_cast<T>(kLeastTotal), most = Format<T>::kMost / 4;
  const T not_a_number = static_cast<T>(__builtin_nanf(""));
  for (int64_t r = 0; r < rows && layer.normalize; ++r) {
    const T total = scales.total[r];
    const bool small = total < least && total > -least, large = !(total < most && total > -most);
    if (!small && !large) continue;
    T* row = ready.data + r * ready.row;
    // A row of an exponential map that has seen no key: 2^-power is infinite, and with it eps in the row's units.
    // (So has a row of NaN no exponent, and its total is NaN.)
    const bool unseen = layer.map == Map::exp && scales.power[r] < T(0.75 * kEmpty) && total == total;
    const bool lost = !layer.repair && !unseen &&
                      (large || (layer.map != Map::exp && !zero_is_exact(layer, phi_q + r * w.d_row, w.d)));
    if (lost || unseen || total == 0)
      for (int64_t c = 0; c < w.v; ++c) row[c] = lost ? not_a_number : T(0);
  }
  if (has_row_powers(layer) && !layer.normalize) {
    for (int64_t r = 0; r < rows; ++r) {
      T* row = ready.data + r * ready.row;
      const int64_t power = static_cast<int64_t>(scales.power[r]), half = power / 2;
      const double first = exact_power(half), second = exact_power(power - half);
      for (int64_t c = 0; c < w.v; ++c) row[c] = static_cast<T>(static_cast<double>(row[c]) * first * second);
    }
  }
  const bool troubled =
      !layer.repair && (!all_finite(ready.data, ready.row, rows, w.v) || overflows_half(layer, ready, rows));
  for (int64_t r = 0; r < rows && !ready.direct; ++r) {
    char* to = out.data + (begin + r) * out.row;
    if (layer.repair && !needs_repair(layer, to, out.col, ready.spare)) continue;
    store_row<T>(layer.dtype, to, out.col, ready.data + r * ready.row, w.v);
  }
  return troubled;
}

template <class T>
static bool query_of(const Layer& layer, const void* prepared, View q, OutView out, int64_t begin, int64_t end,
                     void* scratch) {
  const Widths<T> w(layer);
  const Prepared<T> state(layer, const_cast<void*>(prepared));
  const int64_t most = rows_per_block<T>(kQueryRows, w.d_pad);
  Arena arena(scratch);
  T* phi = arena.take<T>(most * w.d_row);
  T* room = arena.take<T>(w.room(most));
  T* buffer = arena.take<T>(OutRows<T>::elements(w, most));
  RowScales<T> scales(arena, most);
  bool troubled = false;
  for (int64_t r0 = begin; r0 < end; r0 += most) {
    const int64_t rows = min_of(most, end - r0);
    map_queries(layer, state, q, r0, rows, phi, scales.power, scales.dots, room);
    scales.close(layer, rows);
    const OutRows<T> ready(layer, out, r0, buffer, most);
    const int64_t next = r0 + rows, last = min_of(next + most, end);
    Ahead q_ahead(layer.dtype, q.data, q.row, q.col, w.x, next, last);
    Ahead out_ahead(layer.dtype, out.data, out.row, out.col, w.v, next, last);
    for_strips<T, kTileVectors>(w.v_pad, [&](auto vectors, int64_t c) {
      constexpr int NV = decltype(vectors)::value;
      for (int64_t r = 0; r < rows; r += kTileRows<NV>)
        with_rows<kTileRows<NV>>(rows - r, [&](auto tile_rows) {
          q_ahead.touch(2);
          out_ahead.touch(2);
          product_tile<T, decltype(tile_rows)::value, NV>(w.d, phi + r * w.d_row, w.d_row, state.kv + c, w.v_row,
                                                          scales.factor + r, ready.data + r * ready.row + c, ready.row);
        });
    });
    troubled |= finish_rows(layer, out, r0, rows, ready, scales, phi);
  }
  return troubled;
}

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
