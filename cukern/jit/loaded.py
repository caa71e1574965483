"""A compiled kernel on one device: limits, opt-ins and the launch itself."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from . import devices, driver, launch, tape
from .compiler import Compiled
from .errors import DriverError
from .launch import Slot

DEFAULT_SHARED = 48 << 10  # dynamic and static shared memory that needs no opt-in
_MAX_BLOCK = (1024, 1024, 64)
_MAX_GRID = (2**31 - 1, 65535, 65535)

Dims3 = tuple[int, int, int]


def check_dimensions(kernel: str, grid: Dims3, block: Dims3, max_threads: int = 1024) -> None:
    """Refuse a grid or block beyond what every device has.

    Raises
    ------
    ValueError
        Naming the kernel, the value and the limit.
    """
    if any(b > m or b < 1 for b, m in zip(block, _MAX_BLOCK)) or block[0] * block[1] * block[2] > max_threads:
        raise ValueError(
            f"kernel {kernel!r}: block {block} is beyond its limits: {max_threads} threads in all, {_MAX_BLOCK} by axis"
        )
    if any(g > m for g, m in zip(grid, _MAX_GRID)):
        raise ValueError(f"kernel {kernel!r}: grid {grid} is beyond the limits {_MAX_GRID}")


class LoadedKernel:
    """A kernel's function on one device.

    Parameters
    ----------
    name : str
        For messages.
    compiled : Compiled
        Made for this device.
    mangled : str
        Which of its functions.
    device : int
        Ordinal.
    cooperative : bool
        Launch with all blocks resident.
    max_shared_mem : int or None
        Bound of dynamic shared memory.
    """

    def __init__(
        self, name: str, compiled: Compiled, mangled: str, device: int, cooperative: bool, max_shared_mem: int | None
    ) -> None:
        self.name = name
        self.device = device
        self.info = devices.describe(device)
        self.cooperative = cooperative
        self.max_shared_mem = max_shared_mem
        self._driver = driver.get()
        self._guard = threading.Lock()
        self._opted = 0
        self._blocks: dict[tuple[Any, ...], Dims3] = {}
        self._attributes: dict[tuple[Any, ...], tuple[Any, int, int]] = {}
        with devices.use(device):
            self._driver.ensure_context(device)
            try:
                module = self._driver.load(compiled.binary)
                self.function = self._driver.function(module, mangled)
            except DriverError as error:
                raise DriverError(
                    f"kernel {name!r} for {compiled.target} cannot be loaded on {self.info.name}: {error}", error.code
                ) from error
            self.static_shared = self.attribute(driver.SHARED_SIZE_BYTES)
            self.max_threads = self.attribute(driver.MAX_THREADS_PER_BLOCK)
            self._check_layout(compiled.layout.get(mangled, []))
            if max_shared_mem:
                self.allow_shared(max_shared_mem)

    def attribute(self, which: int) -> int:
        """One of the driver's function attributes."""
        return self._driver.attribute(self.function, which)

    def _check_layout(self, layout: list[tuple[int, int, str]]) -> None:
        """The driver's parameters must have the compiler's distances and sizes, or an argument would land on another.

        The driver may begin elsewhere: it counts from the parameter bank, which parameters aligned to 64 bytes enter
        at an offset.
        """
        found = self._driver.parameters(self.function, len(layout))
        expected = [(offset, size) for offset, size, _ in layout]
        start = found[0][0] - expected[0][0] if found and expected else 0
        if found is not None and found != [(offset + start, size) for offset, size in expected]:
            raise RuntimeError(
                f"kernel {self.name!r}: the driver places its parameters at {found}, the compiler at {expected}"
            )

    def allow_shared(self, dynamic: int) -> None:
        """Opt in to `dynamic` bytes of dynamic shared memory where that is more than the default.

        Raises
        ------
        ValueError
            If the device has not that much for a block.
        """
        if self.static_shared + dynamic > self.info.max_shared_mem:
            raise ValueError(
                f"kernel {self.name!r}: {dynamic} bytes of dynamic and {self.static_shared} of static shared memory "
                f"are more than the {self.info.max_shared_mem} that {self.info.name} has for a block"
            )
        with self._guard:
            if dynamic + self.static_shared > DEFAULT_SHARED and dynamic > self._opted:
                self._driver.set_attribute(self.function, driver.MAX_DYNAMIC_SHARED_SIZE_BYTES, dynamic)
                self._opted = dynamic

    def occupancy(self, threads: int, shared_mem: int) -> int:
        """Blocks that fit one multiprocessor."""
        if self.static_shared + shared_mem > self.info.max_shared_mem:
            return 0
        with devices.use(self.device):
            self._driver.ensure_context(self.device)
            self.allow_shared(shared_mem)
            return self._driver.occupancy(self.function, threads, shared_mem)

    def launch(
        self, slot: Slot, grid: Any, block: Any, shared_mem: int, stream: Any, cluster: Dims3 | None, pdl: bool
    ) -> None:
        """Launch with the arguments that `slot` holds. The device must be current."""
        recording = tape.active  # read once: another thread may end it
        if recording is not None:
            recording.miss()
        if type(grid) is int:
            grid = (grid, 1, 1)
        elif type(grid) is not tuple or len(grid) != 3:
            grid = launch.dimensions(grid, "grid")
        key = (block, shared_mem, cluster) if type(block) is not list else None
        try:
            shape = self._blocks.get(key) if key is not None else None
        except TypeError:  # a block that cannot be a key: _check_block says what it is, or takes it
            shape = key = None
        if shape is None:
            shape = self._check_block(block, shared_mem)
            if key is not None:
                self._blocks[key] = shape
        x, y, z = grid
        if not (0 < x <= 2147483647 and 0 < y <= 65535 and 0 < z <= 65535):
            check_dimensions(self.name, launch.dimensions(grid, "grid"), shape, self.max_threads)
            return  # a grid without blocks
        if self.cooperative or cluster is not None:
            self._check_grid(grid, shape, shared_mem, cluster)
        attributes = self._attributes.get((cluster, pdl)) or self._make_attributes(cluster, pdl)
        try:
            slot.configure(x, y, z, *shape, shared_mem, devices.stream_pointer(stream), attributes[1], attributes[2])
        except struct.error:
            launch.dimensions(grid, "grid")
            raise TypeError(f"kernel {self.name!r}: stream={stream!r} is no stream or handle") from None
        code = self._driver.launch_raw(slot.config_address, self.function, slot.pointers_address, None)
        if code:
            self._again(code, slot, grid, shape, shared_mem)

    def _again(self, code: int, slot: Slot, grid: Dims3, shape: Dims3, shared_mem: int) -> None:
        """After a launch that failed: once more if all it lacked was a context, else its error."""
        if code == driver.INVALID_CONTEXT:  # this thread's first use of CUDA
            self._driver.ensure_context(self.device)
            code = self._driver.launch_raw(slot.config_address, self.function, slot.pointers_address, None)
        if code:
            self._driver.fail(
                f"launch of kernel {self.name!r} (grid {grid}, block {shape}, shared memory {shared_mem})", code
            )

    def repeated(
        self,
        pool: list[Slot],
        layout: list[tuple[int, int, str]],
        pack_into: Callable[..., None],
        tail: tuple[Any, ...],
        grid: Any,
        block: Any,
        shared_mem: int,
        cluster: Dims3 | None,
        pdl: bool,
    ) -> Repeated:
        """A launch that :meth:`launch` has made already, to be made again with other leading arguments."""
        shape = self._check_block(block, shared_mem)
        attributes = self._attributes.get((cluster, pdl)) or self._make_attributes(cluster, pdl)
        return Repeated(
            self, pool, layout, pack_into, tail, launch.dimensions(grid, "grid"), shape, shared_mem, attributes
        )

    def _check_block(self, block: Any, shared_mem: int) -> Dims3:
        shape = launch.dimensions(block, "block")
        check_dimensions(self.name, (1, 1, 1), shape, self.max_threads)
        check_shared(self.name, shared_mem, self.max_shared_mem)
        self.allow_shared(shared_mem)
        return shape

    def _check_grid(self, grid: Dims3, block: Dims3, shared_mem: int, cluster: Dims3 | None) -> None:
        key = ("grid", grid, block, shared_mem, cluster)
        if key in self._blocks:
            return
        if cluster is not None:
            if self.info.capability < (9, 0):
                raise ValueError(
                    f"kernel {self.name!r}: clusters need compute capability 9.0, {self.info.name} has "
                    f"{self.info.capability[0]}.{self.info.capability[1]}"
                )
            if any(c < 1 or g % c for g, c in zip(grid, cluster)):
                raise ValueError(f"kernel {self.name!r}: grid {grid} is no multiple of the cluster {cluster}")
            if cluster[0] * cluster[1] * cluster[2] > 8:
                self._driver.set_attribute(self.function, driver.NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        if self.cooperative:
            threads = block[0] * block[1] * block[2]
            room = self.occupancy(threads, shared_mem) * self.info.sm_count
            blocks = grid[0] * grid[1] * grid[2]
            if blocks > room:
                raise ValueError(
                    f"kernel {self.name!r}: a cooperative grid of {blocks} blocks does not fit {self.info.name}, which "
                    f"holds {room} blocks of {threads} threads and {shared_mem} bytes at a time"
                )
        self._blocks[key] = block

    def _make_attributes(self, cluster: Dims3 | None, pdl: bool) -> tuple[Any, int, int]:
        """The launch attributes as memory that lives as long as this object: (buffer, address, count)."""
        early = bool(pdl) and self.info.capability >= (9, 0)
        parts = launch.attributes(self.cooperative, cluster, early)
        buffer = ctypes.create_string_buffer(b"".join(parts), max(len(b"".join(parts)), 1))
        made = (buffer, ctypes.addressof(buffer), len(parts))
        return self._attributes.setdefault((cluster, pdl), made)


class Repeated:
    """A launch of fixed sizes and trailing arguments: ``repeated(address or bytes, ...)`` checks nothing any more.

    The device must be current; the launch goes to CuPy's current stream.
    """

    __slots__ = ("_attributes", "_driver", "_head", "_layout", "_loaded", "_pack_into", "_pool", "_tail")

    def __init__(
        self,
        loaded: LoadedKernel,
        pool: list[Slot],
        layout: list[tuple[int, int, str]],
        pack_into: Callable[..., None],
        tail: tuple[Any, ...],
        grid: Dims3,
        block: Dims3,
        shared_mem: int,
        attributes: tuple[Any, int, int],
    ) -> None:
        self._loaded = loaded
        self._driver = loaded._driver
        self._pool = pool
        self._layout = layout
        self._pack_into = pack_into
        self._tail = tail
        self._head = (*grid, *block, shared_mem)
        self._attributes = attributes

    def __call__(self, *lead: int | bytes) -> None:
        recording = tape.active  # read once: another thread may end it
        if recording is not None:
            recording.add(self, lead)
        try:
            slot = self._pool.pop()
        except IndexError:
            slot = Slot(self._layout)
        try:
            self._pack_into(slot.params, 0, *lead, *self._tail)
            _, address, count = self._attributes
            slot.configure(*self._head, devices.stream_pointer(None), address, count)
            code = self._driver.launch_raw(slot.config_address, self._loaded.function, slot.pointers_address, None)
            if code:
                self.again(code, slot)
        finally:
            self._pool.append(slot)

    def again(self, code: int, slot: Slot) -> None:
        """After a launch from `slot` that failed: once more if all it lacked was a context, else its error."""
        head = self._head
        self._loaded._again(code, slot, head[0:3], head[3:6], head[6])


def is_size(value: Any) -> bool:
    """Whether a value is a number of bytes."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 0)


def check_shared(kernel: str, shared_mem: Any, bound: int | None) -> None:
    """Refuse a dynamic shared memory size that is no size, or beyond the kernel's own bound."""
    if not is_size(shared_mem):
        raise ValueError(f"kernel {kernel!r}: shared_mem={shared_mem!r}, expected bytes as an int, 0 or more")
    if bound is not None and shared_mem > bound:
        raise ValueError(f"kernel {kernel!r}: shared_mem={shared_mem} is more than max_shared_mem={bound}")
