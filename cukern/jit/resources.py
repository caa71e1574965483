"""What a kernel uses, and how many of its blocks fit a multiprocessor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

# capability -> (warps, blocks, shared memory bytes) per multiprocessor; CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability". Every one has 65536 registers, given out to a warp in units of 256, and
# keeps 1 KB a block.
_LIMITS = {
    80: (64, 32, 164 << 10),
    86: (48, 16, 100 << 10),
    87: (48, 16, 164 << 10),
    89: (48, 24, 100 << 10),
    90: (64, 32, 228 << 10),
    100: (64, 32, 228 << 10),
    103: (64, 32, 228 << 10),
    120: (48, 24, 100 << 10),
    121: (48, 24, 100 << 10),
}
_REGISTERS = 65536


@dataclass(frozen=True)
class Resources:
    """Resources of one compiled kernel.

    Attributes
    ----------
    arch : str
        The target it was compiled for.
    registers : int
        Per thread.
    shared : int
        Static shared memory of a block, bytes.
    local : int
        Local memory (stack) of a thread, bytes; more than 0 costs memory traffic.
    spill_stores, spill_loads : int
        Bytes of registers spilled to local memory.
    max_threads : int
        The largest block.
    """

    arch: str
    registers: int
    shared: int
    local: int
    spill_stores: int
    spill_loads: int
    max_threads: int
    _query: Callable[[int, int], int] | None = field(default=None, repr=False, compare=False)

    def occupancy(self, block: int | tuple[int, ...], shared_mem: int = 0) -> int:
        """Blocks that fit one multiprocessor at a time.

        Parameters
        ----------
        block : int or tuple
            Threads of a block.
        shared_mem : int
            Dynamic shared memory, bytes.

        Returns
        -------
        int
            The driver's answer on a GPU, otherwise computed from the architecture's limits; 0 if not even one fits.

        Raises
        ------
        ValueError
            Without a GPU, for an architecture whose limits are not in the table.
        """
        threads = 1
        for n in (block,) if isinstance(block, int) else block:
            threads *= n
        if threads < 1 or shared_mem < 0:
            raise ValueError(f"occupancy: block {block!r} and shared_mem {shared_mem} must be positive")
        if threads > self.max_threads:
            return 0
        if self._query is not None:
            return self._query(threads, shared_mem)
        return computed_occupancy(self.arch, self.registers, self.shared + shared_mem, threads)


def computed_occupancy(arch: str, registers: int, shared: int, threads: int) -> int:
    """Blocks a multiprocessor from registers a thread, bytes of shared memory and threads a block."""
    number = int("".join(c for c in arch if c.isdigit()))
    if number not in _LIMITS:
        raise ValueError(f"occupancy on {arch} is known only where there is such a GPU")
    max_warps, max_blocks, max_shared = _LIMITS[number]
    warps = -(-threads // 32)
    by_warps = max_warps // warps
    by_shared = max_shared // (-(-(shared + 1024) // 128) * 128)
    by_registers = max_blocks
    if registers:
        # registers go to warps of one of four partitions, so a partition's rest is lost
        a_warp = -(-registers * 32 // 256) * 256
        by_registers = 4 * (_REGISTERS // 4 // a_warp) // warps
    return min(by_warps, max_blocks, by_shared, by_registers)


def largest_block(registers: int, bound: int = 1024) -> int:
    """Threads of the largest block that the registers of one multiprocessor allow, at most `bound`."""
    if not registers:
        return bound
    return min(bound, _REGISTERS // (-(-registers * 32 // 256) * 256) * 32)
