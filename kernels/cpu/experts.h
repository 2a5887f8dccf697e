// The part of a layer that each row has to itself: an MLP, or a mixture of experts.
//
// Of experts, rows are sorted by the expert they were given to, so that each expert's rows are one product and read its
// weights once; all experts' items are worked off in one loop. A row's result is one sum in the order in which its
// experts were chosen: which rows are computed beside it decides only where its copies lie meanwhile.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "aligned.h"
#include "linear.h"
#include "ops.h"
#include "team.h"

namespace nova {

// Memory of a step that grows and is never cleared: what it held is lost when it does.
template <class E>
class Buffer {
 public:
  void resize(long count) {
    if (count <= size_) return;
    data_.reset();
    data_ = aligned_array<E>(count);
    size_ = count;
  }
  E* get() { return data_.get(); }
  E& operator[](long i) { return data_[i]; }

 private:
  AlignedArray<E> data_;
  long size_ = 0;
};

// The last fields of `LayerDesc` in native.py; all null where a layer has no experts.
struct ExpertsDesc {
  const LinearDesc* router;
  const LinearDesc* const* gate_up;  // of each expert; there are as many as the router has rows
  const LinearDesc* const* down;
  const LinearDesc* shared_gate_up;  // of the expert that all rows are given to, or null
  const LinearDesc* shared_down;
  const LinearDesc* shared_gate;
  int64_t active;  // experts that a row is given to
  int64_t normalises;
};

// out [m, hidden] = down(silu(gate(x)) * up(x)), or residual + this.
struct MlpCall {
  const LinearDesc& gate_up;
  const LinearDesc& down;
  const void* x;  // [m, hidden]
  long m;
  void* out;
  const void* residual = nullptr;
  bool tiled = false;  // x lies in tiles
};

// Whether what is rounded to INT8 for one of the weights that `weight_of` a call gives is rounded for all of them.
template <class F>
bool read_alike(const std::vector<MlpCall>& calls, F&& weight_of) {
  return std::all_of(calls.begin(), calls.end(),
                     [&](const MlpCall& call) { return reads_alike(weight_of(calls[0]), weight_of(call)); });
}

// Rows that pass through an MLP at once, for each thread: products go through more of them in blocks of as many
// (tiling.h), so that all at once would cost memory and save no reads.
constexpr long MLP_ROWS = 512;

template <class T>
class Mlp {
 public:
  using E = typename T::type;

  // `inner` holds what lies between the two products, and may hold something else before and after.
  explicit Mlp(Buffer<E>& inner) : inner_(inner) {}

  void run(Team& team, const MlpCall& call) {
    const long hidden = call.gate_up.k, width = call.down.n, blocks = ceil_div(call.m, MLP_ROWS * team.size());
    for (long b = 0; b < blocks; b++) {
      const long first = cut(call.m, b, blocks, TILED_ROWS), end = cut(call.m, b + 1, blocks, TILED_ROWS);
      const E* residual = call.residual ? (const E*)call.residual + first * width : nullptr;
      run(team, std::vector<MlpCall>{{call.gate_up, call.down, (const E*)call.x + first * hidden, end - first,
                                      (E*)call.out + first * width, residual, call.tiled}});
    }
  }

  // Several of one shape: each product of all of them in one loop. `rounded` is what they read, one behind the other,
  // if it was rounded for all of them.
  void run(Team& team, const std::vector<MlpCall>& calls, const Rounded* rounded = nullptr) {
    if (calls.empty()) return;
    const long hidden = calls[0].gate_up.k, width = calls[0].down.k;
    long m = 0;
    for (const MlpCall& call : calls) m += call.m;
    const bool gated = can_gate(calls[0].gate_up), alone = calls.size() == 1;
    // Whether what lies between the products does so in tiles.
    const bool tiled = alone && gated && reads_tiles(calls[0].gate_up, m) && reads_tiles(calls[0].down, m);
    inner_.resize((tiled ? tiled_rows(m) : m) * width);
    if (!gated) gate_up_.resize(m * 2 * width);
    jobs_.clear();
    m = 0;
    for (const MlpCall& call : calls) {
      E* out = gated ? &inner_[m * width] : &gate_up_[m * 2 * width];
      jobs_.push_back({call.gate_up, {call.x, hidden, call.m, out, nullptr, gated, rounded, m, call.tiled, tiled}});
      m += call.m;
    }
    linear(team, jobs_.data(), (long)jobs_.size());
    if (!gated)
      team.rows(m, [&](long row) { silu_mul_row<T>(&gate_up_[row * 2 * width], &inner_[row * width], width); });
    std::optional<Rounded> inner;
    if (read_alike(calls, [](const MlpCall& call) -> const LinearDesc& { return call.down; }))
      inner.emplace(rounded_rows(team, calls[0].down, {inner_.get(), width, m, nullptr}, alone));
    rounded = inner ? &*inner : nullptr;
    jobs_.clear();
    m = 0;
    for (const MlpCall& call : calls) {
      const LinearCall down{&inner_[m * width], width, call.m, call.out, call.residual, false, rounded, m, tiled};
      jobs_.push_back({call.down, down});
      m += call.m;
    }
    linear(team, jobs_.data(), (long)jobs_.size());
  }

 private:
  Buffer<E>& inner_;
  Buffer<E> gate_up_;
  std::vector<LinearJob> jobs_;
};

template <class T>
class Experts {
 public:
  using E = typename T::type;

  explicit Experts(Mlp<T>& mlp) : mlp_(mlp) {}

  // residual += what the experts of each of m rows make of it.
  void run(Team& team, const ExpertsDesc& d, const E* x, long m, E* residual) {
    const long hidden = d.router->k, active = d.active, pairs = m * active;
    if (pairs == 0) return;
    choose(team, d, x, m);
    sort(d.router->n, pairs);
    rows_.resize(pairs * hidden);
    calls_.clear();
    for (long expert = 0; expert < d.router->n; expert++) {
      const long first = begin_[expert], count = begin_[expert + 1] - first;
      E* rows = &rows_[first * hidden];  // what an expert gives replaces what it was given, when that has been read
      if (count) calls_.push_back({*d.gate_up[expert], *d.down[expert], rows, count, rows});
    }
    std::optional<Rounded> rounded;
    if (read_alike(calls_, [](const MlpCall& call) -> const LinearDesc& { return call.gate_up; }))
      rounded.emplace(rounded_once(team, calls_[0].gate_up, x, m, active));
    else
      team.rows(pairs,
                [&](long pair) { std::copy_n(x + pair / active * hidden, hidden, &rows_[places_[pair] * hidden]); });
    mlp_.run(team, calls_, rounded ? &*rounded : nullptr);
    const E *shared = nullptr, *gate = nullptr;
    if (d.shared_gate_up) {
      shared_.resize(m * hidden);
      gate_.resize(m);
      mlp_.run(team, {*d.shared_gate_up, *d.shared_down, x, m, shared_.get()});
      linear(team, *d.shared_gate, {x, hidden, m, gate_.get()});
      shared = shared_.get(), gate = gate_.get();
    }
    mixed_.resize(m * hidden);
    team.rows(m, [&](long row) {
      mix_experts_row<T>(rows_.get(), &places_[row * active], &weights_[row * active], (int)active,
                         shared ? shared + row * hidden : nullptr, gate + row, &mixed_[row * hidden], hidden);
      add_row<T>(&mixed_[row * hidden], residual + row * hidden, hidden);
    });
  }

 private:
  Mlp<T>& mlp_;
  Buffer<E> logits_, weights_, rows_, shared_, gate_, mixed_;
  std::vector<int64_t> chosen_, places_;  // of each row's experts: which one, and where among the sorted rows
  std::vector<long> begin_;               // of each expert's rows among these
  std::vector<MlpCall> calls_;

  void choose(Team& team, const ExpertsDesc& d, const E* x, long m) {
    const long experts = d.router->n, active = d.active;
    logits_.resize(m * experts);
    weights_.resize(m * active);
    chosen_.resize(m * active);
    linear(team, *d.router, {x, d.router->k, m, logits_.get()});
    team.rows(m, [&](long row) {
      choose_experts_row<T>(&logits_[row * experts], (int)experts, (int)active, d.normalises, &chosen_[row * active],
                            &weights_[row * active]);
    });
  }

  // The rows that experts are given, sorted: each of x is rounded once, and copied for each of its experts.
  Rounded rounded_once(Team& team, const LinearDesc& gate_up, const E* x, long m, long active) {
    const Rounded each = rounded_rows(team, gate_up, {x, gate_up.k, m, nullptr});
    const long width = each.width, groups = each.groups;
    Rounded sorted(m * active, width, groups);
    team.rows(m * active, [&](long pair) {
      const long from = pair / active, to = places_[pair];
      std::copy_n(&each.q[from * width], width, &sorted.q[to * width]);
      for (long g = 0; g < groups; g++) {
        sorted.scale[sorted.at(to, g)] = each.scale[each.at(from, g)];
        sorted.sum[sorted.at(to, g)] = each.sum[each.at(from, g)];
        sorted.begin[sorted.at(to, g)] = each.begin[each.at(from, g)];
      }
    });
    return sorted;
  }

  // By counting; rows of one expert stay in their order.
  void sort(long experts, long pairs) {
    begin_.assign(experts + 1, 0);
    for (long pair = 0; pair < pairs; pair++) begin_[chosen_[pair] + 1]++;
    for (long expert = 0; expert < experts; expert++) begin_[expert + 1] += begin_[expert];
    std::vector<long> next = begin_;
    places_.resize(pairs);
    for (long pair = 0; pair < pairs; pair++) places_[pair] = next[chosen_[pair]]++;
  }
};

}  // namespace nova
