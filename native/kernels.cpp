// Compiled once for each instruction set, with LINATTN_ISA_NS naming the set. Nothing in here may be
// shared between the sets: no inline function of a standard header that the linker could merge.
#include "kernels.h"

#define LINATTN_STR2(x) #x
#define LINATTN_STR(x) LINATTN_STR2(x)

namespace linattn {
namespace LINATTN_ISA_NS {
namespace {

float sum(const float* x, long n) {
  float s[16] = {};
  long i = 0;
  for (; i + 16 <= n; i += 16)
    for (int j = 0; j < 16; ++j) s[j] += x[i + j];
  float total = 0;
  for (int j = 0; j < 16; ++j) total += s[j];
  for (; i < n; ++i) total += x[i];
  return total;
}

}  // namespace

extern const Kernels kernels;
const Kernels kernels = {LINATTN_STR(LINATTN_ISA_NS), sum};

}  // namespace LINATTN_ISA_NS
}  // namespace linattn
