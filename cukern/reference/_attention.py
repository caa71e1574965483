"""What the two attention oracles share: exact softmax attention of one sequence, and reading pages of a cache."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["attend", "compute_dtype", "default_scale", "gather_pages"]

QUERY_BLOCK = 256
"""Queries per step: bounds the score matrix, and lets causal attention leave out the keys after the block."""


def compute_dtype(array: np.ndarray) -> type[np.floating[Any]]:
    """float64 for float64 input (the oracle of the tests), else float32."""
    return np.float64 if array.dtype == np.float64 else np.float32


def default_scale(scale: float | None, head_dim: int) -> float:
    """1 / sqrt(head_dim) unless given."""
    return float(head_dim) ** -0.5 if scale is None else float(scale)


def gather_pages(cache: np.ndarray, table: np.ndarray, length: int) -> np.ndarray:
    """The first ``length`` tokens of a sequence: [length, Hkv, D] from a cache [num_blocks, Hkv, block_size, D].

    Only the columns of the block table that hold tokens are read.
    """
    heads, block_size, head_dim = cache.shape[1:]
    pages = cache[np.asarray(table[: -(-length // block_size)], np.int64)]
    return pages.transpose(0, 2, 1, 3).reshape(-1, heads, head_dim)[:length]


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool, scale: float, dtype: type[np.floating[Any]]
) -> tuple[np.ndarray, np.ndarray]:
    """softmax(scale * q k^T) v of one sequence, grouped-query, computed in ``dtype``.

    Parameters
    ----------
    q : ndarray [n, Hq, D]
    k, v : ndarray [m, Hkv, D]
        Query head h reads key/value head h // (Hq / Hkv).
    causal : bool
        Query i attends to the keys j <= i + m - n (aligned bottom-right).

    Returns
    -------
    ndarray [n, Hq, D], ndarray [n, Hq]
        Output, and the natural log of the sum of exponentials; zeros and -inf where a query sees no key.
    """
    n, heads, head_dim = q.shape
    m, kv_heads = k.shape[:2]
    out = np.zeros((n, heads, head_dim), dtype)
    lse = np.full((n, heads), -np.inf, dtype)
    if m == 0:
        return out, lse
    group = heads // kv_heads
    # [Hkv, D, m] and [Hkv, m, D]: one matrix product serves the `group` query heads of a kv head
    keys = np.ascontiguousarray(k.transpose(1, 2, 0).astype(dtype))
    values = np.ascontiguousarray(v.transpose(1, 0, 2).astype(dtype))
    offset = m - n
    for start in range(0, n, QUERY_BLOCK):
        stop = min(n, start + QUERY_BLOCK)
        rows = stop - start
        seen = min(m, stop + offset) if causal else m
        if seen <= 0:
            continue
        block = q[start:stop].reshape(rows, kv_heads, group, head_dim).transpose(1, 2, 0, 3)
        block = block.astype(dtype).reshape(kv_heads, group * rows, head_dim)
        scores = (block @ keys[:, :, :seen]).reshape(kv_heads, group, rows, seen)
        scores *= dtype(scale)
        if causal:
            hidden = np.arange(seen)[None, :] > np.arange(start, stop)[:, None] + offset
            scores[:, :, hidden] = -np.inf
        top = scores.max(axis=-1, keepdims=True)
        empty = np.isneginf(top)
        np.subtract(scores, np.where(empty, dtype(0), top), out=scores)
        np.exp(scores, out=scores)
        total = scores.sum(axis=-1, keepdims=True)
        result = scores.reshape(kv_heads, group * rows, seen) @ values[:, :seen]
        result = result.reshape(kv_heads, group, rows, head_dim) / np.where(empty, dtype(1), total)
        out[start:stop] = result.transpose(2, 0, 1, 3).reshape(rows, heads, head_dim)
        with np.errstate(divide="ignore"):
            sums = np.where(empty, -np.inf, top + np.log(total))
        lse[start:stop] = sums[..., 0].transpose(2, 0, 1).reshape(rows, heads)
    return out, lse
