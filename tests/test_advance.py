"""The end of a decoding step: the kernel against the oracle over many steps, and each rule by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cukern import ops, reference
from cukern.ops.advance import StepState

BLOCK = 16


def state(rng, rows=5, width=3, *, top=0, history=0, ring=4) -> StepState:
    """Rows of lengths up to the end of their tables; row 0 is not in use."""
    lengths = rng.integers(1, width * BLOCK - 8, rows).astype(np.int32)
    lengths[0] = 0
    tables = rng.permutation(rows * width).reshape(rows, width).astype(np.int32)
    position = np.maximum(lengths - 1, 0)
    slots = tables[np.arange(rows), position // BLOCK].astype(np.int64) * BLOCK + position % BLOCK
    made = StepState(
        token_ids=rng.integers(0, 9, rows).astype(np.int32),
        positions=position.astype(np.int32),
        seq_lens=lengths,
        slot_mapping=np.where(lengths > 0, slots, -1),
        draw_positions=lengths.astype(np.int64),
        block_tables=tables,
        remaining=rng.integers(1, 9, rows).astype(np.int32),
        stop_ids=np.full((rows, 2), -1, np.int32),
        counters=np.full(rows, 2**32 - 2, np.uint32),
        token_ring=np.full((ring, rows), 77, np.int32),
        logprob_ring=np.full((ring, rows), np.nan, np.float32),
    )
    if top:
        made.top_value_ring = np.full((ring, rows, top), np.nan, np.float32)
        made.top_id_ring = np.full((ring, rows, top), 77, np.int32)
    if history:
        made.history_tokens = np.tile(np.arange(history, dtype=np.int32), (rows, 1))
        made.history_counts = np.zeros((rows, history), np.int32)
        made.history_lengths = np.full(rows, 3, np.int32)
    return made


def moved(made: StepState, put) -> StepState:
    values = {f.name: getattr(made, f.name) for f in dataclasses.fields(StepState)}
    return StepState(**{n: None if a is None else put(a) for n, a in values.items()})


def assert_same(got: StepState, expected: StepState, get) -> None:
    for field in dataclasses.fields(StepState):
        array = getattr(expected, field.name)
        if array is not None:
            np.testing.assert_array_equal(get(getattr(got, field.name)), array, err_msg=field.name)


@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("history", [0, 7])
def test_many_steps(backend, rng, top, history):
    expected = state(rng, top=top, history=history)
    expected.stop_ids[2] = [8, 5]
    got = moved(expected, backend.put)
    for _ in range(8):
        tokens = rng.integers(0, 9, 5).astype(np.int32)
        logprobs = rng.normal(size=5).astype(np.float32)
        best = (rng.normal(size=(5, top)).astype(np.float32), rng.integers(0, 9, (5, top)).astype(np.int32))
        reference.advance(tokens, expected, BLOCK, logprobs=logprobs, top=best if top else None)
        device_best = tuple(map(backend.put, best)) if top else None
        ops.advance(backend.put(tokens), got, BLOCK, logprobs=backend.put(logprobs), top=device_best)
        assert_same(got, expected, backend.get)
    assert (expected.seq_lens == 0).all()  # every row came to its end


@pytest.mark.parametrize("columns", [5, 3000, 300_000, 1_100_000])  # the last: more parts than a warp reads at once
def test_parts_of_the_arg_max(backend, rng, columns):
    x = rng.integers(0, 50, (5, columns)).astype(np.float16)
    x[3, columns - 1] = x[4, columns // 2] = 99
    x[1, columns // 3 :] = np.nan
    tokens = reference.argmax(x)
    assert len(set(tokens.tolist())) > 2
    for history in (0, 7):
        expected = state(rng, history=history)
        expected.stop_ids[3, 1] = tokens[3]
        on_device, by_reference = moved(expected, backend.put), moved(expected, np.copy)
        reference.advance(tokens, expected, BLOCK)
        ops.advance(ops.argmax(backend.put(x), parts=True), on_device, BLOCK)
        assert_same(on_device, expected, backend.get)
        reference.advance(reference.argmax(x, parts=True), by_reference, BLOCK)
        assert_same(by_reference, expected, np.asarray)


def one(rng, backend, tokens: list[int], **fields) -> StepState:
    """A step of two rows with some fields set by hand."""
    made = state(rng, rows=2, width=2, history=4 if "history_lengths" in fields else 0)
    for name, value in fields.items():
        getattr(made, name)[...] = value
    put = moved(made, backend.put)
    ops.advance(backend.put(np.array(tokens, np.int32)), put, BLOCK)
    return moved(put, backend.get)


def test_the_next_block_comes_from_the_table(backend, rng):
    got = one(
        rng, backend, [4, 5], seq_lens=[16, 17], positions=[15, 16], draw_positions=[16, 17], remaining=9,
        block_tables=[[7, 3], [2, 6]],
    )  # fmt: skip
    assert got.slot_mapping.tolist() == [3 * BLOCK, 6 * BLOCK + 1]
    assert got.token_ids.tolist() == [4, 5]
    assert (got.positions.tolist(), got.seq_lens.tolist()) == ([16, 17], [17, 18])
    assert got.draw_positions.tolist() == [17, 18]
    assert got.token_ring[(2**32 - 2) % 4].tolist() == [4, 5]


def test_a_block_that_is_not_there_yet_gives_no_slot(backend, rng):
    got = one(rng, backend, [4, 5], seq_lens=[16, 32], positions=[15, 31], remaining=9, block_tables=[[7, -1], [2, 6]])
    assert got.slot_mapping.tolist() == [-1, -1]  # the second is at the end of its table


@pytest.mark.parametrize("fields", [{"remaining": [1, 9]}, {"remaining": 9, "stop_ids": [[-1, 4], [-1, -1]]}])
def test_a_row_that_ends_goes_out_of_use(backend, rng, fields):
    got = one(rng, backend, [4, 4], seq_lens=5, positions=4, draw_positions=5, block_tables=[[0, 1], [2, 3]], **fields)
    for name in ("token_ids", "positions", "seq_lens", "draw_positions"):
        assert getattr(got, name)[0] == 0
        assert getattr(got, name)[1] != 0
    assert got.slot_mapping.tolist() == [-1, 2 * BLOCK + 5]
    assert got.token_ring[2].tolist() == [4, 4]  # its last token is recorded


def test_history(backend, rng):
    got = one(
        rng, backend, [9, 2], seq_lens=5, positions=4, remaining=9, history_lengths=[3, 4],
        history_tokens=[[1, 2, 3, 0], [2, 5, 6, 7]], history_counts=[[0, 1, 0, 0], [1, 0, 0, 0]],
    )  # fmt: skip
    assert got.history_tokens.tolist() == [[1, 2, 3, 9], [2, 5, 6, 7]]
    assert got.history_counts.tolist() == [[0, 1, 0, 1], [2, 0, 0, 0]]
    assert got.history_lengths.tolist() == [4, 4]


def test_bad_input(backend, rng):
    good = state(rng, top=3, history=4)
    tokens = backend.put(np.zeros(5, np.int32))

    def refused(error, message, tokens=tokens, block_size=BLOCK, values=None, **changes):
        changed = moved(dataclasses.replace(good, **changes), backend.put)
        with pytest.raises(error, match=message):
            ops.advance(tokens, changed, block_size, logprobs=values)

    refused(ValueError, "block_size must be one of", block_size=8)
    refused(TypeError, "sampled must be an array, got None", None)
    refused(TypeError, "token_ids must be an array, got None", token_ids=None)
    with pytest.raises(TypeError, match="advance: state must be a StepState, got NoneType"):
        ops.advance(tokens, None, BLOCK)
    refused(TypeError, "sampled has dtype int64", backend.put(np.zeros(5, np.int64)))
    refused(ValueError, "sampled has shape", backend.put(np.zeros(4, np.int32)))
    refused(ValueError, "sampled has shape", backend.put(np.zeros((5, 0), np.uint64)))
    refused(ValueError, "sampled has shape", backend.put(np.zeros((4, 2), np.uint64)))
    refused(TypeError, "sampled has dtype int32", backend.put(np.zeros((5, 2), np.int32)))
    refused(TypeError, "slot_mapping has dtype int32", slot_mapping=np.zeros(5, np.int32))
    refused(ValueError, "positions has shape", positions=np.zeros(4, np.int32))
    refused(ValueError, "history_counts is missing", history_counts=None)
    refused(ValueError, "no logprob_ring", values=backend.put(np.zeros(5, np.float32)), logprob_ring=None)
    rings = {"logprob_ring": None, "top_value_ring": None, "top_id_ring": None}
    refused(ValueError, "token_ring has no rows", token_ring=np.zeros((0, 5), np.int32), **rings)
