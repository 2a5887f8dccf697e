// Packed weights and the matrix product over them, on a team of threads (linear.cpp says how it works).
#pragma once

#include "simd.h"
#include "team.h"

namespace nova {

// Mirrors `LinearDesc` in native.py.
struct LinearDesc {
  const void* weight;  // packed units [panel][ceil(K / E)][PANEL]
  const float* bias;   // [num_panels * PANEL], or null
  int64_t n, k;        // rows and columns of the weight as given
  int32_t dtype;       // of activations: 0 bf16, 1 fp32
  int32_t format;      // of the weight: a `WeightFormat` of linear.cpp
  const float* scale;  // [num_panels * PANEL]: what rows are multiplied by, or null

  int elements() const { return dtype == 0 ? 2 : 1; }
  long units() const { return ceil_div(k, elements()); }  // of one row
};

constexpr int NV = 2;                      // vectors in a panel
constexpr int PANEL = NV * VL;             // weight rows in a panel
constexpr int MR_MAX = VL == 16 ? 12 : 6;  // activation rows in a tile: MR * NV accumulators fill the registers

// What one product reads and writes. Strides in elements.
struct LinearCall {
  const void* x;  // [m, k]
  long x_stride;
  long m;
  void* out;                       // [m, n], or [m, n / 2] when gated
  const void* residual = nullptr;  // [m, n]: out = round(residual + round(product)); may be `out` itself
  bool gated = false;              // out = round(silu(round(left half)) * round(right half))
};

// Whether a product can be gated: the halves must not share a panel.
inline bool can_gate(const LinearDesc& d) { return d.n % (2 * PANEL) == 0; }

struct LinearJob {
  const LinearDesc& d;
  LinearCall call;
};

// Products of one dtype and format, worked off in one loop; none reads what another one writes.
void linear(Team& team, const LinearJob* jobs, long count);

inline void linear(Team& team, const LinearDesc& d, const LinearCall& call) {
  const LinearJob job{d, call};
  linear(team, &job, 1);
}

}  // namespace nova
