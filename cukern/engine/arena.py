"""Scratch memory of captured decoding steps."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

__all__ = ["Arena"]

_ALIGN = 512
_SLAB = 16 << 20


class Arena:
    """An allocator for CuPy whose memory never goes back to the device while the arena lives.

    A CUDA graph holds addresses, not memory. CuPy's own pool may give freed memory back when it runs short (also that
    of temporaries that a graph writes at every replay), so captured steps take theirs from here. Temporaries of one
    step, and of different graphs, share memory: steps run one after another on one stream.

    Parameters
    ----------
    allocate : callable
        Bytes -> an object that keeps memory, whose ``ptr`` is the address (``cupy.cuda.get_allocator()``).
    slab : int
        Bytes that are allocated at a time, at least.
    """

    def __init__(self, allocate: Callable[[int], Any], slab: int = _SLAB) -> None:
        self._allocate = allocate
        self._slab = slab
        self._slabs: list[Any] = []
        self._free: list[tuple[int, int]] = []  # (address, size) in order of address
        self._first: set[int] = set()  # addresses of slabs, which are not joined with what lies before them

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(size for _, size in self._slabs)

    def take(self, size: int) -> Lease:
        """A piece of memory, given back when the lease is deleted."""
        size = max(-(-size // _ALIGN), 1) * _ALIGN
        fitting = [(length, at) for at, (_, length) in enumerate(self._free) if length >= size]
        if not fitting:
            self._grow(size)
            return self.take(size)
        _, at = min(fitting)
        address, length = self._free.pop(at)
        if length > size:
            self._free.insert(at, (address + size, length - size))
        return Lease(self, address, size)

    def _grow(self, size: int) -> None:
        size = -(-max(size, self._slab) // _ALIGN) * _ALIGN
        memory = self._allocate(size)
        self._slabs.append((memory, size))
        self._first.add(int(memory.ptr))
        bisect.insort(self._free, (int(memory.ptr), size))

    def give(self, address: int, size: int) -> None:
        """Take a piece back and join it with its free neighbours."""
        at = bisect.bisect_left(self._free, (address, size))
        if at < len(self._free) and self._free[at][0] == address + size and address + size not in self._first:
            size += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == address and address not in self._first:
            address, before = self._free.pop(at - 1)
            size += before
            at -= 1
        self._free.insert(at, (address, size))

    def malloc(self, size: int) -> Any:
        """The allocator for ``cupy.cuda.using_allocator``."""
        import cupy

        lease = self.take(size)
        memory = cupy.cuda.UnownedMemory(lease.address, lease.size, lease, cupy.cuda.runtime.getDevice())
        return cupy.cuda.MemoryPointer(memory, 0)


class Lease:
    """A piece of an arena."""

    def __init__(self, arena: Arena, address: int, size: int) -> None:
        self.arena, self.address, self.size = arena, address, size

    def __del__(self) -> None:
        self.arena.give(self.address, self.size)
