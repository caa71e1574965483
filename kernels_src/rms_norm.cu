// RMSNorm:  out = x / sqrt(mean(x^2) + eps) * weight  over each row, all in fp32, one rounding to the type of out.
// With a residual: residual += x (fp32, in place), and the sum is normalised instead of x.
//
// Layouts   x, out [rows, columns], weight fp32 [columns], residual fp32 [rows, columns]
// Bound     memory: x, residual read once, out, residual written once (up to 16384 columns; longer rows are read twice)
// Launch    grid.x = rows, block = 32 * Warps; or, where Warps = 1, four rows a block: short rows in great number
// Template  X, O types of x and out; Residual; Steps: steps of 1024 columns held in registers (0: any number, x read
//           twice); Warps a row; Vector: every row starts at a multiple of 16 bytes (else element by element)
// Measured: 88 % of a copy, 92 % with the residual (8192 x 4096); H200, docs/performance.md
//
// Order of the sum of squares (docs/numerics.md), the same bits in every variant: 256 virtual lanes, lane L owns elements
// 4L to 4L+3 of every step, summed ascending by fma; a butterfly inside each group of 32 lanes (16, 8, 4, 2, 1); then the
// 8 group sums ascending. A thread holds one or two neighbouring virtual lanes, and those of several groups where a row
// has fewer threads than lanes.
#include "common/reduce.cuh"
#include "common/rows.cuh"
#include "common/types.cuh"
#include "ptx/pdl.cuh"

constexpr int STEP = 1024;         // columns that the 256 virtual lanes cover once
constexpr int ROWS_PER_BLOCK = 4;  // where Warps = 1

template <bool First, class A, class B> struct Either {
  typedef A type;
};
template <class A, class B> struct Either<false, A, B> {
  typedef B type;
};

// N elements from `p`; with Vector false only those before `valid` exist, the rest are zero.
template <bool Vector, int N, class T> __device__ __forceinline__ Vec<T, N> load_part(const T *p, i64 valid) {
  if constexpr (Vector) {
    return load_vec_once<T, N>(p);
  } else {
    Vec<T, N> x;
#pragma unroll
    for (int i = 0; i < N; ++i) x.v[i] = i < valid ? p[i] : from_float<T>(0.f);
    return x;
  }
}

template <bool Vector, int N, class T>
__device__ __forceinline__ void store_part(T *p, const float (&x)[N], i64 valid) {
  if constexpr (Vector) {
    store_floats<T, N>(p, x);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (i < valid) p[i] = from_float<T>(x[i]);
  }
}

// Sum over the 256 virtual lanes of a row, in the order above; sums[part][lane] are this thread's.
template <int Warps, int Lanes, int Parts>
__device__ __forceinline__ float row_sum(const float (&sums)[Parts][Lanes], float *groups) {
  const int warp = Warps == 1 ? 0 : threadIdx.x >> 5, lane = threadIdx.x & 31;
  float total = 0.f;
#pragma unroll
  for (int part = 0; part < Parts; ++part) {
    // Lanes virtual lanes a thread: a group is a warp (1) or half a warp (2), where the step 1 is inside the thread.
    float sum = warp_reduce<Sum, 32 / Lanes>(sums[part][0]);
    if (Lanes == 2) sum += warp_reduce<Sum, 32 / Lanes>(sums[part][Lanes - 1]);
    if (Warps > 1) {
      if (lane % (32 / Lanes) == 0) groups[(part * Warps + warp) * Lanes + lane / (32 / Lanes)] = sum;
    } else if (Lanes == 1) {
      total += sum;
    } else {
      const float other = __shfl_xor_sync(0xffffffffu, sum, 16);
      total += lane < 16 ? sum : other;
      total += lane < 16 ? other : sum;
    }
  }
  if (Warps > 1) {
    __syncthreads();
#pragma unroll
    for (int group = 0; group < 8; ++group) total += groups[group];
  }
  return total;
}

template <class X, class O, bool Residual, int Steps, int Warps, bool Vector>
__global__ void __launch_bounds__(Warps == 1 ? 32 * ROWS_PER_BLOCK : 32 * Warps, 1)  // 1: else ptxas spills for 32 registers
    rms_norm(const X *x, const float *weight, float *residual, O *out, i64 rows, int columns, float eps) {
  constexpr int Widest = Residual || sizeof(X) == 4 || sizeof(O) == 4 ? 4 : 2;
  constexpr int Lanes = Vector ? 4 / Widest : 1;  // virtual lanes of one access, at most 16 bytes
  constexpr int Width = 4 * Lanes;                // elements of one access
  constexpr int Stride = Width * 32 * Warps;      // from one access of a thread to its next
  constexpr int Parts = STEP / Stride;            // accesses in a step
  constexpr int Held = Steps > 0 ? Steps : 4;     // steps in registers at a time
  constexpr int Group = Residual && Held * Parts > 4 ? 4 : Held * Parts;  // accesses in flight: with x, twice as many
  typedef typename Either<Residual, float, X>::type H;  // what is normalised, as it stays in registers

  __shared__ float groups[8];
  grid_dependency_launch();
  if (blockIdx.x == 0)  // the weight comes from memory in every layer: to the L2 cache while the kernel ahead still runs
    for (int i = threadIdx.x * 32; i < columns; i += Warps * 32 * 32) prefetch_line(weight + i);
  grid_dependency_wait();
  const i64 row = Warps == 1 ? (i64)blockIdx.x * ROWS_PER_BLOCK + (threadIdx.x >> 5) : (i64)blockIdx.x;
  if (row >= rows) return;  // a whole warp, where rows take one warp and no barrier
  const int first = (Warps == 1 ? threadIdx.x & 31 : threadIdx.x) * Width;
  x += row * columns + first;
  out += row * columns + first;
  if (Residual) residual += row * columns + first;

  constexpr bool Early = Vector && Steps == 1 && Warps > 1;  // the weight is asked for with the row
  float early[Early ? Parts : 1][Width];
  if constexpr (Early)
#pragma unroll
    for (int i = 0; i < Parts; ++i)
      if (i * Stride < columns - first) load_floats(early[i], weight + first + i * Stride);

  Vec<H, Width> held[Held * Parts];
  float sums[Parts][Lanes] = {};
  for (i64 base = 0; base < columns; base += Held * STEP) {
    const i64 left = columns - first - base;  // valid elements from this thread's first one
#pragma unroll
    for (int group = 0; group < Held * Parts; group += Group) {
      Vec<X, Width> added[Residual ? Group : 1];
#pragma unroll
      for (int i = group; i < group + Group; ++i) {
        const int at = i * Stride;
        if (at < left) {
          if constexpr (Residual) {
            held[i] = load_part<Vector, Width>(residual + base + at, left - at);
            added[i - group] = load_part<Vector, Width>(x + base + at, left - at);
          } else {
            held[i] = load_part<Vector, Width>(x + base + at, left - at);
          }
        }
      }
#pragma unroll
      for (int i = group; i < group + Group; ++i) {
        const int at = i * Stride;
        if (at < left) {
          if constexpr (Residual) {
#pragma unroll
            for (int j = 0; j < Width; ++j) held[i].v[j] += to_float(added[i - group].v[j]);
            store_part<Vector, Width>(residual + base + at, held[i].v, left - at);
          }
#pragma unroll
          for (int j = 0; j < Width; ++j) {
            const float value = to_float(held[i].v[j]);
            sums[i % Parts][j / 4] = fmaf(value, value, sums[i % Parts][j / 4]);
          }
        }
      }
    }
    if (Steps > 0) break;  // the whole row is held
  }

  const float mean = __fdiv_rn(row_sum<Warps, Lanes, Parts>(sums, groups), (float)columns);
  const float scale = __fdiv_rn(1.f, __fsqrt_rn(mean + eps));

  for (i64 base = 0; base < columns; base += Held * STEP) {
    const i64 left = columns - first - base;
#pragma unroll
    for (int i = 0; i < Held * Parts; ++i) {
      const int at = i * Stride;
      if (at < left) {
        if constexpr (Steps > 0 && sizeof(H) == 2) {
#pragma unroll
          for (int word = 0; word < Width / 2; ++word) opaque(reinterpret_cast<u32 *>(&held[i])[word]);
        }
        if constexpr (Steps == 0) {
          if constexpr (Residual) {
            held[i] = load_part<Vector, Width>(residual + base + at, left - at);
          } else {
            held[i] = load_part<Vector, Width>(x + base + at, left - at);
          }
        }
        float y[Width];
        if constexpr (Early) {
#pragma unroll
          for (int j = 0; j < Width; ++j) y[j] = early[i][j];
        } else if constexpr (Vector) {
          load_floats(y, weight + first + base + at);
        } else {
#pragma unroll
          for (int j = 0; j < Width; ++j) y[j] = j < left - at ? weight[first + base + at + j] : 0.f;
        }
#pragma unroll
        for (int j = 0; j < Width; ++j) y[j] *= to_float(held[i].v[j]) * scale;
        store_part<Vector, Width>(out + base + at, y, left - at);
      }
    }
    if (Steps > 0) break;
  }
}
