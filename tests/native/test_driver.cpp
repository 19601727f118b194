// What drives the kernels, for every instruction set of this machine, against the definition in double: forms, maps,
// dtypes, memory layouts, masks, packed sequences, grouped heads, states, threads. Every buffer ends where its last
// element does, so that a sanitizer sees the first byte read beyond it.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "dispatch.h"
#include "driver.h"
#include "plain.h"

using namespace linattn;
using plain::get;
using plain::OwnState;
using plain::phi;
using plain::put;
using plain::size_of;

namespace {

const Map kMaps[] = {Map::identity, Map::elu1, Map::relu, Map::squared_relu, Map::exp, Map::softplus, Map::sigmoid};
const DType kDTypes[] = {DType::float32, DType::float64, DType::float16, DType::bfloat16};
const double kNaN = std::numeric_limits<double>::quiet_NaN();

// ---- numbers ----------------------------------------------------------------------------------------------------

// The rounding error of one operation in the working precision, and of one store.
double working_epsilon(DType t) { return plain::epsilon(t) / 2; }
double store_epsilon(DType t) { return plain::rounding(t); }
// Half of the smallest positive number.
double store_least(DType t) { return t == DType::float16 ? 0x1p-25 : t == DType::bfloat16 ? 0x1p-134 : 0; }

// How much larger than its argument's own rounding phi's relative error may be: exp of x is only known to |x| epsilon.
double condition(Map map, double largest) { return map == Map::exp ? 1 + largest : 4; }

// Multiples of 1/32 in [-2, 2]: exact in all four dtypes.
struct Random {
  uint64_t state;
  double next() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (static_cast<int>(state >> 40) % 65 + 65) % 65 / 16.0 - 2;
  }
};

// ---- matrices ---------------------------------------------------------------------------------------------------

enum class Layout { contiguous, spread, reversed, transposed, misaligned, broadcast };
const Layout kLayouts[] = {Layout::contiguous, Layout::spread,     Layout::reversed,
                           Layout::transposed, Layout::misaligned, Layout::broadcast};

// (rows, columns) numbers, and memory that holds them and nothing else.
class Matrix {
 public:
  Matrix(DType dtype, int64_t row_count, int64_t column_count, Layout layout,
         const std::function<double(int64_t, int64_t)>& fill)
      : dtype_(dtype), rows(row_count), columns(column_count) {
    const int64_t item = size_of(dtype);
    int64_t lead = layout == Layout::misaligned ? 1 : 0, first = lead;
    row = columns * item;
    column = item;
    if (layout == Layout::spread) {
      column = 2 * item;
      row = (2 * columns + 3) * item;
    } else if (layout == Layout::reversed) {
      first = rows > 0 ? (rows - 1) * row : 0;
      row = -row;
    } else if (layout == Layout::transposed) {
      row = item;
      column = (rows > 0 ? rows : 1) * item;
    } else if (layout == Layout::broadcast) {
      row = 0;
    }
    const int64_t last = rows == 0 ? 0 : first + (row > 0 ? (rows - 1) * row : 0) + (columns - 1) * column + item;
    memory_ = static_cast<char*>(std::malloc(static_cast<size_t>(last > 0 ? last : 1)));
    std::memset(memory_, 0xff, static_cast<size_t>(last));  // NaN between the elements
    data = memory_ + first;
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) put(dtype, data + i * row + j * column, fill(row ? i : 0, j));
  }
  Matrix(const Matrix&) = delete;
  Matrix& operator=(const Matrix&) = delete;
  ~Matrix() { std::free(memory_); }

  double operator()(int64_t i, int64_t j) const { return get(dtype_, data + i * row + j * column); }
  View view() const { return {data, row, column}; }
  OutView out() const { return {data, row, column}; }

 private:
  DType dtype_;
  char* memory_;

 public:
  int64_t rows, columns, row, column;
  char* data;
};

double poison(int64_t, int64_t) { return kNaN; }

// ---- the definition ---------------------------------------------------------------------------------------------

struct Expected {
  double value;
  double magnitude;  // the same with |phi| and |v|: what rounding is relative to
};

// phi(q), phi(k), v: (rows, columns) each.
struct Operands {
  Layer layer;
  int64_t features, d_v;
  std::vector<double> q, k, v;

  Operands(const Layer& its_layer, const Matrix& from_q, const Matrix& from_k, const Matrix& from_v)
      : layer(its_layer), features(from_k.columns), d_v(from_v.columns) {
    read(from_q, layer.map, q);
    read(from_k, layer.map, k);
    read(from_v, Map::identity, v);
  }

  // Row i of the output over the keys in [begin, end) that the mask keeps: (d_v).
  void definition(const uint8_t* mask, int64_t i, int64_t begin, int64_t end, std::vector<Expected>& row) const {
    double denominator = layer.eps, size = layer.eps;
    row.assign(static_cast<size_t>(d_v), {0, 0});
    const double* q_row = q.data() + i * features;
    for (int64_t j = begin; j < end; ++j) {
      if (mask && !mask[j]) continue;
      const double* k_row = k.data() + j * features;
      const double* v_row = v.data() + j * d_v;
      double weight = 0, weight_size = 0;
      for (int64_t d = 0; d < features; ++d) {
        weight += q_row[d] * k_row[d];
        weight_size += std::fabs(q_row[d] * k_row[d]);
      }
      denominator += weight;
      size += weight_size;
      for (int64_t c = 0; c < d_v; ++c) {
        row[static_cast<size_t>(c)].value += weight * v_row[c];
        row[static_cast<size_t>(c)].magnitude += weight_size * std::fabs(v_row[c]);
      }
    }
    if (!layer.normalize) return;
    for (Expected& x : row) {
      if (denominator == 0) {
        x = {0, 0};
        continue;
      }
      x.value /= denominator;
      x.magnitude = x.magnitude / std::fabs(denominator) + std::fabs(x.value) * size / std::fabs(denominator);
    }
  }

 private:
  static void read(const Matrix& from, Map map, std::vector<double>& to) {
    to.reserve(static_cast<size_t>(from.rows * from.columns));
    for (int64_t i = 0; i < from.rows; ++i)
      for (int64_t j = 0; j < from.columns; ++j) to.push_back(phi(map, from(i, j)));
  }
};

double worst = 0;  // of all, in units of the bound

bool close(DType dtype, Map map, double found, Expected expected, double largest = 2) {
  const double bound = 24 * condition(map, largest) * working_epsilon(dtype) * expected.magnitude +
                       2 * store_epsilon(dtype) * std::fabs(expected.value) + store_least(dtype);
  const double error = std::fabs(found - expected.value);
  if (bound > 0 && error / bound > worst) worst = error / bound;
  return error <= bound;
}

// ---- one set ----------------------------------------------------------------------------------------------------

struct Sizes {
  int64_t n_q, n_k, features, d_v;
};
const Sizes kSizes[] = {{1, 1, 1, 1},      {2, 3, 3, 5},      {13, 7, 17, 8},     {64, 65, 16, 31},
                        {67, 131, 65, 33}, {128, 63, 64, 64}, {131, 257, 7, 129}, {5, 300, 67, 3}};

const char* name_of(Form form) {
  static const char* const names[] = {"parallel", "causal", "quadratic", "absorb", "query", "step"};
  return names[static_cast<int>(form)];
}

Problem problem_of(Form form, DType dtype, Map map, const Matrix& q, const Matrix& k, const Matrix& v,
                   const Matrix& out) {
  const Layer layer = {dtype, map, map != Map::identity, q.columns, v.columns, map == Map::exp ? 0 : 1e-6};
  return plain::problem_of(form, layer, q, k, v, out);
}

void check_rows(const char* what, const Kernels& set, const Problem& p, const Matrix& q, const Matrix& k,
                const Matrix& v, const Matrix& out, const uint8_t* mask, bool causal) {
  const Operands operands(p.layer, q, k, v);
  std::vector<Expected> row;
  for (int64_t i = 0; i < q.rows; ++i) {
    operands.definition(mask, i, 0, causal ? i + 1 : k.rows, row);
    for (int64_t c = 0; c < v.columns; ++c) {
      const bool good = close(p.layer.dtype, p.layer.map, out(i, c), row[static_cast<size_t>(c)]);
      CHECK(good);
      if (!good) {
        std::printf("  %s %s: map %d, dtype %d, n_q %d, n_k %d, D %d, d_v %d, row %d, column %d: %.17g, not %.17g\n",
                    set.name, what, int(p.layer.map), int(p.layer.dtype), int(q.rows), int(k.rows), int(q.columns),
                    int(v.columns), int(i), int(c), out(i, c), row[static_cast<size_t>(c)].value);
        return;
      }
    }
  }
}

// All forms on one choice of map, dtype and sizes. The layouts and the mask vary with `turn`.
void check_forms(const Kernels& set, Map map, DType dtype, Sizes n, int turn) {
  Random random{static_cast<uint64_t>(turn) + 17};
  auto some = [&](int64_t, int64_t) { return random.next(); };
  const Layout in = kLayouts[turn % 6];
  const Layout result = kLayouts[(turn / 6) % 5];  // broadcast can't be written
  const bool masked = turn % 3 == 1;
  std::vector<uint8_t> mask(static_cast<size_t>(n.n_k), 1);
  if (masked)
    for (auto& m : mask) m = random.next() > -0.5;
  // What a mask hides is NaN: it must not leak.
  auto hidden = [&](int64_t j, int64_t) {
    return masked && in != Layout::broadcast && !mask[static_cast<size_t>(j)] ? kNaN : random.next();
  };
  const MaskView mask_view{masked ? mask.data() : nullptr, 1};
  const uint8_t* kept = masked ? mask.data() : nullptr;

  const Matrix q(dtype, n.n_q, n.features, in, some);
  const Matrix k(dtype, n.n_k, n.features, in, hidden), v(dtype, n.n_k, n.d_v, in, hidden);
  for (Form form : {Form::parallel, Form::quadratic}) {
    const Matrix out(dtype, n.n_q, n.d_v, result, poison);
    Problem p = problem_of(form, dtype, map, q, k, v, out);
    p.mask = mask_view;
    CHECK(solve(p, set, 1 + turn % 2));
    check_rows(name_of(form), set, p, q, k, v, out, kept, false);
  }

  // The keys in two parts, then queries of the state.
  {
    const Matrix out(dtype, n.n_q, n.d_v, result, poison);
    Problem p = problem_of(Form::absorb, dtype, map, q, k, v, out);
    OwnState state(1, p.layer);
    p.before = p.after = state.ref();
    const int64_t first = n.n_k / 3;
    p.mask = mask_view;
    p.n_k = first;
    CHECK(solve(p, set, 1));
    p.k.data += first * p.k.row;
    p.v.data += first * p.v.row;
    if (masked) p.mask.data += first;
    p.n_k = n.n_k - first;
    CHECK(solve(p, set, 1));
    p.form = Form::query;
    p.after = {};
    CHECK(solve(p, set, 1));
    check_rows("absorb and query", set, p, q, k, v, out, kept, false);
  }

  // Causal at once; then half of it, continued step by step.
  const Matrix q2(dtype, n.n_k, n.features, in, some);
  {
    const Matrix out(dtype, n.n_k, n.d_v, result, poison);
    Problem p = problem_of(Form::causal, dtype, map, q2, k, v, out);
    p.mask = mask_view;
    CHECK(solve(p, set, 1 + turn % 2));
    check_rows("causal", set, p, q2, k, v, out, kept, true);
  }
  if (!masked) {
    const Matrix out(dtype, n.n_k, n.d_v, result, poison);
    Problem p = problem_of(Form::causal, dtype, map, q2, k, v, out);
    OwnState state(1, p.layer);
    p.after = state.ref();
    const int64_t first = n.n_k / 2;
    p.n_q = p.n_k = first;
    CHECK(solve(p, set, 1));
    p.form = Form::step;
    p.before = p.after;
    p.n_q = p.n_k = 1;
    for (int64_t i = first; i < n.n_k; ++i) {
      p.q.data = q2.data + i * q2.row;
      p.k.data = k.data + i * k.row;
      p.v.data = v.data + i * v.row;
      p.out.data = out.data + i * out.row;
      CHECK(solve(p, set, 1));
    }
    check_rows("prefill and steps", set, p, q2, k, v, out, nullptr, true);
  }
}

// Two key heads, three query heads to each, packed sequences with an empty one; every form that takes them.
void check_batches(const Kernels& set, Map map, DType dtype) {
  const int64_t heads = 2, group = 3, n = 71, features = 19, d_v = 13, item = size_of(dtype);
  const int64_t starts[] = {0, 0, 5, 5, 42, n};
  Random random{5};
  auto some = [&](int64_t, int64_t) { return random.next(); };
  const Matrix q(dtype, heads * group * n, features, Layout::contiguous, some);
  const Matrix k(dtype, heads * n, features, Layout::contiguous, some),
      v(dtype, heads * n, d_v, Layout::contiguous, some);
  for (Form form : {Form::parallel, Form::causal, Form::quadratic})
    for (bool packed : {false, true})
      for (int threads : {1, 3}) {
        const Matrix out(dtype, heads * group * n, d_v, Layout::contiguous, poison);
        Problem p = problem_of(form, dtype, map, q, k, v, out);
        p.n_q = p.n_k = n;
        if (packed) {
          p.cu_seqlens = starts;
          p.sequences = 5;
        }
        p.axis_count = 2;
        p.axes[0] = {heads,          true, group * n * features * item, n * features * item,
                     n * d_v * item, 0,    group * n * d_v * item,      1};
        p.axes[1] = {group, false, n * features * item, 0, 0, 0, n * d_v * item, 0};
        CHECK(solve(p, set, threads));
        const Operands operands(p.layer, q, k, v);
        std::vector<Expected> row;
        bool good = true;
        for (int64_t h = 0; h < heads * group && good; ++h)
          for (int s = packed ? 0 : 4; s < 5; ++s)
            for (int64_t i = packed ? starts[s] : 0; i < starts[s + 1]; ++i) {
              const int64_t from = h / group * n + (packed ? starts[s] : 0);
              const int64_t to = h / group * n + (form == Form::causal ? i + 1 : packed ? starts[s + 1] : n);
              operands.definition(nullptr, h * n + i, from, to, row);
              for (int64_t c = 0; c < d_v; ++c)
                good = good && close(dtype, map, out(h * n + i, c), row[static_cast<size_t>(c)]);
            }
        CHECK(good);
        if (!good)
          std::printf("  %s: heads, %s, map %d, dtype %d, packed %d, %d threads\n", set.name, name_of(form), int(map),
                      int(dtype), packed, threads);
      }
}

// ---- what must keep its bits, and what is easily lost ---------------------------------------------------------------

// Rows before the last keep their bits whatever stands in it.
void check_prefix(const Kernels& set, Map map, DType dtype) {
  const int64_t features = 17, d_v = 11;
  for (int64_t n : {2, 64, 65, 130, 400}) {
    std::vector<std::vector<char>> results;
    for (double last : {0.5, 1.5 * 0x1p9, kNaN}) {
      Random random{9};
      auto some = [&](int64_t i, int64_t) {
        const double x = random.next();
        return i == n - 1 ? last : x;
      };
      const Matrix q(dtype, n, features, Layout::contiguous, some), k(dtype, n, features, Layout::contiguous, some);
      const Matrix v(dtype, n, d_v, Layout::contiguous, some), out(dtype, n, d_v, Layout::contiguous, poison);
      CHECK(solve(problem_of(Form::causal, dtype, map, q, k, v, out), set, 1));
      results.emplace_back(out.data, out.data + (n - 1) * out.row);
    }
    CHECK(results[0] == results[1]);
    CHECK(results[0] == results[2]);
  }
}

// The same bits at every call with as many threads, whichever thread takes which piece.
void check_thread_bits(const Kernels& set, Form form, Map map) {
  const int64_t n = 3001, features = 37, d_v = 41;
  Random random{3};
  auto some = [&](int64_t, int64_t) { return random.next(); };
  const Matrix q(DType::float32, n, features, Layout::contiguous, some);
  const Matrix k(DType::float32, n, features, Layout::contiguous, some);
  const Matrix v(DType::float32, n, d_v, Layout::contiguous, some);
  for (int threads : {1, 2, 3, 7}) {
    std::vector<char> first;
    for (int call = 0; call < 4; ++call) {
      const Matrix out(DType::float32, n, d_v, Layout::contiguous, poison);
      CHECK(solve(problem_of(form, DType::float32, map, q, k, v, out), set, threads));
      std::vector<char> bytes(out.data, out.data + n * out.row);
      if (first.empty()) first = bytes;
      CHECK(bytes == first);
    }
  }
}

// exp of keys and queries far beyond the range of the working precision, of both signs in one row: the signs change
// from row to row, or every 256 rows, so that the sums of whole pieces differ by e^200.
void check_huge_exponents(const Kernels& set, DType dtype, int64_t n, int64_t period) {
  const int64_t features = 3, d_v = 5;
  Random random{4};
  auto near = [&](int64_t, int64_t) { return random.next(); };
  auto far = [&](int64_t i, int64_t d) {
    const double x = 100 + 2 * std::round(random.next());  // exact in bfloat16
    return (i / period + d) % 2 ? x : -x;
  };
  const Matrix q(dtype, n, features, Layout::contiguous, far), k(dtype, n, features, Layout::contiguous, far);
  const Matrix v(dtype, n, d_v, Layout::contiguous, near);
  for (Form form : {Form::parallel, Form::causal, Form::quadratic})
    for (bool with_state : {false, true}) {
      if (with_state && form == Form::quadratic) continue;
      const Matrix out(dtype, n, d_v, Layout::contiguous, poison);
      Problem p = problem_of(form, dtype, Map::exp, q, k, v, out);
      OwnState state(1, p.layer);
      if (with_state) p.after = state.ref();
      CHECK(solve(p, set, 1));
      const Operands operands(p.layer, q, k, v);
      std::vector<Expected> row;
      bool good = true;
      for (int64_t i = 0; i < n; ++i) {
        operands.definition(nullptr, i, 0, form == Form::causal ? i + 1 : n, row);
        for (int64_t c = 0; c < d_v; ++c)
          good = good && close(dtype, Map::exp, out(i, c), row[static_cast<size_t>(c)], 208);
      }
      CHECK(good);
      if (with_state) {  // its sums are those of the definition
        for (int64_t d = 0; d < features; ++d) {
          double sum = 0;
          for (int64_t j = 0; j < n; ++j) sum += std::exp(k(j, d));
          const double found = std::ldexp(state.k_sum[static_cast<size_t>(d)], state.log_scale[static_cast<size_t>(d)]);
          CHECK(std::fabs(found - sum) <= 24 * 104 * working_epsilon(dtype) * sum);
        }
      }
      if (!good)
        std::printf("  %s: huge exponents, %s, dtype %d, n %d, state %d\n", set.name, name_of(form), int(dtype), int(n),
                    with_state);
    }
}

// No keys, only masked keys, or features that are all 0: the denominator is 0 and so is the output.
void check_nothing_to_attend(const Kernels& set, DType dtype) {
  const int64_t n = 9, features = 5, d_v = 3;
  auto negative = [](int64_t i, int64_t) { return -1.0 - static_cast<double>(i % 2); };
  const Matrix x(dtype, n, features, Layout::contiguous, negative), v(dtype, n, d_v, Layout::contiguous, negative);
  const std::vector<uint8_t> none(static_cast<size_t>(n), 0);
  for (Form form : {Form::parallel, Form::causal, Form::quadratic})
    for (int way : {0, 1, 2}) {
      if (way == 0 && form == Form::causal) continue;
      const Matrix out(dtype, n, d_v, Layout::contiguous, poison);
      Problem p = problem_of(form, dtype, way == 2 ? Map::relu : Map::exp, x, x, v, out);
      p.layer.eps = 0;
      if (way == 0) p.n_k = 0;
      if (way == 1) p.mask = {none.data(), 1};
      CHECK(solve(p, set, 1));
      bool zero = true;
      for (int64_t i = 0; i < n; ++i)
        for (int64_t c = 0; c < d_v; ++c) zero = zero && out(i, c) == 0;
      CHECK(zero);
      if (!zero)
        std::printf("  %s: nothing to attend, %s, way %d, dtype %d\n", set.name, name_of(form), way, int(dtype));
    }
}

}  // namespace

// Argument: of how many cases one is run.
int main(int argc, char** argv) {
  if (argc > 1) check::every = std::strtol(argv[1], nullptr, 10);
  CHECK(usable_kernels()[0] != nullptr);
  CHECK(kernels_in_use() != nullptr);
  for (auto at = usable_kernels(); *at; ++at) {
    const Kernels& set = **at;
    int turn = 0;
    for (const Sizes& n : kSizes)
      for (Map map : kMaps)
        for (DType dtype : kDTypes) {
          if (check::due()) check_forms(set, map, dtype, n, turn);
          ++turn;
        }
    for (Map map : {Map::elu1, Map::exp, Map::identity})
      for (DType dtype : kDTypes) {
        if (check::due()) check_batches(set, map, dtype);
        if (check::due()) check_prefix(set, map, dtype);
      }
    for (Form form : {Form::parallel, Form::causal, Form::quadratic})
      for (Map map : {Map::elu1, Map::exp})
        if (check::due()) check_thread_bits(set, form, map);
    for (DType dtype : kDTypes) {
      check_huge_exponents(set, dtype, 37, 1);
      if (check::due()) check_huge_exponents(set, dtype, 1031, 256);
      check_nothing_to_attend(set, dtype);
    }
    std::printf("%s: worst error %.2f of the bound\n", set.name, worst);
    worst = 0;
  }
  return check::report("test_driver");
}
