"""Recorded launches: the layers of a model launched from a tape are those launched one operator after another."""

from __future__ import annotations

import importlib
import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

from fake_cuda import FakeCuda
from test_repeated_calls import aligned, cuda  # noqa: F401

from cukern import jit, ops
from cukern.jit import registry, tape
from cukern.jit.tape import Tape
from cukern.models import ForwardBatch, Qwen3
from cukern.models.device import Device
from cukern.models.kv_cache import PagedKVCache, ScratchKVCache
from cukern.models.weights import LayerWeights
from cukern.testing.checkpoints import QWEN3_SHAPES

CONFIG = replace(
    QWEN3_SHAPES["0.6B"],
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
)
HALF, FLOAT = np.dtype(np.float16), np.dtype(np.float32)
TOKENS = 70


class Bench:
    """A model whose arrays are on no GPU, and what its forward pass launches."""

    def __init__(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, layers: int = 5) -> None:  # noqa: F811
        monkeypatch.setattr(Device, "context", lambda self: nullcontext())
        c = CONFIG
        self.cuda = cuda
        h, i, q, kv, d = c.hidden_size, c.intermediate_size, c.q_size, c.kv_size, c.head_dim
        made = [
            LayerWeights(
                input_norm=self.array((h,), FLOAT),
                qkv=self.array((q + 2 * kv, h)),
                qkv_bias=self.array((q + 2 * kv,), FLOAT),
                q_norm=self.array((d,), FLOAT),
                k_norm=self.array((d,), FLOAT),
                o=self.array((h, q)),
                o_bias=None,
                post_norm=self.array((h,), FLOAT),
                gate_up=self.array((2 * i, h)),
                down=self.array((h, i)),
            )
            for _ in range(layers)
        ]
        self.model = object.__new__(Qwen3)
        self.model.config, self.model.device, self.model.dtype = c, Device("cuda"), HALF
        self.model.weights = SimpleNamespace(embed=self.array((1000, h)), layers=made)
        self.model.rope_table = self.array((200, d), FLOAT)
        self.cache: Any = object.__new__(PagedKVCache)
        self.cache.k, self.cache.v = (self.array((layers, 3, 2, 64, d)) for _ in range(2))
        self.batch = ForwardBatch(
            token_ids=self.array((TOKENS,), np.int32),
            positions=self.array((TOKENS,), np.int32),
            slot_mapping=self.array((TOKENS,), np.int64),
            cu_seqlens_q=self.array((2,), np.int32),
            seq_lens=self.array((1,), np.int32),
            block_tables=self.array((1, 2), np.int32),
            max_query_len=TOKENS,
        )
        self.launched()  # compiles; from now on the sizes of parameters are known
        library: Any = cuda.library
        for kernel in registry._memo.values():
            library.parameter_sizes[kernel._loaded[0].function] = [size for _, size, _ in kernel._layout]

    def array(self, shape: tuple[int, ...], dtype: Any = HALF) -> Any:
        return aligned(self.cuda, shape, dtype)

    def launched(self, tap: Any = None) -> list[tuple[Any, ...]]:
        library = self.cuda.library
        library.launches.clear()
        library.snapshots.clear()
        self.model.hidden(self.batch, self.cache, tap=tap)
        return [
            (x.function, x.grid, x.block, x.shared_mem, x.stream, x.attributes, snapshot)
            for x, snapshot in zip(library.launches, library.snapshots, strict=True)
        ]


@pytest.fixture
def bench(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Bench:  # noqa: F811
    return Bench(cuda, monkeypatch)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a tape was replayed."""
    seen: list[int] = []
    call = tape.Replay.__call__

    def counted(self: tape.Replay, addresses: Any) -> None:
        seen.append(len(self._launches))
        call(self, addresses)

    monkeypatch.setattr(tape.Replay, "__call__", counted)
    return seen


def test_a_replayed_pass_launches_what_the_operators_launch(bench: Bench, replays: list[int]) -> None:
    plain = bench.launched(tap=lambda index, x: None)
    assert replays == []
    assert len(plain) == 1 + 8 * 5
    taped = bench.launched()
    assert replays == [8, 8, 8]
    assert taped == plain
    # every layer has its own weights and caches
    assert len({str(entry) for entry in taped}) == len(taped)


def test_one_pair_of_caches_for_all_layers(bench: Bench, replays: list[int]) -> None:
    scratch: Any = object.__new__(ScratchKVCache)
    scratch.k, scratch.v = bench.cache.k[:1], bench.cache.v[:1]
    bench.cache = scratch
    assert bench.launched() == bench.launched(tap=lambda index, x: None)
    assert len(replays) == 3


def test_decoding_and_short_models_are_not_taped(bench: Bench, replays: list[int]) -> None:
    bench.model.weights.layers = bench.model.weights.layers[:2]
    assert len(bench.launched()) == 1 + 8 * 2
    assert replays == []


def test_a_launch_that_is_not_a_repetition_ends_the_tape(
    bench: Bench, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = bench.launched(tap=lambda index, x: None)
    monkeypatch.setattr("cukern.ops._fast.Plans.find", lambda *_: None)
    assert bench.launched() == plain
    assert replays == []


def test_an_array_that_is_not_on_the_tape_ends_it(
    bench: Bench, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = type(bench.model)._others

    def with_one_more(*args: Any) -> Any:
        kinds, addresses = others(*args)
        return kinds, [*addresses, 4096]

    monkeypatch.setattr(type(bench.model), "_others", with_one_more)
    assert bench.launched() == bench.launched(tap=lambda index, x: None)
    assert replays == []


def test_an_array_that_something_else_made_ends_it(
    bench: Bench, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a library's product stood between the operators."""
    linear, other = ops.linear, bench.array((TOKENS, CONFIG.intermediate_size))

    def replaced(*arguments: Any, **options: Any) -> Any:
        made = linear(*arguments, **options)
        return other if "activation" in options else made

    monkeypatch.setattr(ops, "linear", replaced)
    assert len(bench.launched()) == 1 + 8 * 5
    assert replays == []


def test_two_arrays_in_one_place_end_it(bench: Bench, replays: list[int]) -> None:
    """Where a layer has one array twice, nothing tells which of two others a launch wants."""
    second = bench.model.weights.layers[1]
    second.k_norm = second.q_norm
    assert bench.launched() == bench.launched(tap=lambda index, x: None)
    assert replays == []


@pytest.mark.parametrize("kind", ["strides", "alignment", "dtype", "shape", "bias"])
def test_a_layer_of_another_kind_goes_through_the_operators(
    bench: Bench, replays: list[int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller may replace weights: what the second layer's launches assume must hold for the others too."""
    c, layer = CONFIG, bench.model.weights.layers[3]
    size = (c.hidden_size, c.intermediate_size)
    if kind == "strides":
        layer.down = bench.array(size[::-1]).T
    elif kind == "alignment":
        layer.input_norm = bench.array((c.hidden_size + 1,), FLOAT)[1:]
    elif kind == "dtype":
        layer.down = bench.array(size, FLOAT)
    elif kind == "shape":
        layer.down = bench.array((c.hidden_size, 2 * c.intermediate_size))
    else:
        layer.qkv_bias = None
    through: list[int] = []
    one = type(bench.model)._layer

    def seen(self: Any, index: int, *args: Any) -> Any:
        through.append(index)
        return one(self, index, *args) if index < 3 else args[0]

    monkeypatch.setattr(type(bench.model), "_layer", seen)
    bench.launched()
    assert len(replays) == 1
    assert through == [0, 1, 3, 4]


def test_a_launch_that_fails_is_an_error_and_slots_come_back(bench: Bench) -> None:
    pools = [kernel._slots for kernel in registry._memo.values()]
    before = [len(pool) for pool in pools]
    bench.launched()
    after = [len(pool) for pool in pools]
    assert all(a >= b for a, b in zip(after, before))
    bench.cuda.library.launch_codes = [0] * (1 + 18 + 4) + [700]
    with pytest.raises(jit.DriverError, match="CUDA_ERROR_TEST"):
        bench.launched()
    assert [len(pool) for pool in pools] == after
    assert tape.active is None


def test_another_thread_is_not_recorded(bench: Bench) -> None:
    recorded = Tape()
    with recorded.recording():
        thread = threading.Thread(target=bench.launched)
        thread.start()
        thread.join()
        other = Tape()
        with other.recording():
            pass
    assert recorded._launches == []
    assert not other.whole
    assert recorded.bind([1], []) is None


def test_a_tape_that_ends_while_another_thread_launches(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place looks once at what records: it may be gone at the next look."""

    class Module:
        looks = 0

        @property
        def active(self) -> Tape | None:
            self.looks += 1
            return Tape() if self.looks % 2 else None

    plain = bench.launched()
    for name in ("cukern.jit.loaded", "cukern.ops._fast"):
        monkeypatch.setattr(importlib.import_module(name), "tape", Module())
    assert bench.launched(tap=lambda index, x: None) == plain
    monkeypatch.setattr("cukern.ops._fast.Plans.find", lambda *_: None)
    assert bench.launched(tap=lambda index, x: None) == plain


@pytest.mark.gpu
def test_equal_bits_on_a_gpu(replays: list[int]) -> None:
    """Replayed layers against the operators, for prompts of several lengths and two of them at once."""
    import cupy

    from cukern.bench.random_model import make_model

    model = make_model(cupy, "0.6B", HALF, 5, max_positions=600)
    generator = np.random.default_rng(0)
    for lengths in ((2,), (64,), (65,), (300,), (129, 17)):
        blocks = [-(-n // 16) for n in lengths]
        tables = np.split(np.arange(sum(blocks)), np.cumsum(blocks)[:-1])
        tokens = [generator.integers(0, model.config.vocab_size, n).tolist() for n in lengths]
        batch = ForwardBatch.build(tokens, [0] * len(lengths), [t.tolist() for t in tables], 16, model.device.put)
        caches = [model.new_cache(sum(blocks), 16) for _ in range(2)]
        for cache in caches:
            cache.k.fill(0)
            cache.v.fill(0)
        got, want = model.hidden(batch, caches[0]), model.hidden(batch, caches[1], tap=lambda index, x: None)
        assert replays == [8, 8, 8]
        replays.clear()
        assert not cupy.isnan(got).any()
        np.testing.assert_array_equal(got.get().view(np.uint32), want.get().view(np.uint32))
        for name in ("k", "v"):
            a, b = (getattr(cache, name).view(np.uint16).get() for cache in caches)
            np.testing.assert_array_equal(a, b)
