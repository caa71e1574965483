"""The log-probability of a token is one number: in decoding at any batch size, prefill, prefill in pieces, scoring,
beside any other requests, in another process, and by the portable kernels. For each a control that must differ.

The texts are drawn by the model itself, one token after another, without graphs and alone: what every other route has
to reproduce. Their lengths lie around every boundary of tiles, chunks, segments, pages and pieces.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cukern
from cukern import LLM, SamplingParams, jit, ops
from cukern.bench.exactness import free_order
from cukern.bench.portable import changed, portable_kernels
from cukern.ops import _linear_sm90
from cukern.ops.attention_prefill import Variant, _attention_prefill_variant

DATA = Path(__file__).parent / "data"
STEPS = 3
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1000, 4097)
PIECES = (64, 100, 1000)
Text = tuple[list[int], list[int], np.ndarray]
"""Prompt, completion, and the bits of the completion's log-probabilities."""


def bits(values: Any) -> np.ndarray:
    return np.array(values, np.float32).view(np.uint32)


class Scene:
    """A model, and texts that it has drawn.

    Attributes
    ----------
    texts : list
        Of Text, one of each length.
    """

    def __init__(self, model: cukern.Qwen3, lengths: tuple[int, ...]) -> None:
        self.model, self.lengths = model, lengths
        generator = np.random.default_rng(0)
        self.prompts = [generator.integers(0, model.config.vocab_size, n).tolist() for n in lengths]
        llm = self.llm(cuda_graphs=False)
        drawn = [self.generated(llm, [i])[0] for i in range(len(lengths))]
        self.texts: list[Text] = [(p, *d) for p, d in zip(self.prompts, drawn)]

    def llm(self, **options: Any) -> LLM:
        longest = max(self.lengths) + STEPS
        return LLM(self.model, **{"num_blocks": 3 * (longest // 64 + 1) + 256, "max_model_len": longest, **options})

    def generated(self, llm: LLM, which: Any, keep: int = 0) -> list[tuple[list[int], np.ndarray]]:
        """The rest of texts after prompt and ``keep`` tokens; the seed belongs to the text."""
        prompts = [self.prompts[i] + (self.texts[i][1][:keep] if keep else []) for i in which]
        sampling = [SamplingParams(**self.sampling(i), max_tokens=STEPS - keep) for i in which]
        return [(c.token_ids, bits(c.logprobs)) for c in llm.generate(prompts, sampling)]

    @staticmethod
    def sampling(text: int) -> dict[str, Any]:
        return {"temperature": 0.8, "seed": text, "ignore_eos": True, "logprobs": True}

    def scored(self, llm: LLM, which: Any) -> list[np.ndarray]:
        found = llm.score([self.texts[i][0] for i in which], [self.texts[i][1] for i in which], temperature=0.8)
        return [bits(s.logprobs) for s in found]

    def wrong(self, which: Any, found: list[np.ndarray], keep: int = 0) -> list[int]:
        """Lengths of the texts whose bits are not right."""
        different = [not np.array_equal(f, self.texts[i][2][keep:]) for i, f in zip(which, found)]
        return [self.lengths[i] for i, d in zip(which, different) if d]

    def check(self, which: Any, found: list[tuple[list[int], np.ndarray]], keep: int = 0) -> None:
        assert [t for t, _ in found] == [self.texts[i][1][keep:] for i in which]
        assert self.wrong(which, [b for _, b in found], keep) == []

    def everywhere(self, llm: LLM, which: int) -> np.ndarray:
        """Bits of the log-probabilities of all tokens of a text but the first."""
        prompt, completion, _ = self.texts[which]
        whole = [*prompt, *completion]
        return bits(llm.score(whole[:1], [whole[1:]], temperature=0.8)[0].logprobs)


@pytest.fixture(scope="module", params=["float16", "bfloat16"])
def gpu(request: pytest.FixtureRequest) -> Scene:
    """Four layers of the 0.6B shape, the whole vocabulary: what test_decode_step.py has compiled already."""
    return Scene(gpu_model(request.param), LENGTHS)


def gpu_model(dtype: str, layers: int | None = 4) -> cukern.Qwen3:
    import cupy
    import ml_dtypes

    from cukern.bench.random_model import make_model

    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    return make_model(cupy, "0.6B", kind, layers, max_positions=4096 + 64)


@pytest.fixture(scope="module")
def emulated() -> Scene:
    return Scene(cukern.Qwen3.from_pretrained(DATA / "hd128-fp16", device="emulated"), (1, 17, 64, 129))


# -- faults, for the controls --------------------------------------------------------------------------------------


def split_by_rows(
    x: Any, weight: Any, *, residual: Any = None, dtype: Any = None, activation: str | None = None, **_: Any
) -> Any:
    """A product that splits K where there are few rows, as libraries do to fill the GPU."""
    if activation is not None:
        return ops.swiglu(split_by_rows(x, weight, dtype=dtype))
    if x.shape[0] > 100:
        return LINEAR(x, weight, residual=residual, dtype=dtype)
    half = weight.shape[1] // 32 * 16
    low = LINEAR(x[:, :half].copy(), weight[:, :half].copy(), dtype=np.float32)
    whole = low + LINEAR(x[:, half:].copy(), weight[:, half:].copy(), dtype=np.float32)
    if residual is None:
        return whole.astype(dtype or x.dtype)
    residual += whole
    return residual


def by_cublas(x: Any, weight: Any, **options: Any) -> Any:
    options.pop("static_weight", None)
    return LINEAR(x, weight, backend="cublas", **options)


def other_chunks(*args: Any, **options: Any) -> Any:
    """Prefill whose chunks are longer than those of decoding."""
    return _attention_prefill_variant(Variant(4, 1, chunk=256), *args, **options)


LINEAR = ops.linear
HALF = pytest.mark.parametrize("gpu", ["float16"], indirect=True)
"""The other dtype would tell nothing new."""


# -- on the CPU, emulated ------------------------------------------------------------------------------------------


def test_emulated_routes(emulated: Scene) -> None:
    everything = range(len(emulated.lengths))
    emulated.check(everything, emulated.generated(emulated.llm(max_batched_tokens=50), everything))
    emulated.check(everything, emulated.generated(emulated.llm(), everything, keep=STEPS - 1), keep=STEPS - 1)
    for options in ({}, {"max_batched_tokens": 50}):
        assert emulated.wrong(everything, emulated.scored(emulated.llm(**options), everything)) == []


def test_emulated_controls(emulated: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fault in the kernels the bits of some route are wrong, and only where it can show."""
    everything = range(len(emulated.lengths))
    with monkeypatch.context() as patch:
        patch.setattr(ops, "linear", split_by_rows)
        whole = emulated.scored(emulated.llm(), everything)
        pieces = emulated.scored(emulated.llm(max_batched_tokens=50), everything)
        assert not any(np.array_equal(w, p) for w, p in zip(whole, pieces))
        assert emulated.wrong(everything, pieces) == list(emulated.lengths)
    with monkeypatch.context() as patch:
        patch.setattr(ops, "attention_prefill", other_chunks)
        assert emulated.wrong(everything, emulated.scored(emulated.llm(), everything)) == [129]


# -- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_every_length_by_every_route(gpu: Scene) -> None:
    everything = range(len(gpu.lengths))
    graphs = gpu.llm()
    for i in everything:
        gpu.check([i], gpu.generated(graphs, [i]))  # one kernel a step, replayed
        gpu.check([i], gpu.generated(graphs, [i], keep=STEPS - 1), keep=STEPS - 1)  # prefill of the whole text
    gpu.check(everything, gpu.generated(graphs, everything))
    for tokens in PIECES:
        pieces = gpu.llm(max_batched_tokens=tokens)
        gpu.check(everything, gpu.generated(pieces, everything))
        assert gpu.wrong(everything, gpu.scored(pieces, everything)) == []
    assert gpu.wrong(everything, gpu.scored(graphs, everything)) == []
    assert gpu.wrong(everything, [gpu.scored(graphs, [i])[0] for i in everything]) == []


@pytest.mark.gpu
def test_every_token_of_a_long_text(gpu: Scene) -> None:
    longest = len(gpu.lengths) - 1
    whole = gpu.everywhere(gpu.llm(), longest)
    assert np.array_equal(whole[-STEPS:], gpu.texts[longest][2])
    for tokens in (*PIECES, 4096):
        assert np.array_equal(whole, gpu.everywhere(gpu.llm(max_batched_tokens=tokens), longest))
    short = gpu.lengths.index(129)
    assert np.array_equal(gpu.everywhere(gpu.llm(), short), gpu.everywhere(gpu.llm(max_batched_tokens=1), short))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 17, 64, 256])
def test_decoding_at_every_batch_size(gpu: Scene, rows: int) -> None:
    which = [i % (len(gpu.lengths) - 1) for i in range(rows)]
    gpu.check(which, gpu.generated(gpu.llm(num_blocks=2400), which))


@pytest.mark.gpu
def test_batches_mixed_at_random(gpu: Scene) -> None:
    """Twenty times other neighbours, order, pieces and pages; scored requests among generated ones."""
    generator = np.random.default_rng(1)
    engines = [
        gpu.llm(max_batched_tokens=tokens, block_size=size, num_blocks=40_000 // size)
        for tokens, size in ((333, 16), (2048, 64), (8192, 256))
    ]
    for i in range(20):
        which = generator.choice(len(gpu.lengths), int(generator.choice([1, 13, 16, 24, 40]))).tolist()
        llm = engines[i % 3]
        gpu.check(which, gpu.generated(llm, which))
        assert gpu.wrong(which, gpu.scored(llm, which)) == []


@contextmanager
def only_portable_kernels() -> Iterator[None]:
    """Those for every architecture, and no other was asked for."""
    with portable_kernels():
        yield
        assert not [key for key in jit.registry._memo if "sm90" in str(key)]


@pytest.mark.gpu
def test_portable_kernels(gpu: Scene) -> None:
    if jit.device().arch != _linear_sm90.ARCH:
        pytest.skip("this GPU has the portable kernels only")
    everything = range(len(gpu.lengths))
    with changed():  # nothing remembered
        assert gpu.wrong(everything, gpu.scored(gpu.llm(), everything)) == []
        assert any("linear_sm90" in str(key) for key in jit.registry._memo)
    longest = len(gpu.lengths) - 1
    hopper = gpu.everywhere(gpu.llm(), longest)
    with only_portable_kernels():
        assert gpu.wrong(everything, gpu.scored(gpu.llm(), everything)) == []
        assert np.array_equal(gpu.everywhere(gpu.llm(), longest), hopper)
        gpu.check(everything, gpu.generated(gpu.llm(), everything))


@pytest.mark.gpu
@HALF
def test_portable_kernels_with_other_segments_differ(gpu: Scene) -> None:
    """The control of the test above: sums in another order, by the same kernels."""
    which = range(len(gpu.lengths))
    with portable_kernels(), free_order():
        assert len(gpu.wrong(which, gpu.scored(gpu.llm(), which))) > 10


@pytest.mark.gpu
@HALF
@pytest.mark.parametrize("fault", [by_cublas, split_by_rows])
def test_products_that_depend_on_the_rows_differ(gpu: Scene, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A control of every route: alone, in a batch, whole and in pieces."""
    which = [i for i, n in enumerate(gpu.lengths) if n < 1000]
    longest = len(gpu.lengths) - 1
    monkeypatch.setattr(ops, "linear", fault)
    plain = gpu.llm(cuda_graphs=False)
    assert len(gpu.wrong(which, [gpu.generated(plain, [i])[0][1] for i in which])) > 8
    assert len(gpu.wrong(which, [b for _, b in gpu.generated(plain, which)])) > 8
    pieces = gpu.llm(max_batched_tokens=64)
    assert len(gpu.wrong(which, gpu.scored(pieces, which))) > 8
    assert not np.array_equal(gpu.everywhere(plain, longest), gpu.everywhere(pieces, longest))


@pytest.mark.gpu
@HALF
def test_chunks_that_differ_from_those_of_decoding_show(gpu: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    which = range(len(gpu.lengths))
    monkeypatch.setattr(ops, "attention_prefill", other_chunks)
    wrong = gpu.wrong(which, gpu.scored(gpu.llm(), which))
    assert len(wrong) > 4
    assert min(wrong) >= 127  # up to 128 keys there is one chunk either way


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from test_same_bits import LENGTHS, STEPS, Scene, by_cublas, gpu_model, ops
if sys.argv[3] == "cublas":
    ops.linear = by_cublas
scene = object.__new__(Scene)
scene.model, scene.lengths = gpu_model(sys.argv[2]), LENGTHS
scene.texts = [tuple(t) for t in np.load(sys.argv[4], allow_pickle=True)]
which = list(range(len(LENGTHS)))[::-1]
found = scene.scored(scene.llm(max_batched_tokens=777), which)
print("wrong:", sorted(scene.wrong(which, found)))
"""


@pytest.mark.gpu
@HALF
def test_another_process(gpu: Scene, tmp_path: Path) -> None:
    texts = np.empty((len(gpu.texts), 3), object)
    for i, text in enumerate(gpu.texts):
        texts[i, :] = text
    np.save(tmp_path / "texts.npy", texts, allow_pickle=True)
    dtype = gpu.model.dtype.name
    printed = {}
    for kernels in ("ours", "cublas"):
        command = [
            sys.executable,
            "-c",
            SCRIPT,
            str(Path(__file__).parent),
            dtype,
            kernels,
            str(tmp_path / "texts.npy"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        printed[kernels] = done.stdout.strip().splitlines()[-1]
    assert printed["ours"] == "wrong: []"
    assert printed["cublas"].startswith("wrong: [1")


@pytest.mark.gpu
def test_the_whole_model() -> None:
    """All layers of the 0.6B shape."""
    scene = Scene(gpu_model("float16", layers=None), (1, 65, 129, 513, 1000))
    everything = range(len(scene.lengths))
    graphs = scene.llm()
    for i in everything:
        scene.check([i], scene.generated(graphs, [i]))
    for options in ({}, {"max_batched_tokens": 100}):
        llm = scene.llm(**options)
        scene.check(everything, scene.generated(llm, everything))
        assert scene.wrong(everything, scene.scored(llm, everything)) == []
