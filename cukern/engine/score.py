"""Log-probabilities of given tokens: the requests of `LLM.score`, and what a step computes for them.

A scoring request goes through the engine like a prompt: packed with others, in pieces where it is long, over the same
block pool. The logits of its rows are made and used up `SCORE_ROWS` rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Any

import numpy as np

from cukern.engine.drawing import operators
from cukern.engine.params import ResolvedSampling
from cukern.engine.sequence import Sequence

__all__ = ["SCORE_ROWS", "Score", "Scoring", "book_scores", "compute_scores", "score_arrays"]

SCORE_ROWS = 512
"""Rows of logits, float32 [SCORE_ROWS, V], that exist at a time."""


@dataclass(frozen=True, eq=False)
class Score:
    """Log-probabilities of one given completion.

    Attributes
    ----------
    prompt_index : int
        Which of the prompts it continues.
    token_ids : list of int
        The completion's tokens.
    logprobs : float32 [n]
        ``log_softmax(logits / temperature)[token]`` of each token behind all tokens before it, natural logarithm.
    is_greedy : bool [n]
        The token has the largest logit there, the lowest id on ties: greedy decoding would have chosen it.
    prompt_token_ids : list of int
    """

    prompt_index: int
    token_ids: list[int]
    logprobs: np.ndarray
    is_greedy: np.ndarray
    prompt_token_ids: list[int]

    @property
    def total(self) -> float:
        """Sum of the log-probabilities, in float64: that of the whole completion."""
        return float(self.logprobs.sum(dtype=np.float64))


class Scoring(Sequence):
    """State of one request that only wants log-probabilities.

    Parameters
    ----------
    number : int
        Order of arrival.
    prompt, completion : list of int
        Neither is empty.
    temperature : float
        Positive.
    """

    draws = False

    def __init__(self, number: int, prompt: list[int], completion: list[int], temperature: float) -> None:
        sampling = ResolvedSampling(
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=0,
            max_tokens=len(completion),
            stop=(),
            stop_token_ids=frozenset(),
            logprobs=True,
        )
        super().__init__(number, [*prompt, *completion], sampling, None)
        self.num_prompt = len(prompt)
        self.scores = np.full(len(completion), np.nan, np.float32)
        self.greedy = np.zeros(len(completion), bool)

    @property
    def num_pending(self) -> int:
        """Tokens not yet in the cache, without the last one: nothing follows it."""
        return len(self.tokens) - 1 - self.num_computed

    @property
    def in_prompt(self) -> bool:
        return self.num_pending > 0

    def scored(self, count: int) -> range:
        """Which tokens of the completion the next ``count`` tokens give log-probabilities for."""
        first = self.num_computed + 1 - self.num_prompt  # the logits of token i are those for token i + 1
        return range(max(first, 0), max(first + count, 0))

    def result(self, prompt_index: int) -> Score:
        """The scores; only meaningful once finished."""
        prompt, completion = self.tokens[: self.num_prompt], self.tokens[self.num_prompt :]
        return Score(prompt_index, completion, self.scores, self.greedy, prompt)


def score_arrays(sequences: Listed[Sequence], counts: Listed[int]) -> dict[str, np.ndarray]:
    """Which rows of a step's packed tokens are scored, for which targets and at which temperature; empty if none.

    Returns
    -------
    dict
        ``score_rows`` int64 [R], ``score_targets`` int32 [R], ``score_temperature`` float32 [R].
    """
    rows: list[np.ndarray] = []
    targets: list[int] = []
    temperatures: list[np.ndarray] = []
    start = 0
    for sequence, count in zip(sequences, counts):
        start += count
        if not isinstance(sequence, Scoring):
            continue
        span = sequence.scored(count)
        rows.append(np.arange(start - len(span), start))
        targets += sequence.tokens[sequence.num_prompt + span.start : sequence.num_prompt + span.stop]
        temperatures.append(np.full(len(span), sequence.sampling.temperature, np.float32))
    if not targets:
        return {}
    return {
        "score_rows": np.concatenate(rows),
        "score_targets": np.array(targets, np.int32),
        "score_temperature": np.concatenate(temperatures),
    }


def compute_scores(model: Any, hidden: Any, rows: Any, targets: Any, temperatures: Any) -> list[tuple[Any, Any]]:
    """Log-probabilities of targets, and the likeliest tokens, from the residual stream of a step.

    Parameters
    ----------
    model : cukern.Qwen3
    hidden : float32 [T, H]
    rows : int64 [R]
    targets : int32 [R]
    temperatures : float32 [R]

    Returns
    -------
    list of (float32 [n], int32 [n])
        In the order of the rows; on the model's device, like the arguments.
    """
    ops, x = operators(model), hidden[rows]
    found = []
    for at in range(0, int(x.shape[0]), SCORE_ROWS):
        span = slice(at, at + SCORE_ROWS)
        logits = model.head(x[span])
        found.append((ops.token_logprobs(logits, targets[span], temperatures[span]), ops.argmax(logits)))
        del logits  # its memory is that of the next ones
    return found


def book_scores(sequences: Listed[Sequence], counts: Listed[int], logprobs: np.ndarray, greedy: np.ndarray) -> None:
    """Write a step's scores, in the order of `score_arrays`, into its requests; to be called before the step counts as
    computed. Writing them again, after an interruption, does no harm."""
    start = 0
    for sequence, count in zip(sequences, counts):
        if isinstance(sequence, Scoring):
            span = sequence.scored(count)
            stop = start + len(span)
            sequence.scores[span.start : span.stop] = logprobs[start:stop]
            sequence.greedy[span.start : span.stop] = greedy[start:stop]
            start = stop
