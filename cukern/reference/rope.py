"""Oracle of rotary position embedding."""

from __future__ import annotations

import numpy as np

from cukern.reference._common import finish, widen

__all__ = ["rope"]


def rope(x: np.ndarray, positions: np.ndarray, table: np.ndarray, *, out: np.ndarray | None = None) -> np.ndarray:
    """Rotate the pairs (x[i], x[i + D/2]) of every head by the angles of its position. See cukern.ops.rope.

    ``x`` [..., heads, D], ``positions`` [...], ``table`` [P, D]: cosines in the first D/2 columns, sines in the last.
    """
    positions = np.asarray(positions)
    length = table.shape[0]
    if positions.size and (int(positions.min()) < 0 or int(positions.max()) >= length):
        bad = int(positions.min()) if int(positions.min()) < 0 else int(positions.max())
        raise ValueError(
            f"rope: positions contains {bad}, expected 0 to {length - 1}; build the table for more positions"
        )
    h = widen(x, table)
    half = x.shape[-1] // 2
    angles = widen(table, h)[positions][..., None, :]  # the same for every head
    cos, sin = angles[..., :half], angles[..., half:]
    first, second = h[..., :half], h[..., half:]
    with np.errstate(over="ignore", invalid="ignore"):  # inf and NaN pass through, as on a GPU
        rotated = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return finish(rotated, x.dtype, out)
