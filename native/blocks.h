// Blocks of rows on their way in (any dtype, any strides -> working precision, padded) and out.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace linattn {
namespace LINATTN_ISA_NS {

static inline float widen_half(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  // Exponent and mantissa move up by 13 bits; the bias differs by 112. Subnormals are made by a subtraction.
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7fffu;
  uint32_t bits;
  if (magnitude >= 0x7c00u) {
    bits = 0x7f800000u | (magnitude & 0x3ffu) << 13;
  } else if (magnitude >= 0x400u) {
    bits = (magnitude << 13) + (112u << 23);
  } else {
    const float tiny = static_cast<float>(magnitude) * 5.9604644775390625e-8f;  // 2^-24
    __builtin_memcpy(&bits, &tiny, sizeof bits);
  }
  bits |= sign;
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

static inline uint16_t narrow_half(float x) {  // to nearest, ties to even
#if defined(__F16C__)
  return static_cast<uint16_t>(_cvtss_sh(x, 0));
#else
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (bits >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65536 and more
  if (bits < 0x38800000u) {  // below the normal halves: the float addition rounds to a multiple of 2^-24
    float y;
    __builtin_memcpy(&y, &bits, sizeof y);
    y += 0.5f;
    __builtin_memcpy(&bits, &y, sizeof bits);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  bits += 0xfffu + ((bits >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((bits - (112u << 23)) >> 13));
#endif
}

static inline float widen_bfloat(uint16_t b) {
  const uint32_t bits = static_cast<uint32_t>(b) << 16;
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

static inline uint16_t narrow_bfloat(float x) {  // to nearest, ties to even
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

template <class E>
static inline E fetch(const char* p) {
  E x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}

static inline int64_t item_size(DType dtype) { return dtype == DType::float64 ? 8 : dtype == DType::float32 ? 4 : 2; }

template <class T>
static inline bool is_working(DType dtype) {
  return dtype == (sizeof(T) == 8 ? DType::float64 : DType::float32);
}

template <class T>
static void load_row(DType dtype, const char* src, int64_t col, T* dst, int64_t cols) {
  const bool dense = col == item_size(dtype);
  if (is_working<T>(dtype)) {
    if (dense) {
      __builtin_memcpy(dst, src, static_cast<size_t>(cols) * sizeof(T));
    } else {
      for (int64_t c = 0; c < cols; ++c) dst[c] = fetch<T>(src + c * col);
    }
  } else if (dtype == DType::float32) {
    for (int64_t c = 0; c < cols; ++c) dst[c] = fetch<float>(src + c * col);
  } else if (dtype == DType::float16) {
    int64_t c = 0;
#if defined(__F16C__)
    if (dense && sizeof(T) == 4) {
      for (; c + 8 <= cols; c += 8) {
        const __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + 2 * c)));
        __builtin_memcpy(dst + c, &wide, sizeof wide);
      }
    }
#endif
    for (; c < cols; ++c) dst[c] = widen_half(fetch<uint16_t>(src + c * col));
  } else if (dense) {
    for (int64_t c = 0; c < cols; ++c) dst[c] = widen_bfloat(fetch<uint16_t>(src + 2 * c));
  } else {
    for (int64_t c = 0; c < cols; ++c) dst[c] = widen_bfloat(fetch<uint16_t>(src + c * col));
  }
}

template <class T>
static void store_row(DType dtype, char* dst, int64_t col, const T* src, int64_t cols) {
  const bool dense = col == item_size(dtype);
  if (is_working<T>(dtype)) {
    if (dense) {
      __builtin_memcpy(dst, src, static_cast<size_t>(cols) * sizeof(T));
    } else {
      for (int64_t c = 0; c < cols; ++c) __builtin_memcpy(dst + c * col, src + c, sizeof(T));
    }
  } else if (dtype == DType::float32) {
    for (int64_t c = 0; c < cols; ++c) {
      const float x = static_cast<float>(src[c]);
      __builtin_memcpy(dst + c * col, &x, sizeof x);
    }
  } else if (dtype == DType::float16) {
    int64_t c = 0;
#if defined(__F16C__)
    if (dense && sizeof(T) == 4) {
      for (; c + 8 <= cols; c += 8) {
        __m256 wide;
        __builtin_memcpy(&wide, src + c, sizeof wide);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + 2 * c), _mm256_cvtps_ph(wide, 0));
      }
    }
#endif
    for (; c < cols; ++c) {
      const uint16_t h = narrow_half(static_cast<float>(src[c]));
      __builtin_memcpy(dst + c * col, &h, 2);
    }
  } else {
    for (int64_t c = 0; c < cols; ++c) {
      const uint16_t b = narrow_bfloat(static_cast<float>(src[c]));
      __builtin_memcpy(dst + c * col, &b, 2);
    }
  }
}

// Rows that the next block will want: each touch asks for a few of them, between the products of this block. Left to
// the hardware, k and q arrive in bursts while phi is applied and the products wait, and the narrow strips in which v
// is read and out is written are not followed at all: on sequences in memory this is worth 10 to 20 %.
struct Ahead {
  const char* at = nullptr;
  int64_t row = 0, bytes = 0, rows = 0;

  Ahead() = default;
  Ahead(DType dtype, const char* data, int64_t row_stride, int64_t col_stride, int64_t cols, int64_t begin, int64_t end)
      : at(data + begin * row_stride),
        row(row_stride),
        bytes(cols * item_size(dtype)),
        rows(col_stride == item_size(dtype) ? end - begin : 0) {}

  void touch(int64_t count) {
    for (; count > 0 && rows > 0; --count, --rows, at += row)
      for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(at + b, 0, 2);
  }
};

// The same for as many operands as a gradient has, in turn.
struct AheadAll {
  Ahead list[8];
  int count = 0, next = 0;

  // Rows [begin, end) of a view.
  template <class V>
  void add(DType dtype, const V& view, int64_t cols, int64_t begin, int64_t end) {
    if (count < 8) list[count++] = Ahead(dtype, view.data, view.row, view.col, cols, begin, end);
  }
  void touch(int64_t rows) {
    for (; rows > 0 && count > 0; --rows) {
      list[next].touch(1);
      next = next + 1 < count ? next + 1 : 0;
    }
  }
};

// Whether no element of x: (rows, cols) is infinite or NaN. Sums of them show it; a sum may overflow by itself only
// where elements are huge, so only then each is looked at.
template <class T>
static bool all_finite(const T* x, int64_t row, int64_t rows, int64_t cols) {
  const int64_t whole = cols / kLanes<T> * kLanes<T>;
  Vec<T> sum[4] = {};
  T rest = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const T* at = x + r * row;
    int64_t c = 0;
    for (; c + 4 * kLanes<T> <= whole; c += 4 * kLanes<T>)
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) sum[j] += load(at + c + j * kLanes<T>);
    for (; c < whole; c += kLanes<T>) sum[0] += load(at + c);
    for (; c < cols; ++c) rest += at[c];
  }
  const T total = sum_lanes<T>((sum[0] + sum[1]) + (sum[2] + sum[3])) + rest;
  if (total - total == 0) return true;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c)
      if (x[r * row + c] - x[r * row + c] != 0) return false;
  return true;
}

// Whether every |x| is smaller than `least`.
template <class T>
static bool all_below(const T* x, int64_t count, T least) {
  for (int64_t i = 0; i < count; ++i)
    if (!(x[i] < least && x[i] > -least)) return false;
  return true;
}

// Rows in the working precision: a pointer and a row stride in elements.
template <class T>
struct Rows {
  const T* data;
  int64_t row;
};

// Rows [begin, begin + rows) of a view. They are read where they lie if they are dense in the working precision
// (and, with `padded`, end on a whole vector); otherwise they are copied to `buffer`, padded with zeros to ld. Rows
// that begin off a vector's boundary are read in place too: copying them first cost 3 % more than the split loads.
template <class T>
static Rows<T> rows_of(DType dtype, View view, int64_t begin, int64_t rows, int64_t cols, bool padded, T* buffer,
                       int64_t ld) {
  const char* src = view.data + begin * view.row;
  const bool in_place = is_working<T>(dtype) && view.col == static_cast<int64_t>(sizeof(T)) &&
                        view.row % static_cast<int64_t>(sizeof(T)) == 0 &&
                        reinterpret_cast<uintptr_t>(src) % sizeof(T) == 0 && (!padded || cols % kLanes<T> == 0);
  if (in_place) return {reinterpret_cast<const T*>(src), view.row / static_cast<int64_t>(sizeof(T))};
  for (int64_t r = 0; r < rows; ++r) {
    load_row(dtype, src + r * view.row, view.col, buffer + r * ld, cols);
    for (int64_t c = cols; c < ld; ++c) buffer[r * ld + c] = 0;
  }
  return {buffer, ld};
}

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
