"""This checkout against another one, an earlier commit for example: the same sides, in turn, by both interpreters.

    git worktree add ../before COMMIT && make -C ../before install
    python -m benchmarks.before ../before [noop core_events restart ...] [--pairs 4]

Pairs are taken in the order A B B A, so neither side always has the warmer machine. Each line is what this checkout
does better than the other: a ratio of rates, or the inverse ratio of times, so at least 0.95 means "not worse".
`--json FILE` keeps every number with the machine, the load and both commits.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.harness import ROOT, commit, machine, spread

BAR = 0.95
LIMIT_S = 900.0


class Case(msgspec.Struct, frozen=True):
    """One figure: the side that gives it, and whether more of it is better."""

    arguments: tuple[str, ...]
    figure: Callable[[dict[str, Any]], float]
    unit: str
    more_is_better: bool = True
    own_side: bool = False
    """Whether both checkouts run this checkout's side, because earlier ones have none: with their own Stoker."""


def _rate(found: dict[str, Any]) -> float:
    return float(found["calls_per_s"])


def _events(queued: str) -> Callable[[dict[str, Any]], float]:
    return lambda found: statistics.median(found["events_per_second"][queued])


_NOOP = ("benchmarks.engine.noop", "--executor", "stoker", "--how")
_EVENTS = ("benchmarks.engine.core_events", "--json", "--repeats", "3", "--queued")
CASES = {
    "noop": Case((*_NOOP, "app", "--calls", "10000"), _rate, "calls/s"),
    "map": Case((*_NOOP, "map", "--calls", "100000"), _rate, "calls/s"),
    "sequential": Case((*_NOOP, "sequential"), lambda found: found["p50_ms"], "ms", more_is_better=False),
    "core_events": Case((*_EVENTS, "1000"), _events("1000"), "events/s"),
    "core_events_100000": Case((*_EVENTS, "100000"), _events("100000"), "events/s"),
    "simulator": Case(
        ("benchmarks.scale.simulator", "steady"), lambda found: found["events"] / found["spent_s"], "events/s"
    ),
    "restart": Case(("benchmarks.reliability.recovery", "restart"), lambda found: found["at_work_s"], "s", False),
    "lost_pilot": Case(("benchmarks.reliability.lost_pilot", "killed"), lambda found: found["seconds"], "s", False),
    "many_pilots": Case(("benchmarks.reliability.recovery", "rate", "--pilots", "2000"), _rate, "calls/s"),
    "cold_load": Case(("benchmarks.engine.loads", "cold"), lambda found: found["seconds"], "s", False, own_side=True),
    "eviction": Case(("benchmarks.engine.loads", "evict"), lambda found: found["seconds"], "s", False, own_side=True),
    "facts": Case(("benchmarks.engine.loads", "demo"), lambda found: found["seconds"], "s", False, own_side=True),
    "one_pilot": Case(("benchmarks.reliability.recovery", "rate", "--pilots", "1"), _rate, "calls/s"),
}


def side(checkout: Path, case: Case) -> float:
    python = checkout / ".venv" / "bin" / "python"
    module, *arguments = case.arguments
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT if case.own_side else checkout),
        "PATH": f"{python.parent}:{os.environ.get('PATH', '')}",
    }
    with tempfile.TemporaryDirectory(prefix="before-") as own:
        environment["STOKER_HOME"] = own
        done = subprocess.run(
            [str(python), "-m", module, *arguments], capture_output=True, text=True, timeout=LIMIT_S, cwd=own,
            env=environment,
        )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise RuntimeError(
            f"{' '.join(case.arguments)} in {checkout} failed\n{done.stdout[-1000:]}{done.stderr[-3000:]}"
        )
    found = json.loads(lines[-1])
    if "verdicts" in found:  # both checkouts are to give the same
        print(f"  verdicts of {checkout.name}: {found['verdicts']}", file=sys.stderr)
    return case.figure(found)


def compare(here: Path, other: Path, case: Case, *, pairs: int, say: Callable[[str], None]) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {"here": [], "other": [], "better": []}
    for pair in range(pairs):
        order = (("here", here), ("other", other))
        for name, checkout in order if pair % 2 == 0 else reversed(order):
            figures[name].append(side(checkout, case))
        ours, theirs = figures["here"][-1], figures["other"][-1]
        figures["better"].append(ours / theirs if case.more_is_better else theirs / ours)
        say(f"pair {pair + 1} of {pairs}: {ours:,.2f} and {theirs:,.2f} {case.unit}, load {os.getloadavg()[0]:.1f}")
    return figures


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("other", type=Path, help="another checkout, with its own .venv")
    ask.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all if none is named")
    ask.add_argument("--pairs", type=int, default=4)
    ask.add_argument("--json", type=Path)
    asked = ask.parse_args()
    unknown = [name for name in asked.cases if name not in CASES]
    if unknown:
        ask.error(f"unknown: {', '.join(unknown)}; one of {', '.join(CASES)}")
    other = asked.other.resolve()
    record: dict[str, Any] = {"machine": machine(), "at": time.strftime("%Y-%m-%d %H:%M"), "pairs": asked.pairs}
    record |= {"here": commit(ROOT), "other": commit(other), "cases": {}}
    missed = []
    for name in asked.cases or CASES:
        figures = compare(
            ROOT, other, CASES[name], pairs=asked.pairs,
            say=lambda line: print(f"  {line}", file=sys.stderr, flush=True),
        )  # fmt: skip
        record["cases"][name] = figures
        median = statistics.median(figures["better"])
        digits = 0 if statistics.median(figures["here"]) > 100 else 2
        print(
            f"{name:<20} here {spread(figures['here'], digits=digits)}  other {spread(figures['other'], digits=digits)}"
            f" {CASES[name].unit}  better {spread(figures['better'], digits=2)}"
            f"  {'ok' if median >= BAR else f'under {BAR}'}",
            flush=True,
        )
        missed += [name] if median < BAR else []
        if asked.json is not None:
            asked.json.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
