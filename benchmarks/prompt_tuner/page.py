"""A record, as the sections of the page ask for it."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.prompt_tuner.grid import Grid, read_grid
from benchmarks.prompt_tuner.readings import Reading
from benchmarks.prompt_tuner.record import Record
from benchmarks.prompt_tuner.summary import evaluations

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


def lines_of(*lines: str) -> str:
    """A section."""
    return "\n".join([*lines, ""])


def span(numbers: Sequence[int]) -> str:
    """`1 to 10`."""
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
