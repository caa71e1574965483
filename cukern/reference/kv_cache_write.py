"""Oracle of the write into the paged key/value cache."""

from __future__ import annotations

import numpy as np

__all__ = ["kv_cache_write"]


def kv_cache_write(
    k: np.ndarray, v: np.ndarray, k_cache: np.ndarray, v_cache: np.ndarray, slot_mapping: np.ndarray
) -> None:
    """Copy token i of ``k`` and ``v`` [T, Hkv, D] to slot ``slot_mapping[i]``. See cukern.ops.kv_cache_write.

    Slot s is row ``s % bs`` of block ``s // bs`` of the caches [num_blocks, Hkv, bs, D]; -1 skips the token.
    """
    slots = np.asarray(slot_mapping)
    blocks, _, block_size, _ = k_cache.shape
    if slots.size and (int(slots.min()) < -1 or int(slots.max()) >= blocks * block_size):
        bad = int(slots.min()) if int(slots.min()) < -1 else int(slots.max())
        raise ValueError(
            f"kv_cache_write: slot_mapping contains {bad}, expected -1 (skip) to {blocks * block_size - 1} "
            f"({blocks} blocks of {block_size})"
        )
    used = slots >= 0
    block, row = np.divmod(slots[used], block_size)
    k_cache[block, :, row] = k[used].astype(k_cache.dtype, copy=False)
    v_cache[block, :, row] = v[used].astype(v_cache.dtype, copy=False)
