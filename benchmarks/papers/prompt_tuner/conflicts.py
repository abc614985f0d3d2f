"""Compute which numbers of the paper each drawn set meets, and which pairs of numbers no set meets.

Each number is a difference: percentage points of late jobs, or percent of our cost. A set meets a number if the error
is at most a given share of the number. Two numbers conflict if sets meet each number but no set meets both numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations
from statistics import fmean

import msgspec

from benchmarks.papers.prompt_tuner import paper
from benchmarks.papers.prompt_tuner.scenarios import ELASTIC_FLOW, LITERAL, MEDIUM, PARTS, System
from benchmarks.papers.prompt_tuner.searching import Evaluation


class Number(msgspec.Struct, frozen=True):
    """A number of the paper with its computation. `of_parts`: known only for examined sets."""

    what: str
    low: float
    high: float
    of: Callable[[Evaluation], float]
    of_parts: bool = False

    def deviation(self, value: float) -> float:
        nearest = min(max(value, self.low), self.high)
        return abs(value - nearest) / abs(nearest)

    @property
    def said(self) -> str:
        return f"{self.low:.3g}" if self.low == self.high else f"{self.low:.3g} to {self.high:.3g}"


def _numbers() -> Iterator[Number]:
    late = paper.TABLE_8["whole"].violations
    yield Number("ours late, %", late, late, lambda one: fmean(one.late(MEDIUM)))
    low, high = paper.FEWER_POINTS["infless"]
    yield Number("INFless behind, points", low, high, partial(_fewer_points, LITERAL))
    more = 100.0 / (1.0 - paper.SAVED / 100.0) - 100.0
    yield Number("INFless's cost, % more", more, more, partial(_cost_increase, LITERAL))
    low, high = paper.FEWER_POINTS["elastic-flow"]
    yield Number("ElasticFlow behind, points", low, high, partial(_fewer_points, ELASTIC_FLOW))
    for part in PARTS:
        yield Number(f"{part.what}, points", *part.points, partial(_fewer_points, part.system), of_parts=True)
        low, high = (100.0 * times - 100.0 for times in part.times)
        if max(abs(low), abs(high)) > _SMALL:
            yield Number(f"{part.what}, % of cost", low, high, partial(_cost_increase, part.system), of_parts=True)


def _fewer_points(system: System, one: Evaluation) -> float:
    return one.points(MEDIUM, system).mean


def _cost_increase(system: System, one: Evaluation) -> float:
    return 100.0 * one.times(MEDIUM, system).mean - 100.0


_SMALL = 2.0
"""Percent of cost below which a number has no limit, because seeds differ by more."""


NUMBERS = tuple(_numbers())
MAIN = NUMBERS[:4]


class Single(msgspec.Struct, frozen=True):
    """A number, index and value of the closest set, and the sets within the limit."""

    number: Number
    closest: int
    value: float
    within: int


class Pair(msgspec.Struct, frozen=True):
    """Two numbers, the set closest to both numbers, and the values of this set."""

    numbers: tuple[Number, Number]
    closest: int
    values: tuple[float, float]
    off: float
    conflict: bool


def singles(sets: Sequence[Evaluation], looked_at: Sequence[int], *, limit: float) -> list[Single]:
    found = []
    for number in NUMBERS:
        values = _values(number, sets, looked_at)
        closest = min(values, key=lambda place: number.deviation(values[place]))
        within = sum(number.deviation(value) <= limit for value in values.values())
        found.append(Single(number, closest, values[closest], within))
    return found


def pairs(sets: Sequence[Evaluation], looked_at: Sequence[int], *, limit: float) -> list[Pair]:
    """Return all pairs of main numbers, and all other conflicting pairs."""
    met = {single.number.what for single in singles(sets, looked_at, limit=limit) if single.within}
    found = []
    for one, other in combinations(NUMBERS, 2):
        first, second = _values(one, sets, looked_at), _values(other, sets, looked_at)
        both = first.keys() & second.keys()
        off = {place: max(one.deviation(first[place]), other.deviation(second[place])) for place in both}
        closest = min(sorted(off), key=off.__getitem__)
        conflict = {one.what, other.what} <= met and off[closest] > limit
        if conflict or (one in MAIN and other in MAIN):
            found.append(Pair((one, other), closest, (first[closest], second[closest]), off[closest], conflict))
    return found


def _values(number: Number, sets: Sequence[Evaluation], looked_at: Sequence[int]) -> dict[int, float]:
    places = looked_at if number.of_parts else range(len(sets))
    return {place: number.of(sets[place]) for place in places}
