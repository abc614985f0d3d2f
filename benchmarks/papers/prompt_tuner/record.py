"""Store the numbers of each run. Search steps and all tables are computed from these runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from benchmarks.harness import Facts
from benchmarks.papers.prompt_tuner.grid import Choice, Grid
from benchmarks.papers.prompt_tuner.scenarios import OURS, STATIC, Case, Group, System
from benchmarks.papers.prompt_tuner.simulate import Result
from stoker.manager.study.statistics import MeanEstimate, difference, estimate


class KeptRun(msgspec.Struct, frozen=True, array_like=True):
    """A run. `violations` in percent, `paid_s` in device-seconds, `allocated` as a share of all devices; share of
    job latency during instance starts (mean and maximum).
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

    @classmethod
    def of(cls, choice: Choice, group: Group, system: System, seed: int, result: Result) -> KeptRun:
        paid_s = result.all_s if system.policy in STATIC else result.held_s
        return cls(
            choice.places, group.name, str(system), seed, round(result.violations, 3), round(paid_s, 1),
            round(result.utilisation, 4), round(result.start_share, 4), round(result.start_most, 4),
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
    """Runs of one system with one set, one run per seed."""

    choice: Choice
    group: Group
    system: System
    seeds: tuple[int, ...]


class Book:
    """Runs by name. `simulate`: function for missing runs; if None, a missing run is an error."""

    def __init__(
        self, grid: Grid, kept: Iterable[KeptRun] = (), *, simulate: Callable[[list[Case]], list[Result]] | None = None,
        smaller: int = 1,
    ) -> None:  # fmt: skip
        self.grid = grid
        self.kept = {run.name: run for run in kept}
        self._simulate, self._smaller = simulate, smaller

    def bring(self, every: Iterable[Wanted]) -> None:
        """Simulate all missing runs together. Raises LookupError in a read-only book."""
        missing: dict[Case, tuple[Wanted, int]] = {}
        for one in every:
            seeds = [seed for seed in one.seeds if _name(one, seed) not in self.kept]
            parameters = one.choice.parameters(self.grid)
            for case in one.group.cases(one.system, parameters, seeds=seeds, smaller=self._smaller):
                missing[case] = (one, case.seed)
        if missing and self._simulate is None:
            raise LookupError(f"the record lacks {next(iter(missing))}")
        for result, (one, seed) in zip(self._simulate(list(missing)) if self._simulate else (), missing.values(),
                                       strict=True):  # fmt: skip
            run = KeptRun.of(one.choice, one.group, one.system, seed, result)
            self.kept[run.name] = run

    def runs(self, one: Wanted) -> list[KeptRun]:
        self.bring([one])
        return [self.kept[_name(one, seed)] for seed in one.seeds]


def _name(one: Wanted, seed: int) -> tuple[tuple[int, ...], str, str, int]:
    return one.choice.places, one.group.name, str(one.system), seed


class Evaluation:
    """One set under some seeds. Systems are compared with our scheduler seed by seed."""

    def __init__(self, book: Book, choice: Choice, seeds: Sequence[int]) -> None:
        self.book, self.choice, self.seeds = book, choice, tuple(seeds)
        self.price_s = choice.parameters(book.grid).device_price_s

    def runs(self, group: Group, system: System) -> list[KeptRun]:
        return self.book.runs(Wanted(self.choice, group, system, self.seeds))

    def late(self, group: Group, system: System = OURS) -> list[float]:
        return [run.violations for run in self.runs(group, system)]

    def paid_s(self, group: Group, system: System = OURS) -> list[float]:
        return [run.paid_s for run in self.runs(group, system)]

    def cost(self, group: Group, system: System = OURS) -> MeanEstimate:
        return estimate([seconds * self.price_s for seconds in self.paid_s(group, system)])

    def points(self, group: Group, system: System) -> MeanEstimate:
        """Return percentage points of late jobs minus those of our scheduler."""
        return difference(self.late(group, system), self.late(group))

    def saved(self, group: Group, system: System) -> MeanEstimate:
        """Return the percentage of the cost of the system that our scheduler saves."""
        pairs = zip(self.paid_s(group, system), self.paid_s(group), strict=True)
        return estimate([100.0 * (1.0 - ours / theirs) for theirs, ours in pairs])

    def times(self, group: Group, system: System) -> MeanEstimate:
        """Return the cost of the system divided by ours."""
        pairs = zip(self.paid_s(group, system), self.paid_s(group), strict=True)
        return estimate([theirs / ours for theirs, ours in pairs])


def mean_text(value: MeanEstimate, *, digits: int = 1, sign: bool = False) -> str:
    mean = f"{value.mean:{'+' if sign else ''}.{digits}f}"
    return mean if value.half_width is None else f"{mean} ± {value.half_width:.{digits}f}"
