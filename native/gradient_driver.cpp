// Gradients of all units of a call, on all threads.
#include <vector>

#include "units.h"

namespace linattn {
namespace {

class GradientRun : public Units {
  friend class Units;

 public:
  GradientRun(const GradientProblem& g, const Kernels& kernels, int threads)
      : Units(g.problem),
        g_(g),
        kernels_(kernels),
        threads_(threads),
        turned_bytes_(padded((d_v_ + 1) * features_ * 8 + (exponential() ? features_ * 4 : 0))),
        prepared_bytes_(padded(kernels.turned_bytes(p_.layer))),
        pair_bytes_(p_.layer.repair || p_.layer.dtype == DType::float64 ? 16 : 8) {}

  bool solve() {
    if (nothing()) return true;
    try {
      plan_pieces();
      Stage stages[kMaxStages] = {};
      int count = 0;
      if (p_.form == Form::causal) {
        row_weights_ = allocate(states_ * groups_ * p_.n_q * pair_bytes_);
        if (pieces_ == 1) {
          stages[count++] = {units_, guarded<GradientRun, &GradientRun::whole_causal>};
        } else {
          key_sums_ = allocate(units_ * pieces_ * state_bytes_);
          query_sums_ = allocate(units_ * pieces_ * turned_bytes_);
          stages[count++] = {units_ * (pieces_ - 1), guarded<GradientRun, &GradientRun::causal_key_sums>};
          stages[count++] = {units_, guarded<GradientRun, &GradientRun::scan_keys>};
          stages[count++] = {units_ * pieces_, guarded<GradientRun, &GradientRun::causal_queries>};
          stages[count++] = {units_, guarded<GradientRun, &GradientRun::scan_queries>};
          stages[count++] = {units_ * pieces_, guarded<GradientRun, &GradientRun::causal_keys>};
        }
      } else if (units_ >= kPieces) {
        stages[count++] = {units_, guarded<GradientRun, &GradientRun::whole_parallel>};
      } else {
        query_sums_ = allocate(units_ * groups_ * query_pieces_ * turned_bytes_);
        prepared_ = allocate(units_ * prepared_bytes_);
        if (!p_.after.kv) {
          key_sums_ = allocate(units_ * pieces_ * state_bytes_);
          stages[count++] = {units_ * pieces_, guarded<GradientRun, &GradientRun::key_sums>};
        }
        stages[count++] = {units_, guarded<GradientRun, &GradientRun::merge_keys>};
        stages[count++] = {units_ * groups_ * query_pieces_, guarded<GradientRun, &GradientRun::queries>};
        stages[count++] = {units_, guarded<GradientRun, &GradientRun::merge_queries>};
        stages[count++] = {units_ * pieces_, guarded<GradientRun, &GradientRun::keys>};
      }
      run_stages(stages, count, this, threads_);
    } catch (const std::bad_alloc&) {
      return false;
    }
    return !failed_.load();
  }

 private:
  void plan_pieces() {
    pieces_ = cut(longest_keys(), units_);
    query_pieces_ = cut(longest_queries(), units_ * groups_);
    if (all_rows() * static_cast<double>(2 * features_ * d_v_) < kSerialWork) threads_ = 1;
    if (p_.form == Form::causal && !cutting_pays(threads_)) pieces_ = 1;
  }

  // ---- memory ----

  TurnedRef turned_in(void* memory) const {
    double* sums = static_cast<double*>(memory);
    return {sums, exponential() ? reinterpret_cast<int32_t*>(sums + (d_v_ + 1) * features_) : nullptr};
  }
  TurnedRef query_sums(int64_t index) const {
    return turned_in(static_cast<char*>(query_sums_.get()) + index * turned_bytes_);
  }
  StateRef key_sums(int64_t unit, int64_t piece) const {
    return state_in(static_cast<char*>(key_sums_.get()) + (unit * pieces_ + piece) * state_bytes_);
  }
  void* prepared(int64_t unit) const { return static_cast<char*>(prepared_.get()) + unit * prepared_bytes_; }

  void clear_turned(TurnedRef sums) const {
    std::memset(sums.sums, 0, static_cast<size_t>((d_v_ + 1) * features_) * 8);
    if (sums.log_scale)
      for (int64_t d = 0; d < features_; ++d) sums.log_scale[d] = kEmpty;
  }

  void copy_turned(TurnedRef to, TurnedRef from) const {
    std::memcpy(to.sums, from.sums, static_cast<size_t>((d_v_ + 1) * features_) * 8);
    if (to.log_scale) std::memcpy(to.log_scale, from.log_scale, static_cast<size_t>(features_) * 4);
  }

  void merge_turned(TurnedRef into, TurnedRef other) const {
    for (int64_t d = 0; d < features_; ++d) {
      double own = 1, theirs = 1;
      if (into.log_scale) {
        const int64_t a = into.log_scale[d], b = other.log_scale[d], top = a > b ? a : b;
        own = exact_power(a - top);
        theirs = exact_power(b - top);
        into.log_scale[d] = static_cast<int32_t>(top);
      }
      for (int64_t r = 0; r <= d_v_; ++r) {
        double& at = into.sums[r * features_ + d];
        at = at * own + other.sums[r * features_ + d] * theirs;
      }
    }
  }

  // The gradient with respect to the state after: what the sums over queries begin with. The true sums are the kept
  // ones times 2^log_scale, and a gradient the other way round.
  void start_queries(TurnedRef sums, int64_t unit) const {
    clear_turned(sums);
    if (!g_.grad_after.kv) return;
    const StateRef gradient = state_at(g_.grad_after, unit);
    const int32_t* log_scale = exponential() ? state_at(p_.after, unit).log_scale : nullptr;
    for (int64_t d = 0; d < features_; ++d) {
      if (log_scale) {
        if (log_scale[d] == kEmpty) continue;  // no key was seen, and none is: nothing to multiply
        sums.log_scale[d] = -log_scale[d];
      }
      for (int64_t c = 0; c < d_v_; ++c) sums.sums[c * features_ + d] = gradient.kv[d * d_v_ + c];
      sums.sums[d_v_ * features_ + d] = gradient.k_sum[d];
    }
  }

  // The sums over all queries are the gradient with respect to the state before.
  void finish_before(TurnedRef sums, int64_t unit) const {
    if (!g_.grad_before.kv) return;
    const StateRef to = state_at(g_.grad_before, unit);
    const int32_t* log_scale =
        exponential() && p_.before.kv ? state_at(p_.before, place_of(unit, 0).before).log_scale : nullptr;
    for (int64_t d = 0; d < features_; ++d) {
      // In two steps: each is in range where their product is.
      const int64_t power = log_scale ? static_cast<int64_t>(log_scale[d]) + sums.log_scale[d] : 0;
      const double half = exact_power(power / 2), rest = exact_power(power - power / 2);
      for (int64_t c = 0; c < d_v_; ++c) to.kv[d * d_v_ + c] = sums.sums[c * features_ + d] * half * rest;
      to.k_sum[d] = sums.sums[d_v_ * features_ + d] * half * rest;
    }
  }

  // A thread's own memory: the kernel's scratch, a prepared turned state, a state and a turned one.
  struct Own {
    void *scratch, *prepared;
    StateRef state;
    TurnedRef turned;
  };
  Own own() const {
    const int64_t scratch = padded(max(kernels_.gradient_bytes(p_.layer), kernels_.scratch_bytes(p_.layer)));
    char* memory = static_cast<char*>(thread_scratch(scratch + prepared_bytes_ + state_bytes_ + turned_bytes_));
    char* state = memory + scratch + prepared_bytes_;
    return {memory, memory + scratch, state_in(state), turned_in(state + state_bytes_)};
  }
  static int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

  // ---- operands ----

  struct Operands {
    std::vector<View> q, out, grad_out;
    std::vector<OutView> dq;
    GradientHeads heads;
  };

  // Those of one unit; reversed: row 0 is the last.
  void operands_of(int64_t unit, bool reversed, Operands& to) const {
    const int64_t n_q = queries_of(unit), n_k = keys_of(unit);
    const size_t groups = static_cast<size_t>(groups_);
    to.q.resize(groups);
    to.out.resize(groups);
    to.grad_out.resize(groups);
    to.dq.resize(groups);
    View k{}, v{};
    OutView dk{}, dv{};
    MaskView mask{};
    for (size_t g = 0; g < groups; ++g) {
      const Place at = place_of(unit, static_cast<int64_t>(g));
      to.q[g] = at.q;
      to.out[g] = {at.out.data, at.out.row, at.out.col};
      to.grad_out[g] = g_.grad_out;
      to.dq[g] = g_.dq;
      k = at.k;
      v = at.v;
      mask = at.mask;
      dk = g_.dk;
      dv = g_.dv;
      for_axes(unit, static_cast<int64_t>(g), [&](const Axis& axis, int64_t step) {
        to.grad_out[g].data += step * axis.grad_out;
        to.dq[g].data += step * axis.dq;
        dk.data += step * axis.dk;
        dv.data += step * axis.dv;
      });
      const int64_t first = rows_of(unit).begin;
      to.grad_out[g].data += first * to.grad_out[g].row;
      to.dq[g].data += first * to.dq[g].row;
      dk.data += first * dk.row;
      dv.data += first * dv.row;
      if (reversed) {
        reverse(to.q[g], n_q);
        reverse(to.out[g], n_q);
        reverse(to.grad_out[g], n_q);
        reverse(to.dq[g], n_q);
      }
    }
    if (reversed) {
      reverse(k, n_k);
      reverse(v, n_k);
      reverse(dk, n_k);
      reverse(dv, n_k);
      if (mask.data) {
        mask.data += (n_k - 1) * mask.stride;
        mask.stride = -mask.stride;
      }
    }
    to.heads = {to.q.data(), to.out.data(), to.grad_out.data(), to.dq.data(), groups_, k, v, dk, dv, mask,
                nullptr,     p_.n_q,        reversed ? -1 : 1};
    if (row_weights_) {
      const int64_t first = rows_of(unit).begin;
      const int64_t index = unit % states_ * groups_ * p_.n_q + first + (reversed ? n_q - 1 : 0);
      to.heads.row_weights = static_cast<char*>(row_weights_.get()) + index * pair_bytes_;
    }
  }

  template <class V>
  static void reverse(V& view, int64_t n) {
    view.data += (n - 1) * view.row;
    view.row = -view.row;
  }

  // ---- pieces of work, not causal ----

  void absorb(int64_t unit, Range rows, StateRef into, void* scratch) const {
    const Place at = place_of(unit, 0);
    kernels_.absorb(p_.layer, into, at.k, at.v, at.mask, rows.begin, rows.end, scratch);
  }

  void whole_parallel(int64_t unit) {
    const Own mine = own();
    Operands all;
    operands_of(unit, false, all);
    StateRef state = mine.state;
    if (p_.after.kv) {
      state = state_at(p_.after, unit);
    } else {
      start(state, place_of(unit, 0).before);
      absorb(unit, {0, keys_of(unit)}, state, mine.scratch);
    }
    kernels_.prepare_keys(p_.layer, state, mine.prepared);
    start_queries(mine.turned, unit);
    for (int64_t g = 0; g < groups_; ++g)
      note(kernels_.query_gradient(p_.layer, mine.prepared, all.heads, g, 0, queries_of(unit), mine.turned,
                                   mine.scratch));
    finish_before(mine.turned, unit);
    kernels_.prepare_queries(p_.layer, mine.turned, mine.prepared);
    note(kernels_.key_gradient(p_.layer, mine.prepared, all.heads, 0, keys_of(unit), mine.scratch));
  }

  void key_sums(int64_t index) {
    const int64_t unit = index / pieces_, piece = index % pieces_;
    const StateRef into = key_sums(unit, piece);
    clear(into);
    absorb(unit, piece_of(keys_of(unit), pieces_, piece), into, own().scratch);
  }

  void merge_keys(int64_t unit) {
    StateRef sum;
    if (p_.after.kv) {
      sum = state_at(p_.after, unit);
    } else {
      const Own mine = own();
      sum = mine.state;
      start(sum, place_of(unit, 0).before);
      for (int64_t piece = 0; piece < pieces_; ++piece) merge(sum, key_sums(unit, piece));
    }
    kernels_.prepare_keys(p_.layer, sum, prepared(unit));
  }

  void queries(int64_t index) {
    const int64_t piece = index % query_pieces_, group = index / query_pieces_ % groups_;
    const int64_t unit = index / query_pieces_ / groups_;
    const Range rows = piece_of(queries_of(unit), query_pieces_, piece);
    Operands all;
    operands_of(unit, false, all);
    const TurnedRef into = query_sums(index);
    clear_turned(into);
    note(
        kernels_.query_gradient(p_.layer, prepared(unit), all.heads, group, rows.begin, rows.end, into, own().scratch));
  }

  void merge_queries(int64_t unit) {
    const Own mine = own();
    start_queries(mine.turned, unit);
    const int64_t each = groups_ * query_pieces_;
    for (int64_t i = 0; i < each; ++i) merge_turned(mine.turned, query_sums(unit * each + i));
    finish_before(mine.turned, unit);
    kernels_.prepare_queries(p_.layer, mine.turned, prepared(unit));
  }

  void keys(int64_t index) {
    const int64_t unit = index / pieces_;
    const Range rows = piece_of(keys_of(unit), pieces_, index % pieces_);
    Operands all;
    operands_of(unit, false, all);
    note(kernels_.key_gradient(p_.layer, prepared(unit), all.heads, rows.begin, rows.end, own().scratch));
  }

  // ---- pieces of work, causal ----

  void whole_causal(int64_t unit) {
    const Own mine = own();
    Operands all;
    operands_of(unit, false, all);
    start(mine.state, place_of(unit, 0).before);
    note(kernels_.causal_query_gradient(p_.layer, mine.state, all.heads, 0, keys_of(unit), {}, mine.scratch));
    operands_of(unit, true, all);
    start_queries(mine.turned, unit);
    note(kernels_.causal_key_gradient(p_.layer, mine.turned, all.heads, 0, keys_of(unit), mine.scratch));
    finish_before(mine.turned, unit);
  }

  // As in the forward pass, the sums of a piece stand where the scan makes them the state before the next.
  void causal_key_sums(int64_t index) {
    const int64_t unit = index / (pieces_ - 1), piece = index % (pieces_ - 1);
    const StateRef into = key_sums(unit, piece + 1);
    clear(into);
    absorb(unit, piece_of(keys_of(unit), pieces_, piece), into, own().scratch);
  }

  void scan_keys(int64_t unit) {
    const Own mine = own();
    start(key_sums(unit, 0), place_of(unit, 0).before);
    for (int64_t piece = 1; piece < pieces_; ++piece) {
      copy(mine.state, key_sums(unit, piece - 1));
      merge(mine.state, key_sums(unit, piece));
      copy(key_sums(unit, piece), mine.state);
    }
  }

  void causal_queries(int64_t index) {
    const int64_t unit = index / pieces_, piece = index % pieces_;
    const Range rows = piece_of(keys_of(unit), pieces_, piece);
    Operands all;
    operands_of(unit, false, all);
    TurnedRef into{};
    if (piece > 0) {
      into = query_sums(unit * pieces_ + piece - 1);
      clear_turned(into);
    }
    note(kernels_.causal_query_gradient(p_.layer, key_sums(unit, piece), all.heads, rows.begin, rows.end, into,
                                        own().scratch));
  }

  // From the last piece back: the sums over the queries behind each.
  void scan_queries(int64_t unit) {
    const Own mine = own();
    start_queries(query_sums(unit * pieces_ + pieces_ - 1), unit);
    for (int64_t piece = pieces_ - 2; piece >= 0; --piece) {
      copy_turned(mine.turned, query_sums(unit * pieces_ + piece + 1));
      merge_turned(mine.turned, query_sums(unit * pieces_ + piece));
      copy_turned(query_sums(unit * pieces_ + piece), mine.turned);
    }
  }

  void causal_keys(int64_t index) {
    const int64_t unit = index / pieces_, piece = index % pieces_, n = keys_of(unit);
    const Range rows = piece_of(n, pieces_, piece);
    Operands all;
    operands_of(unit, true, all);
    const TurnedRef sums = query_sums(index);
    note(kernels_.causal_key_gradient(p_.layer, sums, all.heads, n - rows.end, n - rows.begin, own().scratch));
    if (piece == 0) finish_before(sums, unit);
  }

  const GradientProblem& g_;
  const Kernels& kernels_;
  int threads_;
  int64_t turned_bytes_, prepared_bytes_, pair_bytes_;
  int64_t pieces_ = 1, query_pieces_ = 1;
  Memory key_sums_, query_sums_, prepared_, row_weights_;
};

}  // namespace

bool solve_gradient(const GradientProblem& problem, const Kernels& kernels, int threads) {
  GradientRun run(problem, kernels, threads);
  if (!run.solve()) return false;
  if (!run.troubled()) return true;
  GradientProblem again = problem;
  again.problem.layer.repair = true;
  return GradientRun(again, kernels, threads).solve();
}

}  // namespace linattn
