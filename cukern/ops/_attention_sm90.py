"""Prefill attention on Hopper: what the kernels `attention_prefill_sm90*.cu` take, their tensor maps and their launch.

The bits are those of the portable kernel (docs/numerics.md, item 2): what is chosen here decides speed alone.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

from cukern.ops._arrays import CTYPES, Array
from cukern.ops._numerics import ATTN_CHUNK, ATTN_TILE

__all__ = ["ARCH", "HopperVariant", "Launched", "Layout", "kernel_variants", "launched", "select", "tall_tiles"]

ARCH = "sm_90a"
HEAD_DIMS = (64, 128)
MAX_SHARED = 227 << 10
MIN_ROWS = 256
"""From this many query rows of a sequence on (on average) these kernels are used,"""

FEW_ROWS, MIN_KEYS = 16, 1024
"""and for fewer rows, if there may be so many keys (head_dim 128)."""

_ITEMS, _ITEM_BYTES = 4, 48  # of prefill/producer.cuh


class Layout(enum.IntEnum):
    """How keys and values lie, as the kernel numbers it."""

    DENSE = 0
    PACKED = 1
    PAGED = 2


@dataclass(frozen=True)
class HopperVariant:
    """`groups` consumer warpgroups of 64 query rows each; rings of `stages` steps of `keys` keys.

    Steps of 64 keys: the kernel for head_dim 64. Steps of 128: that for head_dim 128, which works on whole chunks and
    has two groups, which take turns.
    """

    groups: int
    stages: int
    keys: int = ATTN_TILE

    def __str__(self) -> str:
        return f"{64 * self.groups} rows, {self.stages} stages of {self.keys} keys"

    @property
    def kernel(self) -> str:
        """Name of the kernel, and of its file without the ending."""
        return "attention_prefill_sm90" if self.keys == ATTN_TILE else "attention_prefill_sm90_chunk"

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return 64 * self.groups

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    def shared_mem(self, head_dim: int) -> int:
        """Queries, rings, barriers, items, a word to a stage, and with tiles 16 bytes to a consumer: `Shared`."""
        tiles = self.keys == ATTN_TILE
        query_slots = self.groups * (1 if tiles else 2)
        rings = (query_slots * 64 + 2 * self.stages * self.keys) * head_dim * 2
        barriers = 4 * self.stages + 2 * query_slots + 2 * _ITEMS
        kept = 16 * 128 * self.groups if tiles else 0
        return rings + kept + 8 * barriers + _ITEMS * _ITEM_BYTES + 4 * self.stages

    def template(self, ctype: str, head_dim: int, layout: Layout) -> tuple[str | int, ...]:
        """Template arguments of the kernel."""
        return (ctype, head_dim, int(layout), self.groups, self.stages)


def select(head_dim: int) -> HopperVariant:
    """The variant for a head_dim."""
    return HopperVariant(3, 8) if head_dim == 64 else HopperVariant(2, 2, ATTN_CHUNK)


def worthwhile(rows: int, keys: int, head_dim: int) -> bool:
    """Whether these kernels are faster than the portable one, for so many rows and keys of a sequence."""
    return rows >= MIN_ROWS or (head_dim == 128 and rows >= FEW_ROWS and keys >= MIN_KEYS)


SHORT_COST, ITEM_COST, MANY_ROUNDS = 0.82, 1.5, 8
"""Measured with three warpgroups: time of a tile of 128 rows beside one of 192; of any tile, in steps of keys. With
more tiles than that to a block, shares come out even by themselves."""


@functools.lru_cache(maxsize=1024)
def tall_tiles(tokens: int, keys: int, columns: int, blocks: int, causal: bool, variant: HopperVariant) -> int:
    """How many query tiles of a dense sequence have all the rows of `variant`; the others have 64 fewer.

    A block takes whole tiles, so with few tiles to a block the last round may be almost empty. Shorter tiles cost more
    per row, but may fill it. This follows some of the blocks through their rounds (long tiles first, dealt out forwards
    and backwards in turn) for the numbers of tall tiles that fill whole rounds.

    Parameters
    ----------
    tokens, keys : int
        Of a sequence.
    columns : int
        Pairs of a sequence and a query head.
    blocks : int
        Blocks that run at once.
    """
    rows = variant.rows
    full = -(-tokens // rows)
    most = full * columns // blocks + 1
    if variant.groups < 3 or most > MANY_ROUNDS:
        return full
    best, best_time = full, float("inf")
    for tall in (full, *(n * blocks // columns for n in range(most - 1, -1, -1))):
        costs: list[float] = []
        row = 0
        while row < tokens:
            height = rows if len(costs) < tall else rows - 64
            end = min(row + height, tokens)
            seen = min(max(end + keys - tokens, 0), keys) if causal else keys
            costs.append((1 if end - row > rows - 64 else SHORT_COST) * (seen / variant.keys + ITEM_COST))
            row += height
        costs.sort(reverse=True)
        time = 0.0
        for sample in range(9):
            block, number, total = sample * (blocks - 1) // 8, 0, 0.0
            while number < len(costs) * columns:
                place = block if number // blocks % 2 == 0 else blocks - 1 - block
                index = (number + place) // columns
                total += costs[index] if index < len(costs) else 0.0
                number += blocks
            time = max(time, total)
        if time < 0.99 * best_time:
            best, best_time = tall, time
    return best


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
        For tests and tuning; it also lifts the lower limits.
    """
    batch, tokens, heads, kv_heads, head_dim = sizes
    cu_q, _, tables, _ = index
    dense, paged = cu_q is None, tables is not None
    layout = Layout.PAGED if paged else Layout.DENSE if dense else Layout.PACKED
    if head_dim not in HEAD_DIMS or min(kv) < 1:
        return None
    keys = tables.shape[1] * kv[1] if tables is not None else kv[1] // (1 if dense else batch)
    if variant is None and not worthwhile(tokens if dense else tokens // batch, keys, head_dim):
        return None
    from cukern import jit

    device = jit.device()
    if device.arch != ARCH or int(out.data.ptr) % 16:
        return None
    if variant is None:
        variant = select(head_dim)
    maps = _maps(strides, (batch if dense else 1, tokens, heads), (*kv, kv_heads), head_dim, variant.keys, paged)
    if maps is None:
        return None
    tall, slots = 0, tokens // variant.rows + batch  # of all sequences, at most
    if dense:
        tall = tall_tiles(tokens, kv[1], batch * heads, device.sm_count, bool(causal), variant)
        slots = batch * (tall + -(-max(tokens - tall * variant.rows, 0) // (variant.rows - 64)))
    items = slots * heads
    if items >= 2**31:
        return None
    from cukern.jit.tensor_map import heads_map

    template = variant.template(CTYPES[out.dtype], head_dim, layout)
    kernel = jit.kernel(f"{variant.kernel}.cu", variant.kernel, template)
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
        tall,
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
    keys: int,
    paged: bool,
) -> tuple[tuple[Any, ...], ...] | None:
    """What `heads_map` takes for q, k and v; None if there is a stride that the copy engine does not know."""
    found: list[tuple[Any, ...]] = []
    for sides, of in ((q_sides, strides[0]), (kv_sides, strides[1]), (kv_sides, strides[2])):
        steps = tuple(s if n > 1 else head_dim for n, s in zip(sides, of))
        if any(s % 8 or not 0 < s < 1 << 39 for s in steps):
            return None
        whole = keys if found else 64
        tokens = min(sides[1], whole) if paged and found else whole
        blocks = head_dim // 64 if tokens == whole else 1
        found.append((*sides, head_dim, steps, tokens, blocks))
    return tuple(found)


def kernel_variants() -> list[tuple[str, str, tuple[Any, ...], None, tuple[str, ...]]]:
    """Kernels to compile ahead and to check for register spills."""
    return [
        (f"{v.kernel}.cu", v.kernel, v.template(ctype, head_dim, layout), None, (ARCH,))
        for head_dim in HEAD_DIMS
        for v in (select(head_dim),)
        for ctype in ("half", "bf16")
        for layout in Layout
    ]
