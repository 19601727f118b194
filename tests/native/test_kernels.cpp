// Every kernel of every table against plain loops in double: all dtypes and maps, sizes off every block, any strides,
// masks, and memory around the operands that must stay as it is.
#include <string>

#include "dispatch.h"
#include "plain.h"

#ifdef LINATTN_TEST_WIDE  // 64-byte vectors and 32 registers, as with AVX-512, on a machine that needn't have it
namespace linattn {
namespace wide {
extern const Kernels kTable;
}
}  // namespace linattn
#endif

using namespace linattn;
using plain::Matrix;
using plain::Random;

namespace {

constexpr DType kDTypes[] = {DType::float32, DType::float64, DType::float16, DType::bfloat16};
constexpr Map kMaps[] = {Map::identity, Map::elu1, Map::relu, Map::squared_relu, Map::exp, Map::softplus, Map::sigmoid};
constexpr int64_t kRows[] = {0,  1,  2,  5,  6,  7,  11,  12,  13,  31,  32,  33,  63,
                             64, 65, 67, 95, 96, 97, 127, 128, 129, 131, 255, 256, 257};
constexpr int64_t kWidths[] = {1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 24, 31, 32, 33, 47, 63, 64, 65, 67, 97, 129};

struct Case {
  Random random;
  Layer layer;
  std::string label;

  Case(const Kernels& kernels, const char* what, uint64_t seed) : random(seed) {
    layer.dtype = kDTypes[seed % 4];
    layer.map = kMaps[seed / 4 % 7];
    layer.normalize = random.below(4) > 0;
    layer.features = random.of(kWidths);
    layer.d_v = random.of(kWidths);
    layer.eps = random.below(2) ? 1e-6 : layer.map == Map::identity ? 8.0 * static_cast<double>(layer.features) : 0.0;
    if (layer.map == Map::identity && layer.eps > 1) layer.eps = 0.5;
    label = std::string(kernels.name) + " " + what + " seed " + std::to_string(seed) + " " +
            plain::name_of(layer.dtype) + " " + plain::name_of(layer.map) + " D " + std::to_string(layer.features) +
            " d_v " + std::to_string(layer.d_v) + (layer.normalize ? "" : " not normalized");
  }

  Matrix::Layout layout() { return static_cast<Matrix::Layout>(random.below(Matrix::layouts)); }

  // The constant of the bound. Where all rows are equal, all roundings of a block go the same way.
  double c(Matrix& k) { return k.view().row == 0 ? 16 : 2; }

  // Keys and queries that keep denominators away from 0: signed maps get positive numbers.
  void fill(Matrix& x) {
    if (layer.map == Map::identity)
      x.fill(random, 0.1, 1.5);
    else
      x.fill(random, -3, 3);
  }

  // Values that must not be seen.
  void spoil(Matrix& k, Matrix& v, const plain::Mask& mask) {
    const double bad[] = {NAN, INFINITY, -INFINITY, 1e30, -1e30};
    for (int64_t r = 0; r < k.rows(); ++r) {
      if (mask.keeps(r)) continue;
      for (int64_t c = 0; c < k.cols(); ++c) k.set(r, c, random.of(bad));
      for (int64_t c = 0; c < v.cols(); ++c) v.set(r, c, random.of(bad));
    }
  }
};

// The three forms, with the second pass that they may ask for.

void query(const Kernels& kernels, Layer layer, const plain::State& state, View q, OutView out, int64_t begin,
           int64_t end) {
  plain::Guarded scratch(kernels.scratch_bytes(layer)), prepared(kernels.prepared_bytes(layer));
  kernels.prepare(layer, state.ref(), prepared.data());
  if (!kernels.query(layer, prepared.data(), q, out, begin, end, scratch.data())) return;
  layer.repair = true;
  plain::Guarded wider(kernels.scratch_bytes(layer)), again(kernels.prepared_bytes(layer));
  kernels.prepare(layer, state.ref(), again.data());
  kernels.query(layer, again.data(), q, out, begin, end, wider.data());
}

void causal(const Kernels& kernels, Layer layer, plain::State& state, const Heads& heads, int64_t begin, int64_t end) {
  const plain::State before(state);
  plain::Guarded scratch(kernels.scratch_bytes(layer)), prepared(kernels.prepared_bytes(layer));
  if (!kernels.causal(layer, state.ref(), heads, begin, end, prepared.data(), scratch.data())) return;
  layer.repair = true;
  state.assign(before);
  plain::Guarded wider(kernels.scratch_bytes(layer)), again(kernels.prepared_bytes(layer));
  kernels.causal(layer, state.ref(), heads, begin, end, again.data(), wider.data());
}

void quadratic(const Kernels& kernels, Layer layer, View q, View k, View v, MaskView mask, int64_t n_k, OutView out,
               int64_t begin, int64_t end) {
  plain::Guarded scratch(kernels.scratch_bytes(layer));
  if (!kernels.quadratic(layer, q, k, v, mask, n_k, out, begin, end, scratch.data())) return;
  layer.repair = true;
  plain::Guarded wider(kernels.scratch_bytes(layer));
  kernels.quadratic(layer, q, k, v, mask, n_k, out, begin, end, wider.data());
}

// Broadcast rows share their memory: they can't differ in what is masked.
Matrix::Layout unless_same(Matrix::Layout layout, bool masked) {
  return masked && layout == Matrix::same_row ? Matrix::gap : layout;
}
Matrix::Layout writable(Matrix::Layout layout) { return layout == Matrix::same_row ? Matrix::dense : layout; }

// Sums made where queries read them give the bits of those that went through a state, or are declined. The spare state
// holds what mustn't be seen.
void test_sums(const Kernels& kernels, const Case& c, const Layer& layer, View k, View v, MaskView mask, int64_t n_k,
               Matrix& q) {
  plain::State state(layer);
  plain::Guarded spare((layer.features * layer.d_v + layer.features) * 8), scratch(kernels.scratch_bytes(layer));
  double* numbers = reinterpret_cast<double*>(spare.data());
  const StateRef spared{numbers, numbers + layer.features * layer.d_v, nullptr};
  plain::Guarded through(kernels.prepared_bytes(layer)), straight(kernels.prepared_bytes(layer));
  const bool taken = kernels.sums(layer, spared, k, v, mask, n_k, straight.data(), scratch.data());
  CHECK(taken == (layer.map != Map::exp && n_k <= 512), "%s", c.label.c_str());
  if (!taken) return;
  scratch.poison();
  kernels.absorb(layer, state.ref(), k, v, mask, 0, n_k, scratch.data());
  kernels.prepare(layer, state.ref(), through.data());
  Matrix one(layer.dtype, q.rows(), layer.d_v, Matrix::dense), two(layer.dtype, q.rows(), layer.d_v, Matrix::dense);
  scratch.poison();
  kernels.query(layer, through.data(), q.view(), one.out(), 0, q.rows(), scratch.data());
  scratch.poison();
  kernels.query(layer, straight.data(), q.view(), two.out(), 0, q.rows(), scratch.data());
  for (int64_t r = 0; r < q.rows(); ++r)
    for (int64_t i = 0; i < layer.d_v; ++i) {
      const double x = one.at(r, i), y = two.at(r, i);
      CHECK(x == y || (std::isnan(x) && std::isnan(y)), "%s: %g for %g", c.label.c_str(), y, x);
    }
}

void test_absorb_and_query(const Kernels& kernels, uint64_t seed) {
  Case c(kernels, "absorb, query", seed);
  const Layer& layer = c.layer;
  const int64_t n_k = c.random.of(kRows) + (seed % 5 == 0 ? 256 : 0), n_q = c.random.of(kRows);
  const int mask_kind = static_cast<int>(c.random.below(8));
  plain::Mask mask(c.random, n_k, mask_kind > 5 ? 0 : mask_kind);
  Matrix k(layer.dtype, n_k, layer.features, unless_same(c.layout(), mask.view.data));
  Matrix v(layer.dtype, n_k, layer.d_v, unless_same(c.layout(), mask.view.data));
  Matrix q(layer.dtype, n_q, layer.features, c.layout());
  Matrix out(layer.dtype, n_q, layer.d_v, writable(c.layout()));
  c.fill(k), c.fill(q), v.fill(c.random, -2, 2);
  c.spoil(k, v, mask);

  plain::Sums sums(layer.features, layer.d_v);
  for (int64_t r = 0; r < n_k; ++r)
    if (mask.keeps(r)) sums.add(layer.map, k, v, r);

  plain::State state(layer);
  plain::Guarded scratch(kernels.scratch_bytes(layer));
  const int64_t cut = n_k ? c.random.below(n_k + 1) : 0;  // two calls add up
  kernels.absorb(layer, state.ref(), k.view(), v.view(), mask.view, 0, cut, scratch.data());
  scratch.poison();
  kernels.absorb(layer, state.ref(), k.view(), v.view(), mask.view, cut, n_k, scratch.data());
  CHECK(state.equals(sums, c.c(k)), "%s", c.label.c_str());

  const int64_t half = n_q ? c.random.below(n_q + 1) : 0;
  query(kernels, layer, state, q.view(), out.out(), half, n_q);
  for (int64_t r = 0; r < half; ++r)
    for (int64_t i = 0; i < layer.d_v; ++i) CHECK(std::isnan(out.at(r, i)), "%s", c.label.c_str());
  query(kernels, layer, state, q.view(), out.out(), 0, half);
  for (int64_t r = 0; r < n_q; ++r)
    CHECK(plain::right(layer, out, r, plain::Row(layer, q, r, sums), c.c(k)), "%s", c.label.c_str());
  CHECK(out.gaps_intact(), "%s", c.label.c_str());
  test_sums(kernels, c, layer, k.view(), v.view(), mask.view, n_k, q);
}

void test_causal(const Kernels& kernels, uint64_t seed) {
  Case c(kernels, "causal", seed);
  const Layer& layer = c.layer;
  const int64_t before = c.random.below(3) ? 0 : c.random.of(kRows), n = before + c.random.of(kRows);
  const int64_t groups = 1 + c.random.below(3);
  const int mask_kind = static_cast<int>(c.random.below(8));
  plain::Mask mask(c.random, n, mask_kind > 5 ? 0 : mask_kind);
  Matrix k(layer.dtype, n, layer.features, unless_same(c.layout(), mask.view.data));
  Matrix v(layer.dtype, n, layer.d_v, unless_same(c.layout(), mask.view.data));
  c.fill(k), v.fill(c.random, -2, 2);
  c.spoil(k, v, mask);
  std::vector<Matrix*> q, out;
  std::vector<View> views;
  std::vector<OutView> outs;
  for (int64_t g = 0; g < groups; ++g) {
    q.push_back(new Matrix(layer.dtype, n, layer.features, c.layout()));
    out.push_back(new Matrix(layer.dtype, n, layer.d_v, writable(c.layout())));
    c.fill(*q.back());
    views.push_back(q.back()->view());
    outs.push_back(out.back()->out());
  }

  plain::State state(layer);
  plain::Guarded scratch(kernels.scratch_bytes(layer));
  kernels.absorb(layer, state.ref(), k.view(), v.view(), mask.view, 0, before, scratch.data());
  const Heads heads{views.data(), outs.data(), groups, k.view(), v.view(), mask.view};
  causal(kernels, layer, state, heads, before, n);

  plain::Sums sums(layer.features, layer.d_v);
  for (int64_t r = 0; r < n; ++r) {
    if (mask.keeps(r)) sums.add(layer.map, k, v, r);
    for (size_t g = 0; g < q.size(); ++g) {
      if (r < before)
        CHECK(std::isnan(out[g]->at(r, 0)), "%s", c.label.c_str());
      else
        CHECK(plain::right(layer, *out[g], r, plain::Row(layer, *q[g], r, sums), c.c(k)), "%s", c.label.c_str());
    }
  }
  CHECK(state.equals(sums, c.c(k)), "%s", c.label.c_str());
  for (size_t g = 0; g < q.size(); ++g) {
    CHECK(out[g]->gaps_intact(), "%s", c.label.c_str());
    delete q[g];
    delete out[g];
  }
}

// Rows up to t keep their bits whatever stands behind them.
void test_prefix(const Kernels& kernels, uint64_t seed) {
  Case c(kernels, "prefix", seed);
  const Layer& layer = c.layer;
  const int64_t n = 2 + c.random.of(kRows), t = c.random.below(n - 1);
  Matrix k(layer.dtype, n, layer.features, Matrix::dense), v(layer.dtype, n, layer.d_v, Matrix::dense);
  Matrix q(layer.dtype, n, layer.features, Matrix::dense), once(layer.dtype, n, layer.d_v, Matrix::dense);
  Matrix again(layer.dtype, n, layer.d_v, Matrix::dense);
  c.fill(k), c.fill(q), v.fill(c.random, -2, 2);
  for (Matrix* out : {&once, &again}) {
    plain::State state(layer);
    const View view = q.view();
    const OutView target = out->out();
    const Heads heads{&view, &target, 1, k.view(), v.view(), {nullptr, 0}};
    causal(kernels, layer, state, heads, 0, n);
    const double bad[] = {NAN, INFINITY, -INFINITY, 60000, -60000, 0};
    for (int64_t r = t + 1; r < n; ++r) {
      for (int64_t i = 0; i < layer.features; ++i) k.set(r, i, c.random.of(bad)), q.set(r, i, c.random.of(bad));
      for (int64_t i = 0; i < layer.d_v; ++i) v.set(r, i, c.random.of(bad));
    }
  }
  const size_t bytes = static_cast<size_t>((t + 1) * layer.d_v * plain::size_of(layer.dtype));
  CHECK(std::memcmp(once.view().data, again.view().data, bytes) == 0, "%s t %lld", c.label.c_str(),
        static_cast<long long>(t));
}

void test_quadratic(const Kernels& kernels, uint64_t seed) {
  Case c(kernels, "quadratic", seed);
  const Layer& layer = c.layer;
  const int64_t n_k = c.random.of(kRows), n_q = c.random.of(kRows);
  const int mask_kind = static_cast<int>(c.random.below(8));
  plain::Mask mask(c.random, n_k, mask_kind > 5 ? 0 : mask_kind);
  Matrix k(layer.dtype, n_k, layer.features, unless_same(c.layout(), mask.view.data));
  Matrix v(layer.dtype, n_k, layer.d_v, unless_same(c.layout(), mask.view.data));
  Matrix q(layer.dtype, n_q, layer.features, c.layout());
  Matrix out(layer.dtype, n_q, layer.d_v, writable(c.layout()));
  c.fill(k), c.fill(q), v.fill(c.random, -2, 2);
  c.spoil(k, v, mask);
  const int64_t half = n_q ? c.random.below(n_q + 1) : 0;
  quadratic(kernels, layer, q.view(), k.view(), v.view(), mask.view, n_k, out.out(), 0, half);
  quadratic(kernels, layer, q.view(), k.view(), v.view(), mask.view, n_k, out.out(), half, n_q);
  plain::Sums sums(layer.features, layer.d_v);
  for (int64_t r = 0; r < n_k; ++r)
    if (mask.keeps(r)) sums.add(layer.map, k, v, r);
  for (int64_t r = 0; r < n_q; ++r)
    CHECK(plain::right(layer, out, r, plain::Row(layer, q, r, sums), c.c(k)), "%s", c.label.c_str());
  CHECK(out.gaps_intact(), "%s", c.label.c_str());
}

void test_step(const Kernels& kernels, uint64_t seed) {
  Case c(kernels, "step", seed);
  const Layer& layer = c.layer;
  const int64_t n = 1 + c.random.below(9), groups = 1 + c.random.below(3);
  Matrix k(layer.dtype, n, layer.features, c.layout()), v(layer.dtype, n, layer.d_v, c.layout());
  c.fill(k), v.fill(c.random, -2, 2);
  plain::State state(layer);
  plain::Sums sums(layer.features, layer.d_v);
  plain::Guarded scratch(kernels.scratch_bytes(layer));
  for (int64_t r = 0; r < n; ++r) {
    std::vector<Matrix*> q, out;
    std::vector<View> views;
    std::vector<OutView> outs;
    for (int64_t g = 0; g < groups; ++g) {
      q.push_back(new Matrix(layer.dtype, 1, layer.features, c.layout()));
      out.push_back(new Matrix(layer.dtype, 1, layer.d_v, c.layout()));
      c.fill(*q.back());
      views.push_back(q.back()->view());
      outs.push_back(out.back()->out());
    }
    View k_row = k.view(), v_row = v.view();
    k_row.data += r * k_row.row;
    v_row.data += r * v_row.row;
    const Heads heads{views.data(), outs.data(), groups, k_row, v_row, {nullptr, 0}};
    scratch.poison();
    kernels.step(layer, state.ref(), heads, scratch.data());
    sums.add(layer.map, k, v, r);
    for (size_t g = 0; g < q.size(); ++g) {
      CHECK(plain::right(layer, *out[g], 0, plain::Row(layer, *q[g], 0, sums), c.c(k)), "%s", c.label.c_str());
      CHECK(out[g]->gaps_intact(), "%s", c.label.c_str());
      delete q[g];
      delete out[g];
    }
  }
  CHECK(state.equals(sums, c.c(k)), "%s", c.label.c_str());
}

// exp of numbers whose exponentials double itself can hold and float cannot, rising and falling along the sequence.
void test_far_exponentials(const Kernels& kernels, uint64_t seed) {
  Case c(kernels, "far exponentials", 4 * (7 * seed + 4) + seed % 4);
  Layer layer = c.layer;
  layer.map = Map::exp;
  layer.normalize = true;
  layer.eps = 0;
  const int64_t n = 1 + c.random.of(kRows);
  Matrix k(layer.dtype, n, layer.features, c.layout()), v(layer.dtype, n, layer.d_v, c.layout());
  Matrix q(layer.dtype, n, layer.features, c.layout()), out(layer.dtype, n, layer.d_v, writable(c.layout()));
  v.fill(c.random, -2, 2);
  for (int64_t r = 0; r < n; ++r)
    for (int64_t d = 0; d < layer.features; ++d) {
      k.set(r, d, c.random.uniform(-150, 150));
      q.set(r, d, c.random.uniform(-150, 150));
    }
  plain::State state(layer);
  const View view = q.view();
  const OutView target = out.out();
  const Heads heads{&view, &target, 1, k.view(), v.view(), {nullptr, 0}};
  causal(kernels, layer, state, heads, 0, n);
  plain::Sums sums(layer.features, layer.d_v);
  for (int64_t r = 0; r < n; ++r) {
    sums.add(layer.map, k, v, r);
    CHECK(plain::right(layer, out, r, plain::Row(layer, q, r, sums), c.c(k)), "%s", c.label.c_str());
  }
  Matrix two(layer.dtype, n, layer.d_v, Matrix::dense), one(layer.dtype, n, layer.d_v, Matrix::dense);
  quadratic(kernels, layer, q.view(), k.view(), v.view(), {nullptr, 0}, n, two.out(), 0, n);
  query(kernels, layer, state, q.view(), one.out(), 0, n);
  for (int64_t r = 0; r < n; ++r) {
    CHECK(plain::right(layer, two, r, plain::Row(layer, q, r, sums), c.c(k)), "%s", c.label.c_str());
    CHECK(plain::right(layer, one, r, plain::Row(layer, q, r, sums), c.c(k)), "%s", c.label.c_str());
  }
}

// Features and values beyond the range of float, and so small that their products vanish in it. Each row is of one
// size, so that a right answer exists in every dtype that has the inputs.
void test_far_numbers(const Kernels& kernels, uint64_t seed) {
  Case c(kernels, "far numbers", seed);
  Layer layer = c.layer;
  layer.normalize = true;
  layer.eps = 0;
  if (layer.dtype == DType::float16) layer.dtype = DType::bfloat16;
  const double most = layer.dtype == DType::float64 ? 300 : 34;
  const int64_t n = 1 + c.random.of(kRows);
  Matrix k(layer.dtype, n, layer.features, Matrix::dense), v(layer.dtype, n, layer.d_v, c.layout());
  Matrix q(layer.dtype, n, layer.features, c.layout()), out(layer.dtype, n, layer.d_v, writable(c.layout()));
  const double small = c.random.below(3) ? 1 : 1e-20;  // so that a denominator overflows alone
  v.fill(c.random, small, 2 * small);
  const bool grows = layer.map != Map::sigmoid && layer.map != Map::exp,
             dies = layer.map != Map::relu && layer.map != Map::identity && layer.map != Map::squared_relu;
  const double power = (layer.dtype == DType::float64 ? 0.45 : 0.9) / (layer.map == Map::squared_relu ? 2 : 1);
  for (Matrix* x : {&k, &q})
    for (int64_t r = 0; r < n; ++r) {
      const double size = c.random.uniform(0, 1);
      for (int64_t d = 0; d < layer.features; ++d) {
        double number = std::pow(10, (grows ? most : 0) * power * size * c.random.uniform(0.99, 1));
        if (dies && c.random.below(2))
          number = -(layer.dtype == DType::float64 ? 340 : 85) * size * c.random.uniform(0.9, 1);
        x->set(r, d, number);
      }
    }
  plain::State state(layer);
  const View view = q.view();
  const OutView target = out.out();
  const Heads heads{&view, &target, 1, k.view(), v.view(), {nullptr, 0}};
  causal(kernels, layer, state, heads, 0, n);
  plain::Sums sums(layer.features, layer.d_v);
  for (int64_t r = 0; r < n; ++r) {
    sums.add(layer.map, k, v, r);
    CHECK(plain::right(layer, out, r, plain::Row(layer, q, r, sums), c.c(k)), "%s", c.label.c_str());
  }
  Matrix two(layer.dtype, n, layer.d_v, Matrix::dense), one(layer.dtype, n, layer.d_v, Matrix::dense);
  quadratic(kernels, layer, q.view(), k.view(), v.view(), {nullptr, 0}, n, two.out(), 0, n);
  query(kernels, layer, state, q.view(), one.out(), 0, n);
  for (int64_t r = 0; r < n; ++r) {
    CHECK(plain::right(layer, two, r, plain::Row(layer, q, r, sums), c.c(k)), "%s quadratic", c.label.c_str());
    CHECK(plain::right(layer, one, r, plain::Row(layer, q, r, sums), c.c(k)), "%s linear", c.label.c_str());
  }
  test_sums(kernels, c, layer, k.view(), v.view(), {nullptr, 0}, n, q);
}

void test_set(const Kernels& kernels, uint64_t cases) {
  for (uint64_t seed = 0; seed < cases; ++seed) {
    test_absorb_and_query(kernels, seed);
    test_causal(kernels, seed);
    test_prefix(kernels, seed);
    test_quadratic(kernels, seed);
    test_step(kernels, seed);
    test_far_numbers(kernels, seed);
    if (seed % 7 == 0) test_far_exponentials(kernels, seed / 7);
  }
  std::printf("%s: done, %ld checks so far\n", kernels.name, check::checks);
}

}  // namespace

// Argument: how many random cases a set gets (each of 28 in a row has another dtype and map).
int main(int argc, char** argv) {
  const uint64_t cases = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 168;
  for (auto set = usable_kernels(); *set; ++set) test_set(**set, cases);
#ifdef LINATTN_TEST_WIDE
  bool runs = std::string((*usable_kernels())->name) != "avx512";  // which has those shapes itself
#if defined(__x86_64__)
  runs = runs && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  if (runs) test_set(wide::kTable, cases);
#endif
  return check::report("test_kernels");
}
