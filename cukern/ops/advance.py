"""The end of a decoding step on the device: the drawn token becomes the next input."""

from __future__ import annotations

import dataclasses

import numpy as np

from cukern import reference
from cukern.jit import kernel
from cukern.ops._arrays import FLOAT32, Array, check_out, check_shape, place_arrays
from cukern.ops._attention import PAGE_SIZES
from cukern.ops._rows import Variant
from cukern.reference.advance import StepState

__all__ = ["StepState", "advance", "kernel_variants"]

_NAME = "advance"
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_UINT32, _UINT64 = np.dtype(np.uint32), np.dtype(np.uint64)

# array -> dtype and shape: B rows, W columns of tables, S stop tokens, R results, n likeliest tokens, C of a history
_FIELDS: dict[str, tuple[np.dtype, str]] = {
    "token_ids": (_INT32, "B"),
    "positions": (_INT32, "B"),
    "seq_lens": (_INT32, "B"),
    "slot_mapping": (_INT64, "B"),
    "draw_positions": (_INT64, "B"),
    "block_tables": (_INT32, "BW"),
    "remaining": (_INT32, "B"),
    "stop_ids": (_INT32, "BS"),
    "counters": (_UINT32, "B"),
    "token_ring": (_INT32, "RB"),
    "logprob_ring": (FLOAT32, "RB"),
    "top_value_ring": (FLOAT32, "RBn"),
    "top_id_ring": (_INT32, "RBn"),
    "history_tokens": (_INT32, "BC"),
    "history_counts": (_INT32, "BC"),
    "history_lengths": (_INT32, "B"),
}
_OPTIONAL = {f.name for f in dataclasses.fields(StepState) if f.default is None}
_GROUPS = (("top_value_ring", "top_id_ring"), ("history_tokens", "history_counts", "history_lengths"))


def advance(
    sampled: Array,
    state: StepState,
    block_size: int,
    *,
    logprobs: Array | None = None,
    top: tuple[Array, Array] | None = None,
) -> None:
    """Record the drawn tokens and make `state` that of the next step, so that it can follow without the host.

    Every row that is in use puts its token into ``token_ring[counter % R]``, counts it in its history, and gets it as
    next token at the next position, with the slot that the block table gives. A row goes out of use when ``remaining``
    reaches 0 or the token is one of its ``stop_ids``. Rows that are not in use put -1 into the ring and stay as they
    are. All counters go up by one.

    Parameters
    ----------
    sampled : array [B], int32
        Or [B, P], uint64: the parts that ``argmax(logits, parts=True)`` gives.
    state : StepState
        Changed in place, the tables and stop tokens excepted. The rings may be pinned host memory.
    block_size : int
        16, 32, 64, 128 or 256.
    logprobs : array [B], float32, optional
        Of the tokens, for ``logprob_ring``.
    top : pair of arrays [B, n], float32 and int32, optional
        As returned by `top_logprobs`, for ``top_value_ring`` and ``top_id_ring``.

    Raises
    ------
    TypeError, ValueError
        A missing array, a wrong dtype or shape, a part of a history, or values without a ring.
    """
    if not isinstance(state, StepState):
        raise TypeError(f"{_NAME}: state must be a StepState, got {type(state).__name__}")
    given = {f.name: getattr(state, f.name) for f in dataclasses.fields(StepState)}
    place, arrays = place_arrays(
        _NAME, sampled=sampled, logprobs=logprobs, top_values=top and top[0], top_ids=top and top[1], **given
    )
    sampled, logprobs, top_values, top_ids = arrays[:4]
    state = StepState(**dict(zip(given, arrays[4:])))
    sizes = _check(state, sampled, logprobs, top_values, top_ids)
    if block_size not in PAGE_SIZES:
        raise ValueError(f"{_NAME}: block_size must be one of {', '.join(map(str, PAGE_SIZES))}, got {block_size!r}")
    if sizes["B"] == 0:
        return
    if place.kind == "reference":
        pair = None if top_values is None else (top_values, top_ids)
        reference.advance(sampled, state, block_size, logprobs=logprobs, top=pair)
        return
    s = state
    history = s.history_tokens is not None
    threads = 256 if history else 32
    tokens, parts = (sampled, None) if sampled.ndim == 1 else (None, sampled)
    kernel("advance.cu", _NAME, (threads,))(
        (sizes["B"],),
        (threads,),
        (
            tokens,
            parts,
            logprobs,
            top_values,
            top_ids,
            s.token_ids,
            s.positions,
            s.seq_lens,
            s.slot_mapping,
            s.draw_positions,
            s.block_tables,
            s.remaining,
            s.stop_ids,
            s.counters,
            s.token_ring,
            s.logprob_ring,
            s.top_value_ring,
            s.top_id_ring,
            s.history_tokens,
            s.history_counts,
            s.history_lengths,
            sizes["W"],
            block_size.bit_length() - 1,
            sizes["S"],
            sizes["R"],
            0 if top_values is None else sizes["n"],
            sizes.get("C", 0),
            0 if parts is None else int(parts.shape[1]),
        ),
        pdl=True,
    )


def _check(state: StepState, sampled: Array, logprobs: Array, top_values: Array, top_ids: Array) -> dict[str, int]:
    """Everything about the arrays; the sizes by their letters."""
    sizes: dict[str, int] = {}
    for name, (dtype, letters) in _FIELDS.items():
        array = getattr(state, name)
        if array is None and name in _OPTIONAL:
            continue
        check_shape(_NAME, name, array, [None] * len(letters))
        for letter, size in zip(letters, array.shape):
            sizes.setdefault(letter, int(size))
        check_out(_NAME, array, [sizes[letter] for letter in letters], dtype, name=name)
    for group in _GROUPS:
        missing = [name for name in group if getattr(state, name) is None]
        if 0 < len(missing) < len(group):
            raise ValueError(f"{_NAME}: {missing[0]} is missing; give {', '.join(group)} together")
    if sizes["R"] == 0:
        raise ValueError(f"{_NAME}: token_ring has no rows")
    rows = (sizes["B"],)
    if sampled is not None and sampled.ndim == 2 and sampled.shape[1] > 0:
        check_out(_NAME, sampled, (*rows, int(sampled.shape[1])), _UINT64, name="sampled")
    else:
        check_out(_NAME, sampled, rows, _INT32, name="sampled")
    for name, array, ring, shape, dtype in (
        ("logprobs", logprobs, "logprob_ring", rows, FLOAT32),
        ("top[0]", top_values, "top_value_ring", (*rows, sizes.get("n", 0)), FLOAT32),
        ("top[1]", top_ids, "top_id_ring", (*rows, sizes.get("n", 0)), _INT32),
    ):
        if array is not None:
            if getattr(state, ring) is None:
                raise ValueError(f"{_NAME}: {name} is given, but the state has no {ring}")
            check_out(_NAME, array, shape, dtype, name=name)
    return sizes


def kernel_variants() -> list[Variant]:
    """Every instantiation that the operator can launch."""
    return [("advance.cu", _NAME, (threads,), None) for threads in (32, 256)]
