// Rotary position embedding of one pair. Every kernel that rotates calls this, so that they agree in every bit.
// Test: tests/test_rope.py, tests/test_qk_norm_rope_cache.py
#pragma once
#include "common/types.cuh"

// (first, second) = elements (i, i + D/2) of a head -> turned by the angle; the explicit fma leaves nothing to contract.
__device__ __forceinline__ void rotate_pair(float &first, float &second, float cosine, float sine) {
  const float a = first, b = second;
  first = fmaf(a, cosine, -__fmul_rn(b, sine));
  second = fmaf(b, cosine, __fmul_rn(a, sine));
}

// Row of the table for a position; false (and row 0) if the table has none.
template <class Position> __device__ __forceinline__ bool table_row(Position position, i64 length, i64 &row) {
  const bool inside = position >= 0 && (i64)position < length;
  row = inside ? (i64)position : 0;
  return inside;
}
