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
// ahead in the panel is what reaches the memory's speed; with many, a panel stays in L2 while the row tiles pass by.
#include "linear.h"

#include <algorithm>
#include <vector>

namespace nova {
namespace {

template <class T>
struct Epilogue {
  using E = typename T::type;
  const LinearDesc& d;
  const LinearCall& call;

  void store(long row, long column, vf value, long count) const {
    if (call.residual) {
      const E* residual = (const E*)call.residual + row * call.out_stride + column;
      value = add(value, load_first<T>(residual, count));
    }
    if (call.out_fp32)
      store_first<Fp32>((float*)call.out + row * call.out_stride + column, value, count);
    else
      store_first<T>((E*)call.out + row * call.out_stride + column, value, count);
  }

  template <int MR>
  void operator()(long row, long panel, vf (&acc)[MR][NV]) const {
    if (d.bias)
      for (int v = 0; v < NV; v++) {
        const vf bias = loadf(d.bias + panel * PANEL + v * VL);
        for (int r = 0; r < MR; r++) acc[r][v] = add(acc[r][v], bias);
      }
    if (d.kind == 1) {
      const long column = panel * VL, count = std::min<long>(VL, d.n / 2 - column);
      for (int r = 0; r < MR; r++) store(row + r, column, mul(silu(acc[r][0]), acc[r][1]), count);
      return;
    }
    for (int v = 0; v < NV; v++) {
      const long column = panel * PANEL + v * VL, count = std::min<long>(VL, d.n - column);
      if (count <= 0) break;
      for (int r = 0; r < MR; r++) store(row + r, column, acc[r][v], count);
    }
  }
};

// Rows are addressed as base[r / 3] + (r % 3) * stride: with 12 rows that is 4 pointers and the addressing mode's
// scaled index instead of 12 pointers, which would not fit into the general registers.
template <class T, int MR, bool PREFETCH>
inline __attribute__((always_inline)) void tile(const char* x, long stride_bytes, const uint32_t* w, long units,
                                                 long ahead, vf (&acc)[MR][NV]) {
  for (int r = 0; r < MR; r++)
    for (int v = 0; v < NV; v++) acc[r][v] = zero();
  const char* base[(MR + 2) / 3];
  for (int i = 0; i < (MR + 2) / 3; i++) base[i] = x + 3 * i * stride_bytes;
#pragma GCC unroll 4
  for (long u = 0; u < units; u++) {
    vi b[NV];
    for (int v = 0; v < NV; v++) b[v] = loadi(w + v * VL);
    if (PREFETCH)
      for (int line = 0; line < PANEL * 4; line += 64) _mm_prefetch((const char*)(w + ahead) + line, _MM_HINT_T0);
#pragma GCC unroll 12
    for (int r = 0; r < MR; r++) {
      const vi a = broadcast_unit(base[r / 3] + (r % 3) * stride_bytes + u * 4);
      for (int v = 0; v < NV; v++) acc[r][v] = T::dp(acc[r][v], a, b[v]);
    }
    w += PANEL;
  }
}

template <class T, bool PREFETCH>
void row_tile(int rows, const Epilogue<T>& epilogue, const char* x, long stride_bytes, const uint32_t* w, long units,
              long ahead, long row, long panel) {
  switch (rows) {
#define CASE(MR)                                                   \
  case MR: {                                                       \
    vf acc[MR][NV];                                                \
    tile<T, MR, PREFETCH>(x, stride_bytes, w, units, ahead, acc);  \
    epilogue(row, panel, acc);                                     \
    break;                                                         \
  }
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if defined(__AVX512F__)
    CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
  }
}

// Tuning (Zen 5, two cores sharing 40 GB/s): see tests/bench/kernels.py.
constexpr long STREAM_ITEM_BYTES = 192 << 10;  // weights of one item when rows are few
constexpr long L2_ITEM_BYTES = 320 << 10;      // weights of one item that the row tiles pass by
constexpr long ROW_BLOCK = 512;               // rows of one item: their activations stay in L2 or L3 beside it
constexpr long PREFETCH_UNITS = 2048;          // 8 KiB ahead

template <class T>
void run(Team& team, const LinearDesc& d, const LinearCall& call) {
  constexpr int E = T::E;
  const long units = ceil_div(d.k, E), panels = num_panels(d), m = call.m;
  const char* x = (const char*)call.x;
  long stride_bytes = call.x_stride * (4 / E);
  std::vector<typename T::type> padded;
  if (d.k % E) {  // the last unit of a row is half filled: pad it, in every member's own copy
    padded.assign(m * units * E, 0);
    for (long r = 0; r < m; r++)
      std::memcpy(&padded[r * units * E], x + r * stride_bytes, d.k * sizeof(typename T::type));
    x = (const char*)padded.data();
    stride_bytes = units * 4;
  }
  const Epilogue<T> epilogue{d, call};
  const uint32_t* weight = (const uint32_t*)d.weight;
  const long panel_units = units * PANEL, panel_bytes = panel_units * 4;

  const bool stream = m <= MR_MAX;
  const long row_blocks = stream ? 1 : ceil_div(m, ROW_BLOCK);
  long group = std::max<long>(1, (stream ? STREAM_ITEM_BYTES : L2_ITEM_BYTES) / panel_bytes);
  // At least four items for each member, so that one who comes late finds others done.
  group = std::max<long>(1, std::min(group, panels * row_blocks / (4 * team.size)));
  const long groups = ceil_div(panels, group);

  team.loop(row_blocks * groups, [&](long item) {
    const long block = item / groups, first = (item % groups) * group, last = std::min(panels, first + group);
    const long row0 = m * block / row_blocks, row1 = m * (block + 1) / row_blocks;
    const long tiles = ceil_div(row1 - row0, MR_MAX);
    for (long t = 0; t < tiles; t++) {  // tiles of nearly equal height: 13 rows are 7 + 6, not 12 + 1
      const long a = row0 + (row1 - row0) * t / tiles, b = row0 + (row1 - row0) * (t + 1) / tiles;
      for (long panel = first; panel < last; panel++) {
        const uint32_t* w = weight + panel * panel_units;
        if (stream)
          row_tile<T, true>((int)(b - a), epilogue, x + a * stride_bytes, stride_bytes, w, units, PREFETCH_UNITS, a,
                            panel);
        else
          row_tile<T, false>((int)(b - a), epilogue, x + a * stride_bytes, stride_bytes, w, units, 0, a, panel);
      }
    }
  });
}

template <class T>
void pack(const LinearDesc& d, const typename T::type* weight, typename T::type* out, int threads) {
  constexpr int E = T::E;
  const long units = ceil_div(d.k, E), panels = num_panels(d);
  run_team(threads, [&](Team& team) {
    team.loop(panels, [&](long panel) {
      typename T::type* to = out + panel * units * PANEL * E;
      for (int lane = 0; lane < PANEL; lane++) {
        const long row = source_row(d, panel, lane);
        const typename T::type* from = weight + row * d.k;
        for (long k = 0; k < units * E; k++) to[(k / E * PANEL + lane) * E + k % E] = row >= 0 && k < d.k ? from[k] : 0;
      }
    });
  });
}

template <class T>
void gather(const LinearDesc& d, const int64_t* ids, long count, typename T::type* out) {
  constexpr int E = T::E;
  const long units = ceil_div(d.k, E);
  const typename T::type* weight = (const typename T::type*)d.weight;
  for (long i = 0; i < count; i++) {
    const typename T::type* from = weight + (ids[i] / PANEL * units * PANEL + ids[i] % PANEL) * E;
    for (long k = 0; k < d.k; k++) out[i * d.k + k] = from[k / E * PANEL * E + k % E];
  }
}

}  // namespace

void linear_in_team(Team& team, const LinearDesc& d, const LinearCall& call) {
  if (d.dtype == 0)
    run<Bf16>(team, d, call);
  else
    run<Fp32>(team, d, call);
}

}  // namespace nova

using namespace nova;

extern "C" {

int64_t nova_linear_bytes(const LinearDesc* d) {
  return num_panels(*d) * ceil_div(d->k, d->dtype == 0 ? 2 : 1) * PANEL * 4;
}

int64_t nova_linear_columns(const LinearDesc* d) { return num_panels(*d) * PANEL; }

void nova_linear_pack(const LinearDesc* d, const void* weight, void* out, int threads) {
  if (d->dtype == 0)
    pack<Bf16>(*d, (const uint16_t*)weight, (uint16_t*)out, threads);
  else
    pack<Fp32>(*d, (const float*)weight, (float*)out, threads);
}

void nova_linear_pack_bias(const LinearDesc* d, const float* bias, float* out) {
  for (long panel = 0; panel < num_panels(*d); panel++)
    for (int lane = 0; lane < PANEL; lane++) {
      const long row = source_row(*d, panel, lane);
      out[panel * PANEL + lane] = row >= 0 ? bias[row] : 0.0f;
    }
}

// Rows of the weight as given, bit for bit; for plain packing only.
void nova_linear_rows(const LinearDesc* d, const int64_t* ids, int64_t count, void* out) {
  if (d->dtype == 0)
    gather<Bf16>(*d, ids, count, (uint16_t*)out);
  else
    gather<Fp32>(*d, ids, count, (float*)out);
}

void nova_linear(const LinearDesc* d, const void* x, int64_t x_stride, int64_t m, void* out, const void* residual,
                 int out_fp32, int threads) {
  const int64_t width = d->kind == 1 ? d->n / 2 : d->n;
  const LinearCall call{x, x_stride, m, out, width, residual, out_fp32};
  run_team(threads, [&](Team& team) { linear_in_team(team, *d, call); });
}

}  // extern "C"
