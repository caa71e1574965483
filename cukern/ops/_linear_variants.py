"""The ways to run the linear layer, and which one is chosen.

All give the same bits (docs/numerics.md, item 1), so the choice is about speed alone: M and the GPU may decide it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cukern.ops._numerics import segment_length

__all__ = ["RowsVariant", "TileVariant", "Variant", "candidates", "select", "template_segment"]

MAX_SHARED = 99 << 10
"""Shared memory of one block that every GPU from sm_80 on can give (sm_86, sm_89 and sm_120 have no more)."""

ROWS_MAX_M = 64
"""Up to this many rows the weight's bytes bound the product, and the kernel for few rows is used."""


def template_segment(n: int, k: int) -> int:
    """The kernels' `Segment` for a weight [n, k]: the contract's segment length, 0 if that is all of K."""
    segment = segment_length(n, k)
    return 0 if segment >= k else segment


@dataclass(frozen=True)
class TileVariant:
    """`linear_tile`: a block computes `bm` x `bn` outputs, a warp `wm` x `wn`; K in steps of `bk`, `stages` buffers."""

    bm: int
    bn: int
    bk: int
    wm: int
    wn: int
    stages: int
    min_blocks: int = 1

    kernel = "linear_tile"

    def __str__(self) -> str:
        return f"tile {self.bm}x{self.bn}x{self.bk} warp {self.wm}x{self.wn} s{self.stages} b{self.min_blocks}"

    @property
    def threads(self) -> int:
        return self.bm // self.wm * (self.bn // self.wn) * 32

    def fits(self, segment: int) -> bool:
        """Whether the accumulators fit in registers: with segments there are two sets of them."""
        accumulators = self.wm * self.wn // 32 * (2 if segment else 1)
        return accumulators <= 128 and self.shared_mem(1, 1, segment) <= MAX_SHARED

    def template(self, segment: int) -> tuple[int, ...]:
        return (self.bm, self.bn, self.bk, self.wm, self.wn, self.stages, self.min_blocks, segment)

    def grid(self, m: int, n: int) -> tuple[int, ...]:
        return (-(-m // self.bm) * -(-n // self.bn),)

    def shared_mem(self, m: int, k: int, segment: int) -> int:
        return self.stages * (self.bm + self.bn) * self.bk * 2


@dataclass(frozen=True)
class RowsVariant:
    """`linear_rows`: a block computes up to `mt` rows of x by `rows` rows of the weight.

    `slots` segments of K at a time, `warps` warps in each; `weight_a`: the weight is the mma's A operand.
    """

    mt: int
    rows: int
    warps: int
    slots: int
    bk: int
    stages: int
    weight_a: bool = False

    kernel = "linear_rows"

    def __str__(self) -> str:
        operand = "A" if self.weight_a else "B"
        return f"rows {self.mt}x{self.rows}x{self.bk} {self.slots}x{self.warps} warps s{self.stages} w={operand}"

    @property
    def threads(self) -> int:
        return self.warps * self.slots * 32

    def fits(self, segment: int) -> bool:
        """Whether it can run with these segments (one segment has one slot), in registers and shared memory."""
        unit, warp_rows = (16 if self.weight_a else 8), self.rows // self.warps
        ring = 16 + self.stages * self.slots * (self.rows + self.mt) * self.bk * 2
        return (
            (segment != 0 or self.slots == 1)
            and self.rows % (self.warps * unit) == 0
            and warp_rows <= 32
            and warp_rows * self.mt <= 1024
            and self.threads <= 1024
            and ring + self.slots * self.mt * self.rows * 4 <= MAX_SHARED
        )

    def template(self, segment: int) -> tuple[int, ...]:
        return (self.mt, self.rows, self.warps, self.slots, self.bk, self.stages, segment, int(self.weight_a))

    def grid(self, m: int, n: int) -> tuple[int, ...]:
        return (-(-n // self.rows), -(-m // self.mt))

    def shared_mem(self, m: int, k: int, segment: int) -> int:
        ring = 16 + self.stages * self.slots * (self.rows + min(m, self.mt)) * self.bk * 2
        partial = self.slots * self.mt * self.rows * 4
        one_round = segment == 0 or k <= segment * self.slots
        return max(ring, partial) if one_round else ring + partial


Variant = TileVariant | RowsVariant

# Speed of a full block of each tile relative to the best, from the bytes of shared memory read per product.
_TILES: dict[TileVariant, float] = {
    TileVariant(128, 256, 32, 64, 64, 4): 1.0,
    TileVariant(128, 128, 32, 64, 64, 4, 2): 1.0,
    TileVariant(128, 128, 32, 64, 32, 4): 0.95,
    TileVariant(128, 64, 32, 64, 32, 4, 2): 0.85,
    TileVariant(64, 64, 64, 32, 32, 4, 2): 0.65,
}
_UNALIGNED_TILE = TileVariant(64, 64, 64, 32, 32, 4, 2)


def _row_tile(m: int) -> int:
    return 8 if m <= 8 else 16 if m <= 16 else 32 if m <= 32 else 64


def _rows_with_segments(mt: int, rows: int, segments: int) -> RowsVariant | None:
    """The variant that takes most segments at once; None if nothing fits."""
    warps = max(1, rows // 32, rows * mt // 1024)
    for slots in (16, 12, 8, 4, 2, 1):
        if slots > 4 and slots >= segments + 4:
            continue
        for stages in (4, 3):
            variant = RowsVariant(mt, rows, warps, slots, 64, stages, weight_a=mt == 8 and rows >= 16)
            if variant.fits(256):
                return variant
    return None


def _rows_whole(mt: int, rows: int) -> RowsVariant | None:
    """One chain over all of K: the warps share the rows of the weight; as many bytes in flight as fit."""
    weight_a = mt == 8 and rows >= 16
    unit = 16 if weight_a or (mt == 64 and rows >= 32) else 8
    warps = max(1, min(8, rows // unit))
    for stages in (6, 5, 4, 3):
        variant = RowsVariant(mt, rows, warps, 1, 128, stages, weight_a)
        if variant.fits(0) and variant.shared_mem(mt, 1, 0) <= MAX_SHARED // (1 if rows <= 32 else 2):
            return variant
    return None


def _row_choices(m: int, n: int, k: int) -> Iterator[RowsVariant]:
    mt = _row_tile(m)
    for rows in (8, 16, 32, 64):
        found = _rows_with_segments(mt, rows, -(-k // 256)) if template_segment(n, k) else _rows_whole(mt, rows)
        if found is not None:
            yield found


# Tiles that are timed by the tuning script but not chosen.
_MORE_TILES = (
    TileVariant(128, 128, 64, 64, 32, 3),
    TileVariant(128, 128, 64, 64, 64, 3, 2),
    TileVariant(256, 128, 32, 64, 64, 4),
    TileVariant(128, 64, 64, 64, 32, 4, 2),
    TileVariant(64, 128, 64, 32, 64, 3, 2),
    TileVariant(64, 64, 64, 32, 32, 3, 3),
)


def candidates(m: int, n: int, k: int) -> list[Variant]:
    """Everything worth timing for a product [m, k] x [n, k]^T: what :func:`select` chooses from, and its neighbours."""
    segment = template_segment(n, k)
    found: list[Variant] = []
    if m <= 2 * ROWS_MAX_M:
        for base in _row_choices(m, n, k):
            found.append(base)
            if base.rows % 16 == 0:
                units = base.rows // 16
                found.append(replace(base, weight_a=not base.weight_a, warps=min(base.warps, units)))
            if segment == 0:
                found += [replace(base, bk=64, stages=min(8, 2 * base.stages)), replace(base, bk=256, stages=3)]
                found += [replace(base, stages=3), replace(base, warps=base.warps * 2)]
            else:
                found += [replace(base, stages=2), replace(base, bk=128, stages=2), replace(base, warps=2)]
    if m > 16:
        found += [*_TILES, *_MORE_TILES]
    return [v for v in dict.fromkeys(found) if v.fits(segment)]


@functools.lru_cache(maxsize=8192)
def select(m: int, n: int, k: int, aligned: bool, sm_count: int) -> Variant:
    """The variant for a product of x [m, k] and a weight [n, k] on a GPU with `sm_count` multiprocessors.

    Parameters
    ----------
    m, n, k : int
        Sizes.
    aligned : bool
        Whether rows start at multiples of 16 bytes; else one generic variant of each kind serves.
    sm_count : int
        Multiprocessors of the GPU.

    Returns
    -------
    TileVariant or RowsVariant
    """
    segment = template_segment(n, k)
    if not aligned:
        if m > ROWS_MAX_M:
            return _UNALIGNED_TILE
        return RowsVariant(16, 8, 1, 4, 64, 3) if segment else RowsVariant(16, 32, 4, 1, 64, 3)
    if m <= ROWS_MAX_M:
        best: Variant | None = None
        best_cost = float("inf")
        for variant in _row_choices(m, n, k):
            blocks = -(-n // variant.rows)
            # rows of the weight that the busiest multiprocessor streams, and the rows of x that come with each block
            cost = -(-blocks // sm_count) * (variant.rows + 0.25 * min(m, variant.mt) + 1)
            if cost < best_cost:
                best, best_cost = variant, cost
        if best is not None:
            return best

    def tile_cost(tile: TileVariant) -> float:
        blocks = tile.grid(m, n)[0]
        waves = -(-blocks // (sm_count * tile.min_blocks)) if blocks > sm_count else 1.0
        resident = min(tile.min_blocks, -(-blocks // sm_count))
        return waves * resident * tile.bm * tile.bn / _TILES[tile]

    return min((t for t in _TILES if t.fits(segment)), key=tile_cost)
