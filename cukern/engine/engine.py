"""The engine: block pool, scheduler and runner, advanced one step at a time."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Iterable
from collections.abc import Sequence as Listed
from typing import Any

from cukern.engine.blocks import BlockPool, blocks_for
from cukern.engine.decode import DecodeLoop
from cukern.engine.runner import OwnStream, Runner
from cukern.engine.scheduler import Scheduler
from cukern.engine.score import SCORE_ROWS
from cukern.engine.sequence import Sequence

__all__ = ["Engine", "plan_memory"]

HOST_KV_BYTES = 1 << 30
GPU_MEMORY_SHARE = 0.9


def plan_memory(
    model: Any,
    *,
    block_size: int,
    max_num_seqs: int,
    max_batched_tokens: int,
    max_model_len: int | None,
    num_blocks: int | None,
    kv_memory: int | None,
) -> tuple[int, int]:
    """Size of the block pool and the longest sequence allowed.

    The pool holds ``num_blocks`` blocks, or as many as fit into ``kv_memory`` bytes, or by default as many as
    ``max_num_seqs`` sequences of full length need, at most what 90 % of the free GPU memory leaves beside one step's
    activations (on the host: four sequences, at most 1 GiB).

    Returns
    -------
    num_blocks, max_model_len : int

    Raises
    ------
    ValueError
        A size is out of range, or the pool cannot hold one sequence of the ``max_model_len`` asked for.
    """
    from cukern.models import PagedKVCache

    config = model.config
    block_bytes = PagedKVCache.block_nbytes(config, block_size, model.dtype.itemsize)
    limit = model.max_positions
    if max_model_len is not None and not 1 <= max_model_len <= limit:
        raise ValueError(f"LLM: max_model_len must be in 1..{limit} (the model's positions), got {max_model_len!r}")
    if num_blocks is not None and kv_memory is not None:
        raise ValueError("LLM: give num_blocks or kv_memory, not both")
    if num_blocks is not None and num_blocks < 1:
        raise ValueError(f"LLM: num_blocks must be at least 1, got {num_blocks!r}")
    if num_blocks is None and kv_memory is not None:
        num_blocks = kv_memory // block_bytes
        if num_blocks < 1:
            raise ValueError(f"LLM: kv_memory must hold at least one block of {block_bytes} bytes, got {kv_memory!r}")
    if num_blocks is None:
        per_sequence = blocks_for(max_model_len or limit, block_size)
        if model.device.kind == "cuda":
            budget = _free_gpu_bytes(model) - _activation_bytes(config, max_batched_tokens, max_num_seqs)
            wanted = max_num_seqs * per_sequence
        else:
            budget, wanted = HOST_KV_BYTES, min(4, max_num_seqs) * per_sequence
        num_blocks = min(wanted, budget // block_bytes)
        if num_blocks < 1:
            raise ValueError(
                f"LLM: {max(budget, 0) / 1e9:.2f} GB of GPU memory are left for the KV cache, not one block of "
                f"{block_bytes / 1e6:.1f} MB; lower max_batched_tokens or max_num_seqs, or free memory"
            )
    if max_model_len is None:
        return num_blocks, min(limit, num_blocks * block_size)
    if num_blocks * block_size < max_model_len:
        raise ValueError(
            f"LLM: {num_blocks} blocks of {block_size} hold {num_blocks * block_size} tokens, less than "
            f"max_model_len {max_model_len}; give more KV memory or a smaller max_model_len"
        )
    return num_blocks, max_model_len


def _free_gpu_bytes(model: Any) -> int:
    import cupy

    with model.device.context():
        pool = cupy.get_default_memory_pool()
        free, _ = cupy.cuda.runtime.memGetInfo()
        return int(GPU_MEMORY_SHARE * (free + pool.free_bytes()))


def _activation_bytes(config: Any, tokens: int, rows: int) -> int:
    """Upper estimate of what one step allocates: residual, projections, MLP, and the float32 logits with the
    sampler's copies; the last both for prompts and for captured decoding steps, which keep their own. Scoring needs no
    more where the prompts' share holds its logits."""
    per_token = 12 * config.hidden_size + 4 * (config.q_size + 2 * config.kv_size) + 6 * config.intermediate_size
    logit_rows = max(3 * rows, min(SCORE_ROWS, tokens)) + 3 * rows
    return 2 * (tokens + rows) * per_token + 4 * logit_rows * config.vocab_size


class Engine:
    """Continuous batching over one model: requests join and leave between any two steps.

    Parameters
    ----------
    model : cukern.Qwen3
    num_blocks, block_size, max_num_seqs, max_batched_tokens : int
        See `LLM`.
    max_model_len : int, optional
        Longest sequence; the model's positions by default.
    cuda_graphs : bool
        On a GPU, decode by CUDA graphs with a step queued ahead; otherwise launch one operator after another. Results
        are the same, bit for bit.
    """

    def __init__(
        self,
        model: Any,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_batched_tokens: int,
        max_model_len: int | None = None,
        cuda_graphs: bool = True,
    ) -> None:
        self.model = model
        self.cache = model.new_cache(num_blocks, block_size)
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(self.pool, max_num_seqs, max_batched_tokens)
        self._runner = Runner(model, self.cache)
        self.stream = OwnStream(model.device)
        self.loop: DecodeLoop | None = None
        self._max_model_len = max_model_len
        self._no_graphs = _graphs_problem(model, cuda_graphs)
        self._steps = 0
        self._next_number = 0
        self._process = os.getpid()
        self._closed = False
        self._step_lock = threading.Lock()
        self._dropped_meanwhile: list[Sequence] = []

    @property
    def stats(self) -> dict[str, Any]:
        """Counts since the start: ``steps`` in all; ``decode_steps`` of the fixed-buffer decoding loop, ``replayed`` of
        them as CUDA graphs, ``loads`` of batches into it, ``graphs`` that are kept; ``preempted`` requests; and
        ``cuda_graphs``, "on" or why they are not used."""
        loop = self.loop
        problem = self._no_graphs or (loop.problem if loop else None)
        return {
            "steps": self._steps,
            "decode_steps": loop.steps if loop else 0,
            "replayed": loop.replayed if loop else 0,
            "loads": loop.loads if loop else 0,
            "graphs": loop.num_graphs if loop else 0,
            "preempted": self.scheduler.num_preempted,
            "cuda_graphs": problem or "on",
        }

    def next_number(self) -> int:
        """Number of the next request."""
        self._next_number += 1
        return self._next_number

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue requests."""
        self.check_usable()
        for sequence in sequences:
            self.scheduler.add(sequence)

    def run(self, sequences: Listed[Sequence]) -> None:
        """Queue requests and step until all of them are finished; after an exception they are forgotten."""
        try:
            self.add(s for s in sequences if s.finish_reason is None)
            while any(s.finish_reason is None for s in sequences):
                self.step()
        finally:
            self.drop(sequences)

    def step(self) -> bool:
        """Compute one step: plan on the host, run on the device, book on the host. False when there was nothing to do.

        With CUDA graphs the step after it is queued before this one is booked. An exception (KeyboardInterrupt
        included) leaves the engine usable: no block is lost, and the requests that are not dropped by their owner are
        computed again from the same point.
        """
        self.check_usable()
        if self._step_lock.locked():
            raise RuntimeError("the engine is in the middle of a step; use one LLM from one thread at a time")
        try:
            with self._step_lock:  # not acquire(): an interruption right behind that would leave it locked
                worked = self._step()
        except Exception:
            self.check_usable()  # closed by another thread in the middle of the step, which then fails somewhere
            raise
        finally:
            dropped, self._dropped_meanwhile = self._dropped_meanwhile, []
            if dropped:
                self.scheduler.recover(dropped)
                self._leave_loop()
        return worked

    def _step(self) -> bool:
        try:
            with self.stream.use():
                worked = self._advance()
            self._steps += worked
            return worked
        except BaseException as error:
            if self.loop is not None:
                self.loop.forget()
            self.scheduler.recover()
            if not os.environ.get("CUKERN_DEBUG"):
                # A kept traceback (sys.last_value in a notebook) would keep the step's activations alive.
                traceback.clear_frames(error.__traceback__)
            raise

    def _advance(self) -> bool:
        loop = self.loop
        if loop is not None and loop.program is not None:
            if self.scheduler.wants_prompts():
                loop.stale = True
            loop.extend()
            if loop.busy:
                self._book(loop)
                return True
            loop.forget()
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        if plan.is_decode and self._no_graphs is None:
            self.loop = self.loop or DecodeLoop(
                self.model,
                self.cache,
                self.pool,
                max_num_seqs=self.scheduler.max_num_seqs,
                max_model_len=self._max_model_len or self.model.max_positions,
                capture=True,
            )
        if plan.is_decode and self.loop is not None:
            self.loop.load(plan)
            self.loop.extend()
            self._book(self.loop)
        else:
            self.scheduler.update(plan, self._runner.run(plan))
        return True

    def _book(self, loop: DecodeLoop) -> None:
        self.scheduler.update(*loop.collect())
        loop.settle()
        if self.scheduler.idle:
            loop.wait()

    def _leave_loop(self) -> None:
        """Requests were taken away from outside."""
        if self.loop is None or self.loop.program is None:
            return
        self.loop.stale = True
        if self.scheduler.idle:
            self.loop.wait()

    def close(self) -> None:
        """Wait until nothing runs on the GPU any more, and let go of cache and model; there is no step after that."""
        self._closed = True
        if self.loop is not None:
            self.loop.wait()
        self.loop = None
        for name in ("cache", "model", "_runner"):  # an open stream still has the engine
            self.__dict__.pop(name, None)

    def drop(self, sequences: Iterable[Sequence]) -> None:
        """Forget requests and free their blocks at once; finished ones are left alone."""
        doomed = [s for s in sequences if s.finish_reason is None]
        if self._step_lock.locked():  # a garbage collection inside a step ended a stream
            self._dropped_meanwhile.extend(doomed)
        else:
            try:
                for sequence in doomed:
                    self.scheduler.remove(sequence)
            except BaseException:
                self.scheduler.recover(doomed)
                raise
            if doomed:
                self._leave_loop()
        for sequence in doomed:
            sequence.finish("abort")

    def check_usable(self) -> None:
        """Raise RuntimeError when closed, or in a process forked from the one that owns the GPU."""
        if self._closed:
            raise RuntimeError("this LLM is closed: its requests cannot go on")
        if self.model.device.kind == "cuda" and os.getpid() != self._process:
            raise RuntimeError(
                "this LLM was made in another process: a GPU cannot be used across fork; start workers with "
                "multiprocessing.get_context('spawn') and make the LLM in the worker"
            )


def _graphs_problem(model: Any, wanted: bool) -> str | None:
    """Why decoding does not use CUDA graphs, or None."""
    if model.device.kind != "cuda":
        return f"not on a GPU ({model.device})"
    return None if wanted else "switched off (cuda_graphs=False)"
