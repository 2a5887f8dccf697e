// The paged KV cache: how a block lies in memory, and how a token is written into one.
//
// Layout, by layer, block and kv head: groups of 16 tokens, all keys of the block, then all values.
//   keys   [unit of head_dim][16 tokens]: a vector is one unit of 16 tokens; a query's unit is broadcast against it
//   values [unit of tokens][head_dim]:    a vector is one unit (bf16: two tokens) of 16 columns; a unit of
//                                         probabilities is broadcast against it
// so that both products of attention are the linear's loop: load, broadcast, `dp`, and no horizontal step.
//
// In INT8 a unit is a pair of cells (16 bits), and each group of keys, and of values, begins with the fp32 scales of
// its 16 tokens. Cells and scales are the numbers of kernels/ops/kv_cache.py.
#pragma once

#include "simd.h"

namespace nova {

constexpr int GROUP = 16;  // tokens stored side by side; the last group of a block may hold fewer
constexpr float CELL_MAX = 127.0f;

// How keys and values are kept; the numbers of `CACHE_FORMATS` in native.py.
enum class CacheFormat : int32_t { AS_COMPUTED = 0, INT8 = 1 };

// Mirrors `CacheDesc` in native.py.
struct CacheDesc {
  void* data;
  int64_t num_blocks, block_size;
  int32_t num_layers, num_heads, num_kv_heads, head_dim;
  int32_t dtype;  // of what is written, and computed with: 0 bf16, 1 fp32
  CacheFormat format;

  bool is_int8() const { return format == CacheFormat::INT8; }
  int elements() const { return is_int8() || dtype == 0 ? 2 : 1; }        // of a unit
  long key_units() const { return ceil_div(head_dim, elements()); }       // of one token
  long value_width() const { return ceil_div(head_dim, GROUP) * GROUP; }  // columns of one unit of tokens
  // All sizes below in 32 bits: a unit, half as much in INT8.
  long scales() const { return is_int8() ? GROUP : 0; }  // of a group
  long key_group() const { return scales() + in_words(key_units() * GROUP); }
  long value_group() const { return scales() + in_words(GROUP / elements() * value_width()); }
  long groups_per_block() const { return ceil_div(block_size, GROUP); }
  long head_words() const { return groups_per_block() * (key_group() + value_group()); }
  long block_words() const { return head_words() * num_kv_heads; }
  long layer_words() const { return block_words() * num_blocks; }

  const uint32_t* layer(int index) const { return (const uint32_t*)data + index * layer_words(); }

 private:
  long in_words(long units) const { return is_int8() ? units / 2 : units; }
};

// Writes token t's key and value [num_kv_heads, head_dim] to its slot; negative slots are skipped.
void write_token(const CacheDesc& cache, int layer, int64_t slot, const void* key, const void* value);

// The scale that makes the largest of n elements `largest`; infinite when one of them is not finite.
template <class T>
inline float scale_of(const typename T::type* x, long n, float largest) {
  const vi magnitude = set1i(0x7fffffffu);
  vf most = zero(), none = zero();
  for (long i = 0; i < n; i += VL) {
    const vf value = load_first<T>(x + i, n - i);
    most = vmax(asf(andi(asi(value), magnitude)), most);
    none = fma(value, zero(), none);  // NaN once one is infinite or NaN
  }
  return hsum(none) == 0.0f ? hmax(most) / largest : std::numeric_limits<float>::infinity();
}

}  // namespace nova
