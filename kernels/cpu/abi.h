// What surrounds every call into the library: exceptions leave it as numbers, because nothing may be thrown across the
// C ABI, and numbers too small to be normal count as zero inside it.
#pragma once

#include <immintrin.h>

#include <new>
#include <stdexcept>

namespace nova {

// What the functions that compute give; native.py makes exceptions of them.
enum Status : int { DONE = 0, NO_MEMORY = 1, FAILED = 2, OUT_OF_RANGE = 3 };

// Arithmetic on denormal numbers takes a hundred times as long, and BF16 products take them for zero anyway. It must be
// the same on every thread that computes items, so that a row has the same bits on each.
class FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | FLUSH_TO_ZERO | DENORMALS_ARE_ZERO); }
  ~FlushDenormals() { _mm_setcsr(before_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  static constexpr unsigned FLUSH_TO_ZERO = 0x8000, DENORMALS_ARE_ZERO = 0x0040;  // bits of MXCSR
  const unsigned before_;
};

template <class F>
int guarded(F&& f) noexcept {
  const FlushDenormals meanwhile;
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
