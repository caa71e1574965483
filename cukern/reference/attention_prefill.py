"""Oracle of ``cukern.ops.attention_prefill``."""

from __future__ import annotations

import numpy as np

from cukern.reference._attention import attend, compute_dtype, default_scale, gather_pages

__all__ = ["attention_prefill"]


def attention_prefill(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    cu_seqlens_q: np.ndarray | None = None,
    cu_seqlens_k: np.ndarray | None = None,
    block_tables: np.ndarray | None = None,
    seq_lens: np.ndarray | None = None,
    causal: bool = True,
    scale: float | None = None,
    return_lse: bool = False,
    out: np.ndarray | None = None,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """Softmax attention of whole sequences or of chunks of them; see ``cukern.ops.attention_prefill``.

    Computed in float32, or in float64 if q is float64; the output has the dtype of q.
    """
    dtype = compute_dtype(q)
    scale = default_scale(scale, q.shape[-1])
    result = np.empty(q.shape, q.dtype) if out is None else out
    lse = np.full(q.shape[:-1], -np.inf, np.float64 if dtype is np.float64 else np.float32)

    if cu_seqlens_q is None:
        for b in range(q.shape[0]):
            result[b], lse[b] = attend(q[b], k[b], v[b], causal=causal, scale=scale, dtype=dtype)
    else:
        for b in range(len(cu_seqlens_q) - 1):
            rows = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
            if rows.start >= rows.stop:
                continue
            if block_tables is not None and seq_lens is not None:
                length = int(seq_lens[b])
                keys = gather_pages(k, block_tables[b], length)
                values = gather_pages(v, block_tables[b], length)
            else:
                cu_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
                columns = slice(int(cu_k[b]), int(cu_k[b + 1]))
                keys, values = k[columns], v[columns]
            result[rows], lse[rows] = attend(q[rows], keys, values, causal=causal, scale=scale, dtype=dtype)
    return (result, lse) if return_lse else result
