// Causal attention over a paged KV cache.
//
// The query heads that share a kv head are rows of one tile, together with neighbouring query tokens: keys and values
// are read once for all of them.
//
// Row invariance: each row's context is cut at fixed multiples of TILE_GROUPS groups. A tile gives a maximum, a sum
// and an accumulator by itself; tiles are merged in ascending order. Which rows are computed beside and which thread
// takes which tile do not change a row's chain of operations: what lies behind its position, or before its window, is
// left out, and merging an empty tile changes nothing. So tiles that sequences share can be read for all their rows at
// once (attention_plan.cpp), and a row go on from there by itself.
#include "attention.h"

#include <algorithm>

#include "abi.h"
#include "attention_float.h"
#include "attention_int8.h"
#include "attention_matrix.h"

namespace nova {
namespace {

// One thread's working memory for a group of query rows.
template <class Tiles>
struct Scratch {
  Tiles tiles;
  AlignedVector<float> acc;                 // [rows][width]
  AlignedVector<float> max, sum;            // [rows], merged so far
  AlignedVector<float> tile_max, tile_sum;  // [rows]
  AlignedVector<float> keep, take;          // [rows]
  AlignedVector<int> window_begin, seen;    // [rows]: from where to before where each of them sees

  // May run out of memory half way, so each is asked, and none shrinks.
  void fit(size_t rows, const CacheDesc& cache) {
    const size_t width = cache.value_width();
    tiles.fit(rows, cache);
    if (acc.size() < rows * width) acc.resize(rows * width);
    for (auto* v : {&max, &sum, &tile_max, &tile_sum, &keep, &take})
      if (v->size() < rows) v->resize(rows);
    for (auto* v : {&window_begin, &seen})
      if (v->size() < rows) v->resize(rows);
  }
};

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
  typename Tiles::Unit unit = {};

  void item(const AttentionPlan::Item& item) {
    const AttentionPlan::Group& group = plan.groups[item.group];
    const int rows = group.count * ratio;
    const int32_t* table = batch.block_tables + group.seq * batch.table_stride;
    load_queries(group);
    float* partial = group.parts > 1 ? &plan.partials[group.partial] : nullptr;
    if (!partial) begin(group);

    TileGroups tiles[2];
    find_groups(cache, layer, table, group.head, item.first_tile, group.limit, tiles[0]);
    for (int tile = item.first_tile, i = 0; tile < item.last_tile; tile++, i ^= 1) {
      TileGroups& next = tiles[i ^ 1];
      next.count = 0;
      if (tile + 1 < item.last_tile) find_groups(cache, layer, table, group.head, tile + 1, group.limit, next);
      float* out = partial ? partial + (tile - group.first_tile) * partial_floats(rows, width) : nullptr;
      Tiles::over_rows(rows, [&](auto some, int r) { rows_of_tile(group, tiles[i], next, r, some, out); });
    }
    if (!partial) {
      finish(group);
    } else if (plan.pending[item.group].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      plan.pending[item.group].store(group.parts, std::memory_order_relaxed);  // for the next layer
      merge_partials(group, partial);
      finish(group);
    }
  }

  // The query token of row r of a group, and its head.
  const AttentionPlan::QueryToken& token_of(const AttentionPlan::Group& group, int r) const {
    return plan.tokens[group.first + r / ratio];
  }
  int head_of(const AttentionPlan::Group& group, int r) const { return group.head * ratio + r % ratio; }

  void load_queries(const AttentionPlan::Group& group) {
    for (int r = 0; r < group.count * ratio; r++) {
      const AttentionPlan::QueryToken& token = token_of(group, r);
      const E* query = (const E*)call.query + token.index * call.query_stride;
      s.tiles.load(r, query + head_of(group, r) * (long)cache.head_dim, cache.head_dim);
      s.seen[r] = token.position + 1;
      s.window_begin[r] = plan.window ? (int)std::max<int64_t>(0, s.seen[r] - plan.window) : 0;
    }
  }

  // Where row r is when it comes from the group before, or goes to the next one.
  float* state_of(const AttentionPlan::Group& group, int r) const {
    const long row = (long)token_of(group, r).state * cache.num_heads + head_of(group, r);
    return &plan.states[row * partial_floats(1, width)];
  }

  // The rows' maxima, sums and accumulators before the first tile.
  void begin(const AttentionPlan::Group& group) {
    for (int r = 0; r < group.count * ratio; r++) {
      const float* state = group.goes_on ? state_of(group, r) : nullptr;
      s.max[r] = state ? state[0] : NEG_INF, s.sum[r] = state ? state[1] : 0.0f;
      if (state)
        std::copy_n(state + 2, width, &s.acc[r * width]);
      else
        std::fill_n(&s.acc[r * width], width, 0.0f);
    }
  }

  // `some` rows from r on against one tile, into `partial` or merged into the scratch.
  template <class Some>
  void rows_of_tile(const AttentionPlan::Group& group, const TileGroups& g, const TileGroups& next, int r, Some some,
                    float* partial) {
    const int rows = group.count * ratio;
    const Sight sight(g, &s.window_begin[r], &s.seen[r], some);
    if (!partial && sight.is_empty()) return;  // merging it would change nothing
    const bool stream = r == 0 && rows <= 2 * std::max(Tiles::ROWS, ROWS);
    unit.begin(some);
    score(g, sight.count, r, some, stream);
    if (partial) {
      s.tiles.soften(some, sight, call.scale * LOG2E, partial + r, partial + rows + r);
      weigh(some, sight, partial + 2 * rows + r * width, nullptr, nullptr);
    } else {
      s.tiles.soften(some, sight, call.scale * LOG2E, &s.tile_max[r], &s.tile_sum[r]);
      merge_sums(r, r + some);
      weigh(some, sight, &s.acc[r * width], &s.keep[r], &s.take[r]);
    }
    if (stream)
      for (int i = 0; i < std::min(next.count, WIDE); i++) prefetch(next.keys[i], cache.key_group());
  }

  // `stream`: few rows, so the context is waited for; ask for what comes next while this is computed.
  template <class Some>
  void score(const TileGroups& g, int count, int r, Some some, bool stream) {
    int i = 0;
    for (; i + WIDE <= count; i += WIDE) {
      if (stream) {
        for (int j = i + WIDE; j < std::min(g.count, i + 2 * WIDE); j++) prefetch(g.keys[j], cache.key_group());
        for (int j = i; j < i + WIDE; j++) prefetch(g.values[j], cache.value_group());
      }
      s.tiles.template score<WIDE>(some, g, i, r);
    }
    for (; i < count; i++) s.tiles.template score<1>(some, g, i, r);
  }

  template <class Some>
  void weigh(Some some, const Sight& sight, float* out, const float* keep, const float* take) {
    long column = 0;
    for (; column + VECTORS * VL <= width; column += VECTORS * VL)
      s.tiles.template weigh<VECTORS>(some, sight, column, width, out, keep, take);
    for (; column < width; column += VL) s.tiles.template weigh<1>(some, sight, column, width, out, keep, take);
  }

  // Takes the tile's maxima and sums in, and leaves the factors of the old and the new accumulators.
  __attribute__((noinline)) void merge_sums(int first, int last) {
    for (int r = first; r < last; r += VL) {
      const vm rows = first_lanes(last - r);
      const vf old = load_lanes(&s.max[r], rows), tile = load_lanes(&s.tile_max[r], rows);
      const vf max = vmax(tile, old);
      const vf from = select(eq(max, set1(NEG_INF)), zero(), max);  // nothing seen so far: its window begins behind it
      const vf keep = exp2v(sub(old, from)), take = exp2v(sub(tile, from));
      const vf sum = fma(load_lanes(&s.sum[r], rows), keep, mul(load_lanes(&s.tile_sum[r], rows), take));
      store_lanes(&s.max[r], rows, max), store_lanes(&s.sum[r], rows, sum);
      store_lanes(&s.keep[r], rows, keep), store_lanes(&s.take[r], rows, take);
    }
  }

  void merge_partials(const AttentionPlan::Group& group, const float* partial) {
    const int rows = group.count * ratio;
    begin(group);
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
      const float* acc = &s.acc[r * width];
      if (!group.is_last) {
        float* state = state_of(group, r);
        state[0] = s.max[r], state[1] = s.sum[r];
        std::copy_n(acc, width, state + 2);
        continue;
      }
      E* out = (E*)call.out + ((long)token_of(group, r).index * cache.num_heads + head_of(group, r)) * cache.head_dim;
      const vf sum = set1(s.sum[r]);
      for (long c = 0; c < cache.head_dim; c += VL)
        store_first<T>(out + c, div(loadf(acc + c), sum), std::min<long>(VL, cache.head_dim - c));
    }
  }
};

template <class T, class Tiles>
void run(Team& team, const CacheDesc& cache, const Batch& batch, AttentionPlan& plan, const AttentionCall& call) {
  long first = 0;
  for (const long end : plan.round_ends) {
    team.loop(end - first, [&](long i) {
      static thread_local Scratch<Tiles> scratch;
      scratch.fit(plan.rows_max, cache);
      Attention<T, Tiles>{cache, batch, plan, call, scratch}.item(plan.items[first + i]);
    });
    first = end;
  }
}

}  // namespace

void attend(Team& team, const CacheDesc& cache, const Batch& batch, AttentionPlan& plan, const AttentionCall& call) {
  const auto attend_with = [&] {
#if defined(NOVA_MATRIX)
    if (MatrixTiles::can(cache)) return run<Bf16, MatrixTiles>;
#endif
    if (cache.is_int8()) return cache.dtype == 0 ? run<Bf16, Int8Tiles<Bf16>> : run<Fp32, Int8Tiles<Fp32>>;
    return cache.dtype == 0 ? run<Bf16, FloatTiles<Bf16>> : run<Fp32, FloatTiles<Fp32>>;
  }();
  attend_with(team, cache, batch, plan, call);
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

// What a layer's attention of a step would read and take, on so many threads.
int nova_attend_plan(const CacheDesc* cache, const int32_t* block_tables, int64_t table_stride,
                     const int32_t* query_start, const int32_t* context_lens, int64_t num_seqs, int64_t window,
                     int threads, int64_t* tiles_read, int64_t* partials_bytes) {
  return guarded([&] {
    const Batch batch{block_tables, table_stride, query_start, context_lens, num_seqs};
    const AttentionPlan plan(*cache, batch, threads, window);
    *tiles_read = plan.tiles_read();
    *partials_bytes = plan.partials_bytes();
  });
}

}  // extern "C"
