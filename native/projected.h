// A projection as an object of Python: its weights in both working precisions, ready for any number of calls.
#pragma once

#include <memory>
#include <vector>

#include "arrays.h"

namespace linattn {

class Projected {
 public:
  // weight: (inputs, columns), bias: (columns) or None, float64 and contiguous.
  Projected(nb::handle weight, nb::handle bias, double square, double shift, bool mirrored) {
    Array w, b;
    if (!w.take(weight) || w.is_tensor || w.kind != Kind::float64 || w.nd != 2 || !w.dense() || w.dims[0] < 1 ||
        w.dims[1] < 1)
      throw nb::type_error("weight: expected a contiguous float64 array (inputs, columns)");
    if (!bias.is_none() &&
        (!b.take(bias) || b.is_tensor || b.kind != Kind::float64 || b.nd != 1 || !b.dense() || b.dims[0] != w.dims[1]))
      throw nb::type_error("bias: expected a contiguous float64 array (columns,) or None");
    const int64_t inputs = w.dims[0], columns = w.dims[1];
    const int64_t row = (columns + kWidestVector - 1) / kWidestVector * kWidestVector;
    const size_t count = static_cast<size_t>((inputs + 1) * row);
    float_.assign(count + kLine / sizeof(float), 0);
    double_.assign(count + kLine / sizeof(double), 0);
    float* narrow = on_a_line(float_.data());
    double* wide = on_a_line(double_.data());
    const double* from = reinterpret_cast<const double*>(w.data);
    const double* added = reinterpret_cast<const double*>(b.data);
    for (int64_t i = 0; i <= inputs; ++i)
      for (int64_t c = 0; c < columns; ++c) {
        const double x = i < inputs ? from[i * columns + c] : added ? added[c] : 0;
        wide[i * row + c] = x;
        narrow[i * row + c] = static_cast<float>(x);
      }
    projection_ = {
        inputs, columns, mirrored, square, shift, row, narrow, narrow + inputs * row, wide, wide + inputs * row};
  }
  Projected(const Projected&) = delete;
  Projected& operator=(const Projected&) = delete;

  const Projection& get() const { return projection_; }

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

  template <class E>
  static E* on_a_line(E* p) {
    return p + (kLine - reinterpret_cast<uintptr_t>(p) % kLine) % kLine / sizeof(E);
  }

  std::vector<float> float_;
  std::vector<double> double_;
  Projection projection_;
};

}  // namespace linattn
