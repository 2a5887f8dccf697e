// The small operations between matrix products, one row at a time; each row's result depends on the row alone.
#pragma once

#include <algorithm>
#include <vector>

#include "simd.h"

namespace nova {

// out = x / sqrt(mean(x^2) + eps) * weight. `line`: elements from each 64 bytes of `out`, a cache line, to the next.
template <class T>
inline void rms_norm_row(const typename T::type* x, const typename T::type* weight, float eps, typename T::type* out,
                         long k, long line = 64 / sizeof(typename T::type)) {
  constexpr long PIECE = 64 / sizeof(typename T::type);
  vf squares[2] = {zero(), zero()};
  int turn = 0;
  for (long i = 0; i < k; i += VL, turn ^= 1) {
    const vf value = load_first<T>(x + i, k - i);
    squares[turn] = fma(value, value, squares[turn]);
  }
  const vf factor = set1(1.0f / std::sqrt(hsum(add(squares[0], squares[1])) / (float)k + eps));
  for (long i = 0; i < k; i += VL)
    store_first<T>(out + i / PIECE * line + i % PIECE,
                   mul(mul(load_first<T>(x + i, k - i), factor), load_first<T>(weight + i, k - i)), k - i);
}

// residual = round(residual + x)
template <class T>
inline void add_row(const typename T::type* x, typename T::type* residual, long k) {
  for (long i = 0; i < k; i += VL)
    store_first<T>(residual + i, add(load_first<T>(residual + i, k - i), load_first<T>(x + i, k - i)), k - i);
}

// out = silu(gate) * up, gate and up side by side
template <class T>
inline void silu_mul_row(const typename T::type* gate_up, typename T::type* out, long width) {
  for (long i = 0; i < width; i += VL)
    store_first<T>(out + i,
                   mul(silu<T>(load_first<T>(gate_up + i, width - i)), load_first<T>(gate_up + width + i, width - i)),
                   width - i);
}

// The experts of a row, likeliest first and of equals the lower number, and their probabilities, over their sum if it
// `normalises`. Where a logit is NaN all probabilities are, and the first experts are chosen.
template <class T>
inline void choose_experts_row(const typename T::type* logits, int experts, int active, bool normalises,
                               int64_t* chosen, typename T::type* weights) {
  const long padded = ceil_div(experts, VL) * VL;
  thread_local std::vector<float> buffer;
  buffer.resize(padded + active);
  float *likely = buffer.data(), *best = likely + padded;
  vf most = set1(-INFINITY);
  for (long i = 0; i < experts; i += VL) {
    const vf some = load_first<T>(logits + i, experts - i);
    storef(likely + i, some);
    most = vmax(select(first_lanes(experts - i), some, most), most);
  }
  const vf largest = set1(hmax(most));
  vf sum = zero();
  for (long i = 0; i < experts; i += VL) {
    const vf power = exp2v(mul(sub(loadf(likely + i), largest), set1(LOG2E)));
    storef(likely + i, power);
    sum = add(sum, select(first_lanes(experts - i), power, zero()));
  }
  const float all = hsum(sum);
  float among = 0.0f;
  for (int a = 0; a < active; a++) {
    // Where probabilities are not numbers each is as good as another, but it must be one that is there
    chosen[a] = std::isnan(all) ? a : std::max_element(likely, likely + experts) - likely;
    best[a] = likely[chosen[a]] / all;
    among += best[a];
    likely[chosen[a]] = -1.0f;
  }
  for (int a = 0; a < active; a++) weights[a] = from_float<T>(normalises ? best[a] / among : best[a]);
}

// out = the sum of weights[a] * outputs[places[a]], in this order, and of sigmoid(gate) * shared where there is one
template <class T>
inline void mix_experts_row(const typename T::type* outputs, const int64_t* places, const typename T::type* weights,
                            int active, const typename T::type* shared, const typename T::type* gate,
                            typename T::type* out, long width) {
  vf share = zero();
  if (shared) share = sigmoid(set1(to_float<T>(*gate)));
  for (long i = 0; i < width; i += VL) {
    vf total = zero();
    for (int a = 0; a < active; a++)
      total = fma(set1(to_float<T>(weights[a])), load_first<T>(outputs + places[a] * width + i, width - i), total);
    if (shared) total = fma(share, load_first<T>(shared + i, width - i), total);
    store_first<T>(out + i, total, width - i);
  }
}

// Norms each query head with q_norm and each key head with k_norm [head_dim], in place; the values behind stay.
template <class T>
inline void qk_norm_row(typename T::type* row, const typename T::type* q_norm, const typename T::type* k_norm,
                        int heads, int kv_heads, int head_dim, float eps) {
  for (int head = 0; head < heads + kv_heads; head++, row += head_dim)
    rms_norm_row<T>(row, head < heads ? q_norm : k_norm, eps, row, head_dim);
}

// Rotates `heads` heads in place; cos_sin holds head_dim / 2 cosines, then as many sines. The halves are paired.
template <class T>
inline void rope_row(typename T::type* row, const float* cos_sin, int heads, int head_dim) {
  const int half = head_dim / 2;
  for (int head = 0; head < heads; head++, row += head_dim)
    for (int i = 0; i < half; i += VL) {
      const long count = half - i;
      const vf low = load_first<T>(row + i, count), high = load_first<T>(row + half + i, count);
      const vf cos = load_first<Fp32>(cos_sin + i, count), sin = load_first<Fp32>(cos_sin + half + i, count);
      store_first<T>(row + i, sub(mul(low, cos), mul(high, sin)), count);
      store_first<T>(row + half + i, add(mul(high, cos), mul(low, sin)), count);
    }
}

}  // namespace nova
