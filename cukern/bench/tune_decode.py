"""The one-launch decode step on this GPU: ``python -m cukern.bench.tune_decode``.

A random model of a published shape is made in device memory. First the logits are compared with `Qwen3.forward`, bit
for bit; then a step is timed as a CUDA graph over batches and contexts; then a build with clock readings shows where
the time of a layer goes. The floor counts every weight once and the cached keys and values, at 4.8 TB/s.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from typing import Any

import ml_dtypes
import numpy as np

from cukern.bench.profile_decode import table
from cukern.bench.random_model import Noise, make_model
from cukern.engine.graphs import context_widths, shortest_context
from cukern.models import ForwardBatch, PagedKVCache, Qwen3
from cukern.models.decode_step import DecodeStep
from cukern.testing.checkpoints import QWEN3_SHAPES

_BANDWIDTH = 4.8e12
_PAGE = 16
_CASES = [(1, 127), (1, 128), (1, 1024), (1, 4096), (1, 32768)]
_CASES += [(batch, context) for context in (128, 1024) for batch in (2, 4, 8, 16)]
_CHECKS = [(1, 127), (1, 128), (1, 2000), (1, 5000), (1, 20000), (2, 300), (3, 200), (4, 3000), (8, 128), (16, 40)]


def make_batch(cupy: Any, model: Qwen3, batch: int, context: int, seed: int = 0) -> tuple[ForwardBatch, PagedKVCache]:
    """Sequences with `context` cached tokens each and one to decode, in shuffled pages."""
    columns = context // _PAGE + 1
    cache = PagedKVCache(model.config, batch * columns, _PAGE, model.device, model.dtype)
    noise = Noise(cupy)
    noise.fill(cache.k, 1.0)
    noise.fill(cache.v, 1.0)
    rng = np.random.default_rng(seed)
    tables = rng.permutation(batch * columns).astype(np.int32).reshape(batch, columns)
    put = model.device.put
    return ForwardBatch(
        token_ids=put(rng.integers(0, model.config.vocab_size, batch).astype(np.int32)),
        positions=put(np.full(batch, context, np.int32)),
        slot_mapping=put(tables[:, context // _PAGE].astype(np.int64) * _PAGE + context % _PAGE),
        cu_seqlens_q=put(np.arange(batch + 1, dtype=np.int32)),
        seq_lens=put(np.full(batch, context + 1, np.int32)),
        block_tables=put(tables),
        max_query_len=1,
    ), cache


def shortest(context: int) -> int:
    """`DecodeStep`'s ``min_context`` where the engine decodes sequences of that length."""
    widths = context_widths(40960, _PAGE)
    return shortest_context(widths, next((w for w in widths if w * _PAGE > context), widths[-1]), _PAGE)


def check(cupy: Any, model: Qwen3, batch: int, context: int) -> bool:
    """Whether logits and cache after a step have the bits of `Qwen3.forward`."""
    inputs, cache = make_batch(cupy, model, batch, context)
    step = DecodeStep(model, cache, batch, int(inputs.block_tables.shape[1]), min_context=shortest(context))
    step.load(inputs)
    got = cupy.asnumpy(step.run()).view(np.uint32)
    keys = cupy.asnumpy(cache.k.view(np.uint16))
    want = cupy.asnumpy(model.forward(inputs, cache)).view(np.uint32)
    same_keys = bool((keys == cupy.asnumpy(cache.k.view(np.uint16))).all())
    different = int((got != want).sum())
    nan = bool(np.isnan(want.view(np.float32)).any())
    print(
        f"check B{batch} context {context}: {different} of {got.size} logits differ, cache "
        f"{'same' if same_keys else 'DIFFERS'}{', NaN' if nan else ''}",
        flush=True,
    )
    return different == 0 and same_keys and not nan


def graph_times(cupy: Any, step: DecodeStep, samples: int = 100) -> list[float]:
    """Microseconds of each of `samples` replays, queued one behind another."""
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        step.run()
        stream.synchronize()
        stream.begin_capture()
        step.run()
        graph = stream.end_capture()
        for _ in range(20):
            graph.launch(stream)
        stream.synchronize()
        events = [cupy.cuda.Event() for _ in range(samples + 1)]
        events[0].record(stream)
        for event in events[1:]:
            graph.launch(stream)
            event.record(stream)
        stream.synchronize()
    return [cupy.cuda.get_elapsed_time(a, b) * 1e3 for a, b in itertools.pairwise(events)]


def step_bytes(model: Qwen3, batch: int, context: int) -> int:
    """Bytes that a step must read."""
    c = model.config
    weights = model.weights.nbytes - (0 if c.tie_word_embeddings else int(model.weights.embed.nbytes))
    return weights + batch * context * c.num_hidden_layers * 2 * c.kv_size * model.dtype.itemsize


def time_cases(cupy: Any, model: Qwen3, cases: list[tuple[int, int]]) -> None:
    print(f"{'batch':>5} {'context':>7} {'us':>8} {'best':>8} {'tokens/s':>9} {'% of 4.8 TB/s':>13}  layout")
    for batch, context in cases:
        problem = DecodeStep.supported(model, batch)
        if problem:
            print(f"{batch:5} {context:7} not run: {problem}")
            continue
        inputs, cache = make_batch(cupy, model, batch, context)
        step = DecodeStep(model, cache, batch, int(inputs.block_tables.shape[1]), min_context=shortest(context))
        step.load(inputs)
        times = graph_times(cupy, step)
        us = statistics.median(times)
        floor = step_bytes(model, batch, context) / _BANDWIDTH * 1e6
        layout = step.layout
        print(
            f"{batch:5} {context:7} {us:8.1f} {min(times):8.1f} {batch / us * 1e6:9.0f} {100 * floor / us:13.1f}  "
            f"ring {layout.slots} x {layout.ring_k}{' overlaid' if layout.overlay else ''}",
            flush=True,
        )


def profile(cupy: Any, model: Qwen3, batch: int, context: int) -> None:
    """Time of each part of a layer, from a build with clock readings; see profile_decode."""
    inputs, cache = make_batch(cupy, model, batch, context)
    step = DecodeStep(
        model, cache, batch, int(inputs.block_tables.shape[1]), min_context=shortest(context), profile=True
    )
    step.load(inputs)
    us = statistics.median(graph_times(cupy, step))
    stamps = cupy.asnumpy(step.stamps)
    whole = (stamps[:, -1, 7, 0] - stamps[:, 0, 0, 0]).astype(np.float64)  # to the last logits
    rate = float(whole.mean()) / us  # the launch itself is counted in: a few percent
    layer = float((stamps[:, -1, 0, 0] - stamps[:, 1, 0, 0]).mean()) / rate / (model.config.num_hidden_layers - 1)
    print(f"profile B{batch} context {context}: {us:.1f} us a step, {rate:.0f} cycles a us, {layer:.2f} us a layer")
    print("\n".join(table(stamps, rate)), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.6B", choices=sorted(QWEN3_SHAPES))
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--case", action="append", metavar="BATCH,CONTEXT", help="time this one (repeatable)")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-profile", action="store_true")
    args = parser.parse_args()
    from cukern.bench.machine import require_gpu

    cupy = require_gpu()
    began = time.perf_counter()
    dtype = np.dtype(np.float16 if args.dtype == "float16" else ml_dtypes.bfloat16)
    model = make_model(cupy, args.model, dtype, args.layers)
    print(f"{model} made in {time.perf_counter() - began:.1f} s", flush=True)
    good = True
    if not args.no_check:
        for batch, context in _CHECKS:
            if DecodeStep.supported(model, batch) is None:
                good &= check(cupy, model, batch, context)
    cases = [tuple(int(n) for n in case.split(",")) for case in args.case or []]
    time_cases(cupy, model, [(b, n) for b, n in cases] or _CASES)
    if not args.no_profile:
        for batch, context in ((1, 127), (1, 4096)):
            profile(cupy, model, batch, context)
    print(f"{time.perf_counter() - began:.0f} s in all" + ("" if good else "; BITS DIFFER"))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
