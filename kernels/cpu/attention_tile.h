// What the kernels of a KV tile share (attention_float.h, attention_int8.h): where its groups lie, and how query rows
// are cut into register tiles.
#pragma once

#include <algorithm>
#include <type_traits>

#include "aligned.h"
#include "kv_cache.h"

namespace nova {

constexpr int TILE_GROUPS = 16;  // groups of one softmax tile, counted from the start of the sequence
constexpr int TILE_LANES = TILE_GROUPS * GROUP;
constexpr int VECTORS = REGISTERS > 16 ? 4 : 2;  // of a register tile
constexpr int ROWS = ACCUMULATORS / VECTORS;     // rows of one
constexpr int GROUP_VECTORS = GROUP / VL;        // vectors that hold a group's 16 lanes
constexpr int WIDE = VECTORS / GROUP_VECTORS;    // groups of a register tile
constexpr float NEG_INF = -std::numeric_limits<float>::infinity();

// Groups and tiles that hold the first `tokens` tokens of a sequence.
inline long groups_of(const CacheDesc& cache, long tokens) {
  return tokens / cache.block_size * cache.groups_per_block() + ceil_div(tokens % cache.block_size, GROUP);
}
inline long tiles_of(const CacheDesc& cache, long tokens) { return ceil_div(groups_of(cache, tokens), TILE_GROUPS); }

// The tile that holds this token.
inline long tile_at(const CacheDesc& cache, long position) {
  return (position / cache.block_size * cache.groups_per_block() + position % cache.block_size / GROUP) / TILE_GROUPS;
}

// A tile's result for some rows in AttentionPlan::partials: max [rows], sum [rows], accumulator [rows][width].
inline long partial_floats(long rows, long width) { return rows * (2 + width); }

// The groups of one KV tile: where they lie, which positions they hold.
struct TileGroups {
  const uint32_t* keys[TILE_GROUPS];
  const uint32_t* values[TILE_GROUPS];
  int position[TILE_GROUPS];  // of the first token
  int tokens[TILE_GROUPS];    // 1..16
  int count = 0;
};

inline void find_groups(const CacheDesc& cache, const uint32_t* layer, const int32_t* table, int head, long tile,
                        long limit, TileGroups& g) {
  const long per_block = cache.groups_per_block();
  g.count = 0;
  for (long i = tile * TILE_GROUPS; i < (tile + 1) * TILE_GROUPS; i++) {
    const long block = i / per_block, in_block = i % per_block;
    const long position = block * cache.block_size + in_block * GROUP;
    if (position >= limit) break;
    const uint32_t* base = layer + table[block] * cache.block_words() + head * cache.head_words();
    g.keys[g.count] = base + in_block * cache.key_group();
    g.values[g.count] = base + per_block * cache.key_group() + in_block * cache.value_group();
    g.position[g.count] = (int)position;
    g.tokens[g.count] = (int)std::min({(long)GROUP, cache.block_size - in_block * GROUP, limit - position});
    g.count++;
  }
}

inline void prefetch(const uint32_t* from, long words) {
  for (long i = 0; i < words; i += 16) prefetch(from + i);
}

// Calls f<MR>(first row) over `rows` rows in register tiles of nearly equal height, at most MOST.
template <int MOST, class F>
void over_rows(int rows, F&& f) {
  const int tiles = (int)ceil_div(rows, MOST);
  for (int t = 0; t < tiles; t++) {
    const int a = rows * t / tiles, b = rows * (t + 1) / tiles;
    switch (b - a) {
      case 1: f(std::integral_constant<int, 1>(), a); break;
      case 2:
        if constexpr (MOST > 1) f(std::integral_constant<int, 2>(), a);
        break;
      case 3:
        if constexpr (MOST > 1) f(std::integral_constant<int, 3>(), a);
        break;
      case 4:
        if constexpr (MOST > 3) f(std::integral_constant<int, 4>(), a);
        break;
      case 5:
        if constexpr (MOST > 3) f(std::integral_constant<int, 5>(), a);
        break;
      case 6:
        if constexpr (MOST > 3) f(std::integral_constant<int, 6>(), a);
        break;
    }
  }
}

// What the tiles that vectors compute have in common: their number of rows is a type's.
template <int ROWS_>
struct OnVectors {
  static constexpr int ROWS = ROWS_;
  struct Unit {
    void begin(int) {}
  };
  template <class F>
  static void over_rows(int rows, F&& f) {
    nova::over_rows<ROWS>(rows, f);
  }
};

// What the rows of a register tile see of a KV tile: row r the tokens from position begin[r] to before seen[r]. Both
// ascend with r, unless all rows see the whole tile (those of several sequences, that share it).
struct Sight {
  const TileGroups& g;
  const int *begin, *seen;
  int count;     // groups before the first one that no row sees any more
  int lead = 0;  // of them, those in which a window may begin
  int common;    // behind those and before this one: groups that all rows see as far as they are filled

  Sight(const TileGroups& g, const int* begin, const int* seen, int rows)
      : g(g), begin(begin), seen(seen), count(g.count) {
    while (count > 0 && g.position[count - 1] >= seen[rows - 1]) count--;
    while (lead < count && g.position[lead] < begin[rows - 1]) lead++;
    common = count;
    while (common > lead && g.position[common - 1] + g.tokens[common - 1] > seen[0]) common--;
  }

  // No row sees any of it.
  bool is_empty() const { return count == 0 || g.position[count - 1] + g.tokens[count - 1] <= begin[0]; }

  // Row r sees the lanes of group i from the one to before the other; none, when that is not more.
  int from(int r, int i) const { return std::max(0, begin[r] - g.position[i]); }
  int to(int r, int i) const { return std::min(g.tokens[i], seen[r] - g.position[i]); }

  // Calls f(group, cut) for each group; where `cut` is false, all rows see all of its 16 lanes.
  template <class F>
  __attribute__((always_inline)) void over_groups(F&& f) const {
    const int count = this->count, lead = this->lead, common = this->common;  // f stores, which might change them
    for (int i = 0; i < count; i++)
      if (lead <= i && i < common && g.tokens[i] == GROUP)
        f(i, std::false_type());
      else
        f(i, std::true_type());
  }

  // Vector v of group i where row r sees it, `other` elsewhere.
  template <bool CUT>
  vf cut(std::bool_constant<CUT>, int r, int i, int v, vf x, vf other) const {
    if (!CUT) return x;
    x = select(first_lanes(to(r, i) - v * VL), x, other);
    return select(first_lanes(from(r, i) - v * VL), other, x);
  }
};

}  // namespace nova
