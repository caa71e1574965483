"""The ways to run the linear layer, and which one is chosen.

All give the same bits (docs/numerics.md, item 1), so the choice is about speed alone: M and the GPU may decide it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from cukern.ops._numerics import segment_length

__all__ = [
    "Gpu",
    "OnceVariant",
    "RowsVariant",
    "TileVariant",
    "Variant",
    "at_once",
    "candidates",
    "select",
    "template_segment",
]

MAX_SHARED = 99 << 10
"""Shared memory of one block that every GPU from sm_80 on can give (sm_86, sm_89 and sm_120 have no more)."""

ROWS_MAX_M = 16
"""Rows of x that one block of the kernel for few rows takes, the height of a tensor-core step."""

_CHUNK_K, _CHUNK_BYTES = 128, 2048  # a chunk of linear_rows.cu: 8 rows of the weight x 128 k
_SEGMENT_STAGES, _WHOLE_STAGES = 4, (6, 8)
_MAX_WARPS = 12
_PARTIAL_BYTES = 32 << 10
_ONCE_TILES = 4  # of a warp of linear_rows_once, at most
_ONCE_ALONE = 48 << 10  # so much of the weight comes soon enough where the next launch finds no room beside this one
_ONCE_GPU = 200 << 10  # it is chosen where a block can have that much, as on the H200 on which it was measured
_ONCE_LEAST = 76 << 10  # shared memory of a block: two fit beside each other, a third's weight would be in the way of x
_ONCE_EARLY = 8  # rows of x up to which the next kernel may start before they have been asked for


class Gpu(NamedTuple):
    """What the choice needs to know of a GPU; shared memory in bytes."""

    sm_count: int
    max_shared: int  # of one block
    shared_per_sm: int

    @classmethod
    def of(cls, device: Any) -> Gpu:
        """From a :class:`cukern.jit.DeviceInfo`."""
        return cls(device.sm_count, device.max_shared_mem, device.shared_mem_per_sm)

    @property
    def shared_target(self) -> int:
        """What a block may use so that the next kernel's blocks fit beside it and start to fetch their weights."""
        return min(self.max_shared, max(MAX_SHARED, self.shared_per_sm // 2 - 1024))


def template_segment(n: int, k: int) -> int:
    """The kernels' `Segment` for a weight [n, k]: the contract's segment length, 0 if that is all of K."""
    segment = segment_length(n, k)
    return 0 if segment >= k else segment


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class TileVariant:
    """`linear_tile`: tiles of `bm` x `bn` outputs, a warp's part `wm` x `wn`; K in stages of `bk`, `stages` buffers.

    `min_blocks` blocks fit a multiprocessor at a time; they share out the tiles.
    """

    bm: int
    bn: int
    bk: int
    wm: int
    wn: int
    stages: int
    min_blocks: int = 1

    file = "linear.cu"
    kernel = "linear_tile"

    def __str__(self) -> str:
        return f"tile {self.bm}x{self.bn}x{self.bk} warp {self.wm}x{self.wn} s{self.stages} b{self.min_blocks}"

    @property
    def threads(self) -> int:
        return self.bm // self.wm * (self.bn // self.wn) * 32

    def fits(self, m: int, n: int, k: int, max_shared: int = MAX_SHARED) -> bool:
        """Whether the accumulators fit in registers: with segments there are two sets of them."""
        accumulators = self.wm * self.wn // 32 * (2 if template_segment(n, k) else 1)
        return accumulators <= 128 and self.shared_mem(m, n, k) <= max_shared

    def template(self, segment: int, aligned: bool = True) -> tuple[int, ...]:
        return (self.bm, self.bn, self.bk, self.wm, self.wn, self.stages, self.min_blocks, segment, int(aligned))

    def tiles(self, m: int, n: int) -> int:
        return _ceil(m, self.bm) * _ceil(n, self.bn)

    def grid(self, m: int, n: int, gpu: Gpu) -> tuple[int, int, int]:
        return (min(self.tiles(m, n), self.min_blocks * gpu.sm_count), 1, 1)

    def shared_mem(self, m: int, n: int, k: int) -> int:
        return self.stages * (self.bm + self.bn) * self.bk * 2

    def arguments(self, m: int, n: int, k: int) -> tuple[int, ...]:
        """What the kernel takes beside the arrays and the sizes."""
        return ()


@dataclass(frozen=True)
class RowsVariant:
    """`linear_rows`: `blocks` blocks share out the tiles of 8 rows of the weight, `warps` in each walk them.

    `rows`: rows of x in a block, at most 16. `x_slots`: chunks of x that wait in shared memory, 0 for all of them;
    `stages` + 2 is the other choice, for a weight without segments.
    """

    blocks: int
    warps: int
    stages: int
    rows: int = ROWS_MAX_M
    x_slots: int = 0

    file = "linear_rows.cu"
    kernel = "linear_rows"

    def __str__(self) -> str:
        passing = f" x{self.x_slots}" if self.x_slots else ""
        return f"rows {self.rows} on {self.blocks} blocks of {self.warps} warps s{self.stages}{passing}"

    @property
    def threads(self) -> int:
        return self.warps * 32

    def fits(self, m: int, n: int, k: int, max_shared: int = MAX_SHARED) -> bool:
        """Whether it can run this product: x passes through a ring only without segments, shared memory suffices."""
        stages = (_SEGMENT_STAGES,) if template_segment(n, k) else _WHOLE_STAGES
        whole_x = self.x_slots in (0, _ceil(k, _CHUNK_K))
        passing = self.x_slots == self.stages + 2 and self.x_slots < _ceil(k, _CHUNK_K) and not template_segment(n, k)
        return (
            k % 8 == 0
            and self.stages in stages
            and 1 <= self.rows <= ROWS_MAX_M
            and 1 <= self.warps <= _MAX_WARPS
            and (whole_x or passing)
            and self.shared_mem(m, n, k) <= max_shared
        )

    def template(self, segment: int, aligned: bool = True) -> tuple[int, ...]:
        return (self.stages, segment)

    def grid(self, m: int, n: int, gpu: Gpu) -> tuple[int, int, int]:
        return (self.blocks, _ceil(m, self.rows), 1)

    def _units(self, n: int, k: int) -> tuple[int, int]:
        """Tiles of the block that has most, and segments of each."""
        segment = template_segment(n, k)
        return _ceil(_ceil(n, 8), self.blocks), _ceil(k, segment) if segment else 1

    def ring_bytes(self, n: int, k: int) -> int:
        """Of all warps of a block: what is in flight at most."""
        return self.warps * self._slots(n, k) * _CHUNK_BYTES

    def _slots(self, n: int, k: int) -> int:
        tiles, segments = self._units(n, k)
        segment = template_segment(n, k)
        return min(self.stages, _ceil(tiles * segments, self.warps) * _ceil(segment or k, _CHUNK_K))

    def _rounds(self, m: int, n: int, k: int) -> tuple[int, int]:
        """Tiles whose partial sums are kept at a time, and the buffers for them."""
        tiles, segments = self._units(n, k)
        tile_bytes = segments * min(self.rows, m) * 32
        if tiles * tile_bytes <= _PARTIAL_BYTES:
            return tiles, 1
        return min(tiles, max(1, _PARTIAL_BYTES // 2 // tile_bytes)), 2

    def shared_mem(self, m: int, n: int, k: int) -> int:
        rows = min(self.rows, m)
        partial = 0
        if template_segment(n, k):
            tiles, buffers = self._rounds(m, n, k)
            partial = tiles * buffers * self._units(n, k)[1] * rows * 32
        x_slots = self.x_slots or _ceil(k, _CHUNK_K)
        return 2 * _CHUNK_K + self.ring_bytes(n, k) + x_slots * rows * 2 * _CHUNK_K + partial

    def arguments(self, m: int, n: int, k: int) -> tuple[int, ...]:
        """What the kernel takes beside the arrays, the sizes and `weight_ready`."""
        x_slots = self.x_slots or _ceil(k, _CHUNK_K)
        return (min(self.rows, m), self._slots(n, k), x_slots, self._rounds(m, n, k)[0])


@dataclass(frozen=True)
class OnceVariant:
    """`linear_rows_once`: all of a block's weight on the way at once, `tiles` tiles of 8 rows of a segment to a warp.

    For weights with segments and up to 16 rows of x; `warps` is a multiple of the number of segments.
    """

    blocks: int
    warps: int
    tiles: int

    file = "linear_rows.cu"
    kernel = "linear_rows_once"

    def __str__(self) -> str:
        return f"once on {self.blocks} blocks of {self.warps} warps t{self.tiles}"

    @property
    def threads(self) -> int:
        return self.warps * 32

    def fits(self, m: int, n: int, k: int, max_shared: int = MAX_SHARED) -> bool:
        """Whether it can run this product: one segment to a warp, all tiles, shared memory suffices."""
        segment = template_segment(n, k)
        if not segment or k % 8:
            return False
        groups, rest = divmod(self.warps, _ceil(k, segment))
        return (
            rest == 0
            and groups >= 1
            and self.warps <= _MAX_WARPS
            and 1 <= self.tiles <= _ONCE_TILES
            and m <= ROWS_MAX_M
            and self.blocks * groups * self.tiles * 8 >= n
            and self.shared_mem(m, n, k) <= max_shared
        )

    def template(self, segment: int, aligned: bool = True) -> tuple[int, ...]:
        return (self.tiles, segment)

    def grid(self, m: int, n: int, gpu: Gpu) -> tuple[int, int, int]:
        return (self.blocks, 1, 1)

    def weight_bytes(self, n: int, k: int) -> int:
        """Of a block, in shared memory."""
        return self.warps * self.tiles * 8 * template_segment(n, k) * 2

    def shared_mem(self, m: int, n: int, k: int) -> int:
        needed = self.weight_bytes(n, k) + self.warps * m * (template_segment(n, k) * 2 + self.tiles * 32)
        return max(needed, _ONCE_LEAST)

    def arguments(self, m: int, n: int, k: int) -> tuple[int, ...]:
        """`early`: more rows of x take so long that a weight that comes before them is in their way."""
        return (int(m <= _ONCE_EARLY),)


Variant = TileVariant | RowsVariant | OnceVariant

# Clock cycles of a k-step of 16 on an H200: a block alone pays both, of several on one multiprocessor each the second.
_TILES: dict[TileVariant, tuple[int, int]] = {
    TileVariant(128, 256, 32, 64, 64, 4): (60, 425),
    TileVariant(128, 128, 64, 64, 32, 3): (60, 275),
    TileVariant(64, 64, 64, 32, 32, 4, 2): (30, 100),
}
_NARROW = TileVariant(64, 32, 64, 16, 32, 6, 2)
_NARROW_CYCLES = (40, 52)
_UNALIGNED_TILE = TileVariant(64, 64, 64, 32, 32, 4, 2)

# Tiles that are timed by the tuning script but not chosen.
_MORE_TILES = (
    TileVariant(128, 128, 128, 64, 32, 3),
    TileVariant(128, 256, 64, 64, 64, 4),
    TileVariant(128, 64, 64, 64, 32, 3, 2),
)


def _row_choices(m: int, n: int, k: int, gpu: Gpu) -> Iterator[tuple[float, RowsVariant]]:
    """Variants that fit, with an estimate of their time: microseconds on an H200, right in proportion elsewhere."""
    tiles, segment = _ceil(n, 8), template_segment(n, k)
    blocks = min(tiles, gpu.sm_count)
    per_block = _ceil(tiles, blocks)
    stream_us = per_block * blocks * 16.0 * k / 4.2e6
    rows = min(m, ROWS_MAX_M)
    while rows:
        units = per_block * (_ceil(k, segment) if segment else 1)
        for warps in range(1, _MAX_WARPS + 1):
            turns = _ceil(units, warps)
            if warps > 1 and turns == _ceil(units, warps - 1):
                continue  # fewer warps end as early
            for stages in (_SEGMENT_STAGES,) if segment else _WHOLE_STAGES:
                for x_slots in (0,) if segment else (0, stages + 2):
                    variant = RowsVariant(blocks, warps, stages, rows, x_slots)
                    if not variant.fits(m, n, k, gpu.max_shared):
                        continue
                    # bytes in flight: all there is, or enough to cover the latency of memory
                    enough = min(56 << 10, units * (segment or k) * 16)
                    starved = max(1.0, enough / variant.ring_bytes(n, k))
                    uneven = 1.0 if segment else turns * warps / units
                    # a warp needs about 0.2 us for a chunk: a chain of eight tensor-core steps behind a load
                    busy = turns * _ceil(segment or k, _CHUNK_K) * 0.2
                    time = stream_us * starved * uneven + 0.2 * busy
                    if x_slots and turns > 1:
                        time += stream_us * rows / (8 * warps)  # x again for every tile of a warp
                    if variant.shared_mem(m, n, k) > gpu.shared_target:
                        time += 1.0  # the next kernel cannot start beside it
                    time *= _ceil(m, rows)
                    yield time + 0.001 * warps, variant
        rows //= 2


def _best_rows(m: int, n: int, k: int, gpu: Gpu) -> RowsVariant | None:
    return min(_row_choices(m, n, k, gpu), default=(0.0, None), key=lambda choice: choice[0])[1]


@functools.lru_cache(maxsize=8192)
def at_once(m: int, n: int, k: int, gpu: Gpu) -> OnceVariant | None:
    """The variant that has all of the weight on the way at once, None where it is not the choice.

    A block to every multiprocessor, with work or without: then one block of each launch is on each.
    """
    segment = template_segment(n, k)
    if not segment or m > ROWS_MAX_M or gpu.max_shared < _ONCE_GPU:
        return None
    block_tiles = _ceil(_ceil(n, 8), gpu.sm_count)
    groups = _ceil(block_tiles, _ONCE_TILES)
    warps = groups * _ceil(k, segment)
    variant = OnceVariant(gpu.sm_count, warps, _ceil(block_tiles, groups))
    enough = gpu.max_shared if variant.weight_bytes(n, k) <= _ONCE_ALONE else gpu.shared_target
    return variant if variant.fits(m, n, k, enough) else None


def candidates(m: int, n: int, k: int, gpu: Gpu) -> list[Variant]:
    """Everything worth timing for a product [m, k] x [n, k]^T: what :func:`select` chooses from, and its neighbours."""
    once = at_once(m, n, k, gpu)
    found: list[Variant] = [once] if once else []
    if m <= 4 * ROWS_MAX_M:
        ranked = sorted(_row_choices(m, n, k, gpu), key=lambda choice: choice[0])
        by_warps: dict[tuple[int, bool], RowsVariant] = {}
        for _, variant in ranked:
            by_warps.setdefault((variant.warps, variant.x_slots == 0), variant)
        found += list(by_warps.values())[:6]
    if m > ROWS_MAX_M:
        found += [*_TILES, _NARROW, *_MORE_TILES]
    return [v for v in dict.fromkeys(found) if v.fits(m, n, k, gpu.max_shared)]


@functools.lru_cache(maxsize=8192)
def select(m: int, n: int, k: int, aligned: bool, gpu: Gpu) -> Variant:
    """The variant for a product of x [m, k] and a weight [n, k].

    Parameters
    ----------
    m, n, k : int
        Sizes.
    aligned : bool
        Whether rows start at multiples of 16 bytes; else one generic variant serves.
    gpu : Gpu

    Returns
    -------
    TileVariant, RowsVariant or OnceVariant
    """
    if not aligned:
        return _UNALIGNED_TILE
    once = at_once(m, n, k, gpu)
    if once is not None:
        return once
    segment = template_segment(n, k)
    # A small weight stays in L2, so few blocks of 16 rows may each read it where tiles would leave the GPU half empty.
    again = segment != 0 and (m <= 2 * ROWS_MAX_M or (m <= 4 * ROWS_MAX_M and _ceil(n, 64) < gpu.sm_count // 2))
    if m <= ROWS_MAX_M or again:
        rows = _best_rows(m, n, k, gpu)
        if rows is not None:
            return rows

    def cost(item: tuple[TileVariant, tuple[int, int]]) -> float:
        tile, (alone, each) = item
        blocks = tile.tiles(m, n)
        resident = min(tile.min_blocks, _ceil(blocks, gpu.sm_count))
        waves = blocks / (gpu.sm_count * resident)
        return max(1.0, _ceil(blocks, gpu.sm_count * resident) if waves < 8 else waves) * max(
            alone + each, resident * each
        )

    tiles = dict(_TILES) if segment else {**_TILES, _NARROW: _NARROW_CYCLES}
    return min((t for t in tiles.items() if t[0].fits(m, n, k, gpu.max_shared)), key=cost)[0]
