"""Operators called again and again with arrays of the same kinds: what the kinds decide is checked and chosen once.

A forward pass calls each operator dozens of times with the same shapes and dtypes. The first such call goes through
all checks; then it leaves a :class:`Plan`. Later calls look at what can differ: that the arguments are CuPy arrays on
the current GPU, contiguous and aligned, and launch. Whatever else comes takes the long way, with its messages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cukern.jit import Kernel, devices, tape
from cukern.jit import registry as jit_registry
from cukern.jit.kernels import Dims
from cukern.ops._arrays import FLOAT32, Array

__all__ = ["Plan", "Plans", "kinds", "plain_dtype"]

_MOST_PLANS = 4096  # prompts of every length leave some


class Plan(NamedTuple):
    """How a call is answered. `launch` and `second` take addresses (0 for None); `extra` is the operator's own."""

    launch: Callable[..., None]
    shape: tuple[int, ...]
    dtype: np.dtype
    extra: Any
    second: Callable[..., None] | None

    def empty(self) -> Array:
        """The array of the result."""
        return _kept(_Cupy.ndarray(self.shape, self.dtype))

    @staticmethod
    def workspace(shape: tuple[int, ...]) -> Array:
        """An array of float32."""
        return _kept(_Cupy.ndarray(shape, FLOAT32))


def _kept(made: Array) -> Array:
    """The array, which belongs to the tape that records, if there is one."""
    recording = tape.active  # read once: another thread may end it
    if recording is not None:
        recording.keep(made)
    return made


class _Cupy:
    """CuPy's array class once CuPy is there; until then, a class that no argument is of."""

    ndarray: Any = type("_NoArray", (), {})
    known = False

    @classmethod
    def learn(cls) -> None:
        found = getattr(sys.modules.get("cupy"), "ndarray", None)
        # `_c_contiguous` is what `flags` asks, at a tenth of its cost
        if found is not None:
            cls.known = True
            if hasattr(found, "_c_contiguous"):
                cls.ndarray = found


class Plans:
    """The plans of one operator, by the kinds of its arguments."""

    def __init__(self) -> None:
        self._plans: dict[tuple[Any, ...], tuple[Plan, Any]] = {}
        jit_registry.at_reload.append(self.clear)

    def clear(self) -> None:
        """Forget all plans."""
        self._plans.clear()

    def find(self, arrays: Sequence[Any], options: Hashable) -> tuple[Plan, list[int]] | None:
        """The plan for these arguments and the arrays' addresses, if they are as a plan wants them.

        Parameters
        ----------
        arrays : sequence
            Array arguments of the operator, in one order; None where one is not given.
        options
            What else decides the call: equal options must mean equal calls.
        """
        seen = kinds(arrays, options)
        if seen is None:
            return None
        key, pointers, device = seen
        found = self._plans.get(key)
        # another device object: facts of the GPU were asked anew
        if found is None or device != devices.current_id() or found[1] is not devices.describe(device):
            return None
        return found[0], pointers

    def keep(
        self,
        arrays: Sequence[Any],
        options: Hashable,
        kernel: Kernel,
        grid: Dims,
        block: Dims,
        arguments: Sequence[Any],
        out: Array,
        *,
        extra: Any = None,
        second: tuple[Kernel, Dims, Dims, Sequence[Any]] | None = None,
        **launch: Any,
    ) -> None:
        """After a call on a GPU that went the long way: leave a plan, where one can serve.

        Parameters
        ----------
        arrays, options
            As for :meth:`find`.
        kernel, grid, block, arguments, **launch
            What was launched; the numbers at the end of `arguments` must follow from the kinds.
        out : array
            The result, of which a later call allocates the like.
        extra
            Of the plan.
        second : tuple, optional
            Another launch behind it: kernel, grid, block, arguments.
        """
        seen = kinds(arrays, options)
        # under emulation the choice of variants is that of another device
        if seen is None or devices.emulation_active() or any(a is not None and a.size == 0 for a in arrays):
            return
        if not any(isinstance(a, bytes) for a in arguments):  # tensor maps stand for arrays
            taken = {a.data.ptr for a in arguments if type(a) is _Cupy.ndarray}
            if not taken.issuperset(p for p in seen[1] if p):  # a copy was made of an argument
                return
        first = kernel._repeated(grid, block, arguments, **launch)
        last = None if second is None else second[0]._repeated(*second[1:], pdl=bool(launch.get("pdl")))
        if first is None or (last is None and second is not None):
            return
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        plan = Plan(first, tuple(out.shape), out.dtype, extra, last)
        self._plans[seen[0]] = (plan, devices.describe(seen[2]))


def kinds(arrays: Sequence[Any], options: Hashable) -> tuple[tuple[Any, ...], list[int], int] | None:
    """(key, addresses, device) of contiguous and aligned CuPy arrays on one GPU, or None."""
    ndarray = _Cupy.ndarray
    device = -1
    key: list[Any] = [options]
    pointers: list[int] = []
    for a in arrays:
        if a is None:
            key.append(None)
            pointers.append(0)
            continue
        if type(a) is not ndarray:
            if not _Cupy.known:
                _Cupy.learn()  # for the next call
            return None
        memory = a.data
        pointer = memory.ptr
        if pointer & 15 or not a._c_contiguous:
            return None
        if device != memory.device_id:
            if device >= 0:
                return None
            device = memory.device_id
        pointers.append(pointer)
        key.append(a.shape)
        key.append(a.dtype)
    if device < 0:
        return None
    key.append(device)
    return tuple(key), pointers, device


def plain_dtype(value: Any) -> bool:
    """Whether an argument `dtype` may stand in the options of a plan: None, a type or a NumPy dtype."""
    return value is None or isinstance(value, (type, np.dtype))
