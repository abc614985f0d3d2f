"""Store results in one file, without single jobs."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean

import msgspec

from benchmarks.harness import commit, machine
from benchmarks.papers.common import RELEASE, Store, read_results, write_bytes
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


class Records:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.kept = read_results(path, Kept) or Kept()
        self._load = os.getloadavg()[0]
        self.store: Store[Case, CaseResult] = Store(self.kept.runs, write=self._stamp)
        self.get = self.store.get

    @property
    def strata(self) -> tuple[str, ...]:
        return tuple(window.cluster for window in self.kept.windows)

    @property
    def jobs(self) -> list[float]:
        return [float(window.jobs) for window in self.kept.windows]

    def of(self, system: str, what: str, *, load: float = settings.MAIN_LOAD) -> list[float]:
        """Return a field of `Measures` by window, averaged over draws. Raises ValueError for a missing run."""
        found = [self.get(Case(system, load, draw)) for draw in range(simulate.draws(system))]
        runs = [each for each in found if each is not None]
        if len(runs) < len(found):
            raise ValueError(
                f"{system} at {load:g} was not run; python -m benchmarks.papers.schedmate.scheduling does it"
            )
        return [
            fmean(getattr(one, what) for one in several) for several in zip(*(r.windows for r in runs), strict=True)
        ]

    def bring(self, cases: Iterable[Case], *, jobs: int, tell: Callable[[str], None]) -> None:
        cases = list(cases)
        if self.store.missing(cases):
            self.kept.windows, self.kept.errors = facts(), error_facts()
            self.store.bring(cases, run_case, tell=tell, jobs=jobs)
            used = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
            self.kept.peak_bytes = max(self.kept.peak_bytes, *(size * 1024 for size in used))

    def keep_summary(self, summary: dict[str, dict[str, tuple[float, float, float]]]) -> None:
        self.kept.summary = summary
        self._write()

    def _stamp(self) -> None:
        kept = self.kept
        kept.fixed_on, kept.seed = settings.FIXED_ON, settings.SEED
        kept.commit, kept.machine = commit(), machine()
        kept.load_average = (round(self._load, 1), round(os.getloadavg()[0], 1))
        self._write()

    def _write(self) -> None:
        self.kept.runs = [found for case in simulate.cases() if (found := self.store.get(case)) is not None]
        write_bytes(self._path, lines_of(self.kept))


def run_case(case: Case) -> CaseResult:
    began = time.process_time()
    found = tuple(simulate.run(case, place) for place in range(len(windows())))
    return CaseResult(case, RELEASE, round(time.process_time() - began, 1), found)


def lines_of(kept: Kept) -> bytes:
    head = msgspec.to_builtins(kept)
    runs, several = head.pop("runs"), head.pop("windows")
    text = msgspec.json.encode(head)[:-1]
    for name, each in (("windows", several), ("runs", runs)):
        text += b',\n"%s":[\n%s\n]' % (name.encode(), b",\n".join(map(msgspec.json.encode, each)))
    return text + b"}\n"


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
    for system in simulate.ERRORS:
        durations, said = list[float](), list[float]()
        for window in windows():
            durations += [job.duration_s for job in window.jobs]
            said += predictions(window, Case(system, settings.MAIN_LOAD)).values()
        shares = errors.share_under_100(durations, said), errors.share_within_two(durations, said)
        found[system] = ErrorFacts(*(round(share, 4) for share in shares))
    return found
