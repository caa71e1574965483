"""Captured decoding steps: sizes, memory, what is captured when, and the bits on a GPU."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from loops import MIXED, assert_released, bits, looped, maker, requests, same

import cukern
from cukern import LLM, SamplingParams
from cukern.engine.arena import Arena
from cukern.engine.decode import DecodeLoop
from cukern.engine.graphs import FixedArrays, StepProgram, context_widths, row_buckets

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def cpu_make():
    return maker(cukern.Qwen3.from_pretrained(DATA / "tied-fp16", device="cpu"))


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
    assert context_widths(40960, 64) == [4, 16, 64, 128, 256, 512, 640]
    assert context_widths(256, 256) == [1]
    assert context_widths(257, 256) == [1, 2]
    assert context_widths(100, 16) == [7]


def test_depth_is_checked():
    with pytest.raises(ValueError, match="depth must be 1 to 7, got 8"):
        DecodeLoop(None, None, None, max_num_seqs=1, max_model_len=1, capture=False, depth=8)


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
