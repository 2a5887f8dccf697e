// The vectors of simd.h on x86-64: AVX-512, with or without BF16, and AVX2.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace nova {

#if defined(__AVX512F__)
constexpr int VL = 16;         // fp32 lanes in a vector
constexpr int REGISTERS = 32;  // vectors
using vf = __m512;
using vi = __m512i;
using vm = __mmask16;
inline vf zero() { return _mm512_setzero_ps(); }
inline vf set1(float x) { return _mm512_set1_ps(x); }
inline vi set1i(uint32_t x) { return _mm512_set1_epi32((int)x); }
inline vf loadf(const float* p) { return _mm512_loadu_ps(p); }
inline void storef(float* p, vf x) { _mm512_storeu_ps(p, x); }
inline vi loadi(const void* p) { return _mm512_loadu_si512(p); }
inline vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf fnma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); }
inline vf fma_to(vf acc, vf a, vf b) { return fma(a, b, acc); }
inline vi andi(vi a, vi b) { return _mm512_and_si512(a, b); }
inline vi xori(vi a, vi b) { return _mm512_xor_si512(a, b); }
inline vi shl16(vi a) { return _mm512_slli_epi32(a, 16); }
inline vi shr4(vi a) { return _mm512_srli_epi32(a, 4); }
inline vf asf(vi a) { return _mm512_castsi512_ps(a); }
inline vi asi(vf a) { return _mm512_castps_si512(a); }
inline vf to_float(vi a) { return _mm512_cvtepi32_ps(a); }
inline vi to_int(vf a) { return _mm512_cvtps_epi32(a); }  // to nearest, ties to even
inline vi addi(vi a, vi b) { return _mm512_add_epi32(a, b); }
inline vi maxi(vi a, vi b) { return _mm512_max_epi32(a, b); }
inline vi max_pairs(vi a, vi b) { return _mm512_max_epu16(a, b); }  // of 16 bits without a sign
inline int32_t hsumi(vi a) { return _mm512_reduce_add_epi32(a); }
inline int32_t hmaxi(vi a) { return _mm512_reduce_max_epi32(a); }
inline void store_int8(int8_t* p, vi a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(a)); }         // VL bytes
inline vi load_int8(const int8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }    // of them
inline vi int8_pairs(const void* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }  // to 16
inline void storei(void* p, vi x) { _mm512_storeu_si512(p, x); }
inline void store_int16(int16_t* p, vf x) {  // to the nearest, ties to even; beyond 16 bits the last number of them
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)));
}
#if defined(__AVX512VNNI__)
inline vi dot_pairs(vi acc, vi a, vi b) {  // of 16 bits, into 32; spelled out for the reason that codes.h has
  asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
}
#else
inline vi dot_pairs(vi acc, vi a, vi b) { return _mm512_add_epi32(acc, _mm512_madd_epi16(a, b)); }
#endif
inline vf round_even(vf a) { return _mm512_roundscale_ps(a, 8); }
inline vf fraction(vf a) { return _mm512_reduce_ps(a, 9); }          // a - floor(a), and 0 of what is infinite
inline vf times_pow2(vf x, vf n) { return _mm512_scalef_ps(x, n); }  // by 2^floor(n)
inline vm first_lanes(long n) { return n >= 16 ? (vm)0xffff : n <= 0 ? (vm)0 : (vm)((1u << n) - 1); }
inline vf select(vm m, vf yes, vf no) { return _mm512_mask_blend_ps(m, no, yes); }
inline vf load_lanes(const float* p, vm m) { return _mm512_maskz_loadu_ps(m, p); }  // 0 in the others, not touched
inline void store_lanes(float* p, vm m, vf x) { _mm512_mask_storeu_ps(p, m, x); }
inline vm from_bits(uint32_t bits) { return (vm)bits; }  // bit i is lane i
inline uint32_t to_bits(vm m) { return m; }
inline vm eq(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline vm gt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline vm ge(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline vm le(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
inline vm both(vm a, vm b) { return (vm)(a & b); }
inline vi sra31(vi a) { return _mm512_srai_epi32(a, 31); }
inline vi mini(vi a, vi b) { return _mm512_min_epi32(a, b); }
inline vm gti(vi a, vi b) { return _mm512_cmpgt_epi32_mask(a, b); }
using vd = __m512d;  // half as many lanes in 64 bits
inline vd set1d(double x) { return _mm512_set1_pd(x); }
inline vd addd(vd a, vd b) { return _mm512_add_pd(a, b); }
inline vd subd(vd a, vd b) { return _mm512_sub_pd(a, b); }
inline vd first_half(vf a) { return _mm512_cvtps_pd(_mm512_castps512_ps256(a)); }
inline vd second_half(vf a) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1)); }
inline void stored(double* p, vd x) { _mm512_storeu_pd(p, x); }
// The lanes of m one after the other; all VL floats at p may be written.
inline void store_packed(float* p, vm m, vf x) { _mm512_storeu_ps(p, _mm512_maskz_compress_ps(m, x)); }
#else
constexpr int VL = 8;
constexpr int REGISTERS = 16;
using vf = __m256;
using vi = __m256i;
using vm = __m256;
inline vf zero() { return _mm256_setzero_ps(); }
inline vf set1(float x) { return _mm256_set1_ps(x); }
inline vi set1i(uint32_t x) { return _mm256_set1_epi32((int)x); }
inline vf loadf(const float* p) { return _mm256_loadu_ps(p); }
inline void storef(float* p, vf x) { _mm256_storeu_ps(p, x); }
inline vi loadi(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
inline vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf fnma(vf a, vf b, vf c) { return _mm256_fnmadd_ps(a, b, c); }
// Into the register of the sum: of 16 of them GCC 12 gives it others, too, and then copies sums to and fro.
inline vf fma_to(vf acc, vf a, vf b) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b));
  return acc;
}
inline vi andi(vi a, vi b) { return _mm256_and_si256(a, b); }
inline vi xori(vi a, vi b) { return _mm256_xor_si256(a, b); }
inline vi shl16(vi a) { return _mm256_slli_epi32(a, 16); }
inline vi shr4(vi a) { return _mm256_srli_epi32(a, 4); }
inline vf asf(vi a) { return _mm256_castsi256_ps(a); }
inline vi asi(vf a) { return _mm256_castps_si256(a); }
inline vf to_float(vi a) { return _mm256_cvtepi32_ps(a); }
inline vi to_int(vf a) { return _mm256_cvtps_epi32(a); }
inline vi addi(vi a, vi b) { return _mm256_add_epi32(a, b); }
inline vi maxi(vi a, vi b) { return _mm256_max_epi32(a, b); }
inline vi max_pairs(vi a, vi b) { return _mm256_max_epu16(a, b); }
inline int32_t hsumi(vi a) {
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
inline int32_t hmaxi(vi a) {
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
inline void store_int8(int8_t* p, vi a) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
}
inline vi load_int8(const int8_t* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
inline vi int8_pairs(const void* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }
inline void storei(void* p, vi x) { _mm256_storeu_si256((__m256i*)p, x); }
inline void store_int16(int16_t* p, vf x) {
  const __m256i wide = _mm256_cvtps_epi32(x);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
}
#if defined(__AVXVNNI__)
inline vi dot_pairs(vi acc, vi a, vi b) {
  asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b));
  return acc;
}
#else
inline vi dot_pairs(vi acc, vi a, vi b) { return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)); }
#endif
inline vf round_even(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf round_down(vf a) { return _mm256_floor_ps(a); }
inline vf times_pow2(vf x, vf n) {  // n is integral, in [-126, 127]
  return mul(x, asf(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23)));
}
inline vm first_lanes(long n) {
  const __m256 iota = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmp_ps(iota, _mm256_set1_ps((float)(n > 8 ? 8 : n)), _CMP_LT_OQ);
}
inline vf select(vm m, vf yes, vf no) { return _mm256_blendv_ps(no, yes, m); }
inline vf load_lanes(const float* p, vm m) { return _mm256_maskload_ps(p, _mm256_castps_si256(m)); }
inline void store_lanes(float* p, vm m, vf x) { _mm256_maskstore_ps(p, _mm256_castps_si256(m), x); }
inline vm from_bits(uint32_t bits) {
  const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return asf(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)bits), lanes), lanes));
}
inline uint32_t to_bits(vm m) { return (uint32_t)_mm256_movemask_ps(m); }
inline vm eq(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
inline vm gt(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
inline vm ge(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
inline vm le(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_LE_OQ); }
inline vm both(vm a, vm b) { return _mm256_and_ps(a, b); }
inline vi sra31(vi a) { return _mm256_srai_epi32(a, 31); }
inline vi mini(vi a, vi b) { return _mm256_min_epi32(a, b); }
inline vm gti(vi a, vi b) { return asf(_mm256_cmpgt_epi32(a, b)); }
using vd = __m256d;
inline vd set1d(double x) { return _mm256_set1_pd(x); }
inline vd addd(vd a, vd b) { return _mm256_add_pd(a, b); }
inline vd subd(vd a, vd b) { return _mm256_sub_pd(a, b); }
inline vd first_half(vf a) { return _mm256_cvtps_pd(_mm256_castps256_ps128(a)); }
inline vd second_half(vf a) { return _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1)); }
inline void stored(double* p, vd x) { _mm256_storeu_pd(p, x); }
// For each set of lanes, eight bits each: the lanes in it one after the other, and then lane 0.
struct LanesOfBits {
  uint64_t lanes[256];

  constexpr LanesOfBits() : lanes() {
    for (uint64_t bits = 0; bits < 256; bits++)
      for (uint64_t lane = 0, place = 0; lane < 8; lane++)
        if (bits >> lane & 1) lanes[bits] |= lane << 8 * place++;
  }
};
inline constexpr LanesOfBits LANES_OF_BITS;
inline void store_packed(float* p, vm m, vf x) {
  const __m128i lanes = _mm_loadl_epi64((const __m128i*)&LANES_OF_BITS.lanes[to_bits(m)]);
  _mm256_storeu_ps(p, _mm256_permutevar8x32_ps(x, _mm256_cvtepu8_epi32(lanes)));
}
#endif

// A fixed tree, the same for every caller: horizontal sums are part of what makes a row's result reproducible.
inline __m256 halve(vf x, __m256 (*combine)(__m256, __m256)) {
#if defined(__AVX512F__)
  return combine(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
#else
  (void)combine;
  return x;
#endif
}

inline float hsum(vf x) {
  const __m256 eight = halve(x, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); });
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

inline float hmax(vf x) {
  const __m256 eight = halve(x, [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); });
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

inline uint16_t float_to_bf16(float x);  // simd.h

#if defined(__AVX512F__)
inline vf load_bf16(const uint16_t* p) {
  return asf(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
#if defined(__AVX512BF16__)
inline void store_bf16(uint16_t* p, vf x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x)); }
// Two vectors take one instruction together, where one alone takes 2 cycles.
#define NOVA_BF16_PAIRS
inline vi bf16_pair(vf a, vf b) { return (vi)_mm512_cvtne2ps_pbh(b, a); }  // a in the lower half
inline void store_bf16_pair(uint16_t* p, vf a, vf b) { storei(p, bf16_pair(a, b)); }
inline void round_bf16_pair(vf& a, vf& b) {
  const vi lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), both = bf16_pair(a, b);
  const vi first = shl16(lane), second = shl16(addi(lane, set1i(16)));  // to the upper half of each lane
  a = asf(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, first, both));
  b = asf(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, second, both));
}
#else
inline void store_bf16(uint16_t* p, vf x) {
  const vi bits = _mm512_castps_si512(x);
  const vi odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  vi half = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  half = _mm512_mask_mov_epi32(half, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(half));
}
#endif
#else
inline vf load_bf16(const uint16_t* p) {
  return asf(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline void store_bf16(uint16_t* p, vf x) {
  const vi bits = _mm256_castps_si256(x), upper = _mm256_srli_epi32(bits, 16);
  const vi odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
  const vi half = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  const vi nan = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
  const vi kept = _mm256_blendv_epi8(half, nan, asi(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(_mm256_castsi256_si128(kept), _mm256_extracti128_si256(kept, 1)));
}
#endif

}  // namespace nova
