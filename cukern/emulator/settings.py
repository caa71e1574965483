"""Whether kernels are emulated here and how: environment first, then nested ``with emulate(...)`` blocks."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

ORDERS = ("up", "down", "random")


@dataclass(frozen=True)
class Settings:
    """How a launch is emulated; see :func:`emulate` for the meaning of each field."""

    check: bool
    order: str
    seed: int
    workers: int
    timeout: float

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order={self.order!r}: expected one of {', '.join(ORDERS)}")
        if self.workers < 1:
            raise ValueError(f"workers={self.workers}: expected 1 or more")
        if not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout}: expected a positive number of seconds")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed={self.seed}: expected 0 <= seed < 2**63")


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


def _number(name: str, default: float) -> float:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}={text!r}: expected a number") from None


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
    return Settings(
        check=check,
        order=os.environ.get("CUKERN_EMULATE_ORDER", "").strip().lower() or "up",
        seed=int(_number("CUKERN_EMULATE_SEED", 0)),
        workers=int(_number("CUKERN_EMULATE_WORKERS", workers)),
        timeout=_number("CUKERN_EMULATE_TIMEOUT", math.inf if debugging() else 60.0),
    )


def current() -> Settings:
    """The settings in force for this thread (or task)."""
    return _current.get() or from_environment()


def active() -> bool:
    """Whether kernels given NumPy arrays run on the emulator here."""
    return _current.get() is not None or bool(_flag("CUKERN_EMULATE"))


@contextlib.contextmanager
def emulate(
    check: bool | None = None,
    order: str | None = None,
    seed: int | None = None,
    workers: int | None = None,
    timeout: float | None = None,
) -> Iterator[None]:
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
    ValueError
        For an option out of range.

    Examples
    --------
    >>> import cukern, numpy as np
    >>> with cukern.emulate():
    ...     y = cukern.ops.rms_norm(np.ones((2, 8), np.float16), np.ones(8, np.float32))
    """
    given: dict[str, Any] = {"check": check, "order": order, "seed": seed, "workers": workers, "timeout": timeout}
    token = _current.set(replace(current(), **{k: v for k, v in given.items() if v is not None}))
    try:
        yield
    finally:
        _current.reset(token)
