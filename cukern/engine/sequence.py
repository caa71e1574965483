"""One request on its way through the engine."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from cukern.engine.params import ResolvedSampling
from cukern.engine.text import ByteDetokenizer, StopMatcher, WindowDetokenizer

__all__ = ["Completion", "Drawn", "FinishReason", "Sequence", "counted"]

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Completion:
    """What a request generated.

    Attributes
    ----------
    text : str
        Generated text, without special tokens, without the stop string and what follows it. Empty without a tokenizer.
    token_ids : list of int
        Every generated token, the one that ended the generation included.
    finish_reason : str
        "stop": an end-of-sequence token, a stop token or a stop string. "length": max_tokens. "abort": closed early.
    stop_reason : int, str or None
        The token or the string that ended it, for "stop".
    logprobs : list of float or None
        One natural log-probability per token of ``token_ids``, where asked for (see SamplingParams.logprobs).
    prompt_token_ids : list of int
    seed : int or None
        The seed that was used; None for greedy. The same seed gives the same tokens again.
    top_logprobs : list of list of (int, float), or None
        For each token of ``token_ids`` the likeliest tokens and their log-probabilities, descending, where asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: list[float] | None
    prompt_token_ids: list[int]
    seed: int | None
    top_logprobs: list[list[tuple[int, float]]] | None = None


@dataclass(frozen=True)
class Drawn:
    """One drawn token, and what was asked for about it."""

    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None


class Sequence:
    """State of one request: its tokens, how many of them are in the KV cache, its blocks, and its text so far.

    Parameters
    ----------
    number : int
        Order of arrival.
    prompt : list of int
    sampling : ResolvedSampling
    detokenizer : ByteDetokenizer, WindowDetokenizer or None
        None: no text is made.

    Attributes
    ----------
    draws : bool
        Tokens are generated. False: the tokens are all known, and only their log-probabilities are wanted (`Scoring`).
    follows : Sequence or None
        A request with the same prompt, queued just before, whose blocks of the prompt serve this one too.
    """

    draws = True
    follows: Sequence | None = None

    def __init__(
        self,
        number: int,
        prompt: list[int],
        sampling: ResolvedSampling,
        detokenizer: ByteDetokenizer | WindowDetokenizer | None,
    ) -> None:
        self.number = number
        self.tokens = list(prompt)
        self.num_prompt = len(prompt)
        self.sampling = sampling
        self.num_computed = 0  # tokens whose keys and values are in the cache
        self.blocks: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[tuple[int, float]]] = []
        self.pieces: deque[str] = deque()  # text not yet collected by a stream
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._text: list[str] = []
        self._detokenizer = detokenizer
        self._stops = StopMatcher(sampling.stop)
        self.forget_history()

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens not yet in the cache: 1 while decoding, more in a prompt, 0 only when finished."""
        return len(self.tokens) - self.num_computed

    @property
    def in_prompt(self) -> bool:
        """The next tokens to be computed are given ones, of which a step may take many."""
        return self.num_pending > 1

    def history(self) -> dict[int, int]:
        """How often each token occurs in the output, in order of first occurrence; with a repetition penalty the
        prompt's tokens come first, with a count of 0 until they are generated."""
        counts = self._history
        for token in self.tokens[self._counted :]:
            counts[token] = counts.get(token, 0) + (self._counted >= self.num_prompt)
            self._counted += 1
        return counts

    def forget_history(self) -> None:
        """Count again from the start next time: after an interruption."""
        self._history: dict[int, int] = {}
        self._counted = 0 if self.sampling.repetition_penalty != 1 else self.num_prompt

    def append(self, drawn: Drawn) -> None:
        """Book one sampled token: its text, and whether it ends the generation."""
        token = drawn.token
        if drawn.logprob is not None:
            del self.logprobs[self.num_generated :]  # a leftover of an interrupted step
            self.logprobs.append(drawn.logprob)
        if drawn.top is not None:
            del self.top_logprobs[self.num_generated :]
            self.top_logprobs.append(drawn.top)
        self.tokens.append(token)
        if token in self.sampling.stop_token_ids:
            self.finish("stop", token)
            return
        if self._detokenizer is not None:
            self._emit(self._stops.add(self._detokenizer.add(token)))
            if self._stops.matched is not None:
                self.finish("stop", self._stops.matched)
                return
        if self.num_generated >= self.sampling.max_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End the generation; text still held back is given out unless a stop string matched."""
        if self.finish_reason is not None:
            return
        if self._detokenizer is not None and self._stops.matched is None:
            self._emit(self._stops.add(self._detokenizer.finish()))
            if self._stops.matched is None:
                self._emit(self._stops.finish())
        self.finish_reason, self.stop_reason = reason, stop_reason

    def _emit(self, text: str) -> None:
        if text:
            self._text.append(text)
            self.pieces.append(text)

    def completion(self) -> Completion:
        """The result; only meaningful once finished."""
        return Completion(
            text="".join(self._text),
            token_ids=self.tokens[self.num_prompt :],
            finish_reason=self.finish_reason or "abort",
            stop_reason=self.stop_reason,
            logprobs=list(self.logprobs) if self.sampling.logprobs else None,
            prompt_token_ids=self.tokens[: self.num_prompt],
            seed=self.sampling.seed if self.sampling.temperature > 0 else None,
            top_logprobs=[list(t) for t in self.top_logprobs] if self.sampling.top_logprobs else None,
        )


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 token, 2 tokens."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
