#include "driver.h"

#include <vector>

#include "units.h"

namespace linattn {
namespace {

class Run : public Units {
  friend class Units;

 public:
  Run(const Problem& p, const Kernels& kernels, int threads)
      : Units(p), kernels_(kernels), threads_(threads), prepared_bytes_(padded(kernels.prepared_bytes(p.layer))) {}

  bool solve() {
    if (nothing()) return true;
    try {
      plan_pieces();
      Stage stages[3] = {};
      int count = 0;
      switch (p_.form) {
        case Form::parallel:
          if (whole()) {
            stages[count++] = {units_, guarded<Run, &Run::whole_parallel>};
          } else {
            allocate_shared(true);
            stages[count++] = {units_ * pieces_, guarded<Run, &Run::partial_sums>};
            stages[count++] = {units_, guarded<Run, &Run::merge_sums>};
            stages[count++] = {units_ * groups_ * query_pieces_, guarded<Run, &Run::query_piece>};
          }
          break;
        case Form::absorb:
          if (whole()) {
            stages[count++] = {units_, guarded<Run, &Run::whole_absorb>};
          } else {
            allocate_shared(false);
            stages[count++] = {units_ * pieces_, guarded<Run, &Run::partial_sums>};
            stages[count++] = {units_, guarded<Run, &Run::merge_sums>};
          }
          break;
        case Form::query:
          if (whole()) {
            stages[count++] = {units_, guarded<Run, &Run::whole_query>};
          } else {
            allocate_shared(true);
            stages[count++] = {units_, guarded<Run, &Run::prepare_given>};
            stages[count++] = {units_ * groups_ * query_pieces_, guarded<Run, &Run::query_piece>};
          }
          break;
        case Form::causal:
          if (whole()) {
            stages[count++] = {units_, guarded<Run, &Run::whole_causal>};
          } else {
            allocate_shared(false);
            stages[count++] = {units_ * (pieces_ - 1), guarded<Run, &Run::causal_sums>};
            stages[count++] = {units_, guarded<Run, &Run::scan_sums>};
            stages[count++] = {units_ * pieces_, guarded<Run, &Run::causal_piece>};
          }
          break;
        case Form::quadratic:
          stages[count++] = {units_ * groups_ * query_pieces_, guarded<Run, &Run::quadratic_piece>};
          break;
        case Form::step:
          stages[count++] = {units_, guarded<Run, &Run::one_step>};
          break;
      }
      run_stages(stages, count, this, threads_);
    } catch (const std::bad_alloc&) {
      return false;
    }
    return !failed_.load();
  }

 private:
  // ---- how the work is cut ----

  void plan_pieces() {
    pieces_ = cut(longest_keys(), units_);
    query_pieces_ = cut(longest_queries(), units_ * groups_);
    double each = static_cast<double>(features_ * d_v_);
    if (p_.form == Form::quadratic) each = static_cast<double>((features_ + d_v_) * p_.n_k) / 2;
    if (all_rows() * each < kSerialWork) threads_ = 1;
    if (p_.form == Form::causal && !cutting_pays(threads_)) pieces_ = 1;
  }

  // Whether one thread does all of a unit, so that no more states exist at a time than threads.
  bool whole() const {
    const bool wide_queries = p_.form == Form::parallel || p_.form == Form::query;
    return pieces_ == 1 && (!wide_queries || units_ >= kPieces || groups_ * query_pieces_ <= 2);
  }

  StateRef result_or(int64_t unit, void* memory) const {
    return p_.after.kv ? state_at(p_.after, unit) : state_in(memory);
  }

  void allocate_shared(bool prepared) {
    if (p_.form != Form::query) shared_ = allocate(units_ * pieces_ * state_bytes_);
    if (prepared) prepared_ = allocate(units_ * prepared_bytes_);
  }
  StateRef shared(int64_t unit, int64_t piece) const {
    return state_in(static_cast<char*>(shared_.get()) + (unit * pieces_ + piece) * state_bytes_);
  }
  void* prepared(int64_t unit) const { return static_cast<char*>(prepared_.get()) + unit * prepared_bytes_; }

  // A thread's own memory: the kernel's scratch, one prepared state, one state.
  struct Own {
    void *scratch, *prepared, *state;
  };
  Own own() const {
    const int64_t scratch = padded(kernels_.scratch_bytes(p_.layer));
    char* memory = static_cast<char*>(thread_scratch(scratch + prepared_bytes_ + state_bytes_));
    return {memory, memory + scratch, memory + scratch + prepared_bytes_};
  }

  // ---- pieces of work ----

  void whole_parallel(int64_t unit) {
    const Own mine = own();
    const Place at = place_of(unit, 0);
    const StateRef state = result_or(unit, mine.state);
    const bool straight =
        !p_.before.kv && !p_.after.kv &&
        kernels_.sums(layer_of(at), state, at.k, at.v, at.mask, keys_of(unit), mine.prepared, mine.scratch);
    if (!straight) {
      start(state, at.before);
      kernels_.absorb(layer_of(at), state, at.k, at.v, at.mask, 0, keys_of(unit), mine.scratch);
      kernels_.prepare(p_.layer, state, mine.prepared);
    }
    query_all(unit, mine);
  }

  void whole_query(int64_t unit) {
    const Own mine = own();
    kernels_.prepare(p_.layer, state_at(p_.before, place_of(unit, 0).before), mine.prepared);
    query_all(unit, mine);
  }

  void query_all(int64_t unit, const Own& mine) {
    for (int64_t g = 0; g < groups_; ++g) {
      const Place here = place_of(unit, g);
      note(kernels_.query(layer_of(here), mine.prepared, here.q, here.out, 0, queries_of(unit), mine.scratch));
    }
  }

  void whole_absorb(int64_t unit) {
    const Own mine = own();
    const Place at = place_of(unit, 0);
    const StateRef state = state_at(p_.after, unit);
    start(state, at.before);
    kernels_.absorb(layer_of(at), state, at.k, at.v, at.mask, 0, keys_of(unit), mine.scratch);
  }

  void absorb_range(int64_t unit, int64_t piece, StateRef into) {
    const Own mine = own();
    const Place at = place_of(unit, 0);
    const Range rows = piece_of(keys_of(unit), pieces_, piece);
    clear(into);
    kernels_.absorb(layer_of(at), into, at.k, at.v, at.mask, rows.begin, rows.end, mine.scratch);
  }

  void partial_sums(int64_t index) {
    const int64_t unit = index / pieces_, piece = index % pieces_;
    absorb_range(unit, piece, shared(unit, piece));
  }

  void merge_sums(int64_t unit) {
    const Place at = place_of(unit, 0);
    const StateRef sum = p_.after.kv ? state_at(p_.after, unit) : shared(unit, 0);
    int64_t piece = 0;
    if (p_.before.kv) {
      if (p_.after.kv) {
        copy(sum, state_at(p_.before, at.before));
      } else {  // the given state comes first, in the order of a continuation
        const Own mine = own();
        const StateRef given = state_in(mine.state);
        copy(given, state_at(p_.before, at.before));
        merge(given, sum);
        copy(sum, given);
        piece = 1;
      }
    } else {
      copy(sum, shared(unit, 0));
      piece = 1;
    }
    for (; piece < pieces_; ++piece) merge(sum, shared(unit, piece));
    if (prepared_) kernels_.prepare(p_.layer, sum, prepared(unit));
  }

  void prepare_given(int64_t unit) {
    kernels_.prepare(p_.layer, state_at(p_.before, place_of(unit, 0).before), prepared(unit));
  }

  void query_piece(int64_t index) {
    const int64_t piece = index % query_pieces_, group = index / query_pieces_ % groups_;
    const int64_t unit = index / query_pieces_ / groups_;
    const Range rows = piece_of(queries_of(unit), query_pieces_, piece);
    const Own mine = own();
    const Place at = place_of(unit, group);
    note(kernels_.query(layer_of(at), prepared(unit), at.q, at.out, rows.begin, rows.end, mine.scratch));
  }

  void quadratic_piece(int64_t index) {
    const int64_t piece = index % query_pieces_, group = index / query_pieces_ % groups_;
    const int64_t unit = index / query_pieces_ / groups_;
    const Range rows = piece_of(queries_of(unit), query_pieces_, piece);
    const Own mine = own();
    const Place at = place_of(unit, group);
    note(kernels_.quadratic(layer_of(at), at.q, at.k, at.v, at.mask, keys_of(unit), at.out, rows.begin, rows.end,
                            mine.scratch));
  }

  void walk(int64_t unit, StateRef state, Range rows, const Own& mine) {
    View few_q[8];
    OutView few_out[8];
    std::vector<View> many_q;
    std::vector<OutView> many_out;
    View* q = few_q;
    OutView* out = few_out;
    if (groups_ > 8) {
      many_q.resize(static_cast<size_t>(groups_));
      many_out.resize(static_cast<size_t>(groups_));
      q = many_q.data();
      out = many_out.data();
    }
    Place at{};
    for (int64_t g = 0; g < groups_; ++g) {
      at = place_of(unit, g);
      q[g] = at.q;
      out[g] = at.out;
    }
    const bool from_start = rows.begin == 0 && !p_.before.kv;
    const Heads heads{q, out, groups_, at.k, at.v, at.mask, from_start, !p_.after.kv};
    if (p_.form == Form::step)
      kernels_.step(layer_of(at), state, heads, mine.scratch);
    else
      note(kernels_.causal(layer_of(at), state, heads, rows.begin, rows.end, mine.prepared, mine.scratch));
  }

  void whole_causal(int64_t unit) {
    const Own mine = own();
    const StateRef state = result_or(unit, mine.state);
    start(state, place_of(unit, 0).before);
    walk(unit, state, {0, keys_of(unit)}, mine);
  }

  // The sums of every piece but the last stand one place further, where the scan makes them the state before it.
  void causal_sums(int64_t index) {
    const int64_t unit = index / (pieces_ - 1), piece = index % (pieces_ - 1);
    absorb_range(unit, piece, shared(unit, piece + 1));
  }

  void scan_sums(int64_t unit) {
    const Own mine = own();
    start(shared(unit, 0), place_of(unit, 0).before);
    for (int64_t piece = 1; piece < pieces_; ++piece) {
      const StateRef sum = state_in(mine.state);
      copy(sum, shared(unit, piece - 1));
      merge(sum, shared(unit, piece));
      copy(shared(unit, piece), sum);
    }
  }

  void causal_piece(int64_t index) {
    const int64_t unit = index / pieces_, piece = index % pieces_;
    const Own mine = own();
    const StateRef state = shared(unit, piece);
    walk(unit, state, piece_of(keys_of(unit), pieces_, piece), mine);
    if (piece == pieces_ - 1 && p_.after.kv) copy(state_at(p_.after, unit), state);
  }

  void one_step(int64_t unit) {
    const Own mine = own();
    walk(unit, state_at(p_.after, unit), {0, 1}, mine);
  }

  const Kernels& kernels_;
  int threads_;
  int64_t prepared_bytes_;
  int64_t pieces_ = 1, query_pieces_ = 1;
  Memory shared_, prepared_;
};

}  // namespace

bool prefers_quadratic(int64_t n_q, int64_t n_k, int64_t features, int64_t d_v, int64_t groups, double again) {
  const double all_q = static_cast<double>(n_q) * static_cast<double>(groups);
  const double linear = (static_cast<double>(n_k) + all_q) * static_cast<double>(features) * static_cast<double>(d_v);
  const double quadratic = all_q * static_cast<double>(n_k) * static_cast<double>(features + d_v);
  return quadratic + again < linear;
}

bool makes_features_often(const Problem& p) { return p.layer.projection && p.n_q > 2 * kChunk * p.sequences; }

bool prefers_quadratic(const Problem& p) {
  if (makes_features_often(p)) return false;
  int64_t groups = 1;
  for (int i = 0; i < p.axis_count; ++i)
    if (!p.axes[i].keys) groups *= p.axes[i].size;
  const int64_t n_q = p.n_q / p.sequences, n_k = p.n_k / p.sequences;
  double again = 0;
  if (const Projection* projection = p.layer.projection) {
    // Unless keys are one block themselves, they are projected for each block of queries anew, and with exp once more
    // for their scales. What follows the product is worth some kPass of its operations a feature.
    constexpr int64_t kPass = 8;
    const int64_t passes = groups * (n_k <= kChunk ? 1 : (n_q + kChunk - 1) / kChunk + (p.layer.map == Map::exp));
    const int64_t product = projection->row ? projection->inputs * projection->columns : 0;
    again = static_cast<double>(passes - 1) * static_cast<double>(n_k) *
            static_cast<double>(product + kPass * p.layer.features);
  }
  return prefers_quadratic(n_q, n_k, p.layer.features, p.layer.d_v, groups, again);
}

bool solve(const Problem& problem, const Kernels& kernels, int threads) {
  Run run(problem, kernels, threads);
  if (!run.solve()) return false;
  if (!run.troubled()) return true;
  Problem again = problem;
  again.layer.repair = true;
  return Run(again, kernels, threads).solve();
}

}  // namespace linattn
