// A pool of sleeping workers that share the pieces of a job on demand.
#pragma once

#include <stdint.h>

namespace linattn {

// How many threads a call uses at most: what was set, else OMP_NUM_THREADS, else the process's CPU affinity.
int thread_count();
bool threads_chosen();               // whether set_thread_count was called
void set_thread_count(int threads);  // 0: back to the default

// One stage of a job: run(context, piece) for every piece in [0, pieces), in any order, on any thread. The pieces of a
// stage begin when all pieces of the stage before it have ended.
struct Stage {
  int64_t pieces;
  void (*run)(void* context, int64_t piece);
};

constexpr int kMaxStages = 5;  // of one job

// Runs the stages on the calling thread and up to threads - 1 workers and returns when all is done. Safe to call from
// many threads at once, and in a child after fork(). The pieces must not throw.
void run_stages(const Stage* stages, int count, void* context, int threads);

// Looks for an OpenMP runtime that the process has loaded.
void find_openmp();

// While one with wanted = true lives, jobs of this thread run on the threads of that runtime, if there is one, and not
// on our own workers. Its idle threads spin for milliseconds after each of its regions: workers of our own would share
// the cores with them, and work that takes turns with torch's own operators runs 1.3 to 1.6 times as long.
class OpenMPGuest {
 public:
  explicit OpenMPGuest(bool wanted);
  ~OpenMPGuest();
  OpenMPGuest(const OpenMPGuest&) = delete;
  OpenMPGuest& operator=(const OpenMPGuest&) = delete;

 private:
  bool before_;
};

// At least `bytes` of 64-byte aligned memory of the calling thread's own, valid until its next call.
void* thread_scratch(int64_t bytes);

}  // namespace linattn
