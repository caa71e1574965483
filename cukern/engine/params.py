"""Sampling parameters of a request, their validation, and the defaults a checkpoint brings along."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["GenerationDefaults", "ResolvedSampling", "SamplingParams"]

MAX_SEED = 2**63 - 1
_FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127
MAX_BIASED = 1024
MAX_TOP_LOGPROBS = 20
DEFAULT_MAX_TOKENS = 256


def _real(name: str, value: Any, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"SamplingParams: {name} must be a number ({allowed}), got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= _FLOAT32_MAX:  # the sampler computes in float32
        raise ValueError(f"SamplingParams: {name} must be finite in float32 ({allowed}), got {value!r}")
    return number


def _integer(name: str, value: Any, allowed: str) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"SamplingParams: {name} must be an integer ({allowed}), got {value!r}")
    return int(value)


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"SamplingParams: {name} must be True or False, got {value!r}")


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when generation ends.

    A field left at None takes the checkpoint's own value from generation_config.json, else the value that switches it
    off. The logits are changed in this order: ``logit_bias``, ``repetition_penalty``, ``frequency_penalty`` and
    ``presence_penalty`` (see `cukern.ops.apply_penalties`). A token is then drawn from softmax(logits / temperature),
    narrowed in the order of Hugging Face transformers: top-k, then top-p on what top-k has left, then min-p (see
    `cukern.ops.sample`). Greedy decoding takes the largest of the changed logits.

    Parameters
    ----------
    temperature : float, optional
        Finite, >= 0. 0 is greedy: the token with the largest logit, lowest id on ties. None: the checkpoint's value
        if it asks for sampling (``do_sample``); otherwise 1 if ``top_k``, ``top_p`` or ``min_p`` is given here, else
        0.
    top_k : int, optional
        Keep the k likeliest tokens; 0 or -1 switches it off; k at or above the vocabulary size keeps all.
    top_p : float, optional
        In (0, 1]. Keep the smallest set of likeliest tokens whose probabilities reach top_p; 1 switches it off.
    min_p : float, optional
        In [0, 1). Keep tokens at least min_p times as likely as the likeliest; 0 switches it off.
    repetition_penalty : float, optional
        Positive; 1 switches it off. As in Hugging Face transformers: the logit of every token that occurs in the prompt
        or in the output so far is divided by it where positive and multiplied by it where negative, once.
    presence_penalty : float
        In [-2, 2]. As in OpenAI's API: subtracted from the logit of every token that the output holds.
    frequency_penalty : float
        In [-2, 2]. As in OpenAI's API: subtracted once for every time that the token occurs in the output.
    logit_bias : mapping of int to float
        Token id to a number in [-100, 100] that is added to its logit; at most 1024 tokens.
    seed : int, optional
        In [0, 2**63). Same seed, prompt and model: same tokens, whatever else is in the batch. None draws a fresh
        seed, which the completion reports.
    max_tokens : int, optional
        Largest number of tokens to generate, >= 0 (0 gives an empty completion). None: as many as the context holds.
    stop : str or sequence of str
        Generation ends before the first of these strings; the text returned stops in front of it.
    stop_token_ids : sequence of int
        Generation ends with any of these tokens, whose text is left out.
    ignore_eos : bool
        Go on past the checkpoint's end-of-sequence tokens.
    logprobs : bool
        Return the log-probability of each chosen token, a natural logarithm:
        ``log_softmax(logits / temperature)[token]``, at the sampling temperature (1 for greedy) and **before** bias,
        penalties, top-k, top-p and min-p, so that it is never renormalised over the kept set and a trainer that divides
        its logits by the same temperature gets the same number.
    top_logprobs : int
        Return the n likeliest tokens of every position with their log-probabilities (of the same kind), n <= 20.

    Raises
    ------
    ValueError, TypeError
        A value is out of range or of the wrong kind; the message names the field, the value and what is allowed.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    stop: str | Iterable[str] = ()
    stop_token_ids: Iterable[int] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        if self.temperature is not None and _real("temperature", self.temperature, ">= 0") < 0:
            raise ValueError(f"SamplingParams: temperature must be >= 0 (0 is greedy), got {self.temperature!r}")
        if self.top_k is not None and _integer("top_k", self.top_k, ">= 1, or 0 or -1 for off") < -1:
            raise ValueError(f"SamplingParams: top_k must be >= 1, or 0 or -1 for off, got {self.top_k!r}")
        if self.top_p is not None and not 0.0 < _real("top_p", self.top_p, "in (0, 1]") <= 1.0:
            raise ValueError(f"SamplingParams: top_p must be in (0, 1] (1 is off), got {self.top_p!r}")
        if self.min_p is not None and not 0.0 <= _real("min_p", self.min_p, "in [0, 1)") < 1.0:
            raise ValueError(f"SamplingParams: min_p must be in [0, 1) (0 is off), got {self.min_p!r}")
        repetition = self.repetition_penalty
        if repetition is not None and not _real("repetition_penalty", repetition, "> 0") > 0.0:
            raise ValueError(f"SamplingParams: repetition_penalty must be > 0 (1 is off), got {repetition!r}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= _real(name, getattr(self, name), "in [-2, 2]") <= 2.0:
                raise ValueError(f"SamplingParams: {name} must be in [-2, 2] (0 is off), got {getattr(self, name)!r}")
        if not 0 <= _integer("top_logprobs", self.top_logprobs, f"0 to {MAX_TOP_LOGPROBS}") <= MAX_TOP_LOGPROBS:
            raise ValueError(f"SamplingParams: top_logprobs must be 0 to {MAX_TOP_LOGPROBS}, got {self.top_logprobs!r}")
        if self.seed is not None and not 0 <= _integer("seed", self.seed, "in [0, 2**63)") <= MAX_SEED:
            raise ValueError(f"SamplingParams: seed must be in [0, 2**63), got {self.seed!r}")
        if self.max_tokens is not None and _integer("max_tokens", self.max_tokens, ">= 0, or None") < 0:
            raise ValueError(f"SamplingParams: max_tokens must be >= 0 (None: as many as fit), got {self.max_tokens!r}")
        object.__setattr__(self, "stop", self._stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", self._stop_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", self._biases(self.logit_bias))
        _flag("ignore_eos", self.ignore_eos)
        _flag("logprobs", self.logprobs)

    @staticmethod
    def _stop_strings(stop: Any) -> tuple[str, ...]:
        strings = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else None
        if strings is None or not all(isinstance(s, str) for s in strings):
            raise TypeError(f"SamplingParams: stop must be a string or strings, got {stop!r}")
        if "" in strings:
            raise ValueError(
                "SamplingParams: stop must not hold an empty string: it would end every generation at once"
            )
        return strings

    @staticmethod
    def _stop_ids(ids: Any) -> tuple[int, ...]:
        if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
            raise TypeError(f"SamplingParams: stop_token_ids must be a sequence of token ids, got {ids!r}")
        checked = tuple(_integer("stop_token_ids", i, "token ids >= 0") for i in ids)
        negative = [i for i in checked if i < 0]
        if negative:
            raise ValueError(f"SamplingParams: stop_token_ids must be >= 0, got {negative[0]}")
        return checked

    @staticmethod
    def _biases(bias: Any) -> dict[int, float]:
        if bias is None:
            return {}
        if not isinstance(bias, Mapping):
            raise TypeError(f"SamplingParams: logit_bias must map token ids to numbers, got {type(bias).__name__}")
        if len(bias) > MAX_BIASED:
            raise ValueError(f"SamplingParams: logit_bias has {len(bias)} tokens, at most {MAX_BIASED} are supported")
        checked = {}
        for token, value in bias.items():
            if _integer("logit_bias", token, "token ids >= 0") < 0:
                raise ValueError(f"SamplingParams: logit_bias has token id {token!r}, it must be >= 0")
            if not -100.0 <= _real("logit_bias", value, "in [-100, 100]") <= 100.0:
                raise ValueError(f"SamplingParams: logit_bias of token {token} must be in [-100, 100], got {value!r}")
            checked[int(token)] = float(value)
        return checked


@dataclass(frozen=True)
class ResolvedSampling:
    """The parameters of one request with every default filled in."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    logprobs: bool
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int = 0

    @property
    def penalized(self) -> bool:
        """A penalty is on, so that the tokens so far change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True)
class GenerationDefaults:
    """What a checkpoint's generation_config.json (with its config.json behind it) says about sampling.

    Parameters
    ----------
    eos_token_ids : tuple of int
        End-of-sequence tokens; empty if the checkpoint names none.
    temperature, top_k, top_p, min_p, repetition_penalty
        As in SamplingParams; the first four are None unless ``do_sample`` is true.
    """

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    source: str = field(default="generation_config.json", compare=False)

    @classmethod
    def from_config(
        cls,
        generation: Mapping[str, Any],
        *,
        eos_fallback: Any = None,
        source: str = "generation_config.json",
        vocab_size: int | None = None,
    ) -> GenerationDefaults:
        """Read the fields of a parsed generation_config.json.

        Parameters
        ----------
        generation : mapping
            The parsed file; empty if there is none.
        eos_fallback : int, sequence of int or None
            ``eos_token_id`` of config.json, used where the generation configuration has none.
        source : str
            Name of the file, for messages.
        vocab_size : int, optional
            End-of-sequence tokens in the file are checked against it.

        Raises
        ------
        ValueError
            A value in the file is out of range.
        """
        stated = generation.get("eos_token_id")
        eos = eos_fallback if stated is None else stated
        ids = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise ValueError(f"{source}: eos_token_id must be a token id or a list of them, got {eos!r}")
        outside = [i for i in ids if vocab_size is not None and i >= vocab_size]
        if outside and stated is not None:
            raise ValueError(
                f"{source}: eos_token_id has {outside[0]}, outside the vocabulary of {vocab_size} tokens; correct the "
                "file, or delete the key to use that of config.json"
            )
        values: dict[str, Any] = {name: generation.get(name) for name in ("temperature", "top_k", "top_p", "min_p")}
        repetition: Any = generation.get("repetition_penalty")
        try:
            SamplingParams(**values, repetition_penalty=repetition)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{source}: {str(error).removeprefix('SamplingParams: ')}") from None
        if not generation.get("do_sample", False):
            values = dict.fromkeys(values)
        elif values["temperature"] is None:
            values["temperature"] = 1.0
        return cls(eos_token_ids=ids, source=source, repetition_penalty=repetition, **values)

    def resolve(self, params: SamplingParams, *, vocab_size: int, room: int, fresh_seed: int) -> ResolvedSampling:
        """Fill in the defaults for one request.

        Parameters
        ----------
        params : SamplingParams
        vocab_size : int
            Token ids are checked against it; top_k at or above it is off.
        room : int
            Tokens that fit behind the prompt; what ``max_tokens=None`` means.
        fresh_seed : int
            Seed to use where the request has none.

        Raises
        ------
        ValueError
            A token id is outside the vocabulary.
        """
        bias = params.logit_bias or {}
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", bias)):
            outside = [i for i in ids if i >= vocab_size]
            if outside:
                raise ValueError(
                    f"SamplingParams: {name} has {outside[0]}, outside the vocabulary of {vocab_size} tokens"
                )
        narrowed = any(value is not None for value in (params.top_k, params.top_p, params.min_p))
        temperature = params.temperature
        if temperature is None:
            temperature = self.temperature if self.temperature is not None else (1.0 if narrowed else 0.0)
        top_k = _first(params.top_k, self.top_k, 0)
        ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= frozenset(self.eos_token_ids)
        return ResolvedSampling(
            temperature=float(temperature),
            top_k=0 if top_k <= 0 or top_k >= vocab_size else int(top_k),
            # in float32 they must not become the 0 and the 1 that mean nothing
            top_p=max(float(_first(params.top_p, self.top_p, 1.0)), 2.0**-126),
            min_p=min(float(_first(params.min_p, self.min_p, 0.0)), 1 - 2.0**-24),
            seed=fresh_seed if params.seed is None else int(params.seed),
            max_tokens=room if params.max_tokens is None else int(params.max_tokens),
            stop=tuple(params.stop),
            stop_token_ids=ends,
            logprobs=params.logprobs,
            repetition_penalty=float(_first(params.repetition_penalty, self.repetition_penalty, 1.0)),
            presence_penalty=float(params.presence_penalty),
            frequency_penalty=float(params.frequency_penalty),
            logit_bias=tuple(bias.items()),
            top_logprobs=min(int(params.top_logprobs), vocab_size),
        )


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
