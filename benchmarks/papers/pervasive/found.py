"""What the reproduction came to, as its record keeps it, and how the page shows numbers of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from benchmarks.harness import Facts
from benchmarks.papers.pervasive import fit, paper
from benchmarks.papers.pervasive.fit import Fit
from benchmarks.papers.pervasive.predict import Prediction, Shared


class Found(msgspec.Struct, frozen=True):
    """What the reproduction came to. `simulated`: the static runs with the first, most central of the `fits`; of
    `predictions` and `shared` there is one row for each fit. `starts`: of searches that the fits came from, on the day
    `searched`. `panels`: whether the pictures have a panel for each size of calls; those of older records mix them."""

    facts: Facts
    starts: int
    fits: tuple[Fit, ...]
    simulated: tuple[tuple[paper.Run, float], ...]
    predictions: tuple[tuple[Prediction, ...], ...]
    shared: tuple[Shared, ...] = ()
    searched: str = fit.FIRST_SEARCHED
    panels: bool = False

    def without_looks(self) -> Found:
        rows = [[msgspec.structs.replace(one, looks=()) for one in row] for row in self.predictions]
        return msgspec.structs.replace(self, predictions=tuple(map(tuple, rows)))

    @property
    def close(self) -> list[tuple[Prediction, ...]]:
        return [row for each, row in zip(self.fits, self.predictions, strict=True) if each.close]


def at_most(part: float) -> str:
    return f"{math.ceil(part * 1000.0) / 10.0:.1f}%"


def between(values: Sequence[float], shown: str = ",.0f") -> str:
    return f"{min(values):{shown}} to {max(values):{shown}}"
