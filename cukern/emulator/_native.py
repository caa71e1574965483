"""The runtime library as seen from Python: structures of runtime/state.h, loading, and one launch."""

from __future__ import annotations

import ctypes as C
import functools
import os
import threading

from . import errors, toolchain

FAULTS: dict[int, type[errors.KernelFault]] = {  # enum FaultKind
    1: errors.OutOfBounds,
    2: errors.WriteToReadOnly,
    3: errors.SharedRace,
    4: errors.UninitialisedShared,
    5: errors.BarrierDivergence,
    6: errors.Deadlock,
    7: errors.Misaligned,
    8: errors.WrongMask,
    9: errors.StackOverflow,
    10: errors.Timeout,
    11: errors.ArithmeticFault,
    12: errors.DeviceAssert,
    13: errors.KernelFault,
}


DYNAMIC_SHARED, STATIC_SHARED = 1, 2  # enum SharedKind


class Range(C.Structure):
    """Memory that a kernel may use."""

    _fields_ = (
        ("lo", C.c_uint64),
        ("hi", C.c_uint64),
        ("base", C.c_uint64),
        ("read_only", C.c_int32),
        ("argument", C.c_int32),
    )


class Fault(C.Structure):
    """The first fault of a launch."""

    _fields_ = (
        ("kind", C.c_int32),
        ("line", C.c_int32),
        ("write", C.c_int32),
        ("bytes", C.c_int32),
        ("argument", C.c_int32),
        ("has_block", C.c_int32),
        ("has_thread", C.c_int32),
        ("shared", C.c_int32),
        ("block", C.c_uint32 * 3),
        ("thread", C.c_uint32 * 3),
        ("pc", C.c_uint64),
        ("address", C.c_uint64),
        ("offset", C.c_int64),
        ("file", C.c_char * 256),
        ("text", C.c_char * 1024),
    )


class Launch(C.Structure):
    """One launch: what to run, how, and what came of it."""

    _fields_ = (
        ("thunk", C.c_void_p),
        ("args", C.c_void_p),
        ("tls_anchor", C.c_void_p),
        ("grid", C.c_uint32 * 3),
        ("block", C.c_uint32 * 3),
        ("dynamic_bytes", C.c_uint64),
        ("dynamic_align", C.c_uint64),
        ("cooperative", C.c_int32),
        ("check", C.c_int32),
        ("order", C.c_int32),
        ("workers", C.c_int32),
        ("seed", C.c_uint64),
        ("timeout", C.c_double),
        ("ranges", C.POINTER(Range)),
        ("range_count", C.c_int32),
        ("guard_count", C.c_int32),
        ("guards", C.POINTER(C.c_uint32)),
        ("fault", Fault),
        ("print_buffer", C.c_void_p),
        ("print_capacity", C.c_uint64),
        ("print_used", C.c_uint64),
        ("print_lost", C.c_uint64),
        ("switches", C.c_uint64),
        ("collectives", C.c_uint64),
        ("static_bytes", C.c_uint64),
        ("load_address", C.c_uint64),
        ("state", C.c_void_p),
    )


class ParamInfo(C.Structure):
    """One kernel parameter as the compiler saw it (struct ParamInfo of include/emu/launch.h)."""

    _fields_ = (
        ("kind", C.c_char),
        ("pointee", C.c_char),
        ("is_const", C.c_uint8),
        ("size", C.c_uint32),
        ("pointee_size", C.c_uint32),
    )


_one_at_a_time = threading.Lock()  # the runtime holds the process's signal handlers during a launch


def _after_fork() -> None:
    """A child has none of the parent's threads, and so nobody who would give a lock back."""
    global _one_at_a_time
    _one_at_a_time = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


@functools.cache
def runtime() -> C.CDLL:
    """The runtime library, built on first use; one for the process, even if the cache's folder changes."""
    # global: kernels find its functions by name
    library = toolchain.loaded(toolchain.build_runtime, lambda path: C.CDLL(str(path), mode=C.RTLD_GLOBAL))
    library.emu_start.argtypes = [C.POINTER(Launch)]
    library.emu_start.restype = None
    library.emu_map_guarded.argtypes = [C.c_uint64]
    library.emu_map_guarded.restype = C.c_void_p
    library.emu_unmap_guarded.argtypes = [C.c_void_p, C.c_uint64]
    library.emu_unmap_guarded.restype = None
    library.emu_wait.argtypes = [C.POINTER(Launch), C.c_double, C.c_int]
    return library


def launch(record: Launch) -> None:
    """Run a launch to its end; Ctrl-C stops it."""
    library = runtime()
    with _one_at_a_time:
        pointer = C.byref(record)
        library.emu_start(pointer)
        try:
            while not library.emu_wait(pointer, 0.2, 0):
                pass
        except BaseException:
            while not library.emu_wait(pointer, 0.2, 1):
                pass
            raise


_guarded: dict[int, list[int]] = {}  # free mappings between guard pages, by size


def take_guarded(size: int) -> int:
    """Address of `size` bytes (a multiple of the page size) between two inaccessible pages."""
    free = _guarded.get(size)
    if free:
        return free.pop()
    library = runtime()
    address = library.emu_map_guarded(size)
    if not address:
        raise MemoryError(f"cannot map {size} bytes for an emulated kernel")
    return int(address)


def give_guarded(address: int, size: int) -> None:
    """Give a mapping back; a few of each size are kept for the next launch."""
    free = _guarded.setdefault(size, [])
    if len(free) < 8 and size <= 1 << 24:
        free.append(address)
    else:
        runtime().emu_unmap_guarded(address, size)
