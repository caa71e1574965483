"""kv_cache_write: exact copies into the right slots, everything else untouched."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cukern import ops

HALF, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


def expect(cache: np.ndarray, new: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Token by token, by the definition."""
    cache = cache.copy()
    blocks, _, block_size, _ = cache.shape
    for token, slot in enumerate(slots):
        if 0 <= slot < blocks * block_size:
            cache[slot // block_size, :, slot % block_size] = new[token]
    return cache


def assert_same(got: np.ndarray, want: np.ndarray) -> None:
    """Bit for bit, NaN too."""
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))


def case(
    rng: np.random.Generator, dtype: np.dtype, tokens: int, heads: int, dim: int, blocks: int, block_size: int
) -> tuple[np.ndarray, ...]:
    k, v = (rng.standard_normal((tokens, heads, dim)).astype(dtype) for _ in "kv")
    caches = [np.full((blocks, heads, block_size, dim), np.nan, dtype) for _ in "kv"]
    slots = rng.permutation(blocks * block_size)[:tokens].astype(np.int64)
    return k, v, *caches, slots


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=lambda d: d.name)
@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "blocks", "block_size"),
    [(5, 2, 64, 3, 16), (33, 8, 128, 4, 32), (7, 1, 16, 2, 256), (20, 3, 20, 9, 5), (1, 5, 3, 1, 1)],
)
def test_slots(
    backend: Any,
    rng: np.random.Generator,
    dtype: np.dtype,
    tokens: int,
    heads: int,
    dim: int,
    blocks: int,
    block_size: int,
) -> None:
    k, v, k_cache, v_cache, slots = case(rng, dtype, tokens, heads, dim, blocks, block_size)
    slots[::4] = -1
    put = [backend.put(a) for a in (k, v, k_cache, v_cache, slots)]
    assert ops.kv_cache_write(*put) is None
    assert_same(backend.get(put[2]), expect(k_cache, k, slots))
    assert_same(backend.get(put[3]), expect(v_cache, v, slots))


def test_bits(backend: Any) -> None:
    k = np.arange(65536, dtype=np.uint16).view(np.float16).reshape(8, 32, 256)
    caches = [backend.put(np.zeros((1, 32, 8, 256), np.float16)) for _ in "kv"]
    ops.kv_cache_write(backend.put(k), backend.put(k[::-1].copy()), *caches, backend.put(np.arange(8)))
    k_cache, v_cache = (backend.get(c)[0].swapaxes(0, 1).copy().view(np.uint16) for c in caches)
    np.testing.assert_array_equal(k_cache, k.view(np.uint16))
    np.testing.assert_array_equal(v_cache, k[::-1].copy().view(np.uint16))


def test_slots_outside_the_cache(backend: Any, rng: np.random.Generator) -> None:
    k, v, k_cache, v_cache, slots = case(rng, HALF, 6, 2, 16, 2, 16)
    slots[:4] = [32, -2, 2**62, -(2**62)]
    put = [backend.put(a) for a in (k, v, k_cache, v_cache, slots)]
    ops.kv_cache_write(*put)
    assert_same(backend.get(put[2]), expect(k_cache, k, slots))
    assert_same(backend.get(put[3]), expect(v_cache, v, slots))


def test_slots_outside_the_cache_numpy(rng: np.random.Generator) -> None:
    k, v, k_cache, v_cache, slots = case(rng, HALF, 3, 2, 16, 2, 16)
    for bad in (32, -2):
        slots[1] = bad
        with pytest.raises(ValueError, match=rf"slot_mapping contains {bad}, expected -1 \(skip\) to 31"):
            ops.kv_cache_write(k, v, k_cache, v_cache, slots)
        assert np.isnan(k_cache).all()  # nothing half done


def test_strided_input(backend: Any, rng: np.random.Generator) -> None:
    """The key and value heads of packed projections."""
    packed = rng.standard_normal((5, 7, 32)).astype(BF16)
    put = backend.put(packed)
    caches = [backend.put(np.full((2, 2, 16, 32), np.nan, BF16)) for _ in "kv"]
    before = backend.get(caches[0]).copy()
    slots = np.array([31, 3, 9, 0, 17])
    doubled = np.repeat(slots, 2)
    ops.kv_cache_write(put[:, 3:5], put[:, 5:7], *caches, backend.put(doubled)[::2])
    assert_same(backend.get(caches[0]), expect(before, packed[:, 3:5], slots))
    assert_same(backend.get(caches[1]), expect(before, packed[:, 5:7], slots))


def test_empty(backend: Any) -> None:
    k, none = backend.put(np.empty((0, 2, 16), np.float16)), backend.put(np.empty(0, np.int64))
    cache = backend.put(np.zeros((1, 2, 16, 16), np.float16))
    ops.kv_cache_write(k, k, cache, backend.put(np.zeros((1, 2, 16, 16), np.float16)), none)
    token = backend.put(np.ones((1, 2, 16), np.float16))
    ops.kv_cache_write(token, token, cache[:0], cache[:0], backend.put(np.full(1, -1)))
    assert (backend.get(cache) == 0).all()


def test_bad_input(backend: Any, rng: np.random.Generator) -> None:
    k, v, k_cache, v_cache, slots = (backend.put(a) for a in case(rng, HALF, 3, 2, 16, 2, 16))
    with pytest.raises(TypeError, match="k has dtype int32"):
        ops.kv_cache_write(backend.put(np.ones((3, 2, 16), np.int32)), v, k_cache, v_cache, slots)
    with pytest.raises(TypeError, match="v has dtype bfloat16"):
        ops.kv_cache_write(k, backend.put(np.ones((3, 2, 16), BF16)), k_cache, v_cache, slots)
    with pytest.raises(ValueError, match="v has shape"):
        ops.kv_cache_write(k, v[:, :1], k_cache, v_cache, slots)
    with pytest.raises(TypeError, match="slot_mapping has dtype int32"):
        ops.kv_cache_write(k, v, k_cache, v_cache, backend.put(np.zeros(3, np.int32)))
    with pytest.raises(ValueError, match="slot_mapping has shape"):
        ops.kv_cache_write(k, v, k_cache, v_cache, slots[:2])
    with pytest.raises(ValueError, match="k_cache has shape"):
        ops.kv_cache_write(k, v, backend.put(np.ones((2, 3, 16, 16), np.float16)), v_cache, slots)
    with pytest.raises(ValueError, match=r"v_cache .*, expected one shape"):
        ops.kv_cache_write(k, v, k_cache, backend.put(np.ones((3, 2, 16, 16), np.float16)), slots)
    with pytest.raises(TypeError, match="v_cache has dtype bfloat16"):
        ops.kv_cache_write(k, v, k_cache, backend.put(np.ones((2, 2, 16, 16), BF16)), slots)
    with pytest.raises(ValueError, match="k_cache must be C-contiguous"):
        ops.kv_cache_write(k, v, backend.put(np.ones((2, 2, 32, 16), np.float16))[:, :, ::2], v_cache, slots)
