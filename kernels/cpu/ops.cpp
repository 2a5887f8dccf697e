// The row operations as calls of their own.
#include "ops.h"

#include "abi.h"
#include "team.h"

using namespace nova;

namespace {

template <class T>
void rms_norm(const void* x, long x_stride, const void* weight, float eps, void* out, long m, long k, int threads) {
  using E = typename T::type;
  Team(threads).rows(
      m, [&](long row) { rms_norm_row<T>((const E*)x + row * x_stride, (const E*)weight, eps, (E*)out + row * k, k); });
}

template <class T>
void add_rms_norm(const void* x, void* residual, const void* weight, float eps, void* out, long m, long k,
                  int threads) {
  using E = typename T::type;
  Team(threads).rows(m, [&](long row) {
    E* sum = (E*)residual + row * k;
    add_row<T>((const E*)x + row * k, sum, k);
    rms_norm_row<T>(sum, (const E*)weight, eps, (E*)out + row * k, k);
  });
}

template <class T>
void silu_mul(const void* gate_up, void* out, long m, long width, int threads) {
  using E = typename T::type;
  Team(threads).rows(
      m, [&](long row) { silu_mul_row<T>((const E*)gate_up + row * 2 * width, (E*)out + row * width, width); });
}

template <class T>
void choose_experts(const void* logits, long m, int experts, int active, bool normalises, int64_t* chosen,
                    void* weights, int threads) {
  using E = typename T::type;
  Team(threads).rows(m, [&](long row) {
    choose_experts_row<T>((const E*)logits + row * experts, experts, active, normalises, chosen + row * active,
                          (E*)weights + row * active);
  });
}

template <class T>
void mix_experts(const void* outputs, const int64_t* places, const void* weights, const void* shared, const void* gate,
                 void* out, long m, int active, long width, int threads) {
  using E = typename T::type;
  Team(threads).rows(m, [&](long row) {
    mix_experts_row<T>((const E*)outputs, places + row * active, (const E*)weights + row * active, active,
                       shared ? (const E*)shared + row * width : nullptr, (const E*)gate + row, (E*)out + row * width,
                       width);
  });
}

template <class T>
void qk_norm(void* qkv, long stride, const void* q_norm, const void* k_norm, int heads, int kv_heads, int head_dim,
             float eps, long m, int threads) {
  using E = typename T::type;
  Team(threads).rows(m, [&](long row) {
    qk_norm_row<T>((E*)qkv + row * stride, (const E*)q_norm, (const E*)k_norm, heads, kv_heads, head_dim, eps);
  });
}

template <class T>
void rope(void* qkv, long stride, const float* cos_sin, const int64_t* positions, int heads, int head_dim, long m,
          int threads) {
  using E = typename T::type;
  Team(threads).rows(
      m, [&](long row) { rope_row<T>((E*)qkv + row * stride, cos_sin + positions[row] * head_dim, heads, head_dim); });
}

}  // namespace

#define BY_TYPE(f, ...) (dtype == 0 ? f<Bf16>(__VA_ARGS__) : f<Fp32>(__VA_ARGS__))

extern "C" {

int nova_rms_norm(int dtype, const void* x, int64_t x_stride, const void* weight, float eps, void* out, int64_t m,
                  int64_t k, int threads) {
  return guarded([&] { BY_TYPE(rms_norm, x, x_stride, weight, eps, out, m, k, threads); });
}

int nova_add_rms_norm(int dtype, const void* x, void* residual, const void* weight, float eps, void* out, int64_t m,
                      int64_t k, int threads) {
  return guarded([&] { BY_TYPE(add_rms_norm, x, residual, weight, eps, out, m, k, threads); });
}

int nova_silu_mul(int dtype, const void* gate_up, void* out, int64_t m, int64_t width, int threads) {
  return guarded([&] { BY_TYPE(silu_mul, gate_up, out, m, width, threads); });
}

// `chosen` and `weights` [m, active].
int nova_choose_experts(int dtype, const void* logits, int64_t m, int64_t experts, int64_t active, int normalises,
                        int64_t* chosen, void* weights, int threads) {
  return guarded([&] {
    BY_TYPE(choose_experts, logits, m, (int)experts, (int)active, normalises != 0, chosen, weights, threads);
  });
}

// `shared` [m, width] and `gate` [m], or neither.
int nova_mix_experts(int dtype, const void* outputs, const int64_t* places, const void* weights, const void* shared,
                     const void* gate, void* out, int64_t m, int64_t active, int64_t width, int threads) {
  return guarded(
      [&] { BY_TYPE(mix_experts, outputs, places, weights, shared, gate, out, m, (int)active, width, threads); });
}

int nova_qk_norm(int dtype, void* qkv, int64_t stride, const void* q_norm, const void* k_norm, int heads, int kv_heads,
                 int head_dim, float eps, int64_t m, int threads) {
  return guarded([&] { BY_TYPE(qk_norm, qkv, stride, q_norm, k_norm, heads, kv_heads, head_dim, eps, m, threads); });
}

int nova_rope(int dtype, void* qkv, int64_t stride, const float* cos_sin, const int64_t* positions, int heads,
              int head_dim, int64_t m, int threads) {
  return guarded([&] { BY_TYPE(rope, qkv, stride, cos_sin, positions, heads, head_dim, m, threads); });
}

}  // extern "C"
