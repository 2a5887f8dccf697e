// Writing tokens into the paged KV cache (kv_cache.h says how it lies in memory).
#include "kv_cache.h"

#include "abi.h"
#include "team.h"

namespace nova {
namespace {

// Where one token lies in the blocks of a layer.
struct Place {
  uint32_t* block;
  long key_group, value_group;  // from the start of a head
  long lane;                    // in both

  Place(const CacheDesc& cache, int layer, int64_t slot) {
    const long offset = slot % cache.block_size;
    block = (uint32_t*)cache.layer(layer) + slot / cache.block_size * cache.block_words();
    key_group = offset / GROUP * cache.key_group();
    value_group = cache.groups_per_block() * cache.key_group() + offset / GROUP * cache.value_group();
    lane = offset % GROUP;
  }
};

template <class T>
void write(const CacheDesc& cache, int layer, int64_t slot, const typename T::type* key,
           const typename T::type* value) {
  using Element = typename T::type;
  constexpr int E = T::E;
  const Place place(cache, layer, slot);
  const long width = cache.value_width();
  for (int head = 0; head < cache.num_kv_heads; head++, key += cache.head_dim, value += cache.head_dim) {
    uint32_t* base = place.block + head * cache.head_words();
    Element* k = (Element*)(base + place.key_group);
    Element* v = (Element*)(base + place.value_group);
    for (int d = 0; d < cache.head_dim; d++) {
      k[(d / E * GROUP + place.lane) * E + d % E] = key[d];
      v[(place.lane / E * width + d) * E + place.lane % E] = value[d];
    }
  }
}

// Calls put(d, cell) for each of n elements, as cells of one scale, which it returns.
template <class T, class Put>
float quantise(const typename T::type* x, long n, Put&& put) {
  const float scale = scale_of<T>(x, n, CELL_MAX);
  // An infinite scale alone says that this is no number: its cells are zeros.
  const vf divisor = set1(scale == 0.0f ? 1.0f : scale), most = set1(scale <= 3.4e38f ? CELL_MAX : 0.0f);
  for (long i = 0; i < n; i += VL) {
    float cells[VL];
    storef(cells, round_even(vmax(vmin(div(load_first<T>(x + i, n - i), divisor), most), sub(zero(), most))));
    for (long d = i; d < std::min(n, i + VL); d++) put(d, (int8_t)cells[d - i]);
  }
  return scale;
}

template <class T>
void write_int8(const CacheDesc& cache, int layer, int64_t slot, const typename T::type* key,
                const typename T::type* value) {
  const Place place(cache, layer, slot);
  const long width = cache.value_width(), lane = place.lane;
  for (int head = 0; head < cache.num_kv_heads; head++, key += cache.head_dim, value += cache.head_dim) {
    float* k_scales = (float*)(place.block + head * cache.head_words() + place.key_group);
    float* v_scales = (float*)(place.block + head * cache.head_words() + place.value_group);
    int8_t* k = (int8_t*)(k_scales + GROUP);
    int8_t* v = (int8_t*)(v_scales + GROUP);
    k_scales[lane] =
        quantise<T>(key, cache.head_dim, [&](long d, int8_t cell) { k[(d / 2 * GROUP + lane) * 2 + d % 2] = cell; });
    v_scales[lane] = quantise<T>(value, cache.head_dim,
                                 [&](long d, int8_t cell) { v[(lane / 2 * width + d) * 2 + lane % 2] = cell; });
  }
}

template <class T>
void write_any(const CacheDesc& cache, int layer, int64_t slot, const void* key, const void* value) {
  using Element = typename T::type;
  (cache.is_int8() ? write_int8<T> : write<T>)(cache, layer, slot, (const Element*)key, (const Element*)value);
}

}  // namespace

void write_token(const CacheDesc& cache, int layer, int64_t slot, const void* key, const void* value) {
  if (slot < 0) return;
  (cache.dtype == 0 ? write_any<Bf16> : write_any<Fp32>)(cache, layer, slot, key, value);
}

}  // namespace nova

using namespace nova;

extern "C" {

int64_t nova_cache_block_bytes(const CacheDesc* cache) { return cache->block_words() * 4 * cache->num_layers; }

int nova_cache_write(const CacheDesc* cache, int layer, const void* key, int64_t key_stride, const void* value,
                     int64_t value_stride, const int64_t* slots, int64_t count, int threads) {
  return guarded([&] {
    const long element = cache->dtype == 0 ? 2 : 4;
    Team(threads).rows(count, [&](long t) {
      write_token(*cache, layer, slots[t], (const char*)key + t * key_stride * element,
                  (const char*)value + t * value_stride * element);
    });
  });
}

}  // extern "C"
