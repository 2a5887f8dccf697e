// Attention over the paged KV cache, on a team of threads (attention.cpp says how it works).
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "kv_cache.h"
#include "team.h"

namespace nova {

// What one step's attention reads, the same for all layers but, maybe, the last one.
struct Batch {
  const int32_t* block_tables;
  int64_t table_stride;
  const int32_t* query_start;
  const int32_t* context_lens;
  int64_t num_seqs;
  const int32_t* query_from = nullptr;  // [num_seqs]: rows of a sequence before this one have no output; null: all have

  int first_query(int seq) const { return query_from ? query_from[seq] : query_start[seq]; }
  int queries(int seq) const { return query_start[seq + 1] - first_query(seq); }
  int before(int seq) const { return context_lens[seq] - queries(seq); }  // tokens
};

// How one step's attention is divided, the same for all layers of one window: a group of items shares query rows and a
// range of KV tiles, each item takes some of the tiles.
//
// Sequences whose block tables begin alike read those tiles once: a shared group has the rows of several of them, and
// leaves each row's state behind, from which another group goes on with the tiles that follow. That is a later round.
class AttentionPlan {
 public:
  struct QueryToken {
    int index;     // in the step
    int position;  // in its sequence
    int state;     // in `states`, where its sequence may share tiles
  };
  struct Group {
    int seq, head;          // whose block table it reads, and the kv head
    int first, count;       // of `tokens`
    int limit;              // tokens of the sequence before this are read
    int first_tile;         // of the KV tiles
    int tiles;              // their number
    int round;              // of the groups that its rows go through
    bool goes_on, is_last;  // after another group, before none
    int parts;              // items of the group
    long partial;           // where its partial results begin, when parts > 1
  };
  struct Item {
    int group, first_tile, last_tile;
  };
  AttentionPlan(const CacheDesc& cache, const Batch& batch, int threads, int64_t window);

  // KV tiles that are read for one head: those of a shared group count once for each reading, not for each sequence.
  int64_t tiles_read() const;
  int64_t partials_bytes() const { return partials.size() * sizeof(float); }

  int64_t window;  // tokens that a row sees, itself among them; 0: its whole context
  std::vector<QueryToken> tokens;
  std::vector<Group> groups;
  std::vector<Item> items;                      // by round, the most expensive first
  std::vector<long> round_ends;                 // in `items`
  int rows_max = 0;                             // query rows (tokens x heads of the kv head) of the largest group
  std::vector<float> partials;                  // of divided groups, by tile: see partial_floats in attention_tile.h
  std::vector<float> states;                    // between rounds, by query token and head: maximum, sum, accumulator
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
