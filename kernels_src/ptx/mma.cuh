// mma.sync.m16n8k16: C[16,8] += A[16,16] * B[16,8], fp16 or bf16 in, fp32 accumulate (sm_80 and later).
// Fragments, lane = 4*g + t:  a[0] A[g][2t,2t+1]  a[1] A[g+8][2t,2t+1]  a[2] A[g][2t+8,2t+9]  a[3] A[g+8][2t+8,2t+9]
//                             b0   B[2t,2t+1][g]  b1   B[2t+8,2t+9][g]
//                             c[0,1] C[g][2t,2t+1]  c[2,3] C[g+8][2t,2t+1]
// PTX ISA, "Matrix Fragments for mma.m16n8k16". Test: tests/test_ptx.py
#pragma once
#include "common/types.cuh"
#include "ptx/site.cuh"

template <class T> struct MmaInput;
template <> struct MmaInput<half> {
  static constexpr bool is_half = true;
};
template <> struct MmaInput<bf16> {
  static constexpr bool is_half = false;
};

template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1 PTX_SITE) {
#ifdef CUKERN_EMU
  emu_mma_m16n8k16(c, a, b0, b1, MmaInput<T>::is_half, PTX_HERE);
#else
  if constexpr (MmaInput<T>::is_half)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
