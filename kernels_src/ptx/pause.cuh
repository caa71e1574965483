// A warp that waits for a number of clock cycles of its multiprocessor. Under emulation there is no clock and no waiting.
// PTX ISA, "%clock". Test: tests/test_decode_step.py
#pragma once
#include "common/types.cuh"

#ifndef CUKERN_EMU
__device__ __forceinline__ u32 clock_now() { return (u32)clock(); }
// Until `cycles` have gone by since `began`.
__device__ __forceinline__ void pause_since(u32 began, u32 cycles) {
  while (clock_now() - began < cycles) {
  }
}
#endif

__device__ __forceinline__ void pause(u32 cycles) {
#ifndef CUKERN_EMU
  pause_since(clock_now(), cycles);
#else
  (void)cycles;
#endif
}
