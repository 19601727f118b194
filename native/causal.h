// causal: chunks of rows. A row takes the keys before its chunk from the state and those of its chunk, up to its
// own, from a triangular product. Nothing a row computes reads a later row, so its bits don't depend on the future.
#pragma once

#include "absorb.h"
#include "query.h"

namespace linattn {
namespace LINATTN_ISA_NS {

// phi_t: (padded D, kChunk) = transposed phi: (rows, padded D); columns from `rows` up to a whole vector are 0.
template <class T>
static void transpose_block(const T* phi, const Widths<T>& w, int64_t rows, T* phi_t) {
  constexpr int64_t lanes = kLanes<T>;
  for (int64_t r = 0; r < rows; r += lanes)
    for (int64_t d = 0; d < w.d_pad; d += lanes) {
      Vec<T> square[lanes];
#pragma GCC unroll 16
      for (int64_t i = 0; i < lanes; ++i) square[i] = r + i < rows ? load(phi + (r + i) * w.d_row + d) : Vec<T>{};
      transpose_square<T>(square);
#pragma GCC unroll 16
      for (int64_t i = 0; i < lanes; ++i) store(phi_t + (d + i) * kChunkRow<T> + r, square[i]);
    }
}

// weights: (rows, kChunk) = phi_q: (rows, D) phi_t: (D, kChunk) in the columns 0..row, 0 from there up to a whole
// vector beyond the tile's last row. The 0 is written, not multiplied: a later key may be NaN.
template <class T>
static void causal_weights(const T* phi_q, const Widths<T>& w, const T* phi_t, int64_t rows, T* weights) {
  for (int64_t r = 0; r < rows; r += kWidestRows)
    with_rows<kWidestRows>(rows - r, [&](auto tile_rows) {
      constexpr int MR = decltype(tile_rows)::value;
      const int64_t columns = round_up<T>(r + MR);
      for_strips<T, kTileVectors>(columns, [&](auto vectors, int64_t c) {
        product_tile<T, MR, decltype(vectors)::value>(w.d, phi_q + r * w.d_row, w.d_row, phi_t + c, kChunkRow<T>,
                                                      static_cast<const T*>(nullptr), weights + r * kChunkRow<T> + c,
                                                      kChunkRow<T>);
      });
      for (int64_t i = 0; i < MR; ++i)
        for (int64_t c = r + i + 1; c < columns; ++c) weights[(r + i) * kChunkRow<T> + c] = 0;
    });
}

// dots: (rows, lanes) += the weights of the row on the keys up to its own.
template <class T>
static void add_weights(const T* weights, int64_t rows, T* dots) {
  for (int64_t r = 0; r < rows; ++r) {
    Vec<T> sum = load(dots + r * kLanes<T>);
    for (int64_t c = 0; c <= r; c += kLanes<T>) sum += load(weights + r * kChunkRow<T> + c);
    store(dots + r * kLanes<T>, sum);
  }
}

// Rows of this chunk before the first key that passes a scale by more than the headroom: the chunk ends there, so
// that the scale it raises touches no earlier row. x: raw keys. If it is the first row, raise(top) is called.
template <class T, class Raise>
static int64_t rows_within_headroom(const Layer& layer, const int32_t* log_scale, const T* x, const uint8_t* kept,
                                    int64_t rows, T* top, Raise&& raise) {
  const Widths<T> w(layer);
  for (int64_t r = 0; r < rows; ++r) {
    if (kept && !kept[r]) continue;
    column_exponents<T>(x + r * w.d_row, w.d_pad, 1, w.d_pad, nullptr, top);
    if (!passes_scales(layer, log_scale, top)) continue;
    if (r > 0) return r;
    raise(top);
  }
  return rows;
}

template <class T>
static bool causal_of(const Layer& layer, StateRef state, const Heads& heads, int64_t begin, int64_t end,
                      void* prepared, void* scratch) {
  const Widths<T> w(layer);
  const Prepared<T> ready(layer, prepared);
  Arena arena(scratch);
  T* phi_k = arena.take<T>(kChunk * w.d_row);
  T* phi_t = arena.take<T>(w.d_pad * kChunkRow<T>);
  T* phi_q = arena.take<T>(kChunk * w.d_row);
  T* weights = arena.take<T>(kChunk * kChunkRow<T>);
  T* values = arena.take<T>(kChunk * w.v_row);
  T* buffer = arena.take<T>(OutRows<T>::elements(w, kChunk));
  T* top = arena.take<T>(w.d_pad);
  T* room = arena.take<T>(w.room(kChunk));
  RowScales<T> scales(arena, kChunk);
  uint8_t kept[kChunk];

  const bool later = heads.empty_before && layer.map != Map::exp;
  PendingSums<T> pending(layer, state, {heads.k, heads.v, heads.mask}, arena, &ready, later);
  bool troubled = false;
  for (int64_t r0 = begin, rows; r0 < end; r0 += rows) {
    rows = min_of(kChunk, end - r0);
    const bool some = heads.mask.data && read_mask(heads.mask, r0, rows, kept) < rows;
    if (layer.map == Map::exp) {
      raw_rows(layer, heads.k, r0, rows, phi_k, layer.projection, room);
      rows = rows_within_headroom<T>(layer, state.log_scale, phi_k, some ? kept : nullptr, rows, top, [&](const T* to) {
        pending.flush();
        raise_scales(layer, state, to);
        pending.prepare();
      });
      exp_keys(layer, ready.scale, phi_k, rows);
    } else {
      map_block(layer, heads.k, r0, rows, phi_k, layer.projection, room);
    }
    Rows<T> v = rows_of<T>(layer.dtype, heads.v, r0, rows, w.v, true, values, w.v_row);
    if (some) {
      v = copied_rows(v, rows, w, values);
      clear_masked(kept, phi_k, w.d_row, rows);
      clear_masked(kept, values, w.v_row, rows);
    }
    transpose_block(phi_k, w, rows, phi_t);
    const int64_t depth = later && r0 == begin ? 0 : w.d;  // an empty state adds nothing
    const int64_t next = r0 + rows, last = min_of(next + kChunk, end);

    for (int64_t g = 0; g < heads.groups; ++g) {
      map_queries(layer, ready, heads.q[g], r0, rows, phi_q, scales.power, scales.dots, room);
      causal_weights(phi_q, w, phi_t, rows, weights);
      add_weights(weights, rows, scales.dots);
      scales.close(layer, rows);
      const OutRows<T> out(layer, heads.out[g], r0, buffer, kChunk);
      const View& from = heads.q[g];
      const OutView& to = heads.out[g];
      Ahead q_ahead(layer.dtype, from.data, from.row, from.col, w.x, next, last);
      Ahead out_ahead(layer.dtype, to.data, to.row, to.col, w.v, next, last);
      for_strips<T, kTileVectors>(w.v_pad, [&](auto vectors, int64_t c) {
        constexpr int NV = decltype(vectors)::value;
        for (int64_t r = 0; r < rows; r += kTileRows<NV>)
          with_rows<kTileRows<NV>>(rows - r, [&](auto tile_rows) {
            q_ahead.touch(2);
            out_ahead.touch(2);
            causal_tile<T, decltype(tile_rows)::value, NV>(
                depth, phi_q + r * w.d_row, w.d_row, ready.kv + c, w.v_row, r, weights + r * kChunkRow<T>, kChunkRow<T>,
                v.data + c, v.row, scales.factor + r, out.data + r * out.row + c, out.row);
          });
      });
      troubled |= finish_rows(layer, heads.out[g], r0, rows, out, scales, phi_q);
    }
    if (heads.state_unused && next == end) break;
    Ahead ahead[2] = {Ahead(layer.dtype, heads.k.data, heads.k.row, heads.k.col, w.x, next, last),
                      Ahead(layer.dtype, heads.v.data, heads.v.row, heads.v.col, w.v, next, last)};
    pending.add(phi_k, v, r0, rows, ahead);
  }
  if (!heads.state_unused) pending.finish();
  return troubled;
}

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
