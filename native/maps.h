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
    return positive + log1p_unit<T>(exp_nonpositive<T>(x - 2 * positive));
  } else if constexpr (map == Map::sigmoid) {
    return 1 / (1 + exp_of<T>(-x));
  } else {
    return x;
  }
}

// phi: (rows, cols) -> dst: (rows, padded cols), row stride ld; the padding is 0, whatever phi(0) is.
template <Map map, class T>
static void map_rows(const T* src, int64_t src_row, T* dst, int64_t ld, int64_t rows, int64_t cols) {
  constexpr int64_t lanes = kLanes<T>;
  const int64_t whole = cols / lanes * lanes, rest = cols - whole;
  for (int64_t r = 0; r < rows; ++r) {
    const T* x = src + r * src_row;
    T* y = dst + r * ld;
    for (int64_t c = 0; c < whole; c += lanes) store(y + c, phi<map, T>(load(x + c)));
    if (rest) {
      const Vec<T> tail = phi<map, T>(load_part(x + whole, rest, T(0)));
      store(y + whole, Vec<T>{});
      for (int64_t c = 0; c < rest; ++c) y[whole + c] = tail[c];
    }
  }
}

template <class T>
static void apply_map(Map map, const T* src, int64_t src_row, T* dst, int64_t ld, int64_t rows, int64_t cols) {
  switch (map) {
    case Map::elu1:
      return map_rows<Map::elu1>(src, src_row, dst, ld, rows, cols);
    case Map::relu:
      return map_rows<Map::relu>(src, src_row, dst, ld, rows, cols);
    case Map::squared_relu:
      return map_rows<Map::squared_relu>(src, src_row, dst, ld, rows, cols);
    case Map::softplus:
      return map_rows<Map::softplus>(src, src_row, dst, ld, rows, cols);
    case Map::sigmoid:
      return map_rows<Map::sigmoid>(src, src_row, dst, ld, rows, cols);
    case Map::identity:
    case Map::exp:  // the exponential map carries scales and is computed by the functions below
      return map_rows<Map::identity>(src, src_row, dst, ld, rows, cols);
  }
}

// ---- the exponential map -------------------------------------------------------------------------------
//
// exp(k_d) is kept as mantissa * 2^(n - scale_d), n whole, scale_d a whole power of two a feature. A scale is
// raised only when a key passes it by more than kHeadroom, so scaled sums stay within 2^kHeadroom times their
// number and no rescaling happens on ordinary data; rescaling itself multiplies by a power of two: exact.

constexpr int32_t kHeadroom = 32;
constexpr double kExpLimit = 1048576;  // |x| beyond it: exp(x) is 0 below, NaN (no usable precision) above

template <class T>
static inline Vec<T> exponent_of(Vec<T> x) {  // n of exp(x) = m * 2^n, kEmpty where exp(x) counts as 0
  using F = Format<T>;
  const Vec<T> n = (x * F::kLog2e + F::kRound) - F::kRound;
  return (x < T(-kExpLimit)) ? splat(T(kEmpty)) : n;
}

// exp(x) * 2^shift; 0 where that is below the normal numbers, NaN where x is NaN or beyond kExpLimit.
template <class T>
static inline Vec<T> exp_shifted(Vec<T> x, Vec<T> shift) {
  using F = Format<T>;
  const ExpParts<T> parts = exp_parts<T>(x);
  const Vec<T> n = parts.exponent + shift;
  const Vec<T> greatest = splat(T(F::kBias));
  const Vec<T> inside = vmin<T>(greatest, vmax<T>(splat(F::kMinExponent), n));
  const Vec<T> y = parts.mantissa * power_of_two<T>(inside);
  const Vec<T> flushed = (n < F::kMinExponent) ? Vec<T>{} : y;
  const Vec<T> low = (x < T(-kExpLimit)) ? Vec<T>{} : flushed;
  return (x > T(kExpLimit)) ? splat(T(__builtin_nanf(""))) : low;
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
