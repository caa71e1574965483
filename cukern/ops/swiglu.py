"""The gated activation of the feed-forward layer."""

from __future__ import annotations

from cukern import reference
from cukern.jit import kernel
from cukern.ops._arrays import CTYPES, Array, as_rows, check_apart, check_dtype, check_out, contiguous, place_arrays
from cukern.ops._fast import Plans
from cukern.ops._rows import FLOATS, Variant, allowed_floats, ceil_div, check_row_length, vector_width

__all__ = ["kernel_variants", "swiglu"]

_PLANS = Plans()
_VECTORS_PER_BLOCK = 256 * 2  # THREADS * UNROLL of swiglu.cu


def swiglu(gate_up: Array, *, out: Array | None = None) -> Array:
    """``silu(gate) * up``, with ``silu(g) = g / (1 + exp(-g))``, in float32 with one rounding at the end.

    Parameters
    ----------
    gate_up : array [..., 2 * I], float16, bfloat16 or float32
        The gate in the first half of each row, up in the second (one packed projection gives both).
    out : array [..., I], optional
        Written in place and returned; must not overlap ``gate_up``.

    Returns
    -------
    array [..., I]
        Same dtype as ``gate_up``.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, an odd last axis, or an ``out`` that does not fit.

    Notes
    -----
    Shazeer, "GLU Variants Improve Transformer" (arXiv 2002.05202).
    """
    name = "swiglu"
    found = _PLANS.find((gate_up,), None) if out is None else None
    if found is not None:
        plan, (address,) = found
        out = plan.empty()
        plan.launch(address, out.data.ptr)
        return out
    given, simple = (gate_up,), out is None
    place, (gate_up, out) = place_arrays(name, gate_up=gate_up, out=out)
    check_dtype(name, "gate_up", gate_up, allowed_floats(place))
    if gate_up.ndim < 1 or gate_up.shape[-1] % 2:
        raise ValueError(
            f"{name}: gate_up has shape {tuple(gate_up.shape)}, expected an even last axis (gate, then up)"
        )
    rows, columns = as_rows(gate_up)
    columns //= 2
    shape = (*gate_up.shape[:-1], columns)
    if out is None:
        out = place.empty(shape, gate_up.dtype)
    else:
        check_out(name, out, shape, gate_up.dtype)
        check_apart(name, "out", out, gate_up=gate_up)
    if out.size == 0:
        return out
    if place.kind == "reference":
        return reference.swiglu(gate_up, out=out)
    check_row_length(name, "gate_up", 2 * columns)
    width = vector_width(columns, gate_up.dtype)
    k = kernel("swiglu.cu", "swiglu", (CTYPES[gate_up.dtype], width))
    grid = (ceil_div(rows * (columns // width), _VECTORS_PER_BLOCK),)
    arguments = (contiguous(gate_up, place), out, rows, columns // width)
    k(grid, (256,), arguments, pdl=True)
    if simple and place.kind == "cuda":
        _PLANS.keep(given, None, k, grid, (256,), arguments, out, pdl=True)
    return out


def kernel_variants() -> list[Variant]:
    """Every instantiation that the operator can launch."""
    return [("swiglu.cu", "swiglu", (CTYPES[d], width), None) for d in FLOATS for width in (16 // d.itemsize, 1)]
