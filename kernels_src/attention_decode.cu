// Attention of one new query per sequence over a paged cache (split over the keys, tensor cores, sm_80 and later).
// Formula   out = softmax(scale * q k^T) v per query head over the first seq_lens[b] keys; head h reads key/value head
//           h / group. lse = log sum exp(scale * q k^T).
// Layouts   q [B, Hq, D] with strides; k, v [blocks, Hkv, page, D] with strides; tables [B, max_blocks];
//           out [B, Hq, D]; lse float [B, Hq]; partial results per chunk: acc float [B, Hq, max_chunks, D], statistics
//           float [B, Hq, max_chunks, 8] = m, l of the 4 lanes of a quad, unused.
// Bound     bytes: 4 * D * seq_len * Hkv of keys and values (16-bit). Two CTAs an SM keep 32 to 64 KB each in flight.
// Launch    attention_decode: 256 threads, grid.x = splits * B * Hkv * ceil(group / 16); the query heads of a key/value
//           head are the rows of a 16-row mma tile. CTA `split` takes the chunks split, split + splits, ... With one
//           split (or one chunk) it merges as it goes and writes the result; else each chunk goes to the workspace and
//           attention_decode_merge (128 threads, grid.x = B * Hq * ceil(D / 32)) adds them up. splits and max_chunks
//           come from shapes, never from values on the device; CTAs without work leave at once.
// Template  T half | bf16; D multiple of 16 up to 256; Chunk (numerics). Shared memory: shared_bytes, at most 76 KB.
// Numerics  chunks of Chunk keys from key 0, tiles of 64, merged in ascending order by common/softmax.cuh: the bits
//           of a row depend neither on splits nor on the batch, and are those of attention_prefill.
// Measured  76 % of a copy (64 sequences of 4,096); H200, docs/performance.md
#include "common/chunk_merge.cuh"
#include "common/kv_tile.cuh"
#include "common/softmax.cuh"
#include "ptx/mma.cuh"

constexpr int TILE = 64;  // keys per online-softmax step (numerics contract)
constexpr int WARPS = 8;

// Keys in shared memory at a time: a whole chunk, or one tile where a chunk would not fit.
template <int D, int Chunk> constexpr int SPAN = D <= 128 ? Chunk : TILE;

template <class T, int D, int Chunk>
__global__ void __launch_bounds__(WARPS * 32, 2)
    attention_decode(const T *__restrict__ q, const T *__restrict__ k, const T *__restrict__ v,
                     const int *__restrict__ tables, const int *__restrict__ seq_lens, T *__restrict__ out,
                     float *__restrict__ lse, float *__restrict__ part_acc, float *__restrict__ part_stats, int batch,
                     int num_heads, int group, i64 q_sequence, int q_head, i64 k_block, int k_head, int k_token,
                     i64 v_block, int v_head, int v_token, int max_blocks, int page_shift, int num_blocks, int max_len,
                     int max_chunks, int splits, float scale, float c) {
  constexpr int Span = SPAN<D, Chunk>, Groups = Span / 16, Threads = WARPS * 32;
  constexpr int Blocks16 = ceil_div(D / 16, WARPS);  // 16-column blocks of V of a warp: warp, warp + 8
  static_assert(Chunk % TILE == 0 && Groups <= WARPS && D % 16 == 0 && D <= 256, "see the head of the file");
  extern __shared__ __align__(128) unsigned char shared[];
  T *const s_k = reinterpret_cast<T *>(shared), *const s_v = s_k + Span * D;
  T *const s_q = s_v + Span * D, *const s_p = s_q + 16 * D;
  float *const s_max = reinterpret_cast<float *>(s_p + 16 * Span);  // [16 rows][Groups]: largest score of 16 keys
  float *const s_sum = s_max + 16 * Groups;                         // [16 rows][4 lanes][Groups]: sum of p

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int row = lane >> 2, column = (lane & 3) * 2;  // of the first element of an accumulator fragment
  const int kv_heads = num_heads / group, head_tiles = ceil_div(group, 16);
  int item = blockIdx.x;
  const int head_tile = item % head_tiles, kv_head = (item /= head_tiles) % kv_heads, b = (item /= kv_heads) % batch;
  const int split = item / batch;
  const int head0 = kv_head * group + head_tile * 16, heads = min(group - head_tile * 16, 16);
  const int len = min(max(seq_lens[b], 0), (int)min((i64)max_blocks << page_shift, (i64)0x7fffffff));
  const bool whole = splits == 1 || len <= Chunk;  // this CTA does all chunks of the sequence
  if (whole && split > 0) return;
  const int step = whole ? 1 : splits, *const table = tables + (i64)b * max_blocks;
  if (split * Chunk >= len && split > 0) return;
  const int end = len <= max_len ? len : 0;  // longer than promised: no place for its chunks, the result is NaN

  k += (i64)kv_head * k_head;
  v += (i64)kv_head * v_head;
  int pages = -1;
  auto fetch = [&](int key0) { pages = key0 < end ? fetch_pages<Span>(table, key0, end, page_shift) : -1; };
  auto copy_keys = [&](int key0) {
    copy_pages<T, D, Span, Threads, Kv::key, 4>(s_k, k, k_block, k_token, pages, key0, end, page_shift, num_blocks);
  };
  auto copy_values = [&](int key0) {
    copy_pages<T, D, Span, Threads, Kv::value, 4>(s_v, v, v_block, v_token, pages, key0, end, page_shift, num_blocks);
  };
  auto advance = [&](int key0) {  // the next span: the rest of the chunk, or this CTA's next chunk
    if (Span < Chunk && (key0 + Span) % Chunk != 0 && key0 + Span < end) return key0 + Span;
    const i64 next = ((i64)key0 / Chunk + step) * Chunk;
    return next < end ? (int)next : end;
  };

  float acc[2 * Blocks16][4], total[2 * Blocks16][4], m[2], l[2];
  ChunkMerge merge[2];
  merge[0].reset();
  merge[1].reset();
#pragma unroll
  for (int d = 0; d < 2 * Blocks16; ++d)
#pragma unroll
    for (int e = 0; e < 4; ++e) total[d][e] = 0.f;

  int key0 = split * Chunk, next = key0;
  if (key0 < end) {
    fetch(key0);
    copy_rows<T, D, 16, Threads>(s_q, q + b * q_sequence + (i64)head0 * q_head, q_head, heads);
    copy_keys(key0);
    cp_async_commit();
    copy_values(key0);
    cp_async_commit();
    next = advance(key0);
    fetch(next);
  }
  for (; key0 < end; key0 = next, next = advance(next)) {
    cp_async_wait<1>();
    __syncthreads();  // K is there

    // Scores: a warp takes 16 keys.
    float s[2][4] = {};
    if (warp < Groups) {
      const int a_at = a_lane<D>(), k_at = key_lane<D>();
#pragma unroll
      for (int kk = 0; kk < D / 16; ++kk) {
        u32 a[4], f[4];
        ldmatrix_x4(a, s_q + fragment_at<D>(a_at, 0, kk));
        ldmatrix_x4(f, s_k + fragment_at<D>(k_at, 0, kk) + warp * 16 * D);
        mma_m16n8k16<T>(s[0], a, f[0], f[1]);
        mma_m16n8k16<T>(s[1], a, f[2], f[3]);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (key0 + warp * 16 + h * 8 + column + (e & 1) >= end) s[h][e] = -CUKERN_INF;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float top = quad_max(fmaxf(fmaxf(s[0][2 * i], s[0][2 * i + 1]), fmaxf(s[1][2 * i], s[1][2 * i + 1])));
        if ((lane & 3) == 0) s_max[(row + 8 * i) * Groups + warp] = top;
      }
    }
    __syncthreads();  // the maxima are there, and K may be overwritten
    if (next < end) copy_keys(next);
    cp_async_commit();

    // Statistics of the tiles of this span, the same in every warp; p of this warp's 16 keys.
    const bool first = key0 % Chunk == 0;
    float corr[Span / TILE][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (first) {
        m[i] = -CUKERN_INF;
        l[i] = 0.f;
      }
#pragma unroll
      for (int tile = 0; tile < Span / TILE; ++tile) {
        const float *const tops = s_max + (row + 8 * i) * Groups + tile * (TILE / 16);
        const float top = fmaxf(m[i], fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3])));
        corr[tile][i] = rescale_factor(m[i], top, c);
        m[i] = top;
        if (warp / (TILE / 16) == tile) {
          const float mc = __fmul_rn(finite_max(top), c);
          float p[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) p[j] = softmax_exp(s[j >> 1][2 * i + (j & 1)], c, mc);
          s_sum[((row + 8 * i) * 4 + (lane & 3)) * Groups + warp] = group_sum(p[0], p[1], p[2], p[3]);
#pragma unroll
          for (int h = 0; h < 2; ++h)
            *reinterpret_cast<u32 *>(s_p + RowTile<Span>::at(row + 8 * i, 2 * warp + h) + column) =
                pack2<T>(p[2 * h], p[2 * h + 1]);
        }
      }
    }
    cp_async_wait<1>();
    __syncthreads();  // V, P and the sums are there

    // P V: a warp takes all keys for its columns.
    if (first) {
#pragma unroll
      for (int d = 0; d < 2 * Blocks16; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[d][e] = 0.f;
    }
#pragma unroll
    for (int tile = 0; tile < Span / TILE; ++tile) {
      if (key0 + tile * TILE >= end) break;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float *const sums = s_sum + ((row + 8 * i) * 4 + (lane & 3)) * Groups + tile * (TILE / 16);
        l[i] = update_sum(l[i], corr[tile][i], ((sums[0] + sums[1]) + sums[2]) + sums[3]);
      }
      if (tile > 0 || !first) {
#pragma unroll
        for (int d = 0; d < 2 * Blocks16; ++d)
#pragma unroll
          for (int e = 0; e < 4; ++e) acc[d][e] = __fmul_rn(acc[d][e], corr[tile][e >> 1]);
      }
#pragma unroll
      for (int j = tile * (TILE / 16); j < (tile + 1) * (TILE / 16); ++j) {
        u32 a[4], f[4];
        if (warp < D / 16) ldmatrix_x4(a, s_p + fragment_at<Span>(a_lane<Span>(), 0, j));
#pragma unroll
        for (int d = 0; d < Blocks16; ++d)
          if (warp + d * WARPS < D / 16) {
            ldmatrix_x4_trans(f, s_v + fragment_at<D>(value_lane<D>(), j * 16, warp + d * WARPS));
            mma_m16n8k16<T>(acc[2 * d], a, f[0], f[1]);
            mma_m16n8k16<T>(acc[2 * d + 1], a, f[2], f[3]);
          }
      }
    }
    __syncthreads();  // V, P and the statistics may be overwritten
    if (next < end) copy_values(next);
    cp_async_commit();
    fetch(advance(next));

    if (next % Chunk != 0 && next < end) continue;  // the chunk goes on
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (whole) {
        merge[i].step(m[i], l[i], c);
#pragma unroll
        for (int d = 0; d < 2 * Blocks16; ++d)
#pragma unroll
          for (int e = 2 * i; e < 2 * i + 2; ++e) total[d][e] = merge[i].add(total[d][e], acc[d][e]);
      } else if (row + 8 * i < heads) {
        const i64 part = ((i64)b * num_heads + head0 + row + 8 * i) * max_chunks + key0 / Chunk;
        if (warp == 0) {
          if ((lane & 3) == 0) part_stats[part * 8] = m[i];
          part_stats[part * 8 + 1 + (lane & 3)] = l[i];
        }
#pragma unroll
        for (int d = 0; d < 2 * Blocks16; ++d)
          if (warp + d / 2 * WARPS < D / 16)
            store_vec(part_acc + part * D + (warp + d / 2 * WARPS) * 16 + d % 2 * 8 + column,
                      Vec<float, 2>{acc[d][2 * i], acc[d][2 * i + 1]});
      }
    }
  }
  cp_async_wait<0>();
  if (!whole && end == len) return;

#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sum = end == len ? quad_sum(merge[i].L) : CUKERN_NAN, norm = softmax_norm(sum);
    if (row + 8 * i >= heads || split > 0) continue;
    const i64 to = (i64)b * num_heads + head0 + row + 8 * i;
    if (lse != nullptr && warp == 0 && (lane & 3) == 0) lse[to] = softmax_lse(merge[i].M, sum, scale);
#pragma unroll
    for (int d = 0; d < 2 * Blocks16; ++d)
      if (warp + d / 2 * WARPS < D / 16)
        *reinterpret_cast<u32 *>(out + to * D + (warp + d / 2 * WARPS) * 16 + d % 2 * 8 + column) =
            pack2<T>(__fmul_rn(total[d][2 * i], norm), __fmul_rn(total[d][2 * i + 1], norm));
  }
}

// Adds up the chunks of a query head, 32 columns a CTA (common/chunk_merge.cuh).
template <class T, int D, int Chunk>
__global__ void __launch_bounds__(128)
    attention_decode_merge(const float *__restrict__ part_acc, const float *__restrict__ part_stats,
                           const int *__restrict__ seq_lens, T *__restrict__ out, float *__restrict__ lse,
                           int num_heads, int max_blocks, int page_shift, int max_len, int max_chunks, float scale, float c) {
  constexpr int Slices = ceil_div(D, MERGE_COLUMNS);
  __shared__ MergeMemory memory;
  const int slice = blockIdx.x % Slices, column0 = slice * MERGE_COLUMNS, columns = min(D - column0, MERGE_COLUMNS);
  const i64 row = blockIdx.x / Slices;
  const int len = min(max(seq_lens[row / num_heads], 0), (int)min((i64)max_blocks << page_shift, (i64)0x7fffffff));
  if (len <= Chunk || len > max_len) return;  // attention_decode has written the result
  float M, sum;
  const float y = merge_chunks<D>(memory, part_acc + row * max_chunks * D + column0, part_stats + row * max_chunks * 8,
                                  (len - 1) / Chunk + 1, columns, c, M, sum);
  if (threadIdx.x >= 32) return;
  if ((int)threadIdx.x < columns) out[row * D + column0 + threadIdx.x] = from_float<T>(y);
  if (lse != nullptr && slice == 0 && threadIdx.x == 0) lse[row] = softmax_lse(M, sum, scale);
}
