// A KV tile of INT8 cells, computed in integers.
//
// Queries and probabilities are written in digits of 16 bits, one for bf16 activations and two for fp32, each digit a
// row of its own; cells are widened to 16 bits as they are loaded, which is one instruction, where bf16 would be eight.
// Sums of 16-bit products are exact in 32 bits, so what a row must not see is a product with a digit of zero, whatever
// lies there. The scales of keys are multiplied into the scores, those of values into the probabilities. Of a token
// that is not a number the scale is infinite and the cells are zeros: a row that sees it, and no other, is NaN.
#pragma once

#include "attention_tile.h"

namespace nova {

constexpr float DIGIT_MAX = 32767.0f;
constexpr float DIGIT_BASE = 2 * DIGIT_MAX;      // a remainder of half a step is the next digit's largest
constexpr int HEAD_DIM_MAX = (1 << 24) / 32767;  // 512: products of a digit and a cell that fit into 32 bits
static_assert((int64_t)32767 * 127 * HEAD_DIM_MAX < INT32_MAX && TILE_LANES <= HEAD_DIM_MAX);

inline const char* cells_of(const uint32_t* group) { return (const char*)(group + GROUP); }
inline const float* scales_of(const uint32_t* group) { return (const float*)group; }

// scores[row][group * 16 + lane] = digits of row . cells of key, for NR rows and NG groups.
template <int NR, int NG>
__attribute__((noinline)) void score_cells(const uint32_t* q, long pairs, const uint32_t* const* keys,
                                           int32_t* scores) {
  constexpr int NVEC = NG * GROUP_VECTORS;
  vi acc[NR][NVEC];
#pragma GCC unroll 16
  for (int r = 0; r < NR; r++)
#pragma GCC unroll 16
    for (int v = 0; v < NVEC; v++) acc[r][v] = set1i(0);
  for (long u = 0; u < pairs; u++) {
    vi b[NVEC];
#pragma GCC unroll 16
    for (int v = 0; v < NVEC; v++)
      b[v] = int8_pairs(cells_of(keys[v / GROUP_VECTORS]) + 2 * (u * GROUP + v % GROUP_VECTORS * VL));
#pragma GCC unroll 16
    for (int r = 0; r < NR; r++) {
      const vi a = broadcast_unit(q + r * pairs + u);
#pragma GCC unroll 16
      for (int v = 0; v < NVEC; v++) acc[r][v] = dot_pairs(acc[r][v], a, b[v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < NR; r++)
#pragma GCC unroll 16
    for (int v = 0; v < NVEC; v++) storei(scores + r * TILE_LANES + v * VL, acc[r][v]);
}

// The query rows that a thread has in work, against one tile after the other.
template <class T>
class Int8Tiles : public OnVectors<ROWS / (T::E == 2 ? 1 : 2)> {
 public:
  using Element = typename T::type;
  static constexpr int DIGITS = T::E == 2 ? 1 : 2;
  static constexpr int ROWS = nova::ROWS / DIGITS;

  void fit(size_t rows, const CacheDesc& cache) {
    pairs_ = cache.key_units();
    if (query_.size() < rows * DIGITS * pairs_) query_.resize(rows * DIGITS * pairs_);
    if (query_step_.size() < rows) query_step_.resize(rows);
  }

  // Takes query [head_dim] as row r.
  void load(int r, const Element* query, long head_dim) {
    const float largest = scale_of<T>(query, head_dim, DIGIT_MAX);
    const float step = largest == 0.0f ? 1.0f : largest;  // of zeros any will do, but 0 times minus infinity is NaN
    const vf per_step = set1(1.0f / step);
    int16_t* to = (int16_t*)&query_[r * DIGITS * pairs_];
    for (long i = 0; i < head_dim; i += VL) {
      int16_t digits[DIGITS][VL];
      to_digits(mul(load_first<T>(query + i, head_dim - i), per_step), digits[0], VL);
      const long n = std::min<long>(VL, 2 * pairs_ - i);  // behind an odd head_dim a zero
      for (int d = 0; d < DIGITS; d++) std::memcpy(to + d * 2 * pairs_ + i, digits[d], n * sizeof(int16_t));
    }
    query_step_[r] = step;
  }

  // Scores of MR rows from r on against NG groups from i on.
  template <int NG, int MR>
  void score(std::integral_constant<int, MR>, const TileGroups& g, int i, int r) {
    score_cells<MR * DIGITS, NG>(&query_[r * DIGITS * pairs_], pairs_, g.keys + i, &scores_[i * GROUP]);
    first_row_ = r;
  }

  // Turns MR rows of scores into digits of probabilities times the scales of values, the probabilities up to a common
  // factor of each row, 2^(score * factor - max). Gives those maxima, and the sums of the probabilities.
  template <int MR>
  __attribute__((noinline)) void soften(std::integral_constant<int, MR>, const Sight& sight, float factor, float* max,
                                        float* sum) {
    const int32_t* scores = scores_.data();  // what is stored below might be the vectors' own pointers, to a compiler
    float* weights = weights_.data();        // scores as they are, then probabilities times scales
    int16_t* digits = digits_.data();
    vf most[MR], per_unit[MR];  // of a row's scores as they were summed
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) most[r] = set1(NEG_INF), per_unit[r] = set1(factor * query_step_[first_row_ + r]);
    sight.over_groups([&](int i, auto cut) __attribute__((always_inline)) {
#pragma GCC unroll 16
      for (int r = 0; r < MR; r++)
        for (int v = 0; v < GROUP_VECTORS; v++) {
          const long at = i * GROUP + v * VL;
          const vf scale = loadf(scales_of(sight.g.keys[i]) + v * VL);
          const vf score = mul(score_of(scores + r * DIGITS * TILE_LANES + at), scale);
          storef(weights + r * TILE_LANES + at, score);
          most[r] = vmax(sight.cut(cut, r, i, v, score, set1(NEG_INF)), most[r]);
        }
    });
    vf minus_max[MR], sums[MR], largest[MR];
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      max[r] = hmax(most[r]) * (factor * query_step_[first_row_ + r]);
      minus_max[r] = set1(-max[r]), sums[r] = largest[r] = zero();
    }
    sight.over_groups([&](int i, auto cut) __attribute__((always_inline)) {
#pragma GCC unroll 16
      for (int r = 0; r < MR; r++)
        for (int v = 0; v < GROUP_VECTORS; v++) {
          float* at = weights + r * TILE_LANES + i * GROUP + v * VL;
          // A scale may be infinite, and is then to be seen however small the probability is: no exponential is zero.
          const vf x = vmax(set1(-126.0f), fma(loadf(at), per_unit[r], minus_max[r]));
          const vf e = sight.cut(cut, r, i, v, T::exp2(x), zero());
          const vf weight = sight.cut(cut, r, i, v, mul(e, loadf(scales_of(sight.g.values[i]) + v * VL)), zero());
          sums[r] = add(sums[r], e);
          largest[r] = vmax(weight, largest[r]);
          storef(at, weight);
        }
    });
    for (int r = 0; r < MR; r++) {
      sum[r] = hsum(sums[r]);
      p_step_[r] = hmax(largest[r]) / DIGIT_MAX;
      const vf per_step = set1(p_step_[r] == 0.0f ? 0.0f : 1.0f / p_step_[r]);
      for (long at = 0; at < sight.count * GROUP; at += VL)
        to_digits(mul(loadf(weights + r * TILE_LANES + at), per_step), digits + r * DIGITS * TILE_LANES + at,
                  TILE_LANES);
    }
  }

  // The values weighted by MR rows of probabilities, in NC vectors of columns, merged into what is there as
  // `out * keep[r] + values * take[r]` when `keep` is given.
  template <int NC, int MR>
  __attribute__((noinline)) void weigh(std::integral_constant<int, MR>, const Sight& sight, long column, long width,
                                       float* out, const float* keep, const float* take) {
    constexpr int NR = MR * DIGITS;
    vi acc[NR][NC];
#pragma GCC unroll 16
    for (int r = 0; r < NR; r++)
#pragma GCC unroll 16
      for (int v = 0; v < NC; v++) acc[r][v] = set1i(0);
    for (int i = 0; i < sight.count; i++) {
      const char* value = cells_of(sight.g.values[i]) + 2 * column;
      const int16_t* p = &digits_[i * GROUP];
      for (int u = 0; u < GROUP / 2; u++, value += 2 * width, p += 2) {
        vi b[NC];
#pragma GCC unroll 16
        for (int v = 0; v < NC; v++) b[v] = int8_pairs(value + 2 * v * VL);
#pragma GCC unroll 16
        for (int r = 0; r < NR; r++) {
          const vi a = broadcast_unit(p + r * TILE_LANES);
#pragma GCC unroll 16
          for (int v = 0; v < NC; v++) acc[r][v] = dot_pairs(acc[r][v], a, b[v]);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 16
      for (int v = 0; v < NC; v++) {
        vf x = mul(to_float(acc[r * DIGITS][v]), set1(p_step_[r]));
        if (DIGITS == 2) x = fma(to_float(acc[r * DIGITS + 1][v]), set1(p_step_[r] / DIGIT_BASE), x);
        float* to = out + r * width + column + v * VL;
        storef(to, keep ? fma(loadf(to), set1(keep[r]), mul(x, set1(take[r]))) : x);
      }
  }

 private:
  // A vector of scores, in steps of a query, of the sums of their digits.
  static vf score_of(const int32_t* sums) {
    const vf first = to_float(loadi(sums));
    return DIGITS == 1 ? first : fma(to_float(loadi(sums + TILE_LANES)), set1(1.0f / DIGIT_BASE), first);
  }

  // x in steps -> its digits, those of a second row `stride` behind those of the first.
  static void to_digits(vf x, int16_t* digits, long stride) {
    store_int16(digits, x);
    if (DIGITS == 2) store_int16(digits + stride, mul(sub(x, round_even(x)), set1(DIGIT_BASE)));
  }

  long pairs_ = 0;
  int first_row_ = 0;                // of those that were scored last
  AlignedVector<uint32_t> query_;    // [rows][DIGITS][pairs_]
  AlignedVector<float> query_step_;  // [rows]: what a digit of 1 stands for
  AlignedVector<int32_t> scores_ = AlignedVector<int32_t>(nova::ROWS * TILE_LANES);  // [ROWS][DIGITS][TILE_LANES]
  AlignedVector<int16_t> digits_ = AlignedVector<int16_t>(nova::ROWS * TILE_LANES);  // [ROWS][DIGITS][TILE_LANES]
  AlignedVector<float> weights_ = AlignedVector<float>(ROWS * TILE_LANES);
  float p_step_[ROWS];
};

}  // namespace nova
