// Linear layer on Hopper's tensor cores (sm_90a only): y[m, j] = sum_k x[m, k] w[j, k]  (+ bias[j])  (+ residual[m, j])
// or, gated, silu(y[m, j]) * y[m, N / 2 + j], of y rounded to T: the bits of swiglu.cu behind a product.
//
// Layouts    x [M, K], w [N, K] (T = half or bf16) through tensor maps with boxes of 64 columns, 128-byte swizzle;
//            bias [N] float, out [M, N]; with `Through` the map of `out`, which is also the residual, in boxes of 64 (XRows)
//            rows x strip_columns(columns of a warpgroup), swizzled by the box's width. All row-major. N % 8 == 0,
//            K % 8 == 0, bases at multiples of 16 bytes. Gated: out [M, N / 2], N % 16 == 0; the map of w has four axes (K,
//            8 rows, gate or up, blocks of 8 rows), so that a tile's columns are eight of the gate and eight of up in turn.
// Order      The numerics contract, item 1, and the bits of linear.cu: mma steps of 16 k, ascending, inside segments of
//            `Segment` k (0: all of K); every segment starts from zero; segment sums are added in ascending order in float32.
// Bound      flops, 2 M N K; bytes of the weight for small M.
// Launch     Persistent: clusters of ClusterM x ClusterN blocks, at most one block to a multiprocessor, 1-D grid;
//            (GroupsM GroupsN + 1) 128 threads; dynamic shared memory: the ring and, to a buffer, 16 bytes of barriers and 8
//            more for each consumer. With pdl=True and weight_ready the first tiles of w are fetched while the kernel ahead
//            still runs.
// Templates  A block computes BM x BN, BM = 64 MI GroupsM, BN: one producer warp copies K-tiles of 64 into a ring of `Stages`
//            buffers, and GroupsM x GroupsN consumer warpgroups multiply, each 64 MI x BN / GroupsN outputs. Blocks of a cluster
//            share tiles of w (along M) and of x (along N): each copies its part to all. `Lag`: each further warpgroup starts
//            that many K-tiles behind the one before, so that one multiplies while the other adds up segments or stores.
//            `Through`: after the K-tiles of a tile some buffers of the ring carry its residual (THROUGH_RESIDUAL) or nothing
//            (THROUGH_EMPTY), strip by strip; sums are added or put there and leave by the copy engine, so that their way to
//            memory overlaps the next tile. 0: from registers to memory.
//            `XRows`: for few rows, 16 instead of the 64 of one warpgroup: only these are copied and counted as the
//            tile's. The tensor core reads 64 rows all the same, whatever lies behind them in shared memory (the allocation
//            reaches that far), and the results of those others are dropped. `Gated`: see above.
// Measured: 91 % of 790 TFLOP/s (8B down, 2,048 rows); 0.98 x cuBLAS over all layers of 0.6B and 8B; H200, docs/performance.md
#include "common/fragment_rows.cuh"
#include "ptx/cluster.cuh"
#include "ptx/pdl.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

constexpr int BK = 64, ROW_BYTES = BK * 2;

#define THROUGH_RESIDUAL 1
#define THROUGH_EMPTY 2

// -0 is the identity of IEEE addition: -0 + x == x for every x, so the first segment sum is taken as it is.
#define SUM_START -0.f

template <class T, class Out, int GroupsM, int GroupsN, int MI, int BN, int Stages, int ClusterM, int ClusterN, int Lag,
          int XRows, int Through, int Gated, int Segment>
__global__ void __launch_bounds__((GroupsM *GroupsN + 1) * 128, 1)
    linear_sm90(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
                const __grid_constant__ TensorMap out_map, const float *bias, Out *out, int m, int n, int k, int group,
                int weight_ready) {
  constexpr int Groups = GroupsM * GroupsN, Cluster = ClusterM * ClusterN;
  constexpr int BM = XRows ? XRows : 64 * MI * GroupsM, WN = BN / GroupsN;  // rows of a block, columns of a warpgroup
  // rows that this block copies for its cluster; where parts of x would be smaller than a swizzle atom, blocks take turns
  constexpr bool Turns = BM % (8 * ClusterN) != 0;
  constexpr int XPart = Turns ? BM : BM / ClusterN, WPart = BN / ClusterM;
  constexpr int StageBytes = (BM + BN) * ROW_BYTES;
  constexpr int SegmentTiles = Segment / BK;
  constexpr int PerOut = Gated ? 2 : 1, WO = WN / PerOut;  // columns of w to one of the result; of the result, a warpgroup's
  // results in the ring: boxes of 64 rows x Strip columns, all rows of a strip together, Held strips to a buffer
  constexpr int BoxRows = XRows ? XRows : 64, Boxes = BM / BoxRows;
  constexpr int Strip = strip_columns<Out>(WO), BoxBytes = BoxRows * Strip * (int)sizeof(Out), StripBytes = Boxes * BoxBytes;
  constexpr int Strips = BN / PerOut / Strip, Held = StageBytes / StripBytes, Extra = Through ? ceil_div(Strips, Held) : 0;
  static_assert(XPart % 8 == 0 && WPart % 8 == 0 && XPart <= 256 && WPart <= 256, "parts are whole swizzle atoms");
  static_assert(Segment % BK == 0, "a segment ends with a tile");
  static_assert(XRows == 0 || (XRows % 16 == 0 && XRows < 64 && MI * GroupsM == 1), "few rows: one warpgroup along M");
  static_assert(Lag * (Groups - 1) < Stages, "the ring holds the lag");
  static_assert(!Through || (WO % Strip == 0 && Held > 0 && Extra <= Stages), "the results of a tile in the ring");
  static_assert(!Gated || (WPart % 16 == 0 && WN % 16 == 0 && sizeof(Out) == 2), "pairs of eight columns, halves");
  static_assert(Through != THROUGH_RESIDUAL || sizeof(Out) == 4, "residuals are float");

  extern __shared__ __align__(1024) unsigned char smem[];
  u64 *const full = reinterpret_cast<u64 *>(smem + Stages * StageBytes), *const empty = full + Stages;
  u64 *const done = empty + Stages;  // of consumer c and buffer s: done[c * Stages + s], its results are in the buffer
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), lane = threadIdx.x & 31;
  const int rank = Cluster > 1 ? (int)cluster_rank() : 0;
  const int rank_m = rank % ClusterM, rank_n = rank / ClusterM;

  const int tiles_m = ceil_div(ceil_div(m, BM), ClusterM), tiles_n = ceil_div(ceil_div(n, BN), ClusterN);
  const int tiles = tiles_m * tiles_n, k_tiles = ceil_div(k, BK);
  const int first_tile = blockIdx.x / Cluster, tile_step = gridDim.x / Cluster;
  // first row and column of this block's part of a tile
  auto tile_at = [&](int tile, int &row, int &column) {
    int tile_m, tile_n;
    grouped_tile(tile, tiles_m, tiles_n, group, tile_m, tile_n);
    row = (tile_m * ClusterM + rank_m) * BM;
    column = (tile_n * ClusterN + rank_n) * BN;
  };
  int stage = 0;
  u32 phase = 0, done_phase = 0;  // of the ring; of `done`, a bit to a buffer
  auto advance = [&]() {
    if (++stage == Stages) {
      stage = 0;
      phase ^= 1;
    }
  };

  grid_dependency_launch();
  if (threadIdx.x == 0) {
    if (shared_address(smem) & 1023) __trap();  // the swizzle counts on it
#pragma unroll
    for (int s = 0; s < Stages; ++s) {
      mbarrier_init(full + s, 1);
      mbarrier_init(empty + s, Groups * 4 * Cluster);  // every consumer warp of the cluster
      if constexpr (Through)
        for (int c = 0; c < Groups; ++c) mbarrier_init(done + c * Stages + s, 4);
    }
    mbarrier_init_fence();
    prefetch_tensor_map(&x_map);
    prefetch_tensor_map(&w_map);
    if constexpr (Through) prefetch_tensor_map(&out_map);
  }
  if constexpr (Cluster > 1)
    cluster_sync();
  else
    __syncthreads();

  auto release = [&](int stage) {  // a warp has read the buffer: all who copy into it may go on
    if constexpr (Cluster > 1) {
      if (lane < Cluster) mbarrier_arrive_at(empty + stage, lane);
    } else {
      if (lane == 0) mbarrier_arrive(empty + stage);
    }
  };

  if (warpgroup == 0) {  // producer
    if constexpr (Groups == 2) fewer_registers<40>();
    if constexpr (Groups == 3) fewer_registers<32>();
    if (threadIdx.x == 0) {
      auto load_x = [&](int kt, int row) {
        const int part = Turns ? 0 : rank_n * XPart;
        unsigned char *const to = smem + stage * StageBytes + part * ROW_BYTES;
        if constexpr (ClusterN > 1) {
          constexpr int Row = ((1 << Cluster) - 1) / ((1 << ClusterM) - 1);  // bits 0, ClusterM, 2 ClusterM ..
          if (!Turns || kt % ClusterN == rank_n)
            tma_load_2d_multicast(to, &x_map, full + stage, kt * BK, row + part, (unsigned short)(Row << rank_m));
        } else {
          tma_load_2d(to, &x_map, full + stage, kt * BK, row);
        }
      };
      auto load_w = [&](int kt, int column) {
        unsigned char *const to = smem + stage * StageBytes + (BM + rank_m * WPart) * ROW_BYTES;
        const int at = column + rank_m * WPart;
        constexpr unsigned Column = (1 << ClusterM) - 1;  // blocks that share it
        if constexpr (Gated && ClusterM > 1)
          tma_load_4d_multicast(to, &w_map, full + stage, kt * BK, 0, 0, at / 16, (unsigned short)(Column << rank_n * ClusterM));
        else if constexpr (Gated)
          tma_load_4d(to, &w_map, full + stage, kt * BK, 0, 0, at / 16);
        else if constexpr (ClusterM > 1)
          tma_load_2d_multicast(to, &w_map, full + stage, kt * BK, at, (unsigned short)(Column << rank_n * ClusterM));
        else
          tma_load_2d(to, &w_map, full + stage, kt * BK, at);
      };
      int row, column, ahead = 0;  // K-tiles whose w is on its way already
      if (weight_ready && first_tile < tiles) {
        tile_at(first_tile, row, column);
        for (; ahead < min(Stages, k_tiles); ++ahead, advance()) {
          mbarrier_arrive_expect(full + stage, StageBytes);
          load_w(ahead, column);
        }
        stage = 0;
        phase = 0;
      }
      grid_dependency_wait();
      for (int tile = first_tile; tile < tiles; tile += tile_step) {
        tile_at(tile, row, column);
        for (int kt = 0; kt < k_tiles; ++kt, advance()) {
          if (ahead > 0) {
            --ahead;
          } else {
            mbarrier_wait(empty + stage, phase ^ 1);
            mbarrier_arrive_expect(full + stage, StageBytes);
            load_w(kt, column);
          }
          load_x(kt, row);
        }
#pragma unroll 1
        for (int strip = 0; strip < Extra * Held; strip += Held, advance()) {
          const int count = min(Held, Strips - strip);
          mbarrier_wait(empty + stage, phase ^ 1);
          if constexpr (Through == THROUGH_EMPTY) {
            mbarrier_arrive(full + stage);
            continue;
          }
          mbarrier_arrive_expect(full + stage, count * StripBytes);
          for (int box = 0; box < count * Boxes; ++box)
            tma_load_2d(smem + stage * StageBytes + box * BoxBytes, &out_map, full + stage,
                        column + (strip + box / Boxes) * Strip, row + box % Boxes * BoxRows);
        }
      }
    }
    if constexpr (Through) {
      // the other warps, one to a consumer warpgroup, send results from the ring to memory and release the buffers
      const int consumer = (threadIdx.x >> 5) - 1, group_m = consumer % GroupsM, group_n = consumer / GroupsM;
      if (consumer >= 0 && consumer < Groups) {
        for (int tile = first_tile; tile < tiles; tile += tile_step) {
          int row, column;
          tile_at(tile, row, column);
          row += group_m * MI * 64;
          column = column / PerOut + group_n * WO;
          stage = (stage + k_tiles) % Stages;  // the K-tiles are of no interest here
#pragma unroll 1
          for (int first = 0; first < Extra * Held; first += Held, advance()) {
            mbarrier_wait(done + consumer * Stages + stage, done_phase >> stage & 1);
            done_phase ^= 1u << stage;
            unsigned char *const boxes = smem + stage * StageBytes + group_m * MI * BoxBytes;
            if (lane == 0) {
              constexpr int Mine = WO / Strip;  // strips of a warpgroup
              const int end = min(first + Held, (group_n + 1) * Mine);
              for (int s = max(first, group_n * Mine); s < end; ++s)
                for (int i = 0; i < MI; ++i)
                  tma_store_2d(&out_map, boxes + (s - first) * StripBytes + i * BoxBytes,
                               column + (s - group_n * Mine) * Strip, row + i * 64);
              bulk_commit();
              bulk_wait_read<0>();
            }
            __syncwarp();
#pragma unroll
            for (int w = 0; w < 4; ++w) release(stage);  // for all warps of the warpgroup
          }
        }
      }
    }
  } else {  // consumers
    if constexpr (Groups == 2) more_registers<232>();
    if constexpr (Groups == 3) more_registers<160>();
    grid_dependency_wait();
    const int consumer = warpgroup - 1, group_m = consumer % GroupsM, group_n = consumer / GroupsM;
    const u64 x_base = wgmma_descriptor(smem + group_m * MI * 64 * ROW_BYTES);
    const u64 w_base = wgmma_descriptor(smem + (BM + group_n * WN) * ROW_BYTES);
    if constexpr (Lag > 0) {
      // the tile `Lag` further is here: the warpgroup before this one has had the tensor cores for those before it
      const int behind = min(consumer * Lag, k_tiles - 1);
      if (first_tile < tiles) mbarrier_wait(full + behind, 0);
    }
    for (int tile = first_tile; tile < tiles; tile += tile_step) {
      float total[MI][WN / 2], acc[MI][WN / 2];  // the first segment's sum is a total as it is
#pragma unroll
      for (int i = 0; i < MI; ++i)
#pragma unroll
        for (int e = 0; e < WN / 2; ++e) total[i][e] = acc[i][e] = 0.f;  // not read: it ends the life of older values
      int left = k_tiles;
      auto segment = [&](float(&sums)[MI][WN / 2]) {
        const int count = Segment ? min(SegmentTiles, left) : left;
        int before = 0;
        left -= count;
        for (int kt = 0; kt < count; ++kt, advance()) {
          mbarrier_wait(full + stage, phase);
          const u64 x_tile = x_base + (u64)(stage * (StageBytes >> 4)), w_tile = w_base + (u64)(stage * (StageBytes >> 4));
#pragma unroll
          for (int i = 0; i < MI; ++i) wgmma_pin(sums[i]);
          wgmma_fence();
#pragma unroll
          for (int s = 0; s < BK / 16; ++s)
#pragma unroll
            for (int i = 0; i < MI; ++i)
              Wgmma<T, WN>::multiply(sums[i], x_tile + i * (64 * ROW_BYTES >> 4) + 2 * s, w_tile + 2 * s, s > 0 ? 1 : kt);
          wgmma_commit();
          wgmma_wait<1>();  // the products of the tile before are done
          if (kt > 0) release(before);
          before = stage;
        }
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < MI; ++i) wgmma_pin(sums[i]);
        release(before);
      };
      segment(total);
      if constexpr (Segment != 0)
        while (left > 0) {
          segment(acc);
#pragma unroll
          for (int i = 0; i < MI; ++i)
#pragma unroll
            for (int e = 0; e < WN / 2; ++e) total[i][e] += acc[i][e];
        }

      int row = 0, column = 0;
      if (!Through || bias) {
        tile_at(tile, row, column);
        row += group_m * MI * 64;
        column += group_n * WN;
      }
      if (bias)
#pragma unroll
        for (int i = 0; i < MI; ++i) add_bias<WN>(total[i], bias, column, n);
      auto leave = [&](float(&y)[MI][WO / 2]) {
        if constexpr (Through) {
#pragma unroll
          for (int first = 0; first < Extra * Held; first += Held, advance()) {
            mbarrier_wait(full + stage, phase);
            unsigned char *const boxes = smem + stage * StageBytes + group_m * MI * BoxBytes;
#pragma unroll
            for (int s = first; s < min(first + Held, Strips); ++s)
              if ((GroupsN == 1 || s / (WO / Strip) == group_n) && (!XRows || (threadIdx.x & 127) < XRows * 2))
#pragma unroll
                for (int i = 0; i < MI; ++i)
                  pass_strip<WO, Strip, Through == THROUGH_RESIDUAL, Out>(y[i], s % (WO / Strip),
                                                                          boxes + (s - first) * StripBytes + i * BoxBytes);
            async_proxy_fence();
            __syncwarp();
            if (lane == 0) mbarrier_arrive(done + consumer * Stages + stage);
          }
        } else {
          const int end = XRows ? min(m, row + XRows) : m;
#pragma unroll
          for (int i = 0; i < MI; ++i) store_rows<WO>(y[i], out, row + i * 64, column / PerOut, end, n / PerOut);
        }
      };
      if constexpr (Gated) {
        float y[MI][WO / 2];
#pragma unroll
        for (int i = 0; i < MI; ++i) gate_columns<T, WN>(total[i], y[i]);
        leave(y);
      } else {
        leave(total);
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
// per x 64 Groups x (BN + 8) floats. `XRows` as above.
template <class T, class Out, int Groups, int XRows, int BN, int Stages, int Split, int Segment>
__global__ void __launch_bounds__((Groups + 1) * 128, 1)
    linear_sm90_split(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const float *bias,
                      const float *residual, Out *out, int m, int n, int k, int weight_ready) {
  constexpr int BM = XRows ? XRows : 64 * Groups, StageBytes = (BM + BN) * ROW_BYTES, Threads = (Groups + 1) * 128;
  constexpr int SegmentTiles = Segment / BK, Rows = BM / Split;
  constexpr int Pitch = BN + 8;  // floats from row to row of a sum: the eight rows of a fragment fall on different banks
  static_assert(Segment > 0 && Segment % BK == 0 && BM % Split == 0, "segments to share out, whole rows to each block");
  static_assert(XRows == 0 || (XRows % 16 == 0 && XRows < 64 && Groups == 1), "few rows: one warpgroup");

  extern __shared__ __align__(1024) unsigned char smem[];
  float *const sums = reinterpret_cast<float *>(smem + Stages * StageBytes);
  const int segments = ceil_div(k, Segment), per = ceil_div(segments, Split);
  u64 *const full = reinterpret_cast<u64 *>(sums + per * BM * Pitch), *const empty = full + Stages;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), lane = threadIdx.x & 31;
  const int rank = cluster_rank(), tile = blockIdx.x / Split, tiles_m = ceil_div(m, BM);
  const int m0 = tile % tiles_m * BM, n0 = tile / tiles_m * BN;
  const int first_kt = min(rank * per * SegmentTiles, ceil_div(k, BK));
  const int end_kt = min((rank + 1) * per * SegmentTiles, ceil_div(k, BK));

  grid_dependency_launch();
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
      auto load_w = [&](int kt) {
        mbarrier_arrive_expect(full + stage, StageBytes);
        tma_load_2d(smem + stage * StageBytes + BM * ROW_BYTES, &w_map, full + stage, kt * BK, n0);
      };
      int ahead = 0;  // K-tiles whose w is on its way already
      if (weight_ready) {
        for (; ahead < min(Stages, end_kt - first_kt); ++ahead, advance()) load_w(first_kt + ahead);
        stage = 0;
        phase = 0;
      }
      grid_dependency_wait();
      for (int kt = first_kt; kt < end_kt; ++kt, advance()) {
        if (ahead > 0) {
          --ahead;
        } else {
          mbarrier_wait(empty + stage, phase ^ 1);
          load_w(kt);
        }
        tma_load_2d(smem + stage * StageBytes, &x_map, full + stage, kt * BK, m0);
      }
    }
    __syncwarp();
    grid_dependency_wait();
  } else {
    grid_dependency_wait();
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
      if (XRows && (threadIdx.x & 127) >= XRows * 2) continue;  // rows that are none
#pragma unroll
      for (int j = 0; j < BN / 8; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          store_vec(at + h * 8 * Pitch + j * 8, Vec<float, 2>{{acc[j * 4 + h * 2], acc[j * 4 + h * 2 + 1]}});
    }
  }

  constexpr int Items = ceil_div(Rows * (BN / 4), Threads);  // of four columns, for each thread
  auto place = [&](int item, int &r, int &c) {
    const int i = item * Threads + threadIdx.x;
    r = rank * Rows + i / (BN / 4);
    c = i % (BN / 4) * 4;
    return i < Rows * (BN / 4) && m0 + r < m && n0 + c < n;
  };
  Vec<float, 4> old[Items];
  if (residual) {
#pragma unroll
    for (int item = 0; item < Items; ++item) {
      int r, c;
      if (place(item, r, c)) old[item] = load_vec<float, 4>(residual + (i64)(m0 + r) * n + n0 + c);
    }
  }
  __syncwarp();
  cluster_sync();  // all sums are there
#pragma unroll
  for (int item = 0; item < Items; ++item) {
    int r, c;
    if (!place(item, r, c)) continue;
    const int column = n0 + c;
    Vec<float, 4> y{{SUM_START, SUM_START, SUM_START, SUM_START}};
    constexpr int Ahead = 12;  // loads under way at a time
    for (int s0 = 0; s0 < segments; s0 += Ahead) {
      Vec<float, 4> v[Ahead];
#pragma unroll
      for (int q = 0; q < Ahead; ++q)
        if (s0 + q < segments) v[q] = load_cluster(sums + ((s0 + q) % per * BM + r) * Pitch + c, (s0 + q) / per);
#pragma unroll
      for (int q = 0; q < Ahead; ++q)
        if (s0 + q < segments)
#pragma unroll
          for (int e = 0; e < 4; ++e) y.v[e] += v[q].v[e];
    }
    Vec<Out, 4> result;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float sum = y.v[e];
      if (bias) sum += bias[column + e];
      if (residual) sum = old[item].v[e] + sum;
      result.v[e] = from_float<Out>(sum);
    }
    store_vec(out + (i64)(m0 + r) * n + column, result);
  }
  cluster_sync();  // no block may end while others still read its sums
}
