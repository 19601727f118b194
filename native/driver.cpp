#include "driver.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "threads.h"

namespace linattn {
namespace {

// The number of pieces depends on the sizes alone, and partial sums are merged in their order: the same input gives
// the same bits whichever thread took which piece.
constexpr int64_t kPieces = 16;      // wanted of a whole call
constexpr int64_t kPieceRows = 256;  // pieces are multiples of it, so that they end where a block ends
constexpr double kSerialWork = 2e6;  // multiply-adds below which waking a thread costs more than it brings

double exact_power(int64_t n) {
  if (n < -1022) return 0;
  const uint64_t bits = static_cast<uint64_t>(n + 1023) << 52;
  double x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

struct Free {
  void operator()(void* p) const { ::operator delete(p, std::align_val_t(64)); }
};
using Memory = std::unique_ptr<void, Free>;

Memory allocate(int64_t bytes) {
  return Memory(::operator new(static_cast<size_t>(bytes > 0 ? bytes : 1), std::align_val_t(64)));
}

int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Where the operands of one batch element begin.
struct Place {
  View q, k, v;
  MaskView mask;
  OutView out;
  int64_t before;  // index of the given state
};

class Run {
 public:
  Run(const Problem& p, const Kernels& kernels, int threads) : p_(p), kernels_(kernels), threads_(threads) {
    features_ = p.layer.features;
    d_v_ = p.layer.d_v;
    state_bytes_ = padded((features_ * d_v_ + features_) * 8 + (exponential() ? features_ * 4 : 0));
    prepared_bytes_ = padded(kernels.prepared_bytes(p.layer));
    for (int i = 0; i < p.axis_count; ++i) (p.axes[i].keys ? states_ : groups_) *= p.axes[i].size;
  }

  bool solve() {
    if (states_ == 0 || groups_ == 0 || p_.sequences == 0) return true;
    try {
      plan_pieces();
      Stage stages[3] = {};
      int count = 0;
      switch (p_.form) {
        case Form::parallel:
          if (whole()) {
            stages[count++] = {units_, guarded<&Run::whole_parallel>};
          } else {
            allocate_shared(true);
            stages[count++] = {units_ * pieces_, guarded<&Run::partial_sums>};
            stages[count++] = {units_, guarded<&Run::merge_sums>};
            stages[count++] = {units_ * groups_ * query_pieces_, guarded<&Run::query_piece>};
          }
          break;
        case Form::absorb:
          if (whole()) {
            stages[count++] = {units_, guarded<&Run::whole_absorb>};
          } else {
            allocate_shared(false);
            stages[count++] = {units_ * pieces_, guarded<&Run::partial_sums>};
            stages[count++] = {units_, guarded<&Run::merge_sums>};
          }
          break;
        case Form::query:
          if (whole()) {
            stages[count++] = {units_, guarded<&Run::whole_query>};
          } else {
            allocate_shared(true);
            stages[count++] = {units_, guarded<&Run::prepare_given>};
            stages[count++] = {units_ * groups_ * query_pieces_, guarded<&Run::query_piece>};
          }
          break;
        case Form::causal:
          if (whole()) {
            stages[count++] = {units_, guarded<&Run::whole_causal>};
          } else {
            allocate_shared(false);
            stages[count++] = {units_ * (pieces_ - 1), guarded<&Run::causal_sums>};
            stages[count++] = {units_, guarded<&Run::scan_sums>};
            stages[count++] = {units_ * pieces_, guarded<&Run::causal_piece>};
          }
          break;
        case Form::quadratic:
          stages[count++] = {units_ * groups_ * query_pieces_, guarded<&Run::quadratic_piece>};
          break;
        case Form::step:
          stages[count++] = {units_, guarded<&Run::one_step>};
          break;
      }
      run_stages(stages, count, this, threads_);
    } catch (const std::bad_alloc&) {
      return false;
    }
    return !failed_.load();
  }

  // Whether rows of output have left the working precision's range and hold something not finite.
  bool troubled() const { return troubled_.load(); }

 private:
  bool exponential() const { return p_.layer.map == Map::exp; }

  // ---- how the work is cut ----

  void plan_pieces() {
    units_ = states_ * p_.sequences;
    int64_t longest_k = p_.n_k, longest_q = p_.n_q;
    if (p_.cu_seqlens) {
      longest_k = 0;
      for (int64_t s = 0; s < p_.sequences; ++s) {
        const int64_t n = p_.cu_seqlens[s + 1] - p_.cu_seqlens[s];
        if (n > longest_k) longest_k = n;
      }
      longest_q = longest_k;
    }
    pieces_ = cut(longest_k, units_);
    query_pieces_ = cut(longest_q, units_ * groups_);
    const double rows = static_cast<double>(p_.n_k) * static_cast<double>(states_) +
                        static_cast<double>(p_.n_q) * static_cast<double>(states_) * static_cast<double>(groups_);
    double each = static_cast<double>(features_ * d_v_);
    if (p_.form == Form::quadratic) each = static_cast<double>((features_ + d_v_) * p_.n_k) / 2;
    if (rows * each < kSerialWork) threads_ = 1;
    if (p_.form == Form::causal && !cutting_pays()) pieces_ = 1;
  }

  // A causal sequence in pieces computes the sums of all but the last twice: 1.4 times the work. Whole sequences are
  // better unless they leave more of the threads idle. (So the bits of a causal result depend on the thread count.)
  bool cutting_pays() const {
    const int64_t rounds = (units_ + threads_ - 1) / threads_;
    return static_cast<double>(rounds * threads_) > 1.4 * static_cast<double>(units_);
  }

  // Pieces of a sequence of n rows when there are `others` to run beside it.
  static int64_t cut(int64_t n, int64_t others) {
    const int64_t wanted = (kPieces + others - 1) / others;
    const int64_t most = (n + kPieceRows - 1) / kPieceRows;
    const int64_t pieces = wanted < most ? wanted : most;
    return pieces > 0 ? pieces : 1;
  }

  // Whether one thread does all of a unit, so that no more states exist at a time than threads.
  bool whole() const {
    const bool wide_queries = p_.form == Form::parallel || p_.form == Form::query;
    return pieces_ == 1 && (!wide_queries || units_ >= kPieces || groups_ * query_pieces_ <= 2);
  }

  struct Range {
    int64_t begin, end;
  };
  static Range piece_of(int64_t n, int64_t pieces, int64_t piece) {
    const int64_t each = ((n + pieces - 1) / pieces + kPieceRows - 1) / kPieceRows * kPieceRows;
    const int64_t begin = piece * each < n ? piece * each : n;
    return {begin, begin + each < n ? begin + each : n};
  }

  int64_t sequence_of(int64_t unit) const { return unit / states_; }
  Range rows_of(int64_t unit) const {  // of a packed sequence, or all
    if (!p_.cu_seqlens) return {0, p_.n_k};
    const int64_t s = sequence_of(unit);
    return {p_.cu_seqlens[s], p_.cu_seqlens[s + 1]};
  }
  int64_t keys_of(int64_t unit) const {
    const Range rows = rows_of(unit);
    return rows.end - rows.begin;
  }
  int64_t queries_of(int64_t unit) const { return p_.cu_seqlens ? keys_of(unit) : p_.n_q; }

  Place place_of(int64_t unit, int64_t group) const {
    Place at{p_.q, p_.k, p_.v, p_.mask, p_.out, 0};
    const int64_t sequence = sequence_of(unit);
    int64_t key_index = unit % states_, group_index = group;
    for (int i = p_.axis_count - 1; i >= 0; --i) {
      const Axis& axis = p_.axes[i];
      int64_t& index = axis.keys ? key_index : group_index;
      const int64_t step = index % axis.size;
      index /= axis.size;
      at.q.data += step * axis.q;
      at.k.data += step * axis.k;
      at.v.data += step * axis.v;
      if (at.mask.data) at.mask.data += step * axis.mask;
      at.out.data += step * axis.out;
      at.before += step * axis.state;
    }
    if (p_.cu_seqlens) {
      const int64_t first = p_.cu_seqlens[sequence];
      at.q.data += first * at.q.row;
      at.k.data += first * at.k.row;
      at.v.data += first * at.v.row;
      if (at.mask.data) at.mask.data += first * at.mask.stride;
      at.out.data += first * at.out.row;
      at.before += sequence * before_stride();
    }
    return at;
  }

  // Given states of packed sequences have a leading axis of sequences.
  int64_t before_stride() const {
    int64_t stride = 1;
    for (int i = 0; i < p_.axis_count; ++i)
      if (p_.axes[i].state != 0) stride *= p_.axes[i].size;
    return stride;
  }

  // ---- states ----

  StateRef state_at(StateRef base, int64_t index) const {
    return {base.kv + index * features_ * d_v_, base.k_sum + index * features_,
            base.log_scale ? base.log_scale + index * features_ : nullptr};
  }

  StateRef state_in(void* memory) const {
    double* kv = static_cast<double*>(memory);
    double* k_sum = kv + features_ * d_v_;
    return {kv, k_sum, exponential() ? reinterpret_cast<int32_t*>(k_sum + features_) : nullptr};
  }

  void clear(StateRef state) const {
    std::memset(state.kv, 0, static_cast<size_t>(features_ * d_v_) * 8);
    std::memset(state.k_sum, 0, static_cast<size_t>(features_) * 8);
    if (state.log_scale)
      for (int64_t d = 0; d < features_; ++d) state.log_scale[d] = kEmpty;
  }

  void copy(StateRef to, StateRef from) const {
    if (to.kv == from.kv) return;
    std::memcpy(to.kv, from.kv, static_cast<size_t>(features_ * d_v_) * 8);
    std::memcpy(to.k_sum, from.k_sum, static_cast<size_t>(features_) * 8);
    if (to.log_scale) std::memcpy(to.log_scale, from.log_scale, static_cast<size_t>(features_) * 4);
  }

  void start(StateRef state, int64_t before) const {
    if (p_.before.kv)
      copy(state, state_at(p_.before, before));
    else
      clear(state);
  }

  void merge(StateRef into, StateRef other) const {
    for (int64_t d = 0; d < features_; ++d) {
      double own = 1, theirs = 1;
      if (into.log_scale) {
        const int64_t a = into.log_scale[d], b = other.log_scale[d], top = a > b ? a : b;
        own = exact_power(a - top);
        theirs = exact_power(b - top);
        into.log_scale[d] = static_cast<int32_t>(top);
      }
      double* row = into.kv + d * d_v_;
      const double* more = other.kv + d * d_v_;
      for (int64_t c = 0; c < d_v_; ++c) row[c] = row[c] * own + more[c] * theirs;
      into.k_sum[d] = into.k_sum[d] * own + other.k_sum[d] * theirs;
    }
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

  // A failed allocation in any piece ends the call with an error; no exception leaves a thread.
  template <void (Run::*piece)(int64_t)>
  static void guarded(void* self, int64_t index) {
    Run* run = static_cast<Run*>(self);
    try {
      (run->*piece)(index);
    } catch (const std::bad_alloc&) {
      run->failed_.store(true);
    }
  }

  void note(bool trouble) {
    if (trouble) troubled_.store(true, std::memory_order_relaxed);
  }

  void whole_parallel(int64_t unit) {
    const Own mine = own();
    const Place at = place_of(unit, 0);
    const StateRef state = result_or(unit, mine.state);
    start(state, at.before);
    kernels_.absorb(p_.layer, state, at.k, at.v, at.mask, 0, keys_of(unit), mine.scratch);
    query_all(unit, state, mine);
  }

  void whole_query(int64_t unit) { query_all(unit, state_at(p_.before, place_of(unit, 0).before), own()); }

  void query_all(int64_t unit, StateRef state, const Own& mine) {
    kernels_.prepare(p_.layer, state, mine.prepared);
    for (int64_t g = 0; g < groups_; ++g) {
      const Place here = place_of(unit, g);
      note(kernels_.query(p_.layer, mine.prepared, here.q, here.out, 0, queries_of(unit), mine.scratch));
    }
  }

  void whole_absorb(int64_t unit) {
    const Own mine = own();
    const Place at = place_of(unit, 0);
    const StateRef state = state_at(p_.after, unit);
    start(state, at.before);
    kernels_.absorb(p_.layer, state, at.k, at.v, at.mask, 0, keys_of(unit), mine.scratch);
  }

  void absorb_range(int64_t unit, int64_t piece, StateRef into) {
    const Own mine = own();
    const Place at = place_of(unit, 0);
    const Range rows = piece_of(keys_of(unit), pieces_, piece);
    clear(into);
    kernels_.absorb(p_.layer, into, at.k, at.v, at.mask, rows.begin, rows.end, mine.scratch);
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
    note(kernels_.query(p_.layer, prepared(unit), at.q, at.out, rows.begin, rows.end, mine.scratch));
  }

  void quadratic_piece(int64_t index) {
    const int64_t piece = index % query_pieces_, group = index / query_pieces_ % groups_;
    const int64_t unit = index / query_pieces_ / groups_;
    const Range rows = piece_of(queries_of(unit), query_pieces_, piece);
    const Own mine = own();
    const Place at = place_of(unit, group);
    note(kernels_.quadratic(p_.layer, at.q, at.k, at.v, at.mask, keys_of(unit), at.out, rows.begin, rows.end,
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
      kernels_.step(p_.layer, state, heads, mine.scratch);
    else
      note(kernels_.causal(p_.layer, state, heads, rows.begin, rows.end, mine.prepared, mine.scratch));
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

  const Problem& p_;
  const Kernels& kernels_;
  int threads_;
  int64_t features_ = 0, d_v_ = 0, state_bytes_ = 0, prepared_bytes_ = 0;
  int64_t states_ = 1, groups_ = 1;  // states of one sequence; queries that share a state
  int64_t units_ = 1;                // states of all sequences
  int64_t pieces_ = 1, query_pieces_ = 1;
  Memory shared_, prepared_;
  std::atomic<bool> failed_{false}, troubled_{false};
};

}  // namespace

bool prefers_quadratic(int64_t n_q, int64_t n_k, int64_t features, int64_t d_v, int64_t groups) {
  const double all_q = static_cast<double>(n_q) * static_cast<double>(groups);
  const double linear = (static_cast<double>(n_k) + all_q) * static_cast<double>(features) * static_cast<double>(d_v);
  const double quadratic = all_q * static_cast<double>(n_k) * static_cast<double>(features + d_v);
  return quadratic < linear;
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
