// Linear layer: y[m, j] = sum_k x[m, k] w[j, k]  (+ bias[j])  (+ residual[m, j])
//
// Layouts    x [M, K], w [N, K] (T = half or bf16), bias [N] float, residual and out [M, N]; all row-major.
// Order      The numerics contract, item 1: mma steps of 16 k, ascending, inside segments of `Segment` k (0: all of K); every
//            segment starts from zero; segment sums are added in ascending order in float32. Both kernels below, at every
//            tile size and with either operand as the mma's A, add the same numbers in the same order: their bits are equal.
// Bound      linear_rows: bytes, N K 2 (M <= 64). linear_tile: flops, 2 M N K (larger M).
// Launch     linear_tile  1-D grid of ceil(M/BM) ceil(N/BN) blocks of (BM/WM)(BN/WN) warps;
//                         dynamic shared memory Stages (BM + BN) BK 2 bytes.
//            linear_rows  grid (ceil(N/Rows), ceil(M/MT)), WarpsN * Slots warps; dynamic shared memory: see linear_rows.
// Templates  T, Out (T or float), tile sizes, Segment, Aligned (K % 8 == 0 and 16-byte aligned bases; else element loads).
// Measured: see docs/performance.md
#include "common/linear_tile.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"

// -0 is the identity of IEEE addition: -0 + x == x for every x, so the first segment sum is taken as it is.
#define SUM_START -0.f

// ------------------------------------------------------------------------------------------------ large M
// Block tile BM x BN, warp tile WM x WN, K in steps of BK through a ring of `Stages` buffers filled by cp.async. Fragments of
// k-step s + 1 are loaded while the tensor cores work on s, across tile borders too.

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

// ------------------------------------------------------------------------------------------------ small M
// A block owns `Rows` rows of w for up to MT rows of x. Its warps form Slots x WarpsN: slot s walks K segments s, s + Slots, ...
// (each its own chain of mma steps), and inside a slot every warp takes Rows / WarpsN rows of w. After each round of segments
// the partial sums meet in shared memory and are added in ascending order by the threads that own the outputs.
// WeightA: w is the mma's A operand (16 rows of w x 8 rows of x per step), else B (MT padded to 16 x 8 rows of w).
//
// Dynamic shared memory: 16 bytes of zeros (what ldmatrix reads for rows of x that do not exist), then Stages x Slots buffers of
// (Rows + min(M, MT)) x BK elements, then the partial sums, Slots x MT x Rows floats; with one round only, the partial sums
// lie over the buffers instead.
template <class T, class Out, int MT, int Rows, int WarpsN, int Slots, int BK, int Stages, int Segment, bool WeightA, bool Aligned>
__global__ void __launch_bounds__(WarpsN *Slots * 32)
    linear_rows(const T *x, const T *w, const float *bias, const float *residual, Out *out, int m, int n, int k) {
  constexpr int Threads = WarpsN * Slots * 32, SlotThreads = WarpsN * 32;
  constexpr int Chunks = BK / 8, WarpRows = Rows / WarpsN;
  static_assert(BK % 32 == 0 && Segment % BK == 0, "k-steps are loaded in pairs, a segment ends with a tile");
  static_assert(MT % 8 == 0 && (MT == 8 || MT % 16 == 0), "row tiles of x");
  static_assert(WarpRows % (WeightA ? 16 : 8) == 0, "row tiles of w");
  static_assert(Segment != 0 || Slots == 1, "one segment: one slot");
  constexpr int XI = WeightA ? MT / 8 : (MT + 15) / 16;       // mma tiles along rows of x
  constexpr int WI = WeightA ? WarpRows / 16 : WarpRows / 8;  // mma tiles along rows of w

  extern __shared__ __align__(128) unsigned char smem[];
  T *const zeros = reinterpret_cast<T *>(smem);
  T *const ring = zeros + 8;
  const int m0 = blockIdx.y * MT, n0 = blockIdx.x * Rows;
  const int x_rows = min(m, MT);
  const int buffer_elements = (Rows + x_rows) * BK;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int slot = warp / WarpsN, slot_thread = threadIdx.x % SlotThreads;
  const int warp_row = warp % WarpsN * WarpRows;

  const int segment = Segment ? Segment : ceil_div(k, 16) * 16;
  const int segments = ceil_div(k, segment), rounds = ceil_div(segments, Slots);
  const int segment_tiles = ceil_div(min(segment, k), BK), n_tiles = rounds * segment_tiles;
  float *const partial =
      reinterpret_cast<float *>(rounds == 1 ? smem : smem + 16 + (i64)Stages * Slots * buffer_elements * sizeof(T));

  // the copies run Stages - 1 tiles ahead of the products
  i64 copy_k = (i64)slot * segment;
  int copy_left = segment_tiles, copied = 0;
  auto copy_tile = [&]() {
    if (copied < n_tiles && copy_k < k) {
      T *const buffer = ring + (copied % Stages * Slots + slot) * buffer_elements;
#pragma unroll 4
      for (int i = slot_thread; i < Rows * Chunks; i += SlotThreads) {
        const int row = i / Chunks, chunk = i % Chunks;
        copy_chunk<T, Aligned>(buffer + tile_offset<BK>(row, chunk), w + (i64)(n0 + row) * k, copy_k + chunk * 8, k,
                               n0 + row < n);
      }
      for (int i = slot_thread; i < x_rows * Chunks; i += SlotThreads) {
        const int row = i / Chunks, chunk = i % Chunks;
        copy_chunk<T, Aligned>(buffer + Rows * BK + tile_offset<BK>(row, chunk), x + (i64)(m0 + row) * k,
                               copy_k + chunk * 8, k, m0 + row < m);
      }
    }
    cp_async_commit();
    ++copied;
    copy_k += BK;
    if (--copy_left == 0) {  // on to this slot's segment in the next round
      copy_left = segment_tiles;
      copy_k += (i64)Slots * segment - (i64)segment_tiles * BK;
    }
  };

  float acc[XI][WI][4];
  auto clear = [&]() {
#pragma unroll
    for (int i = 0; i < XI; ++i)
#pragma unroll
      for (int j = 0; j < WI; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][j][e] = 0.f;
  };
  clear();

  // ldmatrix rows of this lane. A tile of 16 rows: x4 is (rows, k-half) 00 10 01 11; one of 8 rows: x4 is two k-steps.
  const int row16 = lane & 15, half16 = lane >> 4, row8 = lane & 7, quarter8 = lane >> 3;
  auto x_chunk = [&](const T *buffer, int row, int chunk) {
    return row < x_rows ? buffer + Rows * BK + tile_offset<BK>(row, chunk) : zeros;
  };
  // Fragments of two k-steps at a time, double-buffered: [buffer][tile][k-step][register]; tiles of 8 rows use k-step 0 alone,
  // its four registers being two steps of two halves.
  u32 xf[2][XI][2][4], wf[2][WI][2][4];
  auto load_pair = [&](int to, const T *buffer, int chunk) {
#pragma unroll
    for (int i = 0; i < XI; ++i) {
      if constexpr (WeightA || MT == 8) {
        ldmatrix_x4(xf[to][i][0], x_chunk(buffer, i * 8 + row8, chunk + quarter8));
      } else {
#pragma unroll
        for (int s = 0; s < 2; ++s) ldmatrix_x4(xf[to][i][s], x_chunk(buffer, i * 16 + row16, chunk + s * 2 + half16));
      }
    }
#pragma unroll
    for (int j = 0; j < WI; ++j) {
      if constexpr (WeightA) {
#pragma unroll
        for (int s = 0; s < 2; ++s)
          ldmatrix_x4(wf[to][j][s], buffer + tile_offset<BK>(warp_row + j * 16 + row16, chunk + s * 2 + half16));
      } else {
        ldmatrix_x4(wf[to][j][0], buffer + tile_offset<BK>(warp_row + j * 8 + row8, chunk + quarter8));
      }
    }
  };
  auto multiply = [&](int from, int step) {
#pragma unroll
    for (int i = 0; i < XI; ++i)
#pragma unroll
      for (int j = 0; j < WI; ++j) {
        const u32(&xr)[2][4] = xf[from][i];
        const u32(&wr)[2][4] = wf[from][j];
        if constexpr (WeightA) {
          mma_m16n8k16<T>(acc[i][j], wr[step], xr[0][2 * step], xr[0][2 * step + 1]);
        } else if constexpr (MT == 8) {
          const u32 upper_half_empty[4] = {xr[0][2 * step], 0u, xr[0][2 * step + 1], 0u};
          mma_m16n8k16<T>(acc[i][j], upper_half_empty, wr[0][2 * step], wr[0][2 * step + 1]);
        } else {
          mma_m16n8k16<T>(acc[i][j], xr[step], wr[0][2 * step], wr[0][2 * step + 1]);
        }
      }
  };

  // outputs owned by this thread for the ordered sum: (row, column) = e / Rows, e % Rows for e = thread, thread + Threads, ...
  constexpr int Owned = (MT * Rows + Threads - 1) / Threads;
  float total[Owned];
#pragma unroll
  for (int i = 0; i < Owned; ++i) total[i] = SUM_START;
  const int g = lane >> 2, t = lane & 3;
  auto end_round = [&](int first_segment) {
    __syncthreads();  // buffers (if they are shared with) and the partial sums of the last round have been read
    float *const mine = partial + slot * MT * Rows;
#pragma unroll
    for (int i = 0; i < XI; ++i)
#pragma unroll
      for (int j = 0; j < WI; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (WeightA) {
            mine[(i * 8 + 2 * t + (e & 1)) * Rows + warp_row + j * 16 + g + (e >> 1) * 8] = acc[i][j][e];
          } else {
            if (MT == 8 && e >= 2) continue;
            mine[(i * 16 + g + (e >> 1) * 8) * Rows + warp_row + j * 8 + 2 * t + (e & 1)] = acc[i][j][e];
          }
        }
    __syncthreads();
    const int present = min(Slots, segments - first_segment);
#pragma unroll
    for (int i = 0; i < Owned; ++i) {
      const int e = threadIdx.x + i * Threads;
      if (e < MT * Rows)
        for (int s = 0; s < present; ++s) total[i] += partial[s * MT * Rows + e];
    }
  };

  for (int s = 0; s < Stages - 1; ++s) copy_tile();
  if (threadIdx.x < 8) zeros[threadIdx.x] = from_float<T>(0.f);
  __syncthreads();
  int tile = 0;
  for (int round = 0; round < rounds; ++round) {
    i64 at = ((i64)round * Slots + slot) * segment;
    for (int i = 0; i < segment_tiles; ++i, ++tile, at += BK) {
      cp_async_wait<Stages - 2>();
      if constexpr (WarpsN == 1)
        __syncwarp();  // a slot is one warp, and reads only what it copied
      else
        __syncthreads();
      copy_tile();
      const T *const buffer = ring + (tile % Stages * Slots + slot) * buffer_elements;
      if (at + BK <= k) {
        load_pair(0, buffer, 0);
#pragma unroll
        for (int pair = 0; pair < BK / 32; ++pair) {
          if (pair + 1 < BK / 32) load_pair((pair + 1) & 1, buffer, (pair + 1) * 4);
          multiply(pair & 1, 0);
          multiply(pair & 1, 1);
        }
      } else {  // the end of K: as many k-steps as there are, the last one padded with zeros
        for (int step = 0; step < BK / 16 && at + step * 16 < k; step += 2) {
          load_pair(0, buffer, step * 2);
          multiply(0, 0);
          if (at + step * 16 + 16 < k) multiply(0, 1);
        }
      }
    }
    end_round(round * Slots);
    clear();
  }

  const LinearOutput<Out> output{bias, residual, out, m, n};
#pragma unroll
  for (int i = 0; i < Owned; ++i) {
    const int e = threadIdx.x + i * Threads;
    if (e < MT * Rows) output.store(total[i], m0 + e / Rows, n0 + e % Rows);
  }
}
