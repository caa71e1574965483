// argmax   out = the lowest index of the largest logit; NaN counts as largest
// sample   keep  = {x >= k-th largest} (top-k, ties kept)
//          keep &= the most probable tokens up to the one whose mass reaches top_p of the kept mass (its ties are kept)
//          keep &= {exp((x - M) / t) >= min_p}
//          out   = argmax over keep of exp((x - M) / t) / E,  E exponential(seed, position, index): the Gumbel arg-max
// top_logprobs  the n largest log_softmax(x / t), descending, and their indices
//
// Layouts   x [rows, n]; parameters [rows] or, with a null pointer, one number; tiles, group_maxima as written by
//           vocab_stats (softmax.cu); thresholds fp32 [rows]; best u64 [rows, splits]; out int32 [rows]
// Bound     memory: x read once by vocab_stats (or argmax_tiles). After that only those parts of x that can matter are
//           read: for top-k the groups of 128 columns whose maximum is among the k largest; for top-p those above a bound
//           below which all tokens together weigh less than 1 - p; to draw, the tiles within 2^-38 of the maximum
// Launch    vocab_stats (whole GPU) -> sample_threshold (a block a row; returns at once for rows without top-k and top-p,
//           and draws itself when the kept tokens fit its list) -> sample_draw (a warp a tile, the other rows; the block
//           that arrives last reduces the row, by an integer counter that vocab_stats has zeroed).
//           argmax_tiles -> argmax_rows, or `advance` (advance.cu), which reduces `best` itself.
//           With pdl=True each starts while the one ahead ends. No value of a parameter is looked at on the host: the
//           sequence can be captured into a graph.
// Template  T type of x; Aligned: rows start at multiples of 4 elements
// Measured: argmax 78 %, sampling 21 to 38 % of a copy (64 x 151936); H200, docs/performance.md
//
// A row is decided by arg-max if its temperature is not positive, top_k is 1, or its maximum is not finite (NaN included).
#include "common/random.cuh"
#include "common/select.cuh"
#include "common/types.cuh"
#include "common/vocab.cuh"
#include "ptx/memory.cuh"
#include "ptx/pdl.cuh"

constexpr int WARPS = 8;
constexpr int MOST_TOP = 32;

// Weights below 2^-38 of the maximum never win: the maximum itself scores at least 2^-5, and 1 / E is at most 2^33.
constexpr float LOWEST_SCORE = 0.03125f;
constexpr float LARGEST_FACTOR = 17179869184.f;  // 2^34
constexpr float LOWEST_LOG2 = -39.f;

// A row's own value of a parameter, or the one that holds for all.
template <class V> __device__ __forceinline__ V choose(const V *each, V one, i64 row) { return each ? each[row] : one; }

// Parameters are asked for while the kernel ahead still runs: a step reads so much that they come from memory each time.
template <class V> __device__ __forceinline__ void announce(const V *each, i64 row) {
  if (each) prefetch_line(each + row);
}

__device__ __forceinline__ bool is_greedy(float temperature, int top_k, float sum) {
  return !(temperature > 0.f) || top_k == 1 || !(sum > 0.f);
}

// Scores are positive, so that their bits are ordered.
__device__ __forceinline__ u64 pack_score(float score, int index) { return pack_key(__float_as_uint(score), index); }

// Of this lane's part of a tile.
__device__ __forceinline__ u64 largest_of_tile(const VocabTile &v, int tile) {
  float m = v[0][0];
  bool nan = false;
#pragma unroll
  for (int g = 0; g < VOCAB_GROUPS; ++g)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      m = fmaxf(m, v[g][i]);
      nan = nan || v[g][i] != v[g][i];
    }
  int at = 0;  // the first that is equal
#pragma unroll
  for (int g = VOCAB_GROUPS - 1; g >= 0; --g)
#pragma unroll
    for (int i = 3; i >= 0; --i) at = v[g][i] == m ? g * VOCAB_GROUP + i : at;
  if (nan) {
#pragma unroll
    for (int g = VOCAB_GROUPS - 1; g >= 0; --g)
#pragma unroll
      for (int i = 3; i >= 0; --i) at = v[g][i] != v[g][i] ? g * VOCAB_GROUP + i : at;
  }
  return pack_key(nan ? 0xffffffffu : order_key(m), tile_column(tile, 0) + at);
}

// Maximum over a block of up to `WARPS` warps, in the first warp.
__device__ __forceinline__ u64 block_max(u64 best) {
  __shared__ u64 warps[WARPS];
  const int lane = threadIdx.x & 31;
  best = warp_max(best);
  if (lane == 0) warps[threadIdx.x >> 5] = best;
  __syncthreads();
  return warp_max(threadIdx.x < blockDim.x >> 5 ? warps[lane & (WARPS - 1)] : 0);
}

template <class T, bool Aligned>
__global__ void __launch_bounds__(WARPS * 32)
    argmax_tiles(const T *__restrict__ x, u64 *__restrict__ best, int *__restrict__ out, int n, int splits) {
  grid_dependency_launch();
  const i64 row = blockIdx.x / (u32)splits;
  const int tile = (int)(blockIdx.x % (u32)splits) * (int)(blockDim.x >> 5) + (threadIdx.x >> 5);
  grid_dependency_wait();
  u64 largest = 0;
  if ((i64)tile * VOCAB_TILE < n) {
    VocabTile v;
    load_tile<T, Aligned>(v, x + row * n, n, tile);
    largest = largest_of_tile(v, tile);
  }
  largest = block_max(largest);
  if (threadIdx.x == 0) {
    if (out) {
      out[row] = packed_index(largest);
    } else {
      best[blockIdx.x] = largest;
    }
  }
}

__global__ void __launch_bounds__(WARPS * 32)
    argmax_rows(const u64 *__restrict__ best, int *__restrict__ out, i64 rows, int splits) {
  grid_dependency_launch();
  grid_dependency_wait();
  const i64 row = (i64)blockIdx.x * WARPS + (threadIdx.x >> 5);
  if (row >= rows) return;
  u64 largest = 0;
  for (int i = threadIdx.x & 31; i < splits; i += 32) largest = max(largest, best[row * splits + i]);
  largest = warp_max(largest);
  if ((threadIdx.x & 31) == 0) out[row] = packed_index(largest);
}

// Maxima of the groups that a warp of `gather` looks at together: every 16th group, a lane each, four times.
struct GroupMaxima {
  static constexpr int Warps = SELECT_THREADS / 32, Times = 4, Span = Warps * 32 * Times;
  float v[Times];
  static __device__ __forceinline__ int group(int base, int time, int lane) { return base + (time * 32 + lane) * Warps; }
  __device__ __forceinline__ void load(const float *group_maxima, int groups, int base) {
#pragma unroll
    for (int time = 0; time < Times; ++time) {
      const int mine = group(base, time, threadIdx.x & 31);
      v[time] = mine < groups ? group_maxima[mine] : -CUKERN_INF;
    }
  }
};

// Append the elements with a key of at least `low` to the list; those past its end are counted only. `maxima` holds those
// of this warp's first groups.
template <class T, bool Aligned>
__device__ __forceinline__ void gather(SelectMemory &memory, const T *row, const float *group_maxima, GroupMaxima &maxima,
                                       int groups, int n, u32 low) {
  constexpr int Times = GroupMaxima::Times, Batch = Aligned ? 4 : 2;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) memory.count = 0;
  __syncthreads();
  for (int base = warp; base < groups; base += GroupMaxima::Span) {
    if (base != warp) maxima.load(group_maxima, groups, base);
    u32 left[Times], any = 0;
#pragma unroll
    for (int time = 0; time < Times; ++time) {
      const bool inside = GroupMaxima::group(base, time, lane) < groups;
      left[time] = __ballot_sync(0xffffffffu, inside && order_key(maxima.v[time]) >= low);
      any |= left[time];
    }
    auto next = [&]() {  // first column of the next group of interest; n if there is none
      int column = n;
      any = 0;
#pragma unroll
      for (int time = 0; time < Times; ++time) {
        if (column == n && left[time]) {
          column = GroupMaxima::group(base, time, __ffs(left[time]) - 1) * VOCAB_GROUP;
          left[time] &= left[time] - 1;
        }
        any |= left[time];
      }
      return column;
    };
    while (any) {
      float v[Batch][4];
      int column[Batch];
#pragma unroll
      for (int j = 0; j < Batch; ++j) {  // loads of several groups under way together
        column[j] = next() + lane * 4;
        load_columns<T, Aligned>(v[j], row, n, column[j]);
      }
      u32 taken = 0;  // a bit for each of the lane's elements
#pragma unroll
      for (int j = 0; j < Batch; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (column[j] + i < n && order_key(v[j][i]) >= low) taken |= 1u << (j * 4 + i);
      if (__any_sync(0xffffffffu, taken != 0)) {
        const int here = warp_prefix(__popc(taken));
        int at = 0;
        if (lane == 31) at = atomicAdd(&memory.count, here);
        at = __shfl_sync(0xffffffffu, at, 31) + here - __popc(taken);
#pragma unroll
        for (int j = 0; j < Batch; ++j)
#pragma unroll 1
          for (u32 bits = taken >> (j * 4) & 15u; bits; bits &= bits - 1, ++at) {
            const int mine = column[j] + __ffs(bits) - 1;
            if (at < SELECT_LIST) memory.list[at] = pack_key(order_key(to_float(row[mine])), mine);
          }
      }
    }
  }
  __syncthreads();
}

// A key that is surely not above the k-th largest: k tiles, or groups, have a maximum of at least that.
__device__ __forceinline__ u32 top_k_bound(SelectMemory &memory, const float2 *tiles, int count, const float *group_maxima,
                                           int groups, int k, float m) {
  const u32 lowest = order_key(-CUKERN_INF);
  if (k > groups) return lowest;
  if (k <= count && count <= SELECT_THREADS) {
    const float mine = (int)threadIdx.x < count ? tiles[threadIdx.x].x : 0.f;
    return kth_largest(memory, order_key(mine), count, k);
  }
  return search(memory, RowSource<float>{group_maxima, groups}, Count(), (u64)k, lowest, order_key(m));
}

struct Filter {
  int top_k;     // 0: off
  float top_p;   // 1: off
  float m, c;
  double mass;   // of all tokens, in units of MASS_ONE
};

// Key of the least probable token that top-k and top-p keep; `low` if every element of at least that is kept.
template <class Source>
__device__ __forceinline__ u32 filter(SelectMemory &memory, const Source &source, const Filter &f, u32 low) {
  const Mass weight{f.m, f.c};
  const u32 high = order_key(f.m);
  double mass = f.mass;
  if (f.top_k) {
    low = search(memory, source, Count(), (u64)f.top_k, low, high);
    if (f.top_p < 1.f) mass = (double)total(memory, source, weight, low);
  }
  if (f.top_p < 1.f) {
    const u64 target = (u64)fmax(ceil((double)f.top_p * mass), 1.0);
    low = search(memory, source, weight, target, low, high);
  }
  return low;
}

// Score of a candidate where it can be the best that this thread has seen, else 0.
__device__ __forceinline__ u64 draw_candidate(u64 packed, float m, float c, float min_p, u64 seed, i64 position,
                                              float &highest) {
  const float p = exp2_approx((key_value(packed_key(packed)) - m) * c);
  if (!(p >= min_p) || !(p * LARGEST_FACTOR > highest)) return 0;
  const int index = packed_index(packed);
  const uint4 words = vocab_words(seed, position, index >> 2);
  const u32 word = index & 2 ? (index & 1 ? words.w : words.z) : (index & 1 ? words.y : words.x);
  const float score = __fdividef(p, exponential(word));
  highest = fmaxf(highest, score);
  return score > LOWEST_SCORE ? pack_score(score, index) : 0;
}

// By one warp: the best score among at most 32 * Slots listed candidates. One is kept if fewer than k are above it, and if
// those above it do not reach the mass that top-p wants: the same integers, so the same set as by `filter`.
template <int Slots>
__device__ __forceinline__ u64 draw_few(SelectMemory &memory, int listed, const Filter &f, float min_p, u64 seed,
                                        i64 position) {
  static_assert(32 * Slots <= SELECT_FEW && 2 * SELECT_FEW <= SELECT_LIST, "weights lie behind the candidates");
  const int lane = threadIdx.x & 31;
  const Mass weigh{f.m, f.c};
  u64 *const weights = memory.list + SELECT_FEW;
  u64 mass_above[Slots];
  u32 key[Slots];
  int above[Slots];
#pragma unroll
  for (int slot = 0; slot < Slots; ++slot) {
    const int i = slot * 32 + lane;
    key[slot] = i < listed ? packed_key(memory.list[i]) : 0u;
    weights[i] = i < listed ? weigh(key[slot]) : 0;
    mass_above[slot] = 0;
    above[slot] = 0;
  }
  __syncwarp();
#pragma unroll 4
  for (int i = 0; i < listed; ++i) {
    const u32 other = packed_key(memory.list[i]);
    const u64 its = weights[i];
#pragma unroll
    for (int slot = 0; slot < Slots; ++slot)
      if (other > key[slot]) {
        ++above[slot];
        mass_above[slot] += its;
      }
  }
  double mass = f.mass;
  if (f.top_k) {
    u64 mine = 0;
#pragma unroll
    for (int slot = 0; slot < Slots; ++slot)
      if (above[slot] < f.top_k) mine += weights[slot * 32 + lane];
    mass = (double)warp_sum(mine);
  }
  const u64 target = (u64)fmax(ceil((double)f.top_p * mass), 1.0);
  u32 kept = 0;
#pragma unroll
  for (int slot = 0; slot < Slots; ++slot) {
    const bool keep = slot * 32 + lane < listed && (!f.top_k || above[slot] < f.top_k) &&
                      (!(f.top_p < 1.f) || mass_above[slot] < target);
    kept |= (u32)keep << slot;
  }
  u64 best = 0;
  float highest = LOWEST_SCORE;
#pragma unroll 1
  for (int slot = 0; slot < Slots; ++slot)
    if (kept >> slot & 1u)
      best = max(best, draw_candidate(memory.list[slot * 32 + lane], f.m, f.c, min_p, seed, position, highest));
  return warp_max(best);
}

template <class T, bool Aligned>
__global__ void __launch_bounds__(SELECT_THREADS, 2)
    sample_threshold(const T *__restrict__ x, const float2 *__restrict__ tiles, const float *__restrict__ group_maxima,
                     float *__restrict__ thresholds, int *__restrict__ out,
                     const float *__restrict__ temperatures, float temperature,
                     const int *__restrict__ top_ks, int top_k, const float *__restrict__ top_ps, float top_p,
                     const float *__restrict__ min_ps, float min_p, const u64 *__restrict__ seeds, u64 seed,
                     const i64 *__restrict__ positions, i64 position, int n, int count) {
  __shared__ SelectMemory memory;
  const i64 row = blockIdx.x;
  grid_dependency_launch();
  if (threadIdx.x == 0) {
    announce(temperatures, row);
    announce(top_ks, row);
    announce(top_ps, row);
    announce(min_ps, row);
    announce(seeds, row);
    announce(positions, row);
  }
  grid_dependency_wait();
  temperature = choose(temperatures, temperature, row);
  top_k = choose(top_ks, top_k, row);
  top_p = choose(top_ps, top_p, row);
  min_p = choose(min_ps, min_p, row);
  seed = choose(seeds, seed, row);
  position = choose(positions, position, row);
  x += row * n;
  tiles += row * count;
  group_maxima += row * count * VOCAB_GROUPS;
  GroupMaxima maxima;
  maxima.load(group_maxima, count * VOCAB_GROUPS, threadIdx.x >> 5);
  const bool use_k = top_k > 0 && top_k < n, use_p = top_p < 1.f;
  const float c = temperature_scale(temperature, CUKERN_LOG2E);
  const float2 stats = combine_tiles<8>(tiles, count, c);
  if (is_greedy(temperature, top_k, stats.y) || !(use_k || use_p)) {
    if (threadIdx.x == 0) thresholds[row] = -CUKERN_INF;
    return;
  }
  const float m = stats.x;
  u32 low;
  if (use_k) {
    low = top_k_bound(memory, tiles, count, group_maxima, count * VOCAB_GROUPS, top_k, m);
  } else {
    // All n tokens below this weigh less than (1 - p) S together; below min_p none is kept. A little lower for rounding.
    const float tail = (1.f - fmaxf(top_p, 0.f)) * stats.y / (float)n;
    low = order_key(m + (log2f(fmaxf(tail, min_p)) - 0.5f) / c) - 1u;
  }
  low = max(low, order_key(-CUKERN_INF) + 1u);  // a masked token has no mass
  gather<T, Aligned>(memory, x, group_maxima, maxima, count * VOCAB_GROUPS, n, low);
  const int listed = memory.count;
  const Filter f{use_k ? top_k : 0, top_p, m, c, (double)stats.y * MASS_ONE};
  if (listed <= SELECT_FEW) {
    if (threadIdx.x >= 32) return;
    const u64 best = listed <= 32 ? draw_few<1>(memory, listed, f, min_p, seed, position)
                                  : draw_few<SELECT_FEW / 32>(memory, listed, f, min_p, seed, position);
    if (threadIdx.x == 0) {
      out[row] = packed_index(best);
      thresholds[row] = CUKERN_NAN;  // nothing left to do
    }
    return;
  }
  if (listed > SELECT_LIST) {
    low = filter(memory, RowSource<T>{x, n}, f, low);
    if (threadIdx.x == 0) thresholds[row] = key_value(low);
    return;
  }
  const ListSource source{memory.list, listed};
  low = filter(memory, source, f, low);
  u64 best = 0;
  float highest = LOWEST_SCORE;
  for (int i = threadIdx.x; i < listed; i += SELECT_THREADS) {
    const u64 packed = memory.list[i];
    if (packed_key(packed) >= low) best = max(best, draw_candidate(packed, m, c, min_p, seed, position, highest));
  }
  best = warp_max(best);
  if ((threadIdx.x & 31) == 0) memory.warps[threadIdx.x >> 5] = best;
  __syncthreads();
  if (threadIdx.x < 32) {
    best = warp_max(threadIdx.x < SELECT_THREADS / 32 ? memory.warps[threadIdx.x] : 0);
    if (threadIdx.x == 0) {
      out[row] = packed_index(best);
      thresholds[row] = CUKERN_NAN;
    }
  }
}

// The best score of the tile among x >= threshold.
template <class T, bool Aligned>
__device__ __forceinline__ u64 draw_tile(const T *row, int n, int tile, float m, float c, float threshold, float min_p,
                                         u64 seed, i64 position) {
  VocabTile v;
  load_tile<T, Aligned>(v, row, n, tile);
  float highest = LOWEST_SCORE;
  int index = -1;
#pragma unroll
  for (int g = 0; g < VOCAB_GROUPS; ++g) {
    float p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float weight = exp2_approx((v[g][i] - m) * c);
      p[i] = v[g][i] >= threshold && weight >= min_p ? weight : 0.f;
    }
    const float largest = fmaxf(fmaxf(p[0], p[1]), fmaxf(p[2], p[3]));
    if (!__any_sync(0xffffffffu, largest * LARGEST_FACTOR > highest)) continue;
    const int column = tile_column(tile, g);
    const uint4 words = vocab_words(seed, position, column >> 2);
    const u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float score = __fdividef(p[i], exponential(word[i]));
      if (score > highest) {
        highest = score;
        index = column + i;
      }
    }
  }
  return index < 0 ? 0 : pack_score(highest, index);
}

// thresholds null: nothing was filtered.
template <class T, bool Aligned>
__global__ void __launch_bounds__(WARPS * 32)
    sample_draw(const T *__restrict__ x, const float2 *__restrict__ tiles, const float *__restrict__ thresholds,
                u64 *__restrict__ best, u32 *__restrict__ counters, int *__restrict__ out,
                const float *__restrict__ temperatures, float temperature,
                const int *__restrict__ top_ks, int top_k, const float *__restrict__ min_ps, float min_p,
                const u64 *__restrict__ seeds, u64 seed,
                const i64 *__restrict__ positions, i64 position, int n,
                int count, int splits) {
  grid_dependency_launch();
  grid_dependency_wait();
  const i64 row = blockIdx.x / (u32)splits;
  const float threshold = thresholds ? thresholds[row] : -CUKERN_INF;
  if (threshold != threshold) return;
  temperature = choose(temperatures, temperature, row);
  top_k = choose(top_ks, top_k, row);
  min_p = choose(min_ps, min_p, row);
  seed = choose(seeds, seed, row);
  position = choose(positions, position, row);
  x += row * n;
  tiles += row * count;
  const int tile = (int)(blockIdx.x % (u32)splits) * WARPS + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  const float c = temperature_scale(temperature, CUKERN_LOG2E);
  const float2 stats = combine_tiles<8>(tiles, count, c);
  u64 highest = 0;
  if (tile < count) {
    const float2 mine = tiles[tile];
    if (is_greedy(temperature, top_k, stats.y)) {
      if (mine.x == stats.x || mine.y != mine.y) {
        VocabTile v;
        load_tile<T, Aligned>(v, x, n, tile);
        highest = largest_of_tile(v, tile);
      }
    } else if ((mine.x - stats.x) * c > LOWEST_LOG2 && mine.x >= threshold) {
      highest = draw_tile<T, Aligned>(x, n, tile, stats.x, c, threshold, min_p, seed, position);
    }
  }
  highest = block_max(highest);
  if (threadIdx.x >= 32) return;
  if (splits > 1) {
    u32 arrived = 0;
    if (lane == 0) {
      best[blockIdx.x] = highest;
      __threadfence();
      arrived = atomicAdd(&counters[row], 1u);
    }
    if (__shfl_sync(0xffffffffu, arrived, 0) != (u32)splits - 1) return;
    __threadfence();
    highest = 0;
    for (int i = lane; i < splits; i += 32) highest = max(highest, __ldcg(best + row * splits + i));
    highest = warp_max(highest);
  }
  if (lane == 0) out[row] = packed_index(highest);
}

// A row whose maximum is not finite, or whose temperature is not positive, gives NaN and -1.
template <class T, bool Aligned>
__global__ void __launch_bounds__(SELECT_THREADS, 2)
    top_logprobs(const T *__restrict__ x, const float2 *__restrict__ tiles, const float *__restrict__ group_maxima,
                 const float *__restrict__ temperatures, float temperature, float *__restrict__ values,
                 int *__restrict__ ids, int n, int count, int top) {
  __shared__ SelectMemory memory;
  __shared__ u64 chosen[MOST_TOP];
  const i64 row = blockIdx.x;
  const int groups = count * VOCAB_GROUPS;
  x += row * n;
  group_maxima += row * groups;
  values += row * top;
  ids += row * top;
  tiles += row * count;
  grid_dependency_launch();
  grid_dependency_wait();
  if (temperatures) temperature = temperatures[row];
  GroupMaxima maxima;
  maxima.load(group_maxima, groups, threadIdx.x >> 5);
  const float2 stats = combine_tiles<8>(tiles, count, temperature_scale(temperature, CUKERN_NAN));
  if (!(stats.y > 0.f)) {
    if ((int)threadIdx.x < top) {
      values[threadIdx.x] = CUKERN_NAN;
      ids[threadIdx.x] = -1;
    }
    return;
  }
  const u32 low = top_k_bound(memory, tiles, count, group_maxima, groups, top, stats.x);
  gather<T, Aligned>(memory, x, group_maxima, maxima, groups, n, low);
  const int listed = memory.count;
  __syncthreads();
  if (threadIdx.x == 0) memory.count = 0;

  auto select = [&](auto source) {
    const u32 key = search(memory, source, Count(), (u64)top, low, order_key(stats.x));
    // Of the ties for the last place those with the lowest index.
    const u64 above = total(memory, source, Count(), key + 1u);
    const TieSource<decltype(source)> ties{source, key, source.n};
    const u32 tie = search(memory, ties, Count(), (u64)top - above, 0x80000000u, 0xffffffffu);
    for_each(source, [&](u64 packed, bool valid) {
      if (valid && packed >= ((u64)key << 32 | tie)) chosen[atomicAdd(&memory.count, 1)] = packed;
    });
  };
  if (listed <= SELECT_LIST) {
    select(ListSource{memory.list, listed});
  } else {
    select(RowSource<T>{x, n});
  }
  __syncthreads();
  if ((int)threadIdx.x < top) {
    const u64 mine = chosen[threadIdx.x];
    int rank = 0;
    for (int i = 0; i < top; ++i) rank += chosen[i] > mine;
    const int index = packed_index(mine);
    values[rank] = log_probability(to_float(x[index]), stats, temperature);
    ids[rank] = index;
  }
}
