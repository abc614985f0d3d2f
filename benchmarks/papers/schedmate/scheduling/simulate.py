"""Simulate a window under one of the compared policies, with the real cores in virtual time.

A job is a gang call with the duration in the trace and one library per GPU. Starts take no time, except restarts under
Tiresias. A gang may span pilots of eight GPUs.

A window has the jobs of a week of a virtual cluster of Microsoft's Philly clusters, from the artifact of Sia: 77,456
rows of `timestamp, duration, num_gpus, gpu_time, cluster`. A timestamp counts as arrival. These jobs keep only 4 to 29
% of the nodes busy (artifact of QSSF). The GPUs of a window are therefore computed from its jobs and a load
(`gpus_at`).
"""

from __future__ import annotations

import csv
import gzip
import math
import os
import resource
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from statistics import fmean

import msgspec

from benchmarks.baselines.shortest_first import fifo, shortest_first
from benchmarks.baselines.tiresias import tiresias
from benchmarks.harness import commit, machine
from benchmarks.papers import common
from benchmarks.papers.common import RELEASE, Store
from benchmarks.papers.schedmate.scheduling import errors, settings
from stoker.chance import Stream
from stoker.errors import StokerError
from stoker.manager.core.seams import Policies
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.log import LoggedEvent
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.world import ContextModel, Delays, DeviceKind, World
from stoker.manager.study.statistics import quantile
from stoker.protocol.ids import CallId, make_call_id
from stoker.site import Duration, Size

PHILLY = common.DATA / "philly" / "philly.csv.gz"


class Job(msgspec.Struct, frozen=True):
    at_s: float
    duration_s: float
    gpus: int


class Window(msgspec.Struct, frozen=True):
    cluster: str
    week: int
    jobs: tuple[Job, ...]

    @property
    def gpus_at_work(self) -> float:
        week_s = settings.WINDOW_S
        return sum(job.gpus * min(job.duration_s, week_s - job.at_s) for job in self.jobs) / week_s

    def gpus_at(self, load: float) -> int:
        """Return the GPUs of whole pilots for the jobs at this load, at least those of the largest job."""
        wanted = max(self.gpus_at_work / load, max(job.gpus for job in self.jobs))
        return settings.NODE_GPUS * math.ceil(wanted / settings.NODE_GPUS)


def missing() -> str:
    return common.missing(PHILLY, "the jobs of Philly are")


@lru_cache(maxsize=1)
def windows() -> tuple[Window, ...]:
    clusters: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
    with gzip.open(PHILLY, "rt") as file:
        for row in csv.DictReader(file):
            at = datetime.fromisoformat(row["timestamp"]).replace(tzinfo=UTC).timestamp()
            clusters[row["cluster"]].append((at, float(row["duration"]), int(row["num_gpus"])))
    found = []
    for cluster, jobs in sorted(clusters.items()):
        jobs.sort(key=lambda job: job[0])
        weeks: dict[int, list[Job]] = defaultdict(list)
        for at, duration_s, gpus in jobs:
            week, at_s = divmod(at - jobs[0][0], settings.WINDOW_S)
            weeks[int(week)].append(Job(at_s, duration_s, gpus))
        every = (Window(cluster, week, tuple(several)) for week, several in sorted(weeks.items()))
        found += [
            window for window in every
            if len(window.jobs) >= settings.LEAST_JOBS and window.gpus_at_work >= settings.LEAST_GPUS
        ]  # fmt: skip
    return tuple(found)


FIFO, SJF, TIRESIAS = "FIFO", "SJF", "Tiresias"
OURS, OUR_AVERAGE, OURS_UNKNOWN = "our error", "our recipes, plain average", "our error, 30 % unknown"
PAPER, LUCID, SHUFFLED = "SchedMate's error", "Lucid's error", "shuffled"
FIFO_SKIP, SJF_SKIP, OURS_SKIP = "FIFO, passing", "SJF, passing", "our error, passing"
TIRESIAS_OTHER, TIRESIAS_FREE = "Tiresias, 3 queues", "Tiresias, preempting free"

_RATIOS = errors.our_log_ratios()["estimates"]
_OURS = errors.resampled(_RATIOS)
ERRORS: dict[str, errors.Predict] = {
    SJF: errors.none, OURS: _OURS, OURS_UNKNOWN: errors.resampled(_RATIOS, unknown_share=settings.UNKNOWN_SHARE),
    OUR_AVERAGE: errors.resampled(errors.our_log_ratios()["average"]), PAPER: errors.PAPER,
    LUCID: errors.LUCID, SHUFFLED: errors.shuffled,
    SJF_SKIP: errors.none, OURS_SKIP: _OURS,
    **{f"spread {spread:g}": errors.lognormal(spread) for spread in settings.SPREADS},
}  # fmt: skip
"""Predictions of systems that run the shortest expected job first."""
SWEEP = tuple(f"spread {spread:g}" for spread in settings.SPREADS)

MAIN = (FIFO, SJF, TIRESIAS, OURS, PAPER, LUCID, SHUFFLED)
BESIDE = (OUR_AVERAGE, OURS_UNKNOWN, FIFO_SKIP, SJF_SKIP, OURS_SKIP, TIRESIAS_OTHER, TIRESIAS_FREE)


class Case(msgspec.Struct, frozen=True):
    system: str
    load: float
    draw: int = 0

    def __str__(self) -> str:
        return f"{self.system}, load {self.load:g}, draw {self.draw}"

    @property
    def name(self) -> str:
        return f"{self.system}/{self.load:g}/{self.draw}"


def draws(system: str) -> int:
    is_random = system in ERRORS and ERRORS[system] is not errors.none
    return settings.DRAWS if is_random and system not in SWEEP else 1


def cases() -> list[Case]:
    at_main = [
        Case(system, settings.MAIN_LOAD, draw) for system in (*MAIN, *BESIDE, *SWEEP) for draw in range(draws(system))
    ]
    others = [load for load in settings.LOADS if load != settings.MAIN_LOAD]
    return at_main + [Case(system, load, draw) for load in others for system in MAIN for draw in range(draws(system))]


_TIRESIAS = {
    TIRESIAS: (settings.TIRESIAS_THRESHOLDS_GPU_S, settings.TIRESIAS_RESTART_S),
    TIRESIAS_OTHER: (settings.TIRESIAS_OTHER_GPU_S, settings.TIRESIAS_RESTART_S),
    TIRESIAS_FREE: (settings.TIRESIAS_THRESHOLDS_GPU_S, (0.0, 0.0)),
}


def policies_of(system: str, predictions_s: Mapping[CallId, float]) -> Policies:
    if system in (FIFO, FIFO_SKIP):
        return fifo(skip=system == FIFO_SKIP)
    if system in _TIRESIAS:
        thresholds_gpu_s, restart_s = _TIRESIAS[system]
        return tiresias(thresholds_gpu_s=thresholds_gpu_s, restart_s=restart_s)
    return shortest_first(expected_s=lambda call: predictions_s[call.id], skip=system in (SJF_SKIP, OURS_SKIP))


class Measures(msgspec.Struct, frozen=True, array_like=True):
    """Results in seconds. `wait_s`: mean of completion time minus job duration."""

    mean_s: float
    wait_s: float
    p50_s: float
    p95_s: float
    preempted: int


def run(case: Case, place: int) -> Measures:
    window = windows()[place]
    policies = policies_of(case.system, predictions(window, case))
    took_s, preempted = completion_times_s(window.jobs, policies, gpus=window.gpus_at(case.load))
    count, rising = len(took_s), sorted(took_s)
    mean_s, own_s = sum(took_s) / count, sum(job.duration_s for job in window.jobs) / count
    p50_s, p95_s = quantile(rising, 0.5), quantile(rising, 0.95)
    return Measures(round(mean_s, 1), round(mean_s - own_s, 1), round(p50_s, 1), round(p95_s, 1), preempted)


def predictions(window: Window, case: Case) -> dict[CallId, float]:
    if case.system not in ERRORS:
        return {}
    durations = [job.duration_s for job in window.jobs]
    chance = Stream(settings.SEED + case.draw, f"{window.cluster}/{window.week}/{case.system.partition(',')[0]}")
    return {call_of(number): said for number, said in enumerate(ERRORS[case.system](durations, chance))}


def call_of(number: int) -> CallId:
    return make_call_id(client=0, sequence=number)


def completion_times_s(jobs: tuple[Job, ...], policies: Policies, *, gpus: int) -> tuple[list[float], int]:
    arrivals = [Arrival(job.at_s, "job", items=0, gang=(job.gpus, job.gpus), fixed_s=job.duration_s) for job in jobs]
    simulation = Simulation(world(gpus), arrivals, policies)
    outcome = simulation.run(until_s=settings.LONGEST_S)
    log, ended, preempted = simulation.log, dict[int, float](), 0
    for at_s, what, call in zip(log.at_s, log.what, log.call, strict=True):
        if what == LoggedEvent.CALL_ENDED:
            ended[call] = at_s
        elif what == LoggedEvent.CALL_LEFT:
            preempted += 1
    if outcome.failed or not outcome.complete or len(ended) != len(jobs):
        raise StokerError(f"of {len(jobs)} jobs on {gpus} GPUs {len(ended)} ended; failed: {outcome.failed}")
    return [ended[call_of(number)] - job.at_s for number, job in enumerate(jobs)], preempted


def world(gpus: int) -> World:
    source = common.fixed_source("nodes", "GPU", gpus // settings.NODE_GPUS, devices=settings.NODE_GPUS)
    delays = Delays(message_s=Duration(0.0), poll_s=Duration(0.0))
    contexts = {"job": ContextModel(device_memory_bytes=Size(1))}
    return World(devices={"GPU": DeviceKind(Size(1))}, sources=(source,), contexts=contexts, delays=delays)


class WindowFacts(msgspec.Struct, frozen=True):
    """`gpus`: GPUs at each load of the settings."""

    cluster: str
    week: int
    jobs: int
    duration_s: float
    gpus_at_work: float
    gpus: tuple[int, ...]


class ErrorFacts(msgspec.Struct, frozen=True):
    """Shares of predictions: with relative errors under 100 %, and within a factor of two."""

    under_100: float
    within_two: float


class CaseResult(msgspec.Struct, frozen=True):
    case: Case
    release: str
    took_s: float
    windows: tuple[Measures, ...]


class Kept(msgspec.Struct):
    """`commit`: commit of the checkout that wrote last; `peak_bytes`: memory of the largest process."""

    fixed_on: str = settings.FIXED_ON
    seed: int = settings.SEED
    commit: str = ""
    machine: str = ""
    load_average: tuple[float, float] = (0.0, 0.0)
    peak_bytes: int = 0
    windows: list[WindowFacts] = []
    errors: dict[str, ErrorFacts] = {}
    runs: list[CaseResult] = []


def records(path: Path) -> Store[Case, CaseResult]:
    return Store(path, Kept)


def bring(store: Store[Case, CaseResult], cases: Sequence[Case], *, jobs: int) -> None:
    """Run the missing cases. Record the windows, the errors, the machine and its load."""
    kept, before = store.kept, round(os.getloadavg()[0], 1)
    if store.missing(cases):
        kept.fixed_on, kept.seed, kept.commit, kept.machine = settings.FIXED_ON, settings.SEED, commit(), machine()
        kept.windows, kept.errors = facts(), error_facts()
        store.bring(cases, run_case, jobs=jobs)
        used = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        kept.peak_bytes = max(kept.peak_bytes, *(size * 1024 for size in used))
        kept.load_average = (before, round(os.getloadavg()[0], 1))


def run_case(case: Case) -> CaseResult:
    began = time.process_time()
    found = tuple(run(case, place) for place in range(len(windows())))
    return CaseResult(case, RELEASE, round(time.process_time() - began, 1), found)


def facts() -> list[WindowFacts]:
    return [
        WindowFacts(
            window.cluster, window.week, len(window.jobs), round(fmean(job.duration_s for job in window.jobs), 1),
            round(window.gpus_at_work, 2), tuple(window.gpus_at(load) for load in settings.LOADS),
        )
        for window in windows()
    ]  # fmt: skip


def error_facts() -> dict[str, ErrorFacts]:
    found = {}
    durations = [job.duration_s for window in windows() for job in window.jobs]
    for system in ERRORS:
        case = Case(system, settings.MAIN_LOAD)
        said = [each for window in windows() for each in predictions(window, case).values()]
        found[system] = ErrorFacts(*(round(share, 4) for share in errors.error_shares(durations, said)))
    return found
