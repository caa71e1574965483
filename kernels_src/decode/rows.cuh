// What goes into a product: rows in shared memory, normed from the residual stream or loaded as they are.
// Test: tests/test_decode_step.py
#pragma once
#include "common/reduce.cuh"
#include "decode/product.cuh"

constexpr int NORM_STEPS = ceil_div(HIDDEN, 1024);

// Two threads share one of the 256 virtual lanes of a row's RMSNorm (docs/numerics.md, item 3), two elements each of every 1,024.
// Warps 2 g and 2 g + 1 have the even and the odd lanes of group g, so that only the last step of the butterfly leaves a warp.
struct NormLane {
  int column;  // of this thread's first element
  bool second;

  __device__ __forceinline__ NormLane() {
    const int self = this_thread(), warp = self >> 5, lane = self & 31;
    second = lane & 1;
    column = ((warp >> 1) * 32 + (lane >> 1) * 2 + (warp & 1)) * 4 + (lane & 1) * 2;
  }
  // Whether the row reaches so far; the same for both threads of a lane.
  __device__ __forceinline__ bool has(int step) const { return HIDDEN % 1024 == 0 || step * 1024 + column < HIDDEN; }
};

// This thread's norm weights. Those of one step are loaded before the rows are there; more would take too many registers.
struct NormWeights {
  static constexpr bool Early = NORM_STEPS == 1;
  const float *weight;
  Vec<float, 2> v[NORM_STEPS];

  __device__ __forceinline__ void announce(const float *from) {
    weight = from;
    if (Early) load();
  }
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int step = 0; step < NORM_STEPS; ++step) {
      const NormLane place;
      v[step] = place.has(step) ? load_vec<float, 2>(weight + step * 1024 + place.column) : Vec<float, 2>{};
    }
  }
};

// RMSNorm of all rows into x, in the order of rms_norm.cu. `read(row, column)` gives two elements of the residual stream; `groups`
// has room for 16 floats a row. Ends with a block barrier.
template <class T, class Read>
__device__ __forceinline__ void norm_rows(T *x, float *groups, NormWeights &weights, float eps, const Read &read) {
  static_assert(WARPS == 16, "two warps to a group of 32 lanes");
  constexpr int Together = NORM_STEPS >= 16 ? 1 : ROWS < 16 / NORM_STEPS ? ROWS : 16 / NORM_STEPS;  // rows that are read at a time
  constexpr bool Held = Together == ROWS;                                                           // else they are read again
  const NormLane place;
  const int lane = this_thread() & 31;
  Vec<float, 2> v[Together][NORM_STEPS];
  auto read_rows = [&](int row0) {
#pragma unroll
    for (int r = 0; r < Together; ++r)
#pragma unroll
      for (int step = 0; step < NORM_STEPS; ++step)
        v[r][step] = place.has(step) && (ROWS % Together == 0 || row0 + r < ROWS)
                         ? read(row0 + r, step * 1024 + place.column)
                         : Vec<float, 2>{};
  };
#pragma unroll
  for (int row0 = 0; row0 < ROWS; row0 += Together) {
    read_rows(row0);
    float sum[Together];
#pragma unroll
    for (int r = 0; r < Together; ++r) sum[r] = 0.f;
#pragma unroll
    for (int step = 0; step < NORM_STEPS; ++step) {
      const bool there = place.has(step);
#pragma unroll
      for (int r = 0; r < Together; ++r) {
        auto add = [&]() { return fmaf(v[r][step].v[1], v[r][step].v[1], fmaf(v[r][step].v[0], v[r][step].v[0], sum[r])); };
        if (there && !place.second) sum[r] = add();
        sum[r] = __shfl_sync(0xffffffffu, sum[r], lane & ~1);
        if (there && place.second) sum[r] = add();
        sum[r] = __shfl_sync(0xffffffffu, sum[r], lane | 1);
      }
    }
#pragma unroll
    for (int step = 16; step >= 2; step >>= 1)
#pragma unroll
      for (int r = 0; r < Together; ++r) sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], step);
#pragma unroll
    for (int r = 0; r < Together; ++r)
      if (lane == 0 && row0 + r < ROWS) groups[(row0 + r) * 16 + (this_thread() >> 5)] = sum[r];
  }
  if (!NormWeights::Early) weights.load();
  __syncthreads();
#pragma unroll
  for (int row0 = 0; row0 < ROWS; row0 += Together) {
    if (!Held) read_rows(row0);
#pragma unroll
    for (int r = 0; r < Together; ++r) {
      const int row = row0 + r;
      if (row >= ROWS) break;
      float total = 0.f;
#pragma unroll
      for (int group = 0; group < 16; group += 4) {
        const Vec<float, 4> four = load_vec<float, 4>(groups + row * 16 + group);
        total += four.v[0] + four.v[1];
        total += four.v[2] + four.v[3];
      }
      const float scale = __fdiv_rn(1.f, __fsqrt_rn(__fdiv_rn(total, (float)HIDDEN) + eps));
#pragma unroll
      for (int step = 0; step < NORM_STEPS; ++step)
        if (place.has(step)) {
          const Vec<float, 2> &w = weights.v[step], &y = v[r][step];
          store_x(x + row * x_pitch(HIDDEN), step * 1024 + place.column,
                  pack2<T>(w.v[0] * (y.v[0] * scale), w.v[1] * (y.v[1] * scale)));
        }
    }
  }
  __syncthreads();
}

// T [ROWS, K] from other blocks into x. The caller's block barrier follows.
template <int K, class T> __device__ __forceinline__ void load_rows(T *x, const Link &from) {
  constexpr int Pieces = K / 4, Turns = ceil_div(Pieces, THREADS), Together = !DIRECT ? 4 : Turns > 1 ? 2 : 1;
  for (int row = 0; row < ROWS; ++row)
    for (int i = this_thread(); i < Pieces; i += Together * THREADS) {
      u32 v[Together][2], wanted = 0u;
      int column[Together];
#pragma unroll
      for (int n = 0; n < Together; ++n) {
        column[n] = (i + n * THREADS) * 4;
        wanted |= (u32)(column[n] < K) << n;
      }
      from.receive4<K, T, Together>(v, row, column, wanted);
#pragma unroll
      for (int n = 0; n < Together; ++n)
        if (wanted >> n & 1) store_x(x + row * x_pitch(K), column[n], v[n][0], v[n][1]);
    }
}
