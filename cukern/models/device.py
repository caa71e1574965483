"""Where a model lives: a GPU, the CPU reference, or the kernels emulated on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

__all__ = ["Device", "cuda_problem"]


@dataclass(frozen=True)
class Device:
    """A place to compute.

    Attributes
    ----------
    kind : str
        "cuda": CuPy arrays, our kernels. "cpu": NumPy float32 arrays, the reference. "emulated": NumPy
        half-precision arrays, our kernels run by the emulator.
    index : int
        Number of the GPU; 0 otherwise.
    """

    kind: str
    index: int = 0

    @classmethod
    def parse(cls, device: str | Device | None) -> Device:
        """Read "cuda", "cuda:1", "cpu", "emulated", or None for a GPU where one is usable and else the CPU.

        Raises
        ------
        ValueError
            An unknown name, or a GPU that is not there (the message says why).
        """
        if isinstance(device, Device):
            return device
        if device is None:
            return cls("cpu") if cuda_problem() else cls("cuda", _current_gpu())
        if not isinstance(device, str):
            raise TypeError(f"device must be a string or None, got {type(device).__name__}")
        if device in ("cpu", "emulated"):
            return cls(device)
        kind, _, number = device.partition(":")
        if kind != "cuda" or (":" in device and not number.isdecimal()):
            raise ValueError(f"device must be 'cuda', 'cuda:N', 'cpu', 'emulated' or None, got {device!r}")
        problem = cuda_problem()
        if problem:
            raise ValueError(f"device {device!r} is not usable: {problem}; device='cpu' runs the NumPy reference")
        index = int(number) if number else _current_gpu()
        count = _cupy().cuda.runtime.getDeviceCount()
        if index >= count:
            raise ValueError(f"device {device!r} does not exist: this machine has {count} GPU(s), counted from 0")
        return cls("cuda", index)

    @property
    def xp(self) -> ModuleType:
        """The array module: cupy or numpy."""
        return _cupy() if self.kind == "cuda" else np

    @contextmanager
    def context(self) -> Iterator[None]:
        """Make this GPU the current one for a block of code."""
        if self.kind != "cuda":
            yield
            return
        with _cupy().cuda.Device(self.index):
            yield

    @contextmanager
    def running(self) -> Iterator[None]:
        """Be in a state to run operators: this GPU the current one, or the emulator switched on."""
        if self.kind != "emulated":
            with self.context():
                yield
            return
        from .. import emulator

        if emulator.active():  # keep the mode that the user chose
            yield
            return
        with emulator.emulate():
            yield

    def put(self, array: np.ndarray) -> Any:
        """Copy a NumPy array to this device (the host kinds return it as it is)."""
        if self.kind != "cuda":
            return array
        with self.context():
            return _cupy().asarray(array)

    def get(self, array: Any) -> np.ndarray:
        """Copy an array of this device to the host."""
        return np.asarray(array) if self.kind != "cuda" else _cupy().asnumpy(array)

    def __str__(self) -> str:
        return f"cuda:{self.index}" if self.kind == "cuda" else self.kind


def cuda_problem() -> str | None:
    """Say why CuPy cannot use a GPU here, or None if it can. Creates no CUDA context."""
    try:
        cupy = _cupy()
    except ImportError:
        return "CuPy is not installed (pip install 'cukern[cuda12]' or 'cukern[cuda13]')"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # CUDARuntimeError: no driver, too old a driver, no device
        text = f"CUDA reports {str(error).splitlines()[0]}"
        if "InsufficientDriver" in text:  # also what CuPy's runtime says where there is no driver at all
            from cukern.jit import driver
            from cukern.jit.errors import CudaUnavailableError

            try:
                driver.get()
            except CudaUnavailableError as missing:
                return str(missing)
        if "InitializationError" in text:  # what a child of a process that already used CUDA gets
            text += "; a GPU cannot be used across fork, start workers with multiprocessing.get_context('spawn')"
        return text
    return None if count else "no NVIDIA GPU was found"


def _current_gpu() -> int:
    return int(_cupy().cuda.runtime.getDevice())


def _cupy() -> Any:
    import cupy

    return cupy
