// Values of the first items of a block's two teams, asked for by the copy engine a few KB at a time (sm_90 on, VALUE_MAP). The
// blocks' words wait for whatever a multiprocessor has asked for before them, so 64 KB at once, before the next layer's rows,
// hold these up by two microseconds. Two places are nearly free: when the rows of the output product have come, and behind
// that product. The rest is asked for in turns while the block waits for the next layer's rows, by a warp with nothing to do.
// A chunk takes part if all its keys are in the cache; the last chunk of a sequence, items behind the first and couples go by
// cp.async (Attention::copy_values), as all do without VALUE_MAP.
// A tile: 64 columns of 16 keys together, swizzled, so that a copy of 16 keys is one box of the tensor map.
// Test: tests/test_decode_values.py
#pragma once
#include "common/kv_tile.cuh"
#include "decode/shape.cuh"
#ifndef CUKERN_EMU
#include "ptx/tma.cuh"
#else
struct TensorMap {};  // there is no copy engine
#endif

#ifndef CUKERN_EMU
constexpr bool BY_ENGINE = VALUE_MAP != 0 && PAIRS;
#else
constexpr bool BY_ENGINE = false;
#endif
static_assert(!BY_ENGINE || (ROWS == 1 && TEAMS == 2 && !OVERLAY && HEAD_DIM % 64 == 0 && HIDDEN <= 2048 && ALONE == 0),
              "decode_step.py asks for values by the copy engine where they cannot come this way");

// Where a piece of 16 bytes of a key's value lies in its team's tile, in elements. Sixteen rows on it is 16 * HEAD_DIM further.
__device__ __forceinline__ int value_at(int row, int piece) {
  if constexpr (HEAD_DIM % 64 != 0) return RowTile<HEAD_DIM>::at(row, piece);
  return (row >> 4) * (16 * HEAD_DIM) + (piece >> 3) * 1024 + (row & 15) * 64 + (((piece ^ row) & 7) << 3);
}

struct ValueCopies {
  // Copies of 16 keys of both teams: all of them, those asked for when the rows of O have come, and those plus the ones asked
  // for behind O. H200, us a token at 4,096 tokens, 585 by cp.async: with the rows 4 and behind O 6 569, 6 and 4 570, 4 and 8,
  // 4 and 4, 2 and 8 571; of another build, 583: 4 and 6 564, 8 and 0 571, 0 and 8 572, 2 and 2 576, 8 and 8 578, all in turns
  // 582, all at once 592. More of them behind gate|up or with the rows of down 575 to 600, while parts are merged 572 to 584.
  static constexpr int Count = TEAMS * KEYS / 16, EndWithRows = 4, EndBehindO = EndWithRows + 6;
  static_assert(!BY_ENGINE || (EndBehindO % 2 == 0 && EndBehindO < Count && Count <= 32),
                "a lane asks for one copy, the last ones are asked for two by two");
  static constexpr u32 Turn = 750;  // clocks from two copies to the next two; 500 to 1,000 make no difference

  unsigned char *shared;
  const Plan &plan;
  const TensorMap *map;
  int page_shift, num_blocks;

  // Whether this team's first item comes this way.
  __device__ __forceinline__ bool used(int team) const { return BY_ENGINE && plan.by_engine[team] != 0; }

#ifndef CUKERN_EMU
  __device__ __forceinline__ static u64 *barrier(const u64 &of_plan) { return const_cast<u64 *>(&of_plan); }

  // By one thread; a block barrier follows.
  __device__ __forceinline__ void start() const {
    if constexpr (!BY_ENGINE) return;
    acquire_tensor_map(map);
    prefetch_tensor_map(map);
    for (int team = 0; team < TEAMS; ++team) mbarrier_init(barrier(plan.values_there[team]), 1);
    mbarrier_init(barrier(plan.rows_there), 1);
    mbarrier_init_fence();
  }

  // Copies `from` to `to` - 1 of a layer, by a warp: the second team's, then the first one's, from other keys on in each block,
  // so that blocks do not all read at the same offset of their pages. What the tiles held has been read, and what was stored
  // into them otherwise is fenced, see release().
  __device__ __forceinline__ void ask(int layer, int from, int to) const {
    if constexpr (!BY_ENGINE) return;
    const int copy = from + lane_id(), team = copy < Count / 2 ? 1 : 0;
    if (copy >= to || !used(team)) return;
    const unsigned char *const state = shared + Shared::teams + team * TeamShared::bytes;
    const int4 item = *reinterpret_cast<const int4 *>(state + TeamShared::first);
    const int key = (copy + (int)blockIdx.x) % (Count / 2) * 16;
    const int page = reinterpret_cast<const int *>(state + TeamShared::first_pages)[key >> page_shift];
    u64 *const there = barrier(plan.values_there[team]);
    if (copy % (Count / 2) == 0) mbarrier_arrive_expect(there, KEYS * HEAD_DIM * 2);
    tma_load_5d(shared + Shared::kv + (team * KEYS + key) * HEAD_DIM * 2, map, there, 0,
                (item.z * KEYS + key) & ((1 << page_shift) - 1), 0, item.y, layer * num_blocks + page);
  }
  // The last ones, in turns, or at once when the first warp has its part of the layer's rows.
  __device__ __forceinline__ void ask_in_turns(int layer) const {
    if constexpr (!BY_ENGINE) return;
    u32 began = (u32)clock();
#pragma unroll 1
    for (int copy = EndBehindO; copy < Count; copy += 2) {
      ask(layer, copy, copy + 2);
      while ((u32)clock() - began < Turn && !mbarrier_passed(barrier(plan.rows_there), (layer - 1) & 1)) {
      }
      began += Turn;
    }
  }
  // By one thread, once a layer from 1 on.
  __device__ __forceinline__ void rows_have_come() const {
    if constexpr (BY_ENGINE) mbarrier_arrive(barrier(plan.rows_there));
  }

  // By every thread of a team, before it reads them.
  __device__ __forceinline__ void wait(int team, int layer) const {
    if (used(team)) mbarrier_wait(barrier(plan.values_there[team]), layer & 1);
  }
  // By whoever has stored into the tiles, before a block barrier behind which copies are asked for.
  __device__ __forceinline__ void release() const {
    if constexpr (BY_ENGINE) async_proxy_fence();
  }
#else
  __device__ __forceinline__ void start() const {}
  __device__ __forceinline__ void ask(int, int, int) const {}
  __device__ __forceinline__ void ask_in_turns(int) const {}
  __device__ __forceinline__ void rows_have_come() const {}
  __device__ __forceinline__ void wait(int, int) const {}
  __device__ __forceinline__ void release() const {}
#endif
};
