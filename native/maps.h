// The elementwise feature maps over a block of rows, applied while the block is in the first-level cache.
#pragma once

#include "elementary.h"
#include "kernels.h"

namespace linattn {
namespace LINATTN_ISA_NS {

// phi of one vector. Every map passes NaN on.
template <Map map, class T>
static inline Vec<T> phi(Vec<T> x) {
  const Vec<T> zero = {};
  if constexpr (map == Map::elu1) {
    // exp(x) below 0 and not elu(x) + 1, which cancels; no branch: one of the two terms is 0 or 1
    return vmax<T>(zero, x) + exp_nonpositive<T>(vmin<T>(zero, x));
  } else if constexpr (map == Map::relu) {
    return vmax<T>(zero, x);
  } else if constexpr (map == Map::squared_relu) {
    const Vec<T> positive = vmax<T>(zero, x);
    return positive * positive;
  } else if constexpr (map == Map::softplus) {
    const Vec<T> positive = vmax<T>(zero, x);
    return positive + log1p_unit<T>(exp_nonpositive<T>(vmin<T>(-x, x)));  // of -|x|
  } else if constexpr (map == Map::sigmoid) {
    return 1 / (1 + exp_of<T>(-x));
  } else {
    return x;
  }
}

// phi: (rows, cols) -> dst: (rows, padded cols), row stride ld; the padding is 0, whatever phi(0) is. With kDot the
// row's product with k_sum: (padded cols) goes to dots: (rows, lanes), still to be summed over the lanes.
template <Map map, bool kDot, class T>
static void map_rows(const T* src, int64_t src_row, T* dst, int64_t ld, int64_t rows, int64_t cols, const T* k_sum,
                     T* dots) {
  constexpr int64_t lanes = kLanes<T>;
  const int64_t whole = cols / lanes * lanes, rest = cols - whole;
  for (int64_t r = 0; r < rows; ++r) {
    const T* x = src + r * src_row;
    T* y = dst + r * ld;
    Vec<T> dot = {};
    for (int64_t c = 0; c < whole; c += lanes) {
      const Vec<T> mapped = phi<map, T>(load(x + c));
      store(y + c, mapped);
      if constexpr (kDot) dot += mapped * load(k_sum + c);
    }
    if (rest) {
      Vec<T> tail = phi<map, T>(load_part(x + whole, rest, T(0)));
      for (int64_t c = rest; c < lanes; ++c) tail[c] = 0;
      store(y + whole, tail);
      if constexpr (kDot) dot += tail * load(k_sum + whole);
    }
    if constexpr (kDot) store(dots + r * lanes, dot);
  }
}

template <class T, bool kDot>
static void apply_map(Map map, const T* src, int64_t src_row, T* dst, int64_t ld, int64_t rows, int64_t cols,
                      const T* k_sum, T* dots) {
  switch (map) {
    case Map::elu1:
      return map_rows<Map::elu1, kDot>(src, src_row, dst, ld, rows, cols, k_sum, dots);
    case Map::relu:
      return map_rows<Map::relu, kDot>(src, src_row, dst, ld, rows, cols, k_sum, dots);
    case Map::squared_relu:
      return map_rows<Map::squared_relu, kDot>(src, src_row, dst, ld, rows, cols, k_sum, dots);
    case Map::softplus:
      return map_rows<Map::softplus, kDot>(src, src_row, dst, ld, rows, cols, k_sum, dots);
    case Map::sigmoid:
      return map_rows<Map::sigmoid, kDot>(src, src_row, dst, ld, rows, cols, k_sum, dots);
    case Map::identity:
    case Map::exp:  // the exponential map carries scales and is computed by the functions below
      return map_rows<Map::identity, kDot>(src, src_row, dst, ld, rows, cols, k_sum, dots);
  }
}

// ---- the exponential map -------------------------------------------------------------------------------
//
// exp(k_d) is kept as mantissa * 2^(n - scale_d), n whole, scale_d a whole power of two a feature. A scale is
// raised only when a key passes it by more than kHeadroom, so scaled sums stay within 2^kHeadroom times their
// number and no rescaling happens on ordinary data; rescaling itself multiplies by a power of two: exact.

constexpr int32_t kHeadroom = 32;

// Beyond this |x| the exponent is no whole number of the working precision. float gives NaN there, which sends the row
// to the repair pass in double; double gives 0 below and NaN above.
template <class T>
constexpr T kExpLimit = sizeof(T) == 8 ? T(1 << 28) : T(1 << 21);

template <class T>
static inline Vec<T> exponent_of(Vec<T> x) {  // n of exp(x) = m * 2^n, kEmpty where exp(x) counts as 0
  using F = Format<T>;
  const Vec<T> n = (x * F::kLog2e + F::kRound) - F::kRound;
  return (x < -kExpLimit<T>) ? splat(T(kEmpty)) : n;
}

// exp(x) * 2^shift; 0 where that is below the normal numbers or x is -inf, NaN where x is NaN or beyond kExpLimit.
template <class T>
static inline Vec<T> exp_shifted(Vec<T> x, Vec<T> shift) {
  using F = Format<T>;
  const ExpParts<T> parts = exp_parts<T>(x);
  const Vec<T> n = parts.exponent + shift;
  const Vec<T> greatest = splat(T(F::kBias));
  const Vec<T> inside = vmin<T>(greatest, vmax<T>(splat(F::kMinExponent), n));
  const Vec<T> y = parts.mantissa * power_of_two<T>(inside);
  const Vec<T> flushed = (n < F::kMinExponent) ? Vec<T>{} : y;
  const T least = sizeof(T) == 8 ? -kExpLimit<T> : -Format<T>::kMost;
  const Vec<T> low = (x < -kExpLimit<T>) ? ((x < least) ? Vec<T>{} : splat(T(__builtin_nanf("")))) : flushed;
  return (x > kExpLimit<T>) ? splat(T(__builtin_nanf(""))) : low;
}

// The greatest exponent of each feature over the rows that the mask leaves, as whole numbers in T.
template <class T>
static void column_exponents(const T* x, int64_t ld, int64_t rows, int64_t padded, const uint8_t* kept, T* top) {
  for (int64_t c = 0; c < padded; c += kLanes<T>) {
    Vec<T> best = splat(T(kEmpty));
    for (int64_t r = 0; r < rows; ++r) {
      if (kept && !kept[r]) continue;
      const Vec<T> n = exponent_of<T>(load(x + r * ld + c));
      best = (n > best) ? n : best;  // NaN raises nothing
    }
    store(top + c, best);
  }
}

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
