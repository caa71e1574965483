// cp.async: 16 bytes from global to shared memory without registers. `valid` false writes 16 zero bytes and does not read.
// A copy is readable only after commit, wait and a barrier. PTX ISA, "cp.async". Test: tests/test_ptx.py
#pragma once
#include "common/types.cuh"
#include "ptx/cache_policy.cuh"
#include "ptx/site.cuh"

__device__ __forceinline__ void cp_async_16(void *smem, const void *gmem, bool valid = true PTX_SITE) {
#ifdef CUKERN_EMU
  emu_cp_async(smem, gmem, 16, valid ? 16 : 0, PTX_HERE);
#else
  const int n = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(smem)),
               "l"(gmem), "r"(n)
               : "memory");
#endif
}

// The same for data that no one reads again soon: the first to leave L2.
__device__ __forceinline__ void cp_async_16_once(void *smem, const void *gmem, bool valid = true PTX_SITE) {
#ifdef CUKERN_EMU
  emu_cp_async(smem, gmem, 16, valid ? 16 : 0, PTX_HERE);
#else
  const int n = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(
                   (u32)__cvta_generic_to_shared(smem)),
               "l"(gmem), "r"(n), "l"(L2_LEAVES_FIRST)
               : "memory");
#endif
}

__device__ __forceinline__ void cp_async_commit() {
#ifdef CUKERN_EMU
  emu_cp_commit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait until at most `Pending` of this thread's latest groups are unfinished.
template <int Pending> __device__ __forceinline__ void cp_async_wait() {
#ifdef CUKERN_EMU
  emu_cp_wait(Pending);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
#endif
}
