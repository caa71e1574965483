// Streams of weights: each of the warps that multiply owns a ring of slots in shared memory and fills it ahead of use, across
// products, barriers and layers, because weights do not change during a step. A slot is 8 rows x 128 k of a unit (see Product),
// swizzled for ldmatrix; one cp.async group each. A slot is refilled as soon as it is read, or when its memory traffic
// disturbs least: with PAIRS (decode/shape.cuh) see refill, else see held_slots.
// Test: tests/test_decode_step.py
#pragma once
#include "common/linear_tile.cuh"
#include "decode/shape.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/memory.cuh"
#include "ptx/pause.cuh"

// threadIdx.x, such that nothing computed from it is kept in registers from layer to layer: computing it again is cheaper.
__device__ __forceinline__ int this_thread() {
  u32 thread = threadIdx.x;
  opaque(thread);
  return (int)thread;
}

// When an empty ring is filled, see WeightStream::refill: at the start of a product (its number), or while heads are computed.
constexpr int NOT_DUE = -1, DUE_WITH_HEADS = HEAD + 1;
// Clocks from the end of a block's part of QKV until the heads are where they are computed, which most blocks do not see.
// H200, us a token at context 128: 0.6B 436 at 1600, 440 at 1900, 452 at 2400, 460 at 2650; 4B 2,207 at 2400, 2,213 at 3000.
constexpr u32 HEADS_UNDER_WAY = PAIRS ? 1600 : 2400;
// With few streams, that many slots of a ring are not filled behind their last reads in QKV, but then too. Of 7, us a token of
// 4B: none 2,240, 2 2,224, 4 2,213, 6 2,250.
constexpr int HELD = 4;
__device__ constexpr int held_slots(int p) { return p == QKV && in_runs(p) && DIRECT && RING_SLOTS > HELD ? HELD : 0; }

template <class T> struct WeightStream {
  static constexpr int Pieces = RING_K / 8, Rows = 32 / Pieces, Copies = 8 / Rows;  // of a row; rows at once; of a lane
  T *ring;  // this warp's
  const Plan &plan;
  int slot;                // read next, refilled next
  int issued;              // slots filled since the first item's values were asked for
  int phase, unit;         // what is fetched: unit of the phase's product, counted in this block
  int k_left, k_behind;    // of the unit, or of a run as far as it is in this tile; of a run in the tiles behind it
  const T *source;         // this lane's first 16 bytes of the next chunk
  int row_step;            // elements to the row of its next 16 bytes
  int due;                 // with PAIRS: when this warp's empty ring is filled again
  int held;                // slots that were read last and are not filled again, see held_slots

  __device__ __forceinline__ WeightStream(T *ring, const Plan &plan)
      : ring(ring), plan(plan), slot(0), issued(0), phase(0), unit(stream_index() - STREAMS), k_left(0), k_behind(0),
        source(nullptr), row_step(0), due(NOT_DUE), held(0) {}

  template <int P> __device__ __forceinline__ void enter_unit() {
    constexpr int K = product_k(P), Units = product_units(P), Length = unit_k(P);
    const int units = plan.units[P], dealt = plan.dealt[P];
    const int begin = in_runs(P) ? units * unit / dealt : unit, count = in_runs(P) ? units * (unit + 1) / dealt - begin : 1;
    const int lane = this_thread() & 31, tile = begin / Units, k0 = begin % Units * Length;
    const i64 row = (i64)(plan.first[P] + tile) * (P == GATE_UP ? 4 : 8) + lane / Pieces;
    const LayerPointers &layer = plan.layers[P == HEAD ? 0 : phase >> 2];
    const u64 weight = P == HEAD      ? plan.head
                       : P == QKV     ? layer.qkv
                       : P == O       ? layer.o
                       : P == GATE_UP ? layer.gate_up
                                      : layer.down;
    source = reinterpret_cast<const T *>(weight) + row * K + k0 + lane % Pieces * 8;
    row_step = Rows * K;
    k_left = min(count * Length, K - k0);
    k_behind = in_runs(P) ? count * Length - k_left : 0;
  }

  __device__ __forceinline__ void next_unit() {
    unit += STREAMS;
    for (; phase < PHASES; ++phase) {
      const int units = plan.dealt[phase == PHASES - 1 ? (int)HEAD : phase & 3];
      if (unit < units) break;
      unit -= units;
    }
    if (phase >= PHASES) return;
    switch (phase == PHASES - 1 ? (int)HEAD : phase & 3) {
      case QKV: return enter_unit<QKV>();
      case O: return enter_unit<O>();
      case GATE_UP: return enter_unit<GATE_UP>();
      case DOWN: return enter_unit<DOWN>();
      default: return enter_unit<HEAD>();
    }
  }

  // Fills the slot that was read first and not filled again.
  __device__ __forceinline__ void fill() {
    find();
    copy();
  }
  __device__ __forceinline__ void find() {
    if (k_left > 0) return;
    if (STREAMS == WARPS || k_behind <= 0) return next_unit();
    const int K = row_step / Rows;
    source += K * ((phase & 3) == GATE_UP ? 3 : 7);  // from the end of a tile's row to the next tile
    k_left = min(k_behind, K);
    k_behind -= k_left;
  }
  // What find() has found, if anything; without a branch, so that the compiler can lay it between products.
  __device__ __forceinline__ void copy() {
    const int lane = threadIdx.x & 31, row = lane / Pieces, piece = lane % Pieces;
    const bool valid = piece * 8 < k_left;
    T *const target = ring + slot * RING_ELEMENTS;
    // From the gates' to the ups' rows; a product of that name is the only one with this remainder.
    const int up_offset = (phase & 3) == GATE_UP ? (INTERMEDIATE - 4) * HIDDEN : 0;
#pragma unroll
    for (int i = 0; i < Copies; ++i)
      cp_async_16_once(target + tile_offset<RING_K>(row + Rows * i, piece),
                       source + (i * row_step + (i < Copies / 2 ? 0 : up_offset)), valid);
    source += RING_K;
    k_left -= RING_K;
    cp_async_commit();
    if (RING_SLOTS > 1) ++issued;  // else whoever waits for values waits for everything
    slot = slot + 1 == RING_SLOTS ? 0 : slot + 1;
  }

  // Instead of fill(). A group without copies, so that the order of groups says what it says otherwise.
  __device__ __forceinline__ void hold() {
    cp_async_commit();
    ++issued;
    ++held;
    slot = slot + 1 == RING_SLOTS ? 0 : slot + 1;
  }
  __device__ __forceinline__ void fill_held() {
    slot = slot >= held ? slot - held : slot - held + RING_SLOTS;
    fill(held);
    held = 0;
  }

  // With PAIRS: the whole ring, which the whole warp has read, with the unit that next_unit() has found.
  template <int Unroll = PAIR_CHUNKS> __device__ __forceinline__ void fill_unit() {
    due = NOT_DUE;
    if (unit_k(HEAD) % (2 * PAIR_SEGMENT) != 0 && phase == PHASES - 1) return fill(PAIR_CHUNKS);
    __syncwarp();
    const int lane = this_thread() & 31, row = lane / Pieces, piece = lane % Pieces;
    const int up_offset = (phase & 3) == GATE_UP ? (INTERMEDIATE - 4) * HIDDEN : 0;
    const bool valid = k_left > 0;
#pragma unroll Unroll
    for (int chunk = 0; chunk < PAIR_CHUNKS; ++chunk) {
#pragma unroll
      for (int i = 0; i < Copies; ++i)
        if (valid)
          cp_async_16_once(ring + chunk * RING_ELEMENTS + tile_offset<RING_K>(row + Rows * i, piece),
                           source + (i * row_step + (i < Copies / 2 ? 0 : up_offset)) + chunk * RING_K);
      cp_async_commit();
    }
    source += PAIR_CHUNKS * RING_K;
    k_left -= PAIR_CHUNKS * RING_K;
    issued += PAIR_CHUNKS;
  }
  // With PAIRS, behind product P: `read` says whether this warp has multiplied a unit. Weights that arrive in a burst hold up
  // the words that the blocks wait for, so a ring is filled at once only if the next product needs it; else where memory has
  // time until words are sent again: when the rows of a later product have come, of which this warp has no unit, or while the
  // heads are computed, the longest such time.
  template <int P> __device__ __forceinline__ void refill(bool read) {
    if (!read) return;
    next_unit();
    const int apart = (phase - P) & 3, distance = apart == 0 ? 4 : apart;  // phases from the unit that was read to the next
    const bool spared = plan.units[QKV] == 0;  // between down and the heads such a block waits for nothing
    due = P == O                                      ? (int)GATE_UP
          : P == GATE_UP && (distance == 2 || spared) ? (int)DOWN
          : P != QKV && (phase & 3) == O              ? (int)QKV  // before the heads: their warps put off what is due then
                                                      : DUE_WITH_HEADS;
    if (distance == 1 || (P == DOWN && spared)) fill_unit();
  }
  __device__ __forceinline__ void fill_due(int when) {
    if (due == when) fill_unit();
  }
  // Behind QKV. A warp that computes heads has no time to wait: with PAIRS it fills its ring later, its keys come the same way.
  __device__ __forceinline__ void fill_with_heads(bool computes_heads) {
    if (PAIRS ? due != DUE_WITH_HEADS : held == 0) return;
    if (PAIRS && computes_heads) {
      due = O;
      return;
    }
    if (!computes_heads) pause(HEADS_UNDER_WAY);
    if (PAIRS)
      fill_unit();
    else
      fill_held();
  }

  __device__ __forceinline__ void start() {
    if (stream_index() >= 0) fill(RING_SLOTS);
  }

  // Of slots that every lane has read.
  __device__ __forceinline__ void fill(int count) {
    __syncwarp();
#pragma unroll 1
    for (; count > 0; --count) fill();
  }

  // The two oldest slots but `Owed`, which were read and are not filled again, readable by the whole warp; then fill(2).
  template <int Owed> __device__ __forceinline__ void front(const T *(&chunks)[2]) {
    cp_async_wait<(RING_SLOTS >= 2 + Owed ? RING_SLOTS - 2 - Owed : 0)>();
    __syncwarp();
    const int first = slot + Owed < RING_SLOTS ? slot + Owed : slot + Owed - RING_SLOTS;
    chunks[0] = ring + first * RING_ELEMENTS;
    chunks[1] = ring + (first + 1 == RING_SLOTS ? 0 : first + 1) * RING_ELEMENTS;
  }
  // With PAIRS: the whole ring, readable by the whole warp. Later: groups that were committed behind it.
  template <int Later> __device__ __forceinline__ void front_unit() {
    cp_async_wait<Later>();
    __syncwarp();
  }
  // The oldest slot, readable by the whole warp; then fill().
  __device__ __forceinline__ const T *front() {
    cp_async_wait<RING_SLOTS - 1>();
    __syncwarp();
    return ring + slot * RING_ELEMENTS;
  }
};

// Waits for a group that this thread committed before the last `later` fills.
__device__ __forceinline__ void wait_behind(int later) {
  if (RING_SLOTS > 4 && later >= RING_SLOTS)
    cp_async_wait<RING_SLOTS>();
  else if (later >= 4)
    cp_async_wait<4>();
  else if (later >= 2)
    cp_async_wait<2>();
  else
    cp_async_wait<0>();
}
