"""Benchmark results, verdicts against bars, and text with computed numbers."""

from __future__ import annotations

import enum
import math
import statistics
import textwrap
from collections.abc import Sequence

import msgspec

from benchmarks.harness import ratios, spread


class Verdict(enum.Enum):
    MET = "met"
    MISSED = "MISSED"
    TOO_FEW = "too few repeats"
    NOT_JUDGED = "not judged"
    NO_BAR = ""


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """A limit for a median: `at_least` or `at_most`. A bar requires `repeats` finite numbers."""

    at_least: float | None = None
    at_most: float | None = None
    repeats: int = 3

    def __post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("a bar is at_least or at_most")

    def judge(self, numbers: Sequence[float]) -> Verdict:
        if any(not math.isfinite(number) for number in numbers):
            return Verdict.MISSED
        if len(numbers) < self.repeats:
            return Verdict.TOO_FEW
        median = statistics.median(numbers)
        if self.at_least is not None:
            return Verdict.MET if median >= self.at_least else Verdict.MISSED
        return Verdict.MET if self.at_most is not None and median <= self.at_most else Verdict.MISSED

    def __str__(self) -> str:
        if self.at_least is not None:
            return f"at least {self.at_least:,g}"
        return f"at most {self.at_most:,g}"


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A table line. `cells`: numbers by heading, one per repeat. The bar judges the last cell."""

    what: str
    cells: dict[str, list[float]]
    bar: Bar | None = None
    digits: int = 0
    last_digits: int = 2

    def __post_init__(self) -> None:
        if not self.cells or not all(self.cells.values()):
            raise ValueError(f"{self.what}: a line without numbers")

    @property
    def runs(self) -> str:
        counts = [len(numbers) for numbers in self.cells.values()]
        fewest, most = min(counts), max(counts)
        return f"{fewest}" if fewest == most else f"{fewest} to {most}"

    def verdict(self, *, quick: bool = False) -> Verdict:
        if self.bar is None:
            return Verdict.NO_BAR
        if quick:
            return Verdict.NOT_JUDGED
        return self.bar.judge(list(self.cells.values())[-1])


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a benchmark; `python -m benchmarks` sets name and title. `skipped`: why it did not run."""

    name: str = ""
    title: str = ""
    lines: list[Line] = []
    skipped: str = ""
    notes: list[str] = []
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if bool(self.lines) == bool(self.skipped):
            raise ValueError(f"{self.name}: a table has lines, or a reason why not")


def versus(what: str, cells: dict[str, list[float]], *, bar: Bar | None = None, digits: int = 0, last: int = 2) -> Line:
    (ours, above), (theirs, below) = cells.items()
    ratio = {f"{ours} / {theirs}": ratios(above, below)}
    return Line(what=what, cells={**cells, **ratio}, bar=bar, digits=digits, last_digits=last)


def passes(table: Table, *, quick: bool = False) -> bool:
    return all(line.verdict(quick=quick) in (Verdict.MET, Verdict.NO_BAR, Verdict.NOT_JUDGED) for line in table.lines)


def show(table: Table, *, quick: bool = False) -> list[str]:
    out = [f"## {table.name}: {table.title}", ""]
    if table.skipped:
        return [*out, f"skipped: {table.skipped}", ""]
    heads: tuple[str, ...] | None = None
    for line in table.lines:
        if heads != tuple(line.cells):
            if heads is not None:
                out.append("")
            heads = tuple(line.cells)
            out.append(f"| median (min-max) | runs | {' | '.join(heads)} | bar | |")
            out.append("|---" * (len(heads) + 4) + "|")
        shown = []
        for number, cell in enumerate(line.cells.values(), start=1):
            shown.append(spread(cell, digits=line.last_digits if number == len(line.cells) else line.digits))
        bar = str(line.bar) if line.bar else ""
        out.append(f"| {line.what} | {line.runs} | {' | '.join(shown)} | {bar} | {line.verdict(quick=quick).value} |")
    return [*out, "", *(f"{note}  " for note in table.notes), *([""] if table.notes else [])]


WIDTH = 119


def paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def head(*columns: str) -> list[str]:
    return [row(*columns), f"|{'---|' * len(columns)}"]
