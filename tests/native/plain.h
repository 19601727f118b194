// Linear attention as plain loops in double, and what the tests of the kernels share: operands with any strides in
// memory that is guarded on both sides.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "check.h"
#include "driver.h"
#include "kernels.h"

namespace plain {

using linattn::DType;
using linattn::Map;

// ---- numbers ---------------------------------------------------------------------------------------------

struct Random {  // a linear congruential generator: the same numbers everywhere
  uint64_t state;
  explicit Random(uint64_t seed) : state(seed * 2654435761u + 1) { next(), next(); }
  uint32_t next() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state >> 33);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  double uniform(double low, double high) { return low + (high - low) * next() / 2147483648.0; }
  template <class T, size_t n>
  T of(const T (&choices)[n]) {
    return choices[below(static_cast<int64_t>(n))];
  }
};

inline double half_value(uint16_t h) {
  const int exponent = (h >> 10) & 31, fraction = h & 1023;
  double x;
  if (exponent == 31)
    x = fraction ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  else if (exponent == 0)
    x = std::ldexp(fraction, -24);
  else
    x = std::ldexp(1024 + fraction, exponent - 25);
  return h & 0x8000 ? -x : x;
}

inline double bfloat_value(uint16_t b) {
  const uint32_t bits = static_cast<uint32_t>(b) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// To nearest, ties to even, by steps of the format: p bits, least exponent e (of a subnormal's last bit).
inline double rounded(double x, int p, int e) {
  if (x == 0 || !std::isfinite(x)) return x;
  int exponent;
  std::frexp(x, &exponent);
  const int last = exponent - p > e ? exponent - p : e;
  return std::ldexp(std::nearbyint(std::ldexp(x, -last)), last);
}

inline uint16_t half_of(double x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return sign | 0x7e00;
  const double y = std::fabs(rounded(x, 11, -24));
  if (y > 65504) return sign | 0x7c00;
  if (y < std::ldexp(1, -14)) return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::ldexp(y, 24)));
  int exponent;
  const double fraction = std::frexp(y, &exponent);
  return static_cast<uint16_t>(sign | ((exponent + 14) << 10) |
                               (static_cast<uint16_t>(std::ldexp(fraction, 11)) & 1023));
}

inline uint16_t bfloat_of(double x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return sign | 0x7fc0;
  const double y = std::fabs(rounded(x, 8, -133));
  const float f = y > 3.4e38 ? std::numeric_limits<float>::infinity() : static_cast<float>(y);
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return static_cast<uint16_t>(sign | (bits >> 16));
}

inline int64_t size_of(DType dtype) { return dtype == DType::float64 ? 8 : dtype == DType::float32 ? 4 : 2; }
inline const char* name_of(DType dtype) {
  static const char* const names[] = {"float32", "float64", "float16", "bfloat16"};
  return names[static_cast<int>(dtype)];
}
inline const char* name_of(Map map) {
  static const char* const names[] = {"identity", "elu1", "relu", "squared_relu", "exp", "softplus", "sigmoid"};
  return names[static_cast<int>(map)];
}

// The precision computed in, and that of the output.
inline double epsilon(DType dtype) { return dtype == DType::float64 ? 0x1p-52 : 0x1p-23; }
inline double smallest(DType dtype) { return dtype == DType::float64 ? 0x1p-1022 : 0x1p-126; }
inline double rounding(DType dtype) {
  return dtype == DType::float64   ? 0x1p-53
         : dtype == DType::float32 ? 0x1p-24
         : dtype == DType::float16 ? 0x1p-11
                                   : 0x1p-8;
}
inline double step_at_zero(DType dtype) {
  return dtype == DType::float64   ? 0x1p-1074
         : dtype == DType::float16 ? 0x1p-24
         : dtype == DType::float32 ? 0x1p-149
                                   : 0x1p-133;
}
inline double greatest(DType dtype) {
  return dtype == DType::float64 ? 1.7e308 : dtype == DType::float16 ? 65504 : 3.38e38;
}

inline void put(DType dtype, char* at, double x) {
  if (dtype == DType::float64) {
    std::memcpy(at, &x, 8);
  } else if (dtype == DType::float32) {
    const float f = static_cast<float>(x);
    std::memcpy(at, &f, 4);
  } else {
    const uint16_t h = dtype == DType::float16 ? half_of(x) : bfloat_of(x);
    std::memcpy(at, &h, 2);
  }
}

inline double get(DType dtype, const char* at) {
  if (dtype == DType::float64) {
    double x;
    std::memcpy(&x, at, 8);
    return x;
  }
  if (dtype == DType::float32) {
    float x;
    std::memcpy(&x, at, 4);
    return x;
  }
  uint16_t h;
  std::memcpy(&h, at, 2);
  return dtype == DType::float16 ? half_value(h) : bfloat_value(h);
}

// ---- memory ----------------------------------------------------------------------------------------------

// Bytes at an offset from a 64-byte boundary, all 0xff (NaN in every dtype), with guards that must stay. From malloc
// and of the exact size, so that a sanitizer sees what reaches beyond the guards.
class Guarded {
 public:
  static constexpr int64_t kGuard = 256;

  explicit Guarded(int64_t bytes, int64_t offset = 0) : bytes_(bytes) {
    whole_ = static_cast<unsigned char*>(std::malloc(static_cast<size_t>(bytes + offset + 2 * kGuard + 64)));
    if (!whole_) throw std::bad_alloc();
    start_ = whole_ + kGuard;
    start_ += (64 - reinterpret_cast<uintptr_t>(start_) % 64) % 64 + static_cast<uintptr_t>(offset);
    poison();
    std::memset(start_ - kGuard, 0xff, kGuard);
    std::memset(start_ + bytes_, 0xff, kGuard);
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() {
    CHECK(intact(), "%lld bytes", static_cast<long long>(bytes_));
    std::free(whole_);
  }

  void poison() { std::memset(start_, 0xff, static_cast<size_t>(bytes_)); }
  char* data() { return reinterpret_cast<char*>(start_); }
  int64_t bytes() const { return bytes_; }
  bool intact() const {
    for (int64_t i = 0; i < kGuard; ++i)
      if (start_[i - kGuard] != 0xff || start_[bytes_ + i] != 0xff) return false;
    return true;
  }

 private:
  unsigned char* whole_;
  unsigned char* start_;
  int64_t bytes_;
};

// Memory that no sanitizer would let anyone reach beyond: the exact size, nothing around it.
class Exact {
 public:
  explicit Exact(int64_t bytes) : data_(::operator new(static_cast<size_t>(bytes), std::align_val_t(64))) {
    std::memset(data_, 0xff, static_cast<size_t>(bytes));
  }
  Exact(const Exact&) = delete;
  Exact& operator=(const Exact&) = delete;
  ~Exact() { ::operator delete(data_, std::align_val_t(64)); }
  void* data() { return data_; }

 private:
  void* data_;
};

// A matrix (rows, cols) of a dtype somewhere in memory.
class Matrix {
 public:
  enum Layout { dense, gap, reversed, columns, every_other, misaligned, same_row, one_off, layouts };

  Matrix(DType dtype, int64_t rows, int64_t cols, Layout layout)
      : dtype_(dtype),
        rows_(rows),
        cols_(cols),
        memory_(bytes_of(dtype, rows, cols, layout), offset_of(dtype, layout)) {
    const int64_t item = size_of(dtype);
    row_ = cols * item;
    col_ = item;
    int64_t first = 0;
    switch (layout) {
      case gap:
        row_ = (cols + 3) * item;
        break;
      case reversed:
        first = rows > 0 ? (rows - 1) * row_ : 0;
        row_ = -row_;
        break;
      case columns:
        row_ = item;
        col_ = (rows > 0 ? rows : 1) * item;
        break;
      case every_other:
        row_ = 2 * cols * item + item;
        col_ = -2 * item;
        first = 2 * (cols - 1) * item;
        break;
      case same_row:
        row_ = 0;
        break;
      default:
        break;
    }
    start_ = memory_.data() + first;
  }

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  linattn::View view() { return {start_, row_, col_}; }
  linattn::OutView out() { return {start_, row_, col_}; }
  double at(int64_t r, int64_t c) { return get(dtype_, start_ + r * row_ + c * col_); }
  void set(int64_t r, int64_t c, double x) { put(dtype_, start_ + r * row_ + c * col_, x); }
  void fill(Random& random, double low, double high) {
    for (int64_t r = 0; r < rows_; ++r)
      for (int64_t c = 0; c < cols_; ++c) set(r, c, random.uniform(low, high));
  }
  bool intact() const { return memory_.intact(); }

  // Whether what lies between the elements still is as it was.
  bool gaps_intact() {
    std::vector<bool> used(static_cast<size_t>(memory_.bytes()));
    for (int64_t r = 0; r < rows_; ++r)
      for (int64_t c = 0; c < cols_; ++c)
        for (int64_t b = 0; b < size_of(dtype_); ++b)
          used[static_cast<size_t>(start_ + r * row_ + c * col_ + b - memory_.data())] = true;
    for (int64_t i = 0; i < memory_.bytes(); ++i)
      if (!used[static_cast<size_t>(i)] && static_cast<unsigned char>(memory_.data()[i]) != 0xff) return false;
    return true;
  }

 private:
  static int64_t bytes_of(DType dtype, int64_t rows, int64_t cols, Layout layout) {
    const int64_t item = size_of(dtype);
    if (layout == gap) return rows * (cols + 3) * item;
    if (layout == every_other) return rows * (2 * cols + 1) * item;
    return rows * cols * item;
  }
  static int64_t offset_of(DType dtype, Layout layout) {
    return layout == misaligned ? 1 : layout == one_off ? size_of(dtype) : 0;
  }

  DType dtype_;
  int64_t rows_, cols_, row_, col_;
  Guarded memory_;
  char* start_;
};

struct Mask {
  std::vector<uint8_t> bytes;
  linattn::MaskView view{nullptr, 0};
  bool keeps(int64_t r) const { return !view.data || view.data[r * view.stride] != 0; }

  Mask(Random& random, int64_t n, int kind) {
    if (kind == 0) return;
    bytes.assign(static_cast<size_t>(2 * n + 1), 0xff);
    uint8_t* data = bytes.data();
    int64_t stride = 1;
    if (kind == 2) stride = 2;
    if (kind == 3) stride = -1, data += n;
    view = {data, stride};
    for (int64_t r = 0; r < n; ++r)
      data[r * stride] = kind == 4 ? 0 : kind == 5 ? static_cast<uint8_t>(r / 70 % 2) : random.below(3) > 0 ? 1 : 0;
  }
};

// ---- the definition --------------------------------------------------------------------------------------

inline double phi(Map map, double x) {
  switch (map) {
    case Map::identity:
      return x;
    case Map::elu1:
      return x < 0 ? std::exp(x) : x + 1;
    case Map::relu:
      return x > 0 ? x : 0;
    case Map::squared_relu:
      return x > 0 ? x * x : 0;
    case Map::exp:
      return std::exp(x);
    case Map::softplus:
      return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
    case Map::sigmoid:
      return 1 / (1 + std::exp(-x));
  }
  return x;
}

// |x phi'(x) / phi(x)|: what a rounding of x becomes.
inline double conditioning(Map map, double x) {
  switch (map) {
    case Map::identity:
      return 1;
    case Map::elu1:
      return x < 0 ? -x : x / (x + 1);
    case Map::relu:
      return 1;
    case Map::squared_relu:
      return 2;
    case Map::exp:
      return std::fabs(x);
    case Map::softplus:
      return std::fabs(x) / (1 + std::exp(-x)) / phi(map, x);
    case Map::sigmoid:
      return std::fabs(x) / (1 + std::exp(x));
  }
  return 1;
}

// to += x, with what the addition loses kept in `lost`: the loops below must not err more than what they judge.
inline void add(double& to, double& lost, double x) {
  const double sum = to + x, back = sum - to;
  lost += (to - (sum - back)) + (x - back);
  to = sum;
}

// The true sums of keys and, with their conditioning, the sizes that their errors are measured by.
struct Sums {
  int64_t features, d_v;
  std::vector<double> kv, k_sum, kv_size, k_size, kv_lost, k_lost;

  Sums(int64_t features_, int64_t d_v_)
      : features(features_),
        d_v(d_v_),
        kv(static_cast<size_t>(features * d_v)),
        k_sum(static_cast<size_t>(features)),
        kv_size(kv),
        k_size(k_sum),
        kv_lost(kv),
        k_lost(k_sum) {}

  double kv_at(int64_t d, int64_t c) const {
    const size_t at = static_cast<size_t>(d * d_v + c);
    return kv[at] + kv_lost[at];
  }
  double k_sum_at(int64_t d) const { return k_sum[static_cast<size_t>(d)] + k_lost[static_cast<size_t>(d)]; }

  void add(Map map, Matrix& k, Matrix& v, int64_t row) {
    for (int64_t d = 0; d < features; ++d) {
      const double x = k.at(row, d), f = phi(map, x), size = std::fabs(f) * (2 + conditioning(map, x));
      plain::add(k_sum[static_cast<size_t>(d)], k_lost[static_cast<size_t>(d)], f);
      k_size[static_cast<size_t>(d)] += size;
      for (int64_t c = 0; c < d_v; ++c) {
        const size_t at = static_cast<size_t>(d * d_v + c);
        plain::add(kv[at], kv_lost[at], f * v.at(row, c));
        kv_size[at] += size * std::fabs(v.at(row, c));
      }
    }
  }
};

// One row of output and what its error may be, in units of epsilon.
struct Row {
  std::vector<double> value, bound;
  bool zero = false;  // nothing to average: exactly 0

  Row(const linattn::Layer& layer, Matrix& q, int64_t row, const Sums& sums)
      : value(static_cast<size_t>(layer.d_v)), bound(value) {
    double below = 0, below_size = 0;
    std::vector<double> size(value);
    for (int64_t d = 0; d < layer.features; ++d) {
      const double x = q.at(row, d), f = phi(layer.map, x), c_q = conditioning(layer.map, x);
      below += f * sums.k_sum_at(d);
      below_size += std::fabs(f) * (1 + c_q) * sums.k_size[static_cast<size_t>(d)];
      for (int64_t c = 0; c < layer.d_v; ++c) {
        value[static_cast<size_t>(c)] += f * sums.kv_at(d, c);
        size[static_cast<size_t>(c)] += std::fabs(f) * (1 + c_q) * sums.kv_size[static_cast<size_t>(d * layer.d_v + c)];
      }
    }
    if (!layer.normalize) {
      bound = size;
      return;
    }
    below += layer.eps;
    zero = below == 0;
    for (size_t c = 0; c < value.size(); ++c) {
      value[c] = zero ? 0 : value[c] / below;
      bound[c] = zero ? 0 : (size[c] + std::fabs(value[c]) * below_size) / std::fabs(below);
    }
  }
};

// Whether row `row` of out is what it should be.
inline bool right(const linattn::Layer& layer, Matrix& out, int64_t row, const Row& expected, double c = 2) {
  for (int64_t i = 0; i < layer.d_v; ++i) {
    const double value = expected.value[static_cast<size_t>(i)], found = out.at(row, i);
    const double limit = c * epsilon(layer.dtype) * expected.bound[static_cast<size_t>(i)] * 1.01 +
                         rounding(layer.dtype) * std::fabs(value) + smallest(layer.dtype) + step_at_zero(layer.dtype);
    if (std::fabs(value) + limit >= greatest(layer.dtype) && std::isinf(found)) continue;
    if (!(std::fabs(found - value) <= limit)) {
      std::printf("row %lld column %lld: %.17g for %.17g, %.3g times what is allowed\n", static_cast<long long>(row),
                  static_cast<long long>(i), found, value, std::fabs(found - value) / limit);
      return false;
    }
  }
  return true;
}

// A running state in guarded memory.
class State {
 public:
  explicit State(const linattn::Layer& layer)
      : layer_(layer),
        kv_(layer.features * layer.d_v * 8),
        k_sum_(layer.features * 8),
        log_scale_(layer.features * 4),
        ref_{reinterpret_cast<double*>(kv_.data()), reinterpret_cast<double*>(k_sum_.data()),
             layer.map == Map::exp ? reinterpret_cast<int32_t*>(log_scale_.data()) : nullptr} {
    std::memset(kv_.data(), 0, static_cast<size_t>(kv_.bytes()));
    std::memset(k_sum_.data(), 0, static_cast<size_t>(k_sum_.bytes()));
    if (ref_.log_scale)
      for (int64_t d = 0; d < layer.features; ++d) ref_.log_scale[d] = linattn::kEmpty;
  }
  State(const State& other) : State(other.layer_) { assign(other); }
  void assign(const State& other) {
    std::memcpy(ref_.kv, other.ref_.kv, static_cast<size_t>(kv_.bytes()));
    std::memcpy(ref_.k_sum, other.ref_.k_sum, static_cast<size_t>(k_sum_.bytes()));
    if (ref_.log_scale) std::memcpy(ref_.log_scale, other.ref_.log_scale, static_cast<size_t>(log_scale_.bytes()));
  }
  linattn::StateRef ref() const { return ref_; }

  bool equals(const Sums& sums, double c = 2) const {
    const double unit = c * epsilon(layer_.dtype) * 1.01;
    for (int64_t d = 0; d < layer_.features; ++d) {
      const int power = ref_.log_scale ? ref_.log_scale[d] : 0;
      const size_t at = static_cast<size_t>(d);
      if (!near(std::ldexp(ref_.k_sum[d], power), sums.k_sum_at(d), unit * sums.k_size[at])) return false;
      for (int64_t i = 0; i < layer_.d_v; ++i) {
        const size_t here = static_cast<size_t>(d * layer_.d_v + i);
        if (!near(std::ldexp(ref_.kv[here], power), sums.kv_at(d, i), unit * sums.kv_size[here])) return false;
      }
    }
    return true;
  }

 private:
  bool near(double found, double value, double limit) const {
    if (std::fabs(found - value) <= limit + 1000 * smallest(layer_.dtype)) return true;
    std::printf("state: %.17g for %.17g\n", found, value);
    return false;
  }
  const linattn::Layer layer_;
  Guarded kv_, k_sum_, log_scale_;
  linattn::StateRef ref_;
};

// ---- problems of the driver ------------------------------------------------------------------------------

struct OwnState {
  std::vector<double> kv, k_sum;
  std::vector<int32_t> log_scale;
  OwnState(int64_t count, const linattn::Layer& layer)
      : kv(static_cast<size_t>(count * layer.features * layer.d_v)),
        k_sum(static_cast<size_t>(count * layer.features)),
        log_scale(layer.map == Map::exp ? k_sum.size() : 0, linattn::kEmpty) {}
  linattn::StateRef ref() { return {kv.data(), k_sum.data(), log_scale.empty() ? nullptr : log_scale.data()}; }
};

// What the operands of a problem say: anything that has rows and a view.
template <class M, class O>
linattn::Problem problem_of(linattn::Form form, const linattn::Layer& layer, const M& q, const M& k, const M& v,
                            O& out) {
  linattn::Problem p{};
  p.form = form;
  p.layer = layer;
  p.n_q = q.rows;
  p.n_k = k.rows;
  p.q = q.view();
  p.k = k.view();
  p.v = v.view();
  p.out = out.out();
  return p;
}

}  // namespace plain
