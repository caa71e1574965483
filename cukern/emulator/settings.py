"""Whether kernels are emulated here and how: environment first, then nested ``with emulate(...)`` blocks."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

ORDERS = ("up", "down", "random")


@dataclass(frozen=True)
class Settings:
    """How a launch is emulated; see :func:`emulate` for the meaning of each field."""

    check: bool
    order: str
    seed: int
    workers: int
    timeout: float


def _check(value: object, name: str) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r}: expected True or False")
    return bool(value)


def _order(value: object, name: str) -> str:
    if not isinstance(value, str) or value not in ORDERS:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(ORDERS)}")
    return value


def _whole(value: Any, name: str, least: int, bits: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}={value!r}: expected a whole number")
    if not least <= value < 1 << bits:
        raise ValueError(f"{name}={value}: expected {least} <= {name} < 2**{bits}")
    return int(value)


def _seed(value: object, name: str) -> int:
    return _whole(value, name, 0, 63)


def _workers(value: object, name: str) -> int:
    return _whole(value, name, 1, 31)


def _timeout(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}={value!r}: expected a number of seconds")
    if not value > 0:
        raise ValueError(f"{name}={value}: expected a positive number of seconds")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected a number of seconds as large as a float at most, or math.inf") from None


# option -> what checks it; the name that an error gives is the option's or the variable's
_OPTIONS: dict[str, Callable[[Any, str], Any]] = {
    "check": _check,
    "order": _order,
    "seed": _seed,
    "workers": _workers,
    "timeout": _timeout,
}


_current: ContextVar[Settings | None] = ContextVar("cukern_emulate", default=None)


def _flag(name: str) -> bool | None:
    text = os.environ.get(name, "").strip().lower()
    if not text:
        return None
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{name}={text!r}: expected 1 or 0")


def _number(name: str, default: float, kind: Callable[[str], float]) -> float:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{name}={text!r}: expected a {'whole ' if kind is int else ''}number") from None


def debugging() -> bool:
    """Whether kernels are built for a debugger, which also means that nobody minds how long they take."""
    return bool(_flag("CUKERN_EMULATE_DEBUG"))


def _cpus() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # pragma: no cover - not Linux
        return os.cpu_count() or 1


def from_environment() -> Settings:
    """Settings outside any ``with`` block. Check mode is the default under pytest."""
    check = _flag("CUKERN_EMULATE_CHECK")
    if check is None:
        check = "PYTEST_CURRENT_TEST" in os.environ
    # a test runner with several processes has already divided the machine
    workers = 1 if "PYTEST_XDIST_WORKER" in os.environ else _cpus()
    prefix = "CUKERN_EMULATE_"
    order = os.environ.get(prefix + "ORDER", "").strip().lower() or "up"
    timeout = _number(prefix + "TIMEOUT", math.inf if debugging() else 60.0, float)
    return Settings(
        check=check,
        order=_order(order, prefix + "ORDER"),
        seed=_seed(_number(prefix + "SEED", 0, int), prefix + "SEED"),
        workers=_workers(_number(prefix + "WORKERS", workers, int), prefix + "WORKERS"),
        timeout=_timeout(timeout, prefix + "TIMEOUT"),
    )


def current() -> Settings:
    """The settings in force for this thread (or task)."""
    return _current.get() or from_environment()


def active() -> bool:
    """Whether kernels given NumPy arrays run on the emulator here."""
    return _current.get() is not None or bool(_flag("CUKERN_EMULATE"))


class Emulation(contextlib.ContextDecorator):
    """One ``with emulate(...)`` block."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._entered = False

    def _recreate_cm(self) -> Emulation:  # of ContextDecorator: each call of a decorated function is a block
        return Emulation(self._options)

    def __enter__(self) -> None:
        if self._entered:
            raise RuntimeError("this emulate() block was entered before: call emulate(...) for each 'with'")
        self._entered = True
        self._token = _current.set(replace(current(), **self._options))

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


def emulate(
    check: bool | None = None,
    order: str | None = None,
    seed: int | None = None,
    workers: int | None = None,
    timeout: float | None = None,
) -> Emulation:
    """Run CUDA kernels on the CPU inside this block.

    Operators and :class:`cukern.Kernel` given NumPy arrays then run their CUDA source through the emulator. Blocks
    nest: what an inner block leaves out is taken from the outer one, then from the environment. A block holds for the
    thread (or asyncio task) that entered it.

    Parameters
    ----------
    check : bool, optional
        Watch every memory access: out of bounds, misaligned, write to read-only, shared-memory races, uninitialised
        shared memory. 1.5 to 4 times slower. Default: on under pytest, else off (``CUKERN_EMULATE_CHECK``).
    order : {"up", "down", "random"}, optional
        In which order the threads of a block (and blocks) take turns. A correct kernel gives the same bits in every
        order. Default "up" (``CUKERN_EMULATE_ORDER``).
    seed : int, optional
        For ``order="random"``. Default 0 (``CUKERN_EMULATE_SEED``).
    workers : int, optional
        Blocks that run at the same time, on as many CPU cores. Default: all cores (``CUKERN_EMULATE_WORKERS``).
    timeout : float, optional
        Seconds after which a launch is stopped with :class:`cukern.emulator.Timeout`. Default 60
        (``CUKERN_EMULATE_TIMEOUT``).

    Raises
    ------
    TypeError, ValueError
        For an option of a wrong kind or out of range.
    RuntimeError
        Where what this returns is entered a second time.

    Examples
    --------
    >>> import cukern, numpy as np
    >>> with cukern.emulate():
    ...     y = cukern.ops.rms_norm(np.ones((2, 8), np.float16), np.ones(8, np.float32))
    """
    given: dict[str, Any] = {"check": check, "order": order, "seed": seed, "workers": workers, "timeout": timeout}
    return Emulation({k: _OPTIONS[k](v, k) for k, v in given.items() if v is not None})
