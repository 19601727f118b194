// absorb: state += the sums of a range of keys and values.
#pragma once

#include "rows.h"

namespace linattn {
namespace LINATTN_ISA_NS {

// ---- adding a tile to the double state -------------------------------------------------------------------

template <class T>
static inline void add_to_state(double* state, const T* tile, int64_t count) {
  for (int64_t c = 0; c < count; ++c) state[c] += static_cast<double>(tile[c]);
}

// sums: (NV * lanes) = the columns of x: (rows, NV * lanes)
template <class T, int NV>
[[gnu::noinline]] static void column_sums(const T* x, int64_t x_row, int64_t rows, T* sums) {
  Vec<T> sum[NV] = {};
  for (int64_t r = 0; r < rows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) sum[j] += load(x + r * x_row + j * kLanes<T>);
#pragma GCC unroll 4
  for (int j = 0; j < NV; ++j) store(sums + j * kLanes<T>, sum[j]);
}

// Where pending sums came from, for the case that they must be made again.
struct Source {
  View k, v;
  MaskView mask;
};

template <class T>
static void absorb_of(const Layer& layer, StateRef state, View k, View v, MaskView mask, int64_t begin, int64_t end,
                      void* scratch, const Prepared<T>* straight = nullptr);

template <class T>
static int64_t absorb_bytes(const Layer& layer);

// The sums of the last blocks, in the working precision, on their way to the double state. Each block is summed in
// registers and added here; every kFlushRows rows all of it is added to the state. (Converting every block of 64 cost
// 8 % of the causal form.) With `ready`, a prepared state follows every block, by at most kFlushRows / kChunk
// additions of its own, and is rounded from the double state anew at each flush. With `straight`, which is no more
// than kFlushRows rows, the sums are made there, as queries read them, and the double state isn't touched: rounded to
// it and back they would be the same.
template <class T>
class PendingSums {
 public:
  // `later`: the state is empty, and nothing reads the prepared one but its k_sum before the first add.
  PendingSums(const Layer& layer, StateRef state, Source source, Arena& arena, const Prepared<T>* ready = nullptr,
              bool later = false, const Prepared<T>* straight = nullptr)
      : layer_(layer),
        w_(layer),
        state_(state),
        source_(source),
        ready_(ready),
        straight_(straight),
        kv_(straight ? straight->kv : arena.take<T>(w_.d * w_.v_row)),
        k_sum_(straight ? straight->k_sum : arena.take<T>(w_.d_pad)),
        again_(sizeof(T) == 4 ? arena.take<char>(absorb_bytes<double>(layer)) : nullptr) {
    if (later) {
      for (int64_t d = 0; d < w_.d_pad; ++d) ready_->k_sum[d] = 0;
    } else {
      begin();
    }
  }

  // `empty`: so is the state, and needn't be read.
  void begin(bool empty = false) {
    clear();
    if (!empty) {
      prepare();
    } else if (ready_) {
      for (int64_t i = 0; i < w_.d * w_.v_row; ++i) ready_->kv[i] = 0;
    }
    begun_ = true;
  }

  // += phi: (rows, D)^T v: (rows, d_v), and the column sums of phi
  void add(const T* phi, Rows<T> v, int64_t first, int64_t rows, Ahead (&ahead)[2]) {
    if (!begun_) begin(true);  // see `later`
    if (rows_ == 0) first_ = first;
    for_strips<T, kTileVectors>(w_.v_pad, [&](auto vectors, int64_t c) {
      constexpr int NV = decltype(vectors)::value;
      for (int64_t d = 0; d < w_.d; d += kTileRows<NV>)
        with_rows<kTileRows<NV>>(w_.d - d, [&](auto tile_rows) {
          ahead[0].touch(2);
          ahead[1].touch(2);
          const int64_t at = d * w_.v_row + c;
          add_outer_tile<T, decltype(tile_rows)::value, NV>(rows, phi + d, w_.d_row, v.data + c, v.row, kv_ + at,
                                                            ready_ ? ready_->kv + at : nullptr, w_.v_row);
        });
    });
    for_strips<T, 4>(w_.d_pad, [&](auto vectors, int64_t d) {
      constexpr int NV = decltype(vectors)::value;
      T sums[NV * kLanes<T>];
      column_sums<T, NV>(phi + d, w_.d_row, rows, sums);
      for (int64_t j = 0; j < NV * kLanes<T>; ++j) {
        k_sum_[d + j] += sums[j];
        if (ready_) ready_->k_sum[d + j] += sums[j];
      }
    });
    rows_ = first + rows - first_;
    if (rows_ >= kFlushRows && !straight_) flush();
  }

  // Adds everything to the state and starts again.
  void flush() {
    if (rows_ == 0) return;
    finish();
    begin();
  }

  // The last flush: nothing is read or added afterwards.
  void finish() {
    if (rows_ == 0) return;
    if (sizeof(T) == 4 && out_of_range()) {  // these rows again, in double
      if (straight_) clear_state();
      absorb_of<double>(layer_, state_, source_.k, source_.v, source_.mask, first_, first_ + rows_, again_);
      if (straight_) prepare_of<T>(layer_, state_, straight_->kv);
    } else if (!straight_) {
      for (int64_t d = 0; d < w_.d; ++d) add_to_state(state_.kv + d * w_.v, kv_ + d * w_.v_row, w_.v);
      add_to_state(state_.k_sum, k_sum_, w_.d);
    }
  }

  void prepare() {
    if (ready_) prepare_of<T>(layer_, state_, ready_->kv);
  }

 private:
  // Whether the sums have left the range of T: overflown (or not finite from the start), or so small that values of phi
  // may have vanished: with maps that are positive any of them, with products all.
  bool out_of_range() const {
    if (!all_finite(kv_, w_.v_row, w_.d, w_.v_pad) || !all_finite(k_sum_, 0, 1, w_.d)) return true;
    if (may_vanish(layer_)) return all_below(k_sum_, w_.d, T(kLeastSum));
    if (!is_positive(layer_.map)) return false;
    for (int64_t d = 0; d < w_.d; ++d)
      if (k_sum_[d] < T(kLeastSum)) return true;
    return false;
  }

  void clear() {
    for (int64_t i = 0; i < w_.d * w_.v_row; ++i) kv_[i] = 0;
    for (int64_t d = 0; d < w_.d_pad; ++d) k_sum_[d] = 0;
    rows_ = 0;
  }

  void clear_state() {
    for (int64_t i = 0; i < w_.d * w_.v; ++i) state_.kv[i] = 0;
    for (int64_t d = 0; d < w_.d; ++d) state_.k_sum[d] = 0;
  }

  const Layer& layer_;
  const Widths<T> w_;
  StateRef state_;
  Source source_;
  const Prepared<T>*ready_, *straight_;
  T *kv_, *k_sum_;
  void* again_;
  int64_t first_ = 0, rows_ = 0;
  bool begun_ = false;
};

// Bytes of scratch that absorb takes.
template <class T>
static int64_t absorb_bytes(const Layer& layer) {
  const Widths<T> w(layer);
  const int64_t rows = rows_per_block<T>(kAbsorbRows, w.d_pad);
  const int64_t item = sizeof(T);
  const int64_t own = (rows * (w.d_row + w.v_row) + w.room(rows) + w.d * w.v_row + 2 * w.d_pad) * item + rows + 9 * 64;
  if constexpr (sizeof(T) == 4) return own + absorb_bytes<double>(layer);
  return own;
}

template <class T>
static void absorb_of(const Layer& layer, StateRef state, View k, View v, MaskView mask, int64_t begin, int64_t end,
                      void* scratch, const Prepared<T>* straight) {
  const Widths<T> w(layer);
  const int64_t most = rows_per_block<T>(kAbsorbRows, w.d_pad);
  Arena arena(scratch);
  T* phi = arena.take<T>(most * w.d_row);
  T* values = arena.take<T>(most * w.v_row);
  T* room = arena.take<T>(w.room(most));
  T* scale = arena.take<T>(w.d_pad);
  uint8_t* kept = arena.take<uint8_t>(most);
  PendingSums<T> pending(layer, state, {k, v, mask}, arena, nullptr, false, straight);
  for (int64_t r0 = begin; r0 < end; r0 += most) {
    const int64_t rows = min_of(most, end - r0);
    const int64_t count = mask.data ? read_mask(mask, r0, rows, kept) : rows;
    if (count == 0) continue;
    const bool some = count < rows;
    if (layer.map == Map::exp) {
      raw_rows(layer, k, r0, rows, phi, layer.projection, room);
      column_exponents<T>(phi, w.d_row, rows, w.d_pad, some ? kept : nullptr, scale);
      if (passes_scales(layer, state.log_scale, scale)) {
        pending.flush();
        raise_scales(layer, state, scale);
      }
      prepare_scales(layer, state.log_scale, scale);
      exp_keys(layer, scale, phi, rows);
    } else {
      map_block(layer, k, r0, rows, phi, layer.projection, room);
    }
    Rows<T> right = rows_of<T>(layer.dtype, v, r0, rows, w.v, true, values, w.v_row);
    if (some) {
      right = copied_rows(right, rows, w, values);
      clear_masked(kept, phi, w.d_row, rows);
      clear_masked(kept, values, w.v_row, rows);
    }
    const int64_t next = r0 + rows, last = min_of(next + most, end);
    Ahead ahead[2] = {Ahead(layer.dtype, k.data, k.row, k.col, w.x, next, last),
                      Ahead(layer.dtype, v.data, v.row, v.col, w.v, next, last)};
    pending.add(phi, right, r0, rows, ahead);
  }
  pending.finish();
}

// The sums of n keys and values, as queries read them. `spare` is a state for what has to be made in double. False:
// too many keys, or a map with scales; they have to go through a state.
template <class T>
static bool sums_of(const Layer& layer, StateRef spare, View k, View v, MaskView mask, int64_t n, void* prepared,
                    void* scratch) {
  if (n > kFlushRows || layer.map == Map::exp) return false;
  const Prepared<T> straight(layer, prepared);
  absorb_of<T>(layer, spare, k, v, mask, 0, n, scratch, &straight);
  return true;
}

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
