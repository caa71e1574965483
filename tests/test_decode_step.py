"""The one-launch decode step: the bits of `Qwen3.forward`, whatever the grid, batch, lengths and page layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paging import UNUSED, bits

import cukern
from cukern.bench.profile_decode import point_times, table
from cukern.models import ForwardBatch, PagedKVCache, Qwen3, demo_checkpoint
from cukern.models.decode_step import MARKS, DecodeStep, Layout, kernel_defines, plan_layout
from cukern.models.kv_cache import ScratchKVCache
from cukern.testing.checkpoints import QWEN3_SHAPES, make_checkpoint

DATA = Path(__file__).parent / "data"
# Every model, number of rows and grid is a kernel of its own, and seconds of compilation: tests that may have any share
# tied-fp16, untied-bf16-sharded or hd128-fp16 on 3 blocks.
LENGTHS = (1, 2, 15, 64, 127, 128, 129, 200)


@cache
def model_of(name: str, device: str = "emulated") -> Qwen3:
    return Qwen3.from_pretrained(demo_checkpoint() if name == "demo-qwen3" else DATA / name, device=device)


class Scene:
    """A cache with random keys and values of several sequences in shuffled blocks, and NaN everywhere else."""

    def __init__(self, model: Qwen3, lengths: Sequence[int], *, block_size: int = 16, steps: int = 4, seed: int = 0):
        self.model, self.block_size = model, block_size
        self.rng = np.random.default_rng(seed)
        self.lengths = list(lengths)
        blocks = [-(-(n + steps) // block_size) for n in lengths]
        self.width = max(blocks) + 1
        order = self.rng.permutation(sum(blocks) + 2)
        self.tables = np.full((len(lengths), self.width), UNUSED, np.int32)
        at = 0
        for i, count in enumerate(blocks):
            self.tables[i, :count] = order[at : at + count]
            at += count
        c = model.config
        shape = (c.num_hidden_layers, len(order), c.num_key_value_heads, block_size, c.head_dim)
        caches = []
        for _ in range(2):
            full = self.rng.standard_normal(shape, np.float32).astype(model.dtype)
            kept = np.full(shape, np.nan, model.dtype)
            for i, n in enumerate(lengths):  # the token that is decoded next is number n - 1: not there yet
                for t in range(n - 1):
                    block, row = self.tables[i, t // block_size], t % block_size
                    kept[:, block, :, row] = full[:, block, :, row]
            caches.append(kept)
        self.k, self.v = caches

    def cache(self) -> PagedKVCache:
        cache = PagedKVCache(self.model.config, self.k.shape[1], self.block_size, self.model.device, self.model.dtype)
        for whole, values in ((cache.k, self.k), (cache.v, self.v)):
            whole.view(np.uint16)[...] = self.model.device.put(values.view(np.uint16))
        return cache

    def batch(self, step: int = 0) -> ForwardBatch:
        put, rng = self.model.device.put, np.random.default_rng(100 + step)
        last = np.array(self.lengths, np.int64) - 1 + step
        slots = self.tables[np.arange(len(last)), last // self.block_size].astype(np.int64) * self.block_size
        count = len(last)
        return ForwardBatch(
            token_ids=put(rng.integers(0, self.model.config.vocab_size, count).astype(np.int32)),
            positions=put(last.astype(np.int32)),
            slot_mapping=put(slots + last % self.block_size),
            cu_seqlens_q=put(np.arange(count + 1, dtype=np.int32)),
            seq_lens=put((last + 1).astype(np.int32)),
            block_tables=put(self.tables),
            max_query_len=1,
        )

    def expected(self, steps: int = 1) -> tuple[list[np.ndarray], PagedKVCache]:
        cache = self.cache()
        get = self.model.device.get
        return [get(self.model.forward(self.batch(i), cache)).copy() for i in range(steps)], cache

    def stepped(
        self, blocks: int | None, steps: int = 1, max_batch: int | None = None, width: int | None = None, **kwargs: Any
    ) -> Any:
        cache = self.cache()
        width = width or self.width + 1
        step = DecodeStep(self.model, cache, max_batch or len(self.lengths), width, blocks=blocks, **kwargs)
        found = []
        for i in range(steps):
            step.load(self.batch(i))
            found.append(self.model.device.get(step.run())[: len(self.lengths)].copy())
        return found, cache


def assert_same(scene: Scene, got: Any, want: Any) -> None:
    for step, (a, b) in enumerate(zip(got[0], want[0], strict=True)):
        assert not np.isnan(b).any()
        np.testing.assert_array_equal(bits(a), bits(b), err_msg=f"logits of step {step}")
    get = scene.model.device.get
    for name in ("k", "v"):
        a, b = get(getattr(got[1], name).view(np.uint16)), get(getattr(want[1], name).view(np.uint16))
        np.testing.assert_array_equal(a, b, err_msg=f"{name} cache")


@pytest.mark.parametrize(
    ("name", "blocks"),
    [("tied-fp16", 3), ("tied-fp16", 8), ("untied-bf16-sharded", 4), ("hd128-fp16", 3), ("hd128-fp16", 8)],
)
def test_forward_bits_for_any_grid(name: str, blocks: int) -> None:
    scene = Scene(model_of(name), (129, 64, 1))
    assert_same(scene, scene.stepped(blocks), scene.expected())


@pytest.mark.parametrize("length", LENGTHS)
def test_one_sequence_of_every_length(length: int) -> None:
    scene = Scene(model_of("hd128-fp16"), (length,), seed=length)
    assert_same(scene, scene.stepped(3), scene.expected())


@pytest.mark.parametrize(
    ("name", "count"), [("tied-fp16", 1), ("hd128-fp16", 2), ("untied-bf16-sharded", 5), ("tied-fp16", 12)]
)
def test_batch_of_every_size(name: str, count: int) -> None:
    scene = Scene(model_of(name), (LENGTHS * 2)[-count:], block_size=64, seed=count)
    assert_same(scene, scene.stepped(3), scene.expected())


@pytest.mark.parametrize(
    ("lengths", "block_size"),
    [
        ((129,), 16),
        ((300,), 16),
        ((190, 5), 128),
        ((129, 257), 16),
        ((150, 20, 130), 32),
        ((500, 400), 16),
        ((1, 390, 500, 2), 256),
    ],
)
def test_long_sequences_are_merged_in_both_ways(lengths: tuple[int, ...], block_size: int) -> None:
    """With tagged words for one or two sequences, behind a barrier for more."""
    scene = Scene(model_of("hd128-fp16"), lengths, block_size=block_size)
    assert_same(scene, scene.stepped(3), scene.expected())


@pytest.mark.parametrize(
    ("name", "lengths", "block_size", "blocks"),
    [
        ("hd128-fp16", (500, 300), 16, 3),  # 4 items in the first block: a warp has four slots
        ("hd128-fp16", (500, 260), 256, 2),  # 7: two slots
        ("untied-bf16-sharded", (400, 1, 500), 32, 2),  # 9: one slot; statistics and sums behind a barrier
        ("hd128-fp16", (500, 400, 300, 260, 129, 70, 3), 16, 1),  # 36: a warp goes on from item to item
        ("tied-fp16", (500, 450), 16, 1),  # 16, in a step of two sequences
    ],
)
def test_items_of_single_warps(name: str, lengths: tuple[int, ...], block_size: int, blocks: int) -> None:
    """More chunks than teams: every warp takes chunks of its own."""
    scene = Scene(model_of(name), lengths, block_size=block_size)
    layout = plan_layout(scene.model.config, len(lengths), blocks, 227 << 10)
    assert isinstance(layout, Layout)
    items = scene.model.config.num_key_value_heads * sum(-(-n // 128) for n in lengths)
    assert items > 2 * layout.teams * blocks
    assert layout.teams == 2
    with cukern.emulate(check=len(lengths) == 1):
        assert_same(scene, scene.stepped(blocks, max_shared_mem=227 << 10), scene.expected())


@pytest.mark.parametrize("lengths", [(1,), (127,), (300,), (129, 1), (500, 200)])
def test_long_contexts_were_expected(lengths: tuple[int, ...]) -> None:
    """A kernel in which single warps attend, whatever the lengths."""
    scene = Scene(model_of("hd128-fp16"), lengths, seed=3)
    with cukern.emulate(check=len(lengths) == 1):
        got = scene.stepped(2, max_shared_mem=227 << 10, width=64, min_context=1000)
        assert_same(scene, got, scene.expected())


def test_attention_by_context() -> None:
    def attention(rows: int, fewest: int, most: int, name: str = "0.6B", shared_kb: int = 227) -> str:
        layout = plan_layout(QWEN3_SHAPES[name], rows, 132, shared_kb << 10, (fewest, most))
        assert isinstance(layout, Layout)
        return layout.attention

    assert attention(1, 1, 8448) == "teams"  # 528 chunks of 8 key/value heads: two for each team
    assert attention(1, 1, 8449) == attention(1, 8448, 8449) == "either"
    assert attention(1, 8449, 8449) == "warps"
    assert attention(2, 1, 4224) == "teams"
    assert attention(2, 1, 4225) == "either"
    assert attention(2, 8321, 8321) == "warps"
    assert attention(16, 1, 512) == "teams"
    assert attention(1, 30000, 40960, shared_kb=100) == "teams"  # one team
    assert attention(1, 30000, 40960, "4B") == "warps"
    assert attention(1, 30000, 40960, "32B") == "teams"  # no room for 8 query heads a warp
    assert attention(16, 1, 256) == "teams"  # couples, however many


def test_parts_are_counted_in_32_bits() -> None:
    scene = Scene(model_of("hd128-fp16"), (5,))
    with pytest.raises(
        ValueError, match=r"max_blocks_per_seq 200000000: parts of attention would take \d+ words, .* 2\*\*32"
    ):
        scene.stepped(3, width=200_000_000)


def test_min_context_is_checked() -> None:
    scene = Scene(model_of("hd128-fp16"), (5,))
    with pytest.raises(ValueError, match="min_context must be 1 to 32, what the block tables hold, got 33"):
        scene.stepped(3, width=2, min_context=33)


@pytest.mark.parametrize("name", ["max_batch", "max_blocks_per_seq", "min_context", "blocks", "max_shared_mem"])
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (0, ValueError, "must be at least 1, got 0"),
        (-3, ValueError, "must be at least 1, got -3"),
        (True, ValueError, "must be at least 1, got True"),
        (1.5, TypeError, "must be an integer, got 1.5"),
        (float("nan"), TypeError, "must be an integer, got nan"),
        ("3", TypeError, "must be an integer, got '3'"),
    ],
)
def test_sizes_are_checked(name: str, wrong: object, error: type[Exception], message: str) -> None:
    model = model_of("tied-fp16")
    sizes: dict[str, Any] = {"max_batch": 1, "max_blocks_per_seq": 4, name: wrong}
    with pytest.raises(error, match=f"DecodeStep: {name} {message}"):
        DecodeStep(model, model.new_cache(4), **sizes)


def test_narrow_integers_do_not_overflow() -> None:
    scene = Scene(model_of("hd128-fp16"), (100,))
    cache = PagedKVCache(scene.model.config, np.int8(120), np.int16(16), scene.model.device, scene.model.dtype)
    assert cache.num_blocks * cache.block_size == 1920
    step = DecodeStep(scene.model, cache, np.int8(1), np.int8(120), min_context=np.int8(100), blocks=np.int8(3))
    assert step.layout == DecodeStep(scene.model, cache, 1, 120, min_context=100, blocks=3).layout
    got = scene.stepped(np.int8(3), max_batch=np.int8(1), width=np.int8(120), min_context=np.int8(100))
    assert_same(scene, got, scene.expected())


@pytest.mark.parametrize("heads", [(6, 1), (12, 3)])
def test_items_of_single_warps_with_other_heads(heads: tuple[int, int], tmp_path: Path) -> None:
    """The most query heads to a key/value head for which there is room, and a head size that is no power of two."""
    config = replace(
        model_of("tied-fp16").config,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=48 if heads[1] > 1 else 16,
        num_hidden_layers=1,
    )
    model = Qwen3.from_pretrained(make_checkpoint(tmp_path, config, "float16", std=0.2), device="emulated")
    scene = Scene(model, (400, 150))
    layout = plan_layout(model.config, 2, 1, 227 << 10)
    assert isinstance(layout, Layout)
    assert layout.attention == "either"
    with cukern.emulate(check=False):
        assert_same(scene, scene.stepped(1, max_shared_mem=227 << 10), scene.expected())


def test_slot_of_minus_one_with_items_of_single_warps() -> None:
    """The key at the last place is then what the cache holds there."""
    scene = Scene(model_of("tied-fp16"), (300, 140))
    model, put = scene.model, scene.model.device.put
    batch = scene.batch()
    batch.slot_mapping = put(np.array([-1, int(batch.slot_mapping[1])], np.int64))
    cache, other = scene.cache(), scene.cache()
    for c in (cache, other):
        c.k[:, scene.tables[0, 18], :, 11] = c.v[:, scene.tables[0, 18], :, 11] = 0.5
    with cukern.emulate(check=False):
        want = model.forward(batch, cache)
        step = DecodeStep(model, other, 2, scene.width, blocks=1, max_shared_mem=227 << 10)
        step.load(batch)
        np.testing.assert_array_equal(bits(step.run()), bits(want))
    np.testing.assert_array_equal(bits(other.k), bits(cache.k))


@pytest.mark.parametrize(
    ("chunks", "head_dim", "blocks"), [(60, 16, 4), (131, 16, 4), (290, 16, 4), (40, 32, 3), (131, 32, 3), (60, 16, 1)]
)
def test_more_chunks_than_are_merged_in_a_round(chunks: int, head_dim: int, blocks: int, tmp_path: Path) -> None:
    """In turns of a batch, in longer ones, and in those of two rounds; by 16 columns, and by 32 where there are fewer
    blocks than jobs."""
    config = replace(
        model_of("tied-fp16").config,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        num_hidden_layers=1,
        max_position_embeddings=40000,
    )
    model = Qwen3.from_pretrained(make_checkpoint(tmp_path, config, "float16", std=0.2), device="emulated")
    scene = Scene(model, ((chunks - 1) * 128 + 1,), block_size=256)
    with cukern.emulate(check=chunks < 100):
        assert_same(scene, scene.stepped(blocks), scene.expected())


@pytest.mark.parametrize("shared_kb", [227, 160])
@pytest.mark.parametrize("count", [1, 3])
def test_large_shared_memory(shared_kb: int, count: int) -> None:
    """The layouts of larger GPUs: deeper rings, and keys and values beside the rows of x where there is room."""
    scene = Scene(model_of("hd128-fp16"), (200, 129, 3)[:count])
    layout = plan_layout(scene.model.config, count, 4, shared_kb << 10)
    assert isinstance(layout, Layout)
    assert layout.ring_k == 128
    assert layout.overlay == (shared_kb == 160)
    assert_same(scene, scene.stepped(4, max_shared_mem=shared_kb << 10), scene.expected())


def three_layers(folder: Path, **sizes: int) -> Qwen3:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = replace(model_of("hd128-fp16").config, hidden_size=512, num_hidden_layers=3, **heads, **sizes)
    return Qwen3.from_pretrained(make_checkpoint(folder, config, "float16", std=0.1), device="emulated")


@pytest.mark.parametrize("lengths", [(3,), (127,), (200,), (128, 500)])
def test_two_segments_at_once(lengths: tuple[int, ...], tmp_path: Path) -> None:
    """Products of an even number of segments, on enough blocks, with rings of exactly one unit.

    The blocks that compute the heads of one short sequence have no part of the first product.
    """
    model = three_layers(tmp_path, intermediate_size=1024, vocab_size=256)
    scene = Scene(model, lengths, steps=2)
    layout = plan_layout(model.config, len(lengths), 17, 227 << 10)
    assert isinstance(layout, Layout)
    assert (layout.direct, layout.ring_k, layout.slots) == (True, 128, 4)
    with cukern.emulate(check=False):
        assert_same(scene, scene.stepped(17, 2, max_shared_mem=227 << 10), scene.expected(2))


@pytest.mark.parametrize(
    ("lengths", "context", "attention"),
    [
        *(((n,), 5120, "warps") for n in (3, 127, 130, 300)),
        ((3, 70), 5120, "warps"),
        ((500, 200), 5120, "warps"),
        ((2300,), 1, "teams"),  # several items for some teams
        ((1500, 1000), 1, "teams"),
    ],
)
def test_two_segments_at_once_by_context(
    lengths: tuple[int, ...], context: int, attention: str, tmp_path: Path
) -> None:
    """The same in a kernel for long contexts, and with rings that are filled behind the heads."""
    model = three_layers(tmp_path, intermediate_size=1024, vocab_size=256, max_position_embeddings=8192)
    scene = Scene(model, lengths, steps=2)
    width = max(context // 16, scene.width + 1)
    layout = plan_layout(model.config, len(lengths), 17, 227 << 10, (context, width * 16))
    assert isinstance(layout, Layout)
    assert (layout.slots, layout.attention) == (4, attention)
    with cukern.emulate(check=len(lengths) == 1 and lengths[0] < 1000):
        got = scene.stepped(17, 2, max_shared_mem=227 << 10, width=width, min_context=context)
        assert_same(scene, got, scene.expected(2))


@pytest.mark.parametrize("context", [1, 5120])
def test_rows_out_of_use(context: int, tmp_path: Path) -> None:
    """All of them, as before a step is captured, and one of two."""
    model = three_layers(tmp_path, intermediate_size=1024, vocab_size=256, max_position_embeddings=8192)
    scene = Scene(model, (129,))
    cache = scene.cache()
    with cukern.emulate(check=False):
        step = DecodeStep(model, cache, 2, 320, blocks=17, max_shared_mem=227 << 10, min_context=context)
        assert not np.isnan(step.run()).any()
        np.testing.assert_array_equal(bits(cache.k), bits(scene.k))
        got = scene.stepped(17, 1, 2, max_shared_mem=227 << 10, width=320, min_context=context)
        assert_same(scene, got, scene.expected())


@pytest.mark.parametrize(
    ("lengths", "blocks", "shared_kb"), [((130,), 17, 227), ((130,), 17, 80), ((3, 70, 20), 5, 227)]
)
def test_chains_of_several_chunks(lengths: tuple[int, ...], blocks: int, shared_kb: int, tmp_path: Path) -> None:
    """Few streams with deep rings: segments of several chunks, and runs of segments that go on in the next tile.

    Of 17 blocks, the two that compute the heads get less of the first product.
    """
    model = three_layers(tmp_path, intermediate_size=192, head_dim=64, vocab_size=264)
    scene = Scene(model, lengths, steps=2)
    layout = plan_layout(model.config, len(lengths), blocks, shared_kb << 10)
    assert isinstance(layout, Layout)
    assert (layout.streams, layout.ring_k) == (8, 128 if shared_kb == 227 else 64)
    assert_same(scene, scene.stepped(blocks, 2, max_shared_mem=shared_kb << 10), scene.expected(2))


@pytest.mark.parametrize("order", ["down", "random"])
def test_consecutive_steps_and_thread_orders(order: str) -> None:
    """Four steps across a chunk border, each from what the one before has left."""
    scene = Scene(model_of("tied-fp16"), (126, 15, 2))
    with cukern.emulate(order=order, seed=3):
        assert_same(scene, scene.stepped(3, 4), scene.expected(4))


def test_demonstration_model() -> None:
    """With the layout of a large GPU, whose rings hold two whole units."""
    scene = Scene(model_of("demo-qwen3"), (128, 40), steps=2)
    with cukern.emulate(check=False):
        assert_same(scene, scene.stepped(4, 2, max_shared_mem=227 << 10), scene.expected(2))


def test_unused_rows_change_nothing() -> None:
    """A batch smaller than the step was made for; with the kernel of test_batch_of_every_size for five sequences."""
    scene = Scene(model_of("untied-bf16-sharded"), (64, 130, 7))
    assert_same(scene, scene.stepped(3, 2, max_batch=7), scene.expected(2))


def test_biases_and_many_queries_to_a_key(tmp_path: Path) -> None:
    """attention_bias, a group of 12 query heads, head_dim 16, sizes that are no multiple of 32."""
    config = replace(
        model_of("tied-fp16").config,
        hidden_size=80,
        intermediate_size=144,
        num_attention_heads=12,
        num_key_value_heads=1,
        head_dim=16,
        attention_bias=True,
        vocab_size=72,
    )
    model = Qwen3.from_pretrained(make_checkpoint(tmp_path, config, "bfloat16", std=0.2), device="emulated")
    scene = Scene(model, (129, 17))
    assert_same(scene, scene.stepped(3), scene.expected())


def test_token_outside_the_vocabulary_gives_nan_in_its_row_alone() -> None:
    scene = Scene(model_of("hd128-fp16"), (20, 20))
    want = scene.expected()[0][0]
    step = DecodeStep(scene.model, scene.cache(), 2, scene.width, blocks=3)
    step.load(scene.batch())
    step.token_ids[0] = scene.model.config.vocab_size
    got = step.run()
    assert np.isnan(got[0]).all()
    np.testing.assert_array_equal(bits(got[1]), bits(want[1]))


def test_slot_of_minus_one_writes_nothing() -> None:
    """The key at the last place is then what the cache holds there."""
    scene = Scene(model_of("hd128-fp16"), (20, 33))
    model, put = scene.model, scene.model.device.put
    batch = scene.batch()
    batch.slot_mapping = put(np.array([-1, int(batch.slot_mapping[1])], np.int64))
    cache, other = scene.cache(), scene.cache()
    for c in (cache, other):
        c.k[:, scene.tables[0, 1], :, 3] = c.v[:, scene.tables[0, 1], :, 3] = 0.5
    want = model.forward(batch, cache)
    step = DecodeStep(model, other, 2, scene.width, blocks=3)
    step.load(batch)
    np.testing.assert_array_equal(bits(step.run()), bits(want))
    np.testing.assert_array_equal(bits(other.k), bits(cache.k))


def test_profile_names_every_point_and_changes_no_bits() -> None:
    scene = Scene(model_of("hd128-fp16"), (200,))
    cache = scene.cache()
    step = DecodeStep(scene.model, cache, 1, scene.width, blocks=4, profile=True)
    step.load(scene.batch())
    np.testing.assert_array_equal(bits(step.run()), bits(scene.expected()[0][0]))
    layers = scene.model.config.num_hidden_layers
    assert step.stamps.shape == (4, layers + 1, MARKS, 16)
    assert (step.stamps[0, :-1].max(-1) > 0).all()  # block 0 has work in every phase
    lines = table(step.stamps, 1000.0)
    assert sum("= together" in line for line in lines) == 11
    assert all(float(line.split()[-1]) >= 0 for line in lines[2:] if line.startswith("  "))


def test_times_of_a_profile() -> None:
    """A clock that wraps, a warp that is late, a block that does not take part, a point that nobody passes."""
    at = np.cumsum(np.full(MARKS, 10))[None, None, :, None] + np.array([0, 5])
    stamps = np.broadcast_to(at + 2**32 - 103, (2, 3, MARKS, 2)).astype(np.uint64).astype(np.uint32)
    stamps[1, :, 10:21] = 0
    stamps[:, :, 30] = 0
    first, last = point_times(stamps)
    assert first[0, 1, :4].tolist() == [0, 10, 20, 30]
    assert last[0, 1, :4].tolist() == [5, 15, 25, 35]
    assert first[1, 2, 9:22].tolist() == [90.0] * 12 + [210.0]
    assert first[0, 0, 29:32].tolist() == [290, 290, 310]


# ---- refusals


def test_bad_arguments() -> None:
    model = model_of("tied-fp16")
    cache = model.new_cache(4)
    with pytest.raises(ValueError, match="max_blocks_per_seq must be at least 1, got 0"):
        DecodeStep(model, cache, 1, 0)
    with pytest.raises(ValueError, match="a batch of 17: it takes 1 to 16"):
        DecodeStep(model, cache, 17, 4)
    with pytest.raises(ValueError, match="cache has no blocks; make one with"):
        DecodeStep(model, model.new_cache(0), 1, 4)
    with pytest.raises(TypeError, match="DecodeStep: profile must be True or False, got 'x'"):
        DecodeStep(model, cache, 1, 4, profile="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every layer"):
        DecodeStep(model, ScratchKVCache(model.config, 4, 16, model.device, model.dtype), 1, 4)
    with pytest.raises(ValueError, match="float32"):
        DecodeStep(model, PagedKVCache(model.config, 4, 16, model.device, np.float32), 1, 4)
    with pytest.raises(ValueError, match="shared memory"):
        DecodeStep(model, cache, 16, 4, max_shared_mem=40 << 10)
    assert DecodeStep.supported(model, 1) is None
    assert "CPU reference" in str(DecodeStep.supported(model_of("tied-fp16", "cpu"), 1))


def test_batches_that_do_not_fit() -> None:
    scene = Scene(model_of("tied-fp16"), (20, 33))
    step = DecodeStep(scene.model, scene.cache(), 1, scene.width, blocks=3)
    with pytest.raises(ValueError, match="2 sequences"):
        step.load(scene.batch())
    step = DecodeStep(scene.model, scene.cache(), 2, 1, blocks=3)
    with pytest.raises(ValueError, match=f"{scene.width} blocks"):
        step.load(scene.batch())
    prompt = replace(scene.batch(), max_query_len=3, is_decode=False)
    with pytest.raises(ValueError, match="one new token"):
        step.load(prompt)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 256}, "head_dim 256"),
        ({"num_attention_heads": 34, "num_key_value_heads": 2}, "17 query heads"),
        ({"hidden_size": 1032}, "hidden_size 1032"),
        ({"vocab_size": 151935}, "vocab_size 151935"),
    ],
)
def test_models_that_are_refused(change: dict[str, int], reason: str) -> None:
    found = plan_layout(replace(QWEN3_SHAPES["0.6B"], **change), 1, 132, 227 << 10)
    assert isinstance(found, str)
    assert reason in found


def test_published_models_fit_a_large_gpu() -> None:
    for name, config in QWEN3_SHAPES.items():
        for batch in (1, 2):
            layout = plan_layout(config, batch, 132, 227 << 10)
            assert isinstance(layout, Layout), name
            assert layout.streams == (16 if name == "0.6B" else 8)
            assert batch > 1 or layout.streams * layout.slots * layout.ring_k * 16 >= 96 << 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch", "contexts", "arch", "sm_count", "shared_kb"),
    [
        ("0.6B", 2, (1, 40960), "sm_90a", 132, 227),
        ("0.6B", 2, (1, 256), "sm_90a", 132, 227),
        ("0.6B", 16, (1, 40960), "sm_90a", 132, 227),
        ("4B", 1, (1, 8192), "sm_90a", 132, 227),
        ("4B", 1, (32768, 40960), "sm_90a", 132, 227),
        ("8B", 1, (1, 8192), "sm_90a", 132, 227),
    ],
)
def test_compiles_without_spills(
    name: str, batch: int, contexts: tuple[int, int], arch: str, sm_count: int, shared_kb: int
) -> None:
    config = QWEN3_SHAPES[name]
    layout = plan_layout(config, batch, sm_count, shared_kb << 10, contexts)
    assert isinstance(layout, Layout)
    source = cukern.jit.kernels_src() / "decode_step.cu"
    kernel = cukern.Kernel(
        source, "decode_step", template=("bf16",), defines=kernel_defines(config, layout), cooperative=True, arch=arch
    )
    resources = kernel.resources
    assert resources.spill_stores == resources.spill_loads == 0
    assert resources.registers <= 128


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    "lengths",
    [
        *((1,), (128,), (129,), (2000,), (9000,), (64, 700), (5, 128, 300), (6000, 300, 4000)),
        *((130,) * 7, tuple(range(1, 321, 20))),
    ],
)
def test_large_model_bits(large_model: Qwen3, lengths: tuple[int, ...]) -> None:
    scene = Scene(large_model, lengths)
    want = scene.expected(2)
    for blocks in (None, 40):
        assert_same(scene, scene.stepped(blocks, 2), want)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(6000,), (100, 6000), (9000, 1)])
@pytest.mark.parametrize("shared_kb", [180, 140])
def test_values_over_rows_of_x(large_model: Qwen3, lengths: tuple[int, ...], shared_kb: int) -> None:
    """The layout of larger models and of smaller shared memory: what a merge received lies where x is stored next."""
    scene = Scene(large_model, lengths)
    layout = plan_layout(large_model.config, len(lengths), cukern.jit.device().sm_count, shared_kb << 10)
    assert isinstance(layout, Layout)
    assert (layout.direct, layout.overlay) == (True, True)
    want = scene.expected(2)
    for _ in range(5):
        assert_same(scene, scene.stepped(None, 2, max_shared_mem=shared_kb << 10), want)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tied-fp16", "untied-bf16-sharded", "hd128-fp16", "yarn-fp16", "demo-qwen3"])
def test_small_models_on_a_gpu(name: str) -> None:
    scene = Scene(model_of(name, "cuda"), (200, 129, 64, 1))
    assert_same(scene, scene.stepped(None, 3), scene.expected(3))


@pytest.mark.gpu
def test_graph_replay(large_model: Qwen3) -> None:
    """Captured once, replayed for 20 tokens whose lengths pass a chunk border: the bits of separate calls."""
    import cupy

    scene = Scene(large_model, (120, 300, 3), steps=20)
    want, other = scene.expected(20)
    cache = scene.cache()
    step = DecodeStep(large_model, cache, 3, scene.width)
    step.load(scene.batch())
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        step.run()  # compiles and loads
        stream.synchronize()
        stream.begin_capture()
        step.run()
        graph = stream.end_capture()
        for i in range(20):
            step.load(scene.batch(i))
            graph.launch(stream)
            got = cupy.asnumpy(step.logits)
            np.testing.assert_array_equal(bits(got), bits(want[i]), err_msg=f"step {i}")
        stream.synchronize()
    for name in ("k", "v"):
        a, b = (cupy.asnumpy(getattr(c, name).view(np.uint16)) for c in (cache, other))
        np.testing.assert_array_equal(a, b, err_msg=name)
