"""Bias and penalties: the formulas, rows that do not disturb each other, and bad input."""

from __future__ import annotations

import numpy as np
import pytest

from cukern import ops, reference

HISTORY = {name: np.zeros(shape, np.int32) for name, shape in (("tokens", (2, 3)), ("counts", (2, 3)), ("lengths", 2))}


def lists(rng, rows: int, vocab: int, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each row, none twice, and how many of them are in use."""
    tokens = np.stack([rng.permutation(vocab)[:capacity] for _ in range(rows)]).astype(np.int32)
    return tokens, rng.integers(0, capacity + 1, rows).astype(np.int32)


def arguments(rng, rows: int, vocab: int, capacity: int, most: int) -> dict[str, np.ndarray]:
    tokens, lengths = lists(rng, rows, vocab, capacity)
    bias_tokens, bias_lengths = lists(rng, rows, vocab, most)
    return {
        "tokens": tokens,
        "counts": rng.integers(0, 4, (rows, capacity)).astype(np.int32),
        "lengths": lengths,
        "repetition": rng.uniform(0.5, 2, rows).astype(np.float32),
        "presence": rng.uniform(-2, 2, rows).astype(np.float32),
        "frequency": rng.uniform(-2, 2, rows).astype(np.float32),
        "bias_tokens": bias_tokens,
        "biases": rng.uniform(-100, 100, (rows, most)).astype(np.float32),
        "bias_lengths": bias_lengths,
    }


@pytest.mark.parametrize(("rows", "vocab", "capacity", "most"), [(1, 7, 3, 2), (3, 1000, 700, 600), (5, 33, 33, 33)])
def test_values(backend, rng, rows, vocab, capacity, most):
    logits = rng.normal(0, 5, (rows, vocab)).astype(np.float32)
    given = arguments(rng, rows, vocab, capacity, most)
    exact = reference.apply_penalties(logits.astype(np.float64), **given)
    x = backend.put(logits)
    got = ops.apply_penalties(x, **{n: backend.put(a) for n, a in given.items()})
    assert got is x
    np.testing.assert_allclose(backend.get(got), exact, rtol=1e-6, atol=1e-5)
    untouched = exact == logits
    np.testing.assert_array_equal(backend.get(got)[untouched], logits[untouched])


def test_the_formulas_by_hand(backend):
    logits = np.array([[2.0, -2.0, 4.0, 1.0, 0.0, -np.inf]], np.float32)
    given = {
        "tokens": np.array([[0, 1, 2, 5, 3]], np.int32),  # the last one is not in use
        "counts": np.array([[0, 0, 3, 1, 9]], np.int32),
        "lengths": np.array([4], np.int32),
    }
    got = ops.apply_penalties(
        backend.put(logits),
        **{n: backend.put(a) for n, a in given.items()},
        repetition=2.0,
        presence=0.5,
        frequency=0.25,
        bias_tokens=backend.put(np.array([[0, 4, 6, -1]], np.int32)),  # two outside the vocabulary
        biases=backend.put(np.array([[10.0, -3.0, 1.0, 1.0]], np.float32)),
        bias_lengths=backend.put(np.array([4], np.int32)),
    )
    # (2 + 10) / 2; -2 * 2; 4 / 2 - 3 * 0.25 - 0.5; untouched; 0 - 3; stays -inf
    assert backend.get(got).tolist() == [[6.0, -4.0, 0.75, 1.0, -3.0, -np.inf]]


def test_a_row_alone_has_the_same_bits(backend, rng):
    logits = rng.normal(0, 5, (4, 300)).astype(np.float32)
    given = arguments(rng, 4, 300, 40, 9)
    whole = backend.get(ops.apply_penalties(backend.put(logits), **{n: backend.put(a) for n, a in given.items()}))
    for i in range(4):
        one = {n: backend.put(a[i : i + 1]) for n, a in given.items()}
        alone = ops.apply_penalties(backend.put(logits[i : i + 1]), **one)
        np.testing.assert_array_equal(backend.get(alone)[0], whole[i])


def test_neutral_values_change_nothing(backend, rng):
    logits = rng.normal(0, 5, (2, 50)).astype(np.float32)
    tokens, lengths = lists(rng, 2, 50, 20)
    history = {"tokens": tokens, "counts": np.ones_like(tokens), "lengths": lengths}
    got = ops.apply_penalties(backend.put(logits), **{n: backend.put(a) for n, a in history.items()})
    np.testing.assert_array_equal(backend.get(got), logits)
    np.testing.assert_array_equal(backend.get(ops.apply_penalties(backend.put(logits))), logits)


def test_no_rows(backend):
    assert ops.apply_penalties(backend.put(np.zeros((0, 5), np.float32))).shape == (0, 5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tokens": np.zeros((2, 3), np.int32)}, ValueError, "counts is missing"),
        ({"biases": np.zeros((2, 3), np.float32)}, ValueError, "bias_tokens is missing"),
        ({"repetition": 0.0}, ValueError, "repetition must be positive, got 0"),
        ({"repetition": np.array([1.0, -1.0])}, ValueError, "repetition must be positive, got -1"),
        ({"presence": "x"}, TypeError, r"presence must be a number or an array \[2\], got str"),
        ({"presence": np.zeros(3)}, ValueError, "presence has shape"),
        ({**HISTORY, "tokens": np.zeros((2, 3), np.int64)}, TypeError, "tokens has dtype int64"),
        ({**HISTORY, "counts": np.zeros((2, 4), np.int32)}, ValueError, "counts has shape"),
    ],
)
def test_bad_input(backend, options, error, message):
    given = {
        n: backend.put(v) if isinstance(v, np.ndarray) and (v.ndim == 2 or v.dtype.kind == "i") else v
        for n, v in options.items()
    }
    with pytest.raises(error, match=message):
        ops.apply_penalties(backend.put(np.zeros((2, 5), np.float32)), **given)


def test_logits_must_be_writable_float32(backend):
    with pytest.raises(TypeError, match="logits has dtype float16"):
        ops.apply_penalties(backend.put(np.zeros((2, 5), np.float16)))
    with pytest.raises(ValueError, match="contiguous"):
        ops.apply_penalties(backend.put(np.zeros((2, 8), np.float32))[:, ::2])
