// Reductions over the vocabulary in an order that depends on the row length alone (docs/numerics.md): a row is cut into
// tiles of 1024 columns; one warp takes a tile as 8 groups of 128 columns, four consecutive columns a lane. A tile gives
// its maximum m and s = sum exp((x - m) / temperature): (e0 + e1) + (e2 + e3) in each lane, a butterfly (16, 8, 4, 2, 1) in
// each group, then the 8 groups ascending. Tiles meet against the maximum of the row: lane i of a warp adds tiles i,
// i + 32, ... ascending, then a butterfly. Test: tests/test_softmax.py
#pragma once
#include "common/reduce.cuh"
#include "common/types.cuh"
#include "ptx/math.cuh"

constexpr int VOCAB_TILE = 1024;  // as in cukern/ops/_numerics.py
constexpr int VOCAB_GROUP = 128;
constexpr int VOCAB_GROUPS = VOCAB_TILE / VOCAB_GROUP;

typedef float VocabTile[VOCAB_GROUPS][4];

// Factor c of exp((x - m) / temperature) = exp2((x - m) * c), finite and positive; `otherwise` for a temperature that is
// zero, negative or NaN.
__device__ __forceinline__ float clamp_temperature(float t) { return fminf(fmaxf(t, 1.17549435e-38f), 1e36f); }
__device__ __forceinline__ float temperature_scale(float t, float otherwise) {
  return t > 0.f ? CUKERN_LOG2E / clamp_temperature(t) : otherwise;
}

// First column of this lane in group g of the tile.
__device__ __forceinline__ int tile_column(int tile, int g) {
  return tile * VOCAB_TILE + g * VOCAB_GROUP + (threadIdx.x & 31) * 4;
}

// Four columns from `column` on, -inf past the end. Aligned: n is a multiple of 4 and rows start at multiples of 4 elements.
template <class T, bool Aligned>
__device__ __forceinline__ void load_columns(float (&v)[4], const T *row, int n, int column) {
  if (Aligned) {
    if (column < n) {
      const Vec<T, 4> part = load_vec<T, 4>(row + column);
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = to_float(part.v[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = -CUKERN_INF;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = column + i < n ? to_float(row[column + i]) : -CUKERN_INF;
  }
}

template <class T, bool Aligned>
__device__ __forceinline__ void load_tile(VocabTile &v, const T *row, int n, int tile) {
#pragma unroll
  for (int g = 0; g < VOCAB_GROUPS; ++g) load_columns<T, Aligned>(v[g], row, n, tile_column(tile, g));
}

// Eight warp butterflies for little more than one: a step halves the number of values that a lane still carries. Lanes
// 4g to 4g + 3 get the result of r[g], with the bits of warp_reduce.
template <class Op> __device__ __forceinline__ float reduce_groups(float (&r)[VOCAB_GROUPS]) {
#pragma unroll
  for (int step = 16; step >= 4; step >>= 1) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < step / 4; ++i) {
      const float give = upper ? r[i] : r[i + step / 4];
      const float keep = upper ? r[i + step / 4] : r[i];
      r[i] = Op::combine(keep, __shfl_xor_sync(0xffffffffu, give, step));
    }
  }
  float x = r[0];
  x = Op::combine(x, __shfl_xor_sync(0xffffffffu, x, 2));
  return Op::combine(x, __shfl_xor_sync(0xffffffffu, x, 1));
}

// (m, s) of a tile held by a warp; every lane gets them. `group_max` receives the maximum of group (lane / 4).
// NaN is not seen by m, but makes s NaN; so does +inf. A tile of -inf alone gives (-inf, 0).
__device__ __forceinline__ float2 tile_stats(const VocabTile &v, float c, float &group_max) {
  float r[VOCAB_GROUPS];
#pragma unroll
  for (int g = 0; g < VOCAB_GROUPS; ++g) r[g] = fmaxf(fmaxf(v[g][0], v[g][1]), fmaxf(v[g][2], v[g][3]));
  float m = group_max = reduce_groups<Max>(r);
#pragma unroll
  for (int step = 4; step < 32; step <<= 1) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, step));
  const float base = m == -CUKERN_INF ? 0.f : m;
#pragma unroll
  for (int g = 0; g < VOCAB_GROUPS; ++g) {
    float e[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) e[i] = exp2_approx((v[g][i] - base) * c);
    r[g] = (e[0] + e[1]) + (e[2] + e[3]);
  }
  const float part = reduce_groups<Sum>(r);
  float s = __shfl_sync(0xffffffffu, part, 0);
#pragma unroll
  for (int g = 1; g < VOCAB_GROUPS; ++g) s += __shfl_sync(0xffffffffu, part, g * 4);
  return make_float2(m, s);
}

// (M, S) of a row from its tiles, for a whole warp: S = sum exp((x - M) / temperature), at least 1 if M is finite.
// S is NaN if the row holds NaN or +inf, and 0 if it holds nothing but -inf. Batch: loads of a lane that are under way
// together; a tile that is not there adds nothing.
template <int Batch> __device__ __forceinline__ float2 combine_tiles(const float2 *tiles, int count, float c) {
  const int lane = threadIdx.x & 31;
  auto tile = [&](int t) { return t < count ? tiles[t] : make_float2(-CUKERN_INF, 0.f); };
  float m = -CUKERN_INF;
#pragma unroll 1
  for (int first = lane; first < count; first += 32 * Batch) {
    float x[Batch];
#pragma unroll
    for (int j = 0; j < Batch; ++j) x[j] = tile(first + 32 * j).x;
#pragma unroll
    for (int j = 0; j < Batch; ++j) m = fmaxf(m, x[j]);
  }
  m = warp_reduce<Max>(m);
  const float base = m == -CUKERN_INF ? 0.f : m;
  float s = 0.f;
#pragma unroll 1
  for (int first = lane; first < count; first += 32 * Batch) {
    float2 x[Batch];
#pragma unroll
    for (int j = 0; j < Batch; ++j) x[j] = tile(first + 32 * j);
#pragma unroll
    for (int j = 0; j < Batch; ++j) s = fmaf(x[j].y, exp2_approx((x[j].x - base) * c), s);
  }
  return make_float2(m, warp_reduce<Sum>(s));
}

// log(softmax(row / temperature)) at the logit x: never positive, because S >= 1 and x <= M.
__device__ __forceinline__ float log_probability(float x, float2 row, float temperature) {
  return (x - row.x) / clamp_temperature(temperature) - logf(row.y);
}
