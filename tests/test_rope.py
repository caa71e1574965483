"""rope and its table: angles in float64, positions in any order, nothing read outside the table."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cukern import ops, reference
from cukern.ops import rope_table
from cukern.testing import assert_close

HALF, BF16, FLOAT = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def pair_frequencies(table: np.ndarray) -> np.ndarray:
    """Angle of each pair at position 1."""
    half = table.shape[1] // 2
    return np.arctan2(table[1, half:].astype(np.float64), table[1, :half].astype(np.float64))


# ---- the table


@pytest.mark.parametrize("position", [0, 1, 257, 4095, 32767, 40959])
def test_table_at_long_positions(position: int) -> None:
    """Element by element with the math module: an angle in half or single precision would miss by far."""
    table = rope_table(128, 40960, 1e6)
    assert table.shape == (40960, 128)
    assert table.dtype == np.float32
    for pair in (0, 1, 17, 63):
        angle = position * math.exp(-2 * pair / 128 * math.log(1e6))
        assert table[position, pair] == pytest.approx(math.cos(angle), abs=1e-7)
        assert table[position, pair + 64] == pytest.approx(math.sin(angle), abs=1e-7)


@pytest.mark.parametrize(
    ("theta", "scaling", "frequencies", "amplitude"),
    # from transformers 5.24: inv_freq and attention_scaling of Qwen3RotaryEmbedding with head_dim 16
    [
        (
            1e4,
            YARN,
            [1.0, 0.237170815, 0.05, 0.00790569466, 0.0025, 0.000790569466, 0.00025, 7.90569466e-05],
            1.138629436111989,
        ),
        (
            1e6,
            {
                "rope_type": "yarn",
                "factor": 40,
                "original_max_position_embeddings": 4096,
                "mscale": 0.707,
                "mscale_all_dim": 1.0,
                "beta_fast": 16,
                "beta_slow": 2,
            },
            [1.0, 0.177827939, 0.0316227786, 0.00288199936, 2.5e-05, 4.44569832e-06, 7.90569402e-07, 1.40585328e-07],
            0.9210423553163399,
        ),
        (
            1e4,
            {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 1024,
                "attention_factor": 1.3,
                "truncate": False,
            },
            [1.0, 0.316227764, 0.082965076, 0.0170441102, 0.00248313323, 0.000395284733, 0.000125, 3.95284733e-05],
            1.3,
        ),
    ],
)
def test_yarn_golden(theta: float, scaling: dict[str, Any], frequencies: list[float], amplitude: float) -> None:
    table = rope_table(16, 2, theta, scaling)
    np.testing.assert_allclose(pair_frequencies(table), frequencies, rtol=2e-6)
    np.testing.assert_allclose(table[0, :8], amplitude, rtol=1e-6)
    np.testing.assert_allclose(np.hypot(table[:, :8], table[:, 8:]), amplitude, rtol=1e-6)


def test_yarn_by_the_paper() -> None:
    """Pairs that turn over 32 times in the trained context keep their frequency, under 1 time are divided by factor."""
    scaling = {**YARN, "original_max_position_embeddings": 4096, "attention_factor": 1.0}
    plain, scaled = (pair_frequencies(rope_table(128, 2, 1e4, s)) for s in (None, scaling))
    turns = 4096 * plain / (2 * math.pi)
    step = turns[0] / turns[1]  # the limits are rounded outwards to whole pairs
    np.testing.assert_allclose(scaled[turns > 32 * step], plain[turns > 32 * step], rtol=1e-6)
    np.testing.assert_allclose(scaled[turns < 1 / step], plain[turns < 1 / step] / 4, rtol=1e-6)
    ratio = scaled / plain
    assert (np.diff(ratio) <= 1e-6).all()
    assert ((ratio > 0.2499) & (ratio < 1.0001)).all()


def test_scaling_spelled_in_other_ways() -> None:
    plain = rope_table(32, 50, 1e6)
    for scaling in ({"rope_type": "default"}, {"type": "default"}, {"rope_type": "default", "rope_theta": 1000000}, {}):
        np.testing.assert_array_equal(rope_table(32, 50, 1e6, scaling), plain)
    yarn = rope_table(32, 50, 1e6, YARN)
    assert (yarn != plain).any()
    old = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 128, "attention_factor": None}
    np.testing.assert_array_equal(rope_table(32, 50, 1e6, old), yarn)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((15, 8, 1e4), "head_dim must be even and positive, got 15"),
        ((0, 8, 1e4), "head_dim must be even"),
        ((16, -1, 1e4), "max_positions must not be negative"),
        ((16, 8, 1.0), "theta must be a finite number above 1"),
        ((16, 8, float("nan")), "theta must be"),
        ((16, 8, 1e4, {"rope_type": "longrope"}), "rope_type 'longrope' is not supported"),
        ((16, 8, 1e4, {"rope_type": "yarn", "factor": 4.0}), "needs original_max_position_embeddings"),
        ((16, 8, 1e4, {**YARN, "factor": None}), "needs factor"),
        ((16, 8, 1e4, {**YARN, "factor": 0.5}), "factor of YaRN scaling must be at least 1"),
        ((16, 8, 1e4, {**YARN, "beta_fast": "32"}), "beta_fast of YaRN scaling must be a positive number, got '32'"),
        ((16, 8, 1e4, {**YARN, "betafast": 3}), "does not know betafast"),
        ((16, 8, 1e4, {**YARN, "rope_theta": 1e6}), "theta 10000.0 disagrees with rope_theta 1000000.0"),
        ((16, 8, 1e4, {"partial_rotary_factor": 0.5}), "partial_rotary_factor 0.5 is not supported"),
    ],
)
def test_table_bad_input(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_table(*arguments)


# ---- the rotation


@pytest.mark.parametrize("dtype", [HALF, BF16, FLOAT], ids=lambda d: d.name)
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_accuracy(backend: Any, rng: np.random.Generator, dtype: np.dtype, index: type) -> None:
    for lead, heads, dim in [((5,), 3, 64), ((2, 3), 2, 128), ((4,), 1, 6), ((70,), 5, 48)]:
        table = rope_table(dim, 300, 1e4)
        x = rng.standard_normal((*lead, heads, dim)).astype(dtype)
        positions = rng.integers(0, 300, lead, dtype=index)
        result = ops.rope(backend.put(x), backend.put(positions), backend.put(table))
        assert result.shape == x.shape
        assert result.dtype == dtype
        # the oracle's own angles, not the table
        angles = positions[..., None] * 1e4 ** (-2 * np.arange(dim // 2) / dim)
        turned = (x[..., : dim // 2].astype(np.float64) + 1j * x[..., dim // 2 :].astype(np.float64)) * np.exp(
            1j * angles[..., None, :]
        )
        assert_close("rope", backend.get(result), np.concatenate([turned.real, turned.imag], -1))


def test_depends_on_the_position_alone(backend: Any, rng: np.random.Generator) -> None:
    table = rope_table(64, 100, 1e6)
    x = rng.standard_normal((6, 2, 64)).astype(BF16)
    positions = np.array([99, 0, 7, 7, 50, 1], np.int32)
    batch = backend.get(ops.rope(backend.put(x), backend.put(positions), backend.put(table)))
    for i in range(6):
        alone = ops.rope(backend.put(x[i : i + 1]), backend.put(positions[i : i + 1]), backend.put(table[:100]))
        np.testing.assert_array_equal(backend.get(alone)[0], batch[i])
    np.testing.assert_array_equal(batch[1], x[1])  # position 0 turns nothing


def test_positions_outside_the_table(backend: Any, rng: np.random.Generator) -> None:
    table = rope_table(32, 10, 1e4)
    x = rng.standard_normal((6, 2, 32)).astype(np.float16)
    for index, far in ((np.int32, 2**31 - 1), (np.int64, 2**62)):
        positions = np.array([9, 10, -1, 0, far, -far], index)
        result = backend.get(ops.rope(backend.put(x), backend.put(positions), backend.put(table)))
        assert np.isnan(result[[1, 2, 4, 5]]).all()
        assert np.isfinite(result[[0, 3]]).all()
        with pytest.raises(ValueError, match=r"positions contains .*, expected 0 to 9"):
            reference.rope(x, positions, table)


def test_strided_out_and_in_place(backend: Any, rng: np.random.Generator) -> None:
    table = backend.put(rope_table(32, 40, 1e4))
    base = rng.standard_normal((5, 6, 32)).astype(np.float16)
    positions = np.arange(10, dtype=np.int64)
    view, same = backend.put(base)[:, 1:4], base[:, 1:4]  # the middle heads of packed projections
    want = reference.rope(same.astype(np.float64), positions[::2], backend.get(table))
    assert_close("rope", backend.get(ops.rope(view, backend.put(positions)[::2], table)), want)
    x = backend.put(np.ascontiguousarray(same))
    assert ops.rope(x, backend.put(positions)[::2], table, out=x) is x
    assert_close("rope", backend.get(x), want)


def test_many_tokens(backend: Any, rng: np.random.Generator) -> None:
    table = rope_table(4, 16, 1e4)
    x = rng.standard_normal((65537, 1, 4)).astype(np.float16)
    positions = rng.integers(0, 16, 65537, dtype=np.int32)
    result = backend.get(ops.rope(backend.put(x), backend.put(positions), backend.put(table)))
    assert_close("rope", result, reference.rope(x.astype(np.float64), positions, table))


def test_empty(backend: Any) -> None:
    table, none = backend.put(rope_table(16, 8, 1e4)), backend.put(np.empty(0, np.int32))
    assert ops.rope(backend.put(np.empty((0, 2, 16), np.float16)), none, table).shape == (0, 2, 16)
    assert ops.rope(backend.put(np.empty((3, 0, 16), BF16)), backend.put(np.zeros(3, np.int32)), table).dtype == BF16


def test_bad_input(backend: Any) -> None:
    table, positions = backend.put(rope_table(16, 8, 1e4)), backend.put(np.zeros(2, np.int32))
    x = backend.put(np.ones((2, 3, 16), np.float16))
    with pytest.raises(TypeError, match="x has dtype int32"):
        ops.rope(backend.put(np.ones((2, 3, 16), np.int32)), positions, table)
    with pytest.raises(TypeError, match="positions has dtype float32"):
        ops.rope(x, backend.put(np.zeros(2, np.float32)), table)
    with pytest.raises(TypeError, match="table has dtype float16"):
        ops.rope(x, positions, backend.put(np.ones((8, 16), np.float16)))
    with pytest.raises(ValueError, match=r"x has shape .*, expected \(..., heads, D\)"):
        ops.rope(x[:, :, :15], positions, table)
    with pytest.raises(ValueError, match="positions has shape"):
        ops.rope(x, backend.put(np.zeros(3, np.int32)), table)
    with pytest.raises(ValueError, match="table has shape"):
        ops.rope(x, positions, backend.put(np.ones((8, 8), np.float32)))
