// From a warpgroup's accumulators to rows of a matrix, and the order in which tiles of a matrix are worked on.
// Accumulators of 64 rows x Columns as ptx/wgmma.cuh describes them: warp w of the four, lane 4 g + t holds in v[4 j + e] row
// 16 w + g + 8 (e >> 1), column 8 j + 2 t + (e & 1). N is a multiple of 8, so a group of eight columns is whole or absent.
// Test: tests/test_linear_sm90.py
#pragma once
#include "common/types.cuh"

// Tiles that are worked on together share rows of x and of w in L2: down `group` rows of tiles, then one column to the right.
__device__ __forceinline__ void grouped_tile(int tile, int tiles_m, int tiles_n, int group, int &tile_m, int &tile_n) {
  const int per_group = group * tiles_n;
  const int first = tile / per_group * group, in_group = tile % per_group;
  const int height = min(group, tiles_m - first);
  tile_m = first + in_group % height;
  tile_n = in_group / height;
}

// 4 x 4 transpose of 32-bit words: lane t gets word t of lanes 0..3. All lanes of the warp call it.
__device__ __forceinline__ void transpose_quad(u32 (&v)[4]) {
  const int lane = threadIdx.x & 3;
#pragma unroll
  for (int step = 1; step <= 2; step <<= 1) {
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const u32 got = __shfl_xor_sync(0xffffffffu, upper ? v[i] : v[i | step], step);
      if (upper)
        v[i] = got;
      else
        v[i | step] = got;
    }
  }
}

// v += bias of its columns. `column`: of the first accumulator, here and below.
template <int Columns>
__device__ __forceinline__ void add_bias(float (&v)[Columns / 2], const float *bias, int column, int n) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int j = 0; j < Columns / 8; ++j) {
    const int c = column + j * 8 + 2 * t;
    if (c >= n) continue;
    const float b0 = bias[c], b1 = bias[c + 1];
    v[j * 4] += b0;
    v[j * 4 + 1] += b1;
    v[j * 4 + 2] += b0;
    v[j * 4 + 3] += b1;
  }
}

template <int Columns, int Batch>
__device__ __forceinline__ void store_floats(float (&v)[Columns / 2], const float *residual, float *out, int row, int column,
                                             int m, int n) {
  constexpr int Groups = Columns / 8;
  static_assert(Groups % Batch == 0, "whole batches");
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, t = lane & 3;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = row + warp * 16 + h * 8 + (lane >> 2);
    if (r >= m) continue;
    const i64 at = (i64)r * n + column + 2 * t;
    const int left = n - column;
#pragma unroll
    for (int j0 = 0; j0 < Groups; j0 += Batch) {
      Vec<float, 2> old[Batch];
      if (residual) {
#pragma unroll
        for (int q = 0; q < Batch; ++q)
          if ((j0 + q) * 8 < left) old[q] = load_vec<float, 2>(residual + at + (j0 + q) * 8);
      }
#pragma unroll
      for (int q = 0; q < Batch; ++q) {
        const int j = j0 + q;
        Vec<float, 2> y{{v[j * 4 + h * 2], v[j * 4 + h * 2 + 1]}};
        if (residual) {
          y.v[0] = old[q].v[0] + y.v[0];
          y.v[1] = old[q].v[1] + y.v[1];
        }
        if (j * 8 < left) store_vec(out + at + j * 8, y);
      }
    }
  }
}

template <int Columns, class Out>
__device__ __forceinline__ void store_halves(float (&v)[Columns / 2], Out *out, int row, int column, int m, int n) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, t = lane & 3;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = row + warp * 16 + h * 8 + (lane >> 2);
    Out *const at = out + (i64)r * n + column;
    const int left = r < m ? n - column : 0;
#pragma unroll
    for (int j = 0; j < Columns / 8; j += 4) {
      u32 packed[4];
#pragma unroll
      for (int q = 0; q < 4; ++q)
        packed[q] = j + q < Columns / 8 ? pack2<Out>(v[(j + q) * 4 + h * 2], v[(j + q) * 4 + h * 2 + 1]) : 0u;
      transpose_quad(packed);  // lane t: the eight columns of group t
      const int c = (j + t) * 8;
      if (c < left && c < Columns) *reinterpret_cast<uint4 *>(at + c) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
  }
}

// out = v, or residual + v (float only; may be `out` itself). Batch: groups of eight columns whose residuals are loaded
// together.
template <int Columns, int Batch, class Out>
__device__ __forceinline__ void store_rows(float (&v)[Columns / 2], const float *residual, Out *out, int row, int column,
                                           int m, int n) {
  if constexpr (sizeof(Out) == 4)
    store_floats<Columns, Batch>(v, residual, out, row, column, m, n);
  else
    store_halves<Columns>(v, out, row, column, m, n);
}
