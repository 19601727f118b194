// The kernels on offer: with arguments, exactly those of these names; without, at least one, and none twice.
//
// tests/native/CMakeLists.txt runs it under an emulator of processors that lack one instruction each.
#include "dispatch.h"

#include <cstdio>
#include <string>
#include <vector>

using namespace linattn;

int main(int count, char** wanted) {
  std::vector<std::string> found;
  for (auto set = usable_kernels(); *set; ++set) {
    for (const std::string& other : found)
      if (other == (*set)->name) return std::printf("%s is there twice\n", (*set)->name), 1;
    found.push_back((*set)->name);
  }
  if (found.empty() || kernels_in_use() != *usable_kernels()) return std::printf("the first is not in use\n"), 1;
  if (count == 1) return 0;
  if (found == std::vector<std::string>(wanted + 1, wanted + count)) return 0;
  std::printf("expected");
  for (int i = 1; i < count; ++i) std::printf(" %s", wanted[i]);
  std::printf(", found");
  for (const std::string& name : found) std::printf(" %s", name.c_str());
  std::printf("\n");
  return 1;
}
