// Attention over whole sequences or chunks of them on Hopper's tensor cores (sm_90a only), FlashAttention-3 shape.
// Formula   out = softmax(scale * q k^T + mask) v per query head; head h reads key/value head h / group. Causal: query
//           i of n sees the keys j <= i + kv_len - n. lse = log sum exp(scale * q k^T).
// Layouts   q, k, v through tensor maps of five dimensions (64 columns, token, block of 64 columns, head, sequence or page);
//           dense, packed + cu_seqlens or pages + tables, as in attention_prefill.cu; out [tokens, Hq, D] without gaps,
//           lse float [tokens, Hq]. D is 64 or 128; bases and strides are multiples of 16 bytes.
// Bound     tensor cores: 4 * D flops per query-key pair. Q and P come from registers, so that wgmma of 64 columns reads half
//           of what shared memory delivers.
// Launch    Persistent: at most one block to a multiprocessor, (Groups + 1) * 128 threads. Work items are pairs (query tile of
//           64 * Groups rows, head), long ones first, dealt out forwards and backwards in turn.
// Template  T half | bf16; D; Kind of layout; Groups consumer warpgroups of 64 rows; Stages tiles of K and of V in shared memory.
//           Of the first warpgroup, one warp finds work, one copies queries and keys, one values.
// Numerics  tiles of 64 keys, chunks of 128 keys from key 0, merged in ascending order by common/softmax.cuh: the bits of
//           attention_prefill.cu.
// Measured  see docs/performance.md
#include "common/fragment_rows.cuh"
#include "common/packed_tiles.cuh"
#include "common/softmax.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

constexpr int TILE_SHIFT = 6, TILE = 64;  // keys per online-softmax step (numerics contract), two steps to a chunk
constexpr int BLOCK_BYTES = 8192;         // 64 rows of 64 columns

// A query tile of a head, told through shared memory. steps < 0: nothing any more.
struct __align__(8) Item {
  i64 out_row;           // of the first row
  int rows, limit, len;  // rows that exist; row r sees the keys [0, min(limit + r, len))
  int steps;             // K/V tiles that any row looks at
  int head, kv_head;
  int q_row, k_row;  // where rows and keys begin in q, k and v
  int sequence;      // of dense arrays, or of the table of pages
};
constexpr int ITEMS = 4;  // told ahead

template <bool Value> struct Is {
  static constexpr bool value = Value;
};

// Turns the scores of a tile into p, packed as A fragments, and updates m and l. First: of a chunk; m and l are then written
// only. Otherwise the accumulators are to be multiplied by `corr`.
template <class T, bool First>
__device__ __forceinline__ void softmax_tile(float (&s)[TILE / 2], u32 (&p)[TILE / 16][4], float (&m)[2], float (&l)[2],
                                             float (&corr)[2], float c) {
  float mc[2], sum[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float top = First ? -CUKERN_INF : m[i];
#pragma unroll
    for (int n = 0; n < TILE / 8; ++n) top = fmaxf(top, fmaxf(s[4 * n + 2 * i], s[4 * n + 2 * i + 1]));
    top = quad_max(top);
    if constexpr (!First) corr[i] = rescale_factor(m[i], top, c);
    mc[i] = __fmul_rn(finite_max(top), c);
    m[i] = top;
  }
#pragma unroll
  for (int j = 0; j < TILE / 16; ++j) {
    float e[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) e[i] = softmax_exp(s[8 * j + i], c, mc[i >> 1 & 1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float g = group_sum(e[2 * i], e[2 * i + 1], e[4 + 2 * i], e[4 + 2 * i + 1]);
      sum[i] = j == 0 ? g : sum[i] + g;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) p[j][i] = pack2<T>(e[2 * i], e[2 * i + 1]);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) l[i] = First ? sum[i] : update_sum(l[i], corr[i], sum[i]);
}

enum Layout { Dense, Packed, Paged };

template <class T, int D, int Kind, int Groups, int Stages>
__global__ void __launch_bounds__((Groups + 1) * 128, 1)
    attention_prefill_sm90(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                           const __grid_constant__ TensorMap v_map, T *__restrict__ out, float *__restrict__ lse,
                           const int *__restrict__ cu_q, const int *__restrict__ cu_k, const int *__restrict__ tables,
                           const int *__restrict__ seq_lens, int batch, int q_tokens, int kv_tokens, int num_heads, int group,
                           int max_blocks, int page_shift, int num_blocks, int items, int causal, float scale, float c) {
  constexpr int Rows = 64 * Groups, TileBytes = D / 64 * BLOCK_BYTES;
  static_assert(D == 64 || D == 128, "see the head of the file");
  // Registers of a thread, of those that copy and of those that compute: together what the block starts with, or it waits for ever.
  constexpr int Many = Groups == 3 ? 160 : D == 128 ? 240 : 232, Few = Groups == 3 ? 32 : D == 128 ? 24 : 40;
  static_assert(Many * Groups + Few <= 65536 / ((Groups + 1) * 128) / 8 * 8 * (Groups + 1), "as many as there are");
  static_assert((Stages & (Stages - 1)) == 0, "tile number n of all is in stage n % Stages, in phase n / Stages");
  extern __shared__ __align__(1024) unsigned char smem[];
  unsigned char *const s_k = smem + Groups * TileBytes, *const s_v = s_k + Stages * TileBytes;
  unsigned char *const s_kept = s_v + Stages * TileBytes;  // 16 bytes to a consumer thread
  u64 *const k_full = reinterpret_cast<u64 *>(s_kept + Groups * 128 * 16), *const k_empty = k_full + Stages;
  u64 *const v_full = k_empty + Stages, *const v_empty = v_full + Stages;
  u64 *const q_full = v_empty + Stages, *const q_empty = q_full + Groups;
  u64 *const item_full = q_empty + Groups, *const item_empty = item_full + ITEMS;
  Item *const items_told = reinterpret_cast<Item *>(item_empty + ITEMS);
  u32 *const lost = reinterpret_cast<u32 *>(items_told + ITEMS);  // bit i: the i-th page of a K tile is not in the cache

  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    if (shared_address(smem) & 1023) __trap();  // the swizzle counts on it
#pragma unroll
    for (int i = 0; i < Stages; ++i) {
      mbarrier_init(k_full + i, 1);
      mbarrier_init(v_full + i, 1);
      mbarrier_init(k_empty + i, Groups * 4);  // every consumer warp
      mbarrier_init(v_empty + i, Groups * 4);
    }
#pragma unroll
    for (int i = 0; i < Groups; ++i) {
      mbarrier_init(q_full + i, 1);
      mbarrier_init(q_empty + i, 4);
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      mbarrier_init(item_full + i, 1);
      mbarrier_init(item_empty + i, Groups * 4 + 2);  // every consumer warp, and those that copy
    }
    mbarrier_init_fence();
    prefetch_tensor_map(&q_map);
    prefetch_tensor_map(&k_map);
    prefetch_tensor_map(&v_map);
  }
  __syncthreads();

  if (warpgroup == 0) {
    fewer_registers<Few>();
    const int warp = threadIdx.x >> 5;
    if (warp == 1) {  // finds work
      u32 count = 0;
      auto next_item = [&]() -> Item & {  // a place for the next item, once it is free
        mbarrier_wait(item_empty + count % ITEMS, ~(count / ITEMS) & 1);
        return items_told[count % ITEMS];
      };
      auto tell = [&]() {
        if (lane == 0) mbarrier_arrive(item_full + count % ITEMS);
        ++count;
      };
      // Lengths are clamped to the arrays: wrong ones on the device must not reach other memory.
      const int most = Kind == Paged ? (int)min((i64)max_blocks << page_shift, (i64)0x7fffffff) : kv_tokens;
      const PackedLengths<Kind == Paged> lengths{cu_q, cu_k, seq_lens, q_tokens, most};
      PackedTiles<Rows, Kind == Paged> packed;
      // rounds go forwards and backwards through the blocks in turn
      for (u32 number = blockIdx.x;; number += 2 * (count & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x) + 1) {
        const int slot = number / num_heads;
        int b, tile, q_begin = 0, n = q_tokens, k_begin = 0, len = kv_tokens;
        if constexpr (Kind != Dense) {
          if (!packed.find(lengths, batch, causal, slot, b, tile)) break;
          q_begin = lengths.q_begin(b);
          n = lengths.rows(b);
          k_begin = lengths.k_begin(b);
          len = lengths.keys(b);
        } else {
          if (number >= (u32)items) break;
          b = slot % batch;
          tile = ceil_div(q_tokens, Rows) - 1 - slot / batch;
        }
        Item &item = next_item();
        if (lane == 0) {
          const int head = number % num_heads;
          const int row = tile * Rows, limit = row + (causal ? len - n + 1 : 1 << 30);
          item.rows = n - row;
          item.limit = limit;
          item.len = len;
          item.steps = ceil_div(max(min(min(Rows, n - row) - 1 + limit, len), 0), TILE);
          item.head = head;
          item.kv_head = head / group;
          item.q_row = q_begin + row;
          item.k_row = k_begin;
          item.sequence = b;
          item.out_row = (Kind == Dense ? (i64)b * q_tokens : 0) + q_begin + row;
        }
        tell();
      }
      Item &item = next_item();
      if (lane == 0) item.steps = -1;
      tell();
    } else if (warp == 0 || warp == 2) {  // copies queries and keys, or values
      auto copy = [&](auto what) {
        constexpr bool values = decltype(what)::value;
        const TensorMap *const map = values ? &v_map : &k_map;
        unsigned char *const ring = values ? s_v : s_k;
        u64 *const full = values ? v_full : k_full, *const empty = values ? v_empty : k_empty;
        u32 copied = 0;  // tiles
        for (u32 count = 0;; ++count) {
          mbarrier_wait(item_full + count % ITEMS, count / ITEMS & 1);
          const Item &item = items_told[count % ITEMS];
          const int steps = item.steps;
          if constexpr (!values) {
#pragma unroll
            for (int w = 0; w < Groups; ++w) {
              mbarrier_wait(q_empty + w, ~count & 1);
              if (lane != 0) continue;
              if (steps < 0) {
                mbarrier_arrive(q_full + w);
              } else {
                mbarrier_arrive_expect(q_full + w, TileBytes);
                tma_load_5d(smem + w * TileBytes, &q_map, q_full + w, 0, item.q_row + w * 64, 0, item.head,
                            Kind == Dense ? item.sequence : 0);
              }
            }
          }
          if (steps < 0) break;
          const int kv_head = item.kv_head, k_row = item.k_row, sequence = item.sequence, len = item.len;
          __syncwarp();
          if (lane == 0) mbarrier_arrive(item_empty + count % ITEMS);

          int pages = -1;  // 32 at a time, one to a lane
          for (int t = 0; t < steps; ++t, ++copied) {
            const int stage = copied % Stages;
            const u32 free = ~(copied / Stages) & 1;
            if constexpr (Kind == Paged) {
              const int page0 = t * TILE >> page_shift;
              if (t == 0 || ((page0 & 31) == 0 && (t - 1) * TILE >> page_shift != page0)) {
                const int column = page0 + lane;
                pages = ((i64)column << page_shift) < len ? __ldg(tables + (i64)sequence * max_blocks + column) : -1;
              }
              // a lane copies what a tile takes of one page: whole rows, or (short pages) 64 columns at a time
              const int shift = min(page_shift, TILE_SHIFT), at = t * TILE + (lane << shift);
              int page = __shfl_sync(0xffffffffu, pages, (at >> page_shift) & 31);
              const bool mine = lane < TILE >> shift, inside = (u32)page < (u32)num_blocks;
              const u32 missing = __ballot_sync(0xffffffffu, mine && at < len && !inside);
              if (!inside) page = num_blocks;  // arrives as zeros
              mbarrier_wait(empty + stage, free);
              if (lane == 0) {
                if constexpr (!values) lost[stage] = missing;
                mbarrier_arrive_expect(full + stage, TileBytes);
              }
              __syncwarp();
              if (mine) {
                unsigned char *const to = ring + stage * TileBytes + (lane << shift) * 128;
#pragma unroll 1
                for (int column = 0; column < (shift < TILE_SHIFT ? D / 64 : 1); ++column)
                  tma_load_5d(to + column * BLOCK_BYTES, map, full + stage, 0, at & ((1 << page_shift) - 1), column, kv_head, page);
              }
            } else if (lane == 0) {
              mbarrier_wait(empty + stage, free);
              mbarrier_arrive_expect(full + stage, TileBytes);
              tma_load_5d(ring + stage * TileBytes, map, full + stage, 0, k_row + t * TILE, 0, kv_head,
                          Kind == Dense ? sequence : 0);
            }
          }
          __syncwarp();
        }
      };
      if (warp == 0)
        copy(Is<false>{});
      else
        copy(Is<true>{});
    }
  } else {  // consumers
    more_registers<Many>();
    const int consumer = warpgroup - 1, warp = threadIdx.x >> 5 & 3;
    const unsigned char *const s_q = smem + consumer * TileBytes + (warp * 16 + (lane & 15)) * 128;
    const u64 k_base = wgmma_descriptor(s_k), v_base = wgmma_descriptor_n_major(s_v, BLOCK_BYTES);
    // M and L of both rows: needed once in a chunk, and the loop has no register to spare
    using Kept = Vec<float, 4>;
    Kept *const kept = reinterpret_cast<Kept *>(s_kept) + consumer * 128 + (threadIdx.x & 127);
    float s[TILE / 2], acc[D / 2], total[D / 2];
    u32 q[D / 16][4], even[TILE / 16][4], odd[TILE / 16][4];

    u32 n = 0;  // the tile that comes next, counted through all items
    for (u32 items_done = 0;; ++items_done) {
      mbarrier_wait(q_full + consumer, items_done & 1);
      const Item *const item = items_told + items_done % ITEMS;
      auto uniform = [](int x) { return __shfl_sync(0xffffffffu, x, 0); };  // into registers that a warp shares
      const int steps = uniform(item->steps);
      if (steps < 0) break;
      // tiles with a key that a row of this warpgroup sees; from tile `plain` on some do not see every key
      const int row0 = consumer * 64, limit = item->limit + row0;
      const int seen = row0 < item->rows ? min(min(item->rows - row0, 64) - 1 + limit, item->len) : 0;
      const u32 end = n + uniform(ceil_div(max(seen, 0), TILE));
      const u32 plain = n + uniform(min(max(limit, 0), item->len) / TILE), begin = n;
#pragma unroll
      for (int kk = 0; kk < D / 16; ++kk)
        ldmatrix_x4(q[kk], s_q + kk / 4 * BLOCK_BYTES + ((kk % 4 * 2 + (lane >> 4) ^ (lane & 7)) << 4));
      __syncwarp();
      if (lane == 0) mbarrier_arrive(q_empty + consumer);

      auto key_of = [&](u32 t) { return (int)(t - begin) * TILE; };
      auto release = [&](u64 *empty, u32 tile) {  // this warp has read it
        if (lane == 0) mbarrier_arrive(empty + tile % Stages);
      };
      auto multiply_keys = [&](u32 t) {  // starts s = q k^T
        mbarrier_wait(k_full + t % Stages, t / Stages & 1);
        const u64 tile = k_base + (u64)(t % Stages * (TileBytes >> 4));
        wgmma_pin(s);
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < D / 16; ++kk)
          WgmmaRegisters<T, TILE, 0>::multiply(s, q[kk], tile + kk / 4 * (BLOCK_BYTES >> 4) + kk % 4 * 2, kk > 0);
        wgmma_commit();
      };
      auto multiply_values = [&](const u32(&p)[TILE / 16][4], u32 t, int accumulate) {  // starts acc (+)= p v
        mbarrier_wait(v_full + t % Stages, t / Stages & 1);
        if (t >= plain && key_of(t) + TILE > item->len) {  // rows past the end may hold anything: 0 * NaN is not 0
          unsigned char *const rows = s_v + t % Stages * TileBytes;
          const int first = item->len - key_of(t);
#pragma unroll 1
          for (int i = threadIdx.x & 127; i < D / 64 * (TILE * 8); i += 128)
            if ((i >> 3 & (TILE - 1)) >= first) *reinterpret_cast<uint4 *>(rows + i * 16) = make_uint4(0, 0, 0, 0);
          async_proxy_fence();
          named_barrier_sync(1 + consumer, 128);
        }
        const u64 tile = v_base + (u64)(t % Stages * (TileBytes >> 4));
        wgmma_pin(acc);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < TILE / 16; ++j) WgmmaRegisters<T, D, 1>::multiply(acc, p[j], tile + j * 128, j > 0 ? 1 : accumulate);
        wgmma_commit();
      };
      auto mask = [&](u32 t) {
        if constexpr (Kind == Paged) {
          const u32 boxes = lost[t % Stages];
          if (boxes != 0) {
            const int shift = min(page_shift, TILE_SHIFT);
#pragma unroll
            for (int e = 0; e < TILE / 2; ++e)
              if (boxes >> (e / 8 * 16 >> shift) & 1) s[e] = CUKERN_NAN;
          }
        }
        if (t >= plain) {
          const int key = key_of(t) + (lane & 3) * 2, len = item->len;
          const int row = item->limit + consumer * 64 + warp * 16 + (lane >> 2);
          const int bound[2] = {min(row, len) - key, min(row + 8, len) - key};
#pragma unroll
          for (int e = 0; e < TILE / 2; ++e)
            if (e / 4 * 8 + (e & 1) >= bound[e >> 1 & 1]) s[e] = -CUKERN_INF;
        }
      };
      float m[2], l[2], corr[2], a[2], b[2];
      *kept = Kept{{-CUKERN_INF, -CUKERN_INF, 0.f, 0.f}};
      auto end_chunk = [&]() {
        const Kept old = *kept;
        ChunkMerge merge[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          merge[i].M = old.v[i];
          merge[i].L = old.v[2 + i];
          merge[i].step(m[i], l[i], c);
          a[i] = merge[i].a;
          b[i] = merge[i].b;
        }
        *kept = Kept{{merge[0].M, merge[1].M, merge[0].L, merge[1].L}};
      };
      auto values_done = [&](u32(&p)[TILE / 16][4], u32 t) {
        wgmma_pin(acc);
#pragma unroll
        for (int j = 0; j < TILE / 16; ++j) wgmma_pin(p[j]);
        release(v_empty, t);
      };
      auto add_chunk = [&]() {
#pragma unroll
        for (int e = 0; e < D / 2; ++e) {
          ChunkMerge merge;
          merge.a = a[e >> 1 & 1];
          merge.b = b[e >> 1 & 1];
          total[e] = merge.add(total[e], acc[e]);
        }
      };
      auto rescale = [&]() {
#pragma unroll
        for (int e = 0; e < D / 2; ++e) acc[e] = __fmul_rn(acc[e], corr[e >> 1 & 1]);
      };

#pragma unroll
      for (int e = 0; e < D / 2; ++e) total[e] = 0.f;
      if (n != end) {
        multiply_keys(n);
        wgmma_commit();  // an empty group, in the place of the products with V
        for (;; n += 2) {
          wgmma_wait<1>();
          wgmma_pin(s);
          mask(n);
          release(k_empty, n);
          softmax_tile<T, true>(s, even, m, l, corr, c);
          if (n + 1 == end) {
            wgmma_wait<0>();
            if (n != begin) {
              values_done(odd, n - 1);
              add_chunk();
            }
            end_chunk();
            multiply_values(even, n, 0);
            break;
          }
          multiply_keys(n + 1);
          wgmma_wait<1>();
          if (n != begin) {
            values_done(odd, n - 1);
            add_chunk();
          }
          multiply_values(even, n, 0);

          wgmma_wait<1>();
          wgmma_pin(s);
          mask(n + 1);
          release(k_empty, n + 1);
          softmax_tile<T, false>(s, odd, m, l, corr, c);
          end_chunk();
          if (n + 2 == end) {
            wgmma_wait<0>();
            values_done(even, n);
            rescale();
            multiply_values(odd, n + 1, 1);
            break;
          }
          multiply_keys(n + 2);
          wgmma_wait<1>();
          values_done(even, n);
          rescale();
          multiply_values(odd, n + 1, 1);
        }
        wgmma_wait<0>();
        values_done(odd, end - 1);
        add_chunk();
      }
      for (u32 t = end; t != begin + steps; ++t) {  // tiles for the other warpgroups
        mbarrier_wait(k_full + t % Stages, t / Stages & 1);
        release(k_empty, t);
        mbarrier_wait(v_full + t % Stages, t / Stages & 1);
        release(v_empty, t);
      }
      n = begin + steps;

      const int valid = item->rows - consumer * 64, head = item->head;
      const i64 out_row = item->out_row + consumer * 64;
      const Kept last = *kept;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float sum = quad_sum(last.v[2 + i]), norm = softmax_norm(sum);
        const int row = warp * 16 + (lane >> 2) + 8 * i;
        if (lse != nullptr && (lane & 3) == 0 && row < valid)
          lse[(out_row + row) * num_heads + head] = softmax_lse(last.v[i], sum, scale);
#pragma unroll
        for (int e = 0; e < D / 2; ++e)
          if ((e >> 1 & 1) == i) total[e] = __fmul_rn(total[e], norm);
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(item_empty + items_done % ITEMS);
      store_halves<D>(total, out + out_row * num_heads * D, 0, head * D, valid, num_heads * D);
    }
  }
}
