// Scratch memory, padded widths, and the state in the form that queries read.
#pragma once

#include "kernels.h"
#include "products.h"
#include "simd.h"

namespace linattn {
namespace LINATTN_ISA_NS {

// Rows whose sums stay in the working precision, in blocks of kAbsorbRows, before they enter the double state.
constexpr int64_t kFlushRows = 512;
constexpr int64_t kAbsorbRows = 64;  // phi(k) and a strip of v of one block fit the first-level cache
constexpr int64_t kQueryRows = 96;   // a multiple of all tiles' rows; phi(q) of a block stays in the first-level cache
template <class T>
constexpr int64_t kChunkRow = kChunk + kLanes<T>;  // row stride of (., kChunk) blocks, see Widths
constexpr int64_t kBlockBytes = 1 << 17;  // phi(k) of a block at most, so that wide maps stay in the second-level cache

template <class T>
static int64_t rows_per_block(int64_t wanted, int64_t padded) {
  const int64_t fit = kBlockBytes / (padded * static_cast<int64_t>(sizeof(T)));
  return max_of(12, min_of(wanted, fit));
}

class Arena {
 public:
  explicit Arena(void* memory) : next_(static_cast<char*>(memory)) {}
  template <class E>
  E* take(int64_t count) {
    E* p = reinterpret_cast<E*>(next_);
    next_ += (count * static_cast<int64_t>(sizeof(E)) + 63) / 64 * 64;
    return p;
  }
  int64_t used() const { return reinterpret_cast<int64_t>(next_); }

 private:
  char* next_;
};

template <class T>
struct Widths {
  int64_t d, d_pad, v, v_pad;  // d_pad, v_pad: up to a whole vector
  // Row strides of our own blocks: one vector more, since tiles run down narrow columns and a stride that is a power
  // of two would put the rows of a column into a few sets of the cache.
  int64_t d_row, v_row;
  int64_t x;  // features of q and k before the map
  // Room that a projection takes beside its block: for each row of x, for the factors of each row, and for the factors
  // of the one row that is being finished (see finishes.h).
  int64_t x_row = 0, factor_row = 0, finish_room = 0;
  explicit Widths(const Layer& layer)
      : d(layer.features),
        d_pad(round_up<T>(layer.features)),
        v(layer.d_v),
        v_pad(round_up<T>(layer.d_v)),
        d_row(d_pad + kLanes<T>),
        v_row(v_pad + kLanes<T>),
        x(layer.projection ? layer.projection->inputs : layer.features) {
    if (!layer.projection) return;
    const Projection& p = *layer.projection;
    x_row = round_up<T>(x) + kLanes<T>;
    if (has_spectra(p.finish) && p.times > 1) factor_row = round_up<T>(spectrum_columns(p)) + kLanes<T>;
    if (p.finish == Finish::squares) finish_room = spectrum_columns(p) + kLanes<T>;
    if (p.finish == Finish::neighbours) finish_room = 4 * z_columns(p) + kLanes<T>;
  }
  int64_t room(int64_t rows) const { return rows * (x_row + factor_row) + finish_room; }
};

// The state as queries read it: kv: (D, padded d_v), k_sum: (padded D), scale: (padded D) for exponential maps.
template <class T>
struct Prepared {
  T *kv, *k_sum, *scale;
  Prepared(const Layer& layer, void* memory) {
    const Widths<T> w(layer);
    Arena arena(memory);
    kv = arena.take<T>(w.d * w.v_row);
    k_sum = arena.take<T>(w.d_pad);
    scale = arena.take<T>(w.d_pad);
    bytes = arena.used() - reinterpret_cast<int64_t>(memory);
  }
  int64_t bytes;
};

template <class T>
static int64_t prepared_bytes_of(const Layer& layer) {
  return Prepared<T>(layer, nullptr).bytes;
}

template <class T>
static void prepare_scales(const Layer& layer, const int32_t* log_scale, T* scale) {
  const Widths<T> w(layer);
  for (int64_t d = 0; d < w.d_pad; ++d) scale[d] = T(d < w.d ? log_scale[d] : kEmpty);
}

template <class T>
static void prepare_of(const Layer& layer, StateRef state, void* memory) {
  const Widths<T> w(layer);
  const Prepared<T> ready(layer, memory);
  for (int64_t d = 0; d < w.d; ++d) {
    for (int64_t c = 0; c < w.v; ++c) ready.kv[d * w.v_row + c] = static_cast<T>(state.kv[d * w.v + c]);
    for (int64_t c = w.v; c < w.v_pad; ++c) ready.kv[d * w.v_row + c] = 0;
  }
  for (int64_t d = 0; d < w.d_pad; ++d) ready.k_sum[d] = d < w.d ? static_cast<T>(state.k_sum[d]) : T(0);
  if (state.log_scale) prepare_scales(layer, state.log_scale, ready.scale);
}

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
