"""Store the results of cases, of Table 2 and Figure 9 as measured here, and of the session policy.

Figure 9 sends two requests per instance at once to busy runtimes. Times are processor time. The session policy `arlo`
also answers the requests of Figure 6a; the first minute does not count.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from itertools import product
from pathlib import Path
from random import Random

import msgspec
from msgspec.structs import replace

from benchmarks.papers.arlo import settings
from benchmarks.papers.arlo.cases import ARLO, Case, Measures, Result, simulate, within_capacity
from benchmarks.papers.arlo.dispatch import runtime_queues
from benchmarks.papers.arlo.fleet import percentile, runtime_demands
from benchmarks.papers.arlo.tables import SLOWEST
from benchmarks.papers.arlo.workload import LatencyProfile, Trace, Workload, lengths_of, read_lengths, trace_of
from benchmarks.papers.common import RELEASE, Store, fixed_source, say
from stoker.manager.policies.arlo import arlo
from stoker.manager.policies.arlo.allocation import NotEnoughDevicesError, allocate
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.log import EachCallLog, EventLog, LibraryPlace
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.workload import choose_contexts_by_length
from stoker.manager.sim.world import ContextModel, Delays, DeviceKind, World
from stoker.protocol.calls import CallSpec, Objective
from stoker.site import Duration, Size

SIZES = ((50, 8), (200, 12), (1000, 16))
REPEATS = 20
INSTANCES = (200, 400, 600, 800, 1000, 1200)
PEEKED = (1, 2, 4, 6, 8)
LEVELS = 12
LOADS = 0.5, 0.95
LIGHT = 0.7
"""The page separates problems of lower and higher loads."""
FULL = 0.4
"""Share of capacity in use before the burst of Figure 9."""
BURSTS = 5
_LENGTHS = 5_000


class SolvingTime(msgspec.Struct, frozen=True):
    """`loads`: share of busy devices in each run."""

    devices: int
    runtimes: int
    seconds: tuple[float, ...]
    loads: tuple[float, ...]


class DispatchTime(msgspec.Struct, frozen=True):
    instances: int
    requests: int
    peeked: int
    ms: float


class Measured(msgspec.Struct, frozen=True):
    release: str
    solving: list[SolvingTime]
    dispatching: list[DispatchTime]


def _solve(devices: int, runtimes: int) -> SolvingTime:
    rng, (short, long) = Random(f"{devices} {runtimes}"), read_lengths()
    found: list[tuple[float, float]] = []
    while len(found) < REPEATS:
        share = rng.uniform(0.1, 0.5)
        lengths = [rng.choice(long if rng.random() < share else short) for _ in range(_LENGTHS)]
        load = rng.uniform(*LOADS)
        rate = load * devices / SLOWEST.mean_s(lengths, runtimes)
        wanted = runtime_demands(lengths, rate, lengths_of(runtimes), SLOWEST)
        began = time.process_time()
        with contextlib.suppress(NotEnoughDevicesError):
            allocate(devices, wanted)
            found.append((round(time.process_time() - began, 5), round(load, 3)))
    seconds, loads = zip(*found, strict=True)
    return SolvingTime(devices, runtimes, seconds, loads)


def _dispatch_ms(instances: int, peeked: int) -> float:
    rng = Random(f"{instances}")
    levels = [(length, SLOWEST.capacity(length)) for length in lengths_of(LEVELS)]
    queues = runtime_queues(levels, peeked=peeked)
    for instance in range(instances):
        queues.add(instance, instance % LEVELS)
    lengths = [rng.choice(pool) for _ in range(_LENGTHS) for pool in read_lengths()]
    room = sum(capacity for _, capacity in levels) * instances // LEVELS
    for _ in range(int(FULL * room)):
        queues.take(rng.choice(lengths))
    spent_ms = []
    for _ in range(BURSTS):
        burst = [rng.choice(lengths) for _ in range(2 * instances)]
        began = time.process_time()
        taken = [queues.take(tokens) for tokens in burst]
        spent_ms.append(1000 * (time.process_time() - began))
        for instance in taken:
            queues.done(instance)
    return statistics.median(spent_ms)


DEVICES, BEGINS_S = 10, 60.0
ENDS_S = {1_000.0: 150.0, 4_000.0: 90.0}
"""Seconds of the trace by rate: the rate of Figure 6a, and a rate that keeps devices busy."""
_MESSAGE_S = settings.OVERHEAD_S / 2
_GB = 1_000_000_000


class Deployed(msgspec.Struct, frozen=True):
    """Run the session policy and the model with equal requests of one seed."""

    seed: int
    rate: float
    release: str
    requests: int
    mean_ms: float
    p98_ms: float
    late: float
    model: Measures


class _Latencies(EachCallLog):
    def __init__(self) -> None:
        super().__init__(EventLog())
        self._came: dict[int, float] = {}
        self.found: list[tuple[float, float]] = []

    def log_arrival(self, at_s: float, call: int, *, items: int, due_at: float = 0.0) -> None:  # noqa: ARG002 (CallsLog)
        self._came[call] = at_s

    def log_start(self, at_s: float, spec: CallSpec, where: LibraryPlace, *, rank: int) -> None: ...

    def log_end(self, at_s: float, spec: CallSpec, where: LibraryPlace, *, rank: int, items: int) -> None:  # noqa: ARG002
        came_at = self._came.pop(spec.call)
        self.found.append((came_at, at_s + _MESSAGE_S - came_at))


def compare(seed: int, rate: float) -> Deployed:
    profile, workload = LatencyProfile("base"), Workload(rate, ENDS_S[rate], seed)
    trace, wanted = trace_of(workload), Objective(latency_s=profile.slo_s)
    pairs = zip(trace.times, trace.lengths, strict=True)
    arrivals = (Arrival(at, "bert", input_length=tokens, objective=wanted) for at, tokens in pairs)
    run = Simulation(_world(profile), choose_contexts_by_length(_world(profile), arrivals), arlo(tracks=False))
    log = run.calls_log = _Latencies()
    outcome = run.run()
    if outcome.failed or not outcome.complete:
        raise ValueError(f"calls of the session failed: {outcome.failed}")
    rising = sorted(latency for came_at, latency in log.found if came_at >= BEGINS_S)
    first = next(at for at, time in enumerate(trace.times) if time >= BEGINS_S)
    times = [time - BEGINS_S for time in trace.times[first:]]
    later = Trace(times, trace.lengths[first:], trace.lengths[:first])
    return Deployed(
        seed, rate, RELEASE, len(rising),
        mean_ms=round(1000 * sum(rising) / len(rising), 4),
        p98_ms=round(1000 * percentile(rising, 0.98), 4),
        late=round(sum(latency > profile.slo_s for latency in rising) / len(rising), 6),
        model=simulate(Case(within_capacity(ARLO), profile, DEVICES, workload), later),
    )  # fmt: skip


def _world(profile: LatencyProfile) -> World:
    contexts = {
        f"bert-{tokens}": ContextModel(
            device_memory_bytes=Size(2 * _GB), load_s={"": Duration(settings.REPLACEMENT_S)},
            call_s={"": Duration(profile.static_s(tokens))}, family="bert", longest_input=tokens,
        )
        for tokens in lengths_of(8)
    }  # fmt: skip
    pool = replace(fixed_source("pool", "gpu", DEVICES), keep_pending=DEVICES)
    delays = Delays(message_s=Duration(_MESSAGE_S))
    return World(devices={"gpu": DeviceKind(Size(24 * _GB))}, sources=(pool,), contexts=contexts, delays=delays)


class Kept(msgspec.Struct):
    measured: Measured | None = None
    deployed: list[Deployed] = []
    runs: list[Result] = []


def records(path: Path) -> Store[Case, Result]:
    return Store(path, Kept)


def measure(store: Store[Case, Result]) -> None:
    if store.kept.measured is None or store.kept.measured.release != RELEASE:
        say("Table 2 and Figure 9")
        solving = [_solve(devices, runtimes) for devices, runtimes in SIZES]
        dispatching = [
            DispatchTime(n, 2 * n, peeked, round(_dispatch_ms(n, peeked), 3)) for n in INSTANCES for peeked in PEEKED
        ]
        store.kept.measured = Measured(RELEASE, solving, dispatching)
        store.write()


def compare_deployed(store: Store[Case, Result]) -> None:
    for seed, rate in product((*settings.SEEDS, *settings.FRESH_SEEDS), ENDS_S):
        found = {(each.rate, each.seed): each for each in store.kept.deployed}
        if (rate, seed) not in found or found[rate, seed].release != RELEASE:
            say(f"a session under arlo, {rate:,.0f} requests/s, seed {seed}")
            found[rate, seed] = compare(seed, rate)
            store.kept.deployed = [found[key] for key in sorted(found)]
            store.write()
