"""What the two attention operators share: checks, strided arguments, the constants of the softmax."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cukern.ops._arrays import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    Array,
    Place,
    check_apart,
    check_dtype,
    check_shape,
    contiguous,
)

__all__ = [
    "COMPILED_HEAD_DIMS",
    "HEAD_DIMS",
    "PAGE_SIZES",
    "check_caches",
    "check_heads",
    "check_index",
    "check_lengths",
    "check_pages",
    "check_views_apart",
    "softmax_constants",
    "strided",
]

HEAD_DIMS = range(16, 257, 16)
"""Head dimensions the kernels are instantiated for."""

COMPILED_HEAD_DIMS = (16, 32, 64, 80, 96, 128, 160, 192, 256)
"""Those compiled ahead of time and checked for register spills; one of each structure, and the common ones."""

PAGE_SIZES = (16, 32, 64, 128, 256)
"""Tokens per block of a paged cache."""

_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_MAX_TOKENS = (1 << 30) - 256  # kernels add a tile to a row and to 2^30 in 32 bits


def check_heads(function: str, place: Place, q: Array, heads: int, kv_heads: int, head_dim: int) -> None:
    """Dtype of q, a whole number of query heads per key/value head, a head_dim that the kernels have."""
    halves: list[Any] = [FLOAT16, BFLOAT16]
    check_dtype(function, "q", q, [*halves, FLOAT32, np.float64] if place.kind == "reference" else halves)
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{function}: {heads} query heads are no multiple of {kv_heads} key/value heads")
    if head_dim == 0 or (place.kind != "reference" and head_dim not in HEAD_DIMS):
        raise ValueError(
            f"{function}: head_dim {head_dim} is not supported; it must be a multiple of 16 from 16 to 256"
        )


def check_index(function: str, name: str, array: Array, shape: tuple[int | None, ...], place: Place) -> Array:
    """An int32 array of the shape, contiguous."""
    check_dtype(function, name, array, [np.int32])
    check_shape(function, name, array, shape)
    return contiguous(array, place)


def check_caches(
    function: str, place: Place, names: tuple[str, str], k: Array, v: Array, head_dim: int, dtype: np.dtype
) -> None:
    """Caches [num_blocks, Hkv, block_size, D] of one shape, the dtype of q, and a block size that the kernels know."""
    check_shape(function, names[0], k, (None, None, None, head_dim))
    check_shape(function, names[1], v, k.shape)
    for name, cache in zip(names, (k, v)):
        check_dtype(function, name, cache, [dtype])
    if k.shape[2] == 0 or (place.kind != "reference" and k.shape[2] not in PAGE_SIZES):
        raise ValueError(
            f"{function}: {names[0]} has block_size {k.shape[2]}, expected one of {', '.join(map(str, PAGE_SIZES))}"
        )


def check_lengths(function: str, name: str, cumulative: np.ndarray, tokens: int) -> None:
    """Values of a cu_seqlens array on the host: 0, ascending, at most ``tokens``."""
    if cumulative[0] != 0 or (np.diff(cumulative) < 0).any() or cumulative[-1] > tokens:
        raise ValueError(
            f"{function}: {name} must start at 0, never fall and end at {tokens} or below, "
            f"got {cumulative.tolist()[:8]}"
        )


def check_pages(function: str, tables: np.ndarray, seq_lens: np.ndarray, blocks: int, block_size: int) -> None:
    """Values of seq_lens and of the used part of block_tables on the host."""
    capacity = tables.shape[1] * block_size
    for b, length in enumerate(seq_lens.tolist()):
        if not 0 <= length <= capacity:
            raise ValueError(
                f"{function}: seq_lens[{b}] is {length}, but {tables.shape[1]} columns of block_tables hold at most "
                f"{capacity} tokens"
            )
        used = tables[b, : -(-length // block_size)]
        if ((used < 0) | (used >= blocks)).any():
            raise ValueError(f"{function}: block_tables[{b}] names a block outside the cache of {blocks} blocks")


def softmax_constants(function: str, scale: float | None, head_dim: int) -> tuple[float, float]:
    """(scale, scale * log2(e)), the second rounded once to float32: prefill and decode must use one number."""
    try:
        value = head_dim**-0.5 if scale is None else float(scale)
    except (TypeError, ValueError):
        raise TypeError(f"{function}: scale must be a number, got {scale!r}") from None
    except OverflowError:  # an int beyond float64
        value = math.inf
    # Neither may become 0 or infinite in float32, where -inf (a masked score) times it would be NaN.
    if not _SMALLEST <= value <= _LARGEST / math.log2(math.e):
        raise ValueError(f"{function}: scale must be positive and finite in float32, times log2(e) too, got {scale!r}")
    return value, float(np.float32(value * math.log2(math.e)))


def strided(function: str, name: str, array: Array, place: Place) -> tuple[Array, tuple[int, ...]]:
    """An array for a kernel that takes strides, and its strides in elements without the last, which is 1.

    A view whose rows start at multiples of 16 bytes (a slice of a packed qkv buffer, one layer of a cache) is taken as
    it is; another is copied.
    """
    for n in array.shape:
        if n > _MAX_TOKENS:
            raise ValueError(f"{function}: {name} has shape {tuple(array.shape)}, a side beyond {_MAX_TOKENS}")
    if not _fits(array):
        array = contiguous(array, place) if not array.flags.c_contiguous else array.copy()
    strides = tuple(s // array.itemsize if n > 1 else 0 for s, n in zip(array.strides[:-1], array.shape))
    return _as_pointer(array, strides), strides


def check_views_apart(function: str, out: Array, place: Place, **inputs: Array) -> None:
    """`check_apart` for inputs whose views are taken as they are: from their first to their last element. All of q may
    be given as out."""
    taken = {name: strided(function, name, array, place)[0] for name, array in inputs.items() if _fits(array)}
    check_apart(function, "out", out, same="q", **taken)


def _fits(array: Array) -> bool:
    item = array.itemsize
    if array.shape[-1] > 1 and array.strides[-1] != item:
        return False
    sides = [(n, s) for n, s in zip(array.shape[:-1], array.strides) if n > 1]
    if any(s % 16 or s < 0 for _, s in sides) or any(s >= item << 31 for _, s in sides[-2:]):
        return False
    pointer = array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data.ptr
    return array.size == 0 or pointer % 16 == 0


def _as_pointer(array: Array, strides: tuple[int, ...]) -> Array:
    """A contiguous 1-D array over the elements from the first to the last one of a view."""
    if array.flags.c_contiguous or array.size == 0:
        return array
    span = array.shape[-1] + sum((n - 1) * s for n, s in zip(array.shape, strides))
    if isinstance(array, np.ndarray):
        return np.lib.stride_tricks.as_strided(array, (span,), (array.itemsize,), writeable=False)
    import cupy

    return cupy.ndarray((span,), array.dtype, memptr=array.data)
