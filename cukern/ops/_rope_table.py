"""Cosines and sines of rotary position embedding, computed on the host in float64.

Angles in half precision are wrong by up to pi at long positions, and a device's fast sine is inaccurate for large
arguments, so the table is built once in float64 and stored in float32.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["rope_table"]

_KEYS = {
    "default": {"rope_type", "type", "rope_theta", "partial_rotary_factor"},
    "yarn": {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}


def rope_table(head_dim: int, max_positions: int, theta: float, scaling: Mapping[str, Any] | None = None) -> np.ndarray:
    """Table of cosines and sines for positions 0 to ``max_positions - 1``.

    Parameters
    ----------
    head_dim : int
        Even width D of a head. Pair i (elements i and i + D/2) turns by ``position * f_i`` radians, with
        ``f_i = theta ** (-2 i / D)`` unless scaled.
    max_positions : int
        Rows of the table.
    theta : float
        Base of the frequencies (``rope_theta`` of the configuration).
    scaling : mapping, optional
        ``rope_scaling`` or ``rope_parameters`` of a Hugging Face configuration. ``rope_type`` is "default" or "yarn";
        YaRN needs ``factor`` and ``original_max_position_embeddings`` and takes ``attention_factor``, ``beta_fast``
        (32), ``beta_slow`` (1), ``mscale``, ``mscale_all_dim`` and ``truncate`` (True).

    Returns
    -------
    ndarray, float32 [max_positions, head_dim]
        Cosines in the first D/2 columns, sines in the last, both times YaRN's attention factor.

    Raises
    ------
    ValueError
        A size out of range, an unknown rope type or key, or a missing YaRN parameter.
    TypeError
        A size that is no integer, a base that is no number, a scaling that is no mapping.
    MemoryError
        A table larger than the memory.

    Notes
    -----
    RoFormer (arXiv 2104.09864); YaRN (arXiv 2309.00071), sections 3.2 to 3.4, with the conventions of transformers.
    """
    head_dim, max_positions = _integer("head_dim", head_dim), _integer("max_positions", max_positions)
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"rope_table: head_dim must be even and positive, got {head_dim}")
    if max_positions < 0:
        raise ValueError(f"rope_table: max_positions must not be negative, got {max_positions}")
    theta = _real("theta", theta)
    if not (math.isfinite(theta) and theta > 1):
        raise ValueError(f"rope_table: theta must be a finite number above 1, got {theta}")
    if scaling is not None and not isinstance(scaling, Mapping):
        raise TypeError(f"rope_table: scaling must be a mapping or None, got {type(scaling).__name__}")
    frequencies = float(theta) ** (-2 * np.arange(head_dim // 2, dtype=np.float64) / head_dim)
    amplitude = 1.0
    if scaling is not None and _rope_type(scaling, theta) == "yarn":
        frequencies, amplitude = _yarn(frequencies, head_dim, float(theta), scaling)
    table = np.empty((max_positions, head_dim), np.float32)
    block = 4096  # rows at a time, so that the float64 angles of a long table stay small
    for first in range(0, max_positions, block):
        rows = slice(first, min(first + block, max_positions))
        angles = np.outer(np.arange(rows.start, rows.stop, dtype=np.float64), frequencies)
        table[rows, : head_dim // 2] = amplitude * np.cos(angles)
        table[rows, head_dim // 2 :] = amplitude * np.sin(angles)
    return table


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"rope_table: {name} must be an integer, got {value!r}") from None


def _real(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"rope_table: {name} must be a number, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _rope_type(scaling: Mapping[str, Any], theta: float) -> str:
    """The rope type, once every key is known to be understood."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KEYS:
        raise ValueError(f"rope_table: rope_type {kind!r} is not supported, expected 'default' or 'yarn'")
    unknown = sorted(map(str, set(scaling) - _KEYS[kind]))
    if unknown:
        raise ValueError(f"rope_table: rope type {kind!r} does not know {', '.join(unknown)}; check the name")
    if scaling.get("rope_theta") is not None and _real("rope_theta", scaling["rope_theta"]) != theta:
        raise ValueError(f"rope_table: theta {theta} disagrees with rope_theta {scaling['rope_theta']} in scaling")
    if scaling.get("partial_rotary_factor") not in (None, 1, 1.0):
        given = scaling["partial_rotary_factor"]
        raise ValueError(f"rope_table: partial_rotary_factor {given} is not supported, only whole heads rotate")
    return str(kind)


def _number(scaling: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A positive number of the scaling dictionary; zero and null mean "not given", as in transformers."""
    value = scaling.get(name) or default
    if value is None:
        hint = "; older configurations hold it as max_position_embeddings" if name.startswith("original") else ""
        raise ValueError(f"rope_table: YaRN scaling needs {name}{hint}")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"rope_table: {name} of YaRN scaling must be a positive number, got {value!r}")
    return float(value)


def _yarn(frequencies: np.ndarray, head_dim: int, theta: float, scaling: Mapping[str, Any]) -> tuple[np.ndarray, float]:
    """YaRN: pairs that turn often within the trained context keep their frequency, slow ones are divided by factor."""
    factor = _number(scaling, "factor")
    context = _number(scaling, "original_max_position_embeddings")
    fast, slow = _number(scaling, "beta_fast", 32.0), _number(scaling, "beta_slow", 1.0)
    if factor < 1:
        raise ValueError(f"rope_table: factor of YaRN scaling must be at least 1, got {factor}")

    def pair_of(turns: float) -> float:
        # the (fractional) pair that turns this often over the trained context: context * f_i = 2 pi turns
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(fast), pair_of(slow)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    slowed = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    if scaling.get("attention_factor") is not None:
        amplitude = _number(scaling, "attention_factor")
    elif scaling.get("mscale") and scaling.get("mscale_all_dim"):
        amplitude = _mscale(factor, _number(scaling, "mscale")) / _mscale(factor, _number(scaling, "mscale_all_dim"))
    else:
        amplitude = _mscale(factor, 1.0)
    return frequencies * (1 - slowed) + frequencies / factor * slowed, amplitude


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
