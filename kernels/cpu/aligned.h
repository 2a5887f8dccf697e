// Memory that begins where a cache line does, so that no vector register's worth of it, and no row of a tile, lies in
// two.
#pragma once

#include <memory>
#include <new>
#include <vector>

namespace nova {

constexpr std::align_val_t CACHE_LINE{64};

template <class T>
struct OnCacheLines {
  using value_type = T;
  OnCacheLines() = default;
  template <class U>
  OnCacheLines(const OnCacheLines<U>&) {}
  T* allocate(size_t n) { return (T*)::operator new(n * sizeof(T), CACHE_LINE); }
  void deallocate(T* p, size_t) { ::operator delete(p, CACHE_LINE); }
  bool operator==(const OnCacheLines&) const { return true; }
  bool operator!=(const OnCacheLines&) const { return false; }
};
template <class T>
using AlignedVector = std::vector<T, OnCacheLines<T>>;

// The same without a size, and never cleared.
struct FreeAligned {
  void operator()(void* p) const { ::operator delete(p, CACHE_LINE); }
};
template <class T>
using AlignedArray = std::unique_ptr<T[], FreeAligned>;
template <class T>
AlignedArray<T> aligned_array(long count) {
  return AlignedArray<T>((T*)::operator new(count * sizeof(T), CACHE_LINE));
}

}  // namespace nova
