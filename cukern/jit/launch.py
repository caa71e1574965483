"""From Python arguments to one cuLaunchKernelEx call.

A kernel's argument conversion is written out as Python code once (as dataclasses do), so a launch is: check each
argument's type, one ``struct.pack_into``, one call through ctypes. A few microseconds in all.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import driver
from .signature import Parameter, Signature

# NumPy dtype name -> struct format; bfloat16 and float8 go by their bits
_FORMATS = {
    "bool": "?",
    "int8": "b",
    "uint8": "B",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "uint64": "Q",
    "float16": "e",
    "float32": "f",
    "float64": "d",
    "bfloat16": "H",
    "float8_e4m3fn": "B",
    "float8_e5m2": "B",
}
_PTX_SCALARS = {
    "u8": "uint8",
    "s8": "int8",
    "u16": "uint16",
    "s16": "int16",
    "u32": "",
    "s32": "int32",
    "f32": "float32",
    "f64": "float64",
}


class HostArray(Exception):
    """Signal: a NumPy array stands where the kernel wants a pointer, so this launch is for the emulator."""


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype of a NumPy or ml_dtypes name."""
    if name.startswith(("bfloat", "float8")):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def describe_value(value: object) -> str:
    """A short account of an argument for error messages."""
    if value is None:
        return "None"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if dtype is not None and shape is not None:
        kind = "array" if shape != () or not isinstance(value, np.generic) else "scalar"
        where = "NumPy " if isinstance(value, (np.ndarray, np.generic)) else ""
        return f"a {where}{dtype} {kind}" + (f" of shape {tuple(shape)}" if kind == "array" else "")
    return f"{type(value).__name__} {value!r}" if isinstance(value, (bool, int, float)) else f"a {type(value).__name__}"


def check_layout(where: str, array: Any) -> None:
    """Refuse an array whose elements are not what lies from its first address on, whatever their type.

    Raises
    ------
    TypeError
        A masked array, or one of the other byte order.
    ValueError
        An array that is not contiguous.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{where}: a masked array, and no kernel sees the mask; pass its .filled(...)")
    if not array.dtype.isnative:
        raise TypeError(
            f"{where}: expected the machine's byte order, got {describe_value(array)}; "
            "pass .astype(dtype.newbyteorder('=')) of it"
        )
    if not array.flags.c_contiguous:
        module = "numpy" if isinstance(array, np.ndarray) else "cupy"
        raise ValueError(
            f"{where}: the array is not contiguous (shape {array.shape}, strides {array.strides}) and a kernel sees "
            f"only its first address; pass {module}.ascontiguousarray(...) of it"
        )


class Arguments:
    """Checks and conversions of one kernel's arguments.

    Parameters
    ----------
    kernel : str
        For messages.
    parameters : sequence of Parameter
        In order.
    """

    def __init__(self, kernel: str, parameters: Sequence[Parameter]) -> None:
        self.kernel = kernel
        self.parameters = tuple(parameters)
        self.dtypes = tuple(dtype_of(p.dtype) if p.dtype else None for p in self.parameters)

    def wrong(self, i: int, expected: str, value: object, note: str = "") -> TypeError:
        """The TypeError for argument `i`."""
        p = self.parameters[i]
        tail = f" ({note})" if note else ""
        return TypeError(
            f"kernel {self.kernel!r}, parameter {p.name!r} ({p.c_type}): expected {expected}, "
            f"got {describe_value(value)}{tail}"
        )

    def wrong_count(self, given: int) -> TypeError:
        names = ", ".join(p.name for p in self.parameters)
        return TypeError(f"kernel {self.kernel!r} takes {len(self.parameters)} arguments ({names}), got {given}")

    def check_array(self, i: int, array: Any) -> None:
        """Dtype and layout of an array (CuPy's or NumPy's) for pointer parameter `i`."""
        dtype = self.dtypes[i]
        if dtype is not None and array.dtype != dtype and not (dtype.itemsize == 1 and array.dtype.itemsize == 1):
            raise self.wrong(i, f"a {dtype} array", array)
        check_layout(f"kernel {self.kernel!r}, parameter {self.parameters[i].name!r}", array)

    def scalar(self, i: int, value: Any) -> Any:
        """A Python or NumPy scalar for scalar parameter `i`, as struct.pack takes it."""
        dtype = self.dtypes[i]
        assert dtype is not None  # a scalar parameter always has one
        expected = f"{dtype}"
        if isinstance(value, np.ndarray) and value.ndim == 0:
            value = value[()]
        if isinstance(value, np.generic):
            if value.dtype != dtype:
                raise self.wrong(i, expected, value, f"convert it with numpy.{dtype}(...) or pass a Python number")
            if dtype.kind in "V" or dtype.name.startswith(("bfloat", "float8")):
                return int(np.asarray(value).view(f"u{dtype.itemsize}"))
            return value.item()
        if isinstance(value, bool):
            if dtype.kind not in "biu":
                raise self.wrong(i, expected, value)
            return value
        if isinstance(value, int):
            if dtype.kind == "b":
                raise self.wrong(i, expected, value)
            if dtype.kind in "iu":
                limits = np.iinfo(dtype)
                if not limits.min <= value <= limits.max:
                    raise self.wrong(i, f"{expected} ({limits.min} to {limits.max})", value)
                return value
            try:
                value = float(value)
            except OverflowError:
                raise self.wrong(i, f"{expected} (at most {np.finfo(dtype).max})", value) from None
        if isinstance(value, float) and dtype.kind not in "biu":
            if dtype.name.startswith(("bfloat", "float8")):
                return int(np.asarray(value, np.float32).astype(dtype).view(f"u{dtype.itemsize}"))
            finite = np.isfinite(value)
            with np.errstate(over="ignore"):
                rounded = dtype.type(value)
            if finite and not np.isfinite(rounded):
                raise self.wrong(i, f"{expected} (at most {np.finfo(dtype).max})", value)
            return float(rounded)
        raise self.wrong(i, expected, value)

    def opaque(self, i: int, value: Any, size: int, *, number: bool = False) -> bytes:
        """The bytes of a by-value struct: bytes, or a NumPy scalar or one-element array of that size.

        ``number`` says that the compiler sees an integer there, such as an enum: a Python int will do.
        """
        if number and type(value) is int:
            if not -(1 << (8 * size - 1)) <= value < 1 << 8 * size:
                raise self.wrong(i, f"an integer of {size} bytes", value)
            data = value.to_bytes(size, "little", signed=value < 0)
        elif isinstance(value, (bytes, bytearray, memoryview)):
            data = bytes(value)
        elif isinstance(value, (np.generic, np.ndarray)):
            data = np.ascontiguousarray(value).tobytes()
        elif isinstance(value, ctypes.Structure):
            data = bytes(value)
        else:
            raise self.wrong(i, f"{size} bytes by value (bytes, a NumPy scalar or a structured NumPy value)", value)
        if len(data) != size:
            raise self.wrong(i, f"{size} bytes by value", value, f"it has {len(data)} bytes")
        return data

    def host(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Arguments for the emulator: NumPy arrays, scalars of the exact C type, None for null."""
        if len(args) != len(self.parameters):
            raise self.wrong_count(len(args))
        out: list[Any] = []
        for i, (p, value) in enumerate(zip(self.parameters, args)):
            if p.kind == "pointer":
                if value is not None and not isinstance(value, np.ndarray):
                    raise self.wrong(i, "a NumPy array (emulation is active)", value)
                if value is not None:
                    self.check_array(i, value)
                out.append(value if value is not None and value.size else None)
            elif p.kind == "scalar":
                dtype = self.dtypes[i]
                assert dtype is not None
                packed = self.scalar(i, value)
                bits = dtype.name.startswith(("bfloat", "float8"))
                out.append(np.array(packed, f"u{dtype.itemsize}").view(dtype)[()] if bits else dtype.type(packed))
            else:
                out.append(value)
        return tuple(out)


def parameters_from_layout(layout: Sequence[tuple[int, int, str]]) -> list[Parameter]:
    """Parameters where the source was not understood: by the compiler's sizes alone.

    Eight bytes may be a pointer or a number, so such a parameter is opaque: an array, None, or eight bytes by value.
    """
    return [
        Parameter(
            f"argument {i}",
            f"{size} bytes",
            "scalar" if _PTX_SCALARS.get(kind) else "opaque",
            _PTX_SCALARS.get(kind, ""),
        )
        for i, (_, size, kind) in enumerate(layout)
    ]


def checked_arguments(name: str, signature: Signature, layout: Sequence[tuple[int, int, str]]) -> Arguments:
    """The source's parameter types where they agree with the compiler's sizes, else the compiler's sizes alone."""
    parameters = signature.parameters
    if parameters is not None and len(parameters) == len(layout):
        # a type that the source does not explain (one dependent on a template argument) may be plain to the compiler
        parameters = tuple(
            Parameter(p.name, p.c_type, "scalar", _PTX_SCALARS[kind])
            if p.kind == "opaque" and _PTX_SCALARS.get(kind)
            else p
            for p, (_, _, kind) in zip(parameters, layout)
        )
        dtypes = Arguments(name, parameters)
        sizes = [
            8 if p.kind == "pointer" else d.itemsize if d is not None else size
            for p, d, (_, size, _) in zip(parameters, dtypes.dtypes, layout)
        ]
        if sizes == [size for _, size, _ in layout]:
            return dtypes
    return Arguments(name, parameters_from_layout(layout))


def block_struct(arguments: Arguments, layout: Sequence[tuple[int, int, str]]) -> struct.Struct:
    """The parameter block: addresses as Q, scalars by their type, structs as bytes."""
    formats, end = "=", 0
    for p, (offset, size, _) in zip(arguments.parameters, layout):
        formats += f"{offset - end}x" if offset > end else ""
        end = offset + size
        formats += "Q" if p.kind == "pointer" else _FORMATS[p.dtype] if p.kind == "scalar" else f"{size}s"
    return struct.Struct(formats)


def compile_packer(
    arguments: Arguments, layout: Sequence[tuple[int, int, str]], ndarray: Any, as_array: Callable[[Any], Any]
) -> Callable[[Sequence[Any], Any], int]:
    """Write out the conversion of one kernel's arguments.

    Parameters
    ----------
    arguments : Arguments
    layout : sequence of (offset, size, PTX type)
        Where each parameter lies.
    ndarray : type
        CuPy's array class.
    as_array : callable
        Turns a foreign device array into `ndarray` without a copy, or returns None if it is none.

    Returns
    -------
    callable
        ``pack(args, buffer) -> device``: fills the parameter block, returns the device of the arrays, -1 if there
        are none.
    """
    values, lines = [], []
    for i, (p, (_, size, kind)) in enumerate(zip(arguments.parameters, layout)):
        a = f"a{i}"
        if p.kind == "pointer":
            # ndarray.flags makes an object each time; the attribute behind it is seven times faster
            test = f"not {a}._c_contiguous" if hasattr(ndarray, "_c_contiguous") else f"not {a}.flags.c_contiguous"
            if arguments.dtypes[i] is not None:
                test = f"{a}.dtype != d{i} or {test}"
            lines += [
                f"    if type({a}) is not ndarray: {a} = foreign({i}, {a})",
                f"    if {a} is None: p{i} = 0",
                "    else:",
                f"        if {test}: check_array({i}, {a})",
                f"        m = {a}.data",
                f"        p{i} = m.ptr if {a}.size else 0",
                "        if device < 0: device = m.device_id",
                f"        elif device != m.device_id: mixed({i}, device, m.device_id)",
            ]
            values.append(f"p{i}")
        elif p.kind == "scalar":
            fmt = _FORMATS[p.dtype]
            fast = "int" if fmt in "iIqQ" else "float" if fmt in "fd" else ""
            guard = f"if type({a}) is not {fast}: " if fast else ""
            lines.append(f"    {guard}{a} = scalar({i}, {a})")
            values.append(a)
        else:
            lines.append(f"    {a} = by_value({i}, {a}, {size}, {kind!r})")
            values.append(a)
    names = "".join(f"a{i}, " for i in range(len(layout)))
    body = [
        "def pack(args, buffer):",
        f"    if len(args) != {len(layout)}: raise wrong_count(len(args))",
        *([f"    {names}= args"] if layout else []),
        "    device = -1",
        *lines,
        "    try:",
        f"        pack_into(buffer, 0, {', '.join(values)})" if values else "        pass",
        "    except (StructError, OverflowError):",
        f"        explain(({names}))",
        "        raise",
        "    return device",
    ]

    def foreign(i: int, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, np.ndarray):
            raise HostArray
        if not isinstance(value, (bool, int, float, np.generic, str, bytes)):
            array = as_array(value)
            if array is not None:
                return array
        raise arguments.wrong(i, "a CuPy array or None", value)

    def by_value(i: int, value: Any, size: int, kind: str) -> bytes:
        if kind == "struct":  # also eight bytes of it are no pointer
            return arguments.opaque(i, value, size)
        if size == 8 and (value is None or type(value) is ndarray):
            if value is None:
                return bytes(8)
            arguments.check_array(i, value)
            return struct.pack("=Q", value.data.ptr if value.size else 0)
        return arguments.opaque(i, value, size, number=size < 8)

    def mixed(i: int, first: int, second: int) -> None:
        raise ValueError(
            f"kernel {arguments.kernel!r}, parameter {arguments.parameters[i].name!r}: the array is on device "
            f"{second}, an earlier one on device {first}; all must be on one device"
        )

    def explain(values: tuple[Any, ...]) -> None:
        for i, p in enumerate(arguments.parameters):
            if p.kind == "scalar" and arguments.dtypes[i] is not None:
                arguments.scalar(i, values[i])

    scope: dict[str, Any] = {
        "ndarray": ndarray,
        "foreign": foreign,
        "check_array": arguments.check_array,
        "scalar": arguments.scalar,
        "by_value": by_value,
        "mixed": mixed,
        "explain": explain,
        "wrong_count": arguments.wrong_count,
        "pack_into": block_struct(arguments, layout).pack_into,
        "StructError": struct.error,
        **{f"d{i}": d for i, d in enumerate(arguments.dtypes)},
    }
    exec(compile("\n".join(body), f"<arguments of {arguments.kernel}>", "exec"), scope)
    pack: Callable[[Sequence[Any], Any], int] = scope["pack"]
    return pack


# CUlaunchConfig: grid, block, dynamic shared memory, stream, attributes, number of attributes
_CONFIG = struct.Struct("=7I4xQQI4x")
_ATTRIBUTE_BYTES = 72


class Slot:
    """The memory of one launch: parameter block, pointers into it, CUlaunchConfig.

    A slot is taken from a pool for the time of a launch, so that threads do not write into each other's.
    """

    __slots__ = ("_config", "_pointers", "config_address", "configure", "params", "pointers_address")

    def __init__(self, layout: Sequence[tuple[int, int, str]]) -> None:
        size = max((offset + size for offset, size, _ in layout), default=0)
        # 64-byte aligned, which a tensor map wants
        raw = ctypes.create_string_buffer(size + 64)
        self.params = (ctypes.c_char * max(size, 1)).from_buffer(raw, -ctypes.addressof(raw) % 64)
        base = ctypes.addressof(self.params)
        self._pointers = (ctypes.c_void_p * max(len(layout), 1))(*(base + offset for offset, _, _ in layout))
        self.pointers_address = ctypes.addressof(self._pointers)
        self._config = ctypes.create_string_buffer(_CONFIG.size)
        self.config_address = ctypes.addressof(self._config)
        #: configure(grid x, y, z, block x, y, z, shared_mem, stream, attributes' address, their number)
        self.configure: Callable[..., None] = functools.partial(_CONFIG.pack_into, self._config, 0)


def attributes(cooperative: bool, cluster: tuple[int, int, int] | None, pdl: bool) -> list[bytes]:
    """CUlaunchAttribute values as bytes: an id padded to eight bytes, then a union of 64."""
    out = []
    if cooperative:
        out.append(struct.pack("=I4xi", driver.COOPERATIVE, 1).ljust(_ATTRIBUTE_BYTES, b"\0"))
    if cluster is not None:
        out.append(struct.pack("=I4x3I", driver.CLUSTER_DIMENSION, *cluster).ljust(_ATTRIBUTE_BYTES, b"\0"))
    if pdl:
        out.append(struct.pack("=I4xi", driver.PROGRAMMATIC_STREAM_SERIALIZATION, 1).ljust(_ATTRIBUTE_BYTES, b"\0"))
    return out


def check_flag(function: str, name: str, value: Any) -> None:
    """Raise TypeError unless an option is True or False: "no" would count as True."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{function}: {name} must be True or False, got {value!r}")


def dimensions(value: Any, what: str) -> tuple[int, int, int]:
    """A grid or block given as an int or up to three ints.

    Raises
    ------
    TypeError, ValueError
        For anything else, or a negative number.
    """
    try:
        t = tuple(int(n.__index__()) for n in (value if isinstance(value, (tuple, list)) else (value,)))
    except (AttributeError, TypeError):  # a NumPy array has __index__ and refuses
        raise TypeError(f"{what}={value!r}: expected an int or a tuple of up to three ints") from None
    if not 1 <= len(t) <= 3:
        raise ValueError(f"{what}={value!r}: expected one to three sizes")
    if min(t) < 0:
        raise ValueError(f"{what}={value!r}: a size is negative")
    x, y, z = (*t, 1, 1)[:3]
    return x, y, z
