// Barriers of part of a block. Barrier 0 is __syncthreads. All threads of a warp take part; `threads`: how many in all, a
// multiple of 32. No CPU body: not emulated. PTX ISA, "bar". Test: tests/test_attention_prefill_sm90.py
#pragma once

__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Counts these threads in, without waiting for the others.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
