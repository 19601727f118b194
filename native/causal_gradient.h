// Gradients of the causal form: two walks over chunks, with the notation of gradient.h.
//
//   forwards:   dphi(q_i) = sum over j <= i of (g'_i . v'_j) phi(k_j)
//   backwards:  dphi(k_j) = sum over i >= j of (v'_j . g'_i) phi(q_i)
//               dv_j      = sum over i >= j of (phi(k_j) . phi(q_i)) w_i g_i
//
// Each is the causal form itself with the parts exchanged: a running turned state, and a triangular product inside the
// chunk. The walk backwards is a walk forwards over reversed views. No state of a chunk is stored: the first walk
// makes those of the keys anew, and leaves two numbers a row for the second.
#pragma once

#include "causal.h"
#include "gradient.h"

namespace linattn {
namespace LINATTN_ISA_NS {

// out: (rows, padded) = queries state + tril(queries keys^T) values; state: (depth, padded), weights: scratch.
// queries: (rows, w.d), keys_t: (padded w.d, kChunk), both of widths w.
template <class T>
static void chunk_products(const Widths<T>& w, int64_t rows, const T* queries, const T* keys_t, int64_t depth,
                           const T* state, int64_t state_row, const T* values, int64_t values_row, int64_t padded,
                           T* weights, const T* ones, T* out, int64_t out_row, AheadAll& ahead) {
  causal_weights(queries, w, keys_t, rows, weights);
  for_strips<T, kTileVectors>(padded, [&](auto vectors, int64_t c) {
    constexpr int NV = decltype(vectors)::value;
    for (int64_t r = 0; r < rows; r += kTileRows<NV>)
      with_rows<kTileRows<NV>>(rows - r, [&](auto tile_rows) {
        ahead.touch(4);
        causal_tile<T, decltype(tile_rows)::value, NV>(depth, queries + r * w.d_row, w.d_row, state + c, state_row, r,
                                                       weights + r * kChunkRow<T>, kChunkRow<T>, values + c, values_row,
                                                       ones, out + r * out_row + c, out_row);
      });
  });
}

template <class T>
static void add_block(T* to, const T* more, int64_t row, int64_t rows) {
  for (int64_t i = 0; i < rows * row; i += kLanes<T>) store(to + i, load(to + i) + load(more + i));
}

// totals: (rows, padded D): row r = k_sum + the sum of phi(k) up to row r.
template <class T>
static void running_totals(const Widths<T>& w, const T* k_sum, const T* phi_k, int64_t rows, T* totals) {
  const T* before = k_sum;
  for (int64_t r = 0; r < rows; ++r) {
    T* to = totals + r * w.d_row;
    for (int64_t d = 0; d < w.d_pad; d += kLanes<T>) store(to + d, load(before + d) + load(phi_k + r * w.d_row + d));
    before = to;
  }
}

template <class T>
static void row_dots(const Widths<T>& w, const T* a, const T* b, int64_t rows, T* dots) {
  for (int64_t r = 0; r < rows; ++r) {
    Vec<T> dot = {};
    for (int64_t d = 0; d < w.d_pad; d += kLanes<T>) dot += load(a + r * w.d_row + d) * load(b + r * w.d_row + d);
    store(dots + r * kLanes<T>, dot);
  }
}

// With groups there are more operands than it pays to ask for.
template <class T>
static void add_queries_ahead(const Layer& layer, const Widths<T>& w, const GradientHeads& heads, int64_t begin,
                              int64_t end, AheadAll& ahead) {
  ahead.add(layer.dtype, heads.q[0], w.d, begin, end);
  ahead.add(layer.dtype, heads.grad_out[0], w.v, begin, end);
  ahead.add(layer.dtype, heads.out[0], w.v, begin, end);
}

template <class T>
static bool causal_query_gradient_of(const Layer& given, StateRef before, const GradientHeads& heads, int64_t begin,
                                     int64_t end, TurnedRef into, void* scratch) {
  const Layer layer = plain_layer(given);
  const Widths<T> w(layer), t(turned_layer<T>(layer));
  Arena arena(scratch);
  T* phi_k = arena.take<T>(kChunk * w.d_row);
  T* phi_q = arena.take<T>(kChunk * w.d_row);
  T* totals = arena.take<T>(kChunk * w.d_row);
  T* dphi = arena.take<T>(kChunk * w.d_row);
  T* x = arena.take<T>(kChunk * w.d_row);
  T* values = arena.take<T>(kChunk * t.d_row);
  T* values_t = arena.take<T>(t.d_pad * kChunkRow<T>);
  T* left = arena.take<T>(kChunk * t.d_row);
  T* weights = arena.take<T>(kChunk * kChunkRow<T>);
  T* row = arena.take<T>(w.v_row);
  T* top = arena.take<T>(w.d_pad);
  T* turned = arena.take<T>(TurnedSums<T>::elements(layer));
  double* sums = arena.take<double>((w.v + 1) * w.d);
  int32_t* log_scale = arena.take<int32_t>(w.d);
  const Prepared<T> rows_state = row_state<T>(layer, arena);
  RowScales<T> scales(arena, kChunk);
  T ones[kWidestTile];
  for (T& one : ones) one = 1;
  uint8_t kept[kChunk];

  for (int64_t d = 0; d < w.d; ++d) {
    for (int64_t c = 0; c < w.v; ++c) sums[c * w.d + d] = before.kv[d * w.v + c];
    sums[w.v * w.d + d] = before.k_sum[d];
    if (before.log_scale) log_scale[d] = before.log_scale[d];
  }
  const TurnedRef state{sums, before.log_scale ? log_scale : nullptr};
  TurnedSums<T> running(layer, state, arena, turned);
  // Without `into` there is nothing to add to: the object then only takes its place in the scratch memory.
  TurnedSums<T> queries(layer, into, arena, nullptr);
  for (int64_t d = 0; d < w.d_pad; ++d) rows_state.k_sum[d] = 0;
  if (state.log_scale) prepare_scales(layer, log_scale, rows_state.scale);

  bool lost = false;
  for (int64_t r0 = begin, rows; r0 < end; r0 += rows) {
    rows = min_of(kChunk, end - r0);
    const bool some = heads.mask.data && read_mask(heads.mask, r0, rows, kept) < rows;
    if (layer.map == Map::exp) {
      raw_rows(layer, heads.k, r0, rows, phi_k, nullptr, nullptr);
      rows = rows_within_headroom<T>(layer, log_scale, phi_k, some ? kept : nullptr, rows, top, [&](const T* to) {
        running.raise(to);
        prepare_scales(layer, log_scale, rows_state.scale);
      });
      exp_keys(layer, rows_state.scale, phi_k, rows);
    } else {
      map_block(layer, heads.k, r0, rows, phi_k, nullptr, nullptr);
    }
    if (some) clear_masked(kept, phi_k, w.d_row, rows);
    load_values(layer, heads.v, r0, rows, some ? kept : nullptr, values);
    transpose_block(values, t, rows, values_t);
    running_totals(w, turned + w.v_pad * t.v_row, phi_k, rows, totals);

    const int64_t next = r0 + rows, last = min_of(next + kChunk, end);
    AheadAll ahead;
    ahead.add(layer.dtype, heads.k, w.d, next, last);
    ahead.add(layer.dtype, heads.v, w.v, next, last);
    if (heads.groups == 1) {
      add_queries_ahead(layer, w, heads, next, last, ahead);
      ahead.add(layer.dtype, heads.dq[0], w.d, next, last);
    }
    for (int64_t g = 0; g < heads.groups; ++g) {
      const RowWeights<T> pairs{static_cast<T*>(heads.row_weights) + 2 * g * heads.group_stride, heads.row_stride};
      map_queries(layer, rows_state, heads.q[g], r0, rows, phi_q, scales.power, scales.dots, nullptr);
      row_dots(w, phi_q, totals, rows, scales.dots);
      scales.close(layer, rows);
      lost |= weigh_rows(layer, scales, phi_q, pairs, r0, rows);
      load_gradients(layer, heads.grad_out[g], heads.out[g], r0, rows, pairs, r0, left, row);
      chunk_products<T>(t, rows, left, values_t, t.d, turned, t.v_row, phi_k, w.d_row, w.d_pad, weights, ones, dphi,
                        w.d_row, ahead);
      lost |= !finish_features(layer, heads.q[g], r0, rows, phi_q, dphi, x, heads.dq[g],
                               [&](int64_t r) { return pairs.weight(r0 + r) != 0; });
      if (into.sums) add_queries(layer, into, queries, heads.q[g], r0, rows, pairs, r0, left, phi_q, x, top, ahead);
    }
    running.add(values, phi_k, rows, ahead);
  }
  if (into.sums) queries.finish();
  return sizeof(T) == 4 && (lost || running.lost() || queries.lost());
}

template <class T>
static bool causal_key_gradient_of(const Layer& given, TurnedRef state, const GradientHeads& heads, int64_t begin,
                                   int64_t end, void* scratch) {
  const Layer layer = plain_layer(given);
  const Widths<T> w(layer), t(turned_layer<T>(layer));
  Arena arena(scratch);
  T* phi_k = arena.take<T>(kChunk * w.d_row);
  T* phi_q = arena.take<T>(kChunk * w.d_row);
  T* phi_t = arena.take<T>(w.d_pad * kChunkRow<T>);
  T* dphi = arena.take<T>(kChunk * w.d_row);
  T* dv = arena.take<T>(kChunk * w.v_row);
  T* more = arena.take<T>(kChunk * max_of(w.d_row, w.v_row));
  T* x = arena.take<T>(kChunk * w.d_row);
  T* values = arena.take<T>(kChunk * t.d_row);
  T* left = arena.take<T>(kChunk * t.d_row);
  T* left_t = arena.take<T>(t.d_pad * kChunkRow<T>);
  T* weights = arena.take<T>(kChunk * kChunkRow<T>);
  T* row = arena.take<T>(w.v_row);
  T* top = arena.take<T>(w.d_pad);
  T* most = arena.take<T>(w.d_pad);
  T* scale = arena.take<T>(w.d_pad);
  T* turned = arena.take<T>(TurnedSums<T>::elements(layer));
  T* plain = arena.take<T>(w.d_pad * w.v_row);
  TurnedSums<T> running(layer, state, arena, turned);
  T ones[kWidestTile];
  for (T& one : ones) one = 1;
  uint8_t kept[kChunk];
  const bool exponential = layer.map == Map::exp;
  if (exponential) prepare_scales(layer, state.log_scale, scale);

  bool lost = false;
  for (int64_t r0 = begin, rows; r0 < end; r0 += rows) {
    rows = min_of(kChunk, end - r0);
    if (exponential) {  // the rows before one whose queries pass a scale, see rows_within_headroom
      int64_t r = 0;
      for (; r < rows; ++r) {
        for (int64_t d = 0; d < w.d_pad; ++d) most[d] = T(kEmpty);
        for (int64_t g = 0; g < heads.groups; ++g) {
          const RowWeights<T> pairs{static_cast<T*>(heads.row_weights) + 2 * g * heads.group_stride, heads.row_stride};
          raw_rows(layer, heads.q[g], r0 + r, 1, x, nullptr, nullptr);
          weighted_exponents(layer, x, pairs, r0 + r, 1, top);
          for (int64_t d = 0; d < w.d_pad; ++d) most[d] = top[d] > most[d] ? top[d] : most[d];
        }
        if (!passes_scales(layer, state.log_scale, most)) continue;
        if (r > 0) break;
        running.raise(most);
        prepare_scales(layer, state.log_scale, scale);
      }
      rows = r;
    }
    const bool some = heads.mask.data && read_mask(heads.mask, r0, rows, kept) < rows;
    const auto taken = [&](int64_t r) { return !some || kept[r]; };
    if (exponential) {
      raw_rows(layer, heads.k, r0, rows, phi_k, nullptr, nullptr);
      exp_rows<T>(layer, scale, T(1), nullptr, 0, phi_k, rows);
    } else {
      map_block(layer, heads.k, r0, rows, phi_k, nullptr, nullptr);
    }
    if (some) clear_masked(kept, phi_k, w.d_row, rows);
    load_values(layer, heads.v, r0, rows, some ? kept : nullptr, values);
    turn_back(layer, turned, plain);
    const int64_t next = r0 + rows, last = min_of(next + kChunk, end);
    AheadAll ahead;
    ahead.add(layer.dtype, heads.k, w.d, next, last);
    ahead.add(layer.dtype, heads.v, w.v, next, last);
    ahead.add(layer.dtype, heads.dk, w.d, next, last);
    ahead.add(layer.dtype, heads.dv, w.v, next, last);
    if (heads.groups == 1) add_queries_ahead(layer, w, heads, next, last, ahead);

    for (int64_t g = 0; g < heads.groups; ++g) {
      const RowWeights<T> pairs{static_cast<T*>(heads.row_weights) + 2 * g * heads.group_stride, heads.row_stride};
      if (exponential) {
        raw_rows(layer, heads.q[g], r0, rows, phi_q, nullptr, nullptr);
        exp_rows(layer, scale, T(-1), &pairs, r0, phi_q, rows);
      } else {
        map_block(layer, heads.q[g], r0, rows, phi_q, nullptr, nullptr);
      }
      for (int64_t r = 0; r < rows; ++r)
        if (pairs.weight(r0 + r) == 0) clear_row(phi_q + r * w.d_row, w.d_pad);  // NaN times 0 is not 0
      load_gradients(layer, heads.grad_out[g], heads.out[g], r0, rows, pairs, r0, left, row);
      transpose_block(left, t, rows, left_t);
      transpose_block(phi_q, w, rows, phi_t);
      // The state serves the keys once, not once a group of queries.
      chunk_products<T>(t, rows, values, left_t, g == 0 ? t.d : 0, turned, t.v_row, phi_q, w.d_row, w.d_pad, weights,
                        ones, g == 0 ? dphi : more, w.d_row, ahead);
      if (g > 0) add_block(dphi, more, w.d_row, rows);
      chunk_products<T>(w, rows, phi_k, phi_t, g == 0 ? w.d : 0, plain, w.v_row, left, t.d_row, w.v_pad, weights, ones,
                        g == 0 ? dv : more, w.v_row, ahead);
      if (g > 0) add_block(dv, more, w.v_row, rows);
      running.add(left, phi_q, rows, ahead);
    }
    lost |= !finish_features(layer, heads.k, r0, rows, phi_k, dphi, x, heads.dk, taken);
    lost |= !finish_values(layer, r0, rows, dv, heads.dv, taken);
  }
  running.finish();
  return sizeof(T) == 4 && (lost || running.lost());
}

// The most that one of the functions here and in gradient.h takes.
template <class T>
static int64_t gradient_bytes_of(const Layer& layer) {
  const Widths<T> w(layer), t(turned_layer<T>(layer));
  const int64_t item = sizeof(T), pieces = 40 * 64;
  const int64_t rows = max_of(kChunk, rows_per_block<T>(kAbsorbRows, w.d_pad));
  const int64_t blocks = rows * (6 * w.d_row + 2 * t.d_row + 2 * w.v_row + 2) + kChunk * max_of(w.d_row, w.v_row) +
                         (w.d_pad + t.d_pad + kChunk) * kChunkRow<T> + RowScales<T>::elements(rows);
  const int64_t vectors = w.v_row + 4 * w.d_pad;
  const int64_t sums = 3 * TurnedSums<T>::elements(layer) + w.d_pad * w.v_row;
  return (blocks + vectors + sums) * item + (w.v + 1) * w.d * 8 + w.d * 4 + rows + row_state_bytes<T>(layer) + pieces;
}

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
