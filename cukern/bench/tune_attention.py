"""Times every variant of the attention kernels on this GPU: ``python -m cukern.bench.tune_attention``.

First every variant is checked on small shapes: against the float64 reference, and bit for bit against each other. Then
prefill is timed beside torch's SDPA (flash and cuDNN, if torch is installed) and decode for every number of splits.
TFLOP/s count half of the square for causal attention; GB/s count the keys and values that must be read.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from cukern.ops import _attention_sm90 as hopper
from cukern.ops._attention_sm90 import HopperVariant
from cukern.ops.attention_decode import _attention_decode_splits, resident_blocks, select_splits
from cukern.ops.attention_prefill import Variant, _attention_prefill_variant, attention_prefill, candidates, select
from cukern.reference.attention_decode import attention_decode as reference_decode
from cukern.reference.attention_prefill import attention_prefill as reference_prefill

_PREFILL = [(8, 2048), (1, 8192), (2, 8192), (1, 16384)]
_DECODE = [(b, n) for b in (1, 64) for n in (128, 1024, 4096, 32768)]
_PAGE = 16


def _options(head_dim: int) -> list[Variant | HopperVariant]:
    from cukern.jit import device

    extra = [Variant(8, 2), Variant(8, 1), Variant(4, 1)] if head_dim <= 128 else []
    on_hopper = device().arch == hopper.ARCH and head_dim in hopper.HEAD_DIMS
    return list(dict.fromkeys([*([hopper.select(head_dim)] if on_hopper else ()), *candidates(head_dim), *extra]))


def _label(variant: Variant | HopperVariant) -> str:
    """Warps or warpgroups, stages, and keys of a stage."""
    if isinstance(variant, HopperVariant):
        return f"{variant.groups}g{variant.stages}s{variant.keys}"
    return f"{variant.warps}w{variant.stages}s"


def _normal(cupy: Any, shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    """Normal numbers on the GPU; many of them repeat with an odd period."""
    count = int(np.prod(shape, dtype=np.int64))
    base = np.random.default_rng(seed).standard_normal(min(count, (1 << 22) - 3), dtype=np.float32).astype(dtype)
    return cupy.resize(cupy.asarray(base.view(np.int16)), shape).view(dtype)


def _bits(array: Any) -> Any:
    return array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)


def _host(cupy: Any, array: Any) -> np.ndarray:
    return cupy.asnumpy(array.view(np.int16)).view(array.dtype).astype(np.float64)


def _pages(cupy: Any, batch: int, length: int, kv_heads: int, head_dim: int, dtype: Any) -> tuple[Any, Any, Any, Any]:
    """Caches full of random tokens, shuffled tables, and lengths."""
    columns = -(-length // _PAGE)
    shape = (batch * columns, kv_heads, _PAGE, head_dim)
    order = np.random.default_rng(3).permutation(batch * columns).astype(np.int32)
    tables = cupy.asarray(order.reshape(batch, columns))
    return _normal(cupy, shape, dtype, 1), _normal(cupy, shape, dtype, 2), tables, cupy.full(batch, length, np.int32)


def check(cupy: Any) -> int:
    """Errors against float64 and equality of bits on small shapes; returns the number of failures."""
    failures = 0
    worst = 0.0

    def judge(name: str, error: float, equal: bool) -> None:
        nonlocal failures, worst
        worst = max(worst, error)
        if not (error < 5e-3 and equal):
            failures += 1
            print(f"! {name}: error {error:.2e}{'' if equal else ', other bits'}")

    for head_dim in (64, 128, 256):
        for dtype in (np.float16, ml_dtypes.bfloat16):
            for causal in (True, False):
                q = _normal(cupy, (2, 321, 8, head_dim), dtype, 4)
                k, v = (_normal(cupy, (2, 450, 4, head_dim), dtype, seed) for seed in (5, 6))
                want = reference_prefill(*(_host(cupy, a) for a in (q, k, v)), causal=causal)
                first = attention_prefill(q, k, v, causal=causal)
                for variant in _options(head_dim):
                    out = _attention_prefill_variant(variant, q, k, v, causal=causal)
                    error = float(np.abs(_host(cupy, out) - want).max())
                    judge(f"prefill {variant} D={head_dim}", error, bool((_bits(out) == _bits(first)).all()))
            k_cache, v_cache, tables, _ = _pages(cupy, 3, 700, 2, head_dim, dtype)
            lengths = cupy.asarray(np.array([700, 1, 385], np.int32))
            q = _normal(cupy, (3, 8, head_dim), dtype, 7)
            q64, k64, v64 = (_host(cupy, a) for a in (q, k_cache, v_cache))
            want = reference_decode(q64, k64, v64, cupy.asnumpy(tables), cupy.asnumpy(lengths))
            first = attention_prefill(
                q,
                k_cache,
                v_cache,
                cu_seqlens_q=cupy.arange(4, dtype=np.int32),
                block_tables=tables,
                seq_lens=lengths,
            )
            for splits in (1, 2, 6):
                out = _attention_decode_splits(splits, q, k_cache, v_cache, tables, lengths)
                error = float(np.abs(_host(cupy, out) - want).max())
                judge(f"decode {splits} splits D={head_dim}", error, bool((_bits(out) == _bits(first)).all()))
    print(f"checks: {failures} failures, worst error {worst:.1e} against float64")
    return failures


def _median_us(cupy: Any, stream: Any, run: Callable[[], None], repetitions: int, rounds: int) -> float:
    """Median over rounds of the time of one of `repetitions` launches that ``run`` makes."""
    run()
    times = []
    for _ in range(rounds):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(stream)
        run()
        end.record(stream)
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / repetitions)
    return statistics.median(times)


def _graph_us(cupy: Any, launches: Sequence[Callable[[], Any]], rounds: int) -> float:
    """Median microseconds of one of the launches, which are replayed in one graph."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        launches[0]()
        stream.synchronize()
        stream.begin_capture()
        for launch in launches:
            launch()
        graph = stream.end_capture()
        return _median_us(cupy, stream, lambda: graph.launch(stream), len(launches), rounds)


def _torch_us(cupy: Any, q: Any, k: Any, v: Any, causal: bool, rounds: int) -> dict[str, float]:
    """Microseconds of torch's SDPA back ends on the same arrays."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return {}
    kind = torch.float16 if q.dtype == np.float16 else torch.bfloat16
    a, b, c = (torch.from_dlpack(x.view(np.int16)).view(kind).transpose(1, 2) for x in (q, k, v))
    if a.shape[1] != b.shape[1]:  # the flash back end has no grouped-query mode in every version
        b, c = (x.repeat_interleave(a.shape[1] // x.shape[1], dim=1) for x in (b, c))
    found: dict[str, float] = {}
    stream = torch.cuda.Stream()
    outer = cupy.cuda.ExternalStream(stream.cuda_stream)
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        try:
            with torch.cuda.stream(stream), sdpa_kernel(backend):

                def run() -> None:
                    torch.nn.functional.scaled_dot_product_attention(a, b, c, is_causal=causal)

                run()
                stream.synchronize()
                found[name] = _median_us(cupy, outer, run, 1, rounds)
        except RuntimeError as error:
            print(f"! torch {name}: {str(error).splitlines()[0]}")
    return found


def time_prefill(cupy: Any, dtype: Any, head_dim: int, heads: int, kv_heads: int, rounds: int) -> None:
    """A table of TFLOP/s: every variant, and torch where it is installed."""
    from cukern.jit import device

    info = device()
    print(f"prefill TFLOP/s, {heads}/{kv_heads} heads, D={head_dim}; * chosen, x against torch flash")
    for batch, length in _PREFILL:
        q = _normal(cupy, (batch, length, heads, head_dim), dtype, 8)
        k, v = (_normal(cupy, (batch, length, kv_heads, head_dim), dtype, seed) for seed in (9, 10))
        out = cupy.empty_like(q)
        options = _options(head_dim)
        chosen = options[0]
        if isinstance(chosen, Variant):
            chosen = select(head_dim, batch * length, heads, False, info.sm_count, info.shared_mem_per_sm)
        for causal in (True, False):
            flops = 4.0 * batch * heads * length * length * head_dim / (2 if causal else 1)
            peers = _torch_us(cupy, q, k, v, causal, rounds)
            line = [f"{name} {flops / us * 1e-6:.0f}" for name, us in peers.items()]
            for variant in options:
                launch = partial(_attention_prefill_variant, variant, q, k, v, causal=causal, out=out)
                us = _graph_us(cupy, [launch] * 3, rounds)
                ratio = f" ({peers['flash'] / us:.2f}x)" if "flash" in peers else ""
                mark = "*" if variant == chosen else ""
                line.append(f"{mark}{_label(variant)} {flops / us * 1e-6:.0f}{ratio}")
            print(f"  ({batch}, {length}) {'causal' if causal else 'full  '}  " + "  ".join(line))


def time_decode(cupy: Any, dtype: Any, head_dim: int, heads: int, kv_heads: int, rounds: int) -> None:
    """A table of microseconds and GB/s: the chosen number of splits, and others."""
    resident = resident_blocks(head_dim, heads // kv_heads)
    print(f"decode us and GB/s, {heads}/{kv_heads} heads, D={head_dim}, pages of {_PAGE}; * chosen; splits in brackets")
    for batch, length in _DECODE:
        per_copy = 4 * batch * length * kv_heads * head_dim
        copies = max(1, min(384, -(-(192 << 20) // per_copy)))  # walk past the L2 cache
        k_cache, v_cache, tables, _ = _pages(cupy, batch * copies, length, kv_heads, head_dim, dtype)
        lengths = cupy.full(batch, length, np.int32)
        q = _normal(cupy, (batch, heads, head_dim), dtype, 11)
        out = cupy.empty_like(q)
        items, chunks = batch * kv_heads, -(-length // 128)
        chosen = min(select_splits(items, chunks, resident), chunks)
        line = []
        for splits in sorted({1, 2, max(1, chosen // 2), chosen, min(2 * chosen, chunks), min(4 * chosen, chunks)}):
            if splits > chunks or (splits == 1 and batch == 1 and length > 4096):
                continue
            launches = [
                partial(_attention_decode_splits, splits, q, k_cache, v_cache, table, lengths, out=out)
                for table in tables.reshape(copies, batch, -1)
            ]
            us = _graph_us(cupy, launches * (8 if copies == 1 and per_copy < (64 << 20) else 1), rounds)
            mark = "*" if splits == chosen else ""
            line.append(f"{mark}[{splits}] {us:.1f} us {per_copy / us * 1e-3:.0f}")
        print(f"  batch {batch:3} context {length:5}  " + "  ".join(line))
        del k_cache, v_cache, launches
        cupy.get_default_memory_pool().free_all_blocks()


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the number of failed checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7, help="timed replays; the median counts")
    parser.add_argument("--only", choices=["check", "prefill", "decode"], help="only this part")
    options = parser.parse_args(arguments)

    import cupy

    from cukern import jit

    started = time.perf_counter()
    dtype = ml_dtypes.bfloat16 if options.dtype == "bfloat16" else np.float16
    print(f"{jit.device().name}, {options.dtype}")
    failures = check(cupy) if options.only in (None, "check") else 0
    shape = (options.head_dim, options.heads, options.kv_heads)
    if options.only in (None, "prefill"):
        time_prefill(cupy, dtype, *shape, options.rounds)
    if options.only in (None, "decode"):
        time_decode(cupy, dtype, *shape, options.rounds)
    print(f"{time.perf_counter() - started:.0f} s")
    return failures


if __name__ == "__main__":
    raise SystemExit(main())
