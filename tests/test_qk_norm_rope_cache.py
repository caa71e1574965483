"""qk_norm_rope_cache: norm of each head, rotation, cache write, against float64 and against the separate operators."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cukern import ops
from cukern.testing import assert_close

HALF, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
DTYPES = pytest.mark.parametrize("dtype", [HALF, BF16], ids=lambda d: d.name)
EPS = 1e-6
POSITIONS = 300


class Case:
    """Random inputs, in NumPy; the caches hold NaN."""

    def __init__(
        self,
        rng: np.random.Generator,
        dtype: np.dtype,
        *,
        tokens: int = 5,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 32,
        block_size: int = 16,
        index: type = np.int64,
    ) -> None:
        self.heads, self.kv_heads, self.dim, self.dtype = heads, kv_heads, dim, dtype
        # heads of very different sizes: a norm over more than one head would show
        size = 10.0 ** rng.integers(-1, 3, (1, heads + 2 * kv_heads, 1))
        self.qkv = (rng.standard_normal((tokens, heads + 2 * kv_heads, dim)) * size).astype(dtype)
        self.q_weight = np.linspace(0.5, 1.5, dim, dtype=np.float32)
        self.k_weight = rng.uniform(0.5, 1.5, dim).astype(np.float32)
        self.positions = rng.integers(0, POSITIONS, tokens).astype(index)
        self.table = ops.rope_table(dim, POSITIONS, 1e4)
        blocks = tokens // block_size + 2
        self.k_cache, self.v_cache = (np.full((blocks, kv_heads, block_size, dim), np.nan, dtype) for _ in "kv")
        self.slots = rng.permutation(blocks * block_size)[:tokens].astype(np.int64)

    def run(self, backend: Any, rows: slice = slice(None), **more: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q and both caches after the operator, from these rows of the batch."""
        caches = [backend.put(c) for c in (self.k_cache, self.v_cache)]
        q = ops.qk_norm_rope_cache(
            backend.put(self.qkv.reshape(self.qkv.shape[0], self.qkv.shape[1] * self.qkv.shape[2])[rows]),
            *(backend.put(a) for a in (self.q_weight, self.k_weight, self.positions[rows], self.table)),
            *caches,
            backend.put(self.slots[rows]),
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            eps=EPS,
            **more,
        )
        return backend.get(q), *(backend.get(c) for c in caches)

    def expected(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, k, v of every token in float64, from the definition."""
        x = self.qkv.astype(np.float64)
        half = self.dim // 2
        normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)
        q = normed[:, : self.heads] * self.q_weight
        k = normed[:, self.heads : self.heads + self.kv_heads] * self.k_weight
        angles = self.positions[:, None].astype(np.float64) * 1e4 ** (-2 * np.arange(half) / self.dim)
        turn = np.exp(1j * angles)[:, None, :]
        rotated = []
        for part in (q, k):
            z = (part[..., :half] + 1j * part[..., half:]) * turn
            rotated.append(np.concatenate([z.real, z.imag], -1))
        return rotated[0], rotated[1], self.qkv[:, self.heads + self.kv_heads :]

    def at_slots(self, cache: np.ndarray) -> np.ndarray:
        """What the cache holds for each token, [T, Hkv, D]."""
        return np.stack([cache[s // cache.shape[2], :, s % cache.shape[2]] for s in self.slots])

    def untouched(self, cache: np.ndarray, used: np.ndarray) -> bool:
        """All slots but those used are as they were (NaN, bit for bit)."""
        rows = np.ones(cache.shape[0] * cache.shape[2], bool)
        rows[self.slots[used]] = False
        got = cache.swapaxes(1, 2).reshape(len(rows), -1)[rows]
        return bool((got.view(np.uint16) == np.full(1, np.nan, self.dtype).view(np.uint16)).all())


@DTYPES
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "tokens", "block_size"),
    [
        (4, 2, 32, 5, 16),
        (16, 8, 128, 3, 32),  # one block of 256 threads a token
        (2, 1, 16, 9, 16),  # one lane a head
        (5, 1, 48, 4, 256),  # three lanes of four at work
        (3, 3, 80, 2, 16),
        (8, 1, 112, 3, 64),
        (40, 8, 128, 2, 16),  # several blocks a token
        (3, 2, 256, 2, 16),
        (1, 1, 240, 17, 7),
    ],
)
def test_accuracy(
    backend: Any,
    rng: np.random.Generator,
    dtype: np.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    tokens: int,
    block_size: int,
) -> None:
    case = Case(rng, dtype, tokens=tokens, heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size)
    q, k_cache, v_cache = case.run(backend)
    want_q, want_k, want_v = case.expected()
    assert q.shape == (tokens, heads, dim)
    assert q.dtype == dtype
    assert_close("qk_norm_rope_cache", q, want_q)
    assert_close("qk_norm_rope_cache", case.at_slots(k_cache), want_k)
    np.testing.assert_array_equal(case.at_slots(v_cache).view(np.uint16), want_v.view(np.uint16))
    everything = np.ones(tokens, bool)
    assert case.untouched(k_cache, everything)
    assert case.untouched(v_cache, everything)


def contract(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """q and k by the order of sums that qk_norm_rope_cache.cu states, in NumPy float32."""
    half, lanes = case.dim // 2, 16
    x = case.qkv[:, : case.heads + case.kv_heads].astype(np.float32)
    sums = np.zeros((*x.shape[:2], lanes), np.float32)  # lanes past D/16 add zeros
    for first in (0, half):
        for j in range(8):
            own = x[:, :, first + j : first + half : 8].astype(np.float64)
            sums[:, :, : half // 8] = (own * own + sums[:, :, : half // 8]).astype(np.float32)
    width = 1 << (case.dim // 16 - 1).bit_length()
    while width > 1:
        width //= 2
        sums = sums + sums[:, :, np.arange(lanes) ^ width]
    scale = np.float32(1) / np.sqrt(sums[:, :, :1] / np.float32(case.dim) + np.float32(EPS))
    weight = np.stack([case.q_weight] * case.heads + [case.k_weight] * case.kv_heads)
    normed = x * scale * weight
    angles = case.table[case.positions][:, None]
    a, b = normed[..., :half], normed[..., half:]
    cos, sin = angles[..., :half], angles[..., half:]
    wide = a.astype(np.float64) * cos - b * sin, b.astype(np.float64) * cos + a * sin  # fma: one rounding each
    rotated = np.concatenate(wide, -1).astype(np.float32).astype(case.dtype)
    return rotated[:, : case.heads], rotated[:, case.heads :]


@DTYPES
@pytest.mark.parametrize("dim", [128, 80, 16])
def test_order_of_sums(backend: Any, rng: np.random.Generator, dtype: np.dtype, dim: int) -> None:
    """Bit for bit: a later, faster kernel must give the same."""
    case = Case(rng, dtype, tokens=40, heads=6, kv_heads=3, dim=dim)
    q, k_cache, _ = case.run(backend)
    want_q, want_k = contract(case)
    np.testing.assert_array_equal(q, want_q)
    np.testing.assert_array_equal(case.at_slots(k_cache), want_k)


def test_int32_positions(backend: Any, rng: np.random.Generator) -> None:
    case = Case(rng, BF16, index=np.int32)
    q, k_cache, _ = case.run(backend)
    assert_close("qk_norm_rope_cache", q, case.expected()[0])
    assert_close("qk_norm_rope_cache", case.at_slots(k_cache), case.expected()[1])


@DTYPES
def test_skipped_slots(backend: Any, rng: np.random.Generator, dtype: np.dtype) -> None:
    """-1, and on the device any slot outside the cache: no write, but q as ever."""
    case = Case(rng, dtype, tokens=8)
    blocks, _, block_size, _ = case.k_cache.shape
    case.slots[[0, 3, 4, 7]] = [-1, blocks * block_size, -(2**62), 2**62]
    used = np.array([False, True, True, False, False, True, True, False])
    q, k_cache, v_cache = case.run(backend)
    assert_close("qk_norm_rope_cache", q, case.expected()[0])
    case_used = case.slots[used]
    for cache, want in ((k_cache, case.expected()[1]), (v_cache, case.expected()[2].astype(np.float64))):
        got = np.stack([cache[s // block_size, :, s % block_size] for s in case_used])
        assert_close("qk_norm_rope_cache", got, want[used])
        assert case.untouched(cache, used)


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 128), (5, 1, 48)])
def test_one_token_alone(
    backend: Any, rng: np.random.Generator, dtype: np.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    case = Case(rng, dtype, tokens=6, heads=heads, kv_heads=kv_heads, dim=dim)
    q, k_cache, v_cache = case.run(backend)
    slot = case.slots[4]
    alone, k_alone, v_alone = case.run(backend, slice(4, 5))
    np.testing.assert_array_equal(alone[0], q[4])
    for together, single in ((k_cache, k_alone), (v_cache, v_alone)):
        at = (slot // together.shape[2], slice(None), slot % together.shape[2])
        np.testing.assert_array_equal(single[at], together[at])


def test_rotation_agrees_with_rope(backend: Any, rng: np.random.Generator) -> None:
    """Heads that the norm leaves alone (mean square 1, weight 1, eps 0): the bits of ops.rope."""
    case = Case(rng, HALF, dim=64)
    case.qkv = np.where(rng.random(case.qkv.shape) < 0.5, -1, 1).astype(HALF)
    case.q_weight[:] = 1
    put = [backend.put(a) for a in (case.qkv[:, : case.heads], case.positions, case.table)]
    rotated = backend.get(ops.rope(*put))
    caches = [backend.put(c) for c in (case.k_cache, case.v_cache)]
    q = ops.qk_norm_rope_cache(
        backend.put(case.qkv.reshape(5, -1)),
        *(backend.put(a) for a in (case.q_weight, case.k_weight, case.positions, case.table)),
        *caches,
        backend.put(case.slots),
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        eps=0.0,
    )
    np.testing.assert_array_equal(backend.get(q), rotated)


def test_positions_outside_the_table(backend: Any, rng: np.random.Generator) -> None:
    case = Case(rng, HALF, tokens=6)
    case.positions[[1, 2, 5]] = [POSITIONS, -1, 2**62]
    q, k_cache, v_cache = case.run(backend)
    bad = np.array([False, True, True, False, False, True])
    assert np.isnan(q[bad]).all()
    assert np.isfinite(q[~bad]).all()
    assert np.isnan(case.at_slots(k_cache)[bad]).all()
    assert np.isfinite(case.at_slots(k_cache)[~bad]).all()
    np.testing.assert_array_equal(case.at_slots(v_cache), case.expected()[2])


def test_out_and_strided_input(backend: Any, rng: np.random.Generator) -> None:
    case = Case(rng, BF16, dim=16)
    want, *_ = case.run(backend)
    wide = np.zeros((10, case.qkv[0].size + 24), BF16)
    wide[::2, 8:-16] = case.qkv.reshape(5, -1)
    out = backend.put(np.full(want.shape, np.nan, BF16))
    got = ops.qk_norm_rope_cache(
        backend.put(wide)[::2, 8:-16],
        *(backend.put(a) for a in (case.q_weight, case.k_weight)),
        backend.put(np.repeat(case.positions, 2))[::2],
        backend.put(np.pad(case.table, ((0, 0), (0, 16))))[:, :16],
        *(backend.put(a) for a in (case.k_cache, case.v_cache)),
        backend.put(np.repeat(case.slots, 3))[::3],
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        eps=EPS,
        out=out,
    )
    assert got is out
    np.testing.assert_array_equal(backend.get(out), want)


def test_no_tokens(backend: Any, rng: np.random.Generator) -> None:
    case = Case(rng, HALF, tokens=0)
    q, k_cache, _ = case.run(backend)
    assert q.shape == (0, case.heads, case.dim)
    assert np.isnan(k_cache).all()


def test_many_tokens(backend: Any, rng: np.random.Generator) -> None:
    """More tokens than a grid's y axis has blocks."""
    case = Case(rng, HALF, tokens=70001, heads=1, kv_heads=1, dim=16)
    q, k_cache, v_cache = case.run(backend)
    want_q, want_k, want_v = case.expected()
    assert_close("qk_norm_rope_cache", q, want_q)
    assert_close("qk_norm_rope_cache", case.at_slots(k_cache), want_k)
    np.testing.assert_array_equal(case.at_slots(v_cache), want_v)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"qkv": np.ones((5, 8, 32), np.int32)}, TypeError, "qkv has dtype int32"),
        ({"qkv": np.ones((5, 7, 32), np.float16)}, ValueError, "qkv has shape"),
        ({"q_weight": np.ones(32, np.float16)}, TypeError, "q_weight has dtype float16"),
        ({"k_weight": np.ones(16, np.float32)}, ValueError, "k_weight has shape"),
        ({"positions": np.zeros(5, np.float32)}, TypeError, "positions has dtype float32"),
        ({"positions": np.zeros(4, np.int32)}, ValueError, "positions has shape"),
        ({"table": np.zeros((9, 24), np.float32)}, ValueError, "table has 24 columns"),
        ({"table": np.zeros((9, 272), np.float32)}, ValueError, "table has 272 columns"),
        ({"k_cache": np.zeros((2, 2, 16, 16), np.float16)}, ValueError, "k_cache has shape"),
        ({"v_cache": np.zeros((2, 2, 16, 32), BF16)}, TypeError, "v_cache has dtype bfloat16"),
        ({"slots": np.zeros(5, np.int32)}, TypeError, "slot_mapping has dtype int32"),
        ({"slots": np.zeros(6, np.int64)}, ValueError, "slot_mapping has shape"),
        ({"heads": 0}, ValueError, "num_heads must be at least 1, got 0"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_bad_input(
    backend: Any, rng: np.random.Generator, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    case = Case(rng, HALF)
    for name, value in change.items():
        setattr(case, name, value)
    with pytest.raises(error, match=message):
        case.run(backend)


def test_numpy_takes_the_reference(rng: np.random.Generator) -> None:
    case = Case(rng, HALF)
    want_q, want_k, want_v = case.expected()
    for dtype in (HALF, np.dtype(np.float32), np.dtype(np.float64)):
        caches = [np.full(case.k_cache.shape, np.nan, dtype) for _ in "kv"]
        q = ops.qk_norm_rope_cache(
            case.qkv.reshape(5, -1).astype(dtype),
            *(case.q_weight, case.k_weight, case.positions, case.table, *caches, case.slots),
            num_heads=case.heads,
            num_kv_heads=case.kv_heads,
            eps=EPS,
        )
        assert q.dtype == dtype
        assert_close("qk_norm_rope_cache", q, want_q)
        assert_close("qk_norm_rope_cache", case.at_slots(caches[0]), want_k)
        np.testing.assert_array_equal(case.at_slots(caches[1]), want_v.astype(dtype))
    case.positions[0] = POSITIONS
    with pytest.raises(ValueError, match=f"positions contains {POSITIONS}"):
        ops.qk_norm_rope_cache(
            case.qkv.reshape(5, -1),
            *(case.q_weight, case.k_weight, case.positions, case.table, case.k_cache, case.v_cache, case.slots),
            num_heads=case.heads,
            num_kv_heads=case.kv_heads,
        )
