"""NumPy oracle of the linear layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from .swiglu import swiglu

__all__ = ["linear"]

# Elements of the weight converted to float32 at a time (16 MB): a vocabulary-sized weight is never held twice.
_BLOCK = 1 << 22


def linear(
    x: np.ndarray,
    weight: np.ndarray,
    *,
    bias: np.ndarray | None = None,
    residual: np.ndarray | None = None,
    activation: str | None = None,
    dtype: Any = None,
    out: np.ndarray | None = None,
    static_weight: bool = False,
    backend: str = "cukern",
) -> np.ndarray:
    """``y = x @ weight.T + bias``, with the sums in float32 (float64 if the inputs are float64).

    Parameters
    ----------
    x : ndarray [..., K]
        Any float dtype.
    weight : ndarray [N, K]
        Any float dtype.
    bias : ndarray [N], optional
        Added before the result is rounded.
    residual : ndarray [..., N], optional
        float32 (or float64); ``residual += y`` in place, and ``residual`` is returned.
    activation : {None, "swiglu"}
        "swiglu": of y, rounded, the first half is the gate and the second is up; the result is [..., N / 2].
    dtype : dtype, optional
        Of the result; default that of ``out``, else of ``x``. The value is rounded once, at the end.
    out : ndarray [..., N], optional
        Written and returned.
    static_weight : bool
    backend : str
        Both accepted for the signature of :func:`cukern.ops.linear`; there is one backend here, and no launch.

    Returns
    -------
    ndarray [..., N]

    Raises
    ------
    ValueError
        Shapes that do not fit together, an unknown activation, one with an odd N or a residual.
    """
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear: x {x.shape} and weight {weight.shape} do not fit: expected [..., K] and [N, K]")
    if activation is not None:
        return _activated(activation, x, weight, bias, residual, dtype, out)
    n, k = weight.shape
    shape = (*x.shape[:-1], n)
    for name, array, want in (("bias", bias, (n,)), ("residual", residual, shape), ("out", out, shape)):
        if array is not None and array.shape != want:
            raise ValueError(f"linear: {name} has shape {array.shape}, expected {want}")
    work = np.float64 if np.float64 in (x.dtype, weight.dtype) else np.float32
    rows = x.reshape(-1, k).astype(work, copy=False)
    y = np.empty((rows.shape[0], n), work)
    block = max(1, _BLOCK // max(1, k)) if weight.dtype != work else max(1, n)
    for start in range(0, n, block):
        part = weight[start : start + block].astype(work, copy=False)
        np.matmul(rows, part.T, out=y[:, start : start + block])
    if bias is not None:
        y += bias.astype(work)
    y = y.reshape(shape)
    if residual is not None:
        residual += y
        return residual
    if out is None:
        return y.astype(x.dtype if dtype is None else dtype, copy=False)
    out[...] = y.astype(out.dtype, copy=False)
    return out


def _activated(
    activation: str,
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    residual: np.ndarray | None,
    dtype: Any,
    out: np.ndarray | None,
) -> np.ndarray:
    if not (isinstance(activation, str) and activation == "swiglu"):
        raise ValueError(f'linear: activation must be None or "swiglu", got {activation!r}')
    if residual is not None:
        raise ValueError("linear: give residual or activation, not both: the residual is [..., N], the result N / 2")
    if weight.shape[0] % 2:
        raise ValueError(f'linear: activation="swiglu" halves the rows of weight {weight.shape}, N is odd')
    if out is not None:
        shape = (*x.shape[:-1], weight.shape[0] // 2)
        if out.shape != shape:
            raise ValueError(f"linear: out has shape {out.shape}, expected {shape}")
        dtype = out.dtype if dtype is None else dtype
    return swiglu(linear(x, weight, bias=bias, dtype=dtype), out=out)
