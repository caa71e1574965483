"""The device side of a step: what is uploaded, and that it is one copy into buffers that are used again."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from cukern.engine.drawing import Flavour, draw, sampling_arrays
from cukern.engine.params import ResolvedSampling
from cukern.engine.runner import Runner, Staging
from cukern.engine.scheduler import StepPlan
from cukern.engine.sequence import Sequence


def request(tokens, computed, blocks, **sampling) -> Sequence:
    params = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "max_tokens": 9, **sampling}
    sequence = Sequence(
        0, tokens, ResolvedSampling(**params, stop=(), stop_token_ids=frozenset(), logprobs=False), None
    )
    sequence.num_computed, sequence.blocks = computed, blocks
    return sequence


def layout(plan: StepPlan) -> dict[str, np.ndarray]:
    model = SimpleNamespace(device=SimpleNamespace(kind="cpu"))
    return Runner(model, SimpleNamespace(block_size=4))._layout(plan)


def test_layout_of_prompts():
    first = request([10, 11, 12, 13, 14, 15], 0, [7, 2], temperature=0.5, seed=9, top_k=3)
    second = request([20, 21, 22], 1, [5])  # its first token is cached
    third = request([30, 31, 32, 33, 34], 0, [1, 3])  # only a piece of it: no token is drawn
    got = layout(StepPlan([first, second, third], [6, 2, 4], is_decode=False))
    assert got["token_ids"].tolist() == [10, 11, 12, 13, 14, 15, 21, 22, 30, 31, 32, 33]
    assert got["positions"].tolist() == [0, 1, 2, 3, 4, 5, 1, 2, 0, 1, 2, 3]
    assert got["slot_mapping"].tolist() == [28, 29, 30, 31, 8, 9, 21, 22, 4, 5, 6, 7]
    assert got["cu_seqlens_q"].tolist() == [0, 6, 8, 12]
    assert got["seq_lens"].tolist() == [6, 3, 4]
    assert got["block_tables"].tolist() == [[7, 2], [5, 0], [1, 3]]
    assert got["logits_indices"].tolist() == [5, 7]
    assert got["draw_positions"].tolist() == [6, 3]
    got |= sampling_arrays([first.sampling, second.sampling])
    assert got["temperature"].tolist() == [0.5, 0.0]
    assert got["logprob_temperature"].tolist() == [0.5, 1.0]
    assert got["seed"].tolist() == [9, 0]
    assert got["top_k"].tolist() == [3, 0]
    assert {n: a.dtype.name for n, a in got.items()} == {
        "slot_mapping": "int64", "logits_indices": "int64", "seed": "uint64", "draw_positions": "int64",
        "token_ids": "int32", "positions": "int32", "cu_seqlens_q": "int32", "seq_lens": "int32",
        "block_tables": "int32", "top_k": "int32", "temperature": "float32", "logprob_temperature": "float32",
        "top_p": "float32", "min_p": "float32",
    }  # fmt: skip


def test_layout_of_a_decode_step():
    sequences = [request([1, 2, 3, 4, 5], 4, [6, 0]), request([1, 2], 1, [3])]
    got = layout(StepPlan(sequences, [1, 1], is_decode=True))
    assert got["token_ids"].tolist() == [5, 2]
    assert got["positions"].tolist() == [4, 1]
    assert got["slot_mapping"].tolist() == [0, 13]
    assert got["seq_lens"].tolist() == [5, 2]
    assert got["logits_indices"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ([{"temperature": 0.0}, {"temperature": 0.0, "top_k": 4}], None),  # greedy: no draw at all
        ([{"temperature": 1.0}, {"temperature": 0.0}], {"min_p": [0.0, 0.0]}),
        ([{"temperature": 1.0, "top_k": 5}, {"temperature": 1.0}],
         {"min_p": [0.0, 0.0], "top_k": [5, 0], "top_p": [1.0, 1.0]}),
        ([{"temperature": 1.0, "min_p": 0.5}], {"min_p": [0.5]}),
    ],
)  # fmt: skip
def test_filters_that_no_row_uses_are_left_out(sampling, expected):
    seen = []
    ops = SimpleNamespace(
        argmax=lambda logits, **options: np.zeros(len(logits)),
        sample=lambda logits, **options: seen.append(options) or np.zeros(len(logits)),
    )
    params = [request([1], 0, [0], **s).sampling for s in sampling]
    at = sampling_arrays(params) | {"draw_positions": np.ones(len(params), np.int64)}
    draw(ops, np.zeros((len(sampling), 7), np.float32), at, Flavour.of(params))
    got = [{n: o[n].tolist() for n in o.keys() & {"top_k", "top_p", "min_p"}} for o in seen]
    assert got == ([] if expected is None else [expected])


@pytest.fixture
def fake_cupy(monkeypatch):
    """Enough of CuPy to see what Staging does: device memory is a NumPy array."""
    log = SimpleNamespace(copies=[], waits=0, allocated=0, stream="first", synchronized=[])

    class Device(np.ndarray):
        @property
        def data(self):
            return SimpleNamespace(copy_from_host_async=self._copy)

        def _copy(self, pointer, size, stream):
            log.copies.append(size)
            source = (np.ctypeslib.ctypes.c_uint8 * size).from_address(pointer)
            self[:size] = np.frombuffer(source, np.uint8)

    def empty(size, dtype):
        log.allocated += 1
        return np.full(size, 255, dtype).view(Device)

    def wait():
        log.waits += 1

    class Stream:
        def __init__(self, name):
            self.name = name

        def __eq__(self, other: object) -> bool:
            return self.name == other.name

        def record(self):
            return SimpleNamespace(synchronize=wait)

        def synchronize(self):
            log.synchronized.append(self.name)

    cuda = SimpleNamespace(alloc_pinned_memory=bytearray, get_current_stream=lambda: Stream(log.stream))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, empty=empty, uint8=np.uint8))
    return log


def test_staging_uploads_everything_in_one_copy(fake_cupy):
    staging = Staging(SimpleNamespace(kind="cuda"))
    arrays = {
        "a": np.arange(5, dtype=np.int64),
        "b": np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::-1],
        "none": np.zeros(0, np.float32),
        "c": np.array([1.5], np.float32),
    }
    got = staging.upload(arrays)
    assert len(fake_cupy.copies) == 1
    for name, array in arrays.items():
        assert got[name].dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(got[name]), array)
    base = got["a"].__array_interface__["data"][0]
    offsets = [got[n].__array_interface__["data"][0] - base for n in ("b", "c")]
    assert offsets == [256, 512]  # aligned like fresh allocations, and none for an empty array


def test_staging_uses_its_buffers_again_after_the_copy_left(fake_cupy):
    staging = Staging(SimpleNamespace(kind="cuda"))
    for value in range(3):
        got = staging.upload({"a": np.full(10, value, np.int32)})
        assert (np.asarray(got["a"]) == value).all()
    assert (fake_cupy.allocated, fake_cupy.waits) == (1, 2)
    staging.upload({"a": np.zeros(1 << 16, np.int32)})
    assert fake_cupy.allocated == 2


def test_staging_waits_for_the_stream_of_the_step_before(fake_cupy):
    staging = Staging(SimpleNamespace(kind="cuda"))
    for fake_cupy.stream in ("first", "first", "second", "second"):
        staging.upload({"a": np.zeros(3, np.int32)})
    assert fake_cupy.synchronized == ["first"]


def test_staging_passes_host_arrays_through():
    arrays = {"a": np.arange(3)}
    assert Staging(SimpleNamespace(kind="cpu")).upload(arrays) is arrays
