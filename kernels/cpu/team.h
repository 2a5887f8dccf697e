// A team of threads that shares out the items of loops.
//
// One thread, the caller, runs the program; the helpers only take items. On a shared machine a thread loses its core
// for milliseconds at any time, so no thread ever waits for another, only for an item that another has begun: a helper
// that is late or asleep costs nothing but its help. (OpenMP's barriers wait for every thread; with the spinning
// ones, 2 threads on 2 busy cores took 100 to 400 times as long.) Which thread computes an item never changes its
// bits.
//
// A helper without items spins for a moment, as the next loop of a step follows within microseconds, and then sleeps.
#pragma once

#include <algorithm>

namespace nova {

class Team {
 public:
  // A team of up to `threads`, the caller included; alone when the pool serves another caller.
  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // How many may work at once.
  int size() const { return size_; }

  // Calls f(i) once for each i in [0, n), in any order and on any of the threads; returns when all are done. Of what
  // the items throw only std::bad_alloc is passed on, when the others have ended.
  template <class F>
  void loop(long n, F&& f) {
    if (size_ == 1 || n == 1) {
      for (long i = 0; i < n; i++) f(i);
    } else if (n > 0) {
      share(n, [](void* context, long i) { (*(std::remove_reference_t<F>*)context)(i); }, &f);
    }
  }

  // The same over rows of little work each, several to an item.
  template <class F>
  void rows(long n, F&& f) {
    const long chunk = std::max<long>(1, n / (8 * size_)), chunks = (n + chunk - 1) / chunk;
    loop(chunks, [&](long c) {
      for (long row = c * chunk; row < std::min(n, (c + 1) * chunk); row++) f(row);
    });
  }

 private:
  using Function = void (*)(void*, long);
  static void share(long n, Function f, void* context);
  int size_;
};

}  // namespace nova
