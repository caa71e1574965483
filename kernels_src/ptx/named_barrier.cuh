// Barriers of part of a block. Barrier 0 is __syncthreads. All threads of a warp take part; `threads`: how many in all, a
// multiple of 32. PTX ISA, "bar". Test: tests/test_attention_prefill_sm90.py, tests/test_decode_step.py
#pragma once
#include "common/types.cuh"
#include "ptx/site.cuh"

__device__ __forceinline__ void named_barrier_sync(int barrier, int threads PTX_SITE) {
#ifdef CUKERN_EMU
  emu_barrier(barrier, threads, emu::B_PLAIN, 0, PTX_HERE);
#else
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
#endif
}

// Counts these threads in, without waiting for the others. Under emulation they wait.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads PTX_SITE) {
#ifdef CUKERN_EMU
  emu_barrier(barrier, threads, emu::B_PLAIN, 0, PTX_HERE);
#else
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
#endif
}

// The same if `yes`, which is alike in all threads of a warp: one instruction and no branch, so that the code around it is
// scheduled as a whole. No CPU body: not emulated.
__device__ __forceinline__ void named_barrier_arrive_if(bool yes, int barrier, int threads) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p bar.arrive %0, %1;\n}" ::"r"(barrier), "r"(threads), "r"((u32)yes)
               : "memory");
}
