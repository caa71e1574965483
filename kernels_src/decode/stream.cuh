// The stream of weights: every warp owns a ring of slots in shared memory and fills it ahead of use, across products, barriers
// and layers, because weights do not change during a step. A slot is 8 rows x 128 k of a unit (see Product), swizzled for
// ldmatrix; one cp.async group each. The ring is always full: a slot is refilled as soon as it is read.
// Test: tests/test_decode_step.py
#pragma once
#include "common/linear_tile.cuh"
#include "decode/shape.cuh"
#include "ptx/memory.cuh"

// threadIdx.x, such that nothing computed from it is kept in registers from layer to layer: computing it again is cheaper.
__device__ __forceinline__ int this_thread() {
  u32 thread = threadIdx.x;
  opaque(thread);
  return (int)thread;
}

template <class T> struct WeightStream {
  static constexpr int Pieces = RING_K / 8, Rows = 32 / Pieces, Copies = 8 / Rows;  // of a row; rows at once; of a lane
  T *ring;  // this warp's
  const Plan &plan;
  int slot;                // read next, refilled next
  int issued;              // slots filled since the first item's keys and values were asked for
  int phase, unit;         // what is fetched: unit of the phase's product, counted in this block
  int chunks_left, k_left;  // of the unit
  const T *source;         // this lane's first 16 bytes of the next chunk
  int row_step;            // elements to the row of its next 16 bytes
  int up_offset;           // more elements to the second half of the rows (GATE_UP)

  __device__ __forceinline__ WeightStream(T *ring, const Plan &plan)
      : ring(ring), plan(plan), slot(0), issued(0), phase(0), unit((int)(threadIdx.x >> 5) - WARPS), chunks_left(0) {}

  template <int P> __device__ __forceinline__ void enter_unit() {
    constexpr int K = product_k(P), Segments = product_segments(P), Segment = product_segment(P);
    const int lane = threadIdx.x & 31, tile = unit / Segments, k0 = unit % Segments * Segment;
    const i64 row = (i64)(plan.first[P] + tile) * (P == GATE_UP ? 4 : 8) + lane / Pieces;
    source = reinterpret_cast<const T *>(plan.weights[phase]) + row * K + k0 + lane % Pieces * 8;
    row_step = Rows * K;
    up_offset = P == GATE_UP ? (INTERMEDIATE - 4) * K : 0;
    k_left = min(Segment, K - k0);
    chunks_left = ceil_div(k_left, RING_K);
  }

  __device__ __forceinline__ void next_unit() {
    unit += WARPS;
    for (; phase < PHASES; ++phase) {
      const int units = plan.units[phase == PHASES - 1 ? (int)HEAD : phase & 3];
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

  // Fills the slot that was read last.
  __device__ __forceinline__ void fill() {
    if (chunks_left == 0) next_unit();
    if (chunks_left > 0) {
      const int lane = threadIdx.x & 31, row = lane / Pieces, piece = lane % Pieces;
      const bool valid = piece * 8 < k_left;
      T *const target = ring + slot * RING_ELEMENTS;
#pragma unroll
      for (int i = 0; i < Copies; ++i)
        cp_async_16(target + tile_offset<RING_K>(row + Rows * i, piece),
                    source + (i * row_step + (i < Copies / 2 ? 0 : up_offset)), valid);
      source += RING_K;
      k_left -= RING_K;
      --chunks_left;
    }
    cp_async_commit();
    ++issued;
    slot = slot + 1 == RING_SLOTS ? 0 : slot + 1;
  }

  __device__ __forceinline__ void start() {
    for (int i = 0; i < RING_SLOTS; ++i) fill();
  }

  // The two oldest slots, readable by the whole warp; then fill() twice.
  __device__ __forceinline__ void front(const T *(&chunks)[2]) {
    cp_async_wait<(RING_SLOTS >= 2 ? RING_SLOTS - 2 : 0)>();
    __syncwarp();
    chunks[0] = ring + slot * RING_ELEMENTS;
    chunks[1] = ring + (slot + 1 == RING_SLOTS ? 0 : slot + 1) * RING_ELEMENTS;
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
  if (later >= 4)
    cp_async_wait<4>();
  else if (later >= 2)
    cp_async_wait<2>();
  else
    cp_async_wait<0>();
}
