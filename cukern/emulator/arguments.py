"""The arguments of one launch: checked, laid out as the kernel's thunk wants them, and guarded."""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..jit.launch import check_layout
from . import _native
from .errors import ArgumentError

_SCALAR_KINDS = {"i": "iu", "u": "iu", "f": "f", "b": "b"}
_TYPE_NAMES = {"i": "signed integer", "u": "unsigned integer", "f": "floating-point", "b": "bool"}
_CANARY = 0xA5
_ALIGN = 256
# larger arrays are written in place without guard pages when check mode is off: copying them would dominate
_GUARD_LIMIT = 64 << 20


class Param(NamedTuple):
    """One kernel parameter: kind of the value (p, i, u, f, b, s), and for a pointer what it points to."""

    kind: str
    size: int
    pointee: str
    pointee_size: int
    is_const: bool


class Arguments:
    """Arguments of a launch.

    ``pointers`` is what the thunk takes: the address of every value. ``arrays`` maps the position of an array argument
    to the array, ``ranges`` is the memory that the kernel may use. ``changed``: after `release`, an array that is not
    writeable and was written to all the same, and the first such address (of the copy); else None.
    """

    def __init__(
        self, kernel: str, params: Sequence[Param], parameter_name: Callable[[int], str], args: Sequence[Any]
    ) -> None:
        if len(args) != len(params):
            raise ArgumentError(f"kernel {kernel} takes {len(params)} arguments, {len(args)} given")
        self._kernel, self._params, self._parameter_name = kernel, params, parameter_name
        self.arrays: dict[int, np.ndarray] = {}
        self._bounds: dict[int, tuple[int, int]] = {}
        self._roots: dict[int, int] = {}  # address of the allocation that an array lies in
        self._values = [self._value(i, a) for i, a in enumerate(args)]
        self.pointers = (C.c_void_p * max(1, len(args)))(*(C.addressof(v) for v in self._values))
        self.ranges = (_native.Range * max(1, len(self.arrays)))()
        for k, i in enumerate(self.arrays):
            lo, hi = self._bounds[i]
            self.ranges[k] = _native.Range(lo, hi, self._roots[i], int(self._read_only(i)), i)
        self._guards: list[_Guard] = []
        self.changed: tuple[int, int] | None = None

    def _refuse(self, text: str) -> ArgumentError:
        return ArgumentError(f"kernel {self._kernel}: {text}")

    def _value(self, i: int, a: Any) -> Any:
        p = self._params[i]
        name = self._parameter_name(i)
        if isinstance(a, (np.ndarray, np.generic)):
            check_layout(f"kernel {self._kernel!r}, parameter {name!r}", a)
        if p.kind == "p":
            return self._pointer(i, name, a, p)
        if isinstance(a, np.ndarray) and a.ndim:
            raise self._refuse(f"{name} is passed by value, got an array of shape {a.shape}")
        if p.kind == "s":
            return self._object(name, a, p.size)
        if isinstance(a, (bool, int, float)) and not isinstance(a, np.generic):
            a = self._convert(name, a, p)
        dtype = getattr(a, "dtype", None)
        if dtype is None or dtype.itemsize != p.size or dtype.kind not in _SCALAR_KINDS[p.kind]:
            raise self._refuse(
                f"{name} is a {p.size}-byte {_TYPE_NAMES[p.kind]} value, got {dtype or type(a).__name__}: "
                "a GPU would read the wrong bytes"
            )
        return C.create_string_buffer(a.tobytes(), p.size)

    def _object(self, name: str, a: Any, size: int) -> Any:
        """A struct by value: a NumPy scalar (half, a record), bytes or a ctypes structure of the same size."""
        if isinstance(a, (np.generic, np.ndarray)):
            data = a.tobytes()
        else:
            data = bytes(a) if isinstance(a, (bytes, bytearray, C.Structure)) else b""
        if len(data) != size:
            raise self._refuse(f"{name} is an object of {size} bytes passed by value, got {a!r}")
        return C.create_string_buffer(data, size)

    def _pointer(self, i: int, name: str, a: Any, p: Param) -> Any:
        if a is None or (isinstance(a, np.ndarray) and a.size == 0):
            return C.c_void_p(0)
        if not isinstance(a, np.ndarray):
            raise self._refuse(f"{name} is a pointer; expected a NumPy array or None, got {type(a).__name__}")
        width = a.dtype.itemsize
        if p.pointee in "iufb" and (width != p.pointee_size or (p.pointee == "f") != (a.dtype.kind == "f")):
            wanted = f"{p.pointee_size}-byte {_TYPE_NAMES[p.pointee]} values"
            raise self._refuse(f"{name} points to {wanted}, got an array of {a.dtype}")
        if p.pointee == "s" and p.pointee_size == 2 and width != 2 and a.dtype.kind != "u":
            raise self._refuse(f"{name} points to 2-byte values, got an array of {a.dtype}")
        self.arrays[i] = a
        self._bounds[i] = np.lib.array_utils.byte_bounds(a)
        root = a
        while isinstance(root.base, np.ndarray):
            root = root.base
        self._roots[i] = _address(root)
        return C.c_void_p(_address(a))

    def _convert(self, name: str, a: bool | int | float, p: Param) -> np.generic:
        dtype = np.dtype("bool" if p.kind == "b" else f"{p.kind}{p.size}")
        if p.kind in "iu" and (isinstance(a, float) or not np.iinfo(dtype).min <= a <= np.iinfo(dtype).max):
            raise self._refuse(f"{name}={a!r} does not fit {dtype}")
        return dtype.type(a)

    def _read_only(self, i: int) -> bool:
        return not self.arrays[i].flags.writeable or self._params[i].is_const

    def relocate(self, check: bool) -> None:
        """Let the kernel work on copies where the arrays themselves will not do.

        Without check mode that is whatever it may write: the copies lie between guard pages, so that an overrun cannot
        corrupt this process. In both modes it is an allocation that is not aligned to 16 bytes (a memory-mapped file),
        because on a GPU it would be. Arrays that overlap share one copy.
        """
        groups: list[list[Any]] = []  # [lo, hi, positions]
        for i in sorted(self.arrays, key=lambda i: self._bounds[i]):
            lo, hi = self._bounds[i]
            if groups and lo < groups[-1][1]:
                groups[-1][1] = max(groups[-1][1], hi)
                groups[-1][2].append(i)
            else:
                groups.append([lo, hi, [i]])
        rows = {i: self.ranges[k] for k, i in enumerate(self.arrays)}  # the array's own elements, not copies
        for lo, hi, members in groups:
            odd = any(self._roots[i] % 16 for i in members)
            written = not all(self._read_only(i) for i in members)
            # not writeable, yet passed for a pointer that is not const: the copy tells whether the kernel writes
            kept = None if written else next((i for i in members if not self._params[i].is_const), None)
            copied = not check and (kept is not None or (written and hi - lo <= _GUARD_LIMIT))
            if not (odd or copied):
                continue
            g = _Guard(lo, hi, self._roots[members[0]], members[-1], written, kept)
            self._guards.append(g)
            for i in members:
                self._values[i].value += g.shift
                rows[i].lo += g.shift
                rows[i].hi += g.shift
                rows[i].base += g.shift

    def release(self) -> tuple[int, int] | None:
        """Copy guarded arrays back. Position and address of an overrun that no guard page stopped, or None."""
        overrun = None
        for g in self._guards:
            address = g.finish()
            if address is not None and overrun is None:
                overrun = (g.argument, address)
            if g.changed is not None and g.kept is not None and self.changed is None:
                self.changed = (g.kept, g.changed)
        return overrun

    def locate(self, i: int, address: int) -> tuple[tuple[int, ...], str]:
        """The element of array `i` at an address (its first index may lie outside), and a phrase that describes it."""
        for g in self._guards:
            address = g.original(address)
        array = self.arrays[i]
        lo, hi = self._bounds[i]
        offset = address - _address(array)
        index: list[int] = []
        flat = offset // array.itemsize
        for n in reversed(array.shape[1:]):
            index.insert(0, flat % n)
            flat //= n
        index.insert(0, flat)
        place = f"element {index}"
        if address >= hi:
            place += f", {address - hi} bytes past the end"
        elif address < lo:
            place += f", {lo - address} bytes before the start"
        return tuple(index), f"({array.dtype}, shape {array.shape}), {place}"


def _address(a: np.ndarray) -> int:
    return int(a.__array_interface__["data"][0])


class _Guard:
    """A copy of the memory lo..hi that ends at an inaccessible page, with a pattern in the gaps."""

    def __init__(self, lo: int, hi: int, root: int, argument: int, written: bool, kept: int | None) -> None:
        self.argument = argument
        self.kept = kept  # an argument whose memory must not change
        self.changed: int | None = None
        self._written = written
        self._lo, self._size = lo, hi - lo
        self._capacity = (self._size + _ALIGN + 4095) // 4096 * 4096
        self._map = _native.take_guarded(self._capacity)
        end = self._map + self._capacity
        offset = (lo - root) % _ALIGN  # as if the allocation were aligned like one on a GPU
        self._start = ((end - self._size - offset) & -_ALIGN) + offset
        self.shift = self._start - lo
        C.memset(self._map, _CANARY, self._start - self._map)
        C.memset(self._start + self._size, _CANARY, end - self._start - self._size)
        C.memmove(self._start, lo, self._size)

    def original(self, address: int) -> int:
        inside = self._map - 4096 <= address < self._map + self._capacity + 4096
        return address - self.shift if inside else address

    def finish(self) -> int | None:
        """Copy back and release; the address (of the copy) of the first damaged byte of the pattern, if any."""
        if self._written:
            C.memmove(self._lo, self._start, self._size)
        elif self.kept is not None:
            before, now = (np.frombuffer(C.string_at(at, self._size), np.uint8) for at in (self._lo, self._start))
            self.changed = self._start + int(np.argmax(before != now)) if (before != now).any() else None
        damaged = None
        after = self._start + self._size
        for at, n in ((after, self._map + self._capacity - after), (self._map, self._start - self._map)):
            bytes_ = np.frombuffer(C.string_at(at, n), np.uint8)
            wrong = np.flatnonzero(bytes_ != _CANARY)
            if wrong.size and damaged is None:
                # the byte next to the array is the most telling one
                damaged = at + int(wrong[0] if at == after else wrong[-1])
        _native.give_guarded(self._map, self._capacity)
        return damaged
