"""Arrays of more than 2^31 elements: offsets are 64-bit (GPU only: they take gigabytes)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cukern import ops

pytestmark = pytest.mark.gpu

PAGE, HEADS, DIM = 16, 8, 128


def room(gigabytes: float) -> Any:
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    if cupy.cuda.runtime.memGetInfo()[0] < gigabytes * 1e9:
        pytest.skip(f"needs {gigabytes} GB of free GPU memory")
    return cupy


def test_attention_reads_pages_past_two_to_the_31_elements() -> None:
    cupy = room(14)
    tokens = 100
    blocks = (1 << 31) // (HEADS * PAGE * DIM) + 16
    used = -(-tokens // PAGE)
    shape = (blocks, HEADS, PAGE, DIM)
    k, v = cupy.empty(shape, cupy.float16), cupy.empty(shape, cupy.float16)
    draw = cupy.random.RandomState(1)
    small = [draw.standard_normal((used, *shape[1:])).astype(cupy.float16) for _ in range(2)]
    k[-used:], v[-used:] = small
    lengths = cupy.array([tokens], cupy.int32)
    q = draw.standard_normal((tokens, 2 * HEADS, DIM)).astype(cupy.float16)
    cu = cupy.array([0, tokens], cupy.int32)
    results = []
    for caches, first in (((k, v), blocks - used), (small, 0)):
        table = cupy.arange(first, first + used, dtype=cupy.int32)[None]
        prefill = ops.attention_prefill(q, *caches, cu_seqlens_q=cu, block_tables=table, seq_lens=lengths)
        decode = ops.attention_decode(q[-1:], *caches, table, lengths)
        results.append((prefill.get(), decode.get()))
    for far, near in zip(*results):
        assert np.isfinite(near).all()
        np.testing.assert_array_equal(far.view(np.uint16), near.view(np.uint16))


@pytest.mark.parametrize("greedy", [True, False])
def test_tokens_of_rows_past_two_to_the_31_elements(greedy: bool) -> None:
    cupy = room(11)
    vocab = 151936
    rows = (1 << 31) // vocab + 2
    logits = cupy.zeros((rows, vocab), cupy.float16)
    logits[-1] = cupy.random.RandomState(2).standard_normal(vocab).astype(cupy.float16)

    def draw(x: Any) -> np.ndarray:
        if greedy:
            return ops.argmax(x).get()
        return ops.sample(x, temperature=1.0, top_k=20, seed=3, position=5).get()

    every, alone = draw(logits), draw(logits[-1:].copy())
    assert every[-1] == alone[0]
    assert ((every >= 0) & (every < vocab)).all()
