// Products on the matrix unit of a CPU (AMX): eight tiles of up to 16 rows of 64 bytes, and one instruction that
// multiplies 16 rows of activations by a panel's 16 columns, 64 bytes of K deep.
//
// A packed panel is what the unit reads as it lies: a step is 16 units of 4 bytes of PANEL rows, so two tiles. Beside
// it are one or two tiles of activation rows, and what they are multiplied to stays in four. Any number of rows is
// computed by the same instructions, also a single one: where memory is what is waited for, the unit is fast enough.
//
// A sum of BF16 is not the chain of simd.h. The unit adds what is even and what is odd of 32 features in a chain of
// fused multiply-adds each, from zero, then the two to each other, and this to the sum; numbers too small to be normal
// are zero. This is as exact, and it is the same for each row whatever is beside it. Without such a unit the same is
// computed one by one for the tests (NOVA_EMULATED_TILES), to the same bits: a test compares them where there is one.
#pragma once

#include "linear.h"

#if defined(__AMX_TILE__) || defined(NOVA_EMULATED_TILES)
#define NOVA_MATRIX

#include <algorithm>

namespace nova {

constexpr int TILE_ROWS = 16;
constexpr int TILE_BYTES = 64;                       // of a row
constexpr int MATRIX_ROWS = 2 * TILE_ROWS;           // activation rows beside one panel
constexpr long MATRIX_STEP = TILE_ROWS * PANEL * 4;  // bytes of a panel that are multiplied at once
static_assert(PANEL == 2 * TILE_BYTES / 4, "two tiles lie side by side in a panel");

// What tells the unit its tiles' shapes.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int count, int bytes = TILE_BYTES) {
    rows[tile] = (uint8_t)count, row_bytes[tile] = (uint16_t)bytes;
  }
};

// For so many activation rows beside a panel: 0 to 3 hold sums (of its halves, for the first 16 rows and the others), 4
// and 5 activation rows, 6 and 7 a panel's halves.
struct ProductShapes : TileShapes {
  explicit ProductShapes(int count) {
    const int of_first = std::min(count, TILE_ROWS), of_second = std::max(count - TILE_ROWS, 1);
    for (int tile : {0, 1, 4}) set(tile, of_first);
    for (int tile : {2, 3, 5}) set(tile, of_second);
    for (int tile : {6, 7}) set(tile, TILE_ROWS);
  }
};

#if defined(__AMX_TILE__)
// Spelled out: GCC's own intrinsics take no template's number for a tile, and do not say that all shapes are read.
inline void set_shapes(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
inline void release_tiles() { asm volatile("tilerelease"); }
template <int TILE>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(TILE));
}
template <int TILE>
inline void tile_load(const char* from, long stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(TILE), "r"(from), "r"(stride) : "memory");
}
template <int TILE>
inline void tile_store(char* to, long stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(TILE), "r"(to), "r"(stride) : "memory");
}
struct DotBf16 {
  template <int SUM, int A, int B>
  static void accumulate() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
  }
};
struct DotBytes {  // A with a sign, B without
  template <int SUM, int A, int B>
  static void accumulate() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
  }
};
#else
#include "matrix_emulated.h"
#endif

// The unit while one thread computes on it, in `Shapes` of so many rows.
template <class Shapes>
class MatrixUnit {
 public:
  MatrixUnit() = default;
  ~MatrixUnit() {
    if (rows_) release_tiles();
  }
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;

  void begin(int rows) {
    if (rows == rows_) return;
    set_shapes(Shapes(rows));
    rows_ = rows;
  }

 private:
  int rows_ = 0;
};

// What is computed of a panel beside a tile of rows: `steps` of its K, in order; what is asked for meanwhile, `ahead`
// bytes for each; and where the sums [rows][PANEL] of 4 bytes are.
struct MatrixTile {
  const char* x;  // rows `stride` bytes apart, and their next bytes `x_step` behind
  long stride, x_step;
  const char* w;
  long steps;
  const char* next;
  long ahead;
  char* sums;
  bool goes_on;  // from the sums that are there
};

// For the shapes that the unit has; TWO: more than 16 rows. Between the steps the rows of the tile `before` are stored,
// all of them before this one's sums are, which may lie in the same place. It also says what of the weight is asked for
// before each of a step's instructions (eight, of which up to 16 rows have five), and into which cache.
template <class Dot, bool TWO, class Before>
inline void multiply_tiles(const MatrixTile& tile, Before& before) {
  constexpr long LINE = PANEL * 4, SECOND = TILE_ROWS * LINE;
  char* sums = tile.sums;
  if (tile.goes_on) {
    tile_load<0>(sums, LINE);
    tile_load<1>(sums + TILE_BYTES, LINE);
    if constexpr (TWO) {
      tile_load<2>(sums + SECOND, LINE);
      tile_load<3>(sums + SECOND + TILE_BYTES, LINE);
    }
  } else {
    tile_zero<0>();
    tile_zero<1>();
    if constexpr (TWO) {
      tile_zero<2>();
      tile_zero<3>();
    }
  }
  const char *x = tile.x, *second = x + TILE_ROWS * tile.stride, *w = tile.w, *next = tile.next;
  const long stride = tile.stride, x_step = tile.x_step, steps = tile.steps, ahead = tile.ahead;
  const long burst = ceil_div(before.rows_left(), steps);  // rows after each `pause` steps
  const long pause = burst ? std::max<long>(1, steps / (before.rows_left() + 1)) : steps;
  for (long step = 0; step < steps;) {
    const long end = before.rows_left() ? std::min(steps, step + pause) : steps;
#pragma GCC unroll 1
    for (; step < end; step++) {
      Before::template ask<0>(next, ahead);
      tile_load<4>(x, stride);
      Before::template ask<1>(next, ahead);
      tile_load<6>(w, LINE);
      Before::template ask<2>(next, ahead);
      Dot::template accumulate<0, 4, 6>();
      Before::template ask<3>(next, ahead);
      tile_load<7>(w + TILE_BYTES, LINE);
      Before::template ask<4>(next, ahead);
      Dot::template accumulate<1, 4, 7>();
      Before::template ask<5>(next, ahead);
      if constexpr (TWO) tile_load<5>(second, stride);
      Before::template ask<6>(next, ahead);
      if constexpr (TWO) Dot::template accumulate<2, 5, 6>();
      Before::template ask<7>(next, ahead);
      if constexpr (TWO) Dot::template accumulate<3, 5, 7>();
      x += x_step, second += x_step, w += MATRIX_STEP, next += ahead;
    }
    for (long i = 0; i < burst && before.rows_left(); i++) before.store_row();
  }
  tile_store<0>(sums, LINE);
  tile_store<1>(sums + TILE_BYTES, LINE);
  if constexpr (TWO) {
    tile_store<2>(sums + SECOND, LINE);
    tile_store<3>(sums + SECOND + TILE_BYTES, LINE);
  }
}

}  // namespace nova
#endif
