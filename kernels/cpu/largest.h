// The largest numbers of a row, without sorting it.
//
// A row is cut into chunks. One pass over it (`scan`) keeps the largest number of each lane of each chunk: the k-th
// largest of these is at most the k-th largest of the row, so a second look at the few chunks that reach it finds all
// that may be among the k largest. Where that is not enough (a large k, a nucleus of many tokens), `cut` looks for the
// place between two numbers of a sample, again and again, until what lies between is few.
//
// Masses are whole multiples of 2^-40, so their sums have the same bits in any order: a row's token depends on neither
// the vectors' width nor where the row is cut.
#pragma once

#include <algorithm>
#include <climits>
#include <functional>
#include <type_traits>

#include "simd.h"

namespace nova {

constexpr long CHUNK = 4096;  // numbers; so many weights of at most 1 are summed without rounding in a double
constexpr long VOCAB_SIZE_MAX = 1l << 21;  // so many weights of 2^40 can be summed in 64 bits, and ids are 32 bits
constexpr float INF = std::numeric_limits<float>::infinity();

// ---- numbers as integers of the same order: those of NaNs lie outside of the infinities

inline vi keys(vf x) {
  const vi bits = asi(x);
  return xori(bits, andi(sra31(bits), set1i(0x7fffffff)));
}

inline int32_t key(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

inline float number(int32_t key) {
  const int32_t bits = key ^ ((key >> 31) & 0x7fffffff);
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// The least key of numbers that equal this one: -0 is 0.
inline int32_t least_equal(int32_t key) { return key == 0 ? -1 : key; }

// The first n < VL elements; the others are no candidates for anything.
template <class T>
inline vf load_numbers(const typename T::type* p, long n) {
  return n >= VL ? T::load(p) : select(first_lanes(n), load_first<T>(p, n), set1(-INF));
}

// ---- what one pass over a row finds
// Calls f(i, count) for each vector of n numbers; of whole ones `count` is known at compile time.
template <class F>
inline void vectors(long n, F&& f) {
  long i = 0;
  for (; i + VL <= n; i += VL) f(i, std::integral_constant<long, VL>());
  if (i < n) f(i, n - i);
}

// Those lanes of m that a vector of `count` numbers has.
inline vm among(std::integral_constant<long, VL>, vm m) { return m; }
inline vm among(long count, vm m) { return both(first_lanes(count), m); }

// ----------------------------------------------------------------------------------

struct Scan {
  int32_t largest;  // key
  int32_t* tops;    // [chunks * VL]: keys of the largest of each lane of a chunk
  long num_tops;
  bool is_finite;  // no NaN, and the largest is no infinity
  bool is_empty;   // all are minus infinity
};

template <class T>
inline Scan scan(const typename T::type* x, long n, int32_t* tops) {
  vi largest = set1i((uint32_t)INT_MIN), smallest = set1i(INT_MAX);
  long count = 0;
  for (long begin = 0; begin < n; begin += CHUNK, count += VL) {
    vi top = set1i((uint32_t)INT_MIN);
    vectors(std::min(CHUNK, n - begin), [&](long i, auto left) {
      const vi key = keys(load_numbers<T>(x + begin + i, left));
      top = maxi(top, key);
      smallest = mini(smallest, key);
    });
    storef((float*)(tops + count), asf(top));
    largest = maxi(largest, top);
  }
  int32_t most[VL], least[VL];
  storef((float*)most, asf(largest));
  storef((float*)least, asf(smallest));
  const int32_t above = *std::max_element(most, most + VL), below = *std::min_element(least, least + VL);
  const bool is_finite = above < key(INF) && above > key(-INF) && below >= key(-INF);
  return {above, tops, count, is_finite, above == key(-INF) && below == key(-INF)};
}

// Calls f(index) in order for each number whose key is at least this one, until f says that it is enough.
template <class T, class F>
inline void for_each_from(const typename T::type* x, long n, const int32_t* tops, int32_t least, F&& f) {
  const vi below = set1i((uint32_t)(least - 1));
  for (long begin = 0; begin < n; begin += CHUNK, tops += VL) {
    if (!to_bits(gti(loadi(tops), below))) continue;
    const long end = std::min(n, begin + CHUNK);
    for (long i = begin; i < end; i += VL)
      for (uint32_t bits = to_bits(gti(keys(load_numbers<T>(x + i, end - i)), below)); bits; bits &= bits - 1) {
        const long index = i + __builtin_ctz(bits);
        if (index < n && !f(index)) return;
      }
  }
}

template <class T>
inline long first_largest(const typename T::type* x, long n, const Scan& found) {
  long first = 0;
  for_each_from<T>(x, n, found.tops, least_equal(found.largest), [&](long index) { return first = index, false; });
  return first;
}

template <class T>
inline float number_at(const typename T::type* x, long index) {
  if constexpr (T::E == 1) return x[index];
  const uint32_t bits = (uint32_t)x[index] << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// A few numbers of a row, in the order of their indexes.
struct Picked {
  float* values;
  int32_t* ids;
  long count;

  template <class F>
  void keep(F&& wanted) {
    long kept = 0;
    for (long i = 0; i < count; i++)
      if (wanted(values[i])) values[kept] = values[i], ids[kept++] = ids[i];
    count = kept;
  }
};

// All numbers that are among the k largest lanes' and more; at least the k largest. `work` [num_tops].
template <class T>
inline void pick(const typename T::type* x, long n, const Scan& found, long k, int32_t* work, Picked& picked) {
  int32_t least = INT_MIN + 1;
  if (k <= found.num_tops) {
    std::copy_n(found.tops, found.num_tops, work);
    std::nth_element(work, work + k - 1, work + found.num_tops, std::greater<int32_t>());
    least = least_equal(work[k - 1]);
  }
  picked.count = 0;
  for_each_from<T>(x, n, found.tops, least, [&](long index) {
    picked.values[picked.count] = number_at<T>(x, index);
    picked.ids[picked.count++] = (int32_t)index;
    return true;
  });
}

// ---- masses

constexpr double ROUNDS = 4096.0;        // a weight added to it is rounded to a multiple of 2^-40
constexpr double ONE = 1099511627776.0;  // 2^40: the mass of a weight of 1
static_assert(ROUNDS * ONE == 4503599627370496.0, "the last bit of a double in [ROUNDS, 2 ROUNDS) is 1 / ONE");

inline int64_t mass_of(float weight) { return (int64_t)((((double)weight + ROUNDS) - ROUNDS) * ONE); }

// Sums at most CHUNK weights before it is taken.
class ByMass {
 public:
  void add(vf weights, vm m) {
    weights = select(m, weights, zero());
    sums_[0] = addd(sums_[0], rounded(first_half(weights)));
    sums_[1] = addd(sums_[1], rounded(second_half(weights)));
  }
  int64_t take() {
    double lane[VL / 2], sum = 0;
    stored(lane, addd(sums_[0], sums_[1]));
    for (const double part : lane) sum += part;
    sums_[0] = sums_[1] = set1d(0);
    return (int64_t)(sum * ONE);
  }
  static int64_t of(float weight) { return mass_of(weight); }

 private:
  static vd rounded(vd x) { return subd(addd(x, set1d(ROUNDS)), set1d(ROUNDS)); }
  vd sums_[2] = {set1d(0), set1d(0)};
};

class ByCount {
 public:
  void add(vf, vm m) { count_ += __builtin_popcount(to_bits(m)); }
  int64_t take() {
    const int64_t count = count_;
    count_ = 0;
    return count;
  }
  static int64_t of(float) { return 1; }

 private:
  int64_t count_ = 0;
};

// ---- the place where the largest numbers have been enough

// Numbers above `least` are in, and of those that equal it the first `ties`.
struct Cut {
  float least;
  long ties;
};
constexpr Cut ALL = {-INF, 0};

constexpr long SORTED_MAX = 256;    // numbers that are sorted: 5 us
constexpr long SAMPLE_MARGIN = 12;  // ranks of a sample of so many beside the expected one: 1.5 standard deviations

// Of what is larger than `high`; what lies in [low, high] is stored, and counted.
template <class Measure>
inline int64_t divide(const float* x, long n, float low, float high, float* inside, long& count) {
  int64_t above = 0;
  count = 0;
  const vf lows = set1(low), highs = set1(high);
  for (long begin = 0; begin < n; begin += CHUNK) {
    Measure measure;
    vectors(std::min(CHUNK, n - begin), [&](long i, auto left) {
      const vf value = load_first<Fp32>(x + begin + i, left);
      const vm in = among(left, both(ge(value, lows), le(value, highs)));
      measure.add(value, among(left, gt(value, highs)));
      store_packed(inside + count, in, value);
      count += __builtin_popcount(to_bits(in));
    });
    above += measure.take();
  }
  return above;
}

template <class Measure>
inline int64_t measure_of(const float* x, long n) {
  int64_t sum = 0;
  for (long begin = 0; begin < n; begin += CHUNK) {
    Measure measure;
    vectors(std::min(CHUNK, n - begin),
            [&](long i, auto left) { measure.add(load_first<Fp32>(x + begin + i, left), first_lanes(left)); });
    sum += measure.take();
  }
  return sum;
}

// Stores what is larger than `bound`, or smaller; gives how many.
template <bool LARGER>
inline long side(const float* x, long n, float bound, float* out) {
  const vf bounds = set1(bound);
  long count = 0;
  vectors(n, [&](long i, auto left) {
    const vf value = load_first<Fp32>(x + i, left);
    const vm in = among(left, LARGER ? gt(value, bounds) : gt(bounds, value));
    store_packed(out + count, in, value);
    count += __builtin_popcount(to_bits(in));
  });
  return count;
}

// Where the measure of the largest numbers of x [n] reaches `limit`, which is at least 1 and at most `total`, that of
// all of them. `work` [2 (n + VL)].
template <class Measure>
inline Cut cut(const float* x, long n, int64_t limit, int64_t total, float* work) {
  float* buffers[2] = {work, work + n + VL};
  int64_t above = 0, inside = total;  // of what is larger than x, and of x
  bool is_stuck = false;
  float sample[SORTED_MAX];
  while (n > SORTED_MAX) {
    for (long i = 0; i < SORTED_MAX; i++) sample[i] = x[i * n / SORTED_MAX];
    std::sort(sample, sample + SORTED_MAX, std::greater<float>());
    // From the smallest on: the sum of few large numbers would tell less.
    const double outside = (double)(inside - (limit - above)) * SORTED_MAX / n;
    double sum = 0;
    long rank = SORTED_MAX - 1;
    while (rank > 0 && (sum += (double)Measure::of(sample[rank])) <= outside) rank--;
    const long margin = is_stuck ? 0 : SAMPLE_MARGIN;
    const float high = sample[std::max(0l, rank - margin)];
    const float low = sample[std::min(SORTED_MAX - 1, rank + margin)];
    float* next = x == buffers[0] ? buffers[1] : buffers[0];
    long count;
    const int64_t larger = divide<Measure>(x, n, low, high, next, count);
    const int64_t within = measure_of<Measure>(next, count);
    if (above + larger >= limit) {
      inside = larger;
      count = side<true>(x, n, high, next);
    } else if (above + larger + within < limit) {
      above += larger + within, inside -= larger + within;
      count = side<false>(x, n, low, next);
    } else {
      above += larger, inside = within;
      if (low == high) return {low, ceil_div(limit - above, Measure::of(low))};
    }
    is_stuck = count == n;  // then one number of them divides the others
    x = next, n = count;
  }
  std::copy_n(x, n, sample);
  std::sort(sample, sample + n, std::greater<float>());
  long ties = 0;
  for (long i = 0;; i++) {
    ties = i && sample[i] == sample[i - 1] ? ties + 1 : 1;
    above += Measure::of(sample[i]);
    if (above >= limit || i == n - 1) return {sample[i], ties};
  }
}

}  // namespace nova
