"""What a benchmark case is, and the arrays that cases are made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Arrays", "Case", "Peers", "Prepared", "spread"]

Call = Callable[[], Any]
Peers = dict[str, list[Call]]

_ROTATE_BYTES = 192 << 20  # three times a 60 MB L2 cache
_MOST_COPIES = 64
_POOL = (1 << 20) - 3  # an odd period: large arrays are random numbers repeated, made in no time


@dataclass
class Prepared:
    """A case with its inputs in memory.

    Attributes
    ----------
    calls : list of callables
        The same work on different memory.
    check : callable
        Runs the work once and returns its largest error against the reference in float64.
    limit : float
        Allowed error.
    nbytes, flops : float
        Work that cannot be avoided.
    peers : callable
        torch -> name of each other implementation and its calls.
    in_graph : bool
        Time the calls in a CUDA graph, ours and the peers': the launches count for short work.
    """

    calls: list[Call]
    check: Callable[[], float]
    limit: float
    nbytes: float
    flops: float = 0.0
    peers: Callable[[Any], Peers] = field(default=lambda torch: {})
    in_graph: bool = False


@dataclass(frozen=True)
class Case:
    """A named piece of work; ``prepare`` makes its inputs. Of each of ``groups`` the mean ratio to the peer is
    printed.
    """

    operator: str
    label: str
    prepare: Callable[[Arrays], Prepared]
    groups: tuple[str, ...] = ()


class Arrays:
    """Makes inputs on one device in one storage dtype.

    Parameters
    ----------
    xp : module
        cupy, or numpy to run a case on the reference.
    dtype : dtype
        float16 or bfloat16.
    rotate : bool
        Make as many copies of inputs as exceed the L2 cache; False makes one.
    """

    def __init__(self, xp: Any, dtype: Any, *, rotate: bool = True) -> None:
        self.xp = xp
        self.dtype = np.dtype(dtype)
        self.rotate = rotate
        self._random = np.random.default_rng(0)

    def copies(self, nbytes: int) -> int:
        """How many inputs of that size are rotated."""
        return max(2, min(_MOST_COPIES, -(-_ROTATE_BYTES // max(nbytes, 1)))) if self.rotate else 1

    def normal(self, *shape: int, scale: float = 1.0, dtype: Any = None) -> Any:
        """Normal random numbers, repeated with a long odd period."""
        count = math.prod(shape)
        pool = self._random.standard_normal(min(count, _POOL), dtype=np.float32) * np.float32(scale)
        return self._repeat(pool.astype(dtype or self.dtype), count).reshape(shape)

    def positive(self, *shape: int, dtype: Any = np.float32) -> Any:
        """Normal random numbers around 1, like norm weights."""
        values = 1 + 0.1 * self._random.standard_normal(shape)
        return self.xp.asarray(values.astype(dtype))

    def integers(self, high: int, *shape: int, dtype: Any = np.int32) -> Any:
        """Random integers in [0, high)."""
        return self.xp.asarray(self._random.integers(0, high, shape).astype(dtype))

    def permutation(self, count: int, dtype: Any = np.int32) -> Any:
        """A random order of 0 to count - 1."""
        return self.xp.asarray(self._random.permutation(count).astype(dtype))

    def empty(self, *shape: int, dtype: Any = None) -> Any:
        """Room for a result."""
        return self.xp.empty(shape, dtype or self.dtype)

    def host(self, array: Any) -> np.ndarray:
        """An array as NumPy."""
        return array if isinstance(array, np.ndarray) else array.get()

    def double(self, array: Any) -> np.ndarray:
        """An array as NumPy float64: the reference then computes in float64."""
        return self.host(array).astype(np.float64)

    def tensor(self, torch: Any, array: Any) -> Any:
        """A CuPy array as a torch tensor over the same memory."""
        if array.dtype.name == "bfloat16":  # DLPack of bfloat16 is not offered everywhere
            return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_dlpack(array)

    def _repeat(self, pool: np.ndarray, count: int) -> Any:
        bits = {2: np.int16, 4: np.int32}[pool.dtype.itemsize]  # copied as integers: CuPy need not know bfloat16
        out = self.xp.empty(count, bits)
        source = self.xp.asarray(pool.view(bits))
        for start in range(0, count, len(pool)):
            out[start : start + len(pool)] = source[: min(len(pool), count - start)]
        return out.view(pool.dtype)


def spread(count: int, wanted: int) -> np.ndarray:
    """Up to ``wanted`` indices over 0 to count - 1, first and last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, wanted)).round().astype(np.int64))
