// Attention over long contexts: an item (decode/attention.cuh) is one warp's work, which has slots of 16 keys or values in
// shared memory and fills them ahead, across tiles and items: no barrier stands between a copy and its use, and all warps
// together keep the memory busy. The first keys are asked for before the layer's queries are there. Every item leaves a part
// for decode/merge.cuh, also that of a sequence of one chunk. A block of fewer items than warps lets those that work use the
// slots of all.
// Measured: 4.6 TB/s while the chunks run (one sequence of 32,768, pages of 16); H200, docs/journal.md
// Test: tests/test_decode_step.py
#pragma once
#include "decode/attention.cuh"

template <class T> struct WarpAttention {
  static constexpr int Slot = SLOT_KEYS * HEAD_DIM, Pieces = HEAD_DIM / 8, TileSlots = KEY_TILE / SLOT_KEYS;
  const Attention<T> &attention;
  int turn, fill_slot;              // what is asked for: this warp's item of that number, how many of its slots were filled
  int pages;

  __device__ __forceinline__ static int lane() { return this_thread() & 31; }
  __device__ __forceinline__ static int warp() { return this_thread() >> 5; }
  template <class U> __device__ __forceinline__ U *mine(int offset) const {
    return reinterpret_cast<U *>(attention.shared + Shared::teams + WarpShared::warps + warp() * WarpShared::warp_bytes +
                                 offset);
  }

  __device__ __forceinline__ WarpAttention(const Attention<T> &attention) : attention(attention), turn(0), fill_slot(0) {
    pages = mine<int>(WarpShared::pages)[lane()];
  }
  __device__ __forceinline__ int units() const { return *attention.template block_state<int>(WarpShared::units); }
  __device__ __forceinline__ bool has(int turn) const { return warp() + turn * WARPS < units(); }
  // Slots of this warp, a power of two: a tile has a multiple of it.
  __device__ __forceinline__ int depth() const {
    const int count = units();
    return count > WARPS / 2 ? 1 : count > WARPS / 4 ? 2 : 4;
  }
  __device__ __forceinline__ T *slot(int number) const {
    const int count = depth();
    return reinterpret_cast<T *>(attention.shared + Shared::kv) + (warp() * count + (number & (count - 1))) * Slot;
  }
  // Items are looked up once. That of turn 0 stays for the next layer.
  __device__ __forceinline__ int2 *place_of(int turn) const {
    return mine<int2>(WarpShared::items) + (turn == 0 ? 0 : 1 + (turn - 1) % (WarpShared::items_known - 1));
  }
  __device__ __forceinline__ Item item(int turn) const {
    const int2 i = *place_of(turn);
    return Item{i.x >> 16, i.x & 0xffff, i.y};
  }
  // Keys of an item and of those behind it in its sequence.
  __device__ __forceinline__ int keys_left(const Item &i) const { return attention.rows[i.row].length - i.chunk * KEYS; }
  __device__ __forceinline__ void find_next() {
    if (!has(++turn)) return;
    const Item i = attention.item(*attention.template block_state<int>(WarpShared::first) + warp() + turn * WARPS);
    pages = attention.pages(i);
    fill_slot = 0;
    if (lane() == 0) *place_of(turn) = make_int2(i.row << 16 | i.kv_head, i.chunk);
    __syncwarp();
  }

  // 16 keys of an item (or values): neighbours in a page, one piece of memory. Zeros where the cache has none; keys of a
  // block outside of it become NaN and so do the rows that see them.
  __device__ __forceinline__ void copy(T *to, const T *cache, int key, bool value) const {
    const Item i = item(turn);
    const int block = __shfl_sync(0xffffffffu, pages, key >> attention.page_shift), self = lane();
    const int left = keys_left(i) - (attention.is_fresh(i) ? 1 : 0) - key;
    const bool known = (u32)block < (u32)attention.num_blocks;
    const T *const from = cache + attention.cache_row(i, block, key) + self * 8;
    constexpr int Rows = 32 % Pieces == 0 ? 32 / Pieces : 1, cycle = RowTile<HEAD_DIM>::cycle;
    if (32 % Pieces == 0 && known && left >= SLOT_KEYS) {  // a lane stays in its column
      const int at = RowTile<HEAD_DIM>::at(self / Pieces, self % Pieces);
#pragma unroll
      for (int n = 0; n < SLOT_KEYS / Rows; ++n)
        cp_async_16_once(to + (at ^ (((n * Rows / (8 / cycle)) & (cycle - 1)) << 3)) + n * Rows * HEAD_DIM, from + n * 256);
      return;
    }
#pragma unroll 1
    for (int n = self; n < SLOT_KEYS * Pieces; n += 32) {
      const int row = n / Pieces;
      T *const target = to + RowTile<HEAD_DIM>::at(row, n % Pieces);
      if (row < left && !known && !value)
        *reinterpret_cast<uint4 *>(target) = make_uint4(0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu);
      else
        cp_async_16_once(target, row < left && known ? from + (n - self) * 8 : cache, row < left && known);
    }
  }

  // The slot that was read last; a tile's keys, then its values.
  __device__ __forceinline__ void copy_next(const LayerCache<T> &cache) {
    const int part = fill_slot % (2 * TileSlots), key = fill_slot / (2 * TileSlots) * KEY_TILE + part % TileSlots * SLOT_KEYS;
    copy(slot(fill_slot), part < TileSlots ? cache.keys() : cache.values(), key, part >= TileSlots);
    ++fill_slot;
  }
  __device__ __forceinline__ void fill(const LayerCache<T> &cache) {
    if (has(turn)) {
      copy_next(cache);
      if (fill_slot % (2 * TileSlots) == 0 &&
          (fill_slot == KEYS / KEY_TILE * 2 * TileSlots || fill_slot / (2 * TileSlots) * KEY_TILE >= keys_left(item(turn))))
        find_next();
    }
    cp_async_commit();
  }
  // All slots, as one group: what does not depend on this layer.
  __device__ __forceinline__ void start(const LayerCache<T> &cache) {
    if (has(0))
#pragma unroll 1
      for (int i = 0; i < depth(); ++i) copy_next(cache);
    cp_async_commit();
  }
  // The oldest slot, that of this number, when it is there. early: start() filled it, and that has been waited for.
  __device__ __forceinline__ T *front(int number, bool early) const {
    const int count = depth();
    if (early && number < count)
      ;
    else if (count == 1)
      cp_async_wait<0>();
    else if (count == 2)
      cp_async_wait<1>();
    else
      cp_async_wait<3>();
    __syncwarp();
    return slot(number);
  }

  // Query heads of an item into this warp's memory, see query(); in the last chunk the new key and value into the cache.
  __device__ __forceinline__ void load_heads(const Item &i, const LayerCache<T> &cache) const {
    constexpr int AtOnce = 32 / HEAD_LANES, Half = HEAD_DIM / 2;
    const RowState &row = attention.rows[i.row];
    const int self = lane(), element = self % HEAD_LANES * HEAD_WIDTH, heads = GROUP + (attention.is_last(i) ? 2 : 0);
#pragma unroll 1
    for (int head = self / HEAD_LANES; head - self / HEAD_LANES < heads; head += AtOnce) {
      const bool active = head < heads && element < Half;
      Vec<T, HEAD_WIDTH> first{}, second{};
      if (active) {
        const int from = head < GROUP ? i.kv_head * GROUP + head : HEADS + (head - GROUP) * KV_HEADS + i.kv_head;
        const int column = from * HEAD_DIM + element;
        attention.qkv.template receive16<QKV_SIZE, T>(first, second, i.row, column, column + Half);
      }
      const float sum = head_squares(first, second, HEAD_LANES);
      if (!active) continue;
      if (head <= GROUP)
        norm_rotate_head(first, second, sum,
                         attention.template block_state<float>(WarpShared::head_norms) + (head == GROUP ? HEAD_DIM : 0) +
                             element,
                         reinterpret_cast<const float *>(attention.shared + Shared::rotations) + i.row * HEAD_DIM + element,
                         HEAD_DIM, attention.eps, row.position_inside);
      if (head < GROUP) {
        store_query(head, element, first);
        store_query(head, element + Half, second);
      } else if (row.slot >= 0 && row.slot < (i64)attention.num_blocks << attention.page_shift) {
        T *const target = (head == GROUP ? cache.keys() : cache.values()) +
                          slot_offset(row.slot, i.kv_head, KV_HEADS, 1 << attention.page_shift, HEAD_DIM) + element;
        store_vec(target, first);
        store_vec(target + Half, second);
      }
    }
    __syncwarp();
  }
  // Of every 32 elements a lane's four pairs of two steps lie together.
  __device__ __forceinline__ void store_query(int head, int element, const Vec<T, HEAD_WIDTH> &v) const {
    T *const row = mine<T>(WarpShared::queries) + head * WarpShared::query_pitch;
    u32 *const to = reinterpret_cast<u32 *>(row + element / 32 * 32);
#pragma unroll
    for (int t = 0; t < 4; ++t) to[t * 4 + element % 32 / 8] = reinterpret_cast<const u32 *>(&v)[t];
  }
  // Row g head g of the mma's A operand for two steps; there are no heads 8 to 15.
  __device__ __forceinline__ const uint4 *query() const {
    const int self = lane(), g = min(self >> 2, GROUP - 1), t = self & 3;
    return reinterpret_cast<const uint4 *>(mine<T>(WarpShared::queries) + g * WarpShared::query_pitch + t * 8);
  }
  // The new key or value, which this warp has just written to the cache, into its row of a slot that is read.
  __device__ __forceinline__ void new_row(T *slot, int row, const T *cache, const Item &i) const {
    const int self = lane();
    const i64 at = slot_offset(attention.rows[i.row].slot, i.kv_head, KV_HEADS, 1 << attention.page_shift, HEAD_DIM);
    if (self < Pieces) store_vec(slot + RowTile<HEAD_DIM>::at(row, self), load_vec<T, 8>(cache + at + self * 8));
    __syncwarp();
  }

  // All items of this warp. `later`: ring fills since start().
  __device__ __forceinline__ void run(const LayerCache<T> &cache, int later) {
    if (!has(0)) return;
    fill_slot = depth();
    const int t = lane() & 3;
#pragma unroll 1
    for (int now = 0; has(now); ++now) {
      const Item i = item(now);
      const int keys = keys_left(i);
      load_heads(i, cache);
      MARK(attention.plan, 13);
      if (now == 0) wait_behind(later);
      const int new_key = attention.is_fresh(i) ? keys - 1 : -1;
      float acc[HEAD_DIM / 16][4], m = -CUKERN_INF, l = 0.f;
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 16; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[d][e] = 0.f;
      // Of head g: scores of keys 2t, 2t + 1, 2t + 8, 2t + 9 of every 16 of a tile; then p of the four, packed, in [0] and [1].
      float p[KEY_TILE / 16][4] = {};
#pragma unroll 1
      for (int number = 0; number < KEYS / KEY_TILE * 2 * TileSlots; ++number) {  // slots: a tile's keys, then its values
        const int part = number % (2 * TileSlots), tile = number / (2 * TileSlots) * KEY_TILE;
        if (tile > 0 && tile >= keys) break;
        T *const rows = front(number, now == 0);
        const int key = tile + part % TileSlots * SLOT_KEYS, self = lane();
        const int at = RowTile<HEAD_DIM>::at((self & 7) + (self >> 4) * 8, self >> 3 & 1);
        const bool value = part >= TileSlots;
        if ((u32)(new_key - key) < (u32)SLOT_KEYS)
          new_row(rows, new_key - key, value ? cache.values() : cache.keys(), item(now));
        if (!value) {
          const uint4 *const queries = query();
          float s[2][4] = {};
#pragma unroll
          for (int step = 0; step < HEAD_DIM / 16; ++step) {
            const uint4 q = queries[step / 2 * 4];
            const u32 a[4] = {step % 2 == 0 ? q.x : q.z, 0u, step % 2 == 0 ? q.y : q.w, 0u};
            u32 f[4];
            ldmatrix_x4(f, rows + fragment_at<HEAD_DIM>(at, 0, step));
            mma_m16n8k16<T>(s[0], a, f[0], f[1]);
            mma_m16n8k16<T>(s[1], a, f[2], f[3]);
          }
#pragma unroll
          for (int j = 0; j < TileSlots; ++j)
            if (part == j)
#pragma unroll
              for (int e = 0; e < 4; ++e)
                p[j][e] = key + (e >> 1) * 8 + 2 * t + (e & 1) < keys ? s[e >> 1][e & 1] : -CUKERN_INF;
        } else {  // heads 2t, 2t + 1: columns g, g + 8 of every 16
          u32 w[2] = {};
#pragma unroll
          for (int j = 0; j < TileSlots; ++j)
            if (part == TileSlots + j)
#pragma unroll
              for (int h = 0; h < 2; ++h) w[h] = __float_as_uint(p[j][h]);
#pragma unroll
          for (int d = 0; d < HEAD_DIM / 16; ++d) {
            u32 f[4];
            ldmatrix_x4_trans(f, rows + fragment_at<HEAD_DIM>(at, 0, d));
            mma_m16n8k16<T>(acc[d], f, w[0], w[1]);
          }
        }
        __syncwarp();
        fill(cache);
        if (part == TileSlots - 1) {
          float top = -CUKERN_INF;
#pragma unroll
          for (int j = 0; j < KEY_TILE / 16; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) top = fmaxf(top, p[j][e]);
          top = fmaxf(m, quad_max(top));
          const float corr = rescale_factor(m, top, attention.c), mc = __fmul_rn(finite_max(top), attention.c);
          m = top;
          float sum = 0.f;
#pragma unroll
          for (int j = 0; j < KEY_TILE / 16; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) p[j][e] = softmax_exp(p[j][e], attention.c, mc);
            const float group = group_sum(p[j][0], p[j][1], p[j][2], p[j][3]);
            sum = j == 0 ? group : sum + group;
            p[j][0] = __uint_as_float(pack2<T>(p[j][0], p[j][1]));
            p[j][1] = __uint_as_float(pack2<T>(p[j][2], p[j][3]));
          }
          l = update_sum(l, corr, sum);
          if (tile == 0) continue;
          const float even = __shfl_sync(0xffffffffu, corr, 8 * t), odd = __shfl_sync(0xffffffffu, corr, 8 * t + 4);
#pragma unroll
          for (int d = 0; d < HEAD_DIM / 16; ++d)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[d][e] = __fmul_rn(acc[d][e], e & 1 ? odd : even);
        }
      }
      MARK(attention.plan, 18);
      send(item(now), acc, m, l);
      MARK(attention.plan, 20);
    }
  }

  // The item's part of its sequence.
  __device__ __forceinline__ void send(const Item &i, const float (&acc)[HEAD_DIM / 16][4], float m, float l) const {
    const int self = lane(), g = self >> 2, t = self & 3;
    const i64 part0 = (i64)(i.row * HEADS + i.kv_head * GROUP) * attention.max_chunks + i.chunk;
    if (g < GROUP) {
      const i64 part = part0 + (i64)g * attention.max_chunks;
      if constexpr (DIRECT) {
        u64 *const to = attention.part_words + part * PART_WORDS;
        if (t == 0) send_word(to + PART_M, __float_as_uint(m), attention.out.tag);
        send_word(to + PART_L + t, __float_as_uint(l), attention.out.tag);
      } else {
        if (t == 0) attention.part_stats[part * 8] = m;
        attention.part_stats[part * 8 + 1 + t] = l;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (2 * t + h >= GROUP) continue;
      const i64 part = part0 + (i64)(2 * t + h) * attention.max_chunks;
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 16; ++d)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = d * 16 + e * 8 + g;
          if constexpr (DIRECT) {
            const Link to{attention.part_words + part * PART_WORDS, attention.out.tag};
            send_word(to.template pair_of_words<HEAD_DIM>(0, column / 2) + column % 2, __float_as_uint(acc[d][2 * e + h]),
                      to.tag);
          } else {
            attention.part_acc[part * HEAD_DIM + column] = acc[d][2 * e + h];
          }
        }
    }
  }
};
