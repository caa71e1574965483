"""Launches under emulation: settings, arguments, orders, collectives, printf, atomics."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import io
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated import FILL, kernel, launch

import cukern
from cukern import emulator as E
from cukern.emulator import settings

ORDERS = ("up", "down", "random")


# ---- settings


def test_active_only_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUKERN_EMULATE", raising=False)
    assert not E.active()
    with cukern.emulate():
        assert E.active()
        with cukern.emulate(order="down"):
            assert E.active()
        assert E.active()
    assert not E.active()
    monkeypatch.setenv("CUKERN_EMULATE", "1")
    assert E.active()
    monkeypatch.setenv("CUKERN_EMULATE", "0")
    assert not E.active()


def test_inner_blocks_inherit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKERN_EMULATE_SEED", "5")
    with cukern.emulate(check=False, order="random", workers=3):
        with cukern.emulate(timeout=7):
            now = settings.current()
            assert (now.check, now.order, now.workers, now.timeout, now.seed) == (False, "random", 3, 7, 5)
        assert settings.current().timeout == 60


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CHECK": "0", "ORDER": "DOWN", "SEED": "9", "WORKERS": "2", "TIMEOUT": "1.5"}.items():
        monkeypatch.setenv(f"CUKERN_EMULATE_{name}", value)
    assert settings.current() == settings.Settings(check=False, order="down", seed=9, workers=2, timeout=1.5)


def test_check_mode_is_the_default_under_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUKERN_EMULATE_CHECK", raising=False)
    assert settings.current().check
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    assert not settings.current().check


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"order": "aside"}, "order"),
        ({"order": 3}, "order"),
        ({"workers": 0}, "workers"),
        ({"workers": 1 << 31}, "workers"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"timeout": 10**400}, "timeout"),
        ({"seed": -1}, "seed"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=f"^{word}[=:]"), cukern.emulate(**options):
        pass


def test_a_block_is_entered_once() -> None:
    block = cukern.emulate(seed=5)
    with block:
        with pytest.raises(RuntimeError, match=r"entered before: call emulate\(\.\.\.\) for each"), block:
            pass
        assert settings.current().seed == 5
    with pytest.raises(RuntimeError, match="entered before"), block:
        pass
    assert settings.current().seed == 0


def test_a_function_may_be_decorated() -> None:
    @cukern.emulate(seed=5)
    def seeds(depth: int) -> list[int]:
        return [settings.current().seed] + (seeds(depth - 1) if depth else [])

    assert seeds(2) == seeds(2) == [5, 5, 5]
    assert settings.current().seed == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("check", "yes"),
        ("check", 2),
        ("check", 1.0),
        ("seed", 1.5),
        ("seed", "7"),
        ("workers", 2.0),
        ("workers", True),
        ("timeout", "5"),
        ("timeout", True),
    ],
)
def test_options_of_a_wrong_kind(option: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{option}={value!r}: expected"), cukern.emulate(**{option: value}):
        pass


def test_options_may_be_numpy_scalars() -> None:
    options: dict[str, Any] = {"check": np.True_, "seed": np.int64(3), "workers": np.uint8(2), "timeout": np.float32(9)}
    with cukern.emulate(**options):
        now = settings.current()
    assert (now.check, now.seed, now.workers, now.timeout) == (True, 3, 2, 9.0)
    assert [type(v) for v in (now.check, now.seed, now.workers, now.timeout)] == [bool, int, int, float]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CHECK", "maybe"),
        ("TIMEOUT", "soon"),
        ("TIMEOUT", "-1"),
        ("ORDER", "sideways"),
        ("SEED", "1.5"),
        ("SEED", "-1"),
        ("WORKERS", "nan"),
        ("WORKERS", "0"),
    ],
)
def test_environment_out_of_range(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"CUKERN_EMULATE_{name}", value)
    with pytest.raises(ValueError, match=f"^CUKERN_EMULATE_{name}='?{value}"):
        settings.current()


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("/bin/false", r"does not work: with --version it ends with status 1 \(no output\)"),
        ("sh -c 'echo broken >&2; exit 3'", r"status 3 \(broken\)"),
        ("/no/such/compiler", "No such file"),
        ("g++ '-O1", "No closing quotation"),
    ],
)
def test_a_compiler_that_does_not_work(monkeypatch: pytest.MonkeyPatch, command: str, why: str) -> None:
    monkeypatch.setenv("CUKERN_CXX", command)
    with pytest.raises(E.ToolchainError, match=rf"^CUKERN_CXX=.*{why}") as caught:
        launch(FILL, (np.zeros(64, np.float32), 1))
    assert len(str(caught.value).splitlines()) == 1


def test_threads_and_tasks_have_their_own_settings() -> None:
    seen: dict[str, Any] = {}

    def look() -> None:
        seen["thread"] = E.active()

    async def inside() -> None:
        with cukern.emulate(order="down"):
            await asyncio.sleep(0.01)
            seen["inside"] = settings.current().order

    async def outside() -> None:
        await asyncio.sleep(0.005)
        seen["outside"] = E.active()

    async def main() -> None:
        await asyncio.gather(inside(), outside())

    with cukern.emulate():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    asyncio.run(main())
    assert seen == {"thread": False, "inside": "down", "outside": False}


# ---- launches


def test_a_launch_no_gpu_would_accept() -> None:
    x = np.zeros(64, np.float32)
    for grid, block, shared, word in [
        ((1,), (1025,), 0, "1024"),
        ((1,), (0,), 0, "block"),
        ((1,), (1, 1, 65), 0, "block"),
        ((0,), (64,), 0, "grid"),
        ((1, 65536), (64,), 0, "grid"),
        ((1, 1, 1, 1), (64,), 0, "grid"),
        ((1,), (64,), 227 * 1024 + 1, "shared_mem"),
        ((1,), (64,), -1, "shared_mem"),
    ]:
        with pytest.raises(E.LaunchError, match=word):
            launch(FILL, (x, 1), grid, block, shared_mem=shared)
    with pytest.raises(ValueError, match="cooperative"):
        launch(FILL, (x, 1), (257,), (64,), cooperative=True)


def test_too_much_static_shared_memory() -> None:
    text = kernel("__shared__ float s[12289];\ns[threadIdx.x] = n;\nx[threadIdx.x] = s[threadIdx.x];")
    with pytest.raises(E.LaunchError, match=r"49156 bytes of static shared memory.*extern __shared__"):
        launch(text, (np.zeros(64, np.float32), 1))
    launch(text.replace("12289", "12288"), (np.zeros(64, np.float32), 1))


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ((np.zeros(64, np.float32),), "2 arguments, 1 given"),
        ((np.zeros(64, np.float64), 1), "x points to 4-byte"),
        ((np.zeros(64, np.int32), 1), "x points to 4-byte"),
        ((1.0, 1), "x is a pointer"),
        ((np.zeros(64, np.float32), 1.0), "n=1.0 does not fit"),
        ((np.zeros(64, np.float32), 2**31), "n=2147483648 does not fit"),
        ((np.zeros(64, np.float32), np.int64(1)), "n is a 4-byte.*int64"),
        ((np.zeros(64, np.float32), np.zeros(3, np.int32)), "by value"),
        ((np.zeros(64, np.float32), "1"), "n is a 4-byte"),
    ],
)
def test_arguments_that_do_not_fit(args: tuple[Any, ...], word: str) -> None:
    with pytest.raises(E.ArgumentError, match=word):
        launch(FILL, args)
    with pytest.raises(TypeError):
        launch(FILL, args)


def test_a_strided_array_is_to_be_copied_by_numpy() -> None:
    k = cukern.Kernel(FILL, "k")
    with cukern.emulate(), pytest.raises(ValueError, match=r"not contiguous.*pass numpy\.ascontiguousarray\("):
        k(1, 64, (np.zeros(128, np.float32)[::2], 1))


def test_scalars_of_every_kind() -> None:
    parameters = (
        "bool b, signed char c, unsigned short s, int i, unsigned u, long long l, float f, double d, half h, float2 v, "
        "double *out"
    )
    names = ["b", "c", "s", "i", "u", "l", "f", "d", "(float)h", "v.y"]
    body = "\n".join(f"out[{i}] = {v};" for i, v in enumerate(names))
    out = np.zeros(10)
    pair = np.float32([1, 2]).tobytes()
    args = (True, np.int8(-3), 65535, -7, 2**32 - 1, 2**40, 0.5, 1e300, np.float16(1.5), pair, out)
    launch("#include <cuda_fp16.h>\n" + kernel(body, parameters), args, block=(1,))
    assert out.tolist() == [1, -3, 65535, -7, 2**32 - 1, 2**40, 0.5, 1e300, 1.5, 2]


def test_empty_array_is_a_null_pointer() -> None:
    x = np.full(1, 7, np.int32)
    launch(kernel("if (threadIdx.x == 0) y[0] = x == nullptr;", "float *x, int *y"), (np.zeros((0, 3), np.float32), x))
    assert x[0] == 1


@pytest.mark.parametrize("check", [False, True])
def test_array_at_an_odd_address(check: bool) -> None:
    raw = bytearray(8 * 64 + 1)
    x = np.frombuffer(raw, np.float32, 64, 1)
    assert x.__array_interface__["data"][0] % 4
    with cukern.emulate(check=check):
        launch(kernel("reinterpret_cast<float4 *>(x)[threadIdx.x] = make_float4(n, n, n, n);"), (x, 3), block=(16,))
    assert (x == 3).all()


@pytest.mark.parametrize("check", [False, True])
def test_overlapping_views(check: bool) -> None:
    base = np.zeros(96, np.float32)
    with cukern.emulate(check=check):
        body = "x[threadIdx.x] = 1.f; __syncthreads(); y[threadIdx.x] += 2.f;"
        launch(kernel(body, "float *x, float *y"), (base[:64], base[32:]))
    np.testing.assert_array_equal(base, np.repeat(np.float32([1, 3, 2]), 32))


def test_device_and_constant_variables() -> None:
    variables = "__constant__ float table[4] = {1, 2, 3, 4};\n__device__ int calls;\n"
    text = variables + kernel("x[threadIdx.x] = table[threadIdx.x & 3];\natomicAdd(&calls, 1);")
    x = np.zeros(64, np.float32)
    launch(text, (x, 1))
    np.testing.assert_array_equal(x, np.tile(np.float32([1, 2, 3, 4]), 16))


# ---- order and workers

REDUCE = """
extern "C" __global__ void k(const float *x, float *y, int n) {
  __shared__ float part[8];
  float v = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) v += x[(size_t)blockIdx.x * n + i];
  for (int o = 16; o; o >>= 1) v += __shfl_down_sync(0xffffffffu, v, o);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < 8; ++w) v += part[w];
    y[blockIdx.x] = v;
  }
}"""


def test_same_bits_in_every_order_and_with_any_number_of_workers() -> None:
    x = np.random.default_rng(0).standard_normal((9, 1000)).astype(np.float32)
    results = []
    for order in ORDERS:
        for workers in (1, 4):
            for check in (False, True):
                y = np.full(9, np.nan, np.float32)
                with cukern.emulate(order=order, workers=workers, check=check, seed=workers):
                    launch(REDUCE, (x, y, 1000), (9,), (256,))
                results.append(y.tobytes())
    assert len(set(results)) == 1
    np.testing.assert_allclose(np.frombuffer(results[0], np.float32), x.sum(1), rtol=1e-4, atol=1e-4)


def first_come(order: str, seed: int = 0) -> list[int]:
    """The order in which threads start, and come out of a barrier."""
    x = np.zeros(2 * 64 + 2, np.int32)
    body = "x[2 + atomicAdd(x, 1)] = threadIdx.x;\n__syncthreads();\nx[66 + atomicAdd(x + 1, 1)] = threadIdx.x;"
    with cukern.emulate(order=order, seed=seed, workers=1):
        launch(kernel(body, "int *x"), (x,))
    return x[2:].tolist()


def test_orders_differ_where_a_kernel_lets_them() -> None:
    up = list(range(64))
    assert first_come("up") == up + up
    assert first_come("down") == up[::-1] + up[::-1]
    random = first_come("random", 1)
    assert sorted(random[:64]) == up
    assert sorted(random[64:]) == up
    assert random[:64] != up
    assert random == first_come("random", 1)
    assert random != first_come("random", 2)


def test_blocks_run_at_the_same_time() -> None:
    """Two blocks that wait for each other: only possible with two workers."""
    body = "if (threadIdx.x == 0) {\n  atomicAdd(x, 1);\n  while (atomicAdd(x, 0) < 2) __nanosleep(100);\n}"
    x = np.zeros(1, np.int32)
    with cukern.emulate(workers=2, timeout=20):
        launch(kernel(body, "int *x"), (x,), (2,), (32,))
    assert x[0] == 2
    with cukern.emulate(workers=1, timeout=0.3), pytest.raises(E.Timeout):
        launch(kernel(body, "int *x"), (np.zeros(1, np.int32),), (2,), (32,))


def test_launches_from_several_threads() -> None:
    results = [np.zeros(256, np.float32) for _ in range(6)]

    def work(i: int) -> None:
        with cukern.emulate():
            for _ in range(10):
                launch(FILL, (results[i], i), (4,), (64,))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i, x in enumerate(results):
        assert (x == i).all()


FORK = """
import os, signal, sys, threading, time
import numpy as np, cukern
from cukern import emulator as E

def child(work):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            work()
        except BaseException as e:
            os.write(2, repr(e).encode())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

WAIT = 'extern "C" __global__ void wait(volatile int *x) { while (x[0] == 0) ; }'
FILL = 'extern "C" __global__ void k(int *x, int n) { __syncthreads(); x[threadIdx.x] = n; }'
BAD = 'extern "C" __global__ void bad(int *x) { *(int *)8 = 1; }'

def work():
    x = np.zeros(64, np.int32)
    for n in range(3):
        cukern.Kernel(FILL, "k")((1,), (64,), (x, n))
        assert (x == n).all()
    try:
        cukern.Kernel(BAD, "bad")((1,), (1,), (x,))
        raise AssertionError("no fault")
    except E.OutOfBounds:
        pass

def wait():
    with cukern.emulate(timeout=3):
        try:
            cukern.Kernel(WAIT, "wait")((2,), (32,), (np.zeros(1, np.int32),))
        except E.Timeout:
            print("timeout", flush=True)

with cukern.emulate(timeout=30):
    work()
    other = threading.Thread(target=wait)
    other.start()
    time.sleep(1.5)
    assert other.is_alive()
    assert child(work) == 0
    # a child's own crash ends it, also after a launch
    assert child(lambda: (work(), os.kill(os.getpid(), signal.SIGSEGV))) == -signal.SIGSEGV
    assert other.is_alive(), "it was not running meanwhile"
    other.join()
    work()
    kernel = E.runtime_kernel(FILL, "k", filename="another.cu")
    with kernel._lock:  # as while another thread builds it
        assert child(lambda: kernel((1,), (64,), (np.zeros(64, np.int32), 1))) == 0
print("well")
"""


def test_fork_while_another_thread_launches(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    done = subprocess.run([sys.executable, "-c", FORK], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "timeout\nwell\n", done.stderr


def test_interrupt_stops_a_launch() -> None:
    x = np.zeros(64, np.float32)
    timer = threading.Timer(0.3, _thread.interrupt_main)
    timer.start()
    begun = time.monotonic()
    with cukern.emulate(timeout=30), pytest.raises(KeyboardInterrupt):
        launch(kernel("volatile float *y = x;\nwhile (y[0] == 0.f) ;"), (x, 0))
    timer.join()
    assert time.monotonic() - begun < 10
    launch(FILL, (x, 3))  # and the next one works
    assert (x == 3).all()


# ---- warps


def test_shuffles_and_votes() -> None:
    body = """
  const int lane = threadIdx.x & 31;
  int *o = out + threadIdx.x * 12;
  o[0] = __shfl_sync(~0u, lane * 10, 3);
  o[1] = __shfl_sync(~0u, lane * 10, lane + 1, 8);
  o[2] = __shfl_up_sync(~0u, lane, 3);
  o[3] = __shfl_down_sync(~0u, lane, 3, 16);
  o[4] = __shfl_xor_sync(~0u, lane, 17);
  o[5] = (int)__ballot_sync(~0u, lane % 3 == 0);
  o[6] = __any_sync(~0u, lane == 31) + 2 * __all_sync(~0u, lane < 31);
  o[7] = (int)__match_any_sync(~0u, lane / 4);
  o[8] = __reduce_add_sync(~0u, lane) + __reduce_max_sync(~0u, -lane) + (int)__reduce_min_sync(~0u, 5u + lane);
  o[9] = (int)(__reduce_or_sync(~0u, 1u << lane) ^ __reduce_and_sync(~0u, 0xf0u | lane));
  o[9] ^= (int)__reduce_xor_sync(~0u, lane + 1u);
  const double d = __shfl_xor_sync(~0u, lane + 0.5, 1);
  o[10] = (int)(d * 2);
  o[11] = (int)__shfl_sync(~0u, make_int4(lane, lane + 1, lane + 2, lane + 3), 5).w;"""
    out = np.zeros((64, 12), np.int32)
    launch(kernel(body, "int *out"), (out,))
    for lane, row in enumerate(out[:32].tolist()):
        xor = 0
        for v in range(1, 33):
            xor ^= v
        everyone = 0xF0
        for v in range(32):
            everyone &= 0xF0 | v
        want = [
            30,
            ((lane & ~7) | ((lane + 1) & 7)) * 10,
            lane - 3 if lane >= 3 else lane,
            lane + 3 if lane % 16 + 3 < 16 else lane,
            lane ^ 17,
            sum(1 << i for i in range(0, 32, 3)),
            1,
            0xF << (lane & ~3),
            496 + 0 + 5,
            0xFFFFFFFF ^ everyone ^ xor,
            2 * (lane ^ 1) + 1,
            8,
        ]
        assert [v & 0xFFFFFFFF for v in row] == [v & 0xFFFFFFFF for v in want]
    np.testing.assert_array_equal(out[:32], out[32:])


def test_last_warp_is_not_full() -> None:
    x = np.zeros(40, np.float32)
    body = "x[threadIdx.x] = __popc(__activemask()) + __popc(__ballot_sync(__activemask(), 1));"
    launch(kernel(body), (x, 0), block=(40,))
    assert set(x[:32]) == {64}
    assert set(x[32:]) == {16}


def test_barriers_with_a_result() -> None:
    body = """
  const int count = __syncthreads_count(threadIdx.x < n), all = __syncthreads_and(threadIdx.x < 64);
  x[threadIdx.x] = count * 100 + all * 10 + __syncthreads_or(threadIdx.x == 80);"""
    x = np.zeros(64, np.float32)
    launch(kernel(body), (x, 20))
    assert (x == 2010).all()


def test_atomics() -> None:
    body = """
  const int t = threadIdx.x;
  atomicAdd(x, 1), atomicMax(x + 1, t), atomicMin(x + 2, -t), atomicOr(x + 3, 1 << (t & 7)), atomicXor(x + 4, 3);
  atomicSub(x + 5, 2), atomicInc((unsigned *)x + 6, 9u), atomicExch(x + 7, 5), atomicCAS(x + 8, 0, 9);
  atomicAdd((unsigned long long *)(x + 10), 1ull << 31); atomicAdd((float *)x + 12, 0.5f);"""
    x = np.zeros(16, np.int32)
    launch(kernel(body, "int *x"), (x,), (4,))
    assert x[:9].tolist() == [256, 63, -63, 255, 0, -512, 6, 5, 9]
    assert x[10:12].view(np.int64)[0] == 256 << 31
    assert x[12:13].view(np.float32)[0] == 128


def test_last_block_pattern() -> None:
    text = kernel(
        "__shared__ bool last;\n__threadfence();\nif (threadIdx.x == 0) last = atomicAdd(count, 1u) == gridDim.x - 1;\n"
        "__syncthreads();\nif (last && threadIdx.x == 0) x[0] += 1.f;",
        "float *x, unsigned *count",
    )
    x, count = np.zeros(1, np.float32), np.zeros(1, np.uint32)
    launch(text, (x, count), (50,))
    assert x[0] == 1


def test_cooperative_launch() -> None:
    text = kernel(
        "part[blockIdx.x] = blockIdx.x;\nemu_grid_barrier(__FILE__, __LINE__);\nfloat s = 0;\n"
        "for (int i = 0; i < gridDim.x; ++i) s += part[i];\nemu_grid_barrier(__FILE__, __LINE__);\nx[blockIdx.x] = s;",
        "float *x, float *part",
    )
    x = np.zeros(12, np.float32)
    launch(text, (x, np.zeros(12, np.float32)), (12,), (32,), cooperative=True)
    assert (x == 66).all()


def test_large_cooperative_launch() -> None:
    """More threads at once than a process may have mappings for their guard pages."""
    text = kernel(
        "atomicAdd(count, 1);\nemu_grid_barrier(__FILE__, __LINE__);\n"
        "if (threadIdx.x == 0) x[blockIdx.x] = atomicAdd(count, 0);",
        "int *count, int *x",
    )
    count, x = np.zeros(1, np.int32), np.zeros(160, np.int32)
    launch(text, (count, x), (160,), (256,), cooperative=True)
    assert (x == 160 * 256).all()


# ---- printf


@pytest.mark.parametrize("check", [False, True])
def test_printf_goes_to_python(capsys: pytest.CaptureFixture[str], check: bool) -> None:
    show = 'if (threadIdx.x % 32 == 0) printf("%d: %.2f %s\\n", threadIdx.x, x[threadIdx.x], "ok");'
    text = kernel(show + "\nif (n && threadIdx.x == 63) x[64] = 0;")
    x = np.arange(64, dtype=np.float32)
    with cukern.emulate(check=check, workers=1):
        launch(text, (x, 0))
        assert capsys.readouterr().out == "0: 0.00 ok\n32: 32.00 ok\n"
        with pytest.raises(E.OutOfBounds):
            launch(text, (x, 1))
        assert capsys.readouterr().out == "0: 0.00 ok\n32: 32.00 ok\n"  # also when the kernel fails


def test_printf_of_too_much(capsys: pytest.CaptureFixture[str]) -> None:
    text = kernel('for (int i = 0; i < n; ++i) printf("%01000d\\n", i);')
    launch(text, (np.zeros(1, np.float32), 40))
    out = capsys.readouterr().out
    assert len(out) < 1 << 21
    assert "bytes of device printf were dropped" in out


@pytest.mark.parametrize("out", ["none", "closed", "ascii", "no file"])
def test_printf_to_nowhere_hides_no_fault(monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    closed = io.StringIO()
    closed.close()
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", {"none": None, "closed": closed, "ascii": ascii_only, "no file": object()}[out])
    text = kernel('printf("тест");\nif (n) x[64] = 0;')
    told = (
        contextlib.nullcontext() if out == "none" else pytest.warns(RuntimeWarning, match="kernel k: what it printed")
    )
    x = np.zeros(64, np.float32)
    with told:
        launch(text, (x, 0), block=(1,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(E.OutOfBounds):
            launch(text, (x, 1), block=(1,))
