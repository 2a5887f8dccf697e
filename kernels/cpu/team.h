// A team of threads that shares out items one by one and meets at barriers.
//
// Items are handed out dynamically: on a shared machine one thread may lose its core for milliseconds, and the other
// must not wait for its half. Which thread computes an item never changes the item's bits.
//
// The pool is libgomp's, the one torch uses too (torch is loaded first and its libgomp serves this library). Between
// the loops of one region threads wait in `barrier`: a short spin, then a futex, so that a core lost to somebody
// else costs a sleep and not a busy one.
#pragma once

#include <linux/futex.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace nova {

class Team {
 public:
  struct Shared {
    alignas(64) std::atomic<long> next{0};
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<uint32_t> generation{0};
    std::atomic<int> sleepers{0};
  };

  Team(Shared& shared, int rank, int size) : rank(rank), size(size), shared_(shared) {}
  const int rank;
  const int size;

  // Calls f(i) for i in [0, n), each once over the whole team. A `barrier` must follow before the next loop.
  template <class F>
  void loop(long n, F&& f) {
    if (size == 1) {
      for (long i = 0; i < n; i++) f(i);
      return;
    }
    // The counter only grows: every member draws exactly one number too many in each loop, so all know where it
    // will stand after the barrier.
    for (;;) {
      const long i = shared_.next.fetch_add(1, std::memory_order_relaxed) - base_;
      if (i >= n) break;
      f(i);
    }
    base_ += n + size;
  }

  void barrier() {
    if (size == 1) return;
    const uint32_t generation = shared_.generation.load(std::memory_order_acquire);
    if (shared_.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      shared_.arrived.store(0, std::memory_order_relaxed);
      shared_.generation.store(generation + 1);
      if (shared_.sleepers.load() > 0)
        syscall(SYS_futex, &shared_.generation, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
      return;
    }
    for (int spin = 0; spin < spin_max; spin++) {
      if (shared_.generation.load(std::memory_order_acquire) != generation) return;
      __builtin_ia32_pause();
    }
    shared_.sleepers.fetch_add(1);
    while (shared_.generation.load() == generation)
      syscall(SYS_futex, &shared_.generation, FUTEX_WAIT_PRIVATE, generation, nullptr, nullptr, 0);
    shared_.sleepers.fetch_sub(1);
  }

 private:
  static constexpr int spin_max = 2000;  // about 30 us, the price of a sleep and a wake-up
  Shared& shared_;
  long base_ = 0;
};

// Runs f(team) on `threads` threads; returns when all are done. The one barrier of the region is OpenMP's at its end.
template <class F>
void run_team(int threads, F&& f) {
  Team::Shared shared;
  if (threads <= 1) {
    Team team(shared, 0, 1);
    f(team);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    // The pool may be smaller than asked for (a limit of the environment, a nested region).
    Team team(shared, omp_get_thread_num(), omp_get_num_threads());
    f(team);
  }
}

}  // namespace nova
