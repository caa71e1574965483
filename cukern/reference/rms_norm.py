"""Oracle of RMSNorm."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukern.reference._common import finish, widen

__all__ = ["rms_norm"]


def rms_norm(
    x: np.ndarray,
    weight: np.ndarray,
    eps: float = 1e-6,
    *,
    residual: np.ndarray | None = None,
    dtype: Any = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """``x / sqrt(mean(x**2) + eps) * weight`` over the last axis, rounded once. See cukern.ops.rms_norm.

    With ``residual`` (updated in place) ``residual += x`` first, and the sum is normalised.
    """
    h = widen(x, residual)
    with np.errstate(over="ignore", invalid="ignore"):  # inf and NaN pass through, as on a GPU
        if residual is not None:
            residual += h
            h = widen(residual)
        mean = np.mean(h * h, axis=-1, keepdims=True)
        return finish(h / np.sqrt(mean + h.dtype.type(eps)) * widen(weight, h), dtype or x.dtype, out)
