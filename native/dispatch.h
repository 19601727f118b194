// Which of the compiled instruction sets runs.
#pragma once

#include "kernels.h"

namespace linattn {

// All sets that were compiled and that this machine can run, best first, ended by nullptr.
const Kernels* const* usable_kernels();

// The best of them, or the one that LINATTN_ISA names, chosen at the first call. A name that is unknown here gives
// nullptr.
const Kernels* kernels_in_use();

}  // namespace linattn
