"""Values by the copy engine in the one-launch decode step (decode/values.cuh): the bits of `Qwen3.forward`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from paging import bits
from test_decode_step import Scene, assert_same

import cukern
from cukern.models import Qwen3
from cukern.models.decode_step import DecodeStep, Layout, plan_layout
from cukern.testing.checkpoints import QWEN3_SHAPES, make_checkpoint


@pytest.fixture
def _engine() -> None:
    if cukern.jit.device().capability < (9, 0):
        pytest.skip("needs compute capability 9.0")


needs_the_engine = pytest.mark.usefixtures("_engine")


def test_values_by_context() -> None:
    def engine(fewest: int, most: int, rows: int = 1, name: str = "0.6B", copy_engine: bool = True) -> bool:
        layout = plan_layout(QWEN3_SHAPES[name], rows, 132, 227 << 10, (fewest, most), copy_engine)
        assert isinstance(layout, Layout)
        return layout.value_map

    assert engine(2049, 8192)
    assert engine(4033, 8448)
    assert not engine(2048, 8192)  # slower
    assert not engine(2049, 8449)  # single warps may attend
    assert not engine(2049, 4096, rows=2)  # no warp is idle in a norm
    assert not engine(2049, 8192, name="4B")  # few streams
    assert not engine(2049, 8192, copy_engine=False)
    assert not engine(2049, 8192, name="8B")  # values lie over x


@pytest.mark.gpu
@needs_the_engine
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("length", [2049, 4096, 6000])
def test_values_by_the_copy_engine(large_model: Qwen3, length: int, block_size: int) -> None:
    """Teams of one item and of several; first items that the engine brings, and the last chunk, which it does not."""
    scene = Scene(large_model, (length,), block_size=block_size)
    want = scene.expected(2)
    assert DecodeStep(large_model, scene.cache(), 1, scene.width, min_context=length).layout.value_map
    for blocks in (None, None, None, 40):  # again for races; 40 blocks are too few for pairs of segments: no engine
        assert_same(scene, scene.stepped(blocks, 2, width=scene.width, min_context=length), want)


_OTHER_SHAPES: tuple[dict[str, int], ...] = (
    {},
    {"head_dim": 64},
    {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 1024},
    {"num_hidden_layers": 1},
)


@pytest.mark.gpu
@needs_the_engine
@pytest.mark.parametrize("change", _OTHER_SHAPES, ids=["0.6B", "head_dim 64", "hidden 512", "one layer"])
def test_one_captured_step_for_every_length(change: dict[str, int], tmp_path: Path) -> None:
    """Made for long contexts, but the sequence is short, long or not there. Hidden size 512: blocks without QKV."""
    import cupy

    folder = make_checkpoint(tmp_path, "0.6B", "float16", **{"num_hidden_layers": 3, **change})
    model = Qwen3.from_pretrained(folder, device="cuda", max_positions=8192)
    longest = Scene(model, (6000,), block_size=64)
    step = DecodeStep(model, longest.cache(), 1, longest.width, min_context=4033)
    assert step.layout.value_map
    stream = cupy.cuda.Stream(non_blocking=True)
    graph = None
    for n, length in enumerate((1, 129, 257, 300, 2000, 4100, 0, 6000, 129)):
        scene = Scene(model, (max(length, 1),), block_size=64, seed=n)
        size = scene.k.shape[1]  # the step's cache is the longest sequence's
        for whole, part in ((step.cache.k, scene.k), (step.cache.v, scene.v)):
            whole.view(np.uint16)[:, :size] = model.device.put(part.view(np.uint16))
        step.load(scene.batch())
        if length == 0:
            step.seq_lens[:] = 0
            step.slot_mapping[:] = -1
        cupy.cuda.runtime.deviceSynchronize()
        with stream:
            if graph is None:
                step.run()  # compiles and loads
                stream.synchronize()
                stream.begin_capture()
                step.run()
                graph = stream.end_capture()
            graph.launch(stream)
            stream.synchronize()
        if length:
            want = model.device.get(model.forward(scene.batch(), scene.cache()))
            np.testing.assert_array_equal(bits(model.device.get(step.logits)), bits(want), err_msg=f"{length} tokens")


@pytest.mark.gpu
@needs_the_engine
def test_a_page_that_does_not_exist_is_not_waited_for(large_model: Qwen3) -> None:
    """NaN, as from the operators, and no step that never ends: its copies are counted or not asked for."""
    import cupy

    scene = Scene(large_model, (3000,))
    scene.tables[0, 40] = 1 << 20
    cache, other = scene.cache(), scene.cache()
    step = DecodeStep(large_model, cache, 1, scene.width, min_context=3000)
    step.load(scene.batch())
    got, want = (cupy.asnumpy(x) for x in (step.run(), large_model.forward(scene.batch(), other)))
    assert np.isnan(want).all()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
