"""Rows that a block exchanges at its barriers while one half of it also meets at a barrier of its own.

That is what a block of the decode step does where one team attends and the other has nothing to attend to. The kernel
here is right by construction: the emulator finds no race in it, and finds the one that a missing barrier makes. But
racecheck (compute-sanitizer 2025.3) now and then reports hazards in a kernel of this shape, between the writes of one
warp and one ldmatrix of another behind the block's barrier. So this is the measure for such a report:
``compute-sanitizer --tool racecheck --racecheck-report all python -m pytest -m gpu tests/test_half_barriers.py``
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cukern
from cukern.emulator.errors import SharedRace

ROWS, COLUMNS = 4, 256

SOURCE = r"""
#include "common/types.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/named_barrier.cuh"

constexpr int PITCH = 264;  // elements between rows

// out[block, thread]: for the second half of the block, sums over all rounds of what ldmatrix gives and a copied word;
// for the first 0.
__global__ void __launch_bounds__(512) exchange(u32 *out, const uint4 *words, int rounds) {
  __shared__ __align__(16) bf16 x[4 * PITCH];
  __shared__ u32 own[256];
  __shared__ __align__(16) uint4 copied[2][8][32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  u32 sum = 0, other = threadIdx.x, pause = blockIdx.x;
  for (int round = 0; round < rounds; ++round) {
    uint4 *const copy = copied[round & 1][warp & 7];
    if (warp >= 8) cp_async_16(copy + lane, words + lane);
    cp_async_commit();
    if (warp < 8)
      for (int i = 0; i < 6; ++i) {
        own[threadIdx.x] = other;
        named_barrier_sync(1, 256);
        other += own[(threadIdx.x + 37) & 255];
        named_barrier_sync(1, 256);
      }
    __syncthreads();
    if (threadIdx.x == 0) {  // the others wait at the barrier
      const int steps = (round * 7 + blockIdx.x * 13) % 31 * 200;
      for (int i = 0; i < steps; ++i) pause = pause * 1664525u + 1013904223u;
    }
    __syncthreads();
    for (int row = threadIdx.x >> 8; row < 4; row += 2) {
      const int column = (threadIdx.x & 255) * 4;
      u32 *const to = reinterpret_cast<u32 *>(x + row * PITCH + column);
      if (column < 256) {
        to[0] = round * 1000 + row * 200 + column / 2;
        to[1] = round * 1000 + row * 200 + column / 2 + 1;
      }
    }
    READABLE;
    if (warp >= 8) {
      cp_async_wait<0>();
      __syncwarp();
      sum += copy[lane ^ 1].x;
      const int row = lane & 7;
      for (int k = 0; k < 256; k += 32) {
        u32 r[4];
        ldmatrix_x4(r, x + (row < 4 ? row : 0) * PITCH + (lane >> 3) * 8 + k);
        sum += r[0] + 3 * r[1] + 5 * r[2] + 7 * r[3];
      }
      __syncwarp();
    }
    __syncthreads();
  }
  if (other + pause == 1u) sum = 1;  // or they would not be computed
  out[blockIdx.x * 512 + threadIdx.x] = sum;
}
"""


def exchange(put: Any, get: Any, blocks: int, rounds: int, readable: str = "__syncthreads()") -> np.ndarray:
    kernel = cukern.Kernel(SOURCE, "exchange", defines={"READABLE": readable})
    out = put(np.zeros((blocks, 512), np.uint32))
    words = put(np.arange(128, dtype=np.uint32).reshape(32, 4))
    kernel((blocks,), (512,), (out, words, rounds))
    return get(out)


def expected(blocks: int, rounds: int) -> np.ndarray:
    lane = np.arange(32)
    row, pair = np.where(lane // 4 < ROWS, lane // 4, 0), lane % 4
    sums = np.zeros(32, np.int64)
    for number in range(rounds):
        sums += 4 * (lane ^ 1)
        for k in range(0, COLUMNS, 32):
            for j, weight in enumerate((1, 3, 5, 7)):
                sums += weight * (number * 1000 + row * 200 + (k + 8 * j) // 2 + pair)
    out = np.zeros((blocks, 16, 32), np.int64)
    out[:, 8:] = sums
    return out.reshape(blocks, 512).astype(np.uint32)


def test_rows_arrive(backend: Any) -> None:
    blocks, rounds = (8, 100) if backend.name == "cuda" else (2, 2)
    np.testing.assert_array_equal(exchange(backend.put, backend.get, blocks, rounds), expected(blocks, rounds))


@pytest.mark.parametrize("order", ["up", "down", "random"])
def test_no_race_in_any_order(order: str) -> None:
    with cukern.emulate(check=True, order=order, seed=3):
        np.testing.assert_array_equal(exchange(np.array, np.asarray, 1, 2), expected(1, 2))


def test_a_missing_barrier_is_found() -> None:
    with cukern.emulate(check=True), pytest.raises(SharedRace):
        exchange(np.array, np.asarray, 1, 2, "__syncwarp()")
