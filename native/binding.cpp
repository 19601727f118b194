// The one binding file: NumPy arrays in, pointers and strides out.
//
// Every verb checks first and returns None ("declined") for whatever it does not take, before anything is written;
// linattn._check then words the error or prepares the arrays, and calls again.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

// NumPy's headers compile under the stable ABI too (its functions come through a table at run time, its fields
// through NumPy's own inline functions).
#include <numpy/arrayobject.h>

#include <cstring>

#include "dispatch.h"
#include "driver.h"
#include "threads.h"

namespace nb = nanobind;
using namespace linattn;

namespace {

int bfloat16_number = -1;  // type number of ml_dtypes.bfloat16, once registered

struct Array {
  PyArrayObject* object = nullptr;
  char* data = nullptr;
  int nd = 0;
  const npy_intp* dims = nullptr;
  const npy_intp* strides = nullptr;

  explicit operator bool() const { return object != nullptr; }
  int64_t dim(int from_end) const { return dims[nd - from_end]; }
  int64_t stride(int from_end) const { return strides[nd - from_end]; }
  int number() const { return PyArray_DESCR(object)->type_num; }

  // An exact ndarray in native byte order.
  bool take(nb::handle from) {
    if (!PyArray_CheckExact(from.ptr())) return false;
    object = reinterpret_cast<PyArrayObject*>(from.ptr());
    data = static_cast<char*>(PyArray_DATA(object));
    nd = PyArray_NDIM(object);
    dims = PyArray_DIMS(object);
    strides = PyArray_STRIDES(object);
    return PyArray_ISNOTSWAPPED(object);
  }
};

bool dtype_of(const Array& a, DType& dtype) {
  const int number = a.number();
  if (number == NPY_FLOAT)
    dtype = DType::float32;
  else if (number == NPY_DOUBLE)
    dtype = DType::float64;
  else if (number == NPY_HALF)
    dtype = DType::float16;
  else if (number == bfloat16_number && number >= 0)
    dtype = DType::bfloat16;
  else
    return false;
  return true;
}

bool text_is(const char* text, Py_ssize_t size, const char* name) {
  return static_cast<size_t>(size) == std::strlen(name) && std::memcmp(text, name, static_cast<size_t>(size)) == 0;
}

bool map_of(nb::handle name, Map& map) {
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

// The bytes an array can touch: [low, high).
void extent(const Array& a, int64_t item, const char*& low, const char*& high) {
  low = high = a.data;
  for (int i = 0; i < a.nd; ++i) {
    if (a.dims[i] == 0) {
      low = high = a.data;
      return;
    }
    const int64_t reach = static_cast<int64_t>(a.dims[i] - 1) * a.strides[i];
    (reach < 0 ? low : high) += reach;
  }
  high += item;
}

bool may_overlap(const Array& a, const Array& b) {
  const char *a_low, *a_high, *b_low, *b_high;
  extent(a, PyArray_ITEMSIZE(a.object), a_low, a_high);
  extent(b, PyArray_ITEMSIZE(b.object), b_low, b_high);
  return a_low < b_high && b_low < a_high;
}

// Whether no two elements share memory, shown by strides that nest.
bool elements_apart(const Array& a) {
  int64_t strides[kMaxAxes + 4], dims[kMaxAxes + 4];
  int count = 0;
  if (a.nd > kMaxAxes + 2) return false;
  for (int i = 0; i < a.nd; ++i) {
    if (a.dims[i] == 0) return true;
    if (a.dims[i] == 1) continue;
    int64_t stride = a.strides[i] < 0 ? -a.strides[i] : a.strides[i];
    int at = count++;
    for (; at > 0 && strides[at - 1] > stride; --at) {
      strides[at] = strides[at - 1];
      dims[at] = dims[at - 1];
    }
    strides[at] = stride;
    dims[at] = a.dims[i];
  }
  int64_t reach = PyArray_ITEMSIZE(a.object);
  for (int i = 0; i < count; ++i) {
    if (strides[i] < reach) return false;
    reach += (dims[i] - 1) * strides[i];
  }
  return true;
}

struct StateArrays {
  Array kv, k_sum, log_scale;

  static bool sums(const Array& a, int number) {
    return a.number() == number && PyArray_IS_C_CONTIGUOUS(a.object) && PyArray_ISALIGNED(a.object);
  }

  bool take(nb::handle kv_, nb::handle k_sum_, nb::handle log_scale_, bool exponential) {
    if (!kv.take(kv_) || !k_sum.take(k_sum_)) return false;
    if (!sums(kv, NPY_DOUBLE) || !sums(k_sum, NPY_DOUBLE)) return false;
    if (kv.nd < 2 || k_sum.nd != kv.nd - 1) return false;
    for (int i = 0; i < k_sum.nd; ++i)
      if (kv.dims[i] != k_sum.dims[i]) return false;
    if (log_scale_.is_none() == exponential) return false;
    if (!exponential) return true;
    if (!log_scale.take(log_scale_) || !sums(log_scale, NPY_INT32) || log_scale.nd != k_sum.nd) return false;
    for (int i = 0; i < k_sum.nd; ++i)
      if (log_scale.dims[i] != k_sum.dims[i]) return false;
    return true;
  }

  bool writeable() const {
    return PyArray_ISWRITEABLE(kv.object) && PyArray_ISWRITEABLE(k_sum.object) &&
           (!log_scale || PyArray_ISWRITEABLE(log_scale.object));
  }

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

bool widen(int64_t& size, int64_t other) {
  if (other == size || other == 1) return true;
  if (size != 1) return false;
  size = other;
  return true;
}

// One call, being gathered.
struct Call {
  Problem problem;
  Array q, k, v, mask, cu, out;
  StateArrays before;
  bool has_q = false, has_k = false, has_state = false, grouped = false;
  std::vector<int64_t> sequence_starts;
  npy_intp out_dims[kMaxAxes + 2];
  int out_nd = 0;
  npy_intp state_dims[kMaxAxes + 3];  // (sequences,) batch..., D, d_v
  int state_nd = 0;
  Batch q_batch, k_batch, v_batch, mask_batch, state_batch;

  bool take_map(nb::handle feature_map, double eps, bool normalize) {
    Layer& layer = problem.layer;
    layer.normalize = normalize;
    layer.eps = eps;
    return map_of(feature_map, layer.map) && eps >= 0;
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
    problem.layer.d_v = v.dim(1);
    problem.k = {k.data, k.stride(2), k.stride(1)};
    problem.v = {v.data, v.stride(2), v.stride(1)};
    if (key_mask.is_none()) return true;
    if (!mask.take(key_mask) || mask.number() != NPY_BOOL || mask.nd < 1) return false;
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
    if (!has_k && q.dim(1) != features) return false;
    problem.layer.features = features;
    problem.layer.d_v = d_v;
    problem.before = before.ref();
    return true;
  }

  bool take_sequences(nb::handle cu_seqlens) {
    if (cu_seqlens.is_none()) return true;
    if (!cu.take(cu_seqlens) || cu.nd != 1 || cu.dims[0] < 2 || problem.n_q != problem.n_k) return false;
    const int number = cu.number();
    const int64_t count = cu.dims[0];
    const bool wide = PyArray_ITEMSIZE(cu.object) == 8;
    if (!PyTypeNum_ISSIGNED(number) || (!wide && PyArray_ITEMSIZE(cu.object) != 4)) return false;
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
      const bool group_axis = grouped && i == all - 1;
      if (group_axis && has_q)
        out_dims[out_nd - 1] *= size;
      else if (!group_axis)
        out_dims[out_nd++] = size;
      if (i >= all - key_all && !group_axis) state_dims[state_nd++] = key_size;
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
      PyArray_Descr* descr = PyArray_DESCR(q.object);
      Py_INCREF(descr);
      PyObject* fresh = PyArray_NewFromDescr(&PyArray_Type, descr, out_nd, out_dims, nullptr, nullptr, 0, nullptr);
      if (!fresh) throw nb::python_error();
      result = nb::steal(fresh);
      out.take(result);
    } else {
      DType dtype;
      if (!out.take(given) || !dtype_of(out, dtype) || dtype != problem.layer.dtype) return {};
      if (out.nd != out_nd || !PyArray_ISWRITEABLE(out.object) || !elements_apart(out)) return {};
      for (int i = 0; i < out_nd; ++i)
        if (out.dims[i] != out_dims[i]) return {};
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

  void run() {
    drop_single_axes();
    const Kernels* kernels = kernels_in_use();
    const int threads = thread_count();
    bool enough;
    {
      nb::gil_scoped_release unlocked;
      enough = solve(problem, *kernels, threads);
    }
    if (!enough) throw std::bad_alloc();
  }
};

nb::object new_array(int nd, const npy_intp* dims, int number) {
  PyObject* fresh = PyArray_EMPTY(nd, const_cast<npy_intp*>(dims), number, 0);
  if (!fresh) throw nb::python_error();
  return nb::steal(fresh);
}

void* data_of(const nb::object& array) { return PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr())); }

nb::object attend(nb::handle q, nb::handle k, nb::handle v, nb::handle feature_map, double eps, bool causal,
                  nb::handle key_mask, nb::handle cu_seqlens, bool enable_gqa, bool normalize, nb::handle state,
                  bool return_state, nb::handle order, nb::handle out) {
  Call call;
  call.grouped = enable_gqa;
  if (!call.take_map(feature_map, eps, normalize) || !call.take_keys(k, v, key_mask) || !call.take_queries(q))
    return nb::none();
  if (causal && call.problem.n_q != call.problem.n_k) return nb::none();
  if (!call.take_sequences(cu_seqlens)) return nb::none();
  if (!state.is_none()) {
    if (!PyTuple_Check(state.ptr()) || PyTuple_Size(state.ptr()) != 3) return nb::none();
    if (!call.take_state(PyTuple_GetItem(state.ptr(), 0), PyTuple_GetItem(state.ptr(), 1),
                         PyTuple_GetItem(state.ptr(), 2)))
      return nb::none();
  }
  if (!call.lay_axes(false)) return nb::none();

  Py_ssize_t size = 0;
  const char* text = PyUnicode_Check(order.ptr()) ? PyUnicode_AsUTF8AndSize(order.ptr(), &size) : nullptr;
  if (!text) {
    PyErr_Clear();
    return nb::none();
  }
  const bool by_state = causal || call.has_state || return_state;
  bool quadratic = false;
  if (text_is(text, size, "auto")) {
    int64_t groups = 1;
    for (int i = 0; i < call.problem.axis_count; ++i)
      if (!call.problem.axes[i].keys) groups *= call.problem.axes[i].size;
    const int64_t sequences = call.problem.sequences;  // of a packed call, the average one
    quadratic = !by_state && prefers_quadratic(call.problem.n_q / sequences, call.problem.n_k / sequences,
                                               call.problem.layer.features, call.problem.layer.d_v, groups);
  } else if (text_is(text, size, "quadratic")) {
    if (by_state) return nb::none();
    quadratic = true;
  } else if (!text_is(text, size, "linear")) {
    return nb::none();
  }
  call.problem.form = causal ? Form::causal : quadratic ? Form::quadratic : Form::parallel;

  nb::object result = call.take_out(out);
  if (!result) return nb::none();
  if (!return_state) {
    call.run();
    return result;
  }
  nb::object kv = new_array(call.state_nd, call.state_dims, NPY_DOUBLE);
  nb::object k_sum = new_array(call.state_nd - 1, call.state_dims, NPY_DOUBLE);
  nb::object log_scale = nb::none();
  call.problem.after = {static_cast<double*>(data_of(kv)), static_cast<double*>(data_of(k_sum)), nullptr};
  if (call.exponential()) {
    log_scale = new_array(call.state_nd - 1, call.state_dims, NPY_INT32);
    call.problem.after.log_scale = static_cast<int32_t*>(data_of(log_scale));
  }
  call.run();
  return nb::make_tuple(result, kv, k_sum, log_scale);
}

nb::object absorb(nb::handle kv, nb::handle k_sum, nb::handle log_scale, nb::handle k, nb::handle v,
                  nb::handle feature_map, nb::handle key_mask) {
  Call call;
  if (!call.take_map(feature_map, 0, true) || !call.take_keys(k, v, key_mask) ||
      !call.take_state(kv, k_sum, log_scale) || !call.before.writeable())
    return nb::none();
  for (const Array* a : {&call.k, &call.v})
    if (may_overlap(call.before.kv, *a) || may_overlap(call.before.k_sum, *a)) return nb::none();
  if (!call.lay_axes(true)) return nb::none();
  call.problem.form = Form::absorb;
  call.problem.after = call.problem.before;
  call.run();
  return nb::bool_(true);
}

nb::object query(nb::handle kv, nb::handle k_sum, nb::handle log_scale, nb::handle q, nb::handle feature_map,
                 double eps, bool enable_gqa, bool normalize, nb::handle out) {
  Call call;
  call.grouped = enable_gqa;
  if (!call.take_map(feature_map, eps, normalize) || !call.take_queries(q) || !call.take_state(kv, k_sum, log_scale) ||
      !call.lay_axes(false))
    return nb::none();
  call.problem.form = Form::query;
  nb::object result = call.take_out(out);
  if (!result) return nb::none();
  call.run();
  return result;
}

nb::object step(nb::handle kv, nb::handle k_sum, nb::handle log_scale, nb::handle q, nb::handle k, nb::handle v,
                nb::handle feature_map, double eps, bool enable_gqa, bool normalize, nb::handle out) {
  Call call;
  call.grouped = enable_gqa;
  if (!call.take_map(feature_map, eps, normalize) || !call.take_keys(k, v, nb::none()) || !call.take_queries(q) ||
      call.problem.n_k != 1 || call.problem.n_q != 1 || !call.take_state(kv, k_sum, log_scale) ||
      !call.before.writeable() || !call.lay_axes(true))
    return nb::none();
  for (const Array* a : {&call.q, &call.k, &call.v})
    if (may_overlap(call.before.kv, *a) || may_overlap(call.before.k_sum, *a)) return nb::none();
  call.problem.form = Form::step;
  call.problem.after = call.problem.before;
  nb::object result = call.take_out(out);
  if (!result) return nb::none();
  call.run();
  return result;
}

bool import_numpy() {
  import_array1(false);
  return true;
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Kernels of linattn; use the functions of linattn, which check and word errors.";
  if (!import_numpy()) throw nb::python_error();
  if (!kernels_in_use()) {
    std::string names;
    for (auto set = usable_kernels(); *set; ++set) names += std::string(names.empty() ? "" : ", ") + (*set)->name;
    throw nb::import_error(
        ("the environment variable LINATTN_ISA names no instruction set of this machine and build; it has: " + names)
            .c_str());
  }
  m.attr("__version__") = LINATTN_VERSION;

  m.def("attend", attend, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("feature_map"), nb::arg("eps"),
        nb::arg("causal"), nb::arg("key_mask").none(), nb::arg("cu_seqlens").none(), nb::arg("enable_gqa"),
        nb::arg("normalize"), nb::arg("state").none(), nb::arg("return_state"), nb::arg("order"), nb::arg("out").none(),
        "The whole of linear_attention, or None: declined.");
  m.def("absorb", absorb, nb::arg("kv"), nb::arg("k_sum"), nb::arg("log_scale").none(), nb::arg("k"), nb::arg("v"),
        nb::arg("feature_map"), nb::arg("key_mask").none(),
        "State += the sums of k and v, in place; True, or None: declined.");
  m.def("query", query, nb::arg("kv"), nb::arg("k_sum"), nb::arg("log_scale").none(), nb::arg("q"),
        nb::arg("feature_map"), nb::arg("eps"), nb::arg("enable_gqa"), nb::arg("normalize"), nb::arg("out").none(),
        "Queries of a state, or None: declined.");
  m.def("step", step, nb::arg("kv"), nb::arg("k_sum"), nb::arg("log_scale").none(), nb::arg("q"), nb::arg("k"),
        nb::arg("v"), nb::arg("feature_map"), nb::arg("eps"), nb::arg("enable_gqa"), nb::arg("normalize"),
        nb::arg("out").none(), "One position: absorb in place, then query; or None: declined.");
  m.def(
      "prefers_quadratic",
      [](int64_t n_q, int64_t n_k, int64_t features, int64_t d_v, int64_t groups) {
        return prefers_quadratic(n_q, n_k, features, d_v, groups);
      },
      nb::arg("n_q"), nb::arg("n_k"), nb::arg("D"), nb::arg("d_v"), nb::arg("groups") = 1,
      "The rule of linattn.plan, as the core applies it.");
  m.def(
      "register_bfloat16", [](int number) { bfloat16_number = number; }, nb::arg("dtype_num"),
      "Tells the type number of ml_dtypes.bfloat16.");
  m.def("set_num_threads", [](int threads) { set_thread_count(threads); }, nb::arg("threads"));
  m.def("get_num_threads", [] { return thread_count(); });
  m.def("instruction_set", [] { return std::string(kernels_in_use()->name); });
  m.def("instruction_sets", [] {
    std::vector<std::string> names;
    for (auto set = usable_kernels(); *set; ++set) names.push_back((*set)->name);
    return names;
  });
}
