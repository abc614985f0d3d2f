"""Compare this checkout with another checkout in lockstep: one process per checkout, measuring alternately.

    git worktree add ../before COMMIT && make -C ../before install
    python -m benchmarks.lockstep ../before [core_events cold_load ...] [--rounds 20] [--repeats 5]

Each round measures both checkouts in random order. A repeat starts new processes and gives the median ratio of its
rounds. Above 1 this checkout is better; at least 0.95 means "not worse".
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import msgspec

from benchmarks.before import BAR, environment_of, options
from benchmarks.harness import ROOT, spread
from benchmarks.lockstep_side import CASES

BARS = {"simulator": 0.8}
"""Bars that differ from `BAR`. The simulator now simulates whole pilots."""


class Side:
    def __init__(self, checkout: Path, case: str, home: str) -> None:
        python, environment = environment_of(checkout, ROOT, home)
        command = [python, "-m", "benchmarks.lockstep_side", case]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=home, env=environment)
        self._read("ready")

    def figure(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(json.loads(self._read("")))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=120)

    def _read(self, expected: str) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line or (expected and line != expected):
            raise RuntimeError(f"{self._process.args!r} said {line!r} and ended with {self._process.wait(timeout=60)}")
        return line


def run_alternately(here: Path, other: Path, case: str, *, rounds: int, chance: random.Random) -> list[list[float]]:
    found = []
    with ExitStack() as stack:
        sides: dict[Path, Side] = {}
        for checkout in chance.sample([here, other], 2):
            home = stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-"))
            sides[checkout] = side = Side(checkout, case, home)
            stack.callback(side.close)
        for _ in range(rounds):
            taken = {checkout: sides[checkout].figure() for checkout in chance.sample([here, other], 2)}
            found.append([taken[here], taken[other]])
    return found


def main() -> int:
    asked, record = options(__doc__, CASES, rounds=20, repeats=5, seed=1)
    chance, missed = random.Random(asked.seed), False
    for name in asked.cases:
        repeats, loads = [], []
        for _ in range(asked.repeats):
            repeats.append(run_alternately(ROOT, asked.other, name, rounds=asked.rounds, chance=chance))
            loads.append(os.getloadavg()[0])
        better = [statistics.median(theirs / ours for ours, theirs in rounds) for rounds in repeats]
        record["cases"][name] = {"seconds": repeats, "better": better, "load": loads}
        bar, median = BARS.get(name, BAR), statistics.median(better)
        missed |= median < bar
        print(f"{name:<20} better {spread(better, digits=2)}  {'ok' if median >= bar else f'under {bar}'}", flush=True)
        if asked.json is not None:
            asked.json.write_bytes(msgspec.json.encode(record) + b"\n")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
