"""Runs of a system under all seeds, as means with 95 % intervals; two systems are compared seed by seed. One set of
parameters is one `Evaluation`; `over` is the interval over all sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from benchmarks.papers.prompt_tuner.cases import Group, System
from benchmarks.papers.prompt_tuner.grid import Choice, read_grid
from benchmarks.papers.prompt_tuner.jobs import Parameters
from benchmarks.papers.prompt_tuner.record import KeptRun, Record
from stoker.manager.study.statistics import MeanEstimate, difference, estimate


class Evaluation(msgspec.Struct, frozen=True):
    choice: Choice
    parameters: Parameters
    runs: dict[tuple[str, str], list[KeptRun]]

    def results(self, group: Group, system: System) -> list[KeptRun]:
        return self.runs[group.name, str(system)]

    def violations(self, group: Group, system: System) -> list[float]:
        return [run.violations for run in self.results(group, system)]

    def costs(self, group: Group, system: System) -> list[float]:
        return [run.paid_s * self.parameters.device_price_s for run in self.results(group, system)]

    def more_violations(
        self, group: Group, system: System, than: System, *, where: Group | None = None
    ) -> MeanEstimate:
        return difference(self.violations(group, system), self.violations(where or group, than))

    def times_the_cost(self, group: Group, system: System, of: System, *, where: Group | None = None) -> MeanEstimate:
        pairs = zip(self.costs(group, system), self.costs(where or group, of), strict=True)
        return estimate([cost / other for cost, other in pairs])

    def saved(self, group: Group, system: System, of: System) -> MeanEstimate:
        pairs = zip(self.costs(group, system), self.costs(group, of), strict=True)
        return estimate([100.0 * (1.0 - cost / other) for cost, other in pairs])


def evaluations(record: Record) -> list[Evaluation]:
    grid, found = read_grid(), []
    for choice in record.sets:
        runs: dict[tuple[str, str], list[KeptRun]] = {}
        for run in record.runs:
            if run.places == choice.places:
                runs.setdefault((run.group, run.system), []).append(run)
        found.append(Evaluation(choice, choice.parameters(grid), runs))
    return found


class Spread(msgspec.Struct, frozen=True):
    """Something of every set: the central set's mean with its interval, and the means of all."""

    central: MeanEstimate
    means: tuple[float, ...]

    def range(self) -> tuple[float, float]:
        return min(self.means), max(self.means)

    def shown(self, *, digits: int = 1, sign: bool = False) -> tuple[str, str]:
        plus = "+" if sign else ""
        low, high = (f"{value:{plus}.{digits}f}" for value in self.range())
        return show(self.central, digits=digits, sign=sign), f"{low} to {high}"


def over(sets: Sequence[Evaluation], of: Callable[[Evaluation], MeanEstimate]) -> Spread:
    found = [of(each) for each in sets]
    return Spread(found[0], tuple(one.mean for one in found))


def show(value: MeanEstimate, *, digits: int = 1, sign: bool = False, before: str = "") -> str:
    mean = f"{before}{value.mean:{'+' if sign else ''}.{digits}f}"
    return mean if value.half_width is None else f"{mean} ± {value.half_width:.{digits}f}"
