"""What was asked of the reproduction, and whether it holds: each bar with each set, by its interval over seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from benchmarks.papers.prompt_tuner import paper, readings
from benchmarks.papers.prompt_tuner.cases import HEAVY, HIGH, INFLESS, MAIN, MEDIUM, NOBODY, System
from benchmarks.papers.prompt_tuner.readings import Chosen, Condition, Reading
from benchmarks.papers.prompt_tuner.summary import Evaluation, Spread
from stoker.manager.study.statistics import MeanEstimate, estimate

FEWER_POINTS = {Reading.HOLD: 10.0, Reading.AT_ONCE: 10.0, Reading.RESIZES: 30.0, Reading.FIXED: 30.0}
TIMES_THE_COST = {Reading.HOLD: 1.2, Reading.AT_ONCE: 1.2, Reading.RESIZES: 1.8, Reading.FIXED: 1.8}
ROUND_S = 0.002


class Bar(msgspec.Struct, frozen=True):
    """One of them: at least (or, where it is `below`, less than) so much of something, under each set."""

    what: str
    wanted: float
    found: tuple[MeanEstimate, ...]
    digits: int = 1
    below: bool = False
    paper: str = ""
    """What the paper has, where it has a number."""

    def holds(self, one: MeanEstimate) -> bool:
        """By the interval: all of it is where it is wanted."""
        return one.high < self.wanted if self.below else one.low >= self.wanted

    def holds_by_mean(self, one: MeanEstimate) -> bool:
        """By the mean alone."""
        return one.mean < self.wanted if self.below else one.mean >= self.wanted

    @property
    def verdict(self) -> str:
        """Of the central set."""
        one = self.found[0]
        return "yes" if self.holds(one) else "by the mean" if self.holds_by_mean(one) else "**no**"

    @property
    def spread(self) -> Spread:
        """Over all sets."""
        return Spread(self.found[0], tuple(one.mean for one in self.found))

    @property
    def sets(self) -> int:
        """In how many it holds."""
        return sum(map(self.holds, self.found))


def against_baselines(sets: Sequence[Evaluation], chosen: Chosen, condition: Condition) -> Iterator[Bar]:
    """Violations and cost against each reading of each baseline, at medium and high load."""
    for reading in Reading:
        ours, theirs = readings.ours(condition), readings.baseline(chosen, reading, condition)
        for group in (MEDIUM, HIGH):
            fewer = tuple(each.more_violations(group, theirs, ours) for each in sets)
            said = "{:g} to {:g}".format(*paper.FEWER_POINTS[readings.POLICIES[reading]])
            what = f"points that fewer jobs are late than under {reading.value}, {group.load} load"
            yield Bar(what, FEWER_POINTS[reading], fewer, paper=said)
        for group in (MEDIUM, HIGH):
            times = tuple(each.times_the_cost(group, theirs, ours) for each in sets)
            has = readings.POLICIES[reading] == INFLESS and group == MEDIUM
            said = f"{1.0 / (1.0 - paper.SAVED[MEDIUM.emergence] / 100.0):.2f}" if has else ""
            what = f"times our cost that is paid under {reading.value}, {group.load} load"
            yield Bar(what, TIMES_THE_COST[reading], times, 2, paper=said)


class Part(msgspec.Struct, frozen=True):
    """What ours is without a part: the paper's points more and times the cost, as far as it has them."""

    what: str
    system: System
    points: str
    times: str
    dearer: bool = True
    """Whether the paper has it dearer; else cheaper."""


def parts() -> list[Part]:
    """The ablations, with the signs that the paper has."""
    whole, found = paper.TABLE_8["whole"], []
    for name, system in readings.TABLE_8.items():
        if name != "whole":
            said = paper.TABLE_8[name]
            points, ratio = f"{said.violations - whole.violations:+.1f}", said.cost / whole.cost
            found.append(Part(readings.SHOWN[name], system, points, f"{ratio:.2f}", ratio > 1.0))
    low, high = paper.BANK_SAVED
    times = f"{1 / (1 - low / 100):.2f} to {1 / (1 - high / 100):.2f}"
    points = "{:+.0f} to {:+.0f}".format(*paper.BANK_FEWER_POINTS)
    found.append(Part("without the bank", readings.NO_PROMPTS, points, times))
    found.append(Part("without reusing runtimes", readings.NO_RUNTIMES, "more", "more, less than the bank's"))
    return found


def ablations(sets: Sequence[Evaluation]) -> Iterator[tuple[Part, Bar, Bar]]:
    """Both signs of each: violations rise; cost rises or falls, as the paper has it."""
    for part in parts():
        more = tuple(each.more_violations(MEDIUM, part.system, NOBODY) for each in sets)
        times = tuple(each.times_the_cost(MEDIUM, part.system, NOBODY) for each in sets)
        yield part, Bar(part.what, 1e-9, more), Bar(part.what, 1.0, times, 2, below=not part.dearer)


def worse_than(of: Evaluation, chosen: Chosen) -> list[str]:
    """Where ours has more violations than a baseline, and its interval does not reach none."""
    return [
        f"{group.name} ({reading.value})"
        for group in MAIN
        for reading in (Reading.HOLD, Reading.RESIZES)
        if of.more_violations(group, NOBODY, chosen[reading]).low > 0.0
    ]


def rounds(of: Evaluation) -> tuple[MeanEstimate, float]:
    """Milliseconds of a round at 96 GPUs that had something to look at, and the most."""
    large = of.results(HEAVY[-1], NOBODY)
    return estimate([1e3 * run.round_s for run in large]), 1e3 * max(run.round_most_s for run in large)


def held(bars: Sequence[Bar]) -> int:
    """How many hold with the central set."""
    return sum(bar.holds(bar.found[0]) for bar in bars)
