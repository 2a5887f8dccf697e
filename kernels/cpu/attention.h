// Attention over the paged KV cache, on a team of threads (attention.cpp says how it works).
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "kv_cache.h"
#include "team.h"

namespace nova {

// What one step's attention reads, the same for all layers.
struct Batch {
  const int32_t* block_tables;
  int64_t table_stride;
  const int32_t* query_start;
  const int32_t* context_lens;
  int64_t num_seqs;
};

// How one step's attention is divided, the same for all layers of one window: a group of items shares query rows, each
// item takes some KV tiles.
class AttentionPlan {
 public:
  struct Group {
    int seq, head;     // kv head
    int first, count;  // query tokens of the sequence
    int first_tile;    // the KV tile where the window of the first of these tokens begins
    int tiles;         // KV tiles from there to the last of these tokens
    int parts;         // items of the group
    long partial;      // where its partial results begin, when parts > 1
  };
  struct Item {
    int group, first_tile, last_tile;
  };
  AttentionPlan(const CacheDesc& cache, const Batch& batch, int threads, int64_t window);

  int64_t window;  // tokens that a row sees, itself among them; 0: its whole context
  std::vector<Group> groups;
  std::vector<Item> items;                      // the most expensive first
  int rows_max = 0;                             // query rows (tokens x heads of the kv head) of the largest group
  std::vector<float> partials;                  // of divided groups, by tile: see Partial in attention.cpp
  std::unique_ptr<std::atomic<int>[]> pending;  // items not done yet, by group; reset by the last
};

struct AttentionCall {
  int layer;
  const void* query;     // [T, num_heads, head_dim]
  int64_t query_stride;  // elements between tokens
  void* out;             // [T, num_heads * head_dim]
  float scale;
};

void attend(Team& team, const CacheDesc& cache, const Batch& batch, AttentionPlan& plan, const AttentionCall& call);

}  // namespace nova
