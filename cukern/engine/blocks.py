"""The pool of KV-cache blocks: which are free, and nothing else. A block's owners are the sequences whose tables name
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
        self._shared: dict[int, int] = {}  # block to the number of its owners beyond the first

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

    def share(self, blocks: Iterable[int], table: list[int]) -> None:
        """Let a block table begin with blocks of another one, which stay in use until both are released."""
        for block in blocks:
            self._shared[block] = self._shared.get(block, 0) + 1
            table.append(block)

    def release(self, table: list[int]) -> None:
        """Empty a block table and take back every block that no other one names."""
        for block in reversed(table):
            others = self._shared.pop(block, 0)
            if not others:
                self._free.append(block)
            elif others > 1:
                self._shared[block] = others - 1
        table.clear()

    def rebuild(self, tables: Iterable[list[int]]) -> None:
        """Make every block free that no table names: after an interruption in the middle of the bookkeeping."""
        owners: dict[int, int] = {}
        for table in tables:
            for block in table:
                owners[block] = owners.get(block, 0) + 1
        self._free = [block for block in range(self.num_blocks - 1, -1, -1) if block not in owners]
        self._shared = {block: count - 1 for block, count in owners.items() if count > 1}
