// The whole test framework: CHECK, and a main that returns non-zero when one failed.
#pragma once

#include <cstdio>

namespace check {
inline int failures = 0;
inline int checks = 0;

inline int report(const char* name) {
  std::printf("%s: %d checks, %d failed\n", name, checks, failures);
  return failures ? 1 : 0;
}
}  // namespace check

#define CHECK(condition)                                                  \
  do {                                                                    \
    ++check::checks;                                                      \
    if (!(condition)) {                                                   \
      ++check::failures;                                                  \
      std::printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
    }                                                                     \
  } while (0)
