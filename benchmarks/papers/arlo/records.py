"""Results that were computed, in one file: a release computes each case once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from benchmarks.papers.arlo import settings
from benchmarks.papers.arlo.cases import Case, Result, run
from benchmarks.papers.arlo.measured import ENDS_S, Deployed, Measured, compare, measure_all
from benchmarks.papers.common import RELEASE, read_results, unknown
from stoker.whole_files import draft_of


class _Kept(msgspec.Struct):
    measured: Measured | None = None
    deployed: list[Deployed] = []
    runs: list[Result] = []


class Records:
    """The results of a file, by case. Raises ValueError for a file that holds none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        kept = read_results(path, _Kept) or _Kept()
        self.measured = kept.measured
        self.deployed = kept.deployed
        self._found = {result.case.name: result for result in kept.runs}

    @property
    def seconds(self) -> float:
        return sum(result.took_s for result in self._found.values())

    def all(self) -> list[Result]:
        return list(self._found.values())

    def get(self, case: Case) -> Result | None:
        return self._found.get(case.name)

    def bring(self, cases: Iterable[Case], *, tell: Callable[[str], None]) -> None:
        todo = unknown(cases, self.get)
        for number, case in enumerate(todo, 1):
            tell(f"{number} of {len(todo)}: {case.system}, {case.devices} GPUs, {case.workload.rate:,.0f} requests/s")
            self._found[case.name] = run(case)
            self._write()

    def measure(self, *, tell: Callable[[str], None]) -> None:
        if self.measured is None or self.measured.release != RELEASE:
            tell("Table 2 and Figure 9")
            self.measured = measure_all()
            self._write()

    def compare_deployed(self, *, tell: Callable[[str], None]) -> None:
        known = {(each.seed, each.rate) for each in self.deployed if each.release == RELEASE}
        for seed in settings.SEEDS:
            for rate in ENDS_S:
                if (seed, rate) not in known:
                    tell(f"a session under arlo, {rate:,.0f} requests/s, seed {seed}")
                    others = [each for each in self.deployed if (each.seed, each.rate) != (seed, rate)]
                    self.deployed = sorted([*others, compare(seed, rate)], key=lambda each: (each.rate, each.seed))
                    self._write()

    def drop_others(self, cases: Iterable[Case]) -> None:
        names = {case.name for case in cases}
        others = [name for name in self._found if name not in names]
        for name in others:
            del self._found[name]
        if others:
            self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        runs = b",\n".join(
            msgspec.json.encode(self._found[name], order="deterministic") for name in sorted(self._found)
        )
        measured = msgspec.json.encode(self.measured, order="deterministic")
        deployed = msgspec.json.encode(self.deployed, order="deterministic")
        with draft_of(self._path) as draft:
            draft.write_bytes(
                b'{"measured": ' + measured + b',\n"deployed": ' + deployed + b',\n"runs": [' + runs + b"]}\n"
            )
