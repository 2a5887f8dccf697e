// All layers of a pre-norm decoder in one call.
//
// With one call for each operation a decode step of 24 layers pays 200 calls and holds the GIL between them; here the
// helpers stay awake from loop to loop, and the event loop beside it has the interpreter for the whole step. Every part
// is the one that stands alone too (linear.cpp, attention.cpp, ops.h), rounded at the same places: the hidden states
// have the same bits either way.
#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "abi.h"
#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "ops.h"
#include "team.h"

namespace nova {

// The structures of native.py.
struct LayerDesc {
  const void* input_norm;
  const LinearDesc* qkv;
  const LinearDesc* o;
  const void* post_norm;
  const LinearDesc* gate_up;  // of the MLP, or null where there are experts
  const LinearDesc* down;
  const void* q_norm;  // [head_dim]: of each query head before its rotation, or null
  const void* k_norm;
  int64_t sliding_window;  // tokens that a row sees, itself among them; 0: its whole context
  ExpertsDesc experts;
};

struct ModelDesc {
  const LayerDesc* layers;
  int64_t num_layers;
  const void* final_norm;
  const float* cos_sin;  // [max_positions, head_dim]
  const CacheDesc* cache;
  float eps, scale;
};

struct StepDesc {
  int64_t num_tokens, num_seqs, num_samples;
  const int64_t* positions;
  const int64_t* slot_mapping;
  const int32_t* block_tables;
  int64_t table_stride;
  const int32_t* query_start;
  const int32_t* context_lens;
  const int64_t* logit_rows;  // [num_samples], or null: every row, in order
  void* residual;             // [num_tokens, hidden]: the embeddings; overwritten
  void* out;                  // [num_samples, hidden]: normed hidden states of the sampled rows
};

namespace {

// Of each sequence, the first of its rows that are sampled from; the end of its rows where none is.
std::vector<int32_t> first_sampled_rows(const StepDesc& step) {
  const int32_t *start = step.query_start, *end = start + step.num_seqs + 1;
  std::vector<int32_t> found(start + 1, end);
  for (long i = 0; i < step.num_samples; i++) {
    const int row = (int)step.logit_rows[i];
    int32_t& first = found[std::upper_bound(start, end, row) - start - 1];
    first = std::min(first, row);
  }
  return found;
}

template <class T>
struct Forward {
  using E = typename T::type;
  const ModelDesc& model;
  const StepDesc& step;
  const CacheDesc& cache = *model.cache;
  const long hidden = model.layers[0].qkv->k;
  const long head_dim = cache.head_dim;
  const long attended = cache.num_heads * head_dim;
  const long qkv_width = attended + 2 * cache.num_kv_heads * head_dim;
  const Batch batch{step.block_tables, step.table_stride, step.query_start, step.context_lens, step.num_seqs};

  AlignedArray<E> x_ = aligned_array<E>(tiled_rows(step.num_tokens) * hidden);  // in tiles where its product reads them
  Buffer<E> inner_;  // what a layer's attention needs, and then its MLP
  Mlp<T> mlp_{inner_};
  Experts<T> experts_{mlp_};
  AlignedArray<E> sampled_ = aligned_array<E>(step.num_samples * (attended + hidden));
  std::vector<AttentionPlan> plans_;           // one for each window of the layers
  std::optional<AttentionPlan> plan_of_last_;  // where the last layer attends for some of the rows only

  Forward(const ModelDesc& model, const StepDesc& step, int threads) : model(model), step(step) {
    for (long l = 0; l < model.num_layers; l++)
      if (!plan_of(model.layers[l])) plans_.emplace_back(cache, batch, threads, model.layers[l].sliding_window);
    if (!step.logit_rows) return;
    const std::vector<int32_t> from = first_sampled_rows(step);
    Batch sampled = batch;
    sampled.query_from = from.data();
    plan_of_last_.emplace(cache, sampled, threads, model.layers[model.num_layers - 1].sliding_window);
  }

  AttentionPlan* plan_of(const LayerDesc& layer) {
    for (AttentionPlan& plan : plans_)
      if (plan.window == layer.sliding_window) return &plan;
    return nullptr;
  }

  void run(Team& team) {
    E* x = x_.get();
    E* residual = (E*)step.residual;
    long m = step.num_tokens;
    norm(team, residual, model.layers[0].input_norm, x, m, reads_tiles(*model.layers[0].qkv, m));
    for (long l = 0; l < model.num_layers; l++) {
      const LayerDesc& layer = model.layers[l];
      const bool last = l + 1 == model.num_layers;
      inner_.resize(m * (qkv_width + attended));
      E* qkv = inner_.get();
      const E* attention = qkv + m * qkv_width;
      linear(team, *layer.qkv, {x, hidden, m, qkv, nullptr, false, nullptr, 0, reads_tiles(*layer.qkv, m)});
      team.rows(m, [&](long row) { rotate_and_write((int)l, row, qkv + row * qkv_width); });
      if (last && step.num_samples == 0) return;
      AttentionPlan& plan = last && plan_of_last_ ? *plan_of_last_ : *plan_of(layer);
      attend(team, cache, batch, plan, {(int)l, qkv, qkv_width, qkv + m * qkv_width, model.scale});
      if (last && step.logit_rows) {  // from here on only what is sampled from
        E* attention_of = sampled_.get();
        E* residual_of = attention_of + step.num_samples * attended;
        team.rows(step.num_samples, [&](long i) {
          std::copy_n(attention + step.logit_rows[i] * attended, attended, attention_of + i * attended);
          std::copy_n(residual + step.logit_rows[i] * hidden, hidden, residual_of + i * hidden);
        });
        attention = attention_of, residual = residual_of, m = step.num_samples;
      }
      linear(team, *layer.o, {attention, attended, m, residual, residual});
      const bool tiled = layer.gate_up && reads_tiles(*layer.gate_up, m);
      norm(team, residual, layer.post_norm, x, m, tiled);
      if (layer.gate_up)
        mlp_.run(team, {*layer.gate_up, *layer.down, x, m, residual, residual, tiled});
      else
        experts_.run(team, layer.experts, x, m, residual);
      if (last)
        norm(team, residual, model.final_norm, (E*)step.out, m, false);
      else
        norm(team, residual, model.layers[l + 1].input_norm, x, m, reads_tiles(*model.layers[l + 1].qkv, m));
    }
  }

  void norm(Team& team, const E* from, const void* weight, E* to, long m, bool tiled) {
    constexpr long SIZE = sizeof(E), PIECE = TILED_BYTES / SIZE;
    team.rows(m, [&](long row) {
      E* at = to + (tiled ? tiled_at(row, 0, hidden * SIZE) / SIZE : row * hidden);
      rms_norm_row<T>(from + row * hidden, (const E*)weight, model.eps, at, hidden, tiled ? TILED_ROWS * PIECE : PIECE);
    });
  }

  void rotate_and_write(int layer, long row, E* qkv) {
    E* key = qkv + attended;
    const LayerDesc& weights = model.layers[layer];
    if (weights.q_norm)
      qk_norm_row<T>(qkv, (const E*)weights.q_norm, (const E*)weights.k_norm, cache.num_heads, cache.num_kv_heads,
                     (int)head_dim, model.eps);
    rope_row<T>(qkv, model.cos_sin + step.positions[row] * head_dim, cache.num_heads + cache.num_kv_heads, head_dim);
    write_token(cache, layer, step.slot_mapping[row], key, key + cache.num_kv_heads * head_dim);
  }
};

template <class T>
void forward(const ModelDesc& model, const StepDesc& step, int threads) {
  Team team(threads);
  Forward<T>(model, step, team.size()).run(team);
}

}  // namespace
}  // namespace nova

using namespace nova;

extern "C" int nova_forward(const ModelDesc* model, const StepDesc* step, int threads) {
  return guarded([&] {
    if (model->cache->dtype == 0)
      forward<Bf16>(*model, *step, threads);
    else
      forward<Fp32>(*model, *step, threads);
  });
}
