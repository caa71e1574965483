"""Tensor maps: what the copy engine of compute capability 9.0 (TMA) knows about an array in GPU memory."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from . import driver

__all__ = ["TENSOR_MAP_BYTES", "gated_map", "heads_map", "matrix_map", "no_map", "result_map"]

TENSOR_MAP_BYTES = 128
# CUtensorMapDataType, -Interleave, -Swizzle, -L2promotion, -FloatOOBfill
_UINT16, _NO_INTERLEAVE, _SWIZZLE_128, _PROMOTE_256, _FILL_ZEROS = 1, 0, 3, 3, 0
_FLOAT32, _SWIZZLES = 7, {32: 1, 64: 2, 128: 3}  # by the bytes of a row of a box
_MAX_BOX = 256
_MAX_STRIDE = 1 << 40


class TensorMap(bytes):
    """A CUtensorMap, which also knows how to be made for another address.

    Attributes
    ----------
    address : int
    remade : callable
        Address to the map of an array of the same sizes there.
    """

    address: int
    remade: Callable[[int], TensorMap]


@functools.lru_cache(maxsize=8192)
def matrix_map(address: int, rows: int, columns: int, box_rows: int, box_columns: int = 64) -> TensorMap:
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
    TensorMap
        Bytes, to be passed by value as ``const __grid_constant__``.

    Raises
    ------
    ValueError
        For values that the hardware cannot take, naming them.
    DriverError
        If the driver refuses.
    """
    if columns % 8 or columns < 1 or rows < 1:
        raise ValueError(f"tensor map: a matrix [{rows}, {columns}] does not have rows of a multiple of 8 elements")
    if not (1 <= box_rows <= _MAX_BOX and 1 <= box_columns <= 64 and box_columns % 8 == 0):
        raise ValueError(f"tensor map: a box [{box_rows}, {box_columns}], expected at most [{_MAX_BOX}, 64]")
    found = _encode(address, (columns, rows), (columns * 2,), (box_columns, box_rows))
    found.remade = lambda other: matrix_map(other, rows, columns, box_rows, box_columns)
    return found


@functools.lru_cache(maxsize=8192)
def gated_map(address: int, rows: int, columns: int, box_rows: int) -> TensorMap:
    """The tensor map of a weight whose first half of rows is the gate and whose second half is up, for SwiGLU.

    Its four dimensions, innermost first: column, row of a block of eight, gate or up, block of eight rows. A box holds
    eight rows of the gate and eight of up in turn.

    Parameters
    ----------
    address : int
        Of the first element, a multiple of 16.
    rows, columns : int
        Of the matrix: multiples of 16 and of 8.
    box_rows : int
        Of a box: at most 256, a multiple of 16.

    Returns
    -------
    TensorMap
        Bytes, to be passed by value as ``const __grid_constant__``; remembered, as in :func:`matrix_map`.

    Raises
    ------
    ValueError
        For values that the hardware cannot take, naming them.
    DriverError
        If the driver refuses.
    """
    if columns % 8 or columns < 1 or rows % 16 or rows < 1:
        raise ValueError(f"tensor map: a matrix [{rows}, {columns}], expected multiples of 16 rows and 8 columns")
    if box_rows % 16 or not 16 <= box_rows <= _MAX_BOX:
        raise ValueError(f"tensor map: a box of {box_rows} rows, expected a multiple of 16 up to {_MAX_BOX}")
    row = columns * 2
    found = _encode(address, (columns, 8, 2, rows // 16), (row, rows // 2 * row, 8 * row), (64, 8, 2, box_rows // 16))
    found.remade = lambda other: gated_map(other, rows, columns, box_rows)
    return found


@functools.lru_cache(maxsize=8192)
def heads_map(
    address: int,
    sequences: int,
    tokens: int,
    heads: int,
    head_dim: int,
    strides: tuple[int, int, int],
    box_tokens: int,
    box_blocks: int,
) -> TensorMap:
    """The tensor map of heads of queries, keys or values (16-bit), read in boxes with the 128-byte swizzle.

    Its five dimensions, innermost first: 64 columns, token, block of 64 columns, head, sequence (or page of a cache).
    A box of several blocks of columns lies block after block in shared memory, each with all tokens of the box.

    Parameters
    ----------
    address : int
        Of the first element, a multiple of 16.
    sequences, tokens, heads, head_dim : int
        Sizes; `head_dim` a multiple of 64.
    strides : tuple of int
        Elements from sequence to sequence, token to token and head to head, multiples of 8.
    box_tokens, box_blocks : int
        Of a box: at most 256 tokens, and blocks of 64 columns.

    Returns
    -------
    TensorMap
        Bytes, to be passed by value as ``const __grid_constant__`` or put into device memory; remembered, as in
        :func:`matrix_map`.

    Raises
    ------
    ValueError
        For values that the hardware cannot take, naming them.
    DriverError
        If the driver refuses.
    """
    if min(sequences, tokens, heads, head_dim) < 1 or head_dim % 64:
        raise ValueError(f"tensor map: sizes {(sequences, tokens, heads, head_dim)}, expected no 0, columns by 64")
    if any(s % 8 or not 0 < 2 * s < _MAX_STRIDE for s in strides):
        raise ValueError(f"tensor map: strides {strides}, expected multiples of 8 elements from 8 to 2^39")
    if not (1 <= box_tokens <= _MAX_BOX and 1 <= box_blocks <= head_dim // 64):
        raise ValueError(
            f"tensor map: a box of {box_tokens} tokens and {box_blocks} blocks, expected at most {_MAX_BOX} tokens and "
            f"{head_dim // 64} blocks"
        )
    sequence, token, head = (2 * s for s in strides)
    sizes = (64, tokens, head_dim // 64, heads, sequences)
    found = _encode(address, sizes, (token, 128, head, sequence), (64, box_tokens, box_blocks, 1, 1))
    found.remade = lambda other: heads_map(other, sequences, tokens, heads, head_dim, strides, box_tokens, box_blocks)
    return found


@functools.lru_cache(maxsize=8192)
def result_map(address: int, rows: int, columns: int, item: int, box_rows: int, box_columns: int) -> TensorMap:
    """The tensor map of a contiguous matrix that is written (and read) in boxes as wide as their swizzle.

    Parameters
    ----------
    address : int
        Of the first element, a multiple of 16.
    rows, columns : int
        Of the matrix, whose rows take a multiple of 16 bytes.
    item : int
        Bytes of an element: 4 (float32) or 2.
    box_rows, box_columns : int
        Of a box: at most 256 rows, of 128, 64 or 32 bytes.

    Returns
    -------
    TensorMap
        Bytes, to be passed by value as ``const __grid_constant__``; remembered, as in :func:`matrix_map`.

    Raises
    ------
    ValueError
        For values that the hardware cannot take, naming them.
    DriverError
        If the driver refuses.
    """
    if item not in (2, 4) or columns < 1 or rows < 1 or columns * item % 16:
        raise ValueError(f"tensor map: a matrix [{rows}, {columns}] of {item} bytes each, rows not of 16-byte pieces")
    if not 1 <= box_rows <= _MAX_BOX or box_columns * item not in _SWIZZLES:
        raise ValueError(
            f"tensor map: a box [{box_rows}, {box_columns}] of {item} bytes each, expected at most {_MAX_BOX} rows "
            "of 32, 64 or 128 bytes"
        )
    kind, swizzle = _FLOAT32 if item == 4 else _UINT16, _SWIZZLES[box_columns * item]
    found = _encode(address, (columns, rows), (columns * item,), (box_columns, box_rows), kind, swizzle)
    found.remade = lambda other: result_map(other, rows, columns, item, box_rows, box_columns)
    return found


@functools.lru_cache(maxsize=1)
def no_map() -> TensorMap:
    """What is passed where a kernel takes a map that it does not use."""
    found = TensorMap(TENSOR_MAP_BYTES)
    found.address = 0
    found.remade = lambda other: found
    return found


def _encode(
    address: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    kind: int = _UINT16,
    swizzle: int = _SWIZZLE_128,
) -> TensorMap:
    """Sizes and boxes in elements, strides in bytes from the second dimension on."""
    if address % 16:
        raise ValueError(f"tensor map: address {address:#x} is no multiple of 16")
    rank = len(sizes)
    raw = ctypes.create_string_buffer(TENSOR_MAP_BYTES + 64)
    map_ = (ctypes.c_char * TENSOR_MAP_BYTES).from_buffer(raw, -ctypes.addressof(raw) % 64)
    driver.get().call(
        "cuTensorMapEncodeTiled",
        ctypes.byref(map_),
        kind,
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*([1] * rank)),
        _NO_INTERLEAVE,
        swizzle,
        _PROMOTE_256,
        _FILL_ZEROS,
    )
    made = TensorMap(map_)
    made.address = address
    return made
