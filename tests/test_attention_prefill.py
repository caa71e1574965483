"""Prefill attention: values against float64, one order of summation in every layout, arguments."""

from __future__ import annotations

import importlib
import math
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from paging import UNUSED, bits, normal, paginate, random_pages, starts

import cukern
from cukern.ops.attention_prefill import (
    Variant,
    _attention_prefill_variant,
    attention_prefill,
    candidates,
    kernel_variants,
    select,
)
from cukern.reference.attention_prefill import attention_prefill as reference
from cukern.testing import assert_close

HALVES = [np.float16, ml_dtypes.bfloat16]
ON_GPU = pytest.mark.parametrize("backend", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


def wide(*arrays: np.ndarray) -> list[np.ndarray]:
    return [a.astype(np.float64) for a in arrays]


def dense(
    rng: np.random.Generator, b: int, s: int, hq: int, hkv: int, d: int, dtype: Any, s_kv: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    m = s if s_kv is None else s_kv
    return normal(rng, (b, s, hq, d), dtype), normal(rng, (b, m, hkv, d), dtype), normal(rng, (b, m, hkv, d), dtype)


def check_dense(backend: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> np.ndarray:
    out, lse = attention_prefill(*map(backend.put, (q, k, v)), return_lse=True, **options)
    want, want_lse = reference(*wide(q, k, v), return_lse=True, **options)
    assert out.dtype == q.dtype
    assert lse.dtype == np.float32
    assert_close("attention", out, want)
    assert_close("attention", lse, want_lse)
    return backend.get(out)


# ---- values


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("b", "s", "hq", "hkv"),
    [
        (1, 16, 2, 1),
        (1, 64, 4, 2),
        (1, 128, 16, 8),
        (2, 96, 4, 2),
        (1, 256, 16, 8),
        (1, 1, 2, 1),
        (3, 15, 2, 1),
        (1, 17, 4, 2),
        (1, 127, 2, 1),
    ],
)
def test_dense(backend: Any, rng: np.random.Generator, b: int, s: int, hq: int, hkv: int, dtype: Any) -> None:
    check_dense(backend, *dense(rng, b, s, hq, hkv, 128, dtype))


@ON_GPU
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("b", "s", "hq", "hkv"), [(1, 1000, 16, 8), (2, 2048, 4, 1), (1, 4097, 2, 2)])
def test_dense_long(
    backend: Any, rng: np.random.Generator, b: int, s: int, hq: int, hkv: int, d: int, causal: bool, dtype: Any
) -> None:
    check_dense(backend, *dense(rng, b, s, hq, hkv, d, dtype), causal=causal)


@pytest.mark.parametrize(("hq", "hkv"), [(2, 2), (4, 2), (5, 1), (14, 2), (8, 1), (16, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_query_heads_per_key_head(backend: Any, rng: np.random.Generator, hq: int, hkv: int, causal: bool) -> None:
    check_dense(backend, *dense(rng, 1, 33, hq, hkv, 64, np.float16, 70), causal=causal)


@pytest.mark.parametrize(
    ("d", "dtype"),
    [
        (16, HALVES[0]),
        (48, HALVES[0]),
        (80, HALVES[0]),
        (96, HALVES[1]),
        (144, HALVES[0]),
        (256, HALVES[1]),
    ],
)
def test_head_dim(backend: Any, rng: np.random.Generator, d: int, dtype: Any) -> None:
    check_dense(backend, *dense(rng, 1, 70, 2, 1, d, dtype, 150))


@ON_GPU
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("d", range(16, 257, 16))
def test_every_head_dim(backend: Any, rng: np.random.Generator, d: int, dtype: Any) -> None:
    q, k, v = dense(rng, 2, 200, 4, 2, d, dtype, 333)
    check_dense(backend, q, k, v)
    check_dense(backend, q, k, v, causal=False)


@pytest.mark.parametrize("scale", [0.02, 2.0])
def test_scale(backend: Any, rng: np.random.Generator, scale: float) -> None:
    """A large scale makes one key win almost every row: exponents far below the range of exp."""
    check_dense(backend, *dense(rng, 1, 40, 2, 1, 128, np.float16, 140), scale=scale)


def test_large_scores(backend: Any, rng: np.random.Generator) -> None:
    """Raw scores near 1e5, as trained models have them in fp16: no overflow, no loss of the maximum."""
    q, k, v = dense(rng, 1, 20, 2, 1, 64, np.float16)
    check_dense(backend, q * np.float16(60), k * np.float16(60), v)


def test_equal_scores_average_the_values(backend: Any, rng: np.random.Generator) -> None:
    q, k, v = dense(rng, 1, 1, 2, 1, 64, np.float16, 130)
    k[:] = k[:, :1]
    out = backend.get(attention_prefill(*map(backend.put, (q, k, v))))
    np.testing.assert_allclose(out[0, 0, 0].astype(np.float64), v[0, :, 0].astype(np.float64).mean(0), atol=1e-3)


def test_more_queries_than_keys(backend: Any, rng: np.random.Generator) -> None:
    """Bottom-right alignment: the first queries see no key."""
    q, k, v = dense(rng, 1, 70, 2, 1, 128, np.float16, 5)
    out, lse = attention_prefill(*map(backend.put, (q, k, v)), return_lse=True)
    out, lse = backend.get(out), backend.get(lse)
    assert not out[0, :65].any()
    assert np.isneginf(lse[0, :65]).all()
    assert np.isfinite(lse[0, 65:]).all()
    np.testing.assert_array_equal(out[0, 65], np.repeat(v[0, 0], 2, axis=0))  # one key: its value, exactly
    assert_close("attention", out, reference(*wide(q, k, v)))


def test_no_keys(backend: Any, rng: np.random.Generator) -> None:
    q, k, v = dense(rng, 2, 3, 2, 1, 64, np.float16, 0)
    out, lse = attention_prefill(*map(backend.put, (q, k, v)), causal=False, return_lse=True)
    assert not backend.get(out).any()
    assert np.isneginf(backend.get(lse)).all()


# ---- packed and paged


@pytest.mark.parametrize("causal", [True, False])
def test_packed(backend: Any, rng: np.random.Generator, causal: bool) -> None:
    """Ragged, with empty sequences at the start, in the middle and at the end, and keys of other lengths."""
    n, m = [0, 65, 1, 0, 130, 17, 0], [3, 65, 140, 0, 200, 9, 0]
    q = normal(rng, (sum(n), 4, 128), np.float16)
    k, v = (normal(rng, (sum(m), 2, 128), np.float16) for _ in "kv")
    index = {"cu_seqlens_q": starts(n), "cu_seqlens_k": starts(m)}
    out, lse = attention_prefill(
        *map(backend.put, (q, k, v)), causal=causal, return_lse=True, **{x: backend.put(a) for x, a in index.items()}
    )
    want, want_lse = reference(*wide(q, k, v), causal=causal, return_lse=True, **index)
    assert_close("attention", out, want)
    assert_close("attention", lse, want_lse)


def test_order_of_the_work_does_not_show(
    backend: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever number of sequences and heads is worked on together, everything is done once."""
    module = importlib.import_module("cukern.ops.attention_prefill")
    variant, n = Variant(4, 2), [70, 0, 129]
    ragged = tuple(backend.put(normal(rng, (sum(n), heads, 64), np.float16)) for heads in (6, 3, 3))
    whole = tuple(map(backend.put, dense(rng, 2, 130, 6, 3, 64, np.float16)))
    for arrays, options, most in ((whole, {}, 6), (ragged, {"cu_seqlens_q": backend.put(starts(n))}, 3)):
        results = []
        for together in range(1, most + 1):
            monkeypatch.setattr(module, "_together", lambda *_, n=together: n)
            out = backend.put(np.full(arrays[0].shape, np.nan, np.float16))
            results.append(backend.get(_attention_prefill_variant(variant, *arrays, out=out, **options)))
            np.testing.assert_array_equal(bits(results[-1]), bits(results[0]))
        want = reference(*wide(*map(backend.get, arrays)), **{k: backend.get(v) for k, v in options.items()})
        assert_close("attention", results[0], want)


def test_as_many_together_as_fit_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("cukern.ops.attention_prefill")
    monkeypatch.setattr(module, "device", lambda: SimpleNamespace(l2_bytes=10 << 20))
    assert module._together(8, 8, 2048, 256) == 4  # of 1 MB each in 4 MB
    assert module._together(1, 2, 2048, 256) == 2
    assert module._together(8, 8, 1 << 20, 256) == 1
    assert module._together(8, 8, 0, 256) == 64


def test_packed_leaves_rows_past_the_end_alone(backend: Any, rng: np.random.Generator) -> None:
    q, k, v = (normal(rng, (40, 2, 64), np.float16) for _ in "qkv")
    out = backend.put(np.full(q.shape, 7, np.float16))
    cu = backend.put(starts([10, 20]))
    result = attention_prefill(*map(backend.put, (q, k, v)), cu_seqlens_q=cu, out=out)
    assert result is out
    got = backend.get(out)
    assert (got[30:] == 7).all()
    assert_close("attention", got[:30], reference(*wide(q, k, v), cu_seqlens_q=starts([10, 20]))[:30])


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    ("rows", "cu"),
    [(4, [0, 64]), (4, [0, 2**31 - 1]), (100, [0, 130]), (100, [0, 230]), (100, [0, 50, 300, 2**31 - 1])],
    ids=str,
)
def test_sequences_end_with_the_array(
    backend: Any, rng: np.random.Generator, rows: int, cu: list[int], paged: bool
) -> None:
    """Entries of cu_seqlens_q past the array are those of its end: every row is written."""
    lengths = [rows + 20] * (len(cu) - 1)
    cache = random_pages(rng, lengths, 1, 64, 16, np.float16)
    q = normal(rng, (rows, 2, 64), np.float16)
    if paged:
        arrays, index = (q, cache.k_cache, cache.v_cache), {"block_tables": cache.tables, "seq_lens": cache.seq_lens}
    else:
        arrays, index = (q, q[:, :1], q[:, 1:]), {}
    out = backend.put(np.full_like(q, np.nan))
    attention_prefill(
        *map(backend.put, arrays),
        cu_seqlens_q=backend.put(np.array(cu, np.int32)),
        **{name: backend.put(a) for name, a in index.items()},
        out=out,
    )
    inside = np.minimum(cu, rows).astype(np.int32)
    assert_close("attention", backend.get(out), reference(*wide(*arrays), cu_seqlens_q=inside, **index))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_paged(backend: Any, rng: np.random.Generator, block_size: int, dtype: Any) -> None:
    """Chunks at the end of longer contexts; the unwritten part of a page and all unused pages hold NaN."""
    lengths, n = [100, 257, 0, 16, 130], [100, 3, 0, 5, 70]
    cache = random_pages(rng, lengths, 2, 128, block_size, dtype)
    q = normal(rng, (sum(n), 4, 128), dtype)
    index = {"cu_seqlens_q": starts(n), "block_tables": cache.tables, "seq_lens": cache.seq_lens}
    out = attention_prefill(
        *map(backend.put, (q, cache.k_cache, cache.v_cache)), **{x: backend.put(a) for x, a in index.items()}
    )
    assert_close("attention", out, reference(*wide(q, cache.k_cache, cache.v_cache), **index))


@pytest.mark.parametrize(("d", "block_size"), [(64, 16), (96, 16), (192, 16), (96, 256)])
def test_paged_head_dim(backend: Any, rng: np.random.Generator, d: int, block_size: int) -> None:
    """Block 0 is nobody's and holds NaN: a copy past the end of a sequence that is not left out would read it."""
    cache = random_pages(rng, [90, 200], 1, d, block_size, np.float16)
    k, v = (np.concatenate([np.full_like(a[:1], np.nan), a]) for a in (cache.k_cache, cache.v_cache))
    tables = np.where(cache.tables == UNUSED, UNUSED, cache.tables + 1).astype(np.int32)
    q = normal(rng, (100, 2, d), np.float16)
    index = {"cu_seqlens_q": starts([80, 20]), "block_tables": tables, "seq_lens": cache.seq_lens}
    out = attention_prefill(*map(backend.put, (q, k, v)), **{x: backend.put(a) for x, a in index.items()})
    assert_close("attention", out, reference(*wide(q, k, v), **index))


def test_block_id_outside_the_cache_gives_nan(backend: Any, rng: np.random.Generator) -> None:
    """Nothing is read there, the rows that see the block become NaN, the others and other sequences do not change."""
    cache = random_pages(rng, [40, 40], 1, 64, 16, np.float16)
    q = backend.put(normal(rng, (80, 2, 64), np.float16))
    caches = [backend.put(a) for a in (cache.k_cache, cache.v_cache)]
    index = {"cu_seqlens_q": backend.put(starts([40, 40])), "seq_lens": backend.put(cache.seq_lens)}
    good = backend.get(attention_prefill(q, *caches, block_tables=backend.put(cache.tables), **index))
    for wrong in (-1, len(cache.k_cache), UNUSED):
        tables = cache.tables.copy()
        tables[0, 1] = wrong
        out = backend.get(attention_prefill(q, *caches, block_tables=backend.put(tables), **index))
        assert np.isnan(out[16:40]).all()
        np.testing.assert_array_equal(bits(out[:16]), bits(good[:16]))
        np.testing.assert_array_equal(bits(out[40:]), bits(good[40:]))


def test_length_beyond_the_table_is_cut(backend: Any, rng: np.random.Generator) -> None:
    cache = random_pages(rng, [48], 1, 64, 16, np.float16)
    q = backend.put(normal(rng, (4, 2, 64), np.float16))
    args = (q, *(backend.put(a) for a in (cache.k_cache, cache.v_cache)))
    index = {"cu_seqlens_q": backend.put(starts([4])), "block_tables": backend.put(cache.tables[:, :3])}
    full = attention_prefill(*args, **index, seq_lens=backend.put(np.array([48], np.int32)))
    over = attention_prefill(*args, **index, seq_lens=backend.put(np.array([2**31 - 1], np.int32)))
    np.testing.assert_array_equal(bits(backend.get(over)), bits(backend.get(full)))


# ---- the same bits


def test_layout_and_batch_do_not_change_bits(backend: Any, rng: np.random.Generator) -> None:
    """One sequence alone, in a dense batch, packed at two places, and in pages."""
    q, k, v = dense(rng, 3, 140, 4, 2, 128, np.float16)
    alone = backend.get(attention_prefill(*(backend.put(a[1:2]) for a in (q, k, v))))[0]
    batched = backend.get(attention_prefill(*map(backend.put, (q, k, v))))[1]
    np.testing.assert_array_equal(bits(batched), bits(alone))
    order = [(0, 33), (1, 140), (2, 77), (1, 140)]
    packed = [np.concatenate([a[b, :n] for b, n in order]) for a in (q, k, v)]
    cu = starts([n for _, n in order])
    out = backend.get(attention_prefill(*map(backend.put, packed), cu_seqlens_q=backend.put(cu)))
    for i in (1, 3):
        np.testing.assert_array_equal(bits(out[cu[i] : cu[i + 1]]), bits(alone))
    for block_size in (16, 128):
        pages = paginate(rng, [k[b, :n] for b, n in order], [v[b, :n] for b, n in order], block_size)
        out = attention_prefill(
            *map(backend.put, (packed[0], pages.k_cache, pages.v_cache)),
            cu_seqlens_q=backend.put(cu),
            block_tables=backend.put(pages.tables),
            seq_lens=backend.put(pages.seq_lens),
        )
        np.testing.assert_array_equal(bits(backend.get(out)[cu[1] : cu[2]]), bits(alone))


def test_chunked_prefill_has_the_bits_of_the_whole(backend: Any, rng: np.random.Generator) -> None:
    total = 150
    cache = random_pages(rng, [total], 2, 128, 16, np.float16)
    q = normal(rng, (total, 4, 128), np.float16)
    caches = [backend.put(a) for a in (cache.k_cache, cache.v_cache)]

    def run(begin: int, end: int) -> np.ndarray:
        # keys after the chunk are not in the cache yet: the length given hides them
        return backend.get(
            attention_prefill(
                backend.put(q[begin:end]),
                *caches,
                cu_seqlens_q=backend.put(starts([end - begin])),
                block_tables=backend.put(cache.tables),
                seq_lens=backend.put(np.array([end], np.int32)),
            )
        )

    whole = run(0, total)
    for size in (1, 7, 64, 100):
        begin = 128 if size == 1 else 0
        parts = np.concatenate(
            [run(i, min(i + size, total)) for i in range(begin, min(total, begin + 20 * size), size)]
        )
        np.testing.assert_array_equal(bits(parts), bits(whole[begin : begin + len(parts)]), err_msg=f"chunks of {size}")


def test_variants_have_the_same_bits(backend: Any, rng: np.random.Generator) -> None:
    """Tile height and stages do not matter; negative control: another chunk length gives other bits."""
    q, k, v = (backend.put(a) for a in dense(rng, 1, 300, 2, 1, 128, np.float16))
    want = backend.get(attention_prefill(q, k, v))
    for variant in [*candidates(128), Variant(8, 1), Variant(4, 1)]:
        out = backend.get(_attention_prefill_variant(variant, q, k, v))
        np.testing.assert_array_equal(bits(out), bits(want), err_msg=str(variant))
    other = backend.get(_attention_prefill_variant(Variant(4, 1, chunk=64), q, k, v))
    assert (bits(other) != bits(want))[:, 128:].any()
    np.testing.assert_array_equal(bits(other)[:, :64], bits(want)[:, :64])
    assert_close("attention", other, reference(*wide(*map(backend.get, (q, k, v)))))


@pytest.mark.parametrize(("d", "keys"), [(64, 300), (128, 300), (256, 100)])
def test_thread_order_does_not_change_bits(rng: np.random.Generator, d: int, keys: int) -> None:
    """Slow and fast warps: over several chunks every place in shared memory is filled and read again."""
    q, k, v = dense(rng, 1, 80, 2, 1, d, np.float16, keys)
    results = []
    for order in ("up", "down", "random"):
        with cukern.emulate(check=True, order=order):
            results.append(attention_prefill(q, k, v))
    for result in results[1:]:
        np.testing.assert_array_equal(bits(result), bits(results[0]))


@ON_GPU
def test_repeats_have_the_same_bits(backend: Any, rng: np.random.Generator) -> None:
    q, k, v = (backend.put(a) for a in dense(rng, 2, 1111, 16, 8, 128, np.float16))
    want = bits(backend.get(attention_prefill(q, k, v)))
    for _ in range(20):
        np.testing.assert_array_equal(bits(backend.get(attention_prefill(q, k, v))), want)


# ---- arguments


def test_slices_of_a_packed_buffer(backend: Any, rng: np.random.Generator) -> None:
    """q, k and v as views of one qkv buffer, and views that no kernel can read in place."""
    qkv = normal(rng, (50, (4 + 2 + 2) * 64), np.float16)
    cu = backend.put(starts([20, 30]))
    buffer = backend.put(qkv)
    views = [buffer[:, a:b].reshape(50, -1, 64) for a, b in ((0, 256), (256, 384), (384, 512))]
    out = backend.get(attention_prefill(*views, cu_seqlens_q=cu))
    copies = [np.ascontiguousarray(backend.get(x)) for x in views]
    np.testing.assert_array_equal(
        bits(out), bits(backend.get(attention_prefill(*map(backend.put, copies), cu_seqlens_q=cu)))
    )
    assert_close("attention", out, reference(*wide(*copies), cu_seqlens_q=starts([20, 30])))

    q, k, v = (backend.put(a) for a in copies)
    shifted = backend.put(np.zeros((50, 4, 65), np.float16))[:, :, 1:]
    shifted[...] = q
    for odd in (
        shifted,
        q[::-1][::-1],
        backend.put(np.asfortranarray(copies[0])),
        q.transpose(1, 0, 2).copy().transpose(1, 0, 2),
    ):
        np.testing.assert_array_equal(bits(backend.get(attention_prefill(odd, k, v, cu_seqlens_q=cu))), bits(out))
    reverse = backend.get(attention_prefill(q[:, :, ::-1], k[:, :, ::-1], v[:, :, ::-1], cu_seqlens_q=cu))
    assert_close("attention", reverse, reference(*wide(*copies), cu_seqlens_q=starts([20, 30]))[:, :, ::-1])


def test_one_key_head_broadcast(backend: Any, rng: np.random.Generator) -> None:
    """A broadcast view has stride 0; it is read, not copied, and never past its end."""
    q, k, v = dense(rng, 2, 20, 2, 1, 64, np.float16)
    views = [np.broadcast_to(a[:1], a.shape) for a in (k, v)]
    if backend.name == "cuda":
        import cupy

        views = [cupy.broadcast_to(backend.put(a[:1]), a.shape) for a in (k, v)]
    out = attention_prefill(backend.put(q), *views)
    want = reference(*wide(q, np.repeat(k[:1], 2, 0), np.repeat(v[:1], 2, 0)))
    assert_close("attention", out, want)


@pytest.mark.parametrize(("shape", "batch"), [((0, 5, 2, 64), 0), ((2, 0, 2, 64), 2)])
def test_nothing_to_do(backend: Any, shape: tuple[int, ...], batch: int) -> None:
    q, kv = np.zeros(shape, np.float16), np.zeros((batch, 5, 1, 64), np.float16)
    out, lse = attention_prefill(*map(backend.put, (q, kv, kv)), return_lse=True)
    assert out.shape == shape
    assert lse.shape == shape[:-1]


def test_empty_packed_batch(backend: Any) -> None:
    q = backend.put(np.zeros((0, 2, 64), np.float16))
    k = backend.put(np.zeros((0, 1, 64), np.float16))
    for cu in (np.zeros(1, np.int32), np.zeros(3, np.int32)):
        assert attention_prefill(q, k, k, cu_seqlens_q=backend.put(cu)).shape == (0, 2, 64)


@ON_GPU
def test_many_heads(backend: Any, rng: np.random.Generator) -> None:
    """Batch times heads beyond 65535."""
    q, k, v = dense(rng, 70000, 1, 2, 1, 16, np.float16, 2)
    check_dense(backend, q, k, v)


def test_numpy_without_emulation_runs_the_reference(rng: np.random.Generator) -> None:
    q, k, v = dense(rng, 1, 20, 2, 1, 24, np.float32)
    np.testing.assert_array_equal(attention_prefill(q, k, v), reference(q, k, v))


def zeros(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.zeros(shape, dtype)


I32, BF16 = np.int32, HALVES[1]
DENSE = {"q": zeros(1, 4, 2, 64), "k": zeros(1, 4, 1, 64), "v": zeros(1, 4, 1, 64)}
PACKED = {"q": zeros(4, 2, 64), "k": zeros(4, 1, 64), "v": zeros(4, 1, 64), "cu_seqlens_q": zeros(3, dtype=I32)}
TABLES = {"block_tables": zeros(2, 3, dtype=I32), "seq_lens": zeros(2, dtype=I32)}
PAGED = {**PACKED, "k": zeros(4, 1, 16, 64), "v": zeros(4, 1, 16, 64), **TABLES}


def of_dim(d: int) -> dict[str, np.ndarray]:
    return {name: zeros(*a.shape[:-1], d) for name, a in DENSE.items()}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({**DENSE, "v": zeros(1, 5, 1, 64)}, ValueError, "v has shape"),
        ({**DENSE, "k": zeros(2, 4, 1, 64)}, ValueError, "k has shape"),
        ({**DENSE, "k": zeros(1, 4, 1, 32)}, ValueError, "k has shape"),
        ({**PACKED, "cu_seqlens_q": None}, ValueError, "q has shape"),
        ({**DENSE, "k": zeros(1, 4, 3, 64), "v": zeros(1, 4, 3, 64)}, ValueError, "2 query heads are no multiple of 3"),
        (of_dim(40), ValueError, "head_dim 40 is not supported"),
        (of_dim(272), ValueError, "head_dim 272 is not supported"),
        (of_dim(0), ValueError, "head_dim 0 is not supported"),
        ({name: a.astype(np.float32) for name, a in DENSE.items()}, TypeError, "q has dtype float32"),
        ({**DENSE, "k": zeros(1, 4, 1, 64, dtype=BF16)}, TypeError, "k has dtype bfloat16"),
        ({**DENSE, "scale": 0.0}, ValueError, "scale must be positive"),
        ({**DENSE, "scale": math.nan}, ValueError, "scale must be positive"),
        ({**DENSE, "scale": 1e-320}, ValueError, "scale must be positive and finite in float32"),
        ({**DENSE, "scale": 1e-39}, ValueError, "scale must be positive and finite in float32"),
        ({**DENSE, "scale": 3e38}, ValueError, "scale must be positive and finite in float32"),
        ({**DENSE, "scale": 10**400}, ValueError, "scale must be positive and finite in float32"),
        ({**DENSE, "scale": "wide"}, TypeError, "scale must be a number, got 'wide'"),
        ({**DENSE, "causal": "no"}, TypeError, "causal must be True or False, got 'no'"),
        ({**DENSE, "return_lse": 1}, TypeError, "return_lse must be True or False, got 1"),
        ({**DENSE, "k": None}, TypeError, "k must be an array, got None"),
        ({**DENSE, "v": None}, TypeError, "v must be an array, got None"),
        ({**DENSE, "out": zeros(1, 4, 2, 32)}, ValueError, "out has shape"),
        ({**DENSE, "out": zeros(1, 2, 4, 64).swapaxes(1, 2)}, ValueError, "out must be C-contiguous"),
        ({**DENSE, **TABLES}, ValueError, "block_tables needs q packed"),
        ({**PACKED, "cu_seqlens_q": zeros(3, dtype=np.int64)}, TypeError, "cu_seqlens_q has dtype int64"),
        ({**PACKED, "cu_seqlens_q": zeros(0, dtype=I32)}, ValueError, "cu_seqlens_q is empty"),
        ({**PACKED, "cu_seqlens_k": zeros(2, dtype=I32)}, ValueError, "cu_seqlens_k has shape"),
        ({**PACKED, "seq_lens": zeros(2, dtype=I32)}, ValueError, "come together"),
        ({**PAGED, "cu_seqlens_k": zeros(3, dtype=I32)}, ValueError, "does not go with block_tables"),
        ({**PAGED, "k": zeros(4, 1, 24, 64), "v": zeros(4, 1, 24, 64)}, ValueError, "block_size 24"),
        ({**PAGED, "v": zeros(4, 1, 32, 64)}, ValueError, "v has shape"),
    ],
)  # fmt: skip
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with cukern.emulate(check=True), pytest.raises(error, match=message):
        attention_prefill(**arguments)


@pytest.mark.parametrize("argument", ["q", "k", "v"])
def test_out_is_apart_from_what_others_read(argument: str) -> None:
    """Another block may still read what one has written already. Its own queries a block reads first."""
    memory = zeros(2, 4, 2, 64)
    arrays = {name: np.ones((1, 4, 2, 64), np.float16) for name in ("q", "k", "v")} | {argument: memory[:1]}
    shifted = memory.reshape(-1)[64 : 64 + 512].reshape(1, 4, 2, 64)
    for out in (memory[:1], shifted)[argument == "q" :]:
        with cukern.emulate(), pytest.raises(ValueError, match=f"out shares memory with {argument}"):
            attention_prefill(**arrays, out=out)
    arrays["q"] = np.ones((1, 4, 2, 64), np.float16)
    with cukern.emulate():
        want = attention_prefill(**arrays)
        np.testing.assert_array_equal(attention_prefill(**arrays, out=arrays["q"]), want)


def test_out_is_apart_from_a_buffer_of_views(rng: np.random.Generator) -> None:
    qkv = normal(rng, (1, 4, 4, 64), np.float16)
    q, k, v = qkv[:, :, :2], qkv[:, :, 2:3], qkv[:, :, 3:]
    out = qkv.reshape(-1)[:512].reshape(q.shape)
    with cukern.emulate():
        with pytest.raises(ValueError, match="out shares memory with q"):
            attention_prefill(q, k, v, out=out)
        one = [a[:, :1] for a in (q, k, v)]  # a single token: no view goes around the others
        want = attention_prefill(*one)
        np.testing.assert_array_equal(attention_prefill(*one, out=one[0]), want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_q": np.array([1, 2, 4], I32)}, "cu_seqlens_q must start at 0"),
        ({"cu_seqlens_q": np.array([0, 3, 2], I32)}, "cu_seqlens_q must start at 0"),
        ({"cu_seqlens_q": np.array([0, 3, 5], I32)}, "cu_seqlens_q must start at 0"),
        ({"seq_lens": np.array([1, 49], I32)}, r"seq_lens\[1\] is 49"),
        ({"seq_lens": np.array([-1, 4], I32)}, r"seq_lens\[0\] is -1"),
        ({"block_tables": np.array([[0, 1, 9], [0, 1, 5]], I32)}, r"block_tables\[1\] names a block outside"),
    ],
)
def test_wrong_values_on_the_host(change: dict[str, np.ndarray], message: str) -> None:
    index = {
        "cu_seqlens_q": np.array([0, 2, 4], I32),
        "block_tables": np.array([[0, 1, 9], [0, 1, 2]], I32),
        "seq_lens": np.array([20, 48], I32),
    }
    q, cache = zeros(4, 2, 64), zeros(4, 1, 16, 64)
    attention_prefill(q, cache, cache, **index)
    with pytest.raises(ValueError, match=message):
        attention_prefill(q, cache, cache, **{**index, **change})


def test_variant_choice() -> None:
    """Small tiles where two of them fit an SM; tall ones for a few rows on the pages of a long context."""
    for rows in (128, 16384):
        for paged in (False, True):
            assert select(64, rows, 16, paged, 8, 100 << 10) == Variant(4, 2)
            assert select(128, rows, 16, paged, 8, 100 << 10) == Variant(8, 2)
            assert select(256, rows, 16, paged, 132, 228 << 10) == Variant(8, 1)
        for per_sm in (164 << 10, 228 << 10):
            assert select(128, rows, 16, False, 132, per_sm) == Variant(4, 2)
            assert select(128, rows, 16, True, 132, per_sm) == (Variant(8, 2) if rows == 128 else Variant(4, 2))
    for d in range(16, 257, 16):
        for variant in candidates(d):
            assert variant.shared_mem(d) + 1024 <= 99 << 10
    assert len(set(kernel_variants())) == len(kernel_variants())
