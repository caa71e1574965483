"""A CUDA driver that records launches: the launch path is tested without a GPU, down to the bytes it hands over.

The structures are read by the offsets of cuda.h (CUlaunchConfig 56 bytes, CUlaunchAttribute 72 bytes), independently
of the code under test.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

STREAM = 0x5EED


@dataclass
class Launch:
    """What one cuLaunchKernelEx was given."""

    function: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_mem: int
    stream: int
    attributes: list[tuple[int, bytes]]
    params: list[int]  # addresses

    def value(self, i: int, fmt: str) -> Any:
        """Parameter `i`, read as a struct format."""
        (value,) = struct.unpack("=" + fmt, ctypes.string_at(self.params[i], struct.calcsize("=" + fmt)))
        return value


@dataclass
class FakeLibrary:
    """The entry points that cukern.jit.driver uses."""

    capability: tuple[int, int] = (9, 0)
    capabilities: dict[int, tuple[int, int]] = field(default_factory=dict)
    parameters: list[tuple[int, int]] | None = None
    blocks_per_sm: int = 4
    attributes: dict[int, int] = field(default_factory=lambda: {0: 1024, 1: 0, 3: 0, 4: 32})
    launch_codes: list[int] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    set_calls: list[tuple[int, int]] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    images: list[bytes] = field(default_factory=list)
    params_of_launch: int = 0
    snapshots: list[list[bytes]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        kinds = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        self.cuLaunchKernelEx = ctypes.CFUNCTYPE(*kinds)(self._launch)
        if self.parameters is None:
            self.cuFuncGetParamInfo: Callable[..., int] | None = None
        else:
            self.cuFuncGetParamInfo = self._param_info

    def _launch(self, config: int, function: int, params: int, extra: int | None) -> int:
        if self.launch_codes:
            return self.launch_codes.pop(0)
        head = struct.unpack("=7I4xQQI4x", ctypes.string_at(config, 56))
        attributes = []
        for k in range(head[9]):
            raw = ctypes.string_at(head[8] + 72 * k, 72)
            attributes.append((struct.unpack_from("=I", raw)[0], raw[8:]))
        pointers = list((ctypes.c_void_p * self.params_of_launch).from_address(params))
        launch = Launch(function, head[0:3], head[3:6], head[6], head[7], attributes, [p or 0 for p in pointers])
        self.snapshots.append([ctypes.string_at(p, n) for p, n in zip(launch.params, self.sizes)])
        self.launches.append(launch)
        return 0

    def _param_info(self, function: Any, i: Any, offset: Any, size: Any) -> int:
        if i.value >= len(self.parameters or []):
            return 1
        offset._obj.value, size._obj.value = (self.parameters or [])[i.value]
        return 0

    def cuModuleLoadData(self, module: Any, image: Any) -> int:
        self.images.append(image.value)
        module._obj.value = 0x1000 + len(self.images)
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        function._obj.value = module.value + 0x1000
        return 0

    def cuFuncGetAttribute(self, value: Any, which: int, function: Any) -> int:
        value._obj.value = self.attributes.get(which, 0)
        return 0

    def cuFuncSetAttribute(self, function: Any, which: int, value: int) -> int:
        self.set_calls.append((which, value))
        return 0

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, out: Any, function: Any, threads: int, shared: Any) -> int:
        out._obj.value = self.blocks_per_sm
        return 0

    def cuDeviceGetAttribute(self, out: Any, which: int, device: int) -> int:
        capability = self.capabilities.get(device, self.capability)
        values = {16: 4, 38: 50 << 20, 75: capability[0], 76: capability[1], 81: 228 << 10, 97: 227 << 10}
        out._obj.value = values[which]
        return 0

    def cuDeviceGetName(self, buffer: Any, size: int, device: int) -> int:
        buffer.value = f"Fake {device}".encode()
        return 0

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = 2
        return 0

    def cuDriverGetVersion(self, out: Any) -> int:
        out._obj.value = 12090
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        context._obj.value = 0x9000 + device
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.contexts.append(context.value)
        return 0

    def cuGetErrorName(self, code: int, out: Any) -> int:
        out._obj.value = b"CUDA_ERROR_TEST"
        return 0

    def cuGetErrorString(self, code: int, out: Any) -> int:
        out._obj.value = b"a test error"
        return 0


class TensorMapLibrary(FakeLibrary):
    """Also encodes tensor maps: as a record of what was asked for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.encoded: list[tuple[Any, ...]] = []

    def cuTensorMapEncodeTiled(self, out: Any, *args: Any) -> int:
        kind, rank, address, sizes, strides, box, steps, *modes = args
        self.encoded.append((kind, rank, address.value, [*sizes], [*strides], [*box], [*steps], modes))
        out._obj.raw = struct.pack("=Q", len(self.encoded)).ljust(128, b"\xee")
        return 0


class FakeCuda:
    """The fake library installed under cukern.jit, with CuPy arrays that point to host memory."""

    def __init__(self, library: FakeLibrary, monkeypatch: Any) -> None:
        from cukern.jit import devices, driver

        self.library = library
        self.current = 0
        self.used: list[int] = []
        made = driver.Driver(library)
        monkeypatch.setattr(driver, "get", lambda: made)
        monkeypatch.setattr(devices, "current_id", lambda: self.current)
        monkeypatch.setattr(devices, "stream_pointer", lambda stream: STREAM if stream is None else stream)
        monkeypatch.setattr(devices, "use", self._use)
        monkeypatch.setattr(devices, "emulation_active", lambda: False)
        devices.describe.cache_clear()
        devices._device_count.cache_clear()
        self._buffers: list[Any] = []

    def _use(self, device: int) -> AbstractContextManager[None]:
        self.used.append(device)
        return nullcontext()

    def expect(self, sizes: list[int]) -> None:
        """Sizes of the parameters of the launches to come."""
        self.library.params_of_launch = len(sizes)
        self.library.sizes = sizes

    def array(self, shape: Any, dtype: Any, device: int = 0) -> Any:
        """A CuPy array object over host memory."""
        import cupy

        size = max(int(np.prod(shape)) * np.dtype(dtype).itemsize, 1)
        buffer = ctypes.create_string_buffer(size)
        self._buffers.append(buffer)
        memory = cupy.cuda.UnownedMemory(ctypes.addressof(buffer), size, buffer, device_id=device)
        return cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(memory, 0))


def uninstall() -> None:
    """Forget what was learnt from a fake driver."""
    from cukern.jit import devices

    devices.describe.cache_clear()
    devices._device_count.cache_clear()
