"""What the current device is. Under emulation, and where there is no GPU, a small virtual one."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass
from typing import Any

from . import arch, driver, toolchain
from .errors import CudaUnavailableError, DriverError


@dataclass(frozen=True)
class DeviceInfo:
    """A device as kernels' launch rules need it. Sizes in bytes; ``arch`` is the compile target ("sm_90a")."""

    name: str
    arch: str
    capability: tuple[int, int]
    sm_count: int
    max_shared_mem_per_block_optin: int
    shared_mem_per_sm: int
    l2_bytes: int

    @property
    def max_shared_mem(self) -> int:
        """Shared memory that one block can have, static and dynamic together."""
        return self.max_shared_mem_per_block_optin


#: The device that launch rules see without a GPU: small, so that portable paths are taken.
VIRTUAL = DeviceInfo(
    name="emulated",
    arch="sm_80",
    capability=(8, 0),
    sm_count=8,
    max_shared_mem_per_block_optin=99 << 10,
    shared_mem_per_sm=100 << 10,
    l2_bytes=4 << 20,
)


def emulation_active() -> bool:
    """Whether ``cukern.emulate()`` or ``CUKERN_EMULATE=1`` is in force; the emulator is imported only if so."""
    if "cukern.emulator" not in sys.modules and os.environ.get("CUKERN_EMULATE", "") in ("", "0"):
        return False
    from cukern import emulator

    return bool(emulator.active())


@functools.cache
def cupy() -> Any:
    """The CuPy module.

    Raises
    ------
    CudaUnavailableError
        If CuPy is missing or broken; says what to install.
    """
    try:
        import cupy as module
    except ImportError as error:
        raise CudaUnavailableError(toolchain.no_cupy(error)) from error
    return module


def current_id() -> int:
    """The ordinal of CuPy's current device."""
    return int(cupy().cuda.runtime.getDevice())


@functools.cache
def describe(device: int) -> DeviceInfo:
    """The facts of one device, and the target that kernels are compiled for on it.

    Raises
    ------
    CudaUnavailableError
        Without a usable GPU.
    RuntimeError
        If the card is too old for cukern or for this CUDA.
    """
    facts = driver.get().device_facts(device)
    version = ".".join(map(str, toolchain.nvrtc_version()))
    target = arch.for_capability(
        facts["capability"], toolchain.supported_architectures(), facts["name"], f"CUDA {version} (NVRTC)"
    )
    return DeviceInfo(arch=target.name, **facts)


@functools.cache
def _device_count() -> int:
    """GPUs that the driver lists; raises where there is no driver."""
    cupy()
    return driver.get().device_count()


def gpu_present() -> bool:
    """Whether a GPU can be used. Makes no context."""
    try:
        return _device_count() > 0
    except (CudaUnavailableError, DriverError):
        return False


def current() -> DeviceInfo:
    """The current CuPy device; under emulation, and without a GPU, :data:`VIRTUAL`."""
    if emulation_active() or not gpu_present():
        return VIRTUAL
    return describe(current_id())


def use(device: int) -> Any:
    """A context manager that makes a device current."""
    return cupy().cuda.Device(device)


def as_cupy(value: Any) -> Any:
    """A foreign device array as a CuPy one without a copy, or None if `value` is no such thing."""
    cp = cupy()
    if isinstance(value, cp.ndarray):
        return value
    if hasattr(value, "__cuda_array_interface__"):
        return cp.asarray(value)
    if hasattr(value, "__dlpack__"):
        return cp.from_dlpack(value)
    return None


def stream_pointer(stream: Any) -> int:
    """The handle of a stream: None for CuPy's current one, a CuPy or torch stream, or a handle as int."""
    if stream is None:
        return int(cupy().cuda.get_current_stream().ptr)
    if isinstance(stream, int):
        return stream
    pointer = getattr(stream, "ptr", getattr(stream, "cuda_stream", None))
    if pointer is None:
        raise TypeError(f"stream: expected a cupy.cuda.Stream or a handle as int, got a {type(stream).__name__}")
    return int(pointer)
