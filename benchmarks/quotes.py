"""`python -m benchmarks.quotes`: put what README and docs quote of the reproductions into them, from their records.

Each quote is a whole line, found by how it begins. A test compares them, so that no quote outlives its record.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from benchmarks.paired import ROOT
from benchmarks.pervasive import report as context
from benchmarks.pervasive.__main__ import RECORD as CONTEXT_RECORD
from benchmarks.pervasive.__main__ import read as read_context
from benchmarks.prompt_tuner import readings
from benchmarks.prompt_tuner.cases import MEDIUM, NOBODY, System
from benchmarks.prompt_tuner.grid import read_grid
from benchmarks.prompt_tuner.readings import Reading
from benchmarks.prompt_tuner.record import Record, read
from benchmarks.prompt_tuner.report import RECORD as TUNER_RECORD
from benchmarks.prompt_tuner.summary import evaluations, show
from benchmarks.words import row
from stoker.manager.study.statistics import estimate

FOLDER = ROOT / "docs" / "reproduction"


class Quote(NamedTuple):
    """A line of a file, and how it begins."""

    path: Path
    begins: str
    line: str


def quotes() -> list[Quote]:
    """All of them, by the records that are there."""
    record = read(FOLDER / TUNER_RECORD)
    performance = ROOT / "docs" / "performance.md"
    found = [_quote(ROOT / "README.md", "| prompt tuning by deadlines, simulated", _front(record))]
    found += [_quote(performance, begins, line) for begins, line in _schedulers(record)]
    found.append(_quote(performance, "In the simulator, medium load", _condition(record)))
    found.append(_quote(performance, "Of the context paper", _context()))
    return found


def _quote(path: Path, begins: str, line: str) -> Quote:
    if not line.startswith(begins):
        raise ValueError(f"a quote of {path.name} begins otherwise than it is found: {line!r}")
    return Quote(path, begins, line)


def _front(record: Record) -> str:
    one, theirs = evaluations(record)[0], record.chosen[Reading.HOLD]
    fewer, times = one.more_violations(MEDIUM, theirs, NOBODY), one.times_the_cost(MEDIUM, theirs, NOBODY)
    cost = f"INFless's rules cost {show(times, digits=2)} times as much"
    apart = "" if fewer.low > 0 or fewer.high < 0 else " (within the error)"
    what = f"{cost}; {show(fewer)} points fewer jobs miss their deadline{apart}"
    early = "a first look, " if len(record.searched.stages) < len(read_grid().stages) else ""
    sets = f"{early}{len(record.seeds)} seeds, {len(record.sets)} sets of unknowns"
    where = f"[page](docs/reproduction/prompttuner.md); {sets}"
    return row(
        f"prompt tuning by deadlines, simulated, without learning from earlier jobs: {what}", "`make reproduce`", where
    )


def _schedulers(record: Record) -> list[tuple[str, str]]:
    one = evaluations(record)[0]
    systems: list[tuple[str, System]] = [
        ("`prompt-tuner`", NOBODY),
        *((f"{reading.value}", record.chosen[reading]) for reading in Reading),
        ("`prompt-tuner` as it ships: it learns from earlier jobs", readings.LEARNS),
    ]
    return [
        (f"| {name} |", row(name, f"{show(estimate(one.violations(MEDIUM, system)))} %",
                            show(one.times_the_cost(MEDIUM, system, NOBODY), digits=2)))
        for name, system in systems
    ]  # fmt: skip


def _condition(record: Record) -> str:
    return (
        f"In the simulator, medium load on 32 GPUs, S = 1, the most central of {len(record.sets)} sets of what the text"
        f" leaves open, {len(record.seeds)} seeds, 95 % intervals; nobody learns from earlier jobs, as in the paper:"
    )


def _context() -> str:
    return context.quote(read_context(FOLDER / CONTEXT_RECORD))


def main() -> int:
    """Write them."""
    for quote in quotes():
        lines = quote.path.read_text().split("\n")
        places = [place for place, line in enumerate(lines) if line.startswith(quote.begins)]
        if len(places) != 1:
            sys.stderr.write(f"{quote.path}: {len(places)} lines begin with {quote.begins!r}, not one\n")
            return 1
        lines[places[0]] = quote.line
        quote.path.write_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
