// Attention of one step over the paged cache, the same bits as attention_decode.cu: an item is a chunk of 128 keys of one
// sequence for the query heads of one key/value head, the rows of a 16-row mma tile. Its block also norms and rotates these
// heads and, in the last chunk, the new key, and writes key and value to the cache.
// A sequence of one chunk is finished here; the chunks of a longer one go to the workspace and are merged afterwards, either by
// every block as it loads the rows of the next product, or, if there are many, by all blocks together behind a barrier.
// Test: tests/test_decode_step.py
#pragma once
#include "common/head_norm.cuh"
#include "common/kv_tile.cuh"
#include "common/paged.cuh"
#include "decode/rows.cuh"

constexpr int HEAD_LANES = HEAD_DIM > 128 ? 16 : HEAD_DIM > 64 ? 8 : HEAD_DIM > 32 ? 4 : HEAD_DIM > 16 ? 2 : 1;

struct Item {
  int row, kv_head, chunk;
};

template <class T> struct Attention {
  T *keys, *values, *q, *p;
  float *key_max, *key_sum;
  const float *head_norms, *rotations;  // [2][HEAD_DIM] of this layer; [ROWS][HEAD_DIM]
  const RowState *rows;
  const int *tables;
  int max_blocks, page_shift, num_blocks, max_chunks;
  float eps, c;
  float *part_acc, *part_stats;  // [ROWS, HEADS, max_chunks, HEAD_DIM], [.., 8]
  u64 *part_words;               // with DIRECT, of chunks that are not merged together: [ROWS, HEADS, INLINE_CHUNKS, PART_WORDS]
  Link out;                      // T [ROWS, Q_SIZE]
  Link qkv;                      // T [ROWS, QKV_SIZE]
  bool together;                 // chunks are merged behind a barrier
  const Plan &plan;

  __device__ __forceinline__ int items() const {
    return rows[ROWS - 1].first_item + rows[ROWS - 1].chunks * KV_HEADS;
  }
  __device__ __forceinline__ int chunks() const { return items() / KV_HEADS; }

  __device__ __forceinline__ Item item(int index) const {
    int row = 0;
    for (int r = 1; r < ROWS; ++r)
      if (index >= rows[r].first_item) row = r;
    index -= rows[row].first_item;
    return Item{row, index % KV_HEADS, index / KV_HEADS};
  }

  __device__ __forceinline__ bool is_last(const Item &i) const { return i.chunk == rows[i.row].chunks - 1; }
  // Whether the new key is computed here; else what the cache holds at its place counts.
  __device__ __forceinline__ bool is_fresh(const Item &i) const { return is_last(i) && rows[i.row].slot_of_last; }

  __device__ __forceinline__ int pages(const Item &i) const {
    return fetch_pages<KEYS>(tables + (i64)i.row * max_blocks, i.chunk * KEYS, rows[i.row].length, page_shift);
  }
  template <Kv Kind> __device__ __forceinline__ void copy(const Item &i, int pages, const T *cache) const {
    const int end = rows[i.row].length - (is_fresh(i) ? 1 : 0);
    copy_pages<T, HEAD_DIM, KEYS, THREADS, Kind, 4>(
        Kind == Kv::key ? keys : values, cache + ((i64)i.kv_head << page_shift) * HEAD_DIM,
        ((i64)KV_HEADS << page_shift) * HEAD_DIM, HEAD_DIM, pages, i.chunk * KEYS, end, page_shift, num_blocks);
    cp_async_commit();
  }

  // The query heads of an item; of the last chunk the new key and value too. Two phases: `load` before the cached keys are
  // there, `place` after.
  struct NewHeads {
    Vec<T, HEAD_WIDTH> first, second;
    int head, element;
    bool active;
  };
  __device__ __forceinline__ NewHeads load_heads(const Item &i) const {
    NewHeads h;
    const int self = this_thread();
    h.head = self / HEAD_LANES;
    h.element = self % HEAD_LANES * HEAD_WIDTH;
    h.active = h.head < GROUP + (is_last(i) ? 2 : 0) && h.element < HEAD_DIM / 2;
    h.first = h.second = Vec<T, HEAD_WIDTH>{};
    if ((self & ~31) >= (GROUP + 2) * HEAD_LANES) return h;  // the whole warp
    if (h.active) {
      const int from = h.head < GROUP ? i.kv_head * GROUP + h.head : HEADS + (h.head - GROUP) * KV_HEADS + i.kv_head;
      const int column = from * HEAD_DIM + h.element;
      qkv.receive16<QKV_SIZE, T>(h.first, h.second, i.row, column, column + HEAD_DIM / 2);
    }
    MARK(plan, 10);
    const float sum = head_squares(h.first, h.second, HEAD_LANES);
    if (h.active && h.head <= GROUP)
      norm_rotate_head(h.first, h.second, sum, head_norms + (h.head == GROUP ? HEAD_DIM : 0) + h.element,
                       rotations + i.row * HEAD_DIM + h.element, HEAD_DIM, eps, rows[i.row].position_inside);
    return h;
  }
  __device__ __forceinline__ void store_tile(T *tile, int row, const NewHeads &h) const {
    store_vec(tile + RowTile<HEAD_DIM>::at(row, h.element / 8), h.first);
    store_vec(tile + RowTile<HEAD_DIM>::at(row, (h.element + HEAD_DIM / 2) / 8), h.second);
  }
  __device__ __forceinline__ void place_heads(const Item &i, const NewHeads &h, T *k_cache, T *v_cache) const {
    if (!h.active) return;
    if (h.head < GROUP) return store_tile(q, h.head, h);
    const RowState &row = rows[i.row];
    const bool key = h.head == GROUP;
    if (row.slot_of_last) store_tile(key ? keys : values, row.length - 1 - i.chunk * KEYS, h);
    if (row.slot < 0 || row.slot >= (i64)num_blocks << page_shift) return;
    T *const target =
        (key ? k_cache : v_cache) + slot_offset(row.slot, i.kv_head, KV_HEADS, 1 << page_shift, HEAD_DIM) + h.element;
    store_vec(target, h.first);
    store_vec(target + HEAD_DIM / 2, h.second);
  }

  // One item. The copies of its keys and of its values are committed, those of the block's first item `later` ring fills ago,
  // of others (later < 0) just now. `next_keys` and `next_values` are called as soon as their buffers are free; both commit.
  template <class NextKeys, class NextValues>
  __device__ __forceinline__ void attend(const Item &i, int later, T *k_cache, T *v_cache, const NextKeys &next_keys,
                                         const NextValues &next_values) const {
    constexpr int Halves = GROUP > 8 ? 2 : 1;  // rows 8 to 15 of the tile
    const int self = this_thread();
    const int lane = self & 31, warp = self >> 5;
    const int row = lane >> 2, column = (lane & 3) * 2;
    const int key0 = i.chunk * KEYS, length = rows[i.row].length;

    const NewHeads heads = load_heads(i);
    MARK(plan, 11);
    const bool values_later = later < 0 && !is_fresh(i);
    if (values_later)
      cp_async_wait<1>();
    else
      wait_behind(later);
    __syncthreads();  // the cached keys are there, and the values unless they may come later
    MARK(plan, 12);
    place_heads(i, heads, k_cache, v_cache);
    __syncthreads();
    MARK(plan, 13);

    // Scores: a warp takes 16 keys.
    float s[2][4] = {};
    if (warp < KEY_GROUPS) {
      const int a_at = a_lane<HEAD_DIM>(), k_at = key_lane<HEAD_DIM>();
#pragma unroll
      for (int kk = 0; kk < HEAD_DIM / 16; ++kk) {
        u32 a[4], f[4];
        ldmatrix_x4(a, q + fragment_at<HEAD_DIM>(a_at, 0, kk));
        ldmatrix_x4(f, keys + fragment_at<HEAD_DIM>(k_at, 0, kk) + warp * 16 * HEAD_DIM);
        mma_m16n8k16<T>(s[0], a, f[0], f[1]);
        mma_m16n8k16<T>(s[1], a, f[2], f[3]);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (key0 + warp * 16 + h * 8 + column + (e & 1) >= length) s[h][e] = -CUKERN_INF;
#pragma unroll
      for (int r = 0; r < Halves; ++r) {
        const float top = quad_max(fmaxf(fmaxf(s[0][2 * r], s[0][2 * r + 1]), fmaxf(s[1][2 * r], s[1][2 * r + 1])));
        if ((lane & 3) == 0) key_max[(row + 8 * r) * KEY_GROUPS + warp] = top;
      }
    }
    MARK(plan, 14);
    __syncthreads();  // the maxima are there, and the keys may be overwritten
    MARK(plan, 15);
    next_keys();

    // Statistics of the two tiles, the same in every warp; p of this warp's 16 keys.
    float corr[KEYS / KEY_TILE][2], m[2], l[2];
#pragma unroll
    for (int r = 0; r < Halves; ++r) {
      m[r] = -CUKERN_INF;
      l[r] = 0.f;
#pragma unroll
      for (int tile = 0; tile < KEYS / KEY_TILE; ++tile) {
        const float *const tops = key_max + (row + 8 * r) * KEY_GROUPS + tile * (KEY_TILE / 16);
        const float top = fmaxf(m[r], fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3])));
        corr[tile][r] = rescale_factor(m[r], top, c);
        m[r] = top;
        if (warp / (KEY_TILE / 16) == tile) {
          const float mc = __fmul_rn(finite_max(top), c);
          float e[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) e[j] = softmax_exp(s[j >> 1][2 * r + (j & 1)], c, mc);
          key_sum[((row + 8 * r) * 4 + (lane & 3)) * KEY_GROUPS + warp] = group_sum(e[0], e[1], e[2], e[3]);
#pragma unroll
          for (int h = 0; h < 2; ++h)
            *reinterpret_cast<u32 *>(p + RowTile<KEYS>::at(row + 8 * r, 2 * warp + h) + column) =
                pack2<T>(e[2 * h], e[2 * h + 1]);
        }
      }
    }
    MARK(plan, 16);
    if (values_later) cp_async_wait<1>();  // all but the next keys
    __syncthreads();                       // p, the sums and the values are there
    MARK(plan, 17);

    // P V: a warp takes all keys for 16 columns.
    float acc[2][4] = {};
    if (warp < HEAD_DIM / 16) {
#pragma unroll
      for (int tile = 0; tile < KEYS / KEY_TILE; ++tile) {
        if (key0 + tile * KEY_TILE >= length) break;
#pragma unroll
        for (int r = 0; r < Halves; ++r) {
          const float *const sums = key_sum + ((row + 8 * r) * 4 + (lane & 3)) * KEY_GROUPS + tile * (KEY_TILE / 16);
          l[r] = update_sum(l[r], corr[tile][r], ((sums[0] + sums[1]) + sums[2]) + sums[3]);
          if (tile > 0)
#pragma unroll
            for (int d = 0; d < 2; ++d)
#pragma unroll
              for (int e = 2 * r; e < 2 * r + 2; ++e) acc[d][e] = __fmul_rn(acc[d][e], corr[tile][r]);
        }
#pragma unroll
        for (int j = tile * (KEY_TILE / 16); j < (tile + 1) * (KEY_TILE / 16); ++j) {
          u32 a[4], f[4];
          ldmatrix_x4(a, p + fragment_at<KEYS>(a_lane<KEYS>(), 0, j));
          ldmatrix_x4_trans(f, values + fragment_at<HEAD_DIM>(value_lane<HEAD_DIM>(), j * 16, warp));
          mma_m16n8k16<T>(acc[0], a, f[0], f[1]);
          mma_m16n8k16<T>(acc[1], a, f[2], f[3]);
        }
      }
    }
    MARK(plan, 18);
    __syncthreads();  // the values, p and the statistics may be overwritten
    MARK(plan, 19);
    next_values();

    const bool whole = rows[i.row].chunks == 1;
#pragma unroll
    for (int r = 0; r < Halves; ++r) {
      ChunkMerge merge;  // of this one chunk
      merge.reset();
      merge.step(m[r], l[r], c);
      const float norm = softmax_norm(quad_sum(merge.L));
      const int head = row + 8 * r;
      if (head >= GROUP || warp >= HEAD_DIM / 16) continue;
      const i64 to = (i64)i.row * HEADS + i.kv_head * GROUP + head, part = to * max_chunks + i.chunk;
      const bool words = DIRECT && !together;
      u64 *const sent = part_words + (to * INLINE_CHUNKS + i.chunk) * PART_WORDS;
      if (!whole && warp == 0) {
        const int t = lane & 3;
        if (words) {
          if (t == 0) send_word(sent + HEAD_DIM, __float_as_uint(m[r]), out.tag);
          send_word(sent + HEAD_DIM + 1 + t, __float_as_uint(l[r]), out.tag);
          if (t < 3) send_word(sent + HEAD_DIM + 5 + t, 0u, out.tag);  // words come in fours
        } else {
          if (t == 0) part_stats[part * 8] = m[r];
          part_stats[part * 8 + 1 + t] = l[r];
        }
      }
#pragma unroll
      for (int d = 0; d < 2; ++d) {
        const int at = warp * 16 + d * 8 + column;
        if (whole)
          out.send_pair<Q_SIZE, T>(i.row, (i.kv_head * GROUP + head) * HEAD_DIM + at, __fmul_rn(merge.add(0.f, acc[d][2 * r]), norm),
                           __fmul_rn(merge.add(0.f, acc[d][2 * r + 1]), norm));
        else if (words)
          Link{sent, out.tag}.send_floats<HEAD_DIM>(0, at, acc[d][2 * r], acc[d][2 * r + 1]);
        else
          store_vec(part_acc + part * HEAD_DIM + at, Vec<float, 2>{acc[d][2 * r], acc[d][2 * r + 1]});
      }
    }
    MARK(plan, 20);
  }

  // Four columns of a merged head from the statistics (m, l of four lanes) and accumulators of its chunks, into x.
  struct Merged {
    ChunkMerge merge;
    float l[4], total[4];

    __device__ __forceinline__ Merged() : l{}, total{} { merge.reset(); }
    __device__ __forceinline__ void add(const float *m_l, const float *acc, float c) {
      merge.step(m_l[0], 0.f, c);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        l[e] = merge.add(l[e], m_l[1 + e]);
        total[e] = merge.add(total[e], acc[e]);
      }
    }
    __device__ __forceinline__ void store(T *to) const {
      const float norm = softmax_norm((l[0] + l[1]) + (l[2] + l[3]));  // as quad_sum
      float y[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) y[e] = __fmul_rn(total[e], norm);
      store_floats<T, 4>(to, y);
    }
  };

  // Rows of the attention output into x, T [ROWS, Q_SIZE], merging the chunks of long sequences on the way. `stats`: room for
  // 5 floats a head and chunk. Called by the whole block.
  __device__ __forceinline__ void load_merged(T *x, float *stats) const {
    if (items() == ROWS * KV_HEADS) return load_rows<Q_SIZE>(x, out);  // one chunk each
    for (int i = this_thread(); i < ROWS * (Q_SIZE / 8); i += THREADS) {
      const int row = i / (Q_SIZE / 8), element = i % (Q_SIZE / 8) * 8;
      T *const to = x + row * x_pitch(Q_SIZE) + element;
      if (rows[row].chunks == 1) store_vec(to, out.template receive8<Q_SIZE, T>(row, element));
    }
    if constexpr (DIRECT)
      merge_words(x, stats);
    else
      merge_floats(x);
  }

  __device__ __forceinline__ void merge_floats(T *x) const {
    for (int i = this_thread(); i < ROWS * (Q_SIZE / 4); i += THREADS) {
      const int row = i / (Q_SIZE / 4), element = i % (Q_SIZE / 4) * 4, chunks = rows[row].chunks;
      if (chunks == 1) continue;
      Merged merged;
      const i64 part = ((i64)row * HEADS + element / HEAD_DIM) * max_chunks;
#pragma unroll 2
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const float *const m_l = part_stats + (part + chunk) * 8;
        const Vec<float, 4> first = load_vec<float, 4>(m_l);
        const float five[5] = {first.v[0], first.v[1], first.v[2], first.v[3], m_l[4]};
        const Vec<float, 4> acc = load_vec<float, 4>(part_acc + (part + chunk) * HEAD_DIM + element % HEAD_DIM);
        merged.add(five, acc.v, c);
      }
      merged.store(x + row * x_pitch(Q_SIZE) + element);
    }
  }

  // Everything that a thread needs is asked for at once: its columns of up to three chunks, and the statistics of one chunk,
  // which it passes on to the others.
  __device__ __forceinline__ void merge_words(T *x, float *stats) const {
    constexpr int Jobs = ROWS * (Q_SIZE / 4), Turns = ceil_div(Jobs, THREADS), Stats = ROWS * HEADS * INLINE_CHUNKS;
    static_assert(Stats <= THREADS, "one turn for the statistics");
    u32 v[INLINE_CHUNKS + 2][4];
#pragma unroll 1
    for (int turn = 0; turn < Turns + (Turns > 1); ++turn) {
      // Where there is more than one turn, the first is for the statistics alone.
      const int self = this_thread(), job = self + (turn - (Turns > 1)) * THREADS, stat = self + turn * THREADS;
      const int row = min(max(job, 0) / (Q_SIZE / 4), ROWS - 1), element = max(job, 0) % (Q_SIZE / 4) * 4;
      const int stat_head = min(stat / INLINE_CHUNKS, ROWS * HEADS - 1), stat_chunk = stat % INLINE_CHUNKS;
      const int chunks = rows[row].chunks, stat_chunks = rows[stat_head / HEADS].chunks;
      const bool merges = job >= 0 && job < Jobs && chunks > 1;
      const bool passes = stat < Stats && stat_chunks > 1 && stat_chunk < stat_chunks;
      const u64 *first[INLINE_CHUNKS + 2], *second[INLINE_CHUNKS + 2];
#pragma unroll
      for (int chunk = 0; chunk < INLINE_CHUNKS; ++chunk) {
        const Link part{part_words + (((i64)row * HEADS + element / HEAD_DIM) * INLINE_CHUNKS + chunk) * PART_WORDS, out.tag};
        first[chunk] = part.template pair_of_words<HEAD_DIM>(0, element % HEAD_DIM / 2);
        second[chunk] = first[chunk] + HEAD_DIM / 2;
      }
      u64 *const sent = part_words + ((i64)stat_head * INLINE_CHUNKS + stat_chunk) * PART_WORDS + HEAD_DIM;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        first[INLINE_CHUNKS + i] = sent + 4 * i;
        second[INLINE_CHUNKS + i] = sent + 4 * i + 2;
      }
      const u32 wanted = (merges ? (1u << chunks) - 1u : 0u) | (passes ? 3u << INLINE_CHUNKS : 0u);
      receive_words<INLINE_CHUNKS + 2>(v, reinterpret_cast<const u64 *const(&)[INLINE_CHUNKS + 2]>(first),
                                       reinterpret_cast<const u64 *const(&)[INLINE_CHUNKS + 2]>(second), wanted, out.tag);
      if (passes)
#pragma unroll
        for (int e = 0; e < 5; ++e)
          stats[(stat_head * INLINE_CHUNKS + stat_chunk) * 5 + e] = __uint_as_float(v[INLINE_CHUNKS + e / 4][e % 4]);
      __syncthreads();
      if (!merges) continue;
      Merged merged;
#pragma unroll
      for (int chunk = 0; chunk < INLINE_CHUNKS; ++chunk)
        if (chunk < chunks) {
          float acc[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) acc[e] = __uint_as_float(v[chunk][e]);
          merged.add(stats + ((row * HEADS + element / HEAD_DIM) * INLINE_CHUNKS + chunk) * 5, acc, c);
        }
      merged.store(x + row * x_pitch(Q_SIZE) + element);
    }
  }

  // The long sequences by all blocks together, 32 columns of a head at a time, to `out`. Between barriers.
  __device__ __forceinline__ void merge_long(MergeMemory &memory) const {
    constexpr int Slices = ceil_div(HEAD_DIM, MERGE_COLUMNS);
    for (int job = blockIdx.x; job < ROWS * HEADS * Slices; job += gridDim.x) {
      const int head = job / Slices, column0 = job % Slices * MERGE_COLUMNS, columns = min(HEAD_DIM - column0, MERGE_COLUMNS);
      const int chunks = rows[head / HEADS].chunks;
      if (chunks == 1) continue;
      float M, sum;
      const float y = merge_chunks<HEAD_DIM>(memory, part_acc + (i64)head * max_chunks * HEAD_DIM + column0,
                                             part_stats + (i64)head * max_chunks * 8, chunks, columns, c, M, sum);
      const float neighbour = __shfl_down_sync(0xffffffffu, y, 1);
      if ((int)threadIdx.x < columns && threadIdx.x % 2 == 0)
        out.send_pair<Q_SIZE, T>(head / HEADS, head % HEADS * HEAD_DIM + column0 + threadIdx.x, y, neighbour);
    }
  }
};
