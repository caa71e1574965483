"""`DecodeStep`: one token for every sequence of a small batch in a single kernel launch (kernels_src/decode_step.cu).

The bits of the logits are those of `Qwen3.forward`; what differs is the time between kernels, of which there is none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..ops._numerics import ATTN_CHUNK, ATTN_TILE, segment_length
from .batch import ForwardBatch
from .config import Qwen3Config
from .kv_cache import PagedKVCache, ScratchKVCache
from .qwen3 import Qwen3

__all__ = ["MARKS", "MAX_ROWS", "DecodeStep", "Layout", "kernel_variants", "plan_layout"]

Array = Any

MAX_ROWS = 16
"""Sequences of one step: the rows of a tensor-core tile."""

MARKS = 48
"""Clock readings of a profiled step, a layer and warp (see ``MARK`` in kernels_src/decode/shape.cuh)."""

_WARPS = 16
_PROFILE_BYTES = 8 * _WARPS  # of struct Plan
_THREADS = 32 * _WARPS
_MERGE_BYTES = 35872  # sizeof(MergeMemory)
_FEW_STREAMS = 8
# In order of preference: (K of a ring's slot, fewest slots, whether values lie over x, teams).
_RINGS = ((128, 3, False, 2), (128, 2, True, 2), (128, 2, True, 1), (64, 1, True, 1))
_DEEP_RINGS = ((128, 7, False, 2), (128, 4, True, 2), (128, 4, True, 1), (64, 2, True, 1))
_MOST_SLOTS, _MOST_DIRECT_SLOTS, _MOST_DEEP_SLOTS = 8, 4, 16  # direct: see PAIRS of kernels_src/decode/shape.cuh
_MOST_DIRECT_ROWS = 2
_ANY_CONTEXT = 1 << 30
# Fewest tokens of a step up to which its threads copy all values. H200, us a token without and with the copy engine:
# 512 tokens 516 and 541, 1,024 512 and 537, 2,048 556 and 559, 3,300 576 and 572, 4,096 585 and 569, 8,192 758 and 751.
_SHORT_FOR_THE_ENGINE = 2048
_ALONE = {"teams": 0, "warps": 1, "either": 2}
_PART_PADDING = 8  # PART_WORDS of kernels_src/decode/shape.cuh


@dataclass(frozen=True)
class Layout:
    """How one configuration is compiled and launched.

    Attributes
    ----------
    rows : int
        Sequences the kernel computes: the batch rounded up to 1, 2, 4, 8 or 16.
    blocks : int
        Thread blocks of the launch.
    streams : int
        Warps of a block that multiply, each with a ring of weights.
    ring_k, slots : int
        K of a slot (8 rows of a weight), and slots in each ring.
    partials : int
        Most K-segment sums that a block holds at a time.
    owned : int
        Most tiles (8 columns) of the residual stream that a block keeps.
    direct : bool
        Results go from block to block as tagged words instead of through a grid barrier.
    teams : int
        Chunks of attention that a block works on at a time.
    overlay : bool
        Values share their memory with the rows of x.
    attention : {"teams", "warps", "either"}
        Whose work an item of attention is: a team's of warps, which is quicker where there are few, or a single warp's;
        "either" as the lengths of a step say. The bits are the same; a kernel with one of the two alone is quicker by 1
        to 2 %.
    value_map : bool
        Values of whole chunks may come by the copy engine: one sequence of many chunks, compute capability 9.0 and up.
    shared_bytes : int
        Dynamic shared memory of a block.
    """

    rows: int
    blocks: int
    streams: int
    ring_k: int
    slots: int
    partials: int
    owned: int
    direct: bool
    teams: int
    overlay: bool
    attention: str
    value_map: bool
    shared_bytes: int


def _products(config: Qwen3Config) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the five weights."""
    c = config
    return {
        "QKV": (c.q_size + 2 * c.kv_size, c.hidden_size),
        "O": (c.hidden_size, c.q_size),
        "GATE_UP": (2 * c.intermediate_size, c.hidden_size),
        "DOWN": (c.hidden_size, c.intermediate_size),
        "HEAD": (c.vocab_size, c.hidden_size),
    }


def plan_layout(
    config: Qwen3Config,
    batch: int,
    blocks: int,
    max_shared_mem: int,
    contexts: tuple[int, int] = (1, _ANY_CONTEXT),
    copy_engine: bool = False,
) -> Layout | str:
    """Choose how to run a model and batch, or say in one clause why it cannot be run this way.

    Parameters
    ----------
    config : Qwen3Config
    batch : int
        Sequences of a step.
    blocks : int
        Blocks of the launch, one a multiprocessor.
    max_shared_mem : int
        Bytes of shared memory that a block can have.
    contexts : (int, int)
        Fewest and most tokens of the longest sequence of a step. Others than expected give the same results.
    copy_engine : bool
        Whether the device has one (TMA, compute capability 9.0 and up), see `Layout.value_map`.

    Returns
    -------
    Layout or str
    """
    c = config
    if not 1 <= batch <= MAX_ROWS:
        return f"a batch of {batch}: it takes 1 to {MAX_ROWS} sequences"
    if c.head_dim % 16 or c.head_dim > 128:
        return f"head_dim {c.head_dim}: it takes multiples of 16 up to 128"
    group = c.num_attention_heads // c.num_key_value_heads
    if group > 16:
        return f"{group} query heads to a key/value head: it takes at most 16"
    for name in ("hidden_size", "intermediate_size"):
        if getattr(c, name) % 16:
            return f"{name} {getattr(c, name)} is no multiple of 16"
    if c.vocab_size % 8:
        return f"vocab_size {c.vocab_size} is no multiple of 8"
    rows = next(r for r in (1, 2, 4, 8, 16) if r >= batch)
    partials, fewest_chains = 1, _WARPS
    for n, k in _products(c).values():
        segments = -(-k // segment_length(n, k))
        if segments > 1:
            partials = max(partials, segments * -(-(n // 8) // blocks))
        else:
            fewest_chains = min(fewest_chains, n // 8 // blocks)
    owned = -(-(c.hidden_size // 8) // blocks)
    direct = rows <= _MOST_DIRECT_ROWS
    # Rows of a weight that are one chain of products each keep as many streams busy as a block has of them: with few of
    # them, what is under way to a block is what their rings hold.
    few = fewest_chains < _WARPS
    streams, rings = (_FEW_STREAMS, _DEEP_RINGS) if few else (_WARPS, _RINGS)
    most = _MOST_DEEP_SLOTS if few else _MOST_DIRECT_SLOTS if direct else _MOST_SLOTS
    for ring_k, fewest, overlay, teams in rings:
        fixed, slot = _fixed_bytes(c, rows, partials, owned, overlay, teams), streams * 16 * ring_k
        slots = min((max_shared_mem - fixed) // slot, most)
        if slots >= fewest:
            attention = _attention(c, rows, blocks, teams, contexts)
            size = fixed + slots * slot
            # What kernels_src/decode/values.cuh wants; it uses the engine where segments are multiplied in pairs.
            whole = rows == 1 and teams == 2 and not overlay and c.head_dim % 64 == 0 and c.hidden_size <= 2048
            pairs = streams == _WARPS and ring_k == 128 and slots == _MOST_DIRECT_SLOTS
            engine = copy_engine and whole and pairs and attention == "teams" and contexts[0] > _SHORT_FOR_THE_ENGINE
            return Layout(
                rows, blocks, streams, ring_k, slots, partials, owned, direct, teams, overlay, attention, engine, size
            )
    need = fixed + fewest * slot
    return f"a batch of {batch}: it takes {need} bytes of shared memory a block, there are {max_shared_mem}"


def _attention(c: Qwen3Config, rows: int, blocks: int, teams: int, contexts: tuple[int, int]) -> str:
    """`Layout.attention`: single warps where a team would have more than two items and some sequence has more chunks
    than a block has teams, see Attention::choose; teams where single warps find no room (struct WarpShared)."""
    group = c.num_attention_heads // c.num_key_value_heads
    of_warp = group * 2 * (-(-c.head_dim // 32) * 32 + 32) + 160
    if teams == 1 or group > 8 or 8 * c.head_dim + 16 + _WARPS * of_warp > teams * _team_bytes(c):
        return "teams"
    fewest, most = (-(-n // ATTN_CHUNK) for n in contexts)
    items = 2 * teams * blocks
    if most <= teams or rows * most * c.num_key_value_heads <= items:
        return "teams"
    return "warps" if fewest > teams and (fewest + rows - 1) * c.num_key_value_heads > items else "either"


def _team_bytes(c: Qwen3Config) -> int:
    """Struct TeamShared of kernels_src/decode/shape.cuh."""
    groups = ATTN_CHUNK // 16
    return 17 * c.head_dim * 2 + 16 * ATTN_CHUNK * 2 + (16 + 64) * groups * 4 + 2 * c.head_dim * 4 + 272


def _fixed_bytes(c: Qwen3Config, rows: int, partials: int, owned: int, overlay: bool, teams: int) -> int:
    """Shared memory without the rings: struct Shared of kernels_src/decode/shape.cuh."""
    longest = max(c.hidden_size, c.q_size, c.intermediate_size)
    x = rows * (longest + 8 + (longest // 256 * 32 if rows <= _MOST_DIRECT_ROWS else 0)) * 2
    kv = max(teams * ATTN_CHUNK * c.head_dim * 2, _MERGE_BYTES)
    attention = teams * _team_bytes(c)
    state = (partials + owned) * rows * 32 + rows * 32 + rows * c.head_dim * 4 + rows * 32
    plan = c.num_hidden_layers * 80 + 8 + 24 + 18 * 4
    return 16 + (max(x, kv) if overlay else x + kv) + attention + state + plan


class DecodeStep:
    """One decoding step of up to 16 sequences as a single kernel launch.

    Inputs are arrays at fixed addresses, so that a step can be captured into a CUDA graph and replayed with new
    contents (`run` neither allocates nor waits). Rows that are not used have ``seq_lens`` 0 and ``slot_mapping`` -1.

    Parameters
    ----------
    model : Qwen3
        On a GPU or emulated. Weights are used where they are; under emulation they are copied once.
    cache : PagedKVCache
        Keys and values of earlier tokens; the step appends to it.
    max_batch : int
        Sequences, 1 to 16.
    max_blocks_per_seq : int
        Columns of the block tables.
    min_context : int
        Tokens that the longest sequence of a step has at least, as far as is known. It chooses between kernels of the
        same results: a step of shorter ones is only slower.
    blocks : int, optional
        Thread blocks, all resident at a time; one for each multiprocessor by default. Does not change results.
    max_shared_mem : int, optional
        Bytes of shared memory that a block may take; what the device has by default. Does not change results.
    profile : bool
        Fill `stamps`.

    Attributes
    ----------
    token_ids, positions, seq_lens : int32 [max_batch]
        As in `ForwardBatch`; ``seq_lens`` counts the new token.
    slot_mapping : int64 [max_batch]
        Where the new key and value go. It is the place that the block table gives to the last key.
    block_tables : int32 [max_batch, max_blocks_per_seq]
    logits : float32 [max_batch, V]
        Overwritten by every step.
    stamps : uint32 [blocks, L + 1, 48, 16] or None
        Multiprocessor clock of each warp at the points of a layer, only with `profile`; 0 where it did not pass.

    Raises
    ------
    TypeError, ValueError
        A size that is no integer, or below 1; a flag that is none.
    ValueError
        A cache that is not the model's or has no blocks; a model or batch that this kernel does not run (see
        `supported`).
    """

    def __init__(
        self,
        model: Qwen3,
        cache: PagedKVCache,
        max_batch: int,
        max_blocks_per_seq: int,
        *,
        min_context: int = 1,
        blocks: int | None = None,
        max_shared_mem: int | None = None,
        profile: bool = False,
    ) -> None:
        from .. import jit
        from ..jit.launch import check_flag
        from ..ops._arrays import CTYPES
        from ..ops._attention import softmax_constants
        from ..ops._rows import as_count

        # As Python's integers: NumPy's narrow ones would overflow in what follows.
        max_batch = as_count("DecodeStep", "max_batch", max_batch)
        max_blocks_per_seq = as_count("DecodeStep", "max_blocks_per_seq", max_blocks_per_seq)
        min_context = as_count("DecodeStep", "min_context", min_context)
        blocks = None if blocks is None else as_count("DecodeStep", "blocks", blocks)
        max_shared_mem = None if max_shared_mem is None else as_count("DecodeStep", "max_shared_mem", max_shared_mem)
        check_flag("DecodeStep", "profile", profile)
        self.model, self.cache, self.max_batch = model, cache, max_batch
        if isinstance(cache, ScratchKVCache) or cache.k.shape[0] != model.config.num_hidden_layers:
            raise ValueError("cache must hold every layer of the model; make one with model.new_cache")
        if cache.k.dtype != model.dtype:
            raise ValueError(f"cache is {cache.k.dtype}, the model computes in {model.dtype}")
        if cache.num_blocks == 0:
            raise ValueError("cache has no blocks; make one with model.new_cache(num_blocks)")
        most = max_blocks_per_seq * cache.block_size
        if min_context > most:
            raise ValueError(f"min_context must be 1 to {most}, what the block tables hold, got {min_context}")
        c = model.config
        self.blocks, layout = _plan(model, max_batch, blocks, max_shared_mem, profile, (min_context, most))
        if isinstance(layout, str):
            raise ValueError(f"DecodeStep cannot run {layout}; use Qwen3.forward")
        self.layout = layout
        rows, width = layout.rows, max_blocks_per_seq
        self._max_chunks = -(-width * cache.block_size // ATTN_CHUNK)
        words = rows * c.num_attention_heads * self._max_chunks * (c.head_dim + _PART_PADDING)
        if layout.direct and words > 1 << 32:
            raise ValueError(
                f"max_blocks_per_seq {width}: parts of attention would take {words} words, the kernel counts 2**32"
            )
        xp, half = model.device.xp, model.dtype
        with model.device.context():
            self._rows = {
                "token_ids": xp.zeros(rows, np.int32),
                "positions": xp.zeros(rows, np.int32),
                "slot_mapping": xp.full(rows, -1, np.int64),
                "block_tables": xp.zeros((rows, width), np.int32),
                "seq_lens": xp.zeros(rows, np.int32),
            }
            self._logits = xp.empty((rows, c.vocab_size), np.float32)
            # Between blocks: at most a word of 8 bytes for a float or a pair of halves, never read before it is written
            # in the same launch; zeros bear no valid tag.
            links = (
                (c.q_size + 2 * c.kv_size) // 2,
                c.q_size // 2,
                c.hidden_size,
                c.intermediate_size // 2,
                c.hidden_size,
            )
            self._links = tuple(xp.zeros((rows, n), np.uint64) for n in links)
            parts = (rows, c.num_attention_heads, self._max_chunks)
            words, floats = (1, 0) if layout.direct else (0, 1)
            self._part_words = xp.zeros((words, *parts, c.head_dim + _PART_PADDING), np.uint64)
            self._part_acc = xp.empty((floats, *parts, c.head_dim), np.float32)
            self._part_stats = xp.empty((floats, *parts, 8), np.float32)
            self._state = xp.zeros(1 + self.blocks, np.uint64)
            self.stamps = (
                xp.zeros((self.blocks, c.num_hidden_layers + 1, MARKS, _WARPS), np.uint32) if profile else None
            )
        self.token_ids, self.positions, self.slot_mapping, self.block_tables, self.seq_lens = (
            array[:max_batch] for array in self._rows.values()
        )
        self.logits = self._logits[:max_batch]
        self._pointers, self._memory = self._pointer_table()
        self._value_map = self._map_of_values() if layout.value_map else None
        self._kernel = jit.kernel(
            "decode_step.cu", "decode_step", (CTYPES[half],), kernel_defines(c, layout, profile), cooperative=True
        )
        self._c = softmax_constants("decode_step", None, c.head_dim)[1]

    @staticmethod
    def supported(model: Qwen3, batch: int) -> str | None:
        """Why steps of `batch` sequences cannot run in one launch on the model's device, or None if they can."""
        layout = _plan(model, batch, None, None)[1]
        return layout if isinstance(layout, str) else None

    def _pointer_table(self) -> tuple[Array, Array | None]:
        """Addresses of the layers' weights [L, 10], and under emulation the one allocation that they point into."""
        names = ("input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "o", "o_bias", "post_norm", "gate_up", "down")
        layers = [[getattr(layer, name) for name in names] for layer in self.model.weights.layers]
        if self.model.device.kind == "cuda":
            table = [[0 if a is None else int(a.data.ptr) for a in row] for row in layers]
            return self.model.device.put(np.array(table, np.uint64)), None
        # The emulator allows access to the arguments' memory alone.
        sizes = [-(-a.nbytes // 256) * 256 for row in layers for a in row if a is not None]
        memory = np.empty(sum(sizes), np.uint8)
        base, at = int(memory.__array_interface__["data"][0]), 0
        addresses = np.zeros((len(layers), len(names)), np.uint64)
        for i, row in enumerate(layers):
            for j, array in enumerate(row):
                if array is not None:
                    memory[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                    addresses[i, j] = base + at
                    at += -(-array.nbytes // 256) * 256
        return addresses, memory

    def _map_of_values(self) -> Array:
        """The tensor map of the value cache: boxes of 16 keys of a head, pages of all layers one after another."""
        from ..jit.tensor_map import heads_map

        c, cache = self.model.config, self.cache
        page, heads, size = cache.block_size, c.num_key_value_heads, c.head_dim
        with self.model.device.context():
            found = heads_map(
                int(cache.v.data.ptr),
                c.num_hidden_layers * cache.num_blocks,
                page,
                heads,
                size,
                (heads * page * size, size, page * size),
                16,
                size // 64,
            )
        return self.model.device.put(np.frombuffer(found, np.uint8))

    def load(self, batch: ForwardBatch) -> None:
        """Copy a decode batch into the input arrays; the rows behind it become unused ones.

        Parameters
        ----------
        batch : ForwardBatch
            One new token a sequence, at most `max_batch` sequences, tables of at most ``max_blocks_per_seq`` columns.

        Raises
        ------
        ValueError
            A batch that does not fit.
        """
        count, width = len(batch.seq_lens), int(batch.block_tables.shape[1])
        if not batch.is_decode or len(batch.token_ids) != count:
            raise ValueError("DecodeStep.load: the batch must have one new token for each sequence")
        if count > self.max_batch or width > self.block_tables.shape[1]:
            raise ValueError(
                f"DecodeStep.load: {count} sequences with {width} blocks, made for at most {self.max_batch} with "
                f"{self.block_tables.shape[1]}"
            )
        with self.model.device.context():
            for name in ("token_ids", "positions", "slot_mapping", "seq_lens"):
                getattr(self, name)[:count] = getattr(batch, name)
            self.block_tables[:count, :width] = batch.block_tables
            self.slot_mapping[count:] = -1
            self.seq_lens[count:] = 0
            self.token_ids[count:] = 0
            self.positions[count:] = 0

    def run(self) -> Array:
        """Launch the step on the current stream.

        Returns
        -------
        float32 [max_batch, V]
            `logits`, valid when the stream has got there.
        """
        m, w, cache, rows = self.model, self.model.weights, self.cache, self._rows
        with m.device.running():
            self._kernel(
                (self.blocks, 1, 1),
                (_THREADS, 1, 1),
                (
                    rows["token_ids"],
                    rows["positions"],
                    rows["slot_mapping"],
                    rows["block_tables"],
                    rows["seq_lens"],
                    self._pointers,
                    self._memory,
                    w.embed,
                    w.head,
                    w.norm,
                    m.rope_table,
                    cache.k,
                    cache.v,
                    *self._links,
                    self._part_words,
                    self._part_acc,
                    self._part_stats,
                    self._logits,
                    self._state,
                    self.stamps,
                    self._value_map,
                    int(m.rope_table.shape[0]),
                    int(rows["block_tables"].shape[1]),
                    cache.block_size.bit_length() - 1,
                    cache.num_blocks,
                    self._max_chunks,
                    m.config.rms_norm_eps,
                    self._c,
                ),
                shared_mem=self.layout.shared_bytes,
            )
        return self.logits


def _plan(
    model: Qwen3,
    batch: int,
    blocks: int | None,
    max_shared_mem: int | None,
    profile: bool = False,
    contexts: tuple[int, int] = (1, _ANY_CONTEXT),
) -> tuple[int, Layout | str]:
    """Blocks and layout on the model's device."""
    from .. import jit

    if model.device.kind == "cpu":
        return 0, "on the CPU reference"
    with model.device.running():
        info = jit.device()
    count = info.sm_count if blocks is None else blocks
    limit = info.max_shared_mem if max_shared_mem is None else max_shared_mem
    engine = model.device.kind == "cuda" and info.capability >= (9, 0)
    if not profile:
        return count, plan_layout(model.config, batch, count, limit, contexts, engine)
    layout = plan_layout(model.config, batch, count, limit - _PROFILE_BYTES, contexts, engine)
    if isinstance(layout, Layout):
        layout = replace(layout, shared_bytes=layout.shared_bytes + _PROFILE_BYTES)
    return count, layout


def kernel_defines(config: Qwen3Config, layout: Layout, profile: bool = False) -> dict[str, int]:
    """The macros that kernels_src/decode/shape.cuh wants."""
    c = config
    defines = {
        "MODEL_HIDDEN": c.hidden_size,
        "MODEL_HEADS": c.num_attention_heads,
        "MODEL_KV_HEADS": c.num_key_value_heads,
        "MODEL_HEAD_DIM": c.head_dim,
        "MODEL_INTERMEDIATE": c.intermediate_size,
        "MODEL_VOCAB": c.vocab_size,
        "MODEL_LAYERS": c.num_hidden_layers,
        "ATTENTION_CHUNK": ATTN_CHUNK,
        "ATTENTION_TILE": ATTN_TILE,
        "ROWS": layout.rows,
        "BLOCKS": layout.blocks,
        "STREAMS": layout.streams,
        "RING_K": layout.ring_k,
        "RING_SLOTS": layout.slots,
        "PARTIALS": layout.partials,
        "OWNED": layout.owned,
        "DIRECT": int(layout.direct),
        "ATTENTION_TEAMS": layout.teams,
        "ATTENTION_ALONE": _ALONE[layout.attention],
        "VALUE_MAP": int(layout.value_map),
        "OVERLAY": int(layout.overlay),
        "SHARED_BYTES": layout.shared_bytes,
        "PROFILE": int(profile),
    }
    for name, (n, k) in _products(c).items():
        defines[f"SEGMENT_{name}"] = segment_length(n, k)
    return defines


# Architecture, multiprocessors, KB of shared memory of a block, copy engine: a typical GPU of each.
_TARGETS = (
    ("sm_80", 108, 163, False),
    ("sm_86", 84, 99, False),
    ("sm_89", 128, 99, False),
    ("sm_90a", 132, 227, True),
    ("sm_100a", 148, 227, True),
    ("sm_120a", 170, 99, True),
)
_CONTEXTS = ((1, 256), (4096, 8192), (256, 40960), (32768, 40960))


def kernel_variants() -> list[tuple[str, str, tuple[str], dict[str, int], tuple[str, ...]]]:
    """A step of one sequence of Qwen3-0.6B, as a typical GPU of every architecture compiles it (`cukern.jit.variants`),
    for short, middle and long contexts.

    Other models and batches are compiled when they are first used.
    """
    from ..testing.checkpoints import QWEN3_SHAPES

    found: list[tuple[str, str, tuple[str], dict[str, int], tuple[str, ...]]] = []
    for arch, multiprocessors, shared_kb, engine in _TARGETS:
        shape = QWEN3_SHAPES["0.6B"]
        layouts = [plan_layout(shape, 1, multiprocessors, shared_kb << 10, contexts, engine) for contexts in _CONTEXTS]
        for layout in dict.fromkeys(layouts):
            if isinstance(layout, Layout):
                defines = kernel_defines(shape, layout)
                found += [("decode_step.cu", "decode_step", (t,), defines, (arch,)) for t in ("half", "bf16")]
    return found
