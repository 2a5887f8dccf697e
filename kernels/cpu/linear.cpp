// y = x @ W.T over packed weights.
//
// Packing: a panel is PANEL rows of W side by side, unit by unit along K: [panel][unit][row in panel]. One step along
// K loads NV vectors of the panel and broadcasts one unit of each of MR activation rows: no shuffles, no horizontal
// sums, the panel is read in the order it lies in memory, and any M uses the same packing.
//
// Row invariance (matrix.h has another chain): an output element is one chain of `dp` along K, ascending, in one
// accumulator, whatever MR its row was put into. M and the place of a row in the batch decide only which tile computes
// it.
//
// Items: (block of rows, few panels). With few rows the product is a stream of W through the cores, and prefetching
// ahead in the panel is what reaches the memory's speed; with more, a panel stays in L2 while the row tiles pass by,
// and the next one is fetched meanwhile (18 to 45 % of the time at 16 to 64 rows). With 16 vector registers it is part
// after part of a panel that they pass by, which stays in L1.
//
// GCC gives out registers over a whole function at once here: loop by loop, as it does by itself, it copies a tile's
// sums to and fro around each row that is stored (1 % of a prompt's step).
#pragma GCC optimize("ira-region=one")
#include "linear.h"

#include <array>
#include <utility>
#include <vector>

#include "abi.h"
#include "matrix_product.h"
#include "tiling.h"

namespace nova {
namespace {

// Tuning: tests/bench/kernels.py; Zen, two cores.
constexpr long PART_BYTES = 32 << 10;  // of a panel that all rows pass by, where they are stored behind their tiles
constexpr long WIDE_FROM_ROWS = 32;    // from so many on, a part's weights are widened once, too
constexpr int STEPS_UNROLLED = REGISTERS > 16 ? 4 : 1;

// Adds to sums[r][lane] x[r] . panel row `lane` for MR rows, along `units` of K; where `begins`, to nothing. WIDE: over
// weights that were widened (`widen`). Rows are addressed as base[r / 3] + (r % 3) * stride: with 12 rows that is 4
// pointers and the addressing mode's scaled index instead of 12 pointers, which would not fit into the general
// registers.
// Beside each step it asks for LINES cache lines from `next` on, which goes on by `next_step` bytes. After each `pause`
// steps a row of the tile `before` is stored.
template <class T, int MR, int LINES, class Before, bool WIDE>
void tile(const char* x, long stride_bytes, const char* w, long units, const char* next, long next_step, bool begins,
          float* sums, Before& before, long pause) {
  constexpr long VECTOR = VL * 4;                           // bytes
  constexpr long UNIT = T::E * sizeof(typename T::factor);  // of x
  vf acc[MR][NV];
#pragma GCC unroll 12
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) acc[r][v] = begins ? zero() : loadf(sums + r * PANEL + v * VL);
  const char* base[(MR + 2) / 3];
  for (int i = 0; i < (MR + 2) / 3; i++) base[i] = x + 3 * i * stride_bytes;
#pragma GCC unroll 1
  for (long u = 0; u < units;) {
    const long end = before.rows_left() ? std::min(units, u + pause) : units;
#pragma GCC unroll STEPS_UNROLLED
    for (; u < end; u++) {
      for (int line = 0; line < LINES; line++) prefetch(next + u * next_step + line * 64);
      const auto factor = [&](int r) {
        return (const typename T::factor*)(base[r / 3] + (r % 3) * stride_bytes + u * UNIT);
      };
      if constexpr (WIDE) {
        add_halves(acc, factor, [&](int v, int half) { return loadf((const float*)w + ((1 - half) * NV + v) * VL); });
        w += 2 * NV * VECTOR;
      } else {
        add_products<T>(acc, factor, [&](int v) { return loadi(w + v * VECTOR); });
        w += NV * VECTOR;
      }
    }
    if (before.rows_left()) before.store_row();
  }
#pragma GCC unroll 12
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) storef(sums + r * PANEL + v * VL, acc[r][v]);
}

template <class Before>
using Tile = void (*)(const char*, long, const char*, long, const char*, long, bool, float*, Before&, long);

template <class T, int LINES, class Before, bool WIDE, int MR>
constexpr Tile<Before> tile_of() {
  if constexpr (has_tile<Before>(MR))
    return tile<T, MR, LINES, Before, WIDE>;
  else
    return nullptr;
}

template <class T, int LINES, class Before, bool WIDE, int... MR>
constexpr std::array<Tile<Before>, sizeof...(MR)> tiles_of(std::integer_sequence<int, MR...>) {
  return {tile_of<T, LINES, Before, WIDE, MR>()...};
}

// By the number of their rows.
template <class T, int LINES, class Before, bool WIDE = false>
constexpr auto tiles = tiles_of<T, LINES, Before, WIDE>(std::make_integer_sequence<int, MR_MAX + 1>());

// Units of a panel as vectors of fp32: the second halves of each, then the first.
template <class T>
void widen(const char* w, long units, float* out) {
  for (long u = 0; u < units; u++, w += PANEL * 4, out += 2 * PANEL)
    for (int v = 0; v < NV; v++) {
      const vi both = loadi(w + v * VL * 4);
      storef(out + v * VL, T::second(both));
      storef(out + PANEL + v * VL, T::first(both));
    }
}

template <class T>
class Product {
 public:
  using E = typename T::type;

  Product(const LinearJob& job, long num_products, Team& team)
      : d_(job.d),
        call_(job.call),
        x_((const char*)job.call.x),
        stride_bytes_(job.call.x_stride * sizeof(E)),
        tiling_(call_.m, panels_, panel_bytes_ * (call_.gated ? 2 : 1), num_products, team.size()) {
    if (T::IS_WIDENED || d_.k % T::E) take_factors(team);
  }

  long items() const { return tiling_.items(); }

  void compute(long item) const {
    constexpr int LINES = STEP / 64;                 // cache lines of a step
    constexpr int HALF = LINES > 1 ? LINES / 2 : 1;  // two tiles are the fewest of several
    if (tiling_.is_stream)
      compute_in_parts<false>(item, tiles<T, LINES, NoRows>.data());
    else if constexpr (STORES_BETWEEN_STEPS)
      compute_between_steps(item, tiles<T, HALF, Epilogue<T>>.data());
    else if (T::IS_WIDENED && call_.m >= WIDE_FROM_ROWS)
      compute_in_parts<T::IS_WIDENED>(item, tiles<T, HALF, NoRows, T::IS_WIDENED>.data());
    else
      compute_in_parts<false>(item, tiles<T, HALF, NoRows>.data());
  }

 private:
  static constexpr long STEP = PANEL * 4;                          // bytes of one step along K
  static constexpr long UNIT = T::E * sizeof(typename T::factor);  // of x

  // The sums of one tile at a time, whose rows are stored between the steps of the next one.
  void compute_between_steps(long item, const Tile<Epilogue<T>>* tiles) const {
    Epilogue<T> epilogue(d_, call_);
    const long steps = units_ * (call_.gated ? 2 : 1);
    alignas(64) float results[2][2][MR_MAX * PANEL];  // of a tile, and of the one before
    int turn = 0;
    tiling_.compute(item, [&](long panel, long row, int rows, long t, long row_tiles) {
      const char* x = x_ + row * stride_bytes_;
      const char* w = (const char*)d_.weight + panel * panel_bytes_;
      // Tiles share out the next panel, so that memory has no rest while any of them computes.
      const long each = ceil_div(STEP, row_tiles), ahead = panel_bytes_ + t * units_ * each;
      const long pause = ceil_div(steps, epilogue.rows_left() + 1);
      float (*result)[MR_MAX * PANEL] = results[turn ^= 1];
      tiles[rows](x, stride_bytes_, w, units_, w + ahead, each, true, result[0], epilogue, pause);
      if (call_.gated) {
        w += panels_ * panel_bytes_;
        tiles[rows](x, stride_bytes_, w, units_, w + ahead, each, true, result[1], epilogue, pause);
      }
      epilogue.store_rest();
      if (call_.gated)
        epilogue.take_gated(result[0], result[1], rows, row, panel, panel + panels_);
      else
        epilogue.take(result[0], rows, row, panel);
    });
    epilogue.store_rest();
  }

  // All rows pass by one part of a panel after the other, which stays in the first caches meanwhile: the sums of all
  // lie in memory, and each is one chain all the same. Of a stream all is one part. WIDE: the part is widened first.
  template <bool WIDE>
  void compute_in_parts(long item, const Tile<NoRows>* tiles) const {
    constexpr long ROWS = STORES_BETWEEN_STEPS ? MR_MAX : ROW_BLOCK;
    alignas(64) float sums[2][ROWS * PANEL], wide[WIDE ? 2 * PART_BYTES / sizeof(float) : 1];
    const bool stream = tiling_.is_stream;
    const long parts = stream ? 1 : ceil_div(panel_bytes_, PART_BYTES);
    Epilogue<T> epilogue(d_, call_);
    NoRows none;
    tiling_.group(item, [&](long panel, long panels_end, const RowTiles& rows) {
      for (; panel < panels_end; panel++)
        for (int half = 0; half <= call_.gated; half++)
          for (long part = 0; part < parts; part++) {
            const long begin = units_ * part / parts, units = units_ * (part + 1) / parts - begin;
            const char* w = (const char*)d_.weight + (panel + half * panels_) * panel_bytes_ + begin * STEP;
            if constexpr (WIDE) widen<T>(w, units, wide);
            const bool ends = half == call_.gated && part == parts - 1;
            rows.each([&](long row, int count, long t, long row_tiles) {
              // One tile asks for what it will need itself in a moment; several share out the next part.
              const long each = stream ? STEP : ceil_div(STEP, row_tiles);
              const long ahead = stream ? PREFETCH_BYTES : units * STEP + t * units * each;
              const long at = (row - rows.begin) * PANEL;
              tiles[count](x_ + row * stride_bytes_ + begin * UNIT, stride_bytes_, WIDE ? (const char*)wide : w, units,
                           w + ahead, each, part == 0, sums[half] + at, none, 0);
              if (!ends) return;
              if (half)
                epilogue.take_gated(sums[0] + at, sums[1] + at, count, row, panel, panel + panels_);
              else
                epilogue.take(sums[0] + at, count, row, panel);
              epilogue.store_rest();
            });
          }
    });
  }

  const LinearDesc& d_;
  const LinearCall call_;
  const long units_ = d_.units(), panel_bytes_ = units_ * STEP;
  const long panels_ = call_.gated ? d_.n / 2 / PANEL : ceil_div(d_.n, PANEL);
  const char* x_;
  long stride_bytes_;
  AlignedArray<typename T::factor> factors_;
  const Tiling tiling_;

  // Rows as factors, where they are others than x, or where the last unit of a row is half filled.
  void take_factors(Team& team) {
    const long width = units_ * T::E;
    factors_ = aligned_array<typename T::factor>(call_.m * width);
    team.rows(call_.m, [&](long row) {
      typename T::factor* to = &factors_[row * width];
      to_factors<T>((const E*)x_ + row * call_.x_stride, d_.k, to);
      for (long k = d_.k; k < width; k++) to[k] = 0;
    });
    x_ = (const char*)factors_.get();
    stride_bytes_ = width * sizeof(typename T::factor);
  }
};

#if defined(NOVA_MATRIX)
// On the matrix unit, where K fills its steps. A weight is multiplied by it whatever the rows, or never.
struct OnMatrixUnit {
  using type = Bf16;
  using Dot = DotBf16;
  static constexpr long FEATURES = TILE_BYTES / 2;  // of a step
  const LinearCall& call;

  OnMatrixUnit(const LinearJob& job, Team&) : call(job.call) {}

  static bool can(const LinearDesc& d) { return d.format == AS_DTYPE && d.dtype == 0 && d.k % FEATURES == 0; }
  const char* x() const { return (const char*)call.x; }
  long stride() const { return call.x_stride * 2; }
  bool tiled() const { return call.tiled; }
  static void finish(float*, long, long) {}
};
#else
struct OnMatrixUnit {
  static bool can(const LinearDesc&) { return false; }
};
#endif

template <class T>
void pack(const LinearDesc& d, const typename T::type* weight, typename T::type* out, int threads) {
  constexpr int E = T::E;
  const long units = ceil_div(d.k, E), panels = ceil_div(d.n, PANEL);
  Team(threads).loop(panels, [&](long panel) {
    typename T::type* to = out + panel * units * PANEL * E;
    for (int lane = 0; lane < PANEL; lane++) {
      const long row = panel * PANEL + lane;
      const typename T::type* from = weight + row * d.k;
      for (long k = 0; k < units * E; k++) to[(k / E * PANEL + lane) * E + k % E] = row < d.n && k < d.k ? from[k] : 0;
    }
  });
}

// Each unit of a row lies in a cache line of its own: those of the next row are asked for meanwhile.
template <class T>
void gather(const LinearDesc& d, const int64_t* ids, long count, typename T::type* out, int threads) {
  constexpr long STEP = PANEL * 4;  // bytes between units of a row
  const auto first_unit = [&](long i) {
    return (const char*)d.weight + (ids[i] / PANEL * d.units() * PANEL + ids[i] % PANEL) * 4;
  };
  Team(threads).rows(count, [&](long i) {
    const char *from = first_unit(i), *next = first_unit(std::min(i + 1, count - 1));
    typename T::type* to = out + i * d.k;
    const typename T::type* end = to + d.k;
    for (; to + T::E <= end; to += T::E, from += STEP, next += STEP) {
      std::memcpy(to, from, 4);
      prefetch(next);
    }
    if (to < end) std::memcpy(to, from, sizeof *to);
  });
}

}  // namespace

bool reads_tiles(const LinearDesc& d, long m) { return m > TILED_ROWS && OnMatrixUnit::can(d); }

void linear(Team& team, const LinearJob* jobs, long count) {
  const auto are_alike = [](const LinearDesc& a, const LinearDesc& b) {
    return a.format == b.format && OnMatrixUnit::can(a) == OnMatrixUnit::can(b);
  };
  for (long alike; count > 0; jobs += alike, count -= alike) {
    const LinearDesc& d = jobs[0].d;
    for (alike = 1; alike < count && are_alike(d, jobs[alike].d);) alike++;
    if (d.format != AS_DTYPE) quantised_linear(team, jobs, alike);
#if defined(NOVA_MATRIX)
    else if (OnMatrixUnit::can(d))
      multiply<MatrixProduct<OnMatrixUnit>>(team, jobs, alike);
#endif
    else
      d.dtype == 0 ? multiply<Product<Bf16>>(team, jobs, alike) : multiply<Product<Fp32>>(team, jobs, alike);
  }
}

}  // namespace nova

using namespace nova;

extern "C" {

// Bytes of the packed weight; floats of the bias, padded to whole panels.
int64_t nova_linear_bytes(const LinearDesc* d) {
  return d->format == AS_DTYPE ? ceil_div(d->n, PANEL) * PANEL * d->units() * 4 : quantised_bytes(*d);
}

int64_t nova_linear_columns(const LinearDesc* d) { return ceil_div(d->n, PANEL) * PANEL; }

int nova_linear_pack(const LinearDesc* d, const void* weight, void* out, int threads) {
  return guarded([&] {
    if (d->dtype == 0)
      pack<Bf16>(*d, (const uint16_t*)weight, (uint16_t*)out, threads);
    else
      pack<Fp32>(*d, (const float*)weight, (float*)out, threads);
  });
}

// Rows of the weight as given, bit for bit; of codes, what they stand for in fp32, rounded to the dtype.
// OUT_OF_RANGE when there is no such row.
int nova_linear_rows(const LinearDesc* d, const int64_t* ids, int64_t count, void* out, int threads) {
  return guarded([&] {
    for (long i = 0; i < count; i++)
      if (ids[i] < 0 || ids[i] >= d->n) throw std::out_of_range("row");
    if (d->format != AS_DTYPE)
      quantised_rows(*d, ids, count, out, threads);
    else if (d->dtype == 0)
      gather<Bf16>(*d, ids, count, (uint16_t*)out, threads);
    else
      gather<Fp32>(*d, ids, count, (float*)out, threads);
  });
}

int nova_linear(const LinearDesc* d, const void* x, int64_t x_stride, int64_t m, void* out, int threads) {
  return guarded([&] {
    Team team(threads);
    linear(team, *d, {x, x_stride, m, out});
  });
}

}  // extern "C"
