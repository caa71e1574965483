"""rms_norm against float64, and bit for bit against the order of sums that docs/numerics.md fixes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cukern import ops, reference
from cukern.testing import assert_close

HALF, BF16, FLOAT = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
EPS = 1e-6


def contract(x: np.ndarray, weight: np.ndarray, eps: float = EPS) -> np.ndarray:
    """Item 3 of docs/numerics.md in NumPy float32: 256 virtual lanes of 4 columns, butterflies, 8 groups ascending."""
    rows, columns = x.shape
    steps = -(-columns // 1024)
    padded = np.zeros((rows, steps * 1024), np.float32)
    padded[:, :columns] = x.astype(np.float32)
    lanes = padded.reshape(rows, steps, 256, 4)
    sums = np.zeros((rows, 256), np.float32)
    for step in range(steps):
        for element in range(4):
            value = lanes[:, step, :, element].astype(np.float64)
            sums = (value * value + sums).astype(np.float32)  # fma: the product is exact in float64
    groups = sums.reshape(rows, 8, 32)
    for width in (16, 8, 4, 2, 1):
        groups = groups + groups[:, :, np.arange(32) ^ width]
    total = np.zeros(rows, np.float32)
    for group in range(8):
        total = total + groups[:, group, 0]
    scale = np.float32(1) / np.sqrt(total / np.float32(columns) + np.float32(eps))
    return (x.astype(np.float32) * scale[:, None]) * weight


def make(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    x = (rng.standard_normal(shape) * 2).astype(dtype)
    return x, rng.uniform(0.5, 1.5, shape[-1]).astype(np.float32)


SHAPES = [
    (3, 1024),  # one step
    (2, 3, 8),
    (4, 77),  # element by element
    (1, 1),
    (2, 1028),  # vectors for float32, elements for halves
    (2, 3072),  # several steps in registers
    (1, 5120),
    (1, 16384),
    (1, 17416),  # longer than the registers hold
    (1, 4099),
]


@pytest.mark.parametrize("dtype", [HALF, BF16, FLOAT], ids=lambda d: d.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_accuracy(backend: Any, rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> None:
    x, weight = make(rng, shape, dtype)
    result = ops.rms_norm(backend.put(x), backend.put(weight), EPS)
    assert result.shape == shape
    assert result.dtype == dtype
    assert_close("rms_norm", backend.get(result), reference.rms_norm(x.astype(np.float64), weight, EPS))


@pytest.mark.parametrize("columns", [8, 77, 1024, 1152, 2048, 5000, 17416, 4099])
@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=lambda d: d.name)
def test_order_of_sums(backend: Any, rng: np.random.Generator, columns: int, dtype: np.dtype) -> None:
    """Every variant gives the bits of the contract, for one row and for a row in a batch."""
    x, weight = make(rng, (3, columns), HALF)  # halves, so that squares are exact in the oracle's float64
    want = contract(x, weight)
    x = x.astype(dtype)
    batch = backend.get(ops.rms_norm(backend.put(x), backend.put(weight), EPS, dtype=np.float32))
    alone = backend.get(ops.rms_norm(backend.put(x[1:2]), backend.put(weight), EPS, dtype=np.float32))
    np.testing.assert_array_equal(batch, want)
    np.testing.assert_array_equal(alone, want[1:2])


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=lambda d: d.name)
@pytest.mark.parametrize(("rows", "columns"), [(60, 1024), (30, 3072), (20, 8192), (4, 17416), (1030, 1024)])
def test_order_of_sums_16_bit(backend: Any, rng: np.random.Generator, rows: int, columns: int, dtype: np.dtype) -> None:
    """The variants with two virtual lanes a thread; their result is rounded, but in 40,000 elements an order shows."""
    x, weight = make(rng, (rows, columns), HALF)
    x = x.astype(dtype)
    result = backend.get(ops.rms_norm(backend.put(x), backend.put(weight), EPS))
    np.testing.assert_array_equal(result, contract(x, weight).astype(dtype))


@pytest.mark.parametrize(("columns", "dtype", "out"), [(64, HALF, HALF), (128, BF16, FLOAT), (1024, FLOAT, HALF)])
def test_many_rows(backend: Any, rng: np.random.Generator, columns: int, dtype: np.dtype, out: np.dtype) -> None:
    """The variant for many short rows, with a last block that is not full: the same bits as a few rows."""
    x, weight = make(rng, (1027, columns), dtype)
    put = backend.put(weight)
    result = backend.get(ops.rms_norm(backend.put(x), put, EPS, dtype=out))
    assert_close("rms_norm", result, reference.rms_norm(x.astype(np.float64), weight, EPS))
    few = [0, 1, 513, 1026]
    np.testing.assert_array_equal(backend.get(ops.rms_norm(backend.put(x[few]), put, EPS, dtype=out)), result[few])


@pytest.mark.parametrize(
    ("dtype", "out"), [(HALF, HALF), (HALF, FLOAT), (BF16, BF16), (FLOAT, HALF), (FLOAT, BF16), (FLOAT, FLOAT)]
)
@pytest.mark.parametrize("shape", [(2, 3, 64), (2, 13), (1, 20000)], ids=str)
def test_residual(
    backend: Any, rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype, out: np.dtype
) -> None:
    x, weight = make(rng, shape, dtype)
    before = rng.standard_normal(shape).astype(np.float32)
    stream = backend.put(before)
    result = backend.get(ops.rms_norm(backend.put(x), backend.put(weight), EPS, residual=stream, dtype=out))
    after = before + x.astype(np.float32)
    np.testing.assert_array_equal(backend.get(stream), after)
    assert result.dtype == out
    assert_close("rms_norm", result, reference.rms_norm(after.astype(np.float64), weight, EPS))
    plain = backend.get(ops.rms_norm(backend.put(after), backend.put(weight), EPS, dtype=out))
    np.testing.assert_array_equal(result, plain)  # fused and separate: the same bits


def test_residual_many_rows(backend: Any, rng: np.random.Generator) -> None:
    x, weight = make(rng, (1025, 16), HALF)
    before = rng.standard_normal(x.shape).astype(np.float32)
    stream = backend.put(before)
    result = backend.get(ops.rms_norm(backend.put(x), backend.put(weight), EPS, residual=stream))
    np.testing.assert_array_equal(backend.get(stream), before + x.astype(np.float32))
    assert_close(
        "rms_norm", result, reference.rms_norm((before + x.astype(np.float32)).astype(np.float64), weight, EPS)
    )


@pytest.mark.parametrize("columns", [96, 97])
def test_out_and_in_place(backend: Any, rng: np.random.Generator, columns: int) -> None:
    x, weight = make(rng, (5, columns), BF16)
    want = backend.get(ops.rms_norm(backend.put(x), backend.put(weight), EPS))
    out = backend.put(np.full(x.shape, np.nan, BF16))
    assert ops.rms_norm(backend.put(x), backend.put(weight), EPS, out=out) is out
    np.testing.assert_array_equal(backend.get(out), want)
    same = backend.put(x)
    ops.rms_norm(same, backend.put(weight), EPS, out=same)
    np.testing.assert_array_equal(backend.get(same), want)


def test_strided_input(backend: Any, rng: np.random.Generator) -> None:
    base, _ = make(rng, (8, 64), HALF)
    put = backend.put(base)
    for view, expected in [
        (put[:, :24], base[:, :24]),
        (put[:, ::2], base[:, ::2]),
        (put.T, base.T),
        (put[::-1], base[::-1]),
        (put[3:4, 1:9], base[3:4, 1:9]),  # contiguous, but not aligned
    ]:
        weight = np.linspace(0.5, 1.5, view.shape[-1], dtype=np.float32)
        result = ops.rms_norm(view, backend.put(weight), EPS)
        assert_close("rms_norm", backend.get(result), reference.rms_norm(expected.astype(np.float64), weight, EPS))


def test_large_and_special_values(backend: Any) -> None:
    """Squares past the range of fp16; a NaN or an infinity stays in its row; a row of zeros gives zeros."""
    x = np.zeros((4, 16), np.float16)
    x[0] = 60000
    x[1, 3] = np.nan
    x[3] = -1
    result = backend.get(ops.rms_norm(backend.put(x), backend.put(np.ones(16, np.float32)), EPS))
    np.testing.assert_array_equal(result[0], np.float16(1))
    assert np.isnan(result[1]).all()
    np.testing.assert_array_equal(result[2], np.float16(0))
    np.testing.assert_array_equal(result[3], np.float16(-1))


def test_one_rounding(backend: Any, rng: np.random.Generator) -> None:
    """The weight is applied before the only rounding (not after rounding the normalised value)."""
    x, weight = make(rng, (4, 1024), BF16)
    result = backend.get(ops.rms_norm(backend.put(x), backend.put(weight), EPS))
    np.testing.assert_array_equal(result, contract(x, weight).astype(BF16))
    twice = (contract(x, np.ones_like(weight)).astype(BF16).astype(np.float32) * weight).astype(BF16)
    assert (twice != result).any()


def test_many_tiny_rows(backend: Any, rng: np.random.Generator) -> None:
    """More rows than a grid's y axis has blocks."""
    x, weight = make(rng, (65539, 8), HALF)
    result = backend.get(ops.rms_norm(backend.put(x), backend.put(weight), EPS))
    assert_close("rms_norm", result, reference.rms_norm(x.astype(np.float64), weight, EPS))


def test_empty(backend: Any) -> None:
    weight = backend.put(np.ones(128, np.float32))
    result = ops.rms_norm(backend.put(np.empty((0, 128), np.float16)), weight)
    assert result.shape == (0, 128)
    assert result.dtype == HALF
    with pytest.raises(ValueError, match="at least one element"):
        ops.rms_norm(backend.put(np.empty((4, 0), np.float16)), backend.put(np.ones(0, np.float32)))


def test_bad_input(backend: Any) -> None:
    x, weight = backend.put(np.ones((2, 8), np.float16)), backend.put(np.ones(8, np.float32))
    with pytest.raises(TypeError, match="x has dtype int32"):
        ops.rms_norm(backend.put(np.ones((2, 8), np.int32)), weight)
    with pytest.raises(TypeError, match="weight has dtype float16"):
        ops.rms_norm(x, backend.put(np.ones(8, np.float16)))
    with pytest.raises(ValueError, match="weight has shape"):
        ops.rms_norm(x, backend.put(np.ones(9, np.float32)))
    with pytest.raises(ValueError, match="eps must be"):
        ops.rms_norm(x, weight, -1.0)
    with pytest.raises(ValueError, match="eps must be"):
        ops.rms_norm(x, weight, float("nan"))
    with pytest.raises(TypeError, match="dtype is bfloat16"):
        ops.rms_norm(x, weight, dtype=BF16)
    with pytest.raises(TypeError, match="residual has dtype float16"):
        ops.rms_norm(x, weight, residual=x)
    with pytest.raises(ValueError, match="residual has shape"):
        ops.rms_norm(x, weight, residual=backend.put(np.ones((2, 4), np.float32)))
    with pytest.raises(ValueError, match="residual must be C-contiguous"):
        ops.rms_norm(x, weight, residual=backend.put(np.ones((2, 16), np.float32))[:, ::2])
    with pytest.raises(ValueError, match="out must be C-contiguous"):
        ops.rms_norm(x, weight, out=backend.put(np.ones((2, 16), np.float16))[:, ::2])
    with pytest.raises(ValueError, match="out has shape"):
        ops.rms_norm(x, weight, out=backend.put(np.ones((2, 9), np.float16)))
    with pytest.raises(TypeError, match="x must be a CuPy or NumPy array"):
        ops.rms_norm([[1.0]], weight)


def test_numpy_takes_the_reference(rng: np.random.Generator) -> None:
    x, weight = make(rng, (3, 40), HALF)
    for dtype in (np.float16, np.float32, np.float64):
        result = ops.rms_norm(x.astype(dtype), weight, EPS)
        assert result.dtype == dtype
        assert_close("rms_norm", result, reference.rms_norm(x.astype(np.float64), weight, EPS))
    stream = np.ones((3, 40), np.float32)
    ops.rms_norm(x, weight, EPS, residual=stream)
    np.testing.assert_array_equal(stream, 1 + x.astype(np.float32))


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_two_to_the_31_elements() -> None:
    import cupy

    rows, columns = 2**21 + 3, 1024
    if cupy.cuda.runtime.memGetInfo()[0] < 5 * rows * columns:
        pytest.skip("needs 11 GB of GPU memory")
    x = cupy.ones((rows, columns), np.float16)
    x[-1] = cupy.linspace(-1, 1, columns)
    weight = cupy.linspace(0.5, 1.5, columns, dtype=np.float32)
    result = ops.rms_norm(x, weight)
    cupy.testing.assert_array_equal(result[-1:], ops.rms_norm(x[-1:].copy(), weight))
    cupy.testing.assert_array_equal(result[0], result[-2])
