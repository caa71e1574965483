// silu(gate) * up, silu(g) = g / (1 + exp(-g)). Test: tests/test_swiglu.py
#pragma once
#include "common/types.cuh"
#include "ptx/math.cuh"

__device__ __forceinline__ float silu_mul(float gate, float up) {
  return __fdividef(gate, 1.f + exp2_approx(-gate * CUKERN_LOG2E)) * up;
}
