// What does a row of the full form cost, part by part, in cycles of a core that does nothing but multiply and add?
//
//   g++ -O3 -fno-math-errno -fno-trapping-math -ffp-contract=fast -std=c++17 -march=x86-64-v3 \
//       -Inative benchmarks/parts.cpp -o parts && ./parts
//
// float32, d = 64, elu1, one thread, everything in the first two caches. The unit is measured beside each part, as the
// clock of a machine that others use isn't steady: twelve independent fused multiply-adds, six cycles at two a cycle.
// A row takes 2 * 64 * 64 operations in each half, 256 such cycles; what is above that is what is to be won.
#define LINATTN_ISA_NS parts
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "absorb.h"
#include "query.h"

#if !defined(__AVX2__) || !defined(__FMA__)
#error "for AVX2: compile with -march=x86-64-v3"
#endif

using namespace linattn;
using namespace linattn::parts;

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// `turns` times twelve multiply-adds in registers.
[[gnu::noinline]] void peak(long turns) {
  __m256 sum[12] = {};
  const __m256 x = _mm256_set1_ps(1.0f);
  for (; turns > 0; --turns)
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) __asm__ volatile("vfmadd231ps %1, %1, %0" : "+x"(sum[i]) : "x"(x));
}

// The median of many rounds and its quartiles.
template <class Part>
void measure(const char* name, double rows, Part&& part) {
  constexpr long kTurns = 20000;
  const int calls = std::max(1, static_cast<int>(6000 / rows));
  std::vector<double> cycles;
  for (int round = 0; round < 400; ++round) {
    const double start = now();
    peak(kTurns);
    const double middle = now();
    for (int i = 0; i < calls; ++i) part();
    const double unit = (middle - start) / (6.0 * kTurns);
    cycles.push_back((now() - middle) / unit / calls / rows);
  }
  std::sort(cycles.begin(), cycles.end());
  std::printf("%-40s %6.1f [%.1f, %.1f] cycles a row\n", name, cycles[200], cycles[100], cycles[300]);
}

float* numbers(int64_t count) {
  float* x = static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>((count * 4 + 63) / 64 * 64)));
  for (int64_t i = 0; i < count; ++i) x[i] = static_cast<float>(std::rand()) / RAND_MAX * 4 - 2;
  return x;
}

}  // namespace

int main() {
  constexpr int64_t n = 480, d = 64;
  const Layer layer{DType::float32, Map::elu1, true, d, d, 1e-6};
  const Widths<float> w(layer);
  float *q = numbers(n * d), *k = numbers(n * d), *v = numbers(n * d), *out = numbers(n * d);
  float *phi = numbers(kQueryRows * w.d_row), *sums = numbers(d * w.v_row), *dots = numbers(kQueryRows * 8),
        *factor = numbers(kQueryRows), *power = numbers(kQueryRows);
  std::vector<double> kv(d * d), k_sum(d);
  const StateRef state{kv.data(), k_sum.data(), nullptr};
  void* scratch = std::aligned_alloc(64, 4 << 20);
  void* prepared = std::aligned_alloc(64, 1 << 20);
  const auto view = [](float* x) { return View{reinterpret_cast<char*>(x), d * 4, 4}; };
  const OutView to{reinterpret_cast<char*>(out), d * 4, 4};
  prepare_of<float>(layer, state, prepared);
  const Prepared<float> ready(layer, prepared);

  measure("keys: phi", kAbsorbRows, [&] { map_block(layer, view(k), 0, kAbsorbRows, phi); });
  measure("keys: tiles", kAbsorbRows, [&] {
    for_strips<float, kTileVectors>(w.v_pad, [&](auto vectors, int64_t c) {
      constexpr int NV = decltype(vectors)::value;
      for (int64_t r = 0; r < d; r += kTileRows<NV>)
        with_rows<kTileRows<NV>>(d - r, [&](auto rows) {
          add_outer_tile<float, decltype(rows)::value, NV>(kAbsorbRows, phi + r, w.d_row, v + c, d,
                                                           sums + r * w.v_row + c, nullptr, w.v_row);
        });
    });
  });
  measure("keys: all of it", n, [&] { absorb_of<float>(layer, state, view(k), view(v), {nullptr, 0}, 0, n, scratch); });
  measure("queries: phi and denominators", kQueryRows,
          [&] { map_queries(layer, ready, view(q), 0, kQueryRows, phi, power, dots); });
  measure("queries: tiles", kQueryRows, [&] {
    for_strips<float, kTileVectors>(w.v_pad, [&](auto vectors, int64_t c) {
      constexpr int NV = decltype(vectors)::value;
      for (int64_t r = 0; r < kQueryRows; r += kTileRows<NV>)
        with_rows<kTileRows<NV>>(kQueryRows - r, [&](auto rows) {
          product_tile<float, decltype(rows)::value, NV>(d, phi + r * w.d_row, w.d_row, ready.kv + c, w.v_row,
                                                         factor + r, out + r * d + c, d);
        });
    });
  });
  measure("queries: all of it", n, [&] { query_of<float>(layer, prepared, view(q), to, 0, n, scratch); });
  return 0;
}
