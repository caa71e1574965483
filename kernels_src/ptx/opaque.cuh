// A value that the optimiser must take as new: what is computed from it is not moved out of a loop, where it would
// occupy registers for the whole loop. No instruction. Test: tests/test_attention_prefill.py
#pragma once

__device__ __forceinline__ int opaque(int x) {
#ifndef CUKERN_EMU
  asm volatile("" : "+r"(x));
#endif
  return x;
}
