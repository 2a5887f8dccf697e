// A KV tile of keys and values as they were computed, bf16 or fp32.
#pragma once

#include "attention_tile.h"

namespace nova {

// scores[r][group * 16 + lane] = query row r . key, for MR rows and NG groups.
template <class T, int MR, int NG>
__attribute__((noinline)) void score_tile(const typename T::factor* q, const uint32_t* const* keys, long units,
                                          float* scores) {
  constexpr int NVEC = NG * GROUP_VECTORS;
  vf acc[MR][NVEC];
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 16
    for (int v = 0; v < NVEC; v++) acc[r][v] = zero();
  for (long u = 0; u < units; u++)
    add_products<T>(
        acc, [&](int r) { return q + (r * units + u) * T::E; },
        [&](int v) { return loadi(keys[v / GROUP_VECTORS] + u * GROUP + v % GROUP_VECTORS * VL); });
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 16
    for (int v = 0; v < NVEC; v++) storef(scores + r * TILE_LANES + v * VL, acc[r][v]);
}

// out[r][column] = sum over the tile's tokens of p[r][token] * value[token][column], for MR rows and NC vectors of
// columns; merged into what is there as `out * keep[r] + sum * take[r]` when `keep` is given. What a row does not see
// is not multiplied, not even by its probability of zero: it may be infinite or NaN.
template <class T, int MR, int NC>
__attribute__((noinline)) void value_tile(const typename T::factor* p, const Sight& sight, long column, long width,
                                          float* out, const float* keep, const float* take) {
  const TileGroups& g = sight.g;
  vf acc[MR][NC];
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 16
    for (int v = 0; v < NC; v++) acc[r][v] = zero();
  const vi low = set1i(0xffffu), high = set1i(0xffff0000u);
  // Only in a group of the first `lead` may a row's window begin.
  auto row_by_row = [&](int i, auto leads) __attribute__((always_inline)) {
    for (int r = 0; r < MR; r++) {
      const uint32_t* value = g.values[i] + column;
      const typename T::factor* pr = p + i * GROUP + r * TILE_LANES;
      const int from = leads ? sight.from(r, i) : 0, tokens = std::max(0, sight.to(r, i));
      if (leads && tokens <= from) continue;
      const int full = tokens / T::E;
      int u = from / T::E;
      if (leads && from % T::E) {
        for (int v = 0; v < NC; v++)
          acc[r][v] = T::dp(acc[r][v], T::broadcast(pr + u * T::E), andi(loadi(value + u * width + v * VL), high));
        u++;
      }
      for (; u < full; u++)
        for (int v = 0; v < NC; v++)
          acc[r][v] = T::dp(acc[r][v], T::broadcast(pr + u * T::E), loadi(value + u * width + v * VL));
      if (tokens % T::E)
        for (int v = 0; v < NC; v++)
          acc[r][v] = T::dp(acc[r][v], T::broadcast(pr + full * T::E), andi(loadi(value + full * width + v * VL), low));
    }
  };
  const int lead = sight.lead, common = sight.common, count = sight.count;
  for (int i = 0; i < lead; i++) row_by_row(i, std::true_type());  // where windows begin
  for (int i = lead; i < common; i++) {
    const uint32_t* value = g.values[i] + column;
    const typename T::factor* pr = p + i * GROUP;
    const int full = g.tokens[i] / T::E;
    for (int u = 0; u < full; u++)
      add_products<T>(
          acc, [&](int r) { return pr + r * TILE_LANES + u * T::E; },
          [&](int v) { return loadi(value + u * width + v * VL); });
    if (g.tokens[i] % T::E) {
      // Half a unit: the other token was never written for this sequence, but by an earlier owner of the block.
#pragma GCC unroll 16
      for (int v = 0; v < NC; v++) {
        const vi b = andi(loadi(value + full * width + v * VL), low);
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) acc[r][v] = T::dp(acc[r][v], T::broadcast(pr + r * TILE_LANES + full * T::E), b);
      }
    }
  }
  for (int i = common; i < count; i++) row_by_row(i, std::false_type());  // the diagonal
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 16
    for (int v = 0; v < NC; v++) {
      float* to = out + r * width + column + v * VL;
      storef(to, keep ? fma(loadf(to), set1(keep[r]), mul(acc[r][v], set1(take[r]))) : acc[r][v]);
    }
}

// Turns MR rows of scores into probabilities, each up to a common factor of its row, 2^(score * factor - max). Gives
// those maxima, and the sums of the probabilities.
template <class T, int MR>
__attribute__((noinline)) void soften_tile(const float* scores, const Sight& sight, float factor, typename T::factor* p,
                                           float* max, float* sum) {
  vf most[MR];
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++) most[r] = set1(NEG_INF);
  sight.over_groups([&](int i, auto cut) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++)
      for (int v = 0; v < GROUP_VECTORS; v++) {
        const vf score = loadf(scores + r * TILE_LANES + i * GROUP + v * VL);
        most[r] = vmax(sight.cut(cut, r, i, v, score, set1(NEG_INF)), most[r]);
      }
  });
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++) max[r] = hmax(most[r]) * factor;
  vf minus_max[MR], sums[MR];
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++) minus_max[r] = set1(-max[r]), sums[r] = zero();
  sight.over_groups([&](int i, auto cut) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++)
      for (int v = 0; v < GROUP_VECTORS; v++) {
        const long at = r * TILE_LANES + i * GROUP + v * VL;
        const vf e = T::exp2(fma(loadf(scores + at), set1(factor), minus_max[r]));
        const vf seen = sight.cut(cut, r, i, v, e, zero());
        sums[r] = add(sums[r], seen);
        store_factors<T>(p + at, seen);
      }
  });
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++) sum[r] = hsum(sums[r]);
}

// The query rows that a thread has in work, against one tile after the other.
template <class T>
class FloatTiles : public OnVectors<ROWS> {
 public:
  using Element = typename T::type;
  using Factor = typename T::factor;

  void fit(size_t rows, const CacheDesc& cache) {
    units_ = cache.key_units();
    if (query_.size() < rows * units_ * T::E) query_.resize(rows * units_ * T::E);
  }

  // Takes query [head_dim] as row r.
  void load(int r, const Element* query, long head_dim) {
    Factor* to = &query_[r * units_ * T::E];
    to_factors<T>(query, head_dim, to);
    if (head_dim % T::E) to[head_dim] = 0;
  }

  // Scores of MR rows from r on against NG groups from i on.
  template <int NG, int MR>
  void score(std::integral_constant<int, MR>, const TileGroups& g, int i, int r) {
    score_tile<T, MR, NG>(&query_[r * units_ * T::E], g.keys + i, units_, &scores_[i * GROUP]);
  }

  // Turns MR rows of scores into probabilities: `soften_tile`.
  template <int MR>
  void soften(std::integral_constant<int, MR>, const Sight& sight, float factor, float* max, float* sum) {
    soften_tile<T, MR>(scores_.data(), sight, factor, p_.data(), max, sum);
  }

  // The values weighted by MR rows of probabilities, in NC vectors of columns: `value_tile` says how they are merged.
  template <int NC, int MR>
  void weigh(std::integral_constant<int, MR>, const Sight& sight, long column, long width, float* out,
             const float* keep, const float* take) {
    value_tile<T, MR, NC>(p_.data(), sight, column, width, out, keep, take);
  }

 private:
  long units_ = 0;
  AlignedVector<Factor> query_;  // [rows][units_ * E]
  AlignedVector<float> scores_ = AlignedVector<float>(ROWS * TILE_LANES);
  AlignedVector<Factor> p_ = AlignedVector<Factor>(ROWS * TILE_LANES);
};

}  // namespace nova
