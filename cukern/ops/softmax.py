"""Softmax, log-softmax, and log-probabilities of given tokens."""

from __future__ import annotations

import math
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
    as_rows,
    check_dtype,
    check_out,
    check_shape,
    contiguous,
    place_arrays,
)
from cukern.ops._rows import INDICES, Variant, allowed_floats, ceil_div
from cukern.ops._vocab import (
    WARPS,
    check_columns,
    check_logits,
    row_template,
    temperature_arguments,
    tile_pass,
    tile_pass_variants,
    tiles_of,
)

__all__ = ["kernel_variants", "log_softmax", "softmax", "token_logprobs"]

_FLOAT64 = np.dtype(np.float64)
_MOST_TILES = {True: 32, False: 16}  # of a row that one block holds in registers, by alignment
# dtype of x -> dtypes of the result of log_softmax (softmax: that of x)
_OUTPUTS = {FLOAT16: (FLOAT16, FLOAT32), BFLOAT16: (BFLOAT16, FLOAT32), FLOAT32: (FLOAT32,)}


def softmax(x: Array, *, out: Array | None = None) -> Array:
    """``exp(x) / sum(exp(x))`` over the last axis, computed in float32 and rounded once.

    A row's bits depend on that row alone. A row that holds NaN or +inf, or nothing but -inf, gives NaN, as in PyTorch;
    a single finite element among -inf gives exactly 1.

    Parameters
    ----------
    x : array [..., N], float16, bfloat16 or float32
        Rows of any length from 1 on.
    out : array [..., N], dtype of ``x``, optional
        Written in place and returned; may be ``x`` itself.

    Returns
    -------
    array [..., N], dtype of ``x``

    Raises
    ------
    TypeError, ValueError
        A wrong dtype or shape, or rows of length 0.
    """
    return _over_rows("softmax", x, None, out, log=False)


def log_softmax(x: Array, *, dtype: Any = None, out: Array | None = None) -> Array:
    """``x - log(sum(exp(x)))`` over the last axis, computed in float32 and rounded once; never positive.

    A row's bits depend on that row alone. A row that holds NaN or +inf, or nothing but -inf, gives NaN.

    Parameters
    ----------
    x : array [..., N], float16, bfloat16 or float32
        Rows of any length from 1 on.
    dtype : dtype, optional
        Of the result: that of ``x`` (default) or float32. In bfloat16 a log-probability is off by up to 0.06.
    out : array [..., N], optional
        Written in place and returned; may be ``x`` itself.

    Returns
    -------
    array [..., N]

    Raises
    ------
    TypeError, ValueError
        A wrong dtype or shape, or rows of length 0.
    """
    return _over_rows("log_softmax", x, dtype, out, log=True)


def _over_rows(name: str, x: Array, dtype: Any, out: Array | None, *, log: bool) -> Array:
    place, (x, out) = place_arrays(name, x=x, out=out)
    on_host = place.kind == "reference"
    check_dtype(name, "x", x, allowed_floats(place))
    if x.ndim < 1 or x.shape[-1] == 0:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}, expected rows of at least one element")
    rows, columns = as_rows(x)
    check_columns(name, "x", columns)
    wanted = np.dtype(dtype) if dtype is not None else x.dtype if out is None or not log else out.dtype
    allowed = (x.dtype, FLOAT32, _FLOAT64) if on_host else _OUTPUTS[x.dtype]
    if wanted not in allowed:
        names = ", ".join(d.name for d in dict.fromkeys(allowed))
        raise TypeError(f"{name}: dtype is {wanted}, expected {names} for x of dtype {x.dtype}")
    if out is None:
        out = place.empty(x.shape, wanted)
    else:
        check_out(name, out, x.shape, wanted)
    if rows == 0:
        return out
    if on_host:
        return reference.log_softmax(x, out=out) if log else reference.softmax(x, out=out)
    x = contiguous(x, place)
    ctype, aligned = row_template(x.dtype, columns)
    template = (ctype, CTYPES[wanted], aligned)
    count = tiles_of(columns)
    if count <= _MOST_TILES[aligned]:
        warps = WARPS if count == 1 else count
        blocks = ceil_div(rows, WARPS) if count == 1 else rows
        kernel("softmax.cu", "softmax_rows", template)((blocks,), (32 * warps,), (x, out, rows, columns, int(log)))
        return out
    tiles, _ = tile_pass(x.reshape(rows, columns), place, None, 1.0, otherwise=math.nan)
    kernel("softmax.cu", "softmax_apply", template)(
        (ceil_div(rows * count, WARPS),), (32 * WARPS,), (x, tiles, out, rows, columns, count, int(log))
    )
    return out


def token_logprobs(logits: Array, targets: Array, temperature: Any = 1.0) -> Array:
    """``log_softmax(logits / temperature)[target]`` of each row, without writing the probabilities.

    The division comes before the log-softmax: logits [1, 0] at temperature 0.6 give token 0 a log-probability of
    -0.17301; that of the raw logits is -0.31326, and dividing that by the temperature (-0.52210) is no log-probability.
    No top-k, top-p or min-p is applied. Never positive; within 1e-5 of float64 for a vocabulary of 150 000 and
    log-probabilities down to -20. A row's bits depend on that row alone.

    Parameters
    ----------
    logits : array [T, V], float16, bfloat16 or float32
    targets : array [T], int32 or int64
        A target outside [0, V), such as an ignore index of -100, gives NaN in its row; nothing else is read for it.
    temperature : float or array [T]
        Positive. In an array on the GPU, which is not looked at, any other value gives NaN in its row.

    Returns
    -------
    array [T], float32
        NaN also for a row that holds NaN or +inf, or nothing but -inf.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype or shape; a temperature that is zero, negative or not finite (for greedy decoding, where it is
        zero, score at temperature 1).
    """
    name = "token_logprobs"
    place, (logits, targets) = place_arrays(name, logits=logits, targets=targets)
    rows, columns = check_logits(name, logits, place)
    check_dtype(name, "targets", targets, list(INDICES))
    check_shape(name, "targets", targets, (rows,))
    temperatures, number = temperature_arguments(name, temperature, rows, place)
    if rows == 0:
        return place.empty((0,), FLOAT32)
    if place.kind == "reference":
        return reference.token_logprobs(logits, targets, number if temperatures is None else temperatures)
    out = place.empty((rows,), FLOAT32)
    logits, targets = contiguous(logits, place), contiguous(targets, place)
    tiles, _ = tile_pass(logits, place, temperatures, number, otherwise=math.nan)
    kernel("softmax.cu", "token_logprobs", (CTYPES[logits.dtype], INDICES[targets.dtype]))(
        (ceil_div(rows, WARPS),),
        (32 * WARPS,),
        (logits, tiles, targets, temperatures, number, out, rows, columns, tiles_of(columns)),
        pdl=True,
    )
    return out


def kernel_variants() -> list[Variant]:
    """Every instantiation that the operators can launch."""
    rows: list[Variant] = [
        ("softmax.cu", name, (CTYPES[x], CTYPES[out], aligned), None)
        for name in ("softmax_rows", "softmax_apply")
        for x, outputs in _OUTPUTS.items()
        for out in outputs
        for aligned in (True, False)
    ]
    scores: list[Variant] = [
        ("softmax.cu", "token_logprobs", (CTYPES[x], index), None) for x in _OUTPUTS for index in INDICES.values()
    ]
    return [*rows, *tile_pass_variants(), *scores]
