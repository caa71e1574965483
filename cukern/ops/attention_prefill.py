"""Attention of whole sequences, or of chunks of them, over dense, packed or paged keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cukern.jit import Kernel, device, kernel
from cukern.jit.launch import check_flag
from cukern.jit.tensor_map import heads_map
from cukern.ops import _attention_sm90
from cukern.ops._arrays import (
    CTYPES,
    FLOAT32,
    Array,
    Place,
    check_dtype,
    check_out,
    check_shape,
    place_arrays,
)
from cukern.ops._attention import (
    COMPILED_HEAD_DIMS,
    check_caches,
    check_heads,
    check_index,
    check_lengths,
    check_pages,
    check_views_apart,
    softmax_constants,
    strided,
)
from cukern.ops._attention_sm90 import HopperVariant
from cukern.ops._fast import Plans
from cukern.ops._numerics import ATTN_CHUNK, ATTN_TILE
from cukern.reference.attention_prefill import attention_prefill as reference_attention_prefill

__all__ = ["Variant", "attention_prefill", "candidates", "kernel_variants"]

_NAME = "attention_prefill"
_PLANS = Plans()
_L2_SHARE = 0.4  # queries and results pass through it too, and each half of it holds what its multiprocessors read


@dataclass(frozen=True)
class Variant:
    """Tile shape of the kernel. Results do not depend on it, except on ``chunk``, which the numerics contract fixes."""

    warps: int
    stages: int
    chunk: int = ATTN_CHUNK

    def rows(self, head_dim: int) -> int:
        """Query rows of a CTA: 16 a warp, or 16 a pair of warps beyond head_dim 128."""
        return 16 * self.warps // (2 if head_dim > 128 else 1)

    def shared_mem(self, head_dim: int) -> int:
        """Dynamic shared memory in bytes: the queries, and `stages` tiles of keys and of values."""
        return (self.rows(head_dim) + 2 * self.stages * ATTN_TILE) * head_dim * 2

    def template(self, ctype: str, head_dim: int, paged: bool) -> tuple[str | int | bool, ...]:
        """Template arguments of the kernel."""
        return (ctype, head_dim, paged, self.warps, self.stages, self.chunk)


def candidates(head_dim: int) -> list[Variant]:
    """Variants that :func:`select` may choose for a head_dim: they fit the 99 KB of the smallest supported GPU."""
    if head_dim > 128:
        return [Variant(8, 1)]
    return [Variant(4, 2)] if head_dim <= 64 else [Variant(8, 2), Variant(4, 2)]


def select(head_dim: int, rows: int, heads: int, paged: bool, sm_count: int, shared_mem_per_sm: int) -> Variant:
    """The variant for ``rows`` query tokens: from shapes alone, no effect on the result."""
    tall, small = Variant(8, 2), Variant(4, 2)
    if head_dim > 128:
        return Variant(8, 1)
    if head_dim <= 64:
        return small
    # two small CTAs do not wait for each other; they must share an SM (each costs 1 KB beyond what it asks for), else
    # one tall CTA holds as many warps
    if 2 * (small.shared_mem(head_dim) + 2048) > shared_mem_per_sm:
        return tall
    # a chunk of a prompt on its context: where CTAs are few, the warps that copy pages are what counts
    return tall if paged and -(-rows // small.rows(head_dim)) * heads < 2 * sm_count else small


def attention_prefill(
    q: Array,
    k: Array,
    v: Array,
    *,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    block_tables: Array | None = None,
    seq_lens: Array | None = None,
    causal: bool = True,
    scale: float | None = None,
    return_lse: bool = False,
    out: Array | None = None,
) -> Array | tuple[Array, Array]:
    """``softmax(scale * q k^T) v`` per head, grouped-query, causal or not (FlashAttention-2, Dao 2023).

    Three layouts: **dense** (no index arrays), **packed** (`cu_seqlens_q`; sequences one after another, no padding) and
    **paged** (`cu_seqlens_q`, `block_tables`, `seq_lens`; the queries are the last tokens of a longer context that is
    already in the cache, themselves included: a chunk of a prompt). Sums follow a fixed order (docs/numerics.md): a row
    has the same bits in any layout, in any batch, chunked or whole, and in ``attention_decode``.

    Parameters
    ----------
    q : array [B, S, Hq, D] or [T, Hq, D]
        float16 or bfloat16; D a multiple of 16 up to 256. Views whose rows start at multiples of 16 bytes (slices of a
        packed qkv buffer) are taken as they are, others copied; the same for k and v.
    k, v : array
        [B, Skv, Hkv, D], [Tk, Hkv, D] or caches [num_blocks, Hkv, block_size, D]; Hq is a multiple of Hkv, block_size
        16, 32, 64, 128 or 256.
    cu_seqlens_q : array [B + 1], int32
        Sequence b has the rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of q; starts at 0. Rows of the output
        past the last entry are not written.
    cu_seqlens_k : array [B + 1], int32
        The same for k and v; default: `cu_seqlens_q`.
    block_tables : array [B, max_blocks], int32
        Blocks of each sequence in order. Columns past its length are not read.
    seq_lens : array [B], int32
        Keys of each sequence, including those of this call's queries.
    causal : bool
        Query i of n sees the keys j <= i + m - n of m (aligned bottom-right).
    scale : float, optional
        Factor of the scores, positive; default 1 / sqrt(D).
    return_lse : bool
        Also return the natural logarithm of the sum of exponentials of the scaled scores.
    out : array of q's shape and dtype, optional
        Written and returned; contiguous, no memory of k or v (all of q's may be given).

    Returns
    -------
    array, shape and dtype of q
        Rows that see no key are zero.
    lse : float32, q's shape without D, only with `return_lse`
        -inf for rows that see no key.

    Raises
    ------
    TypeError, ValueError
        Wrong dtypes, shapes or combinations of arguments. For NumPy input without emulation also wrong values of
        the index arrays; a GPU clamps lengths to the arrays instead, and a block id outside the cache gives NaN.
    """
    options = (cu_seqlens_q, cu_seqlens_k, block_tables, seq_lens)
    return _attention_prefill(q, k, v, options, causal, scale, return_lse, out, None)


def _attention_prefill_variant(
    variant: Variant | HopperVariant,
    q: Array,
    k: Array,
    v: Array,
    *,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    block_tables: Array | None = None,
    seq_lens: Array | None = None,
    causal: bool = True,
    scale: float | None = None,
    return_lse: bool = False,
    out: Array | None = None,
) -> Array | tuple[Array, Array]:
    """:func:`attention_prefill` by the variant given, for tests and tuning. ValueError if it cannot run this."""
    options = (cu_seqlens_q, cu_seqlens_k, block_tables, seq_lens)
    return _attention_prefill(q, k, v, options, causal, scale, return_lse, out, variant)


def _attention_prefill(
    q: Array,
    k: Array,
    v: Array,
    index: tuple[Array | None, ...],
    causal: bool,
    scale: float | None,
    return_lse: bool,
    out: Array | None,
    variant: Variant | HopperVariant | None,
) -> Array | tuple[Array, Array]:
    simple = (
        out is None
        and return_lse is False
        and variant is None
        and type(causal) is bool
        and (scale is None or type(scale) is float)
    )
    given, options = (q, k, v, *index), (causal, scale)
    found = _PLANS.find(given, options) if simple else None
    if found is not None:
        plan, (q_address, k_address, v_address, *addresses) = found
        same_lengths, maps = plan.extra
        out = plan.empty()
        if same_lengths:
            addresses[1] = addresses[0]
        address = out.data.ptr
        if maps is None:
            plan.launch(q_address, k_address, v_address, address, 0, *addresses)
            return out
        if address % 16 == 0:  # else an allocator of one's own; the Hopper kernel cannot write there
            q_sizes, k_sizes, v_sizes = maps
            plan.launch(
                heads_map(q_address, *q_sizes),
                heads_map(k_address, *k_sizes),
                heads_map(v_address, *v_sizes),
                address,
                0,
                *addresses,
            )
            return out
    cu_q, cu_k, tables, seq_lens = index
    place, (q, k, v, cu_q, cu_k, tables, seq_lens, out) = place_arrays(
        _NAME,
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        block_tables=tables,
        seq_lens=seq_lens,
        out=out,
    )
    batch, cu_q, cu_k, tables, seq_lens = _check(place, q, k, v, cu_q, cu_k, tables, seq_lens)
    value, c = softmax_constants(_NAME, scale, q.shape[-1])
    check_flag(_NAME, "causal", causal)
    check_flag(_NAME, "return_lse", return_lse)
    if out is not None:
        check_out(_NAME, out, q.shape, q.dtype)
        check_views_apart(_NAME, out, place, q=q, k=k, v=v)
    if place.kind == "reference":
        return reference_attention_prefill(
            q,
            k,
            v,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            block_tables=tables,
            seq_lens=seq_lens,
            causal=causal,
            scale=value,
            return_lse=return_lse,
            out=out,
        )
    if out is None:
        out = place.empty(q.shape, q.dtype)
    lse = place.empty(q.shape[:-1], FLOAT32) if return_lse else None
    if q.size and batch:
        launched = _launch(
            q, k, v, (cu_q, cu_k, tables, seq_lens), out, lse, batch, bool(causal), value, c, place, variant
        )
        if simple and place.kind == "cuda":
            program, grid, block, arguments, shared_mem, maps = launched
            extra = (index[1] is None and cu_k is not None, maps)
            _PLANS.keep(given, options, program, grid, block, arguments, out, extra=extra, shared_mem=shared_mem)
    return out if lse is None else (out, lse)


def _launch(
    q: Array,
    k: Array,
    v: Array,
    index: tuple[Array | None, ...],
    out: Array,
    lse: Array | None,
    batch: int,
    causal: bool,
    scale: float,
    c: float,
    place: Place,
    variant: Variant | HopperVariant | None,
) -> tuple[Kernel, tuple[int], tuple[int], tuple[Any, ...], int, Any]:
    """Launch, and return what was launched: kernel, grid, block, arguments, shared memory, sizes of tensor maps."""
    cu_q, cu_k, tables, seq_lens = index
    heads, head_dim = q.shape[-2:]
    dense, paged = cu_q is None, tables is not None
    tokens = q.shape[1] if dense else q.shape[0]
    kv_heads = k.shape[1] if paged else k.shape[-2]
    q_flat, q_strides = strided(_NAME, "q", q, place)
    k_flat, k_strides = strided(_NAME, "k", k, place)
    v_flat, v_strides = strided(_NAME, "v", v, place)
    if paged:  # [block, head, token] -> [block, token, head]
        k_strides, v_strides = ((s[0], s[2], s[1]) for s in (k_strides, v_strides))
    strides = tuple((0,) * (3 - len(s)) + s for s in (q_strides, k_strides, v_strides))
    if place.kind == "cuda" and not isinstance(variant, Variant):
        sizes = (batch, tokens, heads, kv_heads, head_dim)
        kv = (k.shape[0], k.shape[2]) if paged else (batch if dense else 1, k.shape[-3])
        launched = _attention_sm90.launched(
            q_flat, k_flat, v_flat, strides, index, out, lse, sizes, kv, causal, scale, c, variant
        )
        if launched is not None:
            return launched
    if isinstance(variant, HopperVariant):
        raise ValueError(f"{_NAME}: variant {variant} cannot run q {tuple(q.shape)} and k {tuple(k.shape)} here")
    if variant is None:
        info = device()
        total = batch * tokens if dense else tokens
        variant = select(head_dim, total, heads, paged, info.sm_count, info.shared_mem_per_sm)
    rows = variant.rows(head_dim)
    slots = batch * -(-tokens // rows) if dense else tokens // rows + batch
    if slots * heads >= 2**31:
        raise ValueError(f"{_NAME}: q has shape {tuple(q.shape)}, too many (token, head) pairs for one launch")
    keys = tables.shape[1] * k.shape[2] if tables is not None else k.shape[-3]
    program = kernel("attention_prefill.cu", _NAME, variant.template(CTYPES[q.dtype], head_dim, paged))
    grid, block, shared_mem = (slots * heads,), (variant.warps * 32,), variant.shared_mem(head_dim)
    arguments = (
        q_flat,
        k_flat,
        v_flat,
        out,
        lse,
        cu_q,
        cu_k,
        tables,
        seq_lens,
        batch,
        tokens,
        0 if paged else k.shape[-3],
        heads,
        heads // kv_heads,
        _together(batch if dense else 1, kv_heads, keys, head_dim * q.dtype.itemsize),
        *strides[0],
        *strides[1],
        *strides[2],
        tables.shape[1] if tables is not None else 0,
        k.shape[2].bit_length() - 1 if paged else 0,
        k.shape[0] if paged else 0,
        int(causal),
        scale,
        c,
    )
    program(grid, block, arguments, shared_mem=shared_mem)
    return program, grid, block, arguments, shared_mem, None


def _together(sequences: int, kv_heads: int, keys: int, row_bytes: int) -> int:
    """Pairs of sequence and key/value head whose keys and values fit in `_L2_SHARE` of the L2 cache."""
    pairs = int(_L2_SHARE * device().l2_bytes) // max(2 * keys * row_bytes, 1)
    return min(max(pairs, 1), sequences * kv_heads)


def _check(
    place: Place,
    q: Array,
    k: Array,
    v: Array,
    cu_q: Array | None,
    cu_k: Array | None,
    tables: Array | None,
    seq_lens: Array | None,
) -> tuple[int, Array | None, Array | None, Array | None, Array | None]:
    """Everything about the arguments: number of sequences, and the index arrays made contiguous."""
    if (tables is None) != (seq_lens is None):
        raise ValueError(f"{_NAME}: block_tables and seq_lens come together; pass both or neither")
    if cu_q is None:
        for name, array in (("cu_seqlens_k", cu_k), ("block_tables", tables)):
            if array is not None:
                raise ValueError(f"{_NAME}: {name} needs q packed [T, Hq, D] and cu_seqlens_q")
        check_shape(_NAME, "q", q, (None, None, None, None))
        batch, _, heads, head_dim = q.shape
        check_shape(_NAME, "k", k, (batch, None, None, head_dim))
    else:
        check_shape(_NAME, "q", q, (None, None, None))
        heads, head_dim = q.shape[1:]
        cu_q = check_index(_NAME, "cu_seqlens_q", cu_q, (None,), place)
        batch = cu_q.shape[0] - 1
        if batch < 0:
            raise ValueError(f"{_NAME}: cu_seqlens_q is empty; it needs B + 1 entries, the first of them 0")
        if tables is None:
            check_shape(_NAME, "k", k, (None, None, head_dim))
    if tables is not None:
        if cu_k is not None:
            raise ValueError(f"{_NAME}: cu_seqlens_k does not go with block_tables; seq_lens has the lengths")
        tables = check_index(_NAME, "block_tables", tables, (batch, None), place)
        seq_lens = check_index(_NAME, "seq_lens", seq_lens, (batch,), place)
        check_caches(_NAME, place, ("k", "v"), k, v, head_dim, q.dtype)
        kv_heads = k.shape[1]
    else:
        check_shape(_NAME, "v", v, k.shape)
        check_dtype(_NAME, "k", k, [q.dtype])
        check_dtype(_NAME, "v", v, [q.dtype])
        kv_heads = k.shape[-2]
        if cu_q is not None:
            cu_k = cu_q if cu_k is None else check_index(_NAME, "cu_seqlens_k", cu_k, (batch + 1,), place)
    check_heads(_NAME, place, q, heads, kv_heads, head_dim)
    if place.kind == "reference" and cu_q is not None:
        check_lengths(_NAME, "cu_seqlens_q", cu_q, q.shape[0])
        if cu_k is not None:
            check_lengths(_NAME, "cu_seqlens_k", cu_k, k.shape[0])
        if tables is not None and seq_lens is not None:
            check_pages(_NAME, tables, seq_lens, k.shape[0], k.shape[2])
    return batch, cu_q, cu_k, tables, seq_lens


def kernel_variants() -> list[tuple[str, str, tuple[Any, ...], None, tuple[str, ...]]]:
    """Kernels to compile ahead and to check for register spills, each for the architectures where it may be chosen.

    The published models' (head_dim 64 and 128, paged) in both types. Else half and bf16 differ in one instruction: each
    tile shape comes once dense in half and once paged in bf16, and the others are compiled at first use.
    """
    return [
        (
            "attention_prefill.cu",
            _NAME,
            variant.template(ctype, head_dim, paged),
            None,
            _architectures(variant, head_dim),
        )
        for head_dim in COMPILED_HEAD_DIMS
        for variant in candidates(head_dim)
        for ctype, paged in (("half", False), ("bf16", True), *((("half", True),) if head_dim in (64, 128) else ()))
    ]


def _architectures(variant: Variant, head_dim: int) -> tuple[str, ...]:
    """Where a variant may be chosen (empty: everywhere): two small CTAs of a large head_dim need more than 100 KB."""
    return ("sm_80", "sm_90a", "sm_100a") if variant == Variant(4, 2) and head_dim > 64 else ()
