"""Implement the search rule of `grid.toml`: from drawn sets to the headline set and the tuned setting of INFless.

The rule reads runs from a `Book`, so the page repeats the whole search on runs of the record.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import fmean

import msgspec

from benchmarks.papers.common import RELEASE, Store
from benchmarks.papers.prompt_tuner import grid as grids
from benchmarks.papers.prompt_tuner import scenarios
from benchmarks.papers.prompt_tuner.grid import Choice, Grid
from benchmarks.papers.prompt_tuner.record import Book, Evaluation, Wanted
from benchmarks.papers.prompt_tuner.scenarios import ELASTIC_FLOW, LITERAL, MEDIUM, OURS, PARTS, TUNINGS, Case, System
from benchmarks.papers.prompt_tuner.simulate import Result, simulate
from stoker.manager.sim.run import SimulationError
from stoker.manager.study.running import DiedError


class Run(msgspec.Struct, frozen=True):
    case: Case
    release: str
    result: Result


class Kept(msgspec.Struct):
    runs: list[Run] = []


def runs_in(folder: Path) -> Store[Case, Run]:
    return Store(folder / "runs.json", Kept)


def simulated(case: Case) -> Run:
    try:
        return Run(case, RELEASE, simulate(case))
    except Exception as error:
        raise SimulationError(f"{case}: {error}") from error


def book_of(runs: Store[Case, Run], grid: Grid, *, jobs: int, smaller: int = 1) -> Book:
    """Return a book that simulates missing runs and stores their results."""

    def simulate_all(cases: list[Case]) -> list[Result]:
        try:
            runs.bring(cases, simulated, jobs=jobs)
        except DiedError as error:
            raise SimulationError(f"the process that simulated {error.task[1]} died ({error.how})") from None
        return [runs.found[case.name].result for case in cases]

    return Book(grid, simulate=simulate_all, smaller=smaller)


class Found(msgspec.Struct, frozen=True):
    """Steps of the search. `tuned`: best setting of INFless."""

    drawn: tuple[Choice, ...]
    looked_at: tuple[Choice, ...]
    finalists: tuple[Choice, ...]
    headline: Choice
    tuned: System


def count_right_signs(one: Evaluation) -> int:
    """Return how many mean effects of scheduler parts, on violations and on cost, have the sign of the paper."""
    return sum(
        (one.points(MEDIUM, part.system).mean > 0.0)
        + (one.times(MEDIUM, part.system).mean > 1.0 if part.dearer else one.times(MEDIUM, part.system).mean < 1.0)
        for part in PARTS
    )


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
    right = {each: count_right_signs(Evaluation(book, each, asked.seeds)) for each in looked_at}
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
    seeds, few = grid.judge.seeds, grid.judge.seeds[: grid.judge.few]
    wanted = [(MEDIUM, system, seeds) for system in (OURS, *scenarios.baselines(found.tuned).values())]
    wanted += [(MEDIUM, part.system, seeds[: grid.judge.parts]) for part in PARTS]
    wanted += [(group, system, few) for group in scenarios.VICUNA for system in (LITERAL, ELASTIC_FLOW)]
    wanted += [(group, system, few) for group in scenarios.HEAVY for system in (OURS, LITERAL, ELASTIC_FLOW)]
    return [Wanted(found.headline, *each) for each in wanted]
