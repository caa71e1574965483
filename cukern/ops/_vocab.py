"""What the operators over the vocabulary share: checks of logits, and the pass over all tiles."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cukern.jit import device, kernel
from cukern.ops._arrays import CTYPES, FLOAT32, Array, Place, broadcast_rows, check_dtype
from cukern.ops._numerics import VOCAB_TILE
from cukern.ops._rows import FLOATS, Variant, allowed_floats, ceil_div

__all__ = [
    "LOG2E",
    "WARPS",
    "block_warps",
    "check_columns",
    "check_logits",
    "row_template",
    "temperature_arguments",
    "tile_pass",
    "tile_pass_variants",
    "tiles_of",
]

LOG2E = 1.4426950408889634
WARPS = 8
"""Warps of a block whose warps work alone."""

GROUPS = 8
"""Groups of 128 columns in a tile."""

_MOST_COLUMNS = 2**31 - 2 * VOCAB_TILE


def check_logits(function: str, logits: Array, place: Place) -> tuple[int, int]:
    """(rows, columns) of logits [T, V]; raises TypeError or ValueError for another dtype or shape."""
    check_dtype(function, "logits", logits, allowed_floats(place))
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(
            f"{function}: logits has shape {tuple(logits.shape)}, expected [T, V] with at least one column"
        )
    check_columns(function, "logits", int(logits.shape[1]))
    return int(logits.shape[0]), int(logits.shape[1])


def check_columns(function: str, name: str, columns: int) -> None:
    """Raise ValueError for rows too long for a kernel's 32-bit column numbers."""
    if columns > _MOST_COLUMNS:
        raise ValueError(f"{function}: {name} has rows of {columns} elements, at most {_MOST_COLUMNS} are supported")


def row_template(dtype: np.dtype, columns: int) -> tuple[str, bool]:
    """Template arguments T and Aligned of the kernels that read whole rows."""
    return CTYPES[dtype], columns % 4 == 0


def tiles_of(columns: int) -> int:
    """Tiles of a row."""
    return ceil_div(columns, VOCAB_TILE)


def block_warps(tiles: int) -> int:
    """Warps of a block that takes a tile a warp: two where tiles are few, so that more multiprocessors take part."""
    return WARPS if tiles > WARPS * device().sm_count else 2


def temperature_arguments(function: str, temperature: Any, rows: int, place: Place) -> tuple[Array | None, float]:
    """Per-row array (or None) and the number for all rows: positive and finite where the host can see it."""
    if not hasattr(temperature, "__cuda_array_interface__") and not (
        hasattr(temperature, "__dlpack_device__") and not isinstance(temperature, np.ndarray)
    ):
        host = np.asarray(temperature)
        if host.dtype.kind not in "iuf" and host.dtype.name != "bfloat16":
            raise TypeError(f"{function}: temperature must be a number or an array [{rows}], got {temperature!r}")
        wide = host.astype(np.float64)
        bad = ~((wide > 0) & np.isfinite(wide))
        if bad.any():
            raise ValueError(f"{function}: temperature must be positive and finite, got {wide[bad].flat[0]}")
        if host.ndim == 0:
            return None, min(float(wide), 1e36)
        temperature = host.astype(FLOAT32)
    return broadcast_rows(function, "temperature", temperature, rows, FLOAT32, place), math.nan


def tile_pass(
    logits: Array,
    place: Place,
    temperatures: Array | None,
    temperature: float,
    *,
    otherwise: float,
    group_maxima: bool = False,
    counters: Array | None = None,
) -> tuple[Array, Array | None]:
    """Maximum and sum of every tile, float32 [rows, tiles, 2], and the maxima of the groups of 128 columns.

    ``otherwise``: the factor of rows whose temperature is not positive; ``counters``: uint32 [rows] to set to zero.
    """
    rows, columns = logits.shape
    count = tiles_of(columns)
    tiles = place.empty((rows, count, 2), FLOAT32)
    maxima = place.empty((rows, count * GROUPS), FLOAT32) if group_maxima else None
    warps = block_warps(rows * count)
    kernel("softmax.cu", "vocab_stats", row_template(logits.dtype, columns))(
        (ceil_div(rows * count, warps),),
        (32 * warps,),
        (logits, tiles, maxima, counters, temperatures, temperature, otherwise, rows, columns, count),
        pdl=True,
    )
    return tiles, maxima


def tile_pass_variants() -> list[Variant]:
    """The instantiations that :func:`tile_pass` can launch."""
    return [("softmax.cu", "vocab_stats", (CTYPES[t], aligned), None) for t in FLOATS for aligned in (True, False)]
