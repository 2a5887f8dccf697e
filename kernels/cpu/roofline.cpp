// How fast this machine reads memory: what a decode step at batch 1 is measured against.
#include <atomic>

#include "simd.h"
#include "team.h"

using namespace nova;

// Reads every cache line once (up to 255 bytes at the end are left out), in the pieces and with the prefetches that the
// linears use; gives their xor.
extern "C" uint64_t nova_read(const void* data, int64_t bytes, int threads) {
  constexpr long piece = 256 << 10;
  constexpr long ahead = 8 << 10;
  const char* begin = (const char*)data;
  std::atomic<uint64_t> all{0};
  Team(threads).loop(ceil_div(bytes, piece), [&](long i) {
    vi sum[4] = {set1i(0), set1i(0), set1i(0), set1i(0)};
    const char* end = begin + std::min<long>(bytes / 256 * 256, (i + 1) * piece);
    for (const char* at = begin + i * piece; at < end; at += 256) {
      for (int line = 0; line < 256; line += 64) prefetch(at + ahead + line);
      for (int v = 0; v < 256 / (int)sizeof(vi); v++) sum[v % 4] = xori(sum[v % 4], loadi(at + v * sizeof(vi)));
    }
    const vi last = xori(xori(sum[0], sum[1]), xori(sum[2], sum[3]));
    uint64_t words[sizeof(vi) / 8], result = 0;
    std::memcpy(words, &last, sizeof(vi));
    for (const uint64_t word : words) result ^= word;
    all.fetch_xor(result, std::memory_order_relaxed);
  });
  return all.load();
}
