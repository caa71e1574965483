// Adds up the chunks of a query head that other blocks have left in a workspace, in ascending order, with the bits of
// ChunkMerge::step. acc: float [chunks, D]; statistics: float [chunks, 8] = m, l of the 4 lanes of a quad, unused.
// Test: tests/test_attention_decode.py
#pragma once
#include "common/softmax.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"

constexpr int MERGE_PARTS = 128;   // chunks per round, and threads that take part
constexpr int MERGE_COLUMNS = 32;  // columns of the head

struct __align__(16) MergeMemory {
  float acc[2][MERGE_PARTS][MERGE_COLUMNS];
  float a[MERGE_PARTS], b[MERGE_PARTS], l[MERGE_PARTS][4], top[4], total[4];
};

// `columns` columns of one head (acc points at the first), by a whole block of at least MERGE_PARTS threads; the others only
// meet the barriers. Warp 0 owns the columns, four lanes of warp 1 the partial sums; the running maxima, which do not depend
// on the order, are found by a scan so that only two operations a chunk are serial.
// Warp 0 gets its lane's column of the result; M and sum (every lane of it) give the head's log-sum-exp.
template <int D>
__device__ __forceinline__ float merge_chunks(MergeMemory &memory, const float *acc, const float *stats, int chunks,
                                              int columns, float c, float &M, float &sum) {
  u32 self = threadIdx.x;
  opaque(self);  // what follows from it is not kept in registers between calls
  const int i = (int)self, lane = i & 31, warp = i >> 5;
  const bool member = i < MERGE_PARTS;
  auto copy = [&](int chunk0) {
    if (member)
#pragma unroll 2
      for (int n = i; n < MERGE_PARTS * 8; n += MERGE_PARTS) {
        const int part = n / 8, piece = n % 8;
        const bool ok = chunk0 + part < chunks && piece * 4 < columns;
        cp_async_16(&memory.acc[chunk0 / MERGE_PARTS & 1][part][piece * 4],
                    acc + (ok ? (i64)(chunk0 + part) * D + piece * 4 : 0), ok);
      }
    cp_async_commit();
  };
  float total = 0.f;  // a column of the output in warp 0, a partial sum in warp 1
  M = -CUKERN_INF;
  copy(0);
  for (int chunk0 = 0; chunk0 < chunks; chunk0 += MERGE_PARTS) {
    const int count = min(chunks - chunk0, MERGE_PARTS);
    float m = -CUKERN_INF, before = m, top;
    if (member) {
      const float *const mine = stats + (i64)(chunk0 + i) * 8;
      if (i < count) {
        m = mine[0];
#pragma unroll
        for (int t = 0; t < 4; ++t) memory.l[i][t] = mine[1 + t];
      }
      top = m;  // becomes the largest of the chunks up to this one
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const float other = __shfl_up_sync(0xffffffffu, top, step);
        if (lane >= step) top = fmaxf(top, other);
      }
      if (lane == 31) memory.top[warp] = top;
      before = __shfl_up_sync(0xffffffffu, top, 1);
    }
    __syncthreads();
    if (member) {
      float base = M;
      for (int w = 0; w < warp; ++w) base = fmaxf(base, memory.top[w]);
      before = lane == 0 ? base : fmaxf(base, before);
      top = fmaxf(base, top);
      memory.a[i] = rescale_factor(before, top, c);
      memory.b[i] = rescale_factor(m, top, c);
    }
    for (int w = 0; w < 4; ++w) M = fmaxf(M, memory.top[w]);
    if (chunk0 + MERGE_PARTS < chunks) copy(chunk0 + MERGE_PARTS);
    else cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    ChunkMerge merge;
    if (warp == 0 || (warp == 1 && lane < 4)) {
      const float *const value = warp == 0 ? &memory.acc[chunk0 / MERGE_PARTS & 1][0][lane] : &memory.l[0][lane];
      const int pitch = warp == 0 ? MERGE_COLUMNS : 4;
#pragma unroll 8
      for (int p = 0; p < count; ++p) {
        merge.a = memory.a[p];
        merge.b = memory.b[p];
        total = merge.add(total, value[p * pitch]);
      }
    }
    __syncthreads();
  }
  if (warp == 1 && lane < 4) memory.total[lane] = total;
  __syncthreads();
  if (warp > 0) return 0.f;
  sum = quad_sum(memory.total[lane & 3]);
  return __fmul_rn(total, softmax_norm(sum));
}
