"""Rows of a benchmark: what is printed, and the CSV beside it. Speed is never shown without its check."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Floors", "Report", "Row", "describe"]


@dataclass(frozen=True)
class Floors:
    """What this GPU reaches: bytes a second of a plain copy (read plus written), and operations a second of a large
    product."""

    bytes_per_second: float
    flops_per_second: float
    measured: bool = True

    def microseconds(self, nbytes: float, flops: float) -> float:
        """Least time for that work: the larger of the two bounds."""
        return 1e6 * max(nbytes / self.bytes_per_second, flops / self.flops_per_second)


@dataclass
class Row:
    """One measurement.

    Attributes
    ----------
    part, case, dtype : str
    microseconds : float
    nbytes, flops : float
        Work that cannot be avoided: bytes moved once, operations.
    error, limit : float or None
        Of the check against the reference, and what is allowed; None where nothing could be checked.
    peer, peer_microseconds
        The best other implementation timed in the same process.
    note : str
    groups : tuple of str
        Rows of a group have a mean ratio to the peer (`Report.means`).
    """

    part: str
    case: str
    dtype: str
    microseconds: float
    nbytes: float = 0.0
    flops: float = 0.0
    error: float | None = None
    limit: float | None = None
    peer: str = ""
    peer_microseconds: float | None = None
    note: str = ""
    groups: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        """ok, FAIL, or "unchecked"."""
        if self.error is None or self.limit is None:
            return "unchecked"
        return "ok" if self.error <= self.limit else "FAIL"  # a NaN fails

    @property
    def ratio(self) -> float | None:
        """How many times faster than the peer."""
        return None if self.peer_microseconds is None else self.peer_microseconds / self.microseconds

    def rate(self, floors: Floors) -> str:
        """TFLOP/s where operations are the bound, else GB/s."""
        if self.nbytes == self.flops == 0:
            return ""
        if self.flops / floors.flops_per_second > self.nbytes / floors.bytes_per_second:
            return f"{self.flops / self.microseconds * 1e-6:.0f} TFLOP/s"
        return f"{self.nbytes / self.microseconds * 1e-3:.0f} GB/s"

    def percent(self, floors: Floors) -> float | None:
        """Share of the floor that was reached."""
        if self.nbytes == self.flops == 0:
            return None
        return 100 * floors.microseconds(self.nbytes, self.flops) / self.microseconds


_COLUMNS = "{:<46} {:>10} {:>13} {:>8} {:>8} {:<18} {:>9} {:>9}  {}"
_FIELDS = (
    *("part", "case", "dtype", "us", "gb_per_s", "tflop_per_s", "percent_of_floor"),
    *("peer", "peer_us", "ratio_to_peer", "error", "limit", "status", "note"),
)


class Report:
    """Prints rows as they come and keeps them.

    Parameters
    ----------
    floors : Floors
    facts : mapping
        Machine, versions and date: columns of every CSV line.
    echo : callable
        Where lines go.
    csv_path : path, optional
        Rows are appended there as they come; the header is written if the file is new.
    """

    def __init__(
        self,
        floors: Floors,
        facts: Mapping[str, str],
        echo: Callable[[str], object] = print,
        csv_path: Path | None = None,
    ) -> None:
        self.floors, self.facts, self.rows = floors, dict(facts), list[Row]()
        self._echo, self._csv = echo, csv_path

    @property
    def failed(self) -> int:
        """Rows whose check failed."""
        return sum(row.status == "FAIL" for row in self.rows)

    def head(self) -> None:
        """Print the machine, the floors and the names of the columns."""
        how = "measured here" if self.floors.measured else "assumed"
        self._echo("  ".join(f"{name} {value}" for name, value in self.facts.items() if value))
        self._echo(
            f"floors: {self.floors.bytes_per_second / 1e12:.2f} TB/s, "
            f"{self.floors.flops_per_second / 1e12:.0f} TFLOP/s ({how})"
        )
        names = ("case", "time us", "rate", "% floor", "x peer", "peer", "error", "limit", "check")
        self._echo(_COLUMNS.format(*names))

    def add(self, row: Row) -> None:
        """Print a row and append it to the CSV."""
        self.rows.append(row)
        self._echo(self.line(row))
        if self._csv is not None:
            new = not self._csv.exists() or self._csv.stat().st_size == 0
            with self._csv.open("a", newline="") as file:
                writer = csv.DictWriter(file, [*_FIELDS, *self.facts])
                if new:
                    writer.writeheader()
                writer.writerow(self.record(row) | self.facts)

    def line(self, row: Row) -> str:
        """A row as text."""
        percent, ratio = row.percent(self.floors), row.ratio
        text = _COLUMNS.format(
            f"{row.part} {row.case} {row.dtype}".strip(),
            f"{row.microseconds:.2f}",
            row.rate(self.floors),
            "" if percent is None else f"{percent:.0f}",
            "" if ratio is None else f"{ratio:.2f}",
            row.peer,
            "" if row.error is None else f"{row.error:.2g}",
            "" if row.limit is None else f"{row.limit:.2g}",
            row.status,
        )
        return f"{text}  {row.note}".rstrip()

    def record(self, row: Row) -> dict[str, str]:
        """A row as the fields of the CSV."""
        percent, ratio = row.percent(self.floors), row.ratio
        values = (
            row.part,
            row.case,
            row.dtype,
            f"{row.microseconds:.3f}",
            f"{row.nbytes / row.microseconds * 1e-3:.1f}" if row.nbytes else "",
            f"{row.flops / row.microseconds * 1e-6:.2f}" if row.flops else "",
            "" if percent is None else f"{percent:.1f}",
            row.peer,
            "" if row.peer_microseconds is None else f"{row.peer_microseconds:.3f}",
            "" if ratio is None else f"{ratio:.3f}",
            "" if row.error is None else f"{row.error:.3g}",
            "" if row.limit is None else f"{row.limit:.3g}",
            row.status,
            row.note,
        )
        return dict(zip(_FIELDS, values))

    def means(self) -> list[str]:
        """A line for each group: the geometric mean of its ratios to the peer."""
        groups: dict[str, list[float]] = {}
        for row in self.rows:
            if (ratio := row.ratio) is not None:
                for group in row.groups:
                    groups.setdefault(group, []).append(ratio)
        return [
            f"geometric mean of {len(ratios)}: {group}: {statistics.geometric_mean(ratios):.3f} x peer"
            for group, ratios in groups.items()
        ]

    def summary(self) -> str:
        """One line at the end."""
        unchecked = sum(row.status == "unchecked" for row in self.rows)
        return f"{len(self.rows)} cases, {self.failed} FAIL, {unchecked} unchecked"


def describe(error: Exception) -> str:
    """Type and first line of an error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
