// Pieces shared by the variants of the linear layer: shared-memory layout, copies of operand rows, the epilogue.
// Test: tests/test_linear.py
#pragma once
#include "common/types.cuh"
#include "ptx/cp_async.cuh"

// -0 is the identity of IEEE addition: -0 + x == x for every x, so the first segment sum is taken as it is.
#define SUM_START -0.f

// A tile row of `Columns` 16-bit elements is Columns/8 chunks of 16 bytes; chunk c of row r lies at chunk (c ^ row_key(r)).
// The eight rows that one ldmatrix phase or one store phase touches then fall on eight different bank groups.
template <int Columns> __device__ __forceinline__ constexpr int row_key(int row) {
  static_assert(Columns == 32 || Columns % 64 == 0, "a tile row is 64 bytes or a multiple of 128");
  return Columns == 32 ? (row >> 1) & 3 : row & 7;
}

// Element offset of a chunk in a tile.
template <int Columns> __device__ __forceinline__ constexpr int tile_offset(int row, int chunk) {
  return row * Columns + ((chunk ^ row_key<Columns>(row)) << 3);
}

// Eight elements of a row, `column` .. `column + 7`, into shared memory; columns from `limit` on, or all if the row is not
// valid, become zeros. Aligned: rows start at a multiple of 16 bytes and limit % 8 == 0, so a chunk is whole or absent.
template <class T, bool Aligned>
__device__ __forceinline__ void copy_chunk(T *smem, const T *row, i64 column, i64 limit, bool valid) {
  if constexpr (Aligned) {
    cp_async_16(smem, row + column, valid && column < limit);
  } else {
    Vec<T, 8> v;
#pragma unroll
    for (int i = 0; i < 8; ++i) v.v[i] = valid && column + i < limit ? row[column + i] : from_float<T>(0.f);
    store_vec(smem, v);
  }
}

// Where results go. `residual` (same layout as `out`, may be `out` itself) and `bias` may be null.
template <class Out> struct LinearOutput {
  const float *bias, *residual;
  Out *out;
  int m, n;

  // The sum of one output as the numerics contract wants it: + bias, + residual, in float32.
  __device__ __forceinline__ float finish(float sum, i64 at, int column) const {
    if (bias) sum += bias[column];
    if (residual) sum = residual[at] + sum;
    return sum;
  }

  __device__ __forceinline__ void store(float sum, int row, int column) const {
    if (row >= m || column >= n) return;
    const i64 at = (i64)row * n + column;
    out[at] = from_float<Out>(finish(sum, at, column));
  }

  // The same in two steps, the residual being loaded long before the sum is known; `valid` is about the row.
  __device__ __forceinline__ float load_residual(int row, int column, bool valid) const {
    return residual && valid && column < n ? residual[(i64)row * n + column] : 0.f;
  }
  __device__ __forceinline__ void store(float sum, int row, int column, bool valid, float loaded) const {
    if (!valid || column >= n) return;
    if (bias) sum += bias[column];
    if (residual) sum = loaded + sum;
    out[(i64)row * n + column] = from_float<Out>(sum);
  }
};
