"""Linear layer: values against float64, one order of summation whatever kernel runs, arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cukern.ops import _linear_variants as variants
from cukern.ops import linear as linear_function
from cukern.ops._linear_variants import RowsVariant, TileVariant
from cukern.ops.linear import _linear_variant, _plan, kernel_variants, linear
from cukern.reference.linear import linear as reference
from cukern.testing import assert_close

HALVES = [np.float16, ml_dtypes.bfloat16]

# One of each structure: both kernels, both operand roles, one and several slots, warps and stages.
FORCED = [
    TileVariant(64, 64, 64, 32, 32, 4, 2),
    TileVariant(128, 64, 32, 64, 32, 4, 2),
    TileVariant(128, 128, 32, 64, 32, 4),
    RowsVariant(8, 8, 1, 4, 64, 4),
    RowsVariant(8, 32, 1, 2, 64, 3, weight_a=True),
    RowsVariant(8, 32, 2, 1, 128, 4, weight_a=True),
    RowsVariant(16, 16, 2, 1, 128, 3),
    RowsVariant(16, 16, 1, 3, 64, 2, weight_a=True),
    RowsVariant(32, 16, 1, 1, 64, 3),
    RowsVariant(64, 32, 2, 2, 64, 3),
    RowsVariant(64, 16, 1, 1, 64, 3, weight_a=True),
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
    _plan.cache_clear()
    variants.select.cache_clear()
    monkeypatch.setattr("cukern.ops._numerics.LARGE_WEIGHT", 1)
    yield
    _plan.cache_clear()
    variants.select.cache_clear()


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
        (5, 257, 257),
        (16, 64, 528),
        (64, 24, 528),
        (100, 72, 96),
        (257, 33, 15),
        (130, 257, 264),
    ],
)
def test_values(backend: Any, rng: np.random.Generator, dtype: Any, m: int, n: int, k: int) -> None:
    x, w, expected = problem(rng, m, n, k, dtype)
    for out_dtype in (dtype, np.float32):
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


def test_unaligned_weight(backend: Any, rng: np.random.Generator) -> None:
    """A weight cut out of a file may start anywhere."""
    x, w, _ = problem(rng, 9, 8, 64, np.float16)
    flat = backend.put(np.concatenate([np.zeros(1, np.float16), w.ravel()]))
    y = backend.get(linear(backend.put(x), flat[1:].reshape(8, 64)))
    np.testing.assert_array_equal(y, backend.get(linear(backend.put(x), backend.put(w))))


def test_zero_rows(backend: Any) -> None:
    put = backend.put
    w = put(np.zeros((8, 16), np.float16))
    assert linear(put(np.zeros((0, 16), np.float16)), w).shape == (0, 8)
    assert linear(put(np.zeros((4, 0, 16), np.float16)), w, dtype=np.float32).shape == (4, 0, 8)
    empty = linear(put(np.zeros((3, 16), np.float16)), put(np.zeros((0, 16), np.float16)))
    assert empty.shape == (3, 0)
    assert empty.dtype == np.float16


@pytest.mark.parametrize(("dtype", "rounded"), [(np.float16, np.inf), (ml_dtypes.bfloat16, 70144.0)])
@pytest.mark.parametrize("m", [1, 65])
def test_sums_are_float32(backend: Any, dtype: Any, rounded: float, m: int) -> None:
    """A half-precision running sum of ones stops at 2048 (fp16) or 256 (bf16)."""
    put = backend.put
    for k, want in ((8192, 8192.0), (70000, rounded)):
        if k == 70000 and m > 1 and backend.name == "emulated":
            continue  # the tile kernel's chain is long enough at 8192
        x, w = put(np.ones((m, k), dtype)), put(np.ones((3, k), dtype))
        assert (backend.get(linear(x, w)).astype(np.float32) == want).all()
        assert (backend.get(linear(x, w, dtype=np.float32)) == k).all()
    alternating = put((np.resize([300.0, -300.0], (m, 8192))).astype(dtype))
    assert (backend.get(linear(alternating, put(np.full((3, 8192), 300, dtype)))) == 0).all()


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
    segment = variants.template_segment(n, k)
    for variant in [v for v in FORCED if v.fits(segment)]:
        for m in (1, 8, 9, 70):
            y = backend.get(_linear_variant(variant, backend.put(x[:m]), weight, dtype=np.float32))
            np.testing.assert_array_equal(bits(y), bits(every[:m]), err_msg=f"{variant} M={m}")


@pytest.mark.parametrize(
    ("dtype", "n", "k"), [(np.float16, 40, 1040), (ml_dtypes.bfloat16, 40, 528), (np.float16, 33, 257)]
)
def test_variants_give_equal_bits(backend: Any, rng: np.random.Generator, dtype: Any, n: int, k: int) -> None:
    check_variants(backend, rng, dtype, n, k)


@pytest.mark.usefixtures("whole_k")
@pytest.mark.parametrize(("dtype", "n", "k"), [(np.float16, 33, 257), (ml_dtypes.bfloat16, 40, 520)])
def test_variants_give_equal_bits_without_segments(
    backend: Any, rng: np.random.Generator, dtype: Any, n: int, k: int
) -> None:
    check_variants(backend, rng, dtype, n, k)


@pytest.mark.parametrize("dtype", HALVES)
def test_row_does_not_depend_on_the_batch(backend: Any, rng: np.random.Generator, dtype: Any) -> None:
    x, w, _ = problem(rng, 200, 48, 784, dtype)
    weight = backend.put(w)
    batch = backend.get(linear(backend.put(x), weight, dtype=np.float32))
    for first, last in ((0, 1), (199, 200), (3, 11), (1, 17), (100, 133), (7, 71), (64, 192)):
        part = backend.get(linear(backend.put(x[first:last]), weight, dtype=np.float32))
        np.testing.assert_array_equal(bits(part), bits(batch[first:last]))
    shuffled = rng.permutation(200)
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


@pytest.mark.parametrize("variant", FORCED, ids=str)
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
@pytest.mark.parametrize("variant", [v for v in FORCED if v.fits(0)], ids=str)
def test_large_weight_is_one_chain(backend: Any, variant: variants.Variant) -> None:
    x, w = segment_probe(1024, {0: 1.0, 256: TINY, 272: TINY})
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
    segment = variants.template_segment(n, k)
    for m in (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 300, 2048, 8192):
        for sm_count in (8, 46, 132, 170):
            chosen = variants.select(m, n, k, aligned, sm_count)
            assert chosen.fits(segment)
            assert chosen.shared_mem(m, k, segment) <= 99 << 10
            assert chosen.threads <= 1024
            assert isinstance(chosen, TileVariant) == (m > variants.ROWS_MAX_M)


def test_largest_variants_do_not_spill() -> None:
    from cukern import jit

    # by accumulators per thread: (…, WM, WN, stages, blocks, Segment, aligned)
    tiles = [v for v in kernel_variants() if v[1] == "linear_tile" and v[2][0] == "half"]
    largest = [v for v in tiles if int(v[2][5]) * int(v[2][6]) * (2 if v[2][9] else 1) >= 4096]
    assert len(largest) >= 4
    for file, name, template, _ in largest:
        usage = jit.Kernel(jit.kernels_src() / file, name, template=template, arch="sm_80").resources
        assert usage.spill_stores == 0, template
        assert usage.registers <= 255, template


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
        (ValueError, "not both", {"out": result, "residual": result}),
        (ValueError, "backend", {"backend": "magic"}),
        (ValueError, "K = 0", {"x": put(np.ones((3, 0), np.float16)), "weight": put(np.ones((8, 0), np.float16))}),
    ):
        with pytest.raises(error, match=message):
            linear(**{"x": x, "weight": w, **arguments})
    if backend.name == "emulated":
        with pytest.raises(RuntimeError, match="cublas"):
            linear(x, w, backend="cublas")
    with pytest.raises(ValueError, match="cannot run"):
        _linear_variant(RowsVariant(8, 8, 1, 4, 64, 4), put(np.ones((1, 16), np.float16)), w)


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
