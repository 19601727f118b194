// A linear step before the elementwise map, of a block of rows: y = +-(x W + b) - square |x|^2 - shift.
#pragma once

#include "blocks.h"
#include "prepared.h"
#include "products.h"

namespace linattn {
namespace LINATTN_ISA_NS {

template <class T>
struct Weights {
  const T *weight, *bias;  // (inputs, row) and (row), zeros behind the last column
};

template <class T>
static inline Weights<T> weights_of(const Projection& p) {
  if constexpr (sizeof(T) == 4)
    return {p.weight_float, p.bias_float};
  else
    return {p.weight_double, p.bias_double};
}

// |x|^2
template <class T>
static inline T square_of(const T* x, int64_t count) {
  Vec<T> sum = {};
  int64_t c = 0;
  for (; c + kLanes<T> <= count; c += kLanes<T>) sum += load(x + c) * load(x + c);
  if (c < count) {
    const Vec<T> rest = load_part(x + c, count - c, T(0));
    sum += rest * rest;
  }
  return sum_lanes<T>(sum);
}

// What follows the product in one row: z: (columns), which becomes y: (D), zeros behind it.
template <class T>
static void close_row(const Projection& p, const T* bias, T down, const Widths<T>& w, T* row) {
  const int64_t half = p.columns, whole = half / kLanes<T> * kLanes<T>;
  for (int64_t c = 0; c < half; c += kLanes<T>) store(row + c, load(row + c) + load(bias + c));
  // The second half first, since the first is read for it; vectors may run over its end, which is made 0 below.
  if (p.mirrored)
    for (int64_t c = 0; c < half; c += kLanes<T>) store(row + half + c, -load(row + c) - down);
  for (int64_t c = 0; c < whole; c += kLanes<T>) store(row + c, load(row + c) - down);
  for (int64_t c = whole; c < half; ++c) row[c] -= down;
  for (int64_t c = w.d; c < w.d_pad; ++c) row[c] = 0;
}

// x: (rows, inputs) -> block: (rows, padded D)
template <class T>
static void project_rows(const Layer& layer, Rows<T> x, int64_t rows, T* block) {
  const Widths<T> w(layer);
  const Projection& p = *layer.projection;
  const Weights<T> own = weights_of<T>(p);
  for_strips<T, kTileVectors>(round_up<T>(p.columns), [&](auto vectors, int64_t c) {
    constexpr int NV = decltype(vectors)::value;
    for (int64_t r = 0; r < rows; r += kTileRows<NV>)
      with_rows<kTileRows<NV>>(rows - r, [&](auto tile_rows) {
        product_tile<T, decltype(tile_rows)::value, NV>(p.inputs, x.data + r * x.row, x.row, own.weight + c, p.row,
                                                        static_cast<const T*>(nullptr), block + r * w.d_row + c,
                                                        w.d_row);
      });
  });
  const T square = static_cast<T>(p.square), shift = static_cast<T>(p.shift);
  for (int64_t r = 0; r < rows; ++r) {
    T down = shift;
    if (square != 0) down += square * square_of(x.data + r * x.row, p.inputs);
    close_row(p, own.bias, down, w, block + r * w.d_row);
  }
}

// The rows that the elementwise map takes: those of the view, or their projection, which is made in `block`. input:
// (rows, w.x_row), room for rows that can't be projected where they lie.
template <class T>
static Rows<T> rows_before_map(const Layer& layer, View view, int64_t begin, int64_t rows, T* block, T* input) {
  const Widths<T> w(layer);
  if (!layer.projection) return rows_of<T>(layer.dtype, view, begin, rows, w.d, false, block, w.d_row);
  project_rows(layer, rows_of<T>(layer.dtype, view, begin, rows, w.x, false, input, w.x_row), rows, block);
  return {block, w.d_row};
}

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
