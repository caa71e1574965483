"""embedding: an exact copy of rows."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cukern import ops

HALF, BF16, FLOAT = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)


@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("dtype", "out"), [(HALF, HALF), (HALF, FLOAT), (BF16, BF16), (BF16, FLOAT), (FLOAT, FLOAT)], ids=str
)
def test_rows(backend: Any, rng: np.random.Generator, dtype: np.dtype, out: np.dtype, index: type) -> None:
    for ids_shape, width in [((5,), 64), ((2, 3), 1032), ((7,), 13), ((1,), 1), ((), 8)]:
        weight = rng.standard_normal((19, width)).astype(dtype)
        ids = rng.integers(0, 19, ids_shape, dtype=index)
        result = backend.get(ops.embedding(backend.put(ids), backend.put(weight), dtype=out))
        assert result.dtype == out
        np.testing.assert_array_equal(result, weight[ids].astype(out))


def test_every_bit_pattern(backend: Any) -> None:
    """Infinities, subnormals and the payloads of NaNs are copied too."""
    for dtype in (HALF, BF16):
        weight = np.arange(65536, dtype=np.uint16).reshape(64, 1024).view(dtype)
        ids = np.arange(64, dtype=np.int32)[::-1].copy()
        result = backend.get(ops.embedding(backend.put(ids), backend.put(weight)))
        np.testing.assert_array_equal(bits(result), bits(weight)[ids])


def test_ids_out_of_range(backend: Any, rng: np.random.Generator) -> None:
    """On the device: a row of NaN, no stray read, and the other rows as ever."""
    weight = rng.standard_normal((6, 24)).astype(np.float16)
    for index, far in ((np.int32, 2**31 - 1), (np.int64, 2**62)):
        ids = np.array([0, -1, 5, 6, far, -far, 2], index)
        for out in (HALF, FLOAT):
            result = backend.get(ops.embedding(backend.put(ids), backend.put(weight), dtype=out))
            inside = (ids >= 0) & (ids < 6)
            np.testing.assert_array_equal(result[inside], weight[ids[inside]].astype(out))
            assert np.isnan(result[~inside]).all()


def test_ids_out_of_range_numpy() -> None:
    weight = np.ones((6, 4), np.float16)
    for bad in (-1, 6):
        with pytest.raises(IndexError, match=rf"ids contains {bad}, expected 0 to 5"):
            ops.embedding(np.array([0, bad]), weight)


def test_strided_and_out(backend: Any, rng: np.random.Generator) -> None:
    weight, ids = rng.standard_normal((9, 16)).astype(BF16), np.arange(18, dtype=np.int64) % 9
    result = ops.embedding(backend.put(ids)[::-3], backend.put(weight)[:, ::2])
    np.testing.assert_array_equal(backend.get(result), weight[:, ::2][ids[::-3]])
    out = backend.put(np.full((18, 16), np.nan, np.float32))
    assert ops.embedding(backend.put(ids), backend.put(weight), out=out) is out
    np.testing.assert_array_equal(backend.get(out), weight[ids].astype(np.float32))


def test_many_tiny_rows(backend: Any, rng: np.random.Generator) -> None:
    weight, ids = rng.standard_normal((11, 8)).astype(np.float16), rng.integers(0, 11, 70001)
    np.testing.assert_array_equal(backend.get(ops.embedding(backend.put(ids), backend.put(weight))), weight[ids])


def test_empty(backend: Any) -> None:
    weight = backend.put(np.ones((4, 8), np.float16))
    assert ops.embedding(backend.put(np.empty((0, 3), np.int32)), weight).shape == (0, 3, 8)
    assert ops.embedding(backend.put(np.zeros(3, np.int32)), weight[:, :0]).shape == (3, 0)
    nothing = ops.embedding(backend.put(np.zeros(2, np.int32)), weight[:0])  # a table without rows
    assert np.isnan(backend.get(nothing)).all()


def test_bad_input(backend: Any) -> None:
    ids, weight = backend.put(np.zeros(3, np.int32)), backend.put(np.ones((4, 8), np.float16))
    with pytest.raises(TypeError, match="ids has dtype float32"):
        ops.embedding(backend.put(np.zeros(3, np.float32)), weight)
    with pytest.raises(TypeError, match="weight has dtype int8"):
        ops.embedding(ids, backend.put(np.ones((4, 8), np.int8)))
    with pytest.raises(ValueError, match="weight has shape"):
        ops.embedding(ids, weight[0])
    with pytest.raises(TypeError, match="dtype is bfloat16, expected float16"):
        ops.embedding(ids, weight, dtype=BF16)
    with pytest.raises(ValueError, match="out has shape"):
        ops.embedding(ids, weight, out=backend.put(np.ones((3, 4), np.float16)))
    with pytest.raises(TypeError, match="out has dtype float16"):
        ops.embedding(ids, weight, dtype=np.float32, out=backend.put(np.ones((3, 8), np.float16)))


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_two_to_the_31_elements() -> None:
    import cupy

    rows, columns = 2**21 + 3, 1024
    if cupy.cuda.runtime.memGetInfo()[0] < 10 * rows * columns:
        pytest.skip("needs 22 GB of GPU memory")
    weight = cupy.zeros((rows, columns), np.float16)
    weight[-2:] = cupy.arange(2 * columns, dtype=np.float16).reshape(2, columns)
    ids = cupy.arange(rows)
    result = ops.embedding(ids, weight)
    cupy.testing.assert_array_equal(result[-3:], weight[-3:])
