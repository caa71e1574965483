"""Where the time of a decode step goes: clock readings of a profiled build (``MARK`` in kernels_src/decode).

The clocks of two multiprocessors are not comparable, so every time is counted inside a block, from the end of the part
before to the end of this part, either as warp 0 sees it or as the last warp does (the latest warp at one point to the
latest warp at the next). A block that does not pass a point spends no time there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cukern.models.decode_step import MARKS

_PRODUCT = ("ring there", "sums", "all units", "block barrier", "added, sent", "ring filled")
_PARTS: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("norm", 0, ("layer begins", "received", "normed")),
    ("qkv", 3, _PRODUCT),
    (
        "attention",
        9,
        (
            "begins",
            "heads received",
            "heads normed",
            "heads placed",
            "heads there",
            "scores",
            "maxima there",
            "softmax",
            "p there",
            "P V",
            "values free",
            "sent",
            "over",
            "merged together",
        ),
    ),
    ("o input", 23, ("received", "x there")),
    ("o", 25, _PRODUCT),
    ("norm", 31, ("weights asked for", "received", "normed")),
    ("gate|up", 34, _PRODUCT),
    ("down input", 40, ("received", "x there")),
    ("down", 42, _PRODUCT),
)
_POINTS = [(part, what) for part, _, names in _PARTS for what in names]
_HEAD_POINTS = 9  # the last norm and the head pass the first points


def point_times(stamps: Any) -> tuple[Any, Any]:
    """Cycles from the start of a layer to each point.

    Parameters
    ----------
    stamps : uint32 [blocks, layers, 48, warps]
        ``DecodeStep.stamps``: clocks modulo 2**32, 0 where a warp did not pass.

    Returns
    -------
    first, last : float64 [blocks, layers, 48]
        Of warp 0, and of the last warp. Where none of them passed, and where a clock lies before that of the point
        before (another item of work), the time of the point before.
    """
    began = stamps[:, :, :1, :1]
    cycles = (stamps - began).view(np.int32).astype(np.float64)
    cycles[stamps == 0] = -np.inf
    first, last = cycles[..., 0], cycles.max(-1)
    return tuple(np.maximum.accumulate(np.maximum(t, 0.0), axis=2) for t in (first, last))  # type: ignore[return-value]


def table(stamps: Any, cycles_per_us: float) -> list[str]:
    """Lines of text: microseconds of every part of a layer, and of the head.

    "typical" is the mean over the blocks that take part in a phase (all but those that spend less than a third of the
    slowest block's time in it), "last" the block that is slowest in the phase; both over the layers but the first.

    Parameters
    ----------
    stamps : uint32 [blocks, L + 1, 48, warps]
    cycles_per_us : float

    Returns
    -------
    list of str
    """
    if stamps.shape[2] != MARKS or len(_POINTS) != MARKS:
        raise ValueError(f"stamps have {stamps.shape[2]} points, {MARKS} are named")
    lines = [
        f"{'':30} {'typical block':>15} {'last block':>17}",
        f"{'':30} {'warp 0':>7} {'last':>7}   {'warp 0':>7} {'last':>7}",
    ]
    first, last = (t / cycles_per_us for t in point_times(stamps))
    spent = [np.diff(t[:, 1:-1].mean(1), axis=1, prepend=0.0) for t in (first, last)]
    lines += _rows(spent, _PARTS)
    spent = [np.diff(t[:, -1, :_HEAD_POINTS], axis=1, prepend=0.0) for t in (first, last)]
    lines += ["last norm and head", *_rows(spent, _PARTS[:2])]
    return lines


def _rows(spent: list[Any], parts: tuple[tuple[str, int, tuple[str, ...]], ...]) -> list[str]:
    lines = []
    for part, at, names in parts:
        inside = slice(at + (at == 0 or part == "attention"), at + len(names))
        whole = spent[1][:, inside].sum(1)
        taking_part, slowest = whole * 3 >= whole.max(), int(whole.argmax())
        numbers = [column for t in spent for column in (t[taking_part].mean(0), t[slowest])]
        order = (numbers[0], numbers[2], numbers[1], numbers[3])
        lines.append(f"{part} ({int(taking_part.sum())} blocks)")
        for point, what in zip(range(at, at + len(names)), names, strict=True):
            a, b, c, d = (float(column[point]) for column in order)
            lines.append(f"  {what:28} {a:7.2f} {b:7.2f}   {c:7.2f} {d:7.2f}")
        a, b, c, d = (float(column[inside].sum()) for column in order)
        lines.append(f"  {'= together':28} {a:7.2f} {b:7.2f}   {c:7.2f} {d:7.2f}")
    return lines
