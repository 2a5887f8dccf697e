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
// INT8 weights keep the layout with one byte for each element; a vector of units is widened when it is loaded (exactly:
// both types hold the whole numbers up to 127), and the row's scale is multiplied in when its chain has ended. The
// conversion hides behind the memory with few rows, and costs up to half of the time with many.
//
// The epilogues round where separate operations would have rounded, so a fused step gives the same bits as its parts.
#include "linear.h"

#include <algorithm>
#include <vector>

#include "abi.h"

namespace nova {
namespace {

// How the elements of a weight are kept: `FORMAT_CODES` in native.py.
enum WeightFormat : int32_t {
  AS_DTYPE = 0,   // in the dtype of the activations
  INT8_ROWS = 1,  // int8 times a scale of its row; units of as many bytes as the dtype has elements in 32 bits
};

// Bytes of one unit.
long step_bytes(const LinearDesc& d) { return d.format == INT8_ROWS ? d.elements() : 4; }

// How a vector of VL units lies in memory: as it is, or as bytes.
struct Whole {
  static constexpr long VECTOR = VL * 4;  // bytes
  static vi load(const char* w) { return loadi(w); }
};
template <class T>
struct Bytes {
  static constexpr long VECTOR = VL * T::E;
  static vi load(const char* w) { return T::from_int8(w); }
};

// out[r][lane] = x[r] . panel row `lane`, for MR rows. Rows are addressed as base[r / 3] + (r % 3) * stride: with 12
// rows that is 4 pointers and the addressing mode's scaled index instead of 12 pointers, which would not fit into the
// general registers.
// Beside each step it asks for LINES cache lines from `next` on.
template <class T, class W, int MR, int LINES>
void tile(const char* x, long stride_bytes, const char* w, long units, const char* next, float* out) {
  constexpr long LINE = W::VECTOR * NV < 64 ? W::VECTOR * NV : 64;
  vf acc[MR][NV];
  for (int r = 0; r < MR; r++)
    for (int v = 0; v < NV; v++) acc[r][v] = zero();
  const char* base[(MR + 2) / 3];
  for (int i = 0; i < (MR + 2) / 3; i++) base[i] = x + 3 * i * stride_bytes;
#pragma GCC unroll 4
  for (long u = 0; u < units; u++) {
    vi b[NV];
    for (int v = 0; v < NV; v++) b[v] = W::load(w + v * W::VECTOR);
    for (int line = 0; line < LINES; line++) _mm_prefetch(next + (u * LINES + line) * LINE, _MM_HINT_T0);
#pragma GCC unroll 12
    for (int r = 0; r < MR; r++) {
      const vi a = broadcast_unit(base[r / 3] + (r % 3) * stride_bytes + u * 4);
      for (int v = 0; v < NV; v++) acc[r][v] = T::dp(acc[r][v], a, b[v]);
    }
    w += NV * W::VECTOR;
  }
  for (int r = 0; r < MR; r++)
    for (int v = 0; v < NV; v++) storef(out + r * PANEL + v * VL, acc[r][v]);
}

using Tile = void (*)(const char*, long, const char*, long, const char*, float*);

template <class T, class W, int LINES>
constexpr Tile tiles[] = {nullptr,
                          tile<T, W, 1, LINES>,
                          tile<T, W, 2, LINES>,
                          tile<T, W, 3, LINES>,
                          tile<T, W, 4, LINES>,
                          tile<T, W, 5, LINES>,
                          tile<T, W, 6, LINES>,
#if defined(__AVX512F__)
                          tile<T, W, 7, LINES>,
                          tile<T, W, 8, LINES>,
                          tile<T, W, 9, LINES>,
                          tile<T, W, 10, LINES>,
                          tile<T, W, 11, LINES>,
                          tile<T, W, 12, LINES>
#endif
};

// Tuning: tests/bench/kernels.py; Zen 5, two cores.
constexpr long STREAM_ITEM_BYTES = 192 << 10;  // weights of one item when rows are few
constexpr long L2_ITEM_BYTES = 320 << 10;      // weights of one item when the row tiles pass by each panel
constexpr long ROW_BLOCK = 512;                // rows of one item: their activations stay in the caches beside it
constexpr long PREFETCH_BYTES = 8 << 10;       // ahead, in a stream

template <class T, class W>
class Product {
 public:
  using E = typename T::type;

  // One of `num_products` in a loop of `num_members`.
  Product(const LinearJob& job, long num_products, int num_members) : d(job.d), call(job.call) {
    x = (const char*)call.x;
    stride_bytes = call.x_stride * (4 / T::E);
    if (d.k % T::E) pad();
    stream = call.m <= MR_MAX;
    row_blocks = stream ? 1 : ceil_div(call.m, ROW_BLOCK);
    group = (stream ? STREAM_ITEM_BYTES : L2_ITEM_BYTES) / (half_bytes * (call.gated ? 2 : 1));
    // At least four items for each member, so that one who comes late finds others done.
    group = std::max<long>(1, std::min(group, panels * row_blocks * num_products / (4 * num_members)));
    groups = ceil_div(panels, group);
  }

  long items() const { return row_blocks * groups; }

  void compute(long item) const {
    constexpr int LINES = STEP < 64 ? 1 : STEP / 64;  // cache lines of a step
    const long block = item / groups, first = (item % groups) * group, last = std::min(panels, first + group);
    const long row0 = call.m * block / row_blocks, row1 = call.m * (block + 1) / row_blocks;
    const long row_tiles = ceil_div(row1 - row0, MR_MAX);
    alignas(64) float result[2][MR_MAX * PANEL];
    for (long panel = first; panel < last; panel++)
      for (long t = 0; t < row_tiles; t++) {  // of nearly equal height: 13 rows are 7 + 6, not 12 + 1
        const long a = row0 + (row1 - row0) * t / row_tiles, b = row0 + (row1 - row0) * (t + 1) / row_tiles;
        const int rows = (int)(b - a);
        const char* xa = x + a * stride_bytes;
        const char* w = (const char*)d.weight + panel * half_bytes;
        // One tile asks for what it will need itself in a moment; of several, the first ones ask for a line a step
        // of the next panel, the others for what is there (which costs nothing, and a third variant compile time).
        const Tile tile = stream ? tiles<T, W, LINES>[rows] : tiles<T, W, 1>[rows];
        const long ahead = stream ? PREFETCH_BYTES : t < LINES ? half_bytes + t * units * 64 : 0;
        tile(xa, stride_bytes, w, units, (const char*)(w + ahead), result[0]);
        if (call.gated) {
          w += panels * half_bytes;
          tile(xa, stride_bytes, w, units, (const char*)(w + ahead), result[1]);
          store_gated(result[0], result[1], rows, a, panel, panel + panels);
        } else {
          store(result[0], rows, a, panel);
        }
      }
  }

 private:
  static constexpr long STEP = NV * W::VECTOR;  // bytes of one step along K
  const LinearDesc& d;
  const LinearCall call;
  const long units = ceil_div(d.k, T::E), half_bytes = units * STEP;
  const long panels = call.gated ? d.n / 2 / PANEL : ceil_div(d.n, PANEL);
  const char* x;
  long stride_bytes;
  std::vector<E> padded;
  bool stream;
  long row_blocks, group, groups;

  // The last unit of a row is half filled.
  void pad() {
    padded.assign(call.m * units * T::E, 0);
    for (long r = 0; r < call.m; r++) std::memcpy(&padded[r * units * T::E], x + r * stride_bytes, d.k * sizeof(E));
    x = (const char*)padded.data();
    stride_bytes = units * 4;
  }

  // A vector of a finished tile, scale and bias included.
  vf value(const float* tile, int r, long panel, int v) const {
    vf x = loadf(tile + r * PANEL + v * VL);
    if (d.scale) x = mul(x, loadf(d.scale + panel * PANEL + v * VL));
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
};

template <class T, class W>
void multiply(Team& team, const LinearJob* jobs, long count) {
  if (count == 1) {
    const Product<T, W> product(jobs[0], 1, team.size());
    return team.loop(product.items(), [&](long item) { product.compute(item); });
  }
  std::vector<Product<T, W>> products;
  std::vector<long> ends;  // of each product's items among all
  products.reserve(count);
  for (long i = 0; i < count; i++) {
    products.emplace_back(jobs[i], count, team.size());
    ends.push_back((i ? ends.back() : 0) + products.back().items());
  }
  team.loop(ends.back(), [&](long item) {
    const long i = std::upper_bound(ends.begin(), ends.end(), item) - ends.begin();
    products[i].compute(item - (i ? ends[i - 1] : 0));
  });
}

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

// Packs rows as int8, and gives each row's scale: its largest element over 127. The arithmetic of
// kernels/ops/quantised.py.
template <class T>
void quantise(const LinearDesc& d, const typename T::type* weight, int8_t* out, float* scale, int threads) {
  constexpr int E = T::E;
  const long units = d.units(), panels = ceil_div(d.n, PANEL);
  Team(threads).loop(panels, [&](long panel) {
    int8_t* to = out + panel * units * PANEL * E;
    for (long lane = 0; lane < std::min<long>(PANEL, d.n - panel * PANEL); lane++) {
      const long row = panel * PANEL + lane;
      const typename T::type* from = weight + row * d.k;
      vf most = zero();
      for (long k = 0; k < d.k; k += VL)
        most = vmax(asf(andi(asi(load_first<T>(from + k, d.k - k)), set1i(0x7fffffffu))), most);
      scale[row] = hmax(most) / 127.0f;
      const vf step = set1(scale[row] > 0 ? scale[row] : 1.0f);
      for (long k = 0; k < d.k; k += VL) {
        float lanes[VL];
        storef(lanes, round_even(div(load_first<T>(from + k, d.k - k), step)));
        for (long i = k; i < std::min(d.k, k + VL); i++) to[(i / E * PANEL + lane) * E + i % E] = (int8_t)lanes[i - k];
      }
    }
  });
}

// `element(packed element, row of the weight)` is what an output element is made of.
template <class T, class Packed, class F>
void gather(const LinearDesc& d, const int64_t* ids, long count, typename T::type* out, int threads, F&& element) {
  constexpr int E = T::E;
  const long units = ceil_div(d.k, E);
  Team(threads).rows(count, [&](long i) {
    const Packed* from = (const Packed*)d.weight + (ids[i] / PANEL * units * PANEL + ids[i] % PANEL) * E;
    for (long k = 0; k < d.k; k++) out[i * d.k + k] = element(from[k / E * PANEL * E + k % E], ids[i]);
  });
}

template <class T>
void gather_any(const LinearDesc& d, const int64_t* ids, long count, void* out, int threads) {
  using E = typename T::type;
  if (d.format == INT8_ROWS)
    gather<T, int8_t>(d, ids, count, (E*)out, threads,
                      [&](int8_t x, int64_t row) { return from_float<T>((float)x * d.scale[row]); });
  else
    gather<T, E>(d, ids, count, (E*)out, threads, [](E x, int64_t) { return x; });
}

}  // namespace

void linear(Team& team, const LinearJob* jobs, long count) {
  if (count == 0) return;
  const bool is_int8 = jobs[0].d.format == INT8_ROWS;
  if (jobs[0].d.dtype == 0)
    is_int8 ? multiply<Bf16, Bytes<Bf16>>(team, jobs, count) : multiply<Bf16, Whole>(team, jobs, count);
  else
    is_int8 ? multiply<Fp32, Bytes<Fp32>>(team, jobs, count) : multiply<Fp32, Whole>(team, jobs, count);
}

}  // namespace nova

using namespace nova;

extern "C" {

// Bytes of the packed weight; floats of the bias, padded to whole panels.
int64_t nova_linear_bytes(const LinearDesc* d) { return ceil_div(d->n, PANEL) * PANEL * d->units() * step_bytes(*d); }

int64_t nova_linear_columns(const LinearDesc* d) { return ceil_div(d->n, PANEL) * PANEL; }

int nova_linear_pack(const LinearDesc* d, const void* weight, void* out, int threads) {
  return guarded([&] {
    if (d->dtype == 0)
      pack<Bf16>(*d, (const uint16_t*)weight, (uint16_t*)out, threads);
    else
      pack<Fp32>(*d, (const float*)weight, (float*)out, threads);
  });
}

// `out` is zeroed; `scale` [n].
int nova_linear_quantise(const LinearDesc* d, const void* weight, void* out, float* scale, int threads) {
  return guarded([&] {
    if (d->dtype == 0)
      quantise<Bf16>(*d, (const uint16_t*)weight, (int8_t*)out, scale, threads);
    else
      quantise<Fp32>(*d, (const float*)weight, (int8_t*)out, scale, threads);
  });
}

// Rows of the weight as given, bit for bit; of int8 rows, each element times the row's scale, rounded to the dtype.
// OUT_OF_RANGE when there is no such row.
int nova_linear_rows(const LinearDesc* d, const int64_t* ids, int64_t count, void* out, int threads) {
  return guarded([&] {
    for (long i = 0; i < count; i++)
      if (ids[i] < 0 || ids[i] >= d->n) throw std::out_of_range("row");
    d->dtype == 0 ? gather_any<Bf16>(*d, ids, count, out, threads) : gather_any<Fp32>(*d, ids, count, out, threads);
  });
}

int nova_linear(const LinearDesc* d, const void* x, int64_t x_stride, int64_t m, void* out, int threads) {
  return guarded([&] {
    Team team(threads);
    linear(team, *d, {x, x_stride, m, out});
  });
}

}  // extern "C"
