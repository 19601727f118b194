// One call from Python, being gathered: what its arguments say, as a Problem.
#pragma once

#include <vector>

#include "arrays.h"
#include "dispatch.h"
#include "projected.h"
#include "threads.h"

namespace linattn {

inline bool text_is(const char* text, Py_ssize_t size, const char* name) {
  return static_cast<size_t>(size) == std::strlen(name) && std::memcmp(text, name, static_cast<size_t>(size)) == 0;
}

inline bool map_of(nb::handle name, Map& map) {
  static constexpr struct {
    const char* name;
    Map map;
  } kMaps[] = {
      {"elu1", Map::elu1}, {"identity", Map::identity}, {"relu", Map::relu},       {"squared_relu", Map::squared_relu},
      {"exp", Map::exp},   {"softplus", Map::softplus}, {"sigmoid", Map::sigmoid},
  };
  if (!PyUnicode_Check(name.ptr())) return false;
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(name.ptr(), &size);
  if (!text) {
    PyErr_Clear();
    return false;
  }
  for (const auto& entry : kMaps)
    if (text_is(text, size, entry.name)) {
      map = entry.map;
      return true;
    }
  return false;
}

inline bool has_shape(const Array& a, int nd, const npy_intp* dims) {
  if (a.nd != nd) return false;
  for (int i = 0; i < nd; ++i)
    if (a.dims[i] != dims[i]) return false;
  return true;
}

// (kv, k_sum, log_scale)
inline bool take_three(nb::handle three, nb::handle (&parts)[3]) {
  if (!PyTuple_Check(three.ptr()) || PyTuple_Size(three.ptr()) != 3) return false;
  for (int i = 0; i < 3; ++i) parts[i] = PyTuple_GetItem(three.ptr(), i);
  return true;
}

struct StateArrays {
  Array kv, k_sum, log_scale;

  static bool sums(const Array& a, Kind kind) { return a.kind == kind && a.dense(); }

  bool take(nb::handle kv_, nb::handle k_sum_, nb::handle log_scale_, bool exponential) {
    if (!kv.take(kv_) || !k_sum.take(k_sum_)) return false;
    if (!sums(kv, Kind::float64) || !sums(k_sum, Kind::float64)) return false;
    if (kv.nd < 2 || !has_shape(k_sum, kv.nd - 1, kv.dims)) return false;
    if (log_scale_.is_none() == exponential) return false;
    if (!exponential) return true;
    return log_scale.take(log_scale_) && sums(log_scale, Kind::int32) && has_shape(log_scale, k_sum.nd, k_sum.dims);
  }

  bool writeable() const { return kv.writeable() && k_sum.writeable() && (!log_scale || log_scale.writeable()); }

  StateRef ref() const {
    return {reinterpret_cast<double*>(kv.data), reinterpret_cast<double*>(k_sum.data),
            log_scale ? reinterpret_cast<int32_t*>(log_scale.data) : nullptr};
  }
};

// The batch axes of one operand, right-aligned: dims and strides before the last `core` axes. With grouped heads the
// head axis of queries is split into (key heads, group) and keys get a group axis of 1.
struct Batch {
  int64_t dims[kMaxAxes], strides[kMaxAxes];
  int count = 0;

  bool take(const Array& a, int first, int core, int64_t unit) {
    count = a.nd - core - first;
    if (count < 0 || count > kMaxAxes - 1) return false;
    for (int i = 0; i < count; ++i) {
      dims[i] = a.dims[first + i];
      strides[i] = a.strides[first + i] / unit;
    }
    return true;
  }
  bool split_heads(int64_t key_heads) {
    if (count < 1 || count > kMaxAxes - 2 || key_heads < 1) return false;
    const int64_t heads = dims[count - 1], stride = strides[count - 1];
    if (heads % key_heads != 0) return false;
    const int64_t group = heads / key_heads;
    dims[count - 1] = key_heads;
    strides[count - 1] = stride * group;
    dims[count] = group;
    strides[count] = stride;
    ++count;
    return true;
  }
  bool add_group_axis() {
    if (count < 1 || count > kMaxAxes - 2) return false;
    dims[count] = 1;
    strides[count] = 0;
    ++count;
    return true;
  }
  int64_t dim(int axis, int all) const { return axis < all - count ? 1 : dims[axis - (all - count)]; }
  int64_t step(int axis, int all) const { return dim(axis, all) == 1 ? 0 : strides[axis - (all - count)]; }
};

inline bool widen(int64_t& size, int64_t other) {
  if (other == size || other == 1) return true;
  if (size != 1) return false;
  size = other;
  return true;
}

// set_num_threads, then torch's own setting for tensors, then what the machine gives.
inline int threads_for(const Array& a) {
  if (!a.is_tensor || threads_chosen()) return thread_count();
  const nb::object number = nb::steal(PyObject_CallNoArgs(torch.get_num_threads));
  const long threads = number.is_valid() ? PyLong_AsLong(number.ptr()) : 0;
  if (threads > 0) return static_cast<int>(threads);
  PyErr_Clear();
  return thread_count();
}

// One call, being gathered.
struct Call {
  Problem problem;
  Array q, k, v, mask, cu, out;
  StateArrays before;
  bool has_q = false, has_k = false, has_state = false, grouped = false;
  int64_t projection_heads = 1;  // of keys' or queries', if one has several
  std::vector<int64_t> sequence_starts;
  npy_intp out_dims[kMaxAxes + 2];
  int out_nd = 0;
  npy_intp state_dims[kMaxAxes + 3];  // (sequences,) batch..., D, d_v
  int state_nd = 0;
  Batch q_batch, k_batch, v_batch, mask_batch, state_batch;

  // feature_map: the name of a map, (name, Projected), or (name, Projected of keys, Projected of queries).
  bool take_map(nb::handle feature_map, double eps, bool normalize) {
    Layer& layer = problem.layer;
    layer.normalize = normalize;
    layer.eps = eps;
    nb::handle name = feature_map;
    if (PyTuple_Check(feature_map.ptr())) {
      const Py_ssize_t parts = PyTuple_Size(feature_map.ptr());
      if (parts != 2 && parts != 3) return false;
      name = PyTuple_GetItem(feature_map.ptr(), 0);
      const Projected* keys = Projected::of(PyTuple_GetItem(feature_map.ptr(), 1));
      const Projected* queries = parts == 3 ? Projected::of(PyTuple_GetItem(feature_map.ptr(), 2)) : keys;
      if (!keys || !queries || !queries->goes_with(*keys)) return false;
      if (keys->heads() > 1 && queries->heads() > 1 && keys->heads() != queries->heads()) return false;
      layer.projection = keys->first();
      layer.query_projection = queries->first();
      layer.projection_step = keys->heads() > 1;
      layer.query_projection_step = queries->heads() > 1;
      projection_heads = keys->heads() > 1 ? keys->heads() : queries->heads();
    }
    return map_of(name, layer.map) && eps >= 0;
  }
  // Whether rows of q and k of this width have phi of D features.
  bool makes(int64_t inputs, int64_t features) const {
    const Projection* p = problem.layer.projection;
    return p ? inputs == p->inputs && features == p->features : inputs == features;
  }
  bool exponential() const { return problem.layer.map == Map::exp; }

  bool take_keys(nb::handle k_, nb::handle v_, nb::handle key_mask) {
    has_k = true;
    DType v_dtype;
    if (!k.take(k_) || !v.take(v_) || k.nd < 2 || v.nd < 2) return false;
    if (!dtype_of(k, problem.layer.dtype) || !dtype_of(v, v_dtype) || v_dtype != problem.layer.dtype) return false;
    if (k.dim(2) != v.dim(2) || k.dim(1) < 1 || v.dim(1) < 1) return false;
    problem.n_k = k.dim(2);
    problem.layer.features = k.dim(1);
    if (const Projection* p = problem.layer.projection) problem.layer.features = p->features;
    if (!makes(k.dim(1), problem.layer.features)) return false;
    problem.layer.d_v = v.dim(1);
    problem.k = {k.data, k.stride(2), k.stride(1)};
    problem.v = {v.data, v.stride(2), v.stride(1)};
    if (key_mask.is_none()) return true;
    if (!mask.take(key_mask) || mask.kind != Kind::boolean || mask.nd < 1) return false;
    if (mask.dim(1) != problem.n_k || (mask.nd != 1 && mask.nd != k.nd - 1)) return false;
    for (int i = 0; i + 1 < mask.nd; ++i)
      if (mask.dims[i] != 1 && mask.dims[i] != k.dims[i]) return false;
    problem.mask = {reinterpret_cast<const uint8_t*>(mask.data), mask.stride(1)};
    return true;
  }

  bool take_queries(nb::handle q_) {
    has_q = true;
    DType dtype;
    if (!q.take(q_) || q.nd < 2 || !dtype_of(q, dtype)) return false;
    if (has_k && (dtype != problem.layer.dtype || q.dim(1) != k.dim(1))) return false;
    problem.layer.dtype = dtype;
    problem.n_q = q.dim(2);
    problem.q = {q.data, q.stride(2), q.stride(1)};
    return true;
  }

  bool take_state(nb::handle kv, nb::handle k_sum, nb::handle log_scale) {
    has_state = true;
    if (!before.take(kv, k_sum, log_scale, exponential())) return false;
    const int64_t features = before.kv.dim(2), d_v = before.kv.dim(1);
    if (features < 1 || d_v < 1) return false;
    if (has_k && (features != problem.layer.features || d_v != problem.layer.d_v)) return false;
    if (!has_k && !makes(q.dim(1), features)) return false;
    problem.layer.features = features;
    problem.layer.d_v = d_v;
    problem.before = before.ref();
    return true;
  }

  bool take_sequences(nb::handle cu_seqlens) {
    if (cu_seqlens.is_none()) return true;
    if (!cu.take(cu_seqlens) || cu.nd != 1 || cu.dims[0] < 2 || problem.n_q != problem.n_k) return false;
    const int64_t count = cu.dims[0];
    const bool wide = cu.kind == Kind::int64;
    if (!wide && cu.kind != Kind::int32) return false;
    sequence_starts.resize(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
      const char* at = cu.data + i * cu.strides[0];
      int64_t start;
      if (wide) {
        std::memcpy(&start, at, 8);
      } else {
        int32_t narrow;
        std::memcpy(&narrow, at, 4);
        start = narrow;
      }
      if (i == 0 ? start != 0 : start < sequence_starts[static_cast<size_t>(i - 1)]) return false;
      sequence_starts[static_cast<size_t>(i)] = start;
    }
    if (sequence_starts.back() != problem.n_k) return false;
    problem.cu_seqlens = sequence_starts.data();
    problem.sequences = count - 1;
    return true;
  }

  // Broadcasts the batch axes; `in_place`: the state takes exactly the keys' batch.
  bool lay_axes(bool in_place) {
    const Array& first = has_k ? k : q;
    for (const Array* a : {&q, &k, &v, &mask, &before.kv, &before.k_sum, &before.log_scale})
      if (*a && a->is_tensor != first.is_tensor) return false;
    const int sequences = problem.cu_seqlens ? 1 : 0;
    const int64_t state_unit = 8 * problem.layer.features * problem.layer.d_v;
    if (has_q && !q_batch.take(q, 0, 2, 1)) return false;
    if (has_k && (!k_batch.take(k, 0, 2, 1) || !v_batch.take(v, 0, 2, 1))) return false;
    if (mask && mask.nd > 1 && !mask_batch.take(mask, 0, 1, 1)) return false;
    if (has_state) {
      if (sequences && (before.kv.nd < 3 || before.kv.dims[0] != problem.sequences)) return false;
      if (!state_batch.take(before.kv, sequences, 2, state_unit)) return false;
    }
    if (grouped) {
      int64_t key_heads;
      if (has_k) {
        if (k_batch.count < 1 || v_batch.count < 1) return false;
        key_heads = k_batch.dims[k_batch.count - 1];
        if (v_batch.dims[v_batch.count - 1] != key_heads) return false;
        if (has_state && (state_batch.count < 1 || state_batch.dims[state_batch.count - 1] != key_heads)) return false;
      } else {
        if (state_batch.count < 1) return false;
        key_heads = state_batch.dims[state_batch.count - 1];
      }
      if (has_q && !q_batch.split_heads(key_heads)) return false;
      if (has_k && (!k_batch.add_group_axis() || !v_batch.add_group_axis())) return false;
      if (mask_batch.count && !mask_batch.add_group_axis()) return false;
      if (has_state && !state_batch.add_group_axis()) return false;
    }
    int all = 0;
    for (const Batch* b : {&q_batch, &k_batch, &v_batch, &mask_batch, &state_batch})
      if (b->count > all) all = b->count;
    int key_all = 0;
    for (const Batch* b : {&k_batch, &v_batch, &state_batch})
      if (b->count > key_all) key_all = b->count;

    state_nd = 0;
    if (sequences) state_dims[state_nd++] = problem.sequences;
    out_nd = 0;
    problem.axis_count = all;
    for (int i = 0; i < all; ++i) {
      int64_t key_size = 1;
      if (!widen(key_size, k_batch.dim(i, all)) || !widen(key_size, v_batch.dim(i, all)) ||
          !widen(key_size, state_batch.dim(i, all)))
        return false;
      if (in_place && state_batch.dim(i, all) != key_size) return false;
      int64_t size = key_size;
      if (!widen(size, q_batch.dim(i, all))) return false;
      if (size == 0) return false;  // nothing to compute: the other road handles it
      Axis& axis = problem.axes[i];
      axis.size = size;
      axis.keys = key_size > 1;
      axis.q = q_batch.step(i, all);
      axis.k = k_batch.step(i, all);
      axis.v = v_batch.step(i, all);
      axis.mask = mask_batch.step(i, all);
      axis.state = state_batch.step(i, all);
      axis.out = 0;
      axis.head = 0;
      const bool group_axis = grouped && i == all - 1;
      if (group_axis && has_q)
        out_dims[out_nd - 1] *= size;
      else if (!group_axis)
        out_dims[out_nd++] = size;
      if (i >= all - key_all && !group_axis) state_dims[state_nd++] = key_size;
    }
    const Projection* p = problem.layer.projection;
    if (p && p->angles && ((has_q && problem.n_q != p->angles) || (has_k && problem.n_k != p->angles))) return false;
    if (projection_heads > 1) {  // every head of q and k has its own
      const int head = all - 1;
      if (grouped || all < 1 || (has_q && q_batch.dim(head, all) != projection_heads) ||
          (has_k && k_batch.dim(head, all) != projection_heads))
        return false;
      problem.axes[head].head = 1;
    }
    state_dims[state_nd++] = problem.layer.features;
    state_dims[state_nd++] = problem.layer.d_v;
    out_dims[out_nd++] = problem.n_q;
    out_dims[out_nd++] = problem.layer.d_v;
    return out_nd <= kMaxAxes + 2;
  }

  // The given output, if it may be written, or a new one. Null: declined or out of memory (then an error is set).
  nb::object take_out(nb::handle given) {
    nb::object result;
    if (given.is_none()) {
      result = new_array(q, out_nd, out_dims, q.kind);
      out.take(result);
    } else {
      DType dtype;
      if (!out.take(given) || !dtype_of(out, dtype) || dtype != problem.layer.dtype) return {};
      if (!has_shape(out, out_nd, out_dims) || !out.writeable() || out.is_tensor != q.is_tensor || !elements_apart(out))
        return {};
      for (const Array* a : {&q, &k, &v, &mask, &before.kv, &before.k_sum, &before.log_scale})
        if (*a && may_overlap(out, *a)) return {};
      result = nb::borrow(given);
    }
    problem.out = {out.data, out.stride(2), out.stride(1)};
    Batch batch;
    batch.take(out, 0, 2, 1);
    int64_t key_heads = 1;
    if (grouped) {
      key_heads = has_k ? k_batch.dims[k_batch.count - 2] : state_batch.dims[state_batch.count - 2];
      batch.split_heads(key_heads);
    }
    for (int i = 0; i < problem.axis_count; ++i) problem.axes[i].out = batch.step(i, problem.axis_count);
    return result;
  }

  // Axes of size 1 step nowhere; without them the common cases have few.
  void drop_single_axes() {
    int kept = 0;
    for (int i = 0; i < problem.axis_count; ++i)
      if (problem.axes[i].size != 1) problem.axes[kept++] = problem.axes[i];
    problem.axis_count = kept;
  }

  void run() { run(solve); }

  // solver(problem, kernels, threads), without the interpreter's lock; false: not enough memory.
  template <class Solver>
  void run(Solver&& solver) {
    drop_single_axes();
    const Kernels* kernels = kernels_in_use();
    const int threads = threads_for(has_k ? k : q);
    bool enough;
    {
      nb::gil_scoped_release unlocked;
      const OpenMPGuest guest((has_k ? k : q).is_tensor);
      enough = solver(problem, *kernels, threads);
    }
    if (!enough) throw std::bad_alloc();
  }
};

// New arrays for a state, of the shape that the call has found.
struct StateResult {
  nb::object kv, k_sum, log_scale = nb::none();
  StateRef ref{};

  explicit StateResult(const Call& call, bool scales = true) {
    const Array& like = call.has_k ? call.k : call.q;
    kv = new_array(like, call.state_nd, call.state_dims, Kind::float64);
    k_sum = new_array(like, call.state_nd - 1, call.state_dims, Kind::float64);
    ref = {reinterpret_cast<double*>(data_of(kv)), reinterpret_cast<double*>(data_of(k_sum)), nullptr};
    if (!scales || !call.exponential()) return;
    log_scale = new_array(like, call.state_nd - 1, call.state_dims, Kind::int32);
    ref.log_scale = reinterpret_cast<int32_t*>(data_of(log_scale));
  }

 private:
  static char* data_of(const nb::object& fresh) {
    Array array;
    if (!array.take(fresh)) throw nb::type_error("linattn: a new array could not be read");
    return array.data;
  }
};

}  // namespace linattn
