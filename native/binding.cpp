// The one binding file: Python objects in, pointers and strides out. Placeholder functions.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

// NumPy's headers compile under the stable ABI too (its functions come through a table at run time,
// its fields through NumPy's own inline functions).
#include <numpy/arrayobject.h>

#include "kernels.h"

namespace nb = nanobind;

static bool import_numpy() {
  import_array1(false);
  return true;
}

NB_MODULE(_native, m) {
  m.doc() = "Kernels of linattn; use the functions of linattn, which check and word errors.";
  if (!import_numpy()) throw nb::python_error();
  m.attr("__version__") = LINATTN_VERSION;

  m.def("probe_handle", [](nb::handle a) -> nb::object {
    PyObject* o = a.ptr();
    if (!PyArray_CheckExact(o)) return nb::none();
    PyArrayObject* x = reinterpret_cast<PyArrayObject*>(o);
    if (PyArray_DESCR(x)->type_num != NPY_FLOAT || PyArray_NDIM(x) != 1 ||
        PyArray_STRIDES(x)[0] != (npy_intp)sizeof(float))
      return nb::none();
    npy_intp shape[1] = {1};
    PyObject* out = PyArray_EMPTY(1, shape, NPY_FLOAT, 0);
    if (!out) throw nb::python_error();
    float* r = static_cast<float*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(out)));
    {
      nb::gil_scoped_release nogil;
      const linattn::Kernels* const* t = linattn::compiled_kernels();
      while (t[1]) ++t;  // the lowest: runs anywhere
      r[0] = (*t)->sum(static_cast<const float*>(PyArray_DATA(x)), (long)PyArray_DIM(x, 0));
    }
    return nb::steal(out);
  });
  m.def("probe_ndarray", [](nb::ndarray<nb::numpy, const float> a) -> nb::object {
    if (a.ndim() != 1 || a.stride(0) != 1) return nb::none();
    npy_intp shape[1] = {1};
    PyObject* out = PyArray_EMPTY(1, shape, NPY_FLOAT, 0);
    if (!out) throw nb::python_error();
    return nb::steal(out);
  });
  m.def("probe_nothing", [](nb::handle, nb::handle, nb::handle) {});
  m.def("instruction_sets", [] {
    std::vector<std::string> names;
    for (auto t = linattn::compiled_kernels(); *t; ++t) names.push_back((*t)->name);
    return names;
  });
}
