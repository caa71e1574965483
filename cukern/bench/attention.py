"""Cases of attention: prefill (bound by operations) and paged decode (bound by memory)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from cukern import ops, reference
from cukern.bench.cases import Arrays, Call, Case, Peers, Prepared, spread
from cukern.testing import TOLERANCES, max_error

__all__ = ["attention_cases", "prefill_cases"]

BLOCK = 64

PREFILL = ((8, 2048), (1, 8192), (1, 16384))
DECODE = ((1, 4096), (1, 32768), (64, 1024), (64, 4096), (256, 160))


def attention_cases(
    prefill: tuple[tuple[int, int], ...] = PREFILL,
    decode: tuple[tuple[int, int], ...] = DECODE,
    heads: int = 16,
    kv_heads: int = 8,
    dim: int = 128,
) -> list[Case]:
    """Prefill at (batch, length), causal and not, also of half the head dimension, and paged decode at (batch,
    context), all with grouped queries."""
    shape = f"{heads}/{kv_heads}x{dim}"
    return [
        *prefill_cases(prefill, heads, kv_heads, dim),
        *prefill_cases(prefill[:2], heads, kv_heads, dim, causal=False),
        *prefill_cases(prefill[:2], heads, kv_heads, dim // 2),
        *(
            Case(
                "attention_decode",
                f"B{b} ctx{n} {shape}",
                partial(_decode, batch=b, context=n, heads=heads, kv_heads=kv_heads, dim=dim),
            )
            for b, n in decode
        ),
    ]


def prefill_cases(
    shapes: tuple[tuple[int, int], ...] = PREFILL,
    heads: int = 16,
    kv_heads: int = 8,
    dim: int = 128,
    *,
    causal: bool = True,
) -> list[Case]:
    """Attention over whole prompts at (batch, length)."""
    ending = "" if causal else " not causal"
    return [
        Case(
            "attention_prefill",
            f"B{b} S{s} {heads}/{kv_heads}x{dim}{ending}",
            partial(_prefill, batch=b, length=s, heads=heads, kv_heads=kv_heads, dim=dim, causal=causal),
        )
        for b, s in shapes
    ]


def _prefill(a: Arrays, batch: int, length: int, heads: int, kv_heads: int, dim: int, causal: bool = True) -> Prepared:
    nbytes = batch * length * (2 * heads + 2 * kv_heads) * dim * a.dtype.itemsize
    count = min(a.copies(nbytes), 4)
    qs = [a.normal(batch, length, heads, dim) for _ in range(count)]
    ks = [a.normal(batch, length, kv_heads, dim) for _ in range(count)]
    vs = [a.normal(batch, length, kv_heads, dim) for _ in range(count)]
    out = a.empty(batch, length, heads, dim)

    def run(q: Any, k: Any, v: Any) -> Any:
        return ops.attention_prefill(q, k, v, causal=causal, out=out)

    def check() -> float:
        got: Any = run(qs[0], ks[0], vs[0])
        errors = []  # a row alone is the last row of a shorter problem, if causal
        for b, head in {(0, 0), (batch - 1, heads - 1)}:
            q = a.double(qs[0][b, :, head])
            k, v = (a.double(x[0][b, :, head * kv_heads // heads]) for x in (ks, vs))
            for row in spread(length, 12):
                seen = row + 1 if causal else length
                expected: Any = reference.attention_prefill(
                    q[None, row : row + 1, None], k[None, :seen, None], v[None, :seen, None], causal=True
                )
                errors.append(max_error(a.host(got[b, row, head]), expected[0, 0, 0]))
        return max(errors)

    def peers(torch: Any) -> Peers:
        sets = [tuple(a.tensor(torch, t).transpose(1, 2) for t in s) for s in zip(qs, ks, vs)]
        return _sdpa(torch, sets, causal=causal)

    calls: list[Call] = [partial(run, *inputs) for inputs in zip(qs, ks, vs)]
    flops = 2 * batch * heads * length * dim * (length + 1 if causal else 2 * length)
    return Prepared(calls, check, TOLERANCES["attention"], nbytes, flops, peers)


def _decode(a: Arrays, batch: int, context: int, heads: int, kv_heads: int, dim: int) -> Prepared:
    width = -(-context // BLOCK)
    nbytes = 2 * batch * context * kv_heads * dim * a.dtype.itemsize
    count = min(a.copies(nbytes), 16)
    caches = [[a.normal(batch * width, kv_heads, BLOCK, dim) for _ in range(2)] for _ in range(count)]
    tables = a.permutation(batch * width).reshape(batch, width)
    lengths = a.xp.full(batch, context, np.int32)
    q, out = a.normal(batch, heads, dim), a.empty(batch, heads, dim)

    def run(k_cache: Any, v_cache: Any) -> Any:
        return ops.attention_decode(q, k_cache, v_cache, tables, lengths, out=out)

    def check() -> float:
        got = a.host(run(*caches[0]))
        errors = []
        for b in spread(batch, 4):
            k, v = (a.double(cache[tables[int(b)]]) for cache in caches[0])
            row = np.arange(width, dtype=np.int32)[None]
            expected = reference.attention_decode(
                a.double(q[int(b) : int(b) + 1]), k, v, row, np.array([context], np.int32)
            )
            errors.append(max_error(got[b], expected[0]))
        return max(errors)

    def peers(torch: Any) -> Peers:
        # dense keys [B, Hkv, context, D]: easier than our pages, which SDPA cannot read
        query = a.tensor(torch, q).unsqueeze(2)
        sets = [
            (query, *(a.tensor(torch, c).view(batch, kv_heads, width * BLOCK, dim)[:, :, :context] for c in pair))
            for pair in caches
        ]
        return _sdpa(torch, sets, causal=False)

    calls: list[Call] = [partial(run, *pair) for pair in caches]
    flops = 4 * batch * heads * context * dim
    return Prepared(calls, check, TOLERANCES["attention"], nbytes, flops, peers)


def _sdpa(torch: Any, sets: list[tuple[Any, Any, Any]], *, causal: bool) -> Peers:
    """torch's flash and cuDNN back ends, each where it accepts the shape; grouped queries natively or by repeated
    keys."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attention = torch.nn.functional.scaled_dot_product_attention

    def call(backend: Any, inputs: tuple[Any, Any, Any], grouped: bool) -> Any:
        with sdpa_kernel(backend):
            return attention(*inputs, is_causal=causal, enable_gqa=grouped)

    found: Peers = {}
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        for grouped in (True, False):
            inputs = sets if grouped else [_repeat_heads(s) for s in sets]
            calls: list[Call] = [partial(call, backend, s, grouped) for s in inputs]
            try:
                calls[0]()
            except RuntimeError:  # this back end does not take these inputs
                continue
            found[f"{name}{'' if grouped else ', repeated'}"] = calls
            break
    return found


def _repeat_heads(inputs: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    q, k, v = inputs
    ratio = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
