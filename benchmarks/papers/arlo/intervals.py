"""Numbers of several runs as an interval, over seeds, latencies of Bert-Large and readings, and as cells of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from benchmarks.papers.arlo import settings
from benchmarks.papers.arlo.cases import (
    ARLO,
    ARLO_EVEN,
    ARLO_GLOBAL,
    ARLO_IG,
    ARLO_ILB,
    Case,
    Measures,
    Result,
    within_capacity,
)
from benchmarks.papers.arlo.tables import MAIN, READINGS, rate_at
from benchmarks.papers.common import table

Of = Callable[[Case], Result | None]
MISSING = "–"
NAMED = {ours: theirs for theirs, several in READINGS.items() for ours in several}
"""The paper's name of a system, Arlo's own excepted."""
PLAIN = {within_capacity(name): name for name in (ARLO, ARLO_EVEN, ARLO_GLOBAL, ARLO_IG, ARLO_ILB)}
"""The first reading of a system of Arlo's."""


class Interval(msgspec.Struct, frozen=True):
    low: float
    high: float

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high

    def text(self, digits: int = 1) -> str:
        low, high = (f"{each:,.{0 if abs(each) >= 1000 else digits}f}" for each in (self.low, self.high))
        return low if low == high else f"{low} to {high}"

    @classmethod
    def of(cls, numbers: Iterable[float]) -> Interval | None:
        found = list(numbers)
        return cls(min(found), max(found)) if found else None


def shown(interval: Interval | None, digits: int = 1) -> str:
    return MISSING if interval is None else interval.text(digits)


def mean_ms(of: Measures) -> float:
    return of.mean_ms


def p98_ms(of: Measures) -> float:
    return of.p98_ms


def late(of: Measures) -> float:
    return 100 * of.late


def with_system(case: Case, system: str) -> Case:
    return msgspec.structs.replace(case, system=system)


def pairs(of: Of, cases: Sequence[Case], ours: str, theirs: str) -> Iterator[tuple[Measures, Measures]]:
    for case in cases:
        if case.system == theirs:
            one, other = of(with_system(case, ours)), of(case)
            if one is not None and other is not None:
                yield one.measures, other.measures


def less(
    of: Of, cases: Sequence[Case], ours: str, theirs: Iterable[str], what: Callable[[Measures], float]
) -> Interval | None:
    """Return by how many per cent a number of one system is below that of others, on the same requests."""
    found = (pair for system in theirs for pair in pairs(of, cases, ours, system))
    return Interval.of(100 * (1 - what(one) / what(other)) for one, other in found)


def latencies_of(cases: Sequence[Case]) -> list[float]:
    return sorted({case.profile.longest_ms for case in cases})


def of_latency(cases: Sequence[Case], system: str, longest_ms: float) -> list[Case]:
    return [case for case in cases if (case.system, case.profile.longest_ms) == (system, longest_ms)]


class Cells(msgspec.Struct, frozen=True):
    """Numbers of cases as text; `of` returns the result of a case."""

    of: Of

    def values(self, cases: Iterable[Case], what: Callable[[Measures], float], digits: int = 1) -> str:
        found = (what(result.measures) for case in cases if (result := self.of(case)) is not None)
        return shown(Interval.of(found), digits)

    def mean_and_p98(self, cases: Sequence[Case]) -> str:
        return f"{self.values(cases, mean_ms)}; {self.values(cases, p98_ms)}"

    def less(self, cases: Sequence[Case], ours: str, theirs: str, what: Callable[[Measures], float]) -> str:
        return shown(less(self.of, cases, ours, (theirs,), what)) if theirs in NAMED else ""

    def by_latency(self, cases: Sequence[Case]) -> str:
        latencies = latencies_of(cases)
        rows = [
            [f"`{system}`", *(self.values(of_latency(cases, system, each), mean_ms) for each in latencies)]
            for system in MAIN
        ]
        return table(("mean, ms, where 512 tokens take", *(f"{longest:g} ms" for longest in latencies)), rows)

    def by_load(self, cases: Sequence[Case], loads: Sequence[float] = settings.UTILIZATIONS) -> str:
        rows = []
        for system, count in dict.fromkeys((case.system, case.runtimes) for case in cases):
            keys = [(system, count, rate_at(load)) for load in loads]
            apart = ([c for c in cases if (c.system, c.runtimes, c.workload.rate) == key] for key in keys)
            rows.append([f"`{system}`", str(count), *map(self.mean_and_p98, apart)])
        return table(("mean; p98, ms", "runtimes", *(f"{load:.0%} busy" for load in loads)), rows)
