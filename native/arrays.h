// Arrays of Python as pointers, sizes and strides: those of NumPy, and the tensors of torch on a CPU. Neither library
// is linked: NumPy is reached through its own table, torch through the attributes of its tensors.
#pragma once

#include <nanobind/nanobind.h>

// NumPy's headers compile under the stable ABI too (its functions come through a table at run time, its fields
// through NumPy's own inline functions).
#include <numpy/arrayobject.h>

#include <cstring>

#include "driver.h"

namespace linattn {

namespace nb = nanobind;

enum class Kind : uint8_t { float32, float64, float16, bfloat16, boolean, int32, int64, other };
constexpr int kKinds = 7;
constexpr int kMostAxes = kMaxAxes + 3;

inline int bfloat16_number = -1;  // type number of ml_dtypes.bfloat16, once registered

// DLPack's table of functions for exchange in C (version 1), as a tensor type offers it under
// __dlpack_c_exchange_api__: reading a tensor through it takes a tenth of what its attributes take.
namespace dlpack {
struct Tensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};
struct ExchangeAPI {
  uint32_t major, minor;
  ExchangeAPI* previous;
  void *allocate, *from_object, *to_object;
  int (*read)(void* object, Tensor* out);  // borrowed; may be null
  void* current_stream;
};
constexpr int32_t kCPU = 1;
}  // namespace dlpack

// What is known of torch once it is registered; references that live as long as the process.
struct Torch {
  PyObject* tensor = nullptr;  // the type
  PyObject* dtypes[kKinds] = {};
  PyObject* keywords[kKinds] = {};  // of empty: dtype and device
  PyObject *empty = nullptr, *empty_like = nullptr, *new_empty = nullptr, *get_num_threads = nullptr;
  int (*read)(void* object, dlpack::Tensor* out) = nullptr;  // null: an older torch, read by its attributes
  PyObject *data_ptr = nullptr, *shape = nullptr, *stride = nullptr, *dtype = nullptr, *is_cpu = nullptr;

  void take(nb::handle torch) {
    const auto keep = [&](const char* name) { return nb::object(torch.attr(name)).release().ptr(); };
    static constexpr const char* kNames[kKinds] = {"float32", "float64", "float16", "bfloat16",
                                                   "bool",    "int32",   "int64"};
    const nb::object cpu = torch.attr("device")("cpu");
    for (int i = 0; i < kKinds; ++i) {
      dtypes[i] = keep(kNames[i]);
      nb::dict words;
      words["dtype"] = nb::handle(dtypes[i]);
      words["device"] = cpu;
      keywords[i] = words.release().ptr();
    }
    empty = keep("empty");
    empty_like = keep("empty_like");
    new_empty = PyUnicode_InternFromString("new_empty");
    get_num_threads = keep("get_num_threads");
    data_ptr = PyUnicode_InternFromString("data_ptr");
    shape = PyUnicode_InternFromString("shape");
    stride = PyUnicode_InternFromString("stride");
    dtype = PyUnicode_InternFromString("dtype");
    is_cpu = PyUnicode_InternFromString("is_cpu");
    PyObject* type = keep("Tensor");
    const nb::object table = nb::steal(PyObject_GetAttrString(type, "__dlpack_c_exchange_api__"));
    if (table.is_valid() && PyCapsule_IsValid(table.ptr(), "dlpack_exchange_api")) {
      const auto* api = static_cast<dlpack::ExchangeAPI*>(PyCapsule_GetPointer(table.ptr(), "dlpack_exchange_api"));
      while (api && api->major != 1) api = api->previous;
      if (api) read = api->read;
    }
    PyErr_Clear();
    tensor = type;  // last: from now on tensors are known
  }
};
inline Torch torch;

class Array {
 public:
  PyObject* object = nullptr;
  bool is_tensor = false;
  Kind kind = Kind::other;
  int item = 0;  // bytes of an element
  char* data = nullptr;
  int nd = 0;
  const npy_intp *dims = nullptr, *strides = nullptr;  // strides in bytes

  Array() = default;
  Array(const Array&) = delete;  // dims and strides may point into the object
  Array& operator=(const Array&) = delete;

  explicit operator bool() const { return object != nullptr; }
  int64_t dim(int from_end) const { return dims[nd - from_end]; }
  int64_t stride(int from_end) const { return strides[nd - from_end]; }
  bool writeable() const { return is_tensor || PyArray_ISWRITEABLE(reinterpret_cast<PyArrayObject*>(object)); }
  // Whether the elements lie one behind the other, where a pointer to them may be used.
  bool dense() const {
    int64_t next = item;
    for (int i = nd - 1; i >= 0; --i) {
      if (dims[i] == 0) return true;
      if (dims[i] != 1 && strides[i] != next) return false;
      next *= dims[i];
    }
    return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(item) == 0;
  }

  // An exact ndarray in native byte order, or an exact tensor on a CPU. That it is no wrapper, needs no gradient and is
  // strided, the caller has made sure.
  bool take(nb::handle from) {
    if (PyArray_CheckExact(from.ptr())) return take_numpy(from.ptr());
    return torch.tensor && reinterpret_cast<PyObject*>(Py_TYPE(from.ptr())) == torch.tensor && take_tensor(from.ptr());
  }

 private:
  npy_intp sizes_[kMostAxes], steps_[kMostAxes];

  static int size_of(Kind kind) {
    static constexpr int kSizes[] = {4, 8, 2, 2, 1, 4, 8, 0};
    return kSizes[static_cast<int>(kind)];
  }

  static Kind kind_of(int number, int64_t bytes) {
    if (number == NPY_FLOAT) return Kind::float32;
    if (number == NPY_DOUBLE) return Kind::float64;
    if (number == NPY_HALF) return Kind::float16;
    if (number == NPY_BOOL) return Kind::boolean;
    if (number >= 0 && number == bfloat16_number) return Kind::bfloat16;
    if (PyTypeNum_ISSIGNED(number) && bytes == 4) return Kind::int32;
    if (PyTypeNum_ISSIGNED(number) && bytes == 8) return Kind::int64;
    return Kind::other;
  }

  bool take_numpy(PyObject* from) {
    PyArrayObject* array = reinterpret_cast<PyArrayObject*>(from);
    object = from;
    data = static_cast<char*>(PyArray_DATA(array));
    nd = PyArray_NDIM(array);
    dims = PyArray_DIMS(array);
    strides = PyArray_STRIDES(array);
    item = static_cast<int>(PyArray_ITEMSIZE(array));
    kind = kind_of(PyArray_DESCR(array)->type_num, item);
    return PyArray_ISNOTSWAPPED(array);
  }

  static bool numbers(PyObject* tuple, npy_intp* to, int& count) {
    const Py_ssize_t size = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : -1;
    if (size < 0 || size > kMostAxes) return false;
    for (Py_ssize_t i = 0; i < size; ++i) {
      to[i] = static_cast<npy_intp>(PyLong_AsLongLong(PyTuple_GetItem(tuple, i)));
      if (to[i] == -1 && PyErr_Occurred()) return false;
    }
    count = static_cast<int>(size);
    return true;
  }

  bool take_tensor(PyObject* from) {
    // Whatever goes wrong here (a layout without strides, for one) is a call that is declined.
    const bool read = torch.read ? exchange_tensor(from) : read_tensor(from);
    if (!read) {
      PyErr_Clear();
      return false;
    }
    for (int i = 0; i < nd; ++i) steps_[i] *= item;
    dims = sizes_;
    strides = steps_;
    is_tensor = true;
    object = from;
    return true;
  }

  static Kind kind_of(const dlpack::Tensor& t) {
    constexpr uint8_t kInt = 0, kFloat = 2, kBfloat = 4, kBool = 6;
    if (t.lanes != 1) return Kind::other;
    if (t.code == kFloat)
      return t.bits == 32 ? Kind::float32 : t.bits == 64 ? Kind::float64 : t.bits == 16 ? Kind::float16 : Kind::other;
    if (t.code == kBfloat && t.bits == 16) return Kind::bfloat16;
    if (t.code == kBool && t.bits == 8) return Kind::boolean;
    if (t.code == kInt) return t.bits == 32 ? Kind::int32 : t.bits == 64 ? Kind::int64 : Kind::other;
    return Kind::other;
  }

  bool exchange_tensor(PyObject* from) {
    dlpack::Tensor t{};
    if (torch.read(from, &t) != 0 || t.device_type != dlpack::kCPU || t.ndim > kMostAxes) return false;
    kind = kind_of(t);
    item = size_of(kind);
    if (item == 0 || (t.ndim > 0 && !t.strides)) return false;
    nd = t.ndim;
    for (int i = 0; i < nd; ++i) {
      sizes_[i] = static_cast<npy_intp>(t.shape[i]);
      steps_[i] = static_cast<npy_intp>(t.strides[i]);
    }
    data = static_cast<char*>(t.data) + t.byte_offset;
    return true;
  }

  bool read_tensor(PyObject* from) {
    const nb::object device = nb::steal(PyObject_GetAttr(from, torch.is_cpu));
    if (device.ptr() != Py_True) return false;
    const nb::object type = nb::steal(PyObject_GetAttr(from, torch.dtype));
    kind = Kind::other;
    for (int i = 0; i < kKinds; ++i)
      if (type.ptr() == torch.dtypes[i]) kind = static_cast<Kind>(i);
    item = size_of(kind);
    if (item == 0) return false;
    const nb::object shape = nb::steal(PyObject_GetAttr(from, torch.shape));
    int steps = 0;
    if (!shape.is_valid() || !numbers(shape.ptr(), sizes_, nd)) return false;
    const nb::object stride = nb::steal(PyObject_CallMethodObjArgs(from, torch.stride, nullptr));
    if (!stride.is_valid() || !numbers(stride.ptr(), steps_, steps) || steps != nd) return false;
    const nb::object pointer = nb::steal(PyObject_CallMethodObjArgs(from, torch.data_ptr, nullptr));
    if (!pointer.is_valid()) return false;
    data = static_cast<char*>(PyLong_AsVoidPtr(pointer.ptr()));
    return data || !PyErr_Occurred();
  }
};

// The floating kinds come first, in the order of DType.
inline bool dtype_of(const Array& a, DType& dtype) {
  static_assert(static_cast<int>(DType::float32) == static_cast<int>(Kind::float32) &&
                static_cast<int>(DType::float64) == static_cast<int>(Kind::float64) &&
                static_cast<int>(DType::float16) == static_cast<int>(Kind::float16) &&
                static_cast<int>(DType::bfloat16) == static_cast<int>(Kind::bfloat16));
  if (a.kind > Kind::bfloat16) return false;
  dtype = static_cast<DType>(a.kind);
  return true;
}

// A new tensor. torch.empty with a dtype and a device takes 4.3 microseconds, as a whole step of decoding does without
// it; new_empty takes 2.0 and empty_like 1.2, which makes the same tensor where `like` is contiguous.
inline PyObject* new_tensor(const Array& like, int nd, const npy_intp* dims, Kind kind) {
  bool alike = kind == like.kind && nd == like.nd && like.dense();
  for (int i = 0; i < nd && alike; ++i) alike = dims[i] == like.dims[i];
  if (alike) return PyObject_CallFunctionObjArgs(torch.empty_like, like.object, nullptr);
  const nb::object shape = nb::steal(PyTuple_New(nd));
  if (!shape.is_valid()) return nullptr;
  for (int i = 0; i < nd; ++i) PyTuple_SetItem(shape.ptr(), i, PyLong_FromLongLong(dims[i]));
  if (kind == like.kind) return PyObject_CallMethodObjArgs(like.object, torch.new_empty, shape.ptr(), nullptr);
  const nb::object arguments = nb::steal(PyTuple_Pack(1, shape.ptr()));
  if (!arguments.is_valid()) return nullptr;
  return PyObject_Call(torch.empty, arguments.ptr(), torch.keywords[static_cast<int>(kind)]);
}

// A new array of the library of `like`.
inline nb::object new_array(const Array& like, int nd, const npy_intp* dims, Kind kind) {
  PyObject* fresh;
  if (like.is_tensor) {
    fresh = new_tensor(like, nd, dims, kind);
  } else if (kind == like.kind) {
    PyArray_Descr* descr = PyArray_DESCR(reinterpret_cast<PyArrayObject*>(like.object));
    Py_INCREF(descr);
    fresh = PyArray_NewFromDescr(&PyArray_Type, descr, nd, dims, nullptr, nullptr, 0, nullptr);
  } else {
    const int number = kind == Kind::float64 ? NPY_DOUBLE : NPY_INT32;
    fresh = PyArray_EMPTY(nd, const_cast<npy_intp*>(dims), number, 0);
  }
  if (!fresh) throw nb::python_error();
  return nb::steal(fresh);
}

// The bytes an array can touch: [low, high).
inline void extent(const Array& a, const char*& low, const char*& high) {
  low = high = a.data;
  for (int i = 0; i < a.nd; ++i) {
    if (a.dims[i] == 0) {
      low = high = a.data;
      return;
    }
    const int64_t reach = static_cast<int64_t>(a.dims[i] - 1) * a.strides[i];
    (reach < 0 ? low : high) += reach;
  }
  high += a.item;
}

inline bool may_overlap(const Array& a, const Array& b) {
  const char *a_low, *a_high, *b_low, *b_high;
  extent(a, a_low, a_high);
  extent(b, b_low, b_high);
  return a_low < b_high && b_low < a_high;
}

// Whether no two elements share memory, shown by strides that nest.
inline bool elements_apart(const Array& a) {
  int64_t strides[kMostAxes + 1], dims[kMostAxes + 1];
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
  int64_t reach = a.item;
  for (int i = 0; i < count; ++i) {
    if (strides[i] < reach) return false;
    reach += (dims[i] - 1) * strides[i];
  }
  return true;
}

}  // namespace linattn
