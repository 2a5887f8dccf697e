// A product over a packed weight on the matrix unit (matrix.h).
//
// Few rows are one tile, and the product a stream of panels through the unit. Of more, a block passes in tiles by a
// slice of a panel's K, and then by the next slice: the unit takes 64 bytes a cycle, of which the second cache gives
// half, so the slice, with as much of a tile's rows, is to stay in the first one. Sums wait in memory for the next
// slice, and go on from there with the same bits; of a panel of few slices they would cost as much as they save. Where
// K is so long that the rows do not stay in the second cache, they pass by a slice of several panels before they go on
// to the next one.
#pragma once

#include "matrix.h"

#if defined(NOVA_MATRIX)

#include <memory>

#include "tiling.h"

namespace nova {

// Tuning: Emerald Rapids, two cores.
constexpr long STREAM_BYTES = 512 << 10;  // weights of one item of a stream
constexpr long AHEAD_BYTES = 6 << 10;     // what a stream asks for ahead, into the first cache
constexpr long FAR_BYTES = 8 << 10;       // and how far beyond that into the second one
constexpr long SLICE_BYTES = 16 << 10;    // of a panel
constexpr long WHOLE_BYTES = 64 << 10;    // of one that is not cut
constexpr long TOGETHER = 8;              // panels, or half as many and the others of a gated product
constexpr long BLOCK_BYTES = 1 << 20;     // of rows that stay in the second cache with all of their K
static_assert(TILED_ROWS == MATRIX_ROWS && TILED_BYTES == TILE_BYTES && MATRIX_STEP == MATRIX_ROWS * TILE_BYTES);

// The unit's sums of a block of rows, beside each of a group's panels. A tile's rows are stored while the next one is
// computed, whose sums lie elsewhere: a block has more than one tile, or it would be a stream.
struct alignas(64) BlockSums {
  float of_panels[TOGETHER][ROW_BLOCK * PANEL];

  static BlockSums& of_thread() {
    thread_local std::unique_ptr<BlockSums> kept;
    if (!kept) kept.reset(new BlockSums);
    return *kept;
  }
};

// The tile before, of a product that is a stream. Weights are asked for twice: the first cache waits for few lines at a
// time, fewer than a memory that is far away takes to be busy, so those behind them are on their way to the second
// cache meanwhile. And a few lines before each of a step's instructions: with all of them before the first, the
// unit's own loads are slower, as if they waited behind them.
template <class T, class Of>
struct StreamedRows : Epilogue<T, Of> {
  using Epilogue<T, Of>::Epilogue;

  template <int PLACE>
  static void ask(const char* next, long) {
    constexpr int LINES = MATRIX_STEP / 64 / 8;
#pragma GCC unroll 8
    for (int line = PLACE * LINES; line < (PLACE + 1) * LINES; line++) {
      prefetch(next + line * 64);
      prefetch_far(next + line * 64 + FAR_BYTES);
    }
  }
};

// And of one whose rows pass by: the first cache has no room for the next panel beside the one that they pass by.
template <class T, class Of>
struct PassedRows : Epilogue<T, Of> {
  using Epilogue<T, Of>::Epilogue;

  template <int PLACE>
  static void ask(const char* next, long bytes) {
    if constexpr (PLACE == 0)
      for (long line = 0; line < bytes; line += 64) prefetch_far(next + line);
  }
};

// `Of`, made of (job, team), says what is multiplied:
//   Dot                        the unit's instruction
//   type                       of what comes out: Bf16 or Fp32
//   x(), stride(), tiled()     the first row, and bytes between rows, if they do not lie in tiles
//   finish(sums, row, panel)   makes the unit's sums of a row fp32, in place
template <class Of>
class MatrixProduct {
 public:
  using T = typename Of::type;

  MatrixProduct(const LinearJob& job, long num_products, Team& team)
      : d_(job.d),
        call_(job.call),
        of_(job, team),
        tiling_(call_.m, panels_, panel_bytes_ * halves_, num_products, team.size(), MATRIX_ROWS, MATRIX_ROWS,
                together_ > 1 ? together_ : 0, STREAM_BYTES) {}

  long items() const { return tiling_.items(); }

  void compute(long item) const { tiling_.is_stream ? stream(item) : pass_by(item); }

 private:
  void stream(long item) const {
    MatrixUnit<ProductShapes> unit;
    StreamedRows<T, Of> rows_before(d_, call_, of_);
    alignas(64) float sums[2][MATRIX_ROWS * PANEL];  // of both halves
    tiling_.compute(item, [&](long panel, long row, int rows, long, long) {
      unit.begin(rows);
      for (long half = 0; half < halves_; half++) {
        const char* w = weight(panel, half);
        multiply(rows, {x(row, 0), stride_, x_step_, w, steps_, w + AHEAD_BYTES, MATRIX_STEP, (char*)sums[half], false},
                 rows_before);
      }
      take(rows_before, sums[0], sums[1], rows, row, panel);
    });
    rows_before.store_rest();
  }

  void pass_by(long item) const {
    MatrixUnit<ProductShapes> unit;
    PassedRows<T, Of> rows_before(d_, call_, of_);
    BlockSums& sums = BlockSums::of_thread();
    const long slices = panel_bytes_ > WHOLE_BYTES ? ceil_div(panel_bytes_, SLICE_BYTES) : 1;
    tiling_.group(item, [&](long item_first, long item_end, const RowTiles& tiles) {
      for (long first = item_first, end; first < item_end; first = end) {
        end = std::min(first + together_, item_end);
        for (long slice = 0; slice < slices; slice++) {
          const long begin = steps_ * slice / slices, steps = steps_ * (slice + 1) / slices - begin;
          const bool is_last = slice == slices - 1;
          for (long panel = first; panel < end; panel++)
            for (long half = 0; half < halves_; half++) {
              const char* w = weight(panel, half) + begin * MATRIX_STEP;
              const char* next = half < halves_ - 1 ? weight(panel, half + 1) + begin * MATRIX_STEP
                                 : panel < end - 1  ? weight(panel + 1, 0) + begin * MATRIX_STEP
                                 : is_last          ? weight(end, 0)
                                                    : weight(first, 0) + (begin + steps) * MATRIX_STEP;
              float* all = sums.of_panels[(panel - first) * halves_ + half];
              tiles.each([&](long row, int rows, long t, long row_tiles) {
                // They share out the next slice, so that memory has no rest while any of them computes.
                const long ahead = ceil_div(MATRIX_STEP, row_tiles), at = (row - tiles.begin) * PANEL;
                unit.begin(rows);
                multiply(rows,
                         {x(row, begin), stride_, x_step_, w, steps, next + t * steps * ahead, ahead, (char*)(all + at),
                          slice > 0},
                         rows_before);
                if (!is_last || half < halves_ - 1) return;
                take(rows_before, all + at - half * ROW_BLOCK * PANEL, all + at, rows, row, panel);
                rows_before.ask_for_rows();
              });
            }
        }
      }
    });
    rows_before.store_rest();
  }

  const char* x(long row, long step) const {
    const long at = of_.tiled() ? tiled_at(row, 0, steps_ * TILE_BYTES) : row * stride_;
    return of_.x() + at + step * x_step_;
  }
  const char* weight(long panel, long half) const {
    return (const char*)d_.weight + (panel + half * panels_) * panel_bytes_;
  }

  template <class Before>
  static void multiply(int rows, const MatrixTile& tile, Before& before) {
    rows > TILE_ROWS ? multiply_tiles<typename Of::Dot, true>(tile, before)
                     : multiply_tiles<typename Of::Dot, false>(tile, before);
  }

  void take(Epilogue<T, Of>& before, float* sums, float* up, int rows, long row, long panel) const {
    if (call_.gated)
      before.take_gated(sums, up, rows, row, panel, panel + panels_);
    else
      before.take(sums, rows, row, panel);
  }

  const LinearDesc& d_;
  const LinearCall call_;
  const long halves_ = call_.gated ? 2 : 1;
  const long steps_ = d_.k / Of::FEATURES, panel_bytes_ = steps_ * MATRIX_STEP;
  const long panels_ = call_.gated ? d_.n / 2 / PANEL : ceil_div(d_.n, PANEL);
  const long together_ = std::min(call_.m, ROW_BLOCK) * steps_ * TILE_BYTES <= BLOCK_BYTES ? 1 : TOGETHER / halves_;
  Of of_;
  const long stride_ = of_.tiled() ? TILE_BYTES : of_.stride(), x_step_ = of_.tiled() ? MATRIX_STEP : TILE_BYTES;
  const Tiling tiling_;
};

}  // namespace nova
#endif
