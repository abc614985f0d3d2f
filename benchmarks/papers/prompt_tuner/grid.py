"""Load the sets of unspecified values (`grid.toml`, fixed before the first run)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import product
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.papers.prompt_tuner import paper
from benchmarks.papers.prompt_tuner.jobs import Parameters, jobs, slo_s
from stoker.chance import Stream

SEED = 0


class Values(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    duration_median_s: tuple[float, ...]
    overhead: tuple[float, ...]
    width: tuple[str, ...]
    prepare_s: tuple[float, ...]
    speedup: tuple[float, ...]
    widest: tuple[int, ...]


class Search(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`late`: target of late jobs in percent. `within`: its limit as a share. Others: search steps."""

    late: float
    within: float
    seeds: tuple[int, ...]
    looked_at: int
    finalists: int
    more_seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...]

    def deviation(self, late: float) -> float:
        return late / self.late - 1.0


class Judge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seeds of the results, numbers of seeds for scheduler parts and smaller tables, and the limit of a conflict as a
    share.
    """

    seeds: tuple[int, ...]
    parts: int
    few: int
    conflict: float


class Grid(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fixed_on: str
    draws: int
    slo_s: float
    values: Values
    width: Mapping[str, tuple[tuple[int, float], ...]]
    search: Search
    judge: Judge


class Choice(msgspec.Struct, frozen=True, array_like=True):
    """A set: index of its value in each line of the grid."""

    places: tuple[int, ...]

    def values(self, grid: Grid) -> dict[str, float | str]:
        every = msgspec.structs.asdict(grid.values)
        return {name: values[place] for (name, values), place in zip(every.items(), self.places, strict=True)}

    def parameters(self, grid: Grid) -> Parameters:
        values = self.values(grid)
        replicas = grid.width[str(values.pop("width"))]
        return msgspec.structs.replace(Parameters(), replicas=replicas, **values)


@cache
def read_grid() -> Grid:
    return msgspec.toml.decode(Path(__file__).with_name("grid.toml").read_bytes(), type=Grid)


def every_choice(grid: Grid) -> list[Choice]:
    return [Choice(places) for places in product(*(range(len(v)) for v in msgspec.structs.astuple(grid.values)))]


@cache
def median_slo_s(parameters: Parameters, seeds: tuple[int, ...]) -> float:
    """Return the median SLO of jobs at medium load, S = 1."""
    found = (jobs(paper.LOADS["medium"], parameters, seed=seed) for seed in seeds)
    return median(slo_s(job, 1.0, parameters) for some in found for job in some)


def draw_choices(grid: Grid) -> list[Choice]:
    seeds = grid.search.seeds
    every = [each for each in every_choice(grid) if median_slo_s(each.parameters(grid), seeds) >= grid.slo_s]
    some = set(sorted(range(len(every)), key=Stream(SEED, "PromptTuner's grid").uniform)[: grid.draws])
    return [choice for number, choice in enumerate(every) if number in some]
