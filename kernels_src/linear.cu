// Linear layer for many rows: y[m, j] = sum_k x[m, k] w[j, k]  (+ bias[j])  (+ residual[m, j])
//
// Layouts    x [M, K], w [N, K] (T = half or bf16), bias [N] float, residual and out [M, N]; all row-major.
// Order      The numerics contract, item 1: mma steps of 16 k, ascending, inside segments of `Segment` k (0: all of K); every
//            segment starts from zero; segment sums are added in ascending order in float32. Every tile size, and
//            linear_rows.cu, add the same numbers in the same order: their bits are equal.
// Bound      flops, 2 M N K; below about 200 rows the bytes of w.
// Tiles      A tile is BM x BN outputs, a warp's part WM x WN. K comes in stages of BK through a ring of `Stages` buffers
//            filled by cp.async, a few copies in each k-step: a burst of them keeps ldmatrix waiting. Fragments of k-step
//            s + 1 are loaded while the tensor cores work on s.
// Launch     1-D grid of at most ceil(M/BM) ceil(N/BN) blocks of (BM/WM)(BN/WN) warps: block b computes tiles b, b + blocks,
//            ..., and copies the next tile's first stages before it stores this one. Dynamic shared memory
//            Stages (BM + BN) BK 2 bytes. With pdl=True it waits for the kernel ahead before it touches memory.
// Templates  T, Out (T or float), tile sizes, Segment, Aligned (K % 8 == 0 and 16-byte aligned x and w; else element loads).
// Measured   H200, bf16, 2,048 rows of Qwen3-0.6B, us (of cuBLAS): qkv 48 (0.53), gate_up 73 (0.54), o 24 (0.56), with the
//            residual 27 (0.49), down 34 (0.54) and 37 (0.49); the tensor cores alone would need 31 for qkv.
#include "common/fragment_rows.cuh"
#include "common/linear_tile.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/pdl.cuh"

// Two columns of each of two groups of eight, in `Words` words: lanes 2p and 2p + 1 exchange half of them, so that the even
// one has four columns in a row of the first group, the odd one of the second.
template <int Words> __device__ __forceinline__ Vec<u32, 2 * Words> four_columns(const u32 (&v)[2][Words], bool odd) {
  Vec<u32, 2 * Words> y;
#pragma unroll
  for (int i = 0; i < Words; ++i) {
    const u32 got = __shfl_xor_sync(0xffffffffu, odd ? v[0][i] : v[1][i], 1);
    y.v[i] = odd ? got : v[0][i];
    y.v[Words + i] = odd ? v[1][i] : got;
  }
  return y;
}

template <class T, class Out, int BM, int BN, int BK, int WM, int WN, int Stages, int MinBlocks, int Segment, bool Aligned>
__global__ void __launch_bounds__(BM / WM *(BN / WN) * 32, MinBlocks)
    linear_tile(const T *x, const T *w, const float *bias, const float *residual, Out *out, int m, int n, int k) {
  constexpr int WarpsM = BM / WM, Threads = WarpsM * (BN / WN) * 32;
  constexpr int Steps = BK / 16, MI = WM / 16, NI = WN / 8;
  constexpr int Chunks = BK / 8, Pass = Threads / Chunks;  // rows copied at once by the block
  constexpr int Copies = (BM + BN) / Pass, PerStep = ceil_div(Copies, Steps - 1);
  static_assert(Steps % 2 == 0 && NI % 2 == 0 && BM % Pass == 0 && BN % Pass == 0 && Pass % 8 == 0, "tile sizes");
  static_assert(Segment % BK == 0, "a segment ends with a stage");
  constexpr bool Sums = Segment != 0;  // of segments are kept beside the accumulators

  extern __shared__ __align__(128) unsigned char smem[];
  T *const ring = reinterpret_cast<T *>(smem);
  constexpr int StageElements = (BM + BN) * BK;

  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int wm = warp % WarpsM * WM, wn = warp / WarpsM * WN;
  const int stages = ceil_div(k, BK), tiles_m = ceil_div(m, BM), tiles_n = ceil_div(n, BN), tiles = tiles_m * tiles_n;

  // Copies run ahead of the products, into the next tile too: stage copy_stage of tile copy_tile comes next. This thread moves
  // chunk `chunk` of rows copy_row, copy_row + Pass, ...; row i * Pass is valid if below x_left, w_left.
  const int chunk = threadIdx.x % Chunks, copy_row = threadIdx.x / Chunks;
  T *const copy_at = ring + tile_offset<BK>(copy_row, chunk);
  const T *x_rows, *w_rows;
  int copy_tile = blockIdx.x, copy_stage = 0, x_left, w_left;
  auto find_rows = [&]() {
    int tile_m, tile_n;
    grouped_tile(copy_tile, tiles_m, tiles_n, 8, tile_m, tile_n);
    x_rows = x + (i64)(tile_m * BM + copy_row) * k;
    w_rows = w + (i64)(tile_n * BN + copy_row) * k;
    x_left = m - tile_m * BM - copy_row;
    w_left = n - tile_n * BN - copy_row;
  };
  // The residual of the tile whose last copies are under way will be needed soon.
  auto prefetch_residual = [&]() {
    int tile_m, tile_n;
    grouped_tile(copy_tile, tiles_m, tiles_n, 8, tile_m, tile_n);
    for (int i = threadIdx.x; i < BM * (BN / 32); i += Threads) {
      const int row = tile_m * BM + i / (BN / 32), column = tile_n * BN + i % (BN / 32) * 32;
      if (row < m && column < n) prefetch_line_l1(residual + (i64)row * n + column);
    }
  };
  auto copy_rows = [&](int buffer, int first, int end) {
    T *const to = copy_at + buffer * StageElements;
    const int column = copy_stage * BK + chunk * 8;
#pragma unroll
    for (int c = first; c < end && c < Copies; ++c) {
      const int i = c < BM / Pass ? c : c - BM / Pass;
      if (c < BM / Pass)
        copy_chunk<T, Aligned>(to + c * Pass * BK, x_rows + (i64)i * Pass * k, column, k, i * Pass < x_left);
      else
        copy_chunk<T, Aligned>(to + c * Pass * BK, w_rows + (i64)i * Pass * k, column, k, i * Pass < w_left);
    }
  };
  auto next_copy = [&]() {
    if (++copy_stage < stages) return;
    if (sizeof(Out) == 4 && residual && copy_tile < tiles) prefetch_residual();
    copy_stage = 0;
    copy_tile += gridDim.x;
    if (copy_tile < tiles)
      find_rows();
    else
      x_left = w_left = 0;  // nothing is read any more
  };

  // fragments, double-buffered
  u32 a[2][MI][4], b[2][NI / 2][4];
  const int a_row = wm + (lane & 15), a_half = lane >> 4;
  const int b_row = BM + wn + (lane & 7) + (lane >> 4) * 8, b_half = lane >> 3 & 1;
  auto load_fragments = [&](const T *stage, int step) {
#pragma unroll
    for (int i = 0; i < MI; ++i)
      ldmatrix_x4(a[step & 1][i], stage + i * 16 * BK + tile_offset<BK>(a_row, step * 2 + a_half));
#pragma unroll
    for (int j = 0; j < NI / 2; ++j)
      ldmatrix_x4(b[step & 1][j], stage + j * 16 * BK + tile_offset<BK>(b_row, step * 2 + b_half));
  };

  float acc[MI][NI][4], total[Sums ? MI : 1][Sums ? NI : 1][4];
  auto add_segment = [&]() {
    if constexpr (Sums) {
#pragma unroll
      for (int i = 0; i < MI; ++i)
#pragma unroll
        for (int j = 0; j < NI; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            total[i][j][e] += acc[i][j][e];
            acc[i][j][e] = 0.f;
          }
    }
  };
  int buffer = 0;
  const T *stage = ring;
  // The products of one stage. In it the buffer of the stage before is filled again.
  auto multiply_stage = [&]() {
#pragma unroll
    for (int s = 0; s < Steps; ++s) {
      if (s == Steps - 1) {  // every fragment of this stage is in registers: after the barrier its buffer may be refilled
        cp_async_wait<Stages - 2>();
        __syncthreads();
        buffer = buffer + 1 == Stages ? 0 : buffer + 1;
        stage = ring + buffer * StageElements;
      }
      load_fragments(stage, (s + 1) % Steps);
      if (s < Steps - 1) copy_rows(buffer == 0 ? Stages - 1 : buffer - 1, s * PerStep, (s + 1) * PerStep);
      if (s == Steps - 2) cp_async_commit();
#pragma unroll
      for (int i = 0; i < MI; ++i)
#pragma unroll
        for (int j = 0; j < NI; ++j)
          mma_m16n8k16<T>(acc[i][j], a[s & 1][i], b[s & 1][j / 2][j % 2 * 2], b[s & 1][j / 2][j % 2 * 2 + 1]);
    }
    next_copy();
  };

  grid_dependency_launch();
  grid_dependency_wait();
  find_rows();
  for (int s = 0; s < Stages - 1; ++s) {
    copy_rows(s, 0, Copies);
    cp_async_commit();
    next_copy();
  }
  cp_async_wait<Stages - 2>();
  __syncthreads();

  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
#pragma unroll
    for (int i = 0; i < MI; ++i)
#pragma unroll
      for (int j = 0; j < NI; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          acc[i][j][e] = 0.f;
          if constexpr (Sums) total[i][j][e] = SUM_START;
        }
    load_fragments(stage, 0);
    // A block of its own for the additions: in the loop they would become predicated and wait for the products every time.
    for (int begin = 0; begin < stages;) {
      const int end = Sums ? min(begin + Segment / BK, stages) : stages;
#pragma unroll 1
      for (; begin < end; ++begin) multiply_stage();
      add_segment();
    }

    int tile_m, tile_n;
    grouped_tile(tile, tiles_m, tiles_n, 8, tile_m, tile_n);
    const int g = lane >> 2, t = lane & 3, row0 = tile_m * BM + wm + g, column0 = tile_n * BN + wn;
    auto sum = [&](int i, int j, int e) -> float & {
      if constexpr (Sums)
        return total[i][j][e];
      else
        return acc[i][j][e];
    };
    if (bias) {
#pragma unroll
      for (int j = 0; j < NI; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = column0 + j * 8 + 2 * t + e;
          const float add = column < n ? bias[column] : 0.f;
#pragma unroll
          for (int i = 0; i < MI; ++i) {
            sum(i, j, e) += add;
            sum(i, j, 2 + e) += add;
          }
        }
    }
    if (n % 4 == 0) {
      // Eight rows at a time. The residual of `Together` times eight is loaded before the first is stored: out may be residual.
      constexpr int Together = 2 * MI < 16 / NI ? 2 * MI : 16 / NI;
      const int odd = t & 1, first = column0 + odd * 8 + 2 * (t - odd);
      Vec<float, 4> added[Together][NI / 2];
#pragma unroll
      for (int u = 0; u < 2 * MI; ++u) {
        if (sizeof(Out) == 4 && u % Together == 0) {
#pragma unroll
          for (int ahead = 0; ahead < Together; ++ahead)
#pragma unroll
            for (int j = 0; j < NI; j += 2) {
              Vec<float, 4> &r = added[ahead][j / 2];
              r = Vec<float, 4>{{SUM_START, SUM_START, SUM_START, SUM_START}};
              const int row = row0 + (u + ahead) * 8, column = first + j * 8;
              if (residual && row < m && column < n) r = load_vec<float, 4>(residual + (i64)row * n + column);
            }
        }
        const int row = row0 + u * 8;
#pragma unroll
        for (int j = 0; j < NI; j += 2) {
          const int column = first + j * 8;
          Out *const to = out + (i64)row * n + column;
          const bool valid = row < m && column < n;
          if constexpr (sizeof(Out) == 4) {
            u32 v[2][2];
#pragma unroll
            for (int e = 0; e < 4; ++e) v[e / 2][e % 2] = __float_as_uint(sum(u / 2, j + e / 2, u % 2 * 2 + e % 2));
            const Vec<u32, 4> four = four_columns(v, odd);
            Vec<float, 4> y;
#pragma unroll
            for (int e = 0; e < 4; ++e) y.v[e] = added[u % Together][j / 2].v[e] + __uint_as_float(four.v[e]);
            if (valid) store_vec(reinterpret_cast<float *>(to), y);
          } else {
            u32 v[2][1];
#pragma unroll
            for (int q = 0; q < 2; ++q)
              v[q][0] = pack2<T>(sum(u / 2, j + q, u % 2 * 2), sum(u / 2, j + q, u % 2 * 2 + 1));
            const Vec<u32, 2> y = four_columns(v, odd);
            if (valid) store_vec(reinterpret_cast<u32 *>(to), y);
          }
        }
      }
    } else {
      const LinearOutput<Out> output{nullptr, residual, out, m, n};
#pragma unroll
      for (int i = 0; i < MI; ++i)
#pragma unroll
        for (int j = 0; j < NI; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            output.store(sum(i, j, e), row0 + i * 16 + e / 2 * 8, column0 + j * 8 + 2 * t + e % 2);
    }
  }
}
