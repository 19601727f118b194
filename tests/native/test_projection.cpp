// A projection made by the kernels, against rows that were projected first. Numbers are multiples of powers of two, so
// that a projection has no rounding and both give the same bits: every form, map and dtype, widths and lengths around
// the edges of tiles and blocks, masks, rows that must be copied, rows that leave the range of float.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "dispatch.h"
#include "driver.h"
#include "plain.h"

using namespace linattn;
using plain::get;
using plain::OwnState;
using plain::put;
using plain::size_of;

namespace {

// (rows, columns) numbers with `spread` items from one to the next.
struct Matrix {
  DType dtype;
  int64_t rows, columns, spread;
  std::vector<char> memory;

  Matrix(DType dtype_, int64_t rows_, int64_t columns_, int64_t spread_ = 1)
      : dtype(dtype_),
        rows(rows_),
        columns(columns_),
        spread(spread_),
        memory(static_cast<size_t>(rows_ * columns_ * spread_ * size_of(dtype_)), '\xff') {}
  int64_t column() const { return spread * size_of(dtype); }
  int64_t row() const { return columns * column(); }
  char* at(int64_t i, int64_t j) { return memory.data() + i * row() + j * column(); }
  double operator()(int64_t i, int64_t j) const { return get(dtype, memory.data() + i * row() + j * column()); }
  View view() const { return {memory.data(), row(), column()}; }
  OutView out() { return {memory.data(), row(), column()}; }
};

// W, b and the constants, in both precisions, as the binding lays them out.
struct OwnProjection {
  std::vector<float> narrow;
  std::vector<double> wide;
  Projection projection{};

  OwnProjection(plain::Random& random, int64_t inputs, int64_t columns, bool mirrored, bool square) {
    const int64_t row = (columns + 15) / 16 * 16;
    wide.assign(static_cast<size_t>((inputs + 1) * row), 0);
    for (int64_t i = 0; i <= inputs; ++i)
      for (int64_t c = 0; c < columns; ++c) wide[static_cast<size_t>(i * row + c)] = (random.below(9) - 4) / 4.0;
    narrow.assign(wide.begin(), wide.end());
    projection = {inputs,        columns,
                  mirrored,      square ? 0.5 : 0.0,
                  0.25,          row,
                  narrow.data(), narrow.data() + inputs * row,
                  wide.data(),   wide.data() + inputs * row};
  }
  int64_t features() const { return projection.mirrored ? 2 * projection.columns : projection.columns; }
  double weight(int64_t i, int64_t c) const { return wide[static_cast<size_t>(i * projection.row + c)]; }

  // y of the header, in double.
  Matrix of(const Matrix& x, DType dtype) const {
    Matrix y(dtype, x.rows, features());
    for (int64_t r = 0; r < x.rows; ++r) {
      double down = projection.shift;
      for (int64_t i = 0; i < x.columns; ++i) down += projection.square * x(r, i) * x(r, i);
      for (int64_t c = 0; c < projection.columns; ++c) {
        double z = weight(x.columns, c);
        for (int64_t i = 0; i < x.columns; ++i) z += x(r, i) * weight(i, c);
        put(dtype, y.at(r, c), z - down);
        if (projection.mirrored) put(dtype, y.at(r, projection.columns + c), -z - down);
      }
    }
    return y;
  }
};

struct Sizes {
  int64_t n, inputs, columns, d_v;
};

// The rows of all forms: parallel; causal with the state it leaves; then one step more on that state.
std::vector<Matrix> run(const Kernels& set, const Layer& layer, const Matrix& q, const Matrix& k, const Matrix& v,
                        const uint8_t* mask) {
  std::vector<Matrix> results;
  for (Form form : {Form::parallel, Form::causal}) {
    Matrix out(v.dtype, q.rows, v.columns);
    OwnState state(1, layer);
    Problem p = plain::problem_of(form, layer, q, k, v, out);
    p.mask = {mask, 1};
    p.after = state.ref();
    CHECK(solve(p, set, 2));
    results.push_back(out);
    Matrix row(v.dtype, 1, v.columns);
    p.form = Form::step;
    p.before = p.after;
    p.n_q = p.n_k = 1;
    p.out = row.out();
    p.mask = {};
    const int64_t last = q.rows - 1;
    p.q.data += last * p.q.row;  // a row that no mask hides, see below
    p.k.data += last * p.k.row;
    p.v.data += last * p.v.row;
    CHECK(solve(p, set, 1));
    results.push_back(row);
  }
  return results;
}

bool ties_away = false;  // see main

// What `put`, which takes ties to even, is given so that it takes this number away from 0 if it is a tie.
double beyond_tie(double x) { return std::nextafter(x, x < 0 ? -HUGE_VAL : HUGE_VAL); }

void check_sizes(const Kernels& set, Map map, DType dtype, const Sizes& n, int turn) {
  plain::Random random(static_cast<uint64_t>(turn) * 977 + 5);
  const OwnProjection own(random, n.inputs, n.columns, turn % 2 == 1, turn % 3 != 0);
  const bool masked = turn % 4 == 3, far = turn % 5 == 4;
  const int64_t spread = 1 + turn % 2;
  Matrix q(dtype, n.n, n.inputs, spread), k(dtype, n.n, n.inputs, spread), v(dtype, n.n, n.d_v);
  std::vector<uint8_t> mask(static_cast<size_t>(n.n), 1);
  for (int64_t r = 0; r < n.n; ++r) {
    if (masked && r + 1 < n.n) mask[static_cast<size_t>(r)] = random.below(3) != 0;
    const bool hidden = !mask[static_cast<size_t>(r)];
    for (int64_t i = 0; i < n.inputs; ++i) {
      put(dtype, q.at(r, i), (random.below(9) - 4) / 4.0);
      // A large row now and then, of a power of two: exponents far from those before it.
      const double size = far && r % 7 == 3 ? 16 : 1;
      put(dtype, k.at(r, i), hidden ? std::nan("") : size * (random.below(9) - 4) / 4.0);
    }
    for (int64_t c = 0; c < n.d_v; ++c) put(dtype, v.at(r, c), hidden ? std::nan("") : (random.below(17) - 8) / 8.0);
  }
  Layer layer{};
  layer.dtype = dtype;
  layer.map = map;
  layer.normalize = turn % 7 != 6;
  layer.features = own.features();
  layer.d_v = n.d_v;
  layer.eps = turn % 2 ? 1e-6 : 0;
  const uint8_t* kept = masked ? mask.data() : nullptr;

  Layer projected = layer;
  projected.projection = &own.projection;
  const std::vector<Matrix> got = run(set, projected, q, k, v, kept);

  // Half precision can't hold a projection: the other side runs in float32 and is rounded at the end.
  const bool half = dtype == DType::float16 || dtype == DType::bfloat16;
  layer.dtype = half ? DType::float32 : dtype;
  Matrix values(layer.dtype, n.n, n.d_v);
  for (int64_t r = 0; r < n.n; ++r)
    for (int64_t c = 0; c < n.d_v; ++c) put(layer.dtype, values.at(r, c), v(r, c));
  const std::vector<Matrix> wanted = run(set, layer, own.of(q, layer.dtype), own.of(k, layer.dtype), values, kept);

  for (size_t form = 0; form < got.size(); ++form)
    for (int64_t r = 0; r < got[form].rows; ++r)
      for (int64_t c = 0; c < n.d_v; ++c) {
        Matrix rounded(dtype, 1, 1);
        const double exact = wanted[form](r, c);
        put(dtype, rounded.at(0, 0), ties_away && dtype == DType::float16 ? beyond_tie(exact) : exact);
        const double a = got[form](r, c), b = rounded(0, 0);
        const bool same = a == b || (std::isnan(a) && std::isnan(b));
        CHECK(same, "%s %s %s: n %d, inputs %d, columns %d%s, d_v %d, form %d, row %d, column %d: %.9g, not %.9g",
              set.name, plain::name_of(map), plain::name_of(dtype), int(n.n), int(n.inputs), int(n.columns),
              own.projection.mirrored ? " twice" : "", int(n.d_v), int(form), int(r), int(c), a, b);
        if (!same) return;
      }
}

}  // namespace

// Argument: ties-away for an emulator whose VCVTPS2PH rounds so, as that of Bochs 2.7 does.
int main(int argc, char** argv) {
  ties_away = argc > 1 && std::string(argv[1]) == "ties-away";
  const Map maps[] = {Map::identity, Map::elu1, Map::relu, Map::exp, Map::sigmoid};
  const DType dtypes[] = {DType::float32, DType::float64, DType::float16, DType::bfloat16};
  const Sizes sizes[] = {{1, 1, 1, 1},    {2, 3, 5, 7},      {31, 8, 16, 8},   {33, 17, 11, 3}, {65, 64, 24, 65},
                         {97, 5, 129, 2}, {130, 16, 67, 33}, {601, 7, 13, 17}, {300, 3, 301, 5}};
  for (auto set = usable_kernels(); *set; ++set) {
    int turn = 0;
    for (Map map : maps)
      for (DType dtype : dtypes)
        for (const Sizes& n : sizes) check_sizes(**set, map, dtype, n, ++turn);
  }
  return check::report("test_projection");
}
