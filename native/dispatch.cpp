#include "dispatch.h"

#include <cstdlib>
#include <cstring>

namespace linattn {
namespace {

// The processor and the operating system (which must save the wide registers) both have to agree; GCC's and Clang's
// builtin asks both.
[[maybe_unused]] bool runs_avx512() {
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

// F16C, BMI and the rest of x86-64-v3 came with the same processors as AVX2, and no virtual machine is known to hide
// one of them alone; FMA and AVX2 are asked for.
[[maybe_unused]] bool runs_avx2() {
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2");
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
