"""The seconds of very many steps, of one table of step times.

A simulator and a policy that looks ahead ask for a million steps. A decode step of a batch follows another one that
differs by one token of length, and a table is linear between its cells: for each size of a batch, its seconds by
length are a few straight lines. They are found once, and then asked. Where a table is not linear (its cells do not lie
on a grid, as those of steps that were measured while calls ran), the table itself is asked; the answer is always the
table's, up to rounding.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

from stoker.contexts.step_times import StepModel, StepTimes

_LEAST = 1.0
"""No batch has a mean length of less than a token."""
_FAR = 65_536.0
"""So many tokens beyond the last cell a line is straight, too."""
_ROUNDING = 1e-9
_KEPT_PREFILLS = 32_768
"""Prompts of so many lengths are remembered, more than a workload has."""


class StepSeconds:
    """What steps take, by a table that does not change. `factor`: each takes so many times longer than it says."""

    def __init__(self, times: StepTimes, *, factor: float = 1.0) -> None:
        self._model = StepModel(times)
        self._lengths = sorted({_LEAST, *(cell.length for cell in times.decode if cell.length > _LEAST)})
        self._factor = factor
        self._prefills: dict[tuple[int, float], float] = {}
        """The seconds of prompts that were asked for before: a policy asks for a waiting call again and again."""
        self._lines: dict[int, tuple[list[float], list[float | None]]] = {}
        """By the requests of a batch: the seconds at each of the lengths, and for one more token from there on; None
        where they do not lie on a line."""

    def prefill_s(self, tokens: int, length: float) -> float:
        """What a step takes that reads so many tokens of prompts, each of which attends to `length`. Raises LookupError
        if no such step has been measured."""
        known = self._prefills.get((tokens, length))
        if known is None:
            known = self._factor * self._model.step_s(prefill=True, tokens=tokens, length=length)
            if len(self._prefills) >= _KEPT_PREFILLS:
                self._prefills.clear()
            self._prefills[tokens, length] = known
        return known

    def decode_s(self, rows: int, length: float, *, count: int = 1) -> list[float]:
        """What each of `count` decode steps of so many requests takes, one after the other: their mean length is
        `length` in the first, and grows by a token a step. Raises LookupError if no such step has been measured."""
        if rows not in self._lines:
            self._lines[rows] = self._line(rows)
        (values, slopes), lengths, found = self._lines[rows], self._lengths, list[float]()
        while len(found) < count:
            at = length + len(found)
            place = bisect_right(lengths, at) - 1
            slope = slopes[place] if place >= 0 else None
            if slope is None:
                found.append(self._table_s(rows, at))
                continue
            first, steps = values[place] + (at - lengths[place]) * slope, count - len(found)
            if place + 1 < len(lengths):
                steps = min(steps, 1 + int(lengths[place + 1] - at))
            found += [first + slope * number for number in range(steps)]
        return found

    def _line(self, rows: int) -> tuple[list[float], list[float | None]]:
        """The lines of a batch of this size. A line that the table leaves somewhere, it leaves at a quarter, too."""
        knots = [*self._lengths, self._lengths[-1] + _FAR]
        values = [self._table_s(rows, length) for length in knots]
        slopes: list[float | None] = []
        for (start, end), (low, high) in zip(pairwise(knots), pairwise(values), strict=True):
            parts = [(self._table_s(rows, start + (end - start) * part), part) for part in (0.25, 0.5, 0.75)]
            is_line = all(abs(low + (high - low) * part - value) <= _ROUNDING * (value + 1e-3) for value, part in parts)
            slopes.append((high - low) / (end - start) if is_line and end - start > 1e-6 else None)
        return values[:-1], slopes

    def _table_s(self, rows: int, length: float) -> float:
        return self._factor * self._model.step_s(prefill=False, tokens=rows, length=length)
