"""Benchmarks, nearly all without a GPU: every case and its check on the reference, the tables, the timing logic on a
simulated GPU."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import cukern
from cukern.bench import run as run_module
from cukern.bench.attention import attention_cases
from cukern.bench.cases import Arrays, Case, Prepared, spread
from cukern.bench.decode import DecodeBench, DecodeCase, decode_cases
from cukern.bench.exactness import exactness, exactness_cases, free_order, model_exactness
from cukern.bench.linear import LinearCase
from cukern.bench.machine import facts, require_gpu
from cukern.bench.model import ModelBench, forward_flops
from cukern.bench.operators import _linear, operator_cases, product_cases
from cukern.bench.portable import portable
from cukern.bench.report import Floors, Report, Row
from cukern.bench.run import Options, measure, run, select
from cukern.bench.startup import startup
from cukern.bench.timing import GpuTimer, in_graph
from cukern.bench.torch_peer import TorchDecoder
from cukern.models import demo_checkpoint
from cukern.ops import _linear_variants

FLOORS = Floors(4e12, 8e14)
SMALL = [
    *operator_cases(tokens=21, hidden=512, vocab=700, rows=17),
    *attention_cases(((2, 40),), ((3, 70),), heads=4, kv_heads=2, dim=32),
    *(
        Case("linear", layer, partial(_linear, case=LinearCase("x", layer, 5, 48, 96, out_bytes)))
        for layer, out_bytes in (("qkv", 2), ("o", 8), ("lm_head", 4))
    ),
]
IDS = [f"{case.operator} {case.label}" for case in SMALL]


# -- cases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("case", SMALL, ids=IDS)
def test_every_case_runs_and_passes_its_own_check(case, dtype):
    prepared = case.prepare(Arrays(np, dtype, rotate=False))
    for call in prepared.calls:
        call()
    assert prepared.check() <= prepared.limit
    assert prepared.nbytes > 0


@pytest.mark.parametrize("case", SMALL, ids=IDS)
def test_every_check_sees_a_wrong_result(case, monkeypatch):
    """The operator off by a quarter, or by one token."""
    from cukern import ops

    name = case.operator
    right = getattr(ops, name)

    def wrong(*arguments, **options):
        result = right(*arguments, **options)
        result[...] = result + 1 if result.dtype.kind == "i" else result + np.asarray(0.25, result.dtype)
        return result

    monkeypatch.setattr(ops, name, wrong)
    prepared = case.prepare(Arrays(np, np.float16, rotate=False))
    assert prepared.check() > prepared.limit


def test_cases_of_the_benchmark():
    cases = select(())
    assert {c.operator for c in cases} == {
        "embedding", "rms_norm", "swiglu", "rope", "qk_norm_rope_cache", "softmax", "token_logprobs", "argmax",
        "sample", "linear", "attention_prefill", "attention_decode",
    }  # fmt: skip
    labels = [c.label for c in cases if c.operator == "attention_prefill"]
    assert labels[:4] == [
        "B8 S2048 16/8x128",
        "B1 S8192 16/8x128",
        "B1 S16384 16/8x128",
        "B8 S2048 16/8x128 not causal",
    ]
    assert labels[5:] == ["B8 S2048 16/8x64", "B1 S8192 16/8x64"]
    assert len(product_cases()) == 2 * (4 * 6 + 3 + 2 * 6)  # layers, the head, two layers with the residual
    assert {c.operator for c in select(["rope", "linear"])} == {"rope", "linear"}
    with pytest.raises(ValueError, match="no operator 'nope'; there are argmax"):
        select(["nope"])


def test_arrays():
    arrays = Arrays(np, np.float16)
    assert arrays.copies(1) == 64
    assert arrays.copies(50 << 20) == 4
    assert arrays.copies(1 << 40) == 2
    assert Arrays(np, np.float16, rotate=False).copies(1) == 1
    big = arrays.normal(3, 1 << 20, scale=2.0)
    assert big.shape == (3, 1 << 20)
    assert big.dtype == np.float16
    assert np.isfinite(big).all()
    assert abs(float(big.astype(np.float32).std()) - 2) < 0.01
    assert (big[0, :1000] != big[1, :1000]).mean() > 0.9  # rows differ: the period is odd
    assert arrays.normal(4, dtype=np.float32).dtype == np.float32
    assert spread(100, 3).tolist() == [0, 50, 99]
    assert spread(2, 5).tolist() == [0, 1]


# -- rows ----------------------------------------------------------------------------------------------------------


def test_floor_rate_and_ratio():
    memory = Row("rms_norm", "case", "float16", 10.0, nbytes=2e7, flops=1.0, error=1e-4, limit=1e-3)
    assert memory.percent(FLOORS) == pytest.approx(50)
    assert memory.rate(FLOORS) == "2000 GB/s"
    compute = Row("linear", "case", "float16", 10.0, nbytes=1.0, flops=4e9, peer="x", peer_microseconds=20.0)
    assert compute.percent(FLOORS) == pytest.approx(50)
    assert compute.rate(FLOORS) == "400 TFLOP/s"
    assert compute.ratio == 2.0
    assert Row("startup", "", "", 1.0).percent(FLOORS) is None


@pytest.mark.parametrize(
    ("error", "limit", "status"),
    [(0.0, 0.0, "ok"), (1.0, 2.0, "ok"), (3.0, 2.0, "FAIL"), (math.nan, 2.0, "FAIL"), (math.inf, 2.0, "FAIL"),
     (None, 2.0, "unchecked"), (1.0, None, "unchecked")],
)  # fmt: skip
def test_status(error, limit, status):
    assert Row("a", "b", "c", 1.0, error=error, limit=limit).status == status


def test_report_prints_and_writes(tmp_path):
    lines = []
    path = tmp_path / "bench.csv"
    for _ in range(2):
        report = Report(FLOORS, {"gpu": "H200", "driver": "580"}, lines.append, path)
        report.head()
        report.add(Row("linear", "M1", "float16", 2.0, 8e6, 1e3, 1e-4, 1e-3, "cuBLAS", 3.0))
        report.add(Row("rope", "T8", "float16", 1.0, 10.0, error=2.0, limit=1e-3, note="a, b"))
    assert "H200" in lines[0]
    assert "4.00 TB/s, 800 TFLOP/s (measured here)" in lines[1]
    assert lines[3].split() == [
        "linear",
        "M1",
        "float16",
        "2.00",
        "4000",
        "GB/s",
        "100",
        "1.50",
        "cuBLAS",
        "0.0001",
        "0.001",
        "ok",
    ]
    assert "FAIL" in lines[4]
    assert (report.failed, report.summary()) == (1, "2 cases, 1 FAIL, 0 unchecked")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4  # one header
    assert rows[0]["gb_per_s"] == "4000.0"
    assert rows[0]["ratio_to_peer"] == "1.500"
    assert rows[1]["status"] == "FAIL"
    assert rows[1]["note"] == "a, b"
    assert rows[3]["gpu"] == "H200"


def test_measure_checks_before_it_times_and_keeps_the_best_peer():
    order = []

    def check():
        order.append("check")
        return 0.5

    def compare(contenders):
        order.append("time")
        return [{"ours": 4.0, "slow": 9.0, "fast": 2.0}[calls[0]()] for calls in contenders]

    def peers(torch):
        return {"slow": [lambda: "slow"], "fast": [lambda: "fast"]}

    prepared = Prepared([lambda: "ours"], check, 0.1, 100.0, 0.0, peers)
    case = Case("rope", "label", lambda arrays: prepared)
    row = measure(case, Arrays(np, np.float16), compare, torch=object())
    assert order == ["check", "time"]
    assert (row.status, row.peer, row.ratio) == ("FAIL", "fast", 0.5)
    assert "slow 9.00 us" in row.note
    assert measure(case, Arrays(np, np.float16), compare, torch=None).ratio is None


def test_a_peer_that_fails_is_noted_and_does_not_end_the_run():
    def compare(contenders):
        return [calls[0]() for calls in contenders]

    def broken():
        raise RuntimeError("no kernel\nfor this")

    def unavailable(torch):
        raise ImportError("gone")

    case = Case(
        "rope", "", lambda a: Prepared([lambda: 1.0], lambda: 0.0, 0.0, 1.0, 0.0, lambda torch: {"x": [broken]})
    )
    row = measure(case, Arrays(np, np.float16), compare, torch=object())
    assert (row.status, row.peer, row.note) == ("ok", "", "x: RuntimeError: no kernel")
    case = Case("rope", "", lambda a: Prepared([lambda: 1.0], lambda: 0.0, 0.0, 1.0, 0.0, unavailable))
    assert measure(case, Arrays(np, np.float16), compare, torch=object()).note == "peers: ImportError: gone"


# -- timing --------------------------------------------------------------------------------------------------------


class SimulatedGpu:
    """A queue with a clock: kernels take device time, launching takes host time, events stamp the device's clock."""

    def __init__(self, monkeypatch, host_us: float, device_us: float) -> None:
        self.host, self.device = 0.0, 0.0  # microseconds
        self.host_us, self.device_us = host_us, device_us
        self.launched = []
        monkeypatch.setattr("cukern.bench.timing.time.perf_counter", lambda: self.host * 1e-6)
        gpu = self

        class Event:
            def record(self):
                self.at = gpu.device = max(gpu.device, gpu.host)

            def synchronize(self):
                gpu.host = max(gpu.host, self.at)

        self.cuda = SimpleNamespace(
            Event=Event,
            get_elapsed_time=lambda a, b: (b.at - a.at) * 1e-3,
            runtime=SimpleNamespace(deviceSynchronize=lambda: None),
        )

    def launch(self, name: str, host_us: float, device_us: float) -> None:
        self.host += host_us
        self.device = max(self.device, self.host) + device_us
        self.launched.append(name)

    def spin(self, grid, block, arguments):
        self.launch("spin", 1.0, arguments[0] / 2000)

    def timer(self, monkeypatch) -> GpuTimer:
        monkeypatch.setattr("cukern.jit.Kernel", lambda source, name: self.spin)
        return GpuTimer(self, 2000)


@pytest.mark.parametrize(("host_us", "device_us"), [(20.0, 3.0), (1.0, 50.0), (20.0, 0.5), (5.0, 30000.0)])
def test_timer_sees_the_device_and_not_the_host(monkeypatch, host_us, device_us):
    gpu = SimulatedGpu(monkeypatch, host_us, device_us)
    calls = [lambda i=i: gpu.launch(f"call {i}", host_us, device_us) for i in range(3)]
    assert gpu.timer(monkeypatch).microseconds(calls) == pytest.approx(device_us, rel=0.02)
    names = [n for n in gpu.launched if n != "spin"]
    assert set(names) == {"call 0", "call 1", "call 2"}  # inputs are rotated


def test_timer_compares_in_turn(monkeypatch):
    """What slows down with time slows all alike: the ratio stays, though the first is timed first."""
    gpu = SimulatedGpu(monkeypatch, 1.0, 0.0)

    def call(name, device_us):
        return [lambda: gpu.launch(name, 1.0, device_us * (1.0 + gpu.device * 1e-5))]

    a, b = gpu.timer(monkeypatch).compare([call("a", 40.0), call("b", 80.0)])
    assert b / a == pytest.approx(2.0, rel=0.05)  # one after the other: 2.6
    assert a > 44.0
    order = [name for name, before in zip(gpu.launched, ["", *gpu.launched]) if name not in ("spin", before)]
    assert "".join(order).endswith("abbaab")  # each sample begins with a spin


def test_timer_takes_a_sample_again_when_the_host_was_too_slow(monkeypatch):
    gpu = SimulatedGpu(monkeypatch, 10.0, 2.0)
    slow = iter([10.0] * 300 + [100.0] * 150)
    timer = gpu.timer(monkeypatch)
    assert timer.microseconds([lambda: gpu.launch("x", next(slow, 10.0), 2.0)]) == pytest.approx(2.0, rel=0.02)


# -- machine -------------------------------------------------------------------------------------------------------


def test_facts():
    got = facts("0", lambda device, fields: "NVIDIA H200, 580.65, 1980, 3201, 1980, 700.00\n")
    assert (got["gpu"], got["driver"], got["sm_mhz"], got["power_w"]) == ("NVIDIA H200", "580.65", "1980", "700.00")
    assert got["date"].endswith("Z")
    assert got["cupy"]

    def absent(device, fields):
        raise FileNotFoundError("nvidia-smi")

    assert facts("0", absent)["gpu"] == ""

    def failing(device, fields):
        raise subprocess.CalledProcessError(9, "nvidia-smi")

    assert facts("0", failing)["max_sm_mhz"] == ""


def test_without_a_gpu_it_refuses(monkeypatch):
    monkeypatch.setattr("cukern.models.device.cuda_problem", lambda: "no such thing")
    for part in ("ops", "decode"):
        with pytest.raises(RuntimeError, match="bench measures a GPU, and none is usable: no such thing"):
            run(Options(parts=(part,)))
    with pytest.raises(RuntimeError, match="none is usable"):
        require_gpu()


# -- the model -----------------------------------------------------------------------------------------------------


def test_flops_of_a_forward_pass():
    config = SimpleNamespace(
        hidden_size=4, q_size=8, kv_size=2, intermediate_size=6, num_hidden_layers=3, vocab_size=10
    )
    products = 4 * (8 + 4) + 8 * 4 + 3 * 4 * 6
    attention = sum(2 * 2 * 8 * keys for keys in range(1, 6))
    assert forward_flops(config, 5, 2) == 3 * (5 * 2 * products + attention) + 2 * 2 * 4 * 10


@pytest.fixture(scope="module")
def bench():
    return ModelBench(demo_checkpoint(), "auto", "demo", device="cpu")


def test_model_rows_without_peers(bench):
    (logits,) = bench.logits((8,))
    assert (logits.status, logits.peer) == ("unchecked", "")
    assert logits.flops == forward_flops(bench.model.config, 8, 8)
    (prefill,) = bench.prefill((9,))
    assert prefill.microseconds > 0
    assert "tokens/s" in prefill.note


def test_decode_rows(bench):
    cases = decode_cases((1, 3), (25,), ("greedy", "sampled"))
    rows = list(DecodeBench(bench, "NVIDIA H200", steps=8).rows(cases))
    assert [r.case for r in rows] == [
        "demo B1 ctx25 greedy", "demo B1 ctx25 sampled", "demo B3 ctx25 greedy", "demo B3 ctx25 sampled",
    ]  # fmt: skip
    assert [r.status for r in rows] == ["ok"] * 4
    weights = bench.model.config.num_parameters * 4
    assert rows[2].nbytes == weights + 3 * 25 * (2 * 4 * 2 * 128 * 4)
    assert "tokens/s" in rows[0].note
    assert "% of 4.8 TB/s" in rows[0].note
    assert "no CUDA graphs: not on a GPU" in rows[0].note


@pytest.mark.gpu
def test_decode_rows_on_the_gpu_without_torch():
    bench = ModelBench(demo_checkpoint(), "float16", "demo")
    (row,) = DecodeBench(bench, "NVIDIA H200", steps=8).rows(decode_cases((2,), (25,), ("greedy",)))
    assert row.status == "ok"
    assert row.peer == ""


@pytest.mark.parametrize("what", ["first", "token", "logit"])
def test_what_differs_between_captured_and_launched_steps_is_counted(bench, monkeypatch, what):
    trace = DecodeBench._trace

    def other(self, llm, prompts, case, *, plain):
        first, steps = trace(self, llm, prompts, case, plain=plain)
        if plain and what == "first":
            first[0] += 1
        if plain and what == "token":
            steps[1][0][0] += 1
        if plain and what == "logit":
            steps[3][1][0, 7] += 1e-3
        return first, steps

    monkeypatch.setattr(DecodeBench, "_trace", other)
    (row,) = DecodeBench(bench, steps=4).rows(decode_cases((1,), (5,), ("greedy",)))
    assert (row.error, row.status) == (1.0, "FAIL")


def test_contexts_that_do_not_fit_around_the_timed_steps(bench):
    """One that is too short is called what is measured; one too long is refused before anything is timed."""
    (row,) = DecodeBench(bench, steps=4).rows(decode_cases((1,), (1, 5), ("greedy",)))
    assert row.case == "demo B1 ctx11 greedy"
    most = bench.model.max_positions - 4 - 32
    with pytest.raises(ValueError, match=f"context {most + 1} .* the model has 2048; give a context of at most {most}"):
        next(DecodeBench(bench, steps=4).rows(decode_cases((1,), (20, most + 1), ("greedy",))))


def test_decode_cases():
    assert len(decode_cases()) == 10
    assert decode_cases(samplings=["greedy"])[2] == DecodeCase(1, 32768, "greedy")
    assert decode_cases((2,), (), ["sampled"]) == [DecodeCase(2, 128, "sampled")]
    assert [c.label for c in decode_cases((1, 2), (7, 9), ["greedy"])] == [
        "B1 ctx7 greedy", "B2 ctx7 greedy", "B1 ctx9 greedy", "B2 ctx9 greedy",
    ]  # fmt: skip


def test_peers_of_decoding(bench, monkeypatch):
    """The fastest is kept, the others are noted, and one that fails does not end the run."""
    measured = DecodeBench(bench, steps=4)
    monkeypatch.setattr(bench, "torch", "torch")
    monkeypatch.setattr(bench, "transformers_model", "transformers")
    monkeypatch.setattr(bench, "collect", lambda: None)
    monkeypatch.setattr(bench, "peer_step", lambda prompts, steps, compiled: 900.0)
    monkeypatch.setattr(measured, "_torch_graph", lambda case: 400.0)
    monkeypatch.setattr(measured, "_logits_row", lambda case: None)
    row, _ = measured.rows(decode_cases((1,), (5,), ("greedy",)))
    assert (row.peer, row.peer_microseconds) == ("torch graph", 400.0)
    assert "transformers static 900 us" in row.note
    monkeypatch.setattr(measured, "_torch_graph", lambda case: 1 / 0)
    row, _ = measured.rows(decode_cases((1,), (5,), ("greedy",)))
    assert row.peer == "transformers static"
    assert "torch graph: ZeroDivisionError" in row.note


@pytest.mark.parametrize("name", ["tied-fp16", "untied-bf16-sharded"])
def test_the_torch_decoder_computes_what_we_compute(name):
    torch = pytest.importorskip("torch")
    model = cukern.Qwen3.from_pretrained(Path(__file__).parent / "data" / name, device="cpu")
    assert TorchDecoder(torch, model, 3, 20).error(model, [1, 5, 9, 100, 7]) < 1e-5
    decoder = TorchDecoder(torch, model, 2, 9, sampled=True, masked=False)
    decoder.step()
    assert decoder.position.tolist() == [10]
    assert ((decoder.ids >= 0) & (decoder.ids < model.config.vocab_size)).all()


def test_relative_error_of_logits(bench):
    class Tensor:
        """The few methods of a torch tensor that are used."""

        def __init__(self, array):
            self.array = np.asarray(array, np.float64)

        def split(self, rows):
            return [Tensor(self.array[i : i + rows]) for i in range(0, len(self.array), rows)]

        def double(self):
            return self

        def square(self):
            return Tensor(self.array**2)

        def sum(self):
            return self.array.sum()

        def __sub__(self, other):
            return Tensor(self.array - other.array)

    exact = np.full((300, 2), 3.0)
    assert bench._relative_error(Tensor(exact * 1.01), Tensor(exact)) == pytest.approx(0.01)


# -- the price of exactness ----------------------------------------------------------------------------------------


def test_free_order_changes_the_sums_and_nothing_else():
    """Under emulation: other bits within the tolerance, for a few rows, many rows and attention; then as before."""
    from cukern import ops

    rng = np.random.default_rng(0)
    weight = (rng.standard_normal((48, 1024)) / 32).astype(np.float16)
    q, k, v = (rng.standard_normal((1, 200, heads, 32)).astype(np.float16) for heads in (4, 2, 2))
    calls = [
        lambda: ops.linear(rng_rows[:2], weight, dtype=np.float32),
        lambda: ops.linear(rng_rows, weight, dtype=np.float32),
        lambda: ops.attention_prefill(q, k, v),
    ]
    rng_rows = rng.standard_normal((40, 1024)).astype(np.float16)
    with cukern.emulate():
        exact = [call() for call in calls]
        with free_order():
            free = [call() for call in calls]
        again = [call() for call in calls]
    for a, b, c in zip(exact, free, again):
        assert (a != b).any()
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), atol=2e-3)
        np.testing.assert_array_equal(a, c)


def test_free_order_is_chosen_anew_on_any_gpu():
    """Also what was chosen for the product before: of a weight with segments the whole at once, of one chain never."""
    h200 = _linear_variants.Gpu(132, 227 << 10, 228 << 10)
    for _ in range(2):
        for m in (1, 16):
            assert _linear_variants.at_once(m, 1024, 2048, h200) is not None
            with free_order():
                assert _linear_variants.at_once(m, 1024, 2048, h200) is None
                chosen = _linear_variants.select(m, 1024, 2048, True, h200)
                assert chosen.fits(m, 1024, 2048, h200.max_shared)
                assert 0 in chosen.template(_linear_variants.template_segment(1024, 2048))


def test_exactness_rows(monkeypatch):
    linear = Case("linear", "qkv", partial(_linear, case=LinearCase("x", "qkv", 5, 48, 96, 2)))
    times = iter([10.5, 9.0, 11.0, 11.0, 11.5])  # with the rules and without, in turn
    (row,) = exactness([linear], Arrays(np, np.float16, rotate=False), lambda calls: next(times))
    assert (row.part, row.microseconds, row.peer_microseconds, row.status) == ("exact linear", 11.0, 10.0, "ok")
    assert row.note == "exactness costs +10.0 %"
    labels = [c.label for c in exactness_cases()]
    assert len(labels) == (4 + 2) * 5 + 3
    assert not any("lm_head" in label for label in labels)


def test_portable_rows():
    """The peers that count are named; the mean of a group's ratios is printed."""
    case = Case("linear", "qkv", partial(_linear, case=LinearCase("x", "qkv", 5, 48, 96, 2)), ("linear x M5",))
    prepared = case.prepare(Arrays(np, np.float16, rotate=False))
    prepared.peers = lambda torch: {"flash": [lambda: None], "cuDNN": [lambda: None]}
    times = iter([9.0, 40.0, 11.0])
    cases = [replace(case, prepare=lambda arrays: prepared)]
    done = []
    check = prepared.check
    prepared.check = lambda: done.append("check") or check()
    arrays = Arrays(np, np.float16, rotate=False)
    (row,) = portable(cases, arrays, lambda calls: done.append("time") or next(times), torch=True)
    assert done == ["check", "time", "time", "time"]  # correctness first
    assert (row.part, row.peer, row.ratio, row.status, row.note) == ("portable linear", "flash", 4.0, "ok", "")
    report = Report(FLOORS, {}, lambda line: None)
    report.rows = [row, replace(row, microseconds=40.0), Row("x", "y", "z", 1.0)]
    assert report.means() == ["geometric mean of 2: portable linear x M5: 2.000 x peer"]


def test_calls_in_a_graph():
    """Captured once on a stream of their own, behind a round outside of it; the replay's time is shared among them."""
    done = []

    class Stream:
        ptr = 5

        def __init__(self, non_blocking):
            assert non_blocking

        def __enter__(self):
            done.append("stream")

        def __exit__(self, *error):
            done.append("stream ends")

        def synchronize(self):
            pass

        def begin_capture(self):
            done.append("begin")

        def end_capture(self):
            return SimpleNamespace(launch=lambda: done.append("graph"))

    cuda = SimpleNamespace(Stream=Stream, runtime=SimpleNamespace(deviceSynchronize=lambda: None))
    timed = in_graph(lambda calls: calls[0]() or 30.0, SimpleNamespace(cuda=cuda))
    assert timed([lambda: done.append("a"), lambda: done.append("b"), lambda: done.append("c")]) == 10.0
    assert done == [*("stream", "a", "b", "c", "a"), *("begin", "a", "b", "c"), *("stream ends", "graph")]
    assert in_graph(len, np) is len


def test_exactness_of_the_model():
    bench = ModelBench(demo_checkpoint(), "auto", "demo", device="cpu")
    (row,) = model_exactness(bench, (20,))
    assert row.status == "ok"
    assert row.note.startswith("exactness costs ")


def test_startup_rows():
    rows = list(startup(demo_checkpoint(), "auto", "demo", device="cpu"))
    assert [r.case for r in rows] == ["demo, cache empty", "demo, cache warm"]
    assert [r.status for r in rows] == ["ok", "ok"]
    assert all("first token" in r.note for r in rows)


def test_startup_that_fails(tmp_path):
    with pytest.raises(RuntimeError, match=r"the process ended with code 1: FileNotFoundError"):
        list(startup(tmp_path, "auto", "x", device="cpu"))


def test_all_parts_in_order(monkeypatch, tmp_path):
    """The whole of `run` with the GPU, the peers and the measurements replaced."""
    done = []
    device = SimpleNamespace(index=0, context=lambda: __import__("contextlib").nullcontext())
    cupy = SimpleNamespace(
        get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=lambda: None),
        cuda=SimpleNamespace(Device=lambda index: SimpleNamespace(pci_bus_id="0000:19:00.0")),
    )
    monkeypatch.setattr(run_module, "require_gpu", lambda: cupy)
    monkeypatch.setattr("cukern.models.device.Device.parse", lambda name: device)
    monkeypatch.setattr(run_module, "facts", lambda bus: {"gpu": "x", "max_sm_mhz": "1980"})
    timer = SimpleNamespace(microseconds=lambda calls: 1.0, compare=None)
    monkeypatch.setattr(run_module, "GpuTimer", lambda cupy, mhz: timer)
    monkeypatch.setattr(run_module, "measure_floors", lambda cupy, timer, torch: FLOORS)
    row = Row("x", "y", "z", 1.0, error=0.0, limit=0.0)
    monkeypatch.setattr(run_module, "measure", lambda case, *rest: done.append(case.operator) or row)
    monkeypatch.setattr(run_module, "startup", lambda *a: done.append("startup") or [row])
    monkeypatch.setattr(run_module, "portable", lambda *a: done.append("portable") or [row])
    monkeypatch.setattr(run_module, "exactness", lambda *a: done.append("exactness") or [row])
    monkeypatch.setattr(run_module, "model_exactness", lambda *a: done.append("whole model") or [row])
    monkeypatch.setattr("cukern.testing.checkpoints.make_checkpoint", lambda path, *a: path)

    class Bench:
        def __init__(self, folder, dtype, name, torch, transformers, *, model):
            done.append(model or f"folder {folder.is_dir()}")

        def logits(self, lengths):
            done.append("model")
            return [row]

        def prefill(self, lengths):
            done.append("prefill")
            return [row]

    class Decode:
        def __init__(self, bench, gpu, *, compiled_peer):
            assert (type(bench), gpu) == (Bench, "x")

        def rows(self, cases):
            assert len(cases) == 10
            done.append("decode")
            return [Row("x", "y", "z", 1.0, error=1.0, limit=0.0)]

    monkeypatch.setattr(run_module, "ModelBench", Bench)
    monkeypatch.setattr(run_module, "DecodeBench", Decode)
    lines = []
    path = tmp_path / "x.csv"
    assert run(Options(operators=("rope",), csv=path, echo=lines.append, peers=False)) == 1
    assert done == [
        *("rope", "portable", "exactness", "startup", "folder True"),
        *("model", "prefill", "decode", "whole model"),
    ]
    assert lines[-1] == "8 cases, 1 FAIL, 0 unchecked"
    assert len(path.read_text().splitlines()) == 9
    # random weights on the GPU where no part reads a checkpoint
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr("cukern.bench.random_model.make_model", lambda cupy, name, dtype: f"{name} {dtype}")
    # a model that there is not is found out first
    done.clear()
    with pytest.raises(FileNotFoundError, match=r"model 99B: no such folder .*published shapes: 0\.6B, 1\.7B"):
        run(Options(model="99B", echo=lines.append, peers=False))
    too_long = r"bench prefill: length 40960 and .* need 40961 positions, the model has 40960; give .* at most 40959"
    with pytest.raises(ValueError, match=too_long):
        run(Options(parts=("ops", "prefill"), model="8B", lengths=(512, 40960), echo=lines.append, peers=False))
    assert done == []
    assert run(Options(parts=("prefill",), model="8B", echo=lines.append, peers=False)) == 0
    assert done == ["8B float16", "prefill"]
