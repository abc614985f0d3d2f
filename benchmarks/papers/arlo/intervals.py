"""Numbers of several runs as an interval: over seeds, over the latencies of Bert-Large, and over readings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from benchmarks.papers.arlo.cases import DT, INFAAS, INFAAS_SHORT, ST, Case, Measures, Result
from benchmarks.papers.arlo.paper import DT_, INFAAS_, ST_

READINGS: dict[str, tuple[str, ...]] = {
    ST_: (ST,),
    DT_: tuple(DT.values()),
    INFAAS_: (INFAAS, INFAAS_SHORT),
}
"""Our systems that read one of the paper's."""

Of = Callable[[Case], Result | None]
MISSING = "–"


class Interval(msgspec.Struct, frozen=True):
    """From the least to the greatest."""

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


def measures(of: Of, cases: Iterable[Case]) -> Iterator[Measures]:
    return (result.measures for case in cases if (result := of(case)) is not None)


def values(of: Of, cases: Iterable[Case], what: Callable[[Measures], float]) -> Interval | None:
    return Interval.of(what(each) for each in measures(of, cases))


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
    """By how many per cent a number of one system is below that of others, on the same requests."""
    found = (pair for system in theirs for pair in pairs(of, cases, ours, system))
    return Interval.of(100 * (1 - what(one) / what(other)) for one, other in found)


def mean_ms(of: Measures) -> float:
    return of.mean_ms


def p98_ms(of: Measures) -> float:
    return of.p98_ms
