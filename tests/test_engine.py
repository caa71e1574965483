"""LLM from prompt to completion: the demonstration model and the small golden checkpoints on the CPU reference."""

from __future__ import annotations

import dataclasses
import gc
import shutil
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cukern
from cukern import LLM, SamplingParams
from cukern.engine import engine as engine_module
from cukern.engine.engine import Engine, plan_memory
from cukern.engine.tokenizer import Tokenizer
from cukern.models import demo_checkpoint

DATA = Path(__file__).parent / "data"
PROMPT = "According to a careful calculation I have made"
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=True)


@pytest.fixture(scope="module")
def model():
    return cukern.Qwen3.from_pretrained(demo_checkpoint(), device="cpu")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(demo_checkpoint())


@pytest.fixture
def make(model, tokenizer):
    """An LLM over the shared model with options of the test's own."""

    def build(**options) -> LLM:
        return LLM(model, tokenizer=tokenizer, **{"num_blocks": 64, "block_size": 16, **options})

    return build


@pytest.fixture
def llm(make) -> LLM:
    return make()


@pytest.fixture(scope="module")
def tiny_model():
    return cukern.Qwen3.from_pretrained(DATA / "tied-fp16", device="cpu")


@pytest.fixture
def tiny(tiny_model, tokenizer) -> LLM:
    """A model small enough for hundreds of rounds, over two blocks: a leak of one would fail the next round."""
    return LLM(tiny_model, tokenizer=tokenizer, num_blocks=2, block_size=16)


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / name / "golden.npz") as file:
        return dict(file)


def short(**options) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **options})


def assert_released(llm: LLM) -> None:
    assert llm.num_free_blocks == llm.num_blocks
    assert llm.engine.scheduler.idle


# -- golden values -------------------------------------------------------------------------------------------------


def check_demo(llm: LLM, tokens: int, tolerance: float) -> None:
    expected = golden("demo-qwen3")
    (completion,) = llm.generate(PROMPT, dataclasses.replace(GREEDY, max_tokens=tokens))
    assert completion.prompt_token_ids == expected["input_ids"][0].tolist()
    assert completion.token_ids == expected["greedy_ids"][0][:tokens].tolist()
    np.testing.assert_allclose(completion.logprobs, expected["greedy_logprobs"][0][:tokens], atol=tolerance)
    assert completion.text == llm.tokenizer.decode(completion.token_ids)
    assert (completion.finish_reason, completion.seed) == ("length", None)


def test_demo_continuation_on_the_cpu():
    with LLM(demo_checkpoint(), device="cpu", max_num_seqs=1) as llm:
        check_demo(llm, 48, 1e-3)


@pytest.mark.gpu
def test_demo_continuation_on_the_gpu():
    with LLM(demo_checkpoint(), device="cuda") as llm:
        check_demo(llm, 48, 0.05)


@pytest.mark.parametrize("name", ["tied-fp16", "untied-bf16-sharded", "hd128-fp16", "yarn-fp16"])
def test_golden_checkpoints_greedy(name):
    expected = golden(name)
    with LLM(DATA / name, device="cpu", num_blocks=32, block_size=16) as llm:
        prompts = expected["input_ids"].tolist()
        sampling = SamplingParams(
            temperature=0, max_tokens=expected["greedy_ids"].shape[1], ignore_eos=True, logprobs=True
        )
        completions = llm.generate(prompts, sampling)
    assert [c.token_ids for c in completions] == expected["greedy_ids"].tolist()
    np.testing.assert_allclose([c.logprobs for c in completions], expected["greedy_logprobs"], atol=1e-3)
    assert [c.text for c in completions] == [""] * len(prompts)  # no tokenizer there


# -- batching ------------------------------------------------------------------------------------------------------

PROMPTS = ["The whale", PROMPT, "To the Congress of the United States:\n\nI have the honour to", "Call me", "a"]


def test_prompts_of_different_lengths_give_what_each_gives_alone(llm):
    sampling = [short(temperature=0), short(temperature=0.8, seed=3), short(temperature=1.0, top_k=20, seed=4)]
    sampling += [short(temperature=1.2, top_p=0.9, seed=5), short(temperature=0.5, min_p=0.1, seed=6, max_tokens=3)]
    together = llm.generate(PROMPTS, sampling)
    alone = [llm.generate(p, s)[0] for p, s in zip(PROMPTS, sampling)]
    assert together == alone
    assert [len(c.token_ids) for c in together] == [8, 8, 8, 8, 3]


@pytest.mark.parametrize(
    "options",
    [
        {"max_batched_tokens": 3},  # prompts in pieces
        {"max_num_seqs": 2},  # requests wait their turn
        {"num_blocks": 4, "max_model_len": 40},  # little memory: waiting and pre-emption
        {"block_size": 64, "num_blocks": 16},
    ],
)
def test_scheduling_does_not_change_results(make, llm, options):
    sampling = [short(temperature=0.9, seed=i, max_tokens=14) for i in range(len(PROMPTS))]
    constrained = make(**options)
    assert [c.token_ids for c in constrained.generate(PROMPTS, sampling)] == [
        c.token_ids for c in llm.generate(PROMPTS, sampling)
    ]
    assert_released(constrained)


def test_preemption_happens_and_is_invisible(make, llm):
    prompts = [[10 + i] * 15 for i in range(3)]
    sampling = [short(temperature=0.9, seed=i, max_tokens=20, logprobs=True) for i in range(3)]
    tight = make(num_blocks=6)
    got = tight.generate(prompts, sampling)
    assert tight.engine.scheduler.num_preempted > 0
    expected = llm.generate(prompts, sampling)
    assert [c.token_ids for c in got] == [c.token_ids for c in expected]
    for a, b in zip(got, expected):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


def test_blocks_used_again_hold_nothing_of_the_past(make):
    llm = make(num_blocks=2, block_size=16, max_model_len=32)
    first, second = list(range(1, 17)), list(range(101, 117))
    sampling = short(temperature=0, logprobs=True)
    once = llm.generate([first], sampling)
    llm.generate([second], sampling)
    assert llm.generate([first], sampling) == once
    assert_released(llm)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_prompt_lengths_around_block_boundaries(llm, model, length):
    prompt = [int(i) for i in np.random.default_rng(length).integers(0, 4000, length)]
    (completion,) = llm.generate([prompt], short(temperature=0, max_tokens=3))
    tokens = list(prompt)
    for _ in range(3):
        tokens.append(int(model([tokens])[0, -1].argmax()))
    assert completion.token_ids == tokens[length:]


def test_forms_of_prompts(llm):
    ids = llm.tokenizer.encode("The whale")
    expected = llm.generate("The whale", short(temperature=0))
    for form in (["The whale"], ids, [ids], tuple(ids), np.array(ids), [np.array(ids)], ("The whale",)):
        assert llm.generate(form, short(temperature=0)) == expected
    mixed = llm.generate(["The whale", ids], short(temperature=0))
    assert mixed == expected * 2
    assert llm.generate([]) == []
    assert llm.generate([], []) == []


# -- sampling ------------------------------------------------------------------------------------------------------


def test_logprobs_are_of_the_logits_at_the_temperature(llm, model):
    for temperature in (0.0, 0.6, 1.0, 1.7):
        sampling = short(temperature=temperature, top_k=5, seed=2, logprobs=True)
        (completion,) = llm.generate(PROMPT, sampling)
        tokens = completion.prompt_token_ids + completion.token_ids
        logits = model([tokens])[0, len(completion.prompt_token_ids) - 1 : -1].astype(np.float64)
        scaled = logits / (temperature or 1.0)  # greedy: temperature 1
        scaled -= scaled.max(-1, keepdims=True)
        logprobs = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
        expected = logprobs[np.arange(len(completion.token_ids)), completion.token_ids]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-3)
        assert max(completion.logprobs) <= 0


def test_logprobs_only_where_asked(llm):
    got = llm.generate(["a", "b"], [short(logprobs=True), short()])
    assert len(got[0].logprobs) == 8
    assert got[1].logprobs is None


def test_seeds(llm):
    one, same, other = (llm.generate("The", short(temperature=1.0, seed=s))[0] for s in (5, 5, 6))
    assert one == same
    assert one.seed == 5
    assert one.token_ids != other.token_ids
    fresh = [llm.generate("The", short(temperature=1.0, max_tokens=12))[0] for _ in range(2)]
    assert fresh[0].seed != fresh[1].seed
    assert fresh[0].token_ids != fresh[1].token_ids
    (again,) = llm.generate("The", short(temperature=1.0, max_tokens=12, seed=fresh[0].seed))
    assert again.token_ids == fresh[0].token_ids


def test_top_k_of_one_and_tiny_temperature_are_greedy(llm):
    (greedy,) = llm.generate(PROMPT, short(temperature=0))
    for params in (short(temperature=1.0, top_k=1, seed=1), short(temperature=1e-6, seed=1), short(top_p=1e-6, seed=2)):
        assert llm.generate(PROMPT, params)[0].token_ids == greedy.token_ids


def test_checkpoint_defaults_apply():
    with LLM(DATA / "tied-fp16", device="cpu", num_blocks=8) as llm:
        assert (llm.defaults.temperature, llm.defaults.top_k, llm.defaults.top_p) == (0.6, 20, 0.95)
        assert llm.defaults.eos_token_ids == (5, 6)
        (completion,) = llm.generate([1, 2, 3], short())
        assert completion.seed is not None  # it sampled


def test_a_checkpoint_that_ends_with_no_token_is_refused(tmp_path):
    shutil.copytree(demo_checkpoint(), tmp_path / "demo")
    (tmp_path / "demo" / "generation_config.json").write_text('{"eos_token_id": 1000000000}')
    with pytest.raises(ValueError, match=r"demo/generation_config\.json: eos_token_id has 1000000000, outside the"):
        LLM(tmp_path / "demo", device="cpu", num_blocks=8)


# -- endings -------------------------------------------------------------------------------------------------------


def test_stop_strings_end_before_their_text(llm):
    (full,) = llm.generate(PROMPT, short(temperature=0, max_tokens=30))
    for stop in ("Congress", "ommend to C", " it my"):
        (cut,) = llm.generate(PROMPT, short(temperature=0, max_tokens=30, stop=stop))
        assert cut.text == full.text[: full.text.index(stop)]
        assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
        assert llm.tokenizer.decode(cut.token_ids).startswith(cut.text + stop)
        assert full.token_ids[: len(cut.token_ids)] == cut.token_ids
        stream = llm.stream(PROMPT, short(temperature=0, max_tokens=30, stop=stop))
        assert "".join(stream) == cut.text
        assert stream.result == cut
    (missed,) = llm.generate(PROMPT, short(temperature=0, max_tokens=30, stop="never said"))
    assert missed == full


def test_stop_tokens_and_eos(llm):
    (full,) = llm.generate(PROMPT, short(temperature=0, logprobs=True))
    (cut,) = llm.generate(PROMPT, short(temperature=0, stop_token_ids=[full.token_ids[3]], logprobs=True))
    assert cut.token_ids == full.token_ids[:4]  # the stopping token is there, its text is not
    assert cut.text == llm.tokenizer.decode(full.token_ids[:3])
    assert (cut.finish_reason, cut.stop_reason) == ("stop", full.token_ids[3])
    assert len(cut.logprobs) == 4
    llm.defaults = dataclasses.replace(llm.defaults, eos_token_ids=(full.token_ids[2],))
    assert llm.generate(PROMPT, short(temperature=0, ignore_eos=False))[0].token_ids == full.token_ids[:3]
    assert llm.generate(PROMPT, short(temperature=0))[0].token_ids == full.token_ids


def test_max_tokens(make):
    llm = make(max_model_len=24)
    (empty,) = llm.generate("a", short(max_tokens=0, logprobs=True))
    assert (empty.text, empty.token_ids, empty.logprobs, empty.finish_reason) == ("", [], [], "length")
    assert "".join(llm.stream("a", short(max_tokens=0))) == ""
    (most,) = llm.generate([[1] * 10], short(max_tokens=None))
    assert len(most.token_ids) == 14
    assert [len(c.token_ids) for c in llm.generate(["a", "b"], [short(max_tokens=0), short(max_tokens=1)])] == [0, 1]
    assert_released(llm)


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ("", ValueError, r"prompts\[0\] is empty"),
        ([[]], ValueError, r"prompts\[0\] is empty"),
        (["hi", ""], ValueError, r"prompts\[1\] is empty"),
        ([[1, 4096]], ValueError, r"prompts\[0\] has token id 4096, outside the vocabulary 0..4095"),
        ([[-1]], ValueError, "token id -1"),
        ([[1.5]], TypeError, "integer token ids, got 1.5"),
        ([[True]], TypeError, "integer token ids, got True"),
        (5, TypeError, "prompts must be a text"),
        (b"bytes", TypeError, "prompts must be a text"),
        (np.array(3), TypeError, "prompts must be a text"),
        ({1, 2}, TypeError, "prompts must be a text, token ids, or a list of these, got set"),
        ([{1, 2}], TypeError, r"prompts\[0\] must be a text or token ids, got set"),
        ([np.array([[1, 2]])], TypeError, "integer token ids"),
        ([[2**70]], ValueError, "token id 1180591620717411303424"),
        ([None], TypeError, r"prompts\[0\] must be a text or token ids"),
        ([[1] * 2048], ValueError, "2048 tokens; that alone exceeds max_model_len 1024"),
        ("a\ud800", ValueError, "lone surrogate"),
        (["a", "a\ud800"], ValueError, r"prompts\[1\] holds a lone surrogate"),
    ],
)
def test_bad_prompts_are_refused_before_any_work(llm, monkeypatch, prompts, error, message):
    monkeypatch.setattr(llm.engine, "step", lambda: pytest.fail("computed something"))
    with pytest.raises(error, match=message):
        llm.generate(prompts, short())
    assert_released(llm)


@pytest.mark.parametrize(
    ("options", "prompt", "sampling", "message"),
    [
        ({}, 2000, {}, "with max_tokens 256 (the default) that exceeds max_model_len 2048, the model's own limit; "
         "shorten it or lower max_tokens (None: as many as fit)"),
        ({"max_model_len": 64}, 60, {"max_tokens": 8}, "60 tokens; with max_tokens 8 that exceeds max_model_len 64; "
         "shorten it, lower max_tokens (None: as many as fit) or raise max_model_len"),
        ({"max_model_len": 64}, 1, {"max_tokens": 70}, "prompts[0] has 1 token; with max_tokens 70 that exceeds "
         "max_model_len 64; lower max_tokens (None: as many as fit) or raise max_model_len"),
        ({"max_model_len": 64}, 65, {"max_tokens": None}, "65 tokens; that alone exceeds max_model_len 64; "
         "shorten it or raise max_model_len"),
        ({"num_blocks": 4}, 60, {"max_tokens": 8}, "exceeds max_model_len 64, all that the KV pool holds; shorten it, "
         "lower max_tokens (None: as many as fit) or give more KV memory"),
    ],
)  # fmt: skip
def test_too_long_a_prompt_is_advised_what_can_help(model, options, prompt, sampling, message):
    options = {"block_size": 16, "num_blocks": 128} | options
    with pytest.raises(ValueError) as caught:
        LLM(model, **options).generate([[1] * prompt], SamplingParams(**sampling))
    assert str(caught.value).endswith(message)


def test_other_refusals(llm, make, model):
    with pytest.raises(ValueError, match="2 sampling parameters for 1 prompts"):
        llm.generate("a", [short(), short()])
    with pytest.raises(TypeError, match="sampling must be SamplingParams, got dict"):
        llm.generate(["a"], [{"temperature": 1}])
    for wrong in (5, {"temperature": 0}, SamplingParams):
        with pytest.raises(TypeError, match="sampling must be SamplingParams or a list of them"):
            llm.generate("a", wrong)
    with pytest.raises(ValueError, match="outside the vocabulary of 4096"):
        llm.generate("a", short(stop_token_ids=[4096]))
    small = make(num_blocks=4)
    small.engine.pool.num_blocks = 2
    with pytest.raises(ValueError, match="exceeds the KV pool of 2 blocks of 16"):
        small.generate([[1] * 30], short(max_tokens=8))
    bare = LLM(model, num_blocks=4, block_size=16)
    with pytest.raises(ValueError, match=r"a text prompt needs a tokenizer"):
        bare.generate("text")
    with pytest.raises(ValueError, match="chat needs a tokenizer"):
        bare.chat([{"role": "user", "content": "Hi"}])
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        bare.generate([1], short(stop="x"))
    with pytest.raises(ValueError, match="belong to the model"):
        LLM(model, device="cpu")


@pytest.mark.parametrize(
    "name", ["max_num_seqs", "max_batched_tokens", "block_size", "max_model_len", "num_blocks", "kv_memory"]
)
@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1, ValueError), (True, ValueError), (1.5, TypeError), ("8", TypeError)]
)
def test_sizes_must_be_positive_integers(model, name, value, error):
    must = "at least 1" if error is ValueError else "an integer"
    with pytest.raises(error, match=f"LLM: {name} must be {must}, got {value!r}"):
        LLM(model, **{name: value})


def test_narrow_integers_do_not_overflow(model):
    sizes = dict.fromkeys(("max_num_seqs", "num_blocks", "block_size", "max_batched_tokens", "max_model_len"), 16)
    narrow = LLM(model, **{name: np.int8(size) for name, size in sizes.items()})
    wide = LLM(model, **sizes)
    assert narrow.max_model_len == wide.max_model_len
    found = [llm.generate([1, 2, 3], dataclasses.replace(GREEDY, max_tokens=4))[0].token_ids for llm in (narrow, wide)]
    assert found[0] == found[1]
    assert len(found[0]) == 4


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"cuda_graphs": "no"}, TypeError, "LLM: cuda_graphs must be True or False, got 'no'"),
        ({"tokenizer": 3}, TypeError, "LLM: tokenizer must be a folder or a Tokenizer, got int"),
        (
            {"num_blocks": 10**12},
            MemoryError,
            "num_blocks 1000000000000: the KV cache would need .* GB, more than cpu has",
        ),
        ({"num_blocks": 2**70}, MemoryError, f"num_blocks {2**70}: the KV cache would need"),
    ],
)
def test_other_options_are_refused_by_name(model, option, error, message):
    with pytest.raises(error, match=message):
        LLM(model, **option)


def plan(model, **options) -> tuple[int, int]:
    defaults = {"block_size": 16, "max_num_seqs": 4, "max_batched_tokens": 64, "max_model_len": None}
    return plan_memory(model, **{**defaults, "num_blocks": None, "kv_memory": None, **options})


def test_memory_plan(model, monkeypatch):
    block = 2 * 4 * 2 * 128 * 16 * 4  # k and v, layers, heads, head_dim, tokens, float32
    assert plan(model) == (4 * 2048 // 16, 2048)
    assert plan(model, max_model_len=100) == (4 * 7, 100)
    assert plan(model, kv_memory=10 * block + 5) == (10, 160)
    assert plan(model, num_blocks=3) == (3, 48)
    monkeypatch.setattr(engine_module, "HOST_KV_BYTES", 6 * block)
    assert plan(model) == (6, 96)
    for options, message in [
        ({"max_model_len": 2049}, r"max_model_len must be in 1..2048"),
        ({"num_blocks": 2, "kv_memory": 5}, "not both"),
        ({"kv_memory": block - 1}, f"at least one block of {block} bytes"),
        ({"num_blocks": 2, "max_model_len": 33}, "2 blocks of 16 hold 32 tokens, less than max_model_len 33"),
    ]:
        with pytest.raises(ValueError, match=message):
            plan(model, **options)


def test_memory_plan_on_a_gpu(model, monkeypatch):
    block = 2 * 4 * 2 * 128 * 16 * 2
    gpu = SimpleNamespace(
        config=model.config, max_positions=2048, dtype=np.dtype(np.float16), device=SimpleNamespace(kind="cuda")
    )
    step = engine_module._activation_bytes(model.config, 64, 4)
    assert step > 4 * model.config.vocab_size * 4
    monkeypatch.setattr(engine_module, "_free_gpu_bytes", lambda model: step + 100 * block + 1)
    assert plan(gpu) == (100, 1600)
    monkeypatch.setattr(engine_module, "_free_gpu_bytes", lambda model: step)
    with pytest.raises(ValueError, match=r"0.00 GB of GPU memory are left"):
        plan(gpu)


# -- streams and resources -----------------------------------------------------------------------------------------


def test_stream_gives_the_text_of_generate(llm):
    sampling = short(temperature=0.8, seed=9, max_tokens=20, logprobs=True)
    stream = llm.stream(PROMPT, sampling)
    with pytest.raises(RuntimeError, match="not at its end"):
        _ = stream.result
    pieces = list(stream)
    assert all(pieces)
    assert "".join(pieces) == stream.result.text
    assert [stream.result] == llm.generate(PROMPT, sampling)
    assert list(stream) == []
    assert_released(llm)


def test_streams_interleave_with_each_other_and_with_generate(llm):
    sampling = [short(temperature=0.9, seed=i, max_tokens=12) for i in range(3)]
    expected = [llm.generate(p, s)[0] for p, s in zip(PROMPTS, sampling)]
    first, second = llm.stream(PROMPTS[0], sampling[0]), llm.stream(PROMPTS[1], sampling[1])
    texts = [next(first), next(second)]
    third = llm.generate(PROMPTS[2], sampling[2])[0]
    texts[0] += "".join(first)
    texts[1] += "".join(second)
    assert texts == [expected[0].text, expected[1].text]
    assert [first.result, second.result, third] == expected
    assert_released(llm)


def test_a_stream_closed_early_reports_what_it_had(llm):
    stream = llm.stream(PROMPT, short(temperature=0, max_tokens=30))
    piece = next(stream)
    stream.close()
    stream.close()
    assert stream.result.finish_reason == "abort"
    assert stream.result.text.startswith(piece)
    assert 0 < len(stream.result.token_ids) < 30
    assert_released(llm)
    with llm.stream(PROMPT, short()) as stream:
        next(stream)
    assert stream.result.finish_reason == "abort"
    assert_released(llm)


class Boom(Exception):
    pass


def leave_by_break(llm):
    for _ in llm.stream([1, 2], short()):
        break


def leave_by_close(llm):
    stream = llm.stream([1, 2], short())
    next(stream)
    stream.close()


def leave_by_exception_in_the_loop(llm):
    try:
        for _ in llm.stream([1, 2], short()):
            raise Boom
    except Boom:
        pass


def leave_unread(llm):
    llm.stream([1, 2], short())


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_close, leave_by_exception_in_the_loop, leave_unread])
def test_leaving_a_stream_200_times_frees_its_blocks(tiny, leave):
    for _ in range(200):
        leave(tiny)
        assert tiny.num_free_blocks == 2
    assert len(tiny.generate([1, 2], short())[0].token_ids) == 8


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError, MemoryError])
def test_an_interrupted_step_200_times_frees_everything(tiny, tiny_model, monkeypatch, kind):
    expected = tiny.generate([[1, 2], [3]], short(temperature=0))
    hidden, calls = type(tiny_model).hidden, []

    def failing(self, batch, cache, **options):
        calls.append(1)
        if len(calls) % 3 == 0:
            raise kind
        return hidden(self, batch, cache, **options)

    def one_stream():
        list(tiny.stream([1, 2], short(max_tokens=3)))

    with monkeypatch.context() as patch:
        patch.setattr(type(tiny_model), "hidden", failing)
        for i in range(200):
            use = (lambda: tiny.generate([[1, 2], [3]], short(max_tokens=3))) if i % 2 else one_stream
            with pytest.raises(kind):
                use()
            assert_released(tiny)
    assert tiny.generate([[1, 2], [3]], short(temperature=0)) == expected


def test_an_interruption_inside_the_bookkeeping_loses_no_block(make, monkeypatch):
    llm = make(num_blocks=4)
    pool = llm.engine.pool

    def interrupted(table, tokens):
        table.append(pool._free.pop())
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pool, "grow", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("The whale", short())
    assert_released(llm)


def test_an_interrupted_step_leaves_other_streams_right(llm, model, monkeypatch):
    sampling = short(temperature=0.9, seed=1, max_tokens=12)
    (expected,) = llm.generate(PROMPT, sampling)
    stream = llm.stream(PROMPT, sampling)
    text = next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "hidden", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            llm.generate("Call me", short())
    assert text + "".join(stream) == expected.text
    assert stream.result == expected


def test_a_kept_traceback_pins_no_activations(llm, model, monkeypatch):
    alive = []

    def hidden(self, batch, cache, **options):
        activations = np.zeros(10)
        alive.append(weakref.ref(activations))
        raise Boom("kept")

    monkeypatch.setattr(type(model), "hidden", hidden)
    with pytest.raises(Boom) as kept:
        llm.generate("The whale", short())
    gc.collect()
    assert kept.value.__traceback__ is not None
    assert alive[0]() is None


def test_a_stream_collected_inside_a_step_is_dropped_after_it(llm, model, monkeypatch):
    stream = llm.stream("Call me", short(max_tokens=30))
    next(stream)
    hidden, held = type(model).hidden, [stream]
    del stream

    def collecting(self, batch, cache, **options):
        held.clear()
        return hidden(self, batch, cache, **options)

    monkeypatch.setattr(type(model), "hidden", collecting)
    llm.generate("The whale", short())
    assert_released(llm)


def test_a_step_inside_a_step_is_refused(llm, model, monkeypatch):
    monkeypatch.setattr(type(model), "hidden", lambda *a, **k: llm.generate("Call me", short()))
    with pytest.raises(RuntimeError, match="one LLM from one thread"):
        llm.generate("The whale", short())
    assert_released(llm)


def test_closed(model, tokenizer):
    with LLM(model, tokenizer=tokenizer, num_blocks=4) as llm:
        assert "4 blocks" in repr(llm)
    assert repr(llm) == "LLM(closed)"
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.generate("a")


def test_open_streams_end_with_an_error_at_close(model, tokenizer):
    llm = LLM(model, tokenizer=tokenizer, num_blocks=8, max_num_seqs=2)
    streams = [llm.stream("The whale", GREEDY) for _ in range(3)]  # the last one waits
    done = llm.stream("a", SamplingParams(max_tokens=0))
    next(streams[0])
    engine, cache = llm.engine, weakref.ref(llm.engine.cache)
    llm.close()
    llm.close()
    assert cache() is None
    for stream in streams:
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            list(stream)
        assert stream.result.finish_reason == "abort"
        assert list(stream) == []
    assert len(streams[0].result.token_ids) >= 1
    assert list(done) == []
    for act in (engine.step, lambda: engine.add([])):
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            act()


def test_a_step_that_another_thread_closes_ends_with_that_error(model, tokenizer, monkeypatch):
    llm = LLM(model, tokenizer=tokenizer, num_blocks=8)
    stream = llm.stream("The whale", GREEDY)
    next(stream)

    def closed_meanwhile():
        threading.Thread(target=llm.close).run()
        raise AttributeError("'NoneType' object has no attribute 'collect'")

    monkeypatch.setattr(llm.engine, "_advance", closed_meanwhile)
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        next(stream)


def test_a_forked_process_is_told_to_spawn(model):
    gpu = SimpleNamespace(device=SimpleNamespace(kind="cuda"), new_cache=lambda blocks, size: None)
    engine = Engine(gpu, num_blocks=4, block_size=16, max_num_seqs=1, max_batched_tokens=16)
    engine.check_usable()
    engine._process -= 1
    for use in (engine.step, lambda: engine.add([])):
        with pytest.raises(RuntimeError, match="spawn"):
            use()


def test_a_child_of_a_process_that_used_cuda_is_told_to_spawn(monkeypatch):
    def count():
        raise RuntimeError("cudaErrorInitializationError: initialization error")

    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=count)))
    monkeypatch.setattr("cukern.models.device._cupy", lambda: cupy)
    with pytest.raises(ValueError, match=r"initialization error; .*spawn"):
        LLM(demo_checkpoint(), device="cuda")


def test_an_edited_weight_shows_in_the_next_generation(tokenizer):
    model = cukern.Qwen3.from_pretrained(demo_checkpoint(), device="cpu")
    llm = LLM(model, tokenizer=tokenizer, num_blocks=4)
    (before,) = llm.generate("The whale", short(temperature=0))
    model.weights["model.norm.weight"][:] *= -1
    (after,) = llm.generate("The whale", short(temperature=0))
    assert after.token_ids != before.token_ids


# -- chat ----------------------------------------------------------------------------------------------------------


def test_chat(llm):
    messages = [{"role": "user", "content": "Where is the whale?"}]
    ids = llm.chat_prompt(messages)
    assert llm.tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>user\nWhere is the whale?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == llm.tokenizer.token_id("<|im_start|>")
    completion = llm.chat(messages, short(temperature=0), enable_thinking=False)
    assert completion.prompt_token_ids == ids
    assert [completion] == llm.generate([ids], short(temperature=0))
