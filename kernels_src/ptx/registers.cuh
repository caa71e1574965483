// Registers move between the warpgroups of a block (sm_90a and later): each call by all four warps of a warpgroup, a multiple of 8.
// No CPU body: not emulated. PTX ISA, "setmaxnreg". Test: tests/test_linear_sm90.py, tests/test_attention_prefill_sm90.py
#pragma once

// Registers per thread of this warpgroup from here on; waits until others have given up enough.
template <int Registers> __device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers> __device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
