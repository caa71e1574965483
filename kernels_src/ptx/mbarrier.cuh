// mbarrier: a barrier in shared memory that also counts bytes on their way. sm_90 and later only: nothing here has a CPU body,
// and kernels that use it are not emulated.
// A barrier starts in phase 0. wait(parity) returns once the phase of that parity is complete, so on a fresh barrier
// wait(1) returns at once: that is how a producer finds all buffers free. PTX ISA, "mbarrier".
// Test: tests/test_linear_sm90.py
#pragma once
#include "common/types.cuh"

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void mbarrier_init(u64 *barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes this thread's initialisations visible to the copy engine and to the cluster; a block or cluster barrier follows.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u64 *barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// One arrival that also announces `bytes` that copies will bring.
__device__ __forceinline__ void mbarrier_arrive_expect(u64 *barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

// Arrives at the barrier that block `rank` of the cluster has at this address. It orders no ordinary memory accesses between
// blocks (a release to the cluster would be a fence over all of memory): for buffers that only the copy engine writes.
__device__ __forceinline__ void mbarrier_arrive_at(u64 *barrier, u32 rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

__device__ __forceinline__ bool mbarrier_test(u64 *barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ void mbarrier_wait(u64 *barrier, u32 parity) {
  while (!mbarrier_test(barrier, parity)) {
  }
}

// Whether the phase of that parity is complete, without waiting.
__device__ __forceinline__ bool mbarrier_passed(u64 *barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// Waiting for a warp that has time: it sleeps until the phase is complete (or a millisecond is over, then again), where
// mbarrier_wait asks again and again and takes issue slots and power from the warps that compute.
__device__ __forceinline__ void mbarrier_sleep(u64 *barrier, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity), "n"(1000000)
        : "memory");
  } while (!done);
}
