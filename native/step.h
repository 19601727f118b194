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
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) {
        Vec<double> s = load(row + j * lanes);
        if constexpr (kUpdate) {
          s += phi_k[d] * value[j];
          store(row + j * lanes, s);
        }
        sums[j] += phi_q[d] * s;
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

template <class T>
static void step_of(const Layer& layer, StateRef state, const Heads& heads, void* scratch) {
  const Widths<T> w(layer);
  Arena arena(scratch);
  T* row = arena.take<T>(w.d_row);
  T* values = arena.take<T>(w.v_row);
  T* top = arena.take<T>(w.d_pad);
  double* phi_k = arena.take<double>(w.d_pad);
  double* phi_q = arena.take<double>(w.d_pad);
  double* v = arena.take<double>(w.v_pad);
  double* num = arena.take<double>(w.v_pad);
  RowScales<T> scales(arena, 1);
  Prepared<T> ready(layer, arena.take<char>(prepared_bytes_of<T>(layer)));  // for its scales alone

  const bool taken = !heads.mask.data || heads.mask.data[0] != 0;
  if (taken) {
    if (layer.map == Map::exp) {
      raw_rows(layer, heads.k, 0, 1, row);
      column_exponents<T>(row, w.d_pad, 1, w.d_pad, nullptr, top);
      raise_scales(layer, state, top);
      prepare_scales(layer, state.log_scale, ready.scale);
      exp_keys(layer, ready.scale, row, 1);
    } else {
      map_block(layer, heads.k, 0, 1, row);
    }
    load_row<T>(layer.dtype, heads.v.data, heads.v.col, values, w.v);
    for (int64_t d = 0; d < w.d; ++d) {
      phi_k[d] = static_cast<double>(row[d]);
      state.k_sum[d] += phi_k[d];
    }
    for (int64_t c = 0; c < w.v; ++c) v[c] = static_cast<double>(values[c]);
  } else if (layer.map == Map::exp) {
    prepare_scales(layer, state.log_scale, ready.scale);
  }

  for (int64_t g = 0; g < heads.groups; ++g) {
    map_queries(layer, ready, heads.q[g], 0, 1, row, scales.power);
    double denominator = 0;
    for (int64_t d = 0; d < w.d; ++d) {
      phi_q[d] = static_cast<double>(row[d]);
      denominator += phi_q[d] * state.k_sum[d];
    }
    if (taken && g == 0)
      sweep_state<true>(w.d, w.v, state.kv, phi_k, v, phi_q, num);
    else
      sweep_state<false>(w.d, w.v, state.kv, phi_k, v, phi_q, num);
    double factor = 1;
    if (layer.normalize) {
      double eps = layer.eps;
      if (layer.map == Map::exp && eps > 0) eps *= exact_power(static_cast<int64_t>(-scales.power[0]));
      const double total = denominator + eps;
      scales.total[0] = total == 0 ? T(0) : T(1);
      factor = total == 0 ? 0 : 1 / total;
    } else {
      scales.total[0] = 1;
    }
    const OutRows<T> out(layer, heads.out[g], 0, values);
    for (int64_t c = 0; c < w.v; ++c) out.data[c] = static_cast<T>(num[c] * factor);
    finish_rows(layer, heads.out[g], 0, 1, out, scales);
  }
}

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
