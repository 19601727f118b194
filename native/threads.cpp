#include "threads.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#include <pthread.h>
#endif
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace linattn {
namespace {

void relax() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Waits for a moment that is usually microseconds away: first busily, then giving the core to whoever wants it.
template <class Condition>
void wait_briefly(Condition&& done) {
  for (int i = 0; i < 2000; ++i) {
    if (done()) return;
    relax();
  }
  while (!done()) std::this_thread::yield();
}

struct Job {
  Stage stages[kMaxStages];
  int count = 0;
  void* context = nullptr;
  int64_t total = 0;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> ended[kMaxStages] = {};
  int places = 0;              // workers that may still join (under the pool's mutex)
  std::atomic<int> inside{0};  // workers that have joined and not left
  Job* later = nullptr;        // the pool's list

  bool has_pieces() const { return next.load(std::memory_order_relaxed) < total; }

  // Takes pieces until there are none. A piece waits for the stage before its own; those pieces are all taken, by
  // threads that are running them, so the wait ends.
  void work() {
    for (;;) {
      int64_t piece = next.fetch_add(1, std::memory_order_relaxed);
      if (piece >= total) return;
      int s = 0;
      while (piece >= stages[s].pieces) piece -= stages[s++].pieces;
      if (s > 0) wait_briefly([&] { return ended[s - 1].load(std::memory_order_acquire) == stages[s - 1].pieces; });
      stages[s].run(context, piece);
      ended[s].fetch_add(1, std::memory_order_acq_rel);
    }
  }
};

// After its last piece a worker looks around this long for the next job before it sleeps: a sleeping worker takes
// tens of microseconds to wake, a call on a short sequence about as long to compute.
constexpr int kLooks = 1500;

class Pool {
 public:
  void run(Job& job, int helpers) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job.places = helpers;
      while (workers_ < helpers && start_worker()) {
      }
      job.later = first_;
      first_ = &job;
      news_.fetch_add(1, std::memory_order_release);
    }
    for (int i = 0; i < helpers; ++i) wake_.notify_one();
    job.work();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      Job** at = &first_;
      while (*at != &job) at = &(*at)->later;
      *at = job.later;
    }
    wait_briefly([&] { return job.inside.load(std::memory_order_acquire) == 0; });
  }

 private:
  bool start_worker() {
    try {
      std::thread([this] { serve(); }).detach();
    } catch (const std::exception&) {
      return false;  // no more threads to be had: the caller does the work
    }
    ++workers_;
    return true;
  }

  Job* join_one() {  // under the mutex
    for (Job* job = first_; job; job = job->later)
      if (job->places > 0 && job->has_pieces()) {
        --job->places;
        job->inside.fetch_add(1, std::memory_order_relaxed);
        return job;
      }
    return nullptr;
  }

  void serve() {
    for (;;) {
      Job* job = nullptr;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return (job = join_one()) != nullptr; });
      }
      while (job) {
        job->work();
        job->inside.fetch_sub(1, std::memory_order_acq_rel);
        job = look_around();
      }
    }
  }

  Job* look_around() {
    const int64_t seen = news_.load(std::memory_order_acquire);
    for (int i = 0; i < kLooks; ++i) {
      if (news_.load(std::memory_order_acquire) != seen) break;
      relax();
    }
    std::lock_guard<std::mutex> lock(mutex_);
    return join_one();
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  Job* first_ = nullptr;
  int workers_ = 0;
  std::atomic<int64_t> news_{0};
};

// Never destroyed: workers may outlive static destructors. A child after fork() has none of the workers and must not
// touch the parent's mutex, so it starts with a new pool.
std::atomic<Pool*> the_pool{nullptr};
std::atomic<int> chosen_threads{0};

Pool& pool() {
  Pool* found = the_pool.load(std::memory_order_acquire);
  if (found) return *found;
  Pool* fresh = new Pool;
  if (the_pool.compare_exchange_strong(found, fresh, std::memory_order_acq_rel)) return *fresh;
  delete fresh;
  return *found;
}

// libgomp's entry to a parallel region, which runtimes that stand in for it have too.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
std::atomic<Parallel> openmp{nullptr};
thread_local bool guest = false;

#if defined(__unix__) || defined(__APPLE__)
// The threads of an OpenMP runtime are gone in a child too, and it waits for them for ever.
const int registered = pthread_atfork(nullptr, nullptr, [] {
  the_pool.store(nullptr, std::memory_order_release);
  openmp.store(nullptr, std::memory_order_release);
});
#endif

int default_threads() {
  if (const char* text = std::getenv("OMP_NUM_THREADS")) {
    const long n = std::strtol(text, nullptr, 10);  // "4,2": the outermost level counts
    if (n > 0 && n < 4096) return static_cast<int>(n);
  }
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
#endif
  const unsigned n = std::thread::hardware_concurrency();
  return n ? static_cast<int>(n) : 1;
}

struct Scratch {
  void* memory = nullptr;
  int64_t bytes = 0;
  ~Scratch() { release(); }
  void release() {
    ::operator delete(memory, std::align_val_t(64));
    memory = nullptr;
    bytes = 0;
  }
};
thread_local Scratch scratch;

}  // namespace

int thread_count() {
  const int chosen = chosen_threads.load(std::memory_order_relaxed);
  if (chosen > 0) return chosen;
  static const int fallback = default_threads();
  return fallback;
}

bool threads_chosen() { return chosen_threads.load(std::memory_order_relaxed) > 0; }

void set_thread_count(int threads) { chosen_threads.store(threads > 0 ? threads : 0, std::memory_order_relaxed); }

void find_openmp() {
#if defined(__unix__) || defined(__APPLE__)
  openmp.store(reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel")), std::memory_order_release);
#endif
}

OpenMPGuest::OpenMPGuest(bool wanted) : before_(guest) { guest = wanted; }
OpenMPGuest::~OpenMPGuest() { guest = before_; }

void run_stages(const Stage* stages, int count, void* context, int threads) {
  Job job;
  for (int s = 0; s < count; ++s) {
    if (stages[s].pieces == 0) continue;
    job.stages[job.count++] = stages[s];
    job.total += stages[s].pieces;
  }
  job.context = context;
  if (threads > job.total) threads = static_cast<int>(job.total);
  const Parallel parallel = guest ? openmp.load(std::memory_order_acquire) : nullptr;
  if (threads <= 1)
    job.work();
  else if (parallel)
    parallel([](void* it) { static_cast<Job*>(it)->work(); }, &job, static_cast<unsigned>(threads), 0);
  else
    pool().run(job, threads - 1);
}

void* thread_scratch(int64_t bytes) {
  if (scratch.bytes < bytes) {
    scratch.release();
    scratch.memory = ::operator new(static_cast<size_t>(bytes), std::align_val_t(64));
    scratch.bytes = bytes;
  }
  return scratch.memory;
}

}  // namespace linattn
