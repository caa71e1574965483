// Exact selection by one block: the threshold above which lie k values, or a given share of the probability. Values are
// ordered by keys; a pass over them fills a histogram of at most 1024 bins of the key range still in question, and the
// bin where the sum from the top reaches the target is the next range. Counts and masses are integers, so that no order
// of additions can change the result. Test: tests/test_sampling.py
#pragma once
#include "common/types.cuh"
#include "ptx/math.cuh"

constexpr int SELECT_THREADS = 512;
constexpr int SELECT_BINS = 1024;
constexpr int SELECT_LIST = 4096;
constexpr int SELECT_FEW = 128;  // candidates that one warp compares each with each
constexpr float MASS_ONE = 1099511627776.f;  // 2^40: the mass of the most probable token

// Unsigned integers in the order of the floats; both zeros are equal. Not for NaN.
__device__ __forceinline__ u32 order_key(float x) {
  const u32 bits = __float_as_uint(x + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float key_value(u32 key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// Sorts by value, then by lowest index.
__device__ __forceinline__ u64 pack_key(u32 key, int index) { return (u64)key << 32 | (u32)~index; }
__device__ __forceinline__ u32 packed_key(u64 x) { return (u32)(x >> 32); }
__device__ __forceinline__ int packed_index(u64 x) { return (int)~(u32)x; }

__device__ __forceinline__ u64 warp_max(u64 x) {
  const u32 high = __reduce_max_sync(0xffffffffu, (u32)(x >> 32));
  const u32 low = __reduce_max_sync(0xffffffffu, (u32)(x >> 32) == high ? (u32)x : 0u);
  return (u64)high << 32 | low;
}
__device__ __forceinline__ u64 warp_sum(u64 x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
// Sum over this lane and those below.
template <class V> __device__ __forceinline__ V warp_prefix(V x) {
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const V below = __shfl_up_sync(0xffffffffu, x, step);
    if ((int)(threadIdx.x & 31) >= step) x += below;
  }
  return x;
}

struct SelectMemory {
  u64 list[SELECT_LIST];                       // candidates, pack_key, in no particular order
  __align__(16) u32 low[SELECT_BINS];          // halves of the 64-bit sums
  u32 high[SELECT_BINS];
  u64 warps[SELECT_THREADS / 32];
  u64 above;
  int bin, count;
};

// What is searched: element i as pack_key. Batch: elements of a thread that are loaded before the first is used.
struct ListSource {
  static constexpr int Batch = 2;
  const u64 *list;
  int n;
  __device__ __forceinline__ u64 operator()(int i) const { return list[i]; }
};
template <class T> struct RowSource {
  static constexpr int Batch = 8;
  const T *row;
  int n;
  __device__ __forceinline__ u64 operator()(int i) const { return pack_key(order_key(to_float(row[i])), i); }
};
// Ties: the elements whose key is `key`, ordered by lowest index.
template <class Source> struct TieSource {
  static constexpr int Batch = Source::Batch;
  Source source;
  u32 key;
  int n;
  __device__ __forceinline__ u64 operator()(int i) const {
    const u64 x = source(i);
    return packed_key(x) == key ? x << 32 : 0;
  }
};

// What is summed.
struct Count {
  static constexpr bool Wide = false;
  __device__ __forceinline__ u64 operator()(u32) const { return 1; }
};
struct Mass {
  static constexpr bool Wide = true;
  float m, c;
  __device__ __forceinline__ u64 operator()(u32 key) const {
    return (u64)(exp2_approx((key_value(key) - m) * c) * MASS_ONE);
  }
};

// f(element, whether there is one), by all lanes of a warp together.
template <class Source, class F> __device__ __forceinline__ void for_each(const Source &source, const F &f) {
  for (int base = 0; base < source.n; base += SELECT_THREADS * Source::Batch) {
    u64 x[Source::Batch];
#pragma unroll
    for (int j = 0; j < Source::Batch; ++j) {
      const int i = base + j * SELECT_THREADS + (int)threadIdx.x;
      x[j] = i < source.n ? source(i) : 0;
    }
#pragma unroll
    for (int j = 0; j < Source::Batch; ++j) f(x[j], base + j * SELECT_THREADS + (int)threadIdx.x < source.n);
  }
}

__device__ __forceinline__ u64 block_sum(SelectMemory &memory, u64 x) {
  x = warp_sum(x);
  if ((threadIdx.x & 31) == 0) memory.warps[threadIdx.x >> 5] = x;
  __syncthreads();
  x = 0;
#pragma unroll
  for (int w = 0; w < SELECT_THREADS / 32; ++w) x += memory.warps[w];
  __syncthreads();
  return x;
}

// The k-th largest of n keys, 1 <= k <= n <= SELECT_THREADS, of which thread i holds the i-th: each thread counts the keys
// above its own. Called by the whole block.
__device__ __forceinline__ u32 kth_largest(SelectMemory &memory, u32 key, int n, int k) {
  const int thread = threadIdx.x;
  memory.low[thread] = thread < n ? key : 0;
  __syncthreads();
  u32 mine = 0xffffffffu;
  if ((thread & ~31) < n) {
    int above = 0;
#pragma unroll 4
    for (int i = 0; i < n; i += 4) {
      const uint4 other = *reinterpret_cast<const uint4 *>(memory.low + i);
      above += (other.x > key) + (other.y > key) + (other.z > key) + (other.w > key);
    }
    if (thread < n && above < k) mine = key;
  }
  mine = __reduce_min_sync(0xffffffffu, mine);
  if ((thread & 31) == 0) memory.high[thread >> 5] = mine;
  __syncthreads();
  return __reduce_min_sync(0xffffffffu, memory.high[thread & (SELECT_THREADS / 32 - 1)]);
}

// Sum of the weights of all elements with a key of at least `low`.
template <class Source, class Weight>
__device__ __forceinline__ u64 total(SelectMemory &memory, const Source &source, const Weight &weight, u32 low) {
  u64 sum = 0;
  for_each(source, [&](u64 x, bool valid) {
    if (valid && packed_key(x) >= low) sum += weight(packed_key(x));
  });
  return block_sum(memory, sum);
}

// 64-bit addition by 32-bit atomics: whoever makes the low half wrap carries.
template <bool Wide> __device__ __forceinline__ void add_to_bin(SelectMemory &memory, int bin, u64 weight) {
  const u32 low = (u32)weight;
  u32 high = (u32)(weight >> 32);
  if (low) {
    const u32 before = atomicAdd(&memory.low[bin], low);
    high += before + low < before;
  }
  if (Wide && high) atomicAdd(&memory.high[bin], high);
}

// First warp: the highest bin where `above` plus the sum of it and all higher bins reaches the target, or -1.
__device__ __forceinline__ void find_bin(SelectMemory &memory, u64 above, u64 target) {
  const int lane = threadIdx.x & 31;
  auto value = [&](int rank) {  // rank 0 is the highest bin
    const int bin = SELECT_BINS - 1 - rank;
    return (u64)memory.high[bin] << 32 | memory.low[bin];
  };
  u64 sum = 0;
#pragma unroll 8
  for (int j = 0; j < SELECT_BINS / 32; ++j) sum += value(lane * (SELECT_BINS / 32) + ((j + lane) & 31));
  u64 upto = above + warp_prefix(sum);
  u32 reached = __ballot_sync(0xffffffffu, upto >= target);
  if (!reached) {
    if (lane == 0) memory.bin = -1;
    return;
  }
  const int segment = __ffs(reached) - 1;
  above = __shfl_sync(0xffffffffu, upto - sum, segment);
  sum = value(segment * (SELECT_BINS / 32) + lane);
  upto = above + warp_prefix(sum);
  reached = __ballot_sync(0xffffffffu, upto >= target);
  if (lane == __ffs(reached) - 1) {
    memory.bin = SELECT_BINS - 1 - (segment * (SELECT_BINS / 32) + lane);
    memory.above = upto - sum;
  }
}

// The largest key in [low, high] such that the weights of the elements from it up to `high` sum to at least `target` (> 0);
// `low` if all of them do not reach it. Called by the whole block.
template <class Source, class Weight>
__device__ __forceinline__ u32 search(SelectMemory &memory, const Source &source, const Weight &weight, u64 target,
                                      u32 low, u32 high) {
  static_assert(SELECT_BINS == 1024, "ten bits of the key a pass; a lane of find_bin takes 32 bins");
  u64 above = 0;
  while (low < high) {
    const int bits = 32 - __clz((int)(high - low)), shift = bits > 10 ? bits - 10 : 0;
    for (int i = threadIdx.x; i < SELECT_BINS; i += SELECT_THREADS) memory.low[i] = memory.high[i] = 0;
    __syncthreads();
    for_each(source, [&](u64 x, bool valid) {
      const u32 key = packed_key(x);
      valid = valid && key >= low && key <= high;
      const u32 active = __ballot_sync(0xffffffffu, valid);
      if (!active) return;
      const int bin = (int)((key - low) >> shift), leader = __ffs(active) - 1;
      const u64 w = valid ? weight(key) : 0;
      // One bin for the whole warp is common (equal logits) and would serialise its atomics.
      const int first = __shfl_sync(0xffffffffu, bin, leader);
      if (__all_sync(0xffffffffu, !valid || bin == first)) {
        const u64 sum = Weight::Wide ? warp_sum(w) : (u64)__popc(active);
        if ((int)(threadIdx.x & 31) == leader) add_to_bin<Weight::Wide>(memory, bin, sum);
      } else if (valid) {
        add_to_bin<Weight::Wide>(memory, bin, w);
      }
    });
    __syncthreads();
    if (threadIdx.x < 32) find_bin(memory, above, target);
    __syncthreads();
    if (memory.bin < 0) return low;
    above = memory.above;
    low += (u32)memory.bin << shift;
    high = min(high - low, (1u << shift) - 1u) + low;
  }
  return low;
}
