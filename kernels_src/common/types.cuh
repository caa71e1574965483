// Storage types and their conversions: half and bf16 in memory, float in registers.
// Test: tests/test_common_headers.py
#pragma once
#include <cuda_fp16.h>
#include <cuda_bf16.h>

// NVRTC has no <stdint.h>, <math.h> or INFINITY.
typedef __nv_bfloat16 bf16;
typedef long long i64;
typedef unsigned int u32;
typedef unsigned long long u64;

#define CUKERN_INF __int_as_float(0x7f800000)
#define CUKERN_NAN __int_as_float(0x7fffffff)
#define CUKERN_LOG2E 1.4426950408889634f
#define CUKERN_LN2 0.6931471805599453f

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }

template <class T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ half from_float<half>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }

// Two floats -> one 32-bit register of two T; the first lands in the low half, as the mma fragments want it.
template <class T> __device__ __forceinline__ u32 pack2(float lo, float hi);
template <> __device__ __forceinline__ u32 pack2<half>(float lo, float hi) {
  half2 h = __floats2half2_rn(lo, hi);
  return *reinterpret_cast<u32 *>(&h);
}
template <> __device__ __forceinline__ u32 pack2<bf16>(float lo, float hi) {
  __nv_bfloat162 h = __floats2bfloat162_rn(lo, hi);
  return *reinterpret_cast<u32 *>(&h);
}

// N values of T moved by one aligned load or store (N * sizeof(T) is 2, 4, 8 or 16 bytes).
template <class T, int N> struct __align__(sizeof(T) * N) Vec {
  T v[N];
};

template <class T, int N> __device__ __forceinline__ Vec<T, N> load_vec(const T *p) {
  return *reinterpret_cast<const Vec<T, N> *>(p);
}
template <class T, int N> __device__ __forceinline__ void store_vec(T *p, const Vec<T, N> &x) {
  *reinterpret_cast<Vec<T, N> *>(p) = x;
}

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
