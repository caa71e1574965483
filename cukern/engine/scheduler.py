"""Decides on the host which tokens the next step computes.

Prompts first: waiting requests are admitted in order of arrival as soon as their blocks are free, and a step either
computes pieces of prompts (packed, up to ``max_batched_tokens``) or one token of every running request. When a
running request needs a block and none is free, the youngest one is pre-empted: its blocks are freed and it is
computed again later from its tokens. By the numerics contract and counter-based noise the recomputed request
continues with the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from cukern.engine.blocks import BlockPool, blocks_for
from cukern.engine.sequence import Drawn, Sequence

__all__ = ["Scheduler", "StepPlan"]


@dataclass(frozen=True)
class StepPlan:
    """The tokens of one step.

    Attributes
    ----------
    sequences : list of Sequence
    counts : list of int
        Tokens that each computes, from its ``num_computed`` on.
    is_decode : bool
        Every count is 1, and each sequence gets a new token.
    sampled : list of int
        Indices of the sequences whose last token is computed, so that a next one is drawn.
    """

    sequences: list[Sequence]
    counts: list[int]
    is_decode: bool
    sampled: list[int] = field(init=False)

    def __post_init__(self) -> None:
        sampled = [i for i, (s, n) in enumerate(zip(self.sequences, self.counts)) if s.draws and n == s.num_pending]
        object.__setattr__(self, "sampled", sampled)


class Scheduler:
    """Queues of requests over one block pool.

    Parameters
    ----------
    pool : BlockPool
    max_num_seqs : int
        Most requests that run at once.
    max_batched_tokens : int
        Most prompt tokens in one step; a longer prompt is computed in several.
    """

    def __init__(self, pool: BlockPool, max_num_seqs: int, max_batched_tokens: int) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_batched_tokens = max_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._live: dict[int, Sequence] = {}
        self.num_preempted = 0

    @property
    def idle(self) -> bool:
        """No request is waiting or running."""
        return not self._live

    def add(self, sequence: Sequence) -> None:
        """Queue a request."""
        self._live[sequence.number] = sequence
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a request, finished or not, and free its blocks; a request forgotten before is left alone."""
        if self._live.pop(sequence.number, None) is None:
            return
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.pool.release(sequence.blocks)

    def schedule(self) -> StepPlan | None:
        """Plan the next step and take the blocks that it writes; None when there is nothing to do."""
        return self._prefill() or self._decode()

    def wants_prompts(self) -> bool:
        """A prompt would be computed in the next step, rather than one token of every running request."""
        if any(s.in_prompt for s in self.running):
            return True
        return bool(self.waiting) and len(self.running) < self.max_num_seqs and self._room(self.waiting[0])

    def _room(self, sequence: Sequence, shared: int = 0) -> bool:
        """Its blocks beside shared ones are free. One block a running request stays free, so that admission causes no
        pre-emption at once."""
        needed = blocks_for(len(sequence.tokens), self.pool.block_size) - shared
        return needed + len(self.running) <= self.pool.num_free

    def _shared(self, sequence: Sequence, planned: dict[int, int]) -> int | None:
        """Blocks of the request before it that hold the start of its prompt; None where they are not computed before
        or in this step. The last token of the prompt is never among them: its logits are wanted."""
        before = sequence.follows
        if before is None or before not in self.running:
            return 0
        blocks = (sequence.num_prompt - 1) // self.pool.block_size
        done = before.num_computed + planned.get(before.number, 0)
        return blocks if done >= blocks * self.pool.block_size else None

    def _prefill(self) -> StepPlan | None:
        budget = self.max_batched_tokens
        sequences: list[Sequence] = []
        planned: dict[int, int] = {}
        for sequence in self.running:  # prompts that an earlier step left unfinished
            if sequence.in_prompt and budget > 0:
                sequences.append(sequence)
                planned[sequence.number] = min(sequence.num_pending, budget)
                budget -= planned[sequence.number]
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            shared = self._shared(sequence, planned)
            if shared is None or not self._room(sequence, shared):
                break
            if shared and sequence.follows is not None:
                self.pool.share(sequence.follows.blocks[:shared], sequence.blocks)
                sequence.num_computed = shared * self.pool.block_size
            if not self.pool.grow(sequence.blocks, len(sequence.tokens)):
                self.pool.release(sequence.blocks)
                sequence.num_computed = 0
                break
            self.running.append(sequence)
            self.waiting.popleft()
            sequences.append(sequence)
            planned[sequence.number] = min(sequence.num_pending, budget)
            budget -= planned[sequence.number]
        return StepPlan(sequences, [planned[s.number] for s in sequences], is_decode=False) if sequences else None

    def _decode(self) -> StepPlan | None:
        ready: list[Sequence] = []
        for sequence in list(self.running):
            if sequence not in self.running:  # pre-empted below, for an older one
                continue
            while not self.pool.grow(sequence.blocks, len(sequence.tokens)):
                youngest = self.running[-1]
                self._preempt(youngest)
                if youngest is sequence:
                    break
            else:
                ready.append(sequence)
        return StepPlan(ready, [1] * len(ready), is_decode=True) if ready else None

    def _preempt(self, sequence: Sequence) -> None:
        self.waiting.appendleft(sequence)
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.num_computed = 0
        self.num_preempted += 1

    def update(self, plan: StepPlan, drawn: Iterable[Drawn]) -> None:
        """Book the results of a step: one token for each of ``plan.sampled``; finished requests give up their
        blocks."""
        tokens = iter(drawn)
        sampled = set(plan.sampled)
        for i, (sequence, count) in enumerate(zip(plan.sequences, plan.counts)):
            computed = sequence.num_computed + count
            if i in sampled:
                sequence.append(next(tokens))
            sequence.num_computed = computed  # after the token: an interruption in between only computes it again
            if not sequence.draws and not sequence.in_prompt:
                sequence.finish("length")
            if sequence.finish_reason is not None:
                self.remove(sequence)

    def recover(self, dropped: Iterable[Sequence] = ()) -> None:
        """Restore queues and free list after an interruption anywhere above; forget ended and ``dropped`` requests."""
        for sequence in dropped:
            self._live.pop(sequence.number, None)
        for sequence in list(self._live.values()):  # a copy: another thread may queue requests, to be refused a step
            if sequence.finish_reason is not None:  # but not yet removed
                self._live.pop(sequence.number, None)
        live = sorted(self._live.values(), key=lambda s: s.number)
        # What a follower shares may not have been computed: it starts again.
        self.running = [s for s in self.running if s.number in self._live and s.follows is None]
        for sequence in live:
            sequence.forget_history()
            # Blocks are handed out before they are struck off the free list; a request caught before its admission
            # gives them back.
            if sequence not in self.running:
                sequence.blocks.clear()
                sequence.num_computed = 0
        self.waiting = deque(s for s in live if s not in self.running)
        self.pool.rebuild(s.blocks for s in live)
