"""The device side of a step: upload the plan in one copy, run the model, draw the tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukern.engine.scheduler import StepPlan

__all__ = ["Runner", "Staging"]

_FILTERS_OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
_ALIGN = 256  # bytes; what a freshly allocated device array has


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

    def run(self, plan: StepPlan) -> tuple[list[int], list[float | None]]:
        """Compute a step and return, for each of ``plan.sampled``, the drawn token and its log-probability (None if
        not asked).

        The host only prepares and collects: between the upload and the two small copies back nothing waits for it.
        """
        from cukern.models import ForwardBatch

        sampled = plan.sampled
        host = self._layout(plan, sampled)
        max_query_len = max(plan.counts)
        with self.model.device.context():
            at = self._staging.upload(host)
            batch = ForwardBatch(
                token_ids=at["token_ids"],
                positions=at["positions"],
                slot_mapping=at["slot_mapping"],
                cu_seqlens_q=at["cu_seqlens_q"],
                seq_lens=at["seq_lens"],
                block_tables=at["block_tables"],
                max_query_len=max_query_len,
                logits_indices=at["logits_indices"],
                is_decode=plan.is_decode,
            )
            logits = self.model.forward(batch, self.cache)
            if not sampled:
                return [], []
            tokens, logprobs = self._draw(logits, host, at, [plan.sequences[i].sampling.logprobs for i in sampled])
            get = self.model.device.get
            drawn = [int(t) for t in get(tokens)]
            if logprobs is None:
                return drawn, [None] * len(drawn)
            values = get(logprobs)
        wanted = [plan.sequences[i].sampling.logprobs for i in sampled]
        return drawn, [float(v) if w else None for v, w in zip(values, wanted)]

    def _draw(
        self, logits: Any, host: dict[str, np.ndarray], at: dict[str, Any], wanted: list[bool]
    ) -> tuple[Any, Any]:
        ops = _operators(self.model)
        if (host["temperature"] == 0).all():
            tokens = ops.argmax(logits)
        else:
            # A filter that no row uses goes as a number, so that the sampler can leave its pass out.
            filters = {n: at[n] if (host[n] != off).any() else off for n, off in _FILTERS_OFF.items()}
            tokens = ops.sample(
                logits, temperature=at["temperature"], seed=at["seed"], position=at["position"], **filters
            )
        if not any(wanted):
            return tokens, None
        return tokens, ops.token_logprobs(logits, tokens, at["logprob_temperature"])

    def _layout(self, plan: StepPlan, sampled: list[int]) -> dict[str, np.ndarray]:
        """The step as packed host arrays (see ForwardBatch), and the sampling parameters of the rows that get a
        token."""
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
        tokens = np.fromiter(
            (t for s, n in zip(plan.sequences, plan.counts) for t in s.tokens[s.num_computed : s.num_computed + n]),
            np.int32,
            int(cu_seqlens[-1]),
        )
        params = [plan.sequences[i].sampling for i in sampled]
        temperature = np.array([p.temperature for p in params], np.float32)
        return {
            "slot_mapping": slots,
            "logits_indices": cu_seqlens[1:][sampled] - 1,
            "seed": np.array([p.seed for p in params], np.uint64),
            # The token's own position in its sequence: the same noise however the sequence got here.
            "position": ends[sampled],
            "token_ids": tokens,
            "positions": positions.astype(np.int32),
            "cu_seqlens_q": cu_seqlens.astype(np.int32),
            "seq_lens": ends.astype(np.int32),
            "block_tables": tables,
            "temperature": temperature,
            "logprob_temperature": np.where(temperature > 0, temperature, np.float32(1)),
            "top_k": np.array([p.top_k for p in params], np.int32),
            "top_p": np.array([p.top_p for p in params], np.float32),
            "min_p": np.array([p.min_p for p in params], np.float32),
        }


def _operators(model: Any) -> Any:
    """The reference for a CPU model, whatever the user has switched on, else the operators."""
    if model.device.kind == "cpu":
        from cukern import reference

        return reference
    from cukern import ops

    return ops
