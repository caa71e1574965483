"""The portable kernels (those of sm_80 to sm_89 and sm_120) on this GPU, where it has faster ones of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from cukern.bench.attention import prefill_cases
from cukern.bench.cases import Arrays, Case
from cukern.bench.operators import product_cases
from cukern.bench.report import Row, describe
from cukern.bench.timing import in_graph

__all__ = ["changed", "portable", "portable_attention", "portable_cases", "portable_kernels"]

_PEERS = ("flash", "cuBLAS")


@contextmanager
def portable_attention() -> Iterator[None]:
    """Let attention over prompts run as the kernel for every architecture."""
    from cukern.ops import _attention_sm90

    with changed((_attention_sm90, "launched", lambda *_, **__: None)):
        yield


@contextmanager
def portable_kernels() -> Iterator[None]:
    """Let attention over prompts and products run as the kernels for every architecture."""
    from cukern.ops import _linear_sm90

    with portable_attention(), changed((_linear_sm90, "launched", lambda *_, **__: None)):
        yield


@contextmanager
def changed(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes of operators' modules with other values, and nothing remembered that was chosen by them."""
    from cukern import jit
    from cukern.ops import _linear_sm90, _linear_variants

    linear = import_module("cukern.ops.linear")
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]

    def put(values: Sequence[tuple[Any, str, Any]]) -> None:
        for module, name, value in values:
            setattr(module, name, value)
        for chosen in (linear._plan, _linear_sm90._plan, _linear_sm90.select, _linear_variants.select):
            chosen.cache_clear()
        jit.reload()

    put(changes)
    try:
        yield
    finally:
        put(before)


def portable_cases(
    rows: tuple[int, ...] = (2048, 8192), prefill: tuple[tuple[int, int], ...] = ((8, 2048), (1, 8192))
) -> list[Case]:
    """Products of the 0.6B and 8B layers, and causal attention."""
    return [*product_cases(("0.6b", "8b"), rows), *prefill_cases(prefill)]


def portable(
    cases: Sequence[Case],
    arrays: Arrays,
    microseconds: Callable[[Sequence[Callable[[], Any]]], float],
    torch: Any = None,
) -> Iterator[Row]:
    """Check and time every case by the portable kernels, beside torch's flash back end and cuBLAS."""
    for case in cases:
        prepared = case.prepare(arrays)
        timed = in_graph(microseconds, arrays.xp, torch) if prepared.in_graph else microseconds
        with portable_kernels():
            error = prepared.check()
            row = Row(
                f"portable {case.operator}",
                case.label,
                arrays.dtype.name,
                timed(prepared.calls),
                prepared.nbytes,
                prepared.flops,
                error,
                prepared.limit,
                groups=tuple(f"portable {group}" for group in case.groups),
            )
        try:
            peers = prepared.peers(torch) if torch is not None else {}
            for name, calls in peers.items():
                if name.startswith(_PEERS):
                    row.peer, row.peer_microseconds = name, timed(calls)
            if row.peer:
                with portable_kernels():
                    row.microseconds = (row.microseconds + timed(prepared.calls)) / 2  # warm, as the peer was
        except Exception as error:
            row.note = f"peers: {describe(error)}"
        yield row
