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
//           D <= 128: a warp owns 16 query rows. D > 128 (8 warps, 1 stage): two warps share 16 rows; both compute all
//           scores, each owns half of the columns of V. Shared memory: (Rows + 2 * Stages * 64) * D * 2 bytes, at most
//           96 KB.
// Numerics  tiles of 64 keys, chunks of Chunk keys from key 0, merged in ascending order by common/softmax.cuh: the
//           bits of a row do not depend on the tile height, the stages, the page layout or the rest of the batch.
// Measured  35 % of 790 TFLOP/s (2 x 8,192, 16/8 heads x 128); H200, docs/performance.md
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
template <class T, int D>
__device__ __forceinline__ void score_tile(float (&s)[TILE / 8][4], const Queries<T, D> &q, const T *keys) {
  constexpr int Groups = TILE / 16, Steps = D / 16 * Groups, Ahead = 2;
  const int lane = key_lane<D>();
  u32 a[4], b[Ahead + 1][4];
#pragma unroll
  for (int n = 0; n < TILE / 8; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
#pragma unroll
  for (int i = 0; i < Ahead; ++i) ldmatrix_x4(b[i], keys + fragment_at<D>(lane, i % Groups * 16, i / Groups));
#pragma unroll
  for (int i = 0; i < Steps; ++i) {
    const int n = i % Groups, next = i + Ahead;
    if (n == 0) q.get(a, i / Groups);
    if (next < Steps)
      ldmatrix_x4(b[next % (Ahead + 1)], keys + fragment_at<D>(lane, next % Groups * 16, next / Groups));
    const u32(&f)[4] = b[i % (Ahead + 1)];
    mma_m16n8k16<T>(s[2 * n], a, f[0], f[1]);
    mma_m16n8k16<T>(s[2 * n + 1], a, f[2], f[3]);
  }
}

// One online-softmax step: turns the scores of a tile into p, adds p v to acc, and updates m and l of both rows.
// Blocks16: 16-column blocks of V that this warp owns, from block d0; `last` false leaves the last one out.
template <class T, int D, int Blocks16>
__device__ __forceinline__ void attend_tile(float (&s)[TILE / 8][4], float (&acc)[2 * Blocks16][4], float (&m)[2],
                                            float (&l)[2], bool first, float c, const T *values, int d0, bool last) {
  const int lane = value_lane<D>();
  float mc[2], corr[2], sum[2];
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
  if (!first) {
#pragma unroll
    for (int d = 0; d < 2 * Blocks16; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[d][e] = __fmul_rn(acc[d][e], corr[e >> 1]);
  }
#pragma unroll
  for (int j = 0; j < TILE / 16; ++j) {
    float p[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < 4; ++e) p[h][e] = softmax_exp(s[2 * j + h][e], c, mc[e >> 1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float g = group_sum(p[0][2 * i], p[0][2 * i + 1], p[1][2 * i], p[1][2 * i + 1]);
      sum[i] = j == 0 ? g : sum[i] + g;
    }
    const u32 a[4] = {pack2<T>(p[0][0], p[0][1]), pack2<T>(p[0][2], p[0][3]), pack2<T>(p[1][0], p[1][1]),
                      pack2<T>(p[1][2], p[1][3])};
#pragma unroll
    for (int d = 0; d < Blocks16; ++d) {
      if (d == Blocks16 - 1 && !last) break;
      u32 b[4];
      ldmatrix_x4_trans(b, values + fragment_at<D>(lane, j * 16, d0 + d));
      mma_m16n8k16<T>(acc[2 * d], a, b[0], b[1]);
      mma_m16n8k16<T>(acc[2 * d + 1], a, b[2], b[3]);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) l[i] = update_sum(l[i], corr[i], sum[i]);
}

// Which sequence and which of its query tiles a slot of a packed batch stands for: sequence i owns the slots from
// cu[i] / Rows + i up to the next one's, never fewer than it has tiles. tile < 0 or past its end: nothing to do.
template <int Rows>
__device__ __forceinline__ void find_tile(const int *cu, int batch, int slot, int &sequence, int &tile) {
  int low = 0, high = batch;  // the largest i with start(i) <= slot
  while (high - low > 1) {
    const int mid = (low + high) >> 1;
    (cu[mid] / Rows + mid <= slot ? low : high) = mid;
  }
  sequence = low;
  tile = cu[low + 1] / Rows + low - slot;  // the last tile of a sequence first
}

template <class T, int D, bool Paged, int Warps, int Stages, int Chunk>
__global__ void __launch_bounds__(Warps * 32, Warps == 4 ? (D <= 64 ? 3 : 2) : 1)
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
  if (cu_q != nullptr) find_tile<Rows>(cu_q, batch, rest / width, b, tile);
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

  // What is needed rarely waits in shared memory: the loop has no register to spare.
  __shared__ struct {
    i64 out_row;
    const T *k, *v;
    const int *table;
    int valid, head;
  } rare;
  if (threadIdx.x == 0) {
    rare.out_row = (cu_q != nullptr ? 0 : (i64)b * q_tokens) + q_begin + row0;
    rare.valid = n - row0;
    if constexpr (D > 128) rare.head = query_head;
    rare.k = k_rows;
    rare.v = v_rows;
    if constexpr (Paged) rare.table = tables + (i64)b * max_blocks;
  }
  __syncthreads();

  // Row r of this warp sees the keys [0, min(limit + r, len)); none if that is negative, or if the warp has no row.
  const int warp_row = warp / Split * 16, shift = causal ? len - n + 1 : 1 << 30;
  const int limit = row0 + warp_row < n ? row0 + warp_row + shift : -(1 << 30);
  const int tiles = ceil_div(max(min(row0 + Rows - 1 + shift, len), 0), TILE);
  const int d0 = warp % Split * Blocks16;
  const bool last = Split == 1 || d0 + Blocks16 <= D / 16;

  int pages = -1;
  auto fetch = [&](int t) {
    if constexpr (Paged) pages = fetch_pages<TILE>(rare.table, t * TILE, len, page_shift);
  };
  auto copy_keys = [&](int t) {
    T *const dst = s_k + t % Stages * TILE * D;
    if constexpr (Paged)
      copy_pages<T, D, TILE, Threads, Kv::key, Unroll>(dst, rare.k, k_sequence, k_token, pages, t * TILE, len,
                                                       page_shift, num_blocks);
    else
      copy_rows<T, D, TILE, Threads, Unroll>(dst, rare.k + (i64)t * TILE * k_token, k_token, len - t * TILE);
  };
  auto copy_values = [&](int t) {
    T *const dst = s_v + t % Stages * TILE * D;
    if constexpr (Paged)
      copy_pages<T, D, TILE, Threads, Kv::value, Unroll>(dst, rare.v, v_sequence, v_token, pages, t * TILE, len,
                                                         page_shift, num_blocks);
    else
      copy_rows<T, D, TILE, Threads, Unroll>(dst, rare.v + (i64)t * TILE * v_token, v_token, len - t * TILE);
  };

  float s[TILE / 8][4], acc[2 * Blocks16][4], total[2 * Blocks16][4];
  float m[2] = {-CUKERN_INF, -CUKERN_INF}, l[2] = {0.f, 0.f};
  ChunkMerge merge[2];
  merge[0].reset();
  merge[1].reset();
#pragma unroll
  for (int d = 0; d < 2 * Blocks16; ++d)
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[d][e] = total[d][e] = 0.f;
  Queries<T, D> queries;
  queries.rows = s_q + warp_row * D;

  if (tiles > 0) {
    copy_rows<T, D, Rows, Threads>(s_q, q_rows, q_token, n - row0);
    fetch(0);
    copy_keys(0);
    if (Stages == 2) {
      copy_values(0);
      fetch(1);
    }
    cp_async_commit();
  }
  for (int t = 0; t < tiles; ++t) {
    const T *const keys = s_k + t % Stages * TILE * D, *const values = s_v + t % Stages * TILE * D;
    const bool active = t * TILE < min(limit + 15, len);
    cp_async_wait<0>();
    __syncthreads();  // tile t (of K) is there, and nobody reads what the next copies overwrite
    if (t == 0) queries.load();
    if (Stages == 2) {
      if (t + 1 < tiles) {
        copy_keys(t + 1);
        copy_values(t + 1);
        cp_async_commit();
        fetch(t + 2);
      }
      if (active) score_tile<T, D>(s, queries, keys);
    } else {
      copy_values(t);
      cp_async_commit();
      fetch(t + 1);
      if (active) score_tile<T, D>(s, queries, keys);
      cp_async_wait<0>();
      __syncthreads();  // V of tile t is there, and K may be overwritten
      if (t + 1 < tiles) {
        copy_keys(t + 1);
        cp_async_commit();
      }
    }
    if (active) {
      if ((t + 1) * TILE > min(limit, len)) {
        const int key = t * TILE + (lane & 3) * 2, row = limit + (lane >> 2);
        const int bound[2] = {min(row, len) - key, min(row + 8, len) - key};
#pragma unroll
        for (int j = 0; j < TILE / 8; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (j * 8 + (e & 1) >= bound[e >> 1]) s[j][e] = -CUKERN_INF;
      }
      attend_tile<T, D, Blocks16>(s, acc, m, l, t % TilesPerChunk == 0, c, values, d0, last);
      if (t % TilesPerChunk == TilesPerChunk - 1 || (t + 1) * TILE >= min(limit + 15, len)) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          merge[i].step(m[i], l[i], c);
          m[i] = -CUKERN_INF;
          l[i] = 0.f;
        }
#pragma unroll
        for (int d = 0; d < 2 * Blocks16; ++d)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            total[d][e] = merge[e >> 1].add(total[d][e], acc[d][e]);
            acc[d][e] = 0.f;
          }
      }
    }
  }

  // Through shared memory (the place of q, each warp its own part), so that rows leave in pieces of 16 bytes.
  __syncthreads();
  const int valid = rare.valid - warp_row, head = D > 128 ? rare.head : query_head;
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
