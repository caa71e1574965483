// A warp that waits for a number of clock cycles of its multiprocessor. PTX ISA, "%clock". Test: tests/test_decode_step.py
#pragma once
#include "common/types.cuh"

__device__ __forceinline__ void pause(u32 cycles) {
#ifndef CUKERN_EMU
  const u32 began = (u32)clock();
  while ((u32)clock() - began < cycles) {
  }
#else
  (void)cycles;
#endif
}
