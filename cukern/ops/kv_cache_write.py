"""Writing keys and values into the paged cache."""

from __future__ import annotations

from cukern import reference
from cukern.jit import kernel
from cukern.ops._arrays import (
    BFLOAT16,
    CTYPES,
    FLOAT16,
    Array,
    check_dtype,
    check_shape,
    contiguous,
    place_arrays,
)
from cukern.ops._paged import check_caches, check_slots
from cukern.ops._rows import Variant, allowed_floats, ceil_div, check_row_length, vector_width

__all__ = ["kernel_variants", "kv_cache_write"]

_DTYPES = (FLOAT16, BFLOAT16)


def kv_cache_write(k: Array, v: Array, k_cache: Array, v_cache: Array, slot_mapping: Array) -> None:
    """Copy the keys and values of each token to its slot of the paged cache.

    Parameters
    ----------
    k, v : array [T, Hkv, D], float16 or bfloat16
        Keys and values of T tokens.
    k_cache, v_cache : array [num_blocks, Hkv, block_size, D]
        Written in place; same dtype.
    slot_mapping : array [T], int64
        Slot s is row ``s % block_size`` of block ``s // block_size``; -1 skips the token. Two tokens must not share a
        slot. On a GPU a slot outside the cache is skipped like -1.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype or shape; for NumPy input also a slot outside the cache.
    """
    name = "kv_cache_write"
    place, (k, v, k_cache, v_cache, slot_mapping) = place_arrays(
        name, k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping
    )
    check_dtype(name, "k", k, allowed_floats(place, _DTYPES))
    check_dtype(name, "v", v, [k.dtype])
    check_shape(name, "k", k, (None, None, None))
    check_shape(name, "v", v, k.shape)
    tokens, heads, dim = k.shape
    check_caches(name, k_cache, v_cache, heads, dim, k.dtype)
    check_slots(name, slot_mapping, tokens)
    if k.size == 0 or (place.kind != "reference" and k_cache.size == 0):
        return
    if place.kind == "reference":
        reference.kv_cache_write(k, v, k_cache, v_cache, slot_mapping)
        return
    check_row_length(name, "k (heads times D)", heads * dim)
    width = vector_width(dim, k.dtype)
    blocks, _, block_size, _ = k_cache.shape
    launch = kernel("kv_cache_write.cu", "kv_cache_write", (CTYPES[k.dtype], width))
    sources = [contiguous(a, place) for a in (k, v)]
    slots = contiguous(slot_mapping, place)
    launch(
        (ceil_div(tokens * heads * (dim // width), 256),),
        (256,),
        (*sources, k_cache, v_cache, slots, tokens, heads, dim, block_size, blocks * block_size),
    )


def kernel_variants() -> list[Variant]:
    """Every instantiation that the operator can launch."""
    return [
        ("kv_cache_write.cu", "kv_cache_write", (CTYPES[d], width), None)
        for d in _DTYPES
        for width in (16 // d.itemsize, 1)
    ]
