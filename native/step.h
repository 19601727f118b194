// step: one position. The state is read and written once, in double; the queries ride on the same pass.
#pragma once

#include "query.h"

namespace linattn {
namespace LINATTN_ISA_NS {

// num: (d_v) = sum over d of phi_q[d] * kv[d], where kv[d] += phi_k[d] * v on the way (kUpdate).
template <bool kUpdate>
static void sweep_state(int64_t features, int64_t d_v, double* kv, const double* phi_k, const double* v,
                        const double* phi_q, double* num) {
  constexpr int64_t lanes = kLanes<double>;
  constexpr int NV = 4;
  int64_t c = 0;
  for (; c + NV * lanes <= d_v; c += NV * lanes) {
    Vec<double> sums[NV] = {}, value[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) value[j] = load(v + c + j * lanes);
    for (int64_t d = 0; d < features; ++d) {
      double* row = kv + d * d_v + c;
      // Read before the stores to row, which might alias them: else each store is followed by reading both again.
      const Vec<double> asked = splat(phi_q[d]);
      Vec<double> absorbed = {};
      if constexpr (kUpdate) absorbed = splat(phi_k[d]);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) {
        Vec<double> s = load(row + j * lanes);
        if constexpr (kUpdate) {
          s += absorbed * value[j];
          store(row + j * lanes, s);
        }
        sums[j] += asked * s;
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) store(num + c + j * lanes, sums[j]);
  }
  for (; c < d_v; ++c) {
    double sum = 0;
    for (int64_t d = 0; d < features; ++d) {
      double s = kv[d * d_v + c];
      if constexpr (kUpdate) {
        s += phi_k[d] * v[c];
        kv[d * d_v + c] = s;
      }
      sum += phi_q[d] * s;
    }
    num[c] = sum;
  }
}

// Scratch of a step, the double version of it included.
static int64_t step_bytes(const Layer& layer) {
  const Widths<double> w(layer);
  return (6 * (w.d_row + w.v_row) + w.room(1) + OutRows<double>::elements(w, 1) + RowScales<double>::elements(1)) * 8 +
         prepared_bytes_of<double>(layer) + 17 * 64;
}

// phi of the one key, in double; false: it has left the range of T.
template <class T>
static bool step_key(const Layer& layer, StateRef state, View k, double* phi_k, void* scratch) {
  const Widths<T> w(layer);
  Arena arena(scratch);
  T* row = arena.take<T>(w.d_row);
  T* top = arena.take<T>(w.d_pad);
  T* scale = arena.take<T>(w.d_pad);
  T* room = arena.take<T>(w.room(1));
  if (layer.map == Map::exp) {
    raw_rows(layer, k, 0, 1, row, layer.projection, room);
    column_exponents<T>(row, w.d_pad, 1, w.d_pad, nullptr, top);
    raise_scales(layer, state, top);
    prepare_scales(layer, state.log_scale, scale);
    exp_keys(layer, scale, row, 1);
  } else {
    map_block(layer, k, 0, 1, row, layer.projection, room);
  }
  bool vanished = false;
  for (int64_t d = 0; d < w.d; ++d) {
    phi_k[d] = static_cast<double>(row[d]);
    vanished |= row[d] == 0;
  }
  if (may_vanish(layer) && all_below(row, w.d, T(kLeastSum))) return false;
  return all_finite(row, 0, 1, w.d) && !(vanished && is_positive(layer.map));
}

// a . b, in an order that depends on the vector width alone
static double dot_of(const double* a, const double* b, int64_t count) {
  constexpr int64_t lanes = kLanes<double>;
  Vec<double> sum[2] = {};
  int64_t d = 0;
  for (; d + 2 * lanes <= count; d += 2 * lanes)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) sum[j] += load(a + d + j * lanes) * load(b + d + j * lanes);
  double total = sum_lanes<double>(sum[0] + sum[1]);
  for (; d < count; ++d) total += a[d] * b[d];
  return total;
}

// One row of queries; false: it has left the range of T and holds nothing yet.
template <class T, bool kUpdate>
static bool step_query(const Layer& layer, StateRef state, View q, OutView out, const double* phi_k, const double* v,
                       double* num, void* scratch) {
  const Widths<T> w(layer);
  Arena arena(scratch);
  T* row = arena.take<T>(w.d_row);
  T* buffer = arena.take<T>(OutRows<T>::elements(w, 1));
  T* room = arena.take<T>(w.room(1));
  double* phi_q = arena.take<double>(w.d_pad);
  RowScales<T> scales(arena, 1);
  Prepared<T> ready(layer, arena.take<char>(prepared_bytes_of<T>(layer)));  // for its scales alone
  for (int64_t d = 0; d < w.d_pad; ++d) ready.k_sum[d] = 0;
  if (layer.map == Map::exp) prepare_scales(layer, state.log_scale, ready.scale);
  map_queries(layer, ready, q, 0, 1, row, scales.power, scales.dots, room);
  bool vanished = false;
  for (int64_t d = 0; d < w.d; ++d) {
    phi_q[d] = static_cast<double>(row[d]);
    vanished |= row[d] == 0;
  }
  sweep_state<kUpdate>(w.d, w.v, state.kv, phi_k, v, phi_q, num);

  double total = 1;
  if (layer.normalize) {
    double eps = layer.eps;
    if (has_row_powers(layer) && eps > 0) eps *= exact_power(static_cast<int64_t>(-scales.power[0]));
    total = eps + dot_of(phi_q, state.k_sum, w.d);
  }
  if (!layer.repair && !(all_finite(row, 0, 1, w.d) && all_finite(num, 0, 1, w.v))) return false;
  if (!layer.repair && vanished && is_positive(layer.map)) return false;
  if (!layer.repair && layer.map != Map::exp && total > -1e-290 && total < 1e-290 && !zero_is_exact(layer, row, w.d))
    return false;
  const OutRows<T> to(layer, out, 0, buffer, 1);
  for (int64_t c = 0; c < w.v; ++c) to.data[c] = total == 0 ? T(0) : static_cast<T>(num[c] / total);
  if (has_row_powers(layer) && !layer.normalize) {
    const int64_t power = static_cast<int64_t>(scales.power[0]), half = power / 2;
    for (int64_t c = 0; c < w.v; ++c)
      to.data[c] = static_cast<T>(num[c] * exact_power(half) * exact_power(power - half));
  }
  if (!to.direct) store_row<T>(layer.dtype, out.data, out.col, to.data, w.v);
  return true;
}

template <class T>
static void step_of(const Layer& layer, StateRef state, const Heads& heads, void* scratch) {
  const Widths<double> w(layer);
  Layer wide = layer;  // what leaves the range of T is computed again in double
  wide.repair = true;
  Arena arena(scratch);
  double* phi_k = arena.take<double>(w.d_pad);
  double* v = arena.take<double>(w.v_row);
  double* num = arena.take<double>(w.v_row);
  void* rest = arena.take<char>(0);

  if (!step_key<T>(layer, state, heads.k, phi_k, rest)) step_key<double>(wide, state, heads.k, phi_k, rest);
  load_row<double>(layer.dtype, heads.v.data, heads.v.col, v, w.v);
  for (int64_t d = 0; d < w.d; ++d) state.k_sum[d] += phi_k[d];
  for (int64_t g = 0; g < heads.groups; ++g) {
    const bool done = g == 0 ? step_query<T, true>(layer, state, heads.q[g], heads.out[g], phi_k, v, num, rest)
                             : step_query<T, false>(layer, state, heads.q[g], heads.out[g], phi_k, v, num, rest);
    if (!done) step_query<double, false>(wide, state, heads.q[g], heads.out[g], phi_k, v, num, rest);
  }
}

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
