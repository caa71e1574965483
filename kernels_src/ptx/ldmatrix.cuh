// ldmatrix: 8x8 matrices of 16-bit elements from shared memory into mma fragments. Lane i of each group of eight gives the
// address of one 16-byte row (16-byte aligned); x4 takes all 32 lanes, x2 lanes 0-15. Result r[j]: lane 4*g + t holds
// elements [g][2t, 2t+1] of matrix j, or [2t, 2t+1][g] with _trans. PTX ISA, "ldmatrix". Test: tests/test_ptx.py
#pragma once
#include "common/types.cuh"
#include "ptx/site.cuh"

__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], const void *row PTX_SITE) {
#ifdef CUKERN_EMU
  emu_ldmatrix(r, 4, false, row, PTX_HERE);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"((u32)__cvta_generic_to_shared(row))
               : "memory");
#endif
}

__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], const void *row PTX_SITE) {
#ifdef CUKERN_EMU
  emu_ldmatrix(r, 4, true, row, PTX_HERE);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"((u32)__cvta_generic_to_shared(row))
               : "memory");
#endif
}

__device__ __forceinline__ void ldmatrix_x2(u32 (&r)[2], const void *row PTX_SITE) {
#ifdef CUKERN_EMU
  emu_ldmatrix(r, 2, false, row, PTX_HERE);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"((u32)__cvta_generic_to_shared(row))
               : "memory");
#endif
}

__device__ __forceinline__ void ldmatrix_x2_trans(u32 (&r)[2], const void *row PTX_SITE) {
#ifdef CUKERN_EMU
  emu_ldmatrix(r, 2, true, row, PTX_HERE);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"((u32)__cvta_generic_to_shared(row))
               : "memory");
#endif
}

// A place in shared memory that is computed once; what is read at a constant distance from it needs no other register,
// the distance is part of the instruction. (Left to the compiler, every read gets an address of its own.)
#ifdef CUKERN_EMU
typedef const unsigned char *SharedPlace;
#else
typedef u32 SharedPlace;
#endif

__device__ __forceinline__ SharedPlace shared_place(const void *p) {
#ifdef CUKERN_EMU
  return static_cast<SharedPlace>(p);
#else
  SharedPlace place = (u32)__cvta_generic_to_shared(p);
  asm volatile("" : "+r"(place));
  return place;
#endif
}

// As ldmatrix_x4 (Trans: ldmatrix_x4_trans), `offset` bytes from a place.
template <bool Trans> __device__ __forceinline__ void ldmatrix_x4_at(u32 (&r)[4], SharedPlace place, int offset PTX_SITE) {
#ifdef CUKERN_EMU
  emu_ldmatrix(r, 4, Trans, place + offset, PTX_HERE);
#else
  if constexpr (Trans)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(place + offset)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(place + offset)
                 : "memory");
#endif
}
