// Thread-block clusters: blocks that run together and reach into each other's shared memory. sm_90 and later only, no CPU body:
// not emulated. PTX ISA, "barrier.cluster", "mapa", "ld". Test: tests/test_linear_sm90.py
#pragma once
#include "ptx/mbarrier.cuh"

// This block's place in its cluster; 0 without one.
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Every thread of every block of the cluster.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Sixteen bytes of block `rank`'s shared memory, at the place that `p` has in this block's.
__device__ __forceinline__ Vec<float, 4> load_cluster(const float *p, u32 rank) {
  Vec<float, 4> v;
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n}"
      : "=f"(v.v[0]), "=f"(v.v[1]), "=f"(v.v[2]), "=f"(v.v[3])
      : "r"(shared_address(p)), "r"(rank)
      : "memory");
  return v;
}
