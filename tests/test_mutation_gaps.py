"""Inputs that only a planted fault has shown to be missing from the operators' own tests (docs/mutation.md)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_advance import BLOCK, assert_same, moved, state

from cukern import ops, reference
from cukern.testing import assert_close


def test_row_of_more_parts_than_a_warp_has_lanes(backend: Any) -> None:
    """The last reduction over the parts of a row goes round more than once: over 32 * 8192 columns."""
    columns = 300_000
    x = np.zeros((2, columns), np.float16)
    x[0, 290_001] = x[1, 8192 * 34 + 5] = 9
    np.testing.assert_array_equal(backend.get(ops.argmax(backend.put(x))), [290_001, 8192 * 34 + 5])
    drawn = backend.get(ops.sample(backend.put(x), temperature=0.2, seed=1))  # e^45 against 300,000 others
    np.testing.assert_array_equal(drawn, [290_001, 8192 * 34 + 5])
    x[:, 7] = 5  # candidates in the first and the second round over the groups
    drawn = backend.get(ops.sample(backend.put(x), temperature=0.1, seed=1, top_k=2))
    np.testing.assert_array_equal(drawn, [290_001, 8192 * 34 + 5])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_largest_score_in_the_first_chunk_of_a_warp(backend: Any, dtype: Any) -> None:
    """Chunk 32, the first one of the second warp of the merge, has the largest score so far: 33 chunks of 128 keys."""
    rng = np.random.default_rng(3)
    length, page, dim = 32 * 128 + 70, 64, 16
    blocks = -(-length // page)
    q = np.ones((1, 1, dim), dtype)
    k, v = (rng.standard_normal((blocks, 1, page, dim)).astype(dtype) for _ in range(2))
    keys, values = (a.reshape(-1, dim) for a in (k, v))  # one head: the pages in order are the sequence
    keys[32 * 128 + 3] = 2
    table, lengths = np.arange(blocks, dtype=np.int32)[None], np.array([length], np.int32)
    got = ops.attention_decode(*map(backend.put, (q, k, v, table, lengths)))
    scores = keys[:length].astype(np.float64).sum(1) * dim**-0.5
    weights = np.exp(scores - scores.max())
    assert scores.argmax() == 32 * 128 + 3
    expected = weights @ values[:length].astype(np.float64) / weights.sum()
    assert_close("attention", backend.get(got)[0, 0], expected)


def test_history_token_outside_the_vocabulary(backend: Any) -> None:
    """One past the vocabulary is the first logit of the next row."""
    logits = np.arange(12, dtype=np.float32).reshape(2, 6)
    tokens, counts = np.array([[6, -1], [0, 0]], np.int32), np.ones((2, 2), np.int32)
    lengths = np.array([2, 0], np.int32)
    history = {"tokens": tokens, "counts": counts, "lengths": lengths}
    got = ops.apply_penalties(
        backend.put(logits), **{n: backend.put(a) for n, a in history.items()}, repetition=2.0, presence=1.0
    )
    np.testing.assert_array_equal(backend.get(got), logits)


def test_history_that_is_full(backend: Any, rng: np.random.Generator) -> None:
    """A token that is not in it is not remembered, and nothing else changes."""
    expected = state(rng, rows=3, history=4)
    expected.history_lengths[...] = [4, 4, 3]
    got = moved(expected, backend.put)
    tokens = np.array([8, 8, 8], np.int32)  # the history holds 0 to 3
    reference.advance(tokens, expected, BLOCK)
    ops.advance(backend.put(tokens), got, BLOCK)
    assert_same(got, expected, backend.get)
    assert expected.history_lengths.tolist() == [4, 4, 4]
