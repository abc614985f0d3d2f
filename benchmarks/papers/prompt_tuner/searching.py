"""Keep the numbers of each run, and implement the search rule of `grid.toml` on them.

The rule leads from the drawn sets to the headline set and the tuned setting of INFless. The rule reads runs from a
`Book`, so the page repeats the whole search on runs of the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

import msgspec

from benchmarks.harness import Facts
from benchmarks.papers.common import RELEASE, Store
from benchmarks.papers.prompt_tuner import scenarios
from benchmarks.papers.prompt_tuner.scenarios import ELASTIC_FLOW, LITERAL, MEDIUM, OURS, PARTS, Choice, Grid, System
from benchmarks.papers.prompt_tuner.simulate import Result, simulate
from stoker.manager.sim.run import SimulationError
from stoker.manager.study.running import WorkerDiedError
from stoker.manager.study.statistics import MeanEstimate, estimate_difference, estimate_mean

Simulate = Callable[[list[scenarios.Case]], list[Result]]


class KeptRun(msgspec.Struct, frozen=True, array_like=True):
    """A run. `violations`: percent. `paid_s`: device-seconds. `allocated`: share of all devices. Two fields: mean and
    maximum share of job latency during instance starts. `waiting_s`: part of `paid_s` in which replicas of a job waited
    for other replicas.
    """

    places: tuple[int, ...]
    group: str
    system: str
    seed: int
    violations: float
    paid_s: float
    allocated: float
    start_share: float
    start_most: float
    waiting_s: float = 0.0

    @classmethod
    def of(cls, one: Wanted, seed: int, result: Result) -> KeptRun:
        paid_s = result.all_s if one.system.policy in scenarios.STATIC else result.held_s
        return cls(
            *one.name(seed), round(result.violations, 3), round(paid_s, 1), round(result.held_s / result.all_s, 4),
            round(result.start_share, 4), round(result.start_most, 4), round(result.waiting_s, 1),
        )  # fmt: skip

    @property
    def name(self) -> tuple[tuple[int, ...], str, str, int]:
        return self.places, self.group, self.system, self.seed


class Record(msgspec.Struct, frozen=True):
    facts: Facts
    grid: Grid
    runs: tuple[KeptRun, ...]


def read_record(path: Path) -> Record:
    return msgspec.json.decode(path.read_bytes(), type=Record)


class Wanted(msgspec.Struct, frozen=True):
    """Runs of one system with one parameter set: one run per seed."""

    choice: Choice
    group: scenarios.Group
    system: System
    seeds: tuple[int, ...]

    def name(self, seed: int) -> tuple[tuple[int, ...], str, str, int]:
        return self.choice.places, self.group.name, str(self.system), seed


class Book:
    """Runs by name. `simulate`: function for missing runs; if None, a missing run raises LookupError."""

    def __init__(
        self, grid: Grid, kept: Iterable[KeptRun] = (), *, simulate: Simulate | None = None, smaller: int = 1
    ) -> None:
        self.grid = grid
        self.kept = {run.name: run for run in kept}
        self._simulate, self._smaller = simulate, smaller

    def bring(self, every: Iterable[Wanted]) -> None:
        """Simulate all missing runs together. Raises LookupError in a read-only book."""
        missing: dict[scenarios.Case, Wanted] = {}
        for one in every:
            seeds = [seed for seed in one.seeds if one.name(seed) not in self.kept]
            parameters = one.choice.parameters(self.grid)
            missing |= dict.fromkeys(one.group.cases(one.system, parameters, seeds=seeds, smaller=self._smaller), one)
        if missing and self._simulate is None:
            raise LookupError(f"the record lacks {next(iter(missing))}")
        results = self._simulate(list(missing)) if self._simulate else ()
        for result, (case, one) in zip(results, missing.items(), strict=True):
            self.kept[one.name(case.seed)] = KeptRun.of(one, case.seed, result)

    def runs(self, one: Wanted) -> list[KeptRun]:
        self.bring([one])
        return [self.kept[one.name(seed)] for seed in one.seeds]


class Evaluation:
    """One parameter set with some seeds. Systems are compared with our scheduler seed by seed."""

    def __init__(self, book: Book, choice: Choice, seeds: Sequence[int]) -> None:
        self.book, self.choice, self.seeds = book, choice, tuple(seeds)
        self.price_s = choice.parameters(book.grid).device_price_s

    def runs(self, group: scenarios.Group, system: System) -> list[KeptRun]:
        return self.book.runs(Wanted(self.choice, group, system, self.seeds))

    def late(self, group: scenarios.Group, system: System = OURS) -> list[float]:
        return [run.violations for run in self.runs(group, system)]

    def paid_s(self, group: scenarios.Group, system: System = OURS) -> list[float]:
        return [run.paid_s for run in self.runs(group, system)]

    def cost(self, group: scenarios.Group, system: System = OURS) -> MeanEstimate:
        return estimate_mean([seconds * self.price_s for seconds in self.paid_s(group, system)])

    def points(self, group: scenarios.Group, system: System) -> MeanEstimate:
        """Return the percentage points of late jobs above those of our scheduler."""
        return estimate_difference(self.late(group, system), self.late(group))

    def saved(self, group: scenarios.Group, system: System) -> MeanEstimate:
        """Return the percentage of the system's cost that our scheduler saves."""
        pairs = zip(self.paid_s(group, system), self.paid_s(group), strict=True)
        return estimate_mean([100.0 * (1.0 - ours / theirs) for theirs, ours in pairs])

    def times(self, group: scenarios.Group, system: System, *, waiting: bool = True) -> MeanEstimate:
        """Return the system's cost divided by our cost. `waiting`: True if a job's replicas cost while they wait."""
        runs = self.runs(group, system)
        paid = (run.paid_s if waiting else run.paid_s - run.waiting_s for run in runs)
        return estimate_mean([theirs / ours for theirs, ours in zip(paid, self.paid_s(group), strict=True)])


def mean_text(value: MeanEstimate, *, digits: int = 1, sign: bool = False) -> str:
    mean = f"{value.mean:{'+' if sign else ''}.{digits}f}"
    return mean if value.half_width is None else f"{mean} ± {value.half_width:.{digits}f}"


class Run(msgspec.Struct, frozen=True):
    case: scenarios.Case
    release: str
    result: Result


class Kept(msgspec.Struct):
    runs: list[Run] = []


def runs_in(folder: Path) -> Store[scenarios.Case, Run]:
    return Store(folder / "runs.json", Kept)


def simulated(case: scenarios.Case) -> Run:
    try:
        return Run(case, RELEASE, simulate(case))
    except Exception as error:
        raise SimulationError(f"{case}: {error}") from error


def book_of(runs: Store[scenarios.Case, Run], grid: Grid, *, jobs: int, smaller: int = 1) -> Book:
    """Return a book that simulates missing runs and stores their results."""

    def simulate_all(cases: list[scenarios.Case]) -> list[Result]:
        try:
            runs.bring(cases, simulated, jobs=jobs)
        except WorkerDiedError as error:
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
    """Count the mean effects of scheduler parts, on violations and on cost, that have the same sign as in the paper."""
    return sum(
        (one.points(MEDIUM, part.system).mean > 0.0)
        + (one.times(MEDIUM, part.system).mean > 1.0 if part.dearer else one.times(MEDIUM, part.system).mean < 1.0)
        for part in PARTS
    )


def search(book: Book) -> Found:
    grid, asked = book.grid, book.grid.search
    drawn = tuple(scenarios.draw_choices(grid))

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
    book.bring(wanted((headline,), scenarios.TUNINGS, asked.tuning_seeds))
    return Found(drawn, looked_at, finalists, headline, tune_infless(book, headline))


_ALIKE_POINTS = 0.5


def tune_infless(book: Book, headline: Choice) -> System:
    one = Evaluation(book, headline, book.grid.search.tuning_seeds)
    late = {system: fmean(one.late(MEDIUM, system)) for system in scenarios.TUNINGS}
    alike = [system for system in scenarios.TUNINGS if late[system] <= min(late.values()) + _ALIKE_POINTS]
    return min(alike, key=lambda system: (fmean(one.paid_s(MEDIUM, system)), str(system)))


def judged_runs(found: Found, grid: Grid) -> list[Wanted]:
    """Return all result runs with the headline set."""
    seeds, few = grid.judge.seeds, grid.judge.seeds[: grid.judge.few]
    wanted = [(MEDIUM, system, seeds) for system in (OURS, *scenarios.baselines(found.tuned).values())]
    wanted += [(MEDIUM, part.system, seeds[: grid.judge.parts]) for part in PARTS]
    wanted += [(group, system, few) for group in scenarios.VICUNA for system in (LITERAL, ELASTIC_FLOW)]
    others = (*scenarios.HEAVY, *scenarios.OTHERS)
    wanted += [(group, system, few) for group in others for system in (OURS, LITERAL, ELASTIC_FLOW)]
    return [Wanted(found.headline, *each) for each in wanted]
