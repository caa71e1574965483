"""Bias and penalties on logits, from a list of the tokens that a sequence holds."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukern import reference
from cukern.jit import kernel
from cukern.ops._arrays import (
    FLOAT32,
    Array,
    Place,
    broadcast_rows,
    check_dtype,
    check_out,
    check_shape,
    contiguous,
    place_arrays,
)
from cukern.ops._rows import Variant
from cukern.ops._vocab import check_logits

__all__ = ["apply_penalties", "kernel_variants"]

_NAME = "apply_penalties"
_THREADS = 512
_INT32 = np.dtype(np.int32)


def apply_penalties(
    logits: Array,
    *,
    tokens: Array | None = None,
    counts: Array | None = None,
    lengths: Array | None = None,
    repetition: Any = 1.0,
    presence: Any = 0.0,
    frequency: Any = 0.0,
    bias_tokens: Array | None = None,
    biases: Array | None = None,
    bias_lengths: Array | None = None,
) -> Array:
    """Add a bias to some logits, then lower those of tokens that have been used, in place.

    First ``x[t] += bias`` for every biased token; then for every token of the history ``x[t] / repetition`` where
    positive and ``x[t] * repetition`` where not (Keskar et al., "CTRL", arXiv 1909.05858, as Hugging Face transformers
    does it: once a token, prompt included); then, for tokens with a count above 0, ``x[t] - frequency * count -
    presence`` (OpenAI's API: the count is that of the output). The temperature comes afterwards.

    Parameters
    ----------
    logits : array [T, V], float32
        Contiguous; changed.
    tokens, counts : array [T, C], int32, optional
        Tokens of each row, none twice, and how often each occurs in the output (0: in the prompt only).
    lengths : array [T], int32, optional
        How many of the C are in use.
    repetition, presence, frequency : float or array [T]
        Repetition is positive; 1, 0 and 0 switch them off.
    bias_tokens, biases : array [T, M], int32 and float32, optional
        Tokens of each row, none twice, and what is added.
    bias_lengths : array [T], int32, optional
        How many of the M are in use.

    Returns
    -------
    array [T, V]
        ``logits``. A token outside the vocabulary changes nothing.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype or shape, a history or a bias of which only a part is given, or a repetition that is not positive
        (where the host can see it).
    """
    place, (logits, tokens, counts, lengths, bias_tokens, biases, bias_lengths) = place_arrays(
        _NAME,
        logits=logits,
        tokens=tokens,
        counts=counts,
        lengths=lengths,
        bias_tokens=bias_tokens,
        biases=biases,
        bias_lengths=bias_lengths,
    )
    rows, vocab = check_logits(_NAME, logits, place)
    on_host = place.kind == "reference"
    check_out(_NAME, logits, logits.shape, logits.dtype if on_host else FLOAT32, name="logits")
    capacity = _check_list(("tokens", "counts", "lengths"), (tokens, counts, lengths), rows, _INT32)
    most = _check_list(("bias_tokens", "biases", "bias_lengths"), (bias_tokens, biases, bias_lengths), rows, FLOAT32)
    each = [
        _parameter(name, value, rows, place)
        for name, value in (("repetition", repetition), ("presence", presence), ("frequency", frequency))
    ]
    if rows == 0 or (tokens is None and bias_tokens is None):
        return logits
    if on_host:
        return reference.apply_penalties(
            logits,
            tokens=tokens,
            counts=counts,
            lengths=lengths,
            repetition=each[0],
            presence=each[1],
            frequency=each[2],
            bias_tokens=bias_tokens,
            biases=biases,
            bias_lengths=bias_lengths,
        )
    history = [contiguous(a, place) for a in (tokens, counts, lengths)]
    bias = [contiguous(a, place) for a in (bias_tokens, biases, bias_lengths)]
    kernel("penalties.cu", _NAME)((rows,), (_THREADS,), (logits, *history, *each, *bias, vocab, capacity, most))
    return logits


def _check_list(names: tuple[str, str, str], arrays: tuple[Array, Array, Array], rows: int, dtype: np.dtype) -> int:
    """A list of tokens with values of ``dtype``: all three arrays or none; the length of a row."""
    missing = [n for n, a in zip(names, arrays) if a is None]
    if missing:
        if len(missing) < 3:
            raise ValueError(f"{_NAME}: {missing[0]} is missing; give {', '.join(names)} together")
        return 0
    tokens, values, lengths = arrays
    check_shape(_NAME, names[0], tokens, (rows, None))
    check_shape(_NAME, names[1], values, tokens.shape)
    check_shape(_NAME, names[2], lengths, (rows,))
    for name, array, wanted in zip(names, arrays, (_INT32, dtype, _INT32)):
        check_dtype(_NAME, name, array, [wanted])
    return int(tokens.shape[1])


def _parameter(name: str, value: Any, rows: int, place: Place) -> Array:
    if name == "repetition" and isinstance(value, (int, float, np.ndarray, np.generic)):
        bad = ~(np.asarray(value, np.float64) > 0)
        if bad.any():
            raise ValueError(f"{_NAME}: repetition must be positive, got {np.asarray(value)[bad].flat[0]}")
    return broadcast_rows(_NAME, name, value, rows, FLOAT32, place)


def kernel_variants() -> list[Variant]:
    """Every instantiation that the operator can launch."""
    return [("penalties.cu", _NAME, (), None)]
