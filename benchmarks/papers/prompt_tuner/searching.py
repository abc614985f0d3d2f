"""Implement the search rule of `grid.toml`: from drawn sets to the headline set and the tuned setting of INFless.

The rule reads runs from a `Book`, so the page repeats the whole search on runs of the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path
from statistics import fmean

import msgspec

from benchmarks.papers.common import RELEASE, run_tasks, write_bytes
from benchmarks.papers.prompt_tuner import grid as grids
from benchmarks.papers.prompt_tuner.grid import Choice, Grid
from benchmarks.papers.prompt_tuner.record import Book, Evaluation, Wanted
from benchmarks.papers.prompt_tuner.scenarios import (
    ELASTIC_FLOW,
    HEAVY,
    LITERAL,
    MEDIUM,
    OURS,
    PARTS,
    TUNINGS,
    VICUNA,
    Case,
    Group,
    System,
    baselines,
)
from benchmarks.papers.prompt_tuner.simulate import Result, simulate
from stoker.errors import StokerError
from stoker.manager.sim.run import SimulationError
from stoker.manager.study.running import DiedError


class Runs:
    """Results of runs by case and release, stored in a folder."""

    def __init__(self, folder: Path, *, jobs: int) -> None:
        self._folder = folder
        self._jobs = jobs

    def each(self, cases: Iterable[Case], *, tell: Callable[[int, int], None]) -> dict[Case, Result]:
        every = list(dict.fromkeys(cases))
        found = {case: kept for case in every if (kept := self._kept(case)) is not None}
        for case, result in self._do([case for case in every if case not in found]):
            found[case] = result
            self.keep(case, result)
            tell(len(found), len(every))
        return found

    def keep(self, case: Case, result: Result) -> None:
        write_bytes(self._path(case), msgspec.json.encode(_Kept(case, result)))

    def _do(self, todo: list[Case]) -> Iterator[tuple[Case, Result]]:
        try:
            for place, result in run_tasks(simulated, todo, jobs=self._jobs):
                yield todo[place], result
        except DiedError as error:
            raise SimulationError(f"the process that simulated {error.task[1]} died ({error.how})") from None

    def _path(self, case: Case) -> Path:
        digest = blake2b(RELEASE.encode() + msgspec.json.encode(case), digest_size=12).hexdigest()
        return self._folder / f"{digest}.json"

    def _kept(self, case: Case) -> Result | None:
        try:
            return msgspec.json.decode(self._path(case).read_bytes(), type=_Kept).result
        except (OSError, msgspec.DecodeError):
            return None


class _Kept(msgspec.Struct, frozen=True):
    case: Case
    result: Result


def simulated(case: Case) -> Result:
    try:
        return simulate(case)
    except StokerError as error:
        raise SimulationError(f"{case}: {error}") from error
    except Exception as error:
        raise SimulationError(f"{case}: {type(error).__name__}: {error}") from error


def book_of(runs: Runs, grid: Grid, *, tell: Callable[[int, int], None], smaller: int = 1) -> Book:
    def simulate_all(cases: list[Case]) -> list[Result]:
        found = runs.each(cases, tell=tell)
        return [found[case] for case in cases]

    return Book(grid, simulate=simulate_all, smaller=smaller)


class Signs(msgspec.Struct, frozen=True):
    """Number of scheduler parts whose mean effect has the sign of the paper, for violations and for cost."""

    points: int
    times: int

    @property
    def right(self) -> int:
        return self.points + self.times


class Found(msgspec.Struct, frozen=True):
    """Steps of the search. `tuned`: best setting of INFless."""

    drawn: tuple[Choice, ...]
    looked_at: tuple[Choice, ...]
    finalists: tuple[Choice, ...]
    headline: Choice
    tuned: System


def count_right_signs(one: Evaluation) -> Signs:
    points = sum(one.points(MEDIUM, part.system).mean > 0.0 for part in PARTS)
    times = [(one.times(MEDIUM, part.system).mean, part.dearer) for part in PARTS]
    return Signs(points, sum((mean > 1.0) if dearer else (mean < 1.0) for mean, dearer in times))


def search(book: Book) -> Found:
    grid, asked = book.grid, book.grid.search
    drawn = tuple(grids.draw_choices(grid))

    def wanted(choices: Iterable[Choice], systems: Iterable[System], seeds: tuple[int, ...]) -> list[Wanted]:
        systems = list(systems)
        return [Wanted(choice, MEDIUM, system, seeds) for choice in choices for system in systems]

    def off(choice: Choice, *, seeds: tuple[int, ...]) -> float:
        return abs(asked.deviation(fmean(Evaluation(book, choice, seeds).late(MEDIUM))))

    book.bring(wanted(drawn, (OURS, LITERAL, ELASTIC_FLOW), asked.seeds))
    first = partial(off, seeds=asked.seeds)
    looked_at = tuple(sorted(drawn, key=lambda each: (first(each), each.places))[: asked.looked_at])
    book.bring(wanted(looked_at, (part.system for part in PARTS), asked.seeds))
    right = {each: count_right_signs(Evaluation(book, each, asked.seeds)).right for each in looked_at}
    order = sorted(looked_at, key=lambda each: (-right[each], first(each), each.places))
    finalists = tuple(order[: asked.finalists])
    all_seeds = (*asked.seeds, *asked.more_seeds)
    book.bring(wanted(finalists, (OURS,), all_seeds))
    last = {each: off(each, seeds=all_seeds) for each in finalists}
    inside = [each for each in finalists if last[each] <= asked.within]
    if inside:
        headline = min(inside, key=lambda each: (-right[each], last[each], each.places))
    else:
        headline = min(finalists, key=lambda each: (last[each], each.places))
    book.bring(wanted((headline,), TUNINGS, asked.tuning_seeds))
    return Found(drawn, looked_at, finalists, headline, tune_infless(book, headline))


_ALIKE_POINTS = 0.5


def tune_infless(book: Book, headline: Choice) -> System:
    one = Evaluation(book, headline, book.grid.search.tuning_seeds)
    late = {system: fmean(one.late(MEDIUM, system)) for system in TUNINGS}
    alike = [system for system in TUNINGS if late[system] <= min(late.values()) + _ALIKE_POINTS]
    return min(alike, key=lambda system: (fmean(one.paid_s(MEDIUM, system)), str(system)))


def judged_runs(found: Found, grid: Grid) -> list[Wanted]:
    """Return all result runs with the headline set."""
    judge = grid.judge
    seeds, some, few = judge.seeds, judge.seeds[: judge.parts], judge.seeds[: judge.few]
    every, usual = (OURS, *baselines(found.tuned).values()), (OURS, LITERAL, ELASTIC_FLOW)
    parts = [part.system for part in PARTS]
    wanted: list[tuple[Group, Iterable[System], tuple[int, ...]]] = [
        (MEDIUM, every, seeds),
        (MEDIUM, parts, some),
        *((group, (LITERAL, ELASTIC_FLOW), few) for group in VICUNA),
        *((group, usual, few) for group in HEAVY),
    ]
    return [Wanted(found.headline, group, system, those) for group, systems, those in wanted for system in systems]
