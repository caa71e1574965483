"""Every kernel that Qwen3-0.6B launches on this GPU is among those compiled ahead (`cukern compile`)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cukern
from cukern import jit
from cukern.jit import registry

pytestmark = pytest.mark.gpu

_LAYERS = 3
_SAMPLINGS = (
    cukern.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
    cukern.SamplingParams(temperature=0.6, top_k=20, top_p=0.95, seed=0, max_tokens=3, ignore_eos=True, logprobs=True),
)


def _described(file: str, name: str, template: tuple[Any, ...], defines: Any) -> str:
    """A kernel but for what the number of layers decides: there are fewer here."""
    kept = sorted((k, v) for k, v in defines or () if k not in ("MODEL_LAYERS", "SHARED_BYTES"))
    return f"{file} {name} {tuple(map(str, template))} {kept}"


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_a_published_model_launches_what_is_compiled_ahead(dtype: Any) -> None:
    import cupy

    from cukern.bench.random_model import make_model

    registry.reload()
    model = make_model(cupy, "0.6B", np.dtype(dtype), layers=_LAYERS)
    rng = np.random.default_rng(0)
    for batch, length in ((1, 4), (1, 17), (1, 100), (1, 600), (1, 1500), (1, 2100), (4, 300), (40, 20)):
        llm = cukern.LLM(
            model, num_blocks=batch * (length // 64 + 2), block_size=64, max_num_seqs=batch, max_model_len=length + 8
        )
        prompts = rng.integers(0, model.config.vocab_size, (batch, length)).tolist()
        for sampling in _SAMPLINGS:
            llm.generate(prompts, sampling)
        llm.close()
    here = jit.device().arch
    ahead = {
        _described(s.file, s.name, s.template, s.defines) for s in registry.variants() if not s.archs or here in s.archs
    }
    used = {_described(*key[:4]) for key in registry._memo}
    # a step of several sequences is compiled when it is first used (decode_step.kernel_variants)
    missing = {u for u in used - ahead if "'ROWS', 1)" in u or not u.startswith("decode_step.cu")}
    assert used, "no kernel was asked for"
    assert not missing, "\n".join(sorted(missing))
