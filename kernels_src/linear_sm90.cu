// Linear layer on Hopper's tensor cores (sm_90a only): y[m, j] = sum_k x[m, k] w[j, k]  (+ bias[j])  (+ residual[m, j])
//
// Layouts    x [M, K], w [N, K] (T = half or bf16) through tensor maps with boxes of 64 columns, 128-byte swizzle;
//            bias [N] float, residual and out [M, N]; all row-major. N % 8 == 0, K % 8 == 0, bases at multiples of 16 bytes.
// Order      The numerics contract, item 1, and the bits of linear.cu: mma steps of 16 k, ascending, inside segments of
//            `Segment` k (0: all of K); every segment starts from zero; segment sums are added in ascending order in float32.
// Bound      flops, 2 M N K; bytes of the weight for small M.
// Launch     Persistent: clusters of ClusterM x ClusterN blocks, at most one block to a multiprocessor, 1-D grid;
//            (GroupsM GroupsN + 1) 128 threads; dynamic shared memory: the ring and 16 bytes of barriers to a buffer.
// Templates  A block computes BM x BN, BM = 64 MI GroupsM, BN: one producer warp copies K-tiles of 64 into a ring of `Stages`
//            buffers, and GroupsM x GroupsN consumer warpgroups multiply, each 64 MI x BN / GroupsN outputs. Blocks of a cluster
//            share tiles of w (along M) and of x (along N): each copies its part to all. `Lag`: each further warpgroup starts
//            that many K-tiles behind the one before, so that one multiplies while the other adds up segments or stores.
// Measured: see docs/performance.md
#include "common/fragment_rows.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

constexpr int BK = 64, ROW_BYTES = BK * 2;

// -0 is the identity of IEEE addition: -0 + x == x for every x, so the first segment sum is taken as it is.
#define SUM_START -0.f

template <class T, class Out, int GroupsM, int GroupsN, int MI, int BN, int Stages, int ClusterM, int ClusterN, int Lag,
          int Segment>
__global__ void __launch_bounds__((GroupsM *GroupsN + 1) * 128, 1)
    linear_sm90(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const float *bias,
                const float *residual, Out *out, int m, int n, int k, int group) {
  constexpr int Groups = GroupsM * GroupsN, Cluster = ClusterM * ClusterN;
  constexpr int BM = 64 * MI * GroupsM, WN = BN / GroupsN;          // rows of a block, columns of a warpgroup
  constexpr int XPart = BM / ClusterN, WPart = BN / ClusterM;       // rows that this block copies for its cluster
  constexpr int StageBytes = (BM + BN) * ROW_BYTES;
  constexpr int SegmentTiles = Segment / BK;
  static_assert(XPart % 8 == 0 && WPart % 8 == 0 && XPart <= 256 && WPart <= 256, "parts are whole swizzle atoms");
  static_assert(Segment % BK == 0, "a segment ends with a tile");
  static_assert(Lag * (Groups - 1) < Stages, "the ring holds the lag");

  extern __shared__ __align__(1024) unsigned char smem[];
  u64 *const full = reinterpret_cast<u64 *>(smem + Stages * StageBytes), *const empty = full + Stages;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), lane = threadIdx.x & 31;
  const int rank = Cluster > 1 ? (int)cluster_rank() : 0;
  const int rank_m = rank % ClusterM, rank_n = rank / ClusterM;

  const int tiles_m = ceil_div(ceil_div(m, BM), ClusterM), tiles_n = ceil_div(ceil_div(n, BN), ClusterN);
  const int tiles = tiles_m * tiles_n, k_tiles = ceil_div(k, BK);
  const int first_tile = blockIdx.x / Cluster, tile_step = gridDim.x / Cluster;

  if (threadIdx.x == 0) {
    if (shared_address(smem) & 1023) __trap();  // the swizzle counts on it
#pragma unroll
    for (int s = 0; s < Stages; ++s) {
      mbarrier_init(full + s, 1);
      mbarrier_init(empty + s, Groups * 4 * Cluster);  // every consumer warp of the cluster
    }
    mbarrier_init_fence();
    prefetch_tensor_map(&x_map);
    prefetch_tensor_map(&w_map);
  }
  if constexpr (Cluster > 1)
    cluster_sync();
  else
    __syncthreads();

  if (warpgroup == 0) {  // producer
    if constexpr (Groups == 2) fewer_registers<40>();
    if constexpr (Groups == 3) fewer_registers<32>();
    if (threadIdx.x == 0) {
      int stage = 0;
      u32 phase = 0;
      for (int tile = first_tile; tile < tiles; tile += tile_step) {
        int tile_m, tile_n;
        grouped_tile(tile, tiles_m, tiles_n, group, tile_m, tile_n);
        const int x_row = (tile_m * ClusterM + rank_m) * BM + rank_n * XPart;
        const int w_row = (tile_n * ClusterN + rank_n) * BN + rank_m * WPart;
        for (int kt = 0; kt < k_tiles; ++kt) {
          mbarrier_wait(empty + stage, phase ^ 1);
          mbarrier_arrive_expect(full + stage, StageBytes);
          unsigned char *const x_tile = smem + stage * StageBytes + rank_n * XPart * ROW_BYTES;
          unsigned char *const w_tile = smem + stage * StageBytes + (BM + rank_m * WPart) * ROW_BYTES;
          if constexpr (ClusterN > 1) {
            constexpr int Row = ((1 << Cluster) - 1) / ((1 << ClusterM) - 1);  // bits 0, ClusterM, 2 ClusterM ..
            tma_load_2d_multicast(x_tile, &x_map, full + stage, kt * BK, x_row, (unsigned short)(Row << rank_m));
          } else {
            tma_load_2d(x_tile, &x_map, full + stage, kt * BK, x_row);
          }
          if constexpr (ClusterM > 1)
            tma_load_2d_multicast(w_tile, &w_map, full + stage, kt * BK, w_row,
                                  (unsigned short)(((1 << ClusterM) - 1) << rank_n * ClusterM));
          else
            tma_load_2d(w_tile, &w_map, full + stage, kt * BK, w_row);
          if (sizeof(Out) == 4 && residual) {  // a few rows of the residual per K-tile: they will be in L2 when needed
            const int row = (tile_m * ClusterM + rank_m) * BM, column = (tile_n * ClusterN + rank_n) * BN;
            const int bytes = min(BN, n - column) * 4;
            for (int r = kt; r < BM && row + r < m && bytes > 0; r += k_tiles)
              prefetch_l2(residual + (i64)(row + r) * n + column, bytes);
          }
          if (++stage == Stages) {
            stage = 0;
            phase ^= 1;
          }
        }
      }
    }
  } else {  // consumers
    if constexpr (Groups == 2) more_registers<232>();
    if constexpr (Groups == 3) more_registers<160>();
    const int consumer = warpgroup - 1, group_m = consumer % GroupsM, group_n = consumer / GroupsM;
    const u64 x_base = wgmma_descriptor(smem + group_m * MI * 64 * ROW_BYTES);
    const u64 w_base = wgmma_descriptor(smem + (BM + group_n * WN) * ROW_BYTES);
    auto release = [&](int stage) {  // this warp has read the buffer: all who copy into it may go on
      if constexpr (Cluster > 1) {
        if (lane < Cluster) mbarrier_arrive_at(empty + stage, lane);
      } else {
        if (lane == 0) mbarrier_arrive(empty + stage);
      }
    };

    if constexpr (Lag > 0) {
      // the tile `Lag` further is here: the warpgroup before this one has had the tensor cores for those before it
      const int behind = min(consumer * Lag, k_tiles - 1);
      if (first_tile < tiles) mbarrier_wait(full + behind, 0);
    }
    int stage = 0;
    u32 phase = 0;
    for (int tile = first_tile; tile < tiles; tile += tile_step) {
      float acc[MI][WN / 2], total[Segment ? MI : 1][Segment ? WN / 2 : 1];
#pragma unroll
      for (int i = 0; i < MI; ++i)
#pragma unroll
        for (int e = 0; e < WN / 2; ++e) {
          acc[i][e] = 0.f;  // not read: it ends the life of the last tile's values
          if constexpr (Segment != 0) total[i][e] = SUM_START;
        }
      for (int left = k_tiles; left > 0;) {  // segments
        const int count = Segment ? min(SegmentTiles, left) : left;
        left -= count;
        int before = 0;
        for (int kt = 0; kt < count; ++kt) {
          mbarrier_wait(full + stage, phase);
          const u64 x_tile = x_base + (u64)(stage * (StageBytes >> 4)), w_tile = w_base + (u64)(stage * (StageBytes >> 4));
#pragma unroll
          for (int i = 0; i < MI; ++i) wgmma_pin(acc[i]);
          wgmma_fence();
#pragma unroll
          for (int s = 0; s < BK / 16; ++s)
#pragma unroll
            for (int i = 0; i < MI; ++i)
              Wgmma<T, WN>::multiply(acc[i], x_tile + i * (64 * ROW_BYTES >> 4) + 2 * s, w_tile + 2 * s, s > 0 ? 1 : kt);
          wgmma_commit();
          wgmma_wait<1>();  // the products of the tile before are done
          if (kt > 0) release(before);
          before = stage;
          if (++stage == Stages) {
            stage = 0;
            phase ^= 1;
          }
        }
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < MI; ++i) wgmma_pin(acc[i]);
        release(before);
        if constexpr (Segment != 0) {
#pragma unroll
          for (int i = 0; i < MI; ++i)
#pragma unroll
            for (int e = 0; e < WN / 2; ++e) total[i][e] += acc[i][e];
        }
      }

      int tile_m, tile_n;
      grouped_tile(tile, tiles_m, tiles_n, group, tile_m, tile_n);
      const int row = (tile_m * ClusterM + rank_m) * BM + group_m * MI * 64;
      const int column = (tile_n * ClusterN + rank_n) * BN + group_n * WN;
      // residuals in flight, as registers allow: the accumulators of segments are free by now
      constexpr int Batch = Groups == 3                  ? 4
                            : Segment && WN % 128 == 0 ? 16
                            : Segment && WN % 96 == 0  ? 12
                            : WN % 64 == 0             ? 8
                                                       : 2;
      auto finish = [&](float(&v)[WN / 2], int i) {
        if (bias) add_bias<WN>(v, bias, column, n);
        store_rows<WN, Batch>(v, residual, out, row + i * 64, column, m, n);
      };
#pragma unroll
      for (int i = 0; i < MI; ++i) {
        if constexpr (Segment != 0)
          finish(total[i], i);
        else
          finish(acc[i], i);
      }
    }
  }
  if constexpr (Cluster > 1) {  // no block may end while others still reach into its shared memory
    __syncwarp();
    cluster_sync();
  }
}

// ------------------------------------------------------------------------------------------------ few tiles
// A cluster of `Split` blocks computes one tile of 64 Groups x BN: block r multiplies K segments r per, .. r per + per - 1
// (per = ceil(segments / Split)) and leaves each segment's sum in its shared memory; then every block adds all segments, in
// ascending order, for its share of the rows. Grid: Split blocks to a tile; dynamic shared memory: the ring, its barriers, and
// per x 64 Groups x (BN + 8) floats.
template <class T, class Out, int Groups, int BN, int Stages, int Split, int Segment>
__global__ void __launch_bounds__((Groups + 1) * 128, 1)
    linear_sm90_split(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const float *bias,
                      const float *residual, Out *out, int m, int n, int k) {
  constexpr int BM = 64 * Groups, StageBytes = (BM + BN) * ROW_BYTES, Threads = (Groups + 1) * 128;
  constexpr int SegmentTiles = Segment / BK, Rows = BM / Split;
  constexpr int Pitch = BN + 8;  // floats from row to row of a sum: the eight rows of a fragment fall on different banks
  static_assert(Segment > 0 && Segment % BK == 0 && BM % Split == 0, "segments to share out, whole rows to each block");

  extern __shared__ __align__(1024) unsigned char smem[];
  float *const sums = reinterpret_cast<float *>(smem + Stages * StageBytes);
  const int segments = ceil_div(k, Segment), per = ceil_div(segments, Split);
  u64 *const full = reinterpret_cast<u64 *>(sums + per * BM * Pitch), *const empty = full + Stages;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), lane = threadIdx.x & 31;
  const int rank = cluster_rank(), tile = blockIdx.x / Split, tiles_m = ceil_div(m, BM);
  const int m0 = tile % tiles_m * BM, n0 = tile / tiles_m * BN;
  const int first_kt = min(rank * per * SegmentTiles, ceil_div(k, BK));
  const int end_kt = min((rank + 1) * per * SegmentTiles, ceil_div(k, BK));

  if (threadIdx.x == 0) {
    if (shared_address(smem) & 1023) __trap();  // the swizzle counts on it
#pragma unroll
    for (int s = 0; s < Stages; ++s) {
      mbarrier_init(full + s, 1);
      mbarrier_init(empty + s, Groups * 4);
    }
    mbarrier_init_fence();
    prefetch_tensor_map(&x_map);
    prefetch_tensor_map(&w_map);
  }
  __syncthreads();

  int stage = 0;
  u32 phase = 0;
  auto advance = [&]() {
    if (++stage == Stages) {
      stage = 0;
      phase ^= 1;
    }
  };
  if (warpgroup == 0) {
    if (threadIdx.x == 0) {
      for (int kt = first_kt; kt < end_kt; ++kt, advance()) {
        mbarrier_wait(empty + stage, phase ^ 1);
        mbarrier_arrive_expect(full + stage, StageBytes);
        tma_load_2d(smem + stage * StageBytes, &x_map, full + stage, kt * BK, m0);
        tma_load_2d(smem + stage * StageBytes + BM * ROW_BYTES, &w_map, full + stage, kt * BK, n0);
      }
    }
  } else {
    const int consumer = warpgroup - 1;
    const u64 x_base = wgmma_descriptor(smem + consumer * 64 * ROW_BYTES);
    const u64 w_base = wgmma_descriptor(smem + BM * ROW_BYTES);
    float acc[BN / 2];
#pragma unroll
    for (int e = 0; e < BN / 2; ++e) acc[e] = 0.f;
    const int g = lane >> 2, t = lane & 3;
    float *at = sums + (consumer * 64 + (threadIdx.x >> 5 & 3) * 16 + g) * Pitch + 2 * t;
    for (int kt = first_kt; kt < end_kt; at += BM * Pitch) {
      const int segment_end = min(kt + SegmentTiles, end_kt);
      int before = -1;
      for (; kt < segment_end; ++kt, advance()) {
        mbarrier_wait(full + stage, phase);
        const u64 x_tile = x_base + (u64)(stage * (StageBytes >> 4)), w_tile = w_base + (u64)(stage * (StageBytes >> 4));
        wgmma_pin(acc);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < BK / 16; ++s) Wgmma<T, BN>::multiply(acc, x_tile + 2 * s, w_tile + 2 * s, s > 0 || before >= 0);
        wgmma_commit();
        wgmma_wait<1>();  // the products of the tile before are done
        if (lane == 0 && before >= 0) mbarrier_arrive(empty + before);
        before = stage;
      }
      wgmma_wait<0>();
      wgmma_pin(acc);
      if (lane == 0) mbarrier_arrive(empty + before);
#pragma unroll
      for (int j = 0; j < BN / 8; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          store_vec(at + h * 8 * Pitch + j * 8, Vec<float, 2>{{acc[j * 4 + h * 2], acc[j * 4 + h * 2 + 1]}});
    }
  }

  __syncwarp();
  cluster_sync();  // all sums are there
  for (int i = threadIdx.x; i < Rows * (BN / 4); i += Threads) {
    const int r = rank * Rows + i / (BN / 4), c = i % (BN / 4) * 4, row = m0 + r, column = n0 + c;
    if (row >= m || column >= n) continue;
    const i64 to = (i64)row * n + column;
    Vec<float, 4> y{{SUM_START, SUM_START, SUM_START, SUM_START}}, old{};
    if (residual) old = load_vec<float, 4>(residual + to);
    for (int s0 = 0; s0 < segments; s0 += 4) {  // four loads under way at a time
      Vec<float, 4> v[4];
#pragma unroll
      for (int q = 0; q < 4; ++q)
        if (s0 + q < segments) v[q] = load_cluster(sums + ((s0 + q) % per * BM + r) * Pitch + c, (s0 + q) / per);
#pragma unroll
      for (int q = 0; q < 4; ++q)
        if (s0 + q < segments)
#pragma unroll
          for (int e = 0; e < 4; ++e) y.v[e] += v[q].v[e];
    }
    Vec<Out, 4> result;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float sum = y.v[e];
      if (bias) sum += bias[column + e];
      if (residual) sum = old.v[e] + sum;
      result.v[e] = from_float<Out>(sum);
    }
    store_vec(out + to, result);
  }
  cluster_sync();  // no block may end while others still read its sums
}
