// Who reads which KV tiles in a step.
#include <algorithm>
#include <limits>

#include "attention.h"
#include "attention_tile.h"

namespace nova {
namespace {

// Tuning: tests/bench/kernels.py long; Zen 5, two cores.
constexpr int ROWS_SHARED = 48;          // query rows computed over one reading of the context: of decodes
constexpr long CHUNK_BYTES = 320 << 10;  // of a chunk: their queries and accumulators, which stay in L2 beside a tile
// By cost, that all threads end together: a group of a chunk is at most a sixteenth of what a thread has to do in the
// step, if that is ROWS_SHARED rows, and any group that is more than a quarter is divided along its context.
constexpr long CHUNK_GROUPS = 16, PARTS = 4;
// Floats of what the parts of all divided groups give (64 MB, in no account of memory): enough for drafts behind 128k
// tokens. Where it would be more, chunks have smaller groups and others fewer parts.
constexpr long PARTIALS_MAX = 16 << 20;

// Divides the rows of a step into groups.
class Grouping {
 public:
  Grouping(const CacheDesc& cache, const Batch& batch, int threads, AttentionPlan& plan)
      : cache_(cache), batch_(batch), plan_(plan) {
    long cost = 0;
    for (int seq = 0; seq < batch.num_seqs; seq++) cost += queries(seq) * cost_of_token(seq);
    thread_cost_ = cost * cache.num_kv_heads / threads;
    int num_states = 0;
    for (int seq = 0; seq < batch.num_seqs; seq++) {
      if (queries(seq) == 0) continue;
      // A chunk reads its context once for as many rows as a group has: sharing it would save nothing. Where a window
      // begins differs between rows.
      const bool shares = queries(seq) <= shared_tokens_ && !plan.window;
      const int tiles = shares ? whole_tiles(before(seq)) : 0;
      if (tiles) {
        members_.push_back({seq, tiles, num_states, 0});
        num_states += queries(seq);
      } else {
        own_groups({seq, 0, -1, 0}, 0, 0);
      }
    }
    std::sort(members_.begin(), members_.end(), [&](const Member& a, const Member& b) {
      return std::lexicographical_compare(table(a), table(a) + blocks(a), table(b), table(b) + blocks(b));
    });
    for (size_t i = 1; i < members_.size(); i++) {
      const Member& one = members_[i - 1];
      Member& other = members_[i];
      const int most = std::min(blocks(one), blocks(other));
      const long same = std::mismatch(table(one), table(one) + most, table(other)).first - table(one);
      const int tiles = (int)(same * cache.groups_per_block() / TILE_GROUPS);
      other.same_tiles = std::min({tiles, one.tiles, other.tiles});
    }
    share(0, members_.size(), 0, 0);
    if (std::any_of(plan.groups.begin(), plan.groups.end(), [](const auto& group) { return !group.is_last; }))
      plan.states.resize(num_states * cache.num_heads * partial_floats(1, cache.value_width()));
  }

 private:
  struct Member {
    int seq;
    int tiles;       // that its context fills before the first of its rows
    int state;       // of the first of its rows, by query token
    int same_tiles;  // that it shares with the member before
  };

  int queries(int seq) const { return batch_.queries(seq); }
  int before(int seq) const { return batch_.before(seq); }
  const int32_t* table(const Member& member) const { return batch_.block_tables + member.seq * batch_.table_stride; }

  // Tiles that the last token of a sequence sees.
  long cost_of_token(int seq) const {
    const int64_t tokens = batch_.context_lens[seq];
    return std::max(1L, tiles_of(cache_, plan_.window ? std::min(plan_.window, tokens) : tokens));
  }

  // Query tokens of a group of one sequence.
  int chunk_tokens(int seq) const {
    const long in_l2 = CHUNK_BYTES / (4 * (cache_.key_units() + cache_.value_width()) * ratio_);
    const long cost = cost_of_token(seq), share = thread_cost_ / cost;
    // If it could not be divided, of so few rows that it need not be.
    const bool fits = cost * partial_floats(queries(seq) * cache_.num_heads, cache_.value_width()) <= PARTIALS_MAX;
    const long least = fits ? shared_tokens_ : std::clamp(share / PARTS, 1L, (long)shared_tokens_);
    return (int)std::max(least, std::min(in_l2, share / CHUNK_GROUPS));
  }

  // The blocks that the tiles of a member lie in.
  int blocks(const Member& member) const {
    return (int)ceil_div((long)member.tiles * TILE_GROUPS, cache_.groups_per_block());
  }

  int whole_tiles(long tokens) const {
    const long groups = tokens / cache_.block_size * cache_.groups_per_block() + tokens % cache_.block_size / GROUP;
    return (int)(groups / TILE_GROUPS);
  }

  // Members [first, last), which have read the tiles before `tile` in `round` rounds: what they all share is read for
  // all, then each part of them that shares more goes on.
  void share(size_t first, size_t last, int tile, int round) {
    if (first == last) return;
    if (last - first == 1) return own_groups(members_[first], tile, round);
    int common = std::numeric_limits<int>::max();
    for (size_t i = first + 1; i < last; i++) common = std::min(common, members_[i].same_tiles);
    if (common > tile) {
      const int begin = (int)plan_.tokens.size();
      for (size_t i = first; i < last; i++) add_tokens(members_[i], 0, queries(members_[i].seq));
      const int all = (int)plan_.tokens.size() - begin, parts = (int)ceil_div(all, shared_tokens_);
      for (int p = 0; p < parts; p++) {
        const int from = begin + (int)((long)all * p / parts), to = begin + (int)((long)all * (p + 1) / parts);
        int limit = std::numeric_limits<int>::max();
        for (int i = from; i < to; i++) limit = std::min(limit, plan_.tokens[i].position + 1);
        add_groups(
            {members_[first].seq, 0, from, to - from, limit, tile, common - tile, round, round > 0, false, 1, 0});
      }
      tile = common;
      round++;
    }
    for (size_t i = first; i < last;) {
      size_t end = i + 1;
      while (end < last && members_[end].same_tiles > tile) end++;
      share(i, end, tile, round);
      i = end;
    }
  }

  // The rest of one sequence: from this tile, or from where its windows begin.
  void own_groups(const Member& member, int tile, int round) {
    const int seq = member.seq;
    const int chunks = (int)ceil_div(queries(seq), chunk_tokens(seq));
    for (int c = 0; c < chunks; c++) {
      const int first = (int)((long)queries(seq) * c / chunks), last = (int)((long)queries(seq) * (c + 1) / chunks);
      const int64_t begin = plan_.window ? std::max<int64_t>(0, before(seq) + first + 1 - plan_.window) : 0;
      const int first_tile = std::max(tile, (int)tile_at(cache_, begin)), limit = before(seq) + last;
      const int tiles = (int)tiles_of(cache_, limit) - first_tile;
      const int at = (int)plan_.tokens.size();
      add_tokens(member, first, last);
      add_groups({seq, 0, at, last - first, limit, first_tile, tiles, round, round > 0, true, 1, 0});
    }
  }

  void add_tokens(const Member& member, int first, int last) {
    const int index = batch_.first_query(member.seq), position = before(member.seq);
    for (int i = first; i < last; i++) plan_.tokens.push_back({index + i, position + i, member.state + i});
  }

  // One for each kv head.
  void add_groups(AttentionPlan::Group group) {
    plan_.rows_max = std::max(plan_.rows_max, group.count * ratio_);
    for (group.head = 0; group.head < cache_.num_kv_heads; group.head++) plan_.groups.push_back(group);
  }

  const CacheDesc& cache_;
  const Batch& batch_;
  AttentionPlan& plan_;
  const int ratio_ = cache_.num_heads / cache_.num_kv_heads;
  const int shared_tokens_ = std::max(1, ROWS_SHARED / ratio_);  // of a shared group
  long thread_cost_;                                             // a thread's share: tiles x query tokens, for a head
  std::vector<Member> members_;
};

}  // namespace

AttentionPlan::AttentionPlan(const CacheDesc& cache, const Batch& batch, int threads, int64_t window) : window(window) {
  Grouping(cache, batch, threads, *this);
  const int ratio = cache.num_heads / cache.num_kv_heads;
  std::vector<double> totals;  // by round
  for (const Group& group : groups) {
    if ((int)totals.size() <= group.round) totals.resize(group.round + 1);
    totals[group.round] += (double)group.tiles * group.count;
  }
  long floats;
  // Divides the groups that are more than `most` of their round; of all of it none is.
  const auto divide = [&](double most) {
    floats = 0;
    for (Group& group : groups) {
      const double parts = std::ceil(group.tiles * group.count / (totals[group.round] * most));
      group.parts = (int)std::max(1.0, std::min<double>(group.tiles, parts));
      if (group.parts == 1) continue;
      group.partial = floats;
      floats += group.tiles * partial_floats(group.count * ratio, cache.value_width());
    }
    return floats <= PARTIALS_MAX;
  };
  for (double most = threads == 1 ? 1.0 : 1.0 / (PARTS * threads); !divide(most);) most *= 2;
  partials.resize(floats);

  struct Priced {
    int round;
    double cost;
    Item item;
  };
  std::vector<Priced> order;
  for (int i = 0; i < (int)groups.size(); i++) {
    const Group& group = groups[i];
    for (int part = 0; part < group.parts; part++) {
      const int first = group.tiles * part / group.parts, last = group.tiles * (part + 1) / group.parts;
      order.push_back(
          {group.round, (double)(last - first) * group.count, {i, group.first_tile + first, group.first_tile + last}});
    }
  }
  std::stable_sort(order.begin(), order.end(), [](const Priced& a, const Priced& b) {
    return a.round != b.round ? a.round < b.round : a.cost > b.cost;
  });
  for (const Priced& priced : order) items.push_back(priced.item);
  for (size_t i = 0; i < order.size(); i++)
    if (i + 1 == order.size() || order[i + 1].round != order[i].round) round_ends.push_back(i + 1);
  pending.reset(new std::atomic<int>[groups.size()]);
  for (size_t i = 0; i < groups.size(); i++) pending[i].store(groups[i].parts, std::memory_order_relaxed);
}

int64_t AttentionPlan::tiles_read() const {
  int64_t tiles = 0;
  for (const Group& group : groups)
    if (group.head == 0) tiles += group.tiles;
  return tiles;
}

}  // namespace nova
