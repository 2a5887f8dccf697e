// From logits to tokens: what kernels/sampling/sampler.py says, a row of logits at a time on whichever thread is free.
//
// A row is read once for its largest logits (`scan`), and once more where a sum over all of its weights is wanted. What
// changes logits (allowed ids, bans, bias, penalties) works on a copy in fp32, so that the model's are there to report;
// only a step's mask is written into the caller's row, since what it forbids is as if the model had never offered it. A
// row's token is the same whatever threads there are and whatever is computed beside it (largest.h says why).
#include <atomic>

#include "abi.h"
#include "largest.h"
#include "team.h"

// The newer version differs in what it does to errno alone, and an older system has none (as in team.cpp).
#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver log, log@GLIBC_2.2.5");
#elif defined(__GLIBC__) && defined(__aarch64__)
__asm__(".symver log, log@GLIBC_2.17");
#endif

using namespace nova;

namespace {

// How one slot samples; mirrored by SlotDesc in sampling.py.
struct SlotDesc {
  const uint32_t* allowed;  // bit i % 32 of word i / 32; null: all are
  const int32_t* banned;
  const int32_t* stops;
  const int32_t* biased;
  const float* biases;
  int32_t* history;  // tokens so far by their positions; null: no penalties
  int64_t num_banned, num_stops, num_biased;
  int64_t num_prompt;
  int64_t stops_until;  // the position from which stop tokens may be drawn
  uint64_t seed;
  double top_p;
  float temperature;  // 0: the most likely token
  float min_p;
  float repetition, presence, frequency;
  int32_t top_k;     // 0: no filter
  int32_t logprobs;  // most likely tokens to report; -1: no log probabilities at all
};

// Mirrored by DrawDesc in sampling.py: one call's rows, and where their tokens go.
struct DrawDesc {
  const SlotDesc* slots;
  int64_t num_slots, vocab_size, num_positions;
  void* logits;
  int64_t stride, num_rows;
  const int64_t *row_slots, *positions;
  const int64_t* drafts;         // null: none
  const uint32_t* const* masks;  // of allowed tokens, one a row, as SlotDesc::allowed; null: none, or of no row
  int64_t* tokens;
  double* logprobs;  // [num_rows, 1 + width]: of the token, and of the most likely ones
  int32_t* likely;   // [num_rows, width]
  int64_t width;
  uint8_t* scratch;
  int64_t scratch_stride;  // bytes for each thread, of which the first (`marks`) are zero between calls
  int32_t dtype;
};

constexpr int64_t NO_TOKEN = -1, NONE_ALLOWED = -2;  // fsm/messages/step.py
constexpr long FEW = 1024;                           // tokens of a mask that are drawn from as a row of their own
constexpr long NUCLEUS_GUESS = 64;                   // tokens in which a top_p is looked for before the whole row is
constexpr long BLOCK = 64;  // weights summed at once where the token is looked for inside a chunk

// What a thread needs to draw from one row; memory that is not touched takes none.
struct Scratch {
  uint32_t* marks;   // [vocab_size], all 0 between rows
  float* edited;     // [vocab_size]
  float* weights;    // [vocab_size]
  float* work;       // [2 (vocab_size + VL)]
  float* values;     // [vocab_size]
  int32_t* ids;      // [vocab_size]
  int32_t* tops[3];  // [chunks * VL]: of the model's logits, of those that are drawn from, and to work with

  static int64_t lay_out(uint8_t* at, long vocab_size, Scratch& out) {
    uint8_t* const begin = at;
    const auto take = [&](auto*& array, long count) {
      array = (std::remove_reference_t<decltype(array)>)at;
      at += ceil_div(count * 4, 64) * 64;
    };
    take(out.marks, vocab_size), take(out.edited, vocab_size), take(out.weights, vocab_size);
    take(out.work, 2 * (vocab_size + VL)), take(out.values, vocab_size), take(out.ids, vocab_size);
    for (int32_t*& tops : out.tops) take(tops, ceil_div(vocab_size, CHUNK) * VL);
    return at - begin;
  }

  Picked picked() const { return {values, ids, 0}; }
};

// ---- random numbers: kernels/sampling/uniform.py

uint64_t mix(uint64_t state) {
  state += 0x9E3779B97F4A7C15u;
  state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
  state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
  return state ^ (state >> 31);
}

double uniform(uint64_t seed, int64_t position) {
  return (double)(mix(mix(mix(seed)) ^ (uint64_t)position) >> 11) * 0x1p-53;
}

// ---- what changes logits: kernels/sampling/logits.py

// Those of `allowed`, one bit for each token, and minus infinity for the others; null: all are. From may be To.
template <class From, class To>
void copy_allowed(const typename From::type* x, long n, const uint32_t* allowed, typename To::type* out) {
  const vf never = set1(-INF);
  vectors(n, [&](long i, auto left) {
    const vf value = load_first<From>(x + i, left);
    const vm may = allowed ? from_bits(allowed[i / 32] >> (i % 32) & ((1u << VL) - 1)) : first_lanes(VL);
    store_first<To>(out + i, select(may, value, never), left);
  });
}

// The numbers and the ids of all tokens that a mask allows, in their order; -1 where they are more than FEW.
template <class T>
long gather(const typename T::type* x, long n, const uint32_t* mask, float* values, int32_t* ids) {
  long count = 0;
  for (long begin = 0; begin < n; begin += 32) {
    uint32_t bits = mask[begin / 32];
    if (n - begin < 32) bits &= (1u << (n - begin)) - 1;
    for (; bits; bits &= bits - 1) {
      if (count == FEW) return -1;
      const long id = begin + __builtin_ctz(bits);
      values[count] = number_at<T>(x, id);
      ids[count++] = (int32_t)id;
    }
  }
  return count;
}

// Repetition over all tokens so far, presence and frequency over those behind the prompt, each token once.
void penalise(const SlotDesc& slot, int64_t position, uint32_t* marks, float* x) {
  constexpr uint32_t SEEN = 1u << 31;  // below it: how often behind the prompt
  for (int64_t i = 0; i < position; i++) marks[slot.history[i]] |= SEEN;
  for (int64_t i = slot.num_prompt; i < position; i++) marks[slot.history[i]]++;
  for (int64_t i = 0; i < position; i++) {
    const int32_t token = slot.history[i];
    const uint32_t mark = marks[token];
    if (mark == 0) continue;
    marks[token] = 0;
    float value = x[token];
    if (slot.repetition != 1.0f) value = value > 0 ? value / slot.repetition : value * slot.repetition;
    const uint32_t count = mark & ~SEEN;
    if (count) value -= slot.frequency * (float)count + slot.presence;
    x[token] = value;
  }
}

template <class T>
void edit(const typename T::type* x, long n, const SlotDesc& slot, int64_t position, bool is_masked,
          const Scratch& scratch) {
  float* out = scratch.edited;
  copy_allowed<T, Fp32>(x, n, slot.allowed, out);
  for (int64_t i = 0; i < slot.num_banned; i++) out[slot.banned[i]] = -INF;
  if (position < slot.stops_until) {
    for (int64_t i = 0; i < slot.num_stops; i++) {
      float& value = out[slot.stops[i]];
      scratch.values[i] = value;
      value = -INF;
    }
    // Where they are all that may be drawn they stay: some token must be.
    if ((slot.allowed || is_masked || slot.num_banned) && !scan<Fp32>(out, n, scratch.tops[1]).is_finite)
      for (int64_t i = 0; i < slot.num_stops; i++) out[slot.stops[i]] = scratch.values[i];
  }
  for (int64_t i = 0; i < slot.num_biased; i++) out[slot.biased[i]] += slot.biases[i];
  if (slot.history) penalise(slot, position, scratch.marks, out);
}

// ---- the draw: kernels/sampling/draw.py

// exp(x / temperature - largest), and 0 for what is filtered one by one.
struct Weights {
  float largest, temperature;
  float min_p = 0;     // weights below it are none
  float least = -INF;  // nor are those of smaller logits

  template <class T>
  void of(const typename T::type* x, long n, float* out) const {
    const vf temperatures = set1(temperature), largests = set1(largest), floor = set1(-126.0f);
    vectors(n, [&](long i, auto left) {
      const vf value = load_numbers<T>(x + i, left);
      const vf exponent = mul(sub(div(value, temperatures), largests), set1(LOG2E));
      const vf weight = exp2v(vmax(exponent, floor));
      store_first<Fp32>(out + i, select(both(ge(weight, set1(min_p)), ge(value, set1(least))), weight, zero()), left);
    });
  }
};

// Mass of at most CHUNK weights under a cut; `ties` is how many that equal it may still count.
int64_t mass_under(const float* weights, long n, const Cut& cut, long& ties) {
  ByMass mass;
  long equal = 0;
  const vf least = set1(cut.least);
  vectors(n, [&](long i, auto left) {
    const vf weight = load_first<Fp32>(weights + i, left);
    mass.add(weight, among(left, gt(weight, least)));
    if (cut.ties) equal += __builtin_popcount(to_bits(among(left, eq(weight, least))));
  });
  const long counted = std::min(equal, ties);
  ties -= counted;
  return mass.take() + counted * (cut.ties ? mass_of(cut.least) : 0);
}

// The index at which the running mass under the cut first exceeds u times all of it. `chunk(c)` gives the weights of
// chunk c, for as long as no other is asked for.
template <class F>
long search(F&& chunk, long n, const Cut& cut, double u) {
  int64_t masses[VOCAB_SIZE_MAX / CHUNK], total = 0;
  long ties = cut.ties;
  for (long c = 0; c * CHUNK < n; c++)
    total += masses[c] = mass_under(chunk(c), std::min(CHUNK, n - c * CHUNK), cut, ties);
  int64_t target = std::min((int64_t)(u * (double)total), total - 1);
  long c = 0;
  for (; target >= masses[c]; c++) target -= masses[c];
  ties = cut.ties;
  for (long before = 0; cut.ties && before < c; before++) mass_under(chunk(before), CHUNK, cut, ties);
  const float* weights = chunk(c);
  for (long begin = 0;; begin += BLOCK) {
    const long count = std::min(BLOCK, n - c * CHUNK - begin), ties_before = ties;
    const int64_t mass = mass_under(weights + begin, count, cut, ties);
    if (target >= mass) {
      target -= mass;
      continue;
    }
    ties = ties_before;
    for (long i = begin;; i++) {
      target -= mass_under(weights + i, 1, cut, ties);
      if (target < 0) return c * CHUNK + i;
    }
  }
}

// The least mass of the most likely tokens that `top_p` keeps.
int64_t limit_of(double top_p, int64_t total) {
  return std::clamp<int64_t>((int64_t)std::ceil(top_p * (double)total), 1, total);
}

// A token among a few that are the most likely ones, or -1 where they are too few: `total` is the mass of all, if that
// is more than theirs.
long draw_among(Picked& picked, const Weights& kind, double top_p, int64_t total, double u, float* work) {
  float* const weights = picked.values;
  kind.of<Fp32>(picked.values, picked.count, weights);
  const int64_t own = measure_of<ByMass>(weights, picked.count);
  Cut nucleus = ALL;
  if (top_p < 1.0) {
    const int64_t limit = limit_of(top_p, total ? total : own);
    if (limit > own) return -1;
    nucleus = cut<ByMass>(weights, picked.count, limit, own, work);
  }
  return picked.ids[search([&](long c) { return weights + c * CHUNK; }, picked.count, nucleus, u)];
}

template <class T>
long draw_from(const typename T::type* x, long n, const Scan& found, const SlotDesc& slot, double u,
               const Scratch& scratch) {
  Weights kind = {number(found.largest) / slot.temperature, slot.temperature, slot.min_p};
  if (!std::isfinite(kind.largest)) return NO_TOKEN;
  Picked picked = scratch.picked();
  float *const weights = scratch.weights, *const work = scratch.work;
  if (slot.top_k && slot.top_k <= found.num_tops / 2) {
    pick<T>(x, n, found, slot.top_k, scratch.tops[2], picked);
    std::copy_n(picked.values, picked.count, work);
    std::nth_element(work, work + slot.top_k - 1, work + picked.count, std::greater<float>());
    picked.keep([least = work[slot.top_k - 1]](float value) { return value >= least; });
    return draw_among(picked, kind, slot.top_p, 0, u, work);
  }
  if (slot.top_k) {
    copy_allowed<T, Fp32>(x, n, nullptr, weights);
    kind.least = cut<ByCount>(weights, n, slot.top_k, n, work).least;
  }
  if (slot.top_p >= 1.0) {
    const auto chunk = [&](long c) {
      kind.of<T>(x + c * CHUNK, std::min(CHUNK, n - c * CHUNK), weights);
      return weights;
    };
    return search(chunk, n, ALL, u);
  }
  int64_t total = 0;
  for (long begin = 0; begin < n; begin += CHUNK) {
    const long count = std::min(CHUNK, n - begin);
    kind.of<T>(x + begin, count, weights + begin);
    total += measure_of<ByMass>(weights + begin, count);
  }
  pick<T>(x, n, found, NUCLEUS_GUESS, scratch.tops[2], picked);
  const long token = draw_among(picked, kind, slot.top_p, total, u, work);
  if (token >= 0) return token;
  const Cut nucleus = cut<ByMass>(weights, n, limit_of(slot.top_p, total), total, work);
  return search([&](long c) { return weights + c * CHUNK; }, n, nucleus, u);
}

// ---- log probabilities of the model's logits

template <class T>
void report(const typename T::type* x, long n, const Scan& found, long token, long count, const Scratch& scratch,
            double* logprobs, int32_t* likely) {
  const Weights kind = {number(found.largest), 1.0f};
  int64_t total = 0;
  for (long i = 0; i < n; i += CHUNK) {
    kind.of<T>(x + i, std::min(CHUNK, n - i), scratch.weights);
    total += measure_of<ByMass>(scratch.weights, std::min(CHUNK, n - i));
  }
  const double normaliser = kind.largest + std::log((double)total / ONE);
  logprobs[0] = number_at<T>(x, token) - normaliser;
  if (count == 0) return;
  Picked picked = scratch.picked();
  pick<T>(x, n, found, count, scratch.tops[2], picked);
  picked.keep([](float value) { return value > -INF; });
  std::fill(logprobs + 1 + std::min(count, picked.count), logprobs + 1 + count, -INF);
  count = std::min(count, picked.count);
  int32_t* const order = (int32_t*)scratch.work;
  for (long i = 0; i < picked.count; i++) order[i] = (int32_t)i;  // ids ascend with it
  std::partial_sort(order, order + count, order + picked.count, [&](int32_t a, int32_t b) {
    return picked.values[a] != picked.values[b] ? picked.values[a] > picked.values[b] : a < b;
  });
  for (long i = 0; i < count; i++) {
    likely[i] = picked.ids[order[i]];
    logprobs[1 + i] = picked.values[order[i]] - normaliser;
  }
}

// ---- a call's rows

template <class T>
long draw(const typename T::type* x, long n, const Scan& found, const SlotDesc& slot, int64_t position, bool is_masked,
          const Scratch& scratch) {
  if (!found.is_finite) return is_masked && found.is_empty ? NONE_ALLOWED : NO_TOKEN;
  if (slot.temperature == 0) return first_largest<T>(x, n, found);
  return draw_from<T>(x, n, found, slot, uniform(slot.seed, position), scratch);
}

// From the few tokens that a mask allows, in their order, nothing else having changed them: as if from the whole row,
// since masses are exact and in the same order. Most masks of JSON are such, between its strings.
long draw_few(long count, const int32_t* ids, SlotDesc slot, int64_t position, const Scratch& scratch) {
  if (count == 0) return NONE_ALLOWED;
  if (slot.top_k >= count) slot.top_k = 0;
  const Scan found = scan<Fp32>(scratch.edited, count, scratch.tops[0]);
  const long index = draw<Fp32>(scratch.edited, count, found, slot, position, true, scratch);
  return index < 0 ? index : ids[index];
}

template <class T>
int64_t draw_row(const DrawDesc& call, long row, const Scratch& scratch) {
  const long n = call.vocab_size;
  auto* x = (typename T::type*)call.logits + row * call.stride;
  const SlotDesc& slot = call.slots[call.row_slots[row]];
  const int64_t position = call.positions[row];
  const uint32_t* const mask = call.masks ? call.masks[row] : nullptr;
  const bool is_edited = slot.allowed || slot.num_banned || slot.num_biased || slot.history ||
                         (slot.num_stops && position < slot.stops_until);
  if (mask && !is_edited && slot.logprobs < 0) {
    int32_t ids[FEW];
    const long count = gather<T>(x, n, mask, scratch.edited, ids);
    if (count >= 0) return draw_few(count, ids, slot, position, scratch);
  }
  if (mask) copy_allowed<T, T>(x, n, mask, x);
  Scan raw{};
  if (!is_edited || slot.logprobs >= 0) raw = scan<T>(x, n, scratch.tops[0]);
  if (slot.logprobs >= 0 && !raw.is_finite)
    return mask && raw.is_empty ? NONE_ALLOWED : NO_TOKEN;  // wherever a NaN lies, there are no log probabilities
  long token;
  if (is_edited) {
    edit<T>(x, n, slot, position, mask != nullptr, scratch);
    const Scan found = scan<Fp32>(scratch.edited, n, scratch.tops[1]);
    token = draw<Fp32>(scratch.edited, n, found, slot, position, mask != nullptr, scratch);
  } else {
    token = draw<T>(x, n, raw, slot, position, mask != nullptr, scratch);
  }
  if (slot.logprobs >= 0 && token >= 0)
    report<T>(x, n, raw, token, std::min<long>(slot.logprobs, n), scratch, call.logprobs + row * (1 + call.width),
              call.likely + row * call.width);
  return token;
}

// Tokens that the next rows of the same sequences count.
void write_history(const DrawDesc& call, const int64_t* tokens) {
  for (long row = 0; row < call.num_rows; row++) {
    int32_t* history = call.slots[call.row_slots[row]].history;
    if (history && tokens[row] >= 0) history[call.positions[row]] = (int32_t)tokens[row];
  }
}

void check(const DrawDesc& call) {
  const auto lies_in = [](int64_t number, int64_t begin, int64_t end) {
    return begin <= number && number < end;
  };
  for (long row = 0; row < call.num_rows; row++)
    if (!lies_in(call.row_slots[row], 0, call.num_slots) || !lies_in(call.positions[row], 0, call.num_positions) ||
        (call.drafts && !lies_in(call.drafts[row], NO_TOKEN, call.vocab_size)))
      throw std::out_of_range("a slot, position or draft");
}

}  // namespace

extern "C" {

int64_t nova_draw_scratch_bytes(int64_t vocab_size) {
  Scratch scratch;
  return Scratch::lay_out(nullptr, vocab_size, scratch);
}

// One token a row. Drafts count as tokens of their sequences for the rows behind them, and then what was drawn does.
int nova_draw(const DrawDesc* call, int threads) {
  return guarded([&] {
    check(*call);
    if (call->drafts) write_history(*call, call->drafts);
    std::atomic<long> next{0};
    Team team(threads);
    // An item is a thread's scratch, with which it draws from row after row.
    team.loop(std::min<long>(team.size(), call->num_rows), [&](long item) {
      Scratch scratch;
      Scratch::lay_out(call->scratch + item * call->scratch_stride, call->vocab_size, scratch);
      for (long row; (row = next.fetch_add(1, std::memory_order_relaxed)) < call->num_rows;)
        call->tokens[row] =
            call->dtype == 0 ? draw_row<Bf16>(*call, row, scratch) : draw_row<Fp32>(*call, row, scratch);
    });
    write_history(*call, call->tokens);
  });
}

}  // extern "C"
