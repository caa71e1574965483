"""The CUDA driver, called directly: modules, function attributes, occupancy and cuLaunchKernelEx.

CuPy's own launch costs about 8 us of host time and cannot carry launch attributes (clusters, programmatic dependent
launch), so kernels are launched from a parameter block prepared once. CuPy still owns the context, the streams and
the memory.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

from .errors import CudaUnavailableError, DriverError

# CUfunction_attribute
MAX_THREADS_PER_BLOCK = 0
SHARED_SIZE_BYTES = 1
LOCAL_SIZE_BYTES = 3
NUM_REGS = 4
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
# CUdevice_attribute
_MULTIPROCESSOR_COUNT = 16
_L2_CACHE_SIZE = 38
_CAPABILITY_MAJOR = 75
_CAPABILITY_MINOR = 76
_SHARED_PER_MULTIPROCESSOR = 81
_SHARED_PER_BLOCK_OPTIN = 97
# CUlaunchAttributeID
COOPERATIVE = 2
CLUSTER_DIMENSION = 4
PROGRAMMATIC_STREAM_SERIALIZATION = 6
# CUresult
NOT_INITIALIZED = 3
INVALID_CONTEXT = 201

_LIBRARIES = ("libcuda.so.1", "libcuda.so", "nvcuda.dll")


class Driver:
    """Checked calls into one driver library."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._process = os.getpid()
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self.launch_raw = library.cuLaunchKernelEx
        self.launch_raw.argtypes = [ctypes.c_void_p] * 4
        self.launch_raw.restype = ctypes.c_int

    def call(self, name: str, *args: Any) -> None:
        """Call a driver function; a result other than success is a DriverError with the driver's own words."""
        code = getattr(self._library, name)(*args)
        if code:
            self.fail(name, code)

    def fail(self, what: str, code: int) -> None:
        """Raise the DriverError for a result code."""
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(name))
        self._library.cuGetErrorString(code, ctypes.byref(text))
        detail = f"{(name.value or b'unknown error').decode()} ({(text.value or b'').decode()})"
        if code == NOT_INITIALIZED and os.getpid() != self._process:
            detail += "; CUDA was in use before this process was forked: start workers with the 'spawn' method"
        raise DriverError(f"{what} failed: {detail}", code)

    def load(self, image: bytes) -> int:
        """Load a cubin, or PTX that ends in a zero byte, into the current context; returns the CUmodule."""
        module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(image))
        return int(module.value or 0)

    def function(self, module: int, name: str) -> int:
        """The CUfunction of a mangled name."""
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), ctypes.c_void_p(module), name.encode())
        return int(function.value or 0)

    def attribute(self, function: int, which: int) -> int:
        value = ctypes.c_int()
        self.call("cuFuncGetAttribute", ctypes.byref(value), which, ctypes.c_void_p(function))
        return value.value

    def set_attribute(self, function: int, which: int, value: int) -> None:
        self.call("cuFuncSetAttribute", ctypes.c_void_p(function), which, value)

    def parameters(self, function: int, count: int) -> list[tuple[int, int]] | None:
        """(offset, size) of the first `count` parameters, or None where the driver (before CUDA 12.4) cannot say.

        Fewer, if the function has fewer; asking for one more than there are is an error that a sanitizer reports.
        """
        query = getattr(self._library, "cuFuncGetParamInfo", None)
        if query is None:
            return None
        out: list[tuple[int, int]] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        for i in range(count):
            if query(ctypes.c_void_p(function), ctypes.c_size_t(i), ctypes.byref(offset), ctypes.byref(size)):
                break
            out.append((offset.value, size.value))
        return out

    def occupancy(self, function: int, threads: int, shared_mem: int) -> int:
        """Blocks of `threads` threads that fit one multiprocessor."""
        blocks = ctypes.c_int()
        self.call(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            ctypes.byref(blocks),
            ctypes.c_void_p(function),
            threads,
            ctypes.c_size_t(shared_mem),
        )
        return blocks.value

    def device_attribute(self, device: int, which: int) -> int:
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), which, device)
        return value.value

    def device_name(self, device: int) -> str:
        text = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", text, len(text), device)
        return text.value.decode("utf-8", "replace")

    def device_facts(self, device: int) -> dict[str, Any]:
        """Name, capability and sizes of a device."""
        get = functools.partial(self.device_attribute, device)
        return {
            "name": self.device_name(device),
            "capability": (get(_CAPABILITY_MAJOR), get(_CAPABILITY_MINOR)),
            "sm_count": get(_MULTIPROCESSOR_COUNT),
            "max_shared_mem_per_block_optin": get(_SHARED_PER_BLOCK_OPTIN),
            "shared_mem_per_sm": get(_SHARED_PER_MULTIPROCESSOR),
            "l2_bytes": get(_L2_CACHE_SIZE),
        }

    def device_count(self) -> int:
        value = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(value))
        return value.value

    def version(self) -> tuple[int, int]:
        """The newest CUDA version that the driver supports."""
        value = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(value))
        return value.value // 1000, value.value % 1000 // 10

    def ensure_context(self, device: int) -> None:
        """Make the device's primary context current on this thread (a thread that has not used CUDA yet has none)."""
        context = self._contexts.get(device)
        if context is None:
            context = ctypes.c_void_p()
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[device] = context
        self.call("cuCtxSetCurrent", context)


@functools.cache
def get() -> Driver:
    """The driver, initialised (no context is made).

    Raises
    ------
    CudaUnavailableError
        Without a driver library, or when it finds no usable device.
    """
    for name in _LIBRARIES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        if not hasattr(library, "cuLaunchKernelEx"):
            raise CudaUnavailableError("the NVIDIA driver is older than CUDA 11.8: update the driver")
        driver = Driver(library)
        try:
            driver.call("cuInit", 0)
        except DriverError as error:
            raise CudaUnavailableError(f"the NVIDIA driver does not start: {error}") from error
        return driver
    raise CudaUnavailableError(
        "no NVIDIA driver on this machine (libcuda.so.1 is not found): if it has an NVIDIA GPU, install its driver; "
        "a container needs --gpus all"
    )
