"""Cells and tables of the page, from the records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from benchmarks.papers.arlo import settings, tables
from benchmarks.papers.arlo.cases import (
    ARLO,
    ARLO_EVEN,
    ARLO_GLOBAL,
    ARLO_IG,
    ARLO_ILB,
    Case,
    Measures,
    within_capacity,
)
from benchmarks.papers.arlo.intervals import READINGS, Of, less, mean_ms, p98_ms, shown, values

NAMED = {ours: theirs for theirs, several in READINGS.items() for ours in several}
"""What a system of ours is in the paper, Arlo's own apart."""
PLAIN = {within_capacity(name): name for name in (ARLO, ARLO_EVEN, ARLO_GLOBAL, ARLO_IG, ARLO_ILB)}
"""The first reading of a system of Arlo's."""


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    names = list(columns)
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""])


def late(of: Measures) -> float:
    """Per cent of the requests above the objective."""
    return 100 * of.late


class Cells(msgspec.Struct, frozen=True):
    """Numbers of cases as text; `of` gives what came of a case."""

    of: Of

    def values(self, cases: Sequence[Case], what: Callable[[Measures], float], digits: int = 1) -> str:
        """One number of each case, as an interval."""
        return shown(values(self.of, cases, what), digits)

    def mean_and_p98(self, cases: Sequence[Case]) -> str:
        """Two of them."""
        return f"{self.values(cases, mean_ms)}; {self.values(cases, p98_ms)}"

    def less(self, cases: Sequence[Case], ours: str, theirs: str, what: Callable[[Measures], float]) -> str:
        """By how many per cent one is below another; empty beside Arlo's own readings."""
        return shown(less(self.of, cases, ours, (theirs,), what)) if theirs in NAMED else ""

    def by_latency(self, cases: Sequence[Case]) -> str:
        """Means by the latency of Bert-Large, for each system."""
        latencies = latencies_of(cases)
        rows = [
            [f"`{system}`", *(self.values(of_latency(cases, system, each), mean_ms) for each in latencies)]
            for system in tables.MAIN
        ]
        return table(("mean, ms, where 512 tokens take", *(f"{longest:g} ms" for longest in latencies)), rows)

    def by_load(self, cases: Sequence[Case], loads: Sequence[float] = settings.UTILIZATIONS) -> str:
        """Means and tails by the load, for each system and number of runtimes."""
        kinds = dict.fromkeys((case.system, case.runtimes) for case in cases)
        rows = [
            [f"`{system}`", str(count), *(self.mean_and_p98(of_load(cases, system, count, load)) for load in loads)]
            for system, count in kinds
        ]
        return table(("mean; p98, ms", "runtimes", *(f"{load:.0%} busy" for load in loads)), rows)


def of_latency(cases: Sequence[Case], system: str, longest_ms: float) -> list[Case]:
    """Those of a system where 512 tokens take so long."""
    return [case for case in cases if (case.system, case.profile.longest_ms) == (system, longest_ms)]


def of_load(cases: Sequence[Case], system: str, runtimes: int, load: float) -> list[Case]:
    """Those of a system whose ideal runtimes keep so much of the devices busy."""
    wanted = system, runtimes, tables.rate_at(load)
    return [case for case in cases if (case.system, case.runtimes, case.workload.rate) == wanted]


def latencies_of(cases: Sequence[Case]) -> list[float]:
    """What 512 tokens take, in milliseconds, from the least on."""
    return sorted({case.profile.longest_ms for case in cases})
