// Gradients, for every instruction set of this machine, against the derivative of the double sum: forms, maps, dtypes,
// masks, packed sequences, grouped heads, states before and after, memory layouts, threads. Operands lie in guarded
// memory of the exact size, so that a sanitizer sees the first byte read beyond it.
#include <cmath>
#include <cstdio>
#include <vector>

#include "dispatch.h"
#include "driver.h"
#include "plain.h"

using namespace linattn;
using plain::Matrix;
using plain::Random;

namespace {

const Map kMaps[] = {Map::identity, Map::elu1, Map::relu, Map::squared_relu, Map::exp, Map::softplus, Map::sigmoid};
const DType kDTypes[] = {DType::float32, DType::float64, DType::float16, DType::bfloat16};

double slope(Map map, double x) {
  switch (map) {
    case Map::identity:
      return 1;
    case Map::elu1:
      return x < 0 ? std::exp(x) : 1;
    case Map::relu:
      return x > 0 ? 1 : 0;
    case Map::squared_relu:
      return x > 0 ? 2 * x : 0;
    case Map::exp:
      return std::exp(x);
    case Map::softplus:
      return 1 / (1 + std::exp(-x));
    case Map::sigmoid:
      return 1 / ((1 + std::exp(-x)) * (1 + std::exp(x)));
  }
  return 1;
}

// A value and the same sum over absolute terms: what rounding is relative to.
struct Term {
  double value = 0, size = 0;
  void add(double x, double its_size) {
    value += x;
    size += its_size;
  }
};
using Terms = std::vector<Term>;

struct Case {
  DType dtype;
  Map map;
  bool causal, normalize;
  int64_t states, groups, n_q, n_k, features, d_v;
  int mask;                        // a kind of plain::Mask
  bool before, after, grad_after;  // a state before; the state after handed in; a gradient with respect to it
  Matrix::Layout layout;
  std::vector<int64_t> cu_seqlens;  // empty: not packed
  double reach;                     // q and k lie in [-reach, reach]
  int threads;
  double eps = 0.25;
  bool below = false;  // q and k in [-reach, -reach / 2]
};

void describe(const Case& c, const char* what, int64_t row, int64_t column, double found, Term expected) {
  std::printf(
      "%s %s %s normalize %d states %d groups %d n %d %d D %d d_v %d mask %d before %d after %d layout %d "
      "packed %d threads %d: %s[%d, %d] %.9g for %.9g (size %.3g)\n",
      plain::name_of(c.dtype), plain::name_of(c.map), c.causal ? "causal" : "parallel", c.normalize,
      static_cast<int>(c.states), static_cast<int>(c.groups), static_cast<int>(c.n_q), static_cast<int>(c.n_k),
      static_cast<int>(c.features), static_cast<int>(c.d_v), c.mask, c.before, c.after, c.layout,
      static_cast<int>(c.cu_seqlens.size()), c.threads, what, static_cast<int>(row), static_cast<int>(column), found,
      expected.value, expected.size);
}

bool close(const Case& c, double found, Term expected) {
  const double condition = 8 + 4 * c.reach;
  // An exponential map counts as 0 what is below 2^-126 of the greatest feature of its row, times 2^32 at most that
  // sums may exceed their scale.
  const double least = c.map == Map::exp ? std::ldexp(plain::smallest(c.dtype), 32) : plain::smallest(c.dtype);
  const double limit = 12 * condition * plain::epsilon(c.dtype) * expected.size +
                       4 * plain::rounding(c.dtype) * expected.size * (c.dtype >= DType::float16) +
                       2 * plain::rounding(c.dtype) * std::fabs(expected.value) + plain::step_at_zero(c.dtype) + least;
  return std::fabs(found - expected.value) <= limit;
}

void check_rows(const Case& c, const char* what, Matrix& found, const Terms& expected) {
  bool right = true;
  for (int64_t r = 0; r < found.rows() && right; ++r)
    for (int64_t i = 0; i < found.cols() && right; ++i) {
      const Term& term = expected[static_cast<size_t>(r * found.cols() + i)];
      right = close(c, found.at(r, i), term);
      if (!right) describe(c, what, r, i, found.at(r, i), term);
    }
  CHECK(right);
  CHECK(found.gaps_intact());
}

// All matrices of an operand in one block of memory, at equal distances as an axis needs them.
struct Operand {
  int64_t count, rows, cols;
  Matrix whole;  // (count * rows, cols)
  Operand(const Case& c, int64_t count_, int64_t rows_, int64_t cols_, Matrix::Layout layout)
      : count(count_), rows(rows_), cols(cols_), whole(c.dtype, count_ * rows_, cols_, layout) {}
  double at(int64_t i, int64_t r, int64_t d) { return whole.at(i * rows + r, d); }
  View view() { return whole.view(); }
  OutView out() { return whole.out(); }
  int64_t step() { return rows * whole.view().row; }
};

void run(const Case& c, const Kernels& kernels, uint64_t seed) {
  Random random(seed);
  const int64_t heads = c.states * c.groups;
  Operand q(c, heads, c.n_q, c.features, c.layout), grad(c, heads, c.n_q, c.d_v, c.layout);
  Operand k(c, c.states, c.n_k, c.features, c.layout), v(c, c.states, c.n_k, c.d_v, c.layout);
  Operand out(c, heads, c.n_q, c.d_v, Matrix::dense), dq(c, heads, c.n_q, c.features, c.layout);
  Operand dk(c, c.states, c.n_k, c.features, c.layout), dv(c, c.states, c.n_k, c.d_v, c.layout);
  const double low = c.map == Map::identity ? 0.25 : -c.reach;  // so that no denominator is near 0
  q.whole.fill(random, low, c.below ? -c.reach / 2 : c.reach);
  k.whole.fill(random, low, c.below ? -c.reach / 2 : c.reach);
  v.whole.fill(random, -1, 1);
  grad.whole.fill(random, -1, 1);
  const plain::Mask mask(random, c.n_k, c.mask);
  for (int64_t j = 0; j < c.n_k; ++j)  // what is masked plays no part, NaN included
    for (int64_t s = 0; s < c.states && !mask.keeps(j); ++s) {
      for (int64_t d = 0; d < c.features; ++d) k.whole.set(s * c.n_k + j, d, NAN);
      for (int64_t i = 0; i < c.d_v; ++i) v.whole.set(s * c.n_k + j, i, NAN);
    }

  const int64_t sequences = c.cu_seqlens.empty() ? 1 : static_cast<int64_t>(c.cu_seqlens.size()) - 1;
  const int64_t units = sequences * c.states, state_size = c.features * c.d_v;
  struct Sums {
    std::vector<double> kv, k_sum;
    std::vector<int32_t> log_scale;
    StateRef ref() { return {kv.data(), k_sum.data(), log_scale.empty() ? nullptr : log_scale.data()}; }
  };
  const auto sums = [&](bool scales) {
    Sums s{std::vector<double>(static_cast<size_t>(units * state_size)),
           std::vector<double>(static_cast<size_t>(units * c.features)),
           {}};
    if (scales && c.map == Map::exp) s.log_scale.assign(s.k_sum.size(), kEmpty);
    return s;
  };
  Sums before = sums(true), after = sums(true), grad_after = sums(false), grad_before = sums(false);
  if (c.before) {
    for (double& x : before.kv) x = random.uniform(-1, 1);
    for (double& x : before.k_sum) x = random.uniform(1, 2);
    for (int32_t& x : before.log_scale) x = static_cast<int32_t>(random.below(5)) - 2;
  }
  if (c.grad_after) {
    for (double& x : grad_after.kv) x = random.uniform(-1, 1);
    for (double& x : grad_after.k_sum) x = random.uniform(-1, 1);
  }

  GradientProblem gradient;
  Problem& p = gradient.problem;
  p.form = c.causal ? Form::causal : Form::parallel;
  p.layer = {c.dtype, c.map, c.normalize, c.features, c.d_v, c.eps};
  p.n_q = c.n_q;
  p.n_k = c.n_k;
  if (!c.cu_seqlens.empty()) {
    p.cu_seqlens = c.cu_seqlens.data();
    p.sequences = sequences;
  }
  p.axis_count = 2;
  p.axes[0] = {c.states,
               true,
               q.step() * c.groups,
               k.step(),
               v.step(),
               0,
               out.step() * c.groups,
               1,
               grad.step() * c.groups,
               dq.step() * c.groups,
               dk.step(),
               dv.step()};
  p.axes[1] = {c.groups, false, q.step(), 0, 0, 0, out.step(), 0, grad.step(), dq.step(), 0, 0};
  p.q = q.view();
  p.k = k.view();
  p.v = v.view();
  p.mask = mask.view;
  p.out = out.out();
  if (c.before) p.before = before.ref();
  p.after = after.ref();
  CHECK(solve(p, kernels, 1));
  if (!c.after) p.after = {};
  gradient.grad_out = grad.view();
  gradient.dq = dq.out();
  gradient.dk = dk.out();
  gradient.dv = dv.out();
  if (c.grad_after) gradient.grad_after = grad_after.ref();
  if (c.before) gradient.grad_before = grad_before.ref();
  CHECK(solve_gradient(gradient, kernels, c.threads));

  // The definition.
  const size_t key_rows = static_cast<size_t>(c.states * c.n_k), query_rows = static_cast<size_t>(heads * c.n_q);
  const size_t D = static_cast<size_t>(c.features), V = static_cast<size_t>(c.d_v);
  Terms want_q(query_rows * D), want_k(key_rows * D), want_v(key_rows * V);
  bool right_before = true;
  for (int64_t unit = 0; unit < units; ++unit) {
    const int64_t sequence = unit / c.states, state = unit % c.states;
    const int64_t begin = c.cu_seqlens.empty() ? 0 : c.cu_seqlens[static_cast<size_t>(sequence)];
    const int64_t end = c.cu_seqlens.empty() ? c.n_k : c.cu_seqlens[static_cast<size_t>(sequence + 1)];
    const int64_t q_end = c.cu_seqlens.empty() ? c.n_q : end;
    const auto scale = [&](const Sums& s, int64_t d) {
      return s.log_scale.empty() ? 1.0 : std::ldexp(1.0, s.log_scale[static_cast<size_t>(unit * c.features + d)]);
    };
    const auto kv_at = [&](const Sums& s, int64_t d, int64_t i) {
      return s.kv[static_cast<size_t>(unit * state_size + d * c.d_v + i)];
    };
    const auto k_sum_at = [&](const Sums& s, int64_t d) { return s.k_sum[static_cast<size_t>(unit * c.features + d)]; };
    Terms d_kv(D * V), d_k_sum(D);
    const auto d_state = [&](int64_t d, int64_t i) -> Term& {
      return i < c.d_v ? d_kv[static_cast<size_t>(d) * V + static_cast<size_t>(i)] : d_k_sum[static_cast<size_t>(d)];
    };
    for (int64_t d = 0; c.grad_after && d < c.features; ++d) {
      const double unscale = c.map == Map::exp && after.log_scale[static_cast<size_t>(unit * c.features + d)] == kEmpty
                                 ? 0
                                 : 1 / scale(after, d);
      for (int64_t i = 0; i <= c.d_v; ++i) {
        const double x = (i < c.d_v ? kv_at(grad_after, d, i) : k_sum_at(grad_after, d)) * unscale;
        d_state(d, i).add(x, std::fabs(x));
      }
    }
    std::vector<double> phi_k(static_cast<size_t>(end - begin) * D);
    for (int64_t j = begin; j < end; ++j)
      for (int64_t d = 0; d < c.features; ++d)
        phi_k[static_cast<size_t>(j - begin) * D + static_cast<size_t>(d)] =
            mask.keeps(j) ? plain::phi(c.map, k.at(state, j, d)) : 0;
    const auto value_at = [&](int64_t j, int64_t i) { return !mask.keeps(j) ? 0 : i < c.d_v ? v.at(state, j, i) : 1; };
    for (int64_t g = 0; g < c.groups; ++g) {
      const int64_t head = state * c.groups + g;
      for (int64_t i = begin; i < q_end; ++i) {
        std::vector<double> phi_q(D), seen(D * (V + 1)), seen_size(seen);
        for (size_t d = 0; d < D; ++d) phi_q[d] = plain::phi(c.map, q.at(head, i, static_cast<int64_t>(d)));
        for (int64_t d = 0; c.before && d < c.features; ++d)
          for (int64_t e = 0; e <= c.d_v; ++e) {
            const double x = (e < c.d_v ? kv_at(before, d, e) : k_sum_at(before, d)) * scale(before, d);
            seen[static_cast<size_t>(d) * (V + 1) + static_cast<size_t>(e)] += x;
            seen_size[static_cast<size_t>(d) * (V + 1) + static_cast<size_t>(e)] += std::fabs(x);
          }
        const int64_t last = c.causal ? i + 1 : end;
        for (int64_t j = begin; j < last; ++j)
          for (size_t d = 0; d < D; ++d)
            for (int64_t e = 0; e <= c.d_v; ++e) {
              const double x = phi_k[static_cast<size_t>(j - begin) * D + d] * value_at(j, e);
              seen[d * (V + 1) + static_cast<size_t>(e)] += x;
              seen_size[d * (V + 1) + static_cast<size_t>(e)] += std::fabs(x);
            }
        double total = c.eps;
        for (size_t d = 0; d < D; ++d) total += phi_q[d] * seen[d * (V + 1) + V];
        const double weight = c.normalize ? 1 / total : 1;
        std::vector<Term> turned(V + 1);  // g'
        for (size_t e = 0; e < V; ++e) {
          const double given = grad.at(head, i, static_cast<int64_t>(e));
          double numerator = 0, size = 0;
          for (size_t d = 0; d < D; ++d) {
            numerator += phi_q[d] * seen[d * (V + 1) + e];
            size += std::fabs(phi_q[d]) * seen_size[d * (V + 1) + e];
          }
          turned[e].add(given * weight, std::fabs(given * weight));
          if (c.normalize)
            turned[V].add(-weight * given * numerator * weight, std::fabs(weight * given * weight) * size);
        }
        for (size_t d = 0; d < D; ++d) {
          Term sum;
          for (size_t e = 0; e <= V; ++e) {
            sum.add(turned[e].value * seen[d * (V + 1) + e], turned[e].size * seen_size[d * (V + 1) + e]);
            d_state(static_cast<int64_t>(d), static_cast<int64_t>(e))
                .add(phi_q[d] * turned[e].value, std::fabs(phi_q[d]) * turned[e].size);
          }
          const double factor = slope(c.map, q.at(head, i, static_cast<int64_t>(d)));
          want_q[static_cast<size_t>(head * c.n_q + i) * D + d].add(sum.value * factor, sum.size * std::fabs(factor));
        }
        for (int64_t j = begin; j < last; ++j) {
          if (!mask.keeps(j)) continue;
          Term dot, weight_of;
          for (size_t e = 0; e <= V; ++e) {
            const double x = value_at(j, static_cast<int64_t>(e));
            dot.add(turned[e].value * x, turned[e].size * std::fabs(x));
          }
          const size_t row = static_cast<size_t>(state * c.n_k + j);
          for (size_t d = 0; d < D; ++d) {
            const double factor = slope(c.map, k.at(state, j, static_cast<int64_t>(d)));
            const double f = phi_k[static_cast<size_t>(j - begin) * D + d] * phi_q[d];
            want_k[row * D + d].add(dot.value * phi_q[d] * factor, dot.size * std::fabs(phi_q[d] * factor));
            weight_of.add(f, std::fabs(f));
          }
          for (size_t e = 0; e < V; ++e)
            want_v[row * V + e].add(weight_of.value * turned[e].value, weight_of.size * turned[e].size);
        }
      }
    }
    for (int64_t j = begin; c.grad_after && j < end; ++j) {
      if (!mask.keeps(j)) continue;
      const size_t row = static_cast<size_t>(state * c.n_k + j);
      for (int64_t d = 0; d < c.features; ++d) {
        if (c.map == Map::exp && after.log_scale[static_cast<size_t>(unit * c.features + d)] == kEmpty) continue;
        const double f = phi_k[static_cast<size_t>(j - begin) * D + static_cast<size_t>(d)];
        const double factor = slope(c.map, k.at(state, j, d)), unscale = 1 / scale(after, d);
        for (int64_t e = 0; e <= c.d_v; ++e) {
          const double x = (e < c.d_v ? kv_at(grad_after, d, e) : k_sum_at(grad_after, d)) * unscale;
          const double to_k = x * value_at(j, e) * factor;
          want_k[row * D + static_cast<size_t>(d)].add(to_k, std::fabs(to_k));
          if (e < c.d_v) want_v[row * V + static_cast<size_t>(e)].add(x * f, std::fabs(x * f));
        }
      }
    }
    for (int64_t d = 0; c.before && d < c.features && right_before; ++d)
      for (int64_t e = 0; e <= c.d_v && right_before; ++e) {
        Term term = d_state(d, e);
        term.value *= scale(before, d);
        term.size *= scale(before, d);
        const double found = e < c.d_v ? kv_at(grad_before, d, e) : k_sum_at(grad_before, d);
        right_before = close(c, found, term);
        if (!right_before) describe(c, "state", d, e, found, term);
      }
  }
  CHECK(right_before);
  check_rows(c, "dq", dq.whole, want_q);
  check_rows(c, "dk", dk.whole, want_k);
  check_rows(c, "dv", dv.whole, want_v);
}

const int64_t kSizes[][4] = {{1, 1, 1, 1},     {2, 3, 3, 5},     {31, 33, 17, 8}, {64, 65, 16, 31},
                             {67, 131, 65, 3}, {40, 63, 64, 64}, {5, 300, 7, 33}};

void sweep(const Kernels& kernels) {
  Random random(17);
  uint64_t seed = 1;
  for (const Map map : kMaps)
    for (const bool causal : {false, true})
      for (const DType dtype : kDTypes)
        for (const auto& size : kSizes) {
          const int64_t n_q = causal ? size[1] : size[0];
          Case c{dtype,
                 map,
                 causal,
                 random.below(4) != 0,
                 1 + random.below(2),
                 1 + random.below(3),
                 n_q,
                 size[1],
                 size[2],
                 size[3],
                 static_cast<int>(random.below(6)),
                 random.below(2) == 0,
                 random.below(2) == 0,
                 random.below(3) == 0,
                 static_cast<Matrix::Layout>(random.below(Matrix::same_row)),
                 {},
                 2,
                 1 + static_cast<int>(random.below(2))};
          if (c.grad_after) c.after = true;
          if (n_q == size[1] && random.below(3) == 0) c.cu_seqlens = {0, n_q / 3, n_q / 3, n_q};
          if (!c.normalize && dtype == DType::float16) c.normalize = true;  // sums of hundreds overflow there
          ++seed;
          if (check::due()) run(c, kernels, seed);
        }
}

// Long enough to be cut into pieces, by one thread and by four.
void pieces(const Kernels& kernels) {
  for (const Map map : {Map::elu1, Map::exp})
    for (const bool causal : {false, true})
      for (const int threads : {1, 4}) {
        if (!check::due()) continue;
        Case c{DType::float32, map,   causal, true,          1,  2, 1100,   1100, 5, 3, 1,
               true,           false, false,  Matrix::dense, {}, 2, threads};
        run(c, kernels, 99);
        c.states = 16;
        c.n_q = c.n_k = 70;
        run(c, kernels, 100);
      }
}

// Rows whose terms leave the range of float are made again in double; exponential maps have no range to leave.
void far(const Kernels& kernels) {
  for (const bool causal : {false, true})
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
      Case c{dtype, Map::exp, causal, true, 1, 1, 67, 67, 5, 3, 1, true, false, false, Matrix::dense, {}, 60, 1};
      run(c, kernels, 7);
      c.map = Map::elu1;
      run(c, kernels, 8);
      c.eps = 0;
      c.reach = 100;
      c.before = false;
      c.below = true;  // products of phi below 2^-126, gradients of ordinary size
      run(c, kernels, 9);
    }
}

}  // namespace

// Argument: of how many cases one is run.
int main(int argc, char** argv) {
  if (argc > 1) check::every = std::strtol(argv[1], nullptr, 10);
  for (auto set = usable_kernels(); *set; ++set) {
    sweep(**set);
    pieces(**set);
    far(**set);
  }
  return check::report("test_gradient");
}
