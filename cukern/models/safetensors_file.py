"""One memory-mapped safetensors file. The safetensors library decides whether the file is sound; this module says
in a sentence what is wrong with one that is not, and hands out views of the map (bfloat16 included)."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["FORMATS", "CheckpointError", "SafetensorsFile", "StoredTensor"]

FORMATS: dict[str, np.dtype] = {
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
}
"""Tensor formats that the loader reads."""

HEADER_LIMIT = 100_000_000
"""Longest header in bytes; the limit of the safetensors library."""

_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2}
_BYTES |= {"I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded: a broken file, or tensors that do not match the config."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its safetensors format ("BF16"), shape, and byte range counted from the file's start."""

    name: str
    file: SafetensorsFile
    format: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.end - self.begin

    def flat(self) -> np.ndarray:
        """All elements as a 1-D read-only view of the map. It may start at any byte: copy before computing."""
        dtype = FORMATS[self.format]
        return np.frombuffer(self.file.map, dtype, count=self.nbytes // dtype.itemsize, offset=self.begin)


class SafetensorsFile:
    """A safetensors file, checked and mapped. Tensor data is read from disk only when a view is touched.

    Attributes
    ----------
    path : Path
    tensors : dict
        Name to StoredTensor, in the order of the header.

    Raises
    ------
    FileNotFoundError
        No such file.
    CheckpointError
        A Git LFS pointer, a truncated or a corrupt file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            size = os.stat(self.path).st_size
            with open(self.path, "rb") as file:
                header = self._read_header(file.read, size)
                self._validate(header, size - 8 - len(header))
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            link = " (a broken symbolic link)" if self.path.is_symlink() else ""
            raise FileNotFoundError(f"{self.path}: no such file{link}") from None
        start = 8 + len(header)
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        self.tensors = {
            name: StoredTensor(
                name, self, entry["dtype"], tuple(entry["shape"]), *(start + o for o in entry["data_offsets"])
            )
            for name, entry in entries.items()
        }

    def release(self, tensor: StoredTensor) -> None:
        """Let the system drop the pages of a tensor that has been copied, so that the map never holds a whole model."""
        page = mmap.PAGESIZE
        begin = -(-tensor.begin // page) * page
        end = tensor.end // page * page
        if end > begin and hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def _read_header(self, read: Callable[[int], bytes], size: int) -> bytes:
        """Return the header's bytes; every size is checked before anything of that size is read."""
        first = read(8)
        if first == b"version ":
            pointer = first + read(120)
            if pointer.startswith(b"version https://git-lfs"):
                raise CheckpointError(
                    f"{self.path}: this is a Git LFS pointer of {size} bytes, not the tensor file; "
                    "run `git lfs pull` in its folder or download the file again"
                )
        if size < 8:
            raise CheckpointError(
                f"{self.path}: truncated, {size} bytes are too few for a safetensors file; download it again"
            )
        length = int.from_bytes(first, "little")
        if length > size - 8:
            raise CheckpointError(
                f"{self.path}: truncated or not a safetensors file, the header claims {length} bytes "
                f"but {size - 8} follow; download it again"
            )
        if length > HEADER_LIMIT:
            raise CheckpointError(
                f"{self.path}: the header has {length} bytes, above the safetensors limit of {HEADER_LIMIT}"
            )
        return read(length)

    def _validate(self, header: bytes, data: int) -> None:
        import safetensors

        try:
            with safetensors.safe_open(str(self.path), framework="np"):
                pass
        except safetensors.SafetensorError as error:
            reason = _diagnose(header, data) or f"not a valid safetensors file ({error})"
            raise CheckpointError(f"{self.path}: {reason}") from None
        twice = _repeated_name(header)
        if twice:  # which of the two the library keeps is not specified
            raise CheckpointError(f"{self.path}: corrupt, the header lists {twice} twice")


def _repeated_name(header: bytes) -> str | None:
    repeated: list[str] = []

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            names = [name for name, _ in pairs]
            repeated.extend(name for name in out if names.count(name) > 1)
        return out

    json.loads(header, object_pairs_hook=collect)
    return repeated[0] if repeated else None


def _diagnose(header: bytes, data: int) -> str | None:
    """Say which tensor is wrong in a header that the library refused; `data` bytes follow the header."""
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError) as error:  # also an integer too long, brackets too deep
        return f"corrupt, the header is not JSON ({error})"
    if not isinstance(entries, dict):
        return f"corrupt, the header is a JSON {type(entries).__name__} instead of an object"
    spans: list[tuple[int, int, str]] = []
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        problem = _entry_problem(entry, data)
        if problem:
            return f"corrupt, tensor {name}: {problem}"
        spans.append((*entry["data_offsets"], name))
    position = 0
    for begin, end, name in sorted(spans):
        if begin < position:
            return f"corrupt, tensor {name} overlaps the tensor before it (bytes {begin} to {position} of the data)"
        if begin > position:
            return f"corrupt, {begin - position} bytes before tensor {name} belong to no tensor"
        position = end
    if position != data:
        return f"corrupt, {data - position} bytes after the last tensor belong to no tensor"
    return None


def _entry_problem(entry: Any, data: int) -> str | None:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        return f"needs dtype, shape and data_offsets, has {entry!r}"
    shape, offsets = entry["shape"], entry["data_offsets"]
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
            return f"{what} {numbers!r} is not a list of non-negative integers"
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"data_offsets {offsets!r} are not a begin and an end"
    if offsets[1] > data:
        return f"ends at byte {offsets[1]} of {data}: the file is truncated; download it again"
    width = _BYTES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    need, have = math.prod(shape) * (width or 0), offsets[1] - offsets[0]
    if width is not None and need != have:
        return f"shape {shape} of {entry['dtype']} needs {need} bytes, has {have}"
    return None
