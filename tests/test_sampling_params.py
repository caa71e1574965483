"""Sampling parameters: validation, and the defaults of a checkpoint."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from cukern.engine.params import GenerationDefaults, SamplingParams

OUT_OF_RANGE = [
    ("temperature", -1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("top_k", -2),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_p", -0.1),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", 1.0),
    ("seed", -1),
    ("seed", 2**63),
    ("max_tokens", -1),
    ("temperature", 1e39),
    ("temperature", 10**400),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop_token_ids", [1, -1]),
]
WRONG_KIND = [
    ("temperature", "hot"),
    ("temperature", True),
    ("top_k", 1.5),
    ("top_k", False),
    ("top_p", "0.9"),
    ("seed", 1.0),
    ("max_tokens", 2.0),
    ("stop", 3),
    ("stop", [b"x"]),
    ("stop_token_ids", "12"),
    ("stop_token_ids", 7),
    ("stop_token_ids", [1.5]),
    ("ignore_eos", 1),
    ("logprobs", 5),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"SamplingParams: {name} "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), WRONG_KIND)
def test_value_of_the_wrong_kind_is_refused_by_name(name, value):
    with pytest.raises(TypeError, match=rf"SamplingParams: {name} "):
        SamplingParams(**{name: value})


def test_message_shows_the_value_and_the_range():
    with pytest.raises(ValueError, match=r"top_p must be in \(0, 1\].*got 1.5"):
        SamplingParams(top_p=1.5)


@pytest.mark.parametrize("top_k", [0, -1, None, 8, 9, 10**9, 2**31])
def test_top_k_off_and_beyond_the_vocabulary(top_k):
    resolved = resolve(SamplingParams(temperature=1.0, top_k=top_k), vocab_size=8)
    assert resolved.top_k == 0


def test_top_k_within_the_vocabulary_is_kept():
    assert resolve(SamplingParams(top_k=1), vocab_size=8).top_k == 1
    assert resolve(SamplingParams(top_k=7), vocab_size=8).top_k == 7


def test_is_frozen_and_keeps_stops_as_tuples():
    params = SamplingParams(stop="end", stop_token_ids=[1, 2])
    assert params.stop == ("end",)
    assert params.stop_token_ids == (1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 1


def resolve(params, defaults=None, vocab_size=100, room=50):
    return (defaults or GenerationDefaults()).resolve(params, vocab_size=vocab_size, room=room, fresh_seed=77)


def test_without_defaults_it_is_greedy():
    resolved = resolve(SamplingParams())
    assert (resolved.temperature, resolved.top_k, resolved.top_p, resolved.min_p) == (0.0, 0, 1.0, 0.0)
    assert resolved.max_tokens == 256
    assert resolved.seed == 77


@pytest.mark.parametrize("narrow", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_asking_for_a_narrowed_draw_is_not_ignored(narrow):
    assert resolve(SamplingParams(**narrow)).temperature == 1.0
    assert resolve(SamplingParams(temperature=0, **narrow)).temperature == 0.0


def test_checkpoint_defaults_fill_only_what_is_none():
    defaults = GenerationDefaults.from_config(
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [5, 6]}
    )
    resolved = resolve(SamplingParams(), defaults)
    assert (resolved.temperature, resolved.top_k, resolved.top_p) == (0.6, 20, 0.95)
    assert resolved.stop_token_ids == {5, 6}
    resolved = resolve(SamplingParams(temperature=0.1, top_k=0, stop_token_ids=[9]), defaults)
    assert (resolved.temperature, resolved.top_k, resolved.top_p) == (0.1, 0, 0.95)
    assert resolved.stop_token_ids == {5, 6, 9}
    assert resolve(SamplingParams(ignore_eos=True, stop_token_ids=[9]), defaults).stop_token_ids == {9}


def test_defaults_apply_only_where_the_checkpoint_samples():
    greedy = GenerationDefaults.from_config({"temperature": 0.6, "top_k": 20, "top_p": 0.9})
    assert resolve(SamplingParams(), greedy).temperature == 0.0
    assert resolve(SamplingParams(temperature=1.0), greedy).top_k == 0
    assert GenerationDefaults.from_config({"do_sample": True}).temperature == 1.0


def test_eos_falls_back_to_the_model_configuration():
    assert GenerationDefaults.from_config({}, eos_fallback=(3, 4)).eos_token_ids == (3, 4)
    assert GenerationDefaults.from_config({"eos_token_id": 7}, eos_fallback=3).eos_token_ids == (7,)
    assert GenerationDefaults.from_config({}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"eos_token_id": "x"}, "eos_token_id must be a token id or a list of them, got 'x'"),
        ({"eos_token_id": [-1]}, r"eos_token_id must be a token id or a list of them, got \[-1\]"),
        ({"eos_token_id": 1.5}, "eos_token_id must be a token id or a list of them, got 1.5"),
        ({"eos_token_id": {"7": 1}}, "eos_token_id must be a token id or a list of them, got {'7': 1}"),
        ({"eos_token_id": [5, 10**9]}, "eos_token_id has 1000000000, outside the vocabulary of 100 tokens"),
        ({"top_p": 2}, "top_p must be in"),
        ({"temperature": "warm"}, "temperature must be a number"),
    ],
)
def test_bad_generation_config_names_the_file(bad, message):
    with pytest.raises(ValueError, match=rf"folder/generation_config\.json: {message}"):
        GenerationDefaults.from_config(bad, source="folder/generation_config.json", vocab_size=100)


def test_max_tokens_none_fills_the_context():
    assert resolve(SamplingParams(max_tokens=None)).max_tokens == 50
    assert resolve(SamplingParams(max_tokens=0)).max_tokens == 0


def test_stop_token_outside_the_vocabulary():
    with pytest.raises(ValueError, match="stop_token_ids has 100, outside the vocabulary of 100"):
        resolve(SamplingParams(stop_token_ids=[99, 100]))


def test_values_that_float32_would_round_to_others():
    resolved = GenerationDefaults().resolve(
        SamplingParams(temperature=1.0, top_p=1e-300, min_p=1 - 1e-12), vocab_size=10, room=5, fresh_seed=1
    )
    assert 0 < np.float32(resolved.top_p) < 1e-30
    assert 0.999999 < np.float32(resolved.min_p) < 1
