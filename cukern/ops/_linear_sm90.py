"""The linear layer on Hopper: which tiles `linear_sm90.cu` works in, its tensor maps and its launch.

The bits are those of the portable kernels (docs/numerics.md, item 1): what is chosen here decides speed alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cukern.ops._arrays import CTYPES, Array
from cukern.ops._linear_variants import Gpu, at_once, template_segment

__all__ = [
    "ARCH",
    "HopperVariant",
    "SplitVariant",
    "Variant",
    "accepts",
    "candidates",
    "kernel_variants",
    "launched",
    "least_m",
    "select",
]

ARCH = "sm_90a"
BLOCK_K = 64
SEGMENT = 256
MAX_SHARED = 227 << 10
_HALF_SHARED = 113 << 10  # two blocks of that much fit a multiprocessor
_FEW = 64
"""Up to this many rows the bytes of the weight decide, and tiles of 16 or 64 rows serve."""

# Registers of a consumer thread, by the number of consumer warpgroups (setmaxnreg in the kernel), and what is left of
# them beside accumulators.
_REGISTERS = {1: 255, 2: 232, 3: 160}
_WORKING_REGISTERS = 32
_LARGE_TILE = 128 * 128  # from here on all results pass through the ring
# Of a warpgroup's wgmma, as ptx/wgmma.cuh defines them.
_WIDTHS = (16, 32, 48, 64, 72, 96, 128, 160, 192, 256)


@dataclass(frozen=True)
class HopperVariant:
    """`linear_sm90`: a block computes 64 `mi` `groups_m` x `bn` outputs with `groups_m` x `groups_n` warpgroups.

    `stages` K-tiles of 64 in shared memory; clusters of `cluster_m` x `cluster_n` blocks share their tiles; each
    further warpgroup starts `lag` K-tiles later; tiles are walked down `group` rows of them before going right.
    `x_rows`, of one warpgroup: only that many of its 64 rows are copied and belong to the tile.
    """

    groups_m: int
    groups_n: int
    mi: int
    bn: int
    stages: int
    cluster_m: int = 1
    cluster_n: int = 1
    lag: int = 0
    group: int = 8
    x_rows: int = 0

    kernel = "linear_sm90"

    def __str__(self) -> str:
        return (
            f"{self.bm}x{self.bn} wg {self.groups_m}x{self.groups_n} s{self.stages} "
            f"c{self.cluster_m}x{self.cluster_n} lag{self.lag} g{self.group}"
        )

    @property
    def bm(self) -> int:
        return self.x_rows or 64 * self.mi * self.groups_m

    @property
    def consumers(self) -> int:
        return self.groups_m * self.groups_n

    @property
    def cluster(self) -> int:
        return self.cluster_m * self.cluster_n

    @property
    def threads(self) -> int:
        return (self.consumers + 1) * 128

    @property
    def boxes(self) -> tuple[int, int]:
        """Rows of x and of the weight that a block copies at once."""
        x_rows = self.bm // self.cluster_n if self.bm % (8 * self.cluster_n) == 0 else self.bm
        return x_rows, self.bn // self.cluster_m

    def shared_mem(self, k: int) -> int:
        """The ring and its barriers."""
        return _ring(self.stages, self.bm + self.bn) + self.consumers * self.stages * 8

    def fits(self, k: int, segment: int) -> bool:
        """Whether accumulators (two sets with segments) fit in registers, the ring in shared memory, parts in boxes."""
        width = self.bn // self.groups_n
        accumulators = self.mi * width // 2 * (2 if segment else 1)
        return (
            self.consumers in _REGISTERS
            and width * self.groups_n == self.bn
            and width in _WIDTHS
            and accumulators + _WORKING_REGISTERS <= _REGISTERS[self.consumers]
            and self.shared_mem(k) <= MAX_SHARED
            and (self.bm % (8 * self.cluster_n) == 0 or self.x_rows > 0)
            and self.bn % (8 * self.cluster_m) == 0
            and (self.x_rows == 0 or (self.mi * self.groups_m == 1 and self.x_rows == 16))
            and self.lag * (self.consumers - 1) < self.stages
        )

    @property
    def gates(self) -> bool:
        """Whether the kernel can end in SwiGLU: gate and up in pairs of eight columns."""
        return self.bn // self.cluster_m % 16 == 0 and self.bn // self.groups_n % 16 == 0

    def strip(self, item: int, gated: bool = False) -> int:
        """Columns of the boxes in which results of that many bytes each pass through shared memory."""
        width = self.bn // self.groups_n // (1 + gated) * item
        return next((b for b in (128, 64) if width % b == 0), 32) // item

    def passes(self, item: int, gated: bool = False) -> bool:
        """Whether the ring holds the results of a tile."""
        strip, columns = self.strip(item, gated), self.bn // (1 + gated)
        held = (self.bm + self.bn) * BLOCK_K * 2 // (self.bm * strip * item)
        return (
            columns // self.groups_n % strip == 0
            and strip >= 16
            and held > 0
            and -(-columns // (strip * held)) <= self.stages
        )

    def through(self, item: int, residual: bool, gated: bool = False) -> int:
        """The kernel's `Through`: 1 with a residual, 2 for other results that pass through the ring, 0 else."""
        if residual:
            return 1
        return 2 if (item == 4 or self.bm * self.bn >= _LARGE_TILE) and self.passes(item, gated) else 0

    def template(self, segment: int, through: int = 0, gated: bool = False) -> tuple[int, ...]:
        return (
            *(self.groups_m, self.groups_n, self.mi, self.bn, self.stages),
            *(self.cluster_m, self.cluster_n, self.lag, self.x_rows, through, int(gated), segment),
        )

    def cluster_tiles(self, m: int, n: int) -> int:
        """Tiles of the whole cluster that the result consists of."""
        return -(-m // (self.bm * self.cluster_m)) * -(-n // (self.bn * self.cluster_n))

    def waves(self, m: int, n: int, sm_count: int) -> int:
        """Tiles that the busiest block computes."""
        return -(-self.cluster_tiles(m, n) // _resident(self.cluster, sm_count))

    def grid(self, m: int, n: int, sm_count: int) -> int:
        """Blocks: no more than fit the GPU at a time, one to a multiprocessor."""
        return min(self.cluster_tiles(m, n), _resident(self.cluster, sm_count)) * self.cluster

    def sizes(self, m: int, n: int, k: int) -> tuple[int, ...]:
        """The kernel's arguments behind the arrays."""
        return (m, n, k, self.group)


@dataclass(frozen=True)
class SplitVariant:
    """`linear_sm90_split`: `split` blocks share out the segments of K of one tile of 64 `groups` x `bn` outputs.

    For results of few tiles; `stages` K-tiles of 64 in shared memory.
    """

    groups: int
    bn: int
    stages: int
    split: int
    x_rows: int = 0

    kernel = "linear_sm90_split"
    gates = False

    def __str__(self) -> str:
        return f"{self.bm}x{self.bn} split {self.split} s{self.stages}"

    @property
    def bm(self) -> int:
        return self.x_rows or 64 * self.groups

    @property
    def cluster(self) -> int:
        return self.split

    @property
    def threads(self) -> int:
        return (self.groups + 1) * 128

    @property
    def boxes(self) -> tuple[int, int]:
        """Rows of x and of the weight that a block copies at once."""
        return self.bm, self.bn

    def shared_mem(self, k: int) -> int:
        """The ring, two barriers to a buffer, and the sums of a block's segments, rows padded by eight floats."""
        per_block = -(-k // (SEGMENT * self.split))
        return _ring(self.stages, self.bm + self.bn) + per_block * self.bm * (self.bn + 8) * 4

    def fits(self, k: int, segment: int) -> bool:
        """Whether there are segments to share out, and room for their sums."""
        return (
            segment == SEGMENT
            and self.groups in (1, 2)
            and (self.x_rows == 0 or (self.groups == 1 and self.x_rows == 16))
            and self.bn in _WIDTHS
            and self.bn // 2 + _WORKING_REGISTERS <= _REGISTERS[1]
            and self.split in (2, 4, 8)
            and self.shared_mem(k) <= MAX_SHARED
        )

    def passes(self, item: int, gated: bool = False) -> bool:
        """Any residual is read by those who write the result."""
        return True

    def through(self, item: int, residual: bool, gated: bool = False) -> int:
        """Results go from registers to memory."""
        return 0

    def template(self, segment: int, through: int = 0, gated: bool = False) -> tuple[int, ...]:
        return (self.groups, self.x_rows, self.bn, self.stages, self.split, segment)

    def cluster_tiles(self, m: int, n: int) -> int:
        """Tiles, one to a cluster."""
        return -(-m // self.bm) * -(-n // self.bn)

    def waves(self, m: int, n: int, sm_count: int) -> int:
        """Tiles that are computed one after the other."""
        return -(-self.cluster_tiles(m, n) // _resident(self.split, sm_count))

    def grid(self, m: int, n: int, sm_count: int) -> int:
        """Blocks: a cluster to every tile."""
        return self.cluster_tiles(m, n) * self.split

    def sizes(self, m: int, n: int, k: int) -> tuple[int, ...]:
        """The kernel's arguments behind the arrays."""
        return (m, n, k)


Variant = HopperVariant | SplitVariant


def _ring(stages: int, rows: int) -> int:
    """Bytes of `stages` buffers of that many rows with two barriers each, and 64 rows behind the start of the last one,
    which a tensor-core step reads."""
    return (stages - 1) * rows * BLOCK_K * 2 + max(rows * BLOCK_K * 2 + 16 * stages, 64 * BLOCK_K * 2)


def _resident(cluster: int, sm_count: int) -> int:
    """Clusters that run at a time: all pairs, but of fours and eights fewer than their size says (30 and 15 of 132
    multiprocessors, measured), since a cluster does not span groups of multiprocessors."""
    return max(1, sm_count // cluster if cluster <= 2 else sm_count * 10 // 11 // cluster)


def accepts(m: int, n: int, k: int, addresses: tuple[int, ...]) -> bool:
    """Whether the kernel can run a product: all rows start at multiples of 16 bytes (`addresses`: of the arrays)."""
    return m > 0 and n % 8 == 0 and k % 8 == 0 and all(a % 16 == 0 for a in addresses)


# The tiles that are chosen from: how fast a full block is relative to the best, and what a launch costs beside its
# waves, in outputs of the best tile for K from `_PAIR_K` on; as it is a time, a shorter K makes it more outputs. A pair
# of blocks shares loads, but starts and ends together. A seventh buffer of 128 x 128 gains up to 6 % where a block
# computes several tiles and costs 1 to 2 % where it computes one.
_PAIR, _PAIR_K = 2800, 2048
_SEGMENTED: dict[Variant, tuple[float, int]] = {
    HopperVariant(2, 1, 1, 192, 5, 2, 1, lag=1): (1.0, _PAIR),
    HopperVariant(2, 1, 1, 128, 7, 2, 1, lag=2): (0.95, _PAIR),
    HopperVariant(2, 1, 1, 128, 6, lag=2): (0.9, 0),
    HopperVariant(2, 1, 1, 96, 7): (0.75, 0),
    HopperVariant(2, 1, 1, 64, 8): (0.6, 0),
    HopperVariant(2, 1, 1, 32, 10): (0.5, 0),
    HopperVariant(1, 1, 1, 96, 10): (0.5, 0),
    HopperVariant(1, 1, 1, 32, 14): (0.31, 0),
    SplitVariant(1, 32, 8, 2): (0.3, 0),
}
_WHOLE: dict[Variant, tuple[float, int]] = {
    HopperVariant(2, 1, 1, 256, 4, 2, 1, lag=1): (1.0, 0),
    HopperVariant(2, 1, 1, 192, 5, 1, 2): (0.9, 0),
    HopperVariant(2, 1, 1, 128, 6, lag=1): (0.9, 0),
    HopperVariant(2, 1, 1, 96, 7): (0.75, 0),
    HopperVariant(2, 1, 1, 64, 8): (0.6, 0),
    HopperVariant(1, 1, 1, 96, 10, 2, 1): (0.48, 0),
    HopperVariant(1, 1, 1, 64, 12): (0.4, 0),
}


def least_m(n: int, k: int) -> int:
    """From this many rows on the kernel is used, where `at_once` of _linear_variants.py has nothing faster; for fewer,
    `linear_rows` is faster (measured at 1 and 16 rows)."""
    if template_segment(n, k) == 0:
        return 1 if n <= 8192 else 4
    if n > 2048:
        return 1
    return 2 if k <= 8 * SEGMENT else 12  # K split over eight blocks, one segment to each


# For few rows: the variant whose busiest block reads the fewest columns of the weight; of equal ones the first.
_FEW_WHOLE: tuple[Variant, ...] = (
    HopperVariant(1, 1, 1, 192, 6),
    HopperVariant(1, 1, 1, 128, 8),
    HopperVariant(1, 1, 1, 96, 9),
    HopperVariant(1, 1, 1, 48, 12),
    HopperVariant(1, 1, 1, 32, 14),
)
_FEW_SEGMENTED: tuple[Variant, ...] = (
    HopperVariant(1, 1, 1, 48, 12),
    HopperVariant(1, 1, 1, 32, 14),
    SplitVariant(1, 64, 4, 8),
    SplitVariant(1, 72, 4, 8),
    SplitVariant(1, 48, 8, 4),
)
# For up to 16 rows, where x takes little room. Of a long weight about 100 KB should be on the way to a block; of a
# short one, which is there before x is, two launches should fit a multiprocessor. A split: its part of K in the ring.
_FEWEST_WHOLE: tuple[Variant, ...] = (
    HopperVariant(1, 1, 1, 192, 6, x_rows=16),
    HopperVariant(1, 1, 1, 128, 8, x_rows=16),
    HopperVariant(1, 1, 1, 96, 9, x_rows=16),
    HopperVariant(1, 1, 1, 48, 20, x_rows=16),
    HopperVariant(1, 1, 1, 32, 24, x_rows=16),
)
_FEWEST_SEGMENTED: tuple[Variant, ...] = (
    HopperVariant(1, 1, 1, 48, 10, x_rows=16),
    HopperVariant(1, 1, 1, 32, 14, x_rows=16),
    SplitVariant(1, 72, 4, 8, x_rows=16),
    SplitVariant(1, 72, 8, 8, x_rows=16),
)


def _few(m: int, segment: int) -> tuple[Variant, ...]:
    if m <= 16:
        return _FEWEST_SEGMENTED if segment else _FEWEST_WHOLE
    return _FEW_SEGMENTED if segment else _FEW_WHOLE


_SPLIT_SHARE = 0.75  # what a block of a split gains of its part: the sums must meet
_UNEVEN_SHARE = 0.4  # where blocks of a cluster differ in their segments (12 over eight: 7.8 us, over four 6.8)


def _select_few(m: int, n: int, k: int, sm_count: int, residual: bool, gated: bool) -> Variant:
    segment = template_segment(n, k)

    def cost(variant: Variant) -> tuple[float, int]:
        if not isinstance(variant, SplitVariant):
            return variant.waves(m, n, sm_count) * variant.bn, 0
        tiles, segments = variant.cluster_tiles(m, n), -(-k // SEGMENT)
        resident = _resident(variant.split, sm_count)
        if variant.shared_mem(k) <= _HALF_SHARED:  # a few more find room beside others: 16 of eight blocks, measured
            resident += resident // 8
        share = _SPLIT_SHARE if segments % variant.split == 0 else _UNEVEN_SHARE
        part = -(-segments // variant.split) * (SEGMENT // BLOCK_K)  # K-tiles of a block
        return -(-tiles // resident) * variant.bn / (share * variant.split), abs(variant.stages - part)

    return min((v for v in _few(m, segment) if _can(v, k, segment, residual, gated)), key=cost)


def _can(variant: Variant, k: int, segment: int, residual: bool, gated: bool) -> bool:
    """Whether a variant can run such a weight and end that way."""
    return variant.fits(k, segment) and (variant.passes(4) or not residual) and (variant.gates or not gated)


@functools.lru_cache(maxsize=4096)
def select(m: int, n: int, k: int, sm_count: int, residual: bool = False, gated: bool = False) -> Variant:
    """The variant for x [m, k] and a weight [n, k]: the least time by full waves of tiles and each tile's speed."""
    segment = template_segment(n, k)
    if m <= _FEW:
        return _select_few(m, n, k, sm_count, residual, gated)

    def cost(item: tuple[Variant, tuple[float, int]]) -> float:
        variant, (speed, fixed) = item
        share = variant.split if isinstance(variant, SplitVariant) else 1
        launch = fixed * max(1.0, _PAIR_K / k)
        return variant.waves(m, n, sm_count) * variant.bm * variant.bn / share / speed + launch

    table = _SEGMENTED if segment else _WHOLE
    fitting = ((v, s) for v, s in table.items() if _can(v, k, segment, residual, gated))
    return min(fitting, key=cost)[0]


def _all(m: int, segment: int) -> Iterator[Variant]:
    if m <= _FEW:
        for few in _few(m, segment):
            yield few
            if isinstance(few, HopperVariant):
                yield replace(few, cluster_n=2)
        if segment:
            yield from (SplitVariant(1, bn, 8, 2, 16 if m <= 16 else 0) for bn in (16, 64, 96))
    elif m <= 256:
        for bn, stages in ((32, 10), (64, 8), (96, 7), (128, 6), (192, 5)):
            yield HopperVariant(2, 1, 1, bn, stages)
        for bn, stages in ((32, 14), (64, 12), (96, 10), (128, 8)):
            yield from (HopperVariant(1, 1, 1, bn, stages, *clusters) for clusters in ((1, 1), (2, 1)))
        if segment:
            for groups, bn, stages in ((1, 32, 8), (1, 64, 8), (2, 32, 6), (2, 64, 5)):
                yield SplitVariant(groups, bn, stages, 2)
        else:
            yield from (HopperVariant(2, 1, 1, 192, 5, *clusters) for clusters in ((1, 2), (2, 1)))
    elif segment:
        for bn, stages in ((128, 6), (160, 5), (192, 5)):
            for clusters in ((1, 1), (2, 1)):
                yield from (HopperVariant(2, 1, 1, bn, stages, *clusters, lag=lag) for lag in (1, 2))
        yield HopperVariant(3, 1, 1, 128, 5, lag=1)
    else:
        for clusters in ((1, 1), (2, 1)):
            yield from (HopperVariant(2, 1, 1, 256, 4, *clusters, lag=lag) for lag in (0, 1, 2))
        yield HopperVariant(2, 1, 2, 128, 4, 1, 2, lag=1)


def candidates(m: int, n: int, k: int, sm_count: int, residual: bool = False) -> list[Variant]:
    """What is worth timing for a product: the choice first, then others that keep as much of the GPU busy."""
    segment = template_segment(n, k)
    chosen = select(m, n, k, sm_count, residual)
    others = list(_all(m, segment))
    if m > 4096 and isinstance(chosen, HopperVariant):
        others.append(replace(chosen, group=16))

    def busy(variant: Variant) -> float:
        waves = variant.waves(m, n, sm_count)
        return variant.cluster_tiles(m, n) * variant.cluster / (waves * sm_count)

    fitting = [v for v in dict.fromkeys(others) if _can(v, k, segment, residual, False)]
    least = 0.7 * max(busy(v) for v in fitting) if m <= _FEW else 0.0
    return list(dict.fromkeys([chosen, *(v for v in fitting if busy(v) >= least)]))


class Maps(NamedTuple):
    """Sizes of the tensor maps of a launch: rows, columns and box, for `matrix_map` and `result_map`.

    `out`, with the bytes of an element behind the columns, is None for a kernel that takes the residual's address, and
    empty where results do not pass through a map. `gated`: the weight's is for `gated_map`.
    """

    x: tuple[int, int, int]
    weight: tuple[int, int, int]
    out: tuple[int, int, int, int, int] | tuple[()] | None
    gated: bool = False

    def leading(self, x: int, weight: int, bias: Any, residual: Any, target: Any) -> tuple[Any, ...]:
        """The arguments before the numbers. `bias`, `residual` and `target`: addresses or arrays."""
        from cukern.jit.tensor_map import gated_map, matrix_map, no_map, result_map

        x_map = matrix_map(x, *self.x)
        weight_map = gated_map(weight, *self.weight) if self.gated else matrix_map(weight, *self.weight)
        if self.out is None:
            return x_map, weight_map, bias, residual, target
        if self.out:
            out_map = result_map(target if isinstance(target, int) else int(target.data.ptr), *self.out)
        else:
            out_map = no_map()
        return x_map, weight_map, out_map, bias, target


@dataclass(frozen=True)
class _Plan:
    kernel: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_mem: int
    cluster: tuple[int, int, int] | None
    maps: Maps
    sizes: tuple[int, ...]


@functools.lru_cache(maxsize=8192)
def _plan(
    variant: Variant | None,
    ctype: str,
    out_ctype: str,
    m: int,
    n: int,
    k: int,
    residual: bool,
    sm_count: int,
    gated: bool = False,
) -> _Plan:
    """Everything about a launch that does not depend on addresses."""
    from cukern import jit

    segment = template_segment(n, k)
    if variant is None:
        variant = select(m, n, k, sm_count, residual, gated)
    elif not _can(variant, k, segment, residual, gated):
        what = (
            f"segments of {segment or k}" + (" and a residual" if residual else "") + (" and a gate" if gated else "")
        )
        raise ValueError(f"linear: variant {variant} cannot run a weight [{n}, {k}] with {what}")
    item = 4 if out_ctype == "float" else 2
    through: int = variant.through(item, residual, gated)
    out_map: Any = None
    if isinstance(variant, HopperVariant):
        columns = n // (1 + gated)
        out_map = (m, columns, item, variant.x_rows or 64, variant.strip(item, gated)) if through else ()
    return _Plan(
        jit.kernel("linear_sm90.cu", variant.kernel, (ctype, out_ctype, *variant.template(segment, through, gated))),
        (variant.grid(m, n, sm_count), 1, 1),
        (variant.threads, 1, 1),
        variant.shared_mem(k),
        (variant.cluster, 1, 1) if variant.cluster > 1 else None,
        Maps((m, k, variant.boxes[0]), (n, k, variant.boxes[1]), out_map, gated),
        variant.sizes(m, n, k),
    )


class Launched(NamedTuple):
    """A launch as it was made."""

    kernel: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[Any, ...]
    shared_mem: int
    cluster: tuple[int, int, int] | None
    maps: Maps


def launched(
    x: Array,
    weight: Array,
    bias: Array | None,
    residual: Array | None,
    target: Array,
    m: int,
    n: int,
    k: int,
    variant: Variant | None = None,
    static_weight: bool = False,
    gated: bool = False,
) -> Launched | None:
    """Run a product whose arguments :func:`cukern.ops.linear` has checked.

    Parameters
    ----------
    x, weight, bias, residual, target : array
        CuPy arrays, contiguous: [m, k], [n, k] of one half type, [n] float32 or None, `target` itself (float32) or
        None, [m, n].
    m, n, k : int
        Sizes, none of them 0.
    variant : HopperVariant or SplitVariant, optional
        For tests and tuning; it also lifts the lower limit of `m`.
    static_weight : bool
        That nothing that is still queued or running writes the weight.
    gated : bool
        End in SwiGLU: `target` is of the weight's type, [m, n / 2].

    Returns
    -------
    Launched or None
        What was launched; None where another kernel must.

    Raises
    ------
    ValueError
        If the variant given cannot run this weight.
    """
    if variant is None and m < least_m(n, k):
        return None
    from cukern import jit

    device = jit.device()
    if device.arch != ARCH:
        return None
    x_address, w_address, address = int(x.data.ptr), int(weight.data.ptr), int(target.data.ptr)
    if not accepts(m, n // (1 + gated), k, (x_address, w_address, address)):
        return None
    ends = (residual is not None, device.sm_count, gated)
    plan = _plan(variant, CTYPES[x.dtype], CTYPES[target.dtype], m, n, k, *ends)
    leading = plan.maps.leading(x_address, w_address, bias, residual, target)
    arguments = (*leading, *plan.sizes, int(static_weight))
    plan.kernel(plan.grid, plan.block, arguments, shared_mem=plan.shared_mem, cluster=plan.cluster, pdl=True)
    return Launched(plan.kernel, plan.grid, plan.block, arguments, plan.shared_mem, plan.cluster, plan.maps)


def kernel_variants() -> list[tuple[str, str, tuple[str | int, ...], None, tuple[str, ...]]]:
    """What the published Qwen3 sizes launch on this architecture, for compiling ahead and for the check of spills."""
    found: dict[tuple[str, str, tuple[str | int, ...], None, tuple[str, ...]], None] = {}
    gpu = Gpu(132, MAX_SHARED, MAX_SHARED + 1024)
    for hidden, intermediate, heads in ((1024, 3072, 2048), (4096, 12288, 4096)):
        for n, k, out, residual, gated in (
            (heads + 2048, hidden, "same", False, False),
            (hidden, heads, "float", True, False),
            (2 * intermediate, hidden, "same", False, True),
            (hidden, intermediate, "float", True, False),
            (151936, hidden, "float", False, False),
        ):
            segment = template_segment(n, k)
            for m in (1, 16, 32, 64, 128, 192, 256, 288, 512, 600, 1024, 1200, 2048, 2100, 8192):
                if m < least_m(n, k) or (not gated and at_once(m, n, k, gpu) is not None):
                    continue
                option = select(m, n, k, gpu.sm_count, residual, gated)
                for ctype in ("half", "bf16"):
                    kind, item = (ctype, 2) if out == "same" else (out, 4)
                    through = option.through(item, residual, gated)
                    template = (ctype, kind, *option.template(segment, through, gated))
                    found[("linear_sm90.cu", option.kernel, template, None, (ARCH,))] = None
    return list(found)
