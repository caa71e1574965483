"""Planted faults: each is reported as its own exception, at the right line, block and thread; clean twins pass."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from planted import HERE, assembled, expect, f32, launch, text

import cukern
from cukern import emulator as E
from cukern.emulator import toolchain

# ---- memory


def test_read_past_the_end() -> None:
    fault = expect(
        E.OutOfBounds,
        text("""
        x[threadIdx.x] =
          x[threadIdx.x + 1]; // fault"""),
        (f32(), 0),
        block=64,
    )
    assert fault.argument == "x"
    assert fault.shape == (64,)
    assert fault.index == (64,)
    assert fault.thread == (63, 0, 0)


def test_write_before_the_start_of_a_matrix() -> None:
    x = np.zeros((4, 8), np.float32)
    fault = expect(E.OutOfBounds, text("x[(int)threadIdx.x - 1] = 1.f; // fault"), (x, 0), block=8)
    assert fault.index == (-1, 7)
    assert fault.shape == (4, 8)
    assert fault.thread == (0, 0, 0)
    assert "write" in str(fault)
    assert "4 bytes before the start" in str(fault)


def test_index_of_a_higher_dimension() -> None:
    x = np.zeros((4, 5, 6), np.float32)
    fault = expect(E.OutOfBounds, text("x[4 * 5 * 6 + 5 * 6 + 2 * 6 + 3] = 1.f;"), (x, 0), block=1)
    assert fault.index == (5, 2, 3)


def test_block_and_thread_in_three_dimensions() -> None:
    source = text("""
        if (blockIdx.y == 1 && threadIdx.z == 1 && threadIdx.y == 2)
          x[n] = 1.f; // fault""")
    with cukern.emulate(check=True), pytest.raises(E.OutOfBounds) as caught:
        E.runtime_kernel(assembled(source), "k", filename="k.cu")((1, 2), (1, 3, 2), (f32(4), 4))
    assert caught.value.block == (0, 1, 0)
    assert caught.value.thread == (0, 2, 1)


def test_a_view_ends_where_it_ends() -> None:
    base = f32(64)
    fault = expect(E.OutOfBounds, text("x[threadIdx.x] = 1.f; // fault"), (base[8:16], 0), block=9)
    assert fault.index == (8,)


def test_vector_access_that_starts_inside() -> None:
    source = text("reinterpret_cast<float4 *>(x)[threadIdx.x] = float4{1, 2, 3, 4}; // fault")
    fault = expect(E.OutOfBounds, source, (f32(6), 0), block=2)
    assert fault.index in ((4,), (6,))  # the access as a whole, or the first part of it that is outside


def test_null_pointer() -> None:
    fault = expect(E.OutOfBounds, text("x[threadIdx.x] = 1.f; // fault"), (None, 0), block=2)
    assert fault.argument is None
    assert "null" in str(fault)


def test_null_pointer_without_checks() -> None:
    fault = expect(E.OutOfBounds, text("x[threadIdx.x] = 1.f; // fault"), (None, 0), block=2, check=False)
    assert "null" in str(fault)


def test_wild_pointer() -> None:
    fault = expect(E.OutOfBounds, text("*(float *)((char *)x + (1ull << 45)) = 1.f; // fault"), (f32(), 0), block=1)
    assert fault.argument is None


def test_local_array() -> None:
    source = text("""
        float r[4];
        for (int i = 0; i < 4; ++i) r[i] = i;
        x[threadIdx.x] =
          r[n]; // fault""")
    fault = expect(E.OutOfBounds, source, (f32(), 4))
    assert "index 4" in str(fault)


def test_dynamic_shared_memory() -> None:
    source = text("""
        extern __shared__ float s[];
        s[threadIdx.x] = 1.f; // fault
        x[threadIdx.x] = s[threadIdx.x];""")
    fault = expect(E.OutOfBounds, source, (f32(), 0), shared_mem=128)
    assert fault.thread == (32, 0, 0)
    assert "128 bytes" in str(fault)


def test_overrun_without_checks_stops_at_the_guard_page() -> None:
    x = f32(1024)
    fault = expect(
        E.OutOfBounds,
        text("""
        for (int i = 0; i < n; ++i)
          x[i] = 1.f; // fault"""),
        (x, 100000),
        block=1,
        check=False,
    )
    assert fault.argument == "x"
    assert (x == 1).all()  # what came before is delivered


@pytest.mark.parametrize(("at", "index"), [(10, (10,)), (-1, (-1,))])
def test_small_overrun_without_checks_is_found_afterwards(at: int, index: tuple[int, ...]) -> None:
    x = f32(10)
    with pytest.raises(E.OutOfBounds, match="check=True") as caught:
        launch(text("x[n] = 1.f;"), (x, at), block=1, check=False)
    assert caught.value.index == index
    assert not x.any()


def test_array_that_is_not_writeable() -> None:
    x = f32()
    x.flags.writeable = False
    fault = expect(E.WriteToReadOnly, text("x[threadIdx.x] = 1.f; // fault"), (x, 0))
    assert fault.argument == "x"
    assert fault.index == (0,)


def test_array_that_is_not_writeable_without_checks() -> None:
    """The array stays as it was: the kernel worked on a copy."""
    memory = bytes(40)
    x = np.frombuffer(memory, np.float32)
    launch(text("if (x[n] > 1.f) x[n] = 1.f;"), (x, 3), block=1, check=False)  # reads alone: no fault
    with pytest.raises(E.WriteToReadOnly, match=r"'x'.*not writeable") as caught:
        launch(text("x[n] = 1.f;"), (x, 3), block=1, check=False)
    assert (caught.value.argument, caught.value.index) == ("x", (3,))
    assert memory == bytes(40)


def test_write_through_pointer_to_const() -> None:
    source = text("const_cast<float *>(w)[3 + threadIdx.x] = 1.f; // fault", "float *x, const float *w")
    fault = expect(E.WriteToReadOnly, source, (f32(), f32()), block=1)
    assert fault.argument == "w"
    assert fault.index == (3,)


def test_the_same_array_may_be_read_and_written() -> None:
    x = f32()
    launch(text("x[threadIdx.x] = w[threadIdx.x] + 1.f;", "const float *w, float *x"), (x, x))
    assert (x == 1).all()


@pytest.mark.skipif(not toolchain.find_compiler().gcc, reason="clang splits the load before it is checked")
def test_misaligned_vector() -> None:
    source = text("""
        float4 v = *reinterpret_cast<const float4 *>(x + threadIdx.x); // fault
        x[threadIdx.x] = v.x;""")
    fault = expect(E.Misaligned, source, (f32(128), 0))
    assert fault.thread == (1, 0, 0)


def test_misaligned_row_of_ldmatrix() -> None:
    source = text("""
        __shared__ __align__(16) half s[512];
        for (int i = threadIdx.x; i < 512; i += 32) s[i] = half(1.f);
        __syncwarp();
        u32 r[4];
        ldmatrix_x4(r, s + threadIdx.x * 4); // fault
        x[threadIdx.x] = r[0];""")
    expect(E.Misaligned, source, (f32(), 0), block=32)


def test_misaligned_copy() -> None:
    expect(
        E.Misaligned,
        text("""
        __shared__ float4 s[8];
        cp_async_16(s, x + 1); // fault"""),
        (f32(), 0),
        block=1,
    )


def test_misaligned_streaming_load() -> None:
    expect(E.Misaligned, text("x[0] = load_streaming(x + 1).x; // fault"), (f32(), 0), block=1)


def test_misaligned_atomic() -> None:
    expect(E.Misaligned, text("atomicAdd((int *)((char *)x + 2), 1); // fault"), (f32(), 0), block=1)


def test_alignment_of_dynamic_shared_memory_is_what_was_asked_for() -> None:
    body = """
        extern __shared__ {} unsigned char s[];
        if ((size_t)s % {}) x[0] = 1.f;
        if ((size_t)s % {}) x[1] = 1.f;"""
    for align, least in (("", 16), ("__align__(128)", 128), ("__align__(1024)", 1024)):
        x = f32()
        launch(text(body.format(align, least, 2 * least)), (x, 0), block=1, shared_mem=100)
        assert x[0] == 0
        assert x[1] == 1  # and no more, so that a missing __align__ shows


# ---- shared memory


def test_missing_barrier() -> None:
    source = text("""
        __shared__ float s[64];
        s[threadIdx.x] = 1;
        __syncthreads();
        s[threadIdx.x ^ 1] = 2;  // fault
        x[threadIdx.x] = s[threadIdx.x];""")
    fault = expect(E.SharedRace, source, (f32(), 0))
    assert re.search(r"thread \d+ with no barrier", str(fault))


def test_write_after_read() -> None:
    source = text("""
        __shared__ float s[64];
        s[threadIdx.x] = 1;
        __syncthreads();
        float v = s[63 - threadIdx.x]; // fault
        s[threadIdx.x] = v + 1;
        x[threadIdx.x] = v;""")
    expect(E.SharedRace, source, (f32(), 0))
    launch(source.replace("s[threadIdx.x] = v", "__syncthreads(); s[threadIdx.x] = v"), (f32(), 0))


def test_race_in_dynamic_shared_memory() -> None:
    source = text("""
        extern __shared__ float s[];
        s[0] = 1.f; // fault
        x[threadIdx.x] = 1.f;""")
    expect(E.SharedRace, source, (f32(), 0), shared_mem=16)


def test_race_between_lanes_of_a_warp() -> None:
    source = text("""
        __shared__ float s[32];
        s[threadIdx.x] = 1;
        __syncwarp();
        s[threadIdx.x ^ 1] = 2;  // fault
        x[threadIdx.x] = s[threadIdx.x];""")
    expect(E.SharedRace, source, (f32(), 0), block=32)


def test_syncwarp_orders_a_warp_but_not_the_block() -> None:
    body = """
        __shared__ float s[64];
        s[threadIdx.x] = 1;
        __syncwarp();
        x[threadIdx.x] =
          s[threadIdx.x ^ {}]; // fault
        __syncwarp();
        s[threadIdx.x] = 2;"""
    launch(text(body.format(1)), (f32(), 0))
    with pytest.raises((E.SharedRace, E.UninitialisedShared)):
        launch(text(body.format(32)), (f32(), 0))


def test_neighbouring_halves_are_not_a_race() -> None:
    source = """
        __shared__ half s[64];
        s[threadIdx.x] = half(1.f);
        __syncthreads();
        x[threadIdx.x] = s[63 - threadIdx.x];"""
    launch(text(source), (f32(), 0))


def test_neighbouring_bytes_are_not_a_race() -> None:
    source = """
        __shared__ unsigned char s[64];
        s[threadIdx.x] = 1;
        __syncthreads();
        x[threadIdx.x] = s[63 - threadIdx.x];"""
    launch(text(source), (f32(), 0))


def test_a_thread_may_read_its_own_byte() -> None:
    source = "__shared__ unsigned char s[64];\ns[threadIdx.x] = 1;\nx[threadIdx.x] = s[threadIdx.x];"
    for order in ("up", "down", "random"):
        launch(text(source), (f32(), 0), order=order)


def test_double_buffer_without_the_second_barrier() -> None:
    body = """
        __shared__ float s[2][64];
        float sum = 0;
        for (int i = 0; i < 4; ++i) {{
          s[{index}][threadIdx.x] = i;
          __syncthreads();
          sum +=
            s[{index}][63 - threadIdx.x]; // fault
        }}
        x[threadIdx.x] = sum;"""
    launch(text(body.format(index="i & 1")), (f32(), 0))
    expect(E.SharedRace, text(body.format(index="0")), (f32(), 0))


def test_uninitialised_shared_memory() -> None:
    source = text("""
        __shared__ float s[64];
        if (threadIdx.x != 5) s[threadIdx.x] = 1;
        __syncthreads();
        x[threadIdx.x] =
          s[threadIdx.x]; // fault""")
    fault = expect(E.UninitialisedShared, source, (f32(), 0))
    assert fault.thread == (5, 0, 0)


@pytest.mark.parametrize("declared", ["float s[32]", "int s[4][8]", "struct { float v[32]; } s[1]"])
def test_shared_memory_that_nobody_writes(declared: str) -> None:
    read = {"f": "s[threadIdx.x]", "i": "s[threadIdx.x / 8][threadIdx.x % 8]", "s": "s[0].v[threadIdx.x]"}[declared[0]]
    source = text(f"""
        __shared__ {declared};
        if (threadIdx.x < n)
          x[threadIdx.x] = {read}; // fault
    """)
    fault = expect(E.UninitialisedShared, source, (f32(32), 8), block=32)
    assert "'s'" in str(fault)
    x = f32(32)
    launch(text("__shared__ float s[32];\nx[threadIdx.x] = s[threadIdx.x];"), (x, 0), block=32, check=False)
    assert np.isnan(x).all()


def test_shared_memory_that_nobody_reads() -> None:
    source = text("""
        __shared__ float s[4];
        s[0] = threadIdx.x; // fault
    """)
    expect(E.SharedRace, source, (f32(), 0))


def test_static_shared_memory_that_nobody_writes_counts() -> None:
    source = text("__shared__ float s[12289];\nx[threadIdx.x] = s[threadIdx.x + n];")
    with pytest.raises(E.LaunchError, match=r"49156 bytes of static shared memory, the limit is 49152"):
        launch(source, (f32(), 0))


def test_uninitialised_padding_byte() -> None:
    source = text("""
        __shared__ unsigned char s[64];
        if (threadIdx.x != 5) s[threadIdx.x] = 1;
        __syncthreads();
        x[threadIdx.x] =
          s[threadIdx.x]; // fault""")
    expect(E.UninitialisedShared, source, (f32(), 0))


def test_nothing_is_left_from_the_block_before() -> None:
    source = text("""
        __shared__ float s[64];
        if (blockIdx.x == 0) s[threadIdx.x] = 1;
        __syncthreads();
        x[threadIdx.x] =
          s[threadIdx.x]; // fault""")
    fault = expect(E.UninitialisedShared, source, (f32(), 0), grid=2, workers=1)
    assert fault.block == (1, 0, 0)
    x = f32()
    launch(source, (x, 0), grid=2, workers=1, check=False)
    assert np.isnan(x).all()  # without checks it is NaN


COPY = """
    __shared__ float4 s[64];
    cp_async_16(s + threadIdx.x, x + threadIdx.x * 4);
    cp_async_commit();
    {wait}
    y[threadIdx.x] =
      s[threadIdx.x {partner}].x; // fault"""


def copy(wait: str, partner: str = "^ 1") -> str:
    return text(COPY.format(wait=wait, partner=partner), "const float *x, float *y")


def test_copy_waited_for_and_shared() -> None:
    x, y = np.arange(256, dtype=np.float32), f32()
    launch(copy("cp_async_wait<0>(); __syncthreads();"), (x, y))
    np.testing.assert_array_equal(y, x[::4].reshape(-1, 2)[:, ::-1].ravel())


def test_copy_read_before_its_wait() -> None:
    expect(E.SharedRace, copy("__syncthreads();"), (f32(256), f32()))


def test_copy_read_without_barrier() -> None:
    # which fault it is depends on who comes first
    expect(E.UninitialisedShared, copy("cp_async_wait<0>();"), (f32(256), f32()))
    expect(E.SharedRace, copy("cp_async_wait<0>();", "& ~1"), (f32(256), f32()))


def test_wait_that_leaves_the_group_pending() -> None:
    expect(E.SharedRace, copy("cp_async_wait<1>(); __syncthreads();"), (f32(256), f32()))


def test_copy_from_outside_the_array() -> None:
    fault = expect(
        E.OutOfBounds,
        text("""
        __shared__ float4 s[64];
        cp_async_16(s + threadIdx.x, x + threadIdx.x * 4); // fault"""),
        (f32(64), 0),
    )
    assert fault.argument == "x"
    assert fault.index == (64,)


def test_copy_that_is_not_valid_reads_nothing() -> None:
    x = f32()
    launch(
        text("""
        __shared__ float4 s[2];
        cp_async_16(s, nullptr, false);
        cp_async_commit();
        cp_async_wait<0>();
        x[0] = s[0].x + 1.f;"""),
        (x, 0),
        block=1,
    )
    assert x[0] == 1


def test_copy_to_global_memory() -> None:
    expect(E.OutOfBounds, text("cp_async_16(x, x + 4); // fault"), (f32(), 0), block=1)


# ---- the rest


def test_endless_loop() -> None:
    source = text("""
        volatile float *y = x;
        while (y[0] == 0.f) // fault
          ;""")
    for check in (False, True):
        fault = expect(E.Timeout, source.replace(HERE, ""), (f32(), 0), timeout=0.3, check=check)
        assert "0.3 s" in str(fault)


def test_endless_synchronisation() -> None:
    with pytest.raises(E.Timeout):
        launch(text("while (n) __syncthreads();"), (f32(), 1), timeout=0.3)


def test_deep_recursion() -> None:
    # After a launch of more blocks at a time than have guard pages: the workers that have them are taken again first.
    launch(text("__syncthreads(); x[blockIdx.x] = n;"), (f32(), 1), grid=24, block=1024, cooperative=True)
    before = """
        __device__ __noinline__ float f(int n, float *x) {
          volatile float b[1024];
          b[n & 1023] = n;
          return n ? f(n - 1, x) + b[n & 1023] : x[0];
        }"""
    expect(E.StackOverflow, text("x[0] = f(n, x);", before=before), (f32(), 1000), block=1, check=False)


@pytest.mark.parametrize("check", [False, True])
def test_a_frame_larger_than_the_stack(check: bool) -> None:
    source = text("volatile int a[102400]; a[threadIdx.x] = n; x[0] = a[n];")
    expect(E.StackOverflow, source, (f32(), 0), block=1, check=check)


@pytest.mark.parametrize("check", [False, True])
def test_a_frame_does_not_step_over_the_guard_page(check: bool) -> None:
    """Thread 0 waits with values of its own in the stack that lies below the one of thread 1, or the other way."""
    before = """
        __device__ __noinline__ float reach(int n) {
          volatile int a[61250];
          for (int i = 0; i < 10; ++i) a[i] = n;
          return a[n & 7];
        }"""
    body = """
        volatile int mine[10000];
        for (int i = 0; i < 10000; ++i) mine[i] = 7;
        __syncthreads();
        if (threadIdx.x == n) x[0] = reach(5);
        __syncthreads();
        for (int i = 0; i < 10000; ++i) if (mine[i] != 7) x[1] = mine[i];"""
    for caller in (0, 1):
        expect(E.StackOverflow, text(body, before=before), (f32(), caller), block=2, check=check)


@pytest.mark.parametrize("check", [False, True])
def test_division_by_zero(check: bool) -> None:
    expect(E.ArithmeticFault, text("x[threadIdx.x] = 5 / n; // fault"), (f32(), 0), check=check)


def test_shift_out_of_range() -> None:
    expect(E.ArithmeticFault, text("x[threadIdx.x] = 1 << n; // fault"), (f32(), 32))


def test_assert_and_trap() -> None:
    fault = expect(E.DeviceAssert, text("assert(n == 1); // fault"), (f32(), 0))
    assert "n == 1" in str(fault)
    expect(E.DeviceAssert, text("if (threadIdx.x == 7) __trap(); // fault"), (f32(), 0))


def test_the_caller_of_an_inlined_function_is_named() -> None:
    before = """
        __device__ __forceinline__ float get(const float *p, int i) {
          return p[i];
        }"""
    fault = expect(E.OutOfBounds, text("x[threadIdx.x] = get(x, n); // fault", before=before), (f32(), 64))
    assert fault.file == "k.cu"
    assert fault.line == 7
    assert "called from k.cu:10" in str(fault)


def test_fault_inside_one_of_our_headers() -> None:
    source = text("x[threadIdx.x] = load_vec<float, 4>(x + n).v[0]; // fault")
    fault = expect(E.OutOfBounds, source, (f32(), 64))
    assert fault.file == "common/types.cuh"


def test_fault_of_a_kernel_that_was_removed_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path))
    source = text("x[n] = 1.f; // removed from the cache")
    launch(source, (f32(), 1))
    for path in (tmp_path / "emulator").glob("kernel-*.so"):
        path.unlink()
    fault = expect(E.OutOfBounds, source, (f32(), 64))
    assert (fault.file, fault.line, fault.index) == ("", 0, (64,))


def test_works_after_a_fault() -> None:
    for _ in range(3):
        expect(E.OutOfBounds, text("x[n] = 1.f;"), (f32(), 64))
        expect(E.Deadlock, text("if (threadIdx.x == 0) __syncwarp(); else __syncthreads();"), (f32(), 0), block=32)
        x = f32()
        launch(
            text("""
            __shared__ float s[64];
            s[threadIdx.x] = 1;
            __syncthreads();
            x[threadIdx.x] = s[63 - threadIdx.x];"""),
            (x, 0),
        )
        assert (x == 1).all()


@pytest.mark.parametrize("order", ["up", "down", "random"])
def test_faults_are_found_in_every_order(order: str) -> None:
    source = text("""
        __shared__ float s[64];
        s[threadIdx.x] = 1;
        x[threadIdx.x] =
          s[63 - threadIdx.x]; // fault""")
    with pytest.raises((E.SharedRace, E.UninitialisedShared)) as caught:
        launch(source, (f32(), 0), order=order, seed=3)
    assert caught.value.file == "k.cu"


def test_every_fault_class_is_an_emulator_error() -> None:
    for name in E.__all__:
        thing = getattr(E, name)
        if isinstance(thing, type) and issubclass(thing, BaseException):
            assert issubclass(thing, E.EmulatorError)
