// y = x @ W.T over packed weights.
//
// Packing: a panel is PANEL rows of W side by side, unit by unit along K: [panel][unit][row in panel]. One step along
// K loads NV vectors of the panel and broadcasts one unit of each of MR activation rows: no shuffles, no horizontal
// sums, the panel is read in the order it lies in memory, and any M uses the same packing.
//
// Row invariance: an output element is one chain of `dp` along K, ascending, in one accumulator, whatever MR its row
// was put into. M and the place of a row in the batch decide only which tile computes it.
//
// Items: (block of rows, few panels). With few rows the product is a stream of W through the cores, and prefetching
// ahead in the panel is what reaches the memory's speed; with more, a panel stays in L2 while the row tiles pass by,
// and the next one is fetched meanwhile (18 to 45 % of the time at 16 to 64 rows).
//
// The epilogues round where separate operations would have rounded, so a fused step gives the same bits as its parts.
#include "linear.h"

#include <algorithm>
#include <vector>

namespace nova {
namespace {

// out[r][lane] = x[r] . panel row `lane`, for MR rows. Rows are addressed as base[r / 3] + (r % 3) * stride: with 12
// rows that is 4 pointers and the addressing mode's scaled index instead of 12 pointers, which would not fit into the
// general registers.
// Beside each step it asks for LINES cache lines from `next` on.
template <class T, int MR, int LINES>
void tile(const char* x, long stride_bytes, const uint32_t* w, long units, const char* next, float* out) {
  vf acc[MR][NV];
  for (int r = 0; r < MR; r++)
    for (int v = 0; v < NV; v++) acc[r][v] = zero();
  const char* base[(MR + 2) / 3];
  for (int i = 0; i < (MR + 2) / 3; i++) base[i] = x + 3 * i * stride_bytes;
#pragma GCC unroll 4
  for (long u = 0; u < units; u++) {
    vi b[NV];
    for (int v = 0; v < NV; v++) b[v] = loadi(w + v * VL);
    for (int line = 0; line < LINES; line++) _mm_prefetch(next + (u * LINES + line) * 64, _MM_HINT_T0);
#pragma GCC unroll 12
    for (int r = 0; r < MR; r++) {
      const vi a = broadcast_unit(base[r / 3] + (r % 3) * stride_bytes + u * 4);
      for (int v = 0; v < NV; v++) acc[r][v] = T::dp(acc[r][v], a, b[v]);
    }
    w += PANEL;
  }
  for (int r = 0; r < MR; r++)
    for (int v = 0; v < NV; v++) storef(out + r * PANEL + v * VL, acc[r][v]);
}

using Tile = void (*)(const char*, long, const uint32_t*, long, const char*, float*);

template <class T, int LINES>
constexpr Tile tiles[] = {nullptr,
                          tile<T, 1, LINES>,
                          tile<T, 2, LINES>,
                          tile<T, 3, LINES>,
                          tile<T, 4, LINES>,
                          tile<T, 5, LINES>,
                          tile<T, 6, LINES>,
#if defined(__AVX512F__)
                          tile<T, 7, LINES>,
                          tile<T, 8, LINES>,
                          tile<T, 9, LINES>,
                          tile<T, 10, LINES>,
                          tile<T, 11, LINES>,
                          tile<T, 12, LINES>
#endif
};

// Tuning: tests/bench/kernels.py; Zen 5, two cores.
constexpr int PANEL_LINES = PANEL * 4 / 64;    // cache lines of one step along K
constexpr long STREAM_ITEM_BYTES = 192 << 10;  // weights of one item when rows are few
constexpr long L2_ITEM_BYTES = 320 << 10;      // weights of one item when the row tiles pass by each panel
constexpr long ROW_BLOCK = 512;                // rows of one item: their activations stay in the caches beside it
constexpr long PREFETCH_UNITS = 2048;          // 8 KiB ahead

template <class T>
struct Product {
  using E = typename T::type;
  const LinearDesc& d;
  const LinearCall& call;

  // A vector of a finished tile, bias included.
  vf value(const float* tile, int r, long panel, int v) const {
    const vf x = loadf(tile + r * PANEL + v * VL);
    return d.bias ? add(x, loadf(d.bias + panel * PANEL + v * VL)) : x;
  }

  void store(const float* tile, int rows, long row, long panel) const {
    for (int v = 0; v < NV; v++) {
      const long column = panel * PANEL + v * VL, count = std::min<long>(VL, d.n - column);
      if (count <= 0) break;
      for (int r = 0; r < rows; r++) {
        const long at = (row + r) * d.n + column;
        vf y = value(tile, r, panel, v);
        if (call.residual) y = add(load_first<T>((const E*)call.residual + at, count), rounded<T>(y));
        store_first<T>((E*)call.out + at, y, count);
      }
    }
  }

  void store_gated(const float* gate, const float* up, int rows, long row, long panel, long up_panel) const {
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < NV; v++) {
        const vf g = rounded<T>(value(gate, r, panel, v)), u = rounded<T>(value(up, r, up_panel, v));
        T::store((E*)call.out + (row + r) * (d.n / 2) + panel * PANEL + v * VL, mul(silu(g), u));
      }
  }

  void run(Team& team) const {
    constexpr int E = T::E;
    const long units = ceil_div(d.k, E), m = call.m;
    const long panels = call.gated ? d.n / 2 / PANEL : ceil_div(d.n, PANEL);
    const char* x = (const char*)call.x;
    long stride_bytes = call.x_stride * (4 / E);
    std::vector<typename T::type> padded;
    if (d.k % E) {  // the last unit of a row is half filled: pad it
      padded.assign(m * units * E, 0);
      for (long r = 0; r < m; r++)
        std::memcpy(&padded[r * units * E], x + r * stride_bytes, d.k * sizeof(typename T::type));
      x = (const char*)padded.data();
      stride_bytes = units * 4;
    }
    const long panel_units = units * PANEL, panel_bytes = panel_units * 4 * (call.gated ? 2 : 1);
    const bool stream = m <= MR_MAX;

    const long row_blocks = stream ? 1 : ceil_div(m, ROW_BLOCK);
    long group = (stream ? STREAM_ITEM_BYTES : L2_ITEM_BYTES) / panel_bytes;
    // At least four items for each member, so that one who comes late finds others done.
    group = std::max<long>(1, std::min(group, panels * row_blocks / (4 * team.size())));
    const long groups = ceil_div(panels, group);

    team.loop(row_blocks * groups, [&](long item) {
      const long block = item / groups, first = (item % groups) * group, last = std::min(panels, first + group);
      const long row0 = m * block / row_blocks, row1 = m * (block + 1) / row_blocks;
      const long row_tiles = ceil_div(row1 - row0, MR_MAX);
      alignas(64) float result[2][MR_MAX * PANEL];
      for (long panel = first; panel < last; panel++)
        for (long t = 0; t < row_tiles; t++) {  // of nearly equal height: 13 rows are 7 + 6, not 12 + 1
          const long a = row0 + (row1 - row0) * t / row_tiles, b = row0 + (row1 - row0) * (t + 1) / row_tiles;
          const int rows = (int)(b - a);
          const char* xa = x + a * stride_bytes;
          const uint32_t* w = (const uint32_t*)d.weight + panel * panel_units;
          // One tile asks for what it will need itself in a moment; of several, the first two ask for the halves of
          // the next panel, the others for what is there (which costs nothing, and a third variant compile time).
          const Tile tile = stream ? tiles<T, PANEL_LINES>[rows] : tiles<T, 1>[rows];
          const long ahead = stream ? PREFETCH_UNITS : t < 2 ? panel_units + t * units * 16 : 0;
          tile(xa, stride_bytes, w, units, (const char*)(w + ahead), result[0]);
          if (call.gated) {
            w += panels * panel_units;
            tile(xa, stride_bytes, w, units, (const char*)(w + ahead), result[1]);
            store_gated(result[0], result[1], rows, a, panel, panel + panels);
          } else {
            store(result[0], rows, a, panel);
          }
        }
    });
  }
};

template <class T>
void pack(const LinearDesc& d, const typename T::type* weight, typename T::type* out, int threads) {
  constexpr int E = T::E;
  const long units = ceil_div(d.k, E), panels = ceil_div(d.n, PANEL);
  Team(threads).loop(panels, [&](long panel) {
    typename T::type* to = out + panel * units * PANEL * E;
    for (int lane = 0; lane < PANEL; lane++) {
      const long row = panel * PANEL + lane;
      const typename T::type* from = weight + row * d.k;
      for (long k = 0; k < units * E; k++)
        to[(k / E * PANEL + lane) * E + k % E] = row < d.n && k < d.k ? from[k] : 0;
    }
  });
}

template <class T>
void gather(const LinearDesc& d, const int64_t* ids, long count, typename T::type* out, int threads) {
  constexpr int E = T::E;
  const long units = ceil_div(d.k, E);
  const typename T::type* weight = (const typename T::type*)d.weight;
  Team(threads).rows(count, [&](long i) {
    const typename T::type* from = weight + (ids[i] / PANEL * units * PANEL + ids[i] % PANEL) * E;
    for (long k = 0; k < d.k; k++) out[i * d.k + k] = from[k / E * PANEL * E + k % E];
  });
}

}  // namespace

void linear(Team& team, const LinearDesc& d, const LinearCall& call) {
  if (d.dtype == 0)
    Product<Bf16>{d, call}.run(team);
  else
    Product<Fp32>{d, call}.run(team);
}

}  // namespace nova

using namespace nova;

extern "C" {

// Bytes of the packed weight; floats of the bias, padded to whole panels.
int64_t nova_linear_bytes(const LinearDesc* d) {
  return ceil_div(d->n, PANEL) * ceil_div(d->k, d->dtype == 0 ? 2 : 1) * PANEL * 4;
}

int64_t nova_linear_columns(const LinearDesc* d) { return ceil_div(d->n, PANEL) * PANEL; }

void nova_linear_pack(const LinearDesc* d, const void* weight, void* out, int threads) {
  if (d->dtype == 0)
    pack<Bf16>(*d, (const uint16_t*)weight, (uint16_t*)out, threads);
  else
    pack<Fp32>(*d, (const float*)weight, (float*)out, threads);
}

// Rows of the weight as given, bit for bit.
void nova_linear_rows(const LinearDesc* d, const int64_t* ids, int64_t count, void* out, int threads) {
  if (d->dtype == 0)
    gather<Bf16>(*d, ids, count, (uint16_t*)out, threads);
  else
    gather<Fp32>(*d, ids, count, (float*)out, threads);
}

void nova_linear(const LinearDesc* d, const void* x, int64_t x_stride, int64_t m, void* out, int threads) {
  Team team(threads);
  linear(team, *d, {x, x_stride, m, out});
}

}  // extern "C"
