"""Paged caches for tests: shuffled blocks, NaN wherever no token lives, nonsense in unused table columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

UNUSED = 2**30 + 12345
"""Stands in table columns that must not be read."""


@dataclass
class Paged:
    """Keys and values of several sequences, laid out in pages."""

    keys: list[np.ndarray]
    values: list[np.ndarray]
    k_cache: np.ndarray
    v_cache: np.ndarray
    tables: np.ndarray
    seq_lens: np.ndarray


def normal(rng: np.random.Generator, shape: Sequence[int], dtype: Any, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(dtype)


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint32 if array.dtype.itemsize == 4 else np.uint16)


def paginate(
    rng: np.random.Generator, keys: list[np.ndarray], values: list[np.ndarray], block_size: int, *, spare: int = 2
) -> Paged:
    """Lay out [n, Hkv, D] sequences in random blocks of a cache with a few blocks to spare."""
    _, heads, dim = keys[0].shape
    columns = max(1, *(-(-len(k) // block_size) for k in keys)) + spare
    blocks = len(keys) * columns + 3
    tables = rng.permutation(blocks)[: len(keys) * columns].reshape(len(keys), columns).astype(np.int32)
    k_cache = np.full((blocks, heads, block_size, dim), np.nan, keys[0].dtype)
    v_cache = k_cache.copy()
    for b, (k, v) in enumerate(zip(keys, values)):
        for i in range(len(k)):
            k_cache[tables[b, i // block_size], :, i % block_size] = k[i]
            v_cache[tables[b, i // block_size], :, i % block_size] = v[i]
        tables[b, -(-len(k) // block_size) :] = UNUSED
    return Paged(keys, values, k_cache, v_cache, tables, np.array([len(k) for k in keys], np.int32))


def random_pages(
    rng: np.random.Generator, lengths: Sequence[int], heads: int, dim: int, block_size: int, dtype: Any
) -> Paged:
    """Random keys and values of the lengths given, in pages."""
    keys = [normal(rng, (n, heads, dim), dtype) for n in lengths]
    values = [normal(rng, (n, heads, dim), dtype) for n in lengths]
    return paginate(rng, keys, values, block_size)


def starts(lengths: Sequence[int]) -> np.ndarray:
    """cu_seqlens of the lengths."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
