"""CUDA kernels on a CPU: the same text, compiled by a C++ compiler and watched while it runs (docs/emulator.md).

Use it through :func:`cukern.emulate` or ``CUKERN_EMULATE=1``: operators and :class:`cukern.Kernel` given NumPy arrays
then run here. Nothing of this is imported by ``import cukern``.
"""

from __future__ import annotations

from .errors import (
    ArgumentError,
    ArithmeticFault,
    BarrierDivergence,
    BuildError,
    Deadlock,
    DeviceAssert,
    EmulatorError,
    KernelFault,
    LaunchError,
    Misaligned,
    OutOfBounds,
    SharedRace,
    StackOverflow,
    Timeout,
    ToolchainError,
    UninitialisedShared,
    WriteToReadOnly,
    WrongMask,
)
from .kernel import EmulatedKernel, runtime_kernel
from .settings import active, emulate

__all__ = [
    "ArgumentError",
    "ArithmeticFault",
    "BarrierDivergence",
    "BuildError",
    "Deadlock",
    "DeviceAssert",
    "EmulatedKernel",
    "EmulatorError",
    "KernelFault",
    "LaunchError",
    "Misaligned",
    "OutOfBounds",
    "SharedRace",
    "StackOverflow",
    "Timeout",
    "ToolchainError",
    "UninitialisedShared",
    "WriteToReadOnly",
    "WrongMask",
    "active",
    "emulate",
    "runtime_kernel",
]
