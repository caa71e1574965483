// softmax      out = exp(x - M) / S,  M = max x, S = sum exp(x - M), over each row
// log_softmax  out = (x - M) - log S
// logprobs     out = (x[target] - M) / t - log S,  S = sum exp((x - M) / t): the probabilities are never written
//
// Layouts   x, out [rows, n]; targets int32 or int64 [rows]; temperature fp32 [rows] or one number; tiles float2
//           [rows, ceil(n / 1024)]: maximum and sum of each tile of 1024 columns
// Bound     memory: x read once, out written once. Past 32768 columns (unaligned: 16384) softmax reads x twice (the rows
//           that the first pass read last come first in the second, so that part of it is still in the L2 cache).
//           logprobs reads x once
// Launch    softmax_rows (up to that length): one warp a tile with its 1024 columns in registers, a block a row; rows of
//           one tile share a block of 8 warps. Longer rows, and logprobs: vocab_stats, one warp a tile wherever the tile
//           lies, so that a single row fills the GPU; then softmax_apply (one warp a tile) or token_logprobs (one warp a
//           row)
// Template  T, O types of x and out; Aligned: rows start at multiples of 4 elements; I type of the targets
// Measured: 65 % of a copy; token_logprobs 99 % (512 x 151936); H200, docs/performance.md
//
// Order of the sums: common/vocab.cuh. Special values: a row with NaN or +inf, or with nothing but -inf, gives NaN.
#include "common/types.cuh"
#include "common/vocab.cuh"
#include "ptx/pdl.cuh"

constexpr int WARPS = 8;  // per block, where warps work alone

// Tiles of a row that one block holds in registers: addressing single elements takes more registers than vectors do.
constexpr int most_tiles(bool aligned) { return aligned ? 32 : 16; }

template <class O, bool Aligned>
__device__ __forceinline__ void finish_tile(const VocabTile &v, float2 row, O *out, int n, int tile, bool log) {
  const float inverse = 1.f / row.y, log_sum = logf(row.y);
#pragma unroll
  for (int g = 0; g < VOCAB_GROUPS; ++g) {
    const int column = tile_column(tile, g);
    Vec<O, 4> part;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = v[g][i] - row.x;
      part.v[i] = from_float<O>(log ? x - log_sum : exp2_approx(x * CUKERN_LOG2E) * inverse);
    }
    if (Aligned) {
      if (column < n) store_vec(out + column, part);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (column + i < n) out[column + i] = part.v[i];
    }
  }
}

template <class T, class O, bool Aligned>
__global__ void __launch_bounds__(most_tiles(Aligned) * 32)
    softmax_rows(const T *__restrict__ x, O *__restrict__ out, i64 rows, int n, int log) {
  __shared__ float2 tiles[most_tiles(Aligned)];
  const int warp = threadIdx.x >> 5, count = (n + VOCAB_TILE - 1) / VOCAB_TILE;
  const i64 row = count == 1 ? (i64)blockIdx.x * (blockDim.x >> 5) + warp : (i64)blockIdx.x;
  const int tile = count == 1 ? 0 : warp;
  if (row >= rows) return;
  x += row * n;
  out += row * n;
  VocabTile v;
  load_tile<T, Aligned>(v, x, n, tile);
  float group_max;
  float2 stats = tile_stats(v, CUKERN_LOG2E, group_max);
  if (count > 1) {
    if ((threadIdx.x & 31) == 0) tiles[tile] = stats;
    __syncthreads();
    stats = combine_tiles<1>(tiles, count, CUKERN_LOG2E);
  }
  finish_tile<O, Aligned>(v, stats, out, n, tile, log);
}

// (m, s) of every tile; if wanted also the maximum of every group of 128 columns, and a zero in counters[row] for the
// kernel that follows. `otherwise` is the factor c of a row whose temperature is not positive.
template <class T, bool Aligned>
__global__ void __launch_bounds__(WARPS * 32)
    vocab_stats(const T *__restrict__ x, float2 *__restrict__ tiles, float *__restrict__ group_maxima,
                u32 *__restrict__ counters, const float *__restrict__ temperatures, float temperature, float otherwise,
                i64 rows, int n, int count) {
  grid_dependency_wait();
  const i64 index = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), row = index / count;
  const int tile = (int)(index - row * count), lane = threadIdx.x & 31;
  if (row >= rows) return;
  VocabTile v;
  load_tile<T, Aligned>(v, x + row * n, n, tile);
  float group_max;
  const float t = temperatures ? temperatures[row] : temperature;
  const float2 stats = tile_stats(v, temperature_scale(t, otherwise), group_max);
  grid_dependency_launch();  // not before: the few large blocks that follow should find the multiprocessors empty
  if (lane == 0) {
    tiles[index] = stats;
    if (counters && tile == 0) counters[row] = 0;
  }
  if (group_maxima && (lane & 3) == 0) group_maxima[index * VOCAB_GROUPS + lane / 4] = group_max;
}

template <class T, class O, bool Aligned>
__global__ void __launch_bounds__(WARPS * 32)
    softmax_apply(const T *__restrict__ x, const float2 *__restrict__ tiles, O *__restrict__ out, i64 rows, int n,
                  int count, int log) {
  const i64 index = rows * count - 1 - ((i64)blockIdx.x * WARPS + (threadIdx.x >> 5));
  if (index < 0) return;
  const i64 row = index / count;
  const int tile = (int)(index - row * count);
  VocabTile v;
  load_tile<T, Aligned>(v, x + row * n, n, tile);
  const float2 stats = combine_tiles<8>(tiles + row * count, count, CUKERN_LOG2E);
  finish_tile<O, Aligned>(v, stats, out + row * n, n, tile, log);
}

// A target outside [0, n), or a temperature that is not positive, gives NaN in its row.
template <class T, class I>
__global__ void __launch_bounds__(WARPS * 32)
    token_logprobs(const T *__restrict__ x, const float2 *__restrict__ tiles, const I *__restrict__ targets,
                   const float *__restrict__ temperatures, float temperature, float *__restrict__ out, i64 rows, int n,
                   int count) {
  grid_dependency_launch();
  grid_dependency_wait();
  const i64 row = (i64)blockIdx.x * WARPS + (threadIdx.x >> 5);
  if (row >= rows) return;
  const float t = temperatures ? temperatures[row] : temperature;
  const float2 stats = combine_tiles<8>(tiles + row * count, count, temperature_scale(t, CUKERN_NAN));
  if ((threadIdx.x & 31) == 0) {
    const i64 target = targets[row];
    const bool valid = target >= 0 && target < n;
    out[row] = valid ? log_probability(to_float(x[row * n + target]), stats, t) : CUKERN_NAN;
  }
}
