// One vector width and two element types behind a few dozen names, so that linear, attention and small ops are
// written once for AVX-512 (with or without BF16) and AVX2 (simd_avx.h), and for NEON (simd_neon.h).
//
// Everything is stored in 32-bit "units": one fp32 or a pair of bf16. `dp` multiplies unit by unit and adds to fp32
// lanes, so that one loop serves both types. What vectors are multiplied by, a unit in all lanes, is kept as `factor`s:
// where no instruction multiplies bf16, in fp32, to which it is widened once and not by each that reads it. Fused
// multiply-adds are spelled out, never left to contraction: the same row must give the same bits from every
// instantiation of a kernel.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__aarch64__)
#include "simd_neon.h"
#else
#include "simd_avx.h"
#endif

namespace nova {

constexpr int ACCUMULATORS = REGISTERS / 4 * 3;  // vectors of sums in a register tile; beside them what is multiplied

// Asks for a cache line; any address may be asked for.
inline void prefetch(const void* line) { __builtin_prefetch(line); }
inline void prefetch_far(const void* line) { __builtin_prefetch(line, 0, 2); }  // into the second cache

// 2^x for x <= 127; relative error below 2e-7; 2^-126 for everything smaller.
inline vf exp2v(vf x) {
  x = vmax(set1(-126.0f), x);  // in this order a NaN stays one
  const vf n = round_even(x);
  const vf f = sub(x, n);  // [-0.5, 0.5]
  vf p = fma(set1(1.5403530393381610e-4f), f, set1(1.3333558146428443e-3f));
  p = fma(p, f, set1(9.6181291076284772e-3f));
  p = fma(p, f, set1(5.5504108664821580e-2f));
  p = fma(p, f, set1(2.4022650695910072e-1f));
  p = fma(p, f, set1(6.9314718055994531e-1f));
  p = fma(p, f, set1(1.0f));
  return times_pow2(p, n);
}

// 2^x for x <= 127 at half the cost; relative error below 1.1e-4, a twentieth of a bf16's, and none where x is whole;
// 2^-126 or 0 for everything smaller.
inline vf exp2_coarse(vf x) {
#if defined(__AVX512F__)
  const vf f = fraction(x);
#else
  x = vmax(set1(-126.0f), x);
  const vf n = round_down(x), f = sub(x, n);
  x = n;
#endif
  vf p = fma(set1(7.8267470e-2f), f, set1(2.2630836e-1f));
  p = fma(p, f, set1(6.9542417e-1f));
  p = fma(p, f, set1(1.0f));
  return times_pow2(p, x);
}
constexpr float LOG2E = 1.4426950408889634f;

inline uint16_t float_to_bf16(float x) {  // round to nearest even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40);
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

inline vi broadcast_unit(const void* p) {
  uint32_t unit;
  std::memcpy(&unit, p, 4);
  return set1i(unit);
}

struct Fp32 {
  using type = float;
  using factor = float;
  static constexpr int E = 1;                // elements in a unit
  static constexpr bool IS_WIDENED = false;  // as factor
  static vi broadcast(const factor* p) { return broadcast_unit(p); }
  static vf dp(vf acc, vi a, vi b) { return fma_to(acc, asf(a), asf(b)); }
  static vf exp2(vf x) { return exp2v(x); }
  static vf load(const type* p) { return loadf(p); }
  static void store(type* p, vf x) { storef(p, x); }
};

struct Bf16 {
  using type = uint16_t;
  static constexpr int E = 2;
#if defined(__AVX512BF16__)
  using factor = type;
  static constexpr bool IS_WIDENED = false;
  static vi broadcast(const factor* p) { return broadcast_unit(p); }
  static vf dp(vf acc, vi a, vi b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
#else
  using factor = float;
  static constexpr bool IS_WIDENED = true;
  struct Pair {
    vf first, second;
  };
  static Pair broadcast(const factor* p) { return {set1(p[0]), set1(p[1])}; }
  static vf first(vi b) { return asf(shl16(b)); }
  static vf second(vi b) { return asf(andi(b, set1i(0xffff0000u))); }
  static vf dp(vf acc, Pair a, vi b) {
    acc = fma_to(acc, a.second, second(b));
    return fma_to(acc, a.first, first(b));
  }
#endif
  static vf exp2(vf x) { return exp2_coarse(x); }
  static vf load(const type* p) { return load_bf16(p); }
  static void store(type* p, vf x) { store_bf16(p, x); }
};

template <class T>
inline typename T::type from_float(float x) {
  if constexpr (T::E == 1)
    return x;
  else
    return float_to_bf16(x);
}

template <class T>
inline float to_float(typename T::type x) {
  if constexpr (T::E == 1) {
    return x;
  } else {
    const uint32_t bits = (uint32_t)x << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
  }
}

// What a store and a load would make of it.
template <class T>
inline vf rounded(vf x) {
  if (T::E == 1) return x;
  typename T::type buffer[VL];
  T::store(buffer, x);
  return T::load(buffer);
}

// Two vectors, the second one behind the first.
template <class T>
inline void store_pair(typename T::type* p, vf a, vf b) {
#if defined(NOVA_BF16_PAIRS)
  if constexpr (T::E == 2) return store_bf16_pair(p, a, b);
#endif
  T::store(p, a), T::store(p + VL, b);
}

// What `rounded` makes of two vectors.
template <class T>
inline void round_pair(vf& a, vf& b) {
#if defined(NOVA_BF16_PAIRS)
  if constexpr (T::E == 2) return round_bf16_pair(a, b);
#endif
  a = rounded<T>(a), b = rounded<T>(b);
}

// The first n < VL elements, the others read as zero; nothing beyond them is touched.
template <class T>
inline vf load_first(const typename T::type* p, long n) {
  if (n >= VL) return T::load(p);
  typename T::type buffer[VL] = {};
  std::memcpy(buffer, p, sizeof(typename T::type) * n);
  return T::load(buffer);
}

template <class T>
inline void store_first(typename T::type* p, vf x, long n) {
  if (n >= VL) return T::store(p, x);
  typename T::type buffer[VL];
  T::store(buffer, x);
  std::memcpy(p, buffer, sizeof(typename T::type) * n);
}

// Adds to sums[r][v] the products of the two factors at factor(r) by vector(v, 1) and vector(v, 0), in this order,
// which is that of `dp`: few vectors are held at once.
template <int MR, int N, class Factor, class Vector>
__attribute__((always_inline)) inline void add_halves(vf (&sums)[MR][N], Factor&& factor, Vector&& vector) {
#pragma GCC unroll 2
  for (int half = 1; half >= 0; half--) {
    vf b[N];
#pragma GCC unroll 16
    for (int v = 0; v < N; v++) b[v] = vector(v, half);
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      const vf a = set1(factor(r)[half]);
#pragma GCC unroll 16
      for (int v = 0; v < N; v++) sums[r][v] = fma_to(sums[r][v], a, b[v]);
    }
  }
}

// Adds to sums[r][v] the products of the unit that factor(r) points to by those of vector(v).
template <class T, int MR, int N, class Factor, class Vector>
__attribute__((always_inline)) inline void add_products(vf (&sums)[MR][N], Factor&& factor, Vector&& vector) {
  if constexpr (T::IS_WIDENED) {
    add_halves(sums, factor, [&](int v, int half) { return half ? T::second(vector(v)) : T::first(vector(v)); });
  } else {
    vi b[N];
#pragma GCC unroll 16
    for (int v = 0; v < N; v++) b[v] = vector(v);
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      const auto a = T::broadcast(factor(r));
#pragma GCC unroll 16
      for (int v = 0; v < N; v++) sums[r][v] = T::dp(sums[r][v], a, b[v]);
    }
  }
}

// A vector of T as factors, rounded as T.
template <class T>
inline void store_factors(typename T::factor* p, vf x) {
  if constexpr (T::IS_WIDENED)
    storef(p, rounded<T>(x));
  else
    T::store(p, x);
}

// `count` elements as factors.
template <class T>
inline void to_factors(const typename T::type* from, long count, typename T::factor* to) {
  if constexpr (T::IS_WIDENED) {
    long k = 0;
    for (; k + VL <= count; k += VL) storef(to + k, T::load(from + k));
    for (; k < count; k++) to[k] = to_float<T>(from[k]);
  } else {
    std::memcpy(to, from, count * sizeof *to);
  }
}

inline long ceil_div(long a, long b) { return (a + b - 1) / b; }

// 1 + e^-x, the exponential as precise as T stores; the smaller of the two in this order, so that a NaN stays one: an
// expert that all share must not vanish.
template <class T>
inline vf one_and_exp_minus(vf x) {
  return add(set1(1.0f), T::exp2(vmin(set1(127.0f), mul(x, set1(-LOG2E)))));
}

template <class T>
inline vf silu(vf x) {
  return div(x, one_and_exp_minus<T>(x));
}

inline vf sigmoid(vf x) { return div(set1(1.0f), one_and_exp_minus<Fp32>(x)); }

}  // namespace nova
