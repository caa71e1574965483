"""Times every variant of the linear layer on this GPU: ``python -m cukern.bench.tune_linear``.

Before a variant is timed its result is compared bit for bit with one fixed variant's, and that one with float64. The
peer is ``torch.mm`` (cuBLAS) in the same process if torch is installed, else cuBLAS through CuPy outside a graph.
Launches are replayed from a CUDA graph that walks through copies of the weight larger than the L2 cache; each product
may start while the one ahead ends, as in a model.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cukern.bench.linear import LinearCase, cases
from cukern.ops import _linear_variants as variants
from cukern.ops._arrays import CTYPES
from cukern.ops.linear import _linear_variant, linear

_ROTATE_BYTES = 192 << 20
_GRAPH_US = 1500.0
_LINE = "{:12} {:>5} {:>8} {:>8} {:>6} {:>5} {:>8} {:>7}  {}"
_CONTROL = variants.TileVariant(64, 64, 64, 32, 32, 4, 2)
"""Every other variant must give the bits of this one."""


def _values(cupy: Any, shape: tuple[int, ...], dtype: Any, seed: int, scale: float = 1.0) -> Any:
    """Normal numbers on the GPU, repeated with an odd period (drawing billions on the host would take minutes)."""
    period = min(math.prod(shape), (1 << 22) - 3)
    base = (np.random.default_rng(seed).standard_normal(period, dtype=np.float32) * scale).astype(dtype)
    return cupy.resize(cupy.asarray(base.view(np.int16)), shape).view(dtype)


def _repetitions(case: LinearCase, copies: int) -> int:
    guess = 2.0 + case.floor_us(4e12, 4e14)
    return max(1, min(64, max(copies, int(_GRAPH_US / guess)))) if guess < _GRAPH_US else 1


def _time_variant(
    cupy: Any, variant: variants.Variant, x: Any, weights: Any, to: dict[str, Any], repetitions: int, rounds: int
) -> float:
    """Median microseconds of one launch, replayed in a graph of `repetitions`. `to`: out or residual."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        _linear_variant(variant, x, weights[0], **to, static_weight=True)
        stream.synchronize()
        stream.begin_capture()
        for i in range(repetitions):
            _linear_variant(variant, x, weights[i % len(weights)], **to, static_weight=True)
        graph = stream.end_capture()
        return _time_replay(cupy, stream, lambda: graph.launch(stream), repetitions, rounds)


def _time_replay(cupy: Any, stream: Any, replay: Callable[[], None], repetitions: int, rounds: int) -> float:
    replay()
    times = []
    for _ in range(rounds):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(stream)
        replay()
        end.record(stream)
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / repetitions)
    return statistics.median(times)


class _Torch:
    """cuBLAS through torch, in a graph of its own."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.name = f"torch {torch.__version__}"

    def view(self, array: Any) -> Any:
        kind = self.torch.float16 if array.dtype == np.float16 else self.torch.bfloat16
        return self.torch.from_dlpack(array.view(np.int16)).view(kind)

    def time(self, cupy: Any, x: Any, weights: Any, out: Any, repetitions: int, rounds: int) -> float:
        torch = self.torch
        a, b, c = self.view(x), self.view(weights), self.view(out)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                torch.mm(a, b[0].t(), out=c)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for i in range(repetitions):
                    torch.mm(a, b[i % b.shape[0]].t(), out=c)
            outer = cupy.cuda.ExternalStream(stream.cuda_stream)
            return _time_replay(cupy, outer, graph.replay, repetitions, rounds)


class _CupyCublas:
    """cuBLAS through CuPy: cannot be captured, so launches are timed back to back."""

    name = "cuBLAS through CuPy (no graph)"

    def time(self, cupy: Any, x: Any, weights: Any, out: Any, repetitions: int, rounds: int) -> float:
        stream = cupy.cuda.Stream(non_blocking=True)

        def replay() -> None:
            for i in range(repetitions):
                linear(x, weights[i % len(weights)], out=out, backend="cublas")

        with stream:
            return _time_replay(cupy, stream, replay, repetitions, rounds)


def _peer() -> _Torch | _CupyCublas:
    try:
        return _Torch()
    except ImportError:
        return _CupyCublas()


def _compile(work: Sequence[tuple[LinearCase, list[variants.Variant]]], dtype: Any) -> int:
    """Compile everything that will be timed, on all processors."""
    from cukern import jit
    from cukern.jit import registry

    ctype = CTYPES[np.dtype(dtype)]
    specs: dict[Any, None] = {}
    for case, options in work:
        segment = variants.template_segment(case.n, case.k)
        for option in [*options, _CONTROL]:
            for out in (ctype, "float"):
                template = (ctype, out, *option.template(segment))
                specs[registry.KernelSpec(option.file, option.kernel, template)] = None
    built = registry.compile_all([jit.device().arch], specs=list(specs))
    for failed in [b for b in built if b.error]:
        print(f"! {failed.spec}: {failed.error.splitlines()[0]}")
    for spilled in [b for b in built if b.resources is not None and b.resources.spill_stores]:
        print(f"! {spilled.spec}: spills {spilled.resources.spill_stores} bytes")  # type: ignore[union-attr]
    return len(built)


def _check(cupy: Any, case: LinearCase, x: Any, weight: Any, options: Sequence[variants.Variant]) -> tuple[int, float]:
    """How many variants differ in any bit from the control, and its error against float64 (64 columns)."""
    base = _linear_variant(_CONTROL, x, weight, dtype=np.float32)
    columns = np.unique(np.linspace(0, case.n - 1, 64).astype(np.int64))
    some = slice(0, min(case.m, 256))
    chosen = cupy.asnumpy(weight.view(np.int16)[cupy.asarray(columns)]).view(weight.dtype)
    exact = cupy.asnumpy(x[some]).astype(np.float64) @ chosen.astype(np.float64).T
    error = float(np.abs(cupy.asnumpy(base[some][:, cupy.asarray(columns)]) - exact).max())
    different = 0
    for option in options:
        result = _linear_variant(option, x, weight, dtype=np.float32)
        if not bool((result.view(np.uint32) == base.view(np.uint32)).all()):
            different += 1
            print(f"! {case.model} {case.layer} M={case.m}: {option} differs in bits from {_CONTROL}")
    return different, error


def _options(case: LinearCase, gpu: variants.Gpu) -> list[variants.Variant]:
    chosen = variants.select(case.m, case.n, case.k, True, gpu)
    return list(dict.fromkeys([chosen, *variants.candidates(case.m, case.n, case.k, gpu)]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the number of variants whose bits differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,64,128,2048,8192", help="values of M")
    parser.add_argument("--models", default="0.6b,8b")
    parser.add_argument("--layers", default="", help="only these: qkv,o,gate_up,down,lm_head")
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16"])
    parser.add_argument(
        "--residual", action="store_true", help="o and down add into float32 rows, which the peer's do not"
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed replays; the median counts")
    parser.add_argument("--all", action="store_true", help="print every variant, not only the chosen and the best")
    parser.add_argument("--csv", type=Path, help="write every timing here")
    options = parser.parse_args(arguments)

    import cupy

    from cukern import jit

    started = time.perf_counter()
    dtype = ml_dtypes.bfloat16 if options.dtype == "bfloat16" else np.float16
    wanted = [
        c
        for c in cases(options.models.split(","), [int(m) for m in options.rows.split(",")])
        if not options.layers or c.layer in options.layers.split(",")
    ]
    device, peer = jit.device(), _peer()
    work = [(case, _options(case, variants.Gpu.of(device))) for case in wanted]
    count = _compile(work, dtype)
    seconds = time.perf_counter() - started
    print(f"{device.name}, {options.dtype}, peer {peer.name}; {count} kernels in {seconds:.0f} s")
    print("us a product (graph, weights past L2); floor: 4.2 TB/s, 790 TFLOP/s; error against float64, |y| about 1")
    print(_LINE.format("layer", "M", "peer", "chosen", "x peer", "floor", "best", "error", "chosen | best"))

    rows: list[list[Any]] = []
    ratios: dict[str, list[float]] = {}
    different = 0
    weights: Any = None
    for case, choices in sorted(work, key=lambda w: (w[0].model, w[0].n * w[0].k, w[0].n, w[0].m)):
        copies = max(1, min(48, -(-_ROTATE_BYTES // (2 * case.n * case.k))))
        if weights is None or weights.shape != (copies, case.n, case.k):
            weights = None  # freed before the next is made
            weights = _values(cupy, (copies, case.n, case.k), dtype, 1, case.k**-0.5)
        x = _values(cupy, (case.m, case.k), dtype, 2)
        out = cupy.empty((case.m, case.n), dtype)
        into = options.residual and case.out_bytes == 8
        to = {"residual": cupy.zeros((case.m, case.n), np.float32)} if into else {"out": out}
        wrong, error = _check(cupy, case, x, weights[0], choices)
        different += wrong
        repetitions = _repetitions(case, copies)
        peer_us = peer.time(cupy, x, weights, out, repetitions, options.rounds)
        timed: dict[variants.Variant, float] = {}
        for option in choices:
            timed[option] = _time_variant(cupy, option, x, weights, to, repetitions, options.rounds)
            rows.append([case.model, case.layer, case.m, case.n, case.k, str(option), timed[option], peer_us])
        chosen = choices[0]
        best = min(timed, key=timed.__getitem__)
        floor = case.floor_us(4.2e12, 790e12) / timed[chosen]
        ratio = peer_us / timed[chosen]
        kind = "M <= 16" if case.m <= 16 else "M <= 128" if case.m <= 128 else "M > 128"
        ratios.setdefault(f"{case.model} {kind}", []).append(ratio)
        better = "" if best == chosen else f" | {best}"
        figures = [f"{v:.2f}" for v in (peer_us, timed[chosen], ratio)]
        figures += [f"{floor:.0%}", f"{timed[best]:.2f}", f"{error:.1e}"]
        print(_LINE.format(f"{case.model} {case.layer}", case.m, *figures, f"{chosen}{better}"))
        if options.all:
            for option, us in sorted(timed.items(), key=lambda item: item[1]):
                print(f"{'':19} {us:8.2f}  {option}")
    for name, values in ratios.items():
        print(f"{name}: {statistics.geometric_mean(values):.2f} x peer (geometric mean of {len(values)})")
    verdict = "all variants gave equal bits" if different == 0 else f"{different} variants DIFFER in bits"
    print(f"{verdict}; {time.perf_counter() - started:.0f} s")
    if options.csv is not None:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["model", "layer", "m", "n", "k", "variant", "us", "peer_us"])
            writer.writerows(rows)
    return different


if __name__ == "__main__":
    raise SystemExit(main())
