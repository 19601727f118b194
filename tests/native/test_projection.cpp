// A projection made by the kernels, against rows that were projected first. Numbers are multiples of powers of two, so
// that most projections have no rounding and both give the same bits: every form, map and dtype, widths and lengths
// around the edges of tiles and blocks, masks, rows that must be copied, rows that leave the range of float. Those that
// are made of exp, log, sin and cos are held to a few roundings.
#include <algorithm>
#include <cmath>
#include <complex>
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

// The steps of a projection with W, b and angles in both precisions, as the binding lays them out, and the same steps
// in long double.
struct OwnProjection {
  std::vector<float> narrow, narrow_angles;
  std::vector<double> wide, wide_angles;
  Projection projection{};

  // turn: which of the steps that `finish` leaves open are taken
  OwnProjection(plain::Random& random, Finish finish, int64_t n, int64_t inputs, int64_t columns, int turn) {
    Projection& p = projection;
    p.inputs = inputs;
    p.finish = finish;
    p.times = 1;
    p.unit = finish == Finish::waves;
    const bool products = finish == Finish::spectra || finish == Finish::squares;
    if (finish == Finish::neighbours) p.times = 1 + turn % 3;
    if (products) p.times = inputs > 8 ? 2 : 1 + turn % 3;  // so that they are exact in float
    if (finish == Finish::squares) p.times = inputs > 8 ? 1 : 1 + turn % 2;
    p.mirrored =
        finish == Finish::halves || ((finish == Finish::none || finish == Finish::neighbours) && turn % 2 == 1);
    p.square = (finish == Finish::none || finish == Finish::lifted) && turn % 3 != 0 ? 0.5 : 0;
    p.shift = products ? 0 : 0.25;
    p.amount = finish == Finish::lifted ? 0.125 : finish == Finish::waves ? 1 / std::sqrt(double(columns)) : 0;
    const bool weights = finish == Finish::none || finish == Finish::waves || products || turn % 4 != 0;
    p.columns = !weights ? inputs : products ? p.times * columns : columns;
    const int64_t both = p.mirrored ? 2 * p.columns : p.columns;
    p.features = finish == Finish::waves || finish == Finish::turned ? 2 * both
                 : finish == Finish::neighbours                      ? 2 * both * p.times
                 : finish == Finish::squares                         ? columns * (columns + 1) / 2
                 : products                                          ? columns
                                                                     : both;
    if (finish == Finish::turned) {
      for (int64_t i = 0; i < 2 * n; ++i) wide_angles.push_back((random.below(9) - 4) / 4.0);
      narrow_angles.assign(wide_angles.begin(), wide_angles.end());
      p.angles = n;
      p.angles_float = narrow_angles.data();
      p.angles_double = wide_angles.data();
    }
    if (!weights) return;
    p.row = (p.columns + 15) / 16 * 16;
    wide.assign(static_cast<size_t>((inputs + 1) * p.row), 0);
    for (int64_t i = 0; i <= inputs; ++i)
      for (int64_t c = 0; c < p.columns; ++c) wide[static_cast<size_t>(i * p.row + c)] = (random.below(9) - 4) / 4.0;
    narrow.assign(wide.begin(), wide.end());
    wide.resize(wide.size() + 16);
    narrow.resize(narrow.size() + 16);
    p.weight_float = narrow.data();
    p.bias_float = narrow.data() + inputs * p.row;
    p.weight_double = wide.data();
    p.bias_double = wide.data() + inputs * p.row;
  }
  long double weight(int64_t i, int64_t c) const { return wide[static_cast<size_t>(i * projection.row + c)]; }

  // y of row r of x, as kernels.h defines it.
  std::vector<long double> row_of(const Matrix& x, int64_t r) const {
    const Projection& p = projection;
    long double length = 0, down = p.shift;
    for (int64_t i = 0; i < p.inputs; ++i) length += static_cast<long double>(x(r, i)) * x(r, i);
    down += p.square * length;
    const long double unit = p.unit && length > 0 ? std::sqrt(length) : 1;
    std::vector<long double> z;
    for (int64_t c = 0; c < p.columns; ++c) {
      long double sum = wide.empty() ? x(r, c) / unit : weight(p.inputs, c);
      for (int64_t i = 0; i < p.inputs && !wide.empty(); ++i) sum += x(r, i) / unit * weight(i, c);
      z.push_back(sum);
    }
    for (int64_t c = 0; c < p.columns && p.mirrored; ++c) z.push_back(-z[static_cast<size_t>(c)]);
    for (long double& each : z) each -= down;
    return finished(z, r);
  }

  std::vector<long double> finished(const std::vector<long double>& z, int64_t r) const {
    const Projection& p = projection;
    const size_t count = z.size(), D = static_cast<size_t>(p.columns / p.times);  // of a spectrum
    std::vector<long double> y = z;
    switch (p.finish) {
      case Finish::none:
        break;
      case Finish::lifted:
        for (long double& each : y) each = (each > 0 ? each : 0) + p.amount;
        break;
      case Finish::softmax:
        normalise(y, 0, count);
        break;
      case Finish::halves:
        normalise(y, 0, count / 2);
        normalise(y, count / 2, count);
        break;
      case Finish::waves:
        for (long double& each : y) each = p.amount * std::sin(each);
        for (long double each : z) y.push_back(p.amount * std::cos(each));
        break;
      case Finish::neighbours: {
        std::vector<long double> both;
        for (long double each : z) both.push_back(each > 0 ? each : 0);
        for (long double each : z) both.push_back(each < 0 ? -each : 0);
        y.clear();
        const size_t ring = both.size();
        for (size_t j = 1; j <= static_cast<size_t>(p.times); ++j)
          for (size_t i = 0; i < ring; ++i) y.push_back(both[i] * both[(i + ring * j - j) % ring]);
        break;
      }
      case Finish::spectra:
      case Finish::squares: {
        // Each a spectrum of D real numbers: real parts of the frequencies 0 ... D/2, then imaginary ones.
        std::vector<std::complex<long double>> product(D / 2 + 1, 1);
        for (size_t g = 0; g < static_cast<size_t>(p.times); ++g)
          for (size_t f = 0; f <= D / 2; ++f) {
            const bool real = f == 0 || 2 * f == D;
            product[f] *= std::complex<long double>(z[g * D + f], real ? 0 : z[g * D + D / 2 + f]);
          }
        y.clear();
        for (auto each : product) y.push_back(each.real());
        for (size_t f = 1; 2 * f < D; ++f) y.push_back(product[f].imag());
        if (p.finish == Finish::spectra) break;
        const std::vector<long double> single = y;
        y.clear();
        for (size_t i = 0; i < D; ++i)
          for (size_t j = i; j < D; ++j) y.push_back(single[i] * single[j] * (i < j ? std::sqrt(2.0L) : 1));
        break;
      }
      case Finish::turned:
        for (long double& each : y) each *= wide_angles[static_cast<size_t>(2 * r)];
        for (long double each : z) y.push_back(each * wide_angles[static_cast<size_t>(2 * r + 1)]);
        break;
    }
    return y;
  }

  static void normalise(std::vector<long double>& z, size_t begin, size_t end) {
    long double top = -HUGE_VALL, sum = 0;
    for (size_t i = begin; i < end; ++i) top = std::max(top, z[i]);
    for (size_t i = begin; i < end; ++i) sum += std::exp(z[i] - top);
    for (size_t i = begin; i < end; ++i) z[i] -= top + std::log(sum);
  }

  Matrix of(const Matrix& x, DType dtype) const {
    Matrix y(dtype, x.rows, projection.features);
    for (int64_t r = 0; r < x.rows; ++r) {
      const std::vector<long double> row = row_of(x, r);
      for (int64_t c = 0; c < y.columns; ++c) put(dtype, y.at(r, c), static_cast<double>(row[static_cast<size_t>(c)]));
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
  for (Form form : {Form::parallel, Form::causal, Form::quadratic}) {
    Matrix out(v.dtype, q.rows, v.columns);
    OwnState state(1, layer);
    Problem p = plain::problem_of(form, layer, q, k, v, out);
    p.mask = {mask, 1};
    if (form != Form::quadratic) p.after = state.ref();
    CHECK(solve(p, set, 2));
    results.push_back(out);
    if (form == Form::quadratic) break;  // which leaves no state
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
    p.q.first = p.k.first = last;
    CHECK(solve(p, set, 1));
    results.push_back(row);
  }
  return results;
}

bool ties_away = false;  // see main

// What `put`, which takes ties to even, is given so that it takes this number away from 0 if it is a tie.
double beyond_tie(double x) { return std::nextafter(x, x < 0 ? -HUGE_VAL : HUGE_VAL); }

// Steps whose features have roundings of their own; the others give the same bits.
bool rounds(Finish finish) {
  return finish == Finish::softmax || finish == Finish::halves || finish == Finish::waves || finish == Finish::squares;
}

const char* name_of(Finish finish) {
  const char* names[] = {"none", "lifted", "softmax", "halves", "waves", "neighbours", "spectra", "squares", "turned"};
  return names[static_cast<int>(finish)];
}

// The one that such features go with.
Map map_of(Finish finish) { return finish == Finish::softmax || finish == Finish::halves ? Map::exp : Map::identity; }

void check_sizes(const Kernels& set, Finish finish, Map map, DType dtype, const Sizes& n, int turn) {
  plain::Random random(static_cast<uint64_t>(turn) * 977 + 5);
  const OwnProjection own(random, finish, n.n, n.inputs, n.columns, turn);
  OwnProjection own_q(random, finish, n.n, n.inputs, n.columns, turn);
  own_q.wide_angles = own.wide_angles;  // those of positions, which are the same
  own_q.narrow_angles = own.narrow_angles;
  const bool products = finish == Finish::neighbours || finish == Finish::spectra || finish == Finish::squares;
  const bool masked = turn % 4 == 3, far = turn % 5 == 4 && !products && !rounds(finish);
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
  layer.normalize = finish == Finish::squares || (turn % 7 != 6 && finish != Finish::waves);  // whose sums cancel
  layer.features = own.projection.features;
  layer.d_v = n.d_v;
  layer.eps = turn % 2 ? 1e-6 : 0;
  const uint8_t* kept = masked ? mask.data() : nullptr;

  Layer projected = layer;
  projected.projection = &own.projection;
  projected.query_projection = &own_q.projection;
  const std::vector<Matrix> got = run(set, projected, q, k, v, kept);

  // Half precision can't hold a projection: the other side runs in float32 and is rounded at the end.
  const bool half = dtype == DType::float16 || dtype == DType::bfloat16;
  layer.dtype = rounds(finish) ? DType::float64 : half ? DType::float32 : dtype;
  Matrix values(layer.dtype, n.n, n.d_v);
  for (int64_t r = 0; r < n.n; ++r)
    for (int64_t c = 0; c < n.d_v; ++c) put(layer.dtype, values.at(r, c), v(r, c));
  const std::vector<Matrix> wanted = run(set, layer, own_q.of(q, layer.dtype), own.of(k, layer.dtype), values, kept);

  for (size_t form = 0; form < got.size(); ++form)
    for (int64_t r = 0; r < got[form].rows; ++r)
      for (int64_t c = 0; c < n.d_v; ++c) {
        Matrix rounded(dtype, 1, 1);
        const double exact = wanted[form](r, c);
        put(dtype, rounded.at(0, 0), ties_away && dtype == DType::float16 ? beyond_tie(exact) : exact);
        const double a = got[form](r, c), b = rounded(0, 0);
        // |phi(q) . phi(k)| <= 1 for waves, and the map exp of the others gives averages; |v| <= 1.
        const double most = (layer.normalize ? 1 : static_cast<double>(n.n)), epsilon = half ? 1.0 / 256 : 0;
        const double slack = rounds(finish) ? most * (dtype == DType::float64 ? 1e-13 : 2e-5 + epsilon) : 0;
        const bool same = std::fabs(a - b) <= slack || a == b || (std::isnan(a) && std::isnan(b));
        CHECK(same, "%s %s %s %s: n %d, inputs %d, columns %d%s, d_v %d, form %d, row %d, column %d: %.9g, not %.9g",
              set.name, name_of(finish), plain::name_of(map), plain::name_of(dtype), int(n.n), int(n.inputs),
              int(n.columns), own.projection.mirrored ? " twice" : "", int(n.d_v), int(form), int(r), int(c), a, b);
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
  const Sizes small[] = {{1, 1, 1, 1},   {2, 3, 5, 7},   {31, 8, 16, 8}, {33, 17, 11, 3},
                         {65, 24, 2, 9}, {97, 5, 33, 2}, {130, 7, 4, 17}};
  for (auto set = usable_kernels(); *set; ++set) {
    int turn = 0;
    for (Map map : maps)
      for (DType dtype : dtypes)
        for (const Sizes& n : sizes) check_sizes(**set, Finish::none, map, dtype, n, ++turn);
    for (Finish finish : {Finish::lifted, Finish::softmax, Finish::halves, Finish::waves, Finish::neighbours,
                          Finish::spectra, Finish::squares, Finish::turned})
      for (Map map : {Map::identity, Map::relu, Map::exp})
        for (DType dtype : dtypes)
          for (const Sizes& n : small)
            if (!rounds(finish) || map == map_of(finish)) check_sizes(**set, finish, map, dtype, n, ++turn);
  }
  return check::report("test_projection");
}
