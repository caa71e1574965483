// Attention of one step over the paged cache, the same bits as attention_decode.cu. An item is a chunk of 128 keys of one
// sequence for the query heads of one key/value head, the rows of a 16-row mma tile; a team of 8 warps works on it. Its keys go
// from the cache to registers, its values to shared memory, those of the next item while this one is computed; of a layer's
// first item, the keys have been asked for into L2, and the values may come by the copy engine (decode/values.cuh). The team
// also norms and rotates its heads and, in the last chunk, the new key, and writes key and value to the cache.
// A sequence of no more chunks than a block has teams is finished in that block; the parts of a longer one are merged by the
// blocks together (decode/merge.cuh).
// Test: tests/test_decode_step.py
#pragma once
#include "common/head_norm.cuh"
#include "common/kv_tile.cuh"
#include "common/paged.cuh"
#include "decode/rows.cuh"
#include "decode/values.cuh"
#include "ptx/memory.cuh"
#include "ptx/named_barrier.cuh"

struct Item {
  int row, kv_head, chunk;
};

// Keys and values of a layer. Pointers are computed when they are used, which costs less than registers.
template <class T> struct LayerCache {
  T *k, *v;  // of layer 0
  int layer, num_blocks, page_shift;

  __device__ __forceinline__ T *keys() const { return k + offset(); }
  __device__ __forceinline__ T *values() const { return v + offset(); }
  __device__ __forceinline__ i64 offset() const {
    return ((i64)opaque(num_blocks) * (layer * KV_HEADS) << page_shift) * HEAD_DIM;
  }
};

// Whether what a second team leaves for the first one fits over its queries, which nobody reads any more.
constexpr bool BY_WARPS = GROUP * (HEAD_DIM + TEAM_WARPS * 5) * 4 <= TeamShared::p;

template <class T> struct Attention {
  unsigned char *shared;
  const RowState *rows;
  const int *tables;
  int max_blocks, page_shift, num_blocks, max_chunks;
  float eps, c;
  float *part_acc, *part_stats;  // [ROWS, HEADS, max_chunks, HEAD_DIM], [.., 8]
  u64 *part_words;               // with DIRECT instead of these: [ROWS, HEADS, max_chunks, PART_WORDS]
  Link out;                      // T [ROWS, Q_SIZE]
  Link qkv;                      // T [ROWS, QKV_SIZE]
  const Plan &plan;

  // Kept in shared memory, registers are scarce. No sequence has more chunks than there are teams: nothing is left to merge.
  __device__ __forceinline__ bool couples() const { return ALONE != 1 && plan.couples != 0; }
  // Every warp works for itself (decode/warp_attention.cuh): where a team has more than two items, or the kernel is made so.
  __device__ __forceinline__ bool alone() const { return ALONE == 2 ? plan.alone != 0 : ALONE == 1; }

  __device__ __forceinline__ static int team() { return this_thread() / TEAM_THREADS; }
  __device__ __forceinline__ static int team_thread() { return this_thread() % TEAM_THREADS; }
  __device__ __forceinline__ static void team_barrier() { named_barrier_sync(1 + team(), TEAM_THREADS); }
  template <class U> __device__ __forceinline__ U *mine(int offset) const {
    return reinterpret_cast<U *>(shared + Shared::teams + team() * TeamShared::bytes + offset);
  }
  template <class U> __device__ __forceinline__ U *block_state(int offset) const {  // of WarpShared
    return reinterpret_cast<U *>(shared + Shared::teams + offset);
  }
  __device__ __forceinline__ T *values() const {
    return reinterpret_cast<T *>(shared + Shared::kv) + team() * (KEYS * HEAD_DIM);
  }

  __device__ __forceinline__ int items() const {
    return rows[ROWS - 1].first_item + rows[ROWS - 1].chunks * KV_HEADS;
  }

  // How the items are dealt. A couple is one item for each team of a block; else a team takes neighbouring items, which mostly
  // have the same query heads.
  __device__ __forceinline__ void choose() {
    const int count = items(), blocks = (int)gridDim.x, block = (int)blockIdx.x;
    bool couples = ALONE != 1;
    for (int r = 0; r < ROWS; ++r) couples = couples && rows[r].chunks <= TEAMS;
    const bool alone = ALONE == 1 || (ALONE == 2 && !couples && count > 2 * TEAMS * blocks);
    if (threadIdx.x == 0) {
      Plan &state = const_cast<Plan &>(plan);
      state.couples = couples;
      state.alone = alone;
      state.by_engine[0] = state.by_engine[1] = 0;
    }
    __syncthreads();
    if (alone) {
      const int begin = (int)((i64)count * block / blocks), units = (int)((i64)count * (block + 1) / blocks) - begin;
      const int self = this_thread() & 31, warp = this_thread() >> 5;
      unsigned char *const mine = block_state<unsigned char>(WarpShared::warps + warp * WarpShared::warp_bytes);
      const Item i = warp < units ? item(begin + warp) : Item{0, 0, 0};
      reinterpret_cast<int *>(mine + WarpShared::pages)[self] = warp < units ? pages(i) : -1;
      if (self == 0) *reinterpret_cast<int2 *>(mine + WarpShared::items) = make_int2(i.row << 16 | i.kv_head, i.chunk);
      if (threadIdx.x == 0) *block_state<int>(WarpShared::first) = begin;
      if (threadIdx.x == 0) *block_state<int>(WarpShared::units) = units;
      __syncthreads();
      return;
    }
    int first_item = 0, item_count = 0;
    if (couples) {
      for (int index = block + (ROWS * KV_HEADS - 1) / blocks * blocks; index >= block; index -= blocks)
        if (index < ROWS * KV_HEADS && team() < rows[index / KV_HEADS].chunks) {
          first_item = index;
          ++item_count;
        }
    } else if (count <= blocks) {
      first_item = block;
      item_count = team() == 0 && block < count ? 1 : 0;
    } else if (team() < TEAMS) {
      const i64 streams = (i64)blocks * TEAMS, stream = (i64)team() * blocks + block;
      first_item = (int)(count * stream / streams);
      item_count = (int)(count * (stream + 1) / streams) - first_item;
    }
    const int self = team_thread();
    if (team() < TEAMS && self < 32) {
      const Item i = item_count > 0 ? item(first_item) : Item{0, 0, 0};
      if (self == 0) *mine<int4>(TeamShared::first) = make_int4(i.row, i.kv_head, i.chunk, item_count);
      const int pages = item_count > 0 ? this->pages(i) : -1, key = self % (KEYS / 16) * 16;
      const int block = __shfl_sync(0xffffffffu, pages, key >> page_shift);
      const bool known = i.chunk * KEYS + key < rows[i.row].length && (u32)block < (u32)num_blocks;
      mine<int>(TeamShared::first_pages)[self] = pages;
      mine<int>(TeamShared::first_keys)[self] = known ? (int)(cache_row(i, block, key) / HEAD_DIM) : -1;
      if constexpr (BY_ENGINE) {
        const bool whole = __all_sync(0xffffffffu, known) && item_count > 0 && !couples && !is_last(i);
        if (self == 0) const_cast<Plan &>(plan).by_engine[team()] = whole;
      }
    }
    __syncthreads();
  }
  __device__ __forceinline__ int item_count() const {  // of this team
    return TEAMS == 2 || team() == 0 ? mine<int4>(TeamShared::first)->w : 0;
  }
  __device__ __forceinline__ Item first() const {
    const int4 i = *mine<int4>(TeamShared::first);
    return Item{i.x, i.y, i.z};
  }
  __device__ __forceinline__ int first_pages() const { return mine<int>(TeamShared::first_pages)[lane_id()]; }
  // The item behind `i`, if there is one.
  __device__ __forceinline__ Item next(Item i) const {
    if (couples()) {
      int index = i.row * KV_HEADS + i.kv_head;
      do index += (int)gridDim.x;
      while (index < ROWS * KV_HEADS && team() >= rows[index / KV_HEADS].chunks);
      return Item{index / KV_HEADS, index % KV_HEADS, team()};
    }
    if (++i.chunk < rows[i.row].chunks) return i;
    i.chunk = 0;
    if (++i.kv_head < KV_HEADS) return i;
    return Item{i.row + 1, 0, 0};
  }
  __device__ __forceinline__ Item item(int index) const {
    if (couples()) return Item{index / KV_HEADS, index % KV_HEADS, team()};
    int row = 0;
    for (int r = 1; r < ROWS; ++r)
      if (index >= rows[r].first_item) row = r;
    index -= rows[row].first_item;
    return Item{row, index / rows[row].chunks, index % rows[row].chunks};
  }

  __device__ __forceinline__ bool is_last(const Item &i) const { return i.chunk == rows[i.row].chunks - 1; }
  // Whether the new key is computed here; else what the cache holds at its place counts.
  __device__ __forceinline__ bool is_fresh(const Item &i) const { return is_last(i) && rows[i.row].slot_of_last; }

  __device__ __forceinline__ int pages(const Item &i) const {
    return fetch_pages<KEYS>(tables + (i64)i.row * max_blocks, i.chunk * KEYS, rows[i.row].length, page_shift);
  }
  // First element of a key or value of the item, `key` keys behind the first. A layer's rows are counted in 32 bits.
  __device__ __forceinline__ i64 cache_row(const Item &i, int block, int key) const {
    const u32 head = (u32)block * KV_HEADS + (u32)i.kv_head;
    return (i64)((head << page_shift) + (u32)((i.chunk * KEYS + key) & ((1 << page_shift) - 1))) * HEAD_DIM;
  }

  // The item's values into shared memory; keys past the end get zeros, the new one is not touched.
  __device__ __forceinline__ void copy_values(const Item &i, int pages, const T *cache) const {
    constexpr int Pieces = HEAD_DIM / 8;
    static_assert(KEYS * Pieces % TEAM_THREADS == 0, "whole turns");
    const int self = team_thread(), left = rows[i.row].length - i.chunk * KEYS, fresh = is_fresh(i) ? left - 1 : -1;
    T *const tile = values();
    auto copy = [&](T *to, int row, int piece) {
      const int block = __shfl_sync(0xffffffffu, pages, row >> page_shift);
      const bool ok = row < left && (u32)block < (u32)num_blocks;
      if (row != fresh) cp_async_16_once(to, cache + ((ok ? cache_row(i, block, row) : 0) + piece * 8), ok);
    };
    constexpr int Step = TEAM_THREADS / Pieces;  // rows of a turn
    if constexpr (TEAM_THREADS % Pieces == 0 && Step % 8 == 0) {  // a thread stays in its column
      const int row = self / Pieces, piece = self % Pieces;
      T *const to = tile + value_at(row, piece);
#pragma unroll
      for (int turn = 0; turn < KEYS / Step; ++turn) copy(to + turn * Step * HEAD_DIM, row + turn * Step, piece);
    } else {
#pragma unroll 2
      for (int n = self; n < KEYS * Pieces; n += TEAM_THREADS)
        copy(tile + value_at(n / Pieces, n % Pieces), n / Pieces, n % Pieces);
    }
    cp_async_commit();
  }
  // Into L2, at once.
  __device__ __forceinline__ void prefetch_keys(const Item &i, int pages, const T *cache) const {
    const int self = team_thread(), key = self / 2, half = self % 2 * 64;
    const int block = __shfl_sync(0xffffffffu, pages, key >> page_shift);
    if (half < HEAD_DIM && i.chunk * KEYS + key < rows[i.row].length && (u32)block < (u32)num_blocks)
      prefetch_line(cache + cache_row(i, block, key) + half);
  }

  // The first item's keys into L2, by one instruction a page or part of one.
  __device__ __forceinline__ void prefetch_first_keys(const T *keys) const {
    const int self = this_thread();
    if (self % TEAM_THREADS >= KEYS / 16 || self / TEAM_THREADS >= TEAMS) return;
    const int row = mine<int>(TeamShared::first_keys)[self % TEAM_THREADS];
    if (row >= 0) prefetch_bulk(keys + (i64)row * HEAD_DIM, 16 * HEAD_DIM * 2);
  }

  // Keys as B operands of the scores, straight from the cache: a warp has 16 of them. A lane loads 8 elements of every 32, all
  // of one step of 16, and gives 4 of them for 4 of the other step to its neighbour (`exchange`); the queries lie accordingly.
  // Keys past the end are zero; those of a block outside the cache become NaN and so do the rows that see them.
  static constexpr int Wide = HEAD_DIM / 32, Tail = HEAD_DIM % 32 / 16;
  struct Keys {
    uint4 k[2][Wide > 0 ? Wide : 1];
    uint2 tail[2];

    __device__ __forceinline__ void exchange() {
      const bool upper = threadIdx.x & 2;
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int i = 0; i < Wide; ++i) {
          uint4 &v = k[h][i];
          const u32 a = __shfl_xor_sync(0xffffffffu, upper ? v.x : v.z, 2);
          const u32 b = __shfl_xor_sync(0xffffffffu, upper ? v.y : v.w, 2);
          v = upper ? make_uint4(a, b, v.z, v.w) : make_uint4(v.x, v.y, a, b);
        }
    }
    __device__ __forceinline__ void set(int h, const T *key) {  // after the exchange, from all elements of the key
      const int t = threadIdx.x & 3;
      const T *const from = key + ((t & 1) * 2 + (t >> 1)) * 4;
#pragma unroll
      for (int i = 0; i < Wide; ++i) {
        const uint2 a = *reinterpret_cast<const uint2 *>(from + i * 32);
        const uint2 b = *reinterpret_cast<const uint2 *>(from + i * 32 + 16);
        k[h][i] = make_uint4(a.x, a.y, b.x, b.y);
      }
      if (Tail) tail[h] = *reinterpret_cast<const uint2 *>(from + Wide * 32);
    }
    __device__ __forceinline__ uint2 step(int h, int s) const {
      if (s / 2 >= Wide) return tail[h];
      const uint4 &v = k[h][s / 2 < Wide ? s / 2 : 0];
      return s % 2 == 0 ? make_uint2(v.x, v.y) : make_uint2(v.z, v.w);
    }
  };
  __device__ __forceinline__ void load_keys(Keys &keys, const Item &i, int pages, const T *cache) const {
    const int self = team_thread(), lane = self & 31;
    const int end = rows[i.row].length - (is_fresh(i) ? 1 : 0) - i.chunk * KEYS;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = (self >> 5) * 16 + h * 8 + (lane >> 2);
      const int block = __shfl_sync(0xffffffffu, pages, key >> page_shift);
      if (key < end && (u32)block < (u32)num_blocks) {
        const T *const from = cache + cache_row(i, block, key);
        const int t = lane & 3;
#pragma unroll
        for (int wide = 0; wide < Wide; ++wide) keys.k[h][wide] = load_last_time(from + wide * 32 + t * 8);
        if (Tail) keys.tail[h] = load_once_8(from + Wide * 32 + ((t & 1) * 2 + (t >> 1)) * 4);
      } else {
        const u32 fill = key < end ? 0x7fff7fffu : 0u;
#pragma unroll
        for (int wide = 0; wide < Wide; ++wide) keys.k[h][wide] = make_uint4(fill, fill, fill, fill);
        if (Tail) keys.tail[h] = make_uint2(fill, fill);
      }
    }
  }

  // The query heads of an item unless they are there already; of the last chunk the new key and value too. A warp takes a
  // head: every HEAD_LANES lanes receive all of it and sum up its squares, then each of the first four such groups of lanes
  // has two elements of every eight, and their rotation partners.
  __device__ __forceinline__ void make_heads(const Item &i, bool queries_there, T *k_cache, T *v_cache) const {
    constexpr int Half = HEAD_DIM / 2;
    const int lane = team_thread() & 31, group = lane / HEAD_LANES, element = lane % HEAD_LANES * HEAD_WIDTH;
    const int at = element + group % (HEAD_WIDTH / 2) * 2, heads = GROUP + (is_last(i) ? 2 : 0);
    const bool inside = element < Half, stores = inside && group < HEAD_WIDTH / 2;
    const float *const rotation = reinterpret_cast<const float *>(shared + Shared::rotations) + i.row * HEAD_DIM;
#pragma unroll 1
    for (int head = (queries_there ? GROUP : 0) + (team_thread() >> 5); head < heads; head += TEAM_WARPS) {
      // Everything else is there before the head comes.
      const bool query = head < GROUP, key = head == GROUP;
      const float *const weight = mine<float>(TeamShared::head_norms) + (query ? 0 : HEAD_DIM);
      float weights[2][2], cosines[2], sines[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int from = inside ? at + j : 0;
        weights[0][j] = weight[from];
        weights[1][j] = weight[from + Half];
        cosines[j] = rotation[from];
        sines[j] = rotation[from + Half];
      }
      // Where in shared memory they go, counted in words: two halves of a register.
      u32 places = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int to = at + half * Half, key_row = rows[i.row].length - 1 - i.chunk * KEYS;
        const int bytes = query ? own_bytes(TeamShared::q) + query_place(head, to) * 2
                          : key ? own_bytes(TeamShared::new_key) + to * 2
                                : Shared::kv + (team() * KEYS * HEAD_DIM + value_at(key_row, to / 8) + to % 8) * 2;
        places |= (u32)bytes / 4 << 16 * half;
      }
      opaque(places);
      Vec<T, HEAD_WIDTH> first{}, second{};
      if (inside) {
        const int from = query ? i.kv_head * GROUP + head : HEADS + (head - GROUP) * KV_HEADS + i.kv_head;
        qkv.receive16<QKV_SIZE, T>(first, second, i.row, from * HEAD_DIM + element, from * HEAD_DIM + element + Half);
      }
      MARK(plan, 10);
      u32 two[2] = {two_of(first, group), two_of(second, group)};
      if (head <= GROUP) {
        const float scale = rms_scale<HEAD_DIM>(head_squares(first, second, HEAD_LANES), eps);
        Vec<T, 2> a = *reinterpret_cast<const Vec<T, 2> *>(&two[0]), b = *reinterpret_cast<const Vec<T, 2> *>(&two[1]);
        float y[2], z[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          y[j] = to_float(a.v[j]) * scale * weights[0][j];
          z[j] = to_float(b.v[j]) * scale * weights[1][j];
          rotate_pair(y[j], z[j], cosines[j], sines[j]);
          if (!rows[i.row].position_inside) y[j] = z[j] = CUKERN_NAN;
        }
        two[0] = pack2<T>(y[0], y[1]);
        two[1] = pack2<T>(z[0], z[1]);
      }
      MARK(plan, 11);
      if (!stores) continue;
      const RowState &row = rows[i.row];
      if (query || row.slot_of_last)
#pragma unroll
        for (int half = 0; half < 2; ++half) reinterpret_cast<u32 *>(shared)[places >> 16 * half & 0xffffu] = two[half];
      if (query || row.slot < 0 || row.slot >= (i64)num_blocks << page_shift) continue;
      const u32 cache_head = (u32)(row.slot >> page_shift) * KV_HEADS + (u32)i.kv_head;
      T *const target = (key ? k_cache : v_cache) +
                        (i64)((cache_head << page_shift) + ((u32)row.slot & ((1 << page_shift) - 1))) * HEAD_DIM + at;
#pragma unroll
      for (int half = 0; half < 2; ++half) *reinterpret_cast<u32 *>(target + half * Half) = two[half];
    }
  }
  // The two of a lane's eight elements that belong to its group of lanes.
  __device__ __forceinline__ static u32 two_of(const Vec<T, HEAD_WIDTH> &v, int group) {
    const u32 *const w = reinterpret_cast<const u32 *>(&v);
    const u32 low = group & 1 ? w[1] : w[0], high = group & 1 ? w[3] : w[2];
    return group & 2 ? high : low;
  }
  __device__ __forceinline__ static int own_bytes(int offset) { return Shared::teams + team() * TeamShared::bytes + offset; }
  // Of every 16, elements 0 ... 3 are where ldmatrix gives them to lane 0, 4 ... 7 to lane 2, 8 ... 11 to lane 1, the rest to
  // lane 3. Element: even.
  __device__ __forceinline__ static int query_place(int row, int element) {
    return RowTile<HEAD_DIM>::at(row, element / 16 * 2 + (element / 2 & 1)) + ((element / 8 & 1) + (element / 4 & 1) * 2) * 2;
  }

  // One item of this team. The copies of its values are committed, `later` ring fills ago (fill_ring may add to them), or
  // the copy engine brings them: `values_there` waits for that.
  // `next_keys` and `next_values` are called as soon as their places are free; `more`: whether they ask for anything.
  // `fill_ring`: when the heads have come, since memory has nothing to do while they are computed with.
  template <class NextKeys, class NextValues, class FillRing, class ValuesThere>
  __device__ __forceinline__ void attend(const Item &i, Keys &keys, int later, bool queries_there, bool more, T *k_cache,
                                         T *v_cache, const NextKeys &next_keys, const NextValues &next_values,
                                         const FillRing &fill_ring, const ValuesThere &values_there) const {
    constexpr int Halves = GROUP > 8 ? 2 : 1;  // rows 8 to 15 of the tile
    const int self = team_thread();
    const int lane = self & 31, warp = self >> 5;
    const int row = lane >> 2, column = (lane & 3) * 2;
    const int key0 = i.chunk * KEYS, length = rows[i.row].length;
    float *const key_max = mine<float>(TeamShared::key_max), *const key_sum = mine<float>(TeamShared::key_sum);
    T *const p = mine<T>(TeamShared::p);

    if (!queries_there || is_last(i)) {
      keys.exchange();
      make_heads(i, queries_there, k_cache, v_cache);
      MARK(plan, 12);
      team_barrier();
      if (is_fresh(i) && (length - 1 - key0) >> 4 == warp) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (((length - 1) & 15) == h * 8 + row) keys.set(h, mine<T>(TeamShared::new_key));
      }
    } else {
      keys.exchange();
    }
    MARK(plan, 13);
    later += fill_ring();

    // Scores: a warp takes 16 keys.
    float s[2][4] = {};
    const T *const q = mine<T>(TeamShared::q);
    const int a_at = a_lane<HEAD_DIM>();
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step) {
      u32 a[4];
      ldmatrix_x4(a, q + fragment_at<HEAD_DIM>(a_at, 0, step));
#pragma unroll
      for (int h = 0; h < 2; ++h) mma_m16n8k16<T>(s[h], a, keys.step(h, step).x, keys.step(h, step).y);
    }
    next_keys();
    if (key0 + KEYS > length)
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
    MARK(plan, 14);
    team_barrier();  // the maxima are there
    MARK(plan, 15);

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
    // Where a lane's columns of the output or of the part go, see send and send_part.
    const bool whole = couples() || rows[i.row].chunks == 1;
    u32 places[Halves][2];
#pragma unroll
    for (int r = 0; r < Halves; ++r) {
      const int head = i.kv_head * GROUP + min(row + 8 * r, GROUP - 1), at = warp * 16 + column;
      if (DIRECT && !whole && warp == 0 && column == 0 && row + 8 * r < GROUP)
        send_word(part_words + part_at(i, head) + PART_M, __float_as_uint(m[r]), out.tag);
#pragma unroll
      for (int d = 0; d < 2; ++d) {
        places[r][d] = whole || !DIRECT ? out.template pair_at<Q_SIZE, O>(i.row, head * HEAD_DIM + at + d * 8)
                                        : part_at(i, head) + out.template floats_at<HEAD_DIM>(0, at + d * 8);
        opaque(places[r][d]);
      }
    }
    wait_behind(later);
    values_there();
    team_barrier();  // p, the sums and the values are there
    MARK(plan, 17);

    // P V: a warp takes all keys for 16 columns.
    float acc[2][4] = {};
    const T *const values = this->values() + value_at(lane & 15, 2 * warp + (lane >> 4));  // see value_lane
    if (HEAD_DIM == 16 * TEAM_WARPS || warp < HEAD_DIM / 16) {
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
          ldmatrix_x4_trans(f, values + j * 16 * HEAD_DIM);
          mma_m16n8k16<T>(acc[0], a, f[0], f[1]);
          mma_m16n8k16<T>(acc[1], a, f[2], f[3]);
        }
      }
    }
    MARK(plan, 18);
    if (more || (!BY_WARPS && rows[i.row].chunks > 1)) team_barrier();  // the values, p and the statistics may be overwritten
    MARK(plan, 19);
    next_values();
    if (whole)
      send(i, acc, m, l, places);
    else
      send_part(i, acc, m, l, places);
    MARK(plan, 20);
  }

  // First word of a chunk's part of a head, with DIRECT. decode_step.py refuses more than 32 bits can count.
  __device__ __forceinline__ u32 part_at(const Item &i, int head) const {
    return ((u32)(i.row * HEADS + head) * (u32)max_chunks + (u32)i.chunk) * PART_WORDS;
  }
  // A chunk's part of a sequence, to be merged with the others. With DIRECT m is on its way already.
  template <int Halves>
  __device__ __forceinline__ void send_part(const Item &i, const float (&acc)[2][4], const float (&m)[2],
                                            const float (&l)[2], const u32 (&places)[Halves][2]) const {
    const int self = team_thread();
    const int lane = self & 31, warp = self >> 5, t = lane & 3, row = lane >> 2;
#pragma unroll
    for (int r = 0; r < Halves; ++r) {
      const int head = row + 8 * r;
      if (head >= GROUP || warp >= HEAD_DIM / 16) continue;
      if constexpr (DIRECT) {
#pragma unroll
        for (int d = 0; d < 2; ++d)
          send_words(part_words + places[r][d], __float_as_uint(acc[d][2 * r]), __float_as_uint(acc[d][2 * r + 1]), out.tag);
        if (warp == 0)
          send_word(part_words + part_at(i, i.kv_head * GROUP + head) + PART_L + t, __float_as_uint(l[r]), out.tag);
      } else {
        const i64 part = (i64)(i.row * HEADS + i.kv_head * GROUP + head) * max_chunks + i.chunk;
        const int at = warp * 16 + t * 2;
        if (warp == 0) {
          if (t == 0) part_stats[part * 8] = m[r];
          part_stats[part * 8 + 1 + t] = l[r];
        }
#pragma unroll
        for (int d = 0; d < 2; ++d)
          store_vec(part_acc + part * HEAD_DIM + at + d * 8, Vec<float, 2>{acc[d][2 * r], acc[d][2 * r + 1]});
      }
    }
  }

  // The finished heads of a sequence of one chunk, or of a couple.
  template <int Halves>
  __device__ __forceinline__ void send(const Item &i, const float (&acc)[2][4], const float (&m)[2], const float (&l)[2],
                                       const u32 (&places)[Halves][2]) const {
    const int self = team_thread();
    const int lane = self & 31, warp = self >> 5, t = lane & 3;
    const int row = lane >> 2, column = t * 2;
    const int chunks = rows[i.row].chunks;
    const bool member = HEAD_DIM == 16 * TEAM_WARPS || warp < HEAD_DIM / 16;
    const bool couple = TEAMS == 2 && couples() && chunks == 2, again = ROWS * KV_HEADS > (int)gridDim.x;
    // The second team's part: float [GROUP, HEAD_DIM], then of every head the four l, then m. Where it fits over the queries,
    // each warp leaves m and l too, and a warp of the first team waits for its partner alone; else they lie over the sums.
    float *const other = reinterpret_cast<float *>(shared + Shared::teams + TeamShared::bytes);
    float *const other_l = other + (BY_WARPS ? GROUP * HEAD_DIM + warp * GROUP * 5 : TeamShared::key_sum / 4);
    float *const other_m = other_l + GROUP * 4;
    static_assert(GROUP * HEAD_DIM * 4 <= TeamShared::new_key, "the second team's part");
    if (couple && team() == 1) {
#pragma unroll
      for (int r = 0; r < Halves; ++r) {
        const int head = row + 8 * r;
        if (head >= GROUP || !member) continue;
        if (BY_WARPS || warp == 0) {
          other_l[head * 4 + t] = l[r];
          if (t == 0) other_m[head] = m[r];
        }
#pragma unroll
        for (int d = 0; d < 2; ++d)
          store_vec(other + head * HEAD_DIM + warp * 16 + d * 8 + column, Vec<float, 2>{acc[d][2 * r], acc[d][2 * r + 1]});
      }
    }
    const bool second = couple && team() == 1;
    ChunkMerge merge[Halves];
    float total[Halves][2][2];
#pragma unroll
    for (int r = 0; r < Halves; ++r) {
      merge[r].reset();
      merge[r].step(m[r], l[r], c);
#pragma unroll
      for (int d = 0; d < 2; ++d)
#pragma unroll
        for (int e = 0; e < 2; ++e) total[r][d][e] = merge[r].add(0.f, acc[d][2 * r + e]);
    }
    if (couple) named_barrier_sync(1 + TEAMS + (BY_WARPS ? warp : 0), BY_WARPS ? 64 : TEAMS * TEAM_THREADS);
#pragma unroll
    for (int r = 0; r < Halves; ++r) {
      if (second) break;
      const int head = row + 8 * r;
      const bool used = head < GROUP && member;
      if (couple && used) {
        merge[r].step(other_m[head], other_l[head * 4 + t], c);
#pragma unroll
        for (int d = 0; d < 2; ++d) {
          const Vec<float, 2> part = load_vec<float, 2>(other + head * HEAD_DIM + warp * 16 + d * 8 + column);
#pragma unroll
          for (int e = 0; e < 2; ++e) total[r][d][e] = merge[r].add(total[r][d][e], part.v[e]);
        }
      }
      const float norm = softmax_norm(quad_sum(merge[r].L));
      if (!used) continue;
#pragma unroll
      for (int d = 0; d < 2; ++d)
        out.template send_pair<T>(places[r][d], __fmul_rn(total[r][d][0], norm), __fmul_rn(total[r][d][1], norm));
    }
    if (couple && again) named_barrier_sync(1 + TEAMS + TEAM_WARPS, TEAMS * TEAM_THREADS);  // the part may be overwritten
  }
};
