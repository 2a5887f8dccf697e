// How a C++ exception leaves the library: as a number, because nothing may be thrown across the C ABI.
#pragma once

#include <new>
#include <stdexcept>

namespace nova {

// What the functions that compute give; native.py makes exceptions of them.
enum Status : int { DONE = 0, NO_MEMORY = 1, FAILED = 2, OUT_OF_RANGE = 3 };

template <class F>
int guarded(F&& f) noexcept {
  try {
    f();
    return DONE;
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  } catch (const std::out_of_range&) {
    return OUT_OF_RANGE;
  } catch (...) {
    return FAILED;
  }
}

}  // namespace nova
