"""What the page is made from, in one file that is kept beside it: every run's numbers, with where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from benchmarks.harness import Facts
from benchmarks.papers.prompt_tuner.cases import STATIC, Group, System
from benchmarks.papers.prompt_tuner.grid import Choice
from benchmarks.papers.prompt_tuner.readings import Reading
from benchmarks.papers.prompt_tuner.search import Searched
from benchmarks.papers.prompt_tuner.simulate import Result
from benchmarks.papers.prompt_tuner.tuning import Search
from stoker.whole_files import draft_of


class KeptRun(msgspec.Struct, frozen=True, array_like=True):
    """One run: its set, group, system and seed, then percent of violations, dollars' worth of device-seconds
    (`paid_s`), the share of GPUs that were allocated, and what jobs waited before they began, as a share of their
    latency: the mean, the most; and seconds of a round that had something to look at: the mean, the most. Last, of the
    same latency, what a job waited while its libraries were started: the mean, the most (None: not measured)."""

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
    """The file. `sets`: those that were run, the most central first; `chosen`: each reading's best setting of those
    that were tried (`searches`); `seeds`: of the central set; `few`: of the others; `again`: where and
    when one baseline's settings and runs were done again (`everything.again`)."""

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
    runs = ",\n".join(msgspec.json.encode(run).decode() for run in parts.pop("runs"))
    lines = [f'"{name}": {msgspec.json.encode(part).decode()}' for name, part in parts.items()]
    with draft_of(path) as draft:
        draft.write_text("{\n" + ",\n".join([*lines, f'"runs": [\n{runs}]']) + "\n}\n")


def read(path: Path) -> Record:
    return msgspec.json.decode(path.read_bytes(), type=Record)
