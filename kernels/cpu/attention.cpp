// Causal attention over a paged KV cache.
//
// Layout, by layer, block and kv head: groups of 16 tokens, all keys of the block, then all values.
//   keys   [unit of head_dim][16 tokens]: a vector is one unit of 16 tokens; a query's unit is broadcast against it
//   values [unit of tokens][head_dim]:    a vector is one unit (bf16: two tokens) of 16 columns; a unit of
//                                         probabilities is broadcast against it
// so that both products are the linear's loop: load, broadcast, `dp`, and no horizontal step.
//
// The query heads that share a kv head are rows of one tile, together with neighbouring query tokens: keys and values
// are read once for all of them.
//
// Row invariance: each row's context is cut at fixed multiples of TILE_GROUPS groups. A tile gives a maximum, a sum
// and an accumulator by itself; tiles are merged in ascending order. Which rows are computed beside and which thread
// takes which tile do not change a row's chain of operations: what lies behind its position, or before its window, is
// left out, and merging an empty tile changes nothing.
#include "attention.h"

#include <algorithm>

#include "abi.h"

namespace nova {
namespace {

constexpr int ROWS = VL == 16 ? 6 : 3;         // rows of a register tile
constexpr int VECTORS = 4;                     // vectors of a register tile
constexpr int GROUP_VECTORS = GROUP / VL;      // vectors that hold a group's 16 lanes
constexpr int WIDE = VECTORS / GROUP_VECTORS;  // groups of a register tile
constexpr int ROWS_TARGET = 48;                // query rows computed over one reading of the context
constexpr float NEG_INF = -std::numeric_limits<float>::infinity();

// The groups of one KV tile: where they lie, which positions they hold.
struct TileGroups {
  const uint32_t* keys[TILE_GROUPS];
  const uint32_t* values[TILE_GROUPS];
  int position[TILE_GROUPS];  // of the first token
  int tokens[TILE_GROUPS];    // 1..16
  int count = 0;
};

void find_groups(const CacheDesc& cache, const uint32_t* layer, const int32_t* table, int head, long tile, long limit,
                 TileGroups& g) {
  const long per_block = cache.groups_per_block();
  g.count = 0;
  for (long i = tile * TILE_GROUPS; i < (tile + 1) * TILE_GROUPS; i++) {
    const long block = i / per_block, in_block = i % per_block;
    const long position = block * cache.block_size + in_block * GROUP;
    if (position >= limit) break;
    const uint32_t* base = layer + table[block] * cache.block_units() + head * cache.head_units();
    g.keys[g.count] = base + in_block * cache.key_group();
    g.values[g.count] = base + per_block * cache.key_group() + in_block * cache.value_group();
    g.position[g.count] = (int)position;
    g.tokens[g.count] = (int)std::min({(long)GROUP, cache.block_size - in_block * GROUP, limit - position});
    g.count++;
  }
}

inline void prefetch(const uint32_t* from, long units) {
  for (long i = 0; i < units; i += 16) _mm_prefetch((const char*)(from + i), _MM_HINT_T0);
}

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

// Calls f<MR>(first row) over `rows` rows in register tiles of nearly equal height.
template <class F>
void over_rows(int rows, F&& f) {
  const int tiles = (int)ceil_div(rows, ROWS);
  for (int t = 0; t < tiles; t++) {
    const int a = rows * t / tiles, b = rows * (t + 1) / tiles;
    switch (b - a) {
      case 1: f(std::integral_constant<int, 1>(), a); break;
      case 2: f(std::integral_constant<int, 2>(), a); break;
      case 3: f(std::integral_constant<int, 3>(), a); break;
      case 4:
        if constexpr (ROWS > 3) f(std::integral_constant<int, 4>(), a);
        break;
      case 5:
        if constexpr (ROWS > 3) f(std::integral_constant<int, 5>(), a);
        break;
      case 6:
        if constexpr (ROWS > 3) f(std::integral_constant<int, 6>(), a);
        break;
    }
  }
}

// One thread's working memory for a group of query rows.
template <class T>
struct Scratch {
  std::vector<uint32_t> query;  // [rows][key_units]
  std::vector<float> scores = std::vector<float>(ROWS * TILE_LANES);
  std::vector<typename T::type> p = std::vector<typename T::type>(ROWS * TILE_LANES);
  std::vector<float> acc;                 // [rows][width]
  std::vector<float> max, sum;            // [rows], merged so far
  std::vector<float> tile_max, tile_sum;  // [rows]
  std::vector<float> keep, take;          // [rows]

  // May run out of memory half way, so each is asked, and none shrinks.
  void fit(size_t rows, size_t key_units, size_t width) {
    if (query.size() < rows * key_units) query.resize(rows * key_units);
    if (acc.size() < rows * width) acc.resize(rows * width);
    for (auto* v : {&max, &sum, &tile_max, &tile_sum, &keep, &take})
      if (v->size() < rows) v->resize(rows);
  }
};

// A tile's result in AttentionPlan::partials: max [rows], sum [rows], accumulator [rows][width].
inline long partial_floats(long rows, long width) { return rows * (2 + width); }

template <class T>
struct Attention {
  using E = typename T::type;
  const CacheDesc& cache;
  const Batch& batch;
  AttentionPlan& plan;
  const AttentionCall& call;
  Scratch<T>& s;
  const int ratio = cache.num_heads / cache.num_kv_heads;
  const long key_units = cache.key_units(), width = cache.value_width();
  const uint32_t* layer = (const uint32_t*)cache.data + call.layer * cache.layer_units();

  void item(const AttentionPlan::Item& item) {
    const AttentionPlan::Group& group = plan.groups[item.group];
    const int rows = group.count * ratio;
    const int queries = batch.query_start[group.seq + 1] - batch.query_start[group.seq];
    const int position0 = batch.context_lens[group.seq] - queries + group.first;  // of the first query token
    const int32_t* table = batch.block_tables + group.seq * batch.table_stride;
    load_queries(group);
    float* partial = group.parts > 1 ? &plan.partials[group.partial] : nullptr;
    if (!partial) std::fill_n(s.max.begin(), rows, NEG_INF), std::fill_n(s.sum.begin(), rows, 0.0f);
    if (!partial) std::fill_n(s.acc.begin(), rows * width, 0.0f);

    TileGroups tiles[2];
    find_groups(cache, layer, table, group.head, item.first_tile, position0 + group.count, tiles[0]);
    for (int tile = item.first_tile, i = 0; tile < item.last_tile; tile++, i ^= 1) {
      TileGroups& next = tiles[i ^ 1];
      next.count = 0;
      if (tile + 1 < item.last_tile)
        find_groups(cache, layer, table, group.head, tile + 1, position0 + group.count, next);
      float* out = partial ? partial + (tile - group.first_tile) * partial_floats(rows, width) : nullptr;
      over_rows(rows, [&](auto mr, int r) { rows_of_tile<mr>(tiles[i], next, r, position0, rows, out); });
    }
    if (!partial) {
      finish(group);
    } else if (plan.pending[item.group].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      plan.pending[item.group].store(group.parts, std::memory_order_relaxed);  // for the next layer
      merge_partials(group, partial);
      finish(group);
    }
  }

  void load_queries(const AttentionPlan::Group& group) {
    for (int r = 0; r < group.count * ratio; r++) {
      const long token = batch.query_start[group.seq] + group.first + r / ratio;
      const E* from =
          (const E*)call.query + token * call.query_stride + (group.head * ratio + r % ratio) * (long)cache.head_dim;
      E* to = (E*)&s.query[r * key_units];
      std::memcpy(to, from, cache.head_dim * sizeof(E));
      if (cache.head_dim % T::E) to[cache.head_dim] = 0;
    }
  }

  // MR rows against one tile, into `partial` or merged into the scratch.
  template <int MR>
  void rows_of_tile(const TileGroups& g, const TileGroups& next, int r, int position0, int rows, float* partial) {
    score<MR>(g, r, r == 0 && rows <= 2 * ROWS);
    int begin[MR], seen[MR];
    for (int j = 0; j < MR; j++) {
      seen[j] = position0 + (r + j) / ratio + 1;
      begin[j] = plan.window ? (int)std::max<int64_t>(0, seen[j] - plan.window) : 0;
      soften(g, j, r + j, begin[j], seen[j]);
    }
    if (partial) {
      std::copy_n(&s.tile_max[r], MR, partial + r);
      std::copy_n(&s.tile_sum[r], MR, partial + rows + r);
      weigh<MR>(g, partial + 2 * rows + r * width, nullptr, nullptr, begin, seen);
    } else {
      merge_sums(r, r + MR);
      weigh<MR>(g, &s.acc[r * width], &s.keep[r], &s.take[r], begin, seen);
    }
    if (r == 0 && rows <= 2 * ROWS)
      for (int i = 0; i < std::min(next.count, WIDE); i++) prefetch(next.keys[i], cache.key_group());
  }

  // `stream`: few rows, so the context is waited for; ask for what comes next while this is computed.
  template <int MR>
  void score(const TileGroups& g, int r, bool stream) {
    const uint32_t* q = &s.query[r * key_units];
    int i = 0;
    for (; i + WIDE <= g.count; i += WIDE) {
      if (stream) {
        for (int j = i + WIDE; j < std::min(g.count, i + 2 * WIDE); j++) prefetch(g.keys[j], cache.key_group());
        for (int j = i; j < i + WIDE; j++) prefetch(g.values[j], cache.value_group());
      }
      score_tile<T, MR, WIDE>(q, key_units, g.keys + i, key_units, &s.scores[i * GROUP]);
    }
    for (; i < g.count; i++) score_tile<T, MR, 1>(q, key_units, g.keys + i, key_units, &s.scores[i * GROUP]);
  }

  // Turns row j of the scores (row r of the group) into probabilities up to a common factor: 2^(score - tile_max).
  // It sees the tokens from position `begin` to before `seen`.
  __attribute__((noinline)) void soften(const TileGroups& g, int j, int r, int begin, int seen) {
    const vf minus_inf = set1(NEG_INF), scale = set1(call.scale * LOG2E);
    float* scores = &s.scores[j * TILE_LANES];
    E* p = &s.p[j * TILE_LANES];
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
    const float max = hmax(most) * (call.scale * LOG2E);
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
    s.tile_max[r] = max;
    s.tile_sum[r] = hsum(sum);
  }

  template <int MR>
  void weigh(const TileGroups& g, float* out, const float* keep, const float* take, const int* begin, const int* seen) {
    long column = 0;
    for (; column + VECTORS * VL <= width; column += VECTORS * VL)
      value_tile<T, MR, VECTORS>(s.p.data(), g, column, width, out, keep, take, begin, seen);
    for (; column < width; column += VL)
      value_tile<T, MR, 1>(s.p.data(), g, column, width, out, keep, take, begin, seen);
  }

  // Takes the tile's maxima and sums in, and leaves the factors of the old and the new accumulators.
  __attribute__((noinline)) void merge_sums(int first, int last) {
    for (int r = first; r < last; r++) {
      const float max = std::max(s.max[r], s.tile_max[r]);
      const float from = max == NEG_INF ? 0.0f : max;  // nothing seen so far: its window begins behind this tile
      alignas(64) float power[VL] = {s.max[r] - from, s.tile_max[r] - from};
      storef(power, exp2v(loadf(power)));
      s.keep[r] = power[0], s.take[r] = power[1];
      s.max[r] = max;
      s.sum[r] = std::fma(s.sum[r], power[0], s.tile_sum[r] * power[1]);
    }
  }

  void merge_partials(const AttentionPlan::Group& group, const float* partial) {
    const int rows = group.count * ratio;
    std::fill_n(s.max.begin(), rows, NEG_INF), std::fill_n(s.sum.begin(), rows, 0.0f);
    std::fill_n(s.acc.begin(), rows * width, 0.0f);
    for (int tile = 0; tile < group.tiles; tile++, partial += partial_floats(rows, width)) {
      std::copy_n(partial, rows, s.tile_max.begin());
      std::copy_n(partial + rows, rows, s.tile_sum.begin());
      merge_sums(0, rows);
      for (int r = 0; r < rows; r++)
        for (long c = 0; c < width; c += VL) {
          float* to = &s.acc[r * width + c];
          const vf tile_acc = loadf(partial + 2 * rows + r * width + c);
          storef(to, fma(loadf(to), set1(s.keep[r]), mul(tile_acc, set1(s.take[r]))));
        }
    }
  }

  void finish(const AttentionPlan::Group& group) {
    for (int r = 0; r < group.count * ratio; r++) {
      const long token = batch.query_start[group.seq] + group.first + r / ratio;
      E* out = (E*)call.out + (token * cache.num_heads + group.head * ratio + r % ratio) * cache.head_dim;
      const vf sum = set1(s.sum[r]);
      for (long c = 0; c < cache.head_dim; c += VL)
        store_first<T>(out + c, div(loadf(&s.acc[r * width + c]), sum), std::min<long>(VL, cache.head_dim - c));
    }
  }
};

template <class T>
void run(Team& team, const CacheDesc& cache, const Batch& batch, AttentionPlan& plan, const AttentionCall& call) {
  team.loop((long)plan.items.size(), [&](long i) {
    static thread_local Scratch<T> scratch;
    scratch.fit(plan.rows_max, cache.key_units(), cache.value_width());
    Attention<T>{cache, batch, plan, call, scratch}.item(plan.items[i]);
  });
}

template <class T>
void write(const CacheDesc& cache, int layer, int64_t slot, const typename T::type* key,
           const typename T::type* value) {
  if (slot < 0) return;
  constexpr int E = T::E;
  const long block = slot / cache.block_size, offset = slot % cache.block_size;
  const long in_block = offset / GROUP, lane = offset % GROUP, width = cache.value_width();
  for (int head = 0; head < cache.num_kv_heads; head++) {
    uint32_t* base =
        (uint32_t*)cache.data + layer * cache.layer_units() + block * cache.block_units() + head * cache.head_units();
    typename T::type* k = (typename T::type*)(base + in_block * cache.key_group());
    typename T::type* v =
        (typename T::type*)(base + cache.groups_per_block() * cache.key_group() + in_block * cache.value_group());
    for (int d = 0; d < cache.head_dim; d++) {
      k[(d / E * GROUP + lane) * E + d % E] = key[head * cache.head_dim + d];
      v[(lane / E * width + d) * E + lane % E] = value[head * cache.head_dim + d];
    }
  }
}

}  // namespace

AttentionPlan::AttentionPlan(const CacheDesc& cache, const Batch& batch, int threads, int64_t window) : window(window) {
  const int ratio = cache.num_heads / cache.num_kv_heads;
  const int tokens_max = std::max(1, ROWS_TARGET / ratio);
  double total = 0;
  for (int seq = 0; seq < batch.num_seqs; seq++) {
    const int queries = batch.query_start[seq + 1] - batch.query_start[seq];
    const int before = batch.context_lens[seq] - queries;
    const int chunks = (int)ceil_div(queries, tokens_max);
    for (int c = 0; c < chunks; c++) {
      const int first = (int)((long)queries * c / chunks), last = (int)((long)queries * (c + 1) / chunks);
      const int64_t begin = window ? std::max<int64_t>(0, before + first + 1 - window) : 0;
      const int first_tile = (int)cache.tile_at(begin), tiles = (int)cache.tiles_of(before + last) - first_tile;
      rows_max = std::max(rows_max, (last - first) * ratio);
      for (int head = 0; head < cache.num_kv_heads; head++) {
        groups.push_back({seq, head, first, last - first, first_tile, tiles, 1, 0});
        total += (double)tiles * (last - first);
      }
    }
  }
  // A group is divided along its context when it would be more than a quarter of a thread's share.
  const double share = total / (4.0 * threads);
  std::vector<std::pair<double, Item>> order;
  long floats = 0;
  for (int i = 0; i < (int)groups.size(); i++) {
    Group& group = groups[i];
    if (threads > 1)
      group.parts = (int)std::min<double>(group.tiles, std::max(1.0, std::ceil(group.tiles * group.count / share)));
    if (group.parts > 1) {
      group.partial = floats;
      floats += group.tiles * partial_floats(group.count * ratio, cache.value_width());
    }
    for (int part = 0; part < group.parts; part++) {
      const int first = group.tiles * part / group.parts, last = group.tiles * (part + 1) / group.parts;
      order.push_back({-(double)(last - first) * group.count, {i, group.first_tile + first, group.first_tile + last}});
    }
  }
  std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& entry : order) items.push_back(entry.second);
  partials.resize(floats);
  pending.reset(new std::atomic<int>[groups.size()]);
  for (size_t i = 0; i < groups.size(); i++) pending[i].store(groups[i].parts, std::memory_order_relaxed);
}

void attend(Team& team, const CacheDesc& cache, const Batch& batch, AttentionPlan& plan, const AttentionCall& call) {
  if (cache.dtype == 0)
    run<Bf16>(team, cache, batch, plan, call);
  else
    run<Fp32>(team, cache, batch, plan, call);
}

void write_token(const CacheDesc& cache, int layer, int64_t slot, const void* key, const void* value) {
  if (cache.dtype == 0)
    write<Bf16>(cache, layer, slot, (const uint16_t*)key, (const uint16_t*)value);
  else
    write<Fp32>(cache, layer, slot, (const float*)key, (const float*)value);
}

}  // namespace nova

using namespace nova;

extern "C" {

int64_t nova_cache_block_bytes(const CacheDesc* cache) { return cache->block_units() * 4 * cache->num_layers; }

int nova_cache_write(const CacheDesc* cache, int layer, const void* key, int64_t key_stride, const void* value,
                     int64_t value_stride, const int64_t* slots, int64_t count, int threads) {
  return guarded([&] {
    const long element = cache->dtype == 0 ? 2 : 4;
    Team(threads).rows(count, [&](long t) {
      write_token(*cache, layer, slots[t], (const char*)key + t * key_stride * element,
                  (const char*)value + t * value_stride * element);
    });
  });
}

int nova_attend(const CacheDesc* cache, int layer, const void* query, int64_t query_stride, const int32_t* block_tables,
                int64_t table_stride, const int32_t* query_start, const int32_t* context_lens, int64_t num_seqs,
                float scale, int64_t window, void* out, int threads) {
  return guarded([&] {
    const Batch batch{block_tables, table_stride, query_start, context_lens, num_seqs};
    Team team(threads);
    AttentionPlan plan(*cache, batch, team.size(), window);
    attend(team, *cache, batch, plan, {layer, query, query_stride, out, scale});
  });
}

}  // extern "C"
