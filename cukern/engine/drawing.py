"""From logits to tokens: sampling parameters as arrays, and the operators that a batch needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from cukern.engine.params import MAX_TOP_LOGPROBS, ResolvedSampling
from cukern.engine.sequence import Drawn, Sequence

__all__ = ["Flavour", "collect", "draw", "history_arrays", "operators", "sampling_arrays"]


@dataclass(frozen=True)
class Flavour:
    """Which operators run between logits and tokens; what no row of a batch uses is left out.

    Attributes
    ----------
    sample : bool
        Some row is not greedy.
    filters : bool
        Some row has top-k or top-p.
    penalties : bool
        Some row has a bias or a penalty.
    logprobs, top : bool
        Some row wants the log-probability of its token, or the likeliest tokens.
    """

    sample: bool = False
    filters: bool = False
    penalties: bool = False
    logprobs: bool = False
    top: bool = False

    @classmethod
    def of(cls, params: Iterable[ResolvedSampling]) -> Flavour:
        """What a batch with these parameters needs."""
        listed = list(params)
        drawing = [p for p in listed if p.temperature > 0]
        return cls(
            sample=bool(drawing),
            filters=any(p.top_k > 0 or p.top_p < 1 for p in drawing),
            penalties=any(p.penalized or p.logit_bias for p in listed),
            logprobs=any(p.logprobs for p in listed),
            top=any(p.top_logprobs for p in listed),
        )


def sampling_arrays(params: Listed[ResolvedSampling]) -> dict[str, np.ndarray]:
    """The parameters of the rows of a batch, one array each."""
    temperature = np.array([p.temperature for p in params], np.float32)
    return {
        "seed": np.array([p.seed for p in params], np.uint64),
        "temperature": temperature,
        "logprob_temperature": np.where(temperature > 0, temperature, np.float32(1)),
        "top_k": np.array([p.top_k for p in params], np.int32),
        "top_p": np.array([p.top_p for p in params], np.float32),
        "min_p": np.array([p.min_p for p in params], np.float32),
    }


def history_arrays(sequences: Listed[Sequence]) -> dict[str, np.ndarray]:
    """Penalties, histories and biases of the rows of a batch, as `apply_penalties` takes them."""
    params = [s.sampling for s in sequences]
    histories = [s.history() if s.sampling.penalized else {} for s in sequences]
    rows, capacity = len(params), max((len(h) for h in histories), default=0)
    most = max((len(p.logit_bias) for p in params), default=0)
    tokens, counts = np.zeros((2, rows, max(capacity, 1)), np.int32)
    bias_tokens, biases = np.zeros((rows, max(most, 1)), np.int32), np.zeros((rows, max(most, 1)), np.float32)
    for i, (history, p) in enumerate(zip(histories, params)):
        tokens[i, : len(history)] = list(history.keys())
        counts[i, : len(history)] = list(history.values())
        for j, (token, bias) in enumerate(p.logit_bias):
            bias_tokens[i, j], biases[i, j] = token, bias
    return {
        "history_tokens": tokens,
        "history_counts": counts,
        "history_lengths": np.array([len(h) for h in histories], np.int32),
        "repetition": np.array([p.repetition_penalty for p in params], np.float32),
        "presence": np.array([p.presence_penalty for p in params], np.float32),
        "frequency": np.array([p.frequency_penalty for p in params], np.float32),
        "bias_tokens": bias_tokens,
        "biases": biases,
        "bias_lengths": np.array([len(p.logit_bias) for p in params], np.int32),
    }


def draw(
    ops: ModuleType, logits: Any, at: Mapping[str, Any], flavour: Flavour, *, parts: bool = False
) -> tuple[Any, Any, Any]:
    """Draw a token from every row of logits, which are changed where there are penalties.

    Parameters
    ----------
    ops : module
        `operators` of the model.
    logits : float32 [R, V]
    at : mapping
        The arrays of `sampling_arrays`, ``draw_positions`` int64 [R], and those of `history_arrays` for penalties; on
        the device.
    flavour : Flavour
    parts : bool
        For `advance`, which also takes what leads to the tokens.

    Returns
    -------
    tokens : int32 [R], or with `parts` perhaps uint64 [R, P]
    logprobs : float32 [R] or None
    top : (values float32 [R, n], ids int32 [R, n]) or None
        n is 20 or the size of the vocabulary.
    """
    raw = logits
    if flavour.penalties:
        if flavour.logprobs or flavour.top:
            raw = logits.copy()
        ops.apply_penalties(
            logits,
            tokens=at["history_tokens"],
            counts=at["history_counts"],
            lengths=at["history_lengths"],
            repetition=at["repetition"],
            presence=at["presence"],
            frequency=at["frequency"],
            bias_tokens=at["bias_tokens"],
            biases=at["biases"],
            bias_lengths=at["bias_lengths"],
        )
    if flavour.sample:
        filters = {name: at[name] for name in ("top_k", "top_p") if flavour.filters}
        tokens = ops.sample(
            logits,
            temperature=at["temperature"],
            min_p=at["min_p"],
            seed=at["seed"],
            position=at["draw_positions"],
            **filters,
        )
    else:
        tokens = ops.argmax(logits, parts=parts and not flavour.logprobs)
    temperature = at["logprob_temperature"]
    logprobs = ops.token_logprobs(raw, tokens, temperature) if flavour.logprobs else None
    n = min(MAX_TOP_LOGPROBS, int(logits.shape[1]))
    return tokens, logprobs, ops.top_logprobs(raw, n, temperature) if flavour.top else None


def collect(
    params: Iterable[ResolvedSampling],
    tokens: np.ndarray,
    logprobs: np.ndarray | None,
    top: tuple[np.ndarray, np.ndarray] | None,
) -> list[Drawn]:
    """What each request asked for of the results of a step, which are on the host."""
    chosen = tokens.tolist()
    scores = None if logprobs is None else logprobs.tolist()
    values, ids = (None, None) if top is None else (top[0].tolist(), top[1].tolist())
    out = []
    for i, p in enumerate(params):
        best = None
        if p.top_logprobs and values is not None and ids is not None:
            best = list(zip(ids[i][: p.top_logprobs], values[i][: p.top_logprobs]))
        out.append(Drawn(chosen[i], scores[i] if p.logprobs and scores is not None else None, best))
    return out


def operators(model: Any) -> ModuleType:
    """The reference for a CPU model, whatever the user has switched on, else the operators."""
    if model.device.kind == "cpu":
        from cukern import reference

        return reference
    from cukern import ops

    return ops
