// Random numbers by counter: a pure function of (seed, position, vocabulary index), so that the batch, the grid and the
// order of work cannot change a draw. Test: tests/test_sampling.py
#pragma once
#include "common/types.cuh"

// Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
__device__ __forceinline__ uint4 philox(uint4 c, u32 k0, u32 k1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u32 high0 = __umulhi(0xD2511F53u, c.x), low0 = 0xD2511F53u * c.x;
    const u32 high1 = __umulhi(0xCD9E8D57u, c.z), low1 = 0xCD9E8D57u * c.z;
    c = make_uint4(high1 ^ c.y ^ k0, low1, high0 ^ c.w ^ k1, low0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

// The words of vocabulary indices 4 * group to 4 * group + 3.
__device__ __forceinline__ uint4 vocab_words(u64 seed, i64 position, int group) {
  return philox(make_uint4((u32)group, (u32)position, (u32)((u64)position >> 32), 0u), (u32)seed, (u32)(seed >> 32));
}

// -log1p(-v), v = (word + 1/2) / 2^32 (at most 1 - 2^-24): in [2^-33, 16.7], relative error below 1e-5 also for tiny v.
__device__ __forceinline__ float exponential(u32 word) {
  const float v = fminf(fmaf((float)word, 2.3283064365386963e-10f, 1.1641532182693481e-10f), 0.99999994f);
  if (v < 0.0625f) {
    float e = fmaf(v, 0.2f, 0.25f);
    e = fmaf(v, e, 0.33333333f);
    e = fmaf(v, e, 0.5f);
    return v * fmaf(v, e, 1.f);
  }
  return -CUKERN_LN2 * __log2f(1.f - v);
}
