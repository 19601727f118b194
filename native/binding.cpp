// The one binding file: NumPy arrays in, pointers and strides out.
//
// Every verb checks first and returns None ("declined") for whatever it does not take, before anything is written;
// linattn._check then words the error or prepares the arrays, and calls again.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "call.h"

using namespace linattn;

namespace {

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
    nb::handle parts[3];
    if (!take_three(state, parts) || !call.take_state(parts[0], parts[1], parts[2])) return nb::none();
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
    quadratic = !by_state && prefers_quadratic(call.problem);
  } else if (text_is(text, size, "quadratic")) {
    if (by_state || makes_features_often(call.problem)) return nb::none();
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
  StateResult after(call);
  call.problem.after = after.ref;
  call.run();
  return nb::make_tuple(result, after.kv, after.k_sum, after.log_scale);
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

nb::object projection(int64_t inputs, nb::handle weight, nb::handle bias, double square, double shift, bool mirrored,
                      bool unit, const std::string& finish, double amount, int64_t times, nb::handle angles) {
  Projection steps{};
  steps.inputs = inputs;
  steps.square = square;
  steps.shift = shift;
  steps.mirrored = mirrored;
  steps.unit = unit;
  steps.finish = finish_of(finish);
  steps.amount = amount;
  steps.times = times;
  return Projected::capsule(std::make_unique<Projected>(steps, weight, bias, angles));
}

// A view of an operand of a gradient, and its step along each axis of the problem.
template <class V>
bool lay_operand(const Call& call, const Array& a, bool is_keys, int64_t Axis::* step, V& view) {
  view = {a.data, a.stride(2), a.stride(1)};
  Batch batch;
  if (!batch.take(a, 0, 2, 1)) return false;
  if (call.grouped && is_keys && !batch.add_group_axis()) return false;
  if (call.grouped && !is_keys && !batch.split_heads(call.k_batch.dims[call.k_batch.count - 2])) return false;
  for (int i = 0; i < call.problem.axis_count; ++i)
    const_cast<Axis&>(call.problem.axes[i]).*step = batch.step(i, call.problem.axis_count);
  return true;
}

nb::object attend_backward(nb::handle grad_out, nb::handle grad_kv, nb::handle grad_k_sum, nb::handle q, nb::handle k,
                           nb::handle v, nb::handle out, nb::handle feature_map, double eps, bool causal,
                           nb::handle key_mask, nb::handle cu_seqlens, bool enable_gqa, bool normalize,
                           nb::handle before, nb::handle after) {
  Call call;
  call.grouped = enable_gqa;
  if (!call.take_map(feature_map, eps, normalize) || !call.take_keys(k, v, key_mask) || !call.take_queries(q) ||
      call.problem.layer.projection)
    return nb::none();
  if (causal && call.problem.n_q != call.problem.n_k) return nb::none();
  if (!call.take_sequences(cu_seqlens)) return nb::none();
  nb::handle parts[3];
  if (!before.is_none() && (!take_three(before, parts) || !call.take_state(parts[0], parts[1], parts[2])))
    return nb::none();
  if (!call.lay_axes(false)) return nb::none();
  const int axes = call.problem.axis_count;
  for (int i = 0; i < axes; ++i) {  // no operand is broadcast: each of its elements has one gradient
    const Axis& axis = call.problem.axes[i];
    if (call.q_batch.dim(i, axes) != axis.size) return nb::none();
    if (!axis.keys) continue;
    if (call.k_batch.dim(i, axes) != axis.size || call.v_batch.dim(i, axes) != axis.size) return nb::none();
    if (call.has_state && call.state_batch.dim(i, axes) != axis.size) return nb::none();
  }

  GradientProblem gradient;
  Array out_array, grad_array, grad_kv_array, grad_k_sum_array;
  StateArrays after_arrays;
  const auto same = [&](const Array& a) { return a.is_tensor == call.k.is_tensor && a.kind == call.k.kind; };
  if (!out_array.take(out) || !same(out_array) || !has_shape(out_array, call.out_nd, call.out_dims)) return nb::none();
  if (!grad_array.take(grad_out) || !same(grad_array) || !has_shape(grad_array, call.out_nd, call.out_dims))
    return nb::none();
  if (!after.is_none()) {
    if (!take_three(after, parts) || !after_arrays.take(parts[0], parts[1], parts[2], call.exponential()) ||
        after_arrays.kv.is_tensor != call.k.is_tensor || !has_shape(after_arrays.kv, call.state_nd, call.state_dims))
      return nb::none();
    call.problem.after = after_arrays.ref();
  }
  if (grad_kv.is_none() != grad_k_sum.is_none()) return nb::none();
  if (!grad_kv.is_none()) {
    if (call.exponential() && after.is_none()) return nb::none();
    if (!grad_kv_array.take(grad_kv) || !grad_k_sum_array.take(grad_k_sum) ||
        !StateArrays::sums(grad_kv_array, Kind::float64) || !StateArrays::sums(grad_k_sum_array, Kind::float64) ||
        grad_kv_array.is_tensor != call.k.is_tensor || grad_k_sum_array.is_tensor != call.k.is_tensor ||
        !has_shape(grad_kv_array, call.state_nd, call.state_dims) ||
        !has_shape(grad_k_sum_array, call.state_nd - 1, call.state_dims))
      return nb::none();
    gradient.grad_after = {reinterpret_cast<double*>(grad_kv_array.data),
                           reinterpret_cast<double*>(grad_k_sum_array.data), nullptr};
  }

  const Kind kind = call.k.kind;
  const nb::object dq = new_array(call.q, call.q.nd, call.q.dims, kind);
  const nb::object dk = new_array(call.k, call.k.nd, call.k.dims, kind);
  const nb::object dv = new_array(call.k, call.v.nd, call.v.dims, kind);
  Array dq_array, dk_array, dv_array;
  call.problem.form = causal ? Form::causal : Form::parallel;
  if (!dq_array.take(dq) || !dk_array.take(dk) || !dv_array.take(dv) ||
      !lay_operand(call, out_array, false, &Axis::out, call.problem.out) ||
      !lay_operand(call, grad_array, false, &Axis::grad_out, gradient.grad_out) ||
      !lay_operand(call, dq_array, false, &Axis::dq, gradient.dq) ||
      !lay_operand(call, dk_array, true, &Axis::dk, gradient.dk) ||
      !lay_operand(call, dv_array, true, &Axis::dv, gradient.dv))
    return nb::none();
  nb::object dkv = nb::none(), dk_sum = nb::none();
  if (call.has_state) {
    StateResult to(call, false);
    gradient.grad_before = to.ref;
    dkv = to.kv;
    dk_sum = to.k_sum;
  }
  call.run([&](const Problem& problem, const Kernels& kernels, int threads) {
    gradient.problem = problem;
    return solve_gradient(gradient, kernels, threads);
  });
  return nb::make_tuple(dq, dk, dv, dkv, dk_sum);
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

  m.def("projection", projection, nb::arg("inputs"), nb::arg("weight").none(), nb::arg("bias").none(),
        nb::arg("square"), nb::arg("shift"), nb::arg("mirrored"), nb::arg("unit"), nb::arg("finish"), nb::arg("amount"),
        nb::arg("times"), nb::arg("angles").none(),
        "What a map does before its kernel to rows of so many inputs, as an object: the verbs take (kernel, "
        "projection) for a kernel's name, or (kernel, that of keys, that of queries). See "
        "linattn.feature_maps.Recipe.");
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
  m.def("attend_backward", attend_backward, nb::arg("grad_out"), nb::arg("grad_kv").none(),
        nb::arg("grad_k_sum").none(), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("out"), nb::arg("feature_map"),
        nb::arg("eps"), nb::arg("causal"), nb::arg("key_mask").none(), nb::arg("cu_seqlens").none(),
        nb::arg("enable_gqa"), nb::arg("normalize"), nb::arg("before").none(), nb::arg("after").none(),
        "(dq, dk, dv, dkv, dk_sum) of attend, or None: declined. `before` and `after` are states as triples; the last "
        "two are None without `before`.");
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
  m.def(
      "register_torch",
      [](nb::handle module) {
        torch.take(module);
        find_openmp();
      },
      nb::arg("torch"), "Tells the module: from now on its tensors are taken like arrays.");
  m.def("set_num_threads", [](int threads) { set_thread_count(threads); }, nb::arg("threads"));
  m.def("get_num_threads", [] { return thread_count(); });
  m.def("instruction_set", [] { return std::string(kernels_in_use()->name); });
  m.def("instruction_sets", [] {
    std::vector<std::string> names;
    for (auto set = usable_kernels(); *set; ++set) names.push_back((*set)->name);
    return names;
  });
}
