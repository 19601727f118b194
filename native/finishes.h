// What follows a projection's linear step, row by row: the numbers z of a row become y, where they lie.
#pragma once

#include "elementary.h"
#include "kernels.h"

namespace linattn {
namespace LINATTN_ISA_NS {

// Vectors may run over the end of a row by less than one: behind D there is room for it (see Widths), and what products
// read of that, up to a whole vector, is made 0 afterwards.

// z: (count) -> max(z, 0) + amount
template <class T>
static inline void lift(T* z, int64_t count, T amount) {
  for (int64_t c = 0; c < count; c += kLanes<T>) store(z + c, vmax<T>(Vec<T>{}, load(z + c)) + amount);
}

// z: (count) -> z - log(sum exp(z)). A NaN makes all of it NaN, as do an infinity and -infinity everywhere.
template <class T>
static void log_softmax(T* z, int64_t count) {
  const int64_t whole = count / kLanes<T> * kLanes<T>, rest = count - whole;
  const T low = -static_cast<T>(__builtin_inff());
  Vec<T> best = splat(low);
  for (int64_t c = 0; c < whole; c += kLanes<T>) best = vmax<T>(best, load(z + c));
  if (rest) best = vmax<T>(best, load_part(z + whole, rest, low));
  const T top = max_lanes<T>(best);
  Vec<T> sum = {};
  const auto add = [&](Vec<T> x) {
    const Vec<T> below = x - top;  // 0 at most, or NaN
    sum += (below != below) ? below : exp_nonpositive<T>(below);
  };
  for (int64_t c = 0; c < whole; c += kLanes<T>) add(load(z + c));
  if (rest) add(load_part(z + whole, rest, low));
  const T down = log_from_one<T>(splat(sum_lanes<T>(sum)))[0];
  for (int64_t c = 0; c < whole; c += kLanes<T>) store(z + c, (load(z + c) - top) - down);
  for (int64_t c = whole; c < count; ++c) z[c] = (z[c] - top) - down;
}

// z: (half) -> y: (2 half), amount * (sin(z), cos(z))
template <class T>
static void make_waves(T* z, int64_t half, T amount) {
  const int64_t whole = half / kLanes<T> * kLanes<T>;
  Vec<T> sine, cosine;
  for (int64_t c = 0; c < whole; c += kLanes<T>) {
    sin_cos<T>(load(z + c), sine, cosine);
    store(z + half + c, cosine * amount);
    store(z + c, sine * amount);
  }
  if (whole == half) return;
  sin_cos<T>(load_part(z + whole, half - whole, T(0)), sine, cosine);
  store(z + half + whole, cosine * amount);
  for (int64_t c = whole; c < half; ++c) z[c] = sine[c - whole] * amount;
}

// z: (count) -> y: (2 count times), y_(2 count (j - 1) + i) = r_i r_((i - j) mod 2 count). r: room for 4 count + lanes.
template <class T>
static void multiply_neighbours(T* z, int64_t count, int64_t times, T* r) {
  const int64_t ring = 2 * count;
  for (int64_t c = 0; c < count; c += kLanes<T>) store(r + c, vmax<T>(Vec<T>{}, load(z + c)));
  for (int64_t c = 0; c < count; c += kLanes<T>) store(r + count + c, vmax<T>(Vec<T>{}, -load(z + c)));
  __builtin_memcpy(r + ring, r, static_cast<size_t>(ring) * sizeof(T));
  for (int64_t j = 1; j <= times; ++j) {
    const T* back = r + ring - j % ring;
    T* y = z + (j - 1) * ring;
    for (int64_t i = 0; i < ring; i += kLanes<T>) store(y + i, load(r + i) * load(back + i));
  }
}

// z: (count) -> y: (count (count + 1) / 2), the products z_i z_j for i <= j, row after row; those of i < j stand for
// two, times sqrt(2). factors: room for count + lanes.
template <class T>
static void multiply_pairs(T* z, int64_t count, T* factors) {
  const T root = static_cast<T>(1.41421356237309504880);
  __builtin_memcpy(factors, z, static_cast<size_t>(count) * sizeof(T));
  T* y = z;
  for (int64_t i = 0; i < count; y += count - i, ++i) {
    const Vec<T> factor = splat(factors[i] * root);
    for (int64_t j = i; j < count; j += kLanes<T>) store(y + (j - i), load(factors + j) * factor);
    *y = factors[i] * factors[i];
  }
}

// z: (half) -> y: (2 half), (z cosine, z sine)
template <class T>
static void turn(T* z, int64_t half, T cosine, T sine) {
  const int64_t whole = half / kLanes<T> * kLanes<T>;
  for (int64_t c = 0; c < half; c += kLanes<T>) store(z + half + c, load(z + c) * sine);
  for (int64_t c = 0; c < whole; c += kLanes<T>) store(z + c, load(z + c) * cosine);
  for (int64_t c = whole; c < half; ++c) z[c] *= cosine;
}

// a *= b, spectra of m real numbers each: real parts of the frequencies 0 ... m/2, then imaginary parts, which neither
// the first frequency has nor the last of an even m.
template <class T>
static void multiply_spectra(T* a, const T* b, int64_t m) {
  const int64_t real = m / 2 + 1, both = m - real;  // frequencies 1 ... both are complex
  const int64_t to_imaginary = real - 1;
  int64_t f = 1;
  for (; f + kLanes<T> <= both + 1; f += kLanes<T>) {
    const Vec<T> ar = load(a + f), ai = load(a + to_imaginary + f), br = load(b + f), bi = load(b + to_imaginary + f);
    store(a + f, ar * br - ai * bi);
    store(a + to_imaginary + f, ar * bi + ai * br);
  }
  for (; f <= both; ++f) {
    const T ar = a[f], ai = a[to_imaginary + f], br = b[f], bi = b[to_imaginary + f];
    a[f] = ar * br - ai * bi;
    a[to_imaginary + f] = ar * bi + ai * br;
  }
  a[0] *= b[0];
  if (both + 1 < real) a[both + 1] *= b[both + 1];
}

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
