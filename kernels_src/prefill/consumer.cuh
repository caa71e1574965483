// What the consumer warpgroups of both Hopper attention kernels do with their accumulators: 64 rows, held as ptx/wgmma.cuh
// describes them, so that v[e] belongs to row e >> 1 & 1 of the two that a lane has. The order of every sum is that of
// common/softmax.cuh. Test: tests/test_attention_prefill_sm90.py
#pragma once
#include "common/softmax.cuh"

// M and L of a lane's two rows, in shared memory where the loops have no register to spare (head dimension 64): they are needed
// once in a chunk.
using Kept = Vec<float, 4>;

// Keys whose box (1 << shift keys, a bit each) was not copied: every row that sees one becomes NaN.
template <int Keys> __device__ __forceinline__ void lose_keys(float (&s)[Keys / 2], u32 boxes, int shift) {
#pragma unroll
  for (int e = 0; e < Keys / 2; ++e)
    if (boxes >> (e / 8 * 16 >> shift) & 1) s[e] = CUKERN_NAN;
}

// Keys from `row` (for the lane's second row, row + 8) or `len` on are not seen; `key`: of s[0].
template <int Keys> __device__ __forceinline__ void mask_keys(float (&s)[Keys / 2], int key, int row, int len) {
  const int bound[2] = {min(row, len) - key, min(row + 8, len) - key};
#pragma unroll
  for (int e = 0; e < Keys / 2; ++e)
    if (e / 4 * 8 + (e & 1) >= bound[e >> 1 & 1]) s[e] = -CUKERN_INF;
}

// Takes in the statistics of a chunk; a and b are the weights of the totals so far and of the chunk.
__device__ __forceinline__ void end_chunk(Kept *kept, const float (&m)[2], const float (&l)[2], float c, float (&a)[2],
                                          float (&b)[2]) {
  const Kept old = *kept;
  ChunkMerge merge[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    merge[i].M = old.v[i];
    merge[i].L = old.v[2 + i];
    merge[i].step(m[i], l[i], c);
    a[i] = merge[i].a;
    b[i] = merge[i].b;
  }
  *kept = Kept{{merge[0].M, merge[1].M, merge[0].L, merge[1].L}};
}

template <int Count>
__device__ __forceinline__ void add_chunk(float (&total)[Count], const float (&acc)[Count], const float (&a)[2],
                                          const float (&b)[2]) {
#pragma unroll
  for (int e = 0; e < Count; ++e) {
    ChunkMerge merge;
    merge.a = a[e >> 1 & 1];
    merge.b = b[e >> 1 & 1];
    total[e] = merge.add(total[e], acc[e]);
  }
}

template <int Count> __device__ __forceinline__ void rescale(float (&acc)[Count], const float (&corr)[2]) {
#pragma unroll
  for (int e = 0; e < Count; ++e) acc[e] = __fmul_rn(acc[e], corr[e >> 1 & 1]);
}
