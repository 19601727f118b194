// The derivatives of the feature maps, over blocks of rows.
#pragma once

#include "maps.h"

namespace linattn {
namespace LINATTN_ISA_NS {

// phi'(x), from x and phi(x). At the kinks: 1 for elu1, whose two sides agree, and 0 for relu. Every map passes NaN on.
template <Map map, class T>
static inline Vec<T> slope(Vec<T> x, Vec<T> phi_x) {
  const Vec<T> zero = {}, one = splat(T(1));
  if constexpr (map == Map::elu1) {
    return vmin<T>(one, phi_x);  // exp(x) below 0, and phi >= 1 from there
  } else if constexpr (map == Map::relu) {
    return (phi_x > zero) ? one : phi_x * zero;
  } else if constexpr (map == Map::squared_relu) {
    return 2 * vmax<T>(zero, x);
  } else if constexpr (map == Map::softplus) {
    return 1 / (1 + exp_of<T>(-x));
  } else if constexpr (map == Map::sigmoid) {
    return phi_x / (1 + exp_of<T>(x));  // phi(x) phi(-x): 1 - phi(x) would cancel
  } else if constexpr (map == Map::exp) {
    return phi_x;
  } else {
    return one;
  }
}

// to: (rows, padded cols) *= phi'(x); phi_x and to have row stride ld, x ends with its last column.
template <Map map, class T>
static void slope_rows(const T* x, int64_t x_row, const T* phi_x, T* to, int64_t ld, int64_t rows, int64_t cols) {
  constexpr int64_t lanes = kLanes<T>;
  const int64_t whole = cols / lanes * lanes, rest = cols - whole;
  for (int64_t r = 0; r < rows; ++r) {
    const T *from = x + r * x_row, *mapped = phi_x + r * ld;
    T* y = to + r * ld;
    for (int64_t c = 0; c < whole; c += lanes)
      store(y + c, load(y + c) * slope<map, T>(load(from + c), load(mapped + c)));
    if (rest)
      store(y + whole, load(y + whole) * slope<map, T>(load_part(from + whole, rest, T(0)), load(mapped + whole)));
  }
}

template <class T>
static void apply_slopes(Map map, const T* x, int64_t x_row, const T* phi_x, T* to, int64_t ld, int64_t rows,
                         int64_t cols) {
  switch (map) {
    case Map::elu1:
      return slope_rows<Map::elu1>(x, x_row, phi_x, to, ld, rows, cols);
    case Map::relu:
      return slope_rows<Map::relu>(x, x_row, phi_x, to, ld, rows, cols);
    case Map::squared_relu:
      return slope_rows<Map::squared_relu>(x, x_row, phi_x, to, ld, rows, cols);
    case Map::exp:
      return slope_rows<Map::exp>(x, x_row, phi_x, to, ld, rows, cols);
    case Map::softplus:
      return slope_rows<Map::softplus>(x, x_row, phi_x, to, ld, rows, cols);
    case Map::sigmoid:
      return slope_rows<Map::sigmoid>(x, x_row, phi_x, to, ld, rows, cols);
    case Map::identity:
      return;
  }
}

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
