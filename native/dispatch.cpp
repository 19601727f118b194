#include "dispatch.h"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>
#endif

namespace linattn {
namespace {

#if defined(__x86_64__) || defined(_M_X64)
// What x86-64-v3 has beside AVX2, FMA, BMI and BMI2, and no compiler's builtin knew from the start: F16C, MOVBE, LZCNT.
// Processors that have AVX2 have them too, but a virtual machine may hide any.
bool has_f16c_movbe_lzcnt() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return false;
  constexpr unsigned kMovbe = 1u << 22, kF16c = 1u << 29;
  if ((c & kMovbe) == 0 || (c & kF16c) == 0) return false;
  constexpr unsigned kLzcnt = 1u << 5;
  return __get_cpuid(0x80000001, &a, &b, &c, &d) && (c & kLzcnt) != 0;
}
#endif

// Everything that the compiler may use of x86-64-v3. The operating system has to save the wide registers: GCC's and
// Clang's builtin asks that too.
[[maybe_unused]] bool runs_avx2() {
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && has_f16c_movbe_lzcnt();
#else
  return false;
#endif
}

// The same of x86-64-v4, which has all of x86-64-v3.
[[maybe_unused]] bool runs_avx512() {
#if defined(__x86_64__) || defined(_M_X64)
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

struct Usable {
  const Kernels* sets[8] = {};
  int count = 0;
  void add(const Kernels& set) { sets[count++] = &set; }
  Usable() {
#ifdef LINATTN_HAVE_AVX512
    if (runs_avx512()) add(avx512::kTable);
#endif
#ifdef LINATTN_HAVE_AVX2
    if (runs_avx2()) add(avx2::kTable);
#endif
#ifdef LINATTN_HAVE_NEON
    add(neon::kTable);
#endif
#ifdef LINATTN_HAVE_BASELINE
    add(baseline::kTable);
#endif
#ifdef LINATTN_HAVE_PORTABLE
    add(portable::kTable);
#endif
  }
};

const Kernels* choose() {
  const Kernels* const* sets = usable_kernels();
  const char* wanted = std::getenv("LINATTN_ISA");
  if (!wanted || !*wanted) return sets[0];
  for (; *sets; ++sets)
    if (std::strcmp((*sets)->name, wanted) == 0) return *sets;
  return nullptr;
}

}  // namespace

const Kernels* const* usable_kernels() {
  static const Usable usable;
  return usable.sets;
}

const Kernels* kernels_in_use() {
  static const Kernels* const chosen = choose();
  return chosen;
}

}  // namespace linattn
