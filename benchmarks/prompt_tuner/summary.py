"""Runs of a system under all seeds, as means with 95 % intervals; two systems are compared seed by seed."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from benchmarks.prompt_tuner import ablations
from benchmarks.prompt_tuner.cases import ELASTIC_FLOW, WHOLE_EXTENT, Extent, Group, System
from benchmarks.prompt_tuner.result import Result
from benchmarks.prompt_tuner.runs import Found
from stoker.manager.study.statistics import MeanEstimate, difference, estimate

STATIC = frozenset({ELASTIC_FLOW})
"""Policies that hold a cluster of a fixed size."""


class Search(msgspec.Struct, frozen=True):
    """One setting of a baseline, on the seeds that settings are chosen on: mean violations over S = 0.5, 1.0, 1.5 in
    percent, and mean cost in dollars."""

    system: System
    violations: float
    cost: float


class Evaluation(msgspec.Struct, frozen=True):
    """All runs. `systems`: ours and the baselines in their best settings, by policy; `learned`: the baselines in the
    best of those settings with which they learn what jobs need."""

    found: Found
    systems: Mapping[str, System]
    learned: Mapping[str, System]
    searches: tuple[Search, ...]
    extent: Extent = WHOLE_EXTENT

    def results(self, group: Group, system: System) -> list[Result]:
        """A system's runs, one a seed. Raises KeyError where they were not done."""
        extent = self.extent
        seeds = ablations.seeds_of(group, extent)
        return [self.found[case] for case in group.cases(system, seeds=seeds, smaller=extent.smaller)]

    def violations(self, group: Group, system: System) -> list[float]:
        """Percent, by seed."""
        return [result.violations for result in self.results(group, system)]

    def costs(self, group: Group, system: System) -> list[float]:
        """Dollars, by seed."""
        price, static = group.parameters.device_price_s, system.policy in STATIC
        return [result.cost(static=static, device_price_s=price) for result in self.results(group, system)]

    def more_violations(
        self, group: Group, system: System, than: System, *, where: Group | None = None
    ) -> MeanEstimate:
        """By how many points more jobs are late. `where`: the other's group."""
        return difference(self.violations(group, system), self.violations(where or group, than))

    def times_the_cost(self, group: Group, system: System, of: System) -> MeanEstimate:
        """How many times as much it costs, on the mean over seeds."""
        pairs = zip(self.costs(group, system), self.costs(group, of), strict=True)
        return estimate([cost / other for cost, other in pairs])

    def saved(self, group: Group, system: System, of: System) -> MeanEstimate:
        """Percent of another system's cost that this one does without, on the mean over seeds."""
        pairs = zip(self.costs(group, system), self.costs(group, of), strict=True)
        return estimate([100.0 * (1.0 - cost / other) for cost, other in pairs])


def show(value: MeanEstimate, *, digits: int = 1, sign: bool = False, before: str = "") -> str:
    """`12.4 ± 1.3`."""
    mean = f"{before}{value.mean:{'+' if sign else ''}.{digits}f}"
    return mean if value.half_width is None else f"{mean} ± {value.half_width:.{digits}f}"
