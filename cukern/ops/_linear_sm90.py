"""The linear layer on Hopper: which tiles `linear_sm90.cu` works in, its tensor maps and its launch.

The bits are those of the portable kernels (docs/numerics.md, item 1): what is chosen here decides speed alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cukern.ops._arrays import CTYPES, Array
from cukern.ops._linear_variants import template_segment

__all__ = [
    "ARCH",
    "HopperVariant",
    "SplitVariant",
    "Variant",
    "accepts",
    "candidates",
    "kernel_variants",
    "launch",
    "select",
]

ARCH = "sm_90a"
BLOCK_K = 64
SEGMENT = 256
MAX_SHARED = 227 << 10
MIN_M = 65
"""From this many rows on the kernel is used; for fewer, the kernel for few rows reads the weight faster."""

# Registers of a consumer thread, by the number of consumer warpgroups (setmaxnreg in the kernel), and what is left of
# them beside accumulators.
_REGISTERS = {1: 255, 2: 232, 3: 160}
_WORKING_REGISTERS = 32
_WIDTHS = (16, 32, 48, 64, 96, 128, 160, 192, 256)  # of a warpgroup's wgmma, as ptx/wgmma.cuh defines them


@dataclass(frozen=True)
class HopperVariant:
    """`linear_sm90`: a block computes 64 `mi` `groups_m` x `bn` outputs with `groups_m` x `groups_n` warpgroups.

    `stages` K-tiles of 64 in shared memory; clusters of `cluster_m` x `cluster_n` blocks share their tiles; each
    further warpgroup starts `lag` K-tiles later; tiles are walked down `group` rows of them before going right.
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

    kernel = "linear_sm90"

    def __str__(self) -> str:
        return (
            f"{self.bm}x{self.bn} wg {self.groups_m}x{self.groups_n} s{self.stages} "
            f"c{self.cluster_m}x{self.cluster_n} lag{self.lag} g{self.group}"
        )

    @property
    def bm(self) -> int:
        return 64 * self.mi * self.groups_m

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
        return self.bm // self.cluster_n, self.bn // self.cluster_m

    def shared_mem(self, k: int) -> int:
        """The ring, and two barriers of eight bytes to a buffer."""
        return self.stages * ((self.bm + self.bn) * BLOCK_K * 2 + 16)

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
            and self.bm % (8 * self.cluster_n) == 0
            and self.bn % (8 * self.cluster_m) == 0
            and self.lag * (self.consumers - 1) < self.stages
        )

    def template(self, segment: int) -> tuple[int, ...]:
        return (
            *(self.groups_m, self.groups_n, self.mi, self.bn, self.stages),
            *(self.cluster_m, self.cluster_n, self.lag, segment),
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

    kernel = "linear_sm90_split"

    def __str__(self) -> str:
        return f"{self.bm}x{self.bn} split {self.split} s{self.stages}"

    @property
    def bm(self) -> int:
        return 64 * self.groups

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
        return self.stages * ((self.bm + self.bn) * BLOCK_K * 2 + 16) + per_block * self.bm * (self.bn + 8) * 4

    def fits(self, k: int, segment: int) -> bool:
        """Whether there are segments to share out, and room for their sums."""
        return (
            segment == SEGMENT
            and self.groups in (1, 2)
            and self.bn in _WIDTHS
            and self.bn // 2 + _WORKING_REGISTERS <= _REGISTERS[3]
            and self.split in (2, 4, 8)
            and self.shared_mem(k) <= MAX_SHARED
        )

    def template(self, segment: int) -> tuple[int, ...]:
        return (self.groups, self.bn, self.stages, self.split, segment)

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


def _resident(cluster: int, sm_count: int) -> int:
    """Clusters that run at a time: groups of 16 or 18 multiprocessors hold whole pairs, but not always whole fours."""
    return max(1, sm_count // cluster - (1 if cluster > 2 else 0))


def accepts(m: int, n: int, k: int, addresses: tuple[int, ...]) -> bool:
    """Whether the kernel can run a product: all rows start at multiples of 16 bytes (`addresses`: of the arrays)."""
    return m > 0 and n % 8 == 0 and k % 8 == 0 and all(a % 16 == 0 for a in addresses)


# The tiles that are chosen from, and how fast a full block of each is relative to the best.
_SEGMENTED: dict[Variant, float] = {
    HopperVariant(2, 1, 1, 192, 5, 2, 1, lag=1): 1.0,
    HopperVariant(2, 1, 1, 128, 6, 2, 1, lag=2): 0.9,
    HopperVariant(2, 1, 1, 64, 8): 0.6,
    HopperVariant(1, 1, 1, 64, 8): 0.4,
    SplitVariant(1, 64, 8, 2): 0.3,
    SplitVariant(1, 64, 8, 4): 0.25,
}
_WHOLE: dict[Variant, float] = {
    HopperVariant(2, 1, 1, 256, 4, 2, 1, lag=1): 1.0,
    HopperVariant(2, 1, 1, 128, 6, 2, 1, lag=1): 0.9,
    HopperVariant(2, 1, 1, 64, 8): 0.6,
    HopperVariant(1, 1, 1, 64, 8): 0.4,
}


@functools.lru_cache(maxsize=4096)
def select(m: int, n: int, k: int, sm_count: int) -> Variant:
    """The variant for x [m, k] and a weight [n, k]: the least time by full waves of tiles and each tile's speed."""
    segment = template_segment(n, k)

    def cost(item: tuple[Variant, float]) -> float:
        variant, speed = item
        share = variant.split if isinstance(variant, SplitVariant) else 1
        return variant.waves(m, n, sm_count) * variant.bm * variant.bn / share / speed

    table = _SEGMENTED if segment else _WHOLE
    return min(((v, s) for v, s in table.items() if v.fits(k, segment)), key=cost)[0]


def _all(m: int, segment: int) -> Iterator[Variant]:
    if m > 256:
        if segment:
            for stages, bn, lags in ((6, 128, (0, 2, 3)), (5, 192, (0, 1, 2))):
                for clusters in ((2, 1), (1, 2)):
                    yield from (HopperVariant(2, 1, 1, bn, stages, *clusters, lag=lag) for lag in lags)
            yield HopperVariant(2, 1, 1, 128, 7, 2, 1, lag=3)
            yield HopperVariant(2, 1, 1, 128, 6, 1, 1, lag=2)
            yield HopperVariant(2, 1, 1, 128, 6, 2, 2, lag=2)
            yield HopperVariant(2, 1, 1, 192, 5, 1, 1, lag=1)
            yield HopperVariant(3, 1, 1, 128, 5, 1, 2, lag=0)
            yield HopperVariant(3, 1, 1, 128, 5, 1, 2, lag=1)
            yield HopperVariant(3, 1, 1, 128, 5, 2, 1, lag=1)
        else:
            for clusters in ((2, 1), (1, 2), (1, 1)):
                yield from (HopperVariant(2, 1, 1, 256, 4, *clusters, lag=lag) for lag in (0, 1))
            yield HopperVariant(2, 1, 1, 256, 4, 2, 1, lag=2)
            yield HopperVariant(2, 1, 2, 128, 4, 1, 2, lag=1)
            yield HopperVariant(2, 1, 2, 128, 4, 2, 1, lag=1)
            yield HopperVariant(2, 1, 1, 192, 5, 2, 1, lag=1)
            yield HopperVariant(2, 1, 1, 128, 6, 2, 1, lag=2)
            yield HopperVariant(3, 1, 1, 192, 4, 1, 2, lag=1)
        return
    for bn, stages in ((32, 10), (48, 9), (64, 8), (96, 7), (128, 6)):
        for clusters in ((1, 1), (1, 2), (1, 4)):
            yield HopperVariant(2, 1, 1, bn, stages, *clusters, lag=0)
    for bn, stages in ((32, 12), (64, 12), (96, 10), (128, 8)):
        for clusters in ((1, 1), (2, 1), (1, 2)):
            yield HopperVariant(1, 1, 1, bn, stages, *clusters)
    yield HopperVariant(1, 2, 1, 128, 8, 2, 1)
    yield HopperVariant(1, 2, 1, 192, 6, 2, 1)
    if segment:
        for groups, bn, stages in ((1, 32, 8), (1, 64, 8), (1, 128, 4), (2, 32, 6), (2, 64, 5)):
            yield from (SplitVariant(groups, bn, stages, split) for split in (2, 4, 8))


def candidates(m: int, n: int, k: int, sm_count: int) -> list[Variant]:
    """What is worth timing for a product: the choice first, then the others."""
    segment = template_segment(n, k)
    chosen = select(m, n, k, sm_count)
    others = list(_all(m, segment))
    if m > 1024 and isinstance(chosen, HopperVariant):
        others += [replace(chosen, group=g) for g in (4, 16)]
    return [v for v in dict.fromkeys([chosen, *others]) if v.fits(k, segment)]


@dataclass(frozen=True)
class _Plan:
    kernel: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_mem: int
    cluster: tuple[int, int, int] | None
    boxes: tuple[int, int]
    sizes: tuple[int, ...]


@functools.lru_cache(maxsize=8192)
def _plan(variant: Variant | None, ctype: str, out_ctype: str, m: int, n: int, k: int, sm_count: int) -> _Plan:
    """Everything about a launch that does not depend on addresses."""
    from cukern import jit

    segment = template_segment(n, k)
    if variant is None:
        variant = select(m, n, k, sm_count)
    elif not variant.fits(k, segment):
        raise ValueError(f"linear: variant {variant} cannot run a weight [{n}, {k}] with segments of {segment or k}")
    return _Plan(
        jit.kernel("linear_sm90.cu", variant.kernel, (ctype, out_ctype, *variant.template(segment))),
        (variant.grid(m, n, sm_count), 1, 1),
        (variant.threads, 1, 1),
        variant.shared_mem(k),
        (variant.cluster, 1, 1) if variant.cluster > 1 else None,
        variant.boxes,
        variant.sizes(m, n, k),
    )


def launch(
    x: Array,
    weight: Array,
    bias: Array | None,
    residual: Array | None,
    target: Array,
    m: int,
    n: int,
    k: int,
    variant: Variant | None = None,
) -> bool:
    """Run a product whose arguments :func:`cukern.ops.linear` has checked; False where another kernel must.

    Parameters
    ----------
    x, weight, bias, residual, target : array
        CuPy arrays, contiguous: [m, k], [n, k] of one half type, [n] float32 or None, [m, n] float32 or None, [m, n].
    m, n, k : int
        Sizes, none of them 0.
    variant : HopperVariant or SplitVariant, optional
        For tests and tuning; it also lifts the lower limit of `m`.

    Raises
    ------
    ValueError
        If the variant given cannot run this weight.
    """
    return launched(x, weight, bias, residual, target, m, n, k, variant) is not None


class Launched(NamedTuple):
    """A launch as it was made; `maps`: sizes of the tensor maps of x and of the weight, for `matrix_map`."""

    kernel: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[Any, ...]
    shared_mem: int
    cluster: tuple[int, int, int] | None
    maps: tuple[tuple[int, int, int], tuple[int, int, int]]


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
) -> Launched | None:
    """:func:`launch`, and what it launched; None where another kernel must."""
    if m < MIN_M and variant is None:
        return None
    from cukern import jit
    from cukern.jit.tensor_map import matrix_map

    device = jit.device()
    if device.arch != ARCH:
        return None
    x_address, w_address = int(x.data.ptr), int(weight.data.ptr)
    others = [int(a.data.ptr) for a in (residual, target) if a is not None]
    if not accepts(m, n, k, (x_address, w_address, *others)):
        return None
    plan = _plan(variant, CTYPES[x.dtype], CTYPES[target.dtype], m, n, k, device.sm_count)
    maps = ((m, k, plan.boxes[0]), (n, k, plan.boxes[1]))
    x_map, w_map = matrix_map(x_address, *maps[0]), matrix_map(w_address, *maps[1])
    arguments = (x_map, w_map, bias, residual, target, *plan.sizes)
    plan.kernel(plan.grid, plan.block, arguments, shared_mem=plan.shared_mem, cluster=plan.cluster)
    return Launched(plan.kernel, plan.grid, plan.block, arguments, plan.shared_mem, plan.cluster, maps)


def kernel_variants() -> list[tuple[str, str, tuple[str | int, ...], None, tuple[str, ...]]]:
    """What the published Qwen3 sizes launch on this architecture, for compiling ahead and for the check of spills."""
    found: dict[tuple[str, str, tuple[str | int, ...], None, tuple[str, ...]], None] = {}
    for hidden, intermediate, heads in ((1024, 3072, 2048), (4096, 12288, 4096)):
        for n, k, out in (
            (heads + 2048, hidden, "same"),
            (hidden, heads, "float"),
            (2 * intermediate, hidden, "same"),
            (hidden, intermediate, "float"),
            (151936, hidden, "float"),
        ):
            segment = template_segment(n, k)
            for m in (128, 256, 512, 1024, 2048, 8192):
                option = select(m, n, k, 132)
                for ctype in ("half", "bf16"):
                    template = (ctype, ctype if out == "same" else out, *option.template(segment))
                    found[("linear_sm90.cu", option.kernel, template, None, (ARCH,))] = None
    return list(found)
