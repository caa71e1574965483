"""Decoding with steps queued ahead: the device feeds each drawn token into the next step, the host follows behind.

While step n runs, step n + 1 is already queued; the host then books the tokens of step n. A sequence that reaches its
``max_tokens`` or a stop token goes out of use on the device by itself. What only the host sees (a stop string, a
request that is dropped or added) takes effect after the step that is already queued.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from cukern.engine.arena import Arena
from cukern.engine.blocks import BlockPool
from cukern.engine.drawing import Flavour, collect, history_arrays, sampling_arrays
from cukern.engine.graphs import (
    PERSISTENT_ROWS,
    RING,
    ROOM,
    STOPS,
    StepProgram,
    context_widths,
    row_buckets,
    shortest_context,
)
from cukern.engine.scheduler import StepPlan
from cukern.engine.sequence import Drawn, Sequence

__all__ = ["DecodeLoop"]

_MOST_PROGRAMS = 64


@dataclass
class _Queued:
    """A step on its way."""

    number: int  # of all steps
    rows: np.ndarray  # bool: those that compute a token
    done: Any  # event, None on the host


class DecodeLoop:
    """Runs the decoding steps of a batch that stays together for a while.

    `load` takes over a planned step; `extend` queues steps, `collect` waits for the oldest and gives its tokens, and
    `settle` looks at what their booking has changed. While `stale` is set nothing more is queued; when the queue is
    empty the batch has to be planned and loaded again.

    Parameters
    ----------
    model : cukern.Qwen3
    cache : cukern.models.PagedKVCache
    pool : BlockPool
    max_num_seqs, max_model_len : int
        Largest batch and longest sequence.
    capture : bool
        Replay CUDA graphs.
    depth : int
        Steps that are queued at a time, 1 to 7.
    persistent_rows : int
        Largest batch for the one-kernel step.
    keep_logits : bool
        See `StepProgram`.

    Attributes
    ----------
    stale : bool
        The batch on the device no longer is what should run.
    steps, replayed, loads : int
        Steps queued, how many of them as graphs, and how often a batch was loaded.
    """

    def __init__(
        self,
        model: Any,
        cache: Any,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_model_len: int,
        capture: bool,
        depth: int = 2,
        persistent_rows: int = PERSISTENT_ROWS,
        keep_logits: bool = False,
    ) -> None:
        if not 1 <= depth < RING:
            raise ValueError(f"depth must be 1 to {RING - 1}, got {depth}")
        self.model, self.cache, self.pool, self.depth = model, cache, pool, depth
        self.stale = True
        self.steps = self.replayed = self.loads = 0
        self.program: StepProgram | None = None
        self.flavour = Flavour()
        self._options: dict[str, Any] = {
            "capture": capture,
            "persistent_rows": persistent_rows,
            "keep_logits": keep_logits,
        }
        self._buckets = row_buckets(max_num_seqs)
        self._widths = context_widths(max_model_len, cache.block_size)
        self._programs: OrderedDict[tuple[int, int], StepProgram] = OrderedDict()
        self._arena: Arena | None = None
        self._queue: deque[_Queued] = deque()
        self._last: Any = None  # event of the step queued last
        self._sequences: list[Sequence] = []
        self._next = 0  # step after `load`

    @property
    def busy(self) -> bool:
        """Steps are queued."""
        return bool(self._queue)

    @property
    def problem(self) -> str | None:
        """Why a step could not be captured."""
        return next((p.problem for p in self._programs.values() if p.problem), None)

    @property
    def num_graphs(self) -> int:
        """Graphs that are kept."""
        return sum(p.num_graphs for p in self._programs.values())

    # -- loading a batch ---------------------------------------------------------------------------------------

    def load(self, plan: StepPlan) -> None:
        """Take over a decoding step that the scheduler has planned, and those that follow it."""
        self.wait()
        sequences = plan.sequences
        params = [s.sampling for s in sequences]
        self.flavour = Flavour.of(params)
        lengths = np.array([len(s.tokens) for s in sequences], np.int64)
        left = np.array([p.max_tokens - s.num_generated for s, p in zip(sequences, params)], np.int64)
        rows = next(b for b in self._buckets if b >= len(sequences))
        size, most = self.cache.block_size, int((lengths + np.minimum(left, ROOM)).max())
        width = next((w for w in self._widths if w * size >= most), self._widths[-1])
        program = self._program(rows, width)
        program.prepare(self.flavour)
        self.program, self._sequences, self._next = program, sequences, 0
        self._base, self._left = lengths, left
        self._alive = np.ones(len(sequences), bool)
        self._held = np.array([len(s.blocks) * size for s in sequences], np.int64)
        self._stops = [s.sampling.stop_token_ids if len(s.sampling.stop_token_ids) <= STOPS else () for s in sequences]
        self._tables = np.full((len(sequences), width), -1, np.int32)
        self._changed = False
        ready = np.ones(len(sequences), bool)
        self.stale = not self._reserve(ready & (left > 1), lengths + 1)  # the first `advance` looks up the second slot
        for row in range(len(sequences)):
            self._write_table(row)
        last = lengths - 1
        values = {
            "token_ids": np.array([s.tokens[-1] for s in sequences], np.int32),
            "positions": last.astype(np.int32),
            "seq_lens": lengths.astype(np.int32),
            "slot_mapping": self._tables[np.arange(len(last)), last // size].astype(np.int64) * size + last % size,
            "draw_positions": lengths,
            "remaining": left.astype(np.int32),
            "counters": np.array(self.steps % 2**32, np.uint32),
            "stop_ids": self._stop_table(),
            "block_tables": self._tables,
            **sampling_arrays(params),
        }
        if self.flavour.penalties:
            values |= history_arrays(sequences)
        program.load(values, self.flavour)
        self._changed = False
        self.loads += 1

    def _program(self, rows: int, width: int) -> StepProgram:
        key = (rows, width)
        if key not in self._programs:
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.popitem(last=False)
            if self._arena is None and self.model.device.kind == "cuda":
                import cupy

                self._arena = Arena(cupy.cuda.get_allocator())  # not cuda.alloc, which would come back here
            options = self._options | {"min_context": shortest_context(self._widths, width, self.cache.block_size)}
            self._programs[key] = StepProgram(self.model, self.cache, rows, width, self._arena, **options)
        self._programs.move_to_end(key)
        return self._programs[key]

    def _stop_table(self) -> np.ndarray:
        table = np.full((len(self._stops), STOPS), -1, np.int32)
        for row, ids in zip(table, self._stops):
            row[: len(ids)] = sorted(ids)
        return table

    def _write_table(self, row: int) -> None:
        blocks = self._sequences[row].blocks[: self._tables.shape[1]]
        self._tables[row, : len(blocks)] = blocks

    def _reserve(self, rows: np.ndarray, keys: np.ndarray) -> bool:
        """Blocks for so many keys in these rows; False if the pool lacks some, or the tables columns for them."""
        assert self.program is not None
        for row in np.flatnonzero(rows & (self._held < keys)):
            sequence = self._sequences[row]
            if keys[row] > self.program.capacity or not self.pool.grow(sequence.blocks, int(keys[row])):
                return False
            self._held[row] = len(sequence.blocks) * self.cache.block_size
            self._write_table(int(row))
            self._changed = True
        return True

    # -- steps -------------------------------------------------------------------------------------------------

    def extend(self) -> None:
        """Queue steps up to the depth, as far as the batch goes."""
        # Step 0 always has its blocks; without those of step 1 nothing follows it.
        while self._next == 0 or (len(self._queue) < self.depth and not self.stale):
            if not self._launch():
                return

    def _launch(self) -> bool:
        """Queue the next step; False if there is none."""
        program, step = self.program, self._next
        if program is None:
            return False
        rows = self._alive & (step < self._left)
        if not rows.any():
            return False
        # `load` has reserved for step 0 and 1, every launch for the step behind it, so that `advance` finds its slot.
        if step and not self._reserve(rows & (step + 1 < self._left), self._base + step + 1):
            self.stale = True  # this step has its blocks, the next one has not
        if self._changed:
            program.upload_tables(self._tables, self.steps)
            self._changed = False
        self.replayed += program.launch(self.flavour)
        self._last = self._event()
        self._queue.append(_Queued(self.steps, rows, self._last))
        self.steps += 1
        self._next += 1
        return True

    def _event(self) -> Any:
        if self.model.device.kind != "cuda":
            return None
        import cupy

        event = cupy.cuda.Event(disable_timing=True)
        event.record(cupy.cuda.get_current_stream())
        return event

    def collect(self) -> tuple[StepPlan, list[Drawn]]:
        """Wait for the oldest step; what it has computed, for `Scheduler.update`.

        Requests that ended meanwhile are left out.

        Raises
        ------
        RuntimeError
            The device has no token for a row that should have one (an error of this program).
        """
        queued = self._queue.popleft()
        if queued.done is not None:
            queued.done.synchronize()
        assert self.program is not None
        tokens, logprobs, top = self.program.results(queued.number)
        rows = np.flatnonzero(queued.rows & self._alive)
        rows = rows[[self._sequences[r].finish_reason is None for r in rows]] if len(rows) else rows
        if (tokens[rows] < 0).any():
            raise RuntimeError(f"decoding step {queued.number} gave no token for row {rows[tokens[rows] < 0][0]}")
        sequences = [self._sequences[r] for r in rows]
        scores = logprobs[rows] if self.flavour.logprobs else None
        best = (top[0][rows], top[1][rows]) if self.flavour.top else None
        drawn = collect((s.sampling for s in sequences), tokens[rows], scores, best)
        return StepPlan(sequences, [1] * len(sequences), is_decode=True), drawn

    def settle(self) -> None:
        """After the tokens of a step were booked: take note of the requests that ended."""
        for row in np.flatnonzero(self._alive):
            sequence = self._sequences[row]
            if sequence.finish_reason is None:
                continue
            self._alive[row] = False
            known = sequence.finish_reason == "length" or sequence.stop_reason in self._stops[row]
            if not known:
                self.stale = True  # the device goes on with it
        count = int(self._alive.sum())
        if self.program is not None and count and next(b for b in self._buckets if b >= count) < self.program.rows:
            self.stale = True  # fewer rows are enough

    def wait(self) -> None:
        """Let queued steps run out and forget them and the batch."""
        self.forget()
        if self._last is not None:
            self._last.synchronize()
            self._last = None

    def forget(self) -> None:
        """Forget the batch and the results of queued steps, which still run."""
        self._queue.clear()
        self._sequences = []
        self.program = None
        self.stale = True

    def __del__(self) -> None:
        if getattr(self, "_last", None) is not None:  # memory must not be given back under a running step
            self._last.synchronize()
