// Online softmax for attention: one step per tile of 64 keys, one merge per chunk of keys (docs/numerics.md, item 2).
// Prefill and decode both come through here, so that a query row has the same bits in both.
//   statistics of a row   m  largest raw score q.k so far, the same in the 4 lanes of a quad
//                         l  sum of p over the columns that this lane owns (2t, 2t+1 of every 8): 4 partial sums a row
//   c = scale * log2(e);  p = exp2(s * c - m * c), one fma;  a row that saw no key has m = -inf and counts as m = 0
// Every operation is spelt out (__fmaf_rn, __fmul_rn): the compiler may not choose where to fuse.
// Test: tests/test_attention_prefill.py, tests/test_attention_decode.py
#pragma once
#include "common/types.cuh"
#include "ptx/math.cuh"

__device__ __forceinline__ float finite_max(float m) { return m == -CUKERN_INF ? 0.f : m; }

// Largest value over the 4 lanes of a quad, which hold one row of an m16n8 fragment.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// Sum of the 4 lane partials, always in this order.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// exp2((from - to) * c): what a value scaled to the maximum `from` is worth at the maximum `to` >= `from`.
__device__ __forceinline__ float rescale_factor(float from, float to, float c) {
  return exp2_approx(__fmul_rn(from - finite_max(to), c));
}

// p of one score; mc = finite_max(m) * c.
__device__ __forceinline__ float softmax_exp(float s, float c, float mc) { return exp2_approx(__fmaf_rn(s, c, -mc)); }

// A lane's part of the sum over 16 keys: the columns 2t, 2t+1, 2t+8, 2t+9, ascending.
__device__ __forceinline__ float group_sum(float p0, float p1, float p8, float p9) { return ((p0 + p1) + p8) + p9; }

// Row sum after a tile: `sum` is the tile's group sums added in ascending order.
__device__ __forceinline__ float update_sum(float l, float corr, float sum) { return __fmaf_rn(l, corr, sum); }

// Running result of the chunks 0, 1, ... of a row: M, L (this lane's partial) and totals, merged in ascending order.
struct ChunkMerge {
  float M, L;  // start at -inf and 0
  float a, b;  // weights of the running total and of the new chunk

  __device__ __forceinline__ void reset() {
    M = -CUKERN_INF;
    L = 0.f;
  }
  // Takes in the statistics of the next chunk; then `total = add(total, acc)` for every accumulator of the row.
  __device__ __forceinline__ void step(float m, float l, float c) {
    weigh(m, c);
    add_sum(l);
  }
  __device__ __forceinline__ float add(float total, float acc) const { return __fmaf_rn(acc, b, __fmul_rn(total, a)); }

  // Both in parts, for a kernel that has other work to put between them.
  __device__ __forceinline__ void weigh(float m, float c) {
    const float top = fmaxf(M, m);
    a = rescale_factor(M, top, c);
    b = rescale_factor(m, top, c);
    M = top;
  }
  __device__ __forceinline__ void add_sum(float l) { L = __fmaf_rn(l, b, __fmul_rn(L, a)); }
  __device__ __forceinline__ float scaled(float total) const { return __fmul_rn(total, a); }
  __device__ __forceinline__ float add_scaled(float total, float acc) const { return __fmaf_rn(acc, b, total); }
};

// Factor of the totals at the end, from the full row sum: 1 / L, or 0 for a row that saw no key.
__device__ __forceinline__ float softmax_norm(float sum) { return sum == 0.f ? 0.f : 1.f / sum; }

// Natural log of the sum of exp(scale * s); -inf for a row that saw no key.
__device__ __forceinline__ float softmax_lse(float M, float sum, float scale) {
  return sum == 0.f ? -CUKERN_INF : __fmaf_rn(M, scale, logf(sum));
}
