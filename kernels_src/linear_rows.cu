// Linear layer for few rows (M <= 16 a block): y[m, j] = sum_k x[m, k] w[j, k]  (+ bias[j])  (+ residual[m, j])
//
// Layouts    x [M, K], w [N, K] (T = half or bf16; K % 8 == 0, 16-byte aligned), bias [N] float, residual and out [M, N].
// Order      The numerics contract, item 1, as in linear.cu: the bits are the same.
// Bound      bytes: the weight, N K 2, is read once and as one stream that never stops. Every warp owns a ring of `Stages`
//            chunks (8 rows of w x 128 k, 2 KB) in shared memory and a static list of units: a tile of 8 rows x one segment of
//            K. Its copies run `Stages` chunks ahead, across units and tiles. The rows of x wait in shared memory.
// Launch     grid (blocks, ceil(M / block_rows)); any number of blocks: tiles are dealt out evenly; up to 12 warps. With
//            pdl=True and weight_ready the ring fills while the kernel ahead still runs. Dynamic shared memory, in order:
//            256 bytes of zeros, warps x slots chunks of w, x_slots chunks of x (block_rows x 128), the partial sums.
// Arguments  slots: chunks of a ring, Stages or all that a warp ever reads if that is less.
//            x_slots: ceil(K / 128), all of x; without segments also Stages + 2: x then passes through a ring as well.
//            round_tiles: with segments, tiles whose partial sums (block_rows x 8 floats a unit) are kept at a time; two
//            such buffers if a block has more tiles than that.
// Templates  T, Out (T or float), Stages, Segment (the contract's; 0: all of K is one chain).
// Below      linear_rows_once, for weights of which every block's part fits in shared memory as a whole.
// Measured: 99 % of a copy (0.6B lm_head, 1 row), 104 % in a graph; H200, docs/performance.md
#include "common/linear_tile.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/pdl.cuh"

#define CHUNK_K 128
#define CHUNK_ELEMENTS (8 * CHUNK_K)
#define X_PANEL 2  // chunks of x that are copied at once where x passes through a ring

// What one warp reads of w, in order.
template <class T, int Segment> struct WeightStream {
  const T *w;
  int n, k;
  int first, units, segments, unit_chunks, warps;  // of this block
  T *ring;
  int slots;
  int unit, chunks_left, slot;  // fetched next
  const T *source;              // this lane's first 16 bytes of the next chunk; it copies rows r, r + 2, r + 4, r + 6
  int k_left, rows_left;

  __device__ __forceinline__ void fetch() {
    const int lane = threadIdx.x & 31, row = lane >> 4, piece = lane & 15;
    if (chunks_left == 0 && unit < units) {
      const int tile = first + (Segment ? unit / segments : unit), k0 = Segment ? unit % segments * Segment : 0;
      source = w + (i64)(tile * 8 + row) * k + k0 + piece * 8;
      k_left = k - k0 - piece * 8;
      rows_left = n - tile * 8 - row;
      chunks_left = unit_chunks;
      unit += warps;
    }
    if (chunks_left > 0) {
      T *const chunk = ring + slot * CHUNK_ELEMENTS;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        cp_async_16(chunk + tile_offset<CHUNK_K>(row + 2 * i, piece), source + (i64)(2 * i) * k,
                    k_left > 0 && 2 * i < rows_left);
      source += CHUNK_K;
      k_left -= CHUNK_K;
      --chunks_left;
    }
    cp_async_commit();  // an empty group keeps the count
    if (++slot == slots) slot = 0;
  }
};

template <class T, class Out, int Stages, int Segment>
__global__ void __launch_bounds__(384, 2)
    linear_rows(const T *x, const T *w, const float *bias, const float *residual, Out *out, int m, int n, int k,
                int block_rows, int slots, int x_slots, int round_tiles, int weight_ready) {
  static_assert(Segment % CHUNK_K == 0 && Stages % X_PANEL == 0, "sizes");
  const int threads = blockDim.x, warps = threads >> 5, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int g = lane >> 2, t = lane & 3;
  const int m0 = blockIdx.y * block_rows, rows = min(block_rows, m - m0);
  const int chunks = ceil_div(k, CHUNK_K), segments = Segment ? ceil_div(k, Segment ? Segment : 1) : 1;
  const int tiles = ceil_div(n, 8);
  const int first = (int)((i64)tiles * blockIdx.x / gridDim.x), last = (int)((i64)tiles * (blockIdx.x + 1) / gridDim.x);

  extern __shared__ __align__(128) unsigned char smem[];
  T *const zeros = reinterpret_cast<T *>(smem);  // a row of x that does not exist
  T *const rings = zeros + CHUNK_K;
  T *const x_chunks = rings + warps * slots * CHUNK_ELEMENTS;
  const int x_chunk_elements = block_rows * CHUNK_K;

  WeightStream<T, Segment> stream{
      w, n, k, first, (last - first) * segments, segments, Segment ? Segment / CHUNK_K : chunks, warps,
      rings + warp * slots * CHUNK_ELEMENTS, slots, warp, 0, 0, w, 0, 0};

  grid_dependency_launch();
  if (!weight_ready) grid_dependency_wait();
#pragma unroll 1
  for (int s = 0; s < Stages; ++s) stream.fetch();
  if (weight_ready) grid_dependency_wait();

  // The first chunks of x (all of them, or as many as the stream is ahead). Not by cp.async: that would have to wait for
  // the whole ring.
  {
    for (int i = threadIdx.x; i < CHUNK_K; i += threads) zeros[i] = from_float<T>(0.f);
    const int row_pieces = min(chunks, x_slots < chunks ? Stages : x_slots) * (CHUNK_K / 8), pieces = rows * row_pieces;
    constexpr int Batch = 4;
    for (int base = threadIdx.x; base < pieces; base += Batch * threads) {
      Vec<T, 8> v[Batch];
#pragma unroll
      for (int i = 0; i < Batch; ++i) {
        const int at = base + i * threads, row = at / row_pieces, piece = at % row_pieces;
        v[i] = Vec<T, 8>{};
        if (at < pieces && piece * 8 < k) v[i] = load_vec<T, 8>(x + (i64)(m0 + row) * k + piece * 8);
      }
#pragma unroll
      for (int i = 0; i < Batch; ++i) {
        const int at = base + i * threads, row = at / row_pieces, piece = at % row_pieces;
        if (at < pieces)
          store_vec(x_chunks + (piece >> 4) * x_chunk_elements + tile_offset<CHUNK_K>(row, piece & 15), v[i]);
      }
    }
  }

  // fragment addresses of this lane: x is the mma's A operand (16 rows, absent ones zero), w its B operand
  const int x_row = lane & 15, x_half = lane >> 4, w_row = lane & 7, w_quarter = lane >> 3;
  const bool has_x = x_row < rows;
  int slot = 0;
  // The oldest chunk of the ring times chunk `x_slot` of x, `left` k of them; the ring moves on.
  auto multiply = [&](float(&acc)[4], int x_slot, int left) {
    const T *const wc = stream.ring + slot * CHUNK_ELEMENTS;
    const T *const xc = has_x ? x_chunks + x_slot * x_chunk_elements + x_row * CHUNK_K : zeros;
    if (++slot == slots) slot = 0;
    u32 b[4][4], a[4][4];  // b: two k-steps each; a: four of the eight k-steps
    auto load_x = [&](int step) {
      ldmatrix_x4(a[step & 3], xc + (((2 * step + x_half) ^ (x_row & 7)) << 3));
    };
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      ldmatrix_x4(b[s], wc + tile_offset<CHUNK_K>(w_row, 4 * s + w_quarter));
      load_x(s);
    }
    __syncwarp();
    stream.fetch();  // into the slot just read
    if (left >= CHUNK_K) {
#pragma unroll
      for (int s = 0; s < 8; ++s) {
        mma_m16n8k16<T>(acc, a[s & 3], b[s / 2][s % 2 * 2], b[s / 2][s % 2 * 2 + 1]);
        if (s < 4) load_x(s + 4);
      }
    } else {  // the end of K: as many k-steps as there are, the last one padded with zeros
#pragma unroll
      for (int s = 0; s < 8; ++s) {
        if (s * 16 < left) mma_m16n8k16<T>(acc, a[s & 3], b[s / 2][s % 2 * 2], b[s / 2][s % 2 * 2 + 1]);
        if (s < 4) load_x(s + 4);
      }
    }
  };
  const LinearOutput<Out> output{bias, residual, out, m, n};

  if constexpr (Segment == 0) {
    // Warp by warp: a tile, all of K, straight from the accumulators to memory.
    const bool x_streams = x_slots < chunks;
    const int rounds = ceil_div(last - first, warps), positions = rounds * chunks;
    int position = 0, x_slot = 0;
    if (!x_streams) __syncthreads();
    for (int round = 0; round < rounds; ++round) {
      const int tile = first + round * warps + warp;
      const bool active = tile < last;
      if (!active && !x_streams) break;
      float acc[4] = {0.f, 0.f, 0.f, 0.f};
      float loaded[4];  // residuals of rows g and g + 8, columns 2t and 2t + 1
      const auto row = [&](int e) { return g + (e >> 1) * 8; };
      const int column = tile * 8 + 2 * t;
#pragma unroll
      for (int e = 0; e < 4; ++e)
        loaded[e] = output.load_residual(m0 + row(e), column + (e & 1), active && row(e) < rows);
      for (int c = 0; c < chunks; ++c, ++position) {
        cp_async_wait<Stages - 1>();
        if (x_streams && position % X_PANEL == 0) {
          // all warps are done with the panel before; what a thread copied of this one came with its chunk of w
          __syncthreads();
          for (int p = 0; p < X_PANEL; ++p) {
            const int ahead = position + Stages + p;
            if (ahead >= positions) break;
            T *const target = x_chunks + ahead % x_slots * x_chunk_elements;
            const int column = ahead % chunks * CHUNK_K;
            for (int i = threadIdx.x; i < rows * 16; i += threads)
              cp_async_16(target + tile_offset<CHUNK_K>(i >> 4, i & 15),
                          x + (i64)(m0 + (i >> 4)) * k + column + (i & 15) * 8, column + (i & 15) * 8 < k);
          }
        } else {
          __syncwarp();
        }
        if (active)
          multiply(acc, x_slot, k - c * CHUNK_K);
        else
          stream.fetch();
        if (++x_slot == x_slots) x_slot = 0;
      }
#pragma unroll
      for (int e = 0; e < 4; ++e)
        output.store(acc[e], m0 + row(e), column + (e & 1), active && row(e) < rows, loaded[e]);
    }
    cp_async_wait<0>();
  } else {
    // Unit by unit; the sums of a tile's segments meet in shared memory and are added in ascending order.
    float *const partial = reinterpret_cast<float *>(x_chunks + x_slots * x_chunk_elements);
    const int unit_floats = block_rows * 8, round_units = round_tiles * segments;
    __syncthreads();
    int unit = warp;
    for (int round = 0; round * round_tiles < last - first; ++round) {
      const int tile0 = round * round_tiles, columns = min(round_tiles, last - first - tile0) * 8;
      const int units_end = min((round + 1) * round_units, stream.units);
      float *const sums = partial + (round & 1) * round_units * unit_floats;
      // output e of the round: row e / columns, column e % columns; the residual of this thread's first one comes early
      auto load_residual = [&](int e) {
        return output.load_residual(m0 + e / columns, (first + tile0) * 8 + e % columns, e < rows * columns);
      };
      float loaded = load_residual(threadIdx.x);
      for (; unit < units_end; unit += warps) {
        const int segment = unit % segments;
        float acc[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
        for (int c = 0; c < Segment / CHUNK_K; ++c) {
          cp_async_wait<Stages - 1>();
          __syncwarp();
          const int chunk = segment * (Segment / CHUNK_K) + c;
          multiply(acc, min(chunk, chunks - 1), k - chunk * CHUNK_K);
        }
        float *const mine = sums + (unit - round * round_units) * unit_floats;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = g + (e >> 1) * 8;
          if (row < rows) mine[row * 8 + 2 * t + (e & 1)] = acc[e];
        }
      }
      __syncthreads();  // the other buffer of sums is free once all have come here
      for (int e = threadIdx.x; e < rows * columns; e += threads) {
        if (e != threadIdx.x) loaded = load_residual(e);
        const int row = e / columns, column = e % columns;
        const float *const of_tile = sums + (column >> 3) * segments * unit_floats + row * 8 + (column & 7);
        float total = SUM_START;
#pragma unroll 4
        for (int s = 0; s < segments; ++s) total += of_tile[s * unit_floats];
        output.store(total, m0 + row, (first + tile0) * 8 + column, true, loaded);
      }
    }
    cp_async_wait<0>();
  }
}

// ------------------------------------------------------------------------------------------------ all of the weight at once

// The products of one warp: `Tiles` tiles of 8 rows of w times up to 8 Halves rows of x, `left` k of one segment. x_place: of
// its four or two chunks of each 64 or 32 bytes of a row, for every such place in the 128 bytes after which the swizzle
// repeats; w_place: of four chunks, for both halves of 128 bytes.
template <class T, int Tiles, int Halves, int Segment>
__device__ __forceinline__ void once_products(float (&acc)[Tiles][4], const SharedPlace (&x_place)[4],
                                              const SharedPlace (&w_place)[2], int left) {
  constexpr int Steps = Segment / 16, TileBytes = 8 * Segment * (int)sizeof(T);
  constexpr int Loads = Halves == 1 ? Steps / 2 : Steps, Places = Halves == 1 ? 2 : 4;  // of x: two k-steps, 8 rows; or one
  u32 a[4][4], b[Tiles][4];  // x, four loads ahead; w, two k-steps
  auto load_x = [&](int i) { ldmatrix_x4_at<false>(a[i & 3], x_place[i % Places], i / Places * 128); };
#pragma unroll
  for (int i = 0; i < 4; ++i) load_x(i);
#pragma unroll
  for (int s = 0; s < Steps; ++s) {
    if (s % 2 == 0)
#pragma unroll
      for (int j = 0; j < Tiles; ++j) ldmatrix_x4_at<false>(b[j], w_place[s / 2 % 2], j * TileBytes + s / 4 * 128);
    const int i = Halves == 1 ? s / 2 : s, odd = s % 2 * 2;
    const u32(&from)[4] = a[i & 3];
    const u32 fragment[4] = {from[Halves == 1 ? odd : 0], Halves == 1 ? 0 : from[1], from[Halves == 1 ? odd + 1 : 2],
                             Halves == 1 ? 0 : from[3]};
    if (s * 16 < left)
#pragma unroll
      for (int j = 0; j < Tiles; ++j) mma_m16n8k16<T>(acc[j], fragment, b[j][odd], b[j][odd + 1]);
    if ((Halves == 2 || odd) && i + 4 < Loads) load_x(i + 4);
  }
}

// The same formula, layouts and order of sums, for a weight with segments of which a block's part fits in shared memory: every
// copy is on its way before the wait for the kernel ahead, and the chain from there on is short. A warp has one segment of K
// and `Tiles` (1 to 4) tiles of 8 rows of w; what it multiplies it has copied itself, so that a block meets once, before the
// sums. Bound: bytes of the weight, and 1.4 us from the wait to the end of the launch.
// Grid (blocks, 1); warps: segments x groups, at most 12, groups x Tiles tiles to a block; m <= 16. Dynamic shared memory: Tiles
// x 8 rows of w and m rows of x for each warp (256 k), and the sums: segments x tiles of a block x m x 8 floats. A grid of as
// many blocks as there are multiprocessors, some without work, keeps one block of every launch on each.
// early: the next kernel may start at once; else when x has been asked for, so that its weight does not come before x.
// weight_ready: w is fetched before the wait.
// Measured: 1 row of 0.6B in a graph, us: qkv 3.1 (bytes at 4.2 TB/s: 2.0), o 2.1 (1.0), gate_up 3.9 (3.0), down 2.5 (1.5); H200
template <class T, class Out, int Tiles, int Segment>
__global__ void __launch_bounds__(384, 1)
    linear_rows_once(const T *x, const T *w, const float *bias, const float *residual, Out *out, int m, int n, int k,
                     int early, int weight_ready) {
  static_assert(Segment == 256, "a row of a segment is 16 bytes for each lane of a warp");
  const int warps = blockDim.x >> 5, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int segments = ceil_div(k, Segment), segment = warp % segments, group = warp / segments;
  const int block_tiles = warps / segments * Tiles, first = blockIdx.x * block_tiles;

  extern __shared__ __align__(128) unsigned char smem[];
  T *const weights = reinterpret_cast<T *>(smem) + warp * (Tiles * 8 * Segment);
  T *const all_x = reinterpret_cast<T *>(smem) + warps * (Tiles * 8 * Segment), *const xs = all_x + warp * m * Segment;
  float *const sums = reinterpret_cast<float *>(all_x + warps * m * Segment);  // [segment][tile][row][8]

  if (early) grid_dependency_launch();
  if (!weight_ready) grid_dependency_wait();
  const int column = segment * Segment + lane * 8, left = min(Segment, k - segment * Segment);
  {
    const int row = (first + group * Tiles) * 8;
    const T *source = w + (i64)row * k + column;
#pragma unroll
    for (int i = 0; i < Tiles * 8; ++i, source += k)
      cp_async_16(weights + tile_offset<Segment>(i, lane), source, column < k && row + i < n);
    cp_async_commit();
  }
  // Rows of x that do not exist are copies of the last one; their results are dropped.
  const int x_rows = m <= 8 ? 8 : 16, x_row = min(lane & (x_rows - 1), m - 1);
  SharedPlace x_place[4], w_place[2];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    x_place[i] = shared_place(xs + tile_offset<Segment>(x_row, (i * 32 + lane) / x_rows & 7));
#pragma unroll
  for (int i = 0; i < 2; ++i) w_place[i] = shared_place(weights + tile_offset<Segment>(lane & 7, i * 4 + lane / 8));
  const T *x_at = x + column;
  // outputs of this thread: column `lane & 7` of a tile, one of four rows; of the warp's first ones the residual comes early
  const LinearOutput<Out> output{bias, residual, out, m, n};
  const int items = block_tiles * ceil_div(m, 4);
  int tile = warp % block_tiles, row = warp / block_tiles * 4 + lane / 8;

  if (weight_ready) grid_dependency_wait();
#pragma unroll
  for (int i = 0; i < 16; ++i)
    if (i < m) cp_async_16(xs + tile_offset<Segment>(i, lane), x_at + (i64)i * k, column < k);
  cp_async_commit();
  if (!early) grid_dependency_launch();
  float old = output.load_residual(row, (first + tile) * 8 + lane % 8, row < m);
  cp_async_wait<0>();
  __syncwarp();

  float acc[Tiles][4];
#pragma unroll
  for (int j = 0; j < Tiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[j][e] = 0.f;
  if (m <= 8)
    once_products<T, Tiles, 1, Segment>(acc, x_place, w_place, left);
  else
    once_products<T, Tiles, 2, Segment>(acc, x_place, w_place, left);

  const int stride = block_tiles * m * 8, g = lane / 4;
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (g + h * 8 < m) {
      float *const mine = sums + segment * stride + (group * Tiles * m + g + h * 8) * 8 + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < Tiles; ++j) store_vec(mine + j * m * 8, Vec<float, 2>{{acc[j][h * 2], acc[j][h * 2 + 1]}});
    }
  __syncthreads();
#pragma unroll 1
  for (int item = warp; item < items; item += warps) {
    if (item != warp) {
      tile = item % block_tiles;
      row = item / block_tiles * 4 + lane / 8;
      old = output.load_residual(row, (first + tile) * 8 + lane % 8, row < m);
    }
    if (row >= m) continue;
    const float *from = sums + (tile * m + row) * 8 + lane % 8;
    float total = SUM_START;
#pragma unroll 1
    for (int s = segments; s > 0; s -= 4, from += 4 * stride) {
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = i < s ? from[i * stride] : SUM_START;
#pragma unroll
      for (int i = 0; i < 4; ++i) total += v[i];
    }
    output.store(total, row, (first + tile) * 8 + lane % 8, true, old);
  }
}
