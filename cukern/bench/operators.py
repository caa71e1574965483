"""Cases of the operators that are bound by memory, and of the matrix products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from cukern import ops, reference
from cukern.bench.cases import Arrays, Call, Case, Peers, Prepared, spread
from cukern.bench.linear import LinearCase
from cukern.bench.linear import cases as linear_cases
from cukern.testing import TOLERANCES, max_error

__all__ = ["operator_cases", "product_cases"]

EPS = 1e-6
THETA = 1e6


def operator_cases(*, tokens: int = 8192, hidden: int = 4096, vocab: int = 151936, rows: int = 512) -> list[Case]:
    """Cases of embedding to sample; the sizes are those of Qwen3-8B unless given.

    Parameters
    ----------
    tokens, hidden : int
        Size of activations.
    vocab : int
        Size of the vocabulary.
    rows : int
        Rows of logits.
    """
    intermediate, heads, kv_heads, dim = 3 * hidden, max(1, hidden // 128), max(1, hidden // 512), 128
    few = max(1, rows // 8)
    return [
        Case("embedding", f"{tokens}x{hidden}", lambda a: _embedding(a, tokens, hidden, vocab)),
        Case("rms_norm", f"{tokens}x{hidden}", lambda a: _rms_norm(a, tokens, hidden)),
        Case("rms_norm", f"{tokens}x{hidden} +residual", lambda a: _rms_norm_residual(a, tokens, hidden)),
        Case("swiglu", f"{tokens}x{intermediate}", lambda a: _swiglu(a, tokens, intermediate)),
        Case("rope", f"{tokens}x{heads}x{dim}", lambda a: _rope(a, tokens, heads, dim)),
        Case(
            "qk_norm_rope_cache",
            f"{tokens}x{heads}+2*{kv_heads}",
            lambda a: _qk_norm_rope_cache(a, tokens, heads, kv_heads, dim),
        ),
        Case("softmax", f"{rows}x{vocab} float32", lambda a: _softmax(a, rows, vocab)),
        Case("token_logprobs", f"{rows}x{vocab} float32", lambda a: _token_logprobs(a, rows, vocab)),
        Case("argmax", f"{few}x{vocab} float32", lambda a: _argmax(a, few, vocab)),
        Case("sample", f"{few}x{vocab} T", lambda a: _sample(a, few, vocab)),
        Case(
            "sample",
            f"{few}x{vocab} T, top-k 20, top-p 0.95",
            lambda a: _sample(a, few, vocab, top_k=20, top_p=0.95),
        ),
    ]


def product_cases(
    models: tuple[str, ...] = ("0.6b", "8b"), rows: tuple[int, ...] = (1, 16, 128, 256, 2048, 8192)
) -> list[Case]:
    """Cases of `linear`: every layer of the models at each number of rows; those that add to the residual stream also
    without it."""
    found = []
    for c in linear_cases(models, rows):
        label = f"{c.model} {c.layer} M{c.m} N{c.n} K{c.k}"
        plain, called = f"linear {c.model} M{c.m}", f"linear {c.model} M{c.m} as the model calls it"
        if c.out_bytes == 8:
            found.append(Case("linear", label, partial(_linear, case=replace(c, out_bytes=2)), (plain,)))
            found.append(Case("linear", f"{label} +residual", partial(_linear, case=c), (called,)))
        else:
            found.append(Case("linear", label, partial(_linear, case=c), (plain, called)))
    return found


def _bind(function: Callable[..., Any], *sets: list[Any], **fixed: Any) -> list[Call]:
    """One call for each set of inputs."""
    return [partial(function, *inputs, **fixed) for inputs in zip(*sets)]


def _embedding(a: Arrays, tokens: int, hidden: int, vocab: int) -> Prepared:
    weight = a.normal(vocab, hidden)
    ids = [a.integers(vocab, tokens) for _ in range(2 if a.rotate else 1)]
    out = a.empty(tokens, hidden)

    def check() -> float:
        rows = spread(tokens, 512)
        got = a.host(ops.embedding(ids[0], weight)[rows])
        return max_error(got, a.double(weight[ids[0][rows]]))

    def peers(torch: Any) -> Peers:
        table = a.tensor(torch, weight)
        return {"torch": _bind(lambda i: torch.nn.functional.embedding(i, table), [a.tensor(torch, i) for i in ids])}

    calls = _bind(lambda i: ops.embedding(i, weight, out=out), ids)
    return Prepared(calls, check, TOLERANCES["embedding"], tokens * (2 * hidden * a.dtype.itemsize + 4), 0, peers)


def _rms_norm(a: Arrays, tokens: int, hidden: int) -> Prepared:
    nbytes = 2 * tokens * hidden * a.dtype.itemsize
    xs = [a.normal(tokens, hidden) for _ in range(a.copies(nbytes))]
    weight, out = a.positive(hidden), a.empty(tokens, hidden)

    def check() -> float:
        rows = spread(tokens, 64)
        got = a.host(ops.rms_norm(xs[0], weight, EPS))[rows]
        return max_error(got, reference.rms_norm(a.double(xs[0][rows]), a.double(weight), EPS))

    def peers(torch: Any) -> Peers:
        half = a.tensor(torch, weight.astype(a.dtype))
        norm = torch.nn.functional.rms_norm
        return {"torch": _bind(lambda x: norm(x, (hidden,), half, EPS), [a.tensor(torch, x) for x in xs])}

    calls = _bind(lambda x: ops.rms_norm(x, weight, EPS, out=out), xs)
    return Prepared(calls, check, TOLERANCES["rms_norm"], nbytes, 0, peers)


def _rms_norm_residual(a: Arrays, tokens: int, hidden: int) -> Prepared:
    nbytes = tokens * hidden * (2 * a.dtype.itemsize + 8)
    count = a.copies(nbytes)
    xs = [a.normal(tokens, hidden, scale=0.1) for _ in range(count)]
    residuals = [a.normal(tokens, hidden, dtype=np.float32) for _ in range(count)]
    weight, out = a.positive(hidden), a.empty(tokens, hidden)

    def check() -> float:
        rows = spread(tokens, 64)
        residual = residuals[0].copy()
        total = a.double(residual[rows]) + a.double(xs[0][rows])
        got = a.host(ops.rms_norm(xs[0], weight, EPS, residual=residual))[rows]
        error = max_error(got, reference.rms_norm(total, a.double(weight), EPS))
        return max(error, max_error(a.host(residual[rows]), total))

    def peers(torch: Any) -> Peers:
        half, norm = a.tensor(torch, weight), torch.nn.functional.rms_norm
        dtype = torch.bfloat16 if a.dtype.name == "bfloat16" else torch.float16
        pairs = [(a.tensor(torch, x), a.tensor(torch, r)) for x, r in zip(xs, residuals)]

        def eager(x: Any, residual: Any) -> Any:
            return norm(residual.add_(x), (hidden,), half, EPS).to(dtype)

        return {"torch, 3 kernels": [partial(eager, *pair) for pair in pairs]}

    calls = _bind(lambda x, r: ops.rms_norm(x, weight, EPS, residual=r, out=out), xs, residuals)
    return Prepared(calls, check, TOLERANCES["rms_norm"], nbytes, 0, peers)


def _swiglu(a: Arrays, tokens: int, intermediate: int) -> Prepared:
    nbytes = 3 * tokens * intermediate * a.dtype.itemsize
    xs = [a.normal(tokens, 2 * intermediate) for _ in range(a.copies(nbytes))]
    out = a.empty(tokens, intermediate)

    def check() -> float:
        rows = spread(tokens, 64)
        return max_error(a.host(ops.swiglu(xs[0])[rows]), reference.swiglu(a.double(xs[0][rows])))

    def peers(torch: Any) -> Peers:
        silu = torch.nn.functional.silu

        def eager(x: Any) -> Any:
            gate, up = x.chunk(2, -1)
            return silu(gate) * up

        return {"torch, 2 kernels": _bind(eager, [a.tensor(torch, x) for x in xs])}

    return Prepared(_bind(lambda x: ops.swiglu(x, out=out), xs), check, TOLERANCES["swiglu"], nbytes, 0, peers)


def _rope(a: Arrays, tokens: int, heads: int, dim: int) -> Prepared:
    table = a.xp.asarray(ops.rope_table(dim, tokens, THETA))
    positions = a.permutation(tokens)
    nbytes = 2 * tokens * heads * dim * a.dtype.itemsize + tokens * (4 + 4 * dim)
    xs = [a.normal(tokens, heads, dim) for _ in range(a.copies(nbytes))]
    out = a.empty(tokens, heads, dim)

    def check() -> float:
        rows = spread(tokens, 64)
        got = a.host(ops.rope(xs[0], positions, table)[rows])
        return max_error(got, reference.rope(a.double(xs[0][rows]), a.host(positions)[rows], a.host(table)))

    return Prepared(_bind(lambda x: ops.rope(x, positions, table, out=out), xs), check, TOLERANCES["rope"], nbytes)


def _qk_norm_rope_cache(a: Arrays, tokens: int, heads: int, kv_heads: int, dim: int) -> Prepared:
    size = 64
    table = a.xp.asarray(ops.rope_table(dim, tokens, THETA))
    positions, slots = a.permutation(tokens), a.permutation(tokens, np.int64)
    width = (heads + 2 * kv_heads) * dim
    nbytes = 2 * tokens * width * a.dtype.itemsize + tokens * (12 + 4 * dim)
    xs = [a.normal(tokens, width) for _ in range(a.copies(nbytes))]
    q_weight, k_weight = a.positive(dim), a.positive(dim)
    k_cache, v_cache = (a.empty(-(-tokens // size), kv_heads, size, dim) for _ in range(2))
    out = a.empty(tokens, heads, dim)
    sizes: dict[str, Any] = {"num_heads": heads, "num_kv_heads": kv_heads, "eps": EPS}

    def run(x: Any, out: Any = None) -> Any:
        return ops.qk_norm_rope_cache(
            x, q_weight, k_weight, positions, table, k_cache, v_cache, slots, **sizes, out=out
        )

    def check() -> float:
        rows = spread(tokens, 64)
        q = a.host(run(xs[0])[rows])
        k_new, v_new = (np.zeros((len(rows), kv_heads, 1, dim)) for _ in range(2))
        expected = reference.qk_norm_rope_cache(
            a.double(xs[0][rows]),
            a.double(q_weight),
            a.double(k_weight),
            a.host(positions)[rows],
            a.host(table),
            k_new,
            v_new,
            np.arange(len(rows)),
            **sizes,
        )
        at = a.host(slots)[rows]
        errors = [max_error(q, expected)]
        for cache, wanted in ((k_cache, k_new), (v_cache, v_new)):
            errors.append(max_error(a.host(cache)[at // size, :, at % size], wanted[:, :, 0]))
        return max(errors)

    return Prepared(_bind(lambda x: run(x, out), xs), check, TOLERANCES["qk_norm_rope_cache"], nbytes)


def _logits(a: Arrays, rows: int, vocab: int) -> list[Any]:
    return [a.normal(rows, vocab, scale=3, dtype=np.float32) for _ in range(a.copies(4 * rows * vocab))]


def _softmax(a: Arrays, rows: int, vocab: int) -> Prepared:
    xs, out = _logits(a, rows, vocab), a.empty(rows, vocab, dtype=np.float32)

    def check() -> float:
        some = spread(rows, 8)
        return max_error(a.host(ops.softmax(xs[0])[some]), reference.softmax(a.double(xs[0][some])))

    def peers(torch: Any) -> Peers:
        return {"torch": _bind(lambda x: torch.softmax(x, -1), [a.tensor(torch, x) for x in xs])}

    calls = _bind(lambda x: ops.softmax(x, out=out), xs)
    return Prepared(calls, check, TOLERANCES["softmax"], 8 * rows * vocab, 0, peers)


def _token_logprobs(a: Arrays, rows: int, vocab: int) -> Prepared:
    xs, targets = _logits(a, rows, vocab), a.integers(vocab, rows)

    def check() -> float:
        some = spread(rows, 16)
        got = a.host(ops.token_logprobs(xs[0], targets, 0.7))[some]
        return max_error(got, reference.token_logprobs(a.double(xs[0][some]), a.host(targets)[some], 0.7))

    def peers(torch: Any) -> Peers:
        wanted = a.tensor(torch, targets.astype(np.int64))
        entropy = torch.nn.functional.cross_entropy
        return {"torch": _bind(lambda x: entropy(x / 0.7, wanted, reduction="none"), [a.tensor(torch, x) for x in xs])}

    calls = _bind(lambda x: ops.token_logprobs(x, targets, 0.7), xs)
    return Prepared(calls, check, TOLERANCES["token_logprobs"], 4 * rows * vocab, 0, peers)


def _argmax(a: Arrays, rows: int, vocab: int) -> Prepared:
    xs = _logits(a, rows, vocab)

    def check() -> float:
        return float((a.host(ops.argmax(xs[0])) != reference.argmax(a.host(xs[0]))).sum())

    def peers(torch: Any) -> Peers:
        return {"torch": _bind(lambda x: torch.argmax(x, -1), [a.tensor(torch, x) for x in xs])}

    return Prepared(_bind(ops.argmax, xs), check, 0.0, 4 * rows * vocab, 0, peers)


def _sample(a: Arrays, rows: int, vocab: int, top_k: int = 0, top_p: float = 1.0) -> Prepared:
    xs = _logits(a, rows, vocab)
    seeds, positions = a.integers(1 << 40, rows, dtype=np.int64), a.integers(4096, rows, dtype=np.int64)
    temperature = a.xp.full(rows, 0.7, np.float32)

    def run(x: Any) -> Any:
        return ops.sample(x, temperature=temperature, top_k=top_k, top_p=top_p, seed=seeds, position=positions)

    def check() -> float:
        """Rows whose token is not that of the reference."""
        some = spread(rows, 8)
        expected = reference.sample(
            a.host(xs[0][some]),
            temperature=a.host(temperature)[some],
            top_k=top_k,
            top_p=top_p,
            seed=a.host(seeds)[some],
            position=a.host(positions)[some],
        )
        return float((a.host(run(xs[0]))[some] != expected).sum())

    def peers(torch: Any) -> Peers:
        def plain(x: Any) -> Any:
            return torch.multinomial(torch.softmax(x / 0.7, -1), 1)

        def narrowed(x: Any) -> Any:
            values, indices = torch.topk(x / 0.7, top_k)
            p = torch.softmax(values, -1)
            p = torch.where(p.cumsum(-1) - p < top_p, p, 0)
            return indices.gather(-1, torch.multinomial(p, 1))

        return {"torch, eager": _bind(narrowed if top_k else plain, [a.tensor(torch, x) for x in xs])}

    return Prepared(_bind(run, xs), check, 0.0, 4 * rows * vocab, 0, peers)


def _linear(a: Arrays, case: LinearCase) -> Prepared:
    m, n, k = case.m, case.n, case.k
    weights = [a.normal(n, k, scale=k**-0.5) for _ in range(a.copies(2 * n * k))]
    x = a.normal(m, k)
    in_place = case.out_bytes == 8  # the float32 residual is read and written
    dtype = np.dtype(np.float32) if case.out_bytes >= 4 else a.dtype
    out = a.normal(m, n, dtype=np.float32) if in_place else a.empty(m, n, dtype=dtype)

    def run(weight: Any) -> Any:
        if in_place:
            return ops.linear(x, weight, residual=out, static_weight=True)
        return ops.linear(x, weight, dtype=dtype, out=out, static_weight=True)

    def check() -> float:
        rows, columns = spread(m, 16), spread(n, 192)
        before = a.double(out[rows][:, columns]) if in_place else 0.0
        got = a.host(run(weights[0])[rows][:, columns])
        return max_error(got, before + reference.linear(a.double(x[rows]), a.double(weights[0][columns])))

    def peers(torch: Any) -> Peers:
        tensor, linear = a.tensor(torch, x), torch.nn.functional.linear
        tensors = [a.tensor(torch, w) for w in weights]
        if not in_place:
            return {"cuBLAS (torch)": _bind(lambda w: linear(tensor, w), tensors)}
        residual = a.tensor(torch, a.normal(m, n, dtype=np.float32))
        return {"cuBLAS, add (torch)": _bind(lambda w: residual.add_(linear(tensor, w)), tensors)}

    return Prepared(_bind(run, weights), check, TOLERANCES["linear"], case.bytes, case.flops, peers, in_graph=True)
