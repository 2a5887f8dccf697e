// The vectors of simd.h on Arm (aarch64): NEON, which every such CPU has.
//
// Maximum and minimum are x86's: of two numbers one of which is NaN, the second. The kernels count on it.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace nova {

constexpr int VL = 4;
constexpr int REGISTERS = 32;
using vf = float32x4_t;
using vi = int32x4_t;
using vm = uint32x4_t;
inline vf zero() { return vdupq_n_f32(0.0f); }
inline vf set1(float x) { return vdupq_n_f32(x); }
inline vi set1i(uint32_t x) { return vreinterpretq_s32_u32(vdupq_n_u32(x)); }
inline vf loadf(const float* p) { return vld1q_f32(p); }
inline void storef(float* p, vf x) { vst1q_f32(p, x); }
inline vi loadi(const void* p) { return vreinterpretq_s32_u8(vld1q_u8((const uint8_t*)p)); }
inline void storei(void* p, vi x) { vst1q_u8((uint8_t*)p, vreinterpretq_u8_s32(x)); }
inline vf add(vf a, vf b) { return vaddq_f32(a, b); }
inline vf sub(vf a, vf b) { return vsubq_f32(a, b); }
inline vf mul(vf a, vf b) { return vmulq_f32(a, b); }
inline vf div(vf a, vf b) { return vdivq_f32(a, b); }
inline vf select(vm m, vf yes, vf no) { return vbslq_f32(m, yes, no); }
inline vf vmax(vf a, vf b) { return select(vcgtq_f32(a, b), a, b); }
inline vf vmin(vf a, vf b) { return select(vcltq_f32(a, b), a, b); }
inline vf fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
inline vf fma_to(vf acc, vf a, vf b) { return fma(a, b, acc); }
inline vf fnma(vf a, vf b, vf c) { return vfmsq_f32(c, a, b); }
inline vi andi(vi a, vi b) { return vandq_s32(a, b); }
inline vi xori(vi a, vi b) { return veorq_s32(a, b); }
inline vi shl16(vi a) { return vshlq_n_s32(a, 16); }
inline vi shr4(vi a) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a), 4)); }
inline vf asf(vi a) { return vreinterpretq_f32_s32(a); }
inline vi asi(vf a) { return vreinterpretq_s32_f32(a); }
inline vf to_float(vi a) { return vcvtq_f32_s32(a); }
inline vi to_int(vf a) { return vcvtnq_s32_f32(a); }  // to nearest, ties to even
inline vi addi(vi a, vi b) { return vaddq_s32(a, b); }
inline vi maxi(vi a, vi b) { return vmaxq_s32(a, b); }
inline vi max_pairs(vi a, vi b) {
  return vreinterpretq_s32_u16(vmaxq_u16(vreinterpretq_u16_s32(a), vreinterpretq_u16_s32(b)));
}
inline int32_t hsumi(vi a) { return vaddvq_s32(a); }
inline int32_t hmaxi(vi a) { return vmaxvq_s32(a); }
inline void store_int8(int8_t* p, vi a) {  // VL bytes
  const int16x4_t words = vqmovn_s32(a);
  const int8x8_t bytes = vqmovn_s16(vcombine_s16(words, words));
  std::memcpy(p, &bytes, VL);
}
inline void store_int16(int16_t* p, vf x) { vst1_s16(p, vqmovn_s32(to_int(x))); }
inline vi load_int8(const int8_t* p) {
  int8x8_t bytes = vdup_n_s8(0);
  std::memcpy(&bytes, p, VL);
  return vmovl_s16(vget_low_s16(vmovl_s8(bytes)));
}
inline vi int8_pairs(const void* p) { return vreinterpretq_s32_s16(vmovl_s8(vld1_s8((const int8_t*)p))); }  // to 16
inline vi dot_pairs(vi acc, vi a, vi b) {  // of 16 bits, into 32
  const int16x8_t x = vreinterpretq_s16_s32(a), y = vreinterpretq_s16_s32(b);
  return addi(acc, vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y)));
}
inline vf round_even(vf a) { return vrndnq_f32(a); }
inline vf round_down(vf a) { return vrndmq_f32(a); }
inline vf times_pow2(vf x, vf n) {  // n is integral, in [-126, 127]
  return mul(x, asf(vshlq_n_s32(addi(to_int(n), vdupq_n_s32(127)), 23)));
}
inline vm first_lanes(long n) {
  const int32_t iota[VL] = {0, 1, 2, 3};
  return vcltq_s32(vld1q_s32(iota), vdupq_n_s32((int32_t)(n > VL ? VL : n < 0 ? 0 : n)));
}
inline vf load_lanes(const float* p, vm m) {  // 0 in the others, not touched
  float lane[VL] = {};
  for (int i = 0; i < VL; i++)
    if (m[i]) lane[i] = p[i];
  return loadf(lane);
}
inline void store_lanes(float* p, vm m, vf x) {
  for (int i = 0; i < VL; i++)
    if (m[i]) p[i] = x[i];
}
inline vm from_bits(uint32_t bits) {  // bit i is lane i
  const int32_t lanes[VL] = {1, 2, 4, 8};
  return vtstq_s32(vdupq_n_s32((int32_t)bits), vld1q_s32(lanes));
}
inline uint32_t to_bits(vm m) {
  const uint32_t lanes[VL] = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(m, vld1q_u32(lanes)));
}
inline vm eq(vf a, vf b) { return vceqq_f32(a, b); }
inline vm gt(vf a, vf b) { return vcgtq_f32(a, b); }
inline vm ge(vf a, vf b) { return vcgeq_f32(a, b); }
inline vm le(vf a, vf b) { return vcleq_f32(a, b); }
inline vm both(vm a, vm b) { return vandq_u32(a, b); }
inline vi sra31(vi a) { return vshrq_n_s32(a, 31); }
inline vi mini(vi a, vi b) { return vminq_s32(a, b); }
inline vm gti(vi a, vi b) { return vcgtq_s32(a, b); }
using vd = float64x2_t;  // half as many lanes in 64 bits
inline vd set1d(double x) { return vdupq_n_f64(x); }
inline vd addd(vd a, vd b) { return vaddq_f64(a, b); }
inline vd subd(vd a, vd b) { return vsubq_f64(a, b); }
inline vd first_half(vf a) { return vcvt_f64_f32(vget_low_f32(a)); }
inline vd second_half(vf a) { return vcvt_high_f64_f32(a); }
inline void stored(double* p, vd x) { vst1q_f64(p, x); }
// The lanes of m one after the other; all VL floats at p may be written.
inline void store_packed(float* p, vm m, vf x) {
  float lane[VL];
  storef(lane, x);
  for (uint32_t bits = to_bits(m); bits; bits &= bits - 1) *p++ = lane[__builtin_ctz(bits)];
}

// A fixed tree, the same for every caller: horizontal sums are part of what makes a row's result reproducible.
inline float hsum(vf x) {
  const float32x2_t two = vadd_f32(vget_low_f32(x), vget_high_f32(x));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float hmax(vf x) { return vmaxvq_f32(x); }

inline vf load_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
inline void store_bf16(uint16_t* p, vf x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t half = vshrq_n_u32(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd), 16);
  vst1_u16(p, vmovn_u32(vbslq_u32(vceqq_f32(x, x), half, vdupq_n_u32(0x7fc0))));
}

}  // namespace nova
