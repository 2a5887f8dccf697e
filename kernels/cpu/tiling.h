// What products over packed weights have in common, whatever the weights' format: how rows and panels are shared out,
// and what becomes of a finished tile.
#pragma once

#include <algorithm>
#include <vector>

#include "linear.h"

namespace nova {

// Tuning: tests/bench/kernels.py; Zen 5, two cores.
constexpr long STREAM_ITEM_BYTES = 192 << 10;  // weights of one item when rows are few
constexpr long L2_ITEM_BYTES = 320 << 10;      // weights of one item when the row tiles pass by each panel
constexpr long ROW_BLOCK = 512;                // rows of one item: their activations stay in the caches beside it
constexpr long PIECE_ROWS = 128;               // of the last items, so that all threads end at nearly the same time
constexpr long PREFETCH_BYTES = 8 << 10;       // ahead, in a stream

// How one of `num_products` in a loop of `num_members` is cut into items, and those into tiles.
class Tiling {
 public:
  // `panel_bytes` with all that is read beside a panel.
  Tiling(long m, long panels, long panel_bytes, long num_products, int num_members)
      : is_stream(m <= MR_MAX), m_(m), panels_(panels), row_blocks_(is_stream ? 1 : ceil_div(m, ROW_BLOCK)) {
    group_ = (is_stream ? STREAM_ITEM_BYTES : L2_ITEM_BYTES) / panel_bytes;
    // At least four items for each member, so that one who comes late finds others done.
    group_ = std::max<long>(1, std::min(group_, panels * row_blocks_ * num_products / (4 * num_members)));
    groups_ = ceil_div(panels, group_);
    // Where a panel is long work, the last ones are handed out one by one, each in pieces of its rows.
    pieces_ = is_stream ? 1 : m / row_blocks_ / PIECE_ROWS;
    alone_ = pieces_ < 2 ? 0 : std::min(panels, group_ * num_members);
    grouped_ = (row_blocks_ - 1) * groups_ + ceil_div(panels - alone_, group_);
  }

  const bool is_stream;  // rows are so few that the product is a stream of weights through the cores

  long items() const { return grouped_ + alone_ * pieces_; }

  // Calls f(panel, first row, rows, number of the tile beside its panel, and of how many) for the item's tiles, at
  // most MR_MAX rows each.
  template <class F>
  void compute(long item, F&& f) const {
    if (item >= grouped_) {
      const long at = item - grouped_, panel = panels_ - alone_ + at / pieces_;
      return tiles(row_blocks_ - 1, at % pieces_, pieces_, panel, panel + 1, f);
    }
    const long block = item / groups_, first = (item % groups_) * group_;
    const long end = block < row_blocks_ - 1 ? panels_ : panels_ - alone_;
    tiles(block, 0, 1, first, std::min(end, first + group_), f);
  }

 private:
  // The tiles of panels `first` to `last`, beside one of `parts` of a block's rows.
  template <class F>
  void tiles(long block, long part, long parts, long first, long last, F& f) const {
    const long begin = m_ * block / row_blocks_, rows = m_ * (block + 1) / row_blocks_ - begin;
    const long row0 = begin + rows * part / parts, row1 = begin + rows * (part + 1) / parts;
    const long row_tiles = ceil_div(row1 - row0, MR_MAX);
    for (long panel = first; panel < last; panel++)
      for (long t = 0; t < row_tiles; t++) {  // of nearly equal height: 13 rows are 7 + 6, not 12 + 1
        const long a = row0 + (row1 - row0) * t / row_tiles, b = row0 + (row1 - row0) * (t + 1) / row_tiles;
        f(panel, a, (int)(b - a), t, row_tiles);
      }
  }

  long m_, panels_, row_blocks_;
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

// From finished sums [rows][PANEL] in fp32 to what is stored. It rounds where separate operations would have rounded,
// so a fused step gives the same bits as its parts.
template <class T>
struct Epilogue {
  using E = typename T::type;
  const LinearDesc& d;
  const LinearCall call;

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
};

}  // namespace nova
