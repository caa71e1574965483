// Attention over whole sequences or chunks of them (FlashAttention-2 shape, tensor cores, sm_80 and later).
// Formula   out = softmax(scale * q k^T + mask) v per query head; head h reads key/value head h / group. Causal: query
//           i of n sees the keys j <= i + kv_len - n. lse = log sum exp(scale * q k^T).
// Layouts   q [tokens, Hq, D] with strides (sequence, token, head), out the same without gaps, lse float [tokens, Hq];
//           k, v: dense [B, Skv, Hkv, D]; packed [Tk, Hkv, D] + cu_seqlens_k; or pages [blocks, Hkv, page, D] + tables.
// Bound     tensor cores: 4 * D flops per query-key pair. Every warp reads K and V from shared memory by itself, 256
//           bytes per mma of 16 rows, so 128 bytes a cycle limit an SM to half of its dense rate.
// Launch    one CTA per (query tile of Rows, head); grid.x = slots * Hq, no host knowledge of the lengths: a packed
//           batch has T / Rows + B slots and each CTA searches cu_seqlens for its own; long causal tiles go first. So many
//           pairs of sequence and key/value head are worked on `together` that their keys and values stay in L2.
// Template  T half | bf16; D multiple of 16 up to 256; Paged; Warps 4 | 8; Stages of K/V tiles 1 | 2; Chunk (numerics).
//           D <= 128: a warp owns 16 query rows. Two stages: a step is a chunk, p of all its keys first, then its products
//           with V for one half of the columns after the other, merged at once: no accumulator of all columns stands beside the
//           totals, and scores of the next tile can be under way beside a softmax. One stage: a step is a tile. D > 128
//           (8 warps, 1 stage): two warps share 16 rows; both compute all scores, each owns half of the columns of V.
//           Shared memory: (Rows + 2 * Stages * 64) * D * 2 bytes, at most 96 KB.
// Numerics  tiles of 64 keys, chunks of Chunk keys from key 0, merged in ascending order by common/softmax.cuh: the
//           bits of a row do not depend on the tile height, the stages, the page layout or the rest of the batch.
// Measured  39 % of 790 TFLOP/s (1 x 8,192, 16/8 heads x 128), 0.97 of torch's flash (8 x 2,048, causal); chunks cost 3 to 4 %
//           of one softmax over all keys; H200, docs/performance.md
#include "common/kv_tile.cuh"
#include "common/softmax.cuh"
#include "ptx/mma.cuh"

constexpr int TILE = 64;  // keys per online-softmax step (numerics contract)

template <class T, int D> struct Queries {  // 16 query rows of a warp: held as fragments, or read from shared memory
  static constexpr bool in_registers = D <= 128;
  u32 held[in_registers ? D / 16 : 1][4];
  const T *rows;

  __device__ __forceinline__ void load() {
    if constexpr (in_registers) {
      const int lane = a_lane<D>();
#pragma unroll
      for (int kk = 0; kk < D / 16; ++kk) ldmatrix_x4(held[kk], rows + fragment_at<D>(lane, 0, kk));
    }
  }
  __device__ __forceinline__ void get(u32 (&a)[4], int kk) const {
    if constexpr (in_registers) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = held[kk][i];
    } else {
      ldmatrix_x4(a, rows + fragment_at<D>(a_lane<D>(), 0, kk));
    }
  }
};

// s = q k^T for 16 rows and the 64 keys of a tile, k-steps ascending over D. Fragments are loaded ahead of their use.
// `beside(i)`, Parts pieces of other work, are spread over the steps.
template <class T, int D, int Parts, class Work>
__device__ __forceinline__ void score_tile(float (&s)[TILE / 8][4], const Queries<T, D> &q, const T *keys, Work beside) {
  constexpr int Groups = TILE / 16, Steps = D / 16 * Groups, Ahead = 2;
  TileFragments<T, D> fragments;
  fragments.init(keys, key_lane<D>());
  u32 a[4], b[Ahead + 1][4];
#pragma unroll
  for (int n = 0; n < TILE / 8; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
#pragma unroll
  for (int i = 0; i < Ahead; ++i) fragments.template load<false>(b[i], i % Groups * 16, i / Groups);
#pragma unroll
  for (int i = 0; i < Steps; ++i) {
    const int n = i % Groups, next = i + Ahead;
    if (n == 0) q.get(a, i / Groups);
    if (next < Steps) fragments.template load<false>(b[next % (Ahead + 1)], next % Groups * 16, next / Groups);
    const u32(&f)[4] = b[i % (Ahead + 1)];
    mma_m16n8k16<T>(s[2 * n], a, f[0], f[1]);
    mma_m16n8k16<T>(s[2 * n + 1], a, f[2], f[3]);
#pragma unroll
    for (int part = i * Parts / Steps; part < (i + 1) * Parts / Steps; ++part) beside(part);
  }
}
template <class T, int D>
__device__ __forceinline__ void score_tile(float (&s)[TILE / 8][4], const Queries<T, D> &q, const T *keys) {
  score_tile<T, D, 0>(s, q, keys, [](int) {});
}

// Statistics of the keys of a chunk that were seen so far, for the two rows of a lane.
struct Running {
  float m[2], l[2], corr[2], mc[2], sum[2];

  __device__ __forceinline__ void reset() {
    m[0] = m[1] = -CUKERN_INF;
    l[0] = l[1] = 0.f;
  }
  __device__ __forceinline__ void raise(const float (&s)[TILE / 8][4], float c) {  // takes in the maxima of a tile
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float top = m[i];
#pragma unroll
      for (int n = 0; n < TILE / 8; ++n) top = fmaxf(top, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
      top = quad_max(top);
      corr[i] = rescale_factor(m[i], top, c);
      mc[i] = __fmul_rn(finite_max(top), c);
      m[i] = top;
    }
  }
  // p of the keys 16 j ... of the tile as an operand of the products with V, and their sums; j ascending from 0.
  template <class T> __device__ __forceinline__ void exponentials(u32 (&a)[4], const float (&s)[TILE / 8][4], int j, float c) {
    float p[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < 4; ++e) p[h][e] = softmax_exp(s[2 * j + h][e], c, mc[e >> 1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float g = group_sum(p[0][2 * i], p[0][2 * i + 1], p[1][2 * i], p[1][2 * i + 1]);
      sum[i] = j == 0 ? g : sum[i] + g;
      if (j == TILE / 16 - 1) l[i] = update_sum(l[i], corr[i], sum[i]);
    }
    // packed here and not at their use, until when they would take twice the registers
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = opaque(pack2<T>(p[i >> 1][i % 2 * 2], p[i >> 1][i % 2 * 2 + 1]));
  }
};

// One online-softmax step: turns the scores of a tile into p, adds p v to acc, and updates the statistics of both rows.
// Blocks16: 16-column blocks of V that this warp owns, from block d0; `last` false leaves the last one out.
template <class T, int D, int Blocks16>
__device__ __forceinline__ void attend_tile(const float (&s)[TILE / 8][4], float (&acc)[2 * Blocks16][4], Running &chunk,
                                            bool first, float c, const T *values, int d0, bool last) {
  const int lane = value_lane<D>();
  chunk.raise(s, c);
  if (!first) {
#pragma unroll
    for (int d = 0; d < 2 * Blocks16; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[d][e] = __fmul_rn(acc[d][e], chunk.corr[e >> 1]);
  }
#pragma unroll
  for (int j = 0; j < TILE / 16; ++j) {
    u32 a[4];
    chunk.exponentials<T>(a, s, j, c);
#pragma unroll
    for (int d = 0; d < Blocks16; ++d) {
      if (d == Blocks16 - 1 && !last) break;
      u32 b[4];
      ldmatrix_x4_trans(b, values + fragment_at<D>(lane, j * 16, d0 + d));
      mma_m16n8k16<T>(acc[2 * d], a, b[0], b[1]);
      mma_m16n8k16<T>(acc[2 * d + 1], a, b[2], b[3]);
    }
  }
}

// A chunk's products with V, merged into the totals; Tiles 1: its first tile alone is seen. Columns come in blocks of 16,
// Width at a time, each with all of its keys, so that only their sums take registers and not those of all columns. Endless: the
// chunk has no end, its sums go on from the totals. always: true, but not to the compiler: without a branch between the halves
// it begins products of both, has no registers for the last ones and lets each of them wait for the one before.
template <class T, int D, int Tiles, bool Endless>
__device__ __forceinline__ void add_chunk(float (&total)[D / 8][4], const u32 (&p)[2 * TILE / 16][4], const Running &chunk,
                                          const ChunkMerge (&merge)[2], const T *values, bool always) {
  constexpr int Blocks = D / 16, Width = ceil_div(Blocks, 2), Groups = Tiles * TILE / 16;
  constexpr int Steps = ceil_div(Blocks, Width) * Groups;
  TileFragments<T, D> fragments;
  fragments.init(values, value_lane<D>());
  u32 b[2][Width][4];
  auto load = [&](int i) {
#pragma unroll
    for (int w = 0; w < Width; ++w)
      if (i / Groups * Width + w < Blocks)
        fragments.template load<true>(b[i & 1][w], i % Groups * 16, i / Groups * Width + w);
  };
  float acc[2 * Width][4];
  load(0);
  auto step = [&](int i) {
    const int j = i % Groups, first = i / Groups * Width;
    if (i + 1 < Steps) load(i + 1);
#pragma unroll
    for (int d = 0; d < 2 * Width; ++d) {
      if (first + d / 2 >= Blocks) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (j == 0) acc[d][e] = Endless ? merge[e >> 1].scaled(total[2 * first + d][e]) : 0.f;
        if (j == TILE / 16) acc[d][e] = __fmul_rn(acc[d][e], chunk.corr[e >> 1]);
      }
      mma_m16n8k16<T>(acc[d], p[j], b[i & 1][d / 2][d % 2 * 2], b[i & 1][d / 2][d % 2 * 2 + 1]);
    }
    if (j == Groups - 1)
#pragma unroll
      for (int d = 0; d < 2 * Width; ++d)
        if (first + d / 2 < Blocks)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            total[2 * first + d][e] = Endless ? acc[d][e] : merge[e >> 1].add(total[2 * first + d][e], acc[d][e]);
  };
#pragma unroll
  for (int i = 0; i < Groups; ++i) step(i);
  if (Endless || D <= 64 || always)
#pragma unroll
    for (int i = Groups; i < Steps; ++i) step(i);
}

// Which sequence and which of its query tiles a slot of a packed batch stands for: sequence i owns the slots from
// cu[i] / Rows + i up to the next one's, never fewer than it has tiles. tile < 0 or past its end: nothing to do. Entries are
// clamped to the q_tokens rows that there are, like the lengths: otherwise the slots would be those of rows past the array.
template <int Rows>
__device__ __forceinline__ void find_tile(const int *cu, int q_tokens, int batch, int slot, int &sequence, int &tile) {
  auto start = [&](int i) { return min(max(cu[i], 0), q_tokens) / Rows + i; };
  int low = 0, high = batch;  // the largest i with start(i) <= slot
  while (high - low > 1) {
    const int mid = (low + high) >> 1;
    (start(mid) <= slot ? low : high) = mid;
  }
  sequence = low;
  tile = start(low + 1) - 1 - slot;  // the last tile of a sequence first
}

template <class T, int D, bool Paged, int Warps, int Stages, int Chunk>
__global__ void __launch_bounds__(Warps * 32, Warps == 4 && Stages == 2 ? (D <= 64 ? 3 : 2) : 1)
    attention_prefill(const T *__restrict__ q, const T *__restrict__ k, const T *__restrict__ v, T *__restrict__ out,
                      float *__restrict__ lse, const int *__restrict__ cu_q, const int *__restrict__ cu_k,
                      const int *__restrict__ tables, const int *__restrict__ seq_lens, int batch, int q_tokens,
                      int kv_tokens, int num_heads, int group, int together, i64 q_sequence, int q_token, int q_head,
                      i64 k_sequence, int k_token, int k_head, i64 v_sequence, int v_token, int v_head, int max_blocks,
                      int page_shift, int num_blocks, int causal, float scale, float c) {
  constexpr int Split = D > 128 ? 2 : 1, Rows = 16 * Warps / Split, Threads = Warps * 32;
  constexpr int Blocks16 = ceil_div(D / 16, Split), TilesPerChunk = Chunk / TILE;
#if __CUDA_ARCH__ >= 1000
  constexpr int Unroll = 1;  // of the copies that are not rows of 2^n pieces: more would spill here
#else
  constexpr int Unroll = 4;
#endif
  static_assert(Chunk % TILE == 0 && D % 16 == 0 && D <= 256, "see the head of the file");
  constexpr bool Endless = Chunk == 1 << 24;  // one chunk of all keys: to measure what chunks cost
  static_assert(Stages == 1 || (D <= 128 && (TilesPerChunk == 2 || Endless)), "two stages: a chunk, queries in registers");
  extern __shared__ __align__(128) unsigned char shared[];
  T *const s_q = reinterpret_cast<T *>(shared), *const s_k = s_q + Rows * D, *const s_v = s_k + Stages * TILE * D;

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  // pair: a key/value head, or one of a sequence; tiles (or slots) of `together` pairs, then those of the next ones
  const int kv_heads = num_heads / group, pairs = cu_q != nullptr ? kv_heads : batch * kv_heads;
  const u32 count = cu_q != nullptr ? gridDim.x / num_heads : ceil_div(q_tokens, Rows);
  const u32 section = blockIdx.x / (count * group * together), first = section * together;
  const u32 width = min((u32)together, pairs - first) * group, rest = blockIdx.x - first * count * group;
  const u32 pair = first + rest % width / group;
  const int kv_head = pair % kv_heads, query_head = kv_head * group + rest % width % group;
  int b = pair / kv_heads, tile = (int)count - 1 - (int)(rest / width);
  if (cu_q != nullptr) find_tile<Rows>(cu_q, q_tokens, batch, rest / width, b, tile);
  // Lengths are clamped to the arrays: a wrong cu_seqlens or seq_lens on the device must not reach other memory.
  const int q_begin = cu_q != nullptr ? min(max(cu_q[b], 0), q_tokens) : 0;
  const int n = (cu_q != nullptr ? min(cu_q[b + 1], q_tokens) : q_tokens) - q_begin;
  if (tile < 0 || tile * Rows >= n) return;
  int k_begin = 0, len = kv_tokens;
  if constexpr (Paged) {
    len = min(max(seq_lens[b], 0), (int)min((i64)max_blocks << page_shift, (i64)0x7fffffff));
  } else if (cu_k != nullptr) {
    k_begin = min(max(cu_k[b], 0), kv_tokens);
    len = max(min(cu_k[b + 1], kv_tokens) - k_begin, 0);
  }

  const int row0 = tile * Rows;
  const T *const q_rows =
      q + (cu_q != nullptr ? 0 : b * q_sequence) + (i64)(q_begin + row0) * q_token + (i64)query_head * q_head;
  const bool dense_kv = !Paged && cu_k == nullptr;
  const T *const k_rows = k + (dense_kv ? b * k_sequence : 0) + (i64)k_begin * k_token + (i64)kv_head * k_head;
  const T *const v_rows = v + (dense_kv ? b * v_sequence : 0) + (i64)k_begin * v_token + (i64)kv_head * v_head;

  const int warp_row = warp / Split * 16, shift = causal ? len - n + 1 : 1 << 30;
  // What is needed rarely waits in shared memory: the loop has no register to spare.
  __shared__ struct {
    i64 out_row;
    const T *k, *v;
    const int *table;
    int valid, head, limit;
  } rare;
  if (threadIdx.x == 0) {
    rare.out_row = (cu_q != nullptr ? 0 : (i64)b * q_tokens) + q_begin + row0;
    rare.valid = n - row0;
    rare.limit = row0 + shift;
    rare.head = query_head;
    rare.k = k_rows;
    rare.v = v_rows;
    if constexpr (Paged) rare.table = tables + (i64)b * max_blocks;
  }
  __syncthreads();

  // Row r sees the keys [0, min(row0 + shift + r, len)). len: to the end of the last tile of which any row sees a key.
  len = max(min(ceil_div(min(row0 + Rows - 1 + shift, len), TILE) * TILE, len), 0);
  const int full = min(row0 + warp_row + shift, len);  // keys that all rows of this warp see, and that one of them sees
  const int most = row0 + warp_row < n ? min(row0 + warp_row + shift + 15, len) : 0;
  const int d0 = warp % Split * Blocks16;
  const bool last = Split == 1 || d0 + Blocks16 <= D / 16;

  constexpr int Span = Stages * TILE;  // keys whose values are in shared memory
  int pages = -1;                      // of the blocks under the keys that are copied next
  auto fetch = [&](int t) {
    if constexpr (Paged) return fetch_pages<Span>(rare.table, t * TILE, len, page_shift);
    return -1;
  };
  auto copy_keys = [&](T *dst, int t, int of_tile) {
    if constexpr (Paged) {
      if (Stages == 2 && t % 2 == 1) of_tile = __shfl_sync(0xffffffffu, of_tile, (lane + (TILE >> page_shift)) & 31);
      copy_pages<T, D, TILE, Threads, Kv::key, Unroll>(dst, rare.k, k_sequence, k_token, of_tile, t * TILE, len,
                                                       page_shift, num_blocks);
    } else
      copy_rows<T, D, TILE, Threads, Unroll>(dst, rare.k + (i64)t * TILE * k_token, k_token, len - t * TILE);
  };
  auto copy_values = [&](int t) {
    if constexpr (Paged)
      copy_pages<T, D, Span, Threads, Kv::value, Unroll>(s_v, rare.v, v_sequence, v_token, pages, t * TILE, len,
                                                         page_shift, num_blocks);
    else
      copy_rows<T, D, Span, Threads, Unroll>(s_v, rare.v + (i64)t * TILE * v_token, v_token, len - t * TILE);
  };

  float total[2 * Blocks16][4];
#pragma unroll
  for (int d = 0; d < 2 * Blocks16; ++d)
#pragma unroll
    for (int e = 0; e < 4; ++e) total[d][e] = 0.f;
  Running chunk;
  ChunkMerge merge[2];
  merge[0].reset();
  merge[1].reset();
  Queries<T, D> queries;
  queries.rows = s_q + warp_row * D;
  auto mask = [&](float (&s)[TILE / 8][4], int t) {
    if ((t + 1) * TILE <= full) return;
    const int thread = opaque(threadIdx.x);  // or these would stand in registers all the time
    const int key = t * TILE + (thread & 3) * 2, row = rare.limit + warp_row + (thread >> 2 & 7);
    const int bound[2] = {min(row, len) - key, min(row + 8, len) - key};
#pragma unroll
    for (int j = 0; j < TILE / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (j * 8 + (e & 1) >= bound[e >> 1]) s[j][e] = -CUKERN_INF;
  };
  if constexpr (Stages == 2) {  // a chunk a step
    // Beside: the softmax of a tile stands between the scores of the next one. Early: that is so for the second tile too, the
    // scores of a chunk's first tile are those of the chunk before. Each where there are registers for it.
#if __CUDA_ARCH__ >= 1000
    constexpr bool Beside = D <= 64;
#else
    constexpr bool Beside = true;
#endif
    constexpr bool Early = Beside && D > 64;
    constexpr int Parts = 1 + TILE / 16;  // of a softmax: maxima, then 16 keys each
    float s0[TILE / 8][4], s1[TILE / 8][4];
    u32 p[2 * TILE / 16][4];
    T *const s_k1 = s_k + TILE * D;
    // M and L wait in the place of q: there is no register for them
    Vec<float, 4> *const kept = reinterpret_cast<Vec<float, 4> *>(s_q + warp_row * D) + lane;
    auto keep = [&] { *kept = Vec<float, 4>{{merge[0].M, merge[0].L, merge[1].M, merge[1].L}}; };
    auto recall = [&] {
      const Vec<float, 4> x = *kept;
      merge[0].M = x.v[0], merge[0].L = x.v[1], merge[1].M = x.v[2], merge[1].L = x.v[3];
    };
    int next = -1;  // pages of the chunk after the next one
    if (len > 0) {
      copy_rows<T, D, Rows, Threads>(s_q, q_rows, q_token, n - row0);
      pages = fetch(0);
      next = fetch(2);
      copy_keys(Early ? s_v : s_k, 0, pages);  // Early: the place of the first values, they come when its scores are done
      cp_async_commit();
      if (TILE < len) copy_keys(s_k1, 1, pages);
      if (Early && 2 * TILE < len) copy_keys(s_k, 2, next);
      cp_async_commit();
      cp_async_wait<1>();
      __syncthreads();  // queries and the first keys are there
      queries.load();
      __syncwarp();
      if (Early && most > 0) score_tile<T, D>(s0, queries, s_v);
    }
    keep();
    for (int t = 0; t * TILE < len; t += 2) {
      cp_async_wait<0>();
      __syncthreads();  // keys are there, nobody reads the last values
      copy_values(t);
      cp_async_commit();
      pages = next;
      next = fetch(t + 4);
      chunk.reset();
      if constexpr (Endless) {
        recall();
#pragma unroll
        for (int i = 0; i < 2; ++i) chunk.m[i] = merge[i].M, chunk.l[i] = merge[i].L;
      }
      auto softmax = [&](const float(&s)[TILE / 8][4], int tile, int part) {
        if (part == 0) {
          chunk.raise(s, c);
          if (Endless && tile == 0)
            for (int i = 0; i < 2; ++i) merge[i].a = chunk.corr[i];
        } else
          chunk.template exponentials<T>(p[tile * TILE / 16 + part - 1], s, part - 1, c);
      };
      auto first = [&](int part) { softmax(s0, 0, part); };
      auto weigh = [&] {
        if constexpr (!Endless) {
          recall();
          merge[0].weigh(chunk.m[0], c);
          merge[1].weigh(chunk.m[1], c);
        }
      };
      auto second = [&](int part) {
        softmax(s1, 1, part);
        if (part == 1) weigh();  // the maxima are known: beside the exponentials, after them everything would wait for it
      };
      auto all = [&](auto parts) {
#pragma unroll
        for (int part = 0; part < Parts; ++part) parts(part);
      };
      const bool seen = t * TILE < most, both = (t + 1) * TILE < most;  // the first tile, the second one too
      if (seen) {
        if (!Early) score_tile<T, D>(s0, queries, s_k);
        mask(s0, t);
        if (!Beside || !both) all(first);
        if (both) {
          score_tile<T, D, Beside ? Parts : 0>(s1, queries, s_k1, first);
          mask(s1, t + 1);
          if (Early && (t + 2) * TILE < most)
            score_tile<T, D, Parts>(s0, queries, s_k, second);
          else
            all(second);
        } else
          weigh();
        if constexpr (Endless) {
#pragma unroll
          for (int i = 0; i < 2; ++i) merge[i].M = chunk.m[i], merge[i].L = chunk.l[i];
        } else {
          merge[0].add_sum(chunk.l[0]);
          merge[1].add_sum(chunk.l[1]);
        }
        keep();
      }
      cp_async_wait<0>();
      __syncthreads();  // values are there, nobody reads the keys
      const int after = t + (Early ? 4 : 2);
      if ((t + 3) * TILE < len) copy_keys(s_k1, t + 3, pages);
      if (after * TILE < len) copy_keys(s_k, after, Early ? next : pages);
      cp_async_commit();
      if (both)
        add_chunk<T, D, 2, Endless>(total, p, chunk, merge, s_v, group > 0);
      else if (seen)
        add_chunk<T, D, 1, Endless>(total, p, chunk, merge, s_v, group > 0);
    }
    recall();
    __syncwarp();
  } else {  // a tile a step
    float s[TILE / 8][4], acc[2 * Blocks16][4];
    auto start_chunk = [&] {
      chunk.reset();
#pragma unroll
      for (int d = 0; d < 2 * Blocks16; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[d][e] = 0.f;
    };
    start_chunk();
    if (len > 0) {
      copy_rows<T, D, Rows, Threads>(s_q, q_rows, q_token, n - row0);
      pages = fetch(0);
      copy_keys(s_k, 0, pages);
      cp_async_commit();
    }
    for (int t = 0; t * TILE < len; ++t) {
      const bool active = t * TILE < most;
      cp_async_wait<0>();
      __syncthreads();  // K of tile t is there, and nobody reads V of the last one
      if (t == 0) queries.load();
      copy_values(t);
      cp_async_commit();
      pages = fetch(t + 1);
      if (active) score_tile<T, D>(s, queries, s_k);
      cp_async_wait<0>();
      __syncthreads();  // V of tile t is there, and K may be overwritten
      if ((t + 1) * TILE < len) {
        copy_keys(s_k, t + 1, pages);
        cp_async_commit();
      }
      if (active) {
        mask(s, t);
        attend_tile<T, D, Blocks16>(s, acc, chunk, t % TilesPerChunk == 0, c, s_v, d0, last);
        if (t % TilesPerChunk == TilesPerChunk - 1 || (t + 1) * TILE >= most) {
#pragma unroll
          for (int i = 0; i < 2; ++i) merge[i].step(chunk.m[i], chunk.l[i], c);
#pragma unroll
          for (int d = 0; d < 2 * Blocks16; ++d)
#pragma unroll
            for (int e = 0; e < 4; ++e) total[d][e] = merge[e >> 1].add(total[d][e], acc[d][e]);
          start_chunk();
        }
      }
    }
    __syncthreads();
  }

  // Through shared memory (the place of q, each warp its own part), so that rows leave in pieces of 16 bytes.
  const int valid = rare.valid - warp_row, head = rare.head;
  const i64 out_row = rare.out_row + warp_row;
  float norm[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sum = quad_sum(merge[i].L);
    const int row = (lane >> 2) + 8 * i;
    norm[i] = softmax_norm(sum);
    if (lse != nullptr && (lane & 3) == 0 && d0 == 0 && row < valid)
      lse[(out_row + row) * num_heads + head] = softmax_lse(merge[i].M, sum, scale);
  }
#pragma unroll
  for (int d = 0; d < 2 * Blocks16; ++d) {
    if (d >= 2 * Blocks16 - 2 && !last) break;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      *reinterpret_cast<u32 *>(s_q + RowTile<D>::at(warp_row + (lane >> 2) + 8 * i, 2 * d0 + d) + (lane & 3) * 2) =
          pack2<T>(__fmul_rn(total[d][2 * i], norm[i]), __fmul_rn(total[d][2 * i + 1], norm[i]));
  }
  __syncwarp();
  const int pieces = 2 * Blocks16 - (last ? 0 : 2);
  for (int i = lane; i < 16 * pieces; i += 32) {
    const int row = i / pieces, piece = 2 * d0 + i % pieces;
    if (row < valid)
      store_vec(out + ((out_row + row) * num_heads + head) * D + piece * 8,
                load_vec<T, 8>(s_q + RowTile<D>::at(warp_row + row, piece)));
  }
}
