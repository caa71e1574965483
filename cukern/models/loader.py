"""Load a checkpoint folder into `Weights`: check everything by name first, then copy tensor by tensor.

Files are memory-mapped and each tensor goes straight from the map (through two small pinned buffers, on a GPU) to
its rows of the packed matrices, so host memory never holds a second copy of the model.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .config import Qwen3Config
from .device import Device
from .safetensors_file import FORMATS, CheckpointError, SafetensorsFile, StoredTensor
from .weights import LoadReport, Weights, tensor_shapes

__all__ = ["Checkpoint", "CheckpointError", "choose_dtype", "load_weights"]

CHUNK = 16 << 20
"""Bytes copied at a time; also the size of each of the two pinned buffers."""

_DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def load_weights(
    folder: str | Path,
    config: Qwen3Config,
    device: Device,
    *,
    dtype: str = "auto",
    progress: bool | None = None,
) -> Weights:
    """Load the tensors of a checkpoint folder onto a device.

    Parameters
    ----------
    folder : path
        Holds ``model.safetensors``, or ``model.safetensors.index.json`` and its shards. The single file is taken
        where both are present, as in transformers.
    config : Qwen3Config
        Says which tensors there must be.
    device : Device
    dtype : str
        "auto" or a compute dtype, see `choose_dtype`.
    progress : bool, optional
        Show a progress bar with bytes and rate on stderr; by default where that is a terminal and
        ``CUKERN_NO_PROGRESS`` is not set.

    Returns
    -------
    Weights
        With a `report` on what was read, and on precision lost where wider weights became float16.

    Raises
    ------
    FileNotFoundError
        No tensor files, or a shard that the index names is not there.
    CheckpointError
        A broken file, a stale index, tensors that are missing, unexpected, of the wrong shape or format, a stored
        head that contradicts ``tie_word_embeddings``: all before any array is allocated. Or weights beyond
        float16's range with ``dtype="float16"``.

    Warns
    -----
    UserWarning
        Weights below float16's normal range with ``dtype="float16"``.
    """
    checkpoint = Checkpoint(folder)
    tensors = checkpoint.match(config)
    compute = choose_dtype(dtype, {t.format for t in tensors.values() if len(t.shape) == 2}, config, device)
    weights = Weights(config, device, compute)
    report = weights.report
    report.nbytes = sum(t.nbytes for t in tensors.values())
    report.stored = "+".join(sorted({FORMATS[t.format].name for t in tensors.values() if len(t.shape) == 2}))
    report.computed = compute.name
    started = time.perf_counter()
    with device.context(), _progress_bar(checkpoint.folder.name, report.nbytes, progress) as advance:
        copier: _Copier = _CudaCopier(device.xp) if device.kind == "cuda" else _Copier(np)
        # in file order, so that a disk reads forward
        for name, tensor in sorted(tensors.items(), key=lambda item: (str(item[1].file.path), item[1].begin)):
            copier.copy(name, tensor, weights[name], advance)
            tensor.file.release(tensor)
        copier.finish(report)
    report.seconds = time.perf_counter() - started
    _judge_precision(checkpoint.folder, report, config.num_parameters)
    return weights


def choose_dtype(dtype: str, formats: set[str], config: Qwen3Config, device: Device) -> np.dtype:
    """Choose the compute dtype of the matrices.

    On the CPU reference everything is float32. On a GPU (or emulated) "auto" is the dtype in which the matrices are
    stored if that is one half-precision type; for float32 or mixed files it is the half-precision type that
    config.json declares, or else bfloat16, whose range holds every float32 value.

    Parameters
    ----------
    dtype : str
        "auto", "float16", "bfloat16" or "float32".
    formats : set of str
        Safetensors formats of the stored matrices.
    """
    if not isinstance(dtype, str) or dtype not in ("auto", *_DTYPES):
        raise ValueError(f"dtype must be 'auto', 'float16', 'bfloat16' or 'float32', got {dtype!r}")
    if device.kind == "cpu":
        if dtype not in ("auto", "float32"):
            raise ValueError(
                f"device='cpu' computes in float32, not {dtype}; use dtype='auto', or device='emulated' for "
                "the half-precision kernels"
            )
        return _DTYPES["float32"]
    if dtype == "float32":
        raise ValueError(
            f"dtype='float32' is not available on {device}: the kernels compute in float16 or bfloat16 with float32 "
            "accumulation; device='cpu' computes in float32"
        )
    if dtype != "auto":
        return _DTYPES[dtype]
    if formats in ({"F16"}, {"BF16"}):
        return FORMATS[next(iter(formats))]
    return _DTYPES["float16" if config.dtype == "float16" else "bfloat16"]


class Checkpoint:
    """The tensor files of a folder, opened and checked.

    Attributes
    ----------
    folder : Path
    tensors : dict
        Stored name to StoredTensor.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.tensors: dict[str, StoredTensor] = {}
        if (self.folder / _SINGLE).exists() or (self.folder / _SINGLE).is_symlink():
            self.tensors = SafetensorsFile(self.folder / _SINGLE).tensors
        elif (self.folder / _INDEX).exists():
            self._open_shards(self.folder / _INDEX)
        else:
            raise FileNotFoundError(f"{self.folder}: no {_SINGLE} and no {_INDEX}{self._other_files()}")

    def _other_files(self) -> str:
        names = sorted(p.name for p in self.folder.glob("*") if p.is_file()) if self.folder.is_dir() else []
        shards = [n for n in names if n.endswith(".safetensors")]
        if shards:
            return f" (found {_some(shards)}; shards need their index, a single file must be called {_SINGLE})"
        other = [n for n in names if n.endswith((".bin", ".pt", ".pth", ".gguf"))]
        return f" (found {_some(other)}; only safetensors files are read)" if other else ""

    def _open_shards(self, index: Path) -> None:
        try:
            text = index.read_text(encoding="utf-8")
            weight_map = json.loads(text)["weight_map"]
            entries = sorted(weight_map.items())
            if not entries or not all(isinstance(file, str) for _, file in entries):
                raise TypeError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            reason = "it must be a JSON object with a weight_map of tensor names to file names"
            if index.read_bytes().startswith(b"version https://git-lfs"):
                reason = "this is a Git LFS pointer; run `git lfs pull` in its folder"
            raise CheckpointError(f"{index}: not a safetensors index: {reason}") from None
        outside = [file for _, file in entries if Path(file).name != file or file in ("", "..") or "\0" in file]
        if outside:
            raise CheckpointError(f"{index}: file name {outside[0]!r} points out of the checkpoint's folder")
        names = sorted({file for _, file in entries})
        absent = [n for n in names if not (self.folder / n).exists()]
        if absent:
            raise FileNotFoundError(
                f"{self.folder}: {_some(absent)} named in {_INDEX} {'is' if len(absent) == 1 else 'are'} not there; "
                "the download is incomplete or the index is stale"
            )
        stored = {name: SafetensorsFile(self.folder / name).tensors for name in names}
        problems = [f"{tensor} is not in {file}" for tensor, file in entries if tensor not in stored[file]]
        problems += [
            f"{tensor} is in {file} but not in the index"
            if tensor not in weight_map
            else f"{tensor} is in {file} but the index has it in {weight_map[tensor]}"
            for file, tensors in stored.items()
            for tensor in tensors
            if weight_map.get(tensor) != file
        ]
        if problems:
            raise CheckpointError(f"{index}: stale, it does not match the files: {_some(problems, '; ')}")
        self.tensors = {tensor: stored[file][tensor] for tensor, file in entries}

    def match(self, config: Qwen3Config) -> dict[str, StoredTensor]:
        """Pair the model's weights with the stored tensors.

        Returns
        -------
        dict
            Hub name of every weight in `tensor_shapes` to its stored tensor, which may lack the prefix ``model.``.

        Raises
        ------
        CheckpointError
            Lists everything that does not fit.
        """
        found = self._hub_names()
        if config.num_hidden_layers > len(found):  # before billions of names are written down
            raise CheckpointError(
                f"{self.folder}: num_hidden_layers is {config.num_hidden_layers} in config.json, but the files have "
                f"only {len(found)} tensors"
            )
        expected = tensor_shapes(config)
        head = found.pop("lm_head.weight", None) if config.tie_word_embeddings else None
        problems: list[tuple[str, list[str]]] = [
            ("missing", [name for name in expected if name not in found]),
            ("unexpected", [name for name in found if name not in expected]),
            (
                "misshapen",
                [
                    f"{name} {list(found[name].shape)} instead of {list(shape)}"
                    for name, shape in expected.items()
                    if name in found and found[name].shape != shape
                ],
            ),
            (
                "in an unsupported format",
                [f"{name} ({t.format})" for name, t in found.items() if name in expected and t.format not in FORMATS],
            ),
        ]
        lines = [f"{len(names)} {kind}: {_some(names)}" for kind, names in problems if names]
        if lines:
            raise CheckpointError(f"{self.folder}: the tensors do not match config.json: {'; '.join(lines)}")
        if head is not None and not _equal(head, found["model.embed_tokens.weight"]):
            raise CheckpointError(
                f"{self.folder}: config.json ties the head to the embedding (tie_word_embeddings is true), but a "
                f"different lm_head.weight is stored in {head.file.path.name}; set tie_word_embeddings to false to use "
                "it, or remove it"
            )
        return found

    def _hub_names(self) -> dict[str, StoredTensor]:
        # inverse frequencies are a derived buffer that old exports carry along
        stored = {n: t for n, t in self.tensors.items() if not n.endswith("rotary_emb.inv_freq")}
        body = [n for n in stored if n != "lm_head.weight"]
        bare = [n for n in body if n.startswith(("layers.", "embed_tokens.", "norm."))]
        prefixed = [n for n in body if n.startswith("model.")]
        if bare and prefixed:
            raise CheckpointError(
                f"{self.folder}: some tensor names begin with 'model.' ({_some(prefixed, most=3)}) and some do not "
                f"({_some(bare, most=3)}); all or none must"
            )
        added = {n: "model." + n for n in bare}
        return {added.get(n, n): t for n, t in stored.items()}


class _Copier:
    """Copies stored tensors into arrays of this host, converting where the dtypes differ."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self._tallies: list[tuple[str, Any]] = []

    def copy(self, name: str, tensor: StoredTensor, target: Any, advance: Callable[[int], None]) -> None:
        source, flat = tensor.flat(), target.reshape(-1)
        # counted only where float16's narrow range can lose something
        watch = flat.dtype == np.float16 and source.dtype != np.float16
        step = CHUNK // source.dtype.itemsize
        for begin in range(0, source.size, step):
            part, room = source[begin : begin + step], flat[begin : begin + step]
            if part.dtype == room.dtype:
                self._write(part, room)
            else:
                wide = self._lift(part)
                with np.errstate(over="ignore"):
                    room[...] = wide  # rounds to nearest
                if watch:
                    self._tallies.append((name, self._tally(wide.astype(np.float32), room)))
                del wide
            advance(part.nbytes)

    def _write(self, part: np.ndarray, room: Any) -> None:
        room[...] = part

    def _lift(self, part: np.ndarray) -> Any:
        return part

    def _tally(self, wide: Any, narrow: Any) -> Any:
        """Count [overflowed, subnormal or zeroed, zeroed] on the device, to be read once at the end."""
        xp = self.xp
        size = xp.abs(wide)
        low = (size > 0) & (size < np.finfo(np.float16).smallest_normal)
        counts = (xp.isinf(narrow) & xp.isfinite(wide), low, low & (narrow == 0))
        return xp.stack([xp.count_nonzero(c) for c in counts])

    def finish(self, report: LoadReport) -> None:
        for name, counts in self._tallies:
            values = counts.tolist()
            for where, value in zip((report.overflowed, report.subnormal, report.zeroed), values, strict=True):
                if value:
                    where[name] = where.get(name, 0) + value


class _CudaCopier(_Copier):
    """Copies to the current GPU through two pinned buffers: one is filled while the other is on its way."""

    def __init__(self, xp: Any) -> None:
        super().__init__(xp)
        self._stream = xp.cuda.get_current_stream()
        self._pinned = [xp.cuda.alloc_pinned_memory(CHUNK) for _ in range(2)]
        self._buffers = [np.frombuffer(p, np.uint8, CHUNK) for p in self._pinned]
        self._free = [xp.cuda.Event(disable_timing=True) for _ in range(2)]
        self._turn = 0

    def _write(self, part: np.ndarray, room: Any) -> None:
        turn, self._turn = self._turn, 1 - self._turn
        self._free[turn].synchronize()  # returns at once for an event that was never recorded
        np.copyto(self._buffers[turn][: part.nbytes], part.view(np.uint8))
        runtime = self.xp.cuda.runtime
        runtime.memcpyAsync(
            room.data.ptr, self._pinned[turn].ptr, part.nbytes, runtime.memcpyHostToDevice, self._stream.ptr
        )
        self._free[turn].record(self._stream)

    def _lift(self, part: np.ndarray) -> Any:
        wide = self.xp.empty(part.shape, part.dtype)
        self._write(part, wide)
        return wide

    def finish(self, report: LoadReport) -> None:
        self._stream.synchronize()  # the pinned buffers go away with this object
        super().finish(report)


def _judge_precision(folder: Path, report: LoadReport, total: int) -> None:
    """Refuse overflow and warn about subnormals after a conversion to float16."""
    if report.overflowed:
        lost = [f"{name} ({count})" for name, count in report.overflowed.items()]
        raise CheckpointError(
            f"{folder}: dtype='float16' cannot hold {sum(report.overflowed.values())} weights, which are beyond "
            f"+-65504: {_some(lost)}; use dtype='auto' or 'bfloat16'"
        )
    if report.subnormal:
        count, zeroed = sum(report.subnormal.values()), sum(report.zeroed.values())
        worst = max(report.subnormal, key=lambda name: report.subnormal[name])
        warnings.warn(
            f"{folder}: {count} of {total} weights ({100 * count / total:.3g} %) are below float16's normal range of "
            f"6.1e-05 and keep fewer bits, {zeroed} of them became 0; most are in {worst} ({report.subnormal[worst]}). "
            f"dtype='bfloat16' keeps the range",
            stacklevel=4,
        )


def _equal(a: StoredTensor, b: StoredTensor) -> bool:
    if a.shape != b.shape or a.format not in FORMATS:
        return False
    x, y = a.flat(), b.flat()
    step = CHUNK // 4
    for begin in range(0, x.size, step):
        p, q = x[begin : begin + step], y[begin : begin + step]
        if a.format == b.format:  # the bits, so that NaN equals itself
            same = np.array_equal(p.view(np.uint8), q.view(np.uint8))
        else:
            same = np.array_equal(p.astype(np.float32), q.astype(np.float32))
        if not same:
            return False
    return True


@contextmanager
def _progress_bar(name: str, total: int, show: bool | None) -> Iterator[Callable[[int], None]]:
    """Give a function to call with the bytes just copied; it draws a bar on stderr if that is wanted."""
    if show is None:
        show = sys.stderr.isatty() and os.environ.get("CUKERN_NO_PROGRESS", "") in ("", "0")
    if not show:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("Loading {task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr)) as bar:
        task = bar.add_task(name, total=total)
        yield lambda count: bar.advance(task, count)


def _some(names: list[str], separator: str = ", ", most: int = 20) -> str:
    """Join names, cut short after `most`."""
    rest = f"{separator}and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + rest
