"""Prefill attention on Hopper: equal bits with the portable kernel (GPU); launch, tensor maps, order of work (CPU).

Of both kernels: attention_prefill_sm90.cu (head_dim 64) and attention_prefill_sm90_chunk.cu (head_dim 128).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cupy")

from fake_cuda import FakeCuda, TensorMapLibrary, uninstall
from paging import bits, normal, random_pages, starts

import cukern
from cukern import jit
from cukern.jit.arch import Target
from cukern.jit.tensor_map import heads_map
from cukern.ops import _attention_sm90 as hopper
from cukern.ops._attention_sm90 import HopperVariant, Layout
from cukern.ops.attention_prefill import Variant, _attention_prefill_variant, attention_prefill

HALVES = [np.float16, ml_dtypes.bfloat16]
PORTABLE = Variant(4, 2)
EVERY = [(hopper.select(d), d) for d in hopper.HEAD_DIMS]


# ---------------------------------------------------------------------------------------------------- on a GPU


def on_hopper() -> Any:
    cupy = pytest.importorskip("cupy")
    if jit.device().arch != hopper.ARCH:
        pytest.skip(f"needs compute capability 9.0, this GPU is {jit.device().arch}")
    return cupy


def same(a: np.ndarray, b: np.ndarray) -> None:
    """Equal bits; one NaN is as good as another."""
    nan = np.isnan(a.astype(np.float32))
    np.testing.assert_array_equal(nan, np.isnan(b.astype(np.float32)))
    np.testing.assert_array_equal(bits(np.where(nan, 0, a).astype(a.dtype)), bits(np.where(nan, 0, b).astype(b.dtype)))


ENDS = """
import cupy, sys
from cukern.ops import _attention_sm90 as hopper
from cukern.ops.attention_prefill import _attention_prefill_variant
for d in hopper.HEAD_DIMS:
    variant = hopper.select(d)
    if variant.kernel != sys.argv[1]:
        continue
    q, k = cupy.ones((900, 40, d), "e"), cupy.ones((900, 8, d), "e")
    cu = cupy.array([0, 100, 164, 900], "i")
    _attention_prefill_variant(variant, q[None], k[None], k[None])
    _attention_prefill_variant(variant, q, k, k, cu_seqlens_q=cu)
cupy.cuda.runtime.deviceSynchronize()
"""


@functools.cache
def ends(kernel: str) -> bool:
    """Whether a kernel ends, tried in a process that can be stopped: one that hangs would hold up all tests."""
    try:
        return subprocess.run([sys.executable, "-c", ENDS, kernel], timeout=60, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def check(variant: HopperVariant, *arrays: np.ndarray, **options: Any) -> None:
    """Output and lse have the bits of the portable kernel."""
    cupy = on_hopper()
    assert ends(variant.kernel), f"{variant.kernel} hangs, or fails, in a process of its own"
    q, k, v = (cupy.asarray(a) for a in arrays)
    options = {n: cupy.asarray(a) if isinstance(a, np.ndarray) else a for n, a in options.items()}
    want, want_lse = _attention_prefill_variant(PORTABLE, q, k, v, return_lse=True, **options)
    out = cupy.full(q.shape, np.nan, np.float32).astype(q.dtype)
    _, lse = _attention_prefill_variant(variant, q, k, v, return_lse=True, out=out, **options)
    same(out.get(), want.get())
    same(lse.get(), want_lse.get())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("variant", "d"), EVERY, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("s", "m"),
    [
        *((n, n) for n in (1, 15, 17, 63, 64, 65, 127, 128, 129, 255, 256, 1000)),
        *((16, 1000), (128, 192), (300, 1111), (70, 5), (1000, 63), (1, 130)),
    ],
)
def test_dense(
    rng: np.random.Generator, dtype: Any, variant: HopperVariant, d: int, causal: bool, s: int, m: int
) -> None:
    for hq, hkv in ((2, 2), (4, 2), (5, 1), (8, 1)):
        q, k, v = (
            normal(rng, (2, s, hq, d), dtype),
            normal(rng, (2, m, hkv, d), dtype),
            normal(rng, (2, m, hkv, d), dtype),
        )
        check(variant, q, k, v, causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("variant", "d"), EVERY, ids=str)
def test_more_work_than_blocks(rng: np.random.Generator, dtype: Any, variant: HopperVariant, d: int) -> None:
    for b, s, hq, hkv in ((3, 2100, 16, 8), (1, 4097, 5, 1)):
        q, k, v = (
            normal(rng, (b, s, hq, d), dtype),
            normal(rng, (b, s, hkv, d), dtype),
            normal(rng, (b, s, hkv, d), dtype),
        )
        check(variant, q, k, v)


@pytest.mark.gpu
@pytest.mark.parametrize(("variant", "d"), EVERY, ids=str)
def test_more_ragged_work_than_blocks(rng: np.random.Generator, variant: HopperVariant, d: int) -> None:
    """Places of told work and stages of keys are used again and again: for racecheck too."""
    lengths = [300, 700, 512, 257, 1000, 640, 333, 900]
    q = normal(rng, (sum(lengths), 16, d), np.float16)
    k, v = (normal(rng, (sum(lengths), 8, d), np.float16) for _ in range(2))
    check(variant, q, k, v, cu_seqlens_q=starts(lengths))
    p = random_pages(rng, lengths, 8, d, 64, np.float16)
    check(variant, q, p.k_cache, p.v_cache, cu_seqlens_q=starts(lengths), block_tables=p.tables, seq_lens=p.seq_lens)


@pytest.mark.gpu
@pytest.mark.parametrize(("variant", "d"), EVERY, ids=str)
def test_scale_and_large_scores(rng: np.random.Generator, variant: HopperVariant, d: int) -> None:
    q, k, v = (normal(rng, (1, 400, 2, d), np.float16) for _ in range(3))
    for scale in (0.01, 3.0):
        check(variant, q, k, v, scale=scale)
    check(variant, q * np.float16(60), k * np.float16(60), v)
    q[0, 3, 1, 5] = np.nan
    k[0, 200, 0, 7] = np.inf
    check(variant, q, k, v)


@pytest.mark.gpu
@pytest.mark.parametrize(("variant", "d"), EVERY, ids=str)
def test_views(rng: np.random.Generator, variant: HopperVariant, d: int) -> None:
    cupy = on_hopper()
    assert ends(variant.kernel)
    qkv = cupy.asarray(normal(rng, (2, 333, 8, d), np.float16))
    q, k, v = qkv[:, :, :4], qkv[:, :, 4:6], qkv[:, :, 6:]
    want: Any = _attention_prefill_variant(PORTABLE, q, k, v)
    found: Any = _attention_prefill_variant(variant, q, k, v)
    same(found.get(), want.get())


RAGGED = [[5], [1, 0, 64, 65, 300, 0, 129], [700, 3, 128, 128, 1], [2000, 1, 64], [3] * 70 + [400, 20]]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("variant", "d"), EVERY, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", RAGGED, ids=lambda n: f"{len(n)} sequences")
def test_packed(
    rng: np.random.Generator, dtype: Any, variant: HopperVariant, d: int, causal: bool, lengths: list[int]
) -> None:
    keys = [n + int(rng.integers(0, 200)) for n in lengths]
    for kv_lengths, other in ((lengths, {}), (keys, {"cu_seqlens_k": starts(keys)})):
        q = normal(rng, (sum(lengths), 4, d), dtype)
        k, v = (normal(rng, (sum(kv_lengths), 2, d), dtype) for _ in range(2))
        v[0] = np.nan  # seen by the first sequence alone
        check(variant, q, k, v, cu_seqlens_q=starts(lengths), causal=causal, **other)
        v[0] = 1
        v[kv_lengths[0] :] = np.nan  # not seen by the first sequence
        check(variant, q, k, v, cu_seqlens_q=starts(lengths), causal=causal, **other)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("variant", "d"), EVERY, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("page", [16, 32, 64, 128, 256])
def test_paged(rng: np.random.Generator, dtype: Any, variant: HopperVariant, d: int, causal: bool, page: int) -> None:
    lengths, rows = [1, 700, 64, 0, 2333, 129], [1, 200, 64, 0, 100, 129]
    p = random_pages(rng, lengths, 2, d, page, dtype)
    q = normal(rng, (sum(rows), 4, d), dtype)
    tables = {"cu_seqlens_q": starts(rows), "seq_lens": p.seq_lens}
    check(variant, q, p.k_cache, p.v_cache, block_tables=p.tables, causal=causal, **tables)
    lost = p.tables.copy()  # blocks that the cache does not have
    lost[1, 0], lost[2, 0], lost[4, 33 * 64 // page] = 1 << 20, -7, -1
    check(variant, q, p.k_cache, p.v_cache, block_tables=lost, causal=causal, **tables)


@pytest.mark.gpu
@pytest.mark.parametrize(("variant", "d"), EVERY, ids=str)
@pytest.mark.parametrize("cu", [[0, 100, 5000], [-4, 200, 300], [0, 300, 10]], ids=str)
def test_wrong_lengths_stay_inside(rng: np.random.Generator, variant: HopperVariant, d: int, cu: list[int]) -> None:
    """A row that two readings of wrong lengths agree on, the first, is right; nothing else is written to."""
    cupy = on_hopper()
    q, k, v = (cupy.asarray(normal(rng, (300, h, d), np.float16)) for h in (4, 2, 2))
    assert ends(variant.kernel)
    room = cupy.full((500, 4, d), 7, np.float16)
    wrong = cupy.asarray(np.array(cu, np.int32))
    _attention_prefill_variant(variant, q, k, v, cu_seqlens_q=wrong, out=room[100:400], causal=False)
    got = room.get()
    assert (got[:100] == 7).all()
    assert (got[400:] == 7).all()
    keys = min(cu[1], 300)
    want: Any = _attention_prefill_variant(PORTABLE, q[None, :1], k[None, :keys], v[None, :keys], causal=False)
    same(got[100], want.get()[0, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("d", hopper.HEAD_DIMS)
def test_chosen_and_repeated(rng: np.random.Generator, dtype: Any, d: int) -> None:
    cupy = on_hopper()
    q, k, v = (cupy.asarray(normal(rng, (2, 700, h, d), dtype)) for h in (16, 8, 8))
    chosen: Any = _attention_prefill_variant(PORTABLE, q, k, v)
    want = chosen.get()
    for _ in range(20):
        whole: Any = attention_prefill(q, k, v)
        same(whole.get(), want)
    for rows in (1, 16, 100, 333):  # the last rows of the same context: a chunk, or a decoding step
        part: Any = attention_prefill(cupy.ascontiguousarray(q[:, -rows:]), k, v)
        same(part.get(), want[:, -rows:])


# ---------------------------------------------------------------------------------------------------- compiled


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize(("variant", "d"), EVERY, ids=str)
def test_compiles_without_spills_and_stays_asynchronous(variant: HopperVariant, d: int, layout: Layout) -> None:
    kernel = jit.kernel(f"{variant.kernel}.cu", variant.kernel, variant.template("bf16", d, layout))
    compiled = kernel._binary(Target(hopper.ARCH), keep=False)
    name = compiled.names[kernel.name]
    usage = compiled.usage[name]
    assert (usage.spill_stores, usage.spill_loads, usage.stack) == (0, 0, 0)
    # ptxas says so when it puts waits between wgmma instructions or ignores setmaxnreg
    assert "serializ" not in compiled.log
    assert "setmaxnreg" not in compiled.log
    assert [size for _, size, _ in compiled.layout[name]][:3] == [128, 128, 128]
    assert variant.shared_mem(d) <= hopper.MAX_SHARED


def test_declared_variants_are_for_hopper_alone() -> None:
    declared = hopper.kernel_variants()
    assert {item[4] for item in declared} == {("sm_90a",)}
    every = {(v.kernel, v.template(c, d, w)) for v, d in EVERY for c in ("half", "bf16") for w in Layout}
    assert {item[1:3] for item in declared} == every
    assert {item[0] for item in declared} == {"attention_prefill_sm90.cu", "attention_prefill_sm90_chunk.cu"}


# ---------------------------------------------------------------------------------------------------- launch


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    heads_map.cache_clear()
    jit.reload()
    monkeypatch.setattr("cukern.jit.devices.gpu_present", lambda: True)
    fake = FakeCuda(TensorMapLibrary(), monkeypatch)
    fake.expect([128, 128, 128, *[8] * 6, *[4] * 13])
    yield fake
    monkeypatch.undo()
    uninstall()
    heads_map.cache_clear()
    jit.reload()


def aligned(cuda: FakeCuda, shape: tuple[int, ...], dtype: Any) -> Any:
    """An array at a multiple of 16 bytes."""
    cupy = pytest.importorskip("cupy")
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = ctypes.create_string_buffer(size + 32)
    cuda._buffers.append(raw)
    memory = cupy.cuda.UnownedMemory((ctypes.addressof(raw) + 15) // 16 * 16, size + 1, raw, device_id=0)
    return cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(memory, 0))


MODES = [0, 3, 3, 0]  # 128-byte swizzle, 256-byte promotion to L2, zeros outside


def record(address: int, sizes: list[int], strides: list[int], box: list[int]) -> tuple[Any, ...]:
    return (1, 5, address, sizes, strides, box, [1] * 5, MODES)


@pytest.mark.parametrize(("variant", "d"), EVERY, ids=str)
def test_launch_of_dense_arrays(cuda: FakeCuda, variant: HopperVariant, d: int) -> None:
    library: Any = cuda.library
    q, out = (aligned(cuda, (2, 300, 4, d), np.float16) for _ in range(2))
    k, v = (aligned(cuda, (2, 350, 2, d), np.float16) for _ in range(2))
    for _ in range(2):
        _attention_prefill_variant(variant, q, k, v, out=out, causal=False, scale=0.25)
    launched, values = library.launches[0], library.snapshots[0]
    assert launched.grid == (4, 1, 1)  # the fake GPU has four multiprocessors
    assert launched.block == (variant.threads, 1, 1)
    assert launched.shared_mem == variant.shared_mem(d)
    assert [struct.unpack_from("=Q", x)[0] for x in values[:3]] == [1, 2, 3]
    assert [struct.unpack("=Q", x)[0] for x in values[3:9]] == [out.data.ptr, 0, 0, 0, 0, 0]
    tall = hopper.tall_tiles(300, 350, 8, 4, False, variant)
    # sequences, tokens, keys, heads, group, pages (3), items, tiles with all rows, causal
    assert [struct.unpack("=i", x)[0] for x in values[9:20]] == [
        2,
        300,
        350,
        4,
        2,
        0,
        0,
        0,
        2 * 4 * (tall + -(-max(300 - tall * variant.rows, 0) // (variant.rows - 64))),
        tall,
        0,
    ]
    assert struct.unpack("=f", values[20])[0] == 0.25
    head, token, blocks = 2 * d, 4 * d, d // 64
    box = [64, variant.keys, blocks, 1, 1]
    assert library.encoded == [
        record(q.data.ptr, [64, 300, blocks, 4, 2], [2 * token, 128, head, 300 * 2 * token], [64, 64, blocks, 1, 1]),
        record(k.data.ptr, [64, 350, blocks, 2, 2], [token, 128, head, 350 * token], box),
        record(v.data.ptr, [64, 350, blocks, 2, 2], [token, 128, head, 350 * token], box),
    ]
    assert len(library.launches) == 2  # the maps were remembered


@pytest.mark.parametrize(("variant", "d"), EVERY, ids=str)
@pytest.mark.parametrize("page", [16, 64, 128, 256])
def test_launch_of_pages(cuda: FakeCuda, page: int, variant: HopperVariant, d: int) -> None:
    library: Any = cuda.library
    q, out = (aligned(cuda, (300, 4, d), np.float16) for _ in range(2))
    k, v = (aligned(cuda, (7, 2, page, d), np.float16) for _ in range(2))
    cu, tables, lens = (aligned(cuda, s, np.int32) for s in ((2,), (1, 5), (1,)))
    _attention_prefill_variant(variant, q, k, v, cu_seqlens_q=cu, block_tables=tables, seq_lens=lens, out=out)
    (values,) = library.snapshots
    assert [struct.unpack("=Q", x)[0] for x in values[5:9]] == [cu.data.ptr, 0, tables.data.ptr, lens.data.ptr]
    shift = page.bit_length() - 1
    items = (300 // variant.rows + 1) * 4
    assert [struct.unpack("=i", x)[0] for x in values[9:18]] == [1, 300, 0, 4, 2, 5, shift, 7, items]
    # whole steps with all columns, or what one page has of them, 64 columns at a time
    box = [64, variant.keys, d // 64, 1, 1] if page >= variant.keys else [64, page, 1, 1, 1]
    sizes, strides = [64, page, d // 64, 2, 7], [2 * d, 128, 2 * d * page, 4 * d * page]
    assert library.encoded[1] == record(k.data.ptr, sizes, strides, box)


def test_what_goes_to_the_portable_kernel(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    monkeypatch.setattr("cukern.jit.kernels.Kernel.__call__", lambda self, *args, **options: launched.append(self.name))

    def name(s: int, m: int, d: int, **options: Any) -> str:
        q, k, v = (aligned(cuda, (1, n, 2, d), np.float16) for n in (s, m, m))
        launched.clear()
        attention_prefill(q, k, v, out=aligned(cuda, (1, s, 2, d), np.float16), **options)
        return launched[0].split("<")[0]

    assert name(256, 256, 128) == hopper.select(128).kernel
    assert name(256, 256, 64) == hopper.select(64).kernel
    assert name(256, 256, 96) == "attention_prefill"
    assert name(hopper.MIN_ROWS - 1, 256, 128) == "attention_prefill"
    assert name(hopper.FEW_ROWS, hopper.MIN_KEYS, 128) == hopper.select(128).kernel
    assert name(hopper.FEW_ROWS - 1, hopper.MIN_KEYS, 128) == "attention_prefill"
    assert name(hopper.FEW_ROWS, hopper.MIN_KEYS, 64) == "attention_prefill"
    library: Any = cuda.library
    library.capability = (8, 0)
    uninstall()
    assert name(256, 256, 128) == "attention_prefill"


def test_a_variant_that_cannot_run_says_so(cuda: FakeCuda) -> None:
    q, k, v, out = (aligned(cuda, (1, 256, 2, 96), np.float16) for _ in range(4))
    with pytest.raises(ValueError, match="192 rows, 8 stages of 64 keys cannot run q"):
        _attention_prefill_variant(HopperVariant(3, 8), q, k, v, out=out)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"address": 8}, "address 0x8"),
        ({"tokens": 0}, r"sizes \(2, 0, 4, 128\)"),
        ({"head_dim": 96}, r"sizes \(2, 300, 4, 96\)"),
        ({"strides": (4, 512, 128)}, r"strides \(4, 512, 128\)"),
        ({"strides": (1 << 40, 512, 128)}, "multiples of 8"),
        ({"strides": (0, 512, 128)}, "multiples of 8"),
        ({"box_tokens": 257}, "a box of 257 tokens"),
        ({"box_blocks": 3}, "and 3 blocks"),
    ],
)
def test_tensor_map_refuses(changed: dict[str, Any], match: str) -> None:
    good = {
        "address": 16,
        "sequences": 2,
        "tokens": 300,
        "heads": 4,
        "head_dim": 128,
        "strides": (153600, 512, 128),
        "box_tokens": 64,
        "box_blocks": 2,
    }
    with pytest.raises(ValueError, match=match):
        heads_map(**{**good, **changed})


# ---------------------------------------------------------------------------------------------------- order of work

WORK = """
#include "prefill/order.cuh"
// Numbers first, first + step, ...: sequence, tile and head of each, until there is none; how many to out[0].
template <int D, int Kind, int Rows>
__global__ void work(int *out, const int *cu_q, const int *cu_k, const int *seq_lens, int q_tokens, int kv_tokens,
                     int batch, int heads, int group, int tall, int causal, int first, int step, int single) {
  WorkOrder<D, Kind, Rows> order;
  const PackedLengths<Kind == Paged> lengths{cu_q, cu_k, seq_lens, q_tokens, kv_tokens};
  order.init(lengths, batch, q_tokens, kv_tokens, heads, group, tall, single);
  int found = 0, sequence, tile, head;
  for (int n = first; order.find(lengths, batch, heads, causal, n, sequence, tile, head); n += step, ++found)
    if (threadIdx.x == 0) {
      out[1 + 3 * found] = sequence;
      out[2 + 3 * found] = tile;
      out[3 + 3 * found] = head;
    }
  if (threadIdx.x == 0) out[0] = found;
}
"""
HEADS, GROUP, ROWS, SECTION = 6, 2, 128, 16 << 20
Work = list[tuple[int, int, int]]


def order(
    rows: Sequence[int],
    keys: Sequence[int],
    causal: bool,
    layout: Layout,
    first: int = 0,
    step: int = 1,
    tall: int = 1 << 20,
    single: bool = False,
) -> Work:
    """(sequence, tile, head) in the order of work; dense sequences are all as long as the first."""
    dense, paged = layout == Layout.DENSE, layout == Layout.PAGED
    out = np.full(10_000, -1, np.int32)
    cu_q, cu_k = (None, None) if dense else (starts(rows), None if paged else starts(keys))
    lens = np.array(keys, np.int32) if paged else None
    q_tokens, most = (rows[0], keys[0]) if dense else (sum(rows), 1 << 20 if paged else sum(keys))
    sizes = (q_tokens, most, len(rows), HEADS, GROUP, min(tall, -(-rows[0] // ROWS)), int(causal))
    with cukern.emulate(check=True):
        kernel = cukern.Kernel(WORK, f"work<128, {int(layout)}, {ROWS}>")
        kernel(1, 32, (out, cu_q, cu_k, lens, *sizes, first, step, int(single)))
    return [tuple(x) for x in out[1 : 1 + 3 * out[0]].reshape(-1, 3).tolist()]


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("rows", "more"),
    [
        ([1], [0]),
        ([1000] * 3, [0] * 3),
        ([1000] * 4, [9000] * 4),
        ([300], [20000]),
        ([200], [40000]),
        ([128, 129, 0, 5], [0] * 4),
        ([1000, 0, 300, 3000, 128], [0, 700, 12000, 5, 128]),
        ([1000, 0, 300, 3000, 128], [30000, 700, 12000, 5, 128]),
        ([int(n) for n in np.random.default_rng(1).integers(0, 600, 75)], [0] * 75),
        ([300, 10, 400], [-290, -10, -200]),
        ([0, 0], [0, 40]),
    ],
    ids=lambda n: f"{len(n)}",
)
def test_every_tile_once_in_sections(rows: list[int], more: list[int], causal: bool, layout: Layout) -> None:
    dense = layout == Layout.DENSE
    if dense and len(set(zip(rows, more))) > 1:
        pytest.skip("dense sequences have equal lengths")
    keys = [n + m for n, m in zip(rows, more)]
    found = order(rows, keys, causal, layout)
    tiles = [(b, t) for b, n in enumerate(rows) for t in range(-(-n // ROWS))]
    assert sorted(found) == [(*tile, head) for tile in tiles for head in range(HEADS)]

    def seen(b: int, tile: int) -> int:
        return keys[b] - (max(rows[b] - ROWS * (tile + 1), 0) if causal else 0)

    # columns are the heads, of each sequence if dense; sections have equally many key/value heads, but for the last
    per_column = -(-rows[0] // ROWS) if dense else len(tiles)
    groups_in_all = HEADS // GROUP * (len(rows) if dense else 1)
    group_size = 4 * 128 * 128 * sum(-(-n // 128) for n in (keys[:1] if dense else keys) if n > 0)
    fewest = -(-groups_in_all // max(SECTION // max(group_size, 1), 1))
    wide = -(-groups_in_all // fewest)
    size = max(wide * GROUP * per_column, 1)
    sections = [found[n : n + size] for n in range(0, len(found), size)]
    columns = [{(b if dense else 0, head) for b, _, head in section} for section in sections]
    assert sum(map(len, columns)) == len(set().union(*columns))
    for number, section in enumerate(reversed(sections)):
        groups = {(b if dense else 0, head // GROUP) for b, _, head in section}
        assert len(groups) * group_size <= SECTION or len(groups) == 1
        assert len(groups) == wide or number == 0
        lengths = [seen(b, t) for b, t, _ in section]
        if number % 2 == 1:
            lengths.reverse()
        assert all(later < earlier + 2 * ROWS for earlier, later in itertools.pairwise(lengths))
        # query heads of a key/value head are neighbours
        for one, two in zip(section[::GROUP], section[1::GROUP]):
            assert one[:2] == two[:2]
            assert one[2] + 1 == two[2]
    # blocks that ask for every third number share out the same list
    parts = [order(rows, keys, causal, layout, first, 3) for first in range(3)]
    assert [parts[i % 3][i // 3] for i in range(len(found))] == found
    single = order(rows, keys, causal, layout, single=True)
    assert sorted(single) == sorted(found)


def test_short_tiles_come_last() -> None:
    found = order([700], [900], False, Layout.DENSE, tall=3)
    assert [tile for _, tile, _ in found] == [t for t in range(8) for _ in range(HEADS)]  # 3 * 128 + 5 * 64 rows


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("columns", [1, 16, 40])
@pytest.mark.parametrize("tokens", [1, 100, 192, 193, 1000, 2048, 8192, 100_000])
def test_tall_tiles(tokens: int, columns: int, causal: bool) -> None:
    """As many short tiles as make the last to end earlier, none with a kernel that has no shorter ones."""
    variant = hopper.select(64)
    full = -(-tokens // 192)
    tall = hopper.tall_tiles(tokens, tokens, columns, 132, causal, variant)
    assert 0 <= tall <= full
    assert hopper.tall_tiles(tokens, tokens, columns, 132, causal, hopper.select(128)) == -(-tokens // 128)
    if (tokens, columns) == (8192, 16) and not causal:
        # 6 rounds of 192 rows, or 4 of 192 and 2 of 128
        assert tall == 4 * 132 // 16
    if (tokens, columns) == (100, 1) or tokens == 100_000:
        assert tall == full
