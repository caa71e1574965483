"""Oracle of ``cukern.ops.attention_decode``."""

from __future__ import annotations

import numpy as np

from cukern.reference._attention import attend, compute_dtype, default_scale, gather_pages

__all__ = ["attention_decode"]


def attention_decode(
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    block_tables: np.ndarray,
    seq_lens: np.ndarray,
    *,
    scale: float | None = None,
    max_seq_len: int | None = None,
    return_lse: bool = False,
    static_cache: bool = False,
    out: np.ndarray | None = None,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """One new query per sequence over a paged cache; see ``cukern.ops.attention_decode``.

    Computed in float32, or in float64 if q is float64; the output has the dtype of q. ``max_seq_len`` and
    ``static_cache`` are for the launch and ignored here.
    """
    dtype = compute_dtype(q)
    scale = default_scale(scale, q.shape[-1])
    result = np.empty(q.shape, q.dtype) if out is None else out
    lse = np.full(q.shape[:-1], -np.inf, np.float64 if dtype is np.float64 else np.float32)
    for b in range(q.shape[0]):
        length = int(seq_lens[b])
        keys = gather_pages(k_cache, block_tables[b], length)
        values = gather_pages(v_cache, block_tables[b], length)
        one, one_lse = attend(q[b : b + 1], keys, values, causal=False, scale=scale, dtype=dtype)
        result[b], lse[b] = one[0], one_lse[0]
    return (result, lse) if return_lse else result
