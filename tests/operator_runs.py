"""One small call of every operator, for tests that compare ways to run it rather than values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cukern import ops

Put = Callable[[np.ndarray], Any]
Run = Callable[[Put], tuple[Any, ...]]  # moves its inputs by the function it is given


@dataclass(frozen=True)
class Case:
    """`exact`: no approximate instruction takes part, a GPU and the emulator give equal bits; else `operator` names the
    tolerance, or is empty where results are choices that a last bit can turn."""

    name: str
    build: Callable[[Any], Run]
    exact: bool
    operator: str = ""


def random(seed: int, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


def embedding(dtype: Any) -> Run:
    ids, weight = np.array([0, 5, 8, 3], np.int64), random(1, (9, 72), dtype)
    return lambda put: (ops.embedding(put(ids), put(weight)),)


def rms_norm(columns: int) -> Callable[[Any], Run]:
    def build(dtype: Any) -> Run:
        x, weight = random(2, (5, columns), dtype), random(3, (columns,), np.float32)
        residual = random(4, (5, columns), np.float32)

        def run(put: Put) -> tuple[Any, ...]:
            r = put(residual)
            return ops.rms_norm(put(x), put(weight)), ops.rms_norm(put(x), put(weight), residual=r), r

        return run

    return build


def rope(dtype: Any) -> Run:
    table = ops.rope_table(64, 50, 10000.0)
    x, positions = random(5, (7, 3, 64), dtype), np.array([0, 1, 49, 7, 7, 30, 2], np.int32)
    return lambda put: (ops.rope(put(x), put(positions), put(table)),)


def heads_into_the_cache(dtype: Any) -> Run:
    table = ops.rope_table(64, 50, 10000.0)
    qkv, positions = random(6, (5, 8 * 64), dtype), np.array([0, 1, 2, 30, 49], np.int32)
    q_weight, k_weight = random(7, (64,), np.float32), random(8, (64,), np.float32)
    slots, cache = np.array([3, 17, -1, 40, 0], np.int64), random(9, (3, 2, 16, 64), dtype)

    def run(put: Put) -> tuple[Any, ...]:
        k, v = put(cache), put(cache)
        inputs = (put(qkv), put(q_weight), put(k_weight), put(positions), put(table), k, v, put(slots))
        return ops.qk_norm_rope_cache(*inputs, num_heads=4, num_kv_heads=2), k, v

    return run


def kv_cache_write(dtype: Any) -> Run:
    k, v = random(15, (5, 2, 24), dtype), random(16, (5, 2, 24), dtype)
    slots, cache = np.array([3, 17, -1, 40, 0], np.int64), random(17, (3, 2, 16, 24), dtype)

    def run(put: Put) -> tuple[Any, ...]:
        k_cache, v_cache = put(cache), put(cache)
        ops.kv_cache_write(put(k), put(v), k_cache, v_cache, put(slots))
        return k_cache, v_cache

    return run


def linear(m: int, n: int, k: int) -> Callable[[Any], Run]:
    def build(dtype: Any) -> Run:
        x, w = random(10, (m, k), dtype), random(11, (n, k), dtype, 0.1)
        bias, residual = random(12, (n,), np.float32), random(13, (m, n), np.float32)
        return lambda put: (
            ops.linear(put(x), put(w), bias=put(bias)),
            ops.linear(put(x), put(w), residual=put(residual)),
        )

    return build


def argmax(dtype: Any) -> Run:
    x = random(14, (4, 5000), dtype)
    return lambda put: (ops.argmax(put(x)),)


def swiglu(dtype: Any) -> Run:
    x = random(20, (5, 2 * 136), dtype, 3)
    return lambda put: (ops.swiglu(put(x)),)


def softmax(columns: int) -> Callable[[Any], Run]:
    def build(dtype: Any) -> Run:
        x, targets = random(21, (4, columns), dtype, 4), np.array([0, 1, 2, columns - 1], np.int64)
        return lambda put: (
            ops.softmax(put(x)),
            ops.log_softmax(put(x), dtype=np.float32),
            ops.token_logprobs(put(x), put(targets), 0.7),
        )

    return build


def sample(dtype: Any) -> Run:
    x = random(29, (6, 5000), dtype, 3)
    seeds = np.arange(6, dtype=np.uint64)
    return lambda put: (
        ops.sample(put(x), temperature=0.8, seed=put(seeds), position=3),
        ops.sample(put(x), temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=put(seeds), position=3),
        *ops.top_logprobs(put(x), 5),
    )


def attention_prefill(head_dim: int) -> Callable[[Any], Run]:
    def build(dtype: Any) -> Run:
        q = random(22, (2, 70, 4, head_dim), dtype)
        k, v = (random(s, (2, 133, 2, head_dim), dtype) for s in (23, 24))
        return lambda put: tuple(ops.attention_prefill(put(q), put(k), put(v), return_lse=True))

    return build


def attention_decode(dtype: Any) -> Run:
    q = random(25, (3, 8, 64), dtype)
    k, v = (random(s, (40, 2, 16, 64), dtype) for s in (26, 27))
    lengths = np.array([1, 130, 200], np.int32)
    tables = np.random.default_rng(28).permutation(40)[:39].reshape(3, 13).astype(np.int32)
    return lambda put: tuple(ops.attention_decode(put(q), put(k), put(v), put(tables), put(lengths), return_lse=True))


LINEAR_SHAPES = ((1, 96, 272), (7, 200, 1040), (33, 136, 512), (70, 257, 300))  # m, n, k

CASES = (
    Case("embedding", embedding, exact=True),
    *(Case(f"rms_norm {n}", rms_norm(n), exact=True) for n in (64, 130, 1024, 3000)),
    Case("rope", rope, exact=True),
    Case("qk_norm_rope_cache", heads_into_the_cache, exact=True),
    Case("kv_cache_write", kv_cache_write, exact=True),
    *(Case(f"linear {s}", linear(*s), exact=True) for s in LINEAR_SHAPES),
    Case("argmax", argmax, exact=True),
    Case("swiglu", swiglu, exact=False, operator="swiglu"),
    *(Case(f"softmax {n}", softmax(n), exact=False, operator="softmax") for n in (7, 1000, 5000)),
    Case("sample", sample, exact=False),
    *(Case(f"attention_prefill {d}", attention_prefill(d), exact=False, operator="attention") for d in (64, 128)),
    Case("attention_decode", attention_decode, exact=False, operator="attention"),
)
