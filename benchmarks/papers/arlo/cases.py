"""Simulate one run of the evaluation: system, devices, workload and results."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from benchmarks.papers.arlo import settings
from benchmarks.papers.arlo.dispatch import (
    BucketDispatcher,
    Dispatcher,
    RandomDispatcher,
    RuntimeQueues,
    inter_groups_greedy,
    pack_any_runtime,
    pack_shortest_runtime,
)
from benchmarks.papers.arlo.fleet import (
    Agenda,
    Allocator,
    Fleet,
    Headroom,
    Reallocation,
    Served,
    TargetTracking,
    best_allocation,
    even_allocation,
    percentile,
    runtime_demands,
    serve,
)
from benchmarks.papers.arlo.workload import LONGEST, LatencyProfile, Trace, Workload, lengths_of, trace_of
from benchmarks.papers.common import RELEASE, case_name

RS, ILB, IG, PACK_ANY, PACK_SHORTEST, RANDOM = "rs", "ilb", "ig", "pack any", "pack shortest", "random"
PERIODIC, GLOBAL, EVEN = "periodic", "global", "even"


class System(msgspec.Struct, frozen=True):
    """`dynamic`: inflation of dynamic runtimes. `within_capacity`: also limit the longest runtime to its capacity."""

    dispatch: str
    allocation: str = EVEN
    within_capacity: bool = False
    is_padded_whole: bool = False
    dynamic: str = ""


ST, ARLO, INFAAS, INFAAS_SHORT = "st", "arlo", "infaas", "infaas, short queues"
DT = {shape: f"dt, {shape}" for shape in ("flat", "rising", "falling")}
ST_RANDOM, DT_RANDOM = "st, random", "dt, random"
ARLO_ILB, ARLO_IG, ARLO_EVEN, ARLO_GLOBAL = "arlo, ILB", "arlo, IG", "arlo, even", "arlo, global"
_CAPACITY = ", within capacity"


def within_capacity(system: str) -> str:
    return f"{system}{_CAPACITY}"


_ARLO = {
    ARLO: System(RS, PERIODIC),
    ARLO_ILB: System(ILB, PERIODIC),
    ARLO_IG: System(IG, PERIODIC),
    ARLO_GLOBAL: System(RS, GLOBAL),
}
SYSTEMS = {
    ST: System(ILB, is_padded_whole=True),
    **{name: System(ILB, is_padded_whole=True, dynamic=shape) for shape, name in DT.items()},
    ST_RANDOM: System(RANDOM, is_padded_whole=True),
    DT_RANDOM: System(RANDOM, is_padded_whole=True, dynamic="mild"),
    INFAAS: System(PACK_ANY), INFAAS_SHORT: System(PACK_SHORTEST), ARLO_EVEN: System(RS, EVEN), **_ARLO,
    **{within_capacity(name): msgspec.structs.replace(one, within_capacity=True) for name, one in _ARLO.items()},
}  # fmt: skip


PLAIN = {within_capacity(name): name for name in (ARLO, ARLO_EVEN, ARLO_GLOBAL, ARLO_IG, ARLO_ILB)}
"""Systems by the name of the system within capacity."""


class Case(msgspec.Struct, frozen=True):
    """`least`: minimum devices under scaling; 0 = no scaling. `occupies`: True if overhead keeps a device busy."""

    system: str
    profile: LatencyProfile
    devices: int
    workload: Workload
    runtimes: int = 8
    least: int = 0
    occupies: bool = False

    def __str__(self) -> str:
        return f"{self.system}, {self.devices} GPUs, {self.workload.rate:,.0f} requests/s"

    @property
    def name(self) -> str:
        return case_name(self)


class Measures(msgspec.Struct, frozen=True):
    """`late`: share above the objective. `devices`: mean over time. `most_out`: maximum concurrent replacements."""

    requests: int
    lost: int
    mean_ms: float
    p50_ms: float
    p98_ms: float
    late: float
    devices: float
    replaced: int
    most_out: int
    at_once: int


class Result(msgspec.Struct, frozen=True):
    case: Case
    release: str
    measures: Measures
    took_s: float


def run(case: Case) -> Result:
    trace = trace_of(case.workload)
    began = time.process_time()
    measures = simulate(case, trace)
    return Result(case, RELEASE, measures, round(time.process_time() - began, 2))


def simulate(case: Case, trace: Trace) -> Measures:
    system, agenda, served = SYSTEMS[case.system], Agenda(), Served()
    runtimes = (LONGEST,) if system.is_padded_whole else lengths_of(case.runtimes)
    fleet = Fleet(_dispatcher(system, runtimes, case), _rows(system, runtimes, case.profile), agenda)

    def allocation(devices: int, lengths: Sequence[int], rate: float) -> Sequence[int]:
        overload_s = settings.OVERLOAD_S if system.within_capacity else 0.0
        return best_allocation(devices, runtime_demands(lengths, rate, runtimes, case.profile, overload_s=overload_s))

    fleet.start(_first_counts(case, system, trace, allocation))
    if system.allocation == PERIODIC:
        Reallocation(trace, fleet, agenda, allocation, for_s=case.workload.for_s)
    if case.least and system.allocation == PERIODIC:
        TargetTracking(trace, fleet, agenda, served.latencies, case.profile.slo_s, case.least)
    elif case.least:
        Headroom(fleet, agenda, case.least)
    serve(trace, fleet, agenda, served, occupies=case.occupies)
    return _measure(case, fleet, served)


def _dispatcher(system: System, runtimes: Sequence[int], case: Case) -> Dispatcher:
    levels = [(length, case.profile.capacity(length)) for length in runtimes]
    if system.dispatch == RANDOM:
        return RandomDispatcher(case.workload.seed)
    if system.dispatch == RS:
        return RuntimeQueues(levels)
    if system.dispatch == ILB:  # Algorithm 1 with one level balances the load in the shortest runtime.
        return RuntimeQueues(levels, peeked=1)
    strategies = {IG: inter_groups_greedy, PACK_ANY: pack_any_runtime, PACK_SHORTEST: pack_shortest_runtime}
    return BucketDispatcher(levels, strategies[system.dispatch])


def _rows(system: System, runtimes: Sequence[int], profile: LatencyProfile) -> list[list[float]]:
    every = range(LONGEST + 1)
    if system.dynamic:
        return [[profile.dynamic_s(tokens, system.dynamic) for tokens in every]]
    return [[profile.static_s(length)] * len(every) for length in runtimes]


def _first_counts(case: Case, system: System, trace: Trace, allocation: Allocator) -> Sequence[int]:
    if system.allocation == EVEN:
        return even_allocation(case.devices, 1 if system.is_padded_whole else case.runtimes)
    lengths = trace.lengths if system.allocation == GLOBAL else trace.earlier
    return allocation(case.devices, lengths, case.workload.rate)


def _measure(case: Case, fleet: Fleet, served: Served) -> Measures:
    rising = sorted(served.latencies)
    slo_s, for_s = case.profile.slo_s, case.workload.for_s
    return Measures(
        requests=len(rising), lost=served.lost, mean_ms=round(1000 * sum(rising) / len(rising), 4),
        p50_ms=round(1000 * percentile(rising, 0.5), 4), p98_ms=round(1000 * percentile(rising, 0.98), 4),
        late=round(sum(latency > slo_s for latency in rising) / len(rising), 6),
        devices=round(fleet.device_s(for_s) / for_s, 4), replaced=fleet.replaced, most_out=fleet.most_out,
        at_once=max(1, int(settings.REPLACED_AT_ONCE * case.devices)),
    )  # fmt: skip
