"""What the emulator raises. Faults of a kernel carry where they happened; see :class:`KernelFault`."""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "ArithmeticFault",
    "BarrierDivergence",
    "BuildError",
    "Deadlock",
    "DeviceAssert",
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
]

Index3 = tuple[int, int, int]


class EmulatorError(RuntimeError):
    """Base of everything that the emulator raises."""


class ToolchainError(EmulatorError):
    """There is no C++ compiler, it does not work, or what it makes cannot be written; the message says what to do."""


class BuildError(EmulatorError):
    """A kernel does not compile; ``log`` is the compiler's output."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class LaunchError(EmulatorError, ValueError):
    """A launch that no GPU would accept: grid, block or shared memory."""


class ArgumentError(EmulatorError, TypeError):
    """Arguments that do not fit the kernel's parameters: number, type or width."""


class KernelFault(EmulatorError):
    """A fault while a kernel ran.

    Attributes
    ----------
    kernel : str
        Name expression of the kernel.
    file, line : str, int
        Where, as in the source (``#line`` markers are respected); ``""`` and 0 if unknown.
    callers : tuple of (str, int)
        For a fault in an inlined function: who called it, innermost first.
    block, thread : (x, y, z) or None
        Which thread of which block; `thread` is None for a fault of the block as a whole.
    argument : str or None
        Name of the array argument concerned.
    shape : tuple of int or None
        Its shape.
    index : tuple of int or None
        The element accessed, in terms of `shape`; the first entry may lie outside.
    """

    def __init__(
        self,
        message: str,
        *,
        kernel: str = "",
        file: str = "",
        line: int = 0,
        callers: tuple[tuple[str, int], ...] = (),
        block: Index3 | None = None,
        thread: Index3 | None = None,
        argument: str | None = None,
        shape: tuple[int, ...] | None = None,
        index: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(message)
        self.kernel = kernel
        self.file = file
        self.line = line
        self.callers = callers
        self.block = block
        self.thread = thread
        self.argument = argument
        self.shape = shape
        self.index = index


class OutOfBounds(KernelFault):
    """Access outside every array, outside shared memory or a local array, or through a null pointer."""


class WriteToReadOnly(KernelFault):
    """Write to an array that is not writeable, or was passed for a pointer to const."""


class SharedRace(KernelFault):
    """Two threads use the same shared memory, one of them writing, with no barrier in between; or a cp.async target is
    used before its wait."""


class UninitialisedShared(KernelFault):
    """Read of shared memory that the block has not written."""


class BarrierDivergence(KernelFault):
    """Threads of a block wait at different barriers, or a grid barrier is used in an ordinary launch."""


class Deadlock(KernelFault):
    """No thread can go on; the message lists who waits where."""


class Misaligned(KernelFault):
    """Access at an address that is not a multiple of the access's size."""


class WrongMask(KernelFault):
    """A warp operation whose mask does not fit the lanes that take part."""


class StackOverflow(KernelFault):
    """An emulated thread used more than its stack."""


class Timeout(KernelFault):
    """The kernel did not end in time."""


class ArithmeticFault(KernelFault):
    """Integer division by zero, a shift out of range, a missing return."""


class DeviceAssert(KernelFault):
    """``assert`` or ``__trap()`` in device code."""
