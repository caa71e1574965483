"""Every operator on a GPU and emulated, from the same inputs: equal bits where no instruction is approximate.

Needs a GPU and a C++ compiler. tests/test_ptx.py compares the instructions themselves, on recorded results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cukern
from cukern import ops
from cukern.testing import TOLERANCES, to_float64

pytestmark = pytest.mark.gpu

DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
Put = Callable[[np.ndarray], Any]


def random(seed: int, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


def both(run: Callable[[Put], tuple[Any, ...]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pairs (GPU, emulated) of the results of `run`, which moves its inputs by the function it is given."""
    import cupy

    device = [cupy.asnumpy(a) for a in run(cupy.asarray)]
    with cukern.emulate(check=False):
        emulated = [np.asarray(a) for a in run(np.array)]
    return list(zip(device, emulated))


def same_bits(run: Callable[[Put], tuple[Any, ...]]) -> None:
    for device, emulated in both(run):
        assert device.dtype == emulated.dtype
        width = f"u{device.dtype.itemsize}"
        different = (device.view(width) != emulated.view(width)) & ~(np.isnan(device) & np.isnan(emulated))
        assert not different.any(), f"{different.sum()} of {different.size} elements differ"


def close(operator: str, run: Callable[[Put], tuple[Any, ...]]) -> None:
    """Within the operator's tolerance and one unit in the last place of the results' dtype."""
    for device, emulated in both(run):
        a, b = to_float64(device), to_float64(emulated)
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
        finite = np.isfinite(a)
        ulp = float(ml_dtypes.finfo(device.dtype).eps)
        assert (np.abs(a - b)[finite] <= TOLERANCES[operator] + ulp * np.abs(a)[finite]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestSameBits:
    def test_embedding(self, dtype: Any) -> None:
        ids, weight = np.array([0, 5, 8, 3], np.int64), random(1, (9, 72), dtype)
        same_bits(lambda put: (ops.embedding(put(ids), put(weight)),))

    @pytest.mark.parametrize("columns", [64, 130, 1024, 3000])
    def test_rms_norm(self, dtype: Any, columns: int) -> None:
        x, weight = random(2, (5, columns), dtype), random(3, (columns,), np.float32)
        residual = random(4, (5, columns), np.float32)

        def with_residual(put: Put) -> tuple[Any, ...]:
            r = put(residual)
            return ops.rms_norm(put(x), put(weight), residual=r), r

        same_bits(lambda put: (ops.rms_norm(put(x), put(weight)),))
        same_bits(with_residual)

    def test_rope(self, dtype: Any) -> None:
        table = ops.rope_table(64, 50, 10000.0)
        x, positions = random(5, (7, 3, 64), dtype), np.array([0, 1, 49, 7, 7, 30, 2], np.int32)
        same_bits(lambda put: (ops.rope(put(x), put(positions), put(table)),))

    def test_heads_into_the_cache(self, dtype: Any) -> None:
        table = ops.rope_table(64, 50, 10000.0)
        qkv, positions = random(6, (5, 8 * 64), dtype), np.array([0, 1, 2, 30, 49], np.int32)
        q_weight, k_weight = random(7, (64,), np.float32), random(8, (64,), np.float32)
        slots, cache = np.array([3, 17, -1, 40, 0], np.int64), random(9, (3, 2, 16, 64), dtype)

        def run(put: Put) -> tuple[Any, ...]:
            k, v = put(cache), put(cache)
            q = ops.qk_norm_rope_cache(
                put(qkv), put(q_weight), put(k_weight), put(positions), put(table), k, v, put(slots),
                num_heads=4, num_kv_heads=2,
            )  # fmt: skip
            return q, k, v

        same_bits(run)

    @pytest.mark.parametrize(("m", "n", "k"), [(1, 96, 272), (7, 200, 1040), (33, 136, 512), (70, 257, 300)])
    def test_linear(self, dtype: Any, m: int, n: int, k: int) -> None:
        """Products have the card's bits because the emulator adds inside an mma step as the card does."""
        x, w = random(10, (m, k), dtype), random(11, (n, k), dtype, 0.1)
        bias, residual = random(12, (n,), np.float32), random(13, (m, n), np.float32)
        same_bits(lambda put: (ops.linear(put(x), put(w), bias=put(bias)),))
        same_bits(lambda put: (ops.linear(put(x), put(w), dtype=np.float32),))
        same_bits(lambda put: (ops.linear(put(x), put(w), residual=put(residual)),))

    def test_argmax(self, dtype: Any) -> None:
        x = random(14, (4, 5000), dtype)
        same_bits(lambda put: (ops.argmax(put(x)),))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestClose:
    def test_swiglu(self, dtype: Any) -> None:
        x = random(20, (5, 2 * 136), dtype, 3)
        close("swiglu", lambda put: (ops.swiglu(put(x)),))

    @pytest.mark.parametrize("columns", [7, 1000, 5000])
    def test_softmax(self, dtype: Any, columns: int) -> None:
        x, targets = random(21, (4, columns), dtype, 4), np.array([0, 1, 2, columns - 1], np.int64)
        close("softmax", lambda put: (ops.softmax(put(x)),))
        close("token_logprobs", lambda put: (ops.token_logprobs(put(x), put(targets), 0.7),))

    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_attention_prefill(self, dtype: Any, head_dim: int) -> None:
        q = random(22, (2, 70, 4, head_dim), dtype)
        k, v = (random(s, (2, 133, 2, head_dim), dtype) for s in (23, 24))
        close("attention", lambda put: ops.attention_prefill(put(q), put(k), put(v), return_lse=True))

    def test_attention_decode(self, dtype: Any) -> None:
        q = random(25, (3, 8, 64), dtype)
        k, v = (random(s, (40, 2, 16, 64), dtype) for s in (26, 27))
        lengths = np.array([1, 130, 200], np.int32)
        tables = np.random.default_rng(28).permutation(40)[:39].reshape(3, 13).astype(np.int32)

        def run(put: Put) -> tuple[Any, ...]:
            out, lse = ops.attention_decode(put(q), put(k), put(v), put(tables), put(lengths), return_lse=True)
            return out, lse

        close("attention", run)
