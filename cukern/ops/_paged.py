"""Checks of the paged key/value cache, shared by the operators that write it."""

from __future__ import annotations

import numpy as np

from cukern.ops._arrays import Array, check_dtype, check_out, check_shape, pointer

__all__ = ["check_caches", "check_slots"]


def check_caches(function: str, k_cache: Array, v_cache: Array, heads: int, dim: int, dtype: np.dtype) -> None:
    """Both caches are [num_blocks, heads, block_size, dim] of the dtype, of one shape, writable, contiguous, apart."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_dtype(function, name, cache, [dtype])
        check_shape(function, name, cache, (None, heads, None, dim))
        check_out(function, cache, cache.shape, dtype, name=name)
    if k_cache.shape != v_cache.shape:
        raise ValueError(
            f"{function}: k_cache has shape {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}, expected one shape"
        )
    if abs(pointer(k_cache) - pointer(v_cache)) < k_cache.nbytes:
        raise ValueError(f"{function}: k_cache shares memory with v_cache; pass two arrays")


def check_slots(function: str, slot_mapping: Array, tokens: int) -> None:
    check_dtype(function, "slot_mapping", slot_mapping, [np.int64])
    check_shape(function, "slot_mapping", slot_mapping, (tokens,))
