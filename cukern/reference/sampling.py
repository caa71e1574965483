"""Oracles of argmax, sample and top_logprobs, the random numbers of sample, and the checks of its parameters."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from cukern.reference._common import widen

__all__ = ["argmax", "check_parameter", "exponential", "philox", "sample", "top_logprobs"]

MAX_TOP = 32
"""Largest n of top_logprobs."""

# What a parameter of `sample` may be: test on finite float64 (or exact int) values, and the words for it.
_ALLOWED = {
    "temperature": (lambda v: v >= 0, "finite and not negative (0 = greedy)"),
    "top_k": (lambda v: v >= -1, "-1, 0 or None (off) or positive"),
    "top_p": (lambda v: (v > 0) & (v <= 1), "in (0, 1]"),
    "min_p": (lambda v: (v >= 0) & (v < 1), "in [0, 1)"),
    "seed": (lambda v: (v >= -(2**63)) & (v < 2**64), "a 64-bit integer"),
    "position": (lambda v: (v >= -(2**63)) & (v < 2**63), "a 64-bit integer"),
}
_INTEGERS = ("top_k", "seed", "position")
_OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def check_parameter(function: str, name: str, value: Any, rows: int) -> Any:
    """A parameter of ``sample`` that lives on the host: a Python number, or a NumPy array [rows]; checked.

    Returns
    -------
    int, float or ndarray [rows]

    Raises
    ------
    TypeError
        Neither a number nor an array of numbers, or not an integer where one is needed.
    ValueError
        Out of range, or an array of another length.
    """
    allowed, words = _ALLOWED[name]
    if value is None and name in _OFF:
        return _OFF[name]
    array = np.asarray(value)
    integer = name in _INTEGERS
    if array.dtype == object and array.ndim == 0 and isinstance(value, int):
        raise ValueError(f"{function}: {name} must be {words}, got {value}")
    if array.dtype.kind not in ("iu" if integer else "iuf") and array.dtype.name != "bfloat16":
        kind = "an integer" if integer else "a number"
        raise TypeError(f"{function}: {name} must be {kind} or an array [{rows}] of them, got {value!r}")
    if array.ndim and array.shape != (rows,):
        raise ValueError(f"{function}: {name} has shape {array.shape}, expected ({rows},) or a number")
    numbers = array if integer else array.astype(np.float64)
    bad = ~np.asarray(allowed(numbers) & np.isfinite(numbers))
    if bad.any():
        first = numbers[bad][0] if array.ndim else value
        raise ValueError(f"{function}: {name} must be {words}, got {first}")
    if array.ndim:
        return array
    return operator.index(array.item()) if integer else float(numbers)


def argmax(logits: np.ndarray, *, parts: bool = False) -> np.ndarray:
    """Index of the largest logit of each row, int32; lowest on ties, NaN counts as largest. See cukern.ops.argmax."""
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(f"argmax: logits has shape {logits.shape}, expected [T, V] with at least one column")
    tokens = np.argmax(widen(logits), axis=1).astype(np.int32)
    return (~tokens).view(np.uint32).astype(np.uint64)[:, None] if parts else tokens


def unpack(best: np.ndarray) -> np.ndarray:
    """Tokens, int32, of values that order tokens: the complement of one is the low half of its value."""
    return ~best.astype(np.uint32).view(np.int32)


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    Parameters
    ----------
    counter : ndarray [n, 4] of uint32
    key : two integers below 2**32

    Returns
    -------
    ndarray [n, 4] of uint32
    """
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = (int(k) for k in key)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ np.uint64(k0), b & low, (a >> half) ^ c3 ^ np.uint64(k1), a & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def exponential(seed: int, position: int, index: np.ndarray) -> np.ndarray:
    """The exponential random number of each vocabulary index, float64: ``-log1p(-v)`` with v uniform in (0, 1).

    Word ``index % 4`` of Philox at the counter (index // 4, position low, position high, 0) under the key (seed low,
    seed high); ``v = (word + 1/2) / 2**32``, at most 1 - 2**-24, so that the result lies in [2**-33, 16.7].
    """
    index = np.asarray(index, np.int64)
    position, seed = position & (2**64 - 1), seed & (2**64 - 1)
    group, place = np.unique(index >> 2, return_inverse=True)
    counter = np.zeros((len(group), 4), np.uint32)
    counter[:, 0] = group
    counter[:, 1] = position & 0xFFFFFFFF
    counter[:, 2] = position >> 32
    words = philox(counter, (seed & 0xFFFFFFFF, seed >> 32))[place, index & 3]
    return -np.log1p(-np.minimum((words + 0.5) * 2.0**-32, 1 - 2.0**-24))


def sample(
    logits: np.ndarray,
    *,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    seed: Any = 0,
    position: Any = 0,
) -> np.ndarray:
    """Draw one token a row, int32. See cukern.ops.sample: the same token, up to rounding at near ties."""
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(f"sample: logits has shape {logits.shape}, expected [T, V] with at least one column")
    rows = len(logits)
    given = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "position": position,
    }
    columns = {}
    for name, value in given.items():
        value = check_parameter("sample", name, value, rows)
        columns[name] = value.tolist() if isinstance(value, np.ndarray) else [value] * rows
    tokens = np.empty(rows, np.int32)
    for i in range(rows):
        tokens[i] = _sample_row(logits[i].astype(np.float64), **{name: column[i] for name, column in columns.items()})
    return tokens


def _sample_row(
    x: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> int:
    largest = x.max()
    if temperature == 0 or top_k == 1 or not np.isfinite(largest):
        return int(np.argmax(x))
    temperature = max(float(np.float32(temperature)), 2.0**-126)
    with np.errstate(over="ignore"):
        weights = np.exp((x - largest) / temperature)
    keep = np.ones(len(x), bool)
    if 0 < top_k < len(x):
        keep = x >= np.partition(x, len(x) - top_k)[len(x) - top_k]
    if top_p < 1:
        order = np.argsort(-x, kind="stable")
        mass = np.cumsum(np.where(keep, weights, 0.0)[order])
        crossing = min(int(np.searchsorted(mass, float(np.float32(top_p)) * mass[-1])), len(x) - 1)
        keep &= x >= x[order[crossing]]
    # The largest logit scores at least 1 / 16.7, so that a weight below 2**-38 never wins.
    keep &= weights >= max(float(np.float32(min_p)), 2.0**-38)
    index = np.nonzero(keep)[0]
    return int(index[np.argmax(weights[index] / exponential(seed, position, index))])


def top_logprobs(logits: np.ndarray, n: int, temperature: Any = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """The n largest log-probabilities of each row, descending, and their tokens. See cukern.ops.top_logprobs."""
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(f"top_logprobs: logits has shape {logits.shape}, expected [T, V] with at least one column")
    rows, vocab = logits.shape
    if not 1 <= n <= min(MAX_TOP, vocab):
        raise ValueError(f"top_logprobs: n must be in [1, {min(MAX_TOP, vocab)}] (V = {vocab}), got {n}")
    x = widen(logits)
    temperatures = np.broadcast_to(np.asarray(temperature, x.dtype), (rows,))
    if not np.all((temperatures > 0) & np.isfinite(temperatures)):
        raise ValueError(f"top_logprobs: temperature must be positive and finite, got {temperature!r}")
    values = np.full((rows, n), np.nan, x.dtype)
    ids = np.full((rows, n), -1, np.int32)
    for i, (row, t) in enumerate(zip(x, temperatures)):
        largest = row.max()
        if np.isfinite(largest):
            ids[i] = np.argsort(-row, kind="stable")[:n]
            with np.errstate(over="ignore"):
                shifted = (row - largest) / t
            values[i] = shifted[ids[i]] - np.log(np.exp(shifted).sum())
    return values, ids
