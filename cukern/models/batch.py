"""`ForwardBatch`: the tokens of one forward step and where their keys and values live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["ForwardBatch"]


@dataclass
class ForwardBatch:
    """One step of B sequences with T new tokens in all, packed one after another. Arrays are on the model's device.

    Attributes
    ----------
    token_ids : int32 [T]
    positions : int32 [T]
        Position of each token in its own sequence, counted from 0, below the model's ``max_positions``.
    slot_mapping : int64 [T]
        Where each token's key and value go: ``block * block_size + offset``; -1 writes nothing.
    cu_seqlens_q : int32 [B + 1]
        First token of each sequence, and T.
    seq_lens : int32 [B]
        Keys of each sequence after this step (cached ones and this step's).
    block_tables : int32 [B, max_blocks]
        Blocks of each sequence in order; entries past the sequence's end are never read.
    max_query_len : int
        Most new tokens of one sequence.
    logits_indices : int64 [R] or None
        Rows of the packed tokens that go through the head, or None for all T.
    is_decode : bool
        Every sequence has exactly one new token, so the split-KV decode kernel runs. Set from the shapes where
        not given.
    static_cache : bool
        No sequence reads a key that this step writes for another one; decode attention may then fetch keys early
        (`cukern.ops.attention_decode`). True promises it, `build` finds out.
    """

    token_ids: Any
    positions: Any
    slot_mapping: Any
    cu_seqlens_q: Any
    seq_lens: Any
    block_tables: Any
    max_query_len: int
    logits_indices: Any = None
    is_decode: bool | None = None
    static_cache: bool = False

    def __post_init__(self) -> None:
        if self.is_decode is None:
            self.is_decode = self.max_query_len == 1 and len(self.token_ids) == len(self.seq_lens)

    @classmethod
    def build(
        cls,
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        put: Callable[[np.ndarray], Any],
        *,
        last_only: bool = True,
    ) -> ForwardBatch:
        """Lay out a step on the host and upload it.

        Parameters
        ----------
        tokens : per sequence, its new token ids (at least one)
        starts : per sequence, the number of keys that are already cached
        block_tables : per sequence, its blocks, enough for ``starts + len(tokens)`` keys
        block_size : int
            Keys per block.
        put : callable
            NumPy array to array on the device (`Device.put`).
        last_only : bool
            Only the last token of each sequence goes through the head.

        Raises
        ------
        ValueError
            A sequence without new tokens, or a block table too short for its sequence.
        """
        if not (len(tokens) == len(starts) == len(block_tables)):
            raise ValueError(
                f"tokens, starts and block_tables must have one entry a sequence, got {len(tokens)}, {len(starts)} "
                f"and {len(block_tables)}"
            )
        counts = np.array([len(t) for t in tokens], dtype=np.int64)
        if (counts == 0).any():
            raise ValueError(f"sequence {int(np.argmin(counts))} has no new token")
        ends = np.array(starts, dtype=np.int64) + counts
        width = max((len(row) for row in block_tables), default=0)
        tables = np.zeros((len(tokens), width), dtype=np.int32)
        positions, slots = [], []
        for i, row in enumerate(block_tables):
            if len(row) * block_size < ends[i]:
                raise ValueError(
                    f"sequence {i} has {ends[i]} keys but its {len(row)} blocks hold {len(row) * block_size}"
                )
            tables[i, : len(row)] = row
            pos = np.arange(starts[i], ends[i], dtype=np.int64)
            positions.append(pos)
            slots.append(tables[i, pos // block_size].astype(np.int64) * block_size + pos % block_size)
        flat = [np.asarray(t, dtype=np.int32) for t in tokens]
        empty = np.zeros(0, dtype=np.int64)
        seen = np.concatenate([empty, *(np.unique(tables[i, : -(-end // block_size)]) for i, end in enumerate(ends))])
        blocks, readers = np.unique(seen, return_counts=True)
        written = np.concatenate(slots or [empty]) // block_size
        cu_seqlens = np.concatenate([[0], np.cumsum(counts)])
        return cls(
            token_ids=put(np.concatenate(flat) if flat else empty.astype(np.int32)),
            positions=put(np.concatenate(positions or [empty]).astype(np.int32)),
            slot_mapping=put(np.concatenate(slots or [empty])),
            cu_seqlens_q=put(cu_seqlens.astype(np.int32)),
            seq_lens=put(ends.astype(np.int32)),
            block_tables=put(tables),
            max_query_len=int(counts.max(initial=0)),
            logits_indices=put(cu_seqlens[1:].astype(np.int64) - 1) if last_only else None,
            static_cache=not np.isin(written, blocks[readers > 1]).any(),
        )
