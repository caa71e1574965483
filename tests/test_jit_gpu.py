"""Kernels launched on a GPU."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cupy")

import cupy

import cukern
from cukern import jit
from cukern.jit import CompileError

pytestmark = pytest.mark.gpu

SCALE = """
#include "common/types.cuh"
template <class T, int PerThread>
__global__ void scale(const T *__restrict__ x, T *__restrict__ y, long long n, float factor) {
  long long first = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * PerThread;
  for (int i = 0; i < PerThread; ++i)
    if (first + i < n) y[first + i] = from_float<T>(to_float(x[first + i]) * factor);
}
"""
ADD_ONE = (
    "__global__ void add_one(float *x, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) x[i] += 1; }"
)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path / "cache"))


def add_one() -> cukern.Kernel:
    return cukern.Kernel(ADD_ONE, "add_one")


def hopper() -> None:
    if jit.device().capability < (9, 0):
        pytest.skip("needs compute capability 9.0")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("n", [1, 31, 1000, 4097])
def test_template_kernel(dtype: Any, n: int) -> None:
    k = cukern.Kernel(SCALE, "scale", template=(dtype, 4))
    x = cupy.asarray(np.linspace(-3, 3, n).astype(dtype))
    y = cupy.full_like(x, np.nan)
    k((n + 1023) // 1024, 256, (x, y, n, 0.5))
    expected = (x.get().astype(np.float32) * np.float32(0.5)).astype(dtype)
    assert (y.get().view(np.uint8) == expected.view(np.uint8)).all()


def test_every_kind_of_parameter_arrives() -> None:
    source = """
    #include "common/types.cuh"
    struct Pair { int a; double b; };
    __global__ void f(double *out, char a, unsigned short b, bool c, const __grid_constant__ Pair p, half h, bf16 g,
                      long long q, const float *null, float e, unsigned char u) {
      out[0] = a; out[1] = b; out[2] = c; out[3] = p.a; out[4] = p.b; out[5] = to_float(h); out[6] = to_float(g);
      out[7] = q; out[8] = null == nullptr; out[9] = e; out[10] = u;
    }"""
    out = cupy.zeros(11)
    pair = np.array((-5, 0.125), dtype=np.dtype([("a", "i4"), ("b", "f8")], align=True))
    cukern.Kernel(source, "f")(1, 1, (out, -7, 60000, True, pair, 1.5, -2.5, -(2**40), None, 0.1, 255))
    assert out.tolist() == [-7, 60000, 1, -5, 0.125, 1.5, -2.5, -(2**40), 1, float(np.float32(0.1)), 255]


def test_more_than_48_kb_of_shared_memory() -> None:
    source = """
    extern __shared__ float buffer[];
    __global__ void f(float *x, int n) {
      for (int i = threadIdx.x; i < n; i += blockDim.x) buffer[i] = x[i];
      __syncthreads();
      for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = buffer[n - 1 - i];
    }"""
    n = 90 * 1024 // 4
    for more in ({}, {"max_shared_mem": 96 << 10}):
        x = cupy.arange(n, dtype=np.float32)
        cukern.Kernel(source, "f", **more)(1, 256, (x, n), shared_mem=4 * n)
        assert (x.get() == np.arange(n)[::-1]).all()
    with pytest.raises(ValueError, match="has for a block"):
        cukern.Kernel(source, "f")(1, 256, (x, n), shared_mem=1 << 20)


def test_cooperative_grid_barrier() -> None:
    source = """
    __global__ void f(float *x, volatile int *arrived, int n) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      x[i] = i;
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) {
        atomicAdd((int *)arrived, 1);
        while (*arrived < gridDim.x) {}
      }
      __syncthreads();
      float other = ((volatile float *)x)[n - 1 - i];
      __threadfence();
      x[n + i] = other;
    }"""
    k = cukern.Kernel(source, "f", cooperative=True)
    blocks = jit.device().sm_count
    n = blocks * 128
    x, arrived = cupy.zeros(2 * n, np.float32), cupy.zeros(1, np.int32)
    k(blocks, 128, (x, arrived, n))
    assert (x[n:].get() == np.arange(n)[::-1]).all()
    with pytest.raises(ValueError, match="does not fit"):
        k(10**6, 128, (x, arrived, n))


def test_current_stream_and_given_stream() -> None:
    k = add_one()
    x = cupy.zeros(1 << 20, np.float32)
    cupy.cuda.get_current_stream().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(20):
            k(4096, 256, (x, x.size))
        y = x + 0
    stream.synchronize()
    assert (y.get() == 20).all()
    k(4096, 256, (x, x.size), stream=stream)
    k(4096, 256, (x, x.size), stream=stream.ptr)
    stream.synchronize()
    assert (x.get() == 22).all()


@pytest.mark.parametrize("pdl", [False, True])
def test_capture_into_a_graph(pdl: bool) -> None:
    # with the attribute a kernel may start early, and must wait for the one ahead
    wait = '#if __CUDA_ARCH__ >= 900\n asm volatile("griddepcontrol.wait;" ::: "memory");\n#endif\n'
    body = "int i = blockIdx.x * 256 + threadIdx.x; if (i < n) x[i] = x[i] * 2 + 1;"
    source = f"__global__ void f(float *x, int n) {{\n{wait} {body} }}"
    k = cukern.Kernel(source, "f")
    x = cupy.zeros(1000, np.float32)
    k(4, 256, (x, 1000), pdl=pdl)  # loaded before the capture
    x[:] = 0
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        for _ in range(5):
            k(4, 256, (x, 1000), pdl=pdl)
        graph = stream.end_capture()
        assert (x.get() == 0).all()  # captured, not run
        graph.launch(stream)
        graph.launch(stream)
    stream.synchronize()
    assert (x.get() == 2**10 - 1).all()


def test_cluster_at_launch() -> None:
    hopper()
    source = """
    __global__ void f(unsigned *out) {
      unsigned rank, size;
      asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
      asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
      if (threadIdx.x == 0) out[blockIdx.x] = size * 100 + rank;
    }"""
    out = cupy.zeros(8, np.uint32)
    cukern.Kernel(source, "f")(8, 32, (out,), cluster=(4, 1, 1))
    assert out.tolist() == [400, 401, 402, 403] * 2


def test_exact_architecture_runs() -> None:
    hopper()
    source = """
    __global__ void f(int *x) {
    #if defined(__CUDA_ARCH_FEAT_SM90_ALL) || __CUDA_ARCH__ > 900
      x[0] = 1;
    #endif
    }"""
    x = cupy.zeros(1, np.int32)
    cukern.Kernel(source, "f")(1, 1, (x,))
    assert x.tolist() == [1]


def test_ptx_of_an_older_architecture_runs() -> None:
    x = cupy.zeros(1, np.int32)
    k = cukern.Kernel("__global__ void f(int *x) { x[0] = __CUDA_ARCH__; }", "f", arch="compute_80")
    k(1, 1, (x,))
    assert x.tolist() == [800]
    assert k.resources.registers > 0


def test_wrong_arguments_do_not_launch() -> None:
    k = add_one()
    x = cupy.zeros(100, np.float32)
    for args, kind in [
        ((x,), TypeError),
        ((x, 100, 1), TypeError),
        ((x.astype(np.float64), 100), TypeError),
        ((x, 1.5), TypeError),
        ((x, np.int64(3)), TypeError),
        ((x, 2**31), TypeError),
        ((x[::2], 50), ValueError),
        ((np.zeros(100, np.float32), 100), TypeError),
    ]:
        with pytest.raises(kind, match="add_one"):
            k(1, 128, args)
    with pytest.raises(ValueError, match="1024"):
        k(1, 2048, (x, 100))
    assert (x.get() == 0).all()


def test_compile_error_comes_at_the_definition() -> None:
    with pytest.raises(CompileError, match="identifier"):
        cukern.Kernel("__global__ void f(float *x) { x[0] = nothing; }", "f")


def test_resources_agree_with_the_driver() -> None:
    k = cukern.Kernel(SCALE, "scale", template=("half", 4))
    x = cupy.zeros(16, np.float16)
    k(1, 32, (x, x, 16, 1.0))
    r = k.resources
    (loaded,) = k._loaded.values()
    from cukern.jit import driver

    assert r.registers == loaded.attribute(driver.NUM_REGS)
    assert (r.shared, r.local) == (loaded.static_shared, loaded.attribute(driver.LOCAL_SIZE_BYTES))
    assert r.max_threads == loaded.max_threads
    assert r.occupancy(128) > r.occupancy(1024) >= 1
    assert r.occupancy(128, 100 << 10) <= 2
    assert r.occupancy(128, 1 << 30) == 0


def test_computed_occupancy_agrees_with_the_driver() -> None:
    from cukern.jit.resources import computed_occupancy

    r = cukern.Kernel(SCALE, "scale", template=("half", 4)).resources
    for threads in (32, 96, 128, 256, 512, 1024):
        for shared in (0, 1000, 20 << 10, 60 << 10):
            assert computed_occupancy(r.arch, r.registers, shared, threads) == r.occupancy(threads, shared)


def test_a_new_thread_can_launch() -> None:
    k = add_one()
    x = cupy.zeros(64, np.float32)
    cupy.cuda.Device().synchronize()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(100):
                k(1, 64, (x, 64))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    cupy.cuda.Device().synchronize()
    assert not failed
    assert x.get().max() <= 400


def test_numpy_scalars_and_foreign_arrays() -> None:
    k = add_one()
    x = cupy.zeros(64, np.float32)

    class Foreign:
        __cuda_array_interface__ = x.__cuda_array_interface__

    k(1, 64, (Foreign(), np.int32(64)))
    assert (x.get() == 1).all()


def test_empty_arrays_and_empty_grids() -> None:
    k = add_one()
    k(1, 64, (cupy.zeros(0, np.float32), 0))
    k(0, 64, (cupy.zeros(0, np.float32), 0))
    cupy.cuda.Device().synchronize()


def test_large_grids() -> None:
    out = cupy.zeros(1, np.uint64)
    k = cukern.Kernel("__global__ void f(unsigned long long *n) { if (threadIdx.x == 0) atomicAdd(n, 1ull); }", "f")
    for grid in ((70000, 1, 1), (3, 65535), (1, 2, 65535)):
        out[:] = 0
        k(grid, 32, (out,))
        assert int(out[0]) == int(np.prod(grid))
    with pytest.raises(ValueError, match="65535"):
        k((1, 65536), 32, (out,))


def test_second_launch_uses_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    x = cupy.zeros(1, np.float32)
    add_one()(1, 1, (x, 1))
    monkeypatch.setenv("CUKERN_ASSERT_NO_COMPILE", "1")
    add_one()(1, 1, (x, 1))
    assert x.tolist() == [2]


def test_arrays_of_another_device() -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    k = add_one()
    with cupy.cuda.Device(1):
        x = cupy.zeros(64, np.float32)
    first = cupy.zeros(64, np.float32)
    k(1, 64, (x, 64))
    k(1, 64, (first, 64))
    assert (x.get() == 1).all()
    assert (first.get() == 1).all()
    two = cukern.Kernel("__global__ void f(float *a, float *b) { a[0] = b[0]; }", "f")
    with pytest.raises(ValueError, match="on device"):
        two(1, 1, (x, first))


def test_info_names_the_gpu() -> None:
    info = jit.info()
    assert info.usable, info.problems
    assert info.gpus[0] == jit.device()
    assert info.gpus[0].arch.startswith(("sm_", "compute_"))
    assert info.driver
