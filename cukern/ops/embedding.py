"""Embedding look-up."""

from __future__ import annotations

from typing import Any

from cukern import reference
from cukern.jit import kernel
from cukern.ops._arrays import (
    BFLOAT16,
    CTYPES,
    FLOAT16,
    FLOAT32,
    Array,
    as_dtype,
    check_apart,
    check_dtype,
    check_out,
    check_shape,
    contiguous,
    place_arrays,
)
from cukern.ops._fast import Plans, plain_dtype
from cukern.ops._rows import INDICES, Variant, allowed_floats, ceil_div, check_row_length, vector_width

__all__ = ["embedding", "kernel_variants"]

_PLANS = Plans()
_VECTORS_PER_BLOCK = 256 * 4  # THREADS * UNROLL of embedding.cu


def embedding(ids: Array, weight: Array, *, dtype: Any = None, out: Array | None = None) -> Array:
    """Rows of an embedding table: ``out[..., :] = weight[ids[...], :]``.

    Parameters
    ----------
    ids : array [...], int32 or int64
        Rows to take.
    weight : array [V, H], float16, bfloat16 or float32
        The table.
    dtype : dtype, optional
        Of the result: that of ``weight`` (default) or float32 (exact, for a residual stream in float32).
    out : array [..., H], optional
        Written in place and returned.

    Returns
    -------
    array [..., H]
        A copy of the rows. On a GPU an id outside [0, V) gives a row of NaN.

    Raises
    ------
    IndexError
        An id outside [0, V), for NumPy input (checking on a GPU would stall the stream).
    TypeError, ValueError
        A wrong dtype or shape, or an ``out`` that shares memory with an input.
    """
    name = "embedding"
    simple = out is None and plain_dtype(dtype)
    found = _PLANS.find((ids, weight), dtype) if simple else None
    if found is not None:
        plan, (ids_address, weight_address) = found
        out = plan.empty()
        plan.launch(ids_address, weight_address, out.data.ptr)
        return out
    given = (ids, weight)
    place, (ids, weight, out) = place_arrays(name, ids=ids, weight=weight, out=out)
    check_dtype(name, "ids", ids, list(INDICES))
    check_dtype(name, "weight", weight, allowed_floats(place))
    check_shape(name, "weight", weight, (None, None))
    entries, columns = weight.shape
    wanted = as_dtype(name, dtype) if dtype is not None else weight.dtype if out is None else out.dtype
    if wanted not in (weight.dtype, FLOAT32):
        raise TypeError(f"{name}: dtype is {wanted}, expected {weight.dtype} (that of weight) or float32")
    shape = (*ids.shape, columns)
    if out is None:
        out = place.empty(shape, wanted)
    else:
        check_out(name, out, shape, wanted)
        check_apart(name, "out", out, ids=ids, weight=weight)
    if out.size == 0:
        return out
    if place.kind == "reference":
        return reference.embedding(ids, weight, out=out)
    check_row_length(name, "weight", columns)
    width = vector_width(columns, weight.dtype, wanted)
    k = kernel("embedding.cu", "embedding", (CTYPES[weight.dtype], CTYPES[wanted], INDICES[ids.dtype], width))
    grid = (ceil_div(ids.size * (columns // width), _VECTORS_PER_BLOCK),)
    arguments = (contiguous(ids, place), contiguous(weight, place), out, ids.size, entries, columns // width)
    k(grid, (256,), arguments)
    if simple and place.kind == "cuda":
        _PLANS.keep(given, dtype, k, grid, (256,), arguments, out)
    return out


def kernel_variants() -> list[Variant]:
    """Every instantiation that the operator can launch."""
    types = [(FLOAT16, FLOAT16), (FLOAT16, FLOAT32), (BFLOAT16, BFLOAT16), (BFLOAT16, FLOAT32), (FLOAT32, FLOAT32)]
    return [
        ("embedding.cu", "embedding", (CTYPES[w], CTYPES[o], index, width), None)
        for w, o in types
        for index in INDICES.values()
        for width in (16 // max(w.itemsize, o.itemsize), 1)
    ]
