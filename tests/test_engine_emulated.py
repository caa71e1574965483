"""The engine over the CUDA kernels themselves, emulated: the golden text, and the same bits however it is scheduled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import cukern
from cukern import LLM, SamplingParams
from cukern.models import demo_checkpoint

DATA = Path(__file__).parent / "data"
LENGTHS = (3, 17, 33, 1)


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "emulated"], scope="module")
def model(request):
    return cukern.Qwen3.from_pretrained(DATA / "tied-fp16", device=request.param)


def requests(max_tokens: int) -> tuple[list[list[int]], list[SamplingParams]]:
    generator = np.random.default_rng(1)
    prompts = [generator.integers(0, 512, n).tolist() for n in LENGTHS]
    options = [{"temperature": 0}, {"top_k": 20}, {"top_p": 0.9, "temperature": 1.3}, {"min_p": 0.05}]
    sampling = [
        SamplingParams(**{"temperature": 0.8, "seed": i, **o}, max_tokens=max_tokens, ignore_eos=True, logprobs=True)
        for i, o in enumerate(options)
    ]
    return prompts, sampling


def bits(completions) -> list[tuple[list[int], list[float]]]:
    return [(c.token_ids, c.logprobs) for c in completions]


def test_the_same_bits_alone_in_a_batch_in_pieces_and_after_preemption(model):
    prompts, sampling = requests(max_tokens=4)
    free = LLM(model, num_blocks=32, block_size=16)
    alone = [free.generate([p], s)[0] for p, s in zip(prompts, sampling)]
    assert bits(free.generate(prompts, sampling)) == bits(alone)
    backwards = free.generate(prompts[::-1], sampling[::-1])[::-1]
    assert bits(backwards) == bits(alone)
    pieces = LLM(model, num_blocks=32, block_size=64, max_batched_tokens=7)
    assert bits(pieces.generate(prompts, sampling)) == bits(alone)


def test_the_same_bits_after_preemption(model):
    generator = np.random.default_rng(2)
    prompts = [generator.integers(0, 512, 15).tolist() for _ in range(3)]
    sampling = [SamplingParams(temperature=0.8, seed=i, max_tokens=5, ignore_eos=True, logprobs=True) for i in range(3)]
    tight = LLM(model, num_blocks=5, block_size=16, max_model_len=32)
    got = tight.generate(prompts, sampling)
    assert tight.engine.scheduler.num_preempted > 0
    assert bits(got) == bits(LLM(model, num_blocks=32, block_size=16).generate(prompts, sampling))


@pytest.mark.slow
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), "emulated"])
def test_demo_continuation(device, monkeypatch):
    monkeypatch.setenv("CUKERN_EMULATE_CHECK", "0")  # 48 steps; the tests above run the same kernels checked
    with np.load(DATA / "demo-qwen3" / "golden.npz") as golden:
        expected, logprobs = golden["greedy_ids"][0].tolist(), golden["greedy_logprobs"][0]
    with LLM(demo_checkpoint(), device=device, max_num_seqs=1, max_model_len=64) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=True)
        stream = llm.stream("According to a careful calculation I have made", sampling)
        text = "".join(stream)
    assert stream.result.token_ids == expected
    assert text == stream.result.text
    np.testing.assert_allclose(stream.result.logprobs, logprobs, atol=0.05)
