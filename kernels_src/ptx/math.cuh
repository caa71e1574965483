// Fast scalar instructions. Test: tests/test_ptx.py
#pragma once
#include "common/types.cuh"
#include "ptx/site.cuh"

// 2^x, relative error 2^-22, subnormal results flushed to zero; exp2_approx(-inf) = 0, exp2_approx(0) = 1 exactly.
__device__ __forceinline__ float exp2_approx(float x) {
#ifdef CUKERN_EMU
  const float y = exp2f(x);
  return y < 1.17549435e-38f ? 0.f : y;
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}
