// What one instruction set offers: a table of functions over single (positions x features) matrices.
// Pointers, sizes and byte strides; no Python, no threads, no batches.
#pragma once

#include <stdint.h>

namespace linattn {

enum class DType : uint8_t { float32, float64, float16, bfloat16 };
enum class Map : uint8_t { identity, elu1, relu, squared_relu, exp, softplus, sigmoid };

// Causal rows that see each other through a masked product, and queries for which the quadratic order makes phi of all
// keys.
constexpr int64_t kChunk = 32;

// The scale of a feature that has seen no key (see StateRef::log_scale).
constexpr int32_t kEmpty = -(1 << 30);

// (rows, columns) at data + i * row + j * col, strides in bytes of any sign, zero included.
struct View {
  const char* data;
  int64_t row, col;
  int64_t first = 0;  // which row of its operand the view begins with, in packed sequences
};

struct OutView {
  char* data;
  int64_t row, col;
};

// One byte a key, nonzero where it takes part; data == nullptr: all do.
struct MaskView {
  const uint8_t* data;
  int64_t stride;
};

// The running sums, always double: kv: (D, d_v), k_sum: (D), both contiguous. For exponential maps the sums of
// feature d are kept divided by 2^log_scale[d]; nullptr for all other maps.
struct StateRef {
  double* kv;
  double* k_sum;
  int32_t* log_scale;
};

// What a projection makes of the numbers z of a row after its linear step.
enum class Finish : uint8_t {
  none,        // y = z
  lifted,      // y = max(z, 0) + amount
  softmax,     // y = z - log(sum exp(z))
  halves,      // the same for each half of z by itself
  waves,       // y = amount * (sin(z), cos(z))
  neighbours,  // y = r_i r_(i - j) for j = 1 ... times, around the ends, where r = (max(z, 0), max(-z, 0))
  spectra,     // y = the product of the `times` spectra that z is made of (see finishes.h)
  squares,     // y = the products of any two numbers of that product
  turned,      // y = (z cos(a), z sin(a)) with an angle a for each row of q and k
};

static inline bool has_spectra(Finish finish) { return finish == Finish::spectra || finish == Finish::squares; }

// Features that are products may be 0 where no factor is.
static inline bool makes_products(Finish finish) { return finish == Finish::neighbours || has_spectra(finish); }

// The steps before the map: z = +-(x W + b) - square |x|^2 - shift, y = finish(z) and phi(x) = map(y). W: (inputs,
// columns).
struct Projection {
  int64_t inputs, columns;
  int64_t features;  // D, of y
  bool mirrored;     // both signs: z has twice the columns, else as many
  bool unit;         // x is divided by |x|, unless that is 0
  Finish finish;
  int64_t times;
  double square, shift, amount;
  // W and b in either working precision: rows of `row` numbers, zeros behind the last column. nullptr: z comes of x
  // itself.
  int64_t row;
  const float *weight_float, *bias_float;
  const double *weight_double, *bias_double;
  // (angles, 2): cosine and sine of each row's angle, likewise; q and k have to have as many rows.
  int64_t angles;
  const float* angles_float;
  const double* angles_double;
};

// Numbers of z in a row, and those of one of several spectra. (Static, as must be whatever several instruction sets
// compile.)
static inline int64_t z_columns(const Projection& p) { return p.mirrored ? 2 * p.columns : p.columns; }
static inline int64_t spectrum_columns(const Projection& p) { return p.columns / p.times; }

// D, of what the other fields say.
static inline int64_t features_of(const Projection& p) {
  switch (p.finish) {
    case Finish::waves:
    case Finish::turned:
      return 2 * z_columns(p);
    case Finish::neighbours:
      return 2 * z_columns(p) * p.times;
    case Finish::spectra:
      return spectrum_columns(p);
    case Finish::squares:
      return spectrum_columns(p) * (spectrum_columns(p) + 1) / 2;
    default:
      return z_columns(p);
  }
}

// What all rows of one call share.
struct Layer {
  DType dtype;
  Map map;
  bool normalize;
  int64_t features;  // D
  int64_t d_v;
  double eps;
  // A second pass, in double with every row of phi(q) scaled to about 1, over what left the range of the first: it
  // writes those rows only that hold something not finite.
  bool repair = false;
  // nullptr: q and k go to the map as they are. Gradients take no other. Of two that differ in
  // their weights alone keys take the first.
  const Projection *projection = nullptr, *query_projection = nullptr;
  // To the next head's: 0 where all heads share one.
  int64_t projection_step = 0, query_projection_step = 0;
};

// One attention of n_k keys and n_q queries each for `groups` query heads that share them.
struct Heads {
  const View* q;       // one a group
  const OutView* out;  // one a group
  int64_t groups;
  View k, v;
  MaskView mask;
  bool empty_before = false;  // causal: the state is empty, so the first chunk needn't ask it
  bool state_unused = false;  // causal: nobody wants the state after the last row
};

// A state as gradients walk it: sums: (d_v + 1, D) double, contiguous; row c is column c of kv, the last row is k_sum.
// It holds sums over keys, S and Z, or those over queries, dS and dZ (see gradient.h).
struct TurnedRef {
  double* sums;
  int32_t* log_scale;  // as in StateRef
};

// One gradient of n_k keys and n_q queries each for `groups` query heads that share them. out and grad_out: what the
// forward pass gave, and the gradient with respect to it.
struct GradientHeads {
  const View *q, *out, *grad_out;  // one a group
  const OutView* dq;               // one a group
  int64_t groups;
  View k, v;
  OutView dk, dv;
  MaskView mask;
  // Causal: two numbers a row and group, in the working precision: its weight and its power of two (see RowWeights).
  // Row r of group g is at row_weights[g * group_stride + r * row_stride].
  void* row_weights;
  int64_t group_stride, row_stride;  // in pairs
};

struct Kernels {
  const char* name;
  // Bytes of scratch memory that any function below needs for this layer, 64-byte aligned.
  int64_t (*scratch_bytes)(const Layer&);
  // state += the sums of rows [begin, end) of k and v.
  void (*absorb)(const Layer&, StateRef, View k, View v, MaskView, int64_t begin, int64_t end, void* scratch);
  // Bytes of, and the state in the form that queries read: rounded to the working precision, padded.
  int64_t (*prepared_bytes)(const Layer&);
  void (*prepare)(const Layer&, StateRef, void* prepared);
  // Both for n keys and no state before them, without the way through a state; `spare` is one for what has to be made
  // in double. False: that way has to be taken.
  bool (*sums)(const Layer&, StateRef spare, View k, View v, MaskView, int64_t n, void* prepared, void* scratch);
  // The three that write rows of output return whether a row left the range of the working precision (an overflow, or
  // a denominator so small that its terms may have vanished). Such rows hold NaN or infinity: run again with repair.
  //
  // out rows [begin, end) = queries of a prepared state.
  bool (*query)(const Layer&, const void* prepared, View q, OutView out, int64_t begin, int64_t end, void* scratch);
  // Causal rows [begin, end); the state holds the keys before `begin` and afterwards those before `end`.
  bool (*causal)(const Layer&, StateRef, const Heads&, int64_t begin, int64_t end, void* prepared, void* scratch);
  // out rows [begin, end) by (phi(q) phi(k)^T) v over all n_k keys.
  bool (*quadratic)(const Layer&, View q, View k, View v, MaskView, int64_t n_k, OutView out, int64_t begin,
                    int64_t end, void* scratch);
  // One position: absorb one key and value, then query `groups` rows.
  void (*step)(const Layer&, StateRef, const Heads&, void* scratch);

  // ---- gradients ----
  //
  // With layer.repair they run in double whatever the dtype. Those that write rows return whether something left the
  // range of the working precision; then all of the call is to be made again with repair.

  int64_t (*gradient_bytes)(const Layer&);  // scratch memory of any function below
  int64_t (*turned_bytes)(const Layer&);    // of a prepared turned state
  // The state of all keys, as query_gradient reads it, and the sums over all queries, as key_gradient does.
  void (*prepare_keys)(const Layer&, StateRef, void* prepared);
  void (*prepare_queries)(const Layer&, TurnedRef, void* prepared);
  // dq of rows [begin, end) of one group, and `into` += the sums over these queries.
  bool (*query_gradient)(const Layer&, const void* prepared, const GradientHeads&, int64_t group, int64_t begin,
                         int64_t end, TurnedRef into, void* scratch);
  // dk and dv of rows [begin, end).
  bool (*key_gradient)(const Layer&, const void* prepared, const GradientHeads&, int64_t begin, int64_t end,
                       void* scratch);
  // Causal, first pass, forwards: dq and the row weights of rows [begin, end) after the keys in `before`; `into`, if
  // it has sums, += the sums over these queries.
  bool (*causal_query_gradient)(const Layer&, StateRef before, const GradientHeads&, int64_t begin, int64_t end,
                                TurnedRef into, void* scratch);
  // Second pass, backwards: all views are reversed (row 0 is the last). dk and dv of rows [begin, end); `state` holds
  // the sums over the queries of rows < begin, afterwards those of rows < end.
  bool (*causal_key_gradient)(const Layer&, TurnedRef state, const GradientHeads&, int64_t begin, int64_t end,
                              void* scratch);
};

// Compiled once an instruction set; a set that the compiler did not build has no symbol and is not listed.
namespace avx512 {
extern const Kernels kTable;
}
namespace avx2 {
extern const Kernels kTable;
}
namespace baseline {
extern const Kernels kTable;
}
namespace neon {
extern const Kernels kTable;
}
namespace portable {
extern const Kernels kTable;
}

}  // namespace linattn
