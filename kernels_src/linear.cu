// Linear layer for many rows: y[m, j] = sum_k x[m, k] w[j, k]  (+ bias[j])  (+ residual[m, j])
//
// Layouts    x [M, K], w [N, K] (T = half or bf16), bias [N] float, residual and out [M, N]; all row-major.
// Order      The numerics contract, item 1: mma steps of 16 k, ascending, inside segments of `Segment` k (0: all of K); every
//            segment starts from zero; segment sums are added in ascending order in float32. Every tile size, and
//            linear_rows.cu, add the same numbers in the same order: their bits are equal.
// Bound      flops, 2 M N K; below about 200 rows the bytes of w.
// Tiles      A block computes BM x BN outputs, a warp WM x WN. K comes in steps of BK through a ring of `Stages` buffers
//            filled by cp.async. Fragments of k-step s + 1 are loaded while the tensor cores work on s, across tiles too.
// Launch     1-D grid of ceil(M/BM) ceil(N/BN) blocks of (BM/WM)(BN/WN) warps; dynamic shared memory
//            Stages (BM + BN) BK 2 bytes. With pdl=True it waits for the kernel ahead before it touches memory.
// Templates  T, Out (T or float), tile sizes, Segment, Aligned (K % 8 == 0 and 16-byte aligned x and w; else element loads).
// Measured: see docs/performance.md
#include "common/linear_tile.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/pdl.cuh"

// Blocks that run together share rows of x and of w in L2: walk down GROUP row tiles, then one column to the right.
template <int Group> __device__ __forceinline__ void grouped_tile(int tiles_m, int tiles_n, int &tile_m, int &tile_n) {
  const int block = blockIdx.x, group_blocks = Group * tiles_n;
  const int first = block / group_blocks * Group, in_group = block % group_blocks;
  const int height = min(Group, tiles_m - first);
  tile_m = first + in_group % height;
  tile_n = in_group / height;
}

// 4 x 4 transpose of 32-bit words inside each quad of lanes: lane t gets word t of lanes 0..3.
__device__ __forceinline__ void quad_transpose(u32 (&v)[4]) {
  const int lane = threadIdx.x & 3;
#pragma unroll
  for (int step = 1; step <= 2; step <<= 1) {
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const u32 send = upper ? v[i] : v[i | step];
      const u32 got = __shfl_xor_sync(0xffffffffu, send, step);
      if (upper)
        v[i] = got;
      else
        v[i | step] = got;
    }
  }
}

template <class T, class Out, int BM, int BN, int BK, int WM, int WN, int Stages, int MinBlocks, int Segment, bool Aligned>
__global__ void __launch_bounds__(BM / WM *(BN / WN) * 32, MinBlocks)
    linear_tile(const T *x, const T *w, const float *bias, const float *residual, Out *out, int m, int n, int k) {
  constexpr int WarpsM = BM / WM, Threads = WarpsM * (BN / WN) * 32;
  constexpr int Steps = BK / 16, MI = WM / 16, NI = WN / 8;
  constexpr int Chunks = BK / 8, Pass = Threads / Chunks;  // rows copied at once by the block
  static_assert(Steps % 2 == 0 && NI % 4 == 0 && BM % Pass == 0 && BN % Pass == 0 && Pass % 8 == 0, "tile sizes");
  static_assert(Segment % BK == 0, "a segment ends with a tile");

  extern __shared__ __align__(128) unsigned char smem[];
  T *const tiles = reinterpret_cast<T *>(smem);
  constexpr int StageElements = (BM + BN) * BK;

  int tile_m, tile_n;
  grouped_tile<8>(ceil_div(m, BM), ceil_div(n, BN), tile_m, tile_n);
  const int m0 = tile_m * BM, n0 = tile_n * BN;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int wm = warp % WarpsM * WM, wn = warp / WarpsM * WN;
  const int n_tiles = ceil_div(k, BK);

  // copies: this thread moves chunk `chunk` of rows copy_row, copy_row + Pass, ...
  const int chunk = threadIdx.x % Chunks, copy_row = threadIdx.x / Chunks;
  const int copy_at = tile_offset<BK>(copy_row, chunk);
  const T *const x_rows = x + (i64)(m0 + copy_row) * k;
  const T *const w_rows = w + (i64)(n0 + copy_row) * k;
  const int x_left = m - m0 - copy_row, w_left = n - n0 - copy_row;  // row i * Pass is valid if below
  auto copy_tile = [&](int tile) {
    if (tile < n_tiles) {
      T *const stage = tiles + tile % Stages * StageElements + copy_at;
      const int column = tile * BK + chunk * 8;
#pragma unroll
      for (int i = 0; i < BM / Pass; ++i)
        copy_chunk<T, Aligned>(stage + i * Pass * BK, x_rows + (i64)i * Pass * k, column, k, i * Pass < x_left);
#pragma unroll
      for (int i = 0; i < BN / Pass; ++i)
        copy_chunk<T, Aligned>(stage + (BM + i * Pass) * BK, w_rows + (i64)i * Pass * k, column, k, i * Pass < w_left);
    }
    cp_async_commit();  // an empty group keeps the count
  };

  // fragments, double-buffered
  u32 a[2][MI][4], b[2][NI / 2][4];
  const int a_row = wm + (lane & 15), a_half = lane >> 4;
  const int b_row = BM + wn + (lane & 7) + (lane >> 4) * 8, b_half = lane >> 3 & 1;
  auto load_fragments = [&](int buffer, const T *stage, int step) {
#pragma unroll
    for (int i = 0; i < MI; ++i)
      ldmatrix_x4(a[buffer][i], stage + i * 16 * BK + tile_offset<BK>(a_row, step * 2 + a_half));
#pragma unroll
    for (int j = 0; j < NI / 2; ++j)
      ldmatrix_x4(b[buffer][j], stage + j * 16 * BK + tile_offset<BK>(b_row, step * 2 + b_half));
  };

  float acc[MI][NI][4], total[Segment ? MI : 1][Segment ? NI : 1][4];
#pragma unroll
  for (int i = 0; i < MI; ++i)
#pragma unroll
    for (int j = 0; j < NI; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        acc[i][j][e] = 0.f;
        if constexpr (Segment != 0) total[i][j][e] = SUM_START;
      }
  auto multiply = [&](int buffer) {
#pragma unroll
    for (int i = 0; i < MI; ++i)
#pragma unroll
      for (int j = 0; j < NI; ++j)
        mma_m16n8k16<T>(acc[i][j], a[buffer][i], b[buffer][j / 2][j % 2 * 2], b[buffer][j / 2][j % 2 * 2 + 1]);
  };
  auto end_segment = [&]() {
    if constexpr (Segment != 0) {
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

  grid_dependency_launch();
  grid_dependency_wait();
  for (int s = 0; s < Stages - 1; ++s) copy_tile(s);
  cp_async_wait<Stages - 2>();
  __syncthreads();
  const T *stage = tiles;
  load_fragments(0, stage, 0);
  for (int tile = 0; tile + 1 < n_tiles; ++tile) {
#pragma unroll
    for (int s = 0; s < Steps; ++s) {
      if (s == Steps - 1) {  // every fragment of this tile is in registers: after the barrier its buffer may be refilled
        cp_async_wait<Stages - 2>();
        __syncthreads();
        stage = tiles + (tile + 1) % Stages * StageElements;
      }
      load_fragments((s + 1) & 1, stage, (s + 1) % Steps);
      if (s == 0) copy_tile(tile + Stages - 1);
      multiply(s & 1);
    }
    if constexpr (Segment != 0) {
      if ((tile + 1) % (Segment / BK) == 0) end_segment();
    }
  }
  const int last_steps = ceil_div(k - (n_tiles - 1) * BK, 16);
#pragma unroll
  for (int s = 0; s < Steps; ++s) {
    if (s + 1 < last_steps) load_fragments((s + 1) & 1, stage, s + 1);
    if (s < last_steps) multiply(s & 1);
  }
  end_segment();

  const LinearOutput<Out> output{bias, residual, out, m, n};
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int i = 0; i < MI; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = m0 + wm + i * 16 + h * 8 + g;
#pragma unroll
      for (int j = 0; j < NI; j += 4) {
        float v[4][2];
#pragma unroll
        for (int q = 0; q < 4; ++q)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if constexpr (Segment != 0)
              v[q][e] = total[i][j + q][h * 2 + e];
            else
              v[q][e] = acc[i][j + q][h * 2 + e];
          }
        const int column = n0 + wn + j * 8;
        if (column + 32 <= n && n % 8 == 0) {  // whole 32-column strips: full 32-byte sectors
          if constexpr (sizeof(Out) == 4) {
            if (row < m) {
#pragma unroll
              for (int q = 0; q < 4; ++q) {
                const int c = column + q * 8 + 2 * t;
                const i64 at = (i64)row * n + c;
                Vec<float, 2> y{{v[q][0], v[q][1]}};
                if (bias) {
                  y.v[0] += bias[c];
                  y.v[1] += bias[c + 1];
                }
                if (residual) {
                  const Vec<float, 2> r = load_vec<float, 2>(residual + at);
                  y.v[0] = r.v[0] + y.v[0];
                  y.v[1] = r.v[1] + y.v[1];
                }
                store_vec(reinterpret_cast<float *>(out) + at, y);
              }
            }
          } else {
            u32 packed[4];
#pragma unroll
            for (int q = 0; q < 4; ++q) {
              const int c = column + q * 8 + 2 * t;
              if (bias) {
                v[q][0] += bias[c];
                v[q][1] += bias[c + 1];
              }
              packed[q] = pack2<T>(v[q][0], v[q][1]);
            }
            quad_transpose(packed);  // lane t: the eight columns of group t
            if (row < m)
              *reinterpret_cast<uint4 *>(out + (i64)row * n + column + t * 8) =
                  make_uint4(packed[0], packed[1], packed[2], packed[3]);
          }
        } else {
#pragma unroll
          for (int q = 0; q < 4; ++q)
#pragma unroll
            for (int e = 0; e < 2; ++e) output.store(v[q][e], row, column + q * 8 + 2 * t + e);
        }
      }
    }
}
