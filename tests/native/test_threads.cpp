// The pool of threads: every piece once, stages in their order, many callers at once, life after fork().
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <thread>
#include <vector>

#include "check.h"
#include "threads.h"

#if defined(__unix__) || defined(__APPLE__)
#include <sys/wait.h>
#include <unistd.h>
#endif

using namespace linattn;

namespace {

// Three stages over arrays: fill, add a neighbour (any piece may read what any piece of the stage before wrote), sum.
struct Work {
  static constexpr int64_t kPieces = 41;
  int64_t first[kPieces] = {}, second[kPieces] = {}, total = 0;
  std::atomic<int> runs{0};

  static void fill(void* self, int64_t i) {
    Work* w = static_cast<Work*>(self);
    w->first[i] += i * i;
    w->runs.fetch_add(1);
  }
  static void add(void* self, int64_t i) {
    Work* w = static_cast<Work*>(self);
    w->second[i] += w->first[i] + w->first[kPieces - 1 - i];
    w->runs.fetch_add(1);
  }
  static void sum(void* self, int64_t) {
    Work* w = static_cast<Work*>(self);
    for (int64_t x : w->second) w->total += x;
    w->runs.fetch_add(1);
  }

  bool right(int threads) {
    const Stage stages[] = {{kPieces, fill}, {0, nullptr}, {kPieces, add}, {1, sum}};
    run_stages(stages, 4, this, threads);
    int64_t expected = 0;
    for (int64_t i = 0; i < kPieces; ++i) expected += 2 * i * i;
    return total == expected && runs == 2 * kPieces + 1;
  }
};

bool rounds_are_right(int rounds, int threads) {
  for (int r = 0; r < rounds; ++r)
    if (!Work().right(threads)) return false;
  return true;
}

void check_counts() {
  for (int threads : {0, 1, 2, 3, 8, 64}) CHECK(rounds_are_right(20, threads));
  run_stages(nullptr, 0, nullptr, 4);  // nothing to do
}

void check_many_callers() {
  std::atomic<int> right{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 8; ++i) callers.emplace_back([&right, i] { right += rounds_are_right(200, 1 + i % 4); });
  for (std::thread& caller : callers) caller.join();
  CHECK(right == 8);
}

void check_scratch() {
  CHECK(reinterpret_cast<uintptr_t>(thread_scratch(1)) % 64 == 0);
  char* large = static_cast<char*>(thread_scratch(100000));
  CHECK(reinterpret_cast<uintptr_t>(large) % 64 == 0);
  for (int i = 0; i < 100000; ++i) large[i] = 1;  // all of it is there
  std::thread([&] { CHECK(thread_scratch(100) != large); }).join();
}

void check_setting() {
  set_thread_count(3);
  CHECK(thread_count() == 3);
  set_thread_count(0);
  CHECK(thread_count() >= 1);
}

// A child has none of the parent's workers, and the parent keeps its own.
void check_fork() {
// ThreadSanitizer ends a child that starts threads, and so does the emulator of other processors.
#if (defined(__unix__) || defined(__APPLE__)) && !defined(__SANITIZE_THREAD__) && !defined(LINATTN_EMULATED)
  CHECK(rounds_are_right(3, 4));
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // a hang is a failure
    _exit(rounds_are_right(50, 4) ? 0 : 1);
  }
  int status = -1;
  CHECK(child > 0 && waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(rounds_are_right(3, 4));
#endif
}

}  // namespace

int main() {
  check_counts();
  check_many_callers();
  check_scratch();
  check_setting();
  check_fork();
  return check::report("test_threads");
}
