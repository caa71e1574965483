// A value that the optimiser must take as new: what is computed from it is not moved out of a loop, where it would
// occupy registers for the whole loop. No instruction. Test: tests/test_attention_prefill.py
#pragma once

__device__ __forceinline__ int opaque(int x) {
#ifndef CUKERN_EMU
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// Values that are computed here: not later, where they are used.
__device__ __forceinline__ void computed(float &x, float &y) {
#ifndef CUKERN_EMU
  asm volatile("" : "+f"(x), "+f"(y));
#endif
}
