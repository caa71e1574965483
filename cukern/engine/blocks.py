"""The pool of KV-cache blocks: which are free, and nothing else. A block's owner is the sequence whose table names
it."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["BlockPool", "blocks_for"]


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold ``tokens`` keys."""
    return -(-tokens // block_size)


class BlockPool:
    """Free list of a fixed number of blocks.

    Blocks are handed out last freed, first used, so that a short run stays in few pages.

    Parameters
    ----------
    num_blocks : int
        Blocks in the pool, numbered from 0.
    block_size : int
        Keys per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._free)

    def grow(self, table: list[int], tokens: int) -> bool:
        """Extend a block table in place until it holds ``tokens`` keys; False, with nothing taken, if the pool lacks
        blocks."""
        missing = blocks_for(tokens, self.block_size) - len(table)
        if missing <= 0:
            return True
        if missing > len(self._free):
            return False
        taken = self._free[len(self._free) - missing :]
        table.extend(reversed(taken))
        del self._free[len(self._free) - missing :]
        return True

    def release(self, table: list[int]) -> None:
        """Take back every block of a table and empty it."""
        self._free.extend(reversed(table))
        table.clear()

    def rebuild(self, tables: Iterable[list[int]]) -> None:
        """Make every block free that no table names: after an interruption in the middle of the bookkeeping."""
        used = {block for table in tables for block in table}
        self._free = [block for block in range(self.num_blocks - 1, -1, -1) if block not in used]
