// Barrier over all blocks of a cooperative launch, split so that a block can work between its arrival and its wait.
// `counter` is one 64-bit word that only ever grows: kernels that use it one after the other need no reset, as long as all
// of them have the same number of blocks. What any thread wrote before arrive() is seen by every thread after wait().
// PTX ISA, "red", "atom", "ld.acquire"; memory consistency model (cumulativity). Test: tests/test_decode_step.py
#pragma once
#include "common/types.cuh"
#include "ptx/site.cuh"

struct GridBarrier {
  u64 *counter;
  u64 target;  // of thread 0: what the counter reaches when all blocks have arrived

  __device__ __forceinline__ explicit GridBarrier(u64 *counter) : counter(counter), target(0) {}

  // Every thread of every block calls this; also a block barrier.
  __device__ __forceinline__ void arrive() {
    __syncthreads();
#ifndef CUKERN_EMU
    if (threadIdx.x == 0) {
      if (target == 0) {  // the count at which this launch began is known only from an arrival
        u64 before;
        asm volatile("atom.add.release.gpu.global.u64 %0, [%1], 1;" : "=l"(before) : "l"(counter) : "memory");
        target = (before / gridDim.x + 1) * gridDim.x;
      } else {
        asm volatile("red.add.release.gpu.global.u64 [%0], 1;" ::"l"(counter) : "memory");
        target += gridDim.x;
      }
    }
#endif
  }

  // After arrive(); also a block barrier.
  __device__ __forceinline__ void wait(PTX_SITE0) {
#ifdef CUKERN_EMU
    emu_grid_barrier(PTX_HERE);
#else
    if (threadIdx.x == 0) {
      u64 now;
      do {
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(counter) : "memory");
      } while (now < target);
    }
    __syncthreads();
#endif
  }
};
