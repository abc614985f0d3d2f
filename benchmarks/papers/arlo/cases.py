"""Simulate one run of the evaluation: system, devices, workload and results."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from benchmarks.papers.arlo import dispatch, settings
from benchmarks.papers.arlo import fleet as fleets
from benchmarks.papers.arlo.workload import LONGEST, LatencyProfile, Trace, Workload, lengths_of, trace_of
from benchmarks.papers.common import RELEASE, case_name

RS, ILB, IG, PACK_ANY, PACK_SHORTEST, RANDOM = "rs", "ilb", "ig", "pack any", "pack shortest", "random"
PACKING = {
    IG: dispatch.inter_groups_greedy, PACK_ANY: dispatch.pack_any_runtime, PACK_SHORTEST: dispatch.pack_shortest_runtime
}  # fmt: skip
PERIODIC, GLOBAL, EVEN = "periodic", "global", "even"


class System(msgspec.Struct, frozen=True):
    """`dynamic`: shape of the inflation of dynamic runtimes. `within_capacity`: limit also the longest runtime to its
    capacity.
    """

    dispatch: str
    allocation: str = EVEN
    within_capacity: bool = False
    is_padded_whole: bool = False
    dynamic: str = ""


ST, ARLO, INFAAS, INFAAS_SHORT = "st", "arlo", "infaas", "infaas, short queues"
DT = {shape: f"dt, {shape}" for shape in ("flat", "rising", "falling")}
ST_RANDOM, DT_RANDOM = "st, random", "dt, random"
ARLO_ILB, ARLO_IG, ARLO_EVEN, ARLO_GLOBAL = "arlo, ILB", "arlo, IG", "arlo, even", "arlo, global"


def within_capacity(system: str) -> str:
    return f"{system}, within capacity"


_ARLO = {
    ARLO: System(RS, PERIODIC), ARLO_ILB: System(ILB, PERIODIC), ARLO_IG: System(IG, PERIODIC),
    ARLO_GLOBAL: System(RS, GLOBAL),
}  # fmt: skip
SYSTEMS = {
    ST: System(ILB, is_padded_whole=True),
    **{name: System(ILB, is_padded_whole=True, dynamic=shape) for shape, name in DT.items()},
    ST_RANDOM: System(RANDOM, is_padded_whole=True),
    DT_RANDOM: System(RANDOM, is_padded_whole=True, dynamic="mild"),
    INFAAS: System(PACK_ANY), INFAAS_SHORT: System(PACK_SHORTEST), ARLO_EVEN: System(RS, EVEN), **_ARLO,
    **{within_capacity(name): msgspec.structs.replace(one, within_capacity=True) for name, one in _ARLO.items()},
}  # fmt: skip


class Case(msgspec.Struct, frozen=True):
    """`least`: minimum devices if devices scale; 0 = no scaling. `occupies`: True if request overhead keeps a device
    busy.
    """

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
    """`late`: share of requests above the objective. `devices`: mean number over time. `most_out`: maximum instances
    replaced at once.
    """

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
    system, profile = SYSTEMS[case.system], case.profile
    runtimes = (LONGEST,) if system.is_padded_whole else lengths_of(case.runtimes)
    rows = [[profile.static_s(length)] * (LONGEST + 1) for length in runtimes]
    if system.dynamic:
        rows = [[profile.dynamic_s(tokens, system.dynamic) for tokens in range(LONGEST + 1)]]
    fleet = fleets.Fleet(_dispatcher(system, runtimes, case), rows)

    def allocation(devices: int, lengths: Sequence[int], rate: float) -> Sequence[int]:
        overload_s = settings.OVERLOAD_S if system.within_capacity else 0.0
        demands = fleets.runtime_demands(lengths, rate, runtimes, profile, overload_s=overload_s)
        return fleets.best_allocation(devices, demands)

    if system.allocation == EVEN:
        fleet.start(fleets.even_allocation(case.devices, len(runtimes)))
    else:
        known = trace.lengths if system.allocation == GLOBAL else trace.earlier
        fleet.start(allocation(case.devices, known, case.workload.rate))
    if system.allocation == PERIODIC:
        fleets.Reallocation(trace, fleet, allocation, for_s=case.workload.for_s)
    if case.least and system.allocation == PERIODIC:
        fleets.track_target(trace, fleet, profile.slo_s, case.least)
    elif case.least:
        fleets.keep_headroom(fleet, case.least)
    lost, for_s = fleets.serve(trace, fleet, occupies=case.occupies), case.workload.for_s
    rising = sorted(fleet.latencies)
    return Measures(
        requests=len(rising), lost=lost, mean_ms=round(1000 * sum(rising) / len(rising), 4),
        p50_ms=round(1000 * fleets.percentile(rising, 0.5), 4), p98_ms=round(1000 * fleets.percentile(rising, 0.98), 4),
        late=round(sum(latency > profile.slo_s for latency in rising) / len(rising), 6),
        devices=round(fleet.device_s(for_s) / for_s, 4), replaced=fleet.replaced, most_out=fleet.most_out,
        at_once=max(1, int(settings.REPLACED_AT_ONCE * case.devices)),
    )  # fmt: skip


def _dispatcher(system: System, runtimes: Sequence[int], case: Case) -> dispatch.Dispatcher:
    levels = [(length, case.profile.capacity(length)) for length in runtimes]
    match system.dispatch:
        case "random":
            return dispatch.random_dispatcher(levels, case.workload.seed)
        case "rs":
            return dispatch.runtime_queues(levels)
        case "ilb":  # Algorithm 1 with one level balances the load in the shortest runtime.
            return dispatch.runtime_queues(levels, peeked=1)
    return dispatch.Dispatcher(levels, dispatch.LoadBuckets, PACKING[system.dispatch])
