// Loads and stores with a cache policy, for data that is used once. Test: tests/test_ptx.py
#pragma once
#include "common/types.cuh"
#include "ptx/cache_policy.cuh"
#include "ptx/site.cuh"

// 16 bytes of read-only data that will not be read again soon: not kept in L1.
__device__ __forceinline__ uint4 load_streaming(const void *p PTX_SITE) {
#ifdef CUKERN_EMU
  emu_access(p, 16, 0, 16, "load_streaming", PTX_HERE);
  return *static_cast<const uint4 *>(p);
#else
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
#endif
}

// The same for data that this thread alone reads and may overwrite later (an operator called in place).
__device__ __forceinline__ uint4 load_once(const void *p PTX_SITE) {
#ifdef CUKERN_EMU
  emu_access(p, 16, 0, 16, "load_once", PTX_HERE);
  return *static_cast<const uint4 *>(p);
#else
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
#endif
}

// The same, and the first to leave L2.
__device__ __forceinline__ uint4 load_last_time(const void *p PTX_SITE) {
#ifdef CUKERN_EMU
  emu_access(p, 16, 0, 16, "load_last_time", PTX_HERE);
  return *static_cast<const uint4 *>(p);
#else
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p), "l"(L2_LEAVES_FIRST));
  return v;
#endif
}

// 8 bytes in the way of load_once.
__device__ __forceinline__ uint2 load_once_8(const void *p PTX_SITE) {
#ifdef CUKERN_EMU
  emu_access(p, 8, 0, 8, "load_once_8", PTX_HERE);
  return *static_cast<const uint2 *>(p);
#else
  uint2 v;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
#endif
}

// A hint: the 128-byte line at p will be read soon.
__device__ __forceinline__ void prefetch_line(const void *p) {
#ifndef CUKERN_EMU
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#else
  (void)p;
#endif
}

// The same for `bytes` of memory, a multiple of 16, 16-byte aligned: one instruction for the copy engine, which unlike
// prefetch_line drops nothing when memory is busy. From sm_90 on; else line by line.
__device__ __forceinline__ void prefetch_bulk(const void *p, u32 bytes) {
#ifdef CUKERN_EMU
  (void)p, (void)bytes;
#elif __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes));
#else
  for (u32 i = 0; i < bytes; i += 128) prefetch_line(static_cast<const unsigned char *>(p) + i);
#endif
}

// The same into the L1 cache of this multiprocessor: for data that no other thread of the grid writes before it is read.
__device__ __forceinline__ void prefetch_line_l1(const void *p) {
#ifndef CUKERN_EMU
  asm volatile("prefetch.global.L1 [%0];" ::"l"(p));
#else
  (void)p;
#endif
}

// Hides where a register comes from. Without it the compiler keeps what it computed from packed halves (twice as many
// registers of floats) for a second use, instead of the halves.
__device__ __forceinline__ void opaque(u32 &x) {
#ifndef CUKERN_EMU
  asm volatile("" : "+r"(x));
#endif
}
