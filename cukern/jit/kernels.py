"""Kernel: CUDA C++ in, something that can be called on arrays out."""

from __future__ import annotations

import os
import re
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from . import arch as architectures
from . import cache, compiler, devices, driver, launch, toolchain
from .arch import Target
from .compiler import Compiled
from .errors import CompileError, CudaUnavailableError
from .loaded import LoadedKernel, Repeated, check_dimensions, check_shared, is_size
from .resources import Resources, largest_block
from .signature import Signature, kernel_names, name_expression, parse, split_name
from .source import Source, assemble

Dims = int | tuple[int, ...]


class Kernel:
    """A CUDA kernel compiled from source at first use and cached on disk.

    Parameters
    ----------
    source : str or path
        CUDA C++ text, or the path of a .cu file. ``#include "common/types.cuh"`` and ``"ptx/mma.cuh"`` reach
        cukern's headers.
    name : str
        The kernel's name, or a name expression such as ``"scale<half, 128>"``.
    template : tuple, optional
        Template arguments to append: C++ text, ints, bools or NumPy dtypes. ``("half", 128)`` gives ``<half, 128>``.
    defines : mapping, optional
        Macros put before the source.
    arch : str, optional
        Compile for this architecture ("sm_90a") now; needs no GPU. Default: that of the device launched on, at first
        use (at once where there is a GPU, so that a compile error shows at the definition).
    max_shared_mem : int, optional
        Upper bound of dynamic shared memory in bytes, set up front. Without it, a launch that asks for more than 48
        KB opts in by itself.
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
        if max_shared_mem is not None and not is_size(max_shared_mem):
            raise ValueError(f"max_shared_mem={max_shared_mem!r}: expected bytes as an int, 0 or more")
        self.name = name_expression(name, template)
        launch.check_flag(f"kernel {self.name!r}", "cooperative", cooperative)
        self.cooperative = bool(cooperative)
        self.max_shared_mem = max_shared_mem
        self.source: Source = assemble(source, defines)
        self._with = "".join(f" -D{key}={value}" for key, value in (defines or {}).items())  # for messages
        self.signature: Signature = parse(self.source.text, self.name)
        if self.signature.parameters is None:
            self._check_named()
        self._arch = None if arch is None else architectures.parse(arch)
        self._guard = threading.RLock()
        self._compiled: dict[str, Compiled] = {}
        self._loaded: dict[int, LoadedKernel] = {}
        self._emulated: Callable[..., Any] | None = None
        self._pack: Callable[[Sequence[Any], Any], int] | None = None
        self._layout: list[tuple[int, int, str]] = []
        self._slots: list[launch.Slot] = []
        parameters = self.signature.parameters
        self._host = None if parameters is None else launch.Arguments(self.name, parameters)
        if arch is not None or (not _lazy and not devices.emulation_active() and devices.gpu_present()):
            self._binary(self._target())

    def __repr__(self) -> str:
        at = f", arch={self._arch.name!r}" if self._arch else ""
        return f"Kernel({self.name!r}, {self.source.filename!r}{at})"

    def _check_named(self) -> None:
        """Refuse a name that the text does not hold, before any compiler runs (one pasted by ## cannot be seen)."""
        text, base = self.source.text, split_name(self.name)[0]
        if "##" not in text and not re.search(rf"\b{re.escape(base)}\b", text):
            found = ", ".join(kernel_names(text)) or "none"
            raise CompileError(f"no kernel {self.name!r} in {self.source.filename} (kernels found: {found})")

    # ---- compilation

    def _target(self) -> Target:
        if self._arch is not None:
            return self._arch
        if not devices.gpu_present():
            raise CudaUnavailableError(
                f"kernel {self.name!r}: no GPU is usable to take the architecture from ('cukern info' says why): "
                "give one, for example arch='sm_80'"
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

    def _binary(self, target: Target, form: str = "binary", *, keep: bool = True) -> Compiled:
        """The compiled program for a target, from memory (where it stays if `keep`), the disk cache or the compiler."""
        known = self._compiled.get(f"{target.name} {form}")
        if known is None:
            architectures.parse(target.name, toolchain.supported_architectures())
            known = cache.current().get_or_compile(
                target.name,
                self._key(target, form),
                lambda: compiler.compile_source(self.source, [self.name], target, ptx=form == "ptx"),
                f"kernel {self.name!r} of {self.source.filename}{self._with}",
            )
            if keep:
                self._compiled[f"{target.name} {form}"] = known
        return known

    def compile(self, arch: str | None = None) -> Resources | None:
        """Compile into the cache without loading anything, for ahead-of-time use.

        Parameters
        ----------
        arch : str, optional
            Default: as at construction.

        Returns
        -------
        Resources or None
            As the compiler reports them; None for a "compute" target, whose machine code the driver makes.
        """
        target = self._target() if arch is None else architectures.parse(arch)
        compiled = self._binary(target, keep=False)
        usage = compiled.usage.get(compiled.names[self.name])
        return None if usage is None else self._report(compiled, usage, None)

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
        return toolchain.disassemble(self.cubin)

    @property
    def resources(self) -> Resources:
        """Registers, shared and local memory, spills, largest block; ``.occupancy(block, shared_mem)``."""
        return self._resources(self._target())

    def _resources(self, target: Target) -> Resources:
        compiled = self._binary(target)
        mangled = compiled.names[self.name]
        usage = compiled.usage.get(mangled)
        loaded: LoadedKernel | None = None
        if not devices.emulation_active() and devices.gpu_present():
            here = devices.current_id()
            # of two targets that run here, only the kernel's own is what a launch would use
            if target == self._target_on(here) and target.runs_on(devices.describe(here).capability):
                loaded = self._load(here)
        if usage is None and loaded is not None:  # PTX: only the driver knows
            usage = compiler.Usage(
                registers=loaded.attribute(driver.NUM_REGS),
                shared=loaded.static_shared,
                stack=loaded.attribute(driver.LOCAL_SIZE_BYTES),
            )
        if usage is None:
            raise CudaUnavailableError(f"the resources of {self.name!r} for {target.name} are known only on such a GPU")
        return self._report(compiled, usage, loaded)

    def _report(self, compiled: Compiled, usage: compiler.Usage, loaded: LoadedKernel | None) -> Resources:
        bound = compiled.max_threads.get(compiled.names[self.name]) or 1024
        return Resources(
            arch=compiled.target,
            registers=usage.registers,
            shared=usage.shared,
            local=usage.stack,
            spill_stores=usage.spill_stores,
            spill_loads=usage.spill_loads,
            max_threads=loaded.max_threads if loaded else largest_block(usage.registers, bound),
            _query=loaded.occupancy if loaded else None,
        )

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
            One for each parameter: an array (contiguous, on one device; None or an empty array is a null pointer), a
            NumPy scalar of the parameter's exact type, a Python number (converted to that type), or bytes for a
            struct by value.
        shared_mem : int
            Dynamic shared memory, bytes.
        stream : cupy.cuda.Stream or int, optional
            Default: CuPy's current stream of the arrays' device. Under emulation each changes nothing.
        cluster : tuple of three ints, optional
            Thread-block cluster (compute capability 9.0 and later; not emulated); the grid still counts blocks.
        pdl : bool
            Programmatic dependent launch: may start before the kernel ahead of it in the stream has ended. The
            kernel must wait (``griddepcontrol.wait``) before it reads what that one wrote. Ignored before compute
            capability 9.0.

        Raises
        ------
        TypeError
            Wrong number, dtype, width or kind of arguments.
        ValueError
            A non-contiguous array, arrays on different devices, sizes beyond the device's limits.
        """
        if type(args) is not tuple and not isinstance(args, list):
            raise TypeError(
                f"kernel {self.name!r}: args must be a tuple, got {launch.describe_value(args)}; "
                "write (x,) for one argument"
            )
        if cluster is not None:
            cluster = launch.dimensions(cluster, "cluster")
        if pdl is not True and pdl is not False:
            launch.check_flag(f"kernel {self.name!r}", "pdl", pdl)
        pack = self._pack
        if pack is None:
            if self._for_emulator(args):
                self._emulate(grid, block, args, shared_mem, stream, cluster)
                return
            pack = self._make_packer(args)
        try:
            slot = self._slots.pop()
        except IndexError:
            slot = launch.Slot(self._layout)
        try:
            try:
                where = pack(args, slot.params)
            except launch.HostArray:
                self._emulate(grid, block, args, shared_mem, stream, cluster)
                return
            current = devices.current_id()
            if where < 0 or where == current:
                loaded = self._loaded.get(current) or self._load(current)
                loaded.launch(slot, grid, block, shared_mem, stream, cluster, pdl)
            else:
                with devices.use(where):
                    self._load(where).launch(slot, grid, block, shared_mem, stream, cluster, pdl)
        finally:
            self._slots.append(slot)

    def _repeated(
        self,
        grid: Dims,
        block: Dims,
        args: Sequence[Any],
        *,
        shared_mem: int = 0,
        cluster: tuple[int, int, int] | None = None,
        pdl: bool = False,
    ) -> Repeated | None:
        """A launch that was just made on the current device, to be repeated with other addresses.

        Parameters
        ----------
        grid, block, args, shared_mem, cluster, pdl
            As they were. Python numbers at the end of `args` stay what they are; what stands before them (arrays,
            None, bytes) is given at each repetition, as addresses, 0 and bytes.

        Returns
        -------
        Repeated or None
            None where the kernel has not been launched on this device, or its arguments are not of that form.
        """
        loaded, ndarray = self._loaded.get(devices.current_id()), devices.cupy().ndarray
        if loaded is None or self._pack is None or self.cooperative:
            return None
        arguments = launch.checked_arguments(self.name, self.signature, self._layout)
        fixed = len(args)
        while fixed and type(args[fixed - 1]) in (int, float):
            fixed -= 1
        lead = [a.data.ptr if type(a) is ndarray else 0 if a is None else a for a in args[:fixed]]
        layout = self._layout
        by_pack, by_hand = launch.Slot(layout), launch.Slot(layout)
        pack_into = launch.block_struct(arguments, layout).pack_into
        try:
            tail = tuple(arguments.scalar(i, args[i]) for i in range(fixed, len(args)))
            self._pack(args, by_pack.params)
            pack_into(by_hand.params, 0, *lead, *tail)
        except (struct.error, AssertionError):  # opaque parameters, which only the packer knows how to take
            return None
        if bytes(by_pack.params) != bytes(by_hand.params):
            return None
        return loaded.repeated(self._slots, layout, pack_into, tail, grid, block, shared_mem, cluster, pdl)

    def _target_on(self, where: int) -> Target:
        return self._arch or Target(devices.describe(where).arch)

    def _load(self, where: int) -> LoadedKernel:
        """The kernel on a device; loaded once."""
        with self._guard:
            loaded = self._loaded.get(where)
            if loaded is None:
                info, target = devices.describe(where), self._target_on(where)
                if not target.runs_on(info.capability):
                    raise ValueError(
                        f"kernel {self.name!r} is compiled for {target.name} and does not run on "
                        f"{info.name} ({info.arch})"
                    )
                compiled = self._binary(target)
                loaded = LoadedKernel(
                    self.name, compiled, compiled.names[self.name], where, self.cooperative, self.max_shared_mem
                )
                self._loaded[where] = loaded
            return loaded

    def _make_packer(self, args: Sequence[Any]) -> Callable[[Sequence[Any], Any], int]:
        """Build the argument conversion from the source's types and the compiler's layout."""
        ndarray = devices.cupy().ndarray
        with self._guard:
            if self._pack is None:
                where = next((int(a.data.device_id) for a in args if isinstance(a, ndarray)), None)
                compiled = self._binary(self._target() if where is None else self._target_on(where))
                self._layout = compiled.layout.get(compiled.names[self.name], [])
                arguments = launch.checked_arguments(self.name, self.signature, self._layout)
                self._pack = launch.compile_packer(arguments, self._layout, ndarray, devices.as_cupy)
            return self._pack

    # ---- emulation

    def _for_emulator(self, args: Sequence[Any]) -> bool:
        parameters = self.signature.parameters
        if parameters is None or len(parameters) != len(args):
            host = any(isinstance(a, np.ndarray) for a in args)
        else:
            host = any(p.kind == "pointer" and isinstance(a, np.ndarray) for p, a in zip(parameters, args))
        return host or (devices.emulation_active() and not any(hasattr(a, "__cuda_array_interface__") for a in args))

    def _emulate(
        self,
        grid: Dims,
        block: Dims,
        args: Sequence[Any],
        shared_mem: int,
        stream: Any,
        cluster: tuple[int, int, int] | None,
    ) -> None:
        if not devices.emulation_active():
            i = next((i for i, a in enumerate(args) if isinstance(a, np.ndarray)), 0)
            raise TypeError(
                f"kernel {self.name!r}: argument {i} is a NumPy array; pass CuPy arrays, or run on the CPU with "
                "'with cukern.emulate():' or CUKERN_EMULATE=1"
            )
        g, b = launch.dimensions(grid, "grid"), launch.dimensions(block, "block")
        check_dimensions(self.name, g, b)
        check_shared(self.name, shared_mem, self.max_shared_mem)
        if stream is not None:  # which one makes no difference: a launch ends before the call returns
            devices.stream_pointer(stream)
        if cluster not in (None, (1, 1, 1)):
            raise ValueError(f"kernel {self.name!r}: cluster={cluster}: clusters of several blocks are not emulated")
        values = tuple(args) if self._host is None else self._host.host(args)
        if 0 in g:
            return
        if self._emulated is None:
            from cukern import emulator

            self._emulated = emulator.runtime_kernel(self.source.text, self.name, filename=self.source.filename)
        self._emulated(g, b, values, shared_mem=shared_mem, cooperative=self.cooperative)
