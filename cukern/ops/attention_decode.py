"""Attention of one new query per sequence over a paged cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukern.jit import Kernel, device, kernel
from cukern.jit.launch import check_flag
from cukern.ops._arrays import (
    CTYPES,
    FLOAT32,
    Array,
    Place,
    check_apart,
    check_out,
    check_shape,
    place_arrays,
    pointer,
)
from cukern.ops._attention import (
    COMPILED_HEAD_DIMS,
    check_caches,
    check_heads,
    check_index,
    check_pages,
    check_views_apart,
    softmax_constants,
    strided,
)
from cukern.ops._fast import Plans
from cukern.ops._numerics import ATTN_CHUNK
from cukern.reference.attention_decode import attention_decode as reference_attention_decode

__all__ = ["attention_decode", "kernel_variants"]

_NAME = "attention_decode"
_PLANS = Plans()
_WARPS = 4
_HEADS = 8  # query heads of a block
_SLOTS = 2  # of a warp's ring
_MOST_ITEMS = 32  # of a block: one a lane

_Made = tuple[Kernel, tuple[int], tuple[int], tuple[Any, ...]]
"""A launch: kernel, grid, block, arguments."""


def attention_decode(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    *,
    scale: float | None = None,
    max_seq_len: int | None = None,
    return_lse: bool = False,
    static_cache: bool = False,
    out: Array | None = None,
) -> Array | tuple[Array, Array]:
    """``softmax(scale * q k^T) v`` of one query per sequence over its first ``seq_lens`` cached keys, grouped-query.

    The keys are split into chunks of 128 that run side by side and are merged in ascending order (split-KV decoding,
    Dao et al. 2023): a row has the same bits at any batch size and length of its neighbours, and the same as the last
    row of ``attention_prefill``. Nothing about the launch depends on values on the device, so it can be captured into
    a graph whose lengths and tables change between replays.

    Parameters
    ----------
    q : array [B, Hq, D]
        float16 or bfloat16; D a multiple of 16 up to 256. A view whose rows start at multiples of 16 bytes is taken as
        it is, another is copied; the same for the caches.
    k_cache, v_cache : array [num_blocks, Hkv, block_size, D]
        Hq is a multiple of Hkv; block_size 16, 32, 64, 128 or 256.
    block_tables : array [B, max_blocks], int32
        Blocks of each sequence in order. Columns past its length may hold anything.
    seq_lens : array [B], int32
        Keys of each sequence.
    scale : float, optional
        Factor of the scores, positive; default 1 / sqrt(D).
    max_seq_len : int, optional
        No sequence is longer (known on the host); makes the launch and the workspace smaller than the
        ``max_blocks * block_size`` that the tables could hold. A longer sequence gives NaN.
    static_cache : bool
        Promises that the kernel launched just ahead of this one in the stream, and those that may still run beside it,
        write neither `block_tables` and `seq_lens` nor a key or value that a sequence reads, except its own last one
        (also where sequences share blocks). From compute capability 9.0 on older keys are then fetched while that
        kernel still runs.
    return_lse : bool
        Also return the natural logarithm of the sum of exponentials of the scaled scores.
    out : array [B, Hq, D], optional
        Written and returned; contiguous, dtype of q, no memory of the other arrays (all of q's may be given).

    Returns
    -------
    array [B, Hq, D], dtype of q
        Zero for a sequence of length 0.
    lse : float32 [B, Hq], only with `return_lse`
        -inf for a sequence of length 0.

    Raises
    ------
    TypeError, ValueError
        Wrong dtypes or shapes. For NumPy input without emulation also wrong lengths or block ids; a GPU clamps lengths
        to the tables instead, and a block id outside the cache gives NaN.
    """
    given = (q, k_cache, v_cache, block_tables, seq_lens, scale, max_seq_len, return_lse, static_cache, out)
    return _attention_decode(*given)


def _attention_decode_splits(
    splits: int,
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    *,
    scale: float | None = None,
    max_seq_len: int | None = None,
    return_lse: bool = False,
    static_cache: bool = False,
    out: Array | None = None,
) -> Array | tuple[Array, Array]:
    """:func:`attention_decode` with the chunks of a sequence over ``splits`` blocks, for tests and tuning."""
    given = (q, k_cache, v_cache, block_tables, seq_lens, scale, max_seq_len, return_lse, static_cache, out)
    return _attention_decode(*given, splits=splits)


def _attention_decode_blocks(
    blocks: int,
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    *,
    scale: float | None = None,
    max_seq_len: int | None = None,
    return_lse: bool = False,
    static_cache: bool = False,
    out: Array | None = None,
) -> Array | tuple[Array, Array]:
    """:func:`attention_decode` by ``blocks`` blocks that each take whole sequences, for tests and tuning."""
    given = (q, k_cache, v_cache, block_tables, seq_lens, scale, max_seq_len, return_lse, static_cache, out)
    return _attention_decode(*given, splits=1, blocks=blocks)


def _attention_decode(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    scale: float | None,
    max_seq_len: int | None,
    return_lse: bool,
    static_cache: bool,
    out: Array | None,
    splits: int | None = None,
    blocks: int | None = None,
) -> Array | tuple[Array, Array]:
    simple = (
        out is None
        and return_lse is False
        and type(static_cache) is bool
        and splits is None
        and blocks is None
        and (scale is None or type(scale) is float)
        and (max_seq_len is None or type(max_seq_len) is int)
    )
    given, options = (q, k_cache, v_cache, block_tables, seq_lens), (scale, max_seq_len, static_cache)
    found = _PLANS.find(given, options) if simple else None
    if found is not None:
        plan, addresses = found
        out = plan.empty()
        if plan.second is None:
            plan.launch(*addresses, out.data.ptr, 0, 0, 0)
        else:
            part_acc, part_stats = (plan.workspace(shape) for shape in plan.extra)
            plan.launch(*addresses, out.data.ptr, 0, part_acc.data.ptr, part_stats.data.ptr)
            plan.second(part_acc.data.ptr, part_stats.data.ptr, addresses[4], out.data.ptr, 0)
        return out
    place, (q, k_cache, v_cache, block_tables, seq_lens, out) = place_arrays(
        _NAME, q=q, k_cache=k_cache, v_cache=v_cache, block_tables=block_tables, seq_lens=seq_lens, out=out
    )
    check_shape(_NAME, "q", q, (None, None, None))
    batch, heads, head_dim = q.shape
    check_caches(_NAME, place, ("k_cache", "v_cache"), k_cache, v_cache, head_dim, q.dtype)
    check_heads(_NAME, place, q, heads, k_cache.shape[1], head_dim)
    index = (block_tables, seq_lens)
    block_tables = check_index(_NAME, "block_tables", block_tables, (batch, None), place)
    seq_lens = check_index(_NAME, "seq_lens", seq_lens, (batch,), place)
    value, c = softmax_constants(_NAME, scale, head_dim)
    check_flag(_NAME, "return_lse", return_lse)
    check_flag(_NAME, "static_cache", static_cache)
    static_cache = static_cache and block_tables is index[0] and seq_lens is index[1]  # a copy is made just ahead
    if max_seq_len is not None and not isinstance(max_seq_len, (int, np.integer)):
        raise TypeError(f"{_NAME}: max_seq_len must be a whole number, got {max_seq_len!r}")
    if max_seq_len is not None and max_seq_len < 0:
        raise ValueError(f"{_NAME}: max_seq_len must be 0 or more, got {max_seq_len}")
    if out is not None:
        check_out(_NAME, out, q.shape, q.dtype)
        check_views_apart(_NAME, out, place, q=q, k_cache=k_cache, v_cache=v_cache)
        check_apart(_NAME, "out", out, block_tables=block_tables, seq_lens=seq_lens)
    if place.kind == "reference":
        check_pages(_NAME, block_tables, seq_lens, k_cache.shape[0], k_cache.shape[2])
        return reference_attention_decode(
            q, k_cache, v_cache, block_tables, seq_lens, scale=value, return_lse=return_lse, out=out
        )
    if out is None:
        out = place.empty(q.shape, q.dtype)
    lse = place.empty(q.shape[:-1], FLOAT32) if return_lse else None
    if q.size:
        capacity = block_tables.shape[1] * k_cache.shape[2]
        max_len = capacity if max_seq_len is None else min(capacity, int(max_seq_len))
        first, second, parts = _launch(
            q,
            k_cache,
            v_cache,
            block_tables,
            seq_lens,
            out,
            lse,
            max_len,
            value,
            c,
            place,
            splits,
            blocks,
            static_cache,
        )
        if simple and place.kind == "cuda":
            shared_mem = shared_bytes(q.shape[-1], heads // k_cache.shape[1])
            _PLANS.keep(given, options, *first, out, extra=parts, second=second, shared_mem=shared_mem, pdl=True)
    return out if lse is None else (out, lse)


def _launch(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    out: Array,
    lse: Array | None,
    max_len: int,
    scale: float,
    c: float,
    place: Place,
    splits: int | None,
    blocks: int | None,
    static_cache: bool,
) -> tuple[_Made, _Made | None, tuple[tuple[int, ...], ...]]:
    """Launch, and return what was launched, the merge behind it if there was one, and the shapes of the workspaces."""
    batch, heads, head_dim = q.shape
    num_blocks, kv_heads, block_size, _ = k_cache.shape
    group = heads // kv_heads
    items = batch * kv_heads * -(-group // _HEADS)
    max_chunks, shared_mem = max(1, -(-max_len // ATTN_CHUNK)), shared_bytes(head_dim, group)
    resident = resident_blocks(head_dim, group)
    if splits is None:
        splits = select_splits(items, max_chunks, resident)
    splits = max(1, min(splits, max_chunks))
    if blocks is None:
        blocks = select_blocks(items, resident)
    blocks = items * splits if splits > 1 else max(min(blocks, items), -(-items // _MOST_ITEMS))
    q_flat, (q_sequence, q_head) = strided(_NAME, "q", q, place)
    k_flat, k_strides = strided(_NAME, "k_cache", k_cache, place)
    v_flat, v_strides = strided(_NAME, "v_cache", v_cache, place)
    static_cache = static_cache and (pointer(k_flat), pointer(v_flat)) == (pointer(k_cache), pointer(v_cache))
    max_blocks, page_shift = block_tables.shape[1], block_size.bit_length() - 1
    if blocks >= 2**31 or items >= 2**31 - 2**20 or batch * heads * -(-head_dim // 32) >= 2**31:
        raise ValueError(f"{_NAME}: q has shape {tuple(q.shape)}, too many (sequence, head) pairs for one launch")
    split = splits > 1
    parts = ((batch, heads, max_chunks, head_dim), (batch, heads, max_chunks, 8))
    part_acc, part_stats = (place.empty(shape, FLOAT32) if split else None for shape in parts)
    template = (CTYPES[q.dtype], head_dim, ATTN_CHUNK)
    program = kernel("attention_decode.cu", _NAME, template)
    arguments: tuple[Any, ...] = (
        q_flat,
        k_flat,
        v_flat,
        block_tables,
        seq_lens,
        out,
        lse,
        part_acc,
        part_stats,
        batch,
        heads,
        group,
        q_sequence,
        q_head,
        *k_strides,
        *v_strides,
        max_blocks,
        page_shift,
        num_blocks,
        max_len,
        max_chunks,
        splits,
        scale,
        c,
        int(static_cache),
    )
    first = (program, (blocks,), (_WARPS * 32,), arguments)
    program(*first[1:], shared_mem=shared_mem, pdl=True)
    if not split:
        return first, None, parts
    merge = kernel("attention_decode.cu", "attention_decode_merge", template)
    arguments = (part_acc, part_stats, seq_lens, out, lse, heads, max_blocks, page_shift, max_len, max_chunks, scale, c)
    second = (merge, (batch * heads * -(-head_dim // 32),), (128,), arguments)
    merge(*second[1:], pdl=True)
    return first, second, parts


def select_splits(items: int, max_chunks: int, resident: int) -> int:
    """Blocks per item: as many as fill the GPU once, at most one a chunk. No effect on results."""
    return max(1, min(resident // items, max_chunks))


def select_blocks(items: int, resident: int) -> int:
    """Blocks that take whole items: as many as the GPU holds at a time; no effect on results.

    The kernel deals out items by length. More blocks would cost the start of one (2 us) more often than sequences of
    one or two chunks can hide.
    """
    return min(items, resident)


def resident_blocks(head_dim: int, group: int) -> int:
    """Blocks that the GPU holds at a time."""
    info = device()
    return info.sm_count * max(1, min(2, info.shared_mem_per_sm // (shared_bytes(head_dim, group) + 1024)))


def shared_bytes(head_dim: int, group: int) -> int:
    """Dynamic shared memory of the kernel: the rings; then of a round of chunks, statistics and results; totals."""
    heads = min(group, _HEADS)
    keys = 64 if head_dim <= 64 else 32 if head_dim <= 128 else 16
    ring = _WARPS * _SLOTS * keys * head_dim * 2
    acc = _WARPS * min(heads, _WARPS) * (head_dim + 4) * 4
    merge = _WARPS * _HEADS * 8 * 4 + acc + heads * (head_dim + 8) * 4
    alone = ATTN_CHUNK // 16 * 32 * 12 + _WARPS * _HEADS * 4
    return ring + _WARPS * 16 + max(merge, alone)


def kernel_variants() -> list[tuple[str, str, tuple[Any, ...], None]]:
    """Kernels to compile ahead and to check for register spills; other head dimensions are compiled at first use."""
    return [
        ("attention_decode.cu", name, (ctype, head_dim, ATTN_CHUNK), None)
        for head_dim in COMPILED_HEAD_DIMS
        for ctype in ("half", "bf16")
        for name in (_NAME, "attention_decode_merge")
    ]
