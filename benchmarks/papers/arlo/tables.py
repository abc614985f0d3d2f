"""Define Arlo's tables and figures as cases by `--table` name, with the numbers of the paper.

Traces are shorter than in the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

from msgspec.structs import replace

from benchmarks.papers.arlo import cases as runs
from benchmarks.papers.arlo import settings
from benchmarks.papers.arlo.cases import ARLO, ARLO_EVEN, ARLO_GLOBAL, ARLO_IG, ARLO_ILB, DT, INFAAS, INFAAS_SHORT, Case
from benchmarks.papers.arlo.workload import LatencyProfile, Workload, make_trace, read_lengths

DT_, INFAAS_, ST_ = "DT", "INFaaS", "ST"
READINGS: dict[str, tuple[str, ...]] = {ST_: (runs.ST,), DT_: tuple(DT.values()), INFAAS_: (INFAAS, INFAAS_SHORT)}
# Percent by which Arlo reduces the mean and the 98th percentile. For "up to", the larger number of two streams.
MEAN_LESS: dict[str, dict[str, float]] = {
    "6a": {ST_: 70.3, DT_: 23.7, INFAAS_: 24.9},
    "6b": {ST_: 66.7, DT_: 29.2, INFAAS_: 39.3},
    "10a": {ST_: 70.3, DT_: 24.1, INFAAS_: 31.3},
    "10b": {ST_: 98.1, DT_: 30.7, INFAAS_: 41.7},
}
TAIL_LESS: dict[str, dict[str, float]] = {
    "6": {ST_: 89.4, DT_: 25.9, INFAAS_: 40.1},
    "10": {ST_: 98.4, DT_: 26.0, INFAAS_: 29.3},
}
FIGURE_8 = {ST_: (8.13, 430.54), DT_: (6.38, 397.10), INFAAS_: (6.80, 404.12), "Arlo": (5.49, 330.41)}  # GPUs, p98 ms
TABLE_2 = {(50, 8): 0.156, (200, 12): 0.623, (1000, 16): 2.612}  # seconds, by number of devices and runtimes
BAR_TABLE_2_S = 0.3
FIGURE_9_MS = 0.737  # milliseconds for 2,400 requests and 1,200 instances
FIGURE_11 = {8: (14.16, 84.04), 16: (14.45, 81.74)}  # mean and p98 in ms, by number of runtimes
FIGURE_11_LATE = {4: 2.5, 8: 0.0}  # percent of requests above the objective, by number of runtimes
TABLE_3 = {  # mean, p50 and p98 in ms
    ARLO_EVEN: (455.19, 21.13, 3407.02), ARLO_GLOBAL: (80.58, 8.21, 1514.53), ARLO: (11.51, 8.02, 75.04)
}  # fmt: skip
TABLE_4: dict[int, dict[str, tuple[float, float]]] = {  # mean and p98 in ms, by number of GPUs
    25: {ARLO_ILB: (1035.90, 9555.3), ARLO_IG: (150.21, 422.03), ARLO: (77.8, 414.58)},
    80: {ARLO_ILB: (77.83, 1024.78), ARLO_IG: (157.09, 1183.85), ARLO: (73.61, 810.41)},
    1000: {ARLO_ILB: (76.23, 419.04), ARLO_IG: (172.00, 990.29), ARLO: (76.09, 408.79)},
}

ARLOS = (ARLO, runs.within_capacity(ARLO))
MAIN = (runs.ST, *DT.values(), INFAAS, INFAAS_SHORT, *ARLOS)
STILL = (DT["flat"], DT["rising"], INFAAS_SHORT, *ARLOS)
"""Systems whose latency depends on the drift of lengths."""
BASE = LatencyProfile("base")
LARGE = tuple(LatencyProfile("large", longest_ms) for longest_ms in settings.LARGE_MS)
SLOWEST = LARGE[-1]
RANDOM = (runs.ST_RANDOM, runs.DT_RANDOM, *ARLOS)
RANDOM_FIGURES = {
    "6a": ("stable", BASE),
    "6b": ("stable", LARGE[0]),
    "10a": ("mildly bursty", BASE),
    "10b": ("mildly bursty", SLOWEST),
}
"""Arrivals and models. Bert-Large has the grid latency at which the mean of ST is nearest to the paper."""
RANDOM_READINGS = {ST_: runs.ST_RANDOM, DT_: runs.DT_RANDOM}
RANDOM_OF = {ours: theirs for theirs, ours in RANDOM_READINGS.items()}
RATES_7 = (500.0, 1000.0, 1500.0, 2000.0, 2500.0, 3000.0)
LEAST_8 = (1, settings.FIRST_DEVICES)
"""Minimum devices in Figure 8: the first devices may be released, or stay."""
ALLOCATIONS_3 = (ARLO_EVEN, ARLO_GLOBAL, ARLO, runs.within_capacity(ARLO_GLOBAL), runs.within_capacity(ARLO))
_STRATEGIES_4 = (ARLO_ILB, ARLO_IG, ARLO)
DISPATCHES_4 = (*_STRATEGIES_4, *map(runs.within_capacity, _STRATEGIES_4))
COUNTS_11 = (2, 4, 8, 16)
LOWER_LOADS, LOWER_SEED = (0.50, 0.55, 0.60), 7
TRACES_4 = {
    25: (6_000.0, 60.0, settings.GRID_SEEDS),
    80: (20_000.0, 20.0, settings.GRID_SEEDS),
    1000: (250_000.0, 2.0, settings.GRID_SEEDS[:1]),
}
"""Traces of Table 4 by number of devices: requests per second, seconds, seeds."""
FASTER_6B_MS, LONGER_10B_S = (4.0, 5.0, 5.5), (20.0, 30.0)
APART_4 = {
    "as above": ("bursty", 1.0), "no drift": ("bursty", 0.0), "no bursts": ("stable", 1.0), "neither": ("stable", 0.0)
}  # fmt: skip
_ONE = settings.SEEDS[:1]


def _grid(
    systems: Iterable[str], devices: int, rates: Iterable[float], for_s: float, pattern: str = "stable",
    *, seeds: Iterable[int] = settings.SEEDS, profiles: Sequence[LatencyProfile] = (BASE,),
    runtimes: Sequence[int] = (8,), drift: float = 1.0, **more: Any,
) -> list[Case]:  # fmt: skip
    workloads = [Workload(rate, for_s, seed, pattern, drift=drift) for rate in rates for seed in seeds]
    return [
        Case(system, profile, devices, workload, runtimes=count, **more)
        for workload, profile, system, count in product(workloads, profiles, systems, runtimes)
    ]


@lru_cache(maxsize=1)
def lengths_of_trace() -> list[int]:
    return make_trace(Workload(100.0, settings.DRIFT_PERIOD_S, 0), *read_lengths()).lengths


def rate_at(utilization: float) -> float:
    return float(round(utilization * 40 / SLOWEST.mean_s(lengths_of_trace(), 8), -2))


def figure_8() -> list[Case]:
    devices, seed = settings.FIRST_DEVICES, settings.SEEDS[0]
    rates = {profile: float(round(devices / profile.static_s(512))) for profile in (LARGE[0], SLOWEST)}
    return [
        Case(system, profile, devices, Workload(rate, 600.0, seed, "bursty", swings=True), least=least)
        for (profile, rate), least, system in product(rates.items(), LEAST_8, MAIN)
    ]


def _busy(loads: Iterable[float], systems: Iterable[str], for_s: float, **more: Any) -> list[Case]:
    return _grid(systems, 40, map(rate_at, loads), for_s, "bursty", profiles=(SLOWEST,), **more)


def of_trace_4(devices: int) -> list[Case]:
    rate, for_s, seeds = TRACES_4[devices]
    return _grid(DISPATCHES_4, devices, (rate,), for_s, "bursty", seeds=seeds, profiles=LARGE)


def rated_seconds(pattern: str) -> list[Case]:
    rate, _, _ = TRACES_4[25]
    profiles = [LatencyProfile("large", ms) for ms in settings.RATED_MS]
    return _grid(DISPATCHES_4[3:], 25, (rate,), 300.0, pattern, seeds=settings.FRESH_SEEDS[:1], profiles=profiles)


def random_dispatch(figure: str) -> list[Case]:
    """Return runs of `RANDOM` in a figure with separate seeds."""
    first = FIXED[figure]()[0]
    pattern, profile = RANDOM_FIGURES[figure]
    workloads = [replace(first.workload, seed=seed, pattern=pattern) for seed in settings.FRESH_SEEDS]
    return [replace(first, system=one, workload=each, profile=profile) for each in workloads for one in RANDOM]


def lower_loads() -> list[Case]:
    return _busy(LOWER_LOADS, ALLOCATIONS_3, 240.0, seeds=(LOWER_SEED,))


def apart_4(name: str) -> list[Case]:
    (pattern, drift), (rate, for_s, _) = APART_4[name], TRACES_4[25]
    return _grid(DISPATCHES_4[3:], 25, (rate,), for_s, pattern, seeds=_ONE, profiles=LARGE[-2:], drift=drift)


def against_st() -> list[Case]:
    faster = [LatencyProfile("large", each) for each in FASTER_6B_MS]
    cases = _grid((runs.ST, ARLO), 10, (1500.0,), 150.0, seeds=_ONE, profiles=faster)
    for for_s in LONGER_10B_S:
        cases += _grid((runs.ST, ARLO), 300, (25_000.0,), for_s, "bursty", seeds=_ONE, profiles=(SLOWEST,))
    return cases


FIXED: dict[str, Callable[[], list[Case]]] = {
    "6a": lambda: _grid(MAIN, 10, (1000.0,), 360.0),
    "6b": lambda: _grid(MAIN, 10, (1500.0,), 150.0, seeds=settings.GRID_SEEDS, profiles=LARGE),
    "10a": lambda: _grid(MAIN, 90, (8000.0,), 60.0, "bursty"),
    "10b": lambda: _grid(MAIN, 300, (25_000.0,), 10.0, "bursty", seeds=settings.GRID_SEEDS, profiles=LARGE),
}


def experiments() -> list[Case]:
    first = [case for figure in FIXED.values() for case in figure() if case.workload.seed == settings.SEEDS[0]]
    still = [replace(case, workload=replace(case.workload, drift=0.0)) for case in first if case.system in STILL]
    apart = [case for one in APART_4 for case in apart_4(one)]
    busy = _grid(MAIN, 10, (1000.0,), 360.0, seeds=_ONE, occupies=True)
    return [*still, *busy, *lower_loads(), *apart, *against_st()]


TABLES: dict[str, Callable[[], list[Case]]] = {
    "6a": FIXED["6a"], "6b": FIXED["6b"], "7": lambda: _grid(MAIN, 10, RATES_7, 60.0, seeds=_ONE), "8": figure_8,
    "10a": FIXED["10a"], "10b": FIXED["10b"],
    "11": lambda: _busy(settings.UTILIZATIONS, ARLOS, 60.0, seeds=settings.GRID_SEEDS, runtimes=COUNTS_11),
    "3": lambda: _busy(settings.UTILIZATIONS, ALLOCATIONS_3, 360.0, seeds=_ONE),
    "4": lambda: [case for devices in TRACES_4 for case in of_trace_4(devices)],
    "random": lambda: [case for figure in RANDOM_FIGURES for case in random_dispatch(figure)],
    "rated": lambda: [case for pattern in settings.RATED_SECONDS_S for case in rated_seconds(pattern)],
    "experiments": experiments, "measured": list, "deployed": list,
}  # fmt: skip
"""The runs of each table. Other functions run `measured` and `deployed`."""
