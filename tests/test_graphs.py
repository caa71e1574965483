"""Decoding with queued steps over fixed buffers: the same bits as launching one step at a time, captured or not."""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cukern
from cukern import LLM, SamplingParams
from cukern.engine.arena import Arena
from cukern.engine.decode import DecodeLoop
from cukern.engine.drawing import Flavour
from cukern.engine.graphs import FixedArrays, StepProgram, context_widths, row_buckets
from cukern.engine.tokenizer import Tokenizer
from cukern.models import demo_checkpoint

DATA = Path(__file__).parent / "data"
VOCAB = 512  # of the prompts; no model here has fewer
MIXED = [
    {"temperature": 0},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.9, "top_logprobs": 3},
    {"temperature": 1.0, "min_p": 0.05, "presence_penalty": 1.0},
    {"temperature": 0, "repetition_penalty": 1.5, "logit_bias": {3: 8.0}, "logprobs": False},
]


def looped(llm: LLM, **options) -> LLM:
    """The LLM with its decoding forced through the loop; captured on a GPU."""
    engine = llm.engine
    defaults = {
        "max_num_seqs": engine.scheduler.max_num_seqs,
        "max_model_len": llm.max_model_len,
        "capture": engine.model.device.kind == "cuda",
    }
    engine.loop = DecodeLoop(engine.model, engine.cache, engine.pool, **{**defaults, **options})
    return llm


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def model(request):
    return cukern.Qwen3.from_pretrained(DATA / "tied-fp16", device=request.param)


def maker(model) -> Callable[..., LLM]:
    """LLMs that launch one operator after another."""
    defaults = {"num_blocks": 40, "block_size": 16, "max_num_seqs": 8, "cuda_graphs": False}
    return lambda **options: LLM(model, **{**defaults, **options})


@pytest.fixture
def make(model):
    return maker(model)


@pytest.fixture(scope="module")
def cpu_make():
    return maker(cukern.Qwen3.from_pretrained(DATA / "tied-fp16", device="cpu"))


def requests(lengths=(3, 17, 33, 1, 15), max_tokens=9, params=MIXED, **options):
    generator = np.random.default_rng(1)
    prompts = [generator.integers(0, VOCAB, n).tolist() for n in lengths]
    common = {"max_tokens": max_tokens, "ignore_eos": True, "logprobs": True, **options}
    return prompts, [SamplingParams(**{"seed": i, **common, **p}) for i, p in enumerate(params[: len(prompts)])]


def bits(completions):
    return [(c.token_ids, c.logprobs, c.top_logprobs, c.finish_reason, c.stop_reason) for c in completions]


def same(completions, expected) -> bool:
    """The same tokens and ends; log-probabilities up to the rounding of NumPy's products, which see the whole batch."""
    if [(c[0], *c[3:]) for c in bits(completions)] != [(e[0], *e[3:]) for e in bits(expected)]:
        return False
    for a, b in zip(completions, expected):
        for x, y in ((a.logprobs, b.logprobs), (_values(a.top_logprobs), _values(b.top_logprobs))):
            if (x is None) != (y is None) or (x is not None and not np.allclose(x, y, rtol=0, atol=1e-4)):
                return False
    return True


def _values(top):
    return None if top is None else [[value for _, value in best] for best in top]


def assert_released(llm: LLM) -> None:
    assert llm.num_free_blocks == llm.num_blocks
    assert llm.engine.scheduler.idle
    assert not llm.engine.loop.busy


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


# -- parts ---------------------------------------------------------------------------------------------------------


def test_row_buckets():
    assert row_buckets(1) == [1]
    assert row_buckets(5) == [1, 2, 4, 5]
    assert row_buckets(256) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    assert row_buckets(600)[-4:] == [256, 384, 512, 600]
    for most in range(1, 700):
        buckets = row_buckets(most)
        assert buckets == sorted(set(buckets))
        assert buckets[-1] == most


def test_context_widths():
    assert context_widths(40960, 64) == [4, 16, 64, 256, 640]
    assert context_widths(256, 256) == [1]
    assert context_widths(257, 256) == [1, 2]
    assert context_widths(100, 16) == [7]


def test_depth_is_checked(model):
    with pytest.raises(ValueError, match="depth must be 1 to 7, got 8"):
        DecodeLoop(model, None, None, max_num_seqs=1, max_model_len=1, capture=False, depth=8)


def test_fixed_arrays_are_one_buffer_with_aligned_parts():
    shapes = {"a": ((5,), np.int64, -1), "b": ((2, 3), np.int32, 7), "c": ((0,), np.float32, 0)}
    arrays = FixedArrays(SimpleNamespace(kind="cpu", xp=np), shapes)
    arrays.host["b"][1] = 9
    arrays.upload()
    assert arrays.at["a"].tolist() == [-1] * 5
    assert arrays.at["b"].tolist() == [[7, 7, 7], [9, 9, 9]]
    assert arrays.at["b"].ctypes.data - arrays.at["a"].ctypes.data == 256
    arrays.clear()
    assert arrays.host["b"].tolist() == [[7] * 3] * 2
    assert arrays.at["b"][1].tolist() == [9] * 3


def simulated_memory(slabs: list[int]) -> Callable[[int], SimpleNamespace]:
    def allocate(size: int) -> SimpleNamespace:
        slabs.append(size)
        return SimpleNamespace(ptr=1 << 20 if len(slabs) == 1 else (1 << 20) + sum(slabs[:-1]))  # back to back

    return allocate


def test_arena_never_hands_out_memory_twice():
    slabs: list[int] = []
    arena = Arena(simulated_memory(slabs), slab=1 << 14)
    generator, held = np.random.default_rng(0), []
    for _ in range(500):
        if held and generator.random() < 0.5:
            held.pop(int(generator.integers(len(held))))
        else:
            held.append(arena.take(int(generator.integers(0, 6000))))
        spans = sorted((lease.address, lease.address + lease.size) for lease in held)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert all(start % 512 == 0 for start, _ in spans)
    held.clear()
    starts = np.cumsum([1 << 20, *slabs])[:-1].tolist()
    assert arena._free == list(zip(starts, slabs))  # joined again, but never across allocations
    assert arena.nbytes == sum(slabs)


def test_arena_uses_its_memory_again():
    slabs: list[int] = []
    arena = Arena(simulated_memory(slabs), slab=1 << 14)

    def step() -> list[int]:
        first = arena.take(5000)
        second = arena.take(9000)
        addresses = [first.address, second.address]
        del first
        third = arena.take(20000)
        return [*addresses, third.address, second.address]

    warm = step()
    assert step() == warm
    assert len(slabs) == 2


class FakeStream:
    """Records what is launched while it captures; the graph runs it again."""

    def __init__(self) -> None:
        self.capturing, self.captured, self.fail = False, 0, ""

    def synchronize(self) -> None:
        assert not self.capturing

    def begin_capture(self) -> None:
        self.capturing = True

    def end_capture(self):
        self.capturing = False
        if self.fail == "end":
            raise RuntimeError("capture invalidated")
        self.captured += 1
        return SimpleNamespace(launch=self.replay)


@pytest.fixture
def captured(monkeypatch):
    """A GPU that captures: the step is not run while its stream captures, and a replay runs it."""
    stream = FakeStream()
    run = StepProgram._run
    rows_in_use = []

    def recorded(self, flavour):
        if stream.capturing:
            if stream.fail == "run":
                raise RuntimeError("operation not permitted when stream is capturing")
            stream.replay = lambda: run(self, flavour)
            return
        rows_in_use.append(int((self._inputs["seq_lens"] > 0).sum()))
        run(self, flavour)

    monkeypatch.setattr(StepProgram, "_run", recorded)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: stream)))
    return stream, rows_in_use


def test_a_step_is_captured_once_a_flavour_with_no_row_in_use(cpu_make, captured):
    stream, warm_up = captured
    prompts, sampling = requests((5, 9), params=MIXED[:2])
    expected = cpu_make().generate(prompts, sampling)
    llm = looped(cpu_make(), capture=True)
    assert same(llm.generate(prompts, sampling), expected)
    assert same(llm.generate(prompts, sampling), expected)
    stats = llm.engine.stats
    assert stats["replayed"] == stats["decode_steps"] == 16
    assert stream.captured == stats["graphs"] == 1
    assert warm_up == [0]
    llm.generate(prompts[:1], sampling[:1])
    assert stream.captured == llm.engine.stats["graphs"] == 2


@pytest.mark.parametrize("fail", ["run", "end"])
def test_where_capturing_fails_steps_are_launched_and_it_is_said(cpu_make, captured, fail):
    stream, _ = captured
    stream.fail = fail
    prompts, sampling = requests((5, 9), params=MIXED[:2])
    llm = looped(cpu_make(), capture=True)
    llm.engine._no_graphs = None
    assert same(llm.generate(prompts, sampling), cpu_make().generate(prompts, sampling))
    stats = llm.engine.stats
    assert (stats["replayed"], stats["graphs"]) == (0, 0)
    assert stats["decode_steps"] == 8
    assert stats["cuda_graphs"].startswith("capturing a decoding step failed: RuntimeError: ")
    assert not stream.capturing


def test_stats_without_a_gpu(cpu_make):
    llm = cpu_make()
    llm.generate([1, 2], SamplingParams(max_tokens=4, ignore_eos=True))
    assert llm.engine.stats == {
        "steps": 4, "decode_steps": 0, "replayed": 0, "loads": 0, "graphs": 0, "preempted": 0,
        "cuda_graphs": "not on a GPU (cpu)",
    }  # fmt: skip


# -- the kernels themselves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("persistent_rows", [0, 16])
def test_emulated(persistent_rows):
    model = cukern.Qwen3.from_pretrained(DATA / "tied-fp16", device="emulated")
    prompts, sampling = requests((3, 17, 14), max_tokens=4, params=MIXED[2:])
    with cukern.emulate(check=True):
        expected = bits(LLM(model, num_blocks=12, block_size=16).generate(prompts, sampling))
        llm = looped(LLM(model, num_blocks=12, block_size=16), persistent_rows=persistent_rows)
        assert bits(llm.generate(prompts, sampling)) == expected
    assert llm.engine.stats["decode_steps"] >= 3


@pytest.fixture(scope="module", params=["tied-fp16", "untied-bf16-sharded", "hd128-fp16"])
def gpu_model(request):
    return cukern.Qwen3.from_pretrained(DATA / request.param, device="cuda")


def on_gpu(model, **options) -> LLM:
    return LLM(model, **{"num_blocks": 400, "block_size": 16, "max_num_seqs": 48, "max_model_len": 320, **options})


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 13, 16, 17, 24, 33, 48])
def test_captured_bits_at_every_bucket(gpu_model, count):
    vocab = gpu_model.config.vocab_size
    generator = np.random.default_rng(count)
    prompts = [generator.integers(0, vocab, int(n)).tolist() for n in generator.integers(1, 90, count)]
    sampling = [
        SamplingParams(**{"seed": i, "max_tokens": 20, "ignore_eos": True, "logprobs": True, **MIXED[i % len(MIXED)]})
        for i in range(count)
    ]
    expected = bits(on_gpu(gpu_model, cuda_graphs=False).generate(prompts, sampling))
    llm = on_gpu(gpu_model)
    assert bits(llm.generate(prompts, sampling)) == expected
    stats = llm.engine.stats
    assert stats["cuda_graphs"] == "on"
    assert stats["replayed"] == stats["decode_steps"] > 0
    # another order, another page size, another set of neighbours
    other = on_gpu(gpu_model, block_size=64, num_blocks=200)
    assert bits(other.generate(prompts[::-1], sampling[::-1])[::-1]) == expected
    half = count // 2 + 1
    assert bits(llm.generate(prompts[:half], sampling[:half])) == expected[:half]
    assert_released(llm)


@pytest.mark.gpu
@pytest.mark.parametrize("persistent_rows", [0, 16])
@pytest.mark.parametrize("params", MIXED, ids=["greedy", "top_k", "top_p", "presence", "repetition"])
def test_captured_logits_bit_for_bit(gpu_model, persistent_rows, params):
    """Logits of every step, captured against launched, by either kind of step."""
    prompts, sampling = requests((30, 5, 17), max_tokens=12, params=[params] * 3)

    def steps(capture: bool, rows: int) -> list[np.ndarray]:
        llm = looped(on_gpu(gpu_model), capture=capture, persistent_rows=rows, keep_logits=True, depth=1)
        running = [llm.request(p, s) for p, s in zip(prompts, sampling)]
        llm.engine.add(running)
        out = []
        while llm.engine.step():
            loop = llm.engine.loop
            if loop.program is not None:
                out.append(loop.program.logits[loop.flavour].get()[:3])
        assert llm.engine.stats["replayed"] == (llm.engine.stats["decode_steps"] if capture else 0)
        return out

    captured, launched = steps(True, persistent_rows), steps(False, 0)
    assert len(captured) == len(launched) >= 10
    for i, (a, b) in enumerate(zip(captured, launched)):
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32), err_msg=f"step {i}")


@pytest.mark.gpu
def test_captured_steps_on_another_stream_and_with_work_before_them(gpu_model):
    import cupy

    prompts, sampling = requests((30, 5, 17), max_tokens=12, params=MIXED[:3])
    llm = on_gpu(gpu_model)
    expected = bits(llm.generate(prompts, sampling))
    for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream()):
        with stream:
            big = cupy.ones((4096, 4096), cupy.float32)
            for _ in range(5):
                big = big @ big * 1e-4
            assert bits(llm.generate(prompts, sampling)) == expected


@pytest.mark.gpu
def test_an_edited_weight_shows_in_captured_steps():
    model = cukern.Qwen3.from_pretrained(DATA / "tied-fp16", device="cuda")
    llm = on_gpu(model)
    prompts, sampling = requests((30, 5), max_tokens=12, params=MIXED[:2])
    before = bits(llm.generate(prompts, sampling))
    model.weights["model.norm.weight"][...] *= -1
    after = bits(llm.generate(prompts, sampling))
    assert after != before
    assert after == bits(on_gpu(model, cuda_graphs=False).generate(prompts, sampling))


@pytest.mark.gpu
def test_graphs_keep_their_memory_when_everything_around_is_freed(gpu_model):
    """Replays between allocations that take and poison whatever the pools have given back."""
    import cupy

    prompts, sampling = requests(max_tokens=16)
    llm = on_gpu(gpu_model)
    expected = bits(llm.generate(prompts, sampling))
    for _ in range(3):
        gc.collect()
        cupy.get_default_memory_pool().free_all_blocks()
        poison = [cupy.full(1 << 22, cupy.nan, cupy.float32) for _ in range(64)]
        del poison
        assert bits(llm.generate(prompts, sampling)) == expected
    assert llm.engine.stats["replayed"] == llm.engine.stats["decode_steps"]


@pytest.mark.gpu
def test_closing_frees_what_graphs_hold(gpu_model):
    import cupy

    prompts, sampling = requests(max_tokens=6)
    pool = cupy.get_default_memory_pool()
    used = []
    for _ in range(3):
        with on_gpu(gpu_model) as llm:
            llm.generate(prompts, sampling)
        del llm
        gc.collect()
        used.append(pool.used_bytes())
    assert used[1] == used[2]
