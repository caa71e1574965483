"""The decoding loop: batches whose steps are queued ahead, whatever ends, joins, leaves or fails in between."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from loops import MIXED, VOCAB, assert_released, looped, maker, requests, same

import cukern
from cukern import LLM, SamplingParams
from cukern.engine.drawing import Flavour
from cukern.engine.graphs import StepProgram
from cukern.engine.tokenizer import Tokenizer
from cukern.models import demo_checkpoint

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def model(request):
    return cukern.Qwen3.from_pretrained(DATA / "tied-fp16", device=request.param)


@pytest.fixture
def make(model):
    return maker(model)


# -- the same bits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 7])
@pytest.mark.parametrize("block_size", [16, 32])
def test_the_loop_gives_the_bits_of_single_steps(make, depth, block_size):
    prompts, sampling = requests(max_tokens=20)
    expected = make().generate(prompts, sampling)
    llm = looped(make(block_size=block_size), depth=depth)
    assert same(llm.generate(prompts, sampling), expected)
    assert same(llm.generate(prompts[::-1], sampling[::-1])[::-1], expected)
    assert same([llm.generate([p], s)[0] for p, s in zip(prompts, sampling)], expected)
    assert llm.engine.stats["decode_steps"] == 7 * 19  # none in vain
    assert_released(llm)


@pytest.mark.parametrize("params", [[p] * 3 for p in MIXED], ids=["greedy", "top_k", "top_p", "presence", "repetition"])
def test_every_flavour_alone(make, params):
    prompts, sampling = requests((5, 9, 2), params=params)
    llm = looped(make())
    assert same(llm.generate(prompts, sampling), make().generate(prompts, sampling))
    assert llm.engine.loop.flavour == Flavour.of(llm.defaults.resolve(
        s, vocab_size=VOCAB, room=9, fresh_seed=0) for s in sampling)  # fmt: skip


def _counts(state) -> bool:
    return state.history_counts is not None


FAULTS: dict[str, Callable] = {
    "tables of the first step": lambda patch: patch.setattr(StepProgram, "upload_tables", lambda *a: None),
    "old history": lambda patch: patch.setattr(
        StepProgram,
        "_state",
        _with(
            StepProgram._state,
            lambda s: {"history_counts": s.history_counts * 0} if s.history_tokens is not None else {},
        ),
    ),
    "old positions": lambda patch: patch.setattr(
        StepProgram, "_state", _with(StepProgram._state, lambda s: {"positions": s.positions.copy()})
    ),
    "old random numbers": lambda patch: patch.setattr(
        StepProgram, "_state", _with(StepProgram._state, lambda s: {"draw_positions": s.draw_positions.copy()})
    ),
}


def _with(method: Callable, change: Callable) -> Callable:
    def changed(*arguments):
        state = method(*arguments)
        return dataclasses.replace(state, **change(state))

    return changed


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees_a_planted_fault(make, monkeypatch, fault):
    prompts, sampling = requests(max_tokens=20)
    expected = make().generate(prompts, sampling)
    FAULTS[fault](monkeypatch)
    assert not same(looped(make()).generate(prompts, sampling), expected)


def test_rows_that_are_not_in_use_touch_no_page(make):
    llm = looped(make())
    prompts, sampling = requests((3, 17, 5))
    for cache in (llm.engine.cache.k, llm.engine.cache.v):
        cache.fill(np.nan)
    llm.generate(prompts, sampling)
    assert llm.engine.loop._programs.keys() == {(4, 16)}
    used = {0, 1, 2, 3}  # blocks are handed out from 0 up; the second prompt grows into a second block
    for cache in map(llm.model.device.get, (llm.engine.cache.k, llm.engine.cache.v)):
        written = ~np.isnan(cache).all(axis=(0, 2, 3, 4))
        assert set(np.flatnonzero(written)) <= used
        slots = (~np.isnan(cache)).all(axis=(0, 2, 4)).sum()
        assert slots == sum(len(p) + 8 for p in prompts)  # the last token is never written


def test_a_context_that_outgrows_its_width(make):
    prompts, sampling = requests((250,), max_tokens=30)
    llm = looped(make())
    assert same(llm.generate(prompts, sampling), make().generate(prompts, sampling))
    prompts, sampling = requests((180,), max_tokens=90)
    assert same(llm.generate(prompts, sampling), make().generate(prompts, sampling))
    assert llm.engine.loop._programs.keys() == {(1, 16), (1, 32)}


def test_a_step_knows_its_shortest_context(make, monkeypatch):
    made = {}

    class Watched(StepProgram):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made[self.width * self.cache.block_size] = kwargs["min_context"]

    monkeypatch.setattr("cukern.engine.decode.StepProgram", Watched)
    prompts, sampling = requests((180,), max_tokens=90)
    looped(make()).generate(prompts, sampling)
    assert made == {256: 1, 512: 193}  # the longest is 512; a batch is loaded with room for 64 tokens


# -- ends ----------------------------------------------------------------------------------------------------------


def counting(monkeypatch) -> list[int]:
    calls: list[int] = []
    launch = StepProgram.launch

    def counted(self, flavour):
        calls.append(1)
        return launch(self, flavour)

    monkeypatch.setattr(StepProgram, "launch", counted)
    return calls


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_stop_token_wastes_no_more_than_what_is_queued(make, monkeypatch, depth):
    prompts, sampling = requests((5,), max_tokens=30)
    (free,) = make().generate(prompts, sampling)
    at = next(i for i in range(6, 30) if free.token_ids[i] not in free.token_ids[:i])
    sampling = [dataclasses.replace(sampling[0], stop_token_ids=[free.token_ids[at]])]
    calls = counting(monkeypatch)
    llm = looped(make(), depth=depth)
    (stopped,) = llm.generate(prompts, sampling)
    assert stopped.token_ids == free.token_ids[: at + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", free.token_ids[at])
    assert at <= len(calls) <= at + depth - 1  # the prompt's step gave the first token
    assert_released(llm)


def test_a_row_that_ends_leaves_the_others_alone(make):
    """Rows end at stop tokens and at their lengths, one after another; the batch is loaded again only to shrink."""
    prompts, _ = requests((5, 9, 2, 7, 6))
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=True)
    free = make().generate(prompts, greedy)
    sampling = [
        dataclasses.replace(greedy, max_tokens=n, stop_token_ids=[] if i % 2 else [free[i].token_ids[5 + i]])
        for i, n in enumerate((24, 1, 9, 24, 24))
    ]
    llm = looped(make())
    got = llm.generate(prompts, sampling)
    assert same(got, make().generate(prompts, sampling))
    assert {c.finish_reason for c in got} == {"stop", "length"}
    assert llm.engine.stats["loads"] <= 4
    assert_released(llm)


def test_more_stop_tokens_than_the_device_looks_for(make):
    prompts, sampling = requests((5, 6), params=MIXED[:1] * 2)
    free = make().generate(prompts, sampling)[0].token_ids
    stops = [*[t for t in range(VOCAB) if t not in free][:12], free[4]]
    sampling = [dataclasses.replace(sampling[0], stop_token_ids=stops), sampling[1]]
    assert same(looped(make()).generate(prompts, sampling), make().generate(prompts, sampling))


def test_stop_strings(model):
    tokenizer = Tokenizer(demo_checkpoint())
    demo = cukern.Qwen3.from_pretrained(demo_checkpoint(), device=model.device)
    sampling = SamplingParams(temperature=0, max_tokens=30, stop=["the", "a"], ignore_eos=True)
    prompts = ["According to a careful calculation I have made", "Call me"]
    plain = LLM(demo, tokenizer=tokenizer, num_blocks=16, block_size=16, cuda_graphs=False).generate(prompts, sampling)
    llm = looped(LLM(demo, tokenizer=tokenizer, num_blocks=16, block_size=16))
    got = llm.generate(prompts, sampling)
    assert got == plain
    assert any(c.finish_reason == "stop" for c in got)
    assert_released(llm)


# -- requests that come and go -------------------------------------------------------------------------------------


def test_requests_that_join_while_others_decode(make):
    prompts, sampling = requests(max_tokens=12)
    expected = make().generate(prompts, sampling)
    llm = looped(make())
    running = []
    for prompt, s in zip(prompts, sampling):
        running.append(llm.request(prompt, s))
        llm.engine.add(running[-1:])
        for _ in range(3):
            llm.engine.step()
    while llm.engine.step():
        pass
    assert same([r.completion() for r in running], expected)
    assert_released(llm)


def test_the_same_bits_after_preemption(make):
    prompts, sampling = requests((15, 15, 15), max_tokens=20)
    llm = looped(make(num_blocks=6, max_model_len=48))
    assert same(llm.generate(prompts, sampling), make().generate(prompts, sampling))
    assert llm.engine.stats["preempted"] > 0
    assert_released(llm)


def test_a_full_pool_and_waiting_requests(make):
    prompts, sampling = requests((9, 8, 7, 6, 5), max_tokens=14)
    llm = looped(make(num_blocks=3, max_num_seqs=2, max_model_len=32))
    assert same(llm.generate(prompts, sampling), make().generate(prompts, sampling))
    assert_released(llm)


def test_a_dropped_stream_leaves_the_others_right(make):
    prompts, sampling = requests((5, 6, 7), max_tokens=20)
    expected = make().generate(prompts[1:], sampling[1:])
    for steps in (1, 2, 4):
        llm = looped(make())
        first, *others = (llm.request(p, s) for p, s in zip(prompts, sampling))
        llm.engine.add([first, *others])
        for _ in range(steps):
            llm.engine.step()
        llm.engine.drop([first])
        # The blocks go to another request while a step that still writes them is queued.
        late = llm.request(prompts[0], sampling[0])
        llm.engine.add([late])
        while llm.engine.step():
            pass
        assert same([r.completion() for r in others], expected)
        assert late.completion().token_ids == make().generate(prompts[:1], sampling[:1])[0].token_ids
        assert_released(llm)


def test_dropping_everything_waits_and_forgets(make):
    llm = looped(make())
    request = llm.request([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True))
    llm.engine.add([request])
    for _ in range(4):
        llm.engine.step()
    assert llm.engine.loop.busy
    llm.engine.drop([request])
    assert_released(llm)
    assert not llm.engine.step()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", ["launch", "results", "upload_tables", "load"])
def test_an_interrupted_step_frees_everything(make, monkeypatch, kind, where):
    prompts, sampling = requests((5, 14, 7), max_tokens=12)
    llm = looped(make())
    expected = llm.generate(prompts, sampling)
    original, calls = getattr(StepProgram, where), []

    def failing(self, *arguments):
        calls.append(1)
        if len(calls) % 5 == 4:
            raise kind
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(StepProgram, where, failing)
        failed = 0
        for _ in range(12):
            try:
                llm.generate(prompts, sampling)
            except kind:
                failed += 1
            assert_released(llm)
    assert failed
    assert same(llm.generate(prompts, sampling), expected)


def test_other_streams_go_on_after_an_interruption(make, monkeypatch):
    prompts, sampling = requests((5, 6), max_tokens=20)
    expected = make().generate(prompts, sampling)
    llm = looped(make())
    running = [llm.request(p, s) for p, s in zip(prompts, sampling)]
    llm.engine.add(running)
    launch, calls = StepProgram.launch, []

    def failing(self, flavour):
        calls.append(1)
        if len(calls) in (3, 4, 9):
            raise KeyboardInterrupt
        return launch(self, flavour)

    monkeypatch.setattr(StepProgram, "launch", failing)
    while not all(r.finish_reason for r in running):
        try:
            llm.engine.step()
        except KeyboardInterrupt:
            continue
    assert same([r.completion() for r in running], expected)
    assert_released(llm)


def test_a_row_without_a_token_is_an_error(make, monkeypatch):
    llm = looped(make())
    results = StepProgram.results
    monkeypatch.setattr(
        StepProgram, "results", lambda self, number: (results(self, number)[0] * 0 - 1, *results(self, number)[1:])
    )
    with pytest.raises(RuntimeError, match="gave no token for row 0"):
        llm.generate([1, 2], SamplingParams(max_tokens=4))
    assert_released(llm)


# -- penalties and log-probabilities -------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", [False, True])
def test_penalties_and_bias_against_a_plain_loop_over_logits(model, make, loop):
    prompt = [7, 7, 9, 100, 9]
    sampling = SamplingParams(
        temperature=0, max_tokens=16, ignore_eos=True, logprobs=True, top_logprobs=4, repetition_penalty=1.3,
        presence_penalty=0.7, frequency_penalty=0.4, logit_bias={11: 6.0, 7: -3.0},
    )  # fmt: skip
    llm = looped(make()) if loop else make()
    (got,) = llm.generate([prompt], sampling)
    tokens, logprobs, top = list(prompt), [], []
    for _ in range(16):
        raw = model.device.get(model([tokens])[0, -1]).astype(np.float64)
        x = raw.copy()
        x[11] += 6.0
        x[7] -= 3.0
        for t in set(tokens):
            x[t] = x[t] / 1.3 if x[t] > 0 else x[t] * 1.3
        output = tokens[len(prompt) :]
        for t in set(output):
            x[t] -= 0.4 * output.count(t) + 0.7
        scores = raw - np.log(np.exp(raw - raw.max()).sum()) - raw.max()
        tokens.append(int(x.argmax()))
        logprobs.append(scores[tokens[-1]])
        top.append(np.argsort(-raw, kind="stable")[:4].tolist())
    assert got.token_ids == tokens[len(prompt) :]
    np.testing.assert_allclose(got.logprobs, logprobs, atol=1e-3)
    assert [[t for t, _ in best] for best in got.top_logprobs] == top
    assert len(set(got.token_ids)) > 4


def test_a_bias_can_force_and_forbid(make):
    free = make().generate([[5, 6]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0].token_ids
    for llm in (make(), looped(make())):
        force = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logit_bias={33: 100})
        assert llm.generate([[5, 6]], force)[0].token_ids == [33] * 4
        forbid = dataclasses.replace(force, logit_bias={free[0]: -100})
        assert free[0] not in llm.generate([[5, 6]], forbid)[0].token_ids


def test_only_those_who_asked_get_log_probabilities(make):
    options = [{}, {"logprobs": True}, {"top_logprobs": 2}, {"top_logprobs": 20, "logprobs": True}]
    sampling = [SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, **o) for o in options]
    got = looped(make()).generate([[1, 2, 3]] * 4, sampling)
    assert [c.logprobs is not None for c in got] == [False, True, False, True]
    assert [c.top_logprobs is not None for c in got] == [False, False, True, True]
    assert [len(best) for best in got[3].top_logprobs] == [20] * 5
    assert [best[:2] for best in got[3].top_logprobs] == got[2].top_logprobs
    assert [best[0] for best in got[3].top_logprobs] == list(zip(got[3].token_ids, got[3].logprobs))  # greedy
