// The table of functions that each instruction set provides.
#pragma once

namespace linattn {

struct Kernels {
  const char* name;
  float (*sum)(const float* x, long n);  // placeholder
};

#define LINATTN_DECLARE_ISA(ns) \
  namespace ns {                \
  extern const Kernels kernels; \
  }
LINATTN_DECLARE_ISA(avx512)
LINATTN_DECLARE_ISA(avx2)
LINATTN_DECLARE_ISA(baseline)
LINATTN_DECLARE_ISA(neon)
LINATTN_DECLARE_ISA(portable)
#undef LINATTN_DECLARE_ISA

// The sets compiled in, widest first; ends with nullptr. Says nothing about this machine.
const Kernels* const* compiled_kernels();

}  // namespace linattn
