// Attention of one new query per sequence over a paged cache (split over the keys, tensor cores, sm_80 and later).
// Formula   out = softmax(scale * q k^T) v per query head over the first seq_lens[b] keys; head h reads key/value head
//           h / group. lse = log sum exp(scale * q k^T).
// Layouts   q [B, Hq, D] with strides; k, v [blocks, Hkv, page, D] with strides; tables [B, max_blocks];
//           out [B, Hq, D]; lse float [B, Hq]; partial results per chunk: acc float [B, Hq, max_chunks, D], statistics
//           float [B, Hq, max_chunks, 8] = m, l of the 4 lanes of a quad, unused.
// Bound     bytes: 4 * D * seq_len * Hkv of keys and values (16-bit). A warp is a stream of its own: it takes whole
//           chunks, and its ring of slots in shared memory is filled ahead, tile by tile keys then values, across chunks
//           and sequences. No barrier stands in the way of a copy; eight warps of an SM keep up to 128 KB in flight. A
//           block that has one chunk to do shares it out among its warps instead (OneChunk, D <= 128).
// Launch    attention_decode: 128 threads. An item is a sequence and up to 8 query heads of one key/value head (the rows
//           of an mma tile). splits == 1: any grid of at least items / 32; block i takes the items i, i + grid, ...; the
//           chunks of all of them are dealt out to its warps in turn, and after each round the block merges them. Else
//           grid = splits * items: block `split` of an item takes the chunks split, split + splits, ...; each goes to the
//           workspace, and attention_decode_merge (128 threads, grid.x = B * Hq * ceil(D / 32)) adds them up, unless
//           the sequence has one chunk. splits, grid and max_chunks come from shapes, never from values on the device.
//           With pdl=True and cache_ready the rings are filled while the kernel ahead still runs: it writes no table, no
//           length, and of the keys and values at most the last of each sequence.
// Template  T half | bf16; D multiple of 16 up to 256; Chunk (numerics). Shared memory: shared_bytes, at most 91 KB; two
//           blocks to an SM.
// Numerics  chunks of Chunk keys from key 0, tiles of 64, merged in ascending order by common/softmax.cuh: the bits
//           of a row depend neither on splits nor on the batch, and are those of attention_prefill. In P V the values
//           are the mma's A operand; the sum of a step has no order (docs/journal.md), so the bits stay.
// Measured  4.43 TB/s behind itself (64 sequences of 4,096, pages of 64; cache_ready), a plain read reaches 4.6; lengths up to
//           4,096: 4.15; H200, docs/performance.md
#include "common/chunk_merge.cuh"
#include "common/decode_chunk.cuh"
#include "ptx/pdl.cuh"

constexpr int SLOTS = 2;     // of a warp's ring
constexpr int SORTED = 256;  // most sequences whose lengths are compared

// Keys of a slot of the ring: 8 KB where D is a power of two.
template <int D> constexpr int SLOT_KEYS = D <= 64 ? 64 : D <= 128 ? 32 : 16;

// A chunk of one of this block's items. `end`: of the keys to read; `last`: of its item; `too_long`: the result is NaN.
struct Unit {
  int item, key0, end;
  bool last, too_long;
};

// What a block must know of a warp's chunk to merge it.
struct Merged {
  i64 row;  // of the first head in the result
  int heads, state;
};
enum ChunkState { FIRST = 1, LAST = 2, TOO_LONG = 4, ABSENT = 8 };

// The `rank`th longest of `batch` sequences, equal ones by number, or `rank` itself where no two differ by `least` or more. By
// the whole block; `memory`: ints for two lists of whole fours that may be used again afterwards.
template <class Length>
__device__ __forceinline__ int longest_first(int *memory, int rank, int batch, int least, Length length) {
  int *const lengths = memory, *const order = memory + ceil_div(batch, 4) * 4;  // lengths are read four at a time
  for (int b = threadIdx.x; b < batch; b += WARPS * 32) lengths[b] = length(b);
  __syncthreads();
  int low = lengths[0], high = low;
  for (int b = lane_id(); b < batch; b += 32) {
    low = min(low, lengths[b]);
    high = max(high, lengths[b]);
  }
  for (int i = 16; i > 0; i /= 2) {
    low = min(low, __shfl_xor_sync(0xffffffffu, low, i));
    high = max(high, __shfl_xor_sync(0xffffffffu, high, i));
  }
  if (high - low >= least) {
    for (int b = threadIdx.x; b < batch; b += WARPS * 32) {
      const int mine = lengths[b];
      int before = 0;
#pragma unroll 8
      for (int other = 0; other < batch; ++other)
        before += lengths[other] > mine || (lengths[other] == mine && other < b);
      order[before] = b;
    }
    __syncthreads();
    rank = order[rank];
  }
  __syncthreads();
  return rank;
}

template <class T, int D, int Chunk>
__global__ void __launch_bounds__(WARPS * 32, 2)
    attention_decode(const T *__restrict__ q, const T *__restrict__ k, const T *__restrict__ v,
                     const int *__restrict__ tables, const int *__restrict__ seq_lens, T *__restrict__ out,
                     float *__restrict__ lse, float *__restrict__ part_acc, float *__restrict__ part_stats, int batch,
                     int num_heads, int group, i64 q_sequence, int q_head, i64 k_block, int k_head, int k_token,
                     i64 v_block, int v_head, int v_token, int max_blocks, int page_shift, int num_blocks, int max_len,
                     int max_chunks, int splits, float scale, float c, int cache_ready) {
  constexpr int Keys = SLOT_KEYS<D>, Groups = Keys / 16, Steps = TILE / Keys, SlotElements = Keys * D;
  constexpr int Pitch = D + 4, State = D + 8;  // floats of a head: acc; totals and statistics
  constexpr bool KeepQuery = D <= 128;  // in registers; else it is read (from L1) for every slot
  static_assert(Chunk % TILE == 0 && D % 16 == 0 && D <= 256, "see the head of the file");
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int kv_heads = num_heads / group, head_tiles = ceil_div(group, HEADS), most_heads = min(group, HEADS);
  const int items = batch * kv_heads * head_tiles;
  const int split = splits > 1 ? blockIdx.x / items : 0, per_sequence = kv_heads * head_tiles;

  grid_dependency_launch();
  if (!cache_ready) grid_dependency_wait();

  extern __shared__ __align__(128) unsigned char shared[];
  const auto length = [&](int b) {
    return min(max(seq_lens[b], 0), (int)min((i64)max_blocks << page_shift, (i64)0x7fffffff));
  };
  // Lane i knows the block's item i.
  i64 mine = blockIdx.x % (u32)items;
  bool exists = lane == 0;
  if (splits == 1) {
    mine = (i64)lane * gridDim.x + (lane & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    exists = mine < items;
    if ((int)gridDim.x < items && batch <= SORTED) {
      const int rank = exists ? (int)mine / per_sequence : 0;
      const int sequence = longest_first(reinterpret_cast<int *>(shared), rank, batch, Chunk,
                                         [&](int b) { return length(b) > max_len ? 0 : length(b); });
      mine = sequence * per_sequence + (int)mine % per_sequence;
    }
  }
  const int own = exists ? (int)mine : 0;
  const auto item_of = [&](int i) { return __shfl_sync(0xffffffffu, own, i); };

  // The pages of the block's and the warp's first chunk, if it is of the first item, are fetched together with the lengths.
  const int item0 = item_of(0);
  auto pages_of = [&](i64 chunk) {
    const i64 column = (chunk * Chunk >> page_shift) + lane;
    const int *const table = tables + (i64)(item0 / per_sequence) * max_blocks;
    return column < max_blocks && (lane == 0 || lane < Chunk >> page_shift) ? __ldg(table + column) : -1;
  };
  const int block_pages = pages_of(split), first_pages = pages_of(split + (i64)warp * max(splits, 1));

  int keys = 0, count = 0;  // of the lane's item: its keys (-1: more than promised, there is no place for its chunks), units
  if (exists) {
    const int len = length(own / per_sequence);
    keys = len > max_len ? -1 : len;
    count = keys <= 0 ? 1 : (keys - 1) / Chunk + 1;
  }
  const bool whole = splits == 1 || __shfl_sync(0xffffffffu, count, 0) == 1;  // this block does all chunks of its items
  if (whole && split > 0) return grid_dependency_wait();
  const int step = whole ? 1 : splits;
  if (!whole) count = split < count ? (count - split + splits - 1) / splits : 0;
  int through = count;  // units of the items up to this one
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, through, i);
    if (lane >= i) through += other;
  }
  const int units = __shfl_sync(0xffffffffu, through, 31);
  if (units == 0) return grid_dependency_wait();
  auto find = [&](int n) {  // unit n; without keys if there is none
    const int item = min(__popc(__ballot_sync(0xffffffffu, through <= n)), 31);
    const int before = __shfl_sync(0xffffffffu, through - count, item), all = __shfl_sync(0xffffffffu, keys, item);
    Unit u{n < units ? item : 0, 0, 0, false, all < 0};
    if (n < units) {
      u.key0 = (split + (n - before) * step) * Chunk;
      u.last = all - u.key0 <= Chunk;
      u.end = u.last ? max(all, 0) : u.key0 + Chunk;
    }
    return u;
  };

  // A block of fewer units than warps lets those that work use the slots of all.
  const int depth = 2 * units > WARPS ? SLOTS : units > 1 ? 2 * SLOTS : SLOTS * WARPS;
  T *const rings = reinterpret_cast<T *>(shared), *const ring = rings + warp * depth * SlotElements;
  Merged *const s_merged = reinterpret_cast<Merged *>(rings + WARPS * SLOTS * SlotElements);  // [WARPS]
  float *const s_stats = reinterpret_cast<float *>(s_merged + WARPS);                         // [WARPS][HEADS][8]: m, l
  float *const s_acc = s_stats + WARPS * HEADS * 8;                                           // [WARPS][<= WARPS][Pitch]
  float *const s_total = s_acc + WARPS * min(most_heads, WARPS) * Pitch;                      // [most_heads][State]
  for (int i = threadIdx.x; i < most_heads * State; i += WARPS * 32) s_total[i] = 0.f;

  // Where an item is. Said again behind a chunk, so that it occupies no registers meanwhile.
  const auto place = [&](int item, int &b, int &head0, int &heads) {
    const int at = item_of(item), head_tile = at % head_tiles;
    b = at / per_sequence;
    head0 = at / head_tiles % kv_heads * group + head_tile * HEADS;
    heads = min(group - head_tile * HEADS, HEADS);
  };
  const auto copy_16 = [&](T *rows, int row, int page0, int end, int pages, int kv_head, bool value) {
    const int block = __shfl_sync(0xffffffffu, pages, (row - page0) >> page_shift);
    const int stride = value ? v_token : k_token;
    const i64 at = block * (value ? v_block : k_block) + (i64)(row & ((1 << page_shift) - 1)) * stride;
    const T *const cache = value ? v + (i64)kv_head * v_head : k + (i64)kv_head * k_head;
    copy_group<T, D>(rows, cache, (u32)block < (u32)num_blocks ? at : -1, stride, end - row, value);
  };

  if constexpr (D <= 128)
    if (units == 1) {
      grid_dependency_wait();
      const Unit u = find(0);
      int b, head0, heads;
      place(0, b, head0, heads);
      OneChunk<T, D, Chunk> work{rings, s_stats};
      work.run(q + b * q_sequence + (i64)(head0 + min(g, heads - 1)) * q_head + 2 * t, u.key0, u.end, c,
               [&](T *rows, int row, bool value) {
                 copy_16(rows, row, u.key0, u.end, block_pages, head0 / group, value);
               });
      ChunkMerge one;
      one.reset();
      one.step(work.m, work.l, c);
      const float sum = u.too_long ? CUKERN_NAN : quad_sum(one.L), factor = softmax_norm(sum);
      const i64 row0 = (i64)b * num_heads + head0, part = row0 * max_chunks + u.key0 / Chunk;
      if (warp == 0 && g < heads) {
        float *const to = part_stats + (part + (i64)g * max_chunks) * 8;
        if (whole && lse != nullptr && t == 0) lse[row0 + g] = softmax_lse(one.M, sum, scale);
        if (!whole && t == 0) to[0] = work.m;
        if (!whole) to[1 + t] = work.l;
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int head = 2 * t + (e & 1), column = (e >> 1) * 8 + g;
        ChunkMerge of_head = one;
        of_head.b = __shfl_sync(0xffffffffu, one.b, 4 * head);
        const float norm = __shfl_sync(0xffffffffu, factor, 4 * head);
#pragma unroll
        for (int i = 0; i < work.Blocks; ++i) {
          const int at = (warp + i * WARPS) * 16 + column;
          if (head >= heads || at >= D) continue;
          if (whole)
            out[(row0 + head) * D + at] = from_float<T>(__fmul_rn(of_head.add(0.f, work.acc[i][e]), norm));
          else
            part_acc[(part + (i64)head * max_chunks) * D + at] = work.acc[i][e];
        }
      }
      return;
    }

  // What is asked for: the units of this warp, slot by slot; the pages of the unit behind are fetched ahead.
  Unit now;
  int next = warp, pages, next_pages, key, tile0, kv_head, fill_slot = 0;
  bool value = false;
  auto seek = [&] {  // the next unit with keys, and its pages
    Unit u = find(next);
    while (u.key0 >= u.end && next < units) u = find(next += WARPS);
    const int b = item_of(u.item) / per_sequence;
    if (next == warp && u.item == 0)
      next_pages = first_pages;
    else
      next_pages = u.key0 < u.end ? fetch_pages<Chunk>(tables + (i64)b * max_blocks, u.key0, u.end, page_shift) : -1;
  };
  auto enter = [&] {
    now = find(next);
    pages = next_pages;
    key = tile0 = now.key0;
    kv_head = item_of(now.item) / head_tiles % kv_heads;
    next += WARPS;
    seek();
  };
  auto fill = [&] {  // the slot read last; an empty group keeps the count
    if (tile0 < now.end) {
      T *rows = ring + fill_slot * SlotElements;
#pragma unroll 1
      for (int row = key; row < key + Keys; row += 16, rows += 16 * D)
        copy_16(rows, row, now.key0, now.end, pages, kv_head, value);
      key += Keys;
      if (key == tile0 + TILE) {
        if (!value) key = tile0;
        else tile0 = key;
        if (value && tile0 >= now.end) enter();
        value = !value;
      }
    }
    cp_async_commit();
    fill_slot = fill_slot + 1 == depth ? 0 : fill_slot + 1;
  };
  auto front = [&]() -> const T * {  // the oldest slot, when it is there
    if (depth == SLOTS)
      cp_async_wait<SLOTS - 1>();
    else if (depth == 2 * SLOTS)
      cp_async_wait<2 * SLOTS - 1>();
    else
      cp_async_wait<SLOTS * WARPS - 1>();
    __syncwarp();
    return ring + fill_slot * SlotElements;
  };
  seek();
  enter();
#pragma unroll 1
  for (int i = 0; i < depth; ++i) {
    if (now.last && key + Keys >= now.end) grid_dependency_wait();  // the kernel ahead may write the last key
    fill();
  }
  grid_dependency_wait();

  const int lane_place = key_lane<D>();
#pragma unroll 1
  for (int round = 0; round < units; round += WARPS) {
    const Unit u = find(round + warp);
    int b, head0, heads;
    place(u.item, b, head0, heads);
    const T *const query = q + b * q_sequence + (i64)(head0 + min(g, heads - 1)) * q_head + 2 * t;
    u32 kept[D / 16][2];
    if (KeepQuery)
#pragma unroll
      for (int kk = 0; kk < D / 16; ++kk)
#pragma unroll
        for (int h = 0; h < 2; ++h) kept[kk][h] = *reinterpret_cast<const u32 *>(query + kk * 16 + h * 8);

    // Head g: maximum, and the part of the sum that columns 2t, 2t + 1 of every 8 have. Heads 2t, 2t + 1: columns g, g + 8 of
    // every 16 of the result.
    float acc[D / 16][4], m = -CUKERN_INF, l = 0.f;
#pragma unroll
    for (int d = 0; d < D / 16; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[d][e] = 0.f;
#pragma unroll 1
    for (int tile = u.key0; tile < u.end; tile += TILE) {
      // Of head g: scores of keys 2t, 2t + 1, 2t + 8, 2t + 9 of every 16; then p of the four in [0] and [1], packed.
      float p[Steps][Groups][4];
#pragma unroll 1
      for (int part = 0; part < 2 * Steps; ++part) {  // keys slot by slot, then values
        const T *const slot = front();
        const int at = opaque(lane_place);
        if (part < Steps) {
          float s[Groups][2][4] = {};
          const int again = KeepQuery ? 0 : opaque(0);
#pragma unroll
          for (int kk = 0; kk < D / 16; ++kk) {
            u32 a[4] = {};  // there are no heads 8 to 15
#pragma unroll
            for (int h = 0; h < 2; ++h)
              a[2 * h] = KeepQuery ? kept[kk][h]
                                   : *reinterpret_cast<const u32 *>(query + again + kk * 16 + h * 8);
#pragma unroll
            for (int i = 0; i < Groups; ++i) {
              u32 f[4];
              ldmatrix_x4(f, slot + fragment_at<D>(at, i * 16, kk));
              mma_m16n8k16<T>(s[i][0], a, f[0], f[1]);
              mma_m16n8k16<T>(s[i][1], a, f[2], f[3]);
            }
          }
#pragma unroll
          for (int j = 0; j < Steps; ++j)
            if (part == j)
#pragma unroll
              for (int i = 0; i < Groups; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                  p[j][i][e] = tile + j * Keys + i * 16 + (e >> 1) * 8 + 2 * t + (e & 1) < u.end ? s[i][e >> 1][e & 1]
                                                                                                  : -CUKERN_INF;
          if (part == Steps - 1) {
            float top = -CUKERN_INF;
#pragma unroll
            for (int i = 0; i < TILE / 16; ++i)
#pragma unroll
              for (int e = 0; e < 4; ++e) top = fmaxf(top, p[i / Groups][i % Groups][e]);
            top = fmaxf(m, quad_max(top));
            const float corr = rescale_factor(m, top, c), mc = __fmul_rn(finite_max(top), c);
            m = top;
            float sum;
#pragma unroll
            for (int i = 0; i < TILE / 16; ++i) {
              float(&x)[4] = p[i / Groups][i % Groups];
#pragma unroll
              for (int e = 0; e < 4; ++e) x[e] = softmax_exp(x[e], c, mc);
              const float group_total = group_sum(x[0], x[1], x[2], x[3]);
              sum = i == 0 ? group_total : sum + group_total;
              x[0] = __uint_as_float(pack2<T>(x[0], x[1]));
              x[1] = __uint_as_float(pack2<T>(x[2], x[3]));
            }
            l = update_sum(l, corr, sum);
            if (tile > u.key0) {
              const float even = __shfl_sync(0xffffffffu, corr, 8 * t), odd = __shfl_sync(0xffffffffu, corr, 8 * t + 4);
#pragma unroll
              for (int d = 0; d < D / 16; ++d)
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[d][e] = __fmul_rn(acc[d][e], e & 1 ? odd : even);
            }
          }
        } else {
          u32 w[Groups][2];
#pragma unroll
          for (int j = 0; j < Steps; ++j)
            if (part == Steps + j)
#pragma unroll
              for (int i = 0; i < Groups; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) w[i][h] = __float_as_uint(p[j][i][h]);
#pragma unroll
          for (int i = 0; i < Groups; ++i)
#pragma unroll
            for (int d = 0; d < D / 16; ++d) {
              u32 f[4];
              ldmatrix_x4_trans(f, slot + fragment_at<D>(at, i * 16, d));
              mma_m16n8k16<T>(acc[d], f, w[i][0], w[i][1]);
            }
        }
        __syncwarp();  // the slot is read
        fill();
      }
    }

    place(opaque(u.item), b, head0, heads);
    if (!whole) {
      if (round + warp < units) {
        const i64 part = ((i64)b * num_heads + head0) * max_chunks + u.key0 / Chunk;
        if (g < heads) {
          float *const to = part_stats + (part + (i64)g * max_chunks) * 8;
          if (t == 0) to[0] = m;
          to[1 + t] = l;
        }
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (2 * t + (e & 1) < heads) {
            float *const to = part_acc + (part + (i64)(2 * t + (e & 1)) * max_chunks) * D + (e >> 1) * 8 + g;
#pragma unroll
            for (int d = 0; d < D / 16; ++d) to[d * 16] = acc[d][e];
          }
      }
      continue;
    }

    // The chunks of this round are merged in ascending order, four heads at a time: a warp owns a head.
    if (t == 0) s_stats[(warp * HEADS + g) * 8] = m;
    s_stats[(warp * HEADS + g) * 8 + 1 + t] = l;
    if (lane == 0) {
      const int state = (u.key0 == 0 ? FIRST : 0) | (u.last ? LAST : 0) | (u.too_long ? TOO_LONG : 0);
      s_merged[warp] = Merged{(i64)b * num_heads + head0, heads, round + warp < units ? state : ABSENT};
    }
#pragma unroll 1
    for (int first = 0; first < most_heads; first += WARPS) {
      float *const parts = s_acc, *const totals = s_total + (first + warp) * State;
      const int pitch = min(most_heads, WARPS) * Pitch;  // from warp to warp
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int head = 2 * t + (e & 1);
        if (head >= first && head < min(first + WARPS, most_heads)) {
          float *const to = parts + warp * pitch + (head - first) * Pitch + (e >> 1) * 8 + g;
#pragma unroll
          for (int d = 0; d < D / 16; ++d) to[d * 16] = acc[d][e];
        }
      }
      __syncthreads();  // results of all warps are there
      if (first + warp < most_heads) {
        constexpr int Pairs = ceil_div(D, 64);  // of columns, a lane's: 2 lane + 64 i
        Vec<float, 2> total[Pairs];
        ChunkMerge merge;
        merge.M = totals[D];
        merge.L = totals[D + 1 + t];
#pragma unroll
        for (int i = 0; i < Pairs; ++i)
          if (2 * lane + 64 * i < D) total[i] = load_vec<float, 2>(totals + 2 * lane + 64 * i);
#pragma unroll 1
        for (int w = 0; w < WARPS; ++w) {
          const Merged chunk = s_merged[w];
          if (chunk.state == ABSENT) break;
          if (chunk.state & FIRST) {
            merge.reset();
#pragma unroll
            for (int i = 0; i < Pairs; ++i) total[i] = Vec<float, 2>{};
          }
          const float *const stats = s_stats + (w * HEADS + first + warp) * 8;
          merge.step(stats[0], stats[1 + t], c);
#pragma unroll
          for (int i = 0; i < Pairs; ++i)
            if (2 * lane + 64 * i < D) {
              const Vec<float, 2> x = load_vec<float, 2>(parts + w * pitch + warp * Pitch + 2 * lane + 64 * i);
#pragma unroll
              for (int e = 0; e < 2; ++e) total[i].v[e] = merge.add(total[i].v[e], x.v[e]);
            }
          if (!(chunk.state & LAST)) continue;
          const float sum = chunk.state & TOO_LONG ? CUKERN_NAN : quad_sum(merge.L), norm = softmax_norm(sum);
          if (first + warp >= chunk.heads) continue;
          const i64 row = chunk.row + first + warp;
          if (lse != nullptr && lane == 0) lse[row] = softmax_lse(merge.M, sum, scale);
#pragma unroll
          for (int i = 0; i < Pairs; ++i)
            if (2 * lane + 64 * i < D)
              *reinterpret_cast<u32 *>(out + row * D + 2 * lane + 64 * i) =
                  pack2<T>(__fmul_rn(total[i].v[0], norm), __fmul_rn(total[i].v[1], norm));
        }
        __syncwarp();
        if (lane == 0) totals[D] = merge.M;
        if (lane < 4) totals[D + 1 + lane] = merge.L;
#pragma unroll
        for (int i = 0; i < Pairs; ++i)
          if (2 * lane + 64 * i < D) store_vec(totals + 2 * lane + 64 * i, total[i]);
      }
      __syncthreads();  // the results may be overwritten
    }
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
  grid_dependency_launch();
  grid_dependency_wait();
  const int len = min(max(seq_lens[row / num_heads], 0), (int)min((i64)max_blocks << page_shift, (i64)0x7fffffff));
  if (len <= Chunk || len > max_len) return;  // attention_decode has written the result
  float M, sum;
  const float y = merge_chunks<D>(memory, part_acc + row * max_chunks * D + column0, part_stats + row * max_chunks * 8,
                                  (len - 1) / Chunk + 1, columns, c, M, sum);
  if (threadIdx.x >= 32) return;
  if ((int)threadIdx.x < columns) out[row * D + column0 + threadIdx.x] = from_float<T>(y);
  if (lse != nullptr && slice == 0 && threadIdx.x == 0) lse[row] = softmax_lse(M, sum, scale);
}
