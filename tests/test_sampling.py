"""argmax, sample and top_logprobs: against the oracle, an independent filter, and the statistics of the draws."""

from __future__ import annotations

import importlib
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cukern
from cukern import ops, reference
from cukern.reference.sampling import exponential, philox, unpack

HALF, BF16, FLOAT = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
DTYPES = pytest.mark.parametrize("dtype", [HALF, BF16, FLOAT], ids=lambda d: d.name)
VOCAB = 151936
INF, NAN = math.inf, math.nan


def logits_of(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype = FLOAT, scale: float = 3.0) -> Any:
    return (rng.standard_normal(shape) * scale).astype(dtype)


def draw(backend: Any, logits: np.ndarray, **parameters: Any) -> np.ndarray:
    """sample at the backend; arrays among the parameters are put there too."""
    put = {k: backend.put(v) if isinstance(v, np.ndarray) else v for k, v in parameters.items()}
    tokens = backend.get(ops.sample(backend.put(logits), **put))
    assert tokens.dtype == np.int32
    assert tokens.shape == (len(logits),)
    assert ((tokens >= 0) & (tokens < logits.shape[1])).all()
    return tokens


def kept_tokens(x: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The filters one after the other as transformers' logits processors apply them, on plain Python lists."""
    scores = {i: float(v) / temperature for i, v in enumerate(x)}
    if 0 < top_k < len(scores):
        kth = sorted(scores.values(), reverse=True)[top_k - 1]
        scores = {i: v for i, v in scores.items() if v >= kth}
    largest = max(scores.values())
    weights = {i: math.exp(v - largest) for i, v in scores.items()}
    total = math.fsum(weights.values())
    if top_p < 1:
        mass, last = 0.0, None
        for value in sorted(weights.values(), reverse=True):
            if mass >= top_p * total and value != last:
                weights = {i: w for i, w in weights.items() if w > value}
                break
            mass, last = mass + value, value
    return {i for i, w in weights.items() if w >= min_p}


# ---- random numbers

KNOWN = [  # from the known-answer file of Random123: counter, key, words
    ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        (0xA4093822, 0x299F31D0),
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]

RANDOM = """
#include "common/random.cuh"
extern "C" __global__ void words(u64 seed, i64 position, int groups, u32 *out) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  if (i >= groups) return;
  const uint4 w = vocab_words(seed, position, i);
  out[4 * i] = w.x, out[4 * i + 1] = w.y, out[4 * i + 2] = w.z, out[4 * i + 3] = w.w;
}
extern "C" __global__ void exponentials(const u32 *words, float *out, int n) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  if (i < n) out[i] = exponential(words[i]);
}
"""


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_known_answers(counter: list[int], key: tuple[int, int], words: list[int]) -> None:
    assert philox(np.array([counter], np.uint32), key)[0].tolist() == words


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (2**64 - 1, 2**40 + 3), (0x123456789ABCDEF, -5)])
def test_philox_of_the_kernel(backend: Any, seed: int, position: int) -> None:
    out = backend.put(np.zeros(4 * 50, np.uint32))
    cukern.Kernel(RANDOM, "words")(2, 32, (seed, position, 50, out))
    counter = np.zeros((50, 4), np.uint32)
    counter[:, 0] = np.arange(50)
    counter[:, 1:3] = np.array([position & 0xFFFFFFFF, position >> 32 & 0xFFFFFFFF], np.uint32)
    np.testing.assert_array_equal(backend.get(out), philox(counter, (seed & 0xFFFFFFFF, seed >> 32)).ravel())


def test_exponential_of_the_kernel(backend: Any, rng: np.random.Generator) -> None:
    edges = [0, 1, 2, 3, 2**28 - 1, 2**28, 2**28 + 1, 2**31, 2**32 - 2**8, 2**32 - 2, 2**32 - 1]
    words = np.concatenate([edges, 2 ** rng.uniform(0, 32, 500), rng.integers(0, 2**32, 500)]).astype(np.uint32)
    out = backend.put(np.full(len(words), np.nan, np.float32))
    cukern.Kernel(RANDOM, "exponentials")((len(words) + 31) // 32, 32, (backend.put(words), out, len(words)))
    want = -np.log1p(-np.minimum((words + 0.5) * 2.0**-32, 1 - 2.0**-24))
    got = backend.get(out)
    assert np.isfinite(got).all()
    bulk = words < 2**32 - 2**12  # above, v itself has few bits left
    np.testing.assert_allclose(got[bulk], want[bulk], rtol=1e-5)
    np.testing.assert_allclose(got[~bulk], want[~bulk], rtol=0.05)
    assert got.min() >= 2.0**-33
    assert got.max() < 16.7


def test_noise_is_uniform() -> None:
    values = np.sort(np.concatenate([exponential(7, position, np.arange(10000)) for position in range(10)]))
    distance = np.abs(-np.expm1(-values) - (np.arange(len(values)) + 0.5) / len(values)).max()
    assert distance < 1.95 / math.sqrt(len(values))  # Kolmogorov-Smirnov, p = 0.001
    neighbours = exponential(7, 0, np.arange(10000))
    assert abs(np.corrcoef(neighbours[:-1], neighbours[1:])[0, 1]) < 0.04


# ---- exact selection

SEARCH = """
#include "common/select.cuh"
extern "C" __global__ void __launch_bounds__(SELECT_THREADS)
find(const float *x, int n, u64 target, int by_mass, u32 low, u32 high, u32 *out) {
  __shared__ SelectMemory memory;
  const RowSource<float> source{x, n};
  const u32 key = by_mass ? search(memory, source, Mass{0.f, 1.f}, target, low, high)
                          : search(memory, source, Count(), target, low, high);
  if (threadIdx.x == 0) out[0] = key;
}
"""


def order_keys(x: np.ndarray) -> np.ndarray:
    bits = (x + np.float32(0)).view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | np.uint32(2**31))


@pytest.mark.parametrize("by_mass", [0, 1])
@pytest.mark.parametrize("n", [1, 500, 3001, 20000])
def test_search(backend: Any, rng: np.random.Generator, n: int, by_mass: int) -> None:
    if by_mass:  # whole numbers: powers of two in units of 2^-40, exact here and there
        x = -np.minimum(rng.exponential(6, n), 45).astype(int).astype(np.float32)
        weight = np.where(x >= -40, 2.0 ** (40 + x), 0).astype(np.int64)
    else:
        x = (rng.choice([-1, 1], n) * 10.0 ** rng.uniform(-40, 38, n)).astype(np.float32)
        x[: n // 3] = x[0]
        weight = np.ones(n, np.int64)
    keys = order_keys(x)
    order = np.argsort(keys)[::-1]
    sums = np.cumsum(weight[order])
    find, out = cukern.Kernel(SEARCH, "find"), backend.put(np.zeros(1, np.uint32))
    for target in {
        1,
        int(sums[0]),
        int(sums[0]) + 1,
        int(sums[-1]),
        *(int(t) for t in rng.integers(1, sums[-1] + 1, 8)),
    }:
        find(1, 512, (backend.put(x), n, target, by_mass, 0, int(keys.max()), out))
        crossing = np.searchsorted(sums, target)
        assert backend.get(out)[0] == (keys[order[crossing]] if crossing < n else 0), target
    if n > 1:
        low, high = (int(k) for k in np.sort(keys)[[n // 4, n - 1 - n // 10]])
        inside = np.sort(keys[(keys >= low) & (keys <= high)])[::-1]
        if not by_mass:
            find(1, 512, (backend.put(x), n, len(inside) // 2 + 1, 0, low, high, out))
            assert backend.get(out)[0] == inside[len(inside) // 2]
        find(1, 512, (backend.put(x), n, 2**62, by_mass, low, high, out))  # not to be reached
        assert backend.get(out)[0] == low


KTH = """
#include "common/select.cuh"
extern "C" __global__ void __launch_bounds__(SELECT_THREADS) kth(const u32 *keys, int n, int k, u32 *out) {
  __shared__ SelectMemory memory;
  out[threadIdx.x] = kth_largest(memory, (int)threadIdx.x < n ? keys[threadIdx.x] : 0xffffffffu, n, k);
}
"""


@pytest.mark.parametrize("n", [1, 31, 149, 512])
def test_kth_largest(backend: Any, rng: np.random.Generator, n: int) -> None:
    kth, out = cukern.Kernel(KTH, "kth"), backend.put(np.zeros(512, np.uint32))
    for most in (2**32 - 1, 7):  # without and with ties
        keys = rng.integers(0, most, n, np.uint32)
        for k in {1, 2, 20, n // 2, n} & set(range(1, n + 1)):
            kth(1, 512, (backend.put(keys), n, k, out))
            assert (backend.get(out) == np.sort(keys)[n - k]).all(), k


# ---- arg-max


@DTYPES
@pytest.mark.parametrize("columns", [1, 5, 1024, 1027, 9000, VOCAB])
def test_argmax(backend: Any, rng: np.random.Generator, dtype: np.dtype, columns: int) -> None:
    x = logits_of(rng, (3, columns), dtype)
    got = backend.get(ops.argmax(backend.put(x)))
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, x.astype(np.float32).argmax(1))
    parts = backend.get(ops.argmax(backend.put(x), parts=True))
    assert parts.dtype == np.uint64
    assert parts.shape[0] == 3
    np.testing.assert_array_equal(unpack(parts.max(1)), got)
    np.testing.assert_array_equal(unpack(reference.argmax(x, parts=True).max(1)), got)


def test_argmax_parts_is_a_flag(backend: Any) -> None:
    with pytest.raises(TypeError, match="parts must be True or False"):
        ops.argmax(backend.put(np.zeros((1, 4), np.float32)), parts="no")


@pytest.mark.parametrize("columns", [9, 3000, 20000])
def test_argmax_ties_and_special_values(backend: Any, columns: int) -> None:
    x = np.full((9, columns), -1.0, np.float32)
    x[1] = -np.inf
    x[2, [3, columns - 1]] = 5
    x[3, [4, columns - 2]] = np.nan
    x[3, 1] = np.inf
    x[4, [columns // 2, columns - 1]] = np.inf
    x[5] = 0.0
    x[5, ::2] = -0.0
    x[6, columns - 1] = -0.5
    x[7] = np.nan
    x[8, -1] = -np.nan
    got = backend.get(ops.argmax(backend.put(x)))
    np.testing.assert_array_equal(got, x.argmax(1))
    np.testing.assert_array_equal(got, [0, 0, 3, 4, columns // 2, 0, columns - 1, 0, columns - 1])
    # Rows whose maximum is not finite are decided in the same way when sampling is asked for.
    special = [1, 3, 4, 7, 8]
    for parameters in ({}, {"top_k": 3}, {"top_p": 0.5, "min_p": 0.1}):
        np.testing.assert_array_equal(draw(backend, x[special], **parameters), got[special])


# ---- sampling against the oracle

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"top_k": 50},
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 1.5},
    {"min_p": 0.05},
    {"top_k": 7, "top_p": 0.8, "min_p": 0.2, "temperature": 2.0},
    {"top_p": 0.999, "min_p": 0.01},
    {"temperature": 50.0, "top_p": 0.7},
    {"top_k": 700, "temperature": 3.0},
]


@DTYPES
@pytest.mark.parametrize("columns", [1, 8, 1027, 5004])
def test_sample_equals_the_reference(backend: Any, rng: np.random.Generator, dtype: np.dtype, columns: int) -> None:
    rows = 6
    x = logits_of(rng, (rows, columns), dtype)
    seeds = rng.integers(0, 2**64, rows, np.uint64)
    positions = rng.integers(0, 2**41, rows)
    for setting in SETTINGS:
        got = draw(backend, x, seed=seeds, position=positions, **setting)
        np.testing.assert_array_equal(got, reference.sample(x, seed=seeds, position=positions, **setting), str(setting))


@pytest.mark.parametrize("setting", [*SETTINGS, {"top_k": 6000}, {"temperature": 100.0, "top_p": 0.9}], ids=str)
def test_sample_from_a_vocabulary(backend: Any, rng: np.random.Generator, setting: dict[str, Any]) -> None:
    x = logits_of(rng, (3, VOCAB))
    np.testing.assert_array_equal(
        draw(backend, x, seed=11, position=np.arange(3), **setting),
        reference.sample(x, seed=11, position=np.arange(3), **setting),
    )


@pytest.mark.parametrize("candidates", [1, 2, 31, 32, 33, 128, 129, 400])
def test_candidates_of_equal_weight(backend: Any, rng: np.random.Generator, candidates: int) -> None:
    """Ties lie at every edge. Few candidates are compared each with each, more are counted in bins."""
    rows, columns = 4, 40960
    x = np.full((rows, columns), -9.0, np.float32)
    for row in x:
        row[rng.choice(columns, candidates, replace=False)] = rng.integers(0, 7, candidates) / 4
    seeds = np.arange(rows)
    settings: list[dict[str, Any]] = [{"top_k": k} for k in (2, 20, 40, 200)]
    settings += [{"top_k": k, "top_p": p} for k in (40, 200) for p in (0.1, 0.5, 0.8)]
    settings += [{"top_p": 0.4}, {"top_k": 9, "min_p": 0.5}]
    for setting in settings:
        got = draw(backend, x, seed=seeds, position=candidates, temperature=0.7, **setting)
        want = reference.sample(x, seed=seeds, position=candidates, temperature=0.7, **setting)
        np.testing.assert_array_equal(got, want, str(setting))


@pytest.mark.parametrize("few", [True, False])
def test_top_p_that_is_met_exactly(backend: Any, rng: np.random.Generator, few: bool) -> None:
    """Two tokens of weight 1 and four of 1/2, or fifty times as many: the first have one half of the mass."""
    times, columns = (1, 9000) if few else (50, 4000)
    rows, places = 60, rng.permutation(6 * times) * (columns // (6 * times))
    x = np.full((rows, columns), -9.0, np.float32)
    x[:, places] = 1
    x[:, places[: 2 * times]] = 2
    temperature = float(np.float32(1.4426950408889634))  # log2(e): a logit less is half the weight
    for top_p, lowest in ((0.5, 2), (0.50001, 1)):
        setting = {"temperature": temperature, "top_p": top_p, "top_k": 6 * times, "position": np.arange(rows)}
        tokens = draw(backend, x, **setting)
        assert x[0, tokens].min() == lowest


def test_mixed_batch_and_rows_alone(backend: Any, rng: np.random.Generator) -> None:
    rows = 10
    x = logits_of(rng, (rows, 9001))
    x[4] = 0.5  # equal logits: more candidates than the list of a block holds
    parameters: dict[str, np.ndarray] = {
        "temperature": np.array([0, 1, 0.6, 1, 1.2, 0, 5, 1e-3, 1, 0.9], np.float32),
        "top_k": np.array([5, 0, 20, -1, 40, 0, 10**6, 3, 1, 2], np.int32),
        "top_p": np.array([0.5, 1, 0.95, 0.8, 0.5, 1, 0.9, 1, 0.7, 1], np.float32),
        "min_p": np.array([0.1, 0, 0, 0.02, 0, 0, 0, 0.5, 0, 0], np.float32),
        "seed": np.arange(rows, dtype=np.uint64) * np.uint64(2**61),
        "position": np.arange(rows, dtype=np.int64) * 1000,
    }
    got = draw(backend, x, **parameters)
    np.testing.assert_array_equal(got, reference.sample(x, **parameters))
    np.testing.assert_array_equal(got[[0, 5, 8]], x[[0, 5, 8]].argmax(1))
    order = rng.permutation(rows)
    np.testing.assert_array_equal(draw(backend, x[order], **{k: v[order] for k, v in parameters.items()}), got[order])
    for i in range(rows):
        np.testing.assert_array_equal(
            draw(backend, x[i : i + 1], **{k: v[i : i + 1] for k, v in parameters.items()}), got[i]
        )
        numbers = {k: v[i].item() for k, v in parameters.items()}
        np.testing.assert_array_equal(draw(backend, x[i : i + 1], **numbers), got[i])


def test_one_token_whichever_kernel_draws(backend: Any, rng: np.random.Generator) -> None:
    """A filter that removes nothing of weight: the block with the list, the row searched in place, and no filter."""
    x = logits_of(rng, (20, 3000))
    x[:, 0] = -60
    seeds = np.arange(20)
    plain = draw(backend, x, seed=seeds)
    np.testing.assert_array_equal(draw(backend, x, seed=seeds, top_k=2999), plain)
    np.testing.assert_array_equal(draw(backend, x, seed=seeds, top_p=float(np.float32(1 - 2**-24))), plain)
    wide = np.concatenate([x, np.full((20, 4000), -50, np.float32)], 1)
    np.testing.assert_array_equal(draw(backend, wide, seed=seeds, top_k=6999), draw(backend, wide, seed=seeds))


# ---- the kept set


@pytest.mark.parametrize(
    "setting",
    [
        (1.0, 3, 1.0, 0.0),
        (1.0, 0, 0.6, 0.0),
        (0.7, 0, 1.0, 0.1),
        (1.3, 6, 0.75, 0.0),
        (1.0, 5, 0.9, 0.3),
        (1.0, 4, 0.01, 0.0),
        (1.0, 5, 0.62, 0.0),  # 0.62 of what top-k has left, not of everything
        (2.0, 0, 0.999, 0.0),
    ],
)
def test_draws_cover_the_kept_set(backend: Any, setting: tuple[float, int, float, float]) -> None:
    x = np.array([0.3, 2.0, -1.0, 2.0, 1.1, 1.1, 0.9, -3.0, 1.1, 0.0], np.float32)  # with ties at both edges
    temperature, top_k, top_p, min_p = setting
    n = 600 if backend.name == "cuda" else 200
    tokens = draw(
        backend,
        np.tile(x, (n, 1)),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        position=np.arange(n),
    )
    allowed = kept_tokens(x, *setting)
    expected = {i for i in allowed if math.exp((x[i] - 2.0) / temperature) > 0.15}  # rarer ones may be missing
    assert set(tokens.tolist()) <= allowed
    assert set(tokens.tolist()) >= expected


def test_min_p_keeps_the_edge(backend: Any) -> None:
    """At temperature log2(e) a logit one below the maximum weighs exactly 1/2."""
    x = np.zeros((100, 6), np.float32)
    x[:, 3] = 1
    log2e = float(np.float32(1.4426950408889634))
    for setting in ({}, {"top_k": 5}):
        edge = draw(backend, x, min_p=0.5, temperature=log2e, position=np.arange(100), **setting)
        assert set(edge.tolist()) == set(range(6))
        above = draw(backend, x, min_p=0.50001, temperature=log2e, position=np.arange(100), **setting)
        assert set(above.tolist()) == {3}


def test_kept_sets_of_the_reference(rng: np.random.Generator) -> None:
    """The oracle's own filter against the independent one: every draw lies inside, over many small cases."""
    for case in range(300):
        x = np.round(logits_of(rng, (1, int(rng.integers(1, 12)))), int(rng.integers(0, 3)))
        setting = (
            float(rng.uniform(0.3, 3)),
            int(rng.integers(-1, 12)),
            float(rng.uniform(0.01, 1)),
            float(rng.choice([0, 0.1, 0.5])),
        )
        if setting[1] == 1:
            continue  # greedy by definition: one of the kept
        kept = kept_tokens(x[0], *setting)
        names = ("temperature", "top_k", "top_p", "min_p")
        tokens = {int(reference.sample(x, seed=case, position=p, **dict(zip(names, setting)))[0]) for p in range(20)}
        assert tokens <= kept, (x, setting)


@pytest.mark.parametrize(
    "setting", [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1, "top_k": 7}], ids=str
)
def test_frequencies(backend: Any, setting: dict[str, Any]) -> None:
    """Chi-square over the draws at many positions of two seeds."""
    x = np.array([1.0, 0.2, -0.5, 2.0, 1.5, -2.0, 0.7, 1.2], np.float32)
    n = 1000 if backend.name == "emulated" and setting else 4000
    tokens = draw(
        backend, np.tile(x, (n, 1)), seed=np.repeat([3, 4], n // 2), position=np.tile(np.arange(n // 2), 2), **setting
    )
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | setting
    kept = sorted(kept_tokens(x, **full))
    weights = np.exp(x[kept].astype(np.float64) / full["temperature"])
    expected = n * weights / weights.sum()
    counts = np.bincount(tokens, minlength=8)
    assert counts.sum() == counts[kept].sum()
    statistic = ((counts[kept] - expected) ** 2 / expected).sum()
    quantile = {3: 24.3, 4: 26.4, 5: 28.4, 6: 30.3, 7: 32.2, 8: 34.1}[len(kept)]  # at least that of p = 2e-5
    assert statistic < quantile, (counts[kept], expected)


def test_rare_tokens_are_drawn(backend: Any) -> None:
    """4095 tokens of weight 1e-5 each: together 4 % of the draws, which noise of 24 bits would miss in part."""
    x = np.full((1000, 4096), math.log(1e-5), np.float32)
    x[:, 2000] = 0
    hits = int((draw(backend, x, position=np.arange(1000), seed=5) != 2000).sum())
    assert 20 <= hits <= 62  # 39.3 expected, deviation 6.1


def test_seed_and_position_change_the_draw(backend: Any) -> None:
    x = np.zeros((64, 1000), np.float32)
    seeds = draw(backend, x, seed=np.arange(64, dtype=np.uint64) << np.uint64(32))
    positions = draw(backend, x, position=np.arange(64, dtype=np.int64) << 32)
    assert len(set(seeds.tolist())) > 55
    assert len(set(positions.tolist())) > 55
    assert len(set(draw(backend, x, seed=9, position=9).tolist())) == 1


# ---- edges of the parameters


@pytest.mark.parametrize("k", [0, -1, None, 1, 8, 9, 10**9, 2**31])
def test_top_k_at_the_edges(backend: Any, rng: np.random.Generator, k: int | None) -> None:
    x = logits_of(rng, (40, 8))
    want = x.argmax(1) if k == 1 else reference.sample(x, position=np.arange(40))
    np.testing.assert_array_equal(draw(backend, x, top_k=k, position=np.arange(40)), want)
    if k is not None:
        array = np.full(40, k, np.int64)
        np.testing.assert_array_equal(draw(backend, x, top_k=array, position=np.arange(40)), want)


def test_peaked_uniform_and_masked_rows(backend: Any) -> None:
    for columns in (8, 2000, 30000):
        peaked = np.zeros((4, columns), np.float32)
        peaked[:, columns // 2] = 20
        assert (draw(backend, peaked, top_p=0.01, position=np.arange(4)) == columns // 2).all()
        assert (draw(backend, peaked, min_p=0.5, position=np.arange(4)) == columns // 2).all()
        equal = np.zeros((4, columns), np.float32)
        for setting in ({}, {"top_p": 0.01}, {"top_p": 0.9999999}, {"top_k": 2}, {"min_p": 0.999}):
            tokens = draw(backend, equal, position=np.arange(4), **setting)  # all are ties, so all are kept
            np.testing.assert_array_equal(tokens, reference.sample(equal, position=np.arange(4)))
        for only in (0, columns // 3, columns - 1):
            masked = np.full((2, columns), -np.inf, np.float32)
            masked[:, only] = -3.0
            for setting in ({}, {"top_p": 0.5}, {"top_k": 5}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.3}):
                assert (draw(backend, masked, position=np.arange(2), **setting) == only).all()
    assert (draw(backend, np.zeros((3, 1), np.float32), top_p=0.5, top_k=4) == 0).all()


@pytest.mark.parametrize("temperature", [0, 1e-45, 1e-40, 1e-10, 1e-6, 1e-5, 1e-4, 1e-3])
def test_small_temperatures_are_greedy(backend: Any, rng: np.random.Generator, temperature: float) -> None:
    x = np.stack([rng.permutation(np.linspace(-30, 30, 500)) for _ in range(6)]).astype(HALF)
    for setting in ({}, {"top_k": 20, "top_p": 0.9}, {"top_p": 0.9}, {"min_p": 0.1}):
        tokens = draw(backend, x, temperature=temperature, position=np.arange(6), **setting)
        np.testing.assert_array_equal(tokens, x.astype(np.float32).argmax(1))
        array = np.full(6, temperature, np.float32)
        np.testing.assert_array_equal(draw(backend, x, temperature=array, position=np.arange(6), **setting), tokens)


@pytest.mark.parametrize("temperature", [1e4, 1e30, 1e300])
def test_large_temperatures_are_uniform(backend: Any, rng: np.random.Generator, temperature: float) -> None:
    x = logits_of(rng, (20, 300), scale=1.0)
    x[:, ::2] = -np.inf
    positions = np.arange(20)
    flat = np.where(np.isfinite(x), np.float32(0), -np.inf).astype(np.float32)
    tokens = draw(backend, x, temperature=temperature, position=positions)
    same = tokens == reference.sample(flat, position=positions)
    assert same.all() if temperature > 1e4 else same.sum() >= 18
    assert (tokens % 2 == 1).all()


def test_values_far_from_zero(backend: Any, rng: np.random.Generator) -> None:
    for shift in (-1e4, 3e4, 1e30):
        x = np.full((4, 700), -np.inf, np.float32)
        x[:, 100:110] = shift + np.arange(10)
        for setting in ({}, {"top_p": 0.8}, {"top_k": 3}):
            tokens = draw(backend, x, position=np.arange(4), **setting)
            np.testing.assert_array_equal(tokens, reference.sample(x, position=np.arange(4), **setting))


def test_views(backend: Any, rng: np.random.Generator) -> None:
    base = backend.put(logits_of(rng, (8, 2002)))
    for view in (base[:, :1001], base[::2], base[:, ::-1], base[1:, 1:]):
        plain = backend.put(backend.get(view).copy())
        for function in (ops.argmax, lambda x: ops.sample(x, top_k=9, seed=2), lambda x: ops.top_logprobs(x, 5)[1]):
            np.testing.assert_array_equal(backend.get(function(view)), backend.get(function(plain)))


def test_empty_and_bad_input(backend: Any) -> None:
    x = backend.put(np.zeros((2, 8), np.float32))
    none = backend.put(np.zeros((0, 8), np.float32))
    assert ops.argmax(none).shape == ops.sample(none).shape == (0,)
    assert ops.top_logprobs(none, 3)[0].shape == ops.top_logprobs(none, 3)[1].shape == (0, 3)
    for function in (ops.argmax, ops.sample, lambda a: ops.top_logprobs(a, 1)):
        for shape in ((2, 0), (8,), (1, 2, 8)):
            with pytest.raises(ValueError, match="logits has shape"):
                function(backend.put(np.zeros(shape, np.float32)))
        with pytest.raises(TypeError, match="logits has dtype int32"):
            function(backend.put(np.zeros((2, 8), np.int32)))
        with pytest.raises(TypeError, match="logits must be a CuPy or NumPy array"):
            function([[0.0]])
    wrong: list[tuple[str, list[Any]]] = [
        ("temperature", [-1, -1e-9, NAN, INF, np.array([1.0, -1.0])]),
        ("top_k", [-2, -(2**40), 2**70, np.array([5, -2])]),
        ("top_p", [0, -0.1, 1.0001, NAN, np.array([0.5, 0.0])]),
        ("min_p", [-0.1, 1, 2.0, NAN, np.array([0.5, 1.0])]),
        ("seed", [2**64, -(2**64)]),
        ("position", [2**63]),
    ]
    for name, values in wrong:
        for value in [*values, np.zeros(3, np.int64), np.ones((2, 1), np.int64)]:
            with pytest.raises(ValueError, match=f"sample: {name} "):
                ops.sample(x, **{name: value})
        with pytest.raises(TypeError, match=f"sample: {name} must be"):
            ops.sample(x, **{name: "1"})
    for name in ("top_k", "seed", "position"):
        with pytest.raises(TypeError, match=f"sample: {name} must be an integer"):
            ops.sample(x, **{name: 1.0})
    for name in ("temperature", "seed", "position"):
        with pytest.raises(TypeError, match=f"sample: {name} must be"):
            ops.sample(x, **{name: None})


@pytest.mark.gpu
def test_parameters_on_the_gpu() -> None:
    import cupy

    x = cupy.asarray(np.random.default_rng(3).standard_normal((4, 9000), np.float32))
    greedy = cupy.asarray([0, -1, np.nan, 0], np.float32)  # not looked at by the host
    assert (ops.sample(x, temperature=greedy) == ops.argmax(x)).all()
    nothing = cupy.asarray([0, -1, -(2.0**60), 1e-30], np.float32)
    for flat in (x, x * np.float32(1e-6)):
        assert (ops.sample(flat, top_p=nothing) == ops.argmax(flat)).all()
    tokens = ops.sample(x, top_k=cupy.asarray([-7, 0, 2**40, 9000]), seed=cupy.arange(4))
    assert (tokens == ops.sample(x, seed=np.arange(4))).all()
    with pytest.raises(TypeError, match="top_k has dtype float32"):
        ops.sample(x, top_k=greedy)
    with pytest.raises(ValueError, match="seed has shape"):
        ops.sample(x, seed=cupy.arange(3))
    with pytest.raises(TypeError, match="seed lives on the GPU but logits on the CPU"):
        ops.sample(x.get(), seed=cupy.arange(4))


@pytest.mark.gpu
def test_captured_into_a_graph() -> None:
    """Parameters and logits may change between replays; the counters start from zero by themselves."""
    import cupy

    rng = np.random.default_rng(5)
    x = cupy.asarray(logits_of(rng, (5, 20000)))
    parameters = {
        "temperature": cupy.ones(5, np.float32),
        "top_k": cupy.zeros(5, np.int32),
        "top_p": cupy.ones(5, np.float32),
        "min_p": cupy.zeros(5, np.float32),
        "seed": cupy.arange(5, dtype=np.uint64),
        "position": cupy.zeros(5, np.int64),
    }
    ops.sample(x, **parameters)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        ops.sample(x, **parameters)
        stream.synchronize()
        stream.begin_capture()
        tokens = ops.sample(x, **parameters)
        graph = stream.end_capture()
    for step in range(6):
        x[...] = cupy.asarray(logits_of(rng, (5, 20000)))
        parameters["position"][...] = step
        parameters["top_k"][...] = cupy.asarray([0, 20, 1, 6000, 50])
        parameters["top_p"][...] = cupy.asarray([1, 0.9, 1, 0.5, 0.9])
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        want = reference.sample(x.get(), **{k: v.get() for k, v in parameters.items()})
        np.testing.assert_array_equal(tokens.get(), want)


# ---- most probable tokens


@DTYPES
@pytest.mark.parametrize(("columns", "n"), [(1, 1), (8, 8), (40, 32), (3001, 5), (20000, 20), (VOCAB, 32)])
def test_top_logprobs(backend: Any, rng: np.random.Generator, dtype: np.dtype, columns: int, n: int) -> None:
    x = logits_of(rng, (2, columns), dtype)
    values, ids = (backend.get(a) for a in ops.top_logprobs(backend.put(x), n, 0.8))
    want_values, want_ids = reference.top_logprobs(x.astype(np.float64), n, 0.8)
    np.testing.assert_array_equal(ids, want_ids)
    assert np.abs(values - want_values).max() < 1e-5
    assert (values <= 0).all()
    for i in range(n):
        scored = ops.token_logprobs(backend.put(x), backend.put(ids[:, i].copy()), 0.8)
        np.testing.assert_array_equal(backend.get(scored), values[:, i])


def test_top_logprobs_of_ties_and_special_rows(backend: Any) -> None:
    for columns in (40, 6000, 30000):
        x = np.zeros((6, columns), np.float32)  # row 0: all equal
        x[1, [columns - 1, 7]] = 1
        x[2] = -np.inf
        x[2, [9, 30]] = [1, 2]
        x[3, 5] = np.nan
        x[4, 5] = np.inf
        x[5] = -np.inf
        values, ids = (backend.get(a) for a in ops.top_logprobs(backend.put(x), 4))
        want_values, want_ids = reference.top_logprobs(x, 4)
        np.testing.assert_array_equal(ids, want_ids)
        np.testing.assert_array_equal(
            ids, [[0, 1, 2, 3], [7, columns - 1, 0, 1], [30, 9, 0, 1], [-1] * 4, [-1] * 4, [-1] * 4]
        )
        np.testing.assert_allclose(values, want_values, rtol=1e-6)


def test_top_logprobs_over_the_whole_range_of_floats(backend: Any, rng: np.random.Generator) -> None:
    x = (rng.choice([-1, 1], (3, 6001)) * 10.0 ** rng.uniform(-40, 38, (3, 6001))).astype(np.float32)
    _, ids = ops.top_logprobs(backend.put(x), 32)
    np.testing.assert_array_equal(backend.get(ids), np.argsort(-x, axis=1, kind="stable")[:, :32])
    _, lowest = ops.top_logprobs(backend.put(-np.abs(x)), 32)
    np.testing.assert_array_equal(backend.get(lowest), np.argsort(np.abs(x), axis=1, kind="stable")[:, :32])


def test_top_logprobs_bad_n(backend: Any) -> None:
    x = backend.put(np.zeros((2, 8), np.float32))
    for n in (0, -1, 9, 33):
        with pytest.raises(ValueError, match=r"n must be in \[1, 8\]"):
            ops.top_logprobs(x, n)
    with pytest.raises(TypeError, match="n must be an integer"):
        ops.top_logprobs(x, 1.5)
    with pytest.raises(ValueError, match="temperature must be positive"):
        ops.top_logprobs(x, 1, 0.0)


def test_numpy_arrays_take_the_reference(rng: np.random.Generator) -> None:
    x = logits_of(rng, (3, 50))
    sampling = importlib.import_module("cukern.reference.sampling")
    np.testing.assert_array_equal(ops.sample(x, top_k=5, seed=1), sampling.sample(x, top_k=5, seed=1))
    np.testing.assert_array_equal(ops.argmax(x), x.argmax(1))
    np.testing.assert_array_equal(ops.top_logprobs(x, 4)[1], sampling.top_logprobs(x, 4)[1])
