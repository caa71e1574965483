"""Shape arithmetic and launch sizes shared by the operators that work on rows."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from cukern.ops._arrays import BFLOAT16, FLOAT16, FLOAT32, Place

__all__ = [
    "FLOATS",
    "INDICES",
    "Variant",
    "allowed_floats",
    "as_count",
    "as_eps",
    "ceil_div",
    "check_row_length",
    "vector_width",
]

Variant = tuple[str, str, tuple[object, ...], "dict[str, object] | None"]
"""One instantiation that an operator can launch: file in kernels_src, kernel, template arguments, defines."""

FLOATS = (FLOAT16, BFLOAT16, FLOAT32)
INDICES: dict[np.dtype, str] = {np.dtype(np.int32): "int", np.dtype(np.int64): "i64"}
"""dtypes of ids and positions, and their C++ names."""


_FLOAT32_MAX = float(np.finfo(np.float32).max)


def allowed_floats(place: Place, kernel: tuple[np.dtype, ...] = FLOATS) -> tuple[np.dtype, ...]:
    """Float dtypes an operator takes: those of its kernel, and float32 and float64 where NumPy computes."""
    if place.kind != "reference":
        return kernel
    return tuple(dict.fromkeys((*kernel, FLOAT32, np.dtype(np.float64))))


def as_eps(function: str, eps: Any) -> float:
    """``eps`` of a norm as a Python float: any real number that is finite in float32 and not negative."""
    try:
        value = float(eps)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{function}: eps must be a number, got {eps!r}") from None
    if isinstance(eps, (str, bytes)):
        raise TypeError(f"{function}: eps must be a number, got {eps!r}")
    if not (math.isfinite(value) and 0 <= value <= _FLOAT32_MAX):
        raise ValueError(f"{function}: eps must be finite and not negative, got {eps}")
    return value


def as_count(function: str, name: str, value: Any) -> int:
    """A positive size as a Python int; NumPy's integers are taken too."""
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{function}: {name} must be an integer, got {value!r}") from None
    if isinstance(value, bool) or count < 1:
        raise ValueError(f"{function}: {name} must be at least 1, got {value!r}")
    return count


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def vector_width(columns: int, *dtypes: np.dtype) -> int:
    """Elements of a vector access: 16 bytes of the widest dtype, or 1 where rows are not made of whole vectors."""
    width = 16 // max(d.itemsize for d in dtypes)
    return width if columns % width == 0 else 1


def check_row_length(function: str, name: str, columns: int) -> None:
    """Kernels count the columns of one row in 32 bits (rows and offsets in 64)."""
    if columns >= 2**31:
        raise ValueError(f"{function}: {name} has rows of {columns} elements, at most 2**31 - 1 are supported")
