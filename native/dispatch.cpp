// Placeholder: which sets are compiled in.
#include "kernels.h"

namespace linattn {

const Kernels* const* compiled_kernels() {
  static const Kernels* const table[] = {
#ifdef LINATTN_HAVE_AVX512
      &avx512::kernels,
#endif
#ifdef LINATTN_HAVE_AVX2
      &avx2::kernels,
#endif
#ifdef LINATTN_HAVE_NEON
      &neon::kernels,
#endif
#ifdef LINATTN_HAVE_BASELINE
      &baseline::kernels,
#endif
#ifdef LINATTN_HAVE_PORTABLE
      &portable::kernels,
#endif
      nullptr};
  return table;
}

}  // namespace linattn
