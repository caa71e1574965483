"""Penalties, bias and likeliest tokens as parameters of a request: what is allowed, and what a checkpoint sets."""

from __future__ import annotations

import math

import pytest

from cukern.engine.drawing import Flavour, history_arrays
from cukern.engine.params import GenerationDefaults, SamplingParams
from cukern.engine.sequence import Drawn, Sequence

ROOM = {"vocab_size": 100, "room": 10, "fresh_seed": 1}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"repetition_penalty": 0}, ValueError, "repetition_penalty must be > 0 (1 is off), got 0"),
        ({"repetition_penalty": -1.0}, ValueError, "repetition_penalty must be > 0"),
        ({"repetition_penalty": math.nan}, ValueError, "repetition_penalty must be finite"),
        ({"presence_penalty": 2.5}, ValueError, "presence_penalty must be in [-2, 2] (0 is off), got 2.5"),
        ({"frequency_penalty": -2.1}, ValueError, "frequency_penalty must be in [-2, 2]"),
        ({"frequency_penalty": "1"}, TypeError, "frequency_penalty must be a number"),
        ({"logit_bias": [1, 2]}, TypeError, "logit_bias must map token ids to numbers, got list"),
        ({"logit_bias": {"5": 1.0}}, TypeError, "logit_bias must be an integer (token ids >= 0), got '5'"),
        ({"logit_bias": {-1: 1.0}}, ValueError, "logit_bias has token id -1"),
        ({"logit_bias": {5: 101}}, ValueError, "logit_bias of token 5 must be in [-100, 100], got 101"),
        ({"logit_bias": {5: -math.inf}}, ValueError, "logit_bias must be finite"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, ValueError, "logit_bias has 1025 tokens, at most 1024"),
        ({"top_logprobs": 21}, ValueError, "top_logprobs must be 0 to 20, got 21"),
        ({"top_logprobs": -1}, ValueError, "top_logprobs must be 0 to 20"),
        ({"top_logprobs": True}, TypeError, "top_logprobs must be an integer"),
    ],
)
def test_what_is_refused(options, error, message):
    with pytest.raises(error) as raised:
        SamplingParams(**options)
    assert message in str(raised.value)


def test_limits_are_allowed_and_parameters_stay_hashable():
    params = SamplingParams(
        repetition_penalty=1e-3,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={0: -100, 99: 100},
        top_logprobs=20,
    )
    assert hash(params) == hash(SamplingParams(**{**vars(params), "logit_bias": None}))
    resolved = GenerationDefaults().resolve(params, **ROOM)
    assert resolved.logit_bias == ((0, -100.0), (99, 100.0))
    assert resolved.penalized


def test_a_biased_token_must_be_in_the_vocabulary():
    with pytest.raises(ValueError, match="logit_bias has 100, outside the vocabulary of 100 tokens"):
        GenerationDefaults().resolve(SamplingParams(logit_bias={5: 1, 100: 1}), **ROOM)


def test_the_repetition_penalty_of_a_checkpoint():
    defaults = GenerationDefaults.from_config({"repetition_penalty": 1.1, "do_sample": False})
    assert defaults.resolve(SamplingParams(), **ROOM).repetition_penalty == 1.1
    assert defaults.resolve(SamplingParams(repetition_penalty=1), **ROOM).repetition_penalty == 1
    assert not GenerationDefaults.from_config({}).resolve(SamplingParams(), **ROOM).penalized
    with pytest.raises(ValueError, match=r"generation_config.json: repetition_penalty must be > 0"):
        GenerationDefaults.from_config({"repetition_penalty": -1})


def sequence(prompt, **options) -> Sequence:
    return Sequence(0, prompt, GenerationDefaults().resolve(SamplingParams(**options), **ROOM), None)


def test_histories():
    both = sequence([4, 2, 4], repetition_penalty=1.2)
    output = sequence([4, 2, 4], presence_penalty=1.0, logit_bias={7: 1.0, 8: 2.0})
    for s in (both, output):
        for token in (9, 2, 9):
            s.append(Drawn(token))
    assert both.history() == {4: 0, 2: 1, 9: 2}
    assert list(both.history()) == [4, 2, 9]
    assert output.history() == {9: 2, 2: 1}
    both.forget_history()
    both.append(Drawn(4))
    assert both.history() == {4: 1, 2: 1, 9: 2}
    arrays = history_arrays([both, output, sequence([1])])
    assert arrays["history_lengths"].tolist() == [3, 2, 0]
    assert arrays["history_tokens"].tolist() == [[4, 2, 9], [9, 2, 0], [0, 0, 0]]
    assert arrays["history_counts"].tolist() == [[1, 1, 2], [2, 1, 0], [0, 0, 0]]
    assert arrays["bias_tokens"].tolist() == [[0, 0], [7, 8], [0, 0]]
    assert arrays["bias_lengths"].tolist() == [0, 2, 0]


def test_what_a_batch_needs():
    def flavour(*options):
        return Flavour.of([GenerationDefaults().resolve(SamplingParams(**o), **ROOM) for o in options])

    assert flavour({}, {"temperature": 0, "logprobs": True}) == Flavour(logprobs=True)
    assert flavour({}, {"temperature": 1}) == Flavour(sample=True)
    assert flavour({"temperature": 0, "top_k": 3}) == Flavour()  # greedy needs no filter
    assert flavour({"temperature": 1, "top_p": 0.9}, {}) == Flavour(sample=True, filters=True)
    assert flavour({"temperature": 1, "min_p": 0.1}, {}) == Flavour(sample=True)
    assert flavour({"logit_bias": {1: 1}}, {"top_logprobs": 1}) == Flavour(penalties=True, top=True)
