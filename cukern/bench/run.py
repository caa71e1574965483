"""Runs the parts of ``cukern bench`` one after another."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cukern.bench.attention import attention_cases
from cukern.bench.cases import Arrays, Case, Prepared
from cukern.bench.decode import DecodeBench, decode_cases
from cukern.bench.exactness import exactness, exactness_cases, model_exactness
from cukern.bench.machine import facts, measure_floors, peer_module, require_gpu
from cukern.bench.model import ModelBench
from cukern.bench.operators import operator_cases, product_cases
from cukern.bench.portable import portable, portable_cases
from cukern.bench.report import Report, Row, describe
from cukern.bench.startup import startup
from cukern.bench.timing import GpuTimer, graphed

__all__ = ["PARTS", "Options", "measure", "run", "select"]

PARTS = ("ops", "portable", "model", "prefill", "decode", "startup", "exactness")


@dataclass
class Options:
    """What to run.

    Attributes
    ----------
    parts : sequence of str
        Some of PARTS.
    operators : sequence of str
        Restrict the part "ops" to these; empty: all.
    model : str
        A published shape ("0.6B" to "32B"; random weights) or a checkpoint folder.
    dtype : str
    batches, contexts, samplings : sequences
        Of "decode"; its standard cases by default (see `decode_cases`).
    lengths : sequence of int
        Of "prefill".
    peers : bool
        Time torch and transformers too, where they can be imported.
    compiled_peer : bool
        Let the peers of "decode" compile their step (minutes).
    csv : Path or None
    echo : callable
    """

    parts: Sequence[str] = PARTS
    operators: Sequence[str] = ()
    model: str = "0.6B"
    dtype: str = "float16"
    batches: Sequence[int] = ()
    contexts: Sequence[int] = ()
    samplings: Sequence[str] = ()
    lengths: Sequence[int] = (512, 2048, 8192)
    peers: bool = True
    compiled_peer: bool = False
    csv: Path | None = None
    echo: Callable[[str], object] = field(default=print)


def select(operators: Sequence[str]) -> list[Case]:
    """The cases of the part "ops", restricted to some operators.

    Raises
    ------
    ValueError
        An operator without a case.
    """
    cases = [*operator_cases(), *product_cases(), *attention_cases()]
    known = sorted({case.operator for case in cases})
    unknown = sorted(set(operators) - set(known))
    if unknown:
        raise ValueError(f"bench has no operator {unknown[0]!r}; there are {', '.join(known)}")
    return [case for case in cases if not operators or case.operator in operators]


def run(options: Options) -> int:
    """Run the parts; print and write what they measure.

    Returns
    -------
    int
        Number of failed checks.

    Raises
    ------
    RuntimeError
        No GPU is usable.
    ValueError, OSError
        There is no such operator or model, or a prompt is longer than the model's positions.
    """
    chosen = select(options.operators) if "ops" in options.parts else []
    with_model = bool(set(options.parts) - {"ops", "portable"})
    cupy = require_gpu()
    if with_model:
        _check_model(options)  # not after minutes of other parts
    from cukern.models.device import Device

    device = Device.parse("cuda")
    torch = peer_module("torch") if options.peers else None
    transformers = peer_module("transformers") if torch is not None else None
    if torch is not None and not torch.cuda.is_available():
        torch = transformers = None
    with ExitStack() as stack:
        stack.enter_context(device.context())
        machine = facts(cupy.cuda.Device(device.index).pci_bus_id)
        timer = GpuTimer(cupy, float(machine["max_sm_mhz"] or 2000))
        report = Report(measure_floors(cupy, timer, torch), machine, options.echo, options.csv)
        report.head()
        arrays = Arrays(cupy, _numpy_dtype(options.dtype))
        for case in chosen:
            report.add(measure(case, arrays, timer.compare, torch))
            cupy.get_default_memory_pool().free_all_blocks()
        if "portable" in options.parts:
            for row in portable(portable_cases(), arrays, timer.microseconds, torch):
                report.add(row)
                cupy.get_default_memory_pool().free_all_blocks()
        if "exactness" in options.parts:
            for row in exactness(exactness_cases(), arrays, timer.microseconds):
                report.add(row)
                cupy.get_default_memory_pool().free_all_blocks()
        if with_model:
            folder = None
            if not _in_memory(options, transformers):
                scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="cukern-bench-"))
                folder = _checkpoint(options, Path(scratch))
            for rows in _model_parts(options, folder, torch, transformers, machine.get("gpu", "")):
                for row in rows:
                    report.add(row)
        for line in report.means():
            options.echo(line)
        options.echo(report.summary())
        return report.failed


def measure(
    case: Case, arrays: Arrays, compare: Callable[[Sequence[Sequence[Callable[[], Any]]]], list[float]], torch: Any
) -> Row:
    """Check a case, then time it and its peers, sample by sample in turn. A failed check is timed all the same and
    shows as FAIL.
    """
    prepared: Prepared = case.prepare(arrays)
    worst = prepared.check()
    in_graph = prepared.in_graph and hasattr(arrays.xp, "cuda")

    def ready(calls: Sequence[Callable[[], Any]]) -> Sequence[Callable[[], Any]]:
        return [graphed(calls, arrays.xp, torch)] if in_graph else calls

    contenders, notes = {"": ready(prepared.calls)}, list[str]()
    works = {"": len(prepared.calls)}  # in a graph
    try:
        peers = prepared.peers(torch) if torch is not None else {}
    except Exception as error:
        peers, notes = {}, [f"peers: {describe(error)}"]
    for name, calls in peers.items():
        try:
            for call in calls:
                call()
            contenders[name], works[name] = ready(calls), len(calls)
        except Exception as error:  # another library's error must not end the run
            notes.append(f"{name}: {describe(error)}")
    times = dict(zip(contenders, compare(list(contenders.values()))))
    if in_graph:
        times = {name: time / works[name] for name, time in times.items()}
    ours = times.pop("")
    row = Row(
        case.operator,
        case.label,
        arrays.dtype.name,
        ours,
        nbytes=prepared.nbytes,
        flops=prepared.flops,
        error=worst,
        limit=prepared.limit,
        groups=case.groups,
    )
    if times:
        row.peer = min(times, key=times.__getitem__)
        row.peer_microseconds = times[row.peer]
    if len(times) > 1:
        notes = [f"{name} {time:.2f} us" for name, time in times.items()] + notes
    row.note = ", ".join(notes)
    return row


def _in_memory(options: Options, transformers: Any) -> bool:
    """Whether random weights on the GPU will do: nothing reads a checkpoint."""
    from cukern.testing.checkpoints import QWEN3_SHAPES

    return options.model in QWEN3_SHAPES and transformers is None and "startup" not in options.parts


def _model_parts(options: Options, folder: Path | None, torch: Any, transformers: Any, gpu: str) -> Any:
    if folder is not None and "startup" in options.parts:  # first: the GPU's memory is still free
        yield startup(folder, options.dtype, options.model)
    if not set(options.parts) & {"model", "prefill", "decode", "exactness"}:
        return
    model = None
    if folder is None:
        import cupy

        from cukern.bench.random_model import make_model

        model = make_model(cupy, options.model, _numpy_dtype(options.dtype))
    bench = ModelBench(folder, options.dtype, options.model, torch, transformers, model=model)
    if "model" in options.parts:
        yield bench.logits((512, 2048))
    if "prefill" in options.parts:
        yield bench.prefill(options.lengths)
    if "decode" in options.parts:
        cases = decode_cases(options.batches, options.contexts, options.samplings)
        yield DecodeBench(bench, gpu, compiled_peer=options.compiled_peer).rows(cases)
    if "exactness" in options.parts:
        yield model_exactness(bench, (2048,))


def _check_model(options: Options) -> None:
    """Raise FileNotFoundError, or what else is wrong with a checkpoint; ValueError for a prompt that is too long."""
    from cukern.models import resolve_checkpoint
    from cukern.models.config import Qwen3Config
    from cukern.testing.checkpoints import QWEN3_SHAPES

    name = options.model
    if name in QWEN3_SHAPES:
        most = QWEN3_SHAPES[name].max_positions
    else:
        try:
            most = Qwen3Config.from_file(resolve_checkpoint(name)).max_positions
        except FileNotFoundError as error:
            raise FileNotFoundError(f"bench: model {error}; published shapes: {', '.join(QWEN3_SHAPES)}") from None
    longest = max(options.lengths, default=0)
    if "prefill" in options.parts and longest >= most:
        raise ValueError(
            f"bench prefill: length {longest} and the token that follows need {longest + 1} positions, the model has "
            f"{most}; give a length of at most {most - 1}"
        )


def _checkpoint(options: Options, scratch: Path) -> Path:
    """The folder of the model; random weights of a published shape are written to the scratch folder."""
    from cukern.testing.checkpoints import QWEN3_SHAPES, make_checkpoint

    if options.model in QWEN3_SHAPES:
        options.echo(f"writing random weights of the shape {options.model} ...")
        return make_checkpoint(scratch, options.model, options.dtype)
    from cukern.models import resolve_checkpoint

    return resolve_checkpoint(options.model)


def _numpy_dtype(name: str) -> Any:
    import ml_dtypes
    import numpy as np

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
