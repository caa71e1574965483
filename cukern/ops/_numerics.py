"""The constants of the numerics contract (docs/numerics.md): they fix the order of every sum, so that a row's bits do
not depend on the batch, the position in it, the page layout or the kernel variant.

Kernels receive them as template arguments; changing one changes results in the last bits everywhere.
"""

from __future__ import annotations

__all__ = ["ATTN_CHUNK", "ATTN_TILE", "VOCAB_TILE", "segment_length"]

ATTN_TILE = 64
"""Keys per online-softmax step."""

ATTN_CHUNK = 128
"""Keys per chunk, counted from key 0 of a sequence; chunks are merged in ascending order."""

VOCAB_TILE = 1024
"""Columns per tile of a reduction over the vocabulary."""

SMALL_SEGMENT = 256
LARGE_WEIGHT = 1 << 24


def segment_length(n: int, k: int) -> int:
    """Length of the K segments of a product with a weight [n, k].

    A small weight is split finely, so that the chains of tensor-core steps of one token stay short enough to hide
    behind the memory stream; a large one has enough rows to fill the GPU, and one chain is cheapest.

    Parameters
    ----------
    n, k : int
        Rows (outputs) and columns (inputs) of the weight.

    Returns
    -------
    int
        Elements of K per segment, a multiple of 16 (the last segment may be shorter).
    """
    if n * k < LARGE_WEIGHT:
        return SMALL_SEGMENT
    return max(16, -(-k // 16) * 16)
