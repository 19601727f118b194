// A projection as an object of Python: its weights in both working precisions, ready for any number of calls.
#pragma once

#include <memory>
#include <vector>

#include "arrays.h"

namespace linattn {

class Projected {
 public:
  // weight: (inputs, columns), bias: (columns) or None; both may have an axis of heads before. float64, contiguous.
  Projected(nb::handle weight, nb::handle bias, double square, double shift, bool mirrored) {
    Array w, b;
    if (!numbers(w, weight) || (w.nd != 2 && w.nd != 3) || w.dims[0] < 1 || w.dim(2) < 1 || w.dim(1) < 1)
      throw nb::type_error("weight: expected a contiguous float64 array (inputs, columns) or (heads, inputs, columns)");
    const int64_t heads = w.nd == 3 ? w.dims[0] : 1, inputs = w.dim(2), columns = w.dim(1);
    if (!bias.is_none() &&
        (!numbers(b, bias) || b.nd != w.nd - 1 || b.dim(1) != columns || (b.nd == 2 && b.dims[0] != heads)))
      throw nb::type_error(
          "bias: expected a contiguous float64 array (columns,) or (heads, columns) as weight has, or "
          "None");
    const int64_t row = (columns + kWidestVector - 1) / kWidestVector * kWidestVector;
    const int64_t each = (inputs + 1) * row;
    float_.assign(static_cast<size_t>(heads * each) + kLine / sizeof(float), 0);
    double_.assign(static_cast<size_t>(heads * each) + kLine / sizeof(double), 0);
    float* narrow = on_a_line(float_.data());
    double* wide = on_a_line(double_.data());
    const double* from = reinterpret_cast<const double*>(w.data);
    const double* added = reinterpret_cast<const double*>(b.data);
    for (int64_t h = 0; h < heads; ++h, narrow += each, wide += each, from += inputs * columns) {
      for (int64_t i = 0; i <= inputs; ++i)
        for (int64_t c = 0; c < columns; ++c) {
          const double x = i < inputs ? from[i * columns + c] : added ? added[h * columns + c] : 0;
          wide[i * row + c] = x;
          narrow[i * row + c] = static_cast<float>(x);
        }
      projections_.push_back(
          {inputs, columns, mirrored, square, shift, row, narrow, narrow + inputs * row, wide, wide + inputs * row});
    }
  }
  Projected(const Projected&) = delete;
  Projected& operator=(const Projected&) = delete;

  const Projection* first() const { return projections_.data(); }
  int64_t heads() const { return static_cast<int64_t>(projections_.size()); }

  // A capsule, which owns it. A class of nanobind would be one for the whole process, and a second copy of the
  // extension in it, as tests load them, could not have its own.
  static nb::object capsule(std::unique_ptr<Projected> owned) {
    PyObject* made = PyCapsule_New(
        owned.get(), kName, [](PyObject* self) { delete static_cast<Projected*>(PyCapsule_GetPointer(self, kName)); });
    if (!made) throw nb::python_error();
    owned.release();
    return nb::steal(made);
  }
  static const Projected* of(nb::handle capsule) {
    if (!PyCapsule_IsValid(capsule.ptr(), kName)) return nullptr;
    return static_cast<const Projected*>(PyCapsule_GetPointer(capsule.ptr(), kName));
  }

 private:
  static constexpr const char* kName = "linattn.projection";
  static constexpr int64_t kWidestVector = 16;  // of all instruction sets
  static constexpr size_t kLine = 64;

  static bool numbers(Array& a, nb::handle from) {
    return a.take(from) && !a.is_tensor && a.kind == Kind::float64 && a.dense();
  }

  template <class E>
  static E* on_a_line(E* p) {
    return p + (kLine - reinterpret_cast<uintptr_t>(p) % kLine) % kLine / sizeof(E);
  }

  std::vector<float> float_;
  std::vector<double> double_;
  std::vector<Projection> projections_;  // one a head, or one for all
};

}  // namespace linattn
