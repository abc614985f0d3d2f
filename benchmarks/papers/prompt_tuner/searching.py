"""Sets of values that the text's numbers allow (decision 031), each baseline's best setting, and stored runs.

A set is admitted if it reproduces each anchor within a limit, when no system learns and ElasticFlow resizes.

Settings are chosen on separate seeds: at medium load, S = 1.0, with the most central set. The best setting is the
cheapest within half a point of the fewest violations. Our scheduler keeps the paper's settings (§4.4, §6.3). INFless's
constants were added later (2026-11-26). `keep_alive_s` is not chosen, because our scheduler could keep GPUs longer too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from statistics import fmean

import msgspec

from benchmarks.papers.common import RELEASE, results, write_bytes
from benchmarks.papers.prompt_tuner.grid import Choice, Grid
from benchmarks.papers.prompt_tuner.jobs import Parameters
from benchmarks.papers.prompt_tuner.scenarios import (
    ELASTIC_FLOW,
    MEDIUM,
    NOBODY,
    POLICIES,
    STATIC,
    TUNING_SEEDS,
    Case,
    Chosen,
    Group,
    Reading,
    Settings,
    System,
    at,
)
from benchmarks.papers.prompt_tuner.simulate import Result, simulate
from stoker.errors import StokerError
from stoker.manager.sim.run import SimulationError
from stoker.manager.study.running import DiedError

Found = dict[Case, Result]


class Runs:
    """Results of runs by case and release, stored in a folder."""

    def __init__(self, folder: Path, *, jobs: int) -> None:
        self._folder = folder
        self._jobs = jobs

    def each(self, cases: Iterable[Case], *, tell: Callable[[int, int], None]) -> Found:
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
            for place, result in results(simulated, todo, jobs=self._jobs):
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


RESIZES = System(ELASTIC_FLOW, (("slot_s", 1.0),))
STEP = 0.05
"""Added to the limit if too few sets are admitted."""
Progress = Callable[[str], Callable[[int, int], None]]
_Wanted = tuple[tuple[Group, System], ...]
_MEDIUM, _LOOSE = at("medium", 1.0), at("medium", 1.5)
_WANTED: tuple[_Wanted, ...] = (((_MEDIUM, NOBODY),), ((_MEDIUM, RESIZES),), ((_LOOSE, RESIZES), (_LOOSE, NOBODY)))


class Anchored(msgspec.Struct, frozen=True, array_like=True):
    """A set, and its results for each anchor by seed."""

    choice: Choice
    seeds: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]

    def errors(self, grid: Grid) -> list[float]:
        said = grid.anchors.said()[: len(self.values)]
        return [fmean(values) / paper - 1.0 for values, paper in zip(self.values, said, strict=True)]

    def worst(self, grid: Grid) -> float:
        whole = len(self.values) == len(grid.anchors.said())
        return max(map(abs, self.errors(grid))) if whole else max(1.0, *map(abs, self.errors(grid)))


class Searched(msgspec.Struct, frozen=True):
    """All sets by their last stage, the admitted sets, and their limit."""

    stages: tuple[tuple[Anchored, ...], ...]
    within: float
    admitted: tuple[Choice, ...]


def search(grid: Grid, choices: Sequence[Choice], runs: Runs, *, tell: Progress, most: int = 0) -> Searched:
    stages: list[tuple[Anchored, ...]] = []
    left = list(choices)
    for number, stage in enumerate(grid.stages[: most or None], 1):
        within = stage.within if stage is not grid.stages[-1] else math.inf  # The limit may have to rise.
        found = tuple(_measured(grid, left, stage.seeds, within, runs, tell=tell, number=number))
        stages.append(found)
        left = [each.choice for each in found if each.worst(grid) <= stage.within]
    within = grid.anchors.within
    last = [each for each in stages[-1] if each.worst(grid) < 1.0]
    while sum(each.worst(grid) <= within for each in last) < min(grid.anchors.fewest, len(last)):
        within += STEP
    admitted = tuple(each.choice for each in stages[-1] if each.worst(grid) <= within)
    return Searched(tuple(stages), round(within, 2), admitted)


def _measured(
    grid: Grid, choices: Sequence[Choice], seeds: tuple[int, ...], within: float, runs: Runs, *, tell: Progress,
    number: int,
) -> list[Anchored]:  # fmt: skip
    values: dict[Choice, list[tuple[float, ...]]] = {choice: [] for choice in choices}
    alive = list(choices)
    for place, wanted in enumerate(_WANTED):
        cases = [case for choice in alive for case in _cases(wanted, choice.parameters(grid), seeds)]
        found = runs.each(cases, tell=tell(f"stage {number}, anchor {place + 1}"))
        for choice in alive:
            values[choice].append(_values(place, wanted, choice, grid, seeds, found))
        said = grid.anchors.said()[place]
        alive = [choice for choice in alive if abs(fmean(values[choice][-1]) / said - 1.0) <= within]
    return [Anchored(choice, seeds, tuple(some)) for choice, some in values.items()]


def _cases(wanted: _Wanted, parameters: Parameters, seeds: Sequence[int]) -> list[Case]:
    return [case for group, system in wanted for case in group.cases(system, parameters, seeds=seeds)]


def _values(
    place: int, wanted: _Wanted, choice: Choice, grid: Grid, seeds: Sequence[int], found: Mapping[Case, Result]
) -> tuple[float, ...]:
    cases = _cases(wanted, choice.parameters(grid), seeds)
    results = [found[case] for case in cases]
    if place == 0:
        return tuple(round(result.violations, 3) for result in results)
    if place == 1:
        return tuple(round(100.0 * result.utilisation, 3) for result in results)
    theirs, ours = results[: len(seeds)], results[len(seeds) :]
    return tuple(round(one.all_s / other.held_s, 4) for one, other in zip(theirs, ours, strict=True))


ALIKE_POINTS = 0.5
_ORDERS = tuple(
    (("order", order), ("window_s", window_s)) for order in ("arrival", "deadline") for window_s in (0.0, 60.0)
)
_CONSTANTS: tuple[Settings, ...] = (
    (), (("margin", 0.0),), (("margin", 0.3),), (("gamma", 0.0),), (("gamma", 1.0),)
)  # fmt: skip
CHOICES: Mapping[Reading, Sequence[Settings]] = {
    Reading.HOLD: tuple((*order, ("hold", True), *constants) for order in _ORDERS for constants in _CONSTANTS),
    Reading.AT_ONCE: tuple((*order, *constants) for order in _ORDERS for constants in _CONSTANTS),
    Reading.RESIZES: ((("slot_s", 1.0),), (("slot_s", 10.0),)),
    Reading.FIXED: ((("rescale", False),),),
}


class Search(msgspec.Struct, frozen=True):
    reading: Reading
    system: System
    violations: float
    cost: float


def candidates(reading: Reading) -> list[System]:
    return [System(POLICIES[reading], settings) for settings in CHOICES[reading]]


def cases(parameters: Parameters, *, seeds: Sequence[int] = TUNING_SEEDS, smaller: int = 1) -> Iterator[Case]:
    for reading in Reading:
        for system in candidates(reading):
            yield from MEDIUM.cases(system, parameters, seeds=seeds, smaller=smaller)


def searched(
    found: Found, parameters: Parameters, *, seeds: Sequence[int] = TUNING_SEEDS, smaller: int = 1
) -> tuple[Search, ...]:
    def of(reading: Reading, system: System) -> Search:
        runs = [found[case] for case in MEDIUM.cases(system, parameters, seeds=seeds, smaller=smaller)]
        price, static = parameters.device_price_s, system.policy in STATIC
        costs = [run.cost(static=static, device_price_s=price) for run in runs]
        return Search(reading, system, fmean(run.violations for run in runs), fmean(costs))

    return tuple(of(reading, system) for reading in Reading for system in candidates(reading))


def best(searches: Iterable[Search]) -> Chosen:
    by_reading: dict[Reading, list[Search]] = {}
    for search in searches:
        by_reading.setdefault(search.reading, []).append(search)
    return {reading: _best(some) for reading, some in by_reading.items()}


def _best(searches: Sequence[Search]) -> System:
    fewest = min(search.violations for search in searches)
    alike = [search for search in searches if search.violations <= fewest + ALIKE_POINTS]
    return min(alike, key=lambda search: (search.cost, search.violations)).system


def other_order(system: System) -> System:
    order = dict(system.settings)["order"]
    return system.having(order="deadline" if order == "arrival" else "arrival")
