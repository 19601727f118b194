// One vector type for every instruction set, in the compilers' own vector extensions (GCC, Clang, clang-cl).
//
// This header is compiled once per instruction set, each time inside its own namespace (LINATTN_ISA_NS).
// It must not include anything with inline functions of external linkage (no <algorithm>, no <cmath>): the
// linker keeps one copy of such a function, and the copy it keeps may be the one with AVX-512 instructions.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__AVX__) || defined(__SSE2__)
#include <immintrin.h>
#endif

#ifndef LINATTN_ISA_NS
#error "LINATTN_ISA_NS names the namespace of the instruction set that is being compiled"
#endif

namespace linattn {
namespace LINATTN_ISA_NS {

// LINATTN_VECTOR_BYTES overrides the width, so that the AVX-512 shapes can be run on machines without it.
#if defined(LINATTN_VECTOR_BYTES)
constexpr int kVectorBytes = LINATTN_VECTOR_BYTES;
#elif defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kVectorRegisters = 32;
#elif defined(LINATTN_VECTOR_BYTES) && LINATTN_VECTOR_BYTES == 64
constexpr int kVectorRegisters = 32;
#else
constexpr int kVectorRegisters = 16;
#endif

template <class T>
struct IntOf;
template <>
struct IntOf<float> {
  using type = int32_t;
  using bits = uint32_t;
};
template <>
struct IntOf<double> {
  using type = int64_t;
  using bits = uint64_t;
};
template <class T>
using Int = typename IntOf<T>::type;
template <class T>
using Bits = typename IntOf<T>::bits;  // for shifts and sums that may wrap around

template <class T>
struct VecOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vec = typename VecOf<T>::type;
template <class T>
using IntVec = Vec<Int<T>>;
template <class T>
using BitsVec = Vec<Bits<T>>;

template <class T>
constexpr int64_t kLanes = kVectorBytes / static_cast<int64_t>(sizeof(T));

template <class T>
constexpr int64_t round_up(int64_t n) {
  return (n + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

static inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

template <class T>
static inline Vec<T> load(const T* p) {
  Vec<T> v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <class T>
static inline void store(T* p, Vec<T> v) {
  __builtin_memcpy(p, &v, sizeof v);
}

template <class T>
static inline Vec<T> splat(T x) {
  return x - Vec<T>{};
}

template <class T>
static inline BitsVec<T> splat_bits(Bits<T> x) {
  return x - BitsVec<T>{};
}

template <class T>
static inline bool any_lane(IntVec<T> mask) {
#if defined(__AVX__) && !defined(__AVX512F__)
  if constexpr (kVectorBytes == 32) return _mm256_movemask_epi8((__m256i)mask) != 0;
#endif
  Int<T> any = 0;
  for (int64_t i = 0; i < kLanes<T>; ++i) any |= mask[i];
  return any != 0;
}

// The first `count` lanes come from memory, the others are `fill`.
template <class T>
static inline Vec<T> load_part(const T* p, int64_t count, T fill) {
  Vec<T> v = splat(fill);
  for (int64_t i = 0; i < count; ++i) v[i] = p[i];
  return v;
}

// min and max give the second operand when either is NaN, as the x86 instructions do: callers put the value
// that may be NaN second.
template <class T>
static inline Vec<T> vmin(Vec<T> a, Vec<T> b) {
#if defined(__AVX512F__)
  if constexpr (kVectorBytes == 64 && sizeof(T) == 4) return (Vec<T>)_mm512_min_ps((__m512)a, (__m512)b);
  if constexpr (kVectorBytes == 64 && sizeof(T) == 8) return (Vec<T>)_mm512_min_pd((__m512d)a, (__m512d)b);
#elif defined(__AVX__)
  if constexpr (kVectorBytes == 32 && sizeof(T) == 4) return (Vec<T>)_mm256_min_ps((__m256)a, (__m256)b);
  if constexpr (kVectorBytes == 32 && sizeof(T) == 8) return (Vec<T>)_mm256_min_pd((__m256d)a, (__m256d)b);
#endif
  return a < b ? a : b;
}

template <class T>
static inline Vec<T> vmax(Vec<T> a, Vec<T> b) {
#if defined(__AVX512F__)
  if constexpr (kVectorBytes == 64 && sizeof(T) == 4) return (Vec<T>)_mm512_max_ps((__m512)a, (__m512)b);
  if constexpr (kVectorBytes == 64 && sizeof(T) == 8) return (Vec<T>)_mm512_max_pd((__m512d)a, (__m512d)b);
#elif defined(__AVX__)
  if constexpr (kVectorBytes == 32 && sizeof(T) == 4) return (Vec<T>)_mm256_max_ps((__m256)a, (__m256)b);
  if constexpr (kVectorBytes == 32 && sizeof(T) == 8) return (Vec<T>)_mm256_max_pd((__m256d)a, (__m256d)b);
#endif
  return a > b ? a : b;
}

// Pairwise, in an order that depends on the vector width alone.
template <class T>
static inline T sum_lanes(Vec<T> v) {
#if defined(__AVX__)
  if constexpr (kVectorBytes == 32 && sizeof(T) == 4) {
    const __m256 all = (__m256)v;
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
  }
#endif
  T lanes[kLanes<T>];
  __builtin_memcpy(lanes, &v, sizeof v);
  for (int64_t half = kLanes<T> / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

template <class T>
static inline T max_lanes(Vec<T> v) {
  T best = v[0];
  for (int64_t i = 1; i < kLanes<T>; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

// In place: rows[i][j] <-> rows[j][i] of a square of kLanes x kLanes, by log2(kLanes) exchanges.
template <class T>
static inline void transpose_square(Vec<T> (&rows)[kLanes<T>]) {
  constexpr int n = static_cast<int>(kLanes<T>);
#if defined(__AVX__)
  // What the compiler makes of the general exchanges below takes five times as long here.
  if constexpr (kVectorBytes == 32 && sizeof(T) == 4) {
    __m256 quads[8];
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
      const __m256 a = _mm256_unpacklo_ps((__m256)rows[i], (__m256)rows[i + 1]);
      const __m256 b = _mm256_unpackhi_ps((__m256)rows[i], (__m256)rows[i + 1]);
      const __m256 c = _mm256_unpacklo_ps((__m256)rows[i + 2], (__m256)rows[i + 3]);
      const __m256 d = _mm256_unpackhi_ps((__m256)rows[i + 2], (__m256)rows[i + 3]);
      quads[i] = _mm256_shuffle_ps(a, c, 0x44);
      quads[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
      quads[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
      quads[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      rows[i] = (Vec<T>)_mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20);
      rows[i + 4] = (Vec<T>)_mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31);
    }
    return;
  }
#endif
#pragma GCC unroll 8
  for (int step = 1; step < n; step *= 2) {
    IntVec<T> take_low, take_high;  // lane numbers into the concatenation (a, b)
    for (int lane = 0; lane < n; ++lane) {
      take_low[lane] = (lane & step) ? n + lane - step : lane;
      take_high[lane] = (lane & step) ? n + lane : lane + step;
    }
#pragma GCC unroll 32
    for (int i = 0; i < n; ++i) {
      if (i & step) continue;
      Vec<T> a = rows[i], b = rows[i + step];
#if defined(__clang__)
      Vec<T> low, high;
      for (int lane = 0; lane < n; ++lane) {
        low[lane] = (lane & step) ? b[lane - step] : a[lane];
        high[lane] = (lane & step) ? b[lane] : a[lane + step];
      }
      rows[i] = low;
      rows[i + step] = high;
#else
      rows[i] = __builtin_shuffle(a, b, take_low);
      rows[i + step] = __builtin_shuffle(a, b, take_high);
#endif
    }
  }
}

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
