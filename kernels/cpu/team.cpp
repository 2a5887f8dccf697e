// The pool behind Team: helpers that take items of the caller's loop, spin for a moment without any, and then sleep.
#include "team.h"

#include "abi.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <mutex>
#include <new>

// These have newer versions since their move into libc.so, which do the same: by the old ones, a library that was
// linked on a new system runs on an old one.
#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver pthread_create, pthread_create@GLIBC_2.2.5");
__asm__(".symver pthread_mutex_trylock, pthread_mutex_trylock@GLIBC_2.2.5");
__asm__(".symver pthread_sigmask, pthread_sigmask@GLIBC_2.2.5");
__asm__(".symver pthread_setname_np, pthread_setname_np@GLIBC_2.12");
#elif defined(__GLIBC__) && defined(__aarch64__)
__asm__(".symver pthread_create, pthread_create@GLIBC_2.17");
__asm__(".symver pthread_mutex_trylock, pthread_mutex_trylock@GLIBC_2.17");
__asm__(".symver pthread_sigmask, pthread_sigmask@GLIBC_2.17");
__asm__(".symver pthread_setname_np, pthread_setname_np@GLIBC_2.17");
#endif

// From GCC 11 on `new` and vectors call this for sizes that are no sizes; libstdc++ has it since then only.
#if defined(__GLIBCXX__)
namespace std {
[[noreturn]] void __throw_bad_array_new_length();
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
#endif

namespace nova {
namespace {

constexpr int64_t SPIN_NS = 30'000;  // what a sleep and a wake-up cost
constexpr int PAUSES_PER_LOOK = 16;  // at the clock, which takes 20 ns; a pause takes 10 to 50 ns, by the CPU
constexpr int HELPERS_MAX = 255;

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000ll + time.tv_nsec;
}

// Waits without sleeping, for a while.
struct Spin {
  int64_t end_ns = 0;  // of the while, once the clock was looked at
  int pauses = 0;

  // After a pause, whether to go on.
  bool goes_on() {
    spin_pause();
    if (++pauses % PAUSES_PER_LOOK) return true;
    const int64_t now = now_ns();
    if (end_ns == 0) end_ns = now + SPIN_NS;
    return now < end_ns;
  }
};

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake(std::atomic<uint32_t>& word, int count) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

// The loop that is being shared out. `function`, `context` and `n` are read only by who holds one of its items, and
// stay until all of them are done.
struct Pool {
  std::mutex in_use;  // by one caller at a time
  void (*function)(void*, long) = nullptr;
  void* context = nullptr;
  long n = 0;

  alignas(64) std::atomic<uint64_t> ticket{0};  // loop number (high half) and items not begun (low half)
  alignas(64) std::atomic<uint32_t> done{0};    // items ended
  std::atomic<uint32_t> caller_sleeps{0};
  std::atomic<bool> failed{false};             // one of the items
  alignas(64) std::atomic<uint32_t> calls{0};  // futex of the sleeping helpers
  std::atomic<int> sleepers{0};
  std::atomic<int> wanted{0};  // helpers of this number and above stay out
  int helpers = 0;

  // Takes one item of the current loop and computes it; false when none is left.
  bool take() {
    uint64_t t = ticket.load(std::memory_order_acquire);
    do {
      if ((uint32_t)t == 0) return false;
    } while (!ticket.compare_exchange_weak(t, t - 1, std::memory_order_acq_rel, std::memory_order_acquire));
    const long total = n;
    try {
      function(context, total - (long)(uint32_t)t);
    } catch (...) {  // out of memory: nothing else is thrown in this library
      failed.store(true, std::memory_order_relaxed);
    }
    if ((long)done.fetch_add(1) + 1 == total && caller_sleeps.load()) wake(done, 1);
    return true;
  }

  [[noreturn]] void help(int number) {
    for (;;) {
      const uint32_t call = calls.load();
      if (number < wanted.load(std::memory_order_relaxed))
        for (Spin spin; spin.goes_on();)
          while (take()) spin = Spin();
      sleepers.fetch_add(1);
      // The caller that publishes a loop either sees this sleeper, or has raised `calls` before it falls asleep.
      if (number >= wanted.load() || (uint32_t)ticket.load() == 0) sleep_while(calls, call);
      sleepers.fetch_sub(1);
    }
  }

  void share(long items, void (*f)(void*, long), void* c) {
    function = f, context = c, n = items;
    done.store(0, std::memory_order_relaxed);
    failed.store(false, std::memory_order_relaxed);
    const uint64_t loop = (ticket.load(std::memory_order_relaxed) >> 32) + 1;
    ticket.store(loop << 32 | (uint64_t)items);
    calls.fetch_add(1);
    if (sleepers.load() > 0) wake(calls, wanted.load() < helpers ? INT_MAX : (int)std::min<long>(items - 1, INT_MAX));
    while (take()) {
    }
    await(items);
    if (failed.load(std::memory_order_relaxed)) throw std::bad_alloc();
  }

  void await(long items) {
    Spin spin;
    do {
      if ((long)done.load(std::memory_order_acquire) == items) return;
    } while (spin.goes_on());
    caller_sleeps.store(1);
    for (uint32_t ended; (long)(ended = done.load()) != items;) sleep_while(done, ended);
    caller_sleeps.store(0);
  }

  void grow(int count) {
    for (; helpers < std::min(count, HELPERS_MAX); helpers++) {
      struct Start {
        Pool* pool;
        int number;
      };
      auto* start = new (std::nothrow) Start{this, helpers};
      if (start == nullptr) return;
      pthread_attr_t attributes;
      pthread_attr_init(&attributes);
      pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
      sigset_t all, before;  // signals are the interpreter's
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
      pthread_t thread;
      const int failed = pthread_create(
          &thread, &attributes,
          [](void* argument) -> void* {
            const Start mine = *(Start*)argument;
            delete (Start*)argument;
            const FlushDenormals always;
            mine.pool->help(mine.number);
          },
          start);
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      pthread_attr_destroy(&attributes);
      if (failed) {
        delete start;
        return;
      }
      pthread_setname_np(thread, "novainfer-cpu");
    }
  }
};

// Never destroyed: helpers sleep in it when the process ends. A forked child has no helpers and begins anew.
Pool* pool = new Pool;
const int registered = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });

}  // namespace

Team::Team(int threads) : size_(1) {
  if (threads <= 1 || !pool->in_use.try_lock()) return;
  pool->grow(threads - 1);
  pool->wanted.store(threads - 1, std::memory_order_relaxed);
  size_ = std::min(threads, pool->helpers + 1);
  if (size_ == 1) pool->in_use.unlock();
}

Team::~Team() {
  if (size_ > 1) pool->in_use.unlock();
}

void Team::share(long n, Function f, void* context) { pool->share(n, f, context); }

}  // namespace nova
