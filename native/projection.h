// The steps before the elementwise map, of a block of rows: a linear one, z = +-(x W + b) - square |x|^2 - shift, and
// what makes y of z.
#pragma once

#include "blocks.h"
#include "finishes.h"
#include "prepared.h"
#include "products.h"

namespace linattn {
namespace LINATTN_ISA_NS {

template <class T>
struct Weights {
  const T *weight, *bias;  // (inputs, row) and (row), zeros behind the last column; both or none
  const T* angles;         // (angles, 2)
};

template <class T>
static inline Weights<T> weights_of(const Projection& p) {
  if constexpr (sizeof(T) == 4)
    return {p.weight_float, p.bias_float, p.angles_float};
  else
    return {p.weight_double, p.bias_double, p.angles_double};
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

template <class T>
static inline Vec<T> vsize(Vec<T> x) {
  return vmax<T>(-x, x);
}

// x / |x| of each row; a row of zeros stays one. The greatest number is divided out first, so that no square leaves the
// range. to: (rows, ld), which x may be.
template <class T>
static void unit_rows(Rows<T> x, int64_t rows, int64_t count, T* to, int64_t ld) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* from = x.data + r * x.row;
    T* row = to + r * ld;
    const int64_t whole = count / kLanes<T> * kLanes<T>;
    Vec<T> most = vmax<T>(Vec<T>{}, vsize<T>(load_part(from + whole, count - whole, T(0))));
    for (int64_t c = 0; c < whole; c += kLanes<T>) most = vmax<T>(most, vsize<T>(load(from + c)));
    T greatest = max_lanes<T>(most);
    if (greatest == 0) greatest = 1;
    for (int64_t c = 0; c < count; ++c) row[c] = from[c] / greatest;
    T length;
    if constexpr (sizeof(T) == 4)
      length = __builtin_sqrtf(square_of(row, count));
    else
      length = __builtin_sqrt(square_of(row, count));
    if (length == 0) length = 1;
    for (int64_t c = 0; c < count; ++c) row[c] /= length;
  }
}

// x: (rows, inputs) times `columns` columns of W from the first one on -> to: (rows, ld), up to whole vectors of them
template <class T>
static void multiply_rows(const Projection& p, Rows<T> x, int64_t rows, int64_t first, int64_t columns, T* to,
                          int64_t ld) {
  const T* weight = weights_of<T>(p).weight + first;
  for_strips<T, kTileVectors>(round_up<T>(columns), [&](auto vectors, int64_t c) {
    constexpr int NV = decltype(vectors)::value;
    for (int64_t r = 0; r < rows; r += kTileRows<NV>)
      with_rows<kTileRows<NV>>(rows - r, [&](auto tile_rows) {
        product_tile<T, decltype(tile_rows)::value, NV>(p.inputs, x.data + r * x.row, x.row, weight + c, p.row,
                                                        static_cast<const T*>(nullptr), to + r * ld + c, ld);
      });
  });
}

template <class T>
static inline void add_bias(const T* bias, int64_t columns, T* row) {
  for (int64_t c = 0; c < columns; c += kLanes<T>) store(row + c, load(row + c) + load(bias + c));
}

// z: (columns) -> +-z - down, in place, both signs one after the other where they are wanted.
template <class T>
static void mirror_and_lower(const Projection& p, T down, T* row) {
  const int64_t half = p.columns, whole = half / kLanes<T> * kLanes<T>;
  // The second half first, since the first is read for it; vectors may run over its end.
  if (p.mirrored)
    for (int64_t c = 0; c < half; c += kLanes<T>) store(row + half + c, -load(row + c) - down);
  for (int64_t c = 0; c < whole; c += kLanes<T>) store(row + c, load(row + c) - down);
  for (int64_t c = whole; c < half; ++c) row[c] -= down;
}

// The last step of one row, but for products of spectra. at: which row of q or k it is.
template <class T>
static void finish_row(const Projection& p, int64_t at, T* row, T* factors) {
  const int64_t count = z_columns(p);
  const T amount = static_cast<T>(p.amount);
  switch (p.finish) {
    case Finish::none:
    case Finish::spectra:
    case Finish::squares:
      return;
    case Finish::lifted:
      return lift(row, count, amount);
    case Finish::softmax:
      return log_softmax(row, count);
    case Finish::halves:
      log_softmax(row, count / 2);
      return log_softmax(row + count / 2, count / 2);
    case Finish::waves:
      return make_waves(row, count, amount);
    case Finish::neighbours:
      return multiply_neighbours(row, count, p.times, factors);
    case Finish::turned: {
      const T* angle = weights_of<T>(p).angles + 2 * at;
      return turn(row, count, angle[0], angle[1]);
    }
  }
}

// Rows whose features are products of spectra: the first one is made in the block, the others in `factors`: (rows,
// w.factor_row), and multiplied onto it. finish_room: for the factors of one row.
template <class T>
static void project_spectra(const Layer& layer, const Projection& p, Rows<T> x, int64_t rows, T* block, T* factors,
                            T* finish_room) {
  const Widths<T> w(layer);
  const T* bias = weights_of<T>(p).bias;
  const int64_t m = spectrum_columns(p);
  for (int64_t i = 0; i < p.times; ++i) {
    T* to = i == 0 ? block : factors;
    const int64_t to_row = i == 0 ? w.d_row : w.factor_row;
    multiply_rows(p, x, rows, i * m, m, to, to_row);
    for (int64_t r = 0; r < rows; ++r) {
      add_bias(bias + i * m, m, to + r * to_row);
      if (i > 0) multiply_spectra(block + r * w.d_row, factors + r * w.factor_row, m);
    }
  }
  for (int64_t r = 0; r < rows && p.finish == Finish::squares; ++r) multiply_pairs(block + r * w.d_row, m, finish_room);
}

// Rows of all other projections. at: which row of q or k the first one is; factors: room for those of one row.
template <class T>
static void project_each(const Layer& layer, const Projection& p, Rows<T> x, int64_t at, int64_t rows, T* block,
                         T* factors) {
  const Widths<T> w(layer);
  const T* bias = weights_of<T>(p).bias;
  if (bias) multiply_rows(p, x, rows, 0, p.columns, block, w.d_row);
  const T square = static_cast<T>(p.square), shift = static_cast<T>(p.shift);
  for (int64_t r = 0; r < rows; ++r) {
    const T* from = x.data + r * x.row;
    T* row = block + r * w.d_row;
    if (bias)
      add_bias(bias, p.columns, row);
    else
      __builtin_memcpy(row, from, static_cast<size_t>(p.columns) * sizeof(T));
    T down = shift;
    if (square != 0) down += square * square_of(from, p.inputs);
    mirror_and_lower(p, down, row);
    finish_row(p, at + r, row, factors);
  }
}

// A type that is not deduced, so that nullptr will do where there is no projection.
template <class T>
struct RoomOf {
  using type = T*;
};
template <class T>
using Room = typename RoomOf<T>::type;

// The rows that the elementwise map takes: those of the view, or what the projection makes of them in `block`. room:
// w.room(rows) numbers, for rows that can't be projected where they lie and for what their features are made of.
template <class T>
static Rows<T> rows_before_map(const Layer& layer, const Projection* projection, View view, int64_t begin, int64_t rows,
                               T* block, T* room) {
  const Widths<T> w(layer);
  if (!projection) return rows_of<T>(layer.dtype, view, begin, rows, w.d, false, block, w.d_row);
  Rows<T> x = rows_of<T>(layer.dtype, view, begin, rows, w.x, false, room, w.x_row);
  if (projection->unit) {
    unit_rows(x, rows, w.x, room, w.x_row);
    x = {room, w.x_row};
  }
  T* factors = room + rows * w.x_row;
  T* finish_room = factors + rows * w.factor_row;
  if (has_spectra(projection->finish))
    project_spectra(layer, *projection, x, rows, block, factors, finish_room);
  else
    project_each(layer, *projection, x, view.first + begin, rows, block, finish_room);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = w.d; c < w.d_pad; ++c) block[r * w.d_row + c] = 0;
  return {block, w.d_row};
}

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
