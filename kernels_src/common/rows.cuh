// Elementwise operators on matrices: a thread walks the vectors of all rows as one sequence, so that the GPU is full for
// any number of rows and any row length. Test: tests/test_common_headers.py
#pragma once
#include "common/types.cuh"
#include "ptx/memory.cuh"

// Quotient for a, b >= 0; 64-bit division costs four times as much and is rarely needed.
__device__ __forceinline__ i64 divide(i64 a, i64 b) {
  if (((a | b) >> 32) == 0) return (u32)a / (u32)b;
  return a / b;
}

// Position (row, column) of vector `start` of a matrix with `width` vectors a row, moved on by `step` vectors at a time.
struct RowWalk {
  i64 row;
  u32 column, width, step_rows, step_columns;

  __device__ __forceinline__ RowWalk(i64 start, u32 step, u32 width) : width(width) {
    row = divide(start, width);
    column = (u32)(start - row * width);
    step_rows = step / width;
    step_columns = step % width;
  }
  __device__ __forceinline__ void next() {
    row += step_rows;
    column += step_columns;
    if (column >= width) {
      column -= width;
      ++row;
    }
  }
};

// N elements that this thread alone reads: whole 16-byte vectors pass by the L1 cache.
template <class T, int N> __device__ __forceinline__ Vec<T, N> load_vec_once(const T *p) {
  if constexpr (sizeof(Vec<T, N>) == 16) {
    const uint4 raw = load_once(p);
    return *reinterpret_cast<const Vec<T, N> *>(&raw);
  } else {
    return load_vec<T, N>(p);
  }
}

// N floats read by many threads (weights, tables), by 16-byte loads where N allows.
template <int N> __device__ __forceinline__ void load_floats(float (&x)[N], const float *p) {
  constexpr int Width = N % 4 == 0 ? 4 : 1;
#pragma unroll
  for (int i = 0; i < N; i += Width) {
    const Vec<float, Width> part = load_vec<float, Width>(p + i);
#pragma unroll
    for (int j = 0; j < Width; ++j) x[i + j] = part.v[j];
  }
}

// Store N elements at once; more than 16 bytes (N of a wider type than the input's) go as several stores.
template <class T, int N> __device__ __forceinline__ void store_floats(T *p, const float (&x)[N]) {
  constexpr int Width = N * sizeof(T) > 16 ? 16 / sizeof(T) : N;
#pragma unroll
  for (int i = 0; i < N; i += Width) {
    Vec<T, Width> part;
#pragma unroll
    for (int j = 0; j < Width; ++j) part.v[j] = from_float<T>(x[i + j]);
    store_vec<T, Width>(p + i, part);
  }
}
