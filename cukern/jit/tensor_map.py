"""Tensor maps: what the copy engine of compute capability 9.0 (TMA) knows about an array in GPU memory."""

from __future__ import annotations

import ctypes
import functools

from . import driver

__all__ = ["TENSOR_MAP_BYTES", "matrix_map"]

TENSOR_MAP_BYTES = 128
# CUtensorMapDataType, -Interleave, -Swizzle, -L2promotion, -FloatOOBfill
_UINT16, _NO_INTERLEAVE, _SWIZZLE_128, _PROMOTE_256, _FILL_ZEROS = 1, 0, 3, 3, 0
_MAX_BOX = 256


@functools.lru_cache(maxsize=8192)
def matrix_map(address: int, rows: int, columns: int, box_rows: int, box_columns: int = 64) -> bytes:
    """The tensor map of a contiguous matrix of 16-bit elements, read in boxes with the 128-byte swizzle.

    A map holds an address and sizes, nothing of what lies there: it is remembered, and stays right when the memory is
    used again. Elements of a box outside the matrix arrive as zeros.

    Parameters
    ----------
    address : int
        Of the first element, a multiple of 16.
    rows, columns : int
        Of the matrix; `columns` a multiple of 8.
    box_rows, box_columns : int
        Of a box: at most 256 rows and 64 columns (128 bytes, the swizzle's width).

    Returns
    -------
    bytes
        A CUtensorMap, to be passed by value as ``const __grid_constant__``.

    Raises
    ------
    ValueError
        For values that the hardware cannot take, naming them.
    DriverError
        If the driver refuses.
    """
    if address % 16:
        raise ValueError(f"tensor map: address {address:#x} is no multiple of 16")
    if columns % 8 or columns < 1 or rows < 1:
        raise ValueError(f"tensor map: a matrix [{rows}, {columns}] does not have rows of a multiple of 8 elements")
    if not (1 <= box_rows <= _MAX_BOX and 1 <= box_columns <= 64 and box_columns % 8 == 0):
        raise ValueError(f"tensor map: a box [{box_rows}, {box_columns}], expected at most [{_MAX_BOX}, 64]")
    raw = ctypes.create_string_buffer(TENSOR_MAP_BYTES + 64)
    map_ = (ctypes.c_char * TENSOR_MAP_BYTES).from_buffer(raw, -ctypes.addressof(raw) % 64)
    driver.get().call(
        "cuTensorMapEncodeTiled",
        ctypes.byref(map_),
        _UINT16,
        2,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(columns * 2),
        (ctypes.c_uint32 * 2)(box_columns, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        _NO_INTERLEAVE,
        _SWIZZLE_128,
        _PROMOTE_256,
        _FILL_ZEROS,
    )
    return bytes(map_)
