"""swiglu against float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cukern import ops, reference
from cukern.testing import assert_close

HALF, BF16, FLOAT = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
DTYPES = pytest.mark.parametrize("dtype", [HALF, BF16, FLOAT], ids=lambda d: d.name)


@DTYPES
@pytest.mark.parametrize("shape", [(3, 128), (2, 3, 2064), (5, 26), (1, 2), (2, 6144), (4, 8)], ids=str)
def test_accuracy(backend: Any, rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> None:
    gate_up = (rng.standard_normal(shape) * 3).astype(dtype)
    result = ops.swiglu(backend.put(gate_up))
    assert result.shape == (*shape[:-1], shape[-1] // 2)
    assert result.dtype == dtype
    assert_close("swiglu", backend.get(result), reference.swiglu(gate_up.astype(np.float64)), scale=4)


def test_relative_accuracy(backend: Any) -> None:
    """In float32, where no rounding hides it, over the range in which silu is not negligible."""
    gate = np.linspace(-60, 60, 4096, dtype=np.float32)
    result = backend.get(ops.swiglu(backend.put(np.concatenate([gate, np.ones_like(gate)])[None])))
    want = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64)))
    np.testing.assert_allclose(result[0], want, rtol=1e-5, atol=1e-20)


def test_every_half(backend: Any) -> None:
    """All finite fp16 gates, the largest ones too: never a NaN, and a gate far below zero gives zero."""
    gate = np.arange(65536, dtype=np.uint16).view(np.float16)
    gate = gate[np.isfinite(gate)]
    result = backend.get(ops.swiglu(backend.put(np.stack([gate, np.ones_like(gate)], -1))))[:, 0]
    want = reference.swiglu(np.stack([gate, np.ones_like(gate)], -1).astype(np.float64))[:, 0]
    np.testing.assert_allclose(result.astype(np.float64), want, rtol=2**-10, atol=2**-24)
    assert (result[gate < -30] == 0).all()


@DTYPES
def test_one_row_alone(backend: Any, rng: np.random.Generator, dtype: np.dtype) -> None:
    gate_up = rng.standard_normal((9, 2 * 1040)).astype(dtype)
    batch = backend.get(ops.swiglu(backend.put(gate_up)))
    np.testing.assert_array_equal(backend.get(ops.swiglu(backend.put(gate_up[7:8]))), batch[7:8])


def test_nan_stays_in_place(backend: Any, rng: np.random.Generator) -> None:
    gate_up = rng.standard_normal((3, 32)).astype(np.float16)
    gate_up[1, 4] = np.nan
    result = backend.get(ops.swiglu(backend.put(gate_up)))
    np.testing.assert_array_equal(np.argwhere(np.isnan(result)), [[1, 4]])


def test_strided_and_out(backend: Any, rng: np.random.Generator) -> None:
    base = rng.standard_normal((12, 64)).astype(BF16)
    put = backend.put(base)
    for view, same in [(put[::-1, :36], base[::-1, :36]), (put.T, base.T), (put[:, ::2], base[:, ::2])]:
        assert_close("swiglu", backend.get(ops.swiglu(view)), reference.swiglu(same.astype(np.float64)), scale=4)
    out = backend.put(np.full((12, 32), np.nan, BF16))
    assert ops.swiglu(put, out=out) is out
    np.testing.assert_array_equal(backend.get(out), backend.get(ops.swiglu(put)))


def test_many_tiny_rows(backend: Any, rng: np.random.Generator) -> None:
    gate_up = rng.standard_normal((70001, 6)).astype(np.float16)
    result = backend.get(ops.swiglu(backend.put(gate_up)))
    assert_close("swiglu", result, reference.swiglu(gate_up.astype(np.float64)), scale=4)


def test_empty(backend: Any) -> None:
    for shape, want in [((0, 16), (0, 8)), ((4, 0), (4, 0))]:
        result = ops.swiglu(backend.put(np.empty(shape, np.float16)))
        assert result.shape == want
        assert result.dtype == HALF


def test_bad_input(backend: Any) -> None:
    with pytest.raises(TypeError, match="gate_up has dtype int64"):
        ops.swiglu(backend.put(np.ones((2, 4), np.int64)))
    with pytest.raises(ValueError, match="expected an even last axis"):
        ops.swiglu(backend.put(np.ones((2, 5), np.float16)))
    with pytest.raises(ValueError, match="expected an even last axis"):
        ops.swiglu(backend.put(np.float16(1).reshape(())))
    with pytest.raises(ValueError, match="out has shape"):
        ops.swiglu(backend.put(np.ones((2, 8), np.float16)), out=backend.put(np.ones((2, 8), np.float16)))
    with pytest.raises(ValueError, match="out must be C-contiguous"):
        ops.swiglu(backend.put(np.ones((2, 8), np.float16)), out=backend.put(np.ones((2, 8), np.float16))[:, ::2])


def test_numpy_takes_the_reference(rng: np.random.Generator) -> None:
    gate_up = rng.standard_normal((3, 10))
    for dtype in (np.float32, np.float64, HALF, BF16):
        result = ops.swiglu(gate_up.astype(dtype))
        assert result.dtype == dtype
        assert_close("swiglu", result, reference.swiglu(gate_up.astype(dtype).astype(np.float64)), scale=4)


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_two_to_the_31_elements() -> None:
    import cupy

    rows, columns = 80000, 36864
    if cupy.cuda.runtime.memGetInfo()[0] < 4 * rows * columns:
        pytest.skip("needs 12 GB of GPU memory")
    gate_up = cupy.ones((rows, columns), np.float16)
    gate_up[-1] = cupy.linspace(-3, 3, columns)
    result = ops.swiglu(gate_up)
    cupy.testing.assert_array_equal(result[-1:], ops.swiglu(gate_up[-1:].copy()))
    cupy.testing.assert_array_equal(result[0], result[-2])
