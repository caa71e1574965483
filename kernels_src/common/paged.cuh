// Addresses in the paged key/value cache [blocks, heads, block_size, D]. Test: tests/test_kv_cache_write.py
#pragma once
#include "common/rows.cuh"

// First element of a head's row in a slot; slot = block * block_size + row of the block.
__device__ __forceinline__ i64 slot_offset(i64 slot, int head, int heads, int block_size, int dim) {
  const i64 block = divide(slot, block_size), row = slot - block * block_size;
  return ((block * heads + head) * block_size + row) * dim;
}
