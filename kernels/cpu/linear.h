// Packed weights and the matrix product over them, callable from inside a team (linear.cpp says how it works).
#pragma once

#include "simd.h"
#include "team.h"

namespace nova {

// Mirrors `LinearDesc` in native.py.
struct LinearDesc {
  const void* weight;  // packed units [panel][ceil(K / E)][PANEL]
  const float* bias;   // [num_panels * PANEL] in packed order, or null
  int64_t n, k;        // rows of the weight as given, columns
  int32_t dtype;       // 0 bf16, 1 fp32
  int32_t kind;        // 0 plain, 1 gate-up: halves interleaved by vector, output silu(gate) * up of n / 2 columns
};

constexpr int NV = 2;            // vectors in a panel
constexpr int PANEL = NV * VL;   // weight rows in a panel
constexpr int MR_MAX = VL == 16 ? 12 : 6;  // activation rows in a tile: MR * NV accumulators fill the registers

inline long num_panels(const LinearDesc& d) {
  return d.kind == 1 ? ceil_div(d.n / 2, VL) : ceil_div(d.n, PANEL);
}

// Which row of the given weight stands in this lane of this panel; -1 for padding.
inline long source_row(const LinearDesc& d, long panel, int lane) {
  if (d.kind == 1) {
    const long column = panel * VL + lane % VL;
    return column < d.n / 2 ? (lane / VL) * (d.n / 2) + column : -1;
  }
  const long row = panel * PANEL + lane;
  return row < d.n ? row : -1;
}

// What one product reads and writes. Strides in elements.
struct LinearCall {
  const void* x;         // [m, k]
  long x_stride;
  long m;
  void* out;             // [m, n] (or n / 2)
  long out_stride;
  const void* residual;  // [m, n] added before rounding, may be `out` itself; or null
  int out_fp32;          // write fp32 whatever the weight's type (logits)
};

// All members of the team call it with the same arguments; the result is whole after their next barrier.
void linear_in_team(Team& team, const LinearDesc& d, const LinearCall& call);

}  // namespace nova
