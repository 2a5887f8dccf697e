// Causal attention over a paged KV cache.
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
#include "attention_float.h"
#include "attention_int8.h"

namespace nova {
namespace {

constexpr int ROWS_TARGET = 48;  // query rows computed over one reading of the context

// One thread's working memory for a group of query rows.
template <class Tiles>
struct Scratch {
  Tiles tiles;
  std::vector<float> acc;                 // [rows][width]
  std::vector<float> max, sum;            // [rows], merged so far
  std::vector<float> tile_max, tile_sum;  // [rows]
  std::vector<float> keep, take;          // [rows]

  // May run out of memory half way, so each is asked, and none shrinks.
  void fit(size_t rows, const CacheDesc& cache) {
    const size_t width = cache.value_width();
    tiles.fit(rows, cache);
    if (acc.size() < rows * width) acc.resize(rows * width);
    for (auto* v : {&max, &sum, &tile_max, &tile_sum, &keep, &take})
      if (v->size() < rows) v->resize(rows);
  }
};

// A tile's result in AttentionPlan::partials: max [rows], sum [rows], accumulator [rows][width].
inline long partial_floats(long rows, long width) { return rows * (2 + width); }

template <class T, class Tiles>
struct Attention {
  using E = typename T::type;
  const CacheDesc& cache;
  const Batch& batch;
  AttentionPlan& plan;
  const AttentionCall& call;
  Scratch<Tiles>& s;
  const int ratio = cache.num_heads / cache.num_kv_heads;
  const long width = cache.value_width();
  const uint32_t* layer = cache.layer(call.layer);

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
      over_rows<Tiles::ROWS>(rows, [&](auto mr, int r) { rows_of_tile<mr>(tiles[i], next, r, position0, rows, out); });
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
      s.tiles.load(r, from, cache.head_dim);
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
      const Softened softened = s.tiles.soften(g, j, begin[j], seen[j], call.scale * LOG2E);
      s.tile_max[r + j] = softened.max, s.tile_sum[r + j] = softened.sum;
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
    int i = 0;
    for (; i + WIDE <= g.count; i += WIDE) {
      if (stream) {
        for (int j = i + WIDE; j < std::min(g.count, i + 2 * WIDE); j++) prefetch(g.keys[j], cache.key_group());
        for (int j = i; j < i + WIDE; j++) prefetch(g.values[j], cache.value_group());
      }
      s.tiles.template score<MR, WIDE>(g, i, r);
    }
    for (; i < g.count; i++) s.tiles.template score<MR, 1>(g, i, r);
  }

  template <int MR>
  void weigh(const TileGroups& g, float* out, const float* keep, const float* take, const int* begin, const int* seen) {
    long column = 0;
    for (; column + VECTORS * VL <= width; column += VECTORS * VL)
      s.tiles.template weigh<MR, VECTORS>(g, column, width, out, keep, take, begin, seen);
    for (; column < width; column += VL) s.tiles.template weigh<MR, 1>(g, column, width, out, keep, take, begin, seen);
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

template <class T, class Tiles>
void run(Team& team, const CacheDesc& cache, const Batch& batch, AttentionPlan& plan, const AttentionCall& call) {
  team.loop((long)plan.items.size(), [&](long i) {
    static thread_local Scratch<Tiles> scratch;
    scratch.fit(plan.rows_max, cache);
    Attention<T, Tiles>{cache, batch, plan, call, scratch}.item(plan.items[i]);
  });
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
      const int first_tile = (int)tile_at(cache, begin), tiles = (int)tiles_of(cache, before + last) - first_tile;
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
  if (cache.is_int8())
    (cache.dtype == 0 ? run<Bf16, Int8Tiles<Bf16>> : run<Fp32, Int8Tiles<Fp32>>)(team, cache, batch, plan, call);
  else
    (cache.dtype == 0 ? run<Bf16, FloatTiles<Bf16>> : run<Fp32, FloatTiles<Fp32>>)(team, cache, batch, plan, call);
}

}  // namespace nova

using namespace nova;

extern "C" {

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
