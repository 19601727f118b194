// The state as gradients walk it: turned, so that a row of it is a value's feature and a column a feature of phi.
//
// With values extended by a one, v' = [v, 1], and the state by its k_sum, S' = [S, Z], numerator and denominator are
// one product, phi(q) S', and their gradients are too. The turned state is S'^T = sum over j of v'_j^T phi(k_j).
#pragma once

#include "blocks.h"
#include "prepared.h"
#include "rows.h"

namespace linattn {
namespace LINATTN_ISA_NS {

// Sizes with the parts exchanged. In the working precision the one stands behind the padded value, so that a block
// of values begins with whole vectors: features = padded d_v + 1, d_v = D.
template <class T>
static Layer turned_layer(const Layer& layer) {
  Layer turned = layer;
  turned.features = round_up<T>(layer.d_v) + 1;
  turned.d_v = layer.features;
  return turned;
}

template <class T>
static void prepare_turned(const Layer& layer, TurnedRef state, T* ready) {
  const Widths<T> w(layer), t(turned_layer<T>(layer));
  for (int64_t r = 0; r < t.d; ++r) {
    T* row = ready + r * t.v_row;
    const double* from = r < w.v ? state.sums + r * w.d : r == w.v_pad ? state.sums + w.v * w.d : nullptr;
    for (int64_t d = 0; d < w.d_pad; ++d) row[d] = from && d < w.d ? static_cast<T>(from[d]) : T(0);
  }
}

// plain: (padded D, padded d_v) = the turned block without its last row, turned back.
template <class T>
static void turn_back(const Layer& layer, const T* turned, T* plain) {
  constexpr int64_t lanes = kLanes<T>;
  const Widths<T> w(layer), t(turned_layer<T>(layer));
  for (int64_t c = 0; c < w.v_pad; c += lanes)
    for (int64_t d = 0; d < w.d_pad; d += lanes) {
      Vec<T> square[lanes];
#pragma GCC unroll 16
      for (int64_t i = 0; i < lanes; ++i) square[i] = load(turned + (c + i) * t.v_row + d);
      transpose_square<T>(square);
#pragma GCC unroll 16
      for (int64_t i = 0; i < lanes; ++i) store(plain + (d + i) * w.v_row + c, square[i]);
    }
}

// Sums over rows of left^T right, (rows, padded d_v + 1)^T (rows, D), on their way to a turned double state. As with
// PendingSums they stay in the working precision for kFlushRows rows, and `ready`, if given, follows each block.
template <class T>
class TurnedSums {
 public:
  TurnedSums(const Layer& layer, TurnedRef state, Arena& arena, T* ready)
      : layer_(layer),
        w_(layer),
        t_(turned_layer<T>(layer)),
        state_(state),
        ready_(ready),
        pending_(arena.take<T>(t_.d * t_.v_row)) {
    begin();
  }
  static int64_t elements(const Layer& layer) {
    const Widths<T> t(turned_layer<T>(layer));
    return t.d * t.v_row;
  }

  void add(const T* left, const T* right, int64_t rows, AheadAll& ahead) {
    for_strips<T, kTileVectors>(t_.v_pad, [&](auto vectors, int64_t c) {
      constexpr int NV = decltype(vectors)::value;
      for (int64_t r = 0; r < t_.d; r += kTileRows<NV>)
        with_rows<kTileRows<NV>>(t_.d - r, [&](auto tile_rows) {
          ahead.touch(2);
          const int64_t at = r * t_.v_row + c;
          add_outer_tile<T, decltype(tile_rows)::value, NV>(rows, left + r, t_.d_row, right + c, t_.v_row,
                                                            pending_ + at, ready_ ? ready_ + at : nullptr, t_.v_row);
        });
    });
    rows_ += rows;
    if (rows_ >= kFlushRows) flush();
  }

  void flush() {
    if (rows_ == 0) return;
    finish();
    begin();
  }

  // The last flush: nothing is read or added afterwards.
  void finish() {
    if (rows_ == 0) return;
    lost_ |= !all_finite(pending_, t_.v_row, t_.d, w_.d_pad);
    for (int64_t r = 0; r <= w_.v; ++r) {
      const T* from = pending_ + (r < w_.v ? r : w_.v_pad) * t_.v_row;
      double* to = state_.sums + r * w_.d;
      for (int64_t d = 0; d < w_.d; ++d) to[d] += static_cast<double>(from[d]);
    }
  }

  // Raises the scales that `top` passes, see raise_scales.
  void raise(const T* top) {
    flush();
    for (int64_t d = 0; d < w_.d; ++d) {
      if (!passes_scale(state_.log_scale[d], top[d])) continue;
      const int32_t to = static_cast<int32_t>(top[d]);
      const double factor = exact_power(static_cast<int64_t>(state_.log_scale[d]) - to);
      for (int64_t r = 0; r <= w_.v; ++r) state_.sums[r * w_.d + d] *= factor;
      state_.log_scale[d] = to;
    }
    if (ready_) prepare_turned(layer_, state_, ready_);
  }

  // Whether sums have left the range of the working precision, or were not finite from the start.
  bool lost() const { return lost_; }

 private:
  void begin() {
    for (int64_t i = 0; i < t_.d * t_.v_row; ++i) pending_[i] = 0;
    rows_ = 0;
    if (ready_) prepare_turned(layer_, state_, ready_);
  }

  const Layer& layer_;
  const Widths<T> w_, t_;
  TurnedRef state_;
  T *ready_, *pending_;
  int64_t rows_ = 0;
  bool lost_ = false;
};

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
