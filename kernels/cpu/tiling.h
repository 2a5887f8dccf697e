// What products over packed weights have in common, whatever the weights' format: how rows and panels are shared out,
// and what becomes of a finished tile.
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>
#include <vector>

#include "linear.h"

namespace nova {

// Tuning: tests/bench/kernels.py; Zen 5, two cores.
constexpr long STREAM_ITEM_BYTES = 192 << 10;  // weights of one item when rows are few
constexpr long L2_ITEM_BYTES = 320 << 10;      // weights of one item when the row tiles pass by each panel
constexpr long ROW_BLOCK = 512;                // rows of one item: their activations stay in the caches beside it
constexpr long PIECE_ROWS = 128;               // of the last items, so that all threads end at nearly the same time
constexpr long PREFETCH_BYTES = 8 << 10;       // ahead, in a stream

// Rows that pass by a panel, in tiles.
struct RowTiles {
  const long begin, end, tile_rows;  // the last: the most rows of a tile
  const bool full;                   // all tiles but the last, which takes what is left

  // Calls f(first row, rows, number of the tile, and of how many).
  template <class F>
  void each(F&& f) const {
    const long count = ceil_div(end - begin, tile_rows);
    if (!count) return;
    if (full) {
      for (long t = 0, row = begin; t < count; t++, row += tile_rows)
        f(row, (int)std::min(tile_rows, end - row), t, count);
      return;
    }
    const long height = (end - begin) / count;
    const long taller = (end - begin) % count;  // tiles with a row more: 13 rows are 6 + 7, not 12 + 1
    long row = begin, ahead = 0;
    for (long t = 0; t < count; t++) {  // these are spread evenly, without a division for each
      ahead += taller;
      const bool is_taller = ahead >= count;
      if (is_taller) ahead -= count;
      f(row, (int)(height + is_taller), t, count);
      row += height + is_taller;
    }
  }
};

// How one of `num_products` in a loop of `num_members` is cut into items, and those into tiles.
class Tiling {
 public:
  // `panel_bytes` with all that is read beside a panel. `tile_rows`: the most rows of a tile. `unit`: of rows, between
  // which they are cut. `group`: panels that rows pass by together; 0: as many as the second cache holds, one after the
  // other. `stream_bytes`: weights of one item when rows are few.
  Tiling(long m, long panels, long panel_bytes, long num_products, int num_members, int tile_rows = MR_MAX,
         long unit = 1, long group = 0, long stream_bytes = STREAM_ITEM_BYTES)
      : is_stream(m <= tile_rows),
        m_(m),
        panels_(panels),
        tile_rows_(tile_rows),
        unit_(unit),
        row_blocks_(is_stream ? 1 : ceil_div(m, ROW_BLOCK)) {
    group_ = is_stream ? stream_bytes / panel_bytes : group ? group : L2_ITEM_BYTES / panel_bytes;
    // At least four items for each member, so that one who comes late finds others done.
    group_ = std::max<long>(1, std::min(group_, panels * row_blocks_ * num_products / (4 * num_members)));
    groups_ = ceil_div(panels, group_);
    // Where a panel is long work, the last ones are handed out one by one, each in pieces of its rows.
    pieces_ = is_stream || group ? 1 : m / row_blocks_ / PIECE_ROWS;
    alone_ = pieces_ < 2 ? 0 : std::min(panels, group_ * num_members);
    grouped_ = (row_blocks_ - 1) * groups_ + ceil_div(panels - alone_, group_);
  }

  const bool is_stream;  // rows are so few that the product is a stream of weights through the cores

  long items() const { return grouped_ + alone_ * pieces_; }

  // Calls f(first panel, end, rows that pass by them).
  template <class F>
  void group(long item, F&& f) const {
    if (item >= grouped_) {
      const long at = item - grouped_, panel = panels_ - alone_ + at / pieces_;
      return f(panel, panel + 1, rows(row_blocks_ - 1, at % pieces_, pieces_));
    }
    const long block = item / groups_, first = (item % groups_) * group_;
    f(first, std::min(first + group_, block < row_blocks_ - 1 ? panels_ : panels_ - alone_), rows(block, 0, 1));
  }

  // Calls f(panel, first row, rows, number of the tile beside its panel, and of how many) for the item's tiles.
  template <class F>
  void compute(long item, F&& f) const {
    group(item, [&](long panel, long end, const RowTiles& rows) {
      for (; panel < end; panel++)
        rows.each([&](long row, int count, long t, long row_tiles) { f(panel, row, count, t, row_tiles); });
    });
  }

 private:
  // One of `parts` of a block's rows.
  RowTiles rows(long block, long part, long parts) const {
    const long begin = cut(m_, block, row_blocks_, unit_), rows = cut(m_, block + 1, row_blocks_, unit_) - begin;
    return {begin + cut(rows, part, parts, unit_), begin + cut(rows, part + 1, parts, unit_), tile_rows_, unit_ > 1};
  }

  long m_, panels_, tile_rows_, unit_, row_blocks_;
  long group_, groups_;            // panels of a group, and groups of all panels
  long pieces_, alone_, grouped_;  // pieces of a panel, the last panels that are handed out in them, items before these
};

// Works off products, each a P made of (job, number of products, team), with `items()` and `compute(item)`.
template <class P>
void multiply(Team& team, const LinearJob* jobs, long count) {
  if (count == 1) {
    const P product(jobs[0], 1, team);
    return team.loop(product.items(), [&](long item) { product.compute(item); });
  }
  std::vector<P> products;
  std::vector<long> ends;  // of each product's items among all
  products.reserve(count);
  for (long i = 0; i < count; i++) {
    products.emplace_back(jobs[i], count, team);
    ends.push_back((i ? ends.back() : 0) + products.back().items());
  }
  team.loop(ends.back(), [&](long item) {
    const long i = std::upper_bound(ends.begin(), ends.end(), item) - ends.begin();
    products[i].compute(item - (i ? ends[i - 1] : 0));
  });
}

// Sums that are fp32 as they are.
struct Finished {
  static void finish(float*, long, long) {}
};
inline constexpr Finished FINISHED;

// From finished sums [rows][PANEL] in fp32, or those that `Of` finishes in place, to what is stored. It rounds where
// separate operations would have rounded, so a fused step gives the same bits as its parts.
//
// A tile's rows are stored one at a time between the steps of the next tile: what they read and write is waited for
// while there is something to multiply.
template <class T, class Of = Finished>
class Epilogue {
 public:
  using E = typename T::type;

  Epilogue(const LinearDesc& d, const LinearCall& call, const Of& of = FINISHED)
      : of_(of),
        n_(call.gated ? d.n / 2 : d.n),
        writes_tiles_(call.writes_tiles),
        out_step_(writes_tiles_ ? TILED_BYTES / E_BYTES : n_),
        biases_(d.bias),
        all_out_((E*)call.out),
        all_residual_((const E*)call.residual) {}

  // The sums of a tile whose rows are to be stored, where they stay until this is done.
  void take(float* sums, int rows, long row, long panel) {
    const long column = panel * PANEL, at = row * n_ + column;
    rows_left_ = rows, row_ = row, panel_ = panel;
    sums_ = sums, bias_ = biases_ ? biases_ + column : nullptr;
    out_ = all_out_ + (writes_tiles_ ? tiled_at(row, column * E_BYTES, n_ * E_BYTES) / E_BYTES : at),
    residual_ = all_residual_ ? all_residual_ + at : nullptr;
    if (column + PANEL > n_) store_first_columns(n_ - column);
  }

  // Those of both halves of a gated product.
  void take_gated(float* gate, float* up, int rows, long row, long panel, long up_panel) {
    take(gate, rows, row, panel);
    up_ = up, up_panel_ = up_panel, up_bias_ = biases_ ? biases_ + up_panel * PANEL : nullptr;
  }

  int rows_left() const { return rows_left_; }

  // What is the same for all of a row lies in locals: a store to the output might change what pointers lead to.
  __attribute__((always_inline)) void store_row() {
    of_.finish(sums_, row_, panel_);
    const float *sums = sums_, *bias = bias_;
    E* out = out_;
    if (up_) {
      of_.finish(up_, row_, up_panel_);
      const float *up_sums = up_, *up_bias = up_bias_;
      for (int v = 0; v < NV; v += 2) {
        vf g = value(sums, bias, v), h = value(sums, bias, v + 1);
        round_pair<T>(g, h);
        g = silu<T>(g), h = silu<T>(h);
        vf u = value(up_sums, up_bias, v), w = value(up_sums, up_bias, v + 1);
        round_pair<T>(u, w);
        store_pair<T>(out + v * VL, mul(g, u), mul(h, w));
      }
      up_ += PANEL;
    } else {
      const E* residual = residual_;
      for (int v = 0; v < NV; v += 2) {
        vf y = value(sums, bias, v), z = value(sums, bias, v + 1);
        if (residual) {
          round_pair<T>(y, z);
          y = add(T::load(residual + v * VL), y), z = add(T::load(residual + (v + 1) * VL), z);
        }
        store_pair<T>(out + v * VL, y, z);
      }
      if (residual) residual_ = residual + n_;
    }
    sums_ += PANEL, out_ = out + out_step_, row_++;
    rows_left_--;
  }

  void store_rest() {
    while (rows_left_) store_row();
  }

  // A store that waits for its line holds up those behind it, also a matrix unit's sums: with a page for each row that
  // is written, a product of many rows took up to twice as long.
  void ask_for_rows() const {
    for (int r = 0; r < rows_left_; r++)
      for (long i = 0; i < PANEL; i += 64 / E_BYTES) prefetch(out_ + r * out_step_ + i);
  }

 private:
  static constexpr long E_BYTES = sizeof(E);
  const Of& of_;
  const long n_;
  const bool writes_tiles_;  // the rows of a `take` lie in one
  const long out_step_;      // from a row to the next
  const float* const biases_;
  E* const all_out_;
  const E* const all_residual_;
  // Of what was taken, from the next row on.
  int rows_left_ = 0;
  long row_, panel_, up_panel_;
  float *sums_, *up_ = nullptr;
  const float *bias_, *up_bias_;
  E* out_;
  const E* residual_;

  // All rows of a panel that is not full.
  __attribute__((noinline)) void store_first_columns(long columns) {
    for (; rows_left_; rows_left_--, row_++) {
      of_.finish(sums_, row_, panel_);
      for (int v = 0; v * VL < columns; v++) {
        const long count = std::min<long>(VL, columns - v * VL);
        vf y = value(sums_, bias_, v);
        if (residual_) y = add(load_first<T>(residual_ + v * VL, count), rounded<T>(y));
        store_first<T>(out_ + v * VL, y, count);
      }
      sums_ += PANEL, out_ += n_;
      if (residual_) residual_ += n_;
    }
  }

  // A vector of a finished row, bias included.
  static vf value(const float* sums, const float* bias, int v) {
    const vf x = loadf(sums + v * VL);
    return bias ? add(x, loadf(bias + v * VL)) : x;
  }
};

// With 16 vector registers a tile's sums would be copied to and fro around each row that is stored (a sixth of the
// time): the rows of a tile are then stored behind it.
constexpr bool STORES_BETWEEN_STEPS = REGISTERS > 16;

// What a tile has in the place of an Epilogue where nothing is to be stored between its steps: also in a stream of
// weights, where memory is what is waited for.
struct NoRows {
  static constexpr int rows_left() { return 0; }
  static void store_row() {}
};

// Whether there are tiles of so many rows: several share them out evenly.
template <class Before>
constexpr bool has_tile(int rows) {
  return rows > (std::is_same_v<Before, NoRows> ? 0 : (MR_MAX - 1) / 2);
}

}  // namespace nova
