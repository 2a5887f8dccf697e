// Products of whole numbers: a vector of weights' codes by four INT8 activations, exact on every CPU.
//
// VNNI multiplies bytes without a sign by bytes with one and adds to 32 bits. Codes are the ones without: those of 4
// bits have none, and those of 8 bits are stored 128 higher, which the sum of the activations takes back in the end.
//
// Without VNNI the sums of two such products are kept in 16 bits, where they would saturate from 32,767 on. Codes of 4
// bits cannot get there (2 * 15 * 127). Those of 8 bits are stored as they are, and the code's sign is given to
// the activation: 2 * 128 * 127 = 32,512.
//
// Arm multiplies bytes with a sign by such, so codes are stored as they are; without its dot product two products are
// summed in 16 bits there, too.
#pragma once

#include "linear.h"

namespace nova {

#if defined(__aarch64__)
constexpr int STORED_HIGHER = 0;

inline vi dot_bytes(vi acc, vi codes, vi x) {
  const int8x16_t a = vreinterpretq_s8_s32(codes), b = vreinterpretq_s8_s32(x);
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(acc, a, b);
#else
  const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
  return vpadalq_s16(acc, vpaddq_s16(low, high));
#endif
}
inline vi dot_small(vi acc, vi codes, vi x) { return dot_bytes(acc, codes, x); }

#elif defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr int STORED_HIGHER = 128;  // codes of 8 bits, by so much

// Spelled out, as GCC 12 copies a register for every second of its own intrinsics: 1.5 times as long with many rows.
inline vi dot_bytes(vi acc, vi codes, vi x) {
#if defined(__AVX512VNNI__)
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(codes), "v"(x));
#else
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(codes), "x"(x));
#endif
  return acc;
}
inline vi dot_small(vi acc, vi codes, vi x) { return dot_bytes(acc, codes, x); }

#else
constexpr int STORED_HIGHER = 0;

#if defined(__AVX512F__)
inline vi dot_small(vi acc, vi codes, vi x) {  // codes from 0 to 15
  return addi(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(codes, x), _mm512_set1_epi16(1)));
}
inline vi dot_bytes(vi acc, vi codes, vi x) {  // codes from -128 to 127
  const vi turned = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(codes), _mm512_setzero_si512(), x);
  return dot_small(acc, _mm512_abs_epi8(codes), turned);
}
#else
inline vi dot_small(vi acc, vi codes, vi x) {
  return addi(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1)));
}
inline vi dot_bytes(vi acc, vi codes, vi x) {
  return dot_small(acc, _mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes));
}
#endif
#endif

constexpr int STEP = 8;  // features of a row that are unpacked together: two units of four

// How the codes of a panel's rows and of one step lie in memory; each row's begin 4 bytes behind those of the one
// before.
struct Bytes {
  static constexpr long STEP_BYTES = PANEL * STEP;  // the lower four features of all rows, then the upper four
  static constexpr int HALVES = 2;                  // in memory
  static constexpr int ZERO = STORED_HIGHER;
  static vi half(const char* w, int v, int h) { return loadi(w + (h * NV + v) * VL * 4); }
  static vi dot(vi acc, vi codes, vi x) { return dot_bytes(acc, codes, x); }

  static void put(char* w, int feature, int code) { w[feature / 4 * PANEL * 4 + feature % 4] = (char)(code + ZERO); }
  // The codes of one row's step, which begins at w.
  static void unpack(const char* w, int8_t* to) {
    uint32_t halves[2];
    std::memcpy(&halves[0], w, 4), std::memcpy(&halves[1], w + PANEL * 4, 4);
    if (ZERO) halves[0] ^= 0x80808080u, halves[1] ^= 0x80808080u;
    std::memcpy(to, halves, STEP);
  }
};

struct Nibbles {
  static constexpr long STEP_BYTES = PANEL * STEP / 2;  // a byte: a feature of the lower four and one of the upper four
  static constexpr int HALVES = 1;
  static constexpr int ZERO = 0;
  static vi half(const char* w, int v, int h) {
    const vi both = loadi(w + v * VL * 4);
    return andi(h ? shr4(both) : both, set1i(0x0f0f0f0fu));
  }
  static vi dot(vi acc, vi codes, vi x) { return dot_small(acc, codes, x); }

  static void put(char* w, int feature, int code) { w[feature % 4] |= (char)(code << feature / 4 * 4); }
  static void unpack(const char* w, int8_t* to) {
    uint32_t both;
    std::memcpy(&both, w, 4);
    const uint32_t halves[2] = {both & 0x0f0f0f0fu, both >> 4 & 0x0f0f0f0fu};
    std::memcpy(to, halves, STEP);
  }
};

}  // namespace nova
