"""Helpers for tests of kernels: one table of tolerances, and comparison with a float64 oracle."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["TOLERANCES", "assert_close", "max_error", "to_float64"]

TOLERANCES: dict[str, float] = {
    # operator -> largest |result - oracle| allowed, beyond half a unit in the last place of the output dtype
    "embedding": 0.0,
    "rms_norm": 1e-3,
    "rope": 1e-3,
    "qk_norm_rope_cache": 1e-3,
    "kv_cache_write": 0.0,
    "swiglu": 1e-3,
    "softmax": 1e-3,
    "log_softmax": 1e-3,
    "token_logprobs": 1e-3,
    "linear": 1e-3,
    "attention": 5e-3,
}


def to_float64(array: Any) -> np.ndarray:
    """A NumPy or CuPy array of any float dtype as NumPy float64."""
    if not isinstance(array, np.ndarray) and hasattr(array, "get"):
        array = array.get()
    return np.asarray(array).astype(np.float64)


def rounding(expected: np.ndarray, dtype: Any) -> np.ndarray:
    """Half a unit in the last place of ``dtype`` at each expected value: what one rounding to storage costs."""
    import ml_dtypes

    info = ml_dtypes.finfo(np.dtype(dtype))
    magnitude = np.maximum(np.abs(expected), float(info.smallest_normal))
    return np.exp2(np.floor(np.log2(magnitude))) * float(info.eps) / 2


def max_error(result: Any, expected: np.ndarray) -> float:
    """Largest absolute difference beyond one rounding of the result's dtype; a NaN on one side only counts as inf."""
    got, want = to_float64(result), np.asarray(expected, np.float64)
    if got.shape != want.shape:
        raise AssertionError(f"shape {got.shape}, expected {want.shape}")
    if got.size == 0:
        return 0.0
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    finite = np.isfinite(got) & np.isfinite(want)
    error = np.where(same, 0.0, np.inf)
    error[finite] = np.abs(got[finite] - want[finite])
    error[finite] = np.maximum(error - rounding(np.where(np.isfinite(want), want, 0.0), result.dtype), 0.0)[finite]
    return float(error.max())


def assert_close(operator: str, result: Any, expected: np.ndarray, *, scale: float = 1.0) -> None:
    """Fail unless every element is within the operator's tolerance, one rounding of the output dtype apart.

    Parameters
    ----------
    operator : str
        A key of TOLERANCES.
    result : array
        What the kernel gave.
    expected : ndarray
        The oracle in float64, before rounding to the output dtype.
    scale : float
        Size of the values (the tolerance is for values of the order 1).
    """
    if operator not in TOLERANCES:
        raise KeyError(f"no tolerance for {operator!r}: give it a line in TOLERANCES (cukern/testing/__init__.py)")
    error = max_error(result, expected)
    limit = TOLERANCES[operator] * scale
    if not error <= limit:
        got, want = to_float64(result), np.asarray(expected, np.float64)
        worst = np.unravel_index(int(np.nanargmax(np.nan_to_num(np.abs(got - want), nan=np.inf))), got.shape)
        raise AssertionError(
            f"{operator}: error {error:.3g} > {limit:.3g}; at {tuple(int(i) for i in worst)} got {got[worst]!r}, "
            f"expected {want[worst]!r}; {int((~np.isfinite(got)).sum())} non-finite results"
        )
