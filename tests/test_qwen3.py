"""The Qwen3 forward pass against Hugging Face transformers (golden.npz), an oracle of its own, and itself."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cukern.models import ConfigError, ForwardBatch, PagedKVCache, Qwen3, Qwen3Config, demo_checkpoint
from cukern.models.device import Device, cuda_problem
from cukern.ops import rope_table
from cukern.testing.checkpoints import make_checkpoint

DATA = Path(__file__).parent / "data"
FIXTURES = ["tied-fp16", "untied-bf16-sharded", "hd128-fp16", "yarn-fp16"]
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
TINY = Qwen3Config(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rope_theta=1e6,
    max_position_embeddings=300,
)


def folder(name: str) -> Path:
    return demo_checkpoint() if name == "demo-qwen3" else DATA / name


@cache
def golden(name: str, file: str = "golden.npz") -> dict[str, np.ndarray]:
    with np.load(DATA / name / file) as values:
        return dict(values)


@cache
def model_of(name: str, device: str) -> Qwen3:
    return Qwen3.from_pretrained(folder(name), device=device)


def host(model: Qwen3, array: Any) -> np.ndarray:
    return model.device.get(array)


class Paged:
    """A miniature engine: sequences in shuffled blocks of one pool, advanced step by step."""

    def __init__(self, model: Qwen3, sequences: int, *, block_size: int = 16, length: int = 128, seed: int = 0) -> None:
        self.model, self.block_size = model, block_size
        per = -(-length // block_size)
        self.cache = PagedKVCache(model.config, sequences * per + 1, block_size, model.device, model.dtype)
        order = np.random.default_rng(seed).permutation(sequences * per + 1)[:-1]
        self.tables = [[int(b) for b in row] for row in order.reshape(sequences, per)]
        self.done = [0] * sequences

    def step(
        self, tokens: list[Any], *, last_only: bool = True, only: list[int] | None = None, **kwargs: Any
    ) -> np.ndarray:
        """Feed the next tokens of the sequences (or of those in `only`) and return logits on the host."""
        rows = list(range(len(self.done))) if only is None else only
        batch = ForwardBatch.build(
            [list(map(int, t)) for t in tokens],
            [self.done[r] for r in rows],
            [self.tables[r] for r in rows],
            self.block_size,
            self.model.device.put,
            last_only=last_only,
        )
        for key, value in kwargs.items():
            setattr(batch, key, value)
        for r, t in zip(rows, tokens, strict=True):
            self.done[r] += len(t)
        return host(self.model, self.model.forward(batch, self.cache))


def greedy(model: Qwen3, ids: np.ndarray, steps: int, block_size: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Continue greedily with the paged cache: prefill, then one token a step. Returns ids and log-probabilities."""
    paged = Paged(model, len(ids), block_size=block_size, length=ids.shape[1] + steps)
    logits = paged.step(list(ids))
    chosen, logprobs = [], []
    for _ in range(steps):
        token = logits.argmax(-1)
        shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
        scores = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        chosen.append(token)
        logprobs.append(scores[np.arange(len(ids)), token])
        if len(chosen) < steps:
            logits = paged.step([[t] for t in token])
    return np.stack(chosen, 1), np.stack(logprobs, 1)


# -- the CPU reference against transformers ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FIXTURES, "demo-qwen3"])
def test_cpu_logits(name: str) -> None:
    want = golden(name)
    logits, hidden = model_of(name, "cpu")(want["input_ids"], return_hidden=True)
    if "hidden" in want:  # layer by layer, so that a fault is located
        assert hidden.shape == want["hidden"].shape
        for layer, (got, expected) in enumerate(zip(hidden, want["hidden"], strict=True)):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4, err_msg=f"after layer {layer}")
    assert logits.dtype == np.float32
    assert logits.shape == want["logits"].shape
    assert np.abs(logits - want["logits"]).max() < 1e-3


@pytest.mark.parametrize("name", FIXTURES)
def test_cpu_logits_with_rounded_frequencies(name: str) -> None:
    """The golden values that came with the checkpoints: rotary frequencies rounded to the checkpoint's dtype."""
    want = golden(name, "golden_rounded_rope.npz")
    model = Qwen3.from_pretrained(folder(name), device="cpu")
    exact = model(want["input_ids"])
    model.rope_table = rounded_table(model.config)
    logits = model(want["input_ids"])
    assert np.abs(logits - want["logits"]).max() < 1e-3
    assert np.abs(exact - want["logits"]).max() > 1e-3  # the rounding is what tells the two golden files apart


def rounded_table(config: Qwen3Config) -> np.ndarray:
    """Cosines and sines of the model's frequencies after a round trip through the storage dtype."""
    import ml_dtypes

    half = config.head_dim // 2
    table = rope_table(config.head_dim, 2, config.rope_theta, config.rope_scaling).astype(np.float64)
    amplitude = np.hypot(table[1, 0], table[1, half])  # YaRN's attention factor
    frequencies = np.arctan2(table[1, half:], table[1, :half]).astype(np.float32)  # position 1 turns by the frequency
    frequencies = frequencies.astype(np.float16 if config.dtype == "float16" else ml_dtypes.bfloat16).astype(np.float64)
    angles = np.outer(np.arange(config.max_positions), frequencies)
    return (amplitude * np.concatenate([np.cos(angles), np.sin(angles)], 1)).astype(np.float32)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("name", [*FIXTURES, "demo-qwen3"])
def test_cpu_greedy(name: str, block_size: int) -> None:
    want = golden(name)
    ids, logprobs = greedy(model_of(name, "cpu"), want["input_ids"], want["greedy_ids"].shape[1], block_size)
    np.testing.assert_array_equal(ids, want["greedy_ids"])
    np.testing.assert_allclose(logprobs, want["greedy_logprobs"], atol=1e-3)


# -- half precision: our kernels, on a GPU and emulated ---------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "device"),
    [(name, "emulated") for name in [*FIXTURES, "demo-qwen3"]]
    + [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in [*FIXTURES, "demo-qwen3"]],
)
def test_half_precision_logits(name: str, device: str) -> None:
    want, model = golden(name), model_of(name, device)
    assert str(model.dtype) == ("bfloat16" if "bf16" in name else "float16")
    logits, hidden = (host(model, a) for a in model(want["input_ids"], return_hidden=True))
    if "hidden" in want:
        for layer, (got, expected) in enumerate(zip(hidden, want["hidden"], strict=True)):
            error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
            assert error <= 1.2 * want["lowp_rel_l2"], f"after layer {layer}: relative error {error:.2e}"
    error = np.abs(logits - want["logits"])
    assert error.max() <= 1.2 * want["lowp_max_err"]
    assert np.linalg.norm(error) <= 1.2 * want["lowp_rel_l2"] * np.linalg.norm(want["logits"])


@pytest.mark.parametrize(
    ("name", "device"),
    [("tied-fp16", "emulated"), ("untied-bf16-sharded", "emulated"), ("demo-qwen3", "emulated")]
    + [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in [*FIXTURES, "demo-qwen3"]],
)
def test_half_precision_greedy(name: str, device: str) -> None:
    want = golden(name)
    steps = want["greedy_ids"].shape[1]
    if (name, device) == ("demo-qwen3", "emulated"):
        steps = 6  # half a second each
    ids, _ = greedy(model_of(name, device), want["input_ids"], steps)
    for row in range(len(ids)):
        close = want["greedy_gap"][row, :steps] < 2 * want["lowp_max_err"]
        sure = int(np.argmax(close)) if close.any() else steps  # from a near tie on, either continuation is right
        np.testing.assert_array_equal(ids[row, :sure], want["greedy_ids"][row, :sure])
    if name == "demo-qwen3":
        np.testing.assert_array_equal(ids, want["greedy_ids"][:, :steps])  # no near tie on this path


@pytest.mark.parametrize("device", ["emulated", GPU])
@pytest.mark.parametrize("name", ["tied-fp16", "untied-bf16-sharded"])
def test_same_bits_in_prefill_decode_and_any_batch(name: str, device: str) -> None:
    """A token's logits do not depend on what else is computed with it, or on how the prompt was cut."""
    model, ids = model_of(name, device), golden(name)["input_ids"][:, :20]
    together = host(model, model(ids))
    alone = host(model, model(ids[1]))
    np.testing.assert_array_equal(together[1], alone)
    paged = Paged(model, 2, length=32)
    chunks = [
        paged.step([ids[1][:7]], last_only=False, only=[1]),
        paged.step([ids[1][7:18]], last_only=False, only=[1]),
    ]
    chunks += [paged.step([ids[0], ids[1][18:19]])[1:], paged.step([[3], ids[1][19:]])[1:]]
    np.testing.assert_array_equal(np.concatenate(chunks), alone)


@pytest.mark.gpu
def test_same_bits_at_large_batches_on_a_gpu() -> None:
    model = model_of("hd128-fp16", "cuda")
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (33, 300))
    alone = host(model, model(ids[17]))
    np.testing.assert_array_equal(host(model, model(ids))[17], alone)
    paged = Paged(model, 33, length=300)
    paged.step(list(ids[:, :299]))
    np.testing.assert_array_equal(paged.step(list(ids[:, 299:]))[17], alone[299])


# -- an oracle for configurations that no golden file covers ----------------------------------------------------


def oracle(path: Path, ids: np.ndarray) -> np.ndarray:
    """Qwen3 in float64 for one sequence, written from the architecture's description, without cukern's operators."""
    c = Qwen3Config.from_file(path)
    w = {name: a.astype(np.float64) for file in path.glob("*.safetensors") for name, a in load_file(file).items()}

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.rms_norm_eps) * weight

    def project(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[name + ".weight"].T + w.get(name + ".bias", 0.0)

    half = c.head_dim // 2
    angle = np.outer(np.arange(len(ids)), c.rope_theta ** (-np.arange(half) / half))[:, None]

    def rotate(x: np.ndarray) -> np.ndarray:
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)

    x = w["model.embed_tokens.weight"][ids]
    for n in range(c.num_hidden_layers):
        p = f"model.layers.{n}."
        a = p + "self_attn."
        h = norm(x, w[p + "input_layernorm.weight"])
        q, k, v = (project(h, f"{a}{s}_proj").reshape(len(ids), -1, c.head_dim) for s in "qkv")
        q, k = rotate(norm(q, w[a + "q_norm.weight"])), rotate(norm(k, w[a + "k_norm.weight"]))
        heads = []
        for head in range(c.num_attention_heads):
            group = head // (c.num_attention_heads // c.num_key_value_heads)
            scores = q[:, head] @ k[:, group].T / np.sqrt(c.head_dim)
            scores[np.triu_indices(len(ids), 1)] = -np.inf
            p_ = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(p_ / p_.sum(-1, keepdims=True) @ v[:, group])
        x = x + project(np.concatenate(heads, -1), a + "o_proj")
        h = norm(x, w[p + "post_attention_layernorm.weight"])
        gate = project(h, p + "mlp.gate_proj")
        x = x + project(gate / (1 + np.exp(-gate)) * project(h, p + "mlp.up_proj"), p + "mlp.down_proj")
    head_name = "model.embed_tokens" if c.tie_word_embeddings else "lm_head"
    return norm(x, w["model.norm.weight"]) @ w[head_name + ".weight"].T


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"attention_bias": True},
        {"attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-2},
        {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 48},
        {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 14, "rope_theta": 100.0},
    ],
    ids=str,
)
def test_cpu_against_oracle(tmp_path: Path, overrides: dict[str, Any]) -> None:
    path = make_checkpoint(tmp_path, TINY, "float32", seed=1, std=0.3, **overrides)
    ids = np.random.default_rng(2).integers(0, TINY.vocab_size, 70)
    expected = oracle(path, ids)
    assert expected.std() > 0.5
    np.testing.assert_allclose(Qwen3.from_pretrained(path, device="cpu")(ids), expected, atol=1e-3)


@pytest.mark.parametrize("device", ["emulated", GPU])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_attention_bias_in_half_precision(tmp_path: Path, device: str, dtype: str) -> None:
    path = make_checkpoint(tmp_path, TINY, "float16", seed=1, std=0.3, attention_bias=True)
    ids = np.random.default_rng(2).integers(0, TINY.vocab_size, 20)
    expected = oracle(path, ids)
    model = Qwen3.from_pretrained(path, dtype, device)
    assert str(model.dtype) == dtype
    error = np.linalg.norm(host(model, model(ids)) - expected) / np.linalg.norm(expected)
    # a few roundings a layer: measured 1e-3 and 8e-3
    assert error < {"float16": 3e-3, "bfloat16": 2.4e-2}[dtype]
    without = oracle(make_checkpoint(tmp_path / "no", TINY, "float16", seed=1, std=0.3), ids)
    assert np.linalg.norm(without - expected) / np.linalg.norm(expected) > 0.1


# -- stepping through a paged cache -----------------------------------------------------------------------------


def test_ragged_prompts_chunks_and_decode_in_one_pool() -> None:
    model = model_of("hd128-fp16", "cpu")
    rng = np.random.default_rng(7)
    prompts = [rng.integers(0, 1000, n) for n in (1, 15, 33, 50)]
    whole = [model(p) for p in prompts]
    paged = Paged(model, 4, length=64)
    paged.step([prompts[2][:16], prompts[3][:17]], only=[2, 3])
    mixed = paged.step([prompts[0], prompts[1], prompts[2][16:], prompts[3][17:49]])  # prefill beside later chunks
    for row, (got, full) in enumerate(zip(mixed, whole, strict=True)):
        np.testing.assert_allclose(got, full[48 if row == 3 else -1], atol=1e-4, err_msg=f"sequence {row}")
    np.testing.assert_allclose(paged.step([prompts[3][49:]], only=[3])[0], whole[3][-1], atol=1e-4)


@pytest.mark.parametrize("is_decode", [True, False])
def test_decode_path_equals_prefill_path(is_decode: bool) -> None:
    model = model_of("tied-fp16", "cpu")
    ids = golden("tied-fp16")["input_ids"]
    paged = Paged(model, 2, length=64)
    paged.step(list(ids[:, :-1]))
    logits = paged.step(list(ids[:, -1:]), is_decode=is_decode)
    np.testing.assert_allclose(logits, model(ids)[:, -1], atol=1e-4)


def test_logits_of_chosen_rows() -> None:
    model = model_of("tied-fp16", "cpu")
    ids = golden("tied-fp16")["input_ids"][0]
    rows = np.array([30, 0, 7], dtype=np.int64)
    chosen = Paged(model, 1, length=64).step([ids], logits_indices=rows)
    everything = Paged(model, 1, length=64).step([ids], last_only=False)
    np.testing.assert_allclose(chosen, everything[rows], atol=1e-5)


def test_slot_minus_one_writes_nothing() -> None:
    """A padded token leaves the cache as it was and does not disturb its neighbours."""
    model = model_of("tied-fp16", "cpu")
    ids = golden("tied-fp16")["input_ids"][0][:9]
    paged = Paged(model, 1, length=16)
    batch = ForwardBatch.build([ids], [0], paged.tables, 16, model.device.put, last_only=False)
    batch.slot_mapping = np.append(batch.slot_mapping, np.int64(-1))
    batch.token_ids = np.append(batch.token_ids, np.int32(0))
    batch.positions = np.append(batch.positions, np.int32(0))
    before = paged.cache.k.copy()
    logits = model.forward(batch, paged.cache)
    np.testing.assert_allclose(logits[:9], model(ids), atol=1e-4)
    block = paged.tables[0][0]
    untouched = np.delete(np.arange(paged.cache.num_blocks), block)
    np.testing.assert_array_equal(paged.cache.k[:, untouched], before[:, untouched])
    assert np.isfinite(paged.cache.k[:, block, :, :9]).all()
    assert np.isnan(paged.cache.k[:, block, :, 9:]).all()


def test_batch_build() -> None:
    batch = ForwardBatch.build([[5, 6, 7], [8]], [15, 3], [[4, 2], [9]], 16, lambda a: a)
    np.testing.assert_array_equal(batch.token_ids, [5, 6, 7, 8])
    np.testing.assert_array_equal(batch.positions, [15, 16, 17, 3])
    np.testing.assert_array_equal(batch.slot_mapping, [4 * 16 + 15, 2 * 16, 2 * 16 + 1, 9 * 16 + 3])
    np.testing.assert_array_equal(batch.cu_seqlens_q, [0, 3, 4])
    np.testing.assert_array_equal(batch.seq_lens, [18, 4])
    np.testing.assert_array_equal(batch.block_tables, [[4, 2], [9, 0]])
    np.testing.assert_array_equal(batch.logits_indices, [2, 3])
    assert (batch.max_query_len, batch.is_decode) == (3, False)
    assert batch.slot_mapping.dtype == np.int64
    kinds = {
        a.dtype for a in (batch.token_ids, batch.positions, batch.cu_seqlens_q, batch.seq_lens, batch.block_tables)
    }
    assert kinds == {np.dtype(np.int32)}
    assert ForwardBatch.build([[5], [6]], [0, 7], [[0], [1]], 16, lambda a: a).is_decode
    for starts, tables, static in (
        ([16, 17], [[0, 1], [0, 2]], True),  # a full block is shared
        ([17, 18], [[0, 1], [0, 1]], False),  # one reads what the other writes
        ([16, 31], [[0, 1], [2, 1]], False),
        ([15, 3], [[0, 1], [1]], True),  # block 1 of the first is not in use
    ):
        assert ForwardBatch.build([[5], [6]], starts, tables, 16, lambda a: a).static_cache is static


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (([[1]], [0, 1], [[0]]), "one entry a sequence, got 1, 2 and 1"),
        (([[1], []], [0, 1], [[0], [1]]), "sequence 1 has no new token"),
        (([[1, 2]], [15], [[0]]), "sequence 0 has 17 keys but its 1 blocks hold 16"),
    ],
)
def test_batch_build_errors(args: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ForwardBatch.build(*args, 16, lambda a: a)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(4, 8), (4, 48), (-1, 16)])
def test_cache_errors(num_blocks: int, block_size: int) -> None:
    with pytest.raises(
        ValueError, match=r"block_size must be one of|num_blocks must be an integer that is not negative"
    ):
        PagedKVCache(TINY, num_blocks, block_size, Device("cpu"), np.float32)


def test_cache_layout() -> None:
    pool = PagedKVCache(TINY, 3, 32, Device("cpu"), np.float16)
    assert pool.k.shape == pool.v.shape == (2, 3, 2, 32, 16)
    assert pool.nbytes == 3 * PagedKVCache.block_nbytes(TINY, 32, 2)
    k, v = pool.layer(1)
    assert np.shares_memory(k, pool.k)
    assert np.shares_memory(v, pool.v)


# -- weights, inputs, devices -----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",
    ],
)
def test_edited_weight_is_seen_by_the_next_forward(name: str, device: str) -> None:
    model = Qwen3.from_pretrained(folder("tied-fp16"), device=device)
    ids = golden("tied-fp16")["input_ids"]
    before = host(model, model(ids))
    original = model.weights[name].copy()
    model.weights[name][...] *= 1.5
    assert np.abs(host(model, model(ids)) - before).max() > 0.1
    model.weights[name] = original
    np.testing.assert_array_equal(host(model, model(ids)), before)


def test_shapes_of_the_input() -> None:
    model = model_of("tied-fp16", "cpu")
    ids = golden("tied-fp16")["input_ids"][:, :5]
    full = model(ids)
    np.testing.assert_allclose(model(ids[0].tolist()), full[0], atol=1e-5)
    np.testing.assert_allclose(model(ids.astype(np.uint8 if ids.max() < 256 else np.uint16)), full, atol=1e-6)
    logits, hidden = model(ids[1], return_hidden=True)
    assert logits.shape == (5, 512)
    assert hidden.shape == (3, 5, 64)
    assert model([]).shape == (0, 512)
    assert model(np.zeros((0, 7), np.int64)).shape == (0, 7, 512)
    logits, hidden = model(np.zeros((2, 0), np.int32), return_hidden=True)
    assert (logits.shape, hidden.shape) == ((2, 0, 512), (3, 2, 0, 64))


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([[1.0, 2.0]], TypeError, "input_ids must be integers, got dtype float64"),
        ([True, False], TypeError, "input_ids must be integers, got dtype bool"),
        ("text", TypeError, "input_ids must be integers"),
        ([[1, 2], [3]], ValueError, "input_ids must be rectangular"),
        ([[[1]]], ValueError, r"shape \[B, S\] or \[S\], got \(1, 1, 1\)"),
        (3, ValueError, r"shape \[B, S\] or \[S\], got \(\)"),
        ([0, 512], ValueError, "input_ids contains 512, expected 0 to 511"),
        ([-1, 3], ValueError, "input_ids contains -1, expected 0 to 511"),
        (np.zeros(513, np.int64), ValueError, "513 positions, the model is loaded for at most 512"),
    ],
)
def test_bad_input(ids: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        model_of("tied-fp16", "cpu")(ids)


def test_last_position_can_be_computed() -> None:
    model = model_of("tied-fp16", "cpu")
    assert np.isfinite(model(np.zeros(512, np.int64))).all()
    short = Qwen3.from_pretrained(folder("tied-fp16"), device="cpu", max_positions=10)
    assert short.max_positions == 10
    with pytest.raises(ValueError, match="11 positions, the model is loaded for at most 10"):
        short(np.zeros(11, np.int64))
    with pytest.raises(ValueError, match="max_positions must be at least 1"):
        Qwen3.from_pretrained(folder("tied-fp16"), device="cpu", max_positions=0)


def test_yarn_extends_the_positions() -> None:
    assert model_of("yarn-fp16", "cpu").max_positions == 512


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cuda:", "cuda:-1", "CPU", ""])
def test_unknown_device(device: str) -> None:
    with pytest.raises(ValueError, match="device must be 'cuda', 'cuda:N', 'cpu', 'emulated' or None"):
        Qwen3.from_pretrained(folder("tied-fp16"), device=device)


def test_device_of_a_wrong_type() -> None:
    with pytest.raises(TypeError, match="device must be a string or None, got int"):
        Qwen3.from_pretrained(folder("tied-fp16"), device=0)  # type: ignore[arg-type]


def test_unusable_gpu_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cukern.models.device.cuda_problem", lambda: "no NVIDIA GPU was found")
    with pytest.raises(ValueError, match="'cuda' is not usable: no NVIDIA GPU was found; device='cpu'"):
        Qwen3.from_pretrained(folder("tied-fp16"), device="cuda")
    assert str(Qwen3.from_pretrained(folder("tied-fp16")).device) == "cpu"


def test_a_missing_driver_is_not_called_insufficient(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy")
    from cukern.jit import CudaUnavailableError, driver

    def fail(text: str) -> Any:
        def call() -> None:
            raise CudaUnavailableError(text)

        return call

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", fail("cudaErrorInsufficientDriver: driver version"))
    monkeypatch.setattr(driver, "get", fail("no NVIDIA driver on this machine"))
    assert cuda_problem() == "no NVIDIA driver on this machine"
    monkeypatch.setattr(driver, "get", lambda: None)
    assert cuda_problem() == "CUDA reports cudaErrorInsufficientDriver: driver version"


@pytest.mark.gpu
def test_gpu_is_the_default_and_absent_ones_are_refused() -> None:
    import cupy

    assert Qwen3.from_pretrained(folder("tied-fp16")).device.kind == "cuda"
    count = cupy.cuda.runtime.getDeviceCount()
    with pytest.raises(ValueError, match=f"'cuda:{count}' does not exist: this machine has {count} GPU"):
        Qwen3.from_pretrained(folder("tied-fp16"), device=f"cuda:{count}")


@pytest.mark.gpu
def test_gpu_model_takes_cupy_ids_and_keeps_other_streams_apart() -> None:
    import cupy

    model = model_of("hd128-fp16", "cuda")
    ids = golden("hd128-fp16")["input_ids"]
    expected = model(ids)
    assert isinstance(expected, cupy.ndarray)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        results = [model(cupy.asarray(ids)) for _ in range(5)]
        stream.synchronize()
    for result in results:
        np.testing.assert_array_equal(result.get(), expected.get())


@pytest.mark.gpu
def test_host_model_refuses_gpu_ids() -> None:
    import cupy

    with pytest.raises(TypeError, match="input_ids is on a GPU but the model on cpu"):
        model_of("tied-fp16", "cpu")(cupy.zeros(3, np.int64))


@pytest.mark.parametrize("head_dim", [24, 272])
def test_head_dim_that_the_kernels_do_not_take(tmp_path: Path, head_dim: int) -> None:
    path = make_checkpoint(tmp_path, replace(TINY, head_dim=head_dim), "float16")
    with pytest.raises(ValueError, match=f"head_dim {head_dim} is not supported on emulated"):
        Qwen3.from_pretrained(path, device="emulated")
    assert np.isfinite(Qwen3.from_pretrained(path, device="cpu")([1, 2, 3])).all()


def test_config_is_checked_first(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, TINY, "float16")
    text = (path / "config.json").read_text().replace('"silu"', '"relu"')
    (path / "config.json").write_text(text)
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="hidden_act 'relu'"):
        Qwen3.from_pretrained(path, device="cpu")


def test_cpu_model_ignores_emulation() -> None:
    import cukern

    model, ids = model_of("tied-fp16", "cpu"), golden("tied-fp16")["input_ids"]
    expected = model(ids)
    with cukern.emulate():
        np.testing.assert_array_equal(model(ids), expected)


def test_repr() -> None:
    assert repr(model_of("demo-qwen3", "cpu")) == "Qwen3(4.2 M parameters, 4 layers, hidden 256, float32, cpu)"
