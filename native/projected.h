// A projection as an object of Python: its weights in both working precisions, ready for any number of calls.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"

namespace linattn {

// The name that linattn.feature_maps.Recipe has for it.
inline Finish finish_of(const std::string& name) {
  const std::pair<const char*, Finish> known[] = {
      {"none", Finish::none},       {"lifted", Finish::lifted},   {"softmax", Finish::softmax},
      {"halves", Finish::halves},   {"waves", Finish::waves},     {"neighbours", Finish::neighbours},
      {"spectra", Finish::spectra}, {"squares", Finish::squares}, {"turned", Finish::turned}};
  for (const auto& [label, finish] : known)
    if (name == label) return finish;
  throw nb::value_error(
      "finish: expected none, lifted, softmax, halves, waves, neighbours, spectra, squares or turned");
}

class Projected {
 public:
  // steps: all but the weights and what follows from them. weight: (inputs, columns) or None, bias: (columns) or None;
  // both may have an axis of heads before. float64, contiguous.
  Projected(Projection steps, nb::handle weight, nb::handle bias, nb::handle angles) {
    Array w, b, a;
    if (steps.finish == Finish::turned) {
      if (!numbers(a, angles) || a.nd != 2 || a.dims[0] < 1 || a.dim(1) != 2)
        throw nb::type_error("angles: expected a contiguous float64 array (n, 2)");
      const double* from = reinterpret_cast<const double*>(a.data);
      wide_angles_.assign(from, from + 2 * a.dims[0]);
      narrow_angles_.assign(wide_angles_.begin(), wide_angles_.end());
      steps.angles = a.dims[0];
      steps.angles_float = narrow_angles_.data();
      steps.angles_double = wide_angles_.data();
    }
    if (weight.is_none()) {
      if (!bias.is_none() || steps.inputs < 1)
        throw nb::type_error("weight: expected one where there is a bias, and inputs >= 1 without it");
      steps.columns = steps.inputs;
      count_features(steps, true);
      projections_.push_back(steps);
      return;
    }
    if (!numbers(w, weight) || (w.nd != 2 && w.nd != 3) || w.dims[0] < 1 || w.dim(2) < 1 || w.dim(1) < 1)
      throw nb::type_error("weight: expected a contiguous float64 array (inputs, columns) or (heads, inputs, columns)");
    const int64_t heads = w.nd == 3 ? w.dims[0] : 1, inputs = w.dim(2), columns = w.dim(1);
    if (steps.inputs != inputs) throw nb::type_error("weight: expected as many rows as there are inputs");
    steps.columns = columns;
    count_features(steps, false);
    if (!bias.is_none() &&
        (!numbers(b, bias) || b.nd != w.nd - 1 || b.dim(1) != columns || (b.nd == 2 && b.dims[0] != heads)))
      throw nb::type_error(
          "bias: expected a contiguous float64 array (columns,) or (heads, columns) as weight has, or "
          "None");
    const int64_t row = (columns + kWidestVector - 1) / kWidestVector * kWidestVector;
    const int64_t each = (inputs + 1) * row;
    // The last of several spectra may begin anywhere, and vectors of its last columns end behind the row.
    const size_t all = static_cast<size_t>(heads * each + kWidestVector);
    float_.assign(all + kLine / sizeof(float), 0);
    double_.assign(all + kLine / sizeof(double), 0);
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
      steps.row = row;
      steps.weight_float = narrow;
      steps.bias_float = narrow + inputs * row;
      steps.weight_double = wide;
      steps.bias_double = wide + inputs * row;
      projections_.push_back(steps);
    }
  }
  Projected(const Projected&) = delete;
  Projected& operator=(const Projected&) = delete;

  const Projection* first() const { return projections_.data(); }
  // Whether this may be for queries where the other one is for keys.
  bool goes_with(const Projected& keys) const {
    const Projection &a = *first(), &b = *keys.first();
    return this == &keys ||
           (a.inputs == b.inputs && a.columns == b.columns && a.features == b.features && a.mirrored == b.mirrored &&
            a.unit == b.unit && a.finish == b.finish && a.times == b.times && a.square == b.square &&
            a.shift == b.shift && a.amount == b.amount && !a.angles && !b.angles);
  }
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
  static constexpr int64_t kMost = int64_t(1) << 30;  // columns, and times: no number of features overflows

  // Columns of z and features of y.
  static void count_features(Projection& p, bool weightless) {
    if (p.times < 1 || p.times > kMost || p.columns > kMost || (p.finish == Finish::halves && !p.mirrored) ||
        (has_spectra(p.finish) &&
         (p.mirrored || p.square != 0 || p.shift != 0 || weightless || p.columns % p.times != 0)))
      throw nb::value_error("projection: expected steps that fit one another");
    p.features = features_of(p);
  }

  static bool numbers(Array& a, nb::handle from) {
    return a.take(from) && !a.is_tensor && a.kind == Kind::float64 && a.dense();
  }

  template <class E>
  static E* on_a_line(E* p) {
    return p + (kLine - reinterpret_cast<uintptr_t>(p) % kLine) % kLine / sizeof(E);
  }

  std::vector<float> float_, narrow_angles_;
  std::vector<double> double_, wide_angles_;
  std::vector<Projection> projections_;  // one a head, or one for all
};

}  // namespace linattn
