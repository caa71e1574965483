"""Root-mean-square normalisation."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukern import reference
from cukern.jit import kernel
from cukern.ops._arrays import (
    BFLOAT16,
    CTYPES,
    FLOAT16,
    FLOAT32,
    Array,
    as_dtype,
    as_rows,
    check_apart,
    check_dtype,
    check_out,
    check_shape,
    contiguous,
    place_arrays,
)
from cukern.ops._fast import Plans, plain_dtype
from cukern.ops._rows import Variant, allowed_floats, as_eps, ceil_div, check_row_length

__all__ = ["kernel_variants", "rms_norm"]

_PLANS = Plans()
_FLOAT64 = np.dtype(np.float64)
_STEP = 1024  # columns that the 256 virtual lanes cover once
_HELD_STEPS = (1, 4, 8, 16)  # row lengths, in steps, that have a variant with the row in registers
_ROWS_PER_BLOCK = 4  # where a row takes one warp
_MANY_ROWS = 1024  # from here on one warp a row keeps more loads in flight; below, more threads a row are quicker
# dtype of x -> dtypes of the result
_OUTPUTS = {FLOAT16: (FLOAT16, FLOAT32), BFLOAT16: (BFLOAT16, FLOAT32), FLOAT32: (FLOAT32, FLOAT16, BFLOAT16)}


def rms_norm(
    x: Array,
    weight: Array,
    eps: float = 1e-6,
    *,
    residual: Array | None = None,
    dtype: Any = None,
    out: Array | None = None,
) -> Array:
    """``x / sqrt(mean(x**2) + eps) * weight`` over the last axis.

    Everything is computed in float32 and rounded once, at the end (a PyTorch model rounds before the multiplication
    with the weight as well). A row's result does not depend on the other rows.

    Parameters
    ----------
    x : array [..., H], float16, bfloat16 or float32
        Rows to normalise, of any length.
    weight : array [H], float32
        Scale of each column.
    eps : float
        Added to the mean square.
    residual : array [..., H], float32, optional
        Running sum: updated in place to ``residual + x``, which is then normalised instead of ``x``.
    dtype : dtype, optional
        Of the result: that of ``x`` (default) or float32; for float32 ``x`` also float16 or bfloat16.
    out : array [..., H], optional
        Written in place and returned; may be ``x`` itself.

    Returns
    -------
    array [..., H]

    Raises
    ------
    TypeError, ValueError
        A wrong dtype or shape, rows of length 0, an ``eps`` that is negative or not finite, or an array that is
        written and shares memory with another argument.

    Notes
    -----
    Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467).
    """
    name = "rms_norm"
    simple = residual is None and out is None and type(eps) is float and plain_dtype(dtype)
    found = _PLANS.find((x, weight), (eps, dtype)) if simple else None
    if found is not None:
        plan, (x_address, weight_address) = found
        out = plan.empty()
        plan.launch(x_address, weight_address, 0, out.data.ptr)
        return out
    given = (x, weight)
    place, (x, weight, residual, out) = place_arrays(name, x=x, weight=weight, residual=residual, out=out)
    on_host = place.kind == "reference"
    check_dtype(name, "x", x, allowed_floats(place))
    check_dtype(name, "weight", weight, [FLOAT32, _FLOAT64] if on_host else [FLOAT32])
    if x.ndim < 1 or x.shape[-1] == 0:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}, expected rows of at least one element")
    rows, columns = as_rows(x)
    check_shape(name, "weight", weight, (columns,))
    eps = as_eps(name, eps)
    if residual is not None:
        wide = _FLOAT64 if on_host and residual.dtype == _FLOAT64 else FLOAT32
        check_out(name, residual, x.shape, wide, name="residual")
        check_apart(name, "residual", residual, x=x, weight=weight)
    wanted = as_dtype(name, dtype) if dtype is not None else x.dtype if out is None else out.dtype
    if wanted not in ((*_OUTPUTS[FLOAT32], _FLOAT64) if on_host else _OUTPUTS[x.dtype]):
        raise TypeError(
            f"{name}: dtype is {wanted}, expected {', '.join(d.name for d in _OUTPUTS.get(x.dtype, (FLOAT32,)))} "
            f"for x of dtype {x.dtype}"
        )
    if out is None:
        out = place.empty(x.shape, wanted)
    else:
        check_out(name, out, x.shape, wanted)
        check_apart(name, "out", out, same="x", x=x, weight=weight, residual=residual)
    if rows == 0:
        return out
    if on_host:
        return reference.rms_norm(x, weight, eps, residual=residual, out=out)
    check_row_length(name, "x", columns)
    template, rows_per_block = _variant(rows, columns, x.dtype, wanted, residual is not None)
    warps = int(template[4]) * rows_per_block
    k = kernel("rms_norm.cu", "rms_norm", template)
    grid, block = (ceil_div(rows, rows_per_block),), (32 * warps,)
    arguments = (contiguous(x, place), contiguous(weight, place), residual, out, rows, columns, eps)
    k(grid, block, arguments, pdl=True)
    if simple and place.kind == "cuda":
        _PLANS.keep(given, (eps, dtype), k, grid, block, arguments, out, pdl=True)
    return out


def _template(x: np.dtype, out: np.dtype, residual: bool, steps: int, warps: int, vector: bool) -> tuple[Any, ...]:
    return (CTYPES[x], CTYPES[out], residual, steps, warps, vector)


def _lanes(x: np.dtype, out: np.dtype, residual: bool) -> int:
    """Virtual lanes (of 4 elements) of one access of at most 16 bytes in every array."""
    return 1 if residual or max(x.itemsize, out.itemsize) == 4 else 2


def _variant(rows: int, columns: int, x: np.dtype, out: np.dtype, residual: bool) -> tuple[tuple[Any, ...], int]:
    """Template arguments, and rows of a block. All variants give the same bits."""
    lanes = _lanes(x, out, residual)
    if columns % (4 * lanes):
        return _template(x, out, residual, 0, 8, False), 1
    steps = ceil_div(columns, _STEP)
    if steps == 1 and rows >= _MANY_ROWS:
        return _template(x, out, residual, 1, 1, True), _ROWS_PER_BLOCK
    held = next((s for s in _HELD_STEPS if s >= steps), 0)
    return _template(x, out, residual, held, 8 // lanes, True), 1


def kernel_variants() -> list[Variant]:
    """Every instantiation that the operator can launch."""
    return [
        ("rms_norm.cu", "rms_norm", _template(x, out, residual, steps, warps, vector), None)
        for x, outputs in _OUTPUTS.items()
        for out in outputs
        for residual in (False, True)
        for steps, warps, vector in [
            (0, 8, False),
            (1, 1, True),
            *((s, 8 // _lanes(x, out, residual), True) for s in (*_HELD_STEPS, 0)),
        ]
    ]
