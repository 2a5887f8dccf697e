// Runs the native library on fixed inputs and prints what it computes, a line for each result: its name, its type
// ("u8", "i32", "i64", "bf16" or "f32") and its bytes in hexadecimal. test_native_arm.py compares what it prints on two
// CPUs.
#include <cstdio>
#include <string>
#include <vector>

#include "kv_cache.h"
#include "linear.h"

using namespace nova;

extern "C" {
int64_t nova_linear_bytes(const LinearDesc*);
int64_t nova_linear_columns(const LinearDesc*);
int nova_linear_pack(const LinearDesc*, const void*, void*, int);
int nova_linear_pack_codes(const LinearDesc*, const int8_t*, void*, int);
int nova_linear_round(const LinearDesc*, const void*, void*, float*, int);
int nova_linear_rows(const LinearDesc*, const int64_t*, int64_t, void*, int);
int nova_linear(const LinearDesc*, const void*, int64_t, int64_t, void*, int);
int64_t nova_cache_block_bytes(const CacheDesc*);
int nova_cache_write(const CacheDesc*, int, const void*, int64_t, const void*, int64_t, const int64_t*, int64_t, int);
int nova_attend(const CacheDesc*, int, const void*, int64_t, const int32_t*, int64_t, const int32_t*, const int32_t*,
                int64_t, float, int64_t, void*, int);
int nova_rms_norm(int, const void*, int64_t, const void*, float, void*, int64_t, int64_t, int);
int nova_add_rms_norm(int, const void*, void*, const void*, float, void*, int64_t, int64_t, int);
int nova_silu_mul(int, const void*, void*, int64_t, int64_t, int);
int nova_choose_experts(int, const void*, int64_t, int64_t, int64_t, int, int64_t*, void*, int);
int nova_mix_experts(int, const void*, const int64_t*, const void*, const void*, const void*, void*, int64_t, int64_t,
                     int64_t, int);
int nova_qk_norm(int, void*, int64_t, const void*, const void*, int, int, int, float, int64_t, int);
int nova_rope(int, void*, int64_t, const float*, const int64_t*, int, int, int64_t, int);
uint64_t nova_read(const void*, int64_t, int);
int64_t nova_draw_scratch_bytes(int64_t);
int nova_draw(const struct DrawDesc*, int);
}

struct SlotDesc {  // as in sampling.cpp
  const uint32_t* allowed;
  const int32_t *banned, *stops, *biased;
  const float* biases;
  int32_t* history;
  int64_t num_banned, num_stops, num_biased, num_prompt, stops_until;
  uint64_t seed;
  double top_p;
  float temperature, min_p, repetition, presence, frequency;
  int32_t top_k, logprobs;
};

struct DrawDesc {  // likewise
  const SlotDesc* slots;
  int64_t num_slots, vocab_size, num_positions;
  const void* logits;
  int64_t stride, num_rows;
  const int64_t *row_slots, *positions, *drafts;
  const uint32_t* const* masks;
  int64_t* tokens;
  double* logprobs;
  int32_t* likely;
  int64_t width;
  uint8_t* scratch;
  int64_t scratch_stride;
  int32_t dtype;
};

namespace {

constexpr int THREADS = 2;
constexpr float EPS = 1e-6f;

void check(int status) {
  if (status) std::fprintf(stderr, "a call failed with %d\n", status), std::exit(1);
}

uint32_t draw() {  // the same numbers on every machine
  static uint64_t state = 1;
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (uint32_t)(state >> 32);
}

// From -size to size; with `spread`, one in eight of up to that many times the size.
float number(float size, float spread = 1.0f) {
  const float unit = (float)((int32_t)draw() >> 8) / (1 << 23);
  return unit * size * (draw() % 8 ? 1.0f : spread);
}

template <class E>
void print(const std::string& name, const char* type, const std::vector<E>& values) {
  std::printf("%s %s ", name.c_str(), type);
  const unsigned char* bytes = (const unsigned char*)values.data();
  for (size_t i = 0; i < values.size() * sizeof(E); i++) std::printf("%02x", bytes[i]);
  std::printf("\n");
}

template <class T>
struct Run {
  using E = typename T::type;
  static constexpr int DTYPE = T::E == 2 ? 0 : 1;
  const std::string type = DTYPE ? "f32" : "bf16";

  std::vector<E> numbers(long count, float size, float spread = 1.0f) const {
    std::vector<E> found(count);
    for (E& each : found) each = from_float<T>(number(size, spread));
    return found;
  }

  void show(const std::string& name, const std::vector<E>& values) const {
    print(name + "/" + type, type.c_str(), values);
  }

  // Rows of very different sizes, some numbers of one too small to be normal.
  std::vector<E> activations(long m, long k) const {
    std::vector<E> x;
    for (long row = 0; row < m; row++) {
      const float size = row % 5 == 3 ? 1e-37f : std::exp2((float)(row % 12) - 6.0f);
      const std::vector<E> some = numbers(k, size, 50.0f);
      x.insert(x.end(), some.begin(), some.end());
    }
    return x;
  }

  void multiply(const std::string& name, const LinearDesc& d) const {
    std::vector<E> x = activations(37, d.k);
    for (const long m : {1, 2, 5, 37}) {
      std::vector<E> out(m * d.n);
      check(nova_linear(&d, x.data(), d.k, m, out.data(), THREADS));
      show(name + "/" + std::to_string(m), out);
    }
    std::vector<int64_t> ids;
    for (long row = 0; row < d.n; row += 3) ids.push_back(row);
    std::vector<E> rows(ids.size() * d.k);
    check(nova_linear_rows(&d, ids.data(), (long)ids.size(), rows.data(), THREADS));
    show(name + "/rows", rows);
  }

  void linears() const {
    for (const auto& [n, k] : std::vector<std::pair<long, long>>{{160, 384}, {77, 191}, {7, 3}}) {
      const std::string shape = std::to_string(n) + "x" + std::to_string(k);
      const std::vector<E> weight = numbers(n * k, 0.3f, 30.0f);
      LinearDesc d{nullptr, nullptr, n, k, DTYPE, AS_DTYPE, nullptr, nullptr, k};
      std::vector<float> bias(nova_linear_columns(&d));
      for (long i = 0; i < n; i++) bias[i] = number(1.0f);
      d.bias = bias.data();
      std::vector<char> packed(nova_linear_bytes(&d));
      check(nova_linear_pack(&d, weight.data(), packed.data(), THREADS));
      d.weight = packed.data();
      multiply("product/" + shape, d);

      d.format = CODES8;
      packed.assign(nova_linear_bytes(&d), 0);
      std::vector<float> scale(nova_linear_columns(&d));
      check(nova_linear_round(&d, weight.data(), packed.data(), scale.data(), THREADS));
      d.weight = packed.data(), d.scale = scale.data();
      multiply("int8/" + shape, d);
    }
  }

  void groups(long n, long k, WeightFormat format, long size, bool has_shift) const {
    LinearDesc d{nullptr, nullptr, n, k, DTYPE, format, nullptr, nullptr, size};
    std::vector<int8_t> codes(n * k);
    for (int8_t& code : codes) code = (int8_t)(format == CODES8 ? (int)(draw() % 256) - 128 : draw() % 16);
    std::vector<float> scale(nova_linear_columns(&d) * d.groups()), shift(scale.size());
    for (long row = 0; row < n; row++)
      for (long g = 0; g < d.groups(); g++) {
        const long at = (row / PANEL * d.groups() + g) * PANEL + row % PANEL;
        scale[at] = std::abs(number(0.1f)), shift[at] = number(0.5f);
      }
    std::vector<char> packed(nova_linear_bytes(&d));
    check(nova_linear_pack_codes(&d, codes.data(), packed.data(), THREADS));
    d.weight = packed.data(), d.scale = scale.data(), d.shift = has_shift ? shift.data() : nullptr;
    multiply("codes" + std::to_string(format == CODES8 ? 8 : 4) + (has_shift ? "-shifted/" : "/") + std::to_string(n) +
                 "x" + std::to_string(k) + "by" + std::to_string(size),
             d);
  }

  // All codes and activations as large as they can be: sums that leave 16 bits, and pairs that nearly do. And a row
  // with an infinite activation, which no INT8 stands for.
  void extremes() const {
    constexpr long K = 512;
    LinearDesc d{nullptr, nullptr, 8, K, DTYPE, CODES8, nullptr, nullptr, K};
    const std::vector<int8_t> codes(8 * K, -128);
    const std::vector<float> scale(nova_linear_columns(&d), 1.0f);
    std::vector<char> packed(nova_linear_bytes(&d));
    check(nova_linear_pack_codes(&d, codes.data(), packed.data(), THREADS));
    d.weight = packed.data(), d.scale = scale.data();
    std::vector<E> x(3 * K, from_float<T>(127.0f)), out(3 * 8);
    std::fill(x.begin() + K, x.end(), from_float<T>(-127.0f));
    x[2 * K + 5] = from_float<T>(INFINITY);
    check(nova_linear(&d, x.data(), K, 3, out.data(), THREADS));
    std::vector<E> infinite(out.end() - 8, out.end());
    out.resize(2 * 8);
    show("extremes", out);
    show("infinite", infinite);
  }

  // A prompt, a chunk and a decode, over blocks that lie anywhere; one token's key is infinite.
  void attention(CacheFormat format, int head_dim, long block_size, long window) const {
    constexpr int HEADS = 6, KV_HEADS = 2;
    const std::vector<int32_t> contexts{70, 300, 290}, starts{0, 70, 90, 91};
    const long blocks_each = ceil_div(300, block_size), num_blocks = 3 * blocks_each;
    CacheDesc cache{nullptr, num_blocks, block_size, 1, HEADS, KV_HEADS, head_dim, DTYPE, format};
    std::vector<uint8_t> data(nova_cache_block_bytes(&cache) * num_blocks);
    cache.data = data.data();
    std::vector<int32_t> tables;
    for (long i = 0; i < num_blocks; i++) tables.push_back((int32_t)(i * 7 % num_blocks));
    std::vector<int64_t> slots;
    for (long seq = 0; seq < 3; seq++)
      for (long t = 0; t < contexts[seq]; t++)
        slots.push_back(tables[seq * blocks_each + t / block_size] * block_size + t % block_size);
    const long width = KV_HEADS * head_dim, tokens = (long)slots.size();
    std::vector<E> keys = numbers(tokens * width, 1.0f, 3.0f), values = numbers(tokens * width, 2.0f, 3.0f);
    keys[50 * width + 1] = from_float<T>(INFINITY);  // the first sequence's
    check(nova_cache_write(&cache, 0, keys.data(), width, values.data(), width, slots.data(), tokens, THREADS));
    const std::string name = (format == CacheFormat::INT8 ? "int8/" : "plain/") + std::to_string(head_dim) + "by" +
                             std::to_string(block_size) + "/" + std::to_string(window) + "/" + type;
    print("cells/" + name, "u8", data);
    const std::vector<E> query = numbers(starts[3] * HEADS * head_dim, 1.0f, 4.0f);
    std::vector<E> out(query.size());
    check(nova_attend(&cache, 0, query.data(), HEADS * head_dim, tables.data(), blocks_each, starts.data(),
                      contexts.data(), 3, 1.0f / std::sqrt((float)head_dim), window, out.data(), THREADS));
    print("attention/" + name, type.c_str(), out);
  }

  void rows(long m, long k) const {
    const std::string shape = "/" + std::to_string(m) + "x" + std::to_string(k);
    const std::vector<E> x = activations(m, k), weight = numbers(k, 2.0f);
    std::vector<E> out(m * k), residual = numbers(m * k, 1.0f);
    check(nova_rms_norm(DTYPE, x.data(), k, weight.data(), EPS, out.data(), m, k, THREADS));
    show("rms_norm" + shape, out);
    check(nova_add_rms_norm(DTYPE, x.data(), residual.data(), weight.data(), EPS, out.data(), m, k, THREADS));
    show("add_rms_norm" + shape, out);
    show("residual" + shape, residual);

    const std::vector<E> gate_up = numbers(2 * m * k, 8.0f, 30.0f);
    check(nova_silu_mul(DTYPE, gate_up.data(), out.data(), m, k, THREADS));
    show("silu_mul" + shape, out);

    constexpr long ACTIVE = 3;
    std::vector<int64_t> chosen(m * ACTIVE), places;
    std::vector<E> likely(m * ACTIVE);
    check(nova_choose_experts(DTYPE, x.data(), m, k, ACTIVE, 1, chosen.data(), likely.data(), THREADS));
    print("chosen" + shape + "/" + type, "i64", chosen);
    show("likely" + shape, likely);
    for (long i = 0; i < m * ACTIVE; i++) places.push_back(draw() % m);
    const std::vector<E> shares = numbers(m * ACTIVE, 1.0f), gate = numbers(m, 4.0f);
    check(nova_mix_experts(DTYPE, x.data(), places.data(), shares.data(), residual.data(), gate.data(), out.data(), m,
                           ACTIVE, k, THREADS));
    show("mix_experts" + shape, out);
  }

  void heads(int head_dim) const {
    constexpr int HEADS = 4, KV_HEADS = 2;
    constexpr long M = 5, POSITIONS = 7;
    const std::string name = "/" + std::to_string(head_dim);
    const long stride = (HEADS + 2 * KV_HEADS) * head_dim;
    std::vector<E> qkv = numbers(M * stride, 3.0f);
    std::vector<float> cos_sin;
    for (long i = 0; i < POSITIONS * head_dim; i++) cos_sin.push_back(number(1.0f));
    const std::vector<int64_t> positions{3, 0, 6, 1, 5};
    check(
        nova_rope(DTYPE, qkv.data(), stride, cos_sin.data(), positions.data(), HEADS + KV_HEADS, head_dim, M, THREADS));
    show("rope" + name, qkv);
    const std::vector<E> q_norm = numbers(head_dim, 2.0f), k_norm = numbers(head_dim, 2.0f);
    check(nova_qk_norm(DTYPE, qkv.data(), stride, q_norm.data(), k_norm.data(), HEADS, KV_HEADS, head_dim, EPS, M,
                       THREADS));
    show("qk_norm" + name, qkv);
  }

  // A token a row: the likeliest, and drawn among all, a nucleus, the largest few, few by their share, what a mask
  // allows, and with penalties.
  void draws() const {
    constexpr long VOCAB = 9001, POSITION = 20, WIDTH = 4;
    SlotDesc plain{};
    plain.num_prompt = 10, plain.top_p = 1.0, plain.temperature = 0.8f, plain.repetition = 1.0f, plain.logprobs = WIDTH;
    std::vector<SlotDesc> slots(7, plain);
    std::vector<uint32_t> allowed(ceil_div(VOCAB, 32));
    std::vector<int32_t> history(64);
    for (uint32_t& word : allowed) word = draw();
    for (int32_t& token : history) token = (int32_t)(draw() % VOCAB);
    slots[0].temperature = 0;
    slots[2].top_p = 0.9, slots[3].top_k = 40, slots[4].min_p = 0.05f, slots[5].allowed = allowed.data();
    slots[6].history = history.data(), slots[6].repetition = 1.3f, slots[6].presence = 0.5f, slots[6].frequency = 0.2f;
    const long num_rows = (long)slots.size();
    std::vector<int64_t> rows, tokens(num_rows), positions(num_rows, POSITION);
    for (long i = 0; i < num_rows; i++) rows.push_back(i), slots[i].seed = 100 + i;
    const std::vector<E> logits = numbers(num_rows * VOCAB, 4.0f, 2.0f);
    std::vector<double> logprobs(num_rows * (1 + WIDTH));
    std::vector<int32_t> likely(num_rows * WIDTH);
    const int64_t bytes = nova_draw_scratch_bytes(VOCAB);
    std::vector<uint8_t> scratch(THREADS * bytes);
    const DrawDesc call{slots.data(), num_rows,         VOCAB,   64,      logits.data(), VOCAB,           num_rows,
                        rows.data(),  positions.data(), nullptr, nullptr, tokens.data(), logprobs.data(), likely.data(),
                        WIDTH,        scratch.data(),   bytes,   DTYPE};
    check(nova_draw(&call, THREADS));
    print("tokens/" + type, "i64", tokens);
    print("likeliest/" + type, "i32", likely);
    print("logprobs/" + type, "f32", std::vector<float>(logprobs.begin(), logprobs.end()));
  }

  void everything() const {
    draws();
    linears();
    groups(160, 384, CODES4, 32, true);
    groups(77, 192, CODES4, 64, false);
    groups(33, 191, CODES4, 191, true);
    groups(33, 192, CODES8, 32, true);
    groups(5, 12, CODES8, 12, false);
    extremes();
    for (const CacheFormat format : {CacheFormat::AS_COMPUTED, CacheFormat::INT8}) {
      attention(format, 64, 16, 0);
      attention(format, 15, 5, 13);
      attention(format, 80, 32, 300);
    }
    rows(5, 64);
    rows(17, 77);
    heads(64);
    heads(10);
  }
};

}  // namespace

int main() {
  Run<Bf16>().everything();
  Run<Fp32>().everything();
  std::vector<uint64_t> words(4096);
  uint64_t all = 0;
  for (uint64_t& word : words) word = (uint64_t)draw() << 32 | draw(), all ^= word;
  return nova_read(words.data(), (long)words.size() * 8, THREADS) == all ? 0 : 1;
}
