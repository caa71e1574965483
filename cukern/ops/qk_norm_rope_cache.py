"""The fused step between the QKV projection and attention."""

from __future__ import annotations

from cukern import reference
from cukern.jit import kernel
from cukern.ops._arrays import (
    BFLOAT16,
    CTYPES,
    FLOAT16,
    FLOAT32,
    Array,
    check_apart,
    check_dtype,
    check_out,
    check_shape,
    contiguous,
    place_arrays,
)
from cukern.ops._fast import Plans
from cukern.ops._paged import check_caches, check_slots
from cukern.ops._rows import INDICES, Variant, allowed_floats, as_count, as_eps, ceil_div

__all__ = ["kernel_variants", "qk_norm_rope_cache"]

_DTYPES = (FLOAT16, BFLOAT16)
_PLANS = Plans()
_MAX_THREADS = 256


def qk_norm_rope_cache(
    qkv: Array,
    q_weight: Array,
    k_weight: Array,
    positions: Array,
    table: Array,
    k_cache: Array,
    v_cache: Array,
    slot_mapping: Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
    out: Array | None = None,
) -> Array:
    """RMSNorm each query and key head, rotate it, and put keys and values into the paged cache, in one pass.

    ``q = rope(rms_norm(q, q_weight))`` and the same for k, head by head, in float32 with one rounding at the end; v is
    copied exactly. A token's results do not depend on the other tokens.

    Parameters
    ----------
    qkv : array [T, (num_heads + 2 * num_kv_heads) * D], float16 or bfloat16
        Packed projections: query heads, key heads, value heads. D is a multiple of 16, at most 256.
    q_weight, k_weight : array [D], float32
        Weights of the head norms.
    positions : array [T], int32 or int64
        Position of each token.
    table : array [P, D], float32
        Cosines and sines, from :func:`rope_table`.
    k_cache, v_cache : array [num_blocks, num_kv_heads, block_size, D]
        Written in place; dtype of ``qkv``.
    slot_mapping : array [T], int64
        Slot s is row ``s % block_size`` of block ``s // block_size``; -1 writes no key and value (q is still
        computed). Two tokens must not share a slot. On a GPU a slot outside the cache is skipped like -1.
    num_heads, num_kv_heads : int
        Query heads, and key (and value) heads.
    eps : float
        Of the head norms.
    out : array [T, num_heads, D], optional
        Written in place and returned.

    Returns
    -------
    array [T, num_heads, D]
        Queries, dtype of ``qkv``. On a GPU a position outside the table makes q and k NaN.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype or shape; for NumPy input also a position or slot out of range.

    Notes
    -----
    Qwen3 (arXiv 2505.09388) norms each head before the rotation; RoPE as in :func:`rope`.
    """
    name = "qk_norm_rope_cache"
    given = (qkv, q_weight, k_weight, positions, table, k_cache, v_cache, slot_mapping)
    options = (num_heads, num_kv_heads, eps)
    simple = out is None and type(num_heads) is int and type(num_kv_heads) is int and type(eps) is float
    found = _PLANS.find(given, options) if simple else None
    if found is not None and abs(found[1][5] - found[1][6]) >= found[0].extra:  # the caches are apart
        out = found[0].empty()
        found[0].launch(*found[1], out.data.ptr)
        return out
    place, (qkv, q_weight, k_weight, positions, table, k_cache, v_cache, slot_mapping, out) = place_arrays(
        name,
        qkv=qkv,
        q_weight=q_weight,
        k_weight=k_weight,
        positions=positions,
        table=table,
        k_cache=k_cache,
        v_cache=v_cache,
        slot_mapping=slot_mapping,
        out=out,
    )
    check_dtype(name, "qkv", qkv, allowed_floats(place, _DTYPES))
    check_dtype(name, "table", table, allowed_floats(place, (FLOAT32,)))
    check_dtype(name, "positions", positions, list(INDICES))
    check_shape(name, "table", table, (None, None))
    dim = table.shape[1]
    if dim % 16 or not 16 <= dim <= 256:
        raise ValueError(f"{name}: table has {dim} columns, expected a head_dim that is a multiple of 16, 16 to 256")
    num_heads, num_kv_heads = as_count(name, "num_heads", num_heads), as_count(name, "num_kv_heads", num_kv_heads)
    eps = as_eps(name, eps)
    heads = num_heads + 2 * num_kv_heads
    check_shape(name, "qkv", qkv, (None, heads * dim))
    tokens = qkv.shape[0]
    for label, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        check_dtype(name, label, weight, allowed_floats(place, (FLOAT32,)))
        check_shape(name, label, weight, (dim,))
    check_shape(name, "positions", positions, (tokens,))
    check_caches(name, k_cache, v_cache, num_kv_heads, dim, qkv.dtype)
    check_slots(name, slot_mapping, tokens)
    if out is None:
        out = place.empty((tokens, num_heads, dim), qkv.dtype)
    else:
        check_out(name, out, (tokens, num_heads, dim), qkv.dtype)
        check_apart(name, "out", out, qkv=qkv, table=table, k_cache=k_cache, v_cache=v_cache)
    if tokens == 0:
        return out
    if table.shape[0] == 0:
        raise ValueError(f"{name}: table has no rows; build it for at least one position")
    if place.kind == "reference":
        return reference.qk_norm_rope_cache(
            qkv,
            q_weight,
            k_weight,
            positions,
            table,
            k_cache,
            v_cache,
            slot_mapping,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            eps=eps,
            out=out,
        )
    lanes = 1 << (dim // 16 - 1).bit_length()  # threads of a head, 8 pairs each: a power of two for the butterfly
    threads = min(_MAX_THREADS, ceil_div(heads * lanes, 32) * 32)
    blocks_per_token = ceil_div(heads, threads // lanes)
    blocks, _, block_size, _ = k_cache.shape
    sources = [contiguous(a, place) for a in (qkv, q_weight, k_weight, positions, table)]
    sizes = (num_heads, num_kv_heads, dim, lanes, blocks_per_token, table.shape[0], block_size, blocks * block_size)
    launch = kernel("qk_norm_rope_cache.cu", "qk_norm_rope_cache", (CTYPES[qkv.dtype], INDICES[positions.dtype]))
    grid, block = (tokens * blocks_per_token,), (threads,)
    arguments = (*sources, k_cache, v_cache, contiguous(slot_mapping, place), out, *sizes, eps)
    launch(grid, block, arguments, pdl=True)
    if simple and place.kind == "cuda":
        _PLANS.keep(given, options, launch, grid, block, arguments, out, extra=k_cache.nbytes, pdl=True)
    return out


def kernel_variants() -> list[Variant]:
    """Every instantiation that the operator can launch."""
    return [
        ("qk_norm_rope_cache.cu", "qk_norm_rope_cache", (CTYPES[d], index), None)
        for d in _DTYPES
        for index in INDICES.values()
    ]
