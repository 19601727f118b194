// Gradients, not causal. With g the gradient with respect to a row of out, and w = 1 / (denominator + eps),
//
//   g' = [w g, -w (g . out)],   v' = [v, 1],   S' = [S, Z],   R' = sum over i of phi(q_i)^T g'_i = [dS, dZ]
//   dphi(q) = g' S'^T           dphi(k) = v' R'^T             dv = phi(k) dS
//
// so that whatever the forward pass divides, the backward pass is three products and one sum. Without normalization
// w is 1 and the last entry of g' is 0. R' is kept turned, as TurnedSums says.
//
// Exponential maps. S' is kept divided by 2^s_d a feature, a row of phi(q) by 2^p, and the w of that row is then 2^p
// too large: R' takes exp(q_d - p ln 2), and has scales of its own, since the terms phi(k) phi(q) w are at most 1.
#pragma once

#include "derivatives.h"
#include "query.h"
#include "turned.h"

namespace linattn {
namespace LINATTN_ISA_NS {

// A row's weight w and its power p: the weight in true units is weight * 2^-power. Weight 0: the row takes no part.
template <class T>
struct RowWeights {
  T* pairs;
  int64_t stride;  // in pairs; negative where rows are walked backwards
  T& weight(int64_t r) const { return pairs[2 * r * stride]; }
  T& power(int64_t r) const { return pairs[2 * r * stride + 1]; }
};

// The layer as the gradients compute it: in T, whatever the dtype, and without the row powers of a repair.
static inline Layer plain_layer(const Layer& layer) {
  Layer plain = layer;
  plain.repair = false;
  return plain;
}

// What maps a block of queries needs of a prepared state: its k_sum and scales, not its kv.
template <class T>
static Prepared<T> row_state(const Layer& layer, Arena& arena) {
  Layer narrow = layer;
  narrow.d_v = 1;
  return Prepared<T>(narrow, arena.take<char>(Prepared<T>(narrow, nullptr).bytes));
}
template <class T>
static int64_t row_state_bytes(const Layer& layer) {
  Layer narrow = layer;
  narrow.d_v = 1;
  return Prepared<T>(narrow, nullptr).bytes + 64;
}

// out: (rows, padded) = a: (rows, depth) b: (depth, padded)
template <class T>
static void multiply_rows(int64_t rows, int64_t depth, const T* a, int64_t a_row, const T* b, int64_t b_row,
                          int64_t padded, T* out, int64_t out_row, AheadAll& ahead) {
  for_strips<T, kTileVectors>(padded, [&](auto vectors, int64_t c) {
    constexpr int NV = decltype(vectors)::value;
    for (int64_t r = 0; r < rows; r += kTileRows<NV>)
      with_rows<kTileRows<NV>>(rows - r, [&](auto tile_rows) {
        ahead.touch(4);
        product_tile<T, decltype(tile_rows)::value, NV>(depth, a + r * a_row, a_row, b + c, b_row,
                                                        static_cast<const T*>(nullptr), out + r * out_row + c, out_row);
      });
  });
}

// x: (rows, padded D) -> exp(x) 2^(sign * scale + shift of the row), in place; padding columns become 0.
template <class T>
static void exp_rows(const Layer& layer, const T* scale, T sign, const RowWeights<T>* minus_powers, int64_t first, T* x,
                     int64_t rows) {
  const Widths<T> w(layer);
  for (int64_t r = 0; r < rows; ++r) {
    T* row = x + r * w.d_row;
    const T shift = minus_powers ? -minus_powers->power(first + r) : T(0);
    for (int64_t c = 0; c < w.d_pad; c += kLanes<T>)
      store(row + c, exp_shifted<T>(load(row + c), sign * load(scale + c) + shift));
    for (int64_t c = w.d; c < w.d_pad; ++c) row[c] = 0;
  }
}

// top: (padded D) = the greatest exponent of exp(x) 2^-power over rows that have weight.
template <class T>
static void weighted_exponents(const Layer& layer, const T* x, const RowWeights<T>& weights, int64_t first,
                               int64_t rows, T* top) {
  const Widths<T> w(layer);
  for (int64_t c = 0; c < w.d_pad; c += kLanes<T>) {
    Vec<T> best = splat(T(kEmpty));
    for (int64_t r = 0; r < rows; ++r) {
      if (weights.weight(first + r) == 0) continue;
      const Vec<T> n = exponent_of<T>(load(x + r * w.d_row + c)) - weights.power(first + r);
      best = (n > best) ? n : best;  // NaN raises nothing
    }
    store(top + c, best);
  }
}

// Weights from the denominators of a block, in `scales`; returns whether a row has left the range of T.
template <class T>
static bool weigh_rows(const Layer& layer, const RowScales<T>& scales, const T* phi_q, const RowWeights<T>& weights,
                       int64_t first, int64_t rows) {
  const Widths<T> w(layer);
  const T least = static_cast<T>(kLeastTotal), most = Format<T>::kMost / 4;
  bool lost = false;
  for (int64_t r = 0; r < rows; ++r) {
    const T total = scales.total[r];
    T weight = scales.factor[r], power = layer.map == Map::exp ? scales.power[r] : T(0);
    const bool unseen = layer.map == Map::exp && power < T(0.75 * kEmpty);
    if (!layer.normalize) {
      weight = layer.map == Map::exp ? static_cast<T>(exact_power(static_cast<int64_t>(power))) : T(1);
    } else {
      const bool small = total < least && total > -least, large = !(total < most && total > -most);
      lost |= !unseen && (large || (small && layer.map != Map::exp && !zero_is_exact(layer, phi_q + r * w.d_row, w.d)));
      if (total == 0) weight = 0;
    }
    weights.weight(first + r) = unseen ? T(0) : weight;
    weights.power(first + r) = unseen ? T(0) : power;
  }
  return lost;
}

// left: (rows, padded d_v + 1) = g', zeros where a row has no weight. `row`: room for one row of out.
template <class T>
static void load_gradients(const Layer& layer, View grad_out, View out, int64_t begin, int64_t rows,
                           const RowWeights<T>& weights, int64_t first, T* left, T* row) {
  const Widths<T> w(layer), t(turned_layer<T>(layer));
  for (int64_t c = 0; c < w.v_pad; ++c) row[c] = 0;
  for (int64_t r = 0; r < rows; ++r) {
    T* to = left + r * t.d_row;
    const T weight = weights.weight(first + r);
    const int64_t loaded = weight == 0 ? 0 : w.v;
    for (int64_t c = loaded; c < t.d_pad; ++c) to[c] = 0;
    if (weight == 0) continue;
    load_row<T>(layer.dtype, grad_out.data + (begin + r) * grad_out.row, grad_out.col, to, w.v);
    if (layer.normalize) load_row<T>(layer.dtype, out.data + (begin + r) * out.row, out.col, row, w.v);
    Vec<T> dot = {};
    for (int64_t c = 0; c < w.v_pad; c += kLanes<T>) {
      const Vec<T> g = load(to + c);
      dot += g * load(row + c);
      store(to + c, g * weight);
    }
    to[w.v_pad] = layer.normalize ? -weight * sum_lanes<T>(dot) : T(0);
  }
}

// left: (rows, padded d_v + 1) = v', zeros where a key is masked.
template <class T>
static void load_values(const Layer& layer, View v, int64_t begin, int64_t rows, const uint8_t* kept, T* left) {
  const Widths<T> w(layer), t(turned_layer<T>(layer));
  for (int64_t r = 0; r < rows; ++r) {
    T* to = left + r * t.d_row;
    const bool takes_part = !kept || kept[r];
    if (takes_part) load_row<T>(layer.dtype, v.data + (begin + r) * v.row, v.col, to, w.v);
    for (int64_t c = takes_part ? w.v : 0; c < t.d_pad; ++c) to[c] = 0;
    if (takes_part) to[w.v_pad] = 1;
  }
}

template <class T>
static void clear_row(T* row, int64_t count) {
  for (int64_t c = 0; c < count; ++c) row[c] = 0;
}

// dphi: (rows, padded D) times phi'(x), on its way out; false: not all of it is finite. Rows for which taken(r) is
// false become 0, whatever NaN x or dphi hold.
template <class T, class Taken>
static bool finish_features(const Layer& layer, View x, int64_t begin, int64_t rows, const T* phi_x, T* dphi, T* buffer,
                            OutView to, Taken&& taken) {
  const Widths<T> w(layer);
  if (layer.map != Map::identity) {
    const bool from_phi = layer.map == Map::elu1 || layer.map == Map::relu || layer.map == Map::exp;
    const Rows<T> raw =
        from_phi ? Rows<T>{phi_x, w.d_row} : rows_of<T>(layer.dtype, x, begin, rows, w.d, false, buffer, w.d_row);
    apply_slopes(layer.map, raw.data, raw.row, phi_x, dphi, w.d_row, rows, w.d);
  }
  for (int64_t r = 0; r < rows; ++r) {
    if (!taken(r)) clear_row(dphi + r * w.d_row, w.d_pad);
    store_row<T>(layer.dtype, to.data + (begin + r) * to.row, to.col, dphi + r * w.d_row, w.d);
  }
  return all_finite(dphi, w.d_row, rows, w.d);
}

// The same for dv: (rows, padded d_v).
template <class T, class Taken>
static bool finish_values(const Layer& layer, int64_t begin, int64_t rows, T* dv, OutView to, Taken&& taken) {
  const Widths<T> w(layer);
  for (int64_t r = 0; r < rows; ++r) {
    if (!taken(r)) clear_row(dv + r * w.v_row, w.v_pad);
    store_row<T>(layer.dtype, to.data + (begin + r) * to.row, to.col, dv + r * w.v_row, w.v);
  }
  return all_finite(dv, w.v_row, rows, w.v);
}

// What key_gradient and query_gradient read: the turned state, and beside it what they need to map rows.
template <class T>
struct PreparedTurned {
  Prepared<T> rows;
  T *turned, *plain;
  int64_t bytes;
  PreparedTurned(const Layer& layer, void* memory) : PreparedTurned(layer, Arena(memory), memory) {}

 private:
  PreparedTurned(const Layer& layer, Arena arena, void* memory) : rows(row_state<T>(layer, arena)) {
    const Widths<T> w(layer);
    turned = arena.take<T>(TurnedSums<T>::elements(layer));
    plain = arena.take<T>(w.d_pad * w.v_row);
    bytes = arena.used() - reinterpret_cast<int64_t>(memory);
  }
};

template <class T>
static int64_t turned_bytes_of(const Layer& layer) {
  return PreparedTurned<T>(layer, nullptr).bytes;
}

// The state of all keys, for queries.
template <class T>
static void prepare_keys_of(const Layer& layer, StateRef state, void* memory) {
  const Widths<T> w(layer), t(turned_layer<T>(layer));
  const PreparedTurned<T> ready(layer, memory);
  for (int64_t i = 0; i < t.d * t.v_row; ++i) ready.turned[i] = 0;
  for (int64_t d = 0; d < w.d_pad; ++d) {
    const T sum = d < w.d ? static_cast<T>(state.k_sum[d]) : T(0);
    ready.rows.k_sum[d] = ready.turned[w.v_pad * t.v_row + d] = sum;
    for (int64_t c = 0; d < w.d && c < w.v; ++c) ready.turned[c * t.v_row + d] = static_cast<T>(state.kv[d * w.v + c]);
  }
  if (state.log_scale) prepare_scales(layer, state.log_scale, ready.rows.scale);
}

// The sums over all queries, for keys.
template <class T>
static void prepare_queries_of(const Layer& layer, TurnedRef state, void* memory) {
  const PreparedTurned<T> ready(layer, memory);
  prepare_turned(layer, state, ready.turned);
  turn_back(layer, ready.turned, ready.plain);
  if (state.log_scale) prepare_scales(layer, state.log_scale, ready.rows.scale);
}

// Adds a block of queries, phi(q)^T g', to the sums over queries. For exponential maps phi is made anew, in x, in the
// units of these sums.
template <class T>
static void add_queries(const Layer& layer, TurnedRef into, TurnedSums<T>& sums, View q, int64_t begin, int64_t rows,
                        const RowWeights<T>& weights, int64_t first, const T* left, T* phi_q, T* x, T* top,
                        AheadAll& ahead) {
  const Widths<T> w(layer);
  T* right = phi_q;
  if (layer.map == Map::exp) {
    raw_rows(layer, q, begin, rows, x, nullptr, nullptr);
    weighted_exponents(layer, x, weights, first, rows, top);
    if (passes_scales(layer, into.log_scale, top)) sums.raise(top);
    prepare_scales(layer, into.log_scale, top);
    exp_rows(layer, top, T(-1), &weights, first, x, rows);
    right = x;
  }
  for (int64_t r = 0; r < rows; ++r)
    if (weights.weight(first + r) == 0) clear_row(right + r * w.d_row, w.d_pad);  // NaN times 0 is not 0
  sums.add(left, right, rows, ahead);
}

template <class T>
static bool query_gradient_of(const Layer& given, const void* prepared, const GradientHeads& heads, int64_t group,
                              int64_t begin, int64_t end, TurnedRef into, void* scratch) {
  const Layer layer = plain_layer(given);
  const Widths<T> w(layer), t(turned_layer<T>(layer));
  const PreparedTurned<T> ready(layer, const_cast<void*>(prepared));
  const int64_t most = rows_per_block<T>(kAbsorbRows, w.d_pad);
  Arena arena(scratch);
  T* phi = arena.take<T>(most * w.d_row);
  T* left = arena.take<T>(most * t.d_row);
  T* dphi = arena.take<T>(most * w.d_row);
  T* x = arena.take<T>(most * w.d_row);
  T* row = arena.take<T>(w.v_row);
  T* top = arena.take<T>(w.d_pad);
  const RowWeights<T> weights{arena.take<T>(2 * most), 1};
  RowScales<T> scales(arena, most);
  TurnedSums<T> sums(layer, into, arena, nullptr);
  const View q = heads.q[group];
  bool lost = false;
  for (int64_t r0 = begin; r0 < end; r0 += most) {
    const int64_t rows = min_of(most, end - r0);
    map_queries(layer, ready.rows, q, r0, rows, phi, scales.power, scales.dots, nullptr);
    scales.close(layer, rows);
    lost |= weigh_rows(layer, scales, phi, weights, 0, rows);
    load_gradients(layer, heads.grad_out[group], heads.out[group], r0, rows, weights, 0, left, row);
    AheadAll ahead;
    const int64_t next = r0 + rows, last = min_of(next + most, end);
    ahead.add(layer.dtype, q, w.d, next, last);
    ahead.add(layer.dtype, heads.grad_out[group], w.v, next, last);
    ahead.add(layer.dtype, heads.out[group], w.v, next, last);
    ahead.add(layer.dtype, heads.dq[group], w.d, next, last);
    multiply_rows(rows, t.d, left, t.d_row, ready.turned, t.v_row, w.d_pad, dphi, w.d_row, ahead);
    lost |= !finish_features(layer, q, r0, rows, phi, dphi, x, heads.dq[group],
                             [&](int64_t r) { return weights.weight(r) != 0; });
    add_queries(layer, into, sums, q, r0, rows, weights, 0, left, phi, x, top, ahead);
  }
  sums.finish();
  return sizeof(T) == 4 && (lost || sums.lost());
}

template <class T>
static bool key_gradient_of(const Layer& given, const void* prepared, const GradientHeads& heads, int64_t begin,
                            int64_t end, void* scratch) {
  const Layer layer = plain_layer(given);
  const Widths<T> w(layer), t(turned_layer<T>(layer));
  const PreparedTurned<T> ready(layer, const_cast<void*>(prepared));
  const int64_t most = rows_per_block<T>(kAbsorbRows, w.d_pad);
  Arena arena(scratch);
  T* phi = arena.take<T>(most * w.d_row);
  T* left = arena.take<T>(most * t.d_row);
  T* dphi = arena.take<T>(most * w.d_row);
  T* dv = arena.take<T>(most * w.v_row);
  T* x = arena.take<T>(most * w.d_row);
  uint8_t* kept = arena.take<uint8_t>(most);
  bool lost = false;
  for (int64_t r0 = begin; r0 < end; r0 += most) {
    const int64_t rows = min_of(most, end - r0);
    const bool some = heads.mask.data && read_mask(heads.mask, r0, rows, kept) < rows;
    const auto taken = [&](int64_t r) { return !some || kept[r]; };
    if (layer.map == Map::exp) {
      raw_rows(layer, heads.k, r0, rows, phi, nullptr, nullptr);
      exp_rows<T>(layer, ready.rows.scale, T(1), nullptr, 0, phi, rows);
    } else {
      map_block(layer, heads.k, r0, rows, phi, nullptr, nullptr);
    }
    if (some) clear_masked(kept, phi, w.d_row, rows);
    load_values(layer, heads.v, r0, rows, some ? kept : nullptr, left);
    AheadAll ahead;
    const int64_t next = r0 + rows, last = min_of(next + most, end);
    ahead.add(layer.dtype, heads.k, w.d, next, last);
    ahead.add(layer.dtype, heads.v, w.v, next, last);
    ahead.add(layer.dtype, heads.dk, w.d, next, last);
    ahead.add(layer.dtype, heads.dv, w.v, next, last);
    multiply_rows(rows, t.d, left, t.d_row, ready.turned, t.v_row, w.d_pad, dphi, w.d_row, ahead);
    multiply_rows(rows, w.d, phi, w.d_row, ready.plain, w.v_row, w.v_pad, dv, w.v_row, ahead);
    lost |= !finish_features(layer, heads.k, r0, rows, phi, dphi, x, heads.dk, taken);
    lost |= !finish_values(layer, r0, rows, dv, heads.dv, taken);
  }
  return sizeof(T) == 4 && lost;
}

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
