// Products of whole numbers: a vector of weights' codes by four INT8 activations, exact on every CPU.
//
// VNNI multiplies bytes without a sign by bytes with one and adds to 32 bits. Codes are the ones without: those of 4
// bits have none, and those of 8 bits are stored 128 higher, which the sum of the activations takes back in the end.
//
// Without VNNI the sums of two such products are kept in 16 bits, where they would saturate from 32,767 on. Codes of 4
// bits cannot get there (2 * 15 * 127) and are summed there further, as far as there is room: that takes two thirds of
// the time. Those of 8 bits are stored as they are, and the code's sign is given to the activation: 2 * 128 * 127 =
// 32,512.
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

#else
constexpr int STORED_HIGHER = 0;

// `add_pairs` adds the sums of two products to 16 bits, `sum_pairs` makes 32 of two such sums.
#define NOVA_PAIRS_OF_SUMS
#if defined(__AVX512F__)
inline vi add_pairs(vi sums, vi codes, vi x) { return _mm512_add_epi16(sums, _mm512_maddubs_epi16(codes, x)); }
inline vi sum_pairs(vi sums) { return _mm512_madd_epi16(sums, _mm512_set1_epi16(1)); }
inline vi dot_bytes(vi acc, vi codes, vi x) {  // codes from -128 to 127
  const vi turned = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(codes), _mm512_setzero_si512(), x);
  return addi(acc, sum_pairs(_mm512_maddubs_epi16(_mm512_abs_epi8(codes), turned)));
}
#else
// Spelled out, as of 16 registers GCC 12 finds too few for all that it computes ahead: 1.15 times as long.
inline vi add_pairs(vi sums, vi codes, vi x) {
  vi products;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(codes), "x"(x));
  return sums;
}
inline vi sum_pairs(vi sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
inline vi dot_bytes(vi acc, vi codes, vi x) {
  vi products;
  asm("vpmaddubsw %3, %2, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0"
      : "+x"(acc), "=&x"(products)
      : "x"(_mm256_abs_epi8(codes)), "x"(_mm256_sign_epi8(x, codes)), "xm"(_mm256_set1_epi16(1)));
  return acc;
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
  // The most rows of a tile. Of 16 registers a product takes more, where signs are turned.
  static constexpr int TILE_ROWS = STORED_HIGHER || REGISTERS > 16 ? MR_MAX : 4;
  static constexpr int STEPS_IN_16_BITS = 0;
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
  static constexpr int TILE_ROWS = MR_MAX;
  // How many steps are summed in 16 bits: 4 steps of two units are 8 * 2 * 15 * 127 = 30,480.
#if defined(NOVA_PAIRS_OF_SUMS)
  static constexpr int STEPS_IN_16_BITS = 4;
  static vi add_pairs(vi sums, vi codes, vi x) { return nova::add_pairs(sums, codes, x); }
  static vi sum_pairs(vi sums) { return nova::sum_pairs(sums); }
#else
  static constexpr int STEPS_IN_16_BITS = 0;
  static vi dot(vi acc, vi codes, vi x) { return dot_bytes(acc, codes, x); }
#endif
  static vi half(const char* w, int v, int h) {
    const vi both = loadi(w + v * VL * 4);
    return andi(h ? shr4(both) : both, set1i(0x0f0f0f0fu));
  }

  static void put(char* w, int feature, int code) { w[feature % 4] |= (char)(code << feature / 4 * 4); }
  static void unpack(const char* w, int8_t* to) {
    uint32_t both;
    std::memcpy(&both, w, 4);
    const uint32_t halves[2] = {both & 0x0f0f0f0fu, both >> 4 & 0x0f0f0f0fu};
    std::memcpy(to, halves, STEP);
  }
};

}  // namespace nova
