"""Argument checks and launches, against a driver that records what it is given (no GPU needed)."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cupy")

from fake_cuda import STREAM, FakeCuda, FakeLibrary, uninstall

import cukern
from cukern.jit import CudaUnavailableError, DriverError, device

MIXED = """
#include "common/types.cuh"
struct Pair { int a; float b; };
template <class T>
__global__ void f(const T *x, float *y, int n, float eps, bf16 h, bool flag, i64 big, const __grid_constant__ Pair p,
                  unsigned char c, half g, double d) {
  if (flag) y[n] = to_float(x[big]) + eps + to_float(h) + p.b + p.a + c + to_float(g) + d;
}
"""
SIZES = [8, 8, 4, 4, 2, 1, 8, 8, 1, 2, 8]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "launch-cache"))


@pytest.fixture
def library() -> FakeLibrary:
    return FakeLibrary()


@pytest.fixture
def cuda(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    yield FakeCuda(library, monkeypatch)
    monkeypatch.undo()
    uninstall()


@pytest.fixture
def mixed(cuda: FakeCuda) -> cukern.Kernel:
    cuda.expect(SIZES)
    return cukern.Kernel(MIXED, "f", template=("half",))


def values(cuda: FakeCuda, **other: Any) -> tuple[Any, ...]:
    given = {
        "x": cuda.array((4, 8), np.float16),
        "y": cuda.array(16, np.float32),
        "n": 7,
        "eps": 0.5,
        "h": 1.5,
        "flag": True,
        "big": 2**40,
        "p": struct.pack("if", 3, 0.25),
        "c": 200,
        "g": 2.5,
        "d": 1e300,
    }
    given.update(other)
    return tuple(given.values())


def test_every_parameter_reaches_the_driver_with_its_c_type(cuda: FakeCuda, mixed: cukern.Kernel) -> None:
    args = values(cuda)
    mixed((3, 2), 64, args, shared_mem=128)
    (launch,) = cuda.library.launches
    assert (launch.grid, launch.block) == ((3, 2, 1), (64, 1, 1))
    assert (launch.shared_mem, launch.stream, launch.attributes) == (128, STREAM, [])
    formats = ["Q", "Q", "i", "f", "H", "?", "q", "8s", "B", "e", "d"]
    read = [struct.unpack("=" + f, raw)[0] for f, raw in zip(formats, cuda.library.snapshots[0])]
    bits = int(np.array(1.5, ml_dtypes.bfloat16).view(np.uint16))
    assert read[:2] == [args[0].data.ptr, args[1].data.ptr]
    assert read[2:] == [7, 0.5, bits, True, 2**40, struct.pack("if", 3, 0.25), 200, 2.5, 1e300]


def test_parameters_lie_where_the_c_layout_puts_them(cuda: FakeCuda, mixed: cukern.Kernel) -> None:
    mixed(1, 1, values(cuda))
    params = cuda.library.launches[0].params
    assert [p - params[0] for p in params] == [0, 8, 16, 20, 24, 26, 32, 40, 48, 50, 56]
    assert params[0] % 64 == 0


def test_none_and_empty_arrays_are_null(cuda: FakeCuda, mixed: cukern.Kernel) -> None:
    mixed(1, 1, values(cuda, x=None, y=cuda.array((0, 4), np.float32)))
    assert [struct.unpack("=Q", raw)[0] for raw in cuda.library.snapshots[0][:2]] == [0, 0]


def test_numpy_scalars_of_the_exact_type_are_accepted(cuda: FakeCuda, mixed: cukern.Kernel) -> None:
    exact = {
        "n": np.int32(7),
        "eps": np.float32(0.5),
        "h": ml_dtypes.bfloat16(1.5),
        "flag": np.bool_(True),
        "big": np.int64(2**40),
        "c": np.uint8(200),
        "g": np.float16(2.5),
        "d": np.float64(1e300),
        "p": np.array([(3, 0.25)], dtype=[("a", "i4"), ("b", "f4")]),
    }
    mixed(1, 1, values(cuda))
    mixed(1, 1, values(cuda, **exact))
    assert cuda.library.snapshots[0][2:] == cuda.library.snapshots[1][2:]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("n", np.int64(7), ["'n'", "int32", "int64"]),
        ("n", 7.0, ["'n'", "int32", "float"]),
        ("n", 2**31, ["'n'", "int32", "2147483648"]),
        ("n", None, ["'n'", "int32", "None"]),
        ("c", 256, ["'c'", "uint8", "256"]),
        ("c", -1, ["'c'", "uint8", "-1"]),
        ("eps", "1", ["'eps'", "float32", "str"]),
        ("eps", np.float64(1), ["'eps'", "float32", "float64"]),
        ("eps", 1e300, ["'eps'", "float32"]),
        ("eps", True, ["'eps'", "float32", "bool"]),
        ("g", 1e6, ["'g'", "float16"]),
        ("flag", 1, ["'flag'", "bool", "int 1"]),
        ("big", 2**63, ["'big'", "int64"]),
        ("p", b"123", ["'p'", "8 bytes", "3 bytes"]),
        ("p", 5, ["'p'", "8 bytes", "int 5"]),
        ("x", 5, ["'x'", "array", "int 5"]),
        ("x", "text", ["'x'", "array", "str"]),
    ],
)
def test_wrong_arguments_are_refused_before_launch(
    cuda: FakeCuda, mixed: cukern.Kernel, name: str, value: Any, words: list[str]
) -> None:
    with pytest.raises(TypeError) as error:
        mixed(1, 1, values(cuda, **{name: value}))
    for word in ["'f<half>'", *words]:
        assert word in str(error.value)
    assert not cuda.library.launches


def test_wrong_array_dtype(cuda: FakeCuda, mixed: cukern.Kernel) -> None:
    with pytest.raises(TypeError, match=r"'x' \(const T\*\): expected a float16 array, got a float32 array"):
        mixed(1, 1, values(cuda, x=cuda.array(4, np.float32)))
    assert not cuda.library.launches


def test_wrong_count_names_the_parameters(cuda: FakeCuda, mixed: cukern.Kernel) -> None:
    for args in (values(cuda)[:-1], (*values(cuda), 1), ()):
        with pytest.raises(TypeError, match=r"takes 11 arguments \(x, y, n, .*\), got " + str(len(args))):
            mixed(1, 1, args)
    with pytest.raises(TypeError, match=r"write \(x,\)"):
        mixed(1, 1, cuda.array(4, np.float32))
    assert not cuda.library.launches


@pytest.mark.parametrize("view", ["transpose", "columns", "reverse", "broadcast"])
def test_strided_arrays_are_refused(cuda: FakeCuda, mixed: cukern.Kernel, view: str) -> None:
    import cupy

    x = cuda.array((4, 8), np.float16)
    strided = {"transpose": x.T, "columns": x[:, :4], "reverse": x[::-1], "broadcast": cupy.broadcast_to(x[:1], (4, 8))}
    with pytest.raises(ValueError, match=r"'x'.*not contiguous.*ascontiguousarray"):
        mixed(1, 1, values(cuda, x=strided[view]))
    assert not cuda.library.launches


def test_a_contiguous_slice_passes_its_own_address(cuda: FakeCuda, mixed: cukern.Kernel) -> None:
    x = cuda.array((4, 8), np.float16)
    mixed(1, 1, values(cuda, x=x[2:]))
    assert struct.unpack("=Q", cuda.library.snapshots[0][0])[0] == x.data.ptr + 2 * 8 * 2


def test_arrays_on_two_devices_are_refused(cuda: FakeCuda, mixed: cukern.Kernel) -> None:
    with pytest.raises(ValueError, match=r"'y'.*on device 1.*on device 0"):
        mixed(1, 1, values(cuda, y=cuda.array(16, np.float32, device=1)))
    assert not cuda.library.launches


def test_the_arrays_device_is_used(cuda: FakeCuda, mixed: cukern.Kernel) -> None:
    args = values(cuda, x=cuda.array((4, 8), np.float16, 1), y=cuda.array(16, np.float32, 1))
    mixed(1, 1, args)
    assert cuda.used == [1, 1]  # for loading, for launching
    assert cuda.library.contexts == [0x9001]
    mixed(1, 1, values(cuda))  # and device 0 gets a function of its own
    assert len({launch.function for launch in cuda.library.launches}) == 2


def test_the_architecture_is_the_devices_own(cuda: FakeCuda) -> None:
    cuda.library.capabilities = {0: (8, 0), 1: (9, 0)}
    cuda.expect([8])
    k = cukern.Kernel("__global__ void f(float *x) { x[0] = __CUDA_ARCH__; }", "f")
    k(1, 1, (cuda.array(1, np.float32, 1),))
    k(1, 1, (cuda.array(1, np.float32, 0),))
    assert sorted(c.target for c in k._compiled.values()) == ["sm_80", "sm_90a"]
    cuda.current = 1
    assert device().arch == "sm_90a"
    assert device().max_shared_mem == 227 << 10


def test_an_explicit_architecture_that_does_not_run_here(cuda: FakeCuda) -> None:
    k = cukern.Kernel("__global__ void f(float *x) { x[0] = 1; }", "f", arch="sm_80")
    with pytest.raises(ValueError, match=r"compiled for sm_80 and does not run on Fake 0 \(sm_90a\)"):
        k(1, 1, (cuda.array(1, np.float32),))


def test_too_old_a_card_names_card_and_cuda(cuda: FakeCuda) -> None:
    cuda.library.capability = (6, 1)
    with pytest.raises(RuntimeError, match=r"Fake 0 has compute capability 6\.1.*CUDA 1\d\.\d"):
        cukern.Kernel("__global__ void f(float *x) { x[0] = 1; }", "f")


def test_a_card_newer_than_nvrtc_gets_ptx(cuda: FakeCuda) -> None:
    cuda.library.capability = (99, 0)
    cuda.expect([8])
    k = cukern.Kernel("__global__ void f(float *x) { x[0] = 1; }", "f")
    k(1, 1, (cuda.array(1, np.float32),))
    assert b".target sm_" in cuda.library.images[0]
    assert device().arch.startswith("compute_")
    assert k.resources.registers == 32  # the driver's number
    with pytest.raises(CudaUnavailableError, match="PTX"):
        _ = k.sass


def test_launch_limits(cuda: FakeCuda, mixed: cukern.Kernel) -> None:
    args = values(cuda)
    for grid, block, words in [
        (1, 1025, "1024 threads"),
        (1, (32, 33), "1024 threads"),
        (1, (1, 1, 65), "64"),
        (1, 0, "block"),
        ((1, 65536), 1, "65535"),
        ((1, 1, 65536), 1, "65535"),
        (2**31, 1, "2147483647"),
        (-1, 1, "negative"),
        ((1, 1, 1, 1), 1, "one to three"),
    ]:
        with pytest.raises(ValueError, match=words):
            mixed(grid, block, args)
    for grid in (1.5, "1", None):
        with pytest.raises(TypeError, match="grid"):
            mixed(grid, 1, args)  # type: ignore[arg-type]
    assert not cuda.library.launches
    mixed((70000, 65535), np.int64(32), args)
    assert cuda.library.launches[0].grid == (70000, 65535, 1)


def test_a_grid_without_blocks_launches_nothing_but_checks(cuda: FakeCuda, mixed: cukern.Kernel) -> None:
    mixed((0, 3), 64, values(cuda))
    assert not cuda.library.launches
    with pytest.raises(TypeError):
        mixed(0, 64, ())


def test_shared_memory_beyond_48_kb_opts_in_once(cuda: FakeCuda, mixed: cukern.Kernel) -> None:
    args = values(cuda)
    for size in (48 << 10, 100 << 10, 100 << 10, 60 << 10, 200 << 10):
        mixed(1, 64, args, shared_mem=size)
    assert cuda.library.set_calls == [(8, 100 << 10), (8, 200 << 10)]
    with pytest.raises(ValueError, match=r"more than the 232448 that Fake 0 has"):
        mixed(1, 64, args, shared_mem=228 << 10)
    with pytest.raises(ValueError, match="shared_mem=-1"):
        mixed(1, 64, args, shared_mem=-1)


def test_max_shared_mem_is_set_up_front_and_is_a_bound(cuda: FakeCuda) -> None:
    cuda.expect([8])
    k = cukern.Kernel("__global__ void f(float *x) { x[0] = 1; }", "f", max_shared_mem=64 << 10)
    x = cuda.array(1, np.float32)
    k(1, 1, (x,))
    assert cuda.library.set_calls == [(8, 64 << 10)]
    with pytest.raises(ValueError, match="max_shared_mem=65536"):
        k(1, 1, (x,), shared_mem=(64 << 10) + 1)
    with pytest.raises(ValueError, match="max_shared_mem=-5"):
        cukern.Kernel("__global__ void f(float *x) { x[0] = 1; }", "f", max_shared_mem=-5)


def test_cooperative_launch_attribute_and_size(cuda: FakeCuda) -> None:
    cuda.expect([8])
    k = cukern.Kernel("__global__ void f(float *x) { x[0] = 1; }", "f", cooperative=True)
    x = cuda.array(1, np.float32)
    k(16, 32, (x,))  # 4 multiprocessors of 4 blocks
    assert [(i, raw[:4]) for i, raw in cuda.library.launches[0].attributes] == [(2, struct.pack("i", 1))]
    with pytest.raises(ValueError, match=r"cooperative grid of 17 blocks does not fit Fake 0, which holds 16 blocks"):
        k(17, 32, (x,))


def test_cluster_and_dependent_launch_attributes(cuda: FakeCuda, mixed: cukern.Kernel) -> None:
    args = values(cuda)
    mixed(4, 32, args, cluster=(2, 1, 1), pdl=True)
    (launch,) = cuda.library.launches
    assert [i for i, _ in launch.attributes] == [4, 6]
    assert struct.unpack("3I", launch.attributes[0][1][:12]) == (2, 1, 1)
    assert struct.unpack("i", launch.attributes[1][1][:4]) == (1,)
    with pytest.raises(ValueError, match="no multiple of the cluster"):
        mixed(5, 32, args, cluster=2)
    mixed(16, 32, args, cluster=16)
    assert cuda.library.set_calls == [(14, 1)]


def test_before_hopper_pdl_is_ignored_and_clusters_refused(cuda: FakeCuda) -> None:
    cuda.library.capability = (8, 6)
    cuda.expect([8])
    k = cukern.Kernel("__global__ void f(float *x) { x[0] = 1; }", "f")
    x = cuda.array(1, np.float32)
    k(1, 1, (x,), pdl=True)
    assert cuda.library.launches[0].attributes == []
    with pytest.raises(ValueError, match=r"compute capability 9\.0, Fake 0 has 8\.6"):
        k(2, 1, (x,), cluster=2)


def test_stream_argument(cuda: FakeCuda, mixed: cukern.Kernel) -> None:
    mixed(1, 1, values(cuda), stream=77)
    assert cuda.library.launches[0].stream == 77


def test_stream_pointer_kinds() -> None:
    from cukern.jit import devices

    class Torch:
        cuda_stream = 5

    assert devices.stream_pointer(9) == 9
    assert devices.stream_pointer(Torch()) == 5
    with pytest.raises(TypeError, match="stream"):
        devices.stream_pointer("x")


def test_a_driver_error_names_the_kernel(cuda: FakeCuda, mixed: cukern.Kernel) -> None:
    args = values(cuda)
    mixed(1, 1, args)
    cuda.library.launch_codes = [700]
    with pytest.raises(DriverError, match=r"launch of kernel 'f<half>' \(grid \(1, 1, 1\).*CUDA_ERROR_TEST") as error:
        mixed(1, 1, args)
    assert error.value.code == 700


def test_a_thread_without_a_context_gets_one(cuda: FakeCuda, mixed: cukern.Kernel) -> None:
    args = values(cuda)
    mixed(1, 1, args)
    before = len(cuda.library.contexts)
    cuda.library.launch_codes = [201]
    mixed(1, 1, args)
    assert len(cuda.library.launches) == 2
    assert cuda.library.contexts[before:] == [0x9000]


def test_after_a_fork_the_error_says_spawn(cuda: FakeCuda, mixed: cukern.Kernel) -> None:
    from cukern.jit import driver

    args = values(cuda)
    mixed(1, 1, args)
    driver.get()._process -= 1  # as a forked child sees it
    cuda.library.launch_codes = [3]
    with pytest.raises(DriverError, match="spawn"):
        mixed(1, 1, args)


def test_a_parameter_layout_that_differs_from_the_drivers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "__global__ void f(float *x, int n) { x[0] = n; }"
    for layout, right in (([(0, 8), (8, 4)], True), ([(0, 8), (16, 4)], False)):
        cuda = FakeCuda(FakeLibrary(parameters=layout), monkeypatch)
        cuda.expect([8, 4])
        k = cukern.Kernel(source, "f")
        if right:
            k(1, 1, (cuda.array(1, np.float32), 3))
            assert cuda.library.snapshots == [[cuda.library.snapshots[0][0], struct.pack("i", 3)]]
        else:
            with pytest.raises(RuntimeError, match="places its parameters"):
                k(1, 1, (cuda.array(1, np.float32), 3))
    monkeypatch.undo()
    uninstall()


def test_parameters_that_the_source_does_not_explain_are_checked_by_size(cuda: FakeCuda) -> None:
    source = """
    template <class T> struct Traits { using type = T; };
    template <class T> __global__ void f(typename Traits<T>::type *x, typename Traits<T>::type v) { x[0] = v; }
    """
    cuda.expect([8, 4])
    k = cukern.Kernel(source, "f", template=("float",))
    k(1, 1, (cuda.array(1, np.float32), np.float32(2)))
    assert cuda.library.launches[0].value(1, "f") == 2.0
    with pytest.raises(TypeError, match="expected float32, got a NumPy float64 scalar"):
        k(1, 1, (cuda.array(1, np.float32), np.float64(2)))


def test_foreign_arrays_are_taken_without_a_copy(
    cuda: FakeCuda, mixed: cukern.Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    y = cuda.array(16, np.float32)

    class Foreign:
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {"shape": (16,), "typestr": "<f4", "version": 3}

    monkeypatch.setattr(cupy, "asarray", lambda value: y)
    mixed(1, 1, values(cuda, y=Foreign()))
    assert struct.unpack("=Q", cuda.library.snapshots[0][1])[0] == y.data.ptr


def test_threads_do_not_mix_their_arguments(cuda: FakeCuda) -> None:
    cuda.expect([8, 4, 4])
    k = cukern.Kernel("__global__ void f(float *x, int a, int b) { x[0] = a + b; }", "f")
    x = cuda.array(1, np.float32)
    k(1, 1, (x, 0, 0))

    def work(n: int) -> None:
        for i in range(200):
            k(1, 1, (x, n * 1000 + i, -(n * 1000 + i)))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    pairs = [(struct.unpack("=i", s[1])[0], struct.unpack("=i", s[2])[0]) for s in cuda.library.snapshots]
    assert len(pairs) == 801
    assert all(a == -b for a, b in pairs)
    assert len({a for a, _ in pairs}) == 800  # the first launch and thread 0 share a 0


def test_numpy_arrays_without_emulation_are_a_type_error(cuda: FakeCuda, mixed: cukern.Kernel) -> None:
    numpy_args = values(cuda, x=np.zeros((4, 8), np.float16), y=np.zeros(16, np.float32))
    for _ in range(2):  # before and after the first launch on the device
        with pytest.raises(TypeError, match=r"NumPy array.*cukern\.emulate"):
            mixed(1, 1, numpy_args)
        mixed(1, 1, values(cuda))
    with pytest.raises(TypeError, match="NumPy array"):
        mixed(1, 1, values(cuda, x=np.zeros((4, 8), np.float16)))


def test_no_gpu_no_arch_says_what_to_give() -> None:
    from cukern.jit import devices

    if devices.gpu_present():
        pytest.skip("this machine has a GPU")
    k = cukern.Kernel("__global__ void f(float *x) { x[0] = 1; }", "f")  # nothing is compiled
    assert not k._compiled
    with pytest.raises(CudaUnavailableError, match="arch='sm_80'"):
        _ = k.ptx


def test_host_cost_of_a_launch(cuda: FakeCuda) -> None:
    source = (
        '#include "common/types.cuh"\n__global__ void f(half *a, half *b, half *c, half *d, int m, int n, float e) {}'
    )
    cuda.expect([])
    k = cukern.Kernel(source, "f")
    args = (*(cuda.array((4, 8), np.float16) for _ in range(4)), 3, 4, 0.5)
    k(1, 1, args)
    k._loaded[0]._driver.launch_raw = lambda *a: 0
    best = min(_seconds(lambda: k((3, 2, 1), (128, 1, 1), args), 2000) for _ in range(5))
    assert best < 30e-6  # measured about 6 us; the bound allows for a busy machine


def _seconds(call: Any, n: int) -> float:
    start = time.perf_counter()
    for _ in range(n):
        call()
    return (time.perf_counter() - start) / n


def test_source_from_a_file(cuda: FakeCuda, tmp_path: Path) -> None:
    (tmp_path / "mine.cuh").write_text("#define VALUE 4\n")
    (tmp_path / "mine.cu").write_text('#include "mine.cuh"\n__global__ void f(float *x) { x[0] = VALUE; }\n')
    cuda.expect([8])
    for path in (tmp_path / "mine.cu", str(tmp_path / "mine.cu")):
        cukern.Kernel(path, "f")(1, 1, (cuda.array(1, np.float32),))
    assert len(cuda.library.launches) == 2
