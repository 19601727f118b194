// Compiled once an instruction set, as the kernels are.
#include "probe.h"

#include "blocks.h"
#include "maps.h"
#include "projection.h"

#define LINATTN_STRING_(x) #x
#define LINATTN_STRING(x) LINATTN_STRING_(x)

namespace linattn {
namespace LINATTN_ISA_NS {

template <class T, class F>
static void over(const T* x, T* y, int64_t n, F&& f) {
  for (int64_t i = 0; i < n; i += kLanes<T>) store(y + i, f(load(x + i)));
}

template <class T>
static Functions<T> functions() {
  Functions<T> f;
  f.exp = [](const T* x, T* y, int64_t n) { over(x, y, n, [](Vec<T> v) { return exp_of<T>(v); }); };
  f.exp_nonpositive = [](const T* x, T* y, int64_t n) {
    over(x, y, n, [](Vec<T> v) { return exp_nonpositive<T>(v); });
  };
  f.log1p_unit = [](const T* x, T* y, int64_t n) { over(x, y, n, [](Vec<T> v) { return log1p_unit<T>(v); }); };
  f.log_from_one = [](const T* x, T* y, int64_t n) { over(x, y, n, [](Vec<T> v) { return log_from_one<T>(v); }); };
  f.sine = [](const T* x, T* y, int64_t n) {
    over(x, y, n, [](Vec<T> v) {
      Vec<T> s, c;
      sin_cos<T>(v, s, c);
      return s;
    });
  };
  f.cosine = [](const T* x, T* y, int64_t n) {
    over(x, y, n, [](Vec<T> v) {
      Vec<T> s, c;
      sin_cos<T>(v, s, c);
      return c;
    });
  };
  f.exponent = [](const T* x, T* y, int64_t n) { over(x, y, n, [](Vec<T> v) { return exponent_of<T>(v); }); };
  f.exp_shifted = [](const T* x, const T* shift, T* y, int64_t n) {
    for (int64_t i = 0; i < n; i += kLanes<T>) store(y + i, exp_shifted<T>(load(x + i), load(shift + i)));
  };
  f.minimum = [](const T* a, const T* b, T* y, int64_t n) {
    for (int64_t i = 0; i < n; i += kLanes<T>) store(y + i, vmin<T>(load(a + i), load(b + i)));
  };
  f.maximum = [](const T* a, const T* b, T* y, int64_t n) {
    for (int64_t i = 0; i < n; i += kLanes<T>) store(y + i, vmax<T>(load(a + i), load(b + i)));
  };
  f.phi = [](Map map, const T* x, T* y, int64_t n) {
    switch (map) {
      case Map::elu1:
        return over(x, y, n, [](Vec<T> v) { return phi<Map::elu1, T>(v); });
      case Map::relu:
        return over(x, y, n, [](Vec<T> v) { return phi<Map::relu, T>(v); });
      case Map::squared_relu:
        return over(x, y, n, [](Vec<T> v) { return phi<Map::squared_relu, T>(v); });
      case Map::softplus:
        return over(x, y, n, [](Vec<T> v) { return phi<Map::softplus, T>(v); });
      case Map::sigmoid:
        return over(x, y, n, [](Vec<T> v) { return phi<Map::sigmoid, T>(v); });
      default:
        return over(x, y, n, [](Vec<T> v) { return phi<Map::identity, T>(v); });
    }
  };
  f.sum_lanes = [](const T* x) { return sum_lanes<T>(load(x)); };
  f.max_lanes = [](const T* x) { return max_lanes<T>(load(x)); };
  f.transpose = [](T* square) {
    constexpr int64_t lanes = kLanes<T>;
    Vec<T> rows[lanes];
    for (int64_t i = 0; i < lanes; ++i) rows[i] = load(square + i * lanes);
    transpose_square<T>(rows);
    for (int64_t i = 0; i < lanes; ++i) store(square + i * lanes, rows[i]);
  };
  f.lanes = kLanes<T>;
  f.load_row = [](DType dtype, const char* from, int64_t col, T* to, int64_t cols) {
    load_row<T>(dtype, from, col, to, cols);
  };
  f.store_row = [](DType dtype, char* to, int64_t col, const T* from, int64_t cols) {
    store_row<T>(dtype, to, col, from, cols);
  };
  f.project = [](const Layer& layer, View x, int64_t rows, T* block, T* room) {
    rows_before_map<T>(layer, layer.projection, x, 0, rows, block, room);
  };
  f.block = [](const Layer& layer) { return Widths<T>(layer).d_row; };
  f.room = [](const Layer& layer, int64_t rows) { return Widths<T>(layer).room(rows); };
  return f;
}

static float widened_half(uint16_t h) { return widen_half(h); }
static uint16_t narrowed_half(float x) { return narrow_half(x); }
static float widened_bfloat(uint16_t h) { return widen_bfloat(h); }
static uint16_t narrowed_bfloat(float x) { return narrow_bfloat(x); }

Probe probe() {
  return {LINATTN_STRING(LINATTN_ISA_NS),
          functions<float>(),
          functions<double>(),
          widened_half,
          narrowed_half,
          widened_bfloat,
          narrowed_bfloat};
}

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
