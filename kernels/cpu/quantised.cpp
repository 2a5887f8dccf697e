// y = x @ W.T over weights that are whole numbers of 8 or 4 bits, with a scale (and a shift) for each group of
// features.
//
// Activations are rounded to INT8 once for each product (once for all experts of a layer), every group of a row's
// features as a row of its own, by the definition of kernels/ops/quantised.py; a weight that is rounded by row is one
// group. Products and sums within a group are exact, so neither tile nor instruction set can change them. Then, in
// fp32, one chain for an output element:
//
//   y = fma(float(sum of code * q) * x scale, weight scale, y)      for each group, ascending
//   y = fma(float(sum of q) * x scale, shift, y)                    likewise, where codes are not symmetric
//
// so that a row has the same bits in any batch and on every CPU. Symmetric codes of 4 bits stand for 8 less than they
// are: 8 times the sum of q is taken from the sum before it becomes fp32.
//
// Packing: as in linear.cpp, rows of a panel side by side, here in steps of eight features: [panel][step][half][row]
// (codes.h), with codes of 4 bits two to a byte, which are unpacked in registers by each tile that passes. Scales and
// shifts: [panel][group][PANEL].
//
// GCC gives out registers over a whole function at once here: loop by loop, as it does by itself, it copies a tile's
// sums to and fro around each row that is stored (1 % of a prompt's step).
#pragma GCC optimize("ira-region=one")
#include <algorithm>
#include <array>
#include <memory>
#include <type_traits>
#include <utility>

#include "abi.h"
#include "codes.h"
#include "linear.h"
#include "matrix_product.h"
#include "tiling.h"

namespace nova {
namespace {

constexpr int SYMMETRIC_INT4 = 8;  // the code that stands for 0

// What is taken from each stored code.
template <class W>
int zero_of(const LinearDesc& d) {
  return W::ZERO + (d.format == CODES4 && !d.shift ? SYMMETRIC_INT4 : 0);
}

long steps_of(const LinearDesc& d) { return ceil_div(d.group_size, STEP); }  // of a group
long padded_columns(const LinearDesc& d) { return d.groups() * steps_of(d) * STEP; }

// Rows of `Rounded` from one on.
struct Rows {
  const long width, groups, stride;  // the last: numbers between groups
  const int8_t* q;
  const float *scale, *sum;
  const int32_t* begin;

  Rows(const Rounded& all, long first)
      : width(all.width),
        groups(all.groups),
        stride(all.rows),
        q(&all.q[first * width]),
        scale(&all.scale[first]),
        sum(&all.sum[first]),
        begin(&all.begin[first]) {}
};

// x / y to the nearest whole number, ties to even, as a division of fp32 gives it. For bf16 the inverse, which a row
// needs once, and one correction give the same (a test looks at all mantissas), unless y is so small that what is left
// of x has no bits.
template <class T>
struct Divisor {
  const vf y, inverse;
  const bool by_inverse;

  explicit Divisor(float y)
      : y(set1(y)), inverse(set1(1.0f / y)), by_inverse(T::E == 2 && y >= 0x1p-100f && y < INFINITY) {}

  vi divide(vf x) const {
    if (!by_inverse) return to_int(div(x, y));
    const vf near = mul(x, inverse);
    return to_int(fma(fnma(near, y, x), inverse, near));
  }
};

// The bits of the largest of `count` numbers without their signs, NaN where one is: as whole numbers, bits are ordered
// as what they stand for, with NaN above all.
template <class T>
int32_t largest_bits(const typename T::type* from, long count) {
  vi most = set1i(0);
  long k = 0;
  if constexpr (T::E == 2) {  // two numbers a lane, as they lie
    for (; k + 2 * VL <= count; k += 2 * VL) most = max_pairs(most, andi(loadi(from + k), set1i(0x7fff7fffu)));
    most = maxi(shl16(most), andi(most, set1i(0xffff0000u)));
  }
  for (; k < count; k += VL) most = maxi(most, andi(asi(load_first<T>(from + k, count - k)), set1i(0x7fffffffu)));
  return hmaxi(most);
}

// Rounds `count` numbers to `padded` bytes and gives the scale: the largest over 127, NaN where one is. `sum` is that
// of what was rounded. `line`: bytes from each 64 of them to the next; others than 64 where all 64 are there.
template <class T>
float round_to_int8(const typename T::type* from, long count, int8_t* to, long padded, int32_t* sum,
                    long line = TILED_BYTES) {
  const int32_t bits = largest_bits<T>(from, count);
  float scale;
  std::memcpy(&scale, &bits, 4);
  scale /= 127.0f;
  const Divisor<T> step(scale > 0 ? scale : 1.0f);
  vi total = set1i(0);
  for (long k = 0; k < count; k += VL) {
    const vi rounded = step.divide(load_first<T>(from + k, count - k));
    total = addi(total, rounded);
    if (padded - k >= VL) {
      store_int8(to + k / TILED_BYTES * line + k % TILED_BYTES, rounded);
    } else {
      int8_t last[VL];
      store_int8(last, rounded);
      std::memcpy(to + k, last, padded - k);
    }
  }
  for (long k = ceil_div(count, VL) * VL; k < padded; k++) to[k] = 0;
  *sum = hsumi(total);
  return scale;
}

template <class T>
Rounded rounded_for(Team& team, const LinearDesc& d, const LinearCall& call, int zero, bool tiled) {
  using E = typename T::type;
  const long groups = d.groups(), padded = steps_of(d) * STEP;
  Rounded out(call.m, padded_columns(d), groups, tiled);
  const long line = tiled ? TILED_ROWS * TILED_BYTES : TILED_BYTES;
  team.rows(call.m, [&](long row) {
    for (long g = 0; g < groups; g++) {
      int32_t sum;
      const E* from = (const E*)call.x + row * call.x_stride + g * d.group_size;
      const long at = out.at(row, g);
      int8_t* to = &out.q[tiled ? tiled_at(row, 0, out.width) : row * out.width + g * padded];
      out.scale[at] = round_to_int8<T>(from, d.group_size, to, padded, &sum, line);
      out.sum[at] = (float)sum * out.scale[at];
      out.begin[at] = -zero * sum;
    }
  });
  return out;
}

// One panel of the weight, and what belongs to it.
struct Panel {
  const char* w;
  const float* scale;
  const float* shift;
  const char* next;  // what is asked for meanwhile, from there on so many bytes for each step
  long next_step;
};

// out[r][lane] = row r of x by panel row `lane`, for MR rows from `row` on. After each `pause` steps a row of the tile
// `before` is stored.
template <class W, int MR, int LINES, class Before>
void tile(const Rows& x, long row, const Panel& panel, long steps, float* out, Before& before, long pause) {
  // Few rows leave registers for two chains of sums each, which hide the products' latency. Sums are exact.
  constexpr int CHAINS = W::STEPS_IN_16_BITS == 0 && 2 * MR * NV <= REGISTERS / 2 ? 2 : 1;
  const long width = x.width;
  const int8_t* base[(MR + 2) / 3];
  base[0] = x.q + row * width;
  for (int i = 1; i < (MR + 2) / 3; i++) base[i] = base[i - 1] + 3 * width;
  const char *w = panel.w, *next = panel.next;
  for (long g = 0; g < x.groups; g++) {
    const long at = g * x.stride + row;
    const int32_t* begin = x.begin + at;
    const float *x_scale = x.scale + at, *x_sum = x.sum + at;
    vi acc[CHAINS][MR][NV];
#pragma GCC unroll 12
    for (int r = 0; r < MR; r++)
      for (int v = 0; v < NV; v++) {
        acc[0][r][v] = set1i((uint32_t)begin[r]);
        if (CHAINS == 2) acc[CHAINS - 1][r][v] = set1i(0);
      }
    // Calls add(chain, row, vector, its codes, the row's unit) for all of a step.
    const auto step = [&](auto&& add) __attribute__((always_inline)) {
      for (int line = 0; line < LINES; line++) prefetch(next + line * 64);
      next += panel.next_step;
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        vi codes[NV];
        for (int v = 0; v < NV; v++) codes[v] = W::half(w, v, h);
#pragma GCC unroll 12
        for (int r = 0; r < MR; r++) {
          const vi a = broadcast_unit(base[r / 3] + (r % 3) * width + h * 4);
          for (int v = 0; v < NV; v++) add(h % CHAINS, r, v, codes[v], a);
        }
      }
      for (const int8_t*& at : base) at += STEP;
      w += W::STEP_BYTES;
    };
#pragma GCC unroll 1
    for (long left = steps; left > 0;) {
      long some = before.rows_left() ? std::min(left, pause) : left;
      left -= some;
      if constexpr (W::STEPS_IN_16_BITS > 0) {
#pragma GCC unroll 1
        while (some > 0) {
          const long few = std::min<long>(some, W::STEPS_IN_16_BITS);
          some -= few;
          vi sums[MR][NV];
#pragma GCC unroll 12
          for (int r = 0; r < MR; r++)
            for (int v = 0; v < NV; v++) sums[r][v] = set1i(0);
#pragma GCC unroll 1
          for (long i = 0; i < few; i++)
            step([&](int, int r, int v, vi codes, vi a)
                     __attribute__((always_inline)) { sums[r][v] = W::add_pairs(sums[r][v], codes, a); });
#pragma GCC unroll 12
          for (int r = 0; r < MR; r++)
            for (int v = 0; v < NV; v++) acc[0][r][v] = addi(acc[0][r][v], W::sum_pairs(sums[r][v]));
        }
      } else {
#pragma GCC unroll 1  // twice, sums would be copied to and fro
        for (; some > 0; some--)
          step([&](int chain, int r, int v, vi codes, vi a)
                   __attribute__((always_inline)) { acc[chain][r][v] = W::dot(acc[chain][r][v], codes, a); });
      }
      if (before.rows_left()) before.store_row();
    }
    // Cases are told apart once, not for each sum: that and their addresses took 4 % of a product of 896 features.
    const auto add_to_rows = [&](auto is_first, auto is_shifted) __attribute__((always_inline)) {
      vf scale[NV], shift[NV];
      for (int v = 0; v < NV; v++) {
        scale[v] = loadf(panel.scale + g * PANEL + v * VL);
        if (is_shifted) shift[v] = loadf(panel.shift + g * PANEL + v * VL);
      }
#pragma GCC unroll 12  // else sums would live in memory, also while they are made
      for (int r = 0; r < MR; r++)
        for (int v = 0; v < NV; v++) {
          const vi sum = CHAINS == 2 ? addi(acc[0][r][v], acc[CHAINS - 1][r][v]) : acc[0][r][v];
          vf y = is_first ? zero() : loadf(out + r * PANEL + v * VL);
          y = fma(mul(to_float(sum), set1(x_scale[r])), scale[v], y);
          if (is_shifted) y = fma(set1(x_sum[r]), shift[v], y);
          storef(out + r * PANEL + v * VL, y);
        }
    };
    if (panel.shift)
      g ? add_to_rows(std::false_type(), std::true_type()) : add_to_rows(std::true_type(), std::true_type());
    else
      g ? add_to_rows(std::false_type(), std::false_type()) : add_to_rows(std::true_type(), std::false_type());
  }
}

template <class Before>
using Tile = void (*)(const Rows&, long, const Panel&, long, float*, Before&, long);

template <class W, int LINES, class Before, int MR>
constexpr Tile<Before> tile_of() {
  if constexpr (has_tile<Before>(MR))
    return tile<W, MR, LINES, Before>;
  else
    return nullptr;
}

template <class W, int LINES, class Before, int... MR>
constexpr std::array<Tile<Before>, sizeof...(MR)> tiles_of(std::integer_sequence<int, MR...>) {
  return {tile_of<W, LINES, Before, MR>()...};
}

// By the number of their rows.
template <class W, int LINES, class Before>
constexpr auto tiles = tiles_of<W, LINES, Before>(std::make_integer_sequence<int, W::TILE_ROWS + 1>());

template <class T, class W>
class Product {
 public:
  Product(const LinearJob& job, long num_products, Team& team)
      : d_(job.d),
        call_(job.call),
        own_(call_.rounded ? nullptr : new Rounded(nova::rounded_rows(team, d_, call_))),
        x_(call_.rounded ? *call_.rounded : *own_, call_.rounded ? call_.first : 0),
        tiling_(call_.m, panels_, panel_bytes() * (call_.gated ? 2 : 1), num_products, team.size(), W::TILE_ROWS) {}

  long items() const { return tiling_.items(); }

  void compute(long item) const {
    constexpr int HALF = LINES > 1 ? LINES / 2 : 1;  // two tiles are the fewest of several
    Epilogue<T> epilogue(d_, call_);
    NoRows none;
    if (tiling_.is_stream)
      compute(item, tiles<W, LINES, NoRows>.data(), none, epilogue);
    else if constexpr (STORES_BETWEEN_STEPS)
      compute(item, tiles<W, HALF, Epilogue<T>>.data(), epilogue, epilogue);
    else
      compute(item, tiles<W, HALF, NoRows>.data(), none, epilogue);
  }

 private:
  static constexpr int LINES = W::STEP_BYTES / 64;  // cache lines of a step

  template <class Before>
  void compute(long item, const Tile<Before>* tiles, Before& before, Epilogue<T>& epilogue) const {
    const bool stream = tiling_.is_stream;
    const long steps = groups_ * steps_ * (call_.gated ? 2 : 1);
    alignas(64) float results[2][2][MR_MAX * PANEL];  // of a tile, and of the one before
    int turn = 0;
    tiling_.compute(item, [&](long panel, long row, int rows, long t, long row_tiles) {
      // One tile asks for what it will need itself in a moment; several share out the next panel (as in linear.cpp).
      const long each = stream ? LINES * 64 : ceil_div(LINES * 64, row_tiles);
      const long ahead = stream ? PREFETCH_BYTES : codes_bytes_ + t * groups_ * steps_ * each;
      const long pause = ceil_div(steps, epilogue.rows_left() + 1);
      float (*result)[MR_MAX * PANEL] = results[turn ^= 1];
      tiles[rows](x_, row, this->panel(panel, ahead, each), steps_, result[0], before, pause);
      if (call_.gated)
        tiles[rows](x_, row, this->panel(panel + panels_, ahead, each), steps_, result[1], before, pause);
      epilogue.store_rest();
      if (call_.gated)
        epilogue.take_gated(result[0], result[1], rows, row, panel, panel + panels_);
      else
        epilogue.take(result[0], rows, row, panel);
      if (std::is_same_v<Before, NoRows>) epilogue.store_rest();
    });
    epilogue.store_rest();
  }

  const LinearDesc& d_;
  const LinearCall call_;
  const long groups_ = d_.groups(), steps_ = steps_of(d_), codes_bytes_ = groups_ * steps_ * W::STEP_BYTES;
  const long panels_ = call_.gated ? d_.n / 2 / PANEL : ceil_div(d_.n, PANEL);
  std::unique_ptr<Rounded> own_;  // of x, where the caller has not rounded it
  const Rows x_;
  const Tiling tiling_;

  long panel_bytes() const { return codes_bytes_ + groups_ * PANEL * (d_.shift ? 8 : 4); }

  Panel panel(long number, long ahead, long each) const {
    const char* w = (const char*)d_.weight + number * codes_bytes_;
    const long numbers = number * groups_ * PANEL;
    return {w, d_.scale + numbers, d_.shift ? d_.shift + numbers : nullptr, w + ahead, each};
  }
};

#if defined(NOVA_MATRIX)
// On the matrix unit, where a row is one group and fills its steps: sums are the same whole numbers.
template <class T_>
class OnMatrixUnit {
 public:
  using type = T_;
  using Dot = DotBytes;
  static constexpr long FEATURES = TILE_BYTES;  // of a step

  OnMatrixUnit(const LinearJob& job, Team& team)
      : d_(job.d),
        own_(job.call.rounded ? nullptr : new Rounded(nova::rounded_rows(team, d_, job.call, true))),
        x_(job.call.rounded ? *job.call.rounded : *own_, job.call.rounded ? job.call.first : 0),
        tiled_(job.call.rounded ? job.call.rounded->tiled : own_->tiled) {}

  static bool can(const LinearDesc& d) {
    return d.format == CODES8 && !d.shift && d.groups() == 1 && d.k % FEATURES == 0;
  }

  const char* x() const { return (const char*)x_.q; }
  long stride() const { return x_.width; }
  bool tiled() const { return tiled_; }

  void finish(float* sums, long row, long panel) const {
    const vi begin = set1i((uint32_t)x_.begin[row]);
    const vf scale = set1(x_.scale[row]);
    for (int v = 0; v < NV; v++) {
      const vf product = mul(to_float(addi(loadi(sums + v * VL), begin)), scale);
      storef(sums + v * VL, fma(product, loadf(d_.scale + panel * PANEL + v * VL), zero()));
    }
  }

 private:
  const LinearDesc& d_;
  std::unique_ptr<Rounded> own_;
  const Rows x_;
  const bool tiled_;
};
#else
template <class T>
struct OnMatrixUnit {
  static bool can(const LinearDesc&) { return false; }
};
#endif

// Where the step of a feature begins for one row of the weight, and which of its features it is.
template <class W>
std::pair<long, int> place(const LinearDesc& d, long row, long k) {
  const long in_group = k % d.group_size, step = k / d.group_size * steps_of(d) + in_group / STEP;
  const long steps = row / PANEL * steps_of(d) * d.groups() + step;
  return {steps * W::STEP_BYTES + row % PANEL * 4, (int)(in_group % STEP)};
}

template <class W>
void pack_row(const LinearDesc& d, const int8_t* codes, long row, char* out) {
  for (long k = 0; k < d.k; k++) {
    const auto [at, feature] = place<W>(d, row, k);
    W::put(out + at, feature, codes[k]);
  }
}

template <class T>
void round_rows(const LinearDesc& d, const typename T::type* weight, char* out, float* scale, int threads) {
  Team(threads).rows(d.n, [&](long row) {
    const std::unique_ptr<int8_t[]> codes(new int8_t[d.k]);
    int32_t sum;
    scale[row] = round_to_int8<T>(weight + row * d.k, d.k, codes.get(), d.k, &sum);
    pack_row<Bytes>(d, codes.get(), row, out);
  });
}

// A row lies in as many cache lines as it has steps, and more: those of the next one are asked for meanwhile.
template <class T, class W>
void gather(const LinearDesc& d, const int64_t* ids, long count, typename T::type* out, int threads) {
  constexpr long SOME = 8 * STEP;  // features that are unpacked before they are scaled
  const float below = d.format == CODES4 ? SYMMETRIC_INT4 : 0;
  const long groups = d.groups(), size = d.group_size;
  const auto first_step = [&](long i) {
    return (const char*)d.weight + place<W>(d, ids[i], 0).first;
  };
  Team(threads).rows(count, [&](long i) {
    const char *codes = first_step(i), *next = first_step(std::min(i + 1, count - 1));
    typename T::type* to = out + i * d.k;
    int8_t some[SOME] = {};
    for (long g = 0; g < groups; g++, to += size) {
      const long number = (ids[i] / PANEL * groups + g) * PANEL + ids[i] % PANEL;
      const vf scale = set1(d.scale[number]), shift = d.shift ? set1(d.shift[number]) : mul(set1(-below), scale);
      for (long k = 0; k < size; k += SOME) {
        const long left = std::min(SOME, size - k);
        for (long feature = 0; feature < left; feature += STEP, codes += W::STEP_BYTES, next += W::STEP_BYTES) {
          W::unpack(codes, some + feature);
          for (int half = 0; half < W::HALVES; half++) prefetch(next + half * PANEL * 4);
        }
        for (long v = 0; v < left; v += VL)
          store_first<T>(to + k + v, add(mul(to_float(load_int8(some + v)), scale), shift), left - v);
      }
    }
  });
}

}  // namespace

Rounded rounded_rows(Team& team, const LinearDesc& d, const LinearCall& call, bool tiled) {
  const int zero = d.format == CODES8 ? zero_of<Bytes>(d) : zero_of<Nibbles>(d);
  tiled = tiled && call.m > TILED_ROWS && OnMatrixUnit<Bf16>::can(d);
  return d.dtype == 0 ? rounded_for<Bf16>(team, d, call, zero, tiled) : rounded_for<Fp32>(team, d, call, zero, tiled);
}

bool reads_alike(const LinearDesc& a, const LinearDesc& b) {
  const auto is_codes = [](const LinearDesc& d) {
    return d.format != AS_DTYPE;
  };
  return is_codes(a) && a.format == b.format && a.dtype == b.dtype && a.k == b.k && a.group_size == b.group_size &&
         !a.shift == !b.shift;
}

template <class T>
void quantised_linear_of(Team& team, const LinearJob* jobs, long count) {
#if defined(NOVA_MATRIX)
  if (std::all_of(jobs, jobs + count, [](const LinearJob& job) { return OnMatrixUnit<T>::can(job.d); }))
    return multiply<MatrixProduct<OnMatrixUnit<T>>>(team, jobs, count);
#endif
  jobs[0].d.format == CODES8 ? multiply<Product<T, Bytes>>(team, jobs, count)
                             : multiply<Product<T, Nibbles>>(team, jobs, count);
}

void quantised_linear(Team& team, const LinearJob* jobs, long count) {
  jobs[0].d.dtype == 0 ? quantised_linear_of<Bf16>(team, jobs, count) : quantised_linear_of<Fp32>(team, jobs, count);
}

long quantised_bytes(const LinearDesc& d) {
  return ceil_div(d.n, PANEL) * PANEL * padded_columns(d) / (d.format == CODES4 ? 2 : 1);
}

void quantised_rows(const LinearDesc& d, const int64_t* ids, long count, void* out, int threads) {
  if (d.dtype == 0)
    d.format == CODES8 ? gather<Bf16, Bytes>(d, ids, count, (uint16_t*)out, threads)
                       : gather<Bf16, Nibbles>(d, ids, count, (uint16_t*)out, threads);
  else
    d.format == CODES8 ? gather<Fp32, Bytes>(d, ids, count, (float*)out, threads)
                       : gather<Fp32, Nibbles>(d, ids, count, (float*)out, threads);
}

}  // namespace nova

using namespace nova;

extern "C" {

// Codes [n, k], one a byte, into `out`, which is zeroed.
int nova_linear_pack_codes(const LinearDesc* d, const int8_t* codes, void* out, int threads) {
  return guarded([&] {
    Team(threads).rows(d->n, [&](long row) {
      d->format == CODES8 ? pack_row<Bytes>(*d, codes + row * d->k, row, (char*)out)
                          : pack_row<Nibbles>(*d, codes + row * d->k, row, (char*)out);
    });
  });
}

// Rounds rows [n, k] of the weight to INT8 and packs them; `out` is zeroed, `scale` [n].
int nova_linear_round(const LinearDesc* d, const void* weight, void* out, float* scale, int threads) {
  return guarded([&] {
    if (d->dtype == 0)
      round_rows<Bf16>(*d, (const uint16_t*)weight, (char*)out, scale, threads);
    else
      round_rows<Fp32>(*d, (const float*)weight, (char*)out, scale, threads);
  });
}

}  // extern "C"
