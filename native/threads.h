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

// At least `bytes` of 64-byte aligned memory of the calling thread's own, valid until its next call.
void* thread_scratch(int64_t bytes);

}  // namespace linattn
