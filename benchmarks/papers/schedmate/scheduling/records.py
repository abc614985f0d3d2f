"""Results that were computed, in one file: a release computes each case once.

The file has numbers of whole windows, none of single jobs: the trace is not ours to hand on.
"""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean

import msgspec

from benchmarks.harness import ROOT, machine
from benchmarks.papers.common import RELEASE, read_results, unknown
from benchmarks.papers.schedmate.scheduling import errors, settings, simulate
from benchmarks.papers.schedmate.scheduling.simulate import Case, Measures, Task, predictions, run_timed
from benchmarks.papers.schedmate.scheduling.trace import windows
from stoker.manager.study.running import Workers
from stoker.whole_files import draft_of


class WindowFacts(msgspec.Struct, frozen=True):
    """A window, without its jobs. `gpus`: at each load of the settings; seconds in the mean over its jobs."""

    cluster: str
    week: int
    jobs: int
    duration_s: float
    gpus_at_work: float
    gpus: tuple[int, ...]


class ErrorFacts(msgspec.Struct, frozen=True):
    """Of all predictions of a system: shares of relative errors under 100 %, and of those within a factor of two."""

    under_100: float
    within_two: float


class CaseResult(msgspec.Struct, frozen=True):
    """What came of a case in each window. `release`: of Stoker, that computed it; `took_s`: seconds of a core."""

    case: Case
    release: str
    took_s: float
    windows: tuple[Measures, ...]


class Kept(msgspec.Struct):
    """The file. `commit`: of the checkout that wrote it last; `peak_bytes`: of the largest process.
    `summary`: computed from the rest (`report.summary`), for programs that read the file."""

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
    """The results of a file, by case. Raises ValueError for a file that holds none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.kept = read_results(path, Kept) or Kept()
        self._found = {result.case.name: result for result in self.kept.runs}

    @property
    def strata(self) -> tuple[str, ...]:
        return tuple(window.cluster for window in self.kept.windows)

    @property
    def jobs(self) -> list[float]:
        return [float(window.jobs) for window in self.kept.windows]

    def get(self, case: Case) -> CaseResult | None:
        return self._found.get(case.name)

    def of(self, system: str, what: str, *, load: float = settings.MAIN_LOAD) -> list[float]:
        """One number of `Measures` for each window, the mean over draws. Raises ValueError for one that was not run."""
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
        """Run the cases that this release has not run, and keep each result at once. `jobs`: processes; 1 is this
        one."""
        todo, places = unknown(cases, self.get), range(len(windows()))
        if not todo:
            return
        before = os.getloadavg()[0]
        self.kept.windows, self.kept.errors = facts(), error_facts()
        with ExitStack() as stack:
            workers = stack.enter_context(Workers(_do, count=jobs)) if jobs > 1 else None
            for number, case in enumerate(todo, 1):
                tell(f"{number} of {len(todo)}: {case.system}, load {case.load:g}, draw {case.draw}")
                tasks = [Task(case, place) for place in places]
                found = map(_do, tasks) if workers is None else workers.each(tasks, hear=_heard)
                self._keep(case, sorted(found, key=lambda each: each[0].place))
                self._write(before)

    def drop_others(self, cases: Iterable[Case]) -> None:
        names = {case.name for case in cases}
        self._found = {name: result for name, result in self._found.items() if name in names}

    def keep_summary(self, summary: dict[str, dict[str, tuple[float, float, float]]]) -> None:
        self.kept.summary = summary
        self._write_file()

    def _keep(self, case: Case, found: Sequence[tuple[Task, Measures, float, int]]) -> None:
        took_s = round(sum(each[2] for each in found), 1)
        self._found[case.name] = CaseResult(case, RELEASE, took_s, tuple(each[1] for each in found))
        self.kept.peak_bytes = max(self.kept.peak_bytes, *(each[3] for each in found))

    def _write(self, load_before: float) -> None:
        kept = self.kept
        kept.fixed_on, kept.seed = settings.FIXED_ON, settings.SEED
        kept.commit, kept.machine = commit(), machine()
        kept.load_average = (round(load_before, 1), round(os.getloadavg()[0], 1))
        self._write_file()

    def _write_file(self) -> None:
        self.kept.runs = list(self._found.values())
        with draft_of(self._path) as draft:
            draft.write_bytes(_lines(self.kept))


def _do(task: Task, tell: Callable[..., None] | None = None) -> tuple[Task, Measures, float, int]:  # noqa: ARG001
    found = run_timed(task)
    return (*found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _heard(*_: object) -> None:
    """Tasks say nothing before they are done."""


def _lines(kept: Kept) -> bytes:
    head = msgspec.to_builtins(kept)
    runs, several = head.pop("runs"), head.pop("windows")
    text = msgspec.json.encode(head)[:-1]
    for name, rows in (("windows", several), ("runs", runs)):
        text += b',\n"%s":[\n%s\n]' % (name.encode(), b",\n".join(map(msgspec.json.encode, rows)))
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


def commit() -> str:
    try:
        asked = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=7", "--dirty=+", "--exclude=*"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
