// What surrounds every call into the library: exceptions leave it as numbers, because nothing may be thrown across the
// C ABI, and numbers too small to be normal count as zero inside it.
#pragma once

#if !defined(__aarch64__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <new>
#include <stdexcept>

namespace nova {

#if defined(__aarch64__)
using FloatControl = uint64_t;                         // FPCR
constexpr FloatControl DENORMALS_ARE_ZERO = 1u << 24;  // those that are read and those that would be written
inline FloatControl float_control() {
  FloatControl bits;
  asm volatile("mrs %0, fpcr" : "=r"(bits));
  return bits;
}
inline void set_float_control(FloatControl bits) { asm volatile("msr fpcr, %0" : : "r"(bits)); }
inline void spin_pause() { asm volatile("isb"); }  // some 10 ns; `yield` does nothing on most
#else
using FloatControl = unsigned;                                // MXCSR
constexpr FloatControl DENORMALS_ARE_ZERO = 0x8000 | 0x0040;  // those that would be written, those that are read
inline FloatControl float_control() { return _mm_getcsr(); }
inline void set_float_control(FloatControl bits) { _mm_setcsr(bits); }
inline void spin_pause() { _mm_pause(); }
#endif

// What the functions that compute give; native.py makes exceptions of them.
enum Status : int { DONE = 0, NO_MEMORY = 1, FAILED = 2, OUT_OF_RANGE = 3 };

// Arithmetic on denormal numbers takes a hundred times as long, and BF16 products take them for zero anyway. It must be
// the same on every thread that computes items, so that a row has the same bits on each.
class FlushDenormals {
 public:
  FlushDenormals() : before_(float_control()) { set_float_control(before_ | DENORMALS_ARE_ZERO); }
  ~FlushDenormals() { set_float_control(before_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  const FloatControl before_;
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
