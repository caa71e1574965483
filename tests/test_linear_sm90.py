"""The Hopper linear layer: equal bits with the portable kernels (GPU); launch plan, tensor maps and epilogue (CPU)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cupy")

from fake_cuda import FakeCuda, TensorMapLibrary, uninstall

import cukern
from cukern import jit
from cukern.jit.arch import Target
from cukern.jit.tensor_map import gated_map, matrix_map, result_map
from cukern.ops import _linear_sm90 as hopper
from cukern.ops import _linear_variants as portable
from cukern.ops._linear_sm90 import HopperVariant, SplitVariant, Variant
from cukern.ops.linear import _linear_variant, linear
from cukern.ops.swiglu import swiglu

HALVES = [np.float16, ml_dtypes.bfloat16]
EVERY = [
    *((v, 256) for v in hopper._SEGMENTED),
    *((v, 0) for v in hopper._WHOLE),
    *((v, 256) for v in (*hopper._FEW_SEGMENTED, *hopper._FEWEST_SEGMENTED)),
    *((v, 0) for v in (*hopper._FEW_WHOLE, *hopper._FEWEST_WHOLE)),
]

# One of each structure, chosen variants among them: one to three warpgroups along both axes, all kinds of cluster, with
# and without lag, few rows, K split.
FORCED = [
    HopperVariant(2, 1, 1, 256, 4, 2, 1, lag=1),
    HopperVariant(2, 1, 2, 128, 4, 1, 2, lag=1),
    HopperVariant(2, 1, 1, 192, 5, 2, 1, lag=1),
    HopperVariant(2, 1, 1, 192, 5, 1, 2),
    HopperVariant(2, 1, 1, 128, 6, lag=2),
    HopperVariant(2, 1, 1, 64, 6, 2, 2, lag=3),
    HopperVariant(3, 1, 1, 128, 5, lag=1),
    HopperVariant(1, 1, 1, 96, 10, 2, 1),
    HopperVariant(1, 2, 1, 128, 8),
    HopperVariant(1, 1, 1, 32, 16, 1, 4, x_rows=16),
    HopperVariant(1, 1, 1, 48, 12, 1, 2, x_rows=16),
    SplitVariant(1, 32, 8, 2),
    SplitVariant(1, 72, 4, 8, x_rows=16),
    SplitVariant(2, 64, 5, 4),
]
PORTABLE = portable.TileVariant(64, 64, 64, 32, 32, 4, 2)


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint32 if array.dtype.itemsize == 4 else np.uint16)


# ---------------------------------------------------------------------------------------------------- on a GPU


def on_hopper() -> Any:
    cupy = pytest.importorskip("cupy")
    if jit.device().arch != hopper.ARCH:
        pytest.skip(f"needs compute capability 9.0, this GPU is {jit.device().arch}")
    return cupy


def run(variant: Variant | None, x: Any, w: Any, out: Any, bias: Any = None, residual: Any = None) -> None:
    assert hopper.launched(x, w, bias, residual, out, x.shape[0], w.shape[0], x.shape[1], variant) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("variant", "m", "n", "k"),
    [
        pytest.param(variant, m, n, k, id=f"{variant} {m}x{n}x{k}")
        for m, n, k in (
            (1, 8, 8),
            (65, 72, 64),
            (300, 200, 328),
            (129, 1032, 1000),
            (2100, 2056, 520),
            (257, 520, 256),
            (300, 4104, 4104),
        )
        for variant in FORCED
        if variant.fits(k, portable.template_segment(n, k))
    ],
)
def test_bits_of_the_portable_kernel(
    rng: np.random.Generator, dtype: Any, variant: Variant, m: int, n: int, k: int
) -> None:
    cupy = on_hopper()
    x = cupy.asarray(rng.standard_normal((m, k)).astype(dtype))
    w = cupy.asarray((rng.standard_normal((n, k)) * k**-0.5).astype(dtype))
    bias = cupy.asarray(rng.standard_normal(n, np.float32))
    stream = cupy.asarray(rng.standard_normal((m, n), np.float32))
    for out_dtype in (dtype, np.float32):
        want = _linear_variant(PORTABLE, x, w, bias=bias, dtype=out_dtype)
        got = cupy.full((m, n), np.nan, np.float32).astype(out_dtype)
        run(variant, x, w, got, bias)
        np.testing.assert_array_equal(bits(got.get()), bits(want.get()))
    want = _linear_variant(PORTABLE, x, w, residual=stream.copy())
    run(variant, x, w, stream, residual=stream)
    np.testing.assert_array_equal(bits(stream.get()), bits(want.get()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("variant", "m", "n", "k"),
    [
        pytest.param(variant, m, n, k, id=f"{variant} {m}x{n}x{k}")
        for m, n, k in ((1, 16, 8), (65, 208, 64), (300, 2064, 328), (2100, 2048, 520), (300, 4112, 4104))
        for variant in dict.fromkeys((*FORCED, *hopper._SEGMENTED, *hopper._WHOLE))
        if variant.gates and variant.fits(k, portable.template_segment(n, k))
    ],
)
def test_gated_bits(rng: np.random.Generator, dtype: Any, variant: Variant, m: int, n: int, k: int) -> None:
    """A product that ends in SwiGLU has the bits of a product and SwiGLU behind it."""
    cupy = on_hopper()
    x = cupy.asarray(rng.standard_normal((m, k)).astype(dtype))
    w = cupy.asarray((rng.standard_normal((n, k)) * 3 * k**-0.5).astype(dtype))
    want = swiglu(_linear_variant(PORTABLE, x, w))
    got = cupy.full((m, n // 2), np.nan, np.float32).astype(dtype)
    assert hopper.launched(x, w, None, None, got, m, n, k, variant, gated=True) is not None
    np.testing.assert_array_equal(bits(got.get()), bits(want.get()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_gated_operator(rng: np.random.Generator, dtype: Any) -> None:
    """At every number of rows, first and later calls, and with an `out`."""
    cupy = on_hopper()
    x = cupy.asarray(rng.standard_normal((2048, 1024)).astype(dtype))
    w = cupy.asarray((rng.standard_normal((6144, 1024)) / 16).astype(dtype))
    want = swiglu(_linear_variant(PORTABLE, x, w)).get()
    for m in (1, 16, 17, 64, 65, 128, 200, 512, 2048):
        for _ in range(3):
            got = linear(x[:m], w, activation="swiglu", static_weight=True)
            np.testing.assert_array_equal(bits(got.get()), bits(want[:m]))
        out = cupy.empty((m, 3072), dtype)
        assert linear(x[:m], w, activation="swiglu", out=out) is out
        np.testing.assert_array_equal(bits(out.get()), bits(want[:m]))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [v for v in FORCED if v.fits(1024, 256)], ids=str)
def test_segments_and_zeros(variant: Variant) -> None:
    """Where segments end shows in sums that are exact inside one; a segment of zeros starts from +0."""
    cupy = on_hopper()
    tiny = 2.0**-24
    x = cupy.ones((70, 1024), np.float16)
    for values, want in (
        ({0: 1.0, 256: tiny, 272: tiny}, 1 + 2 * tiny),
        ({255: 1.0, 512: tiny, 767: tiny}, 1 + 2 * tiny),
        ({0: 1.0, 256: tiny, 512: tiny}, 1.0),
        ({768: 1.0, 0: tiny, 256: tiny}, 1 + 2 * tiny),
    ):
        w = cupy.zeros((40, 1024), np.float16)
        for position, value in values.items():
            w[:, position] = value
        out = cupy.empty((70, 40), np.float32)
        run(variant, x, w, out)
        assert (out.get() == want).all()
    out = cupy.empty((70, 40), np.float32)
    run(variant, x, cupy.full((40, 1024), -0.0, np.float16), out)
    np.testing.assert_array_equal(bits(out.get()), 0)
    x[3, 7] = np.nan
    run(variant, x, cupy.ones((40, 1024), np.float16), out)
    assert np.isnan(out[3].get()).all()
    assert (cupy.delete(out, 3, axis=0).get() == 1024).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_chosen_variants_and_repeats(rng: np.random.Generator, dtype: Any) -> None:
    """Every row has the same bits at any number of rows, run after run."""
    cupy = on_hopper()
    x = cupy.asarray(rng.standard_normal((4096, 1024)).astype(dtype))
    w = cupy.asarray((rng.standard_normal((4096, 1024)) / 32).astype(dtype))
    want = _linear_variant(PORTABLE, x, w, dtype=np.float32).get()
    for m in (1, 15, 33, 64, 65, 128, 129, 256, 700, 2048, 4096):
        for _ in range(5):
            out = cupy.full((m, 4096), np.nan, np.float32)
            run(None, x[:m], w, out)
            np.testing.assert_array_equal(bits(out.get()), bits(want[:m]))


# ---------------------------------------------------------------------------------------------------- compiled


@pytest.mark.parametrize(("variant", "segment"), EVERY, ids=str)
def test_compiles_without_spills_and_stays_asynchronous(variant: Variant, segment: int) -> None:
    assert variant.fits(1024, segment)
    endings = [("half", 0, False), ("half", 2, False), ("float", 1, False), ("float", 2, False)]
    endings += [("half", 0, True), ("half", 2, True)] if variant.gates else []
    for out, through, gated in endings:
        if through and not variant.passes(2 if out == "half" else 4, gated):
            continue
        template = ("half", out, *variant.template(segment, through, gated))
        kernel = jit.kernel("linear_sm90.cu", variant.kernel, template)
        compiled = kernel._binary(Target(hopper.ARCH), keep=False)
        usage = compiled.usage[compiled.names[kernel.name]]
        assert (usage.spill_stores, usage.spill_loads, usage.stack) == (0, 0, 0)
        # ptxas says so when it puts waits between wgmma instructions or ignores setmaxnreg
        assert "serializ" not in compiled.log
        assert "setmaxnreg" not in compiled.log
        assert [size for _, size, _ in compiled.layout[compiled.names[kernel.name]]][:2] == [128, 128]


def test_declared_variants_are_for_hopper_alone() -> None:
    declared = hopper.kernel_variants()
    assert {item[4] for item in declared} == {("sm_90a",)}
    every = {v.template(s, t, gated) for v, s in EVERY for t in (0, 1, 2) for gated in (False, True)}
    assert {item[2][2:] for item in declared} <= every


# ---------------------------------------------------------------------------------------------------- plan


def test_select_fits_and_covers() -> None:
    for n, k in ((4096, 1024), (1024, 3072), (1000, 264), (6144, 4096), (4096, 12288), (151936, 1024)):
        segment = portable.template_segment(n, k)
        for m in (1, 16, 17, 33, 64, 65, 128, 200, 2048, 8192, 100_000):
            for sm_count in (114, 132):
                variant = hopper.select(m, n, k, sm_count)
                assert variant.fits(k, segment)
                blocks = variant.grid(m, n, sm_count)
                assert blocks > 0
                assert isinstance(variant, SplitVariant) or blocks <= sm_count
                assert blocks % variant.cluster == 0
                assert variant.cluster_tiles(m, n) * variant.cluster * variant.bm * variant.bn >= m * n


def test_pairs_are_for_long_sums() -> None:
    """What a pair of blocks costs a launch is a time, and weighs more the shorter the sums are."""
    for m in (1024, 1280):  # gate and up of 0.6B: 23.7 us by single blocks, 25.1 by pairs; 29.6, 30.8
        assert hopper.select(m, 6144, 1024, 132, gated=True).cluster == 1
        assert hopper.select(m, 6144, 2048, 132, gated=True).cluster == 2
    for k in (2048, 3072):
        assert hopper.select(8192, 1024, k, 132, residual=True).cluster == 2
        assert hopper.select(2048, 1024, k, 132, residual=True).cluster == 1  # one wave


def test_what_does_not_fit() -> None:
    good = HopperVariant(2, 1, 1, 256, 4, 2, 1, lag=1)
    assert good.fits(4096, 0)
    assert not good.fits(4096, 256)  # two sets of 128 accumulators
    for variant in (
        HopperVariant(2, 1, 1, 256, 5),  # shared memory
        HopperVariant(2, 1, 2, 256, 3),  # registers
        HopperVariant(2, 1, 1, 56, 4),  # no such wgmma
        HopperVariant(2, 1, 1, 128, 3, lag=3),  # the ring is shorter than the lag
        HopperVariant(4, 1, 1, 64, 4),  # too many warpgroups
    ):
        assert not variant.fits(4096, 0)
    split = SplitVariant(1, 64, 8, 4)
    assert split.fits(3072, 256)
    assert not split.fits(4096, 0)  # one segment
    assert not split.fits(16384, 256)  # sums of 16 segments to a block
    assert split.shared_mem(3072) == 8 * (128 * 128 + 16) + 3 * 64 * 72 * 4
    with pytest.raises(ValueError, match="cannot run a weight"):
        hopper._plan(good, "half", "half", 128, 1024, 1024, False, 132)


def test_accepts() -> None:
    assert hopper.accepts(1, 8, 8, (0, 16, 32))
    assert not hopper.accepts(1, 9, 8, (0,))
    assert not hopper.accepts(1, 8, 12, (0,))
    assert not hopper.accepts(1, 8, 8, (0, 8))


# ---------------------------------------------------------------------------------------------------- launch


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    matrix_map.cache_clear()
    jit.reload()
    hopper._plan.cache_clear()
    yield FakeCuda(TensorMapLibrary(), monkeypatch)
    monkeypatch.undo()
    uninstall()
    matrix_map.cache_clear()
    jit.reload()
    hopper._plan.cache_clear()


def test_launch_passes_maps_and_sizes(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = cuda.library
    monkeypatch.setattr("cukern.jit.devices.gpu_present", lambda: True)
    cuda.expect([128, 128, 128, 8, 8, 4, 4, 4, 4, 4])
    m, n, k = 300, 1024, 512
    x, w, out = (cuda.array(s, np.float16) for s in ((m, k), (n, k), (m, n)))
    variant = HopperVariant(2, 1, 1, 128, 6, 2, 1, lag=2)
    monkeypatch.setattr(hopper, "_LARGE_TILE", 1)
    assert hopper.launched(x, w, None, None, out, m, n, k, variant) is not None
    (launched,), (values,) = library.launches, library.snapshots
    assert launched.grid == (4, 1, 1)  # the fake GPU has four multiprocessors
    assert launched.block == (384, 1, 1)
    assert launched.shared_mem == variant.shared_mem(k) == 6 * (256 * 128 + 16 + 16)
    assert struct.unpack_from("=3I", launched.attributes[0][1]) == (2, 1, 1)
    assert all(address % 64 == 0 for address in launched.params[:3])
    assert [struct.unpack_from("=Q", v)[0] for v in values[:3]] == [1, 2, 3]
    assert [struct.unpack("=Q", v)[0] for v in values[3:5]] == [0, out.data.ptr]
    assert [struct.unpack("=i", v)[0] for v in values[5:]] == [m, n, k, 8, 0]
    # uint16, two axes, innermost first, stride in bytes, 128-byte swizzle, zeros outside; x whole, w in halves
    modes = [0, 3, 3, 0]
    assert library.encoded == [
        (1, 2, x.data.ptr, [k, m], [2 * k], [64, 128], [1, 1], modes),
        (1, 2, w.data.ptr, [k, n], [2 * k], [64, 64], [1, 1], modes),
        (1, 2, out.data.ptr, [n, m], [2 * n], [64, 64], [1, 1], modes),  # results, by warpgroup
    ]
    assert hopper.launched(x, w, None, None, out, m, n, k, variant) is not None
    assert len(library.encoded) == 3  # remembered
    assert len(library.launches) == 2
    # a residual: float32, rows of 128 bytes
    stream = cuda.array((m, n), np.float32)
    assert hopper.launched(x, w, None, stream, stream, m, n, k, variant) is not None
    assert library.encoded[3:] == [(7, 2, stream.data.ptr, [n, m], [4 * n], [32, 64], [1, 1], modes)]


def test_gated_launch(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of four axes: eight rows of the gate, eight of up; half as many columns of the result."""
    library: Any = cuda.library
    monkeypatch.setattr("cukern.jit.devices.gpu_present", lambda: True)
    cuda.expect([128, 128, 128, 8, 8, 4, 4, 4, 4, 4])
    m, n, k = 300, 1024, 512
    x, w, out = (cuda.array(s, np.float16) for s in ((m, k), (n, k), (m, n // 2)))
    variant = HopperVariant(2, 1, 1, 128, 6, 2, 1, lag=2)
    assert hopper.launched(x, w, None, None, out, m, n, k, variant, gated=True) is not None
    modes = [0, 3, 3, 0]
    # a pair of blocks copies 64 rows of the weight each
    weight = (1, 4, w.data.ptr, [k, 8, 2, n // 16], [2 * k, n * k, 16 * k], [64, 8, 2, 4], [1, 1, 1, 1], modes)
    assert library.encoded == [
        (1, 2, x.data.ptr, [k, m], [2 * k], [64, 128], [1, 1], modes),
        weight,
        (1, 2, out.data.ptr, [n // 2, m], [n], [64, 64], [1, 1], modes),
    ]
    assert [struct.unpack("=i", v)[0] for v in library.snapshots[0][5:]] == [m, n, k, 8, 0]
    with pytest.raises(ValueError, match="and a gate"):
        hopper.launched(x, w, None, None, out, m, n, k, SplitVariant(1, 32, 8, 2), gated=True)


def test_launch_leaves_the_rest_to_others(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cukern.jit.devices.gpu_present", lambda: True)
    library: Any = cuda.library

    def refused(m: int, n: int, k: int) -> bool:
        x, w, out = (cuda.array(s, np.float16) for s in ((m, k), (n, k), (m, n)))
        return hopper.launched(x, w, None, None, out, m, n, k) is None

    assert hopper.least_m(1024, 2048) == 2
    assert refused(1, 1024, 2048)
    assert refused(128, 60, 64)
    assert refused(128, 64, 60)
    library.capability = (8, 0)
    uninstall()
    assert refused(128, 64, 64)
    assert not library.launches
    assert not library.encoded


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((8, 4, 64, 64), "address 0x8"),
        ((16, 4, 60, 64), r"\[4, 60\]"),
        ((16, 0, 64, 64), r"\[0, 64\]"),
        ((16, 4, 64, 257), r"box \[257, 64\]"),
        ((16, 4, 64, 64, 128), r"box \[64, 128\]"),
    ],
)
def test_tensor_map_refuses(arguments: tuple[int, ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        matrix_map(*arguments)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((8, 32, 64, 32), "address 0x8"),
        ((16, 24, 64, 16), r"\[24, 64\]"),
        ((16, 32, 60, 16), r"\[32, 60\]"),
        ((16, 32, 64, 24), "box of 24 rows"),
        ((16, 1024, 64, 272), "box of 272 rows"),
    ],
)
def test_gated_map_refuses(arguments: tuple[int, ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        gated_map(*arguments)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((8, 4, 64, 4, 64, 32), "address 0x8"),
        ((16, 4, 62, 4, 64, 32), r"\[4, 62\]"),
        ((16, 4, 64, 8, 64, 32), "8 bytes"),
        ((16, 4, 64, 4, 257, 32), r"box \[257, 32\]"),
        ((16, 4, 64, 2, 64, 128), r"box \[64, 128\]"),
    ],
)
def test_result_map_refuses(arguments: tuple[int, ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        result_map(*arguments)


# ---------------------------------------------------------------------------------------------------- epilogue

EPILOGUE = """
#include "common/fragment_rows.cuh"
// Accumulator of (row, column) = 64 row + column, as ptx/wgmma.cuh lays them out.
__device__ float value(int row, int column) { return row * 64 + column; }
template <int Columns>
__device__ void fill(float (&v)[Columns / 2], int row, int column) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int j = 0; j < Columns / 8; ++j)
    for (int e = 0; e < 4; ++e)
      v[4 * j + e] = value(row + 16 * warp + (lane >> 2) + 8 * (e >> 1), column + 8 * j + 2 * (lane & 3) + (e & 1));
}
template <int Columns, class Out>
__global__ void epilogue(const float *bias, Out *out, int row, int column, int m, int n) {
  float v[Columns / 2];
  fill<Columns>(v, row, column);
  if (bias) add_bias<Columns>(v, bias, column, n);
  store_rows<Columns>(v, out, row, column, m, n);
}
template <int Columns, class T>
__global__ void gated(const float *in, float *out) {
  float v[Columns / 2], y[Columns / 4];
  const int lane = threadIdx.x & 31, row = 16 * (threadIdx.x >> 5) + (lane >> 2);
  for (int j = 0; j < Columns / 8; ++j)
    for (int e = 0; e < 4; ++e)
      v[4 * j + e] = in[(row + 8 * (e >> 1)) * Columns + 8 * j + 2 * (lane & 3) + (e & 1)];
  gate_columns<T, Columns>(v, y);
  store_rows<Columns / 2>(y, out, 0, 0, 64, Columns / 2);
}
// Strip by strip through shared memory, laid out as the copy engine does.
template <int Columns, class Out, bool Add>
__global__ void through_strips(Out *out) {
  constexpr int Strip = strip_columns<Out>(Columns), Bytes = Strip * sizeof(Out);
  __shared__ __align__(1024) unsigned char tile[64 * Bytes];
  float v[Columns / 2];
  fill<Columns>(v, 0, 0);
  auto place = [&](int i) {
    const int byte = i * sizeof(Out), line = byte >> 7 & (Bytes / 16 - 1);
    return reinterpret_cast<Out *>(tile + (byte ^ line << 4));
  };
#pragma unroll
  for (int s = 0; s < Columns / Strip; ++s) {
    __syncthreads();
    for (int i = threadIdx.x; i < 64 * Strip; i += 128) *place(i) = out[i / Strip * Columns + s * Strip + i % Strip];
    __syncthreads();
    pass_strip<Columns, Strip, Add, Out>(v, s, tile);
    __syncthreads();
    for (int i = threadIdx.x; i < 64 * Strip; i += 128) out[i / Strip * Columns + s * Strip + i % Strip] = *place(i);
  }
}
__global__ void tiles(int *out, int tiles_m, int tiles_n, int group) {
  int i, j;
  grouped_tile(threadIdx.x, tiles_m, tiles_n, group, i, j);
  out[2 * threadIdx.x] = i;
  out[2 * threadIdx.x + 1] = j;
}
"""


@pytest.mark.parametrize(
    ("columns", "row", "column", "n"),
    [(64, 0, 0, 64), (64, 64, 64, 104), (48, 0, 48, 80), (96, 64, 0, 96), (16, 0, 32, 40)],
)
def test_epilogue(columns: int, row: int, column: int, n: int) -> None:
    m = row + 51
    want = (np.arange(m)[:, None] * 64.0 + np.arange(n)).astype(np.float32)
    inside = np.zeros((m, n), bool)
    inside[row : row + 64, column : column + columns] = True
    bias = np.arange(n, dtype=np.float32)
    with cukern.emulate(check=True):
        for name, dtype in (("half", np.float16), ("bf16", ml_dtypes.bfloat16), ("float", np.float32)):
            kernel = cukern.Kernel(EPILOGUE, f"epilogue<{columns}, {name}>")
            out = np.full((m, n), np.nan, dtype)
            kernel(1, 128, (bias, out, row, column, m, n))
            np.testing.assert_array_equal(out[inside], (want + bias).astype(dtype)[inside])
            assert np.isnan(out[~inside].astype(np.float32)).all()


@pytest.mark.parametrize("columns", [16, 48, 128])
def test_gated_columns(columns: int, rng: np.random.Generator) -> None:
    """Eight columns of the gate and eight of up in turn, both rounded first, as the operator reads them."""
    for name, dtype in (("half", np.float16), ("bf16", ml_dtypes.bfloat16)):
        values = rng.standard_normal((64, columns), np.float32) * 3
        out = np.full((64, columns // 2), np.nan, np.float32)
        pairs = values.astype(dtype).reshape(64, -1, 2, 8)
        packed = np.ascontiguousarray(pairs.transpose(0, 2, 1, 3).reshape(64, columns))
        with cukern.emulate(check=True):
            cukern.Kernel(EPILOGUE, f"gated<{columns}, {name}>")(1, 128, (values, out))
            want = swiglu(packed)
        np.testing.assert_array_equal(out.astype(dtype), want)


@pytest.mark.parametrize("columns", [16, 32, 48, 128, 176])
def test_strips(columns: int, rng: np.random.Generator) -> None:
    kinds = (("float", np.float32, False), ("float", np.float32, True), ("half", np.float16, False))
    for name, dtype, add in kinds:
        old = rng.integers(-1000, 1000, (64, columns)).astype(dtype)
        out = old.copy()
        with cukern.emulate(check=True):
            cukern.Kernel(EPILOGUE, f"through_strips<{columns}, {name}, {str(add).lower()}>")(1, 128, (out,))
        want = add * old.astype(np.float32) + np.arange(64)[:, None] * 64 + np.arange(columns)
        np.testing.assert_array_equal(out, want.astype(dtype))


@pytest.mark.parametrize(("tiles_m", "tiles_n", "group"), [(16, 4, 8), (5, 7, 2), (3, 9, 8), (1, 20, 4)])
def test_every_tile_once(tiles_m: int, tiles_n: int, group: int) -> None:
    with cukern.emulate(check=True):
        out = np.full((tiles_m * tiles_n, 2), -1, np.int32)
        cukern.Kernel(EPILOGUE, "tiles")(1, tiles_m * tiles_n, (out, tiles_m, tiles_n, group))
    assert {tuple(t) for t in out.tolist()} == {(i, j) for i in range(tiles_m) for j in range(tiles_n)}
    # the first tiles go down `group` rows of the first column
    assert out[: min(group, tiles_m)].tolist() == [[i, 0] for i in range(min(group, tiles_m))]
