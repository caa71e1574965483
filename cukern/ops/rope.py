"""Rotary position embedding."""

from __future__ import annotations

from cukern import reference
from cukern.jit import kernel
from cukern.ops._arrays import (
    CTYPES,
    FLOAT32,
    Array,
    check_apart,
    check_dtype,
    check_out,
    check_shape,
    contiguous,
    place_arrays,
)
from cukern.ops._rope_table import rope_table
from cukern.ops._rows import FLOATS, INDICES, Variant, allowed_floats, ceil_div, check_row_length, vector_width

__all__ = ["kernel_variants", "rope", "rope_table"]

_VECTORS_PER_BLOCK = 256 * 2  # THREADS * UNROLL of rope.cu


def rope(x: Array, positions: Array, table: Array, *, out: Array | None = None) -> Array:
    """Turn the pairs (x[i], x[i + D/2]) of every head by the angles of the token's position (NeoX halves).

    ``out[i] = x[i] cos - x[i + D/2] sin`` and ``out[i + D/2] = x[i + D/2] cos + x[i] sin``, in float32 with one
    rounding at the end.

    Parameters
    ----------
    x : array [..., heads, D], float16, bfloat16 or float32
        Heads of each token.
    positions : array [...], int32 or int64
        Position of each token, in any order.
    table : array [P, D], float32
        Cosines and sines of positions 0 to P - 1, from :func:`rope_table`.
    out : array [..., heads, D], optional
        Written in place and returned; may be ``x`` itself.

    Returns
    -------
    array [..., heads, D]
        Same dtype as ``x``. On a GPU a position outside the table gives NaN.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype or shape, a table without rows, an ``out`` that shares memory with an input (except for all of
        ``x``); for NumPy input also a position outside the table.

    Notes
    -----
    Su et al., "RoFormer" (arXiv 2104.09864).
    """
    name = "rope"
    place, (x, positions, table, out) = place_arrays(name, x=x, positions=positions, table=table, out=out)
    check_dtype(name, "x", x, allowed_floats(place))
    check_dtype(name, "positions", positions, list(INDICES))
    check_dtype(name, "table", table, allowed_floats(place, (FLOAT32,)))
    if x.ndim < 2 or x.shape[-1] % 2 or x.shape[-1] == 0:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}, expected (..., heads, D) with D even and positive")
    heads, dim = x.shape[-2:]
    check_shape(name, "positions", positions, x.shape[:-2])
    check_shape(name, "table", table, (None, dim))
    if x.size and table.shape[0] == 0:
        raise ValueError(f"{name}: table has no rows; build it for at least one position")
    if out is None:
        out = place.empty(x.shape, x.dtype)
    else:
        check_out(name, out, x.shape, x.dtype)
        check_apart(name, "out", out, same="x", x=x, positions=positions, table=table)
    if out.size == 0:
        return out
    if place.kind == "reference":
        return reference.rope(x, positions, table, out=out)
    check_row_length(name, "x (heads times D)", heads * dim)
    width = vector_width(dim // 2, x.dtype)
    k = kernel("rope.cu", "rope", (CTYPES[x.dtype], INDICES[positions.dtype], width))
    grid = ceil_div(positions.size * (heads * dim // (2 * width)), _VECTORS_PER_BLOCK)
    sources = [contiguous(a, place) for a in (x, positions, table)]
    k((grid,), (256,), (*sources, out, positions.size, heads, dim, table.shape[0]))
    return out


def kernel_variants() -> list[Variant]:
    """Every instantiation that the operator can launch."""
    return [
        ("rope.cu", "rope", (CTYPES[d], index, width), None)
        for d in FLOATS
        for index in INDICES.values()
        for width in (16 // d.itemsize, 1)
    ]
