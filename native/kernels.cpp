// The kernels of one instruction set (LINATTN_ISA_NS), gathered into its table.
//
// Shapes: phi(k): (rows, D), v: (rows, d_v), kv: (D, d_v), k_sum: (D). The working precision T is float for float32
// and the halves, double for float64.
#include "kernels.h"

#include "absorb.h"
#include "causal.h"
#include "causal_gradient.h"
#include "gradient.h"
#include "quadratic.h"
#include "query.h"
#include "step.h"

#define LINATTN_STRING_(x) #x
#define LINATTN_STRING(x) LINATTN_STRING_(x)

namespace linattn {
namespace LINATTN_ISA_NS {

// The most that one of the functions takes; each piece is rounded up to 64 bytes.
template <class T>
static int64_t scratch_bytes_of(const Layer& layer) {
  const Widths<T> w(layer);
  const int64_t item = sizeof(T), pieces = 24 * 64;
  const int64_t query_rows = rows_per_block<T>(kQueryRows, w.d_pad);
  const int64_t query = (query_rows * w.d_row + w.room(query_rows) + OutRows<T>::elements(w, query_rows) +
                         RowScales<T>::elements(query_rows)) *
                        item;
  const int64_t chunk = (kChunk * (2 * w.d_row + w.v_row) + w.room(kChunk) + (w.d_pad + kChunk) * kChunkRow<T> +
                         w.d_pad + OutRows<T>::elements(w, kChunk) + RowScales<T>::elements(kChunk)) *
                        item;
  const int64_t causal = chunk + absorb_bytes<T>(layer);
  const int64_t quadratic = chunk + (kChunk * (w.v_row + 1) + w.d) * 8 + prepared_bytes_of<T>(layer);
  const int64_t step = step_bytes(layer);
  return max_of(max_of(max_of(query, causal), max_of(quadratic, step)), absorb_bytes<T>(layer)) + pieces;
}

// Calls f(T) with the working precision of the layer.
template <class F>
static inline auto in_precision(const Layer& layer, F&& f) {
  return layer.dtype == DType::float64 || layer.repair ? f(double()) : f(float());
}

static int64_t scratch_bytes(const Layer& layer) {
  return in_precision(layer, [&](auto t) { return scratch_bytes_of<decltype(t)>(layer); });
}
static int64_t prepared_bytes(const Layer& layer) {
  return in_precision(layer, [&](auto t) { return prepared_bytes_of<decltype(t)>(layer); });
}
static void absorb(const Layer& layer, StateRef state, View k, View v, MaskView mask, int64_t begin, int64_t end,
                   void* scratch) {
  in_precision(layer, [&](auto t) { absorb_of<decltype(t)>(layer, state, k, v, mask, begin, end, scratch); });
}
static void prepare(const Layer& layer, StateRef state, void* prepared) {
  in_precision(layer, [&](auto t) { prepare_of<decltype(t)>(layer, state, prepared); });
}
static bool sums(const Layer& layer, StateRef spare, View k, View v, MaskView mask, int64_t n, void* prepared,
                 void* scratch) {
  return in_precision(layer,
                      [&](auto t) { return sums_of<decltype(t)>(layer, spare, k, v, mask, n, prepared, scratch); });
}
static bool query(const Layer& layer, const void* prepared, View q, OutView out, int64_t begin, int64_t end,
                  void* scratch) {
  return in_precision(layer,
                      [&](auto t) { return query_of<decltype(t)>(layer, prepared, q, out, begin, end, scratch); });
}
static bool causal(const Layer& layer, StateRef state, const Heads& heads, int64_t begin, int64_t end, void* prepared,
                   void* scratch) {
  return in_precision(
      layer, [&](auto t) { return causal_of<decltype(t)>(layer, state, heads, begin, end, prepared, scratch); });
}
static bool quadratic(const Layer& layer, View q, View k, View v, MaskView mask, int64_t n_k, OutView out,
                      int64_t begin, int64_t end, void* scratch) {
  return in_precision(
      layer, [&](auto t) { return quadratic_of<decltype(t)>(layer, q, k, v, mask, n_k, out, begin, end, scratch); });
}
static void step(const Layer& layer, StateRef state, const Heads& heads, void* scratch) {
  in_precision(layer, [&](auto t) { step_of<decltype(t)>(layer, state, heads, scratch); });
}

static int64_t gradient_bytes(const Layer& layer) {
  return in_precision(layer, [&](auto t) { return gradient_bytes_of<decltype(t)>(layer); });
}
static int64_t turned_bytes(const Layer& layer) {
  return in_precision(layer, [&](auto t) { return turned_bytes_of<decltype(t)>(layer); });
}
static void prepare_keys(const Layer& layer, StateRef state, void* prepared) {
  in_precision(layer, [&](auto t) { prepare_keys_of<decltype(t)>(layer, state, prepared); });
}
static void prepare_queries(const Layer& layer, TurnedRef state, void* prepared) {
  in_precision(layer, [&](auto t) { prepare_queries_of<decltype(t)>(layer, state, prepared); });
}
static bool query_gradient(const Layer& layer, const void* prepared, const GradientHeads& heads, int64_t group,
                           int64_t begin, int64_t end, TurnedRef into, void* scratch) {
  return in_precision(layer, [&](auto t) {
    return query_gradient_of<decltype(t)>(layer, prepared, heads, group, begin, end, into, scratch);
  });
}
static bool key_gradient(const Layer& layer, const void* prepared, const GradientHeads& heads, int64_t begin,
                         int64_t end, void* scratch) {
  return in_precision(
      layer, [&](auto t) { return key_gradient_of<decltype(t)>(layer, prepared, heads, begin, end, scratch); });
}
static bool causal_query_gradient(const Layer& layer, StateRef before, const GradientHeads& heads, int64_t begin,
                                  int64_t end, TurnedRef into, void* scratch) {
  return in_precision(layer, [&](auto t) {
    return causal_query_gradient_of<decltype(t)>(layer, before, heads, begin, end, into, scratch);
  });
}
static bool causal_key_gradient(const Layer& layer, TurnedRef state, const GradientHeads& heads, int64_t begin,
                                int64_t end, void* scratch) {
  return in_precision(
      layer, [&](auto t) { return causal_key_gradient_of<decltype(t)>(layer, state, heads, begin, end, scratch); });
}

extern const Kernels kTable = {
    LINATTN_STRING(LINATTN_ISA_NS),
    scratch_bytes,
    absorb,
    prepared_bytes,
    prepare,
    sums,
    query,
    causal,
    quadratic,
    step,
    gradient_bytes,
    turned_bytes,
    prepare_keys,
    prepare_queries,
    query_gradient,
    key_gradient,
    causal_query_gradient,
    causal_key_gradient,
};

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
