// Programmatic dependent launch (compute capability 9.0 and later; elsewhere, and for a kernel launched without it, these do
// nothing). A kernel that was launched with `pdl=True` may start while the kernel ahead of it still runs:
//   grid_dependency_wait()    returns when that kernel has ended and all it wrote is visible. Every thread calls it before it
//                             touches memory that an earlier kernel wrote, or writes memory that an earlier kernel reads
//                             (but for the address of a prefetch, which may be a guess).
//                             Every kernel of a chain must call it: its end then implies the end of all before it.
//   grid_dependency_launch()  lets the next kernel start once every block of this one has called it or ended.
// PTX ISA, "griddepcontrol". Test: tests/test_linear.py
#pragma once

__device__ __forceinline__ void grid_dependency_wait() {
#if !defined(CUKERN_EMU) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void grid_dependency_launch() {
#if !defined(CUKERN_EMU) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
