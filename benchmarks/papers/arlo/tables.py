"""The tables and figures of Arlo's evaluation as cases, by the names that `--table` takes.

Traces are shorter than the paper's, which names no length for most of them (its small ones are 5 to 10 minutes). The
larger the cluster, the shorter the trace, so that all of this takes less than 25 minutes of one core.

Cells and tables of the page, from the records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import product

import msgspec
from msgspec.structs import replace

from benchmarks.papers.arlo import settings
from benchmarks.papers.arlo.cases import (
    ARLO,
    ARLO_EVEN,
    ARLO_GLOBAL,
    ARLO_IG,
    ARLO_ILB,
    DT,
    INFAAS,
    INFAAS_SHORT,
    ST,
    Case,
    Measures,
    within_capacity,
)
from benchmarks.papers.arlo.intervals import READINGS, Of, less, mean_ms, p98_ms, shown, values
from benchmarks.papers.arlo.workload import LatencyProfile, Workload, make_trace, read_lengths

ARLOS = (ARLO, within_capacity(ARLO))
"""Arlo with the two readings of its allocation."""
MAIN = (ST, *DT.values(), INFAAS, INFAAS_SHORT, *ARLOS)
STILL = (DT["flat"], DT["rising"], INFAAS_SHORT, *ARLOS)
"""Systems whose latency the drift of lengths changes."""
BASE = LatencyProfile("base")
LARGE = tuple(LatencyProfile("large", longest_ms) for longest_ms in settings.LARGE_MS)
SLOWEST = LARGE[-1]
"""For Table 3 and Figure 11, whose load is relative to the latency."""
RATES_7 = (500.0, 1000.0, 1500.0, 2000.0, 2500.0, 3000.0)
LEAST_8 = (1, settings.FIRST_DEVICES)
"""Figure 8 with and without the right to release a device that it began with."""
ALLOCATIONS_3 = (ARLO_EVEN, ARLO_GLOBAL, ARLO, within_capacity(ARLO_GLOBAL), within_capacity(ARLO))
_STRATEGIES_4 = (ARLO_ILB, ARLO_IG, ARLO)
DISPATCHES_4 = (*_STRATEGIES_4, *map(within_capacity, _STRATEGIES_4))
COUNTS_11 = (2, 4, 8, 16)
LOWER_LOADS, LOWER_SEED = (0.50, 0.55, 0.60), 7
"""Table 3 once more, as an experiment: shares of the devices that the ideal runtimes keep busy, and the seed."""
TRACES_4 = {
    25: (6_000.0, 60.0, settings.GRID_SEEDS),
    80: (20_000.0, 20.0, settings.GRID_SEEDS),
    1000: (250_000.0, 2.0, settings.GRID_SEEDS[:1]),
}
"""By devices: requests a second, seconds, seeds."""
FASTER_6B_MS, LONGER_10B_S = (4.0, 5.0, 5.5), (20.0, 30.0)
"""Experiments on ST: latencies of Bert-Large in Figure 6b, and seconds of the trace in Figure 10b."""
APART_4 = {
    "as above": ("bursty", 1.0),
    "no drift": ("bursty", 0.0),
    "no bursts": ("stable", 1.0),
    "neither": ("stable", 0.0),
}
"""Table 4 once more, as an experiment: arrivals, and the drift of lengths."""


def experiments() -> list[Case]:
    """What explains misses: on the figures with fixed devices, lengths that do not drift, and an overhead that keeps a
    device busy; on Table 3, lower loads; on Table 4, arrivals without bursts and lengths without drift;
    against ST, a faster Bert-Large and longer traces."""
    first = [case for figure in (figure_6a, figure_6b, figure_10a, figure_10b) for case in figure()]
    still = [
        replace(case, workload=replace(case.workload, drift=0.0)) for case in first
        if case.workload.seed == settings.SEEDS[0] and case.system in STILL
    ]  # fmt: skip
    apart = [case for one in APART_4 for case in apart_4(one)]
    return [*still, *figure_6a(occupies=True), *lower_loads(), *apart, *against_st()]


def figure_6a(*, occupies: bool = False) -> list[Case]:
    seeds = settings.SEEDS[:1] if occupies else settings.SEEDS
    return [
        Case(system, BASE, 10, Workload(1000.0, 360.0, seed), occupies=occupies)
        for seed, system in product(seeds, MAIN)
    ]  # fmt: skip


def figure_6b() -> list[Case]:
    return [
        Case(system, profile, 10, Workload(1500.0, 150.0, seed))
        for seed, profile, system in product(settings.GRID_SEEDS, LARGE, MAIN)
    ]  # fmt: skip


def figure_7() -> list[Case]:
    return [Case(system, BASE, 10, Workload(rate, 60.0, settings.SEEDS[0])) for rate, system in product(RATES_7, MAIN)]


def figure_8() -> list[Case]:
    found = []
    for profile, least, system in product((LARGE[0], SLOWEST), LEAST_8, MAIN):
        rate = round(settings.FIRST_DEVICES / profile.static_s(512))
        workload = Workload(float(rate), 600.0, settings.SEEDS[0], "bursty", swings=True)
        found.append(Case(system, profile, settings.FIRST_DEVICES, workload, least=least))
    return found


def figure_10a() -> list[Case]:
    return [
        Case(system, BASE, 90, Workload(8000.0, 60.0, seed, "bursty")) for seed, system in product(settings.SEEDS, MAIN)
    ]


def figure_10b() -> list[Case]:
    return [
        Case(system, profile, 300, Workload(25_000.0, 10.0, seed, "bursty"))
        for seed, profile, system in product(settings.GRID_SEEDS, LARGE, MAIN)
    ]


@lru_cache(maxsize=1)
def lengths_of_trace() -> list[int]:
    """Lengths of a trace of their own, over one wave of drift, for what is computed without a run."""
    return make_trace(Workload(100.0, settings.DRIFT_PERIOD_S, 0), *read_lengths()).lengths


def rate_at(utilization: float) -> float:
    """Requests a second at which the ideal ones of 8 runtimes keep so much of 40 GPUs busy."""
    return float(round(utilization * 40 / SLOWEST.mean_s(lengths_of_trace(), 8), -2))


def _workloads_3(for_s: float, seeds: Sequence[int]) -> list[Workload]:
    every = product(settings.UTILIZATIONS, seeds)
    return [Workload(rate_at(utilization), for_s, seed, "bursty") for utilization, seed in every]


def lower_loads() -> list[Case]:
    workloads = [Workload(rate_at(load), 240.0, LOWER_SEED, "bursty") for load in LOWER_LOADS]
    return [Case(system, SLOWEST, 40, workload) for workload, system in product(workloads, ALLOCATIONS_3)]


def table_3() -> list[Case]:
    workloads = _workloads_3(360.0, settings.SEEDS[:1])
    return [Case(system, SLOWEST, 40, workload) for workload, system in product(workloads, ALLOCATIONS_3)]


def figure_11() -> list[Case]:
    workloads = _workloads_3(60.0, settings.GRID_SEEDS)
    return [
        Case(system, SLOWEST, 40, workload, runtimes=count)
        for workload, system, count in product(workloads, ARLOS, COUNTS_11)
    ]  # fmt: skip


def table_4() -> list[Case]:
    return [case for devices in TRACES_4 for case in of_trace_4(devices)]


def against_st() -> list[Case]:
    """ST and Arlo where Figure 6b's load is less than ST can do, and where Figure 10b's is more, for longer."""
    seed = settings.SEEDS[0]
    faster = product([LatencyProfile("large", each) for each in FASTER_6B_MS], [Workload(1500.0, 150.0, seed)], [10])
    longer = product([SLOWEST], [Workload(25_000.0, for_s, seed, "bursty") for for_s in LONGER_10B_S], [300])
    return [
        Case(system, profile, devices, workload)
        for profile, workload, devices in (*faster, *longer) for system in (ST, ARLO)
    ]  # fmt: skip


def apart_4(name: str) -> Iterator[Case]:
    """Table 4's smallest trace with other arrivals or lengths, where each instance is to be within its capacity."""
    pattern, drift = APART_4[name]
    rate, for_s, _ = TRACES_4[25]
    workload = Workload(rate, for_s, settings.SEEDS[0], pattern, drift=drift)
    for profile, strategy in product(LARGE[-2:], _STRATEGIES_4):
        yield Case(within_capacity(strategy), profile, 25, workload)


def of_trace_4(devices: int) -> Iterator[Case]:
    rate, for_s, seeds = TRACES_4[devices]
    for seed, profile, system in product(seeds, LARGE, DISPATCHES_4):
        yield Case(system, profile, devices, Workload(rate, for_s, seed, "bursty"))


TABLES = {
    "6a": figure_6a,
    "6b": figure_6b,
    "7": figure_7,
    "8": figure_8,
    "10a": figure_10a,
    "10b": figure_10b,
    "11": figure_11,
    "3": table_3,
    "4": table_4,
    "experiments": experiments,
    "measured": list,
    "deployed": list,
}
"""What has to be run for each table. `measured` stands for Table 2 and Figure 9, which are no simulations, `deployed`
for the policy of a session, which has a simulator of its own."""


NAMED = {ours: theirs for theirs, several in READINGS.items() for ours in several}
"""What a system of ours is in the paper, Arlo's own apart."""
PLAIN = {within_capacity(name): name for name in (ARLO, ARLO_EVEN, ARLO_GLOBAL, ARLO_IG, ARLO_ILB)}
"""The first reading of a system of Arlo's."""


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(columns)
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""])


def late(of: Measures) -> float:
    return 100 * of.late


class Cells(msgspec.Struct, frozen=True):
    """Numbers of cases as text; `of` gives what came of a case."""

    of: Of

    def values(self, cases: Sequence[Case], what: Callable[[Measures], float], digits: int = 1) -> str:
        return shown(values(self.of, cases, what), digits)

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
        kinds = dict.fromkeys((case.system, case.runtimes) for case in cases)
        rows = [
            [f"`{system}`", str(count), *(self.mean_and_p98(of_load(cases, system, count, load)) for load in loads)]
            for system, count in kinds
        ]
        return table(("mean; p98, ms", "runtimes", *(f"{load:.0%} busy" for load in loads)), rows)


def of_latency(cases: Sequence[Case], system: str, longest_ms: float) -> list[Case]:
    return [case for case in cases if (case.system, case.profile.longest_ms) == (system, longest_ms)]


def of_load(cases: Sequence[Case], system: str, runtimes: int, load: float) -> list[Case]:
    wanted = system, runtimes, rate_at(load)
    return [case for case in cases if (case.system, case.runtimes, case.workload.rate) == wanted]


def latencies_of(cases: Sequence[Case]) -> list[float]:
    return sorted({case.profile.longest_ms for case in cases})
