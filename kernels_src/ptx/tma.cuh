// The copy engine of sm_90 (TMA): boxes of a tensor that a tensor map describes, from global to shared memory, completing on
// an mbarrier. Elements outside the tensor arrive as zeros; all bytes of the box are counted. No CPU body: not emulated.
// PTX ISA, "cp.async.bulk.tensor". Test: tests/test_linear_sm90.py
#pragma once
#include "ptx/mbarrier.cuh"

// A CUtensorMap (made by cukern/jit/tensor_map.py): a parameter, `const __grid_constant__ TensorMap`, or in global memory.
struct __align__(64) TensorMap {
  u64 opaque[16];
};

// Of a map in global memory that a copy from the host has written, before its use in this block.
__device__ __forceinline__ void acquire_tensor_map(const TensorMap *map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap *map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The box whose first element is (column, row), to `smem` of this block.
__device__ __forceinline__ void tma_load_2d(void *smem, const TensorMap *map, u64 *barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          shared_address(smem)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row)
      : "memory");
}

// A box of a tensor of four dimensions, first element at (c0, .. c3), c0 innermost.
__device__ __forceinline__ void tma_load_4d(void *smem, const TensorMap *map, u64 *barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}],"
      " [%2];" ::"r"(shared_address(smem)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// A box of a tensor of five dimensions, first element at (c0, .. c4), c0 innermost.
__device__ __forceinline__ void tma_load_5d(void *smem, const TensorMap *map, u64 *barrier, int c0, int c1, int c2, int c3,
                                            int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}],"
      " [%2];" ::"r"(shared_address(smem)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// The box of tma_load_2d to every block of the cluster whose bit is set, at the same addresses, completing on each block's barrier.
__device__ __forceinline__ void tma_load_2d_multicast(void *smem, const TensorMap *map, u64 *barrier, int column, int row,
                                                      unsigned short blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(smem)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "h"(blocks)
      : "memory");
}

// The box of tma_load_4d, likewise.
__device__ __forceinline__ void tma_load_4d_multicast(void *smem, const TensorMap *map, u64 *barrier, int c0, int c1, int c2,
                                                      int c3, unsigned short blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(smem)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(blocks)
      : "memory");
}

// After ordinary stores to shared memory, before a barrier behind which the tensor cores or the copy engine read them, or the
// copy engine writes in their place.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The box from this block's shared memory to (column, row) of the tensor; what lies outside is not written. Behind ordinary
// stores to the box: async_proxy_fence, then a barrier with the thread that calls this.
__device__ __forceinline__ void tma_store_2d(const TensorMap *map, const void *smem, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(shared_address(smem)), "r"(column), "r"(row)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until at most `Pending` of this thread's latest groups of stores still read shared memory.
template <int Pending> __device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}
