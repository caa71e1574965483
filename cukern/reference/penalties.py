"""Oracle of bias and penalties on logits."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["apply_penalties"]


def apply_penalties(
    logits: np.ndarray,
    *,
    tokens: np.ndarray | None = None,
    counts: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
    repetition: Any = 1.0,
    presence: Any = 0.0,
    frequency: Any = 0.0,
    bias_tokens: np.ndarray | None = None,
    biases: np.ndarray | None = None,
    bias_lengths: np.ndarray | None = None,
) -> np.ndarray:
    """Change logits [T, V] in place and return them. See cukern.ops.apply_penalties."""
    rows, vocab = logits.shape
    each = [np.broadcast_to(np.asarray(p, np.float64), (rows,)) for p in (repetition, presence, frequency)]
    for i in range(rows):
        row = logits[i]
        if bias_tokens is not None and biases is not None and bias_lengths is not None:
            for token, bias in zip(bias_tokens[i, : bias_lengths[i]], biases[i]):
                if 0 <= token < vocab:
                    row[token] += bias
        r, p, f = (float(e[i]) for e in each)
        if tokens is None or counts is None or lengths is None or (r, p, f) == (1, 0, 0):
            continue
        for token, count in zip(tokens[i, : lengths[i]], counts[i]):
            if 0 <= token < vocab:
                x = float(row[token])
                x = x / r if x > 0 else x * r
                row[token] = x - f * count - p if count > 0 else x
    return logits
