"""The sets of values that the text leaves open (`grid.toml`, fixed before the first run)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path

import msgspec

from benchmarks.papers.prompt_tuner.jobs import Parameters
from stoker.chance import Stream

PATH = Path(__file__).parent / "grid.toml"
SEED = 0


class Values(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    duration_median_s: tuple[float, ...]
    overhead: tuple[float, ...]
    width: tuple[str, ...]
    prepare_s: tuple[float, ...]
    speedup: tuple[float, ...]
    widest: tuple[int, ...]


class Anchors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers of the text that a set must reproduce within a share (`within`)."""

    within: float
    fewest: int
    violations: float
    allocated: float
    cost_ratio: float

    def said(self) -> tuple[float, float, float]:
        return self.violations, self.allocated, self.cost_ratio


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seeds: tuple[int, ...]
    within: float


class ReportSeeds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seeds of the central set, how many the other sets use, and the most sets."""

    seeds: tuple[int, ...]
    few: int
    most: int


class Grid(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fixed_on: str
    draws: int
    values: Values
    width: Mapping[str, tuple[tuple[int, float], ...]]
    anchors: Anchors
    stages: tuple[Stage, ...]
    report: ReportSeeds


class Choice(msgspec.Struct, frozen=True, array_like=True):
    places: tuple[int, ...]

    def values(self, grid: Grid) -> dict[str, float | str]:
        every = msgspec.structs.asdict(grid.values)
        return {name: values[place] for (name, values), place in zip(every.items(), self.places, strict=True)}

    def parameters(self, grid: Grid) -> Parameters:
        values = self.values(grid)
        replicas = grid.width[str(values.pop("width"))]
        return msgspec.structs.replace(Parameters(), replicas=replicas, **values)

    def distance(self, other: Choice, grid: Grid) -> float:
        steps = [len(values) - 1 for values in msgspec.structs.astuple(grid.values)]
        return math.dist(
            [place / step for place, step in zip(self.places, steps, strict=True)],
            [place / step for place, step in zip(other.places, steps, strict=True)],
        )


@cache
def read_grid(path: Path = PATH) -> Grid:
    return msgspec.toml.decode(path.read_bytes(), type=Grid)


def every_choice(grid: Grid) -> list[Choice]:
    return [Choice(places) for places in product(*(range(len(v)) for v in msgspec.structs.astuple(grid.values)))]


def drawn(grid: Grid) -> list[Choice]:
    every, chance = every_choice(grid), Stream(SEED, "PromptTuner's grid")
    some = set(sorted(range(len(every)), key=chance.uniform)[: grid.draws])
    return [choice for number, choice in enumerate(every) if number in some]


def central(choices: Sequence[Choice], grid: Grid) -> Choice:
    return min(choices, key=lambda each: (sum(each.distance(other, grid) for other in choices), each.places))


def farthest_apart(choices: Sequence[Choice], grid: Grid, *, most: int) -> list[Choice]:
    """Return the central set, then repeatedly the set farthest from all chosen sets (Gonzalez, 1985)."""
    picked = [central(choices, grid)]
    left = [each for each in choices if each != picked[0]]
    while left and len(picked) < most:
        picked.append(max(left, key=lambda each: (min(each.distance(other, grid) for other in picked), each.places)))
        left.remove(picked[-1])
    return picked
