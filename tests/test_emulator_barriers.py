"""Planted faults at barriers and in warps: each is reported as its own exception, where it is; clean twins pass."""

from __future__ import annotations

import numpy as np
import pytest
from planted import expect, f32, launch, text

from cukern import emulator as E


def test_two_barriers() -> None:
    source = text("""
        if (threadIdx.x < 32)
          __syncthreads();
        else
          __syncthreads(); // fault
        x[threadIdx.x] = 1;""")
    fault = expect(E.BarrierDivergence, source, (f32(), 0))
    assert fault.thread == (32, 0, 0)


def test_exited_threads_count_as_arrived() -> None:
    x = f32()
    launch(
        text("""
        if (threadIdx.x >= n) return;
        __syncthreads();
        x[threadIdx.x] = 1;"""),
        (x, 40),
    )
    assert x.sum() == 40


def test_deadlock_names_who_waits_where() -> None:
    source = text("""
        if (threadIdx.x < 32) {
          __syncthreads(); // fault
        } else {
          x[0] = __shfl_xor_sync(0xffffffffu, 1.f, 1);
          while (true) __syncwarp();
        }""")
    with pytest.raises(E.Timeout):
        launch(source, (f32(), 0), timeout=0.3)
    source = text("""
        if (threadIdx.x % 32 < 16) {
          __syncthreads(); // fault
        } else {
          x[0] = __shfl_xor_sync(0xffffffffu, 1.f, 1);
        }""")
    fault = expect(E.Deadlock, source, (f32(), 0))
    assert fault.thread is None
    assert "32 (first: thread 0) wait in __syncthreads" in str(fault)
    assert "32 (first: thread 16) wait in __shfl_xor_sync" in str(fault)


def test_mask_without_the_caller() -> None:
    fault = expect(E.WrongMask, text("x[threadIdx.x] = __shfl_xor_sync(0xffffu, 1.f, 1); // fault"), (f32(), 0))
    assert fault.thread == (16, 0, 0)


def test_shuffle_from_a_lane_outside_the_mask() -> None:
    source = text("""
        if (threadIdx.x < 16)
          x[threadIdx.x] = __shfl_xor_sync(0xffffu, 1.f, 16); // fault""")
    expect(E.WrongMask, source, (f32(), 0), block=32)


def test_lanes_in_different_operations() -> None:
    source = text("""
        float v = 1;
        if (threadIdx.x & 1)
          v = __shfl_xor_sync(0xffffffffu, v, 1);
        else
          v = __shfl_down_sync(0xffffffffu, v, 1);
        x[threadIdx.x] = v;""")
    fault = expect(E.WrongMask, source, (f32(), 0))
    assert fault.line in (9, 11)


def test_lanes_in_different_shuffles_of_one_line() -> None:
    source = text("""
        float v = threadIdx.x;
        v = threadIdx.x < 16 ? __shfl_xor_sync(0xffffffffu, v, 1) : __shfl_sync(0xffffffffu, v, 1); // fault
        x[threadIdx.x] = v;
    """)
    fault = expect(E.WrongMask, source, (f32(), 0), block=32)
    assert "__shfl_xor_sync at k.cu" in str(fault)
    assert "lane 16 arrives in __shfl_sync" in str(fault)


def test_masks_that_wait_for_each_other() -> None:
    source = text("""
        float v = 1;
        if (threadIdx.x == 0)
          v = __shfl_sync(0x3u, v, 0);
        else if (threadIdx.x == 1)
          v = __shfl_sync(0x6u, v, 1);
        else if (threadIdx.x == 2)
          v = __shfl_sync(0x5u, v, 2);
        x[threadIdx.x] = v;""")
    fault = expect(E.WrongMask, source, (f32(), 0), block=32)
    assert "waits for lanes" in str(fault)


def test_half_warps_with_their_own_masks() -> None:
    body = """
        unsigned m = threadIdx.x & 16 ? 0xffff0000u : 0xffffu;
        float v = threadIdx.x;
        if (threadIdx.x & 16) v = __shfl_xor_sync(m, v, 1);
        else v = __shfl_xor_sync(m, v, 2);
        x[threadIdx.x] = v;"""
    x = f32()
    launch(text(body), (x, 0))
    lane = np.arange(64)
    np.testing.assert_array_equal(x, np.where(lane & 16, lane ^ 1, lane ^ 2))


def test_mma_by_part_of_a_warp() -> None:
    source = text("""
        u32 a[4] = {};
        float c[4] = {};
        if (threadIdx.x < 24)
          mma_m16n8k16<half>(c, a, 0, 0); // fault
        x[threadIdx.x] = c[0];""")
    expect(E.WrongMask, source, (f32(), 0), block=32)


def test_grid_barrier_in_an_ordinary_launch() -> None:
    expect(E.BarrierDivergence, text('emu_grid_barrier("k.cu", 7);'), (f32(), 0))


def test_block_that_leaves_before_the_grid_barrier() -> None:
    source = text('if (blockIdx.x == 3) return;\nemu_grid_barrier("k.cu", 8);')
    fault = expect(E.Deadlock, source, (f32(), 0), grid=4, cooperative=True)
    assert fault.line == 8
