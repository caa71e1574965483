// Reductions whose order never changes: the result is a function of the values alone (docs/numerics.md).
// Test: tests/test_common_headers.py
#pragma once
#include "common/types.cuh"

struct Sum {
  static constexpr float identity = 0.f;
  __device__ __forceinline__ static float combine(float a, float b) { return a + b; }
};

struct Max {
  __device__ __forceinline__ static float combine(float a, float b) { return fmaxf(a, b); }
};

// Xor butterfly over `Width` neighbouring lanes, widest step first; every lane gets the result.
template <class Op, int Width = 32> __device__ __forceinline__ float warp_reduce(float x) {
#pragma unroll
  for (int step = Width / 2; step > 0; step >>= 1) x = Op::combine(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

// One value per thread of `Warps` full warps: a butterfly in each warp, then the warp results in ascending order.
// Every thread gets the result. `scratch` holds Warps floats and is free again after the call.
template <class Op, int Warps> __device__ __forceinline__ float block_reduce(float x, float *scratch) {
  x = warp_reduce<Op>(x);
  if (Warps == 1) return x;
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
  __syncthreads();
  x = scratch[0];
#pragma unroll
  for (int w = 1; w < Warps; ++w) x = Op::combine(x, scratch[w]);
  __syncthreads();
  return x;
}
