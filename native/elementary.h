// exp, log, sin and cos over a vector: within about one unit in the last place, no tables, no branches (but for sines
// of huge numbers).
#pragma once

#include "simd.h"

namespace linattn {
namespace LINATTN_ISA_NS {

template <class T>
struct Format;  // the numbers of an IEEE format that the elementary functions need

template <>
struct Format<float> {
  static constexpr int kMantissaBits = 23;
  static constexpr int kBias = 127;
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds to an integer
  static constexpr float kLog2e = 1.44269504088896341f;
  static constexpr float kLn2High = 0.693359375f;  // few bits, so that n * kLn2High is exact without FMA too
  static constexpr float kLn2Low = -2.12194440054690583e-4f;
  static constexpr float kExpUnderflow = -87.336544f;  // below: exp(x) is not a normal number, we give 0
  static constexpr float kExpOverflow = 88.72283f;
  static constexpr float kMinExponent = -126.0f;
  static constexpr float kMost = 3.402823466e+38f;
  // pi / 2 in parts; the products of the first two with a whole n are exact up to kWaveLimit, without FMA too.
  static constexpr float kTwoOverPi = 0.636619772367581343f;
  static constexpr float kHalfPiHigh = 1.5703125f;                   // 11 bits
  static constexpr float kHalfPiMiddle = 0.0004837512969970703125f;  // the next 11
  static constexpr float kHalfPiLow = 7.549790126404332e-08f;
  static constexpr float kWaveLimit = 8192;
};

template <>
struct Format<double> {
  static constexpr int kMantissaBits = 52;
  static constexpr int kBias = 1023;
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLog2e = 1.4426950408889634074;
  static constexpr double kLn2High = 0.693147180369123816490;
  static constexpr double kLn2Low = 1.90821492927058770002e-10;
  static constexpr double kExpUnderflow = -708.39641853226408;
  static constexpr double kExpOverflow = 709.78271289338397;
  static constexpr double kMinExponent = -1022.0;
  static constexpr double kMost = 1.7976931348623157e+308;
  static constexpr double kTwoOverPi = 0.636619772367581343;
  static constexpr double kHalfPiHigh = 0x1.921fb544p+0;     // 33 bits
  static constexpr double kHalfPiMiddle = 0x1.0b4611a6p-34;  // the next 33
  static constexpr double kHalfPiLow = 0x1.3198a2e037073p-69;
  static constexpr double kWaveLimit = 1048576;
};

// exp(r) for |r| <= ln(2)/2, written 1 + r + r^2 q(r). float: q is the minimax polynomial of degree 4 for the
// relative error (3e-9; fitted by Lawson's iteration). double: the Taylor series to r^13 (4e-18).
static inline Vec<float> exp_reduced(Vec<float> r) {
  // In pairs rather than by Horner's rule: as many multiplications, but 16 cycles deep instead of 24, and it is the
  // depth that limits how many vectors are under way at once.
  const Vec<float> r2 = r * r;
  const Vec<float> low = r * 0.1666652113199234f + 0.4999999403953552f;
  const Vec<float> high = r * 0.008368715643882751f + 0.04166838899254799f;
  return ((r2 * 0.0013814599951729178f + high) * r2 + low) * r2 + (r + 1.0f);
}

static inline Vec<double> exp_reduced(Vec<double> r) {
  Vec<double> q = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0;
  q = q * r + 1.0 / 39916800.0;
  q = q * r + 1.0 / 3628800.0;
  q = q * r + 1.0 / 362880.0;
  q = q * r + 1.0 / 40320.0;
  q = q * r + 1.0 / 5040.0;
  q = q * r + 1.0 / 720.0;
  q = q * r + 1.0 / 120.0;
  q = q * r + 1.0 / 24.0;
  q = q * r + 1.0 / 6.0;
  q = q * r + 0.5;
  return (q * r + 1.0) * r + 1.0;
}

// atanh(s) / s - 1 over z = s^2 <= 1/9, divided by z. float: minimax of degree 3 (5e-9); double: the series.
static inline Vec<float> atanh_series(Vec<float> z) {
  Vec<float> q = z * 0.14012232422828674f + 0.13999569416046143f;
  q = q * z + 0.20010849833488464f;
  return q * z + 0.3333320617675781f;
}

static inline Vec<double> atanh_series(Vec<double> z) {
  Vec<double> q = splat(1.0 / 37.0);
#pragma GCC unroll 20
  for (int odd = 35; odd >= 3; odd -= 2) q = q * z + 1.0 / odd;
  return q;
}

// exp(x) = mantissa * 2^exponent, exponent a whole number in a floating vector.
template <class T>
struct ExpParts {
  Vec<T> mantissa, exponent;
};

template <class T>
static inline ExpParts<T> exp_parts(Vec<T> x) {
  using F = Format<T>;
  const Vec<T> n = (x * F::kLog2e + F::kRound) - F::kRound;
  return {exp_reduced((x - n * F::kLn2High) - n * F::kLn2Low), n};
}

// x - n ln(2) for |n| <= 151. With a fused multiply-add one float constant does: the product is exact, and ln(2) is
// off by 1.9e-9, so exp(-16) by 0.4 and exp(-87) by 2 units in the last place. (Unoptimised code fuses nothing.)
template <class T>
static inline Vec<T> minus_logs(Vec<T> x, Vec<T> n) {
#if (defined(__FMA__) || defined(__aarch64__)) && defined(__OPTIMIZE__)
  if constexpr (sizeof(T) == 4) return x - n * 0.693147180559945309f;
#endif
  return (x - n * Format<T>::kLn2High) - n * Format<T>::kLn2Low;
}

// 2^n for whole n from the least normal exponent up to the greatest.
template <class T>
static inline Vec<T> power_of_two(Vec<T> n) {
  using F = Format<T>;
  const Vec<T> biased = n + (F::kRound + F::kBias);  // the low bits of the mantissa are n + bias
  return (Vec<T>)((BitsVec<T>)biased << F::kMantissaBits);
}

// exp(x) for x <= 0; NaN gives no defined value (callers add a term that carries the NaN on).
template <class T>
static inline Vec<T> exp_nonpositive(Vec<T> x) {
  using F = Format<T>;
  const Vec<T> shifted = x * F::kLog2e + F::kRound;
  const Vec<T> n = shifted - F::kRound;
  const Vec<T> r = minus_logs<T>(x, n);
  // n goes into the exponent field by an integer addition: one multiplication less than mantissa * 2^n
  const BitsVec<T> bits = (BitsVec<T>)exp_reduced(r) + ((BitsVec<T>)shifted << F::kMantissaBits);
  return (Vec<T>)(bits & ~(BitsVec<T>)(x < F::kExpUnderflow));
}

// exp(x), 0 below the normal numbers and infinity above them; NaN stays NaN.
template <class T>
static inline Vec<T> exp_of(Vec<T> x) {
  using F = Format<T>;
  const Vec<T> inside = vmin<T>(splat(F::kExpOverflow), vmax<T>(splat(F::kExpUnderflow), x));
  const ExpParts<T> parts = exp_parts<T>(inside);
  // the greatest exponent, one above the format's, is taken in two steps: 0.7 * 2^128 is a float, 2^128 is not
  const Vec<T> greatest = splat(T(F::kBias));
  const Vec<T> twice = (parts.exponent > greatest) ? splat(T(2)) : splat(T(1));
  const Vec<T> y = parts.mantissa * power_of_two<T>(vmin<T>(greatest, parts.exponent)) * twice;
  const Vec<T> above = (x > F::kExpOverflow) ? y * splat(__builtin_inff() * T(1)) : y;
  return (x < F::kExpUnderflow) ? Vec<T>{} : above;
}

// log(1 + u) for 0 <= u <= 1, by 2 atanh(u / (2 + u)): exact to the relative precision for tiny u too.
template <class T>
static inline Vec<T> log1p_unit(Vec<T> u) {
  const Vec<T> s = u / (u + 2);
  const Vec<T> z = s * s;
  return 2 * (s + s * (z * atanh_series(z)));
}

// log(x) for x >= 1; NaN stays NaN.
template <class T>
static inline Vec<T> log_from_one(Vec<T> x) {
  using F = Format<T>;
  const BitsVec<T> bits = (BitsVec<T>)x, low = splat_bits<T>((Bits<T>(1) << F::kMantissaBits) - 1);
  const BitsVec<T> one = splat_bits<T>(Bits<T>(F::kBias) << F::kMantissaBits);
  const Vec<T> mantissa = (Vec<T>)((bits & low) | one);
  const Vec<T> exponent = __builtin_convertvector((IntVec<T>)(bits >> F::kMantissaBits) - F::kBias, Vec<T>);
  return ((log1p_unit<T>(mantissa - 1) + exponent * F::kLn2Low) + exponent * F::kLn2High) + (x - x);
}

// sin(r) and cos(r) for |r| <= pi / 4. float: minimax, r + r^3 p(r^2) to 3e-9 of sin(r) and 1 - r^2 / 2 + r^4 q(r^2) to
// 1e-10 of cos(r); double: the Taylor series to r^17 and r^16 (8e-20 and 2e-18).
static inline Vec<float> sin_reduced(Vec<float> r, Vec<float> r2) {
  const Vec<float> p = (r2 * -0.0001951463200384751f + 0.008332155644893646f) * r2 + -0.16666655242443085f;
  return r + (r * r2) * p;
}
static inline Vec<float> cos_reduced(Vec<float> r2) {
  const Vec<float> q = (r2 * 2.443241282890085e-05f + -0.0013887309469282627f) * r2 + 0.04166664555668831f;
  return (1.0f - 0.5f * r2) + (r2 * r2) * q;
}
static inline Vec<double> sin_reduced(Vec<double> r, Vec<double> r2) {
  Vec<double> p = r2 * (1.0 / 355687428096000.0) - 1.0 / 1307674368000.0;
  p = p * r2 + 1.0 / 6227020800.0;
  p = p * r2 - 1.0 / 39916800.0;
  p = p * r2 + 1.0 / 362880.0;
  p = p * r2 - 1.0 / 5040.0;
  p = p * r2 + 1.0 / 120.0;
  p = p * r2 - 1.0 / 6.0;
  return r + (r * r2) * p;
}
static inline Vec<double> cos_reduced(Vec<double> r2) {
  Vec<double> q = r2 * (1.0 / 20922789888000.0) - 1.0 / 87178291200.0;
  q = q * r2 + 1.0 / 479001600.0;
  q = q * r2 - 1.0 / 3628800.0;
  q = q * r2 + 1.0 / 40320.0;
  q = q * r2 - 1.0 / 720.0;
  q = q * r2 + 1.0 / 24.0;
  return (1.0 - 0.5 * r2) + (r2 * r2) * q;
}

// sin(x) and cos(x), off by at most two units in the last place of 1/2 ... 1 (near a zero relative digits are lost).
// Beyond kWaveLimit pi / 2 would need more bits, and libm is asked number by number.
template <class T>
static inline void sin_cos(Vec<T> x, Vec<T>& sine, Vec<T>& cosine) {
  using F = Format<T>;
  const Vec<T> shifted = x * F::kTwoOverPi + F::kRound;
  const Vec<T> n = shifted - F::kRound;
  const Vec<T> r = ((x - n * F::kHalfPiHigh) - n * F::kHalfPiMiddle) - n * F::kHalfPiLow;
  const Vec<T> r2 = r * r, s = sin_reduced(r, r2), c = cos_reduced(r2);
  const BitsVec<T> quarter = (BitsVec<T>)shifted;  // its last two bits are those of n
  constexpr int to_sign = 8 * static_cast<int>(sizeof(T)) - 2;
  const BitsVec<T> two = splat_bits<T>(2), one = splat_bits<T>(1);
  const IntVec<T> odd = (IntVec<T>)(quarter & one) != IntVec<T>{};
  sine = (Vec<T>)((BitsVec<T>)(odd ? c : s) ^ ((quarter & two) << to_sign));
  cosine = (Vec<T>)((BitsVec<T>)(odd ? s : c) ^ (((quarter + one) & two) << to_sign));
  const IntVec<T> near = (x >= -F::kWaveLimit) & (x <= F::kWaveLimit);
  if (any_lane<T>(~near))
    for (int64_t i = 0; i < kLanes<T>; ++i)
      if (!near[i]) {
        sine[i] = static_cast<T>(__builtin_sin(static_cast<double>(x[i])));
        cosine[i] = static_cast<T>(__builtin_cos(static_cast<double>(x[i])));
      }
}

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
