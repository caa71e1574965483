"""Decode attention: values against float64, the bits of prefill at every split, arguments."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from paging import UNUSED, Paged, bits, normal, random_pages, starts

import cukern
from cukern.ops.attention_decode import (
    _attention_decode_blocks,
    _attention_decode_splits,
    attention_decode,
    kernel_variants,
    select_blocks,
    select_splits,
    shared_bytes,
)
from cukern.ops.attention_prefill import Variant, _attention_prefill_variant, attention_prefill
from cukern.reference.attention_decode import attention_decode as reference
from cukern.testing import assert_close

HALVES = [np.float16, ml_dtypes.bfloat16]
ON_GPU = pytest.mark.parametrize("backend", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
BOUNDARIES = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300]


def arguments(backend: Any, q: np.ndarray, cache: Paged) -> list[Any]:
    return [backend.put(a) for a in (q, cache.k_cache, cache.v_cache, cache.tables, cache.seq_lens)]


def oracle(q: np.ndarray, cache: Paged, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    halves = [a.astype(np.float64) for a in (q, cache.k_cache, cache.v_cache)]
    return reference(*halves, cache.tables, cache.seq_lens, return_lse=True, **options)


def check(backend: Any, q: np.ndarray, cache: Paged, splits: int | None = None, **options: Any) -> np.ndarray:
    args = arguments(backend, q, cache)
    if splits is None:
        out, lse = attention_decode(*args, return_lse=True, **options)
    else:
        out, lse = _attention_decode_splits(splits, *args, return_lse=True, **options)
    want, want_lse = oracle(q, cache, **options)
    assert out.dtype == q.dtype
    assert_close("attention", out, want)
    assert_close("attention", lse, want_lse)
    return backend.get(out)


# ---- values


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("seqs", "context", "hq", "hkv"), [(1, 32, 2, 1), (1, 128, 16, 8), (2, 64, 4, 2), (4, 128, 16, 8), (1, 300, 4, 2)]
)
def test_contexts(
    backend: Any, rng: np.random.Generator, seqs: int, context: int, hq: int, hkv: int, dtype: Any
) -> None:
    cache = random_pages(rng, [context] * seqs, hkv, 128, 16, dtype)
    check(backend, normal(rng, (seqs, hq, 128), dtype), cache)


@pytest.mark.parametrize("splits", [None, 1, 2, 8])
def test_ragged_lengths(backend: Any, rng: np.random.Generator, splits: int | None) -> None:
    """Splits without keys, more splits than chunks, an empty sequence; the workspace starts as NaN."""
    cache = random_pages(rng, [1, 5, 0, 300, 129], 2, 128, 16, np.float16)
    out = check(backend, normal(rng, (5, 4, 128), np.float16), cache, splits)
    assert not out[2].any()


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_block_size(backend: Any, rng: np.random.Generator, block_size: int) -> None:
    cache = random_pages(rng, [270, 31, 128], 2, 128, block_size, np.float16)
    check(backend, normal(rng, (3, 4, 128), np.float16), cache)


@pytest.mark.parametrize(("hq", "hkv"), [(2, 2), (4, 2), (5, 1), (14, 2), (8, 1), (16, 1), (40, 2)])
def test_query_heads_per_key_head(backend: Any, rng: np.random.Generator, hq: int, hkv: int) -> None:
    cache = random_pages(rng, [70, 200], hkv, 64, 16, np.float16)
    check(backend, normal(rng, (2, hq, 64), np.float16), cache)


@pytest.mark.parametrize(
    ("d", "dtype"),
    [
        (16, HALVES[0]),
        (48, HALVES[1]),
        (80, HALVES[0]),
        (144, HALVES[0]),
        (192, HALVES[0]),
        (256, HALVES[1]),
    ],
)
def test_head_dim(backend: Any, rng: np.random.Generator, d: int, dtype: Any) -> None:
    cache = random_pages(rng, [200, 65], 1, d, 16, dtype)
    q = normal(rng, (2, 2, d), dtype)
    whole = check(backend, q, cache, 1)
    np.testing.assert_array_equal(bits(check(backend, q, cache, 2)), bits(whole))


@ON_GPU
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("d", range(16, 257, 16))
def test_every_head_dim(backend: Any, rng: np.random.Generator, d: int, dtype: Any) -> None:
    cache = random_pages(rng, [1000, 1, 128, 577], 2, d, 32, dtype)
    q = normal(rng, (4, 6, d), dtype)
    whole = check(backend, q, cache, 1)
    np.testing.assert_array_equal(bits(check(backend, q, cache, 3)), bits(whole))


@ON_GPU
@pytest.mark.parametrize("dtype", HALVES)
def test_long_context(backend: Any, rng: np.random.Generator, dtype: Any) -> None:
    """More chunks than the merge takes in one round, with and without a remainder."""
    cache = random_pages(rng, [32768, 16384, 16385, 20000], 2, 128, 256, dtype)
    q = normal(rng, (4, 4, 128), dtype)
    whole = check(backend, q, cache, 1)
    for splits in (7, 66, 1000):
        np.testing.assert_array_equal(bits(check(backend, q, cache, splits)), bits(whole))


def test_merge_of_many_chunks(backend: Any, rng: np.random.Generator) -> None:
    """130 chunks: two rounds of the merge kernel."""
    cache = random_pages(rng, [130 * 128 - 5], 1, 16, 256, np.float16)
    q = normal(rng, (1, 1, 16), np.float16, 4.0)
    whole = check(backend, q, cache, 1)
    np.testing.assert_array_equal(bits(check(backend, q, cache, 130)), bits(whole))


@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_scale(backend: Any, rng: np.random.Generator, scale: float) -> None:
    cache = random_pages(rng, [140], 1, 64, 16, np.float16)
    check(backend, normal(rng, (1, 2, 64), np.float16), cache, scale=scale)


# ---- the same bits


@pytest.mark.parametrize("dtype", HALVES)
def test_bits_of_prefill(backend: Any, rng: np.random.Generator, dtype: Any) -> None:
    """The last token decoded is the last row of the prefill, around every boundary, at every split.

    Negative control: a prefill with chunks of another length differs as soon as a sequence has two of them.
    """
    cache = random_pages(rng, BOUNDARIES, 1, 128, 16, dtype)
    q = normal(rng, (sum(BOUNDARIES), 2, 128), dtype)
    last = starts(BOUNDARIES)[1:] - 1
    caches = [backend.put(a) for a in (cache.k_cache, cache.v_cache)]
    pages = {"block_tables": backend.put(cache.tables), "seq_lens": backend.put(cache.seq_lens)}
    index = {"cu_seqlens_q": backend.put(starts(BOUNDARIES)), **pages}
    out, lse = attention_prefill(backend.put(q), *caches, return_lse=True, **index)
    want, want_lse = backend.get(out)[last], backend.get(lse)[last]
    for splits in (1, 2, 3):
        got, got_lse = _attention_decode_splits(splits, backend.put(q[last]), *caches, *pages.values(), return_lse=True)
        np.testing.assert_array_equal(bits(backend.get(got)), bits(want), err_msg=f"{splits} splits")
        np.testing.assert_array_equal(bits(backend.get(got_lse)), bits(want_lse))
    other = backend.get(
        _attention_prefill_variant(Variant(4, 1, chunk=64), backend.put(q[last]), *caches,
                                   cu_seqlens_q=backend.put(starts([1] * len(last))), **pages)
    )  # fmt: skip
    long = cache.seq_lens > 64
    np.testing.assert_array_equal(bits(other[~long]), bits(want[~long]))
    assert (bits(other[long]) != bits(want[long])).any(axis=(1, 2)).sum() >= 4


def test_neighbours_do_not_change_bits(backend: Any, rng: np.random.Generator) -> None:
    """A sequence alone, and at two places of a batch with longer and shorter ones."""
    lengths = [190, 3, 300, 190, 0]
    cache = random_pages(rng, lengths, 2, 128, 32, np.float16)
    q = normal(rng, (5, 4, 128), np.float16)
    batched = backend.get(attention_decode(*arguments(backend, q, cache)))
    for b in range(5):
        alone = [q[b : b + 1], cache.k_cache, cache.v_cache, cache.tables[b : b + 1], cache.seq_lens[b : b + 1]]
        out = backend.get(attention_decode(*map(backend.put, alone)))
        np.testing.assert_array_equal(bits(out[0]), bits(batched[b]), err_msg=f"sequence {b}")


@pytest.mark.parametrize("longest", [300, 700])
def test_sequences_of_a_block(backend: Any, rng: np.random.Generator, longest: int) -> None:
    """Several sequences to a block, in another order than in the batch, since some lengths differ."""
    lengths = [190, 0, 1, longest, 127, 128, 129, 64, 257, 190]
    cache = random_pages(rng, lengths, 2, 32, 16, np.float16)
    q = normal(rng, (len(lengths), 6, 32), np.float16)
    args = arguments(backend, q, cache)
    want, want_lse = map(backend.get, _attention_decode_blocks(20, *args, return_lse=True))
    assert_close("attention", want, oracle(q, cache)[0])
    for blocks in (1, 2, 4, 7):
        got, lse = _attention_decode_blocks(blocks, *args, return_lse=True)
        np.testing.assert_array_equal(bits(backend.get(got)), bits(want), err_msg=f"{blocks} blocks")
        np.testing.assert_array_equal(bits(backend.get(lse)), bits(want_lse), err_msg=f"{blocks} blocks")
        bounded, lse = _attention_decode_blocks(blocks, *args, return_lse=True, max_seq_len=256)
        long = np.asarray(lengths) > 256
        assert np.isnan(backend.get(bounded)[long]).all()
        assert np.isnan(backend.get(lse)[long]).all()
        np.testing.assert_array_equal(bits(backend.get(bounded)[~long]), bits(want[~long]))


def test_thread_order_does_not_change_bits(rng: np.random.Generator) -> None:
    cache = random_pages(rng, [200], 1, 64, 16, np.float16)
    args = (normal(rng, (1, 2, 64), np.float16), cache.k_cache, cache.v_cache, cache.tables, cache.seq_lens)
    twice = [np.concatenate([args[i]] * 2) for i in (0, 3, 4)]  # a block of two sequences
    results = []
    for order in ("up", "down", "random"):
        with cukern.emulate(check=True, order=order):
            results += [_attention_decode_splits(splits, *args) for splits in (1, 2)]
            results.append(_attention_decode_blocks(1, twice[0], *args[1:3], *twice[1:])[1:])
    for result in results[1:]:
        np.testing.assert_array_equal(bits(result), bits(results[0]))


@ON_GPU
def test_graph_replay_follows_the_arrays(backend: Any, rng: np.random.Generator) -> None:
    """Captured once; lengths, tables and queries change between replays."""
    import cupy

    cache = random_pages(rng, [2000] * 4, 2, 128, 16, np.float16)
    q, k, v, tables, lengths = arguments(backend, normal(rng, (4, 4, 128), np.float16), cache)
    out = cupy.empty_like(q)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        attention_decode(q, k, v, tables, lengths, out=out)
        stream.synchronize()
        stream.begin_capture()
        attention_decode(q, k, v, tables, lengths, out=out)
        graph = stream.end_capture()
        for i in range(20):
            new = rng.integers(0, 2001, 4).astype(np.int32)
            lengths.set(new)
            tables.set(cache.tables[rng.permutation(4)])
            q.set(normal(rng, (4, 4, 128), np.float16))
            out.fill(np.nan)
            graph.launch(stream)
            stream.synchronize()
            np.testing.assert_array_equal(
                bits(out.get()), bits(attention_decode(q, k, v, tables, lengths).get()), err_msg=f"replay {i}: {new}"
            )


# ---- keys fetched while the kernel ahead runs

ENDS = [1, 16, 17, 32, 33, 63, 64, 65, 96, 97, 128, 129, 160, 161, 200, 257, 513, 0]


@pytest.mark.parametrize("splits", [None, 1, 3])
def test_static_cache(backend: Any, rng: np.random.Generator, splits: int | None) -> None:
    """A promise about what is ready changes the order of copies, not the bits."""
    cache = random_pages(rng, [1, 33, 0, 300, 129, 128], 2, 128, 16, np.float16)
    q = normal(rng, (6, 4, 128), np.float16)
    want = check(backend, q, cache, splits)
    np.testing.assert_array_equal(bits(check(backend, q, cache, splits, static_cache=True)), bits(want))


@ON_GPU
@pytest.mark.parametrize("d", [64, 128, 256])
def test_last_keys_come_from_the_kernel_ahead(backend: Any, rng: np.random.Generator, d: int) -> None:
    """Under `static_cache` the last key and value of each sequence, and q, are those that the kernel ahead writes while
    this one has started; it waits itself for a slow product, so that the cache holds those of the round before."""
    import cupy

    from cukern.ops import linear, qk_norm_rope_cache, rope_table

    cache = random_pages(rng, ENDS, 2, d, 16, np.float16)
    tables, lengths = backend.put(cache.tables), backend.put(cache.seq_lens)
    last = np.maximum(cache.seq_lens.astype(np.int64) - 1, 0)
    slots = cache.tables[np.arange(len(last)), last // 16].astype(np.int64) * 16 + last % 16
    slots[cache.seq_lens == 0] = -1
    targets = backend.put(slots)
    given = [backend.put(a) for a in (np.ones(d, np.float32), np.ones(d, np.float32), last, rope_table(d, 600, 1e6))]
    weight = backend.put(normal(rng, (8 * d, 8192), np.float16, 8192**-0.5))
    rounds = [backend.put(normal(rng, (len(ENDS), 8192), np.float16)) for _ in range(4)]

    def run(wait: bool) -> list[np.ndarray]:
        k, v = backend.put(cache.k_cache), backend.put(cache.v_cache)
        results = []
        for i in range(12):
            qkv = linear(rounds[i % 4], weight, static_weight=True)
            q = qk_norm_rope_cache(qkv, *given, k, v, targets, num_heads=4, num_kv_heads=2)
            if wait:
                cupy.cuda.runtime.deviceSynchronize()
            results.append(attention_decode(q, k, v, tables, lengths, static_cache=not wait))
        return [bits(backend.get(r)) for r in results]

    want = run(wait=True)
    assert (want[0][:-1] != want[1][:-1]).any(axis=(1, 2)).all()
    for i, (got, wanted) in enumerate(zip(run(wait=False), want)):
        np.testing.assert_array_equal(got, wanted, err_msg=f"round {i}")


# ---- arguments


def test_max_seq_len(backend: Any, rng: np.random.Generator) -> None:
    """A promise about the lengths changes the launch, not the bits; a sequence that breaks it is NaN."""
    cache = random_pages(rng, [140, 20, 300], 1, 64, 16, np.float16)
    args = arguments(backend, normal(rng, (3, 2, 64), np.float16), cache)
    want = backend.get(attention_decode(*args))
    for bound in (300, 301, 10**6):
        np.testing.assert_array_equal(bits(backend.get(attention_decode(*args, max_seq_len=bound))), bits(want))
    for splits in (1, 3):
        out, lse = _attention_decode_splits(splits, *args, max_seq_len=299, return_lse=True)
        assert np.isnan(backend.get(out)[2]).all()
        assert np.isnan(backend.get(lse)[2]).all()
        np.testing.assert_array_equal(bits(backend.get(out)[:2]), bits(want[:2]))


def test_block_id_outside_the_cache_gives_nan(backend: Any, rng: np.random.Generator) -> None:
    cache = random_pages(rng, [200, 200], 1, 64, 16, np.float16)
    q, k, v, tables, lengths = arguments(backend, normal(rng, (2, 2, 64), np.float16), cache)
    want = backend.get(attention_decode(q, k, v, tables, lengths))
    for wrong in (-1, len(cache.k_cache), UNUSED):
        changed = cache.tables.copy()
        changed[0, 9] = wrong
        for splits in (1, 2):
            out = backend.get(_attention_decode_splits(splits, q, k, v, backend.put(changed), lengths))
            assert np.isnan(out[0]).all()
            np.testing.assert_array_equal(bits(out[1]), bits(want[1]))


def test_length_at_and_beyond_the_table(backend: Any, rng: np.random.Generator) -> None:
    cache = random_pages(rng, [48], 1, 64, 16, np.float16)
    q, k, v, tables, lengths = arguments(backend, normal(rng, (1, 2, 64), np.float16), cache)
    tables = backend.put(cache.tables[:, :3])
    full = backend.get(attention_decode(q, k, v, tables, lengths))
    for length in (49, 2**31 - 1):
        over = attention_decode(q, k, v, tables, backend.put(np.array([length], np.int32)))
        np.testing.assert_array_equal(bits(backend.get(over)), bits(full))
    below = attention_decode(q, k, v, tables, backend.put(np.array([-3], np.int32)))
    assert not backend.get(below).any()


def test_views(backend: Any, rng: np.random.Generator) -> None:
    """q inside a packed qkv row, caches as one layer of a larger array."""
    cache = random_pages(rng, [40, 77], 1, 64, 16, np.float16)
    plain = normal(rng, (2, 2, 64), np.float16)
    q, k, v, tables, lengths = arguments(backend, plain, cache)
    want = backend.get(attention_decode(q, k, v, tables, lengths))
    row = backend.put(np.zeros((2, 4 * 64), np.float16))
    row[:, :128] = q.reshape(2, 128)
    both = backend.put(np.stack([cache.k_cache, cache.v_cache], axis=1))
    out = attention_decode(row[:, :128].reshape(2, 2, 64), both[:, 0], both[:, 1], tables, lengths)
    np.testing.assert_array_equal(bits(backend.get(out)), bits(want))
    target = backend.put(np.full(plain.shape, np.nan, np.float16))
    assert attention_decode(q, k, v, tables, lengths, out=target) is target
    np.testing.assert_array_equal(bits(backend.get(target)), bits(want))


def test_nothing_to_do(backend: Any) -> None:
    cache = backend.put(np.zeros((3, 1, 16, 64), np.float16))
    empty = [backend.put(np.zeros(s, d)) for s, d in (((0, 2, 64), np.float16), ((0, 4), np.int32), ((0,), np.int32))]
    out, lse = attention_decode(empty[0], cache, cache, *empty[1:], return_lse=True)
    assert out.shape == (0, 2, 64)
    assert lse.shape == (0, 2)


def test_table_without_columns(backend: Any, rng: np.random.Generator) -> None:
    cache = backend.put(np.full((3, 1, 16, 64), np.nan, np.float16))
    q = backend.put(normal(rng, (2, 2, 64), np.float16))
    tables, lengths = backend.put(np.zeros((2, 0), np.int32)), backend.put(np.array([0, 5], np.int32))
    assert not backend.get(attention_decode(q, cache, cache, tables, lengths)).any()


@ON_GPU
def test_many_sequences(backend: Any, rng: np.random.Generator) -> None:
    """Batch times heads beyond 65535, a cache of more than 2^31 elements would share the same 64-bit offsets."""
    cache = random_pages(rng, [2] * 40000, 2, 16, 16, np.float16)
    check(backend, normal(rng, (40000, 4, 16), np.float16), cache)


@ON_GPU
def test_cache_beyond_two_to_the_31_elements(backend: Any, rng: np.random.Generator) -> None:
    import cupy

    blocks = 2**31 // (8 * 256 * 128) + 5
    k, v = (cupy.full((blocks, 8, 256, 128), cupy.nan, np.float16) for _ in "kv")
    small = random_pages(rng, [300], 8, 128, 256, np.float16)
    tables = np.array([[blocks - 1, blocks - 2]], np.int32)
    for big, part in ((k, small.k_cache), (v, small.v_cache)):
        for column in (0, 1):
            big[int(tables[0, column])] = backend.put(part[small.tables[0, column]])
    q = normal(rng, (1, 16, 128), np.float16)
    out = attention_decode(backend.put(q), k, v, backend.put(tables), backend.put(small.seq_lens))
    want = attention_decode(*arguments(backend, q, small))
    np.testing.assert_array_equal(bits(backend.get(out)), bits(backend.get(want)))


def zeros(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": zeros(2, 2, 1, 64)}, ValueError, "q has shape"),
        ({"q": zeros(2, 3, 64)}, ValueError, "3 query heads are no multiple of 2"),
        ({"q": zeros(2, 2, 64, dtype=np.float32)}, TypeError, "k_cache has dtype"),
        ({"q": zeros(2, 2, 32)}, ValueError, "k_cache has shape"),
        ({"k_cache": zeros(4, 2, 16, 32)}, ValueError, "k_cache has shape"),
        ({"v_cache": zeros(4, 2, 32, 64)}, ValueError, "v_cache has shape"),
        ({"k_cache": zeros(4, 2, 48, 64), "v_cache": zeros(4, 2, 48, 64)}, ValueError, "block_size 48"),
        ({"v_cache": zeros(4, 2, 16, 64, dtype=HALVES[1])}, TypeError, "v_cache has dtype"),
        ({"block_tables": zeros(3, 4, dtype=np.int32)}, ValueError, "block_tables has shape"),
        ({"block_tables": zeros(2, 4, dtype=np.int64)}, TypeError, "block_tables has dtype"),
        ({"seq_lens": zeros(3, dtype=np.int32)}, ValueError, "seq_lens has shape"),
        ({"seq_lens": [1, 2]}, TypeError, "seq_lens must be a CuPy or NumPy array"),
        ({"scale": -1.0}, ValueError, "scale must be positive"),
        ({"max_seq_len": -1}, ValueError, "max_seq_len must be 0 or more"),
        ({"out": zeros(2, 2, 64, dtype=HALVES[1])}, TypeError, "out has dtype"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    good: dict[str, Any] = {
        "q": zeros(2, 2, 64),
        "k_cache": zeros(4, 2, 16, 64),
        "v_cache": zeros(4, 2, 16, 64),
        "block_tables": zeros(2, 4, dtype=np.int32),
        "seq_lens": zeros(2, dtype=np.int32),
    }
    with cukern.emulate(check=True), pytest.raises(error, match=message):
        attention_decode(**{**good, **change})


def test_wrong_values_on_the_host() -> None:
    q, cache, tables = zeros(1, 2, 64), zeros(4, 2, 16, 64), np.array([[0, 3, 7]], np.int32)
    attention_decode(q, cache, cache, tables, np.array([32], np.int32))
    with pytest.raises(ValueError, match=r"block_tables\[0\] names a block outside"):
        attention_decode(q, cache, cache, tables, np.array([33], np.int32))
    with pytest.raises(ValueError, match=r"seq_lens\[0\] is 49"):
        attention_decode(q, cache, cache, tables, np.array([49], np.int32))


def test_launch_rule() -> None:
    """At least one block an item, at most one a chunk; many items are shared out to what the GPU holds."""
    assert select_splits(8, 1, 264) == 1
    assert select_splits(8, 256, 264) == 33
    assert select_splits(8, 10, 264) == 10
    assert select_splits(512, 256, 264) == 1
    assert select_blocks(512, 264) == 264
    assert select_blocks(1 << 20, 264) == 264
    assert select_blocks(7, 264) == 7
    assert all(shared_bytes(d, group) <= 99 << 10 for d in range(16, 257, 16) for group in (1, 2, 4, 8, 16))
    assert len(set(kernel_variants())) == len(kernel_variants())


def test_out_in_the_memory_of_an_input(backend: Any, rng: np.random.Generator) -> None:
    """Refused, but for all of q; and a `max_seq_len` that is no whole number."""
    cache = random_pages(rng, [40, 17], 1, 16, 16, np.float16)
    q = normal(rng, (3, 2, 16), np.float16)
    _, k, v, tables, lens = arguments(backend, q, cache)
    rows = backend.put(q)
    want = backend.get(attention_decode(rows[1:], k, v, tables, lens))
    for name, out in (("q", rows[:-1]), ("k_cache", k.reshape(-1)[:64].reshape(2, 2, 16))):
        with pytest.raises(ValueError, match=f"out shares memory with {name}"):
            attention_decode(rows[1:], k, v, tables, lens, out=out)
    with pytest.raises(TypeError, match=r"max_seq_len must be a whole number, got 1\.5"):
        attention_decode(rows[1:], k, v, tables, lens, max_seq_len=1.5)  # type: ignore[arg-type]
    for flag in ("return_lse", "static_cache"):
        with pytest.raises(TypeError, match=f"{flag} must be True or False, got 'no'"):
            attention_decode(rows[1:], k, v, tables, lens, **{flag: "no"})  # type: ignore[arg-type]
    mine = backend.put(q[1:].copy())
    attention_decode(mine, k, v, tables, lens, out=mine)
    np.testing.assert_array_equal(bits(backend.get(mine)), bits(want))
