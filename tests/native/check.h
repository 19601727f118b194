// The whole test framework: CHECK, and a report that is non-zero when one failed.
#pragma once

#include <cstdio>

namespace check {
inline long failures = 0;
inline long checks = 0;
inline long cases = 0;
inline long every = 1;

// Whether this case is to run: of those that ask, one in `every`, for an emulator that is slow.
inline bool due() { return cases++ % every == 0; }

inline int report(const char* name) {
  std::printf("%s: %ld checks, %ld failed\n", name, checks, failures);
  return failures ? 1 : 0;
}
}  // namespace check

// CHECK(condition) or CHECK(condition, "how it was: %d", x): the words are printed where it fails.
#define CHECK(condition, ...)                                           \
  do {                                                                  \
    ++check::checks;                                                    \
    if (!(condition) && ++check::failures <= 50) {                      \
      std::printf("%s:%d: failed: %s", __FILE__, __LINE__, #condition); \
      std::printf("  " __VA_ARGS__);                                    \
      std::printf("\n");                                                \
    }                                                                   \
  } while (0)
