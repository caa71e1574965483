"""Oracle of the fused step between the QKV projection and attention."""

from __future__ import annotations

import numpy as np

from cukern.reference._common import finish, widen
from cukern.reference.kv_cache_write import kv_cache_write
from cukern.reference.rms_norm import rms_norm
from cukern.reference.rope import rope

__all__ = ["qk_norm_rope_cache"]


def qk_norm_rope_cache(
    qkv: np.ndarray,
    q_weight: np.ndarray,
    k_weight: np.ndarray,
    positions: np.ndarray,
    table: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    slot_mapping: np.ndarray,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """``rope(rms_norm(q head))``, the same for k, and k, v into the paged cache. See cukern.ops.qk_norm_rope_cache."""
    tokens, dim = qkv.shape[0], table.shape[1]
    heads = qkv.reshape(tokens, num_heads + 2 * num_kv_heads, dim)
    q, k, v = np.split(heads, [num_heads, num_heads + num_kv_heads], axis=1)
    # one rounding at the end: the normed heads stay in the dtype of the computation
    wide = widen(q, table).dtype
    q = rope(rms_norm(q, q_weight, eps, dtype=wide), positions, table)
    k = rope(rms_norm(k, k_weight, eps, dtype=wide), positions, table)
    kv_cache_write(k, v, k_cache, v_cache, slot_mapping)
    return finish(q, qkv.dtype, out)
