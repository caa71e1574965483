"""Linear layer: values against float64, one order of summation whatever kernel runs, arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cukern import jit
from cukern.ops import _linear_variants as variants
from cukern.ops import linear as linear_function
from cukern.ops._linear_variants import Gpu, OnceVariant, RowsVariant, TileVariant
from cukern.ops.linear import _linear_variant, _plan, kernel_variants, linear
from cukern.reference.linear import linear as reference
from cukern.testing import assert_close

HALVES = [np.float16, ml_dtypes.bfloat16]

# One of each structure: both kernels, several sizes, x kept or passing by, few and many warps, partial sums in rounds.
TILES = [TileVariant(64, 64, 64, 32, 32, 4, 2), TileVariant(64, 32, 64, 16, 32, 6, 2)]
FORCED = [
    *TILES,
    TileVariant(128, 128, 64, 64, 32, 3),
    RowsVariant(1, 1, 4),
    RowsVariant(2, 3, 4, rows=5),
    RowsVariant(5, 12, 4),
    RowsVariant(1, 2, 6),
    RowsVariant(2, 3, 8, rows=8),
    RowsVariant(1, 4, 6, x_slots=8),
    RowsVariant(3, 1, 6, rows=3, x_slots=8),
]


GPUS = [  # sm_86, the emulated one, sm_80, H200, RTX 5090
    Gpu(46, 99 << 10, 100 << 10),
    Gpu(8, 99 << 10, 100 << 10),
    Gpu(108, 163 << 10, 164 << 10),
    Gpu(132, 227 << 10, 228 << 10),
    Gpu(170, 99 << 10, 100 << 10),
]


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(dtype)


def problem(rng: np.random.Generator, m: int, n: int, k: int, dtype: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, a weight that keeps y of the order 1, and y in float64."""
    x, w = random(rng, (m, k), dtype), random(rng, (n, k), dtype, k**-0.5)
    return x, w, x.astype(np.float64) @ w.astype(np.float64).T


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint32 if array.dtype.itemsize == 4 else np.uint16)


@pytest.fixture
def whole_k(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every weight counts as large: one segment over all of K, at a size that a test can afford."""
    jit.reload()
    for chosen in (_plan, variants.select, variants.at_once):
        chosen.cache_clear()
    monkeypatch.setattr("cukern.ops._numerics.LARGE_WEIGHT", 1)
    yield
    jit.reload()
    for chosen in (_plan, variants.select, variants.at_once):
        chosen.cache_clear()


# ---------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (1, 1, 1),
        (1, 33, 7),
        (7, 15, 17),
        (15, 7, 100),
        (17, 100, 33),
        (33, 17, 255),
        (1, 40, 256),
        (5, 65, 257),
        (16, 64, 528),
        (64, 24, 528),
        (100, 72, 96),
        (129, 33, 15),
        (130, 97, 264),
    ],
)
def test_values(backend: Any, rng: np.random.Generator, dtype: Any, m: int, n: int, k: int) -> None:
    x, w, expected = problem(rng, m, n, k, dtype)
    # element loads (K % 8) and stores do not depend on each other: half of the pairs are enough for a CPU
    outputs = (dtype, np.float32) if k % 8 == 0 or backend.name == "cuda" else (dtype if m % 2 else np.float32,)
    for out_dtype in outputs:
        y = backend.get(linear(backend.put(x), backend.put(w), dtype=out_dtype))
        assert y.dtype == out_dtype
        assert_close("linear", y, expected)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("m", "n", "k"), [(3, 24, 520), (70, 40, 272), (150, 33, 40), (9, 13, 19)])
def test_bias_and_residual(backend: Any, rng: np.random.Generator, dtype: Any, m: int, n: int, k: int) -> None:
    x, w, expected = problem(rng, m, n, k, dtype)
    bias = random(rng, (n,), np.float32)
    residual = random(rng, (m, n), np.float32)
    put = backend.put
    assert_close("linear", backend.get(linear(put(x), put(w), bias=put(bias))), expected + bias)
    half_bias = bias.astype(dtype)
    y = linear(put(x), put(w), bias=put(half_bias), dtype=np.float32)
    assert_close("linear", backend.get(y), expected + half_bias.astype(np.float64))
    stream = put(residual)
    returned = linear(put(x), put(w), bias=put(bias), residual=stream)
    assert returned is stream
    assert_close("linear", backend.get(stream), expected + bias + residual)
    # the product enters the residual without being rounded to storage: the same float32 sum as without one
    plain = backend.get(linear(put(x), put(w), dtype=np.float32))
    stream = put(residual)
    linear(put(x), put(w), residual=stream)
    np.testing.assert_array_equal(backend.get(stream), residual + plain)


@pytest.mark.parametrize("dtype", HALVES)
def test_leading_axes_views_and_out(backend: Any, rng: np.random.Generator, dtype: Any) -> None:
    base, w, _ = problem(rng, 2 * 3 * 5, 24, 64, dtype)
    put = backend.put
    x = base.reshape(2, 3, 5, 64)
    y = backend.get(linear(put(x), put(w)))
    assert y.shape == (2, 3, 5, 24)
    same = backend.get(linear(put(base), put(w)))
    np.testing.assert_array_equal(y.reshape(30, 24), same)
    one = backend.get(linear(put(base[0]), put(w)))
    np.testing.assert_array_equal(one, same[0])
    wide = put(np.concatenate([base, base + base], axis=1))
    for view, want in (
        (wide[:, :64], same),
        (put(base)[::2], same[::2]),
        (put(base)[::-1], same[::-1]),
        (put(np.ascontiguousarray(base.T)).T, same),
    ):
        np.testing.assert_array_equal(backend.get(linear(view, put(w))), want)
    out = put(np.full((30, 24), np.nan, dtype))
    assert linear(put(base), put(w), out=out) is out
    np.testing.assert_array_equal(backend.get(out), same)


@pytest.mark.parametrize("m", [9, 70])
def test_arrays_that_start_anywhere(backend: Any, rng: np.random.Generator, m: int) -> None:
    """A weight cut out of a file, or an input inside a larger buffer: no address is a multiple of 16."""
    x, w, _ = problem(rng, m, 32, 64, np.float16)

    def shifted(array: np.ndarray) -> Any:
        flat = backend.put(np.concatenate([np.zeros(1, array.dtype), array.ravel()]))
        return flat[1:].reshape(array.shape)

    want = backend.get(linear(backend.put(x), backend.put(w)))
    np.testing.assert_array_equal(backend.get(linear(backend.put(x), shifted(w))), want)
    np.testing.assert_array_equal(backend.get(linear(shifted(x), backend.put(w))), want)


def test_zero_rows(backend: Any) -> None:
    put = backend.put
    w = put(np.zeros((8, 16), np.float16))
    assert linear(put(np.zeros((0, 16), np.float16)), w).shape == (0, 8)
    assert linear(put(np.zeros((4, 0, 16), np.float16)), w, dtype=np.float32).shape == (4, 0, 8)
    empty = linear(put(np.zeros((3, 16), np.float16)), put(np.zeros((0, 16), np.float16)))
    assert empty.shape == (3, 0)
    assert empty.dtype == np.float16


@pytest.mark.parametrize(
    ("dtype", "rounded"), [(np.float16, (5000.0, np.inf)), (ml_dtypes.bfloat16, (4992.0, 79872.0))]
)
@pytest.mark.parametrize("m", [1, 65])
def test_sums_are_float32(backend: Any, dtype: Any, rounded: tuple[float, float], m: int) -> None:
    """A half-precision running sum of ones stops at 2048 (fp16) or 256 (bf16)."""
    put = backend.put
    x = put(np.ones((m, 5000), dtype))
    for value, want in zip((1, 16), rounded):
        w = put(np.full((3, 5000), value, dtype))
        assert (backend.get(linear(x, w)).astype(np.float32) == want).all()
        assert (backend.get(linear(x, w, dtype=np.float32)) == 5000 * value).all()
    alternating = put((np.resize([300.0, -300.0], (m, 5000))).astype(dtype))
    assert (backend.get(linear(alternating, put(np.full((3, 5000), 300, dtype)))) == 0).all()


def test_special_values(backend: Any) -> None:
    """NaN and infinity stay in their row; rows past the end of a tile add nothing."""
    x = np.ones((20, 40), np.float16)
    x[3, 7] = np.nan
    x[5, 0] = np.inf
    w = np.ones((10, 40), np.float16)
    y = backend.get(linear(backend.put(x), backend.put(w)))
    assert np.isnan(y[3]).all()
    assert (y[5] == np.inf).all()
    assert (np.delete(y, [3, 5], axis=0) == 40).all()


# ---------------------------------------------------------------------------------------------------- order of the sums


def check_variants(backend: Any, rng: np.random.Generator, dtype: Any, n: int, k: int) -> None:
    x, w, expected = problem(rng, 70, n, k, dtype)
    weight = backend.put(w)
    every = backend.get(linear(backend.put(x), weight, dtype=np.float32))
    assert_close("linear", every, expected)
    tried = [v for v in FORCED if v.fits(70, n, k)]
    assert len(tried) >= 5
    if backend.name == "emulated" and dtype != np.float16:
        tried = tried[::2]  # the order of the sums does not know the dtype, and each one is a compilation
    for variant in tried:
        for m in (1, 9, 70):
            y = backend.get(_linear_variant(variant, backend.put(x[:m]), weight, dtype=np.float32))
            np.testing.assert_array_equal(bits(y), bits(every[:m]), err_msg=f"{variant} M={m}")


@pytest.mark.parametrize(("dtype", "n", "k"), [(np.float16, 33, 1048), (ml_dtypes.bfloat16, 40, 528)])
def test_variants_give_equal_bits(backend: Any, rng: np.random.Generator, dtype: Any, n: int, k: int) -> None:
    check_variants(backend, rng, dtype, n, k)


@pytest.mark.parametrize(
    ("variant", "n", "k", "dtype"),
    [  # tiles of a block beyond N, a block beyond N, several groups of warps, the last segment of 24, 16 and 8 k
        (OnceVariant(3, 5, 2), 33, 1048, np.float16),
        (OnceVariant(5, 3, 2), 59, 528, np.float16),
        (OnceVariant(3, 6, 1), 41, 528, ml_dtypes.bfloat16),
        (OnceVariant(2, 3, 4), 33, 528, np.float16),
        (OnceVariant(2, 4, 2), 50, 264, np.float16),  # two groups of two tiles
    ],
)
def test_all_of_the_weight_at_once(
    backend: Any, rng: np.random.Generator, variant: OnceVariant, n: int, k: int, dtype: Any
) -> None:
    """Few and many rows of x, with and without what is added, the weight before and behind the wait: equal bits."""
    x, w, expected = problem(rng, 16, n, k, dtype)
    bias, residual = random(rng, (n,), np.float32), random(rng, (16, n), np.float32)
    put, weight = backend.put, backend.put(w)
    for m in (1, 5, 8, 9, 16):
        y = backend.get(_linear_variant(variant, put(x[:m]), weight, dtype=np.float32, static_weight=m % 2 == 0))
        assert_close("linear", y, expected[:m])
        want = _linear_variant(TILES[0], put(x[:m]), weight, dtype=np.float32)
        np.testing.assert_array_equal(bits(y), bits(backend.get(want)), err_msg=f"M={m}")
        results = [
            backend.get(_linear_variant(v, put(x[:m]), weight, bias=put(bias), residual=put(residual[:m].copy())))
            for v in (variant, TILES[0])
        ]
        np.testing.assert_array_equal(bits(results[0]), bits(results[1]), err_msg=f"M={m}, bias and residual")
    halves = [backend.get(_linear_variant(v, put(x[:3]), weight, bias=put(bias))) for v in (variant, TILES[0])]
    assert halves[0].dtype == dtype
    np.testing.assert_array_equal(bits(halves[0]), bits(halves[1]))


@pytest.mark.usefixtures("whole_k")
@pytest.mark.parametrize(("dtype", "n", "k"), [(np.float16, 33, 1288), (ml_dtypes.bfloat16, 40, 520)])
def test_variants_give_equal_bits_without_segments(
    backend: Any, rng: np.random.Generator, dtype: Any, n: int, k: int
) -> None:
    check_variants(backend, rng, dtype, n, k)


def test_rows_not_at_16_bytes_give_equal_bits(backend: Any, rng: np.random.Generator) -> None:
    """K % 8 != 0 takes the element loads; the same numbers padded with zeros to whole chunks take the others."""
    x, w, _ = problem(rng, 70, 33, 261, np.float16)
    padding = ((0, 0), (0, 3))
    odd = backend.get(linear(backend.put(x), backend.put(w), dtype=np.float32))
    even = linear(backend.put(np.pad(x, padding)), backend.put(np.pad(w, padding)), dtype=np.float32)
    np.testing.assert_array_equal(bits(odd), bits(backend.get(even)))


def test_partial_sums_in_rounds(backend: Any, rng: np.random.Generator) -> None:
    """More tiles in a block than partial sums fit in shared memory at a time."""
    variant = RowsVariant(1, 3, 4)
    x, w, _ = problem(rng, 16, 140, 1040, np.float16)
    assert variant.arguments(16, 140, 1040)[3] < 18
    y = _linear_variant(variant, backend.put(x), backend.put(w), dtype=np.float32)
    want = _linear_variant(TILES[0], backend.put(x), backend.put(w), dtype=np.float32)
    np.testing.assert_array_equal(bits(backend.get(y)), bits(backend.get(want)))


@pytest.mark.parametrize(("n", "k"), [(300, 264), (300, 200), (297, 40)])
def test_more_tiles_than_blocks(backend: Any, rng: np.random.Generator, n: int, k: int) -> None:
    """Blocks go on to a second and a third tile, with copies for it under way while the one before is stored."""
    tile, gpu = TILES[0], Gpu.of(jit.device())
    m = 64 * (gpu.sm_count * tile.min_blocks * 2 // 5 + 1) - 7
    assert tile.tiles(m, n) > 2 * tile.grid(m, n, gpu)[0]
    x, w, expected = problem(rng, m, n, k, np.float16)
    bias, residual = random(rng, (n,), np.float32), random(rng, (m, n), np.float32)
    put = backend.put
    y = backend.get(_linear_variant(tile, put(x), put(w), bias=put(bias)))
    assert_close("linear", y, expected + bias)
    stream = put(residual)
    _linear_variant(tile, put(x), put(w), residual=stream)
    for rows in (slice(0, 5), slice(m // 2, m // 2 + 9), slice(m - 3, m)):
        alone = backend.get(linear(put(x[rows]), put(w), residual=put(residual[rows].copy())))
        np.testing.assert_array_equal(bits(backend.get(stream)[rows]), bits(alone))
    assert_close("linear", backend.get(stream), expected + residual)


@pytest.mark.parametrize("dtype", HALVES)
def test_row_does_not_depend_on_the_batch(backend: Any, rng: np.random.Generator, dtype: Any) -> None:
    x, w, _ = problem(rng, 140, 24, 784, dtype)
    weight = backend.put(w)
    batch = backend.get(linear(backend.put(x), weight, dtype=np.float32))
    for first, last in ((0, 1), (139, 140), (3, 11), (1, 17), (100, 133), (7, 71), (10, 138)):
        part = backend.get(linear(backend.put(x[first:last]), weight, dtype=np.float32))
        np.testing.assert_array_equal(bits(part), bits(batch[first:last]))
    shuffled = rng.permutation(140)
    np.testing.assert_array_equal(
        bits(backend.get(linear(backend.put(x[shuffled]), weight, dtype=np.float32))), bits(batch[shuffled])
    )
    # negative control: the same products in float32 in two other orders do not have these bits, nor each other's
    x32, w32 = x.astype(np.float32), w.astype(np.float32)
    forward = np.cumsum(x32[:, None, :] * w32[None], axis=2, dtype=np.float32)[..., -1]
    backward = np.cumsum((x32[:, None, :] * w32[None])[..., ::-1], axis=2, dtype=np.float32)[..., -1]
    assert not np.array_equal(bits(forward), bits(backward))
    assert not np.array_equal(bits(forward), bits(batch))
    assert not np.array_equal(bits(backward), bits(batch))


# Inside a segment these sums are exact, so they show where segments end and how segment sums are added.
TINY = 2.0**-24


def segment_probe(k: int, values: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
    w = np.zeros((8, k), np.float16)
    for position, value in values.items():
        w[:, position] = value
    return np.ones((1, k), np.float16), w


@pytest.mark.parametrize("variant", [*(v for v in FORCED if v.fits(1, 8, 1024)), OnceVariant(1, 4, 1)], ids=str)
def test_segments_of_256_in_ascending_order(backend: Any, variant: variants.Variant) -> None:

    def run(values: dict[int, float]) -> float:
        x, w = segment_probe(1024, values)
        return float(backend.get(_linear_variant(variant, backend.put(x), backend.put(w), dtype=np.float32))[0, 0])

    # two tiny products meet inside a segment before the 1 of another one: a single chain would lose both
    assert run({0: 1.0, 256: TINY, 272: TINY}) == 1 + 2 * TINY
    assert run({255: 1.0, 512: TINY, 767: TINY}) == 1 + 2 * TINY
    # in different segments, each is lost against the 1 before it ...
    assert run({0: 1.0, 256: TINY, 512: TINY}) == 1.0
    assert run({0: 1.0, 255: 0.0, 511: TINY, 512: TINY}) == 1.0
    # ... and kept when the 1 comes last: ascending order
    assert run({255: TINY, 256: TINY, 1023: 1.0}) == 1 + 2 * TINY


@pytest.mark.usefixtures("whole_k")
@pytest.mark.parametrize("variant", FORCED, ids=str)
def test_large_weight_is_one_chain(backend: Any, variant: variants.Variant) -> None:
    x, w = segment_probe(1032, {0: 1.0, 256: TINY, 272: TINY})
    if not variant.fits(1, 8, 1032):
        pytest.skip("runs weights with segments only")
    y = backend.get(_linear_variant(variant, backend.put(x), backend.put(w), dtype=np.float32))
    assert y[0, 0] == 1.0


def test_template_segment() -> None:
    assert variants.template_segment(1024, 1024) == 256
    assert variants.template_segment(4096, 4095) == 256
    assert variants.template_segment(4096, 4096) == 0  # 2^24 elements: one chain
    assert variants.template_segment(151936, 1024) == 0
    assert variants.template_segment(1024, 256) == 0  # one segment anyway
    assert variants.template_segment(1, 257) == 256


# ------------------------------------------------------------------------------------------ choice of the variant


@pytest.mark.parametrize(("n", "k"), [(1024, 1024), (1024, 3072), (6144, 1024), (151936, 1024), (4096, 12288), (8, 8)])
@pytest.mark.parametrize("aligned", [True, False])
def test_selection_fits_every_gpu(n: int, k: int, aligned: bool) -> None:
    for m in (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 300, 2048, 8192):
        for gpu in GPUS:
            chosen = variants.select(m, n, k, aligned, gpu)
            assert chosen.fits(m, n, k, gpu.max_shared)
            assert chosen.shared_mem(m, n, k) <= gpu.max_shared
            assert chosen.threads <= 384
            if m <= variants.ROWS_MAX_M and aligned:
                assert isinstance(chosen, RowsVariant | OnceVariant)
                assert chosen.blocks <= gpu.sm_count
                if isinstance(chosen, OnceVariant):
                    assert chosen == variants.at_once(m, n, k, gpu)
                    continue
                # a block's share of the weight is in flight, or enough of it to cover the latency of memory
                share = -(-n // 8 // chosen.blocks) * 16 * k
                assert chosen.ring_bytes(n, k) >= min((40 if gpu.max_shared > 200 << 10 else 12) << 10, share)
            if m > 64 or not aligned:
                assert isinstance(chosen, TileVariant)


def test_few_kernels() -> None:
    """Each one is compiled for six architectures in the tests, and by whoever compiles ahead."""
    assert len(kernel_variants()) <= 42


def test_what_is_chosen_for_all_of_the_weight_at_once() -> None:
    """Two blocks beside each other, or few bytes; weights of one segment, more rows and smaller GPUs are for others."""
    h200 = GPUS[3]
    assert variants.at_once(1, 4096, 1024, h200) == OnceVariant(132, 4, 4)
    assert variants.at_once(16, 1024, 2048, h200) == OnceVariant(132, 8, 1)
    assert variants.at_once(16, 1024, 3072, h200) == OnceVariant(132, 12, 1)  # alone on its multiprocessor
    assert variants.at_once(1, 6144, 1024, h200) == OnceVariant(132, 8, 3)
    assert variants.at_once(16, 6144, 1024, h200) is None
    assert variants.at_once(17, 1024, 2048, h200) is None
    assert variants.at_once(1, 1024, 4096, h200) is None  # more segments than warps
    assert variants.at_once(1, 4096, 4096, h200) is None
    assert all(variants.at_once(1, 1024, 2048, gpu) is None for gpu in GPUS if gpu != h200)
    for m in range(1, 17):
        for n, k in ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (40, 520)):
            chosen = variants.at_once(m, n, k, h200)
            if chosen is not None:
                two = 2 * (chosen.shared_mem(m, n, k) + 1024) <= h200.shared_per_sm
                assert two or chosen.weight_bytes(n, k) <= 48 << 10
    tall, odd, wide = OnceVariant(132, 8, 1), OnceVariant(1, 2, 1), OnceVariant(1, 2, 5)
    assert not tall.fits(17, 1024, 2048, h200.max_shared)
    assert not OnceVariant(100, 8, 1).fits(1, 1024, 2048, h200.max_shared)  # columns without a block
    assert not odd.fits(1, 8, 520)
    assert not wide.fits(1, 40, 264)
    assert not OnceVariant(1, 1, 1).fits(1, 8, 260)


# ---------------------------------------------------------------------------------------------------- arguments


def test_wrong_arguments(backend: Any) -> None:
    put = backend.put
    x, w = put(np.ones((3, 16), np.float16)), put(np.ones((8, 16), np.float16))
    result = put(np.ones((3, 8), np.float32))
    for error, message, arguments in (
        (ValueError, "weight", {"weight": put(np.ones((8, 24), np.float16))}),
        (ValueError, "weight", {"weight": put(np.ones(16, np.float16))}),
        (ValueError, "contiguous", {"weight": put(np.ones((16, 8), np.float16)).T}),
        (ValueError, "contiguous", {"weight": put(np.ones((8, 32), np.float16))[:, :16]}),
        (TypeError, "weight", {"weight": put(np.ones((8, 16), ml_dtypes.bfloat16))}),
        (TypeError, "x has dtype", {"x": put(np.ones((3, 16), np.float32))}),
        (ValueError, "bias", {"bias": put(np.ones(7, np.float32))}),
        (TypeError, "bias", {"bias": put(np.ones(8, np.float64))}),
        (ValueError, "residual", {"residual": put(np.ones((2, 8), np.float32))}),
        (TypeError, "residual", {"residual": put(np.ones((3, 8), np.float16))}),
        (ValueError, "residual", {"residual": put(np.ones((3, 16), np.float32))[:, ::2]}),
        (ValueError, "out", {"out": put(np.ones((3, 7), np.float16))}),
        (TypeError, "dtype", {"out": put(np.ones((3, 8), np.float64))}),
        (ValueError, "out", {"out": put(np.ones((3, 16), np.float16))[:, ::2]}),
        (TypeError, "dtype", {"dtype": ml_dtypes.bfloat16}),
        (ValueError, "float32", {"dtype": np.float16, "residual": result}),
        (TypeError, "linear: dtype is 'float33'", {"dtype": "float33"}),
        (TypeError, "linear: dtype is 'float33'", {"dtype": "float33", "residual": result}),
        (ValueError, "not both", {"out": result, "residual": result}),
        (ValueError, "backend", {"backend": "magic"}),
        (ValueError, "K = 0", {"x": put(np.ones((3, 0), np.float16)), "weight": put(np.ones((8, 0), np.float16))}),
    ):
        with pytest.raises(error, match=message):
            linear(**{"x": x, "weight": w, **arguments})
    if backend.name == "emulated":
        with pytest.raises(RuntimeError, match="cublas"):
            linear(x, w, backend="cublas")
    square, bias = put(np.ones((8, 8), np.float16)), put(np.ones(8, np.float32))
    for name, given in (("x", square), ("weight", square), ("bias", bias)):
        arguments = {"x": put(np.ones((2, 8), np.float16)), "weight": put(np.ones((8, 8), np.float16)), name: given}
        out = given[:2] if name == "weight" else given if name == "x" else bias.reshape(1, 8)
        if name == "bias":
            arguments |= {"x": put(np.ones((1, 8), np.float16)), "dtype": np.float32}
        with pytest.raises(ValueError, match=f"out shares memory with {name}"):
            linear(**arguments, out=out)
    for variant in (RowsVariant(1, 1, 4), RowsVariant(1, 13, 6), RowsVariant(1, 1, 6, rows=17)):
        with pytest.raises(ValueError, match="cannot run"):
            _linear_variant(variant, put(np.ones((1, 16), np.float16)), w)


def test_numpy_runs_the_reference(rng: np.random.Generator) -> None:
    x, w, expected = problem(rng, 5, 300, 70, np.float16)
    assert_close("linear", linear(x, w), expected)
    np.testing.assert_array_equal(linear(x, w), reference(x, w))
    exact = reference(x.astype(np.float64), w.astype(np.float64))
    np.testing.assert_allclose(exact, expected, rtol=1e-12, atol=1e-12)
    wide = linear(x.astype(np.float32), w.astype(np.float32))
    assert wide.dtype == np.float32
    assert linear(x.astype(np.float64), w.astype(np.float64)).dtype == np.float64
    assert linear_function is linear


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_cublas_backend(rng: np.random.Generator, dtype: Any) -> None:
    import cupy

    x, w, expected = problem(rng, 70, 40, 520, dtype)
    gx, gw = cupy.asarray(x), cupy.asarray(w)
    assert_close("linear", linear(gx, gw, backend="cublas").get(), expected)
    assert_close("linear", linear(gx, gw, dtype=np.float32, backend="cublas").get(), expected)
    residual = cupy.ones((70, 40), np.float32)
    linear(gx, gw, residual=residual, backend="cublas")
    assert_close("linear", residual.get(), expected + 1)


@pytest.mark.gpu
def test_chain_of_early_launches(rng: np.random.Generator) -> None:
    """Each product reads what the one ahead wrote, and overwrites what that one read, while their ends overlap."""
    import cupy

    def run(static_weight: bool, wait: bool) -> list[np.ndarray]:
        x = [cupy.asarray(start), cupy.zeros_like(start)]
        residual = cupy.zeros((m, 1024), np.float32)
        for i in range(60):
            linear(x[i % 2], weights[i % 3], out=x[(i + 1) % 2], static_weight=static_weight)
            if wait:
                cupy.cuda.get_current_stream().synchronize()
            linear(x[(i + 1) % 2], weights[(i + 1) % 3], residual=residual, static_weight=static_weight)
            if wait:
                cupy.cuda.get_current_stream().synchronize()
        return [bits(a.get()) for a in (x[0], x[1], residual)]

    weights = [cupy.asarray(random(rng, (1024, 1024), np.float16, 1 / 32)) for _ in range(3)]
    for m in (1, 16, 40, 128):
        start = random(rng, (m, 1024), np.float16)
        want = run(static_weight=False, wait=True)
        for _ in range(5):
            for static_weight in (True, False):
                for got, wanted in zip(run(static_weight, wait=False), want):
                    np.testing.assert_array_equal(got, wanted, err_msg=f"M={m} static_weight={static_weight}")


@pytest.mark.gpu
def test_weight_written_by_the_kernel_ahead(rng: np.random.Generator) -> None:
    """Without the promise of `static_weight`, a weight may come from any kernel, our own included."""
    import cupy

    a, b = cupy.asarray(random(rng, (16, 512), np.float16)), cupy.asarray(random(rng, (512, 512), np.float16))
    x = cupy.asarray(random(rng, (3, 512), np.float16, 1 / 16))
    weight = cupy.empty((16, 512), np.float16)
    for scale in range(1, 60):
        scaled = a * np.float16(scale / 64)
        cupy.cuda.get_current_stream().synchronize()
        linear(scaled, b, out=weight)
        y = linear(x, weight, dtype=np.float32)
        cupy.cuda.get_current_stream().synchronize()
        np.testing.assert_array_equal(y.get(), linear(x, weight, dtype=np.float32).get())


@pytest.mark.gpu
def test_offsets_past_32_bits() -> None:
    """Rows of the result past element 2^31 equal the same rows alone."""
    import cupy

    m, n, k = 14200, 151936, 16
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 6 << 30:
        pytest.skip("needs 6 GB of free GPU memory")
    x = cupy.random.standard_normal((m, k), dtype=np.float32).astype(np.float16)
    w = cupy.random.standard_normal((n, k), dtype=np.float32).astype(np.float16)
    y = linear(x, w)
    assert bool((y[-3:] == linear(x[-3:], w)).all())
