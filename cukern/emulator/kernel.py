"""A kernel under emulation: prepare its text, build it, check arguments, launch it, explain its faults."""

from __future__ import annotations

import ctypes as C
import functools
import os
import re
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import _native, source, symbols, toolchain
from .arguments import Arguments, Param
from .errors import ArgumentError, BuildError, KernelFault, LaunchError, OutOfBounds, WriteToReadOnly
from .settings import ORDERS, Settings, current, debugging

STATIC_SHARED_LIMIT = 48 * 1024
_OVERRUN = "out-of-bounds write: argument {name} {place}; found after the launch, run with check=True to see the line"
_CHANGED = (
    "write to argument {name}, an array that is not writeable {place}; the array is as it was: pass a copy, or run "
    "with check=True to see the line"
)
SHARED_LIMIT = 227 * 1024
_PRINT_BYTES = 1 << 20


class _Binary:
    """A built and loaded kernel."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = C.CDLL(str(path))
        count = self.library.emu_param_count()
        self.library.emu_params.restype = C.POINTER(_native.ParamInfo)
        table = self.library.emu_params()
        self.params = [
            Param(p.kind.decode(), p.size, p.pointee.decode(), p.pointee_size, bool(p.is_const)) for p in table[:count]
        ]
        self.thunk = C.cast(self.library.emu_thunk, C.c_void_p).value
        self.anchor = C.cast(self.library.emu_tls_anchor, C.c_void_p).value
        variables = symbols.shared_variables(path)
        self.shared = [v for v in variables if not v.guard]
        guards = [v.offset for v in variables if v.guard]
        self.guards = (C.c_uint32 * len(guards))(*guards)
        self.static_bytes = sum(v.size for v in self.shared)


class EmulatedKernel:
    """One kernel of one source text, callable on NumPy arrays."""

    def __init__(self, text: str, name: str, filename: str) -> None:
        self.name = name
        self.filename = filename
        self._text = text
        self._prepared = source.prepare(text, name, filename)
        self._binaries: dict[tuple[object, ...], _Binary] = {}
        self._lock = threading.Lock()
        self.stats: dict[str, int] = {}

    def binary(self, check: bool) -> _Binary:
        """The shared object for a mode, built on first use."""
        debug = debugging()
        key = (check, debug, os.environ.get("CUKERN_CXX", ""))
        found = self._binaries.get(key)
        if found is None:
            with self._lock:
                found = self._binaries.get(key)
                if found is None:
                    wrong = source.misnamed(self._text, self.name, self.filename)
                    if wrong:
                        raise BuildError(wrong)
                    _native.runtime()  # first: the bound of the cache may take a kernel that is not loaded yet
                    build = functools.partial(toolchain.build_kernel, self._prepared.text, check=check, debug=debug)
                    try:
                        found = self._binaries[key] = toolchain.loaded(build, _Binary)
                    except BuildError as e:
                        raise self._compile_error(e) from None
        return found

    def _compile_error(self, e: BuildError) -> BuildError:
        if not self._prepared.found:
            from cukern.jit.signature import kernel_names

            names = ", ".join(kernel_names(self._text)) or "none"
            return BuildError(f"no kernel {self.name!r} in {self.filename} (kernels found: {names})", e.log)
        found = re.findall(r"^(.*?):(\d+):(?:\d+:)? (?:fatal )?error: (.*)$", e.log, re.M)
        # where the text is well, what is wrong is the name, which the exports repeat
        shown = [x for x in found if not _ours(x[0])] or [x for x in found if x[0] == source.EXPORTS] or found
        told = dict.fromkeys(f"its name: {m}" if f == source.EXPORTS else f"{f}:{n}: {m}" for f, n, m in shown)
        lines = "\n".join([*told][:10])
        compiler = toolchain.find_compiler().name
        return BuildError(f"kernel {self.name!r} does not compile for emulation ({compiler}):\n{lines or e.log}", e.log)

    def parameter_name(self, i: int) -> str:
        """Name of parameter `i` in the source."""
        names = self._prepared.parameters
        return names[i] if i < len(names) else f"argument {i}"

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        shared_mem: int = 0,
        cooperative: bool = False,
    ) -> None:
        """Launch and wait.

        Parameters
        ----------
        grid, block : sequence of 1 to 3 int
            As for a CUDA launch.
        args : sequence
            NumPy arrays for pointers (None or a zero-size array is a null pointer), NumPy or Python scalars.
        shared_mem : int
            Bytes of dynamic shared memory.
        cooperative : bool
            All blocks run at the same time and may use a grid barrier.

        Raises
        ------
        LaunchError, ArgumentError
            For a launch that no GPU would accept.
        KernelFault
            For a fault while the kernel ran; see the subclasses.
        """
        settings = current()
        binary = self.binary(settings.check)
        record = _native.Launch(thunk=binary.thunk, tls_anchor=binary.anchor)
        record.fault.argument = -1
        record.grid[:], record.block[:] = self._extent(grid, "grid"), self._extent(block, "block")
        self._check_extents(record, shared_mem, cooperative, binary.static_bytes)
        arguments = Arguments(self.name, binary.params, self.parameter_name, args)
        arguments.relocate(settings.check)
        record.args = C.addressof(arguments.pointers)
        record.ranges, record.range_count = arguments.ranges, len(arguments.arrays)
        record.dynamic_bytes, record.dynamic_align = shared_mem, max(16, self._prepared.dynamic_align)
        record.guards, record.guard_count = binary.guards, len(binary.guards)
        record.cooperative, record.check = int(cooperative), int(settings.check)
        self._apply(record, settings)
        printed = C.create_string_buffer(_PRINT_BYTES) if self._prepared.prints else None
        if printed is not None:
            record.print_buffer, record.print_capacity = C.addressof(printed), _PRINT_BYTES
        unseen: Exception | None = None
        try:
            _native.launch(record)
        finally:
            overrun = arguments.release()
            if printed is not None and record.print_used:
                text = C.string_at(printed, record.print_used).decode(errors="replace")
                if record.print_lost:
                    text += f"[{record.print_lost} more bytes of device printf were dropped]\n"
                unseen = _show(text)
        self.stats = {"switches": record.switches, "collectives": record.collectives, "shared": binary.static_bytes}
        if record.fault.kind:
            raise self._explain(record, binary, arguments)
        if overrun:
            raise self._after(OutOfBounds, arguments, *overrun, _OVERRUN)
        if arguments.changed:
            raise self._after(WriteToReadOnly, arguments, *arguments.changed, _CHANGED)
        if unseen is not None:  # said last: it must not hide a fault
            warnings.warn(
                f"kernel {self.name}: what it printed cannot be written to sys.stdout ({unseen})",
                RuntimeWarning,
                stacklevel=3,
            )

    @staticmethod
    def _apply(record: _native.Launch, settings: Settings) -> None:
        record.order = ORDERS.index(settings.order)
        record.seed, record.workers, record.timeout = settings.seed, settings.workers, settings.timeout

    def _extent(self, value: Sequence[int], what: str) -> tuple[int, int, int]:
        try:
            values = tuple(int(v) for v in value)
        except TypeError:
            raise ArgumentError(f"{what}={value!r}: expected a tuple of 1 to 3 integers") from None
        if not 1 <= len(values) <= 3:
            raise LaunchError(f"{what}={values}: expected 1 to 3 integers")
        x, y, z = (*values, 1, 1)[:3]
        return x, y, z

    def _check_extents(self, record: _native.Launch, shared_mem: int, cooperative: bool, static: int) -> None:
        grid, block = tuple(record.grid), tuple(record.block)
        threads = block[0] * block[1] * block[2]
        if not 0 < threads <= 1024 or block[2] > 64:
            raise LaunchError(f"kernel {self.name}: block={block} is not 1 to 1024 threads (and z at most 64)")
        if min(grid) < 1 or grid[0] > 2**31 - 1 or max(grid[1:]) > 65535:
            raise LaunchError(f"kernel {self.name}: grid={grid} is outside 1..2**31-1, 1..65535, 1..65535")
        if static > STATIC_SHARED_LIMIT:
            raise LaunchError(
                f"kernel {self.name} has {static} bytes of static shared memory, the limit is {STATIC_SHARED_LIMIT}: "
                "use extern __shared__ and shared_mem="
            )
        if not 0 <= shared_mem <= SHARED_LIMIT - static:
            limit = SHARED_LIMIT - static
            raise LaunchError(f"kernel {self.name}: shared_mem={shared_mem} is outside 0..{limit} bytes")
        if cooperative and grid[0] * grid[1] * grid[2] > 256:
            raise LaunchError(f"kernel {self.name}: a cooperative launch of more than 256 blocks is not emulated")

    def _explain(self, record: _native.Launch, binary: _Binary, arguments: Arguments) -> KernelFault:
        fault = record.fault
        where: list[symbols.Position] = []
        if fault.line:
            where = [(fault.file.decode(errors="replace"), fault.line)]
        elif fault.pc:
            # a return address is one past the call
            found = symbols.positions(binary.path, fault.pc - record.load_address - 1)
            where = [p for p in found if not _ours(p[0])]
        message = fault.text.decode(errors="replace")
        argument = shape = index = None
        if fault.argument >= 0:
            argument, shape = self.parameter_name(fault.argument), arguments.arrays[fault.argument].shape
            index, detail = arguments.locate(fault.argument, fault.address)
            message += f": argument {argument!r} {detail}"
        elif fault.shared == _native.DYNAMIC_SHARED and fault.kind != 1:  # an overrun says so itself
            message += f": dynamic shared memory at byte {fault.offset}"
        elif fault.shared == _native.STATIC_SHARED:
            v = next((v for v in binary.shared if v.offset <= fault.offset < v.offset + v.size), None)
            message += f": shared variable {v.name!r} at byte {fault.offset - v.offset} of {v.size}" if v else ""
        block = tuple(fault.block) if fault.has_block else None
        thread = tuple(fault.thread) if fault.has_thread else None
        text = f"kernel {self.name}: {message}"
        if where:
            text += f"; at {where[0][0]}:{where[0][1]}"
            text += "".join(f", called from {f}:{n}" for f, n in where[1:4])
        if block is not None:
            text += f"; block {block}"
        if thread is not None:
            text += f", thread {thread}"
        return _native.FAULTS.get(fault.kind, KernelFault)(
            text,
            kernel=self.name,
            file=where[0][0] if where else "",
            line=where[0][1] if where else 0,
            callers=tuple(where[1:]),
            block=block,
            thread=thread,
            argument=argument,
            shape=shape,
            index=index,
        )

    def _after(self, fault: type[KernelFault], arguments: Arguments, i: int, address: int, text: str) -> KernelFault:
        """A fault of argument `i` that was found after the launch. `text`: with {name} and {place} of the argument."""
        name = self.parameter_name(i)
        index, place = arguments.locate(i, address)
        return fault(
            f"kernel {self.name}: " + text.format(name=repr(name), place=place),
            kernel=self.name,
            argument=name,
            shape=arguments.arrays[i].shape,
            index=index,
        )


def _ours(file: str) -> bool:
    """Whether a file is the emulator's, which means nothing to the user."""
    return file == source.EXPORTS or file.startswith(str(toolchain.INCLUDE))


_kernels: dict[tuple[str, str, str], EmulatedKernel] = {}


def runtime_kernel(text: str, name: str, *, filename: str = "<source>") -> EmulatedKernel:
    """The kernel `name` (a name expression such as ``"rms_norm<half, 256>"``) of an assembled source text.

    Memoised: the same text and name give the same object.
    """
    key = (text, name, filename)
    found = _kernels.get(key)
    if found is None:
        found = _kernels.setdefault(key, EmulatedKernel(text, name, filename))
    return found


def _after_fork() -> None:
    """A kernel that the parent was just building is built by the child itself."""
    for kernel in _kernels.values():
        kernel._lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _show(text: str) -> Exception | None:
    """Write what a kernel printed; why it cannot be: closed, full, an encoding that lacks a letter, no file at all."""
    try:
        print(text, end="")  # nothing where sys.stdout is None, as in a process without a console
    except Exception as error:
        return error
    return None
