"""One decoding step over arrays at fixed places, captured into CUDA graphs.

The device part is a sequence of operator calls that reads nothing from the host. Run as it is it works on any device;
on a GPU it is captured once for each `Flavour` and replayed, with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from cukern.engine.arena import Arena
from cukern.engine.drawing import Flavour, draw, operators
from cukern.engine.params import MAX_BIASED, MAX_TOP_LOGPROBS
from cukern.ops.advance import StepState

__all__ = [
    "RING",
    "ROOM",
    "STOPS",
    "FixedArrays",
    "StepProgram",
    "context_widths",
    "row_buckets",
    "shortest_context",
]

RING = 8
"""Steps whose results are kept."""

STOPS = 8
"""Stop tokens of a row that the device looks for."""

ROOM = 64
"""Tokens for which a step has room when it is loaded: it is not loaded twice in a row at the end of its width."""

PERSISTENT_ROWS = 16
"""Most rows for which the whole model runs as one kernel (`cukern.models.decode_step`), where that can run it."""

_ALIGN = 256
_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_FIRST_CONTEXT, _LONG_CONTEXT = 256, 4096
_STEP_INPUTS = ("token_ids", "positions", "slot_mapping", "block_tables", "seq_lens")


def row_buckets(max_num_seqs: int) -> list[int]:
    """Numbers of rows for which a step is made, ascending; the last one is ``max_num_seqs``."""
    larger = range(_ROWS[-1] + 128, max_num_seqs, 128)
    return [rows for rows in (*_ROWS, *larger) if rows < max_num_seqs] + [max_num_seqs]


def context_widths(max_model_len: int, block_size: int) -> list[int]:
    """Columns of the block tables for which a step is made, ascending: contexts of 256, 1024, 4096, 8192, 16384, ...
    tokens, and the longest. Where contexts are long, a step of few sequences has a kernel for a range of them."""
    last = -(-max_model_len // block_size)
    widths, context = [], _FIRST_CONTEXT
    while context // block_size < last:
        widths.append(max(context // block_size, 1))
        context *= 4 if context < _LONG_CONTEXT else 2
    return [*widths, last]


def shortest_context(widths: list[int], width: int, block_size: int) -> int:
    """Tokens that the longest sequence of a batch has at least when a step of that width is chosen for it."""
    narrower = max((w for w in widths if w < width), default=0)
    return max(narrower * block_size - ROOM + 1, 1)


class FixedArrays:
    """Arrays at fixed places on a device, each with a copy on the host, uploaded together in one transfer.

    Parameters
    ----------
    device : cukern.models.device.Device
    arrays : mapping
        Name to (shape, dtype, value to fill with).

    Attributes
    ----------
    host, at : dict
        The arrays on the host and on the device.
    """

    def __init__(self, device: Any, arrays: Mapping[str, tuple[tuple[int, ...], Any, Any]]) -> None:
        starts, end = {}, 0
        for name, (shape, dtype, _) in arrays.items():
            starts[name] = end
            end += -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // _ALIGN) * _ALIGN
        self._pinned = pinned(end) if device.kind == "cuda" else np.zeros(end, np.uint8)
        self._buffer: Any = device.xp.empty(end, np.uint8)
        self.host: dict[str, np.ndarray] = {}
        self.at: dict[str, Any] = {}
        self._fill = {name: fill for name, (_, _, fill) in arrays.items()}
        for name, (shape, dtype, _) in arrays.items():
            span = slice(starts[name], starts[name] + int(np.prod(shape)) * np.dtype(dtype).itemsize)
            self.host[name] = self._pinned[span].view(dtype).reshape(shape)
            self.at[name] = self._buffer[span].view(dtype).reshape(shape)
        self.clear()

    def clear(self) -> None:
        """Fill the host's copies with their initial values."""
        for name, fill in self._fill.items():
            self.host[name][...] = fill

    def upload(self) -> None:
        """Copy everything to the device, on the current stream. The host's copies must stay until that is done."""
        copy_to_device(self._buffer, self._pinned)


def pinned(nbytes: int) -> np.ndarray:
    """Page-locked host memory as bytes, which the GPU can reach under the same address."""
    import cupy

    return np.frombuffer(cupy.cuda.alloc_pinned_memory(max(nbytes, 1)), np.uint8, nbytes)


def copy_to_device(target: Any, source: np.ndarray) -> None:
    """Copy a contiguous host array, page-locked on a GPU, without waiting."""
    if isinstance(target, np.ndarray):
        target[...] = source
        return
    import cupy

    target.data.copy_from_host_async(source.ctypes.data, source.nbytes, cupy.cuda.get_current_stream())


def _copy_on_device(target: Any, source: Any) -> None:
    if isinstance(target, np.ndarray):
        target[...] = source
    else:
        target.data.copy_from_device_async(source.data, source.nbytes)


class _Results:
    """Rings of the last steps' results, written by the device straight into host memory."""

    def __init__(self, device: Any, rows: int, top: int) -> None:
        shapes: dict[str, tuple[tuple[int, ...], Any]] = {
            "token_ring": ((RING, rows), np.int32),
            "logprob_ring": ((RING, rows), np.float32),
            "top_value_ring": ((RING, rows, top), np.float32),
            "top_id_ring": ((RING, rows, top), np.int32),
        }
        self.host: dict[str, np.ndarray] = {}
        self.at: dict[str, Any] = {}
        for name, (shape, dtype) in shapes.items():
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            raw = pinned(nbytes) if device.kind == "cuda" else np.zeros(nbytes, np.uint8)
            self.host[name] = raw.view(dtype).reshape(shape)
            self.at[name] = self.host[name] if device.kind != "cuda" else self._mapped(self.host[name], device)

    @staticmethod
    def _mapped(array: np.ndarray, device: Any) -> Any:
        import cupy

        memory = cupy.cuda.UnownedMemory(array.ctypes.data, array.nbytes, array, device.index)
        return cupy.ndarray(array.shape, array.dtype, memptr=cupy.cuda.MemoryPointer(memory, 0))


class StepProgram:
    """A decoding step of up to ``rows`` sequences whose block tables have ``width`` columns.

    Parameters
    ----------
    model : cukern.Qwen3
    cache : cukern.models.PagedKVCache
    rows, width : int
    arena : Arena or None
        Where temporaries live; None on the host.
    capture : bool
        Replay CUDA graphs; otherwise launch one operator after another.
    min_context : int
        Tokens that the longest sequence has at least, as far as is known: a matter of speed, see `DecodeStep`.
    persistent_rows : int
        Use the one-kernel step for at most this many rows.
    keep_logits : bool
        Keep a copy of every step's logits in `logits` (before bias and penalties).

    Attributes
    ----------
    problem : str or None
        Why capturing failed.
    logits : dict
        Flavour to float32 [rows, V].
    """

    def __init__(
        self,
        model: Any,
        cache: Any,
        rows: int,
        width: int,
        arena: Arena | None,
        *,
        capture: bool,
        min_context: int = 1,
        persistent_rows: int = PERSISTENT_ROWS,
        keep_logits: bool = False,
    ) -> None:
        self.model, self.cache, self.rows, self.width = model, cache, rows, width
        self.capacity = width * cache.block_size
        self.problem: str | None = None
        self.logits: dict[Flavour, Any] = {}
        self._arena, self._capturing, self._keep_logits = arena, capture, keep_logits
        self._graphs: dict[Flavour, Any] = {}
        self._top = min(MAX_TOP_LOGPROBS, model.config.vocab_size)
        self._results = _Results(model.device, rows, self._top)
        self._arrays = FixedArrays(model.device, self._shapes(rows, width))
        self._penalties: FixedArrays | None = None
        self._tables = [np.zeros((rows, width), np.int32)] * RING
        if model.device.kind == "cuda":
            self._tables = [pinned(rows * width * 4).view(np.int32).reshape(rows, width) for _ in range(RING)]
        self._step = self._one_kernel(persistent_rows, min_context)
        self._inputs = dict(self._arrays.at)
        if self._step is not None:
            self._inputs |= {name: getattr(self._step, name) for name in _STEP_INPUTS}
        self._batch = self._forward_batch()

    @staticmethod
    def _shapes(rows: int, width: int) -> dict[str, tuple[tuple[int, ...], Any, Any]]:
        return {
            "slot_mapping": ((rows,), np.int64, -1),
            "draw_positions": ((rows,), np.int64, 0),
            "seed": ((rows,), np.uint64, 0),
            "token_ids": ((rows,), np.int32, 0),
            "positions": ((rows,), np.int32, 0),
            "seq_lens": ((rows,), np.int32, 0),
            "remaining": ((rows,), np.int32, 0),
            "counters": ((rows,), np.uint32, 0),
            "stop_ids": ((rows, STOPS), np.int32, -1),
            "temperature": ((rows,), np.float32, 0),
            "logprob_temperature": ((rows,), np.float32, 1),
            "top_k": ((rows,), np.int32, 0),
            "top_p": ((rows,), np.float32, 1),
            "min_p": ((rows,), np.float32, 0),
            "block_tables": ((rows, width), np.int32, -1),
        }

    def _penalty_arrays(self) -> FixedArrays:
        """Made when first needed: a history may be as long as the context."""
        if self._penalties is None:
            rows = self.rows
            capacity = min(self.capacity, self.model.config.vocab_size)
            shapes: dict[str, tuple[tuple[int, ...], Any, Any]] = {
                "history_tokens": ((rows, capacity), np.int32, 0),
                "history_counts": ((rows, capacity), np.int32, 0),
                "history_lengths": ((rows,), np.int32, 0),
                "repetition": ((rows,), np.float32, 1),
                "presence": ((rows,), np.float32, 0),
                "frequency": ((rows,), np.float32, 0),
                "bias_tokens": ((rows, MAX_BIASED), np.int32, 0),
                "biases": ((rows, MAX_BIASED), np.float32, 0),
                "bias_lengths": ((rows,), np.int32, 0),
            }
            self._penalties = FixedArrays(self.model.device, shapes)
        return self._penalties

    def _one_kernel(self, persistent_rows: int, min_context: int) -> Any:
        if self.rows > persistent_rows or self.model.device.kind == "cpu":
            return None
        from cukern.models.decode_step import DecodeStep

        if DecodeStep.supported(self.model, self.rows) is not None:
            return None
        return DecodeStep(self.model, self.cache, self.rows, self.width, min_context=min_context)

    def _forward_batch(self) -> Any:
        from cukern.models import ForwardBatch

        at = self._inputs
        return ForwardBatch(
            token_ids=at["token_ids"],
            positions=at["positions"],
            slot_mapping=at["slot_mapping"],
            cu_seqlens_q=None,
            seq_lens=at["seq_lens"],
            block_tables=at["block_tables"],
            max_query_len=1,
            is_decode=True,
            static_cache=True,  # sequences share full blocks alone
        )

    # -- state -------------------------------------------------------------------------------------------------

    def load(self, values: Mapping[str, np.ndarray], flavour: Flavour) -> None:
        """Set the state of the first rows; the others go out of use.

        The steps queued before must be done.

        Parameters
        ----------
        values : mapping
            Name to array [n, ...] with n <= rows; for `Flavour.penalties` also those of `history_arrays`. Columns that
            an array lacks keep their initial values. ``counters`` holds one number for all rows.
        flavour : Flavour
        """
        groups = [self._arrays, *([self._penalty_arrays()] if flavour.penalties else [])]
        for group in groups:
            group.clear()
            for name in group.host.keys() & values.keys():
                value = values[name]
                place = group.host[name]
                if name == "counters":
                    place[...] = value
                else:
                    place[tuple(slice(0, n) for n in value.shape)] = value
            group.upload()
        if self._step is not None:
            for name in _STEP_INPUTS:
                _copy_on_device(self._inputs[name], self._arrays.at[name])

    def upload_tables(self, tables: np.ndarray, number: int) -> None:
        """Replace the block tables [n, width] before step ``number``, behind the steps that are queued."""
        host = self._tables[number % RING]
        host[...] = -1
        host[: len(tables)] = tables
        copy_to_device(self._inputs["block_tables"], host)

    def results(self, number: int) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """Tokens, log-probabilities and likeliest tokens of all rows of step ``number``, once it is done.

        What its flavour does not compute is left from earlier steps.
        """
        at, host = number % RING, self._results.host
        return host["token_ring"][at], host["logprob_ring"][at], (host["top_value_ring"][at], host["top_id_ring"][at])

    # -- the step ----------------------------------------------------------------------------------------------

    @property
    def num_graphs(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)

    def prepare(self, flavour: Flavour) -> None:
        """Capture the step, where that is wanted and has not been done. Afterwards no row is in use."""
        if not self._capturing or self.problem is not None or flavour in self._graphs:
            return
        import cupy

        self.load({}, flavour)
        self._run(flavour)  # compiles and loads every kernel, and brings the memory
        stream = cupy.cuda.get_current_stream()
        stream.synchronize()
        try:
            stream.begin_capture()
            self._run(flavour)
            graph = stream.end_capture()
        except BaseException as error:
            with suppress(Exception):  # there may be no capture left to end
                stream.end_capture()
            if not isinstance(error, Exception):
                raise
            self.problem = f"capturing a decoding step failed: {type(error).__name__}: {error}"
            return
        self._graphs[flavour] = graph

    def launch(self, flavour: Flavour) -> bool:
        """Queue one step on the current stream; True if it was a replay."""
        graph = self._graphs.get(flavour)
        if graph is not None:
            graph.launch()
            return True
        self._run(flavour)
        return False

    def _run(self, flavour: Flavour) -> None:
        model, ops = self.model, operators(self.model)
        with self._memory(), model.device.running():
            logits = self._step.run() if self._step is not None else model.forward(self._batch, self.cache)
            if self._keep_logits:
                self.logits[flavour] = logits.copy()
            at = self._inputs if self._penalties is None else self._inputs | self._penalties.at
            tokens, logprobs, top = draw(ops, logits, at, flavour, parts=True)
            ops.advance(tokens, self._state(flavour), self.cache.block_size, logprobs=logprobs, top=top)

    def _state(self, flavour: Flavour) -> StepState:
        at, results = self._inputs, self._results.at
        history = {}
        if flavour.penalties:
            of = self._penalty_arrays().at
            history = {name: of[name] for name in ("history_tokens", "history_counts", "history_lengths")}
        return StepState(
            token_ids=at["token_ids"],
            positions=at["positions"],
            seq_lens=at["seq_lens"],
            slot_mapping=at["slot_mapping"],
            draw_positions=at["draw_positions"],
            block_tables=at["block_tables"],
            remaining=at["remaining"],
            stop_ids=at["stop_ids"],
            counters=at["counters"],
            **results,
            **history,
        )

    @contextmanager
    def _memory(self) -> Iterator[None]:
        """Let temporaries come from the arena."""
        if self._arena is None:
            yield
            return
        import cupy

        with cupy.cuda.using_allocator(self._arena.malloc):
            yield
