// A KV tile of bf16 keys and values on the matrix unit (matrix.h), which reads them as they lie in the cache.
//
// A score is the unit's sum over head_dim; what a row makes of the values of a group of 16 tokens is two chains of
// eight, added to what was there. Where rows see different tokens of a group the same is computed row by row, to the
// same bits, so that what a row does not see is not multiplied: it may be infinite or NaN.
#pragma once

#include "attention_float.h"
#include "matrix.h"

#if defined(NOVA_MATRIX)

namespace nova {

// For so many query rows: 0 to 3 hold sums, 4 queries, 5 probabilities, 6 keys, 7 values.
struct AttentionShapes : TileShapes {
  explicit AttentionShapes(int count) {
    for (int tile : {0, 1, 2, 3, 4}) set(tile, count);
    set(5, count, GROUP * 2);
    set(6, TILE_ROWS);
    set(7, GROUP / 2);
  }
};

// The query rows that a thread has in work, against one tile after the other: up to 16 of them at once.
class MatrixTiles {
 public:
  using Element = uint16_t;
  using Unit = MatrixUnit<AttentionShapes>;
  static constexpr int ROWS = TILE_ROWS;

  static bool can(const CacheDesc& cache) {
    return cache.dtype == 0 && !cache.is_int8() && cache.head_dim % (TILE_BYTES / 2) == 0;
  }

  void fit(size_t rows, const CacheDesc& cache) {
    units_ = cache.key_units();
    if (query_.size() < rows * units_) query_.resize(rows * units_);
  }

  // Takes query [head_dim] as row r.
  void load(int r, const Element* query, long head_dim) {
    std::memcpy(&query_[r * units_], query, head_dim * sizeof(Element));
  }

  // Calls f(rows, first row) for as many at a time as the unit takes.
  template <class F>
  static void over_rows(int rows, F&& f) {
    for (int r = 0; r < rows; r += ROWS) f(std::min(ROWS, rows - r), r);
  }

  // Scores of the rows that the unit has the shapes of, from r on, against COUNT groups from i on.
  template <int COUNT>
  void score(int, const TileGroups& g, int i, int r) {
    constexpr long LINE = TILE_LANES * 4;
    const uint32_t* const* keys = g.keys + i;
    const char* query = (const char*)&query_[r * units_];
    char* to = (char*)&scores_[i * GROUP];
    tile_zero<0>();
    if constexpr (COUNT > 1) {
      tile_zero<1>();
      tile_zero<2>();
      tile_zero<3>();
    }
    for (long unit = 0; unit < units_; unit += TILE_ROWS) {
      tile_load<4>(query + unit * 4, units_ * 4);
      score_group<0>(keys[0] + unit * GROUP);
      if constexpr (COUNT > 1) {
        score_group<1>(keys[1] + unit * GROUP);
        score_group<2>(keys[2] + unit * GROUP);
        score_group<3>(keys[3] + unit * GROUP);
      }
    }
    tile_store<0>(to, LINE);
    if constexpr (COUNT > 1) {
      tile_store<1>(to + GROUP * 4, LINE);
      tile_store<2>(to + 2 * GROUP * 4, LINE);
      tile_store<3>(to + 3 * GROUP * 4, LINE);
    }
  }

  // Probabilities of `rows` rows, and their maxima and sums: `soften_tile`.
  void soften(int rows, const Sight& sight, float factor, float* max, float* sum) {
    nova::over_rows<nova::ROWS>(rows, [&](auto mr, int r) {
      const Sight part(sight.g, sight.begin + r, sight.seen + r, mr);
      soften_tile<Bf16, mr>(&scores_[r * TILE_LANES], part, factor, &p_[r * TILE_LANES], max + r, sum + r);
    });
  }

  // The values weighted by `rows` rows of probabilities, in COUNT vectors of columns: merged as `value_tile` says.
  template <int COUNT>
  void weigh(int rows, const Sight& sight, long column, long width, float* out, const float* keep, const float* take) {
    constexpr long LINE = COUNT * GROUP * 4;
    float* sums = sums_.data();
    std::memset(sums, 0, rows * LINE);
    for (int i = 0; i < sight.lead; i++) weigh_by_row<COUNT>(sight, i, rows, column, width, sums);
    if (sight.common > sight.lead) {
      load_sums<0, COUNT>(sums);
      for (int i = sight.lead; i < sight.common; i++) {
        const uint32_t* values = sight.g.values[i] + column;
        long stride = width * 4;
        if (sight.g.tokens[i] < GROUP) {
          values = without_rest<COUNT>(values, width, sight.g.tokens[i]);
          stride = LINE;
        }
        tile_load<5>((const char*)&p_[i * GROUP], TILE_LANES * 2);
        weigh_group<0, COUNT>((const char*)values, stride);
      }
      store_sums<0, COUNT>(sums);
    }
    for (int i = sight.common; i < sight.count; i++) weigh_by_row<COUNT>(sight, i, rows, column, width, sums);
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < COUNT; v++) {
        float* to = out + r * width + column + v * VL;
        const vf sum = loadf(sums + (r * COUNT + v) * VL);
        storef(to, keep ? fma(loadf(to), set1(keep[r]), mul(sum, set1(take[r]))) : sum);
      }
  }

 private:
  template <int SUM>
  static void score_group(const uint32_t* keys) {
    tile_load<6>((const char*)keys, GROUP * 4);
    DotBf16::accumulate<SUM, 4, 6>();
  }

  template <int SUM, int COUNT>
  static void weigh_group(const char* values, long stride) {
    tile_load<7>(values + SUM * GROUP * 4, stride);
    DotBf16::accumulate<SUM, 5, 7>();
    if constexpr (SUM + 1 < COUNT) weigh_group<SUM + 1, COUNT>(values, stride);
  }

  template <int SUM, int COUNT>
  static void load_sums(const float* sums) {
    tile_load<SUM>((const char*)(sums + SUM * GROUP), COUNT * GROUP * 4);
    if constexpr (SUM + 1 < COUNT) load_sums<SUM + 1, COUNT>(sums);
  }

  template <int SUM, int COUNT>
  static void store_sums(float* sums) {
    tile_store<SUM>((char*)(sums + SUM * GROUP), COUNT * GROUP * 4);
    if constexpr (SUM + 1 < COUNT) store_sums<SUM + 1, COUNT>(sums);
  }

  // A group's values with zeros for what is behind its tokens, which an earlier owner of the block may have left.
  template <int COUNT>
  const uint32_t* without_rest(const uint32_t* values, long width, int tokens) {
    uint32_t* to = clean_.data();
    for (int u = 0; u < GROUP / 2; u++)
      for (int v = 0; v < COUNT; v++) {
        const int there = std::clamp(tokens - 2 * u, 0, 2);
        const vi mask = set1i(there == 2 ? 0xffffffffu : there == 1 ? 0xffffu : 0);
        storei(to + (u * COUNT + v) * VL, there ? andi(loadi(values + u * width + v * VL), mask) : set1i(0));
      }
    return to;
  }

  // Adds what each row makes of the tokens of group i that it sees.
  template <int COUNT>
  void weigh_by_row(const Sight& sight, int i, int rows, long column, long width, float* sums) const {
    const vi high = set1i(0xffff0000u);
    for (int r = 0; r < rows; r++, sums += COUNT * GROUP) {
      const int from = sight.from(r, i), to = sight.to(r, i);
      if (to <= from) continue;
      const uint32_t* value = sight.g.values[i] + column;
      const Element* p = &p_[r * TILE_LANES + i * GROUP];
      vf even[COUNT], odd[COUNT];
      for (int v = 0; v < COUNT; v++) even[v] = odd[v] = zero();
      for (int t = from; t < to; t++) {
        const vf probability = set1(to_float<Bf16>(p[t]));
        for (int v = 0; v < COUNT; v++) {
          const vi both = loadi(value + t / 2 * width + v * VL);
          if (t % 2)
            odd[v] = fma(probability, asf(andi(both, high)), odd[v]);
          else
            even[v] = fma(probability, asf(shl16(both)), even[v]);
        }
      }
      for (int v = 0; v < COUNT; v++) {
        float* sum = sums + v * VL;
        storef(sum, add(loadf(sum), add(even[v], odd[v])));
      }
    }
  }

  long units_ = 0;
  AlignedVector<uint32_t> query_;  // [rows][units_]
  AlignedVector<float> scores_ = AlignedVector<float>(ROWS * TILE_LANES);
  AlignedVector<Element> p_ = AlignedVector<Element>(ROWS * TILE_LANES);
  AlignedVector<float> sums_ = AlignedVector<float>(ROWS * VECTORS * VL);
  AlignedVector<uint32_t> clean_ = AlignedVector<uint32_t>(GROUP / 2 * VECTORS * VL);
};

}  // namespace nova
#endif
