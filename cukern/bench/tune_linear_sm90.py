"""Checks and times the Hopper linear layer on this GPU: ``python -m cukern.bench.tune_linear_sm90``.

Three steps, each over every variant: products of small integers, which are exact and show *which* element is wrong;
random products, bit for bit against the portable kernel, with bias and residual; then times, beside ``torch.mm`` in
the same process (CUDA graph, copies of the weight past the L2 cache). GPU work runs in a child process that is stopped
when a task takes too long, so that a hang costs seconds and names the variant.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from cukern.bench.linear import LinearCase, cases
from cukern.bench.tune_linear import _ROTATE_BYTES, _peer, _repetitions, _time_replay, _values
from cukern.ops import _linear_sm90 as hopper
from cukern.ops import _linear_variants as portable
from cukern.ops._arrays import CTYPES
from cukern.ops._linear_sm90 import HopperVariant, SplitVariant, Variant
from cukern.ops._linear_variants import template_segment

_HELLO_SECONDS, _TASK_SECONDS = 90.0, 20.0
_CONTROL = portable.TileVariant(64, 64, 64, 32, 32, 4, 2)
_DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
# Odd tails in every direction; the second needs more tiles than a GPU has multiprocessors. The weights of the "whole"
# shapes have 2^24 elements or more and so one segment.
_SEGMENTED_SHAPES = ((300, 200, 328), (2100, 2056, 520), (130, 1032, 1000))
_WHOLE_SHAPES = ((300, 4104, 4104), (1030, 6152, 2736))
_LINE = "{:12} {:>5} {:>8} {:>8} {:>6} {:>5} {:>7} {:>8} {:>9}  {}"


# ---------------------------------------------------------------------------------------------------- in the child


@functools.lru_cache(maxsize=8)
def _exact_inputs(kind: str, m: int, n: int, k: int, dtype: np.dtype) -> tuple[Any, Any, np.ndarray]:
    """x and weight on the GPU, and the exact product."""
    import cupy

    rows, columns, inner = np.arange(m), np.arange(n), np.arange(k)
    if kind == "one-hot":  # row i picks column 7 i of the weight
        x = (inner[None] == (7 * rows % k)[:, None]).astype(np.float32)
        w = ((columns[:, None] * 5 + inner[None] * 3) % 251 - 125).astype(np.float32)
        want = np.ascontiguousarray(w[:, 7 * rows % k].T)
    else:  # integers below 2^24: exact in any order
        x = ((rows[:, None] * 2 + inner[None]) % 5 - 2).astype(np.float32)
        w = ((columns[:, None] * 3 + inner[None]) % 7 - 3).astype(np.float32)
        want = x @ w.T
    x, w = x.astype(dtype), w.astype(dtype)
    return cupy.asarray(x.view(np.int16)).view(dtype), cupy.asarray(w.view(np.int16)).view(dtype), want


@functools.lru_cache(maxsize=8)
def _random_products(m: int, n: int, k: int, dtype: np.dtype) -> tuple[Any, ...]:
    """x, weight, bias, residual, and the portable kernel's results: float32, half, with bias and residual."""
    import cupy

    from cukern.ops.linear import _linear_variant

    x, w = _values(cupy, (m, k), dtype, 2), _values(cupy, (n, k), dtype, 1, k**-0.5)
    x[m // 2] = 0  # a row whose products are all -0 or +0
    x[m // 3] = -0.0
    rng = np.random.default_rng(3)
    bias = cupy.asarray(rng.standard_normal(n, np.float32))
    residual = cupy.asarray(rng.standard_normal((m, n), np.float32))
    wants = [_linear_variant(_CONTROL, x, w, dtype=d) for d in (np.float32, dtype)]
    wants.append(_linear_variant(_CONTROL, x, w, bias=bias, residual=residual.copy()))
    return x, w, bias, residual, wants


def _difference(got: np.ndarray, want: np.ndarray) -> str:
    """Where two results differ: count, first element, and which rows and columns modulo a tile; empty if equal."""
    wrong = (got.view(np.uint32) != want.view(np.uint32)) & ~((got == 0) & (want == 0))
    if not wrong.any():
        return ""
    at = np.argwhere(wrong)
    i, j = (int(v) for v in at[0])

    def some(values: np.ndarray) -> str:
        different = np.unique(values)
        return f"{different.size}: " + ",".join(map(str, different[:12])) + (".." if different.size > 12 else "")

    return (
        f"{len(at)} of {wrong.size} differ, first [{i}, {j}]: got {got[i, j]!r}, want {want[i, j]!r}; "
        f"rows % 128 ({some(at[:, 0] % 128)}); columns % 64 ({some(at[:, 1] % 64)})"
    )


def _run(variant: Variant, x: Any, w: Any, out: Any, bias: Any = None, residual: Any = None) -> None:
    m, k = x.shape
    if hopper.launched(x, w, bias, residual, out, m, w.shape[0], k, variant, static_weight=True) is None:
        raise RuntimeError(f"the kernel does not take x {x.shape}, weight {w.shape} on this GPU")


def _exact(cupy: Any, variant: Variant, shape: Sequence[int], dtype: np.dtype) -> str:
    m, n, k = shape
    for kind in ("one-hot", "ramp"):
        x, w, want = _exact_inputs(kind, m, n, k, dtype)
        out = cupy.full((m, n), np.nan, np.float32)
        _run(variant, x, w, out)
        found = _difference(cupy.asnumpy(out), want)
        if found:
            return f"{kind}: {found}"
    return ""


def _bits(cupy: Any, variant: Variant, shape: Sequence[int], dtype: np.dtype) -> str:
    m, n, k = shape
    x, w, bias, residual, wants = _random_products(m, n, k, dtype)
    for what, want in zip(("float32", "half", "bias and residual"), wants):
        if what == "bias and residual":
            if not variant.passes(4):
                continue
            got = residual.copy()
            _run(variant, x, w, got, bias, got)
        else:
            got = cupy.full((m, n), np.nan, np.float32).astype(want.dtype)
            _run(variant, x, w, got)
        word = np.uint32 if want.dtype.itemsize == 4 else np.uint16
        if not bool((want.view(word) == got.view(word)).all()):
            a, b = (cupy.asnumpy(v.view(word)).view(want.dtype).astype(np.float32) for v in (got, want))
            return f"{what}: {_difference(a, b) or 'only signs of zeros differ'}"
    return ""


class _Timer:
    """Times products; keeps the weights of the last shape, since making them takes longer than timing."""

    def __init__(self, cupy: Any, rounds: int) -> None:
        self.cupy, self.rounds, self.peer = cupy, rounds, _peer()
        self.weights: Any = None
        self.case: LinearCase | None = None
        self.dtype = np.dtype(np.float16)

    def prepare(self, case: LinearCase, dtype: np.dtype) -> None:
        if self.case == case and self.dtype == dtype:
            return
        copies = max(1, min(48, -(-_ROTATE_BYTES // (2 * case.n * case.k))))
        if self.weights is None or self.weights.shape != (copies, case.n, case.k) or self.weights.dtype != dtype:
            self.weights = None
            self.weights = _values(self.cupy, (copies, case.n, case.k), dtype, 1, case.k**-0.5)
        self.case, self.dtype = case, dtype
        self.x = _values(self.cupy, (case.m, case.k), dtype, 2)
        self.out = self.cupy.empty((case.m, case.n), dtype)
        self.logits = self.cupy.empty((case.m, case.n), np.float32) if case.out_bytes == 4 else self.out
        self.stream = self.cupy.zeros((case.m, case.n), np.float32)
        self.repetitions = _repetitions(case, copies)

    def time_peer(self) -> float:
        if self.case is not None and self.case.flops > 5e10:
            time.sleep(0.1)
        return self.peer.time(self.cupy, self.x, self.weights, self.out, self.repetitions, self.rounds)

    def time(self, variant: Variant, residual: bool) -> float:
        cupy = self.cupy
        if self.case is not None and self.case.flops > 5e10:
            time.sleep(0.1)  # large products run into the power limit, one after the other more so
        target = self.stream if residual else self.logits
        stream = cupy.cuda.Stream(non_blocking=True)

        def one(i: int) -> None:
            w = self.weights[i % len(self.weights)]
            _run(variant, self.x, w, target, None, target if residual else None)

        with stream:
            one(0)
            stream.synchronize()
            stream.begin_capture()
            for i in range(self.repetitions):
                one(i)
            graph = stream.end_capture()
            return _time_replay(cupy, stream, lambda: graph.launch(stream), self.repetitions, self.rounds)


def _child(rounds: int) -> int:
    """Answers tasks, one JSON line each, until standard input ends."""
    import cupy

    from cukern import jit

    device, timer = jit.device(), _Timer(cupy, rounds)
    cupy.zeros(1)
    print(json.dumps({"name": device.name, "sm_count": device.sm_count, "peer": timer.peer.name}), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        dtype = _DTYPES[task["dtype"]]
        answer: Any
        try:
            if task["kind"] in ("exact", "bits"):
                check = _exact if task["kind"] == "exact" else _bits
                answer = check(cupy, _variant(task["variant"]), task["shape"], dtype)
            else:
                timer.prepare(LinearCase(**task["case"]), dtype)
                variant = task.get("variant")
                answer = timer.time(_variant(variant), task["residual"]) if variant else timer.time_peer()
            print(json.dumps({"answer": answer}), flush=True)
        except Exception as error:  # the parent prints it; after a fault of the GPU this process is of no more use
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
            if "CUDA" in str(error) or "cu" in type(error).__name__.lower():
                return 1
    return 0


# ---------------------------------------------------------------------------------------------------- in the parent


class _Failed(Exception):
    pass


class _Worker:
    """The child process, started again after a failure."""

    def __init__(self, rounds: int) -> None:
        self.command = [sys.executable, "-m", "cukern.bench.tune_linear_sm90", "--child", "--rounds", str(rounds)]
        self.process: subprocess.Popen[str] | None = None
        self.lines: queue.Queue[str] = queue.Queue()
        self.hello: dict[str, Any] = {}
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.lines = queue.Queue()
        threading.Thread(target=self._read, args=(self.process, self.lines), daemon=True).start()
        self.hello = json.loads(self._line(_HELLO_SECONDS))

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    def _line(self, seconds: float) -> str:
        try:
            line = self.lines.get(timeout=seconds)
        except queue.Empty:
            self.stop()
            raise _Failed(f"no answer in {seconds:.0f} s: hangs") from None
        if not line:
            self.stop()
            raise _Failed("the process ended")
        return line

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def ask(self, task: dict[str, Any]) -> Any:
        """The answer to a task; _Failed with a reason if it takes too long or fails."""
        if self.process is None:
            self.start()
        assert self.process is not None
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(task) + "\n")
            self.process.stdin.flush()
        except OSError:
            self.stop()
            raise _Failed("the process ended") from None
        answer = json.loads(self._line(_TASK_SECONDS))
        if "error" in answer:
            self.stop()  # a fault of the GPU stays in its process
            raise _Failed(answer["error"])
        return answer["answer"]


def _segment(case: LinearCase) -> int:
    return template_segment(case.n, case.k)


def _compile(work: Iterable[tuple[Variant, int, str, int]]) -> int:
    """Compile (variant, segment, dtype, bytes of an output as in LinearCase) into the cache on all processors.

    Prints what spills.
    """
    from cukern.jit import registry

    specs: dict[Any, None] = {}
    for variant, segment, dtype, out_bytes in work:
        ctype = CTYPES[_DTYPES[dtype]]
        kind, item = (ctype, 2) if out_bytes == 2 else ("float", 4)
        if out_bytes == 8 and not variant.passes(4):
            continue
        template = (ctype, kind, *variant.template(segment, variant.through(item, out_bytes == 8)))
        specs[registry.KernelSpec("linear_sm90.cu", variant.kernel, template)] = None
        template = (ctype, kind, *_CONTROL.template(segment))
        specs[registry.KernelSpec("linear.cu", _CONTROL.kernel, template)] = None
    built = registry.compile_all([hopper.ARCH], specs=list(specs))
    for b in built:
        if b.error:
            print(f"! {b.spec}: {b.error.splitlines()[0]}")
        elif b.resources is not None and b.resources.spill_stores:
            print(f"! {b.spec}: spills {b.resources.spill_stores} bytes")
    return len(built)


def _same_kernel(variant: Variant) -> Variant:
    """The variant without what does not change the kernel's text."""
    return dataclasses.replace(variant, group=8) if isinstance(variant, HopperVariant) else variant


def _variant(fields: dict[str, Any]) -> Variant:
    return SplitVariant(**fields) if "split" in fields else HopperVariant(**fields)


def _check_all(
    worker: _Worker, pairs: Iterable[tuple[Variant, int]], chosen: set[Any], dtypes: Sequence[str]
) -> set[Any]:
    """Exact and random products by every kernel (by the chosen in both dtypes); returns those that fail."""
    bad: set[Any] = set()
    count = 0
    for variant, segment in dict.fromkeys((_same_kernel(v), s) for v, s in pairs):
        shapes = _SEGMENTED_SHAPES if segment else _WHOLE_SHAPES
        tasks = [("bits", shape, dtypes[0]) for shape in shapes]
        if (variant, segment) in chosen:
            tasks.append(("bits", shapes[0], dtypes[1]))
        for kind, shape, dtype in tasks:
            task = {"kind": kind, "variant": dataclasses.asdict(variant), "shape": shape, "dtype": dtype}
            count += 1
            try:
                found = worker.ask(task)
            except _Failed as failure:
                found = str(failure)
            if found:
                print(f"! {variant} segment {segment} {kind} {shape} {dtype}: {found}")
                bad.add((variant, segment))
                break
    print(f"{count} checks, {len(bad)} kernels wrong", flush=True)
    return bad


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the number of kernels that are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="128,256,2048,8192", help="values of M")
    parser.add_argument("--models", default="0.6b,8b")
    parser.add_argument("--layers", default="qkv,o,gate_up,down")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(_DTYPES))
    parser.add_argument("--rounds", type=int, default=5, help="timed replays; the median counts")
    parser.add_argument("--seconds", type=float, default=300.0, help="stop timing after this long")
    parser.add_argument("--top", type=int, default=4, help="variants to print of each product")
    parser.add_argument("--no-check", action="store_true", help="times alone")
    parser.add_argument("--no-time", action="store_true", help="checks alone")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        return _child(options.rounds)

    started = time.perf_counter()
    wanted = [
        c
        for c in cases(options.models.split(","), [int(m) for m in options.rows.split(",")])
        if c.layer in options.layers.split(",")
    ]
    worker = _Worker(options.rounds)
    sm_count = worker.hello["sm_count"]
    work = {case: hopper.candidates(case.m, case.n, case.k, sm_count, case.out_bytes == 8) for case in wanted}
    pairs = [(v, template_segment(c.n, c.k)) for c, found in work.items() for v in found]
    dtypes = [options.dtype, *(d for d in _DTYPES if d != options.dtype)]
    chosen = {(_same_kernel(found[0]), template_segment(c.n, c.k)) for c, found in work.items()}
    if options.no_check:
        needed = {(v, s, dtypes[0], c.out_bytes) for c, found in work.items() for v in found for s in [_segment(c)]}
    else:
        needed = {(v, s, dtypes[0], out) for v, s in pairs for out in (2, 4, 8)}
        needed |= {(v, s, dtypes[1], out) for v, s in chosen for out in (2, 4, 8)}
    compiled = _compile(needed)
    seconds = time.perf_counter() - started
    print(
        f"{worker.hello['name']}, {options.dtype}, peer {worker.hello['peer']}; {compiled} kernels in {seconds:.0f} s"
    )
    bad = set() if options.no_check else _check_all(worker, pairs, chosen, dtypes)
    if not options.no_time:
        _time_all(worker, work, bad, options, started)
    worker.stop()
    print(f"{time.perf_counter() - started:.0f} s")
    return len(bad)


def _time_all(worker: _Worker, work: dict[LinearCase, Any], bad: set[Any], options: Any, started: float) -> None:
    print("us a product (graph, weights past L2); floor: 4.2 TB/s, 790 TFLOP/s")
    print("o and down with the float32 residual in place, the others without; -/+res: the other way")
    print(
        _LINE.format("layer", "M", "peer", "chosen", "x peer", "floor", "TFLOP/s", "-/+res", "best", "chosen | fastest")
    )
    ratios: dict[str, list[float]] = {}
    best_ratios: dict[str, list[float]] = {}
    for case in sorted(work, key=lambda c: (c.model, c.n * c.k, c.n, c.m)):
        if time.perf_counter() - started > options.seconds:
            print(f"! stopped after {options.seconds:.0f} s")
            break
        segment = template_segment(case.n, case.k)
        task: dict[str, Any] = {"kind": "time", "case": dataclasses.asdict(case), "dtype": options.dtype}
        timed: dict[Variant, float] = {}
        try:
            peer = worker.ask(task)
        except _Failed as failure:
            print(f"! {case.model} {case.layer} M={case.m} peer: {failure}")
            continue
        for variant in work[case]:
            if (_same_kernel(variant), segment) in bad:
                continue
            try:
                timed[variant] = worker.ask(
                    {**task, "variant": dataclasses.asdict(variant), "residual": case.out_bytes == 8}
                )
            except _Failed as failure:
                print(f"! {case.model} {case.layer} M={case.m} {variant}: {failure}")
                bad.add((_same_kernel(variant), segment))
        if not timed:
            print(f"{case.model} {case.layer} {case.m}: no variant ran")
            continue
        order = sorted(timed, key=timed.__getitem__)
        chosen = work[case][0] if work[case][0] in timed else order[0]
        residual = float("nan")
        with contextlib.suppress(_Failed):
            if not options.no_check:  # else it is not compiled
                other = {"variant": dataclasses.asdict(chosen), "residual": case.out_bytes != 8}
                residual = worker.ask({**task, **other})
        us, best = timed[chosen], timed[order[0]]
        with contextlib.suppress(_Failed):  # the peer again: the card is warmer now
            peer = statistics.mean((peer, worker.ask(task)))
        kind = f"{case.model} M {'<' if case.m <= 256 else '>'} 1024"
        ratios.setdefault(kind, []).append(peer / us)
        best_ratios.setdefault(kind, []).append(peer / best)
        figures = [f"{peer:.2f}", f"{us:.2f}", f"{peer / us:.2f}", f"{case.floor_us(4.2e12, 790e12) / us:.0%}"]
        figures += [f"{case.flops / us * 1e-6:.0f}", f"{residual:.2f}", f"{best:.2f}"]
        listed = " | ".join(f"{v} {timed[v]:.1f}" for v in order[: options.top])
        print(_LINE.format(f"{case.model} {case.layer}", case.m, *figures, f"{chosen} | {listed}"), flush=True)
    for name, values in ratios.items():
        chosen_mean, best_mean = statistics.geometric_mean(values), statistics.geometric_mean(best_ratios[name])
        print(f"{name}: {chosen_mean:.3f} x peer chosen, {best_mean:.3f} best (geometric mean of {len(values)})")


if __name__ == "__main__":
    raise SystemExit(main())
