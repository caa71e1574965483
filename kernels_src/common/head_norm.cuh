// Norm and rotation of a query or key head: rotate(head / sqrt(mean(head^2) + eps) * weight). Every kernel that prepares
// heads calls this, so that they agree in every bit. A head of `dim` elements belongs to `lanes` neighbouring lanes (1, 2, 4,
// 8 or 16: dim / 16 rounded up); lane i holds elements 8i to 8i+7 in `first` and their rotation partners, dim / 2 further
// on, in `second`. Test: tests/test_qk_norm_rope_cache.py
#pragma once
#include "common/rope.cuh"
#include "common/rows.cuh"

constexpr int HEAD_WIDTH = 8;

// Sum of squares in an order that is a function of dim alone: first, then second, by fma; then a butterfly over the lanes of
// the head, widest step first. Lanes beyond dim / 2 hold zeros.
template <class T>
__device__ __forceinline__ float head_squares(const Vec<T, HEAD_WIDTH> &first, const Vec<T, HEAD_WIDTH> &second,
                                              int lanes) {
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < HEAD_WIDTH; ++j) sum = fmaf(to_float(first.v[j]), to_float(first.v[j]), sum);
#pragma unroll
  for (int j = 0; j < HEAD_WIDTH; ++j) sum = fmaf(to_float(second.v[j]), to_float(second.v[j]), sum);
  for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  return sum;
}

// In place. `weight` and `table` (the position's row: dim / 2 cosines, dim / 2 sines) point at this lane's first element;
// a position outside the table makes the head NaN.
template <class T>
__device__ __forceinline__ void norm_rotate_head(Vec<T, HEAD_WIDTH> &first, Vec<T, HEAD_WIDTH> &second, float sum,
                                                 const float *weight, const float *table, int dim, float eps,
                                                 bool inside) {
  const float scale = __fdiv_rn(1.f, __fsqrt_rn(__fdiv_rn(sum, (float)dim) + eps));
  float a[HEAD_WIDTH], b[HEAD_WIDTH], x[HEAD_WIDTH], y[HEAD_WIDTH];
  load_floats(x, weight);
  load_floats(y, weight + dim / 2);
#pragma unroll
  for (int j = 0; j < HEAD_WIDTH; ++j) {
    a[j] = to_float(first.v[j]) * scale * x[j];
    b[j] = to_float(second.v[j]) * scale * y[j];
  }
  load_floats(x, table);
  load_floats(y, table + dim / 2);
#pragma unroll
  for (int j = 0; j < HEAD_WIDTH; ++j) {
    rotate_pair(a[j], b[j], x[j], y[j]);
    first.v[j] = from_float<T>(inside ? a[j] : CUKERN_NAN);
    second.v[j] = from_float<T>(inside ? b[j] : CUKERN_NAN);
  }
}
