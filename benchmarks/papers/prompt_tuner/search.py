"""Which sets of values the text's own numbers allow (decision 031): those that give each anchor within a limit.

Nobody learns here, as in the paper. ElasticFlow resizes, as its paper and PromptTuner's text have it. INFless is not
run: its distances are predicted with what is found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import msgspec

from benchmarks.papers.prompt_tuner.cases import ELASTIC_FLOW, NOBODY, Case, Group, System, at
from benchmarks.papers.prompt_tuner.grid import Choice, Grid
from benchmarks.papers.prompt_tuner.jobs import Parameters
from benchmarks.papers.prompt_tuner.runs import Runs
from benchmarks.papers.prompt_tuner.simulate import Result

RESIZES = System(ELASTIC_FLOW, (("slot_s", 1.0),))
STEP = 0.05
"""By so much the limit is raised where too few sets count."""
_Wanted = tuple[tuple[Group, System], ...]
_MEDIUM, _LOOSE = at("medium", 1.0), at("medium", 1.5)
_WANTED: tuple[_Wanted, ...] = (
    ((_MEDIUM, NOBODY),),
    ((_MEDIUM, RESIZES),),
    ((_LOOSE, RESIZES), (_LOOSE, NOBODY)),
)
"""The runs of each anchor, in their order."""
Tell = Callable[[str], Callable[[int, int], None]]


class Anchored(msgspec.Struct, frozen=True, array_like=True):
    """A set, and what it gives of each anchor under each seed of a stage; fewer where one was off already."""

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
    """What was found: all sets by their last stage, and those that count (`admitted`), within which limit."""

    stages: tuple[tuple[Anchored, ...], ...]
    within: float
    admitted: tuple[Choice, ...]


def search(grid: Grid, choices: Sequence[Choice], runs: Runs, *, tell: Tell, most: int = 0) -> Searched:
    """Stage by stage; `most`: so many stages, for a page before the search is over (0: all). Raises SimulationError."""
    stages: list[tuple[Anchored, ...]] = []
    left = list(choices)
    for number, stage in enumerate(grid.stages[: most or None], 1):
        within = stage.within if stage is not grid.stages[-1] else math.inf  # the limit may have to be raised
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
    grid: Grid, choices: Sequence[Choice], seeds: tuple[int, ...], within: float, runs: Runs, *, tell: Tell, number: int
) -> list[Anchored]:
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
