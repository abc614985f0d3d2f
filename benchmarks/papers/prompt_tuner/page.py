"""A record, as the sections of the page ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from benchmarks.papers.prompt_tuner.cases import MEDIUM, NOBODY
from benchmarks.papers.prompt_tuner.grid import Grid, read_grid
from benchmarks.papers.prompt_tuner.readings import Reading
from benchmarks.papers.prompt_tuner.record import Record
from benchmarks.papers.prompt_tuner.summary import evaluations, over

TEXT = (Reading.HOLD, Reading.RESIZES)
"""The readings nearest to the text: those that every table has."""


class Page:
    """A record, and what is asked of it again and again."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.grid: Grid = read_grid()
        self.sets = evaluations(record)
        self.central = self.sets[0]
        self.chosen = record.chosen

    def of_all(self, theirs: Reading) -> str:
        low, high = over(self.sets, lambda one: one.more_violations(MEDIUM, self.chosen[theirs], NOBODY)).range()
        return f"{low:.1f} to {high:.1f}"

    def one_set(self) -> str:
        late = [fmean(one.violations(MEDIUM, NOBODY)) for one in self.sets]
        told = ", ".join(f"{reading.value} {self.of_all(reading)}" for reading in TEXT)
        return f"""± is over the seeds of the most central set. Sets differ by more: at medium load and S = 1 the
            {len(self.sets)} have {min(late):.1f} to {max(late):.1f} % of ours late, and behind ours are, in points,
            {told}."""


def lines_of(*lines: str) -> str:
    return "\n".join([*lines, ""])


def span(numbers: Sequence[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
