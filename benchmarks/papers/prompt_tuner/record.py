"""The record of the page: every run's numbers, and means with 95 % intervals over seeds and sets.

Systems are compared on runs of equal seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from benchmarks.harness import Facts
from benchmarks.papers.common import write_parts
from benchmarks.papers.prompt_tuner.grid import Choice, Grid, read_grid
from benchmarks.papers.prompt_tuner.jobs import Parameters
from benchmarks.papers.prompt_tuner.scenarios import MEDIUM, NOBODY, STATIC, Group, Reading, System
from benchmarks.papers.prompt_tuner.searching import Search, Searched
from benchmarks.papers.prompt_tuner.simulate import Result
from stoker.manager.study.statistics import MeanEstimate, difference, estimate


class KeptRun(msgspec.Struct, frozen=True, array_like=True):
    """One run. `violations` in percent, `paid_s` in device-seconds. Shares of a job's latency spent waiting, and
    waiting for starts (None: not measured).
    """

    places: tuple[int, ...]
    group: str
    system: str
    seed: int
    violations: float
    paid_s: float
    allocated: float
    wait_share: float
    wait_most: float
    round_s: float
    round_most_s: float
    start_share: float | None = None
    start_most: float | None = None

    @classmethod
    def of(cls, choice: Choice, group: Group, system: System, seed: int, result: Result) -> KeptRun:
        paid_s = result.all_s if system.policy in STATIC else result.held_s
        return cls(
            choice.places, group.name, str(system), seed, round(result.violations, 3), round(paid_s, 1),
            round(result.utilisation, 4), round(result.wait_share, 4), round(result.wait_most, 4),
            float(f"{result.round_s:.3g}"), float(f"{result.round_most_s:.3g}"),
            round(result.start_share, 4), round(result.start_most, 4),
        )  # fmt: skip

    @property
    def name(self) -> tuple[tuple[int, ...], str, str, int]:
        return self.places, self.group, self.system, self.seed

    @property
    def came_to(self) -> tuple[float, float]:
        return self.violations, self.paid_s


class Record(msgspec.Struct, frozen=True):
    """`sets`: most central first. `chosen`: each reading's best setting. `seeds`, `few`: of the central set and of
    other sets. `again`: a later run of one baseline.
    """

    facts: Facts
    searched: Searched
    sets: tuple[Choice, ...]
    searches: tuple[Search, ...]
    chosen: Mapping[Reading, System]
    seeds: tuple[int, ...]
    few: tuple[int, ...]
    runs: tuple[KeptRun, ...]
    again: Facts | None = None


def keep(path: Path, record: Record) -> None:
    parts = msgspec.to_builtins(record)
    runs = parts.pop("runs")
    write_parts(path, {**parts, "runs": runs})


def read(path: Path) -> Record:
    return msgspec.json.decode(path.read_bytes(), type=Record)


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
    """The central set's mean with its interval, and the means of all sets."""

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


TEXT = (Reading.HOLD, Reading.RESIZES)
"""The readings closest to the text."""


class Page:
    def __init__(self, record: Record) -> None:
        self.record = record
        self.grid: Grid = read_grid()
        self.sets = evaluations(record)
        self.central = self.sets[0]
        self.chosen = record.chosen

    def of_all(self, theirs: Reading) -> str:
        low, high = over(self.sets, lambda one: one.more_violations(MEDIUM, self.chosen[theirs], NOBODY)).range()
        return f"{low:.1f} to {high:.1f}"

    def one_set(self) -> str:
        late = [fmean(one.violations(MEDIUM, NOBODY)) for one in self.sets]
        told = ", ".join(f"{reading.value} {self.of_all(reading)}" for reading in TEXT)
        return f"""± is over the seeds of the most central set. Sets differ by more: at medium load and S = 1 the
            {len(self.sets)} have {min(late):.1f} to {max(late):.1f} % of ours late, and behind ours are, in points,
            {told}."""


def span(numbers: Sequence[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
