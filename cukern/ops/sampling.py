"""Choosing tokens: arg-max, sampling, and the most probable tokens with their log-probabilities."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from cukern import reference
from cukern.jit import kernel
from cukern.jit.launch import check_flag
from cukern.ops._arrays import CTYPES, FLOAT32, Array, Place, check_shape, contiguous, place_arrays
from cukern.ops._rows import FLOATS, Variant, ceil_div
from cukern.ops._vocab import (
    LOG2E,
    WARPS,
    block_warps,
    check_logits,
    row_template,
    temperature_arguments,
    tile_pass,
    tile_pass_variants,
    tiles_of,
)
from cukern.reference.sampling import MAX_TOP, check_parameter

__all__ = ["argmax", "kernel_variants", "sample", "top_logprobs"]

_INT32 = np.dtype(np.int32)
_UINT32 = np.dtype(np.uint32)
_UINT64 = np.dtype(np.uint64)
_SELECT_THREADS = 512
_MOST_INT32 = 2**31 - 1

# dtype in which the kernel takes each parameter of `sample`, in the order of its arguments
_PARAMETERS: dict[str, np.dtype] = {
    "temperature": FLOAT32,
    "top_k": _INT32,
    "top_p": FLOAT32,
    "min_p": FLOAT32,
    "seed": _UINT64,
    "position": np.dtype(np.int64),
}


def argmax(logits: Array, *, parts: bool = False) -> Array:
    """Index of the largest logit of each row.

    Parameters
    ----------
    logits : array [T, V], float16, bfloat16 or float32
    parts : bool
        Leave the last step to :func:`advance`, which takes the result instead of tokens.

    Returns
    -------
    array [T], int32
        The lowest index on ties (-0 equals +0); NaN counts as largest, as in NumPy. With `parts` uint64 [T, P]: of each
        part of a row a value by which they are ordered, and which holds the index.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype or shape, or V = 0.
    """
    place, (logits,) = place_arrays("argmax", logits=logits)
    rows, columns = check_logits("argmax", logits, place)
    check_flag("argmax", "parts", parts)
    if place.kind == "reference":
        return reference.argmax(logits, parts=parts)
    return _argmax(contiguous(logits, place), rows, columns, place, parts)


def _argmax(logits: Array, rows: int, columns: int, place: Place, parts: bool = False) -> Array:
    count = tiles_of(columns)
    warps = block_warps(rows * count)
    splits = ceil_div(count, warps)
    best = place.empty((rows, splits), _UINT64) if splits > 1 or parts else None
    out = None if parts else place.empty((rows,), _INT32)
    if rows:
        kernel("sampling.cu", "argmax_tiles", row_template(logits.dtype, columns))(
            (rows * splits,),
            (32 * warps,),
            (logits, best, out if best is None else None, columns, splits),
            pdl=True,
        )
        if best is not None and out is not None:
            kernel("sampling.cu", "argmax_rows")(
                (ceil_div(rows, WARPS),), (32 * WARPS,), (best, out, rows, splits), pdl=True
            )
    return best if out is None else out


def sample(
    logits: Array,
    *,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    seed: Any = 0,
    position: Any = 0,
) -> Array:
    """Draw one token from each row of logits.

    The filters apply in the order of Hugging Face transformers: temperature, top-k, top-p on what top-k has left,
    min-p. The draw is the Gumbel arg-max over the kept tokens with random numbers that are a function of (seed,
    position, token) only, so that the same row with the same parameters gives the same token in any batch, and every
    result is a kept token. Nothing waits for the GPU, and no parameter array on it is looked at by the host.

    Every parameter is a number or an array [T].

    Parameters
    ----------
    logits : array [T, V], float16, bfloat16 or float32
    temperature : float
        0 is greedy: the arg-max. Logits are divided by it in float32, relative to the maximum, so that no positive
        value overflows.
    top_k : int
        Keep the k largest logits, and all that equal the k-th. 1 is greedy. Off at 0, -1, None, and from V on.
    top_p : float
        In (0, 1]: keep the most probable tokens up to the one with which their sum reaches top_p, and all that equal
        that one. 1 or None is off.
    min_p : float
        In [0, 1): keep tokens at least min_p times as probable as the most probable. 0 or None is off.
    seed : int
        64 bits.
    position : int
        64 bits: of the token to be drawn, in its sequence.

    Returns
    -------
    array [T], int32
        A row whose largest logit is NaN or infinite is decided by arg-max (see :func:`argmax`).

    Raises
    ------
    TypeError, ValueError
        A wrong dtype or shape, or a parameter out of range. Arrays on the GPU are not checked: there a temperature
        that is NaN or negative is greedy, a negative top_k is off, a top_p of 0 or less keeps the most probable token.

    Notes
    -----
    Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Top-p: Holtzman et al., "The
    curious case of neural text degeneration" (arXiv 1904.09751). Min-p: Nguyen et al. (arXiv 2407.01082).
    """
    place, (logits,) = place_arrays("sample", logits=logits)
    rows, columns = check_logits("sample", logits, place)
    given = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "position": position,
    }
    values = {name: _parameter(name, value, rows, place) for name, value in given.items()}
    if rows == 0:
        return place.empty((0,), _INT32)
    if place.kind == "reference":
        return reference.sample(logits, **given)
    logits = contiguous(logits, place)
    if _is(values["temperature"], 0) or _is(values["top_k"], 1):
        return _argmax(logits, rows, columns, place)

    arguments: tuple[Any, ...] = tuple(
        part for value in values.values() for part in ((None, value) if isinstance(value, (int, float)) else (value, 0))
    )
    template = row_template(logits.dtype, columns)
    count = tiles_of(columns)
    splits = ceil_div(count, WARPS)
    # A hint from numbers; the kernels decide from the values of each row.
    k = values["top_k"]
    filtered = not (isinstance(k, int) and not 0 < k < columns and _is(values["top_p"], 1))
    out = place.empty((rows,), _INT32)
    counters = place.empty((rows,), _UINT32) if splits > 1 else None
    best = place.empty((rows, splits), _UINT64) if splits > 1 else None
    tiles, maxima = tile_pass(logits, place, *arguments[:2], otherwise=LOG2E, group_maxima=filtered, counters=counters)
    thresholds = None
    if filtered:
        thresholds = place.empty((rows,), FLOAT32)
        kernel("sampling.cu", "sample_threshold", template)(
            (rows,), (_SELECT_THREADS,), (logits, tiles, maxima, thresholds, out, *arguments, columns, count), pdl=True
        )
    draw = (*arguments[:4], *arguments[6:])  # without top_p
    kernel("sampling.cu", "sample_draw", template)(
        (rows * splits,),
        (32 * WARPS,),
        (logits, tiles, thresholds, best, counters, out, *draw, columns, count, splits),
        pdl=True,
    )
    return out


def _is(value: Any, number: int) -> bool:
    return isinstance(value, (int, float)) and value == number


def _on_gpu(value: Any) -> bool:
    if hasattr(value, "__cuda_array_interface__"):
        return True
    return hasattr(value, "__dlpack_device__") and int(value.__dlpack_device__()[0]) in (2, 13)


def _parameter(name: str, value: Any, rows: int, place: Place) -> Any:
    """A parameter as the kernels take it: a Python number for all rows, or an array [rows] at the place."""
    dtype = _PARAMETERS[name]
    if _on_gpu(value):
        if place.kind != "cuda":
            raise TypeError(f"sample: {name} lives on the GPU but logits on the CPU")
        array = place_arrays("sample", **{name: value})[1][0]
        if array.dtype.kind not in ("iu" if dtype.kind in "iu" else "iuf") and array.dtype.name != "bfloat16":
            raise TypeError(f"sample: {name} has dtype {array.dtype}, expected {dtype} or one that converts to it")
        check_shape("sample", name, array, (rows,))
    else:
        array = check_parameter("sample", name, value, rows)
        if not isinstance(array, np.ndarray):
            if name == "temperature":
                return min(array, 1e36)  # finite in float32; the kernels clamp there as well
            if name == "top_k":
                return min(array, _MOST_INT32)
            return array & (2**64 - 1) if name == "seed" else array
    if name == "top_k" and array.dtype.itemsize > 4:
        array = array.clip(0, _MOST_INT32)
    return contiguous(place.xp.asarray(array).astype(dtype, copy=False), place)


def top_logprobs(logits: Array, n: int, temperature: Any = 1.0) -> tuple[Array, Array]:
    """The n largest values of ``log_softmax(logits / temperature)`` of each row, and their tokens.

    Parameters
    ----------
    logits : array [T, V], float16, bfloat16 or float32
    n : int
        From 1 to 32, at most V.
    temperature : float or array [T]
        Positive, as for token_logprobs, whose bits the values have.

    Returns
    -------
    values : array [T, n], float32
        Descending; never positive.
    ids : array [T, n], int32
        Equal logits in the order of their indices. A row that holds NaN or +inf, or nothing but -inf, gives values NaN
        and ids -1.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype or shape, n out of range, or a temperature that is not positive and finite.
    """
    name = "top_logprobs"
    place, (logits,) = place_arrays(name, logits=logits)
    rows, columns = check_logits(name, logits, place)
    try:
        n = operator.index(n)
    except TypeError:
        raise TypeError(f"{name}: n must be an integer, got {n!r}") from None
    if not 1 <= n <= min(MAX_TOP, columns):
        raise ValueError(f"{name}: n must be in [1, {min(MAX_TOP, columns)}] (V = {columns}), got {n}")
    temperatures, number = temperature_arguments(name, temperature, rows, place)
    values = place.empty((rows, n), FLOAT32)
    ids = place.empty((rows, n), _INT32)
    if rows == 0:
        return values, ids
    if place.kind == "reference":
        return reference.top_logprobs(logits, n, number if temperatures is None else temperatures)
    logits = contiguous(logits, place)
    tiles, maxima = tile_pass(logits, place, temperatures, number, otherwise=math.nan, group_maxima=True)
    kernel("sampling.cu", "top_logprobs", row_template(logits.dtype, columns))(
        (rows,),
        (_SELECT_THREADS,),
        (logits, tiles, maxima, temperatures, number, values, ids, columns, tiles_of(columns), n),
        pdl=True,
    )
    return values, ids


def kernel_variants() -> list[Variant]:
    """Every instantiation that the operators can launch."""
    variants: list[Variant] = [
        ("sampling.cu", name, (CTYPES[t], aligned), None)
        for name in ("argmax_tiles", "sample_threshold", "sample_draw", "top_logprobs")
        for t in FLOATS
        for aligned in (True, False)
    ]
    return [*variants, ("sampling.cu", "argmax_rows", (), None), *tile_pass_variants()]
