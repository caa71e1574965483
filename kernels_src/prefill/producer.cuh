// What the Hopper kernels of prefill attention share: shared memory, the list of work, and the warpgroup that copies. Of that
// warpgroup one warp finds work, one copies queries and keys, one copies values; items of work are told through shared memory.
// Test: tests/test_attention_prefill_sm90.py
#pragma once
#include "prefill/order.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"

constexpr int TILE = 64, CHUNK = 128;  // keys of an online-softmax step, and of a chunk (numerics contract)
constexpr int ITEMS = 4;               // told ahead

// A query tile of a head, told through shared memory. steps < 0: nothing any more.
struct __align__(8) Item {
  i64 out_row;           // of the first row
  int rows, limit, len;  // rows that exist; row r sees the keys [0, min(limit + r, len))
  int steps;             // steps of keys that any row looks at
  int head, kv_head;
  int q_row, k_row;  // where rows and keys begin in q, k and v
  int sequence;      // of dense arrays, or of the table of pages
};

template <bool Value> struct Is {
  static constexpr bool value = Value;
};

// Shared memory: queries [QSlots][Groups], rings of K and of V of `Keys` keys a stage, each in blocks of 64 columns with the
// 128-byte swizzle; if Keeps, 16 bytes to a consumer thread; barriers; items.
template <int D, int Groups, int Stages, int Keys, int QSlots, bool Keeps> struct Shared {
  static constexpr int Block = Keys * 128, Step = D / 64 * Block, Queries = D / 64 * 8192;  // bytes
  static_assert((Stages & (Stages - 1)) == 0, "step n of all is in stage n % Stages, in phase n / Stages");
  unsigned char *const queries, *const keys, *const values;
  Vec<float, 4> *const kept;
  u64 *const k_full, *const k_empty, *const v_full, *const v_empty, *const q_full, *const q_empty;
  u64 *const item_full, *const item_empty;
  Item *const items;
  u32 *const lost;  // [Stages]; bit i: the i-th page of a step of K is not in the cache

  __device__ __forceinline__ explicit Shared(unsigned char *smem)
      : queries(smem), keys(queries + QSlots * Groups * Queries), values(keys + Stages * Step),
        kept(reinterpret_cast<Vec<float, 4> *>(values + Stages * Step)),
        k_full(reinterpret_cast<u64 *>(kept + (Keeps ? Groups * 128 : 0))),
        k_empty(k_full + Stages), v_full(k_empty + Stages), v_empty(v_full + Stages), q_full(v_empty + Stages),
        q_empty(q_full + QSlots * Groups), item_full(q_empty + QSlots * Groups), item_empty(item_full + ITEMS),
        items(reinterpret_cast<Item *>(item_empty + ITEMS)), lost(reinterpret_cast<u32 *>(items + ITEMS)) {}

  __device__ __forceinline__ void init() const {
    if (shared_address(queries) & 1023) __trap();  // the swizzle counts on it
#pragma unroll
    for (int i = 0; i < Stages; ++i) {
      mbarrier_init(k_full + i, 1);
      mbarrier_init(v_full + i, 1);
      mbarrier_init(k_empty + i, Groups * 4);  // every consumer warp
      mbarrier_init(v_empty + i, Groups * 4);
    }
#pragma unroll
    for (int i = 0; i < QSlots * Groups; ++i) {
      mbarrier_init(q_full + i, 1);
      mbarrier_init(q_empty + i, 4);
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      mbarrier_init(item_full + i, 1);
      mbarrier_init(item_empty + i, (Groups * 4 + 2) * 32);  // every consumer, and the two warps that copy: all read it
    }
    mbarrier_init_fence();
  }
};

// Registers of a thread, of those that compute and of those that do not: together no more than the block starts with, or the
// former wait for ever.
template <int Groups> struct Registers {
  static constexpr int Many = Groups == 3 ? 160 : 232, Few = Groups == 3 ? 32 : 40;
  static_assert(Many * Groups + Few <= 65536 / ((Groups + 1) * 128) / 8 * 8 * (Groups + 1), "as many as there are");
};

// What the first warpgroup does.
template <int D, int Kind, int Groups, int Stages, int Keys, int QSlots, bool Keeps>
__device__ __forceinline__ void produce(const Shared<D, Groups, Stages, Keys, QSlots, Keeps> &shared, const TensorMap &q_map,
                                        const TensorMap &k_map, const TensorMap &v_map, const int *cu_q, const int *cu_k,
                                        const int *tables, const int *seq_lens, int batch, int q_tokens, int kv_tokens,
                                        int num_heads, int group, int max_blocks, int page_shift, int num_blocks, int items,
                                        int tall, int causal) {
  constexpr int Rows = 64 * Groups, KeysShift = Keys == 64 ? 6 : 7;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (warp == 1) {  // finds work
    u32 count = 0;
    auto next_item = [&]() -> Item & {  // a place for the next item, once it is free
      mbarrier_sleep(shared.item_empty + count % ITEMS, ~(count / ITEMS) & 1);
      return shared.items[count % ITEMS];
    };
    auto tell = [&]() {
      if (lane == 0) mbarrier_arrive(shared.item_full + count % ITEMS);
      ++count;
    };
    // Lengths are clamped to the arrays: wrong ones on the device must not reach other memory.
    const int most = Kind == Paged ? (int)min((i64)max_blocks << page_shift, (i64)0x7fffffff) : kv_tokens;
    const PackedLengths<Kind == Paged> lengths{cu_q, cu_k, seq_lens, q_tokens, most};
    WorkOrder<D, Kind, Rows> order;
    order.init(lengths, batch, q_tokens, kv_tokens, num_heads, group, tall, items <= gridDim.x);
    // rounds go forwards and backwards through the blocks in turn
    for (u32 number = blockIdx.x;; number += 2 * (count & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x) + 1) {
      int b, tile, head, q_begin = 0, n = q_tokens, k_begin = 0, len = kv_tokens;
      if (!order.find(lengths, batch, num_heads, causal, number, b, tile, head)) break;
      int row = tile * Rows, rows = Rows;
      if constexpr (Kind != Dense) {
        q_begin = lengths.q_begin(b);
        n = lengths.rows(b);
        k_begin = lengths.k_begin(b);
        len = lengths.keys(b);
      } else if (tile >= tall) {
        row -= (tile - tall) * 64;
        rows -= 64;
      }
      rows = min(rows, n - row);
      Item &item = next_item();
      if (lane == 0) {
        const int limit = row + (causal ? len - n + 1 : 1 << 30);
        item.rows = rows;
        item.limit = limit;
        item.len = len;
        item.steps = ceil_div(max(min(rows - 1 + limit, len), 0), Keys);
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
      unsigned char *const ring = values ? shared.values : shared.keys;
      u64 *const full = values ? shared.v_full : shared.k_full, *const empty = values ? shared.v_empty : shared.k_empty;
      u32 copied = 0;  // steps
      for (u32 count = 0;; ++count) {
        mbarrier_sleep(shared.item_full + count % ITEMS, count / ITEMS & 1);
        const Item &item = shared.items[count % ITEMS];
        const int steps = item.steps;
        if constexpr (!values) {
#pragma unroll
          for (int w = 0; w < Groups; ++w) {
            const int slot = count % QSlots * Groups + w;
            mbarrier_sleep(shared.q_empty + slot, ~(count / QSlots) & 1);
            if (lane != 0) continue;
            if (steps < 0) {
              mbarrier_arrive(shared.q_full + slot);
            } else {
              mbarrier_arrive_expect(shared.q_full + slot, shared.Queries);
              tma_load_5d(shared.queries + slot * shared.Queries, &q_map, shared.q_full + slot, 0, item.q_row + w * 64, 0,
                          item.head, Kind == Dense ? item.sequence : 0);
            }
          }
        }
        if (steps < 0) break;
        const int kv_head = item.kv_head, sequence = item.sequence;
        [[maybe_unused]] const int k_row = item.k_row, len = item.len;
        mbarrier_arrive(shared.item_empty + count % ITEMS);
        __syncwarp();

        [[maybe_unused]] int pages = -1;  // 32 at a time, one to a lane
        for (int t = 0; t < steps; ++t, ++copied) {
          const int stage = copied % Stages;
          const u32 free = ~(copied / Stages) & 1;
          if constexpr (Kind == Paged) {
            const int page0 = t * Keys >> page_shift;
            if (t == 0 || ((page0 & 31) == 0 && (t - 1) * Keys >> page_shift != page0)) {
              const int column = page0 + lane;
              pages = ((i64)column << page_shift) < len ? __ldg(tables + (i64)sequence * max_blocks + column) : -1;
            }
            // a lane copies what a step takes of one page: whole rows, or (short pages) 64 columns at a time
            const int shift = min(page_shift, KeysShift), at = t * Keys + (lane << shift);
            int page = __shfl_sync(0xffffffffu, pages, (at >> page_shift) & 31);
            const bool mine = lane < Keys >> shift, inside = (u32)page < (u32)num_blocks;
            const u32 missing = __ballot_sync(0xffffffffu, mine && at < len && !inside);
            if (!inside) page = num_blocks;  // arrives as zeros
            mbarrier_sleep(empty + stage, free);
            if (lane == 0) {
              if constexpr (!values) shared.lost[stage] = missing;
              mbarrier_arrive_expect(full + stage, shared.Step);
            }
            __syncwarp();
            if (mine) {
              unsigned char *const to = ring + stage * shared.Step + (lane << shift) * 128;
#pragma unroll 1
              for (int column = 0; column < (shift < KeysShift ? D / 64 : 1); ++column)
                tma_load_5d(to + column * shared.Block, map, full + stage, 0, at & ((1 << page_shift) - 1), column, kv_head,
                            page);
            }
          } else if (lane == 0) {
            mbarrier_sleep(empty + stage, free);
            mbarrier_arrive_expect(full + stage, shared.Step);
            tma_load_5d(ring + stage * shared.Step, map, full + stage, 0, k_row + t * Keys, 0, kv_head,
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
}

