"""What every operator does first: find where its arrays live, and check them before anything is launched.

CuPy arrays (and anything with ``__cuda_array_interface__`` or DLPack on a GPU) run the CUDA kernel, NumPy arrays run
the reference, or the emulated CUDA kernel while emulation is active.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

from cukern.jit import devices as jit_devices

__all__ = [
    "BFLOAT16",
    "CTYPES",
    "FLOAT16",
    "FLOAT32",
    "Array",
    "Place",
    "as_dtype",
    "as_rows",
    "broadcast_rows",
    "check_apart",
    "check_dtype",
    "check_out",
    "check_shape",
    "contiguous",
    "place_arrays",
    "pointer",
]

Array = Any
"""A NumPy or CuPy array (CuPy may be absent, so it cannot be named in a type)."""

FLOAT16 = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)

CTYPES = {FLOAT16: "half", BFLOAT16: "bf16", FLOAT32: "float"}
"""NumPy dtype -> the name of the type in kernels_src/common/types.cuh."""

_ARRAY = "a CuPy or NumPy array (or offer __cuda_array_interface__ or DLPack)"

Kind = Literal["cuda", "emulated", "reference"]


@dataclass(frozen=True)
class Place:
    """Where an operator runs: ``kind`` and the array module ``xp`` (cupy or numpy)."""

    kind: Kind
    xp: Any

    def empty(self, shape: Sequence[int] | int, dtype: np.dtype) -> Array:
        """Uninitialised array; under emulation its bytes are all ones (NaN, -1), so that an unwritten element shows."""
        out = self.xp.empty(shape, dtype)
        if self.kind == "emulated" and out.size:
            out.reshape(-1).view(np.uint8)[...] = 255
        return out


def _emulating() -> bool:
    module = sys.modules.get("cukern.emulator")
    if module is None and os.environ.get("CUKERN_EMULATE", "") in ("", "0"):
        return False
    from cukern import emulator

    return emulator.active()


def _to_array(function: str, name: str, value: Any, wanted: str = _ARRAY) -> tuple[Array, bool]:
    """The value as an array, and whether it lives on a GPU; ``wanted`` is what messages say that it must be."""
    if isinstance(value, np.ndarray):
        if isinstance(value, np.ma.MaskedArray):  # no operator looks at a mask
            raise TypeError(f"{function}: {name} is a masked array; pass {name}.filled(...)")
        return value, False
    if isinstance(value, getattr(sys.modules.get("cupy"), "ndarray", ())):  # asking for its interface is slow
        return value, True
    try:
        if hasattr(value, "__cuda_array_interface__"):
            import cupy

            return cupy.asarray(value), True
        if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
            on_gpu = int(value.__dlpack_device__()[0]) in (2, 13)  # kDLCUDA, kDLCUDAManaged
            if on_gpu:
                import cupy

                return cupy.from_dlpack(value), True
            return np.from_dlpack(value), False
    except ImportError:
        raise
    except Exception as error:  # whatever the other library's export, or our import of it, met
        raise TypeError(
            f"{function}: {name} ({type(value).__name__}) cannot be taken over as an array: {error}"
        ) from error
    raise TypeError(f"{function}: {name} must be {wanted}, got {type(value).__name__}")


def place_arrays(function: str, /, **arrays: Any) -> tuple[Place, list[Array]]:
    """Classify the arguments of an operator.

    Parameters
    ----------
    function : str
        Name of the operator, for messages.
    **arrays
        The array arguments by name; None is passed through.

    Returns
    -------
    Place, list
        Where to run, and the arguments as CuPy or NumPy arrays in the order given.

    Raises
    ------
    TypeError
        An argument is no array, or some live on a GPU and some do not.
    ValueError
        The arrays live on different GPUs, or on one that is not the current one.
    """
    converted: list[Array] = []
    on_gpu: list[str] = []
    on_cpu: list[str] = []
    for name, value in arrays.items():
        if value is None:
            converted.append(None)
            continue
        array, gpu = _to_array(function, name, value)
        converted.append(array)
        (on_gpu if gpu else on_cpu).append(name)
    if on_gpu and on_cpu:
        raise TypeError(
            f"{function}: {', '.join(on_gpu)} on the GPU but {', '.join(on_cpu)} on the CPU; "
            "move them to one place (cupy.asarray or cupy.asnumpy)"
        )
    if on_gpu:
        import cupy

        devices = {int(a.data.device_id) for a in converted if a is not None}
        if len(devices) > 1:
            where = ", ".join(f"{n} on {a.data.device_id}" for n, a in zip(arrays, converted) if a is not None)
            raise ValueError(f"{function}: arrays on different GPUs ({where}); copy them to one")
        (device,) = devices
        if device != jit_devices.current_id():  # results would be allocated on the current one
            raise ValueError(
                f"{function}: the arrays are on GPU {device}, but the current one is {jit_devices.current_id()}; "
                f"call it inside 'with cupy.cuda.Device({device}):'"
            )
        return Place("cuda", cupy), converted
    return Place("emulated" if _emulating() else "reference", np), converted


def check_dtype(function: str, name: str, array: Array, allowed: Sequence[np.dtype | type]) -> None:
    """Raise TypeError unless there is an array and its dtype is one of ``allowed``."""
    if array is None:
        raise TypeError(f"{function}: {name} must be an array, got None")
    dtypes = [np.dtype(d) for d in allowed]
    if array.dtype not in dtypes:
        names = ", ".join(d.name for d in dtypes)
        raise TypeError(f"{function}: {name} has dtype {array.dtype}, expected {names}")


def check_shape(function: str, name: str, array: Array, shape: Sequence[int | None]) -> None:
    """Raise ValueError unless the shape matches; None stands for any size. TypeError if there is no array."""
    if array is None:
        raise TypeError(f"{function}: {name} must be an array, got None")
    if len(array.shape) != len(shape) or any(w is not None and g != w for g, w in zip(array.shape, shape)):
        want = ", ".join("any" if s is None else str(s) for s in shape)
        raise ValueError(f"{function}: {name} has shape {tuple(array.shape)}, expected ({want})")


def contiguous(array: Array, place: Place) -> Array:
    """The array itself if C-contiguous and aligned to 16 bytes, else a copy that is: kernels see a base pointer."""
    if array is None:
        return array
    flags = array.flags
    if flags.c_contiguous and (array.size == 0 or pointer(array) % 16 == 0):
        return array
    copy = place.xp.empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def pointer(array: Array) -> int:
    """The address of an array's first element."""
    if isinstance(array, np.ndarray):
        return int(array.__array_interface__["data"][0])
    return int(array.data.ptr)


def check_out(function: str, out: Array, shape: Sequence[int], dtype: np.dtype, *, name: str = "out") -> None:
    """Check an array that a kernel writes: exact shape and dtype, writable, C-contiguous, aligned to 16 bytes."""
    check_shape(function, name, out, shape)
    check_dtype(function, name, out, [dtype])
    if not out.flags.c_contiguous:
        raise ValueError(f"{function}: {name} must be C-contiguous (strides {out.strides}); pass a contiguous array")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError(f"{function}: {name} is read-only")
    if out.size and pointer(out) % 16:
        raise ValueError(f"{function}: {name} must start at a multiple of 16 bytes; pass a freshly allocated array")


def check_apart(function: str, name: str, out: Array, *, same: str = "", **inputs: Array | None) -> None:
    """Refuse a written array that shares memory with an input; ``same`` names one that it may be as a whole.

    Threads read the input while others write. An input that is not contiguous is copied first and is of no concern.
    """
    if out.size == 0:
        return
    begin = pointer(out)
    end = begin + out.nbytes
    for label, array in inputs.items():
        if array is None or array.size == 0 or not array.flags.c_contiguous:
            continue
        start = pointer(array)
        if start < end and begin < start + array.nbytes:
            if label == same and start == begin and array.nbytes == out.nbytes:
                continue
            raise ValueError(
                f"{function}: {name} shares memory with {label}: the kernel writes the one while it reads the other; "
                "pass an array of its own"
            )


def as_dtype(function: str, value: Any) -> np.dtype:
    """The argument ``dtype`` of an operator; TypeError if it names none."""
    try:
        return np.dtype(value)
    except (TypeError, ValueError):
        raise TypeError(f"{function}: dtype is {value!r}, which is no dtype") from None


def as_rows(array: Array) -> tuple[int, int]:
    """(rows, columns) of an array seen as a matrix over its last axis."""
    columns = int(array.shape[-1])
    rows = 1
    for n in array.shape[:-1]:
        rows *= int(n)
    return rows, columns


def broadcast_rows(function: str, name: str, value: Any, rows: int, dtype: np.dtype, place: Place) -> Array:
    """A scalar or an array [rows] of per-row parameters as an array [rows] of ``dtype`` at the place."""
    wanted = f"a number or an array [{rows}]"
    if value is None:
        raise TypeError(f"{function}: {name} must be {wanted}, got None")
    xp = place.xp
    if isinstance(value, (int, float, np.generic)):
        return xp.full(rows, value, dtype)
    array, gpu = _to_array(function, name, value, wanted)
    if gpu != (place.kind == "cuda"):
        if gpu:
            raise TypeError(f"{function}: {name} lives on the GPU but the other arrays on the CPU")
        array = xp.asarray(array)
    if array.ndim == 0:
        return xp.full(rows, array, dtype)
    check_shape(function, name, array, (rows,))
    return xp.ascontiguousarray(array.astype(dtype, copy=False))
