"""Prefill attention on Hopper: what `attention_prefill_sm90.cu` takes, its tensor maps and its launch.

The bits are those of the portable kernel (docs/numerics.md, item 2): what is chosen here decides speed alone.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

from cukern.ops._arrays import CTYPES, Array
from cukern.ops._numerics import ATTN_TILE

__all__ = ["ARCH", "HopperVariant", "Launched", "Layout", "candidates", "kernel_variants", "launched", "select"]

ARCH = "sm_90a"
HEAD_DIMS = (64, 128)
MAX_SHARED = 227 << 10
MIN_ROWS = 64
"""From this many query rows of a sequence on (on average) the kernel is used."""

READY = False
FILE, NAME = "attention_prefill_sm90.cu", "attention_prefill_sm90"


class Layout(enum.IntEnum):
    """How keys and values lie, as the kernel numbers it."""

    DENSE = 0
    PACKED = 1
    PAGED = 2


@dataclass(frozen=True)
class HopperVariant:
    """`groups` consumer warpgroups of 64 query rows each; `stages` tiles of keys and of values in shared memory."""

    groups: int
    stages: int

    def __str__(self) -> str:
        return f"{64 * self.groups} rows, {self.stages} stages"

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return 64 * self.groups

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    def shared_mem(self, head_dim: int) -> int:
        """Queries, ring, 16 bytes to a consumer, barriers, four items of 48 bytes, a word to a stage."""
        tiles = (self.groups + 2 * self.stages) * ATTN_TILE * head_dim * 2
        barriers = 4 * self.stages + 2 * self.groups + 2 * 4
        return tiles + 16 * 128 * self.groups + 8 * barriers + 4 * 48 + 4 * self.stages

    def template(self, ctype: str, head_dim: int, layout: Layout) -> tuple[str | int, ...]:
        """Template arguments of the kernel."""
        return (ctype, head_dim, int(layout), self.groups, self.stages)


def candidates(head_dim: int) -> list[HopperVariant]:
    """What is worth timing, the choice first."""
    if head_dim == 64:
        return [HopperVariant(2, 8), HopperVariant(3, 8)]
    return [HopperVariant(2, 4)]


def select(head_dim: int) -> HopperVariant:
    """The variant for a head_dim."""
    return candidates(head_dim)[0]


class Launched(NamedTuple):
    """A launch as it was made; `maps`: what `heads_map` takes behind the addresses of q, k and v."""

    kernel: Any
    grid: tuple[int]
    block: tuple[int]
    arguments: tuple[Any, ...]
    shared_mem: int
    maps: tuple[tuple[Any, ...], ...]


def launched(
    q: Array,
    k: Array,
    v: Array,
    strides: tuple[tuple[int, ...], ...],
    index: tuple[Array | None, ...],
    out: Array,
    lse: Array | None,
    sizes: tuple[int, int, int, int, int],
    kv: tuple[int, int],
    causal: bool,
    scale: float,
    c: float,
    variant: HopperVariant | None = None,
) -> Launched | None:
    """Run what :func:`cukern.ops.attention_prefill` has checked; None where another kernel must.

    Parameters
    ----------
    q, k, v : array
        CuPy arrays, flat: from the first to the last element.
    strides : tuple
        Of q, k and v, in elements: sequence (or page), token, head; 0 along sides of length 1.
    index : tuple
        cu_seqlens_q, cu_seqlens_k, block_tables, seq_lens, or None for each.
    out, lse : array
        Contiguous; lse may be None.
    sizes : tuple of int
        Sequences, tokens of q (of one sequence if dense, else of all), query heads, key/value heads, head_dim.
    kv : tuple of int
        Sizes of the first two sides of k: sequences and tokens, or pages and their length.
    causal, scale, c
        As the kernel takes them.
    variant : HopperVariant, optional
        For tests and tuning; it also lifts the lower limit of query rows.
    """
    batch, tokens, heads, kv_heads, head_dim = sizes
    cu_q, _, tables, _ = index
    dense, paged = cu_q is None, tables is not None
    layout = Layout.PAGED if paged else Layout.DENSE if dense else Layout.PACKED
    if head_dim not in HEAD_DIMS or min(kv) < 1:
        return None
    if variant is None and (not READY or tokens < MIN_ROWS * (1 if dense else batch)):
        return None
    from cukern import jit

    device = jit.device()
    if device.arch != ARCH or int(out.data.ptr) % 16:
        return None
    maps = _maps(strides, (batch if dense else 1, tokens, heads), (*kv, kv_heads), head_dim, paged)
    if maps is None:
        return None
    if variant is None:
        variant = select(head_dim)
    slots = batch * -(-tokens // variant.rows) if dense else tokens // variant.rows + batch
    items = slots * heads
    if items >= 2**31:
        return None
    from cukern.jit.tensor_map import heads_map

    kernel = jit.kernel(FILE, NAME, variant.template(CTYPES[out.dtype], head_dim, layout))
    grid, block, shared_mem = (min(items, device.sm_count),), (variant.threads,), variant.shared_mem(head_dim)
    arguments = (
        *(heads_map(int(a.data.ptr), *m) for a, m in zip((q, k, v), maps)),
        out,
        lse,
        *index,
        batch,
        tokens,
        0 if paged else kv[1],
        heads,
        heads // kv_heads,
        tables.shape[1] if tables is not None else 0,
        kv[1].bit_length() - 1 if paged else 0,
        kv[0] if paged else 0,
        items,
        int(causal),
        scale,
        c,
    )
    kernel(grid, block, arguments, shared_mem=shared_mem)
    return Launched(kernel, grid, block, arguments, shared_mem, maps)


def _maps(
    strides: tuple[tuple[int, ...], ...],
    q_sides: tuple[int, int, int],
    kv_sides: tuple[int, int, int],
    head_dim: int,
    paged: bool,
) -> tuple[tuple[Any, ...], ...] | None:
    """What `heads_map` takes for q, k and v; None if there is a stride that the copy engine does not know."""
    found: list[tuple[Any, ...]] = []
    for sides, of in ((q_sides, strides[0]), (kv_sides, strides[1]), (kv_sides, strides[2])):
        steps = tuple(s if n > 1 else head_dim for n, s in zip(sides, of))
        if any(s % 8 or not 0 < s < 1 << 39 for s in steps):
            return None
        tokens = min(sides[1], ATTN_TILE) if paged and found else ATTN_TILE
        blocks = head_dim // 64 if tokens == ATTN_TILE else 1
        found.append((*sides, head_dim, steps, tokens, blocks))
    return tuple(found)


def kernel_variants() -> list[tuple[str, str, tuple[Any, ...], None, tuple[str, ...]]]:
    """Kernels to compile ahead and to check for register spills."""
    return [
        (FILE, NAME, select(head_dim).template(ctype, head_dim, layout), None, (ARCH,))
        for head_dim in HEAD_DIMS
        for ctype in ("half", "bf16")
        for layout in Layout
    ]
