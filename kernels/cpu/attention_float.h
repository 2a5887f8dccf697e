// A KV tile of keys and values as they were computed, bf16 or fp32.
#pragma once

#include "attention_tile.h"

namespace nova {

// scores[r][group * 16 + lane] = query row r . key, for MR rows and NG groups.
template <class T, int MR, int NG>
__attribute__((noinline)) void score_tile(const uint32_t* q, long q_stride, const uint32_t* const* keys, long units,
                                          float* scores) {
  constexpr int NVEC = NG * GROUP_VECTORS;
  vf acc[MR][NVEC];
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 16
    for (int v = 0; v < NVEC; v++) acc[r][v] = zero();
  for (long u = 0; u < units; u++) {
    vi b[NVEC];
#pragma GCC unroll 16
    for (int v = 0; v < NVEC; v++) b[v] = loadi(keys[v / GROUP_VECTORS] + u * GROUP + v % GROUP_VECTORS * VL);
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      const vi a = broadcast_unit(q + r * q_stride + u);
#pragma GCC unroll 16
      for (int v = 0; v < NVEC; v++) acc[r][v] = T::dp(acc[r][v], a, b[v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 16
    for (int v = 0; v < NVEC; v++) storef(scores + r * TILE_LANES + v * VL, acc[r][v]);
}

// out[r][column] = sum over the tile's tokens of p[r][token] * value[token][column], for MR rows and NC vectors of
// columns; merged into what is there as `out * keep[r] + sum * take[r]` when `keep` is given. Row r sees the tokens
// from position begin[r] to before seen[r], which ascend with r; all others are not multiplied, not even by their
// probability of zero: they may be infinite or NaN.
template <class T, int MR, int NC>
__attribute__((noinline)) void value_tile(const typename T::type* p, const TileGroups& g, long column, long width,
                                          float* out, const float* keep, const float* take, const int* begin,
                                          const int* seen) {
  vf acc[MR][NC];
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 16
    for (int v = 0; v < NC; v++) acc[r][v] = zero();
  int lead = 0;  // groups that begin before the window of some row
  while (lead < g.count && g.position[lead] < begin[MR - 1]) lead++;
  int common = g.count;  // behind them: groups that all rows see as far as they are filled
  while (common > lead && g.position[common - 1] + g.tokens[common - 1] > seen[0]) common--;
  const vi low = set1i(0xffffu), high = set1i(0xffff0000u);
  // Only in a group of the first `lead` may a row's window begin.
  auto row_by_row = [&](int i, auto leads) __attribute__((always_inline)) {
    for (int r = 0; r < MR; r++) {
      const uint32_t* value = g.values[i] + column;
      const typename T::type* pr = p + i * GROUP + r * TILE_LANES;
      const int from = leads ? std::max(0, begin[r] - g.position[i]) : 0;
      const int tokens = std::max(0, std::min(g.tokens[i], seen[r] - g.position[i]));
      if (leads && tokens <= from) continue;
      const int full = tokens / T::E;
      int u = from / T::E;
      if (leads && from % T::E) {
        for (int v = 0; v < NC; v++)
          acc[r][v] = T::dp(acc[r][v], broadcast_unit(pr + u * T::E), andi(loadi(value + u * width + v * VL), high));
        u++;
      }
      for (; u < full; u++)
        for (int v = 0; v < NC; v++)
          acc[r][v] = T::dp(acc[r][v], broadcast_unit(pr + u * T::E), loadi(value + u * width + v * VL));
      if (tokens % T::E)
        for (int v = 0; v < NC; v++)
          acc[r][v] =
              T::dp(acc[r][v], broadcast_unit(pr + full * T::E), andi(loadi(value + full * width + v * VL), low));
    }
  };
  for (int i = 0; i < lead; i++) row_by_row(i, std::true_type());  // where windows begin
  for (int i = lead; i < common; i++) {
    const uint32_t* value = g.values[i] + column;
    const typename T::type* pr = p + i * GROUP;
    const int full = g.tokens[i] / T::E;
    for (int u = 0; u < full; u++) {
      vi b[NC];
#pragma GCC unroll 16
      for (int v = 0; v < NC; v++) b[v] = loadi(value + u * width + v * VL);
#pragma GCC unroll 16
      for (int r = 0; r < MR; r++) {
        const vi a = broadcast_unit(pr + r * TILE_LANES + u * T::E);
#pragma GCC unroll 16
        for (int v = 0; v < NC; v++) acc[r][v] = T::dp(acc[r][v], a, b[v]);
      }
    }
    if (g.tokens[i] % T::E) {
      // Half a unit: the other token was never written for this sequence, but by an earlier owner of the block.
#pragma GCC unroll 16
      for (int v = 0; v < NC; v++) {
        const vi b = andi(loadi(value + full * width + v * VL), low);
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) acc[r][v] = T::dp(acc[r][v], broadcast_unit(pr + r * TILE_LANES + full * T::E), b);
      }
    }
  }
  for (int i = common; i < g.count; i++) row_by_row(i, std::false_type());  // the diagonal
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 16
    for (int v = 0; v < NC; v++) {
      float* to = out + r * width + column + v * VL;
      storef(to, keep ? fma(loadf(to), set1(keep[r]), mul(acc[r][v], set1(take[r]))) : acc[r][v]);
    }
}

// The query rows that a thread has in work, against one tile after the other.
template <class T>
class FloatTiles {
 public:
  using Element = typename T::type;
  static constexpr int ROWS = nova::ROWS;

  void fit(size_t rows, const CacheDesc& cache) {
    units_ = cache.key_units();
    if (query_.size() < rows * units_) query_.resize(rows * units_);
  }

  // Takes query [head_dim] as row r.
  void load(int r, const Element* query, long head_dim) {
    Element* to = (Element*)&query_[r * units_];
    std::memcpy(to, query, head_dim * sizeof(Element));
    if (head_dim % T::E) to[head_dim] = 0;
  }

  // Scores of MR rows from r on against NG groups from i on.
  template <int MR, int NG>
  void score(const TileGroups& g, int i, int r) {
    score_tile<T, MR, NG>(&query_[r * units_], units_, g.keys + i, units_, &scores_[i * GROUP]);
  }

  // Turns row j of the scores into probabilities up to a common factor, 2^(score * factor - max), for the tokens from
  // position `begin` to before `seen`, which it sees.
  __attribute__((noinline)) Softened soften(const TileGroups& g, int j, int begin, int seen, float factor) {
    const vf minus_inf = set1(NEG_INF), scale = set1(factor);
    float* scores = &scores_[j * TILE_LANES];
    Element* p = &p_[j * TILE_LANES];
    int lead = 0;  // groups that begin before its window
    while (lead < g.count && g.position[lead] < begin) lead++;
    int whole = lead;  // behind them: up to here groups that this row sees entirely
    while (whole < g.count && g.tokens[whole] == GROUP && g.position[whole] + GROUP <= seen) whole++;
    // Vector v of group i where the row sees it, `other` elsewhere.
    auto visible = [&](int i, int v, vf x, vf other, auto leads) {
      x = select(first_lanes(std::min(g.tokens[i], seen - g.position[i]) - v * VL), x, other);
      return leads ? select(first_lanes(begin - g.position[i] - v * VL), other, x) : x;
    };

    vf most = minus_inf;
    auto take_maximum = [&](int i, auto leads) {
      for (int v = 0; v < GROUP_VECTORS; v++)
        most = vmax(visible(i, v, loadf(scores + i * GROUP + v * VL), minus_inf, leads), most);
    };
    for (int i = 0; i < lead; i++) take_maximum(i, std::true_type());
    for (int v = lead * GROUP_VECTORS; v < whole * GROUP_VECTORS; v++) most = vmax(loadf(scores + v * VL), most);
    for (int i = whole; i < g.count; i++) take_maximum(i, std::false_type());
    const float max = hmax(most) * factor;
    const vf minus_max = set1(-max);
    vf sum = zero();
    auto soften_group = [&](int i, auto leads) {
      for (int v = 0; v < GROUP_VECTORS; v++) {
        const vf e = exp2v<T::E == 2>(fma(loadf(scores + i * GROUP + v * VL), scale, minus_max));
        const vf kept = visible(i, v, e, zero(), leads);
        sum = add(sum, kept);
        T::store(p + i * GROUP + v * VL, kept);
      }
    };
    for (int i = 0; i < lead; i++) soften_group(i, std::true_type());
    for (int v = lead * GROUP_VECTORS; v < whole * GROUP_VECTORS; v++) {
      const vf e = exp2v<T::E == 2>(fma(loadf(scores + v * VL), scale, minus_max));
      sum = add(sum, e);
      T::store(p + v * VL, e);
    }
    for (int i = whole; i < g.count; i++) soften_group(i, std::false_type());
    return {max, hsum(sum)};
  }

  // The values weighted by MR rows of probabilities, in NC vectors of columns: `value_tile` says how they are merged.
  template <int MR, int NC>
  void weigh(const TileGroups& g, long column, long width, float* out, const float* keep, const float* take,
             const int* begin, const int* seen) {
    value_tile<T, MR, NC>(p_.data(), g, column, width, out, keep, take, begin, seen);
  }

 private:
  long units_ = 0;
  std::vector<uint32_t> query_;  // [rows][units_]
  std::vector<float> scores_ = std::vector<float>(ROWS * TILE_LANES);
  std::vector<Element> p_ = std::vector<Element>(ROWS * TILE_LANES);
};

}  // namespace nova
