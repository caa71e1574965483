"""Kernel: CUDA C++ in, something that can be called on arrays out."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import arch as architectures
from . import cache, compiler, devices, driver, launch, resources, toolchain
from .arch import Target
from .compiler import Compiled
from .errors import CompileError, CudaUnavailableError, DriverError
from .signature import Signature, kernel_names, name_expression, parse, split_name
from .source import Source, assemble

Dims = int | tuple[int, ...]
_DEFAULT_SHARED = 48 << 10
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_BLOCK = (1024, 1024, 64)


@dataclass
class _Loaded:
    """A kernel on one device."""

    function: int
    static_shared: int
    max_threads: int
    info: devices.DeviceInfo
    dynamic_shared: int = _DEFAULT_SHARED
    allowed: set[tuple[Any, ...]] = field(default_factory=set)
    resident: dict[tuple[int, int], int] = field(default_factory=dict)


class Kernel:
    """A CUDA kernel compiled from source at first use and cached on disk.

    Parameters
    ----------
    source : str or path
        CUDA C++ text, or the path of a .cu file. ``#include "common/types.cuh"`` and ``"ptx/mma.cuh"`` reach cukern's headers.
    name : str
        The kernel's name, or a name expression such as ``"scale<half, 128>"``.
    template : tuple, optional
        Template arguments to append: C++ text, ints, bools or NumPy dtypes. ``("half", 128)`` gives ``<half, 128>``.
    defines : mapping, optional
        Macros put before the source.
    arch : str, optional
        Compile for this architecture ("sm_90a") now; needs no GPU. Default: that of the device launched on, at first use (at once
        where there is a GPU, so that a compile error shows at the definition).
    max_shared_mem : int, optional
        Upper bound of dynamic shared memory in bytes, set up front. Without it, a launch that asks for more than 48 KB opts in by itself.
    cooperative : bool
        Launch so that all blocks are resident together (a grid barrier is possible).

    Raises
    ------
    CompileError
        With file, line and the line's text.
    FileNotFoundError
        For a missing file or header.

    Examples
    --------
    >>> k = cukern.Kernel('extern "C" __global__ void twice(float *x, int n) '
    ...                   '{ int i = blockIdx.x * 256 + threadIdx.x; if (i < n) x[i] *= 2; }', "twice")
    >>> k((n + 255) // 256, 256, (x, n))
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        name: str,
        *,
        template: Sequence[object] | None = None,
        defines: Mapping[str, object] | None = None,
        arch: str | None = None,
        max_shared_mem: int | None = None,
        cooperative: bool = False,
        _lazy: bool = False,
    ) -> None:
        if not isinstance(name, str) or not name.strip():
            raise TypeError(f"name={name!r}: expected the kernel's name")
        if max_shared_mem is not None and max_shared_mem < 0:
            raise ValueError(f"max_shared_mem={max_shared_mem}: expected bytes, 0 or more")
        self.name = name_expression(name, template)
        self.cooperative = bool(cooperative)
        self.max_shared_mem = max_shared_mem
        self.source: Source = assemble(source, defines)
        self.signature: Signature = parse(self.source.text, self.name)
        if self.signature.parameters is None and split_name(self.name)[0] not in kernel_names(self.source.text):
            self._check_named()
        self._arch = None if arch is None else architectures.parse(arch)
        self._guard = threading.RLock()
        self._compiled: dict[str, Compiled] = {}
        self._loaded: dict[int, _Loaded] = {}
        self._emulated: Callable[..., Any] | None = None
        self._pack: Callable[[Sequence[Any], Any], int] | None = None
        self._layout: list[tuple[int, int, str]] = []
        self._slots: dict[tuple[Any, ...], list[launch.Slot]] = {}
        self._arguments: launch.Arguments | None = None
        if self.signature.parameters is not None:
            self._arguments = launch.Arguments(self.name, self.signature.parameters)
        if arch is not None or (not _lazy and not devices.emulation_active() and devices.gpu_present()):
            self._binary(self._target())

    def __repr__(self) -> str:
        at = f", arch={self._arch.name!r}" if self._arch else ""
        return f"Kernel({self.name!r}, {self.source.filename!r}{at})"

    def _check_named(self) -> None:
        """Refuse a name that no kernel of the text has, before any compiler runs."""
        found = kernel_names(self.source.text)
        base = split_name(self.name)[0]
        if not re.search(rf"\b{re.escape(base)}\b", self.source.text):
            raise CompileError(
                f"no kernel {self.name!r} in {self.source.filename} (kernels found: {', '.join(found) or 'none'})"
            )

    # ---- compilation

    def _target(self) -> Target:
        if self._arch is not None:
            return self._arch
        if not devices.gpu_present():
            raise CudaUnavailableError(
                f"kernel {self.name!r}: there is no usable GPU to take the architecture from; give one, for example arch='sm_80' "
                "(cukern info says why no GPU is usable)"
            )
        return Target(devices.describe(devices.current_id()).arch)

    def _key(self, target: Target, form: str) -> str:
        return cache.make_key(
            {
                "source": self.source.text,
                "names": [self.name],
                "options": sorted(compiler.options(target)),
                "arch": target.name,
                "form": form,
                "nvrtc": toolchain.nvrtc_build(),
                "headers": toolchain.headers_digest(),
            }
        )

    def _binary(self, target: Target, form: str = "binary") -> Compiled:
        """The compiled program for a target, from memory, the disk cache or the compiler."""
        known = self._compiled.get(f"{target.name} {form}")
        if known is None:
            architectures.parse(target.name, toolchain.supported_architectures())
            known = cache.current().get_or_compile(
                target.name,
                self._key(target, form),
                lambda: compiler.compile_source(self.source, [self.name], target, ptx=form == "ptx"),
            )
            self._compiled[f"{target.name} {form}"] = known
        return known

    def compile(self, arch: str | None = None) -> Resources:
        """Compile for an architecture (default: as at construction) without launching; returns the resources."""
        return self._resources(self._target() if arch is None else architectures.parse(arch))

    @property
    def cubin(self) -> bytes:
        """The machine code, an ELF file (PTX text for a card newer than this NVRTC)."""
        return self._binary(self._target()).binary

    @property
    def ptx(self) -> str:
        """The PTX text."""
        target = self._target()
        form = "binary" if target.is_ptx else "ptx"
        return self._binary(target, form).binary.rstrip(b"\0").decode("utf-8", "replace")

    @property
    def sass(self) -> str:
        """The disassembly.

        Raises
        ------
        CudaUnavailableError
            Where neither nvdisasm nor cuobjdump is found; says what to install.
        """
        target = self._target()
        if target.is_ptx:
            raise CudaUnavailableError(
                f"{target.name} is PTX, which the driver translates: there is no machine code to show"
            )
        return disassemble(self.cubin)

    @property
    def resources(self) -> Resources:
        """Registers, shared and local memory, spills, largest block; ``.occupancy(block, shared_mem)``."""
        return self._resources(self._target())

    def _resources(self, target: Target) -> Resources:
        compiled = self._binary(target)
        mangled = compiled.names[self.name]
        usage = compiled.usage.get(mangled)
        query = None
        loaded: _Loaded | None = None
        if devices.gpu_present() and not devices.emulation_active():
            here = devices.current_id()
            if _runs_on(target, devices.describe(here)):
                loaded = self._load(here)
                query = lambda threads, shared: self._occupancy(here, threads, shared)  # noqa: E731
        if usage is None and loaded is not None:  # PTX: only the driver knows
            get = driver.get()
            usage = compiler.Usage(
                registers=get.attribute(loaded.function, driver.NUM_REGS),
                shared=loaded.static_shared,
                stack=get.attribute(loaded.function, driver.LOCAL_SIZE_BYTES),
            )
        if usage is None:
            raise CudaUnavailableError(f"the resources of {self.name!r} for {target.name} are known only on such a GPU")
        threads = compiled.max_threads.get(mangled) or 1024
        if usage.registers:
            threads = min(threads, 65536 // (-(-usage.registers * 32 // 256) * 256) * 32, 1024)
        return Resources(
            arch=target.name,
            registers=usage.registers,
            shared=usage.shared,
            local=usage.stack,
            spill_stores=usage.spill_stores,
            spill_loads=usage.spill_loads,
            max_threads=loaded.max_threads if loaded else threads,
            _query=query,
        )

    def _occupancy(self, where: int, threads: int, shared_mem: int) -> int:
        loaded = self._load(where)
        if loaded.static_shared + shared_mem > loaded.info.max_shared_mem:
            return 0
        self._allow_shared(loaded, shared_mem)
        return driver.get().occupancy(loaded.function, threads, shared_mem)

    # ---- launch

    def __call__(
        self,
        grid: Dims,
        block: Dims,
        args: Sequence[Any] = (),
        *,
        shared_mem: int = 0,
        stream: Any = None,
        cluster: tuple[int, int, int] | None = None,
        pdl: bool = False,
    ) -> None:
        """Launch. Returns at once; nothing waits for the GPU.

        Parameters
        ----------
        grid, block : int or tuple of up to three ints
            Blocks of the grid, threads of a block. A grid with a 0 launches nothing.
        args : tuple
            One for each parameter: an array (contiguous, on one device; None or an empty array is a null pointer), a NumPy scalar of the
            parameter's exact type, a Python number (converted to that type), or bytes for a struct by value.
        shared_mem : int
            Dynamic shared memory, bytes.
        stream : cupy.cuda.Stream or int, optional
            Default: CuPy's current stream of the arrays' device.
        cluster : tuple of three ints, optional
            Thread-block cluster (compute capability 9.0 and later); the grid still counts blocks.
        pdl : bool
            Programmatic dependent launch: may start before the kernel ahead of it in the stream has ended. The kernel must wait
            (``griddepcontrol.wait``) before it reads what that one wrote. Ignored before compute capability 9.0.

        Raises
        ------
        TypeError
            Wrong number, dtype, width or kind of arguments.
        ValueError
            A non-contiguous array, arrays on different devices, sizes beyond the device's limits.
        """
        if type(args) is not tuple and not isinstance(args, list):
            raise TypeError(
                f"kernel {self.name!r}: args must be a tuple, got {launch.describe_value(args)}; write (x,) for one argument"
            )
        pack = self._pack
        if pack is None:
            if self._for_emulator(args):
                self._emulate(grid, block, args, shared_mem)
                return
            pack = self._make_packer(args)
        pool = self._slots.get((cluster, pdl))
        if pool is None:
            pool = self._new_pool(cluster, pdl)
        try:
            slot = pool.pop()
        except IndexError:
            slot = self._new_slot(cluster, pdl)
        try:
            try:
                where = pack(args, slot.params)
            except launch.HostArray:
                self._emulate(grid, block, args, shared_mem)
                return
            current = devices.current_id()
            if where < 0 or where == current:
                self._launch(slot, current, grid, block, shared_mem, stream, cluster, pdl)
            else:
                with devices.cupy().cuda.Device(where):
                    self._launch(slot, where, grid, block, shared_mem, stream, cluster, pdl)
        finally:
            pool.append(slot)

    def _launch(
        self,
        slot: launch.Slot,
        where: int,
        grid: Any,
        block: Any,
        shared_mem: int,
        stream: Any,
        cluster: Any,
        pdl: bool,
    ) -> None:
        grid = launch.dimensions(grid, "grid")
        block = launch.dimensions(block, "block")
        loaded = self._loaded.get(where) or self._load(where)
        key = (block, shared_mem, cluster, grid if self.cooperative or cluster else None)
        if key not in loaded.allowed:
            self._check_launch(loaded, grid, block, shared_mem, cluster)
            loaded.allowed.add(key)
        if grid[0] > _MAX_GRID[0] or grid[1] > 65535 or grid[2] > 65535:
            raise ValueError(f"kernel {self.name!r}: grid {grid} is beyond the limits {_MAX_GRID}")
        if not (grid[0] and grid[1] and grid[2]):
            return
        slot.configure(grid, block, shared_mem, _stream_pointer(stream))
        calls = driver.get()
        code = calls.launch_raw(slot.config_address, loaded.function, slot.pointers_address, None)
        if code == driver.INVALID_CONTEXT:  # a thread's first use of CUDA
            calls.ensure_context(where)
            code = calls.launch_raw(slot.config_address, loaded.function, slot.pointers_address, None)
        if code:
            calls.fail(f"launch of kernel {self.name!r} (grid {grid}, block {block}, shared memory {shared_mem})", code)

    def _check_launch(
        self, loaded: _Loaded, grid: tuple[int, int, int], block: tuple[int, int, int], shared_mem: int, cluster: Any
    ) -> None:
        """All that depends on the device's limits, once for each block shape."""
        threads = block[0] * block[1] * block[2]
        if threads < 1 or any(b > m for b, m in zip(block, _MAX_BLOCK)) or threads > loaded.max_threads:
            raise ValueError(
                f"kernel {self.name!r}: block {block} is beyond its limits ({loaded.max_threads} threads in all, {_MAX_BLOCK} by axis)"
            )
        if not isinstance(shared_mem, int) or shared_mem < 0:
            raise ValueError(f"kernel {self.name!r}: shared_mem={shared_mem!r}, expected bytes, 0 or more")
        if self.max_shared_mem is not None and shared_mem > self.max_shared_mem:
            raise ValueError(
                f"kernel {self.name!r}: shared_mem={shared_mem} is more than max_shared_mem={self.max_shared_mem}"
            )
        self._allow_shared(loaded, shared_mem)
        if cluster is not None:
            self._check_cluster(loaded, grid, cluster)
        if self.cooperative:
            room = driver.get().occupancy(loaded.function, threads, shared_mem) * loaded.info.sm_count
            blocks = grid[0] * grid[1] * grid[2]
            if blocks > room:
                raise ValueError(
                    f"kernel {self.name!r}: a cooperative grid of {blocks} blocks does not fit {loaded.info.name}, which holds {room} of "
                    f"{threads} threads and {shared_mem} bytes at a time"
                )

    def _check_cluster(self, loaded: _Loaded, grid: tuple[int, int, int], cluster: Any) -> None:
        if loaded.info.capability < (9, 0):
            raise ValueError(
                f"kernel {self.name!r}: clusters need compute capability 9.0, {loaded.info.name} has {loaded.info.capability}"
            )
        shape = launch.dimensions(cluster, "cluster")
        if any(c < 1 or g % c for g, c in zip(grid, shape)):
            raise ValueError(f"kernel {self.name!r}: grid {grid} is no multiple of the cluster {shape}")
        if shape[0] * shape[1] * shape[2] > 8:
            driver.get().set_attribute(loaded.function, driver.NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)

    def _allow_shared(self, loaded: _Loaded, dynamic: int) -> None:
        limit = loaded.info.max_shared_mem - loaded.static_shared
        if dynamic > limit:
            raise ValueError(
                f"kernel {self.name!r}: {dynamic} bytes of dynamic and {loaded.static_shared} of static shared memory are more than the "
                f"{loaded.info.max_shared_mem} that {loaded.info.name} has for a block"
            )
        with self._guard:
            if (
                dynamic + loaded.static_shared > _DEFAULT_SHARED
                and dynamic > loaded.dynamic_shared - loaded.static_shared
            ):
                driver.get().set_attribute(loaded.function, driver.MAX_DYNAMIC_SHARED_SIZE_BYTES, dynamic)
                loaded.dynamic_shared = dynamic + loaded.static_shared

    def _load(self, where: int) -> _Loaded:
        """The kernel on a device; loaded once."""
        with self._guard:
            loaded = self._loaded.get(where)
            if loaded is not None:
                return loaded
            info = devices.describe(where)
            target = self._arch or Target(info.arch)
            if not _runs_on(target, info):
                raise ValueError(
                    f"kernel {self.name!r} is compiled for {target.name} and does not run on {info.name} ({info.arch})"
                )
            compiled = self._binary(target)
            calls = driver.get()
            with devices.cupy().cuda.Device(where):
                calls.ensure_context(where)
                try:
                    module = calls.load(compiled.binary)
                except DriverError as error:
                    raise DriverError(
                        f"kernel {self.name!r} for {target.name} cannot be loaded on {info.name}: {error}", error.code
                    ) from error
                function = calls.function(module, compiled.names[self.name])
                loaded = _Loaded(
                    function=function,
                    static_shared=calls.attribute(function, driver.SHARED_SIZE_BYTES),
                    max_threads=calls.attribute(function, driver.MAX_THREADS_PER_BLOCK),
                    info=info,
                )
                self._check_layout(calls.parameters(function), compiled)
                if self.max_shared_mem:
                    self._allow_shared(loaded, self.max_shared_mem)
            self._loaded[where] = loaded
            return loaded

    def _check_layout(self, found: list[tuple[int, int]] | None, compiled: Compiled) -> None:
        """The driver's word on parameter places must be the compiler's, or an argument would land in the wrong place."""
        layout = compiled.layout.get(compiled.names[self.name], [])
        if found is not None and found != [(offset, size) for offset, size, _ in layout]:
            raise RuntimeError(
                f"kernel {self.name!r}: the driver places its parameters at {found}, the compiler at {layout}"
            )

    def _make_packer(self, args: Sequence[Any]) -> Callable[[Sequence[Any], Any], int]:
        """Build the argument conversion from the source's types and the compiler's layout."""
        cp = devices.cupy()
        with self._guard:
            if self._pack is not None:
                return self._pack
            where = next((a.device.id for a in args if isinstance(a, cp.ndarray)), None)
            if where is None:
                target = self._target()
            else:
                target = self._arch or Target(devices.describe(where).arch)
            compiled = self._binary(target)
            layout = compiled.layout.get(compiled.names[self.name], [])
            self._arguments = checked_arguments(self.name, self.signature, layout)
            self._layout = layout
            self._pack = launch.compile_packer(self._arguments, layout, cp.ndarray, _as_cupy)
            return self._pack

    def _new_pool(self, cluster: Any, pdl: bool) -> list[launch.Slot]:
        return self._slots.setdefault((cluster, pdl), [])

    def _new_slot(self, cluster: Any, pdl: bool) -> launch.Slot:
        shape = None if cluster is None else launch.dimensions(cluster, "cluster")
        pdl = bool(pdl) and devices.describe(devices.current_id()).capability >= (9, 0)
        return launch.Slot(self._layout, launch.attributes(self.cooperative, shape, pdl))

    # ---- emulation

    def _for_emulator(self, args: Sequence[Any]) -> bool:
        parameters = self.signature.parameters
        if parameters is None or len(parameters) != len(args):
            host = any(isinstance(a, np.ndarray) for a in args)
        else:
            host = any(p.kind == "pointer" and isinstance(a, np.ndarray) for p, a in zip(parameters, args))
        return host or (devices.emulation_active() and not any(hasattr(a, "__cuda_array_interface__") for a in args))

    def _emulate(self, grid: Dims, block: Dims, args: Sequence[Any], shared_mem: int) -> None:
        if not devices.emulation_active():
            i = next((i for i, a in enumerate(args) if isinstance(a, np.ndarray)), 0)
            raise TypeError(
                f"kernel {self.name!r}: argument {i} is a NumPy array; pass CuPy arrays, or run on the CPU with "
                "'with cukern.emulate():' or CUKERN_EMULATE=1"
            )
        g, b = launch.dimensions(grid, "grid"), launch.dimensions(block, "block")
        values = tuple(args) if self._arguments is None else self._arguments.host(args)
        if 0 in g:
            return
        if self.max_shared_mem is not None and shared_mem > self.max_shared_mem:
            raise ValueError(
                f"kernel {self.name!r}: shared_mem={shared_mem} is more than max_shared_mem={self.max_shared_mem}"
            )
        if self._emulated is None:
            from cukern import emulator

            self._emulated = emulator.runtime_kernel(self.source.text, self.name, filename=self.source.filename)
        self._emulated(g, b, values, shared_mem=shared_mem, cooperative=self.cooperative)


Resources = resources.Resources


def checked_arguments(name: str, signature: Signature, layout: Sequence[tuple[int, int, str]]) -> launch.Arguments:
    """The source's parameter types where they agree with the compiler's sizes, else the compiler's sizes alone."""
    parameters = signature.parameters
    if parameters is not None and len(parameters) == len(layout):
        dtypes = launch.Arguments(name, parameters)
        sizes = [
            8 if p.kind == "pointer" else d.itemsize if d is not None else size
            for p, d, (_, size, _) in zip(parameters, dtypes.dtypes, layout)
        ]
        if sizes == [size for _, size, _ in layout]:
            return dtypes
    return launch.Arguments(name, launch.parameters_from_layout(layout))


def _as_cupy(value: Any) -> Any:
    """A foreign device array as a CuPy one without a copy, or None if `value` is no such thing."""
    cp = devices.cupy()
    if isinstance(value, cp.ndarray):
        return value
    if hasattr(value, "__cuda_array_interface__"):
        return cp.asarray(value)
    if hasattr(value, "__dlpack__"):
        return cp.from_dlpack(value)
    return None


def _stream_pointer(stream: Any) -> int:
    if stream is None:
        return int(devices.cupy().cuda.get_current_stream().ptr)
    if isinstance(stream, int):
        return stream
    pointer = getattr(stream, "ptr", getattr(stream, "cuda_stream", None))
    if pointer is None:
        raise TypeError(f"stream: expected a cupy.cuda.Stream or a stream handle as int, got a {type(stream).__name__}")
    return int(pointer)


def _runs_on(target: Target, info: devices.DeviceInfo) -> bool:
    """Machine code runs on its own generation, from its minor version up, and with an "a" on that very one; PTX on all later."""
    here = info.capability[0] * 10 + info.capability[1]
    if target.name[-1] == "a":
        return target.number == here
    if target.is_ptx:
        return target.number <= here
    return target.number // 10 == here // 10 and target.number <= here


def disassemble(cubin: bytes) -> str:
    """SASS of a cubin, by nvdisasm or cuobjdump."""
    tools = (("nvdisasm", ("-c",)), ("cuobjdump", ("-sass",)))
    for name, options in tools:
        program = toolchain.find_program(name)
        if program is None:
            continue
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            done = subprocess.run([program, *options, file.name], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name} failed: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout
    raise CudaUnavailableError(
        "neither nvdisasm nor cuobjdump is found: install a CUDA toolkit (set CUDA_PATH), or pip install "
        "nvidia-cuda-nvdisasm nvidia-cuda-cuobjdump"
    )


_memo: dict[tuple[Any, ...], Kernel] = {}


def kernel(
    file: str,
    name: str,
    template: tuple[object, ...] = (),
    defines: Mapping[str, object] | None = None,
    *,
    cooperative: bool = False,
) -> Kernel:
    """A kernel of ``kernels_src/<file>``; made once a process, then a dictionary lookup.

    Parameters
    ----------
    file : str
        File name under the kernel sources, for example "rms_norm.cu".
    name, template, defines, cooperative
        As for :class:`Kernel`.
    """
    key = (file, name, template, None if not defines else tuple(sorted(defines.items())), cooperative)
    known = _memo.get(key)
    if known is None:
        from .source import kernels_src

        made = Kernel(
            kernels_src() / file, name, template=template, defines=defines, cooperative=cooperative, _lazy=True
        )
        known = _memo.setdefault(key, made)
    return known


def reload() -> None:
    """Forget the kernels made by :func:`kernel`, so that edited sources are read again."""
    _memo.clear()
