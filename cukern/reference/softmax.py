"""Oracles of softmax, log-softmax and the log-probabilities of given tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukern.reference._common import finish, widen

__all__ = ["log_softmax", "softmax", "token_logprobs"]


def _check_width(function: str, name: str, x: np.ndarray) -> None:
    if x.ndim < 1 or x.shape[-1] == 0:
        raise ValueError(f"{function}: {name} has shape {x.shape}, expected at least one column (the last axis)")


def _shifted(x: np.ndarray) -> np.ndarray:
    """``x`` minus the maximum of its row; NaN where that is inf - inf."""
    with np.errstate(invalid="ignore"):
        return x - np.max(x, axis=-1, keepdims=True)


def softmax(x: np.ndarray, *, out: np.ndarray | None = None) -> np.ndarray:
    """``exp(x) / sum(exp(x))`` over the last axis. See cukern.ops.softmax."""
    _check_width("softmax", "x", x)
    if x.size == 0:
        return finish(widen(x), x.dtype, out)
    weights = np.exp(_shifted(widen(x)))
    return finish(weights / weights.sum(axis=-1, keepdims=True), x.dtype, out)


def log_softmax(x: np.ndarray, *, dtype: Any = None, out: np.ndarray | None = None) -> np.ndarray:
    """``log(softmax(x))`` over the last axis. See cukern.ops.log_softmax."""
    _check_width("log_softmax", "x", x)
    if x.size == 0:
        return finish(widen(x), dtype or x.dtype, out)
    shifted = _shifted(widen(x))
    return finish(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)), dtype or x.dtype, out)


def token_logprobs(logits: np.ndarray, targets: np.ndarray, temperature: Any = 1.0) -> np.ndarray:
    """``log_softmax(logits / temperature)[targets]``; NaN for a target outside. See cukern.ops.token_logprobs."""
    _check_width("token_logprobs", "logits", logits)
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(f"token_logprobs: logits {logits.shape} and targets {targets.shape} must be [T, V] and [T]")
    rows, vocab = logits.shape
    x = widen(logits)
    temperatures = np.broadcast_to(np.asarray(temperature, x.dtype), (rows,))
    if not np.all((temperatures > 0) & np.isfinite(temperatures)):
        raise ValueError(f"token_logprobs: temperature must be positive and finite, got {temperature!r}")
    result = np.full(rows, np.nan, x.dtype)
    for row, target, t, i in zip(x, targets, temperatures, range(rows)):  # one row at a time: V is large
        if 0 <= target < vocab:
            with np.errstate(over="ignore"):
                shifted = _shifted(row) / t
            result[i] = shifted[target] - np.log(np.exp(shifted).sum())
    return result
