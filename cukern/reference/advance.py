"""Oracle of the end of a decoding step, and the arrays that it works on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cukern.reference.sampling import unpack

__all__ = ["StepState", "advance"]


@dataclass
class StepState:
    """What a decoding step of B rows reads and the next one finds advanced; all arrays on one device, at fixed places.

    Attributes
    ----------
    token_ids, positions, seq_lens : int32 [B]
        As in `cukern.models.ForwardBatch`; ``seq_lens`` counts the new token, 0 is a row that is not in use.
    slot_mapping : int64 [B]
        Place of the new key in the cache; -1 for a row that is not in use.
    draw_positions : int64 [B]
        Position of the token to be drawn, for its random numbers.
    block_tables : int32 [B, W]
        -1 where there is no block yet.
    remaining : int32 [B]
        Steps after which the row goes out of use.
    stop_ids : int32 [B, S]
        Tokens after which it does, -1 for none.
    counters : uint32 [B]
        Steps done; the row of the rings is ``counters % R``.
    token_ring : int32 [R, B]
        Drawn tokens; -1 for a row that is not in use.
    logprob_ring : float32 [R, B], optional
    top_value_ring, top_id_ring : float32 and int32 [R, B, n], optional
        Log-probabilities and ids of the likeliest tokens.
    history_tokens, history_counts : int32 [B, C], optional
    history_lengths : int32 [B], optional
        As for `cukern.ops.apply_penalties`.
    """

    token_ids: Any
    positions: Any
    seq_lens: Any
    slot_mapping: Any
    draw_positions: Any
    block_tables: Any
    remaining: Any
    stop_ids: Any
    counters: Any
    token_ring: Any
    logprob_ring: Any = None
    top_value_ring: Any = None
    top_id_ring: Any = None
    history_tokens: Any = None
    history_counts: Any = None
    history_lengths: Any = None


def advance(
    sampled: np.ndarray,
    state: StepState,
    block_size: int,
    *,
    logprobs: np.ndarray | None = None,
    top: tuple[np.ndarray, np.ndarray] | None = None,
) -> None:
    """Record the drawn tokens and prepare the next step. See cukern.ops.advance."""
    s = state
    if sampled.ndim == 2:
        sampled = unpack(sampled.max(1))
    for row, token in enumerate(sampled.tolist()):
        at = int(s.counters[row]) % len(s.token_ring)
        s.counters[row] = (int(s.counters[row]) + 1) % 2**32
        s.token_ring[at, row] = token if s.seq_lens[row] > 0 else -1
        if logprobs is not None:
            s.logprob_ring[at, row] = logprobs[row]
        if top is not None:
            s.top_value_ring[at, row], s.top_id_ring[at, row] = top[0][row], top[1][row]
        if s.seq_lens[row] <= 0:
            continue
        if s.history_tokens is not None:
            _count(token, s.history_tokens[row], s.history_counts[row], s.history_lengths, row)
        s.remaining[row] -= 1
        if s.remaining[row] <= 0 or token in s.stop_ids[row]:
            for array in (s.token_ids, s.positions, s.seq_lens, s.draw_positions):
                array[row] = 0
            s.slot_mapping[row] = -1
            continue
        s.token_ids[row] = token
        for array in (s.positions, s.seq_lens, s.draw_positions):
            array[row] += 1
        column, offset = divmod(int(s.positions[row]), block_size)
        block = int(s.block_tables[row, column]) if column < s.block_tables.shape[1] else -1
        s.slot_mapping[row] = block * block_size + offset if block >= 0 else -1


def _count(token: int, tokens: np.ndarray, counts: np.ndarray, lengths: np.ndarray, row: int) -> None:
    used = int(lengths[row])
    found = np.nonzero(tokens[:used] == token)[0]
    if len(found):
        counts[found[0]] += 1
    elif used < len(tokens):
        tokens[used], counts[used], lengths[row] = token, 1, used + 1
