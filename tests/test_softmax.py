"""softmax, log_softmax and token_logprobs against float64, and bit for bit against docs/numerics.md."""

from __future__ import annotations

import importlib
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cukern
from cukern import ops, reference
from cukern.ops._arrays import place_arrays
from cukern.ops._numerics import VOCAB_TILE
from cukern.ops._vocab import tile_pass
from cukern.testing import assert_close

HALF, BF16, FLOAT = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
DTYPES = pytest.mark.parametrize("dtype", [HALF, BF16, FLOAT], ids=lambda d: d.name)
WIDTHS = [1, 2, 7, 31, 128, 255, 1000, 1024, 1025, 4099, 5000, 16383, 16385, 32768, 40004]
VOCAB = 151936
INF, NAN = math.inf, math.nan


def logits_of(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype, scale: float = 5.0) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(dtype)


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


def tile_contract(x: np.ndarray) -> np.ndarray:
    """(m, s) of the tiles of rows, with exp2 for exp: item 4 of docs/numerics.md in NumPy float32."""
    rows, columns = x.shape
    tiles = -(-columns // 1024)
    padded = np.full((rows, tiles * 1024), -np.inf, np.float32)
    padded[:, :columns] = x
    m = padded.reshape(rows, tiles, 1024).max(2)
    e = np.exp2(padded.reshape(rows, tiles, 8, 32, 4) - m[:, :, None, None, None])
    lanes = (e[..., 0] + e[..., 1]) + (e[..., 2] + e[..., 3])
    for step in (16, 8, 4, 2, 1):
        lanes = lanes + lanes[..., np.arange(32) ^ step]
    s = lanes[:, :, 0, 0]
    for group in range(1, 8):
        s = s + lanes[:, :, group, 0]
    return np.stack([m, s], axis=2)


def combine_contract(tiles: np.ndarray) -> np.ndarray:
    """(M, S) of one row from its tiles: lane i adds tiles i, i + 32, ... by fma, then a butterfly."""
    m = tiles[:, 0].max()
    lanes = np.zeros(32, np.float32)
    for t, (tile_m, tile_s) in enumerate(tiles):
        scaled = np.float64(tile_s) * np.float64(np.exp2(tile_m - m))  # exact in float64
        lanes[t % 32] = np.float32(scaled + np.float64(lanes[t % 32]))
    for step in (16, 8, 4, 2, 1):
        lanes = lanes + lanes[np.arange(32) ^ step]
    return np.array([m, lanes[0]], np.float32)


COMBINE = """
#include "common/vocab.cuh"
extern "C" __global__ void combine(const float *tiles, float *out, int count) {
  const float2 row = combine_tiles<2>(reinterpret_cast<const float2 *>(tiles), count, 1.f);
  if (threadIdx.x == 0) { out[0] = row.x; out[1] = row.y; }
}
"""


@pytest.mark.parametrize("columns", [5, 1024, 3000, 40001])
def test_order_of_sums(backend: Any, rng: np.random.Generator, columns: int) -> None:
    # At temperature log2(e) the factor is 1: whole numbers give exact powers of two, whose sums depend on the order.
    x = -rng.integers(0, 30, (2, columns)).astype(np.float32)
    place, (logits,) = place_arrays("test", x=backend.put(x))
    log2e = float(np.float32(1.4426950408889634))
    tiles, maxima = tile_pass(logits, place, None, log2e, otherwise=NAN, group_maxima=True)
    got = backend.get(tiles)
    np.testing.assert_array_equal(got.view(np.uint32), tile_contract(x).view(np.uint32))
    padded = np.full((2, got.shape[1] * 1024), -np.inf, np.float32)
    padded[:, :columns] = x
    np.testing.assert_array_equal(backend.get(maxima), padded.reshape(2, -1, 128).max(2))
    combined = backend.put(np.full(2, np.nan, np.float32))
    cukern.Kernel(COMBINE, "combine")(1, 32, (backend.put(got[0]), combined, got.shape[1]))
    np.testing.assert_array_equal(backend.get(combined), combine_contract(got[0]))


def test_order_matters() -> None:
    """The control of the test above: adding the same powers of two in another order gives other bits."""
    x = -np.random.default_rng(0).integers(0, 30, (1, 1024)).astype(np.float32)
    s = tile_contract(x)[0, 0, 1]
    forward = np.float32(0)
    for value in np.exp2(x[0] - x.max()):
        forward += value
    assert s != forward


def test_tile_width_of_the_header() -> None:
    source = (cukern.jit.kernels_src() / "common" / "vocab.cuh").read_text()
    assert f"constexpr int VOCAB_TILE = {VOCAB_TILE};" in source


@DTYPES
@pytest.mark.parametrize("columns", WIDTHS)
def test_softmax(backend: Any, rng: np.random.Generator, dtype: np.dtype, columns: int) -> None:
    x = logits_of(rng, (2, 3, columns) if columns < 5000 else (2, columns), dtype)
    out = backend.put(np.full(x.shape, np.nan, dtype))
    assert ops.softmax(backend.put(x), out=out) is out
    assert_close("softmax", backend.get(out), reference.softmax(wide(x)))
    log = ops.log_softmax(backend.put(x))
    assert log.dtype == dtype
    assert_close("log_softmax", backend.get(log), reference.log_softmax(wide(x)))
    exact = backend.get(ops.log_softmax(backend.put(x), dtype=np.float32))
    assert np.abs(exact - reference.log_softmax(wide(x))).max() < 1e-5
    assert (exact <= 0).all()


def test_rows_do_not_depend_on_the_batch(backend: Any, rng: np.random.Generator) -> None:
    for columns in (37, 900, 2049, 33000):
        x = logits_of(rng, (11 if columns < 1000 else 3, columns), FLOAT)
        together = backend.get(ops.softmax(backend.put(x)))
        for i in (0, len(x) - 1):
            alone = backend.get(ops.softmax(backend.put(x[i])))
            np.testing.assert_array_equal(alone.view(np.uint32), together[i].view(np.uint32))


def test_one_result_in_all_kernels(backend: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of one block a row, the two kernels for long rows, and token_logprobs."""
    for columns in (700, 5002, 9000):
        x = logits_of(rng, (2, columns), FLOAT)
        held = backend.get(ops.log_softmax(backend.put(x)))
        with monkeypatch.context() as patch:
            patch.setattr(importlib.import_module("cukern.ops.softmax"), "_MOST_TILES", {True: 0, False: 0})
            split = backend.get(ops.log_softmax(backend.put(x)))
        np.testing.assert_array_equal(held.view(np.uint32), split.view(np.uint32))
        targets = rng.integers(0, columns, 2)
        scored = backend.get(ops.token_logprobs(backend.put(x), backend.put(targets)))
        np.testing.assert_array_equal(scored.view(np.uint32), held[[0, 1], targets].view(np.uint32))


@pytest.mark.parametrize("columns", [1, 7, 31, 255, 1024, 3001, 33000])
def test_special_rows(backend: Any, columns: int) -> None:
    x = np.full((6, columns), -np.inf, np.float32)
    x[0, 0] = 0.0  # one finite element: exactly one-hot
    x[1, -1] = -7.5
    x[3, columns // 2] = np.inf
    x[4] = 1.0
    x[4, columns // 3] = np.nan
    x[5] = 3.0
    got = backend.get(ops.softmax(backend.put(x)))
    want = np.zeros((2, columns), np.float32)
    want[0, 0] = want[1, -1] = 1
    np.testing.assert_array_equal(got[:2], want)
    assert np.isnan(got[2:5]).all()  # nothing but -inf; +inf; NaN
    assert np.abs(got[5] - 1 / columns).max() <= 1e-6 / columns
    log = backend.get(ops.log_softmax(backend.put(x)))
    assert log[0, 0] == 0
    assert (log[0, 1:] == -np.inf).all()
    assert np.isnan(log[2:5]).all()


def test_large_and_negative_values(backend: Any) -> None:
    x = np.array([[3e38, 3e38, -3e38, 0], [-3e38, -3.1e38, -3.2e38, -3.4e38], [1e-42, 0, -1e-42, 0]], np.float32)
    got = backend.get(ops.softmax(backend.put(x)))
    np.testing.assert_array_equal(got, [[0.5, 0.5, 0, 0], [1, 0, 0, 0], [0.25] * 4])


def test_many_rows(backend: Any, rng: np.random.Generator) -> None:
    rows = 70000 if backend.name == "cuda" else 5003  # past the 65535 of grid.y
    x = logits_of(rng, (rows, 8), HALF)
    got = backend.get(ops.softmax(backend.put(x)))
    assert_close("softmax", got, reference.softmax(wide(x)))


def test_views_and_in_place(backend: Any, rng: np.random.Generator) -> None:
    base = backend.put(logits_of(rng, (6, 2050), FLOAT))
    for view in (base[:, :1025], base[::2], base[::-1], base.T, base[1:, 1:], base[:, ::3]):
        got = backend.get(ops.softmax(view))
        np.testing.assert_array_equal(got, backend.get(ops.softmax(backend.put(backend.get(view).copy()))))
        with pytest.raises(ValueError, match="out must be C-contiguous"):
            ops.softmax(backend.put(np.zeros(view.shape, np.float32)), out=view)
    for columns in (300, 2049, 33000):
        x = logits_of(rng, (2, columns), FLOAT)
        want = backend.get(ops.softmax(backend.put(x)))
        same = backend.put(x)
        ops.softmax(same, out=same)
        np.testing.assert_array_equal(backend.get(same), want)


def test_empty_and_bad_input(backend: Any) -> None:
    f32 = np.float32
    assert ops.softmax(backend.put(np.zeros((0, 128), f32))).shape == (0, 128)
    assert ops.log_softmax(backend.put(np.zeros((3, 0, 5), HALF))).shape == (3, 0, 5)
    assert ops.token_logprobs(backend.put(np.zeros((0, 9), f32)), backend.put(np.zeros(0, np.int32))).shape == (0,)
    x, targets = backend.put(np.zeros((2, 8), f32)), backend.put(np.zeros(2, np.int32))
    with pytest.raises(ValueError, match=r"softmax: x has shape \(4, 0\)"):
        ops.softmax(backend.put(np.zeros((4, 0), f32)))
    with pytest.raises(ValueError, match="softmax: x has shape"):
        ops.softmax(backend.put(np.zeros((), f32)))
    with pytest.raises(TypeError, match="x has dtype float64"):
        ops.softmax(backend.put(np.zeros((2, 8))))
    with pytest.raises(TypeError, match="dtype is float16"):
        ops.log_softmax(x, dtype=np.float16)
    with pytest.raises(ValueError, match="out has shape"):
        ops.softmax(x, out=backend.put(np.zeros((2, 9), f32)))
    with pytest.raises(TypeError, match="out has dtype float16"):
        ops.softmax(x, out=backend.put(np.zeros((2, 8), HALF)))
    with pytest.raises(ValueError, match="logits has shape"):
        ops.token_logprobs(backend.put(np.zeros((2, 0), f32)), targets)
    with pytest.raises(ValueError, match="targets has shape"):
        ops.token_logprobs(x, backend.put(np.zeros(3, np.int32)))
    with pytest.raises(TypeError, match="targets has dtype float32"):
        ops.token_logprobs(x, backend.put(np.zeros(2, f32)))
    for bad in (0, 0.0, -1.0, NAN, INF, np.array([1.0, 0.0]), np.array([NAN, 1.0])):
        with pytest.raises(ValueError, match="temperature must be positive and finite"):
            ops.token_logprobs(x, targets, bad)
    with pytest.raises(TypeError, match="temperature must be a number"):
        ops.token_logprobs(x, targets, "1")
    with pytest.raises(ValueError, match="temperature has shape"):
        ops.token_logprobs(x, targets, np.ones(3))


@DTYPES
def test_token_logprobs_of_a_vocabulary(backend: Any, rng: np.random.Generator, dtype: np.dtype) -> None:
    x = logits_of(rng, (4, VOCAB), dtype, 3.0)
    x[0, 77] = 40  # probability near 1
    targets = np.array([77, VOCAB - 1, int(x[2].argmin()), 0], np.int64)
    for temperature in (1.0, 0.6, np.array([1.0, 0.3, 2.0, 0.05])):
        want = reference.token_logprobs(wide(x), targets, temperature)
        put = backend.put(temperature.astype(np.float32)) if isinstance(temperature, np.ndarray) else temperature
        got = backend.get(ops.token_logprobs(backend.put(x), backend.put(targets), put))
        assert got.dtype == np.float32
        assert (got <= 0).all()
        assert (np.abs(got - want) <= 1e-5 + 2e-7 * np.abs(want)).all(), (got, want)


def test_temperature_divides_the_logits(backend: Any) -> None:
    logits, targets = backend.put(np.array([[1, 0]], np.float32)), backend.put(np.array([0], np.int32))
    got = float(backend.get(ops.token_logprobs(logits, targets, 0.6))[0])
    assert abs(got - -0.17301) < 1e-5  # raw: -0.31326; raw / T: -0.52210


def test_targets_outside_the_row(backend: Any) -> None:
    x = np.arange(40, dtype=np.float32).reshape(8, 5)
    for dtype in (np.int32, np.int64):
        targets = np.array([-100, 0, 5, -1, 4, -5, 2**31 - 1, 3], dtype)
        got = backend.get(ops.token_logprobs(backend.put(x), backend.put(targets)))
        np.testing.assert_array_equal(np.isnan(got), [True, False, True, True, False, True, True, False])
        want = reference.log_softmax(wide(x))
        for row in (1, 4, 7):
            assert abs(got[row] - want[row, targets[row]]) < 1e-6
    wrapped = np.array([2**32 + 1, -(2**33)] * 4, np.int64)  # valid if cut to 32 bits
    assert np.isnan(backend.get(ops.token_logprobs(backend.put(x), backend.put(wrapped)))).all()


def test_temperatures_on_the_device(backend: Any) -> None:
    x = np.tile(np.array([[3, 1, 2]], np.float32), (6, 1))
    temperatures = np.array([1, 1e-40, 1e-6, 1e6, 1e38, 1], np.float32)
    targets = np.array([0, 0, 1, 1, 2, 2], np.int32)
    got = backend.get(ops.token_logprobs(backend.put(x), backend.put(targets), backend.put(temperatures)))
    third = -math.log(3)
    np.testing.assert_allclose(got, [-0.40760596, 0, -2e6, third, third, -1.407606], rtol=2e-6)
    if backend.name == "cuda":  # a NumPy array is checked by the host, one on the GPU is not looked at
        bad = backend.put(np.array([0, -1, np.nan, 1, 1, 1], np.float32))
        np.testing.assert_array_equal(
            np.isnan(backend.get(ops.token_logprobs(backend.put(x), backend.put(targets), bad))), [1, 1, 1, 0, 0, 0]
        )


def test_special_rows_of_token_logprobs(backend: Any) -> None:
    x = np.zeros((5, 2000), np.float32)
    x[0] = -np.inf
    x[1, 1999] = np.nan
    x[2, 5] = np.inf
    x[3] = -np.inf
    x[3, 1500] = -4
    x[4, 3] = -np.inf
    targets = backend.put(np.array([0, 0, 0, 1500, 3], np.int32))
    got = backend.get(ops.token_logprobs(backend.put(x), targets))
    np.testing.assert_array_equal(got, np.array([NAN, NAN, NAN, 0, -np.inf], np.float32))


def test_logprobs_of_a_row_alone(backend: Any, rng: np.random.Generator) -> None:
    x, targets = logits_of(rng, (5, 20001), FLOAT), rng.integers(0, 20001, 5).astype(np.int32)
    temperature = np.array([1, 0.5, 0.7, 2, 1.1], np.float32)
    got = backend.get(ops.token_logprobs(backend.put(x), backend.put(targets), backend.put(temperature)))
    for i in range(5):
        alone = ops.token_logprobs(backend.put(x[i : i + 1]), backend.put(targets[i : i + 1]), float(temperature[i]))
        assert backend.get(alone).view(np.uint32)[0] == got.view(np.uint32)[i]


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_two_to_the_31_elements() -> None:
    import cupy

    rows = 14135  # 4.3 GB of float16; row 14134 lies beyond 2**31 elements
    try:
        x = cupy.zeros((rows, VOCAB), HALF)
    except cupy.cuda.memory.OutOfMemoryError:
        pytest.skip("needs 9 GB of GPU memory")
    last = cupy.asarray(logits_of(np.random.default_rng(1), (1, VOCAB), HALF))
    x[-1:] = last
    targets = cupy.full(rows, 5, np.int32)
    assert ops.token_logprobs(x, targets)[-1] == ops.token_logprobs(last, targets[:1])[0]
    assert ops.argmax(x)[-1] == ops.argmax(last)[0]
    assert ops.sample(x, top_k=20, seed=4)[-1] == ops.sample(last, top_k=20, seed=4)[0]
    ops.softmax(x, out=x)
    assert (x[-1] == ops.softmax(last)[0]).all()
