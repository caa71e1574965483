"""`LLM.score`: log-probabilities of given completions, against the golden file, NumPy and the engine's own."""

from __future__ import annotations

import contextlib
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cukern
from cukern import LLM, SamplingParams
from cukern.engine import score as score_module
from cukern.engine.engine import Engine
from cukern.engine.scheduler import StepPlan
from cukern.engine.score import Scoring, book_scores, score_arrays
from cukern.engine.tokenizer import Tokenizer
from cukern.models import demo_checkpoint

DATA = Path(__file__).parent / "data"
PROMPT = "According to a careful calculation I have made"


@pytest.fixture(scope="module")
def model() -> cukern.Qwen3:
    return cukern.Qwen3.from_pretrained(demo_checkpoint(), device="cpu")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(demo_checkpoint())


@pytest.fixture
def make(model: cukern.Qwen3, tokenizer: Tokenizer) -> Any:
    def build(**options: Any) -> LLM:
        return LLM(model, tokenizer=tokenizer, **{"num_blocks": 64, "block_size": 16, **options})

    return build


@pytest.fixture
def llm(make: Any) -> LLM:
    return make()


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "emulated"], scope="module")
def kernels(request: pytest.FixtureRequest) -> cukern.Qwen3:
    return cukern.Qwen3.from_pretrained(DATA / "tied-fp16", device=request.param)


def golden() -> tuple[list[int], list[int], np.ndarray]:
    with np.load(DATA / "demo-qwen3" / "golden.npz") as file:
        return file["input_ids"][0].tolist(), file["greedy_ids"][0].tolist(), file["greedy_logprobs"][0]


def oracle(model: cukern.Qwen3, prompt: list[int], completion: list[int], temperature: float = 1.0) -> np.ndarray:
    logits = model(np.array([*prompt, *completion]))[len(prompt) - 1 : -1].astype(np.float64) / temperature
    top = logits.max(-1, keepdims=True)
    rows = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return rows[np.arange(len(completion)), completion]


def assert_released(llm: LLM) -> None:
    assert llm.num_free_blocks == llm.num_blocks
    assert llm.engine.scheduler.idle


# -- numbers -------------------------------------------------------------------------------------------------------


def test_the_golden_continuation(llm: LLM) -> None:
    prompt, completion, expected = golden()
    (score,) = llm.score(PROMPT, completion)
    assert (score.prompt_index, score.prompt_token_ids, score.token_ids) == (0, prompt, completion)
    assert (score.logprobs.dtype, score.is_greedy.dtype) == (np.float32, bool)
    np.testing.assert_allclose(score.logprobs, expected, atol=1e-3)
    assert score.is_greedy.all()
    assert score.total == pytest.approx(float(expected.sum()), abs=1e-2)
    assert_released(llm)


@pytest.mark.parametrize("temperature", [1, 0.6, 2.5])
def test_against_numpy_in_pieces_of_every_size(make: Any, model: cukern.Qwen3, temperature: float) -> None:
    generator = np.random.default_rng(0)
    lengths = [(1, 1), (1, 20), (30, 1), (17, 16), (5, 40)]
    vocab = model.config.vocab_size
    prompts, completions = ([generator.integers(0, vocab, n[k]).tolist() for n in lengths] for k in (0, 1))
    expected = [oracle(model, p, c, temperature) for p, c in zip(prompts, completions)]
    for tokens in (3, 16, 17, 8192):
        llm = make(max_batched_tokens=tokens, max_num_seqs=3)
        scores = llm.score(prompts, completions, temperature=temperature)
        assert [s.prompt_index for s in scores] == list(range(5))
        assert [s.token_ids for s in scores] == completions
        for score, want in zip(scores, expected):
            np.testing.assert_allclose(score.logprobs, want, atol=1e-4)
        assert_released(llm)


def test_is_greedy_tells_which_token_generate_would_take(llm: LLM) -> None:
    (best,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    other = list(best.token_ids)
    other[3] = (other[3] + 1) % llm.model.config.vocab_size
    right, wrong = llm.score(PROMPT, [best.token_ids, other])
    assert right.is_greedy.all()
    assert wrong.is_greedy[:4].tolist() == [True, True, True, False]
    assert wrong.logprobs[3] < right.logprobs[3]
    np.testing.assert_allclose(wrong.logprobs[:3], right.logprobs[:3], atol=1e-4)


# -- the same bits as generate (kernels) ---------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_bits_of_generate(kernels: cukern.Qwen3, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(1)
    prompts = [generator.integers(0, 512, n).tolist() for n in (3, 17, 1)]
    sampling = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=5, ignore_eos=True, logprobs=True) for i in range(3)
    ]
    llm = LLM(kernels, num_blocks=32, block_size=16)
    done = llm.generate(prompts, sampling)
    completions = [c.token_ids for c in done]
    expected = [np.array(c.logprobs, np.float32) for c in done]

    def check(scoring: LLM) -> None:
        scores = scoring.score(prompts, completions, temperature=temperature or 1.0)
        for score, want in zip(scores, expected):
            np.testing.assert_array_equal(score.logprobs.view(np.uint32), want.view(np.uint32))
            assert temperature or score.is_greedy.all()

    check(llm)
    monkeypatch.setattr(score_module, "SCORE_ROWS", 2)
    check(LLM(kernels, num_blocks=32, block_size=64, max_batched_tokens=7))


def test_no_more_logits_at_a_time_than_promised(llm: LLM, model: cukern.Qwen3, monkeypatch: pytest.MonkeyPatch) -> None:
    head, rows = type(model).head, []

    def recorded(self: cukern.Qwen3, x: Any) -> Any:
        rows.append(len(x))
        return head(self, x)

    monkeypatch.setattr(type(model), "head", recorded)
    monkeypatch.setattr(score_module, "SCORE_ROWS", 8)
    llm.score([[1, 2, 3], [4]], [[5] * 20, [6]])
    assert rows == [8, 8, 5]  # none for the tokens of the prompts, none in vain


# -- arguments -----------------------------------------------------------------------------------------------------


def test_one_or_several_for_each_prompt(llm: LLM) -> None:
    def found(*args: Any) -> list[tuple[int, list[int]]]:
        return [(s.prompt_index, s.token_ids) for s in llm.score(*args)]

    assert found([1, 2], [3, 4]) == [(0, [3, 4])]
    assert found([1, 2], [[3, 4], [5]]) == [(0, [3, 4]), (0, [5])]
    assert found([[1, 2]], [[3, 4]]) == [(0, [3, 4])]
    assert found([[1, 2], [3]], [[3, 4], [[5], [6, 7]]]) == [(0, [3, 4]), (1, [5]), (1, [6, 7])]
    assert found([[1, 2], [3]], [np.array([3, 4]), np.array([[5], [6]])]) == [(0, [3, 4]), (1, [5]), (1, [6])]
    assert found([], []) == []


def test_texts_are_encoded_each_by_itself(llm: LLM, tokenizer: Tokenizer) -> None:
    scores = llm.score(["The whale", PROMPT], [" swims", [" one", " two"]])
    assert [s.token_ids for s in scores] == [tokenizer.encode(t) for t in (" swims", " one", " two")]
    assert [s.prompt_token_ids for s in scores] == [tokenizer.encode(t) for t in ("The whale", PROMPT, PROMPT)]


@pytest.mark.parametrize(
    ("prompts", "completions", "options", "kind", "message"),
    [
        ([[1], [2]], [[3]], {}, ValueError, "1 completions for 2 prompts"),
        ([[1]], "abc", {}, TypeError, "completions must be a list with one entry a prompt, got str"),
        ([[1]], 3, {}, TypeError, "completions must be a list with one entry a prompt, got int"),
        ([[1]], [3], {}, TypeError, r"completions\[0\] must be a text, token ids, or a list of these, got int"),
        ([1], [], {}, ValueError, r"completions\[0\] is empty; give at least one token to score"),
        ([1], "", {}, ValueError, r"completions\[0\] is empty; give at least one token to score"),
        ([1], [[2], []], {}, ValueError, r"completions\[0\]\[1\] is empty; give at least one token to score"),
        ([[]], [[2]], {}, ValueError, r"prompts\[0\] is empty"),
        ([1], [2, 10**6], {}, ValueError, r"completions\[0\] has token id 1000000, outside the vocabulary"),
        ([1], [[-1]], {}, ValueError, r"completions\[0\]\[0\] has token id -1, outside the vocabulary"),
        ([1], [[1.5]], {}, TypeError, r"completions\[0\]\[0\] must hold integer token ids, got 1.5"),
        ([1] * 30, [2] * 35, {}, ValueError, r"prompts\[0\] has 30 tokens; with the 35 tokens of completions"),
        ([1], [2], {"temperature": 0}, ValueError, "temperature must be positive and finite in float32, got 0"),
        ([1], [2], {"temperature": 1e40}, ValueError, "temperature must be positive and finite"),
        ([1], [[None]], {}, TypeError, r"completions\[0\]\[0\] must hold integer token ids, got None"),
        ([1], [2], {"temperature": 10**400}, ValueError, "temperature must be positive and finite"),
        ([1], [2], {"temperature": float("nan")}, ValueError, "temperature must be positive and finite"),
        ([1], [2], {"temperature": "hot"}, TypeError, "temperature must be a number, got 'hot'"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(
    make: Any, prompts: Any, completions: Any, options: Any, kind: type[Exception], message: str
) -> None:
    llm = make(max_model_len=64)
    with pytest.raises(kind, match=message):
        llm.score(prompts, completions, **options)
    assert_released(llm)


def test_a_completion_that_just_fits(make: Any) -> None:
    llm = make(num_blocks=2, max_num_seqs=4)
    scores = llm.score([[1] * 20, [1], [2]], [[2] * 12, [3] * 31, [4]])
    assert [len(s.logprobs) for s in scores] == [12, 31, 1]
    assert all(np.isfinite(s.logprobs).all() for s in scores)


def test_text_needs_a_tokenizer(model: cukern.Qwen3) -> None:
    with pytest.raises(ValueError, match="a text completion needs a tokenizer"):
        LLM(model, num_blocks=4).score([1], "text")


# -- beside other requests -----------------------------------------------------------------------------------------


def test_streams_go_on_unharmed(llm: LLM) -> None:
    sampling = SamplingParams(temperature=0.9, seed=1, max_tokens=12, ignore_eos=True, logprobs=True)
    (expected,) = llm.generate(PROMPT, sampling)
    stream = llm.stream(PROMPT, sampling)
    text = next(stream)
    (score,) = llm.score(PROMPT, expected.token_ids, temperature=0.9)
    np.testing.assert_allclose(score.logprobs, expected.logprobs, atol=1e-4)
    assert text + "".join(stream) == expected.text
    assert_released(llm)


def test_a_pool_that_a_stream_fills_is_waited_for(make: Any) -> None:
    llm = make(num_blocks=4)
    stream = llm.stream([1] * 40, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    llm.engine.step()
    (score,) = llm.score([1] * 30, [2] * 20)
    assert np.isfinite(score.logprobs).all()
    list(stream)
    assert len(stream.result.token_ids) == 20
    assert_released(llm)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_frees_everything(make: Any, model: cukern.Qwen3, kind: Any, monkeypatch: Any) -> None:
    llm = make(max_batched_tokens=8)
    want = llm.score([[1, 2, 3], [4]], [[5] * 20, [6] * 9])
    hidden, calls = type(model).hidden, []

    def failing(self: cukern.Qwen3, batch: Any, cache: Any) -> Any:
        calls.append(1)
        if len(calls) % 3 == 0:
            raise kind
        return hidden(self, batch, cache)

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "hidden", failing)
        for _ in range(10):
            with pytest.raises(kind):
                llm.score([[1, 2, 3], [4]], [[5] * 20, [6] * 9])
            assert_released(llm)
    again = llm.score([[1, 2, 3], [4]], [[5] * 20, [6] * 9])
    for a, b in zip(want, again):
        np.testing.assert_array_equal(a.logprobs, b.logprobs)


def test_an_interruption_between_the_last_token_and_its_removal(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make()

    def interrupted(sequence: Any) -> None:
        raise KeyboardInterrupt

    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    for use in (lambda: llm.score([1, 2], [3, 4]), lambda: llm.generate([1, 2], sampling)):
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.scheduler, "remove", interrupted)
            with pytest.raises(KeyboardInterrupt):
                use()
        assert_released(llm)


def test_an_interruption_on_any_line_of_a_step(llm: LLM) -> None:
    """Where a signal may arrive: before each line of `Engine.step`, when it is first reached."""
    codes = (Engine.step.__code__, Engine._step.__code__)
    met: list[tuple[Any, int]] = []

    def line(frame: Any, event: str, _: Any) -> Any:
        place = (frame.f_code, frame.f_lineno)
        if event == "line" and len(met) < rounds and place not in met:
            met.append(place)
            raise KeyboardInterrupt
        return line

    (want,) = llm.score([1, 2], [3, 4])
    before, rounds = sys.gettrace(), 0
    while rounds == len(met):  # one interruption a round, until there is no further line
        rounds += 1
        sys.settrace(lambda frame, event, _: line if frame.f_code in codes else None)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                llm.score([1, 2], [3, 4])
        finally:
            sys.settrace(before)
        assert_released(llm)
    assert len(met) > 5
    (again,) = llm.score([1, 2], [3, 4])
    np.testing.assert_array_equal(again.logprobs, want.logprobs)


# -- rows of a step ------------------------------------------------------------------------------------------------


def test_rows_and_targets_of_a_step_with_everything_in_it() -> None:
    whole = Scoring(0, [10, 11, 12], [20, 21], 1.0)
    second = Scoring(1, [30, 31], [40, 41, 42, 43], 0.5)
    second.num_computed = 2
    piece = Scoring(2, [50, 51, 52, 53], [60], 1.0)  # nothing of it is scored in this step
    sequences, counts = [whole, second, piece], [4, 2, 2]
    got = score_arrays(sequences, counts)
    assert got["score_rows"].tolist() == [2, 3, 4, 5]
    assert got["score_targets"].tolist() == [20, 21, 41, 42]
    assert got["score_temperature"].tolist() == [1.0, 1.0, 0.5, 0.5]
    assert StepPlan(sequences, counts, is_decode=False).sampled == []
    book_scores(sequences, counts, np.array([1, 2, 3, 4], np.float32), np.array([True, False, True, True]))
    assert whole.scores.tolist() == [1, 2]
    assert whole.greedy.tolist() == [True, False]
    np.testing.assert_array_equal(second.scores, [np.nan, 3, 4, np.nan])
    assert score_arrays([piece], [2]) == {}


# -- several completions of one prompt -----------------------------------------------------------------------------


def test_a_prompt_is_computed_once_for_all_its_completions(make: Any, model: cukern.Qwen3, monkeypatch: Any) -> None:
    hidden, tokens = type(model).hidden, []

    def recorded(self: cukern.Qwen3, batch: Any, cache: Any) -> Any:
        tokens.append(len(batch.token_ids))
        return hidden(self, batch, cache)

    monkeypatch.setattr(type(model), "hidden", recorded)
    prompts = [list(range(1, 51)), [7] * 33]
    completions = [[[60], [61, 62], [63]], [[64, 65], [66]]]
    want = [make().score(p, c)[0].logprobs for p, entry in zip(prompts, completions) for c in entry]
    tokens.clear()
    llm = make()
    got = llm.score(prompts, completions)
    for score, expected in zip(got, want):
        np.testing.assert_allclose(score.logprobs, expected, atol=1e-4)
    # 48 and 32 tokens fill blocks; the last token of a completion is never computed
    assert tokens == [50 + (2 + 1) + 2 + 33 + 1 + 1]
    assert_released(llm)


@pytest.mark.parametrize("options", [{"max_batched_tokens": 7}, {"max_num_seqs": 1}, {"num_blocks": 6}, {}], ids=str)
def test_shared_prompts_give_the_bits_of_their_own(kernels: cukern.Qwen3, options: dict[str, int]) -> None:
    generator = np.random.default_rng(3)
    prompts = [generator.integers(0, 512, n).tolist() for n in (16, 17, 40)]
    completions = [[generator.integers(0, 512, n).tolist() for n in (3, 1, 18)] for _ in prompts]
    alone = LLM(kernels, num_blocks=32, block_size=16)
    want = [alone.score(p, c)[0] for p, entry in zip(prompts, completions) for c in entry]
    llm = LLM(kernels, **{"num_blocks": 32, "block_size": 16, **options})
    for a, b in zip(llm.score(prompts, completions), want):
        assert a.token_ids == b.token_ids
        np.testing.assert_array_equal(a.logprobs.view(np.uint32), b.logprobs.view(np.uint32))
        np.testing.assert_array_equal(a.is_greedy, b.is_greedy)
    assert_released(llm)


def test_an_interruption_while_prompts_are_shared(make: Any, model: cukern.Qwen3, monkeypatch: Any) -> None:
    """A stream goes on afterwards in the pool that they shared, and the requests can be given again."""
    args = ([list(range(40)), [5]], [[[60], [61, 62], [63] * 20], [[64, 65], [66]]])
    for fails_at in (1, 2, 3, 4):
        llm = make(max_batched_tokens=20)
        want = [s.logprobs for s in llm.score(*args)]
        hidden, calls = type(model).hidden, []

        def failing(self: cukern.Qwen3, batch: Any, cache: Any, hidden=hidden, calls=calls, at=fails_at) -> Any:
            calls.append(1)
            if len(calls) == at:
                raise KeyboardInterrupt
            return hidden(self, batch, cache)

        with monkeypatch.context() as patch:
            patch.setattr(type(model), "hidden", failing)
            requests = [Scoring(llm.engine.next_number(), args[0][0], c, 1.0) for c in args[1][0]]
            for before, after in itertools.pairwise(requests):
                after.follows = before
            llm.engine.add(requests)
            while any(r.finish_reason is None for r in requests):
                with contextlib.suppress(KeyboardInterrupt):
                    llm.engine.step()
        assert len(calls) > fails_at
        for request, expected in zip(requests, want):
            np.testing.assert_allclose(request.scores, expected, atol=1e-4)
        assert_released(llm)
