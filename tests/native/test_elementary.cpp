// The small functions of every instruction set: exp and log1p in units in the last place, the maps and their special
// values, all 65,536 numbers of both half formats and the ties between them, rows in and out, transposes.
#include <algorithm>
#include <functional>
#include <string>

#include "dispatch.h"
#include "plain.h"
#include "probe.h"

namespace linattn {
#define LINATTN_PROBE(set) \
  namespace set {          \
  Probe probe();           \
  }
LINATTN_PROBE(avx512)
LINATTN_PROBE(avx2)
LINATTN_PROBE(baseline)
LINATTN_PROBE(neon)
LINATTN_PROBE(portable)
LINATTN_PROBE(wide)
}  // namespace linattn

using namespace linattn;

namespace {

template <class T>
struct Limits;
template <>
struct Limits<float> {
  using Bits = uint32_t;
  using Wider = double;
  static constexpr int digits = 24, least = -149, first_normal = -126, last = 127;
  static constexpr DType dtype = DType::float32;
};
template <>
struct Limits<double> {
  using Bits = uint64_t;
  using Wider = long double;
  static constexpr int digits = 53, least = -1074, first_normal = -1022, last = 1023;
  static constexpr DType dtype = DType::float64;
};

const double kInf = std::numeric_limits<double>::infinity();
const double kNaN = std::numeric_limits<double>::quiet_NaN();

// |found - right| in units of the last place of right.
template <class T>
double ulps(T found, typename Limits<T>::Wider right) {
  if (right == 0) return found == 0 ? 0 : kInf;
  int exponent;
  std::frexp(right, &exponent);
  const int last = std::max(exponent - Limits<T>::digits, Limits<T>::least);
  return static_cast<double>(std::fabs(static_cast<typename Limits<T>::Wider>(found) - right) *
                             std::ldexp(static_cast<typename Limits<T>::Wider>(1), -last));
}

// Numbers of [low, high], evenly in the format's own order: as many near 0 as far from it.
template <class T>
std::vector<T> scan(double low, double high, int64_t count) {
  using Bits = typename Limits<T>::Bits;
  std::vector<T> x;
  auto bits_of = [](double number) {
    const T rounded = static_cast<T>(std::fabs(number));
    Bits bits;
    std::memcpy(&bits, &rounded, sizeof bits);
    return bits;
  };
  for (const int sign : {-1, 1}) {
    const double from = sign < 0 ? std::max(0.0, -high) : std::max(0.0, low), to = sign < 0 ? -low : high;
    if (to <= from && !(sign > 0 && to == 0)) continue;
    const Bits first = bits_of(from), last = bits_of(to);
    const Bits step = std::max<Bits>(1, (last - first) / static_cast<Bits>(count));
    for (Bits at = first; at <= last && at >= first; at += step) {
      T value;
      std::memcpy(&value, &at, sizeof value);
      x.push_back(sign < 0 ? -value : value);
    }
    x.push_back(static_cast<T>(sign * to));
  }
  // and evenly on the line, where most inputs are
  for (int64_t i = 0; i <= count; ++i)
    x.push_back(static_cast<T>(low + (high - low) * static_cast<double>(i) / static_cast<double>(count)));
  while (x.size() % kProbeLanes) x.push_back(x.back());
  return x;
}

// log(1 + x) for x in [0, 1], as 2 atanh(x / (2 + x)): emulated processors are careless with their own logarithms.
template <class Wider>
Wider log1p_series(Wider x) {
  const Wider z = x / (2 + x);
  Wider sum = 0;
  for (int k = 45; k > 0; k -= 2) sum = sum * z * z + static_cast<Wider>(1) / k;  // 9^-23 < 2^-72
  return 2 * z * sum;
}

// log(x) for x >= 1, likewise.
template <class Wider>
Wider log_series(Wider x) {
  int exponent;
  const Wider mantissa = std::frexp(x, &exponent) * 2;
  return log1p_series<Wider>(mantissa - 1) +
         (exponent - 1) * static_cast<Wider>(0.693147180559945309417232121458176568L);
}

struct Worst {
  double ulps = 0, at = 0;
};

template <class T>
Worst worst_of(void (*f)(const T*, T*, int64_t), const std::vector<T>& x,
               const std::function<typename Limits<T>::Wider(typename Limits<T>::Wider)>& right, double slope) {
  std::vector<T> y(x.size());
  f(x.data(), y.data(), static_cast<int64_t>(x.size()));
  Worst worst;
  for (size_t i = 0; i < x.size(); ++i) {
    // Beyond 1 unit, `slope` units more for each unit of the argument: law 1 forgives |x| epsilon.
    const double off = ulps<T>(y[i], right(x[i])) - slope * std::fabs(static_cast<double>(x[i]));
    if (off > worst.ulps || std::isnan(off)) worst = {off, static_cast<double>(x[i])};
  }
  return worst;
}

template <class T>
void test_functions(const char* name, const Functions<T>& f, int64_t count) {
  using Wider = typename Limits<T>::Wider;
  const bool single = sizeof(T) == 4;
  const double under = single ? -87.33 : -708.39, over = single ? 88.72 : 709.78;

  Worst worst = worst_of<T>(f.exp, scan<T>(under, over, count), [](Wider x) { return std::exp(x); }, 0);
  CHECK(worst.ulps <= 1.5, "%s exp: %.3f ulp at %.9g", name, worst.ulps, worst.at);
  std::printf("%s %s: exp %.2f", name, single ? "float" : "double", worst.ulps);
  worst = worst_of<T>(f.exp_nonpositive, scan<T>(under, 0, count), [](Wider x) { return std::exp(x); }, 0.05);
  CHECK(worst.ulps <= 1.5, "%s exp_nonpositive: %.3f ulp at %.9g", name, worst.ulps, worst.at);
  std::printf(", below 0 %.2f (and |x| / 20)", worst.ulps);
  worst = worst_of<T>(f.log1p_unit, scan<T>(0, 1, count), [](Wider x) { return log1p_series(x); }, 0);
  CHECK(worst.ulps <= 2.5, "%s log1p: %.3f ulp at %.9g", name, worst.ulps, worst.at);
  std::printf(", log1p %.2f", worst.ulps);
  worst = worst_of<T>(f.log_from_one, scan<T>(1, 1e30, count), log_series<Wider>, 0);
  CHECK(worst.ulps <= 2.5, "%s log: %.3f ulp at %.9g", name, worst.ulps, worst.at);
  std::printf(", log %.2f ulp", worst.ulps);

  // sin and cos in units of the last place of 1/2 ... 1, to both sides of where libm takes over.
  const double limit = single ? 8192 : 1048576;
  for (double most : {4.0, limit, 3 * limit}) {
    const std::vector<T> x = scan<T>(-most, most, count / 2);
    std::vector<T> sine(x.size()), cosine(x.size());
    f.sine(x.data(), sine.data(), static_cast<int64_t>(x.size()));
    f.cosine(x.data(), cosine.data(), static_cast<int64_t>(x.size()));
    double off = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const Wider z = x[i];
      const double errors[] = {static_cast<double>(std::fabs(sine[i] - std::sin(z))),
                               static_cast<double>(std::fabs(cosine[i] - std::cos(z)))};
      for (double error : errors) off = std::max(off, std::isnan(error) ? kInf : std::ldexp(error, Limits<T>::digits));
    }
    CHECK(off <= 2, "%s sin, cos to %g: %.3f", name, most, off);
    if (most == limit) std::printf(", sin and cos %.2f of 1/2 ... 1\n", off);
  }

  // The maps as they are defined, conditioning included.
  for (Map map : {Map::elu1, Map::relu, Map::squared_relu, Map::softplus, Map::sigmoid, Map::identity}) {
    const std::vector<T> x = scan<T>(under * 0.99, over * 0.99, count / 4);
    std::vector<T> y(x.size());
    f.phi(map, x.data(), y.data(), static_cast<int64_t>(x.size()));
    for (size_t i = 0; i < x.size(); ++i) {
      const Wider z = x[i];
      Wider right = z;
      if (map == Map::elu1) right = z < 0 ? std::exp(z) : z + 1;
      if (map == Map::relu) right = z > 0 ? z : 0;
      if (map == Map::squared_relu) right = z > 0 ? z * z : 0;
      if (map == Map::softplus) right = std::max<Wider>(z, 0) + log1p_series(std::exp(-std::fabs(z)));
      if (map == Map::sigmoid) right = 1 / (1 + std::exp(-z));
      const bool tiny = std::fabs(right) < std::ldexp(1.0, Limits<T>::first_normal);
      const double off = tiny ? static_cast<double>(std::fabs(y[i] - right)) / std::ldexp(1.0, Limits<T>::first_normal)
                              : ulps<T>(y[i], right) - 0.05 * std::fabs(static_cast<double>(z));
      CHECK(off <= 4, "%s %s(%.9g) = %.9g, not %.9g", name, plain::name_of(map), static_cast<double>(z),
            static_cast<double>(y[i]), static_cast<double>(right));
    }
    T special[kProbeLanes] = {T(-kInf), T(kInf), T(kNaN), T(0), T(-0.0), T(-1e30), T(1e30), T(-120), T(-2000)},
      out[kProbeLanes];
    f.phi(map, special, out, kProbeLanes);
    const bool to_zero = map != Map::identity;
    CHECK(out[0] == (to_zero ? 0 : T(-kInf)), "%s %s(-inf) = %g", name, plain::name_of(map), double(out[0]));
    CHECK(out[1] == (map == Map::sigmoid ? 1 : T(kInf)), "%s %s(inf) = %g", name, plain::name_of(map), double(out[1]));
    CHECK(std::isnan(out[2]), "%s %s(nan) = %g", name, plain::name_of(map), double(out[2]));
    const double zero = map == Map::elu1 ? 1 : map == Map::softplus ? std::log(2.0) : map == Map::sigmoid ? 0.5 : 0;
    CHECK(std::fabs(double(out[3]) - zero) < 1e-6 && std::fabs(double(out[4]) - zero) < 1e-6, "%s", name);
    if (to_zero) CHECK(out[5] == 0 && out[8] == 0, "%s %s(-1e30) = %g", name, plain::name_of(map), double(out[5]));
    if (to_zero && single) CHECK(out[7] == 0, "%s", name);
    CHECK(out[6] == (map == Map::sigmoid        ? 1
                     : map == Map::squared_relu ? T(1e30) * T(1e30)
                                                : T(1e30)),
          "%s %s", name, plain::name_of(map));
  }

  // exp beyond its range
  T x[kProbeLanes] = {T(-kInf), T(kInf), T(kNaN), T(0), T(-1e30), T(1e30), T(under * 1.01), T(over * 1.01)},
    y[kProbeLanes];
  f.sine(x, y, kProbeLanes);
  CHECK(std::isnan(y[0]) && std::isnan(y[1]) && std::isnan(y[2]) && y[3] == 0 && std::fabs(y[4]) <= 1, "%s", name);
  f.cosine(x, y, kProbeLanes);
  CHECK(std::isnan(y[0]) && std::isnan(y[1]) && std::isnan(y[2]) && y[3] == 1 && std::fabs(y[5]) <= 1, "%s", name);
  const T ones[kProbeLanes] = {1, T(kNaN), 1};
  f.log_from_one(ones, y, kProbeLanes);
  CHECK(y[0] == 0 && std::isnan(y[1]) && y[2] == 0, "%s", name);
  f.exp(x, y, kProbeLanes);
  CHECK(y[0] == 0 && y[1] == T(kInf) && std::isnan(y[2]) && y[3] == 1 && y[4] == 0 && y[5] == T(kInf), "%s", name);
  CHECK(y[6] == 0 && y[7] == T(kInf), "%s", name);

  // exp(x) 2^shift, which reaches over the whole range of exponents
  plain::Random random(7);
  for (int round = 0; round < 2000; ++round) {
    T shift[kProbeLanes], n[kProbeLanes];
    for (int64_t i = 0; i < kProbeLanes; ++i) x[i] = static_cast<T>(random.uniform(-3000, 3000));
    f.exponent(x, n, kProbeLanes);
    for (int64_t i = 0; i < kProbeLanes; ++i) {
      CHECK(std::fabs(double(n[i]) - double(x[i]) * 1.4426950408889634) <= 0.51, "%s exponent of %g: %g", name,
            double(x[i]), double(n[i]));
      shift[i] =
          static_cast<T>(static_cast<double>(random.below(2 * Limits<T>::last + 40)) - Limits<T>::last - 20) - n[i];
    }
    f.exp_shifted(x, shift, y, kProbeLanes);
    for (int64_t i = 0; i < kProbeLanes; ++i) {
      const long double right = std::exp(static_cast<long double>(x[i]) +
                                         static_cast<long double>(shift[i]) * 0.693147180559945309417232121458176568L);
      const int power = static_cast<int>(n[i] + shift[i]);
      if (power > Limits<T>::last) continue;  // callers never shift so far
      if (power < Limits<T>::first_normal)
        CHECK(y[i] == 0, "%s", name);
      else if (right < std::ldexp(1.0L, Limits<T>::last))
        CHECK(std::fabs(y[i] - right) <=
                  std::ldexp(right, 1 - Limits<T>::digits) * (2 + std::fabs(static_cast<long double>(x[i]))),
              "%s exp(%g) 2^%g = %g, not %g", name, double(x[i]), double(shift[i]), double(y[i]), double(right));
    }
  }

  // minima and maxima: the second operand where either is NaN
  const T a[kProbeLanes] = {1, 2, T(kNaN), 4, T(-kInf), T(kInf)}, b[kProbeLanes] = {2, 1, 3, T(kNaN), 5, 6};
  f.minimum(a, b, y, kProbeLanes);
  CHECK(y[0] == 1 && y[1] == 1 && y[2] == 3 && std::isnan(y[3]) && y[4] == T(-kInf) && y[5] == 6, "%s", name);
  f.maximum(a, b, y, kProbeLanes);
  CHECK(y[0] == 2 && y[1] == 2 && y[2] == 3 && std::isnan(y[3]) && y[4] == 5 && y[5] == T(kInf), "%s", name);

  // over the lanes
  for (int round = 0; round < 100; ++round) {
    double sum = 0, top = -kInf;
    T lanes[kProbeLanes];
    for (int64_t i = 0; i < f.lanes; ++i) {
      lanes[i] = static_cast<T>(random.below(2000) - 1000);
      sum += double(lanes[i]);
      top = std::max(top, double(lanes[i]));
    }
    CHECK(double(f.sum_lanes(lanes)) == sum && double(f.max_lanes(lanes)) == top, "%s", name);
  }
  std::vector<T> square(static_cast<size_t>(f.lanes * f.lanes));
  for (size_t i = 0; i < square.size(); ++i) square[i] = static_cast<T>(i);
  f.transpose(square.data());
  for (int64_t i = 0; i < f.lanes; ++i)
    for (int64_t j = 0; j < f.lanes; ++j)
      CHECK(square[static_cast<size_t>(i * f.lanes + j)] == static_cast<T>(j * f.lanes + i), "%s", name);

  // rows in and out: any length, any stride, of every dtype that meets this precision
  for (DType dtype : {DType::float32, DType::float64, DType::float16, DType::bfloat16}) {
    if ((dtype == DType::float64) == single) continue;
    for (int64_t cols = 1; cols < 41; ++cols)
      for (auto layout :
           {plain::Matrix::dense, plain::Matrix::every_other, plain::Matrix::columns, plain::Matrix::misaligned}) {
        plain::Matrix from(dtype, 3, cols, layout), to(dtype, 3, cols, layout);
        from.fill(random, -300, 300);
        plain::Guarded row(cols * static_cast<int64_t>(sizeof(T)));
        T* values = reinterpret_cast<T*>(row.data());
        const View view = from.view();
        const OutView out = to.out();
        f.load_row(dtype, view.data + view.row, view.col, values, cols);
        bool same = true;
        for (int64_t c = 0; c < cols; ++c) same = same && double(values[c]) == from.at(1, c);
        f.store_row(dtype, out.data + out.row, out.col, values, cols);
        for (int64_t c = 0; c < cols; ++c)
          same = same && to.at(1, c) == from.at(1, c) && std::isnan(to.at(0, c)) && std::isnan(to.at(2, c));
        CHECK(same && to.gaps_intact(), "%s rows of %s, %d columns", name, plain::name_of(dtype), int(cols));
      }
  }
}

// Projections with no more memory than they ask for: the ends of rows of every width.
template <class T>
void test_room(const char* name, const Functions<T>& f) {
  plain::Random random(3);
  for (int finish = 0; finish <= static_cast<int>(Finish::turned); ++finish)
    for (int64_t columns : {1, 2, 3, 5, 8, 9, 16, 17, 31})
      for (int64_t inputs : {1, 3, 16, 17})
        for (int turn = 0; turn < 8; ++turn) {
          Projection p{};
          p.finish = static_cast<Finish>(finish);
          p.mirrored = turn % 2 && !has_spectra(p.finish);
          if (p.finish == Finish::halves && !p.mirrored) continue;
          const bool weights = has_spectra(p.finish) || turn / 2 % 2;
          p.unit = turn / 4;
          p.times = makes_products(p.finish) ? 1 + turn % 3 : 1;
          p.inputs = inputs;
          p.columns = !weights ? inputs : has_spectra(p.finish) ? columns * p.times : columns;
          p.square = has_spectra(p.finish) ? 0 : 0.5;
          p.features = features_of(p);
          const int64_t rows = 1 + turn % 3;
          p.angles = rows;
          p.row = (p.columns + 15) / 16 * 16;
          std::vector<T> own(static_cast<size_t>((inputs + 1) * p.row + 16)), angles(static_cast<size_t>(2 * rows));
          for (T& each : own) each = static_cast<T>(random.uniform(-1, 1));
          for (T& each : angles) each = static_cast<T>(random.uniform(0, 1));
          if constexpr (sizeof(T) == 4) {
            p.weight_float = weights ? own.data() : nullptr;
            p.bias_float = weights ? own.data() + inputs * p.row : nullptr;
            p.angles_float = angles.data();
          } else {
            p.weight_double = weights ? own.data() : nullptr;
            p.bias_double = weights ? own.data() + inputs * p.row : nullptr;
            p.angles_double = angles.data();
          }
          Layer layer{};
          layer.dtype = turn % 2 ? DType::float16 : Limits<T>::dtype;
          layer.features = p.features;
          layer.d_v = 1;
          layer.projection = layer.query_projection = &p;
          plain::Matrix x(layer.dtype, rows, inputs, plain::Matrix::dense);
          x.fill(random, -2, 2);
          const int64_t ld = f.block(layer), size = static_cast<int64_t>(sizeof(T));
          plain::Guarded block(rows * ld * size), room(f.room(layer, rows) * size);
          T* y = reinterpret_cast<T*>(block.data());
          f.project(layer, x.view(), rows, y, reinterpret_cast<T*>(room.data()));
          bool all = true;
          for (int64_t r = 0; r < rows; ++r) {
            for (int64_t c = 0; c < p.features; ++c) all = all && std::isfinite(y[r * ld + c]);
            for (int64_t c = p.features; c < (p.features + f.lanes - 1) / f.lanes * f.lanes; ++c)
              all = all && y[r * ld + c] == 0;
          }
          CHECK(all && block.intact() && room.intact(), "%s: finish %d, columns %d, inputs %d, turn %d", name, finish,
                int(columns), int(inputs), turn);
        }
}

// Every number of the format in and out, and the ties between each and the next, which go to the even one, or away
// from 0.
void test_halves(const char* name, float (*widen)(uint16_t), uint16_t (*narrow)(float), double (*value)(uint16_t),
                 uint16_t infinity, bool ties_away = false) {
  const uint16_t sign = 0x8000;
  for (uint32_t i = 0; i < 65536; ++i) {
    const uint16_t h = static_cast<uint16_t>(i);
    const double right = value(h);
    const float found = widen(h);
    if (std::isnan(right)) {
      const uint16_t back = narrow(found);
      CHECK(std::isnan(found) && (back & 0x7fff) > infinity && (back & sign) == (h & sign), "%s %04x", name, i);
      continue;
    }
    CHECK(double(found) == right && std::signbit(found) == std::signbit(right), "%s %04x: %g", name, i, double(found));
    CHECK(narrow(found) == h, "%s %04x", name, i);
    if ((h & 0x7fff) >= infinity) continue;
    // The midpoint to the next larger in size, and its neighbours to either side.
    const uint16_t next = static_cast<uint16_t>(h + 1);
    const double beyond = (next & 0x7fff) == infinity ? 2 * right - value(static_cast<uint16_t>(h - 1)) : value(next);
    const float middle = static_cast<float>((right + beyond) / 2);
    CHECK(narrow(middle) == (ties_away || h & 1 ? next : h), "%s tie after %04x: %04x", name, i, narrow(middle));
    CHECK(narrow(std::nextafterf(middle, 0.0f)) == h, "%s below the tie after %04x", name, i);
    CHECK(narrow(std::nextafterf(middle, middle < 0 || std::signbit(middle) ? -HUGE_VALF : HUGE_VALF)) == next,
          "%s above the tie after %04x", name, i);
  }
  CHECK(narrow(3e38f) == (infinity == 0x7c00 ? 0x7c00 : plain::bfloat_of(3e38f)), "%s", name);
  CHECK(narrow(-3.4e38f) == (infinity == 0x7c00 ? 0xfc00 : plain::bfloat_of(-3.4e38f)), "%s", name);
  CHECK(narrow(1e-45f) == 0 && narrow(-1e-45f) == sign, "%s", name);
}

void test_set(const Probe& probe, int64_t count, bool ties_away) {
  test_functions(probe.name, probe.single, count);
  test_functions(probe.name, probe.wide, count);
  test_room(probe.name, probe.single);
  test_room(probe.name, probe.wide);
  test_halves(probe.name, probe.widen_half, probe.narrow_half, plain::half_value, 0x7c00, ties_away);
  test_halves(probe.name, probe.widen_bfloat, probe.narrow_bfloat, plain::bfloat_value, 0x7f80);
}

}  // namespace

// Arguments: how many numbers a function is tried on; and ties-away for an emulator whose VCVTPS2PH rounds so, as that
// of Bochs 2.7 does.
int main(int argc, char** argv) {
  const int64_t count = argc > 1 ? std::atoll(argv[1]) : 200000;
  const bool ties_away = argc > 2 && std::string(argv[2]) == "ties-away";
  bool avx2 = true, has_avx512 = false;  // which has the shapes of `wide` itself
#if defined(__x86_64__)
  avx2 = false;
#endif
  for (auto set = usable_kernels(); *set; ++set) {
    const std::string name = (*set)->name;
    if (name == "avx2") avx2 = true;
    if (name == "avx512") has_avx512 = true;
#ifdef LINATTN_HAVE_AVX512
    if (name == "avx512") test_set(avx512::probe(), count, ties_away);
#endif
#ifdef LINATTN_HAVE_AVX2
    if (name == "avx2") test_set(avx2::probe(), count, ties_away);
#endif
#ifdef LINATTN_HAVE_BASELINE
    if (name == "baseline") test_set(baseline::probe(), count, ties_away);
#endif
#ifdef LINATTN_HAVE_NEON
    if (name == "neon") test_set(neon::probe(), count, ties_away);
#endif
#ifdef LINATTN_HAVE_PORTABLE
    if (name == "portable") test_set(portable::probe(), count, ties_away);
#endif
  }
  if (avx2 && !has_avx512) test_set(wide::probe(), count, ties_away);
  return check::report("test_elementary");
}
