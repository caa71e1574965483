"""What the fixed order of sums costs: the same kernels with the numerics contract, and without its rules.

Without: a product is one chain over all of K (`Segment` 0), whose tiles may be larger for want of a second set of
accumulators; attention over a prompt is one online softmax over all keys (a chunk that does not end).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from cukern.bench.attention import PREFILL, prefill_cases
from cukern.bench.cases import Arrays, Case
from cukern.bench.operators import product_cases
from cukern.bench.portable import changed, portable_attention
from cukern.bench.report import Row
from cukern.bench.timing import in_graph

__all__ = ["exactness", "exactness_cases", "free_order", "model_exactness"]

_ENDLESS = 1 << 24  # keys


@contextmanager
def free_order() -> Iterator[None]:
    """Let products and attention over prompts sum without the rules of the contract.

    Their results then depend on the number of rows and on how a prompt is cut. Decoding attention and the one-kernel
    decoding step keep their order. Attention runs as the portable kernel.
    """
    from cukern.ops import _linear_sm90, _linear_variants

    prefill = import_module("cukern.ops.attention_prefill")
    with (
        portable_attention(),
        changed(
            (_linear_sm90, "template_segment", lambda n, k: 0),
            (_linear_variants, "template_segment", lambda n, k: 0),
            (_linear_variants, "at_once", lambda *_: None),  # for weights with segments, of which there are none
            (prefill, "select", _endless(prefill.select)),
        ),
    ):
        yield


def _endless(select: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: replace(select(*args), chunk=_ENDLESS)


def exactness_cases(
    rows: tuple[int, ...] = (1, 16, 128, 2048, 8192), prefill: tuple[tuple[int, int], ...] = PREFILL
) -> list[Case]:
    """Products of the 0.6B layers whose order has rules (a large weight is one chain anyway), and attention."""
    products = [case for case in product_cases(("0.6b",), rows) if "lm_head" not in case.label]
    return [*products, *prefill_cases(prefill)]


def exactness(
    cases: Sequence[Case], arrays: Arrays, microseconds: Callable[[Sequence[Callable[[], Any]]], float]
) -> Iterator[Row]:
    """Check and time every case with the rules and without; the peer of a row is the free order.

    Attention is the portable kernel both times.
    """
    for case in cases:
        prepared = case.prepare(arrays)
        timed = in_graph(microseconds, arrays.xp) if prepared.in_graph else microseconds
        times: dict[Any, list[float]] = {portable_attention: [], free_order: []}
        errors = list[float]()
        for order in (portable_attention, free_order) * 2 + (portable_attention,):  # in turn, as the GPU gets warm
            with order():
                if len(errors) < 2:
                    errors.append(prepared.check())
                times[order].append(timed(prepared.calls))
        exact, free = (statistics.mean(taken) for taken in times.values())
        yield Row(
            f"exact {case.operator}",
            case.label,
            arrays.dtype.name,
            exact,
            prepared.nbytes,
            prepared.flops,
            max(errors),
            prepared.limit,
            "free order",
            free,
            _cost(exact, free),
        )


def model_exactness(bench: Any, lengths: Sequence[int]) -> Iterator[Row]:
    """First token of a prompt with the rules and without, by portable attention. Checked: the two log-probabilities
    are close.

    Parameters
    ----------
    bench : ModelBench
    lengths : sequence of int
    """
    for length in lengths:
        prompt = bench.prompt(length).tolist()
        first = partial(bench.first, bench.llm(1, length + 1), prompt)
        with portable_attention():
            exact_token, exact = first(), bench.wall(first)
        with free_order():
            free_token, free = first(), bench.wall(first)
        yield Row(
            "exact prefill",
            f"{bench.name} B1 S{length}",
            bench.dtype,
            exact,
            error=abs(exact_token[1][0] - free_token[1][0]),
            limit=0.05,
            peer="free order",
            peer_microseconds=free,
            note=_cost(exact, free),
        )


def _cost(exact: float, free: float) -> str:
    return f"exactness costs {100 * (exact / free - 1):+.1f} %"
