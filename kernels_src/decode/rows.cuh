// What goes into a product: rows in shared memory, normed from the residual stream or loaded as they are.
// Test: tests/test_decode_step.py
#pragma once
#include "common/reduce.cuh"
#include "decode/product.cuh"

constexpr int NORM_STEPS = ceil_div(HIDDEN, 1024);
constexpr int NORM_WARPS = 8;  // of a row; where there is one row alone, the others have nothing to do in a norm

// This thread's norm weights. Those of one step are loaded before the rows are there; more would take too many registers.
struct NormWeights {
  static constexpr bool Early = NORM_STEPS == 1 || !PAIRS;
  const float *weight;
  Vec<float, 4> v[NORM_STEPS];

  __device__ __forceinline__ void announce(const float *from) {
    weight = from;
    if (Early) load();
  }
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int step = 0; step < NORM_STEPS; ++step) {
      const int column = step * 1024 + (threadIdx.x & 255) * 4;
      v[step] = column < HIDDEN ? load_vec<float, 4>(weight + column) : Vec<float, 4>{};
    }
  }
};

// 1 / sqrt(sum / N + eps), every step rounded as in rms_norm.cu and head_norm.cuh: to multiply by a power of two is to divide,
// and a rounded reciprocal is a rounded quotient, with fewer instructions.
template <int N> __device__ __forceinline__ float rms_scale(float sum, float eps) {
  constexpr bool PowerOfTwo = (N & (N - 1)) == 0;
  const float mean = PowerOfTwo ? __fmul_rn(sum, 1.f / N) : __fdiv_rn(sum, (float)N);
  return __frcp_rn(__fsqrt_rn(mean + eps));
}

// RMSNorm of all rows into x, in the order of rms_norm.cu (docs/numerics.md, item 3): the 256 threads of half a block are the
// virtual lanes of a row. `read(v, row, column, wanted)` gives four elements of the residual stream at `column` and at every
// 1,024 behind it, zeros behind the end. Ends with a block barrier.
template <int P, class T, class Read>
__device__ __forceinline__ void norm_rows(T *x, float *groups, NormWeights &weights, float eps, const Read &read) {
  constexpr int Turns = ceil_div(ROWS, 2);                     // rows of a half
  constexpr bool Held = Turns * NORM_STEPS <= (PAIRS ? 2 : 5);  // else they are read again
  const int self = this_thread(), half = self >> 8, lane = self & 255;
  u32 place = x_place<P>(half, lane * 4);
  opaque(place);  // found while waiting
  Vec<float, 4> held[Held ? Turns : 1][NORM_STEPS];
#pragma unroll
  for (int turn = 0; turn < Turns; ++turn) {
    const int row = 2 * turn + half;
    Vec<float, 4>(&v)[NORM_STEPS] = held[Held ? turn : 0];
    const bool used = ROWS % 2 == 0 || row < ROWS;
    float sum = 0.f;
    read(v, used ? row : 0, lane * 4, used);
#pragma unroll
    for (int step = 0; step < NORM_STEPS; ++step)
#pragma unroll
      for (int j = 0; j < 4; ++j) sum = fmaf(v[step].v[j], v[step].v[j], sum);
    sum = warp_reduce<Sum>(sum);  // outside of any branch: the compiler need not provide for lanes apart
    if (used && (lane & 31) == 0) groups[row * 8 + (lane >> 5)] = sum;
  }
  if (!NormWeights::Early) weights.load();
  __syncthreads();
#pragma unroll
  for (int turn = 0; turn < Turns; ++turn) {
    const int row = 2 * turn + half;
    Vec<float, 4>(&v)[NORM_STEPS] = held[Held ? turn : 0];
    if (ROWS % 2 == 0 || row < ROWS) {
      float total = 0.f;
#pragma unroll
      for (int group = 0; group < 8; ++group) total += groups[row * 8 + group];
      const float scale = rms_scale<HIDDEN>(total, eps);
      if (!Held) read(v, row, lane * 4, true);
#pragma unroll
      for (int step = 0; step < NORM_STEPS; ++step) {
        const int column = step * 1024 + lane * 4;
        if (column < HIDDEN) {
          float y[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) y[j] = weights.v[step].v[j] * (v[step].v[j] * scale);
          store_x<P>(x, place + turn * 2 * x_row_words<P>() + step * x_step_words<P>(), y);
        }
      }
    }
  }
  __syncthreads();
}

// T [ROWS, K] from other blocks into x of a product. The caller's block barrier follows.
template <int P, class T> __device__ __forceinline__ void load_rows(T *x, const Link &from) {
  constexpr int K = product_k(P), Pieces = K / 8, Turns = ceil_div(ROWS * Pieces, THREADS);
  if constexpr (DIRECT) {
    constexpr int AtOnce = paired(P) ? 1 : Turns < 4 ? Turns : 4;
#pragma unroll 1
    for (int begin = this_thread(); begin < ROWS * Pieces; begin += AtOnce * THREADS) {
      Vec<T, 8> v[AtOnce];
      from.receive8<K, T>(v, begin);
#pragma unroll
      for (int n = 0; n < AtOnce; ++n) {
        const int i = begin + n * THREADS;
        if (AtOnce == 1 || i < ROWS * Pieces) store_vec(x + x_piece<P>(i / Pieces, i % Pieces), v[n]);
      }
    }
  } else {
#pragma unroll 4
    for (int i = this_thread(); i < ROWS * Pieces; i += THREADS) {
      const int row = i / Pieces, piece = i % Pieces;
      store_vec(x + x_piece<P>(row, piece), load_vec<T, 8>(reinterpret_cast<const T *>(from.words) + (i64)row * K + piece * 8));
    }
  }
}
