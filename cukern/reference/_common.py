"""Number formats of the oracles: float64 if any input is float64, else float32, and one rounding at the end."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["finish", "widen"]


def widen(array: Any, *others: Any) -> np.ndarray:
    """``array`` in the dtype to compute in: float64 if it or one of ``others`` is float64, else float32."""
    double = any(np.asarray(a).dtype == np.float64 for a in (array, *others) if a is not None)
    return np.asarray(array).astype(np.float64 if double else np.float32, copy=False)


def finish(result: np.ndarray, dtype: Any, out: np.ndarray | None) -> np.ndarray:
    """Round ``result`` once, to the dtype of ``out`` (written in place) or else to ``dtype``."""
    with np.errstate(over="ignore", invalid="ignore"):
        if out is not None:
            out[...] = result.astype(out.dtype, copy=False)
            return out
        return result.astype(dtype, copy=False)
