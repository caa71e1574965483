"""The device side of a step: upload the plan in one copy, run the model, draw the tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from cukern.engine.drawing import Flavour, collect, draw, history_arrays, operators, sampling_arrays
from cukern.engine.scheduler import StepPlan
from cukern.engine.score import book_scores, compute_scores, score_arrays
from cukern.engine.sequence import Drawn

__all__ = ["OwnStream", "Runner", "Staging"]

_ALIGN = 256  # bytes; what a freshly allocated device array has


class OwnStream:
    """The CUDA stream of an engine: all its work is in one order, and a graph can be captured on it.

    Parameters
    ----------
    device : cukern.models.device.Device
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._stream: Any = None

    @contextmanager
    def use(self) -> Iterator[None]:
        """Make it the current stream, behind what the caller has queued so far (an edit of a weight)."""
        if self._device.kind != "cuda":
            yield
            return
        import cupy

        with self._device.context():
            if self._stream is None:
                self._stream = cupy.cuda.Stream(non_blocking=True)
            callers = cupy.cuda.get_current_stream()
            if not callers.done:
                self._stream.wait_event(callers.record())
            with self._stream:
                yield


class Staging:
    """Uploads several small arrays in one copy, through a pinned host buffer and a device buffer that are used again.

    Parameters
    ----------
    device : cukern.models.device.Device
        On the host kinds arrays are passed through as they are.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._host = np.zeros(0, np.uint8)
        self._buffer: Any = None
        self._copied: Any = None  # event: the last copy has left the host buffer
        self._stream: Any = None

    def upload(self, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        """The arrays on the device. They are views of one buffer, valid until the next upload."""
        if self._device.kind != "cuda":
            return arrays
        import cupy

        starts, end = {}, 0
        for name, array in arrays.items():
            starts[name] = end
            end += -(-array.nbytes // _ALIGN) * _ALIGN
        if self._copied is not None:
            self._copied.synchronize()
        if end > len(self._host):
            size = max(2 * end, 1 << 16)
            self._host = np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.uint8, size)
            self._buffer = cupy.empty(size, cupy.uint8)
        for name, array in arrays.items():
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self._host[starts[name] : starts[name] + raw.size] = raw
        stream = cupy.cuda.get_current_stream()
        if self._stream is not None and stream != self._stream:
            self._stream.synchronize()  # its kernels may still read the device buffer (and write the KV cache)
        self._stream = stream
        self._buffer.data.copy_from_host_async(self._host.ctypes.data, end, stream)
        self._copied = stream.record()
        return {
            name: self._buffer[starts[name] : starts[name] + array.nbytes].view(array.dtype).reshape(array.shape)
            for name, array in arrays.items()
        }


class Runner:
    """Runs the steps that the scheduler plans.

    Parameters
    ----------
    model : cukern.Qwen3
    cache : cukern.models.PagedKVCache
    """

    def __init__(self, model: Any, cache: Any) -> None:
        self.model = model
        self.cache = cache
        self._staging = Staging(model.device)

    def run(self, plan: StepPlan) -> list[Drawn]:
        """Compute a step, book the scores of those that only want these, and return what was drawn for each of
        ``plan.sampled``.

        The host only prepares and collects: between the upload and the small copies back nothing waits for it.
        """
        from cukern.models import ForwardBatch

        rows = [plan.sequences[i] for i in plan.sampled]
        params = [s.sampling for s in rows]
        flavour = Flavour.of(params)
        host = self._layout(plan) | sampling_arrays(params)
        if flavour.penalties:
            host |= history_arrays(rows)
        scored = score_arrays(plan.sequences, plan.counts)
        host |= scored
        with self.model.device.running():
            at = self._staging.upload(host)
            batch = ForwardBatch(
                token_ids=at["token_ids"],
                positions=at["positions"],
                slot_mapping=at["slot_mapping"],
                cu_seqlens_q=at["cu_seqlens_q"],
                seq_lens=at["seq_lens"],
                block_tables=at["block_tables"],
                max_query_len=max(plan.counts),
                is_decode=plan.is_decode,
                static_cache=True,  # sequences share full blocks alone
            )
            hidden = self.model.hidden(batch, self.cache)
            get = self.model.device.get
            if scored:
                found = compute_scores(self.model, hidden, *(at[name] for name in scored))
                values, best = (np.concatenate([get(part) for part in parts]) for parts in zip(*found))
                book_scores(plan.sequences, plan.counts, values, best == scored["score_targets"])
            if not rows:
                return []
            logits = self.model.head(hidden[at["logits_indices"]])
            tokens, logprobs, top = draw(operators(self.model), logits, at, flavour)
            scores = None if logprobs is None else get(logprobs)
            return collect(params, get(tokens), scores, None if top is None else (get(top[0]), get(top[1])))

    def _layout(self, plan: StepPlan) -> dict[str, np.ndarray]:
        """The step as packed host arrays (see ForwardBatch), and the positions of the tokens to be drawn."""
        size = self.cache.block_size
        counts = np.array(plan.counts, np.int64)
        starts = np.array([s.num_computed for s in plan.sequences], np.int64)
        ends = starts + counts
        cu_seqlens = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=cu_seqlens[1:])
        tables = np.zeros((len(counts), -(-int(ends.max()) // size)), np.int32)
        for row, sequence in zip(tables, plan.sequences):
            used = sequence.blocks[: len(row)]
            row[: len(used)] = used
        owner = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(cu_seqlens[-1]) - cu_seqlens[owner] + starts[owner]
        slots = tables[owner, positions // size].astype(np.int64) * size + positions % size
        pieces = [s.tokens[s.num_computed : s.num_computed + n] for s, n in zip(plan.sequences, plan.counts)]
        tokens = np.array(list(itertools.chain.from_iterable(pieces)) if len(pieces) > 1 else pieces[0], np.int32)
        return {
            "slot_mapping": slots,
            "logits_indices": cu_seqlens[1:][plan.sampled] - 1,
            # The token's own position in its sequence: the same noise however the sequence got here.
            "draw_positions": ends[plan.sampled],
            "token_ids": tokens,
            "positions": positions.astype(np.int32),
            "cu_seqlens_q": cu_seqlens.astype(np.int32),
            "seq_lens": ends.astype(np.int32),
            "block_tables": tables,
        }
