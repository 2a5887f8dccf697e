// The paged KV cache and attention over it, on a team of threads (attention.cpp says how it works).
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "simd.h"
#include "team.h"

namespace nova {

constexpr int GROUP = 16;        // tokens stored side by side; the last group of a block may hold fewer
constexpr int TILE_GROUPS = 16;  // groups of one softmax tile, counted from the start of the sequence
constexpr int TILE_LANES = TILE_GROUPS * GROUP;

// Mirrors `CacheDesc` in native.py.
struct CacheDesc {
  void* data;
  int64_t num_blocks, block_size;
  int32_t num_layers, num_heads, num_kv_heads, head_dim;
  int32_t dtype;  // 0 bf16, 1 fp32

  int elements() const { return dtype == 0 ? 2 : 1; }
  // All sizes in 32-bit units.
  long key_units() const { return ceil_div(head_dim, elements()); }        // of one token
  long value_width() const { return ceil_div(head_dim, GROUP) * GROUP; }   // columns of one token pair
  long key_group() const { return key_units() * GROUP; }                   // keys of a group
  long value_group() const { return GROUP / elements() * value_width(); }  // values of a group
  long groups_per_block() const { return ceil_div(block_size, GROUP); }
  long head_units() const { return groups_per_block() * (key_group() + value_group()); }
  long block_units() const { return head_units() * num_kv_heads; }
  long layer_units() const { return block_units() * num_blocks; }

  // Groups and tiles that hold the first `tokens` tokens of a sequence.
  long groups_of(long tokens) const {
    return tokens / block_size * groups_per_block() + ceil_div(tokens % block_size, GROUP);
  }
  long tiles_of(long tokens) const { return ceil_div(groups_of(tokens), TILE_GROUPS); }
  long tile_at(long position) const {  // the tile that holds this token
    return (position / block_size * groups_per_block() + position % block_size / GROUP) / TILE_GROUPS;
  }
};

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

// Writes token t's key and value [num_kv_heads, head_dim] to its slot; negative slots are skipped.
void write_token(const CacheDesc& cache, int layer, int64_t slot, const void* key, const void* value);

}  // namespace nova
