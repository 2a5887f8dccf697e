// Packed weights and the matrix product over them, on a team of threads (linear.cpp says how it works, and
// quantised.cpp where weights are codes).
#pragma once

#include <algorithm>
#include <memory>

#include "aligned.h"
#include "simd.h"
#include "team.h"

namespace nova {

// How the elements of a weight are kept: `FORMAT_CODES` in native.py.
enum WeightFormat : int32_t {
  AS_DTYPE = 0,  // in the dtype of the activations
  CODES8 = 1,    // whole numbers of 8 bits, with a scale for each group of a row's features
  CODES4 = 2,    // of 4 bits
};

// Mirrors `LinearDesc` in native.py.
struct LinearDesc {
  const void* weight;  // packed: units [panel][ceil(K / E)][PANEL], or codes (quantised.cpp)
  const float* bias;   // [num_panels * PANEL], or null
  int64_t n, k;        // rows and columns of the weight as given
  int32_t dtype;       // of activations: 0 bf16, 1 fp32
  int32_t format;      // of the weight: a `WeightFormat`
  const float* scale;  // of codes: [panel][group][PANEL]
  const float* shift;  // what is added to each code's element, likewise; null: codes are symmetric
  int64_t group_size;  // features of a group; it divides K

  int elements() const { return dtype == 0 ? 2 : 1; }
  long units() const { return ceil_div(k, elements()); }  // of one row, AS_DTYPE
  long groups() const { return k / group_size; }
};

// Rows of activations lie one behind the other, or in tiles as a matrix unit reads them: 64 bytes of each of 32 rows,
// then the next 64 of these. 32 rows that lie apart are in as many pages, and at some widths in one set of a cache; of
// a few rows it is tiles that fall into few sets, so these never lie in them.
constexpr int TILED_ROWS = 32, TILED_BYTES = 64;

// How many rows a buffer of `rows` in tiles has room for.
inline long tiled_rows(long rows) { return ceil_div(rows, TILED_ROWS) * TILED_ROWS; }
// Where a byte of a row lies, of rows of `width` bytes.
inline long tiled_at(long row, long byte, long width) {
  return row / TILED_ROWS * TILED_ROWS * width + byte / TILED_BYTES * (TILED_ROWS * TILED_BYTES) +
         row % TILED_ROWS * TILED_BYTES + byte % TILED_BYTES;
}

// Where one of `parts` begins, of rows that are cut between whole `unit`s alone.
inline long cut(long rows, long part, long parts, long unit) {
  return std::min(rows, ceil_div(rows, unit) * part / parts * unit);
}

constexpr int NV = VL == 4 ? 4 : 2;        // vectors in a panel, whose steps are whole cache lines
constexpr int PANEL = NV * VL;             // weight rows in a panel
constexpr int MR_MAX = ACCUMULATORS / NV;  // activation rows in a tile: MR * NV accumulators fill the registers

// Activations in INT8, as products over codes read them: rows of `width` bytes, and three numbers for each of their
// groups, which lie as a tile of rows reads them: [groups][rows].
struct Rounded {
  long rows, width, groups;
  bool tiled;  // how `q` lies
  AlignedArray<int8_t> q;
  std::unique_ptr<float[]> scale, sum;  // the sum times the scale
  std::unique_ptr<int32_t[]> begin;     // what a sum of products begins at: the zero of all codes taken from it

  Rounded(long rows, long width, long groups, bool tiled = false)
      : rows(rows),
        width(width),
        groups(groups),
        tiled(tiled),
        q(aligned_array<int8_t>((tiled ? tiled_rows(rows) : rows) * width)),
        scale(new float[rows * groups]),
        sum(new float[rows * groups]),
        begin(new int32_t[rows * groups]) {}

  long at(long row, long group) const { return group * rows + row; }  // of the three numbers
};

// What one product reads and writes. Strides in elements.
struct LinearCall {
  const void* x;  // [m, k]
  long x_stride;
  long m;
  void* out;                         // [m, n], or [m, n / 2] when gated
  const void* residual = nullptr;    // [m, n]: out = round(residual + round(product)); may be `out` itself
  bool gated = false;                // out = round(silu(round(left half)) * round(right half))
  const Rounded* rounded = nullptr;  // x, if it was rounded for a weight that reads it alike: x is not read then
  long first = 0;                    // row of these that is its first
  bool tiled = false;                // x lies in tiles; only where `reads_tiles`
  bool writes_tiles = false;         // what is computed is to lie so; only there, of a gated product
};

// Whether a product can be gated: the halves must not share a panel.
inline bool can_gate(const LinearDesc& d) { return d.n % (2 * PANEL) == 0; }

struct LinearJob {
  const LinearDesc& d;
  LinearCall call;
};

// Whether a product of so many rows over a weight reads them in tiles, if they lie in tiles, and can write tiles if it
// is gated.
bool reads_tiles(const LinearDesc& d, long m);

// Products of one dtype; none reads what another one writes. Neighbours of one format are worked off in one loop.
void linear(Team& team, const LinearJob* jobs, long count);

inline void linear(Team& team, const LinearDesc& d, const LinearCall& call) {
  const LinearJob job{d, call};
  linear(team, &job, 1);
}

// Of weights that are codes (quantised.cpp). Rows are rounded into tiles where that is asked for and the product reads
// tiles; `first` of those who read them is 0 then. `reads_alike`: what was rounded for one of these is as the other
// needs it.
Rounded rounded_rows(Team& team, const LinearDesc& d, const LinearCall& call, bool tiled = false);
bool reads_alike(const LinearDesc& a, const LinearDesc& b);
void quantised_linear(Team& team, const LinearJob* jobs, long count);
long quantised_bytes(const LinearDesc& d);
void quantised_rows(const LinearDesc& d, const int64_t* ids, long count, void* out, int threads);

}  // namespace nova
