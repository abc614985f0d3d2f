"""The record of the page: results by case and window, without single jobs."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from benchmarks.harness import commit, machine
from benchmarks.papers.common import RELEASE, Store
from benchmarks.papers.schedmate.scheduling import errors, settings, simulate
from benchmarks.papers.schedmate.scheduling.simulate import Case, Measures, predictions
from benchmarks.papers.schedmate.scheduling.trace import windows


class WindowFacts(msgspec.Struct, frozen=True):
    """`gpus`: GPUs at each load of the settings."""

    cluster: str
    week: int
    jobs: int
    duration_s: float
    gpus_at_work: float
    gpus: tuple[int, ...]


class ErrorFacts(msgspec.Struct, frozen=True):
    """Share of relative errors under 100 %, and share within a factor of two."""

    under_100: float
    within_two: float


class CaseResult(msgspec.Struct, frozen=True):
    case: Case
    release: str
    took_s: float
    windows: tuple[Measures, ...]


class Kept(msgspec.Struct):
    """`commit`: commit of the last writer; `peak_bytes`: memory of the largest process."""

    fixed_on: str = settings.FIXED_ON
    seed: int = settings.SEED
    commit: str = ""
    machine: str = ""
    load_average: tuple[float, float] = (0.0, 0.0)
    peak_bytes: int = 0
    summary: dict[str, dict[str, tuple[float, float, float]]] = {}
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
    found = tuple(simulate.run(case, place) for place in range(len(windows())))
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
    for system in simulate.ERRORS:
        case = Case(system, settings.MAIN_LOAD)
        said = [each for window in windows() for each in predictions(window, case).values()]
        shares = errors.share_under_100(durations, said), errors.share_within_two(durations, said)
        found[system] = ErrorFacts(*(round(share, 4) for share in shares))
    return found
