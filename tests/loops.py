"""Requests for the decoding loop, and how their results are compared."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cukern import LLM, SamplingParams
from cukern.engine.decode import DecodeLoop

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


def maker(model) -> Callable[..., LLM]:
    """LLMs that launch one operator after another."""
    defaults = {"num_blocks": 40, "block_size": 16, "max_num_seqs": 8, "cuda_graphs": False}
    return lambda **options: LLM(model, **{**defaults, **options})


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
