"""Compare this checkout with another checkout, for example an earlier commit: run the sides alternately.

    git worktree add ../before COMMIT && make -C ../before install
    python -m benchmarks.before ../before [restart many_pilots ...] [--pairs 4]

Each line is a ratio of rates, or the inverse ratio of times: at least 0.95 means "not worse". `lockstep` compares
what takes seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.harness import ROOT, commit, in_turns, machine, output_of, ratios, spread, verify_facts

BAR = 0.95
LIMIT_S = 900.0
_FACTS = "facts-side"


class Case(msgspec.Struct, frozen=True):
    """`own_side`: both checkouts run the side of this checkout."""

    arguments: tuple[str, ...]
    figure: Callable[[dict[str, Any]], float]
    unit: str
    more_is_better: bool = True
    own_side: bool = False


_RECOVERY = "benchmarks.reliability.recovery"
CASES = {
    "restart": Case((_RECOVERY, "restart"), lambda found: found["at_work_s"], "s", False),
    "lost_pilot": Case((_RECOVERY, "killed"), lambda found: found["seconds"], "s", False, own_side=True),
    "many_pilots": Case((_RECOVERY, "rate", "--pilots", "2000"), lambda found: found["calls_per_s"], "calls/s"),
    "one_pilot": Case((_RECOVERY, "rate", "--pilots", "1"), lambda found: found["calls_per_s"], "calls/s"),
    "facts": Case(("benchmarks.before", _FACTS), lambda found: found["seconds"], "s", False, own_side=True),
}


def environment_of(checkout: Path, modules: Path, home: str) -> tuple[str, dict[str, str]]:
    """Return interpreter and environment of a checkout, with `benchmarks` from `modules`."""
    python = checkout / ".venv" / "bin" / "python"
    path = f"{python.parent}:{os.environ.get('PATH', '')}"
    return str(python), {**os.environ, "PYTHONPATH": str(modules), "PATH": path, "STOKER_HOME": home}


def measure_side(checkout: Path, case: Case) -> float:
    with tempfile.TemporaryDirectory(prefix="before-") as own:
        python, environment = environment_of(checkout, ROOT if case.own_side else checkout, own)
        command = [python, "-m", *case.arguments]
        said = output_of(command, timeout_s=LIMIT_S, folder=own, environment=environment)
    found = json.loads(said.splitlines()[-1])
    if "verdicts" in found:  # Both checkouts must give equal verdicts.
        print(f"  verdicts of {checkout.name}: {found['verdicts']}", file=sys.stderr)
    return case.figure(found)


def verify_claims(count: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="facts-") as folder:
        seconds, found = verify_facts(Path(folder), "--limit", str(count), "--out", str(Path(folder) / "out"))
    return {"seconds": seconds, "claims": count, "verdicts": [prompt["confusion"] for prompt in found["prompts"]]}


def options(about: str | None, cases: Collection[str], **counts: int) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Parse the command line. Return the options and the start of the record."""
    ask = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("other", type=lambda path: Path(path).resolve(), help="another checkout, with its own .venv")
    ask.add_argument("cases", nargs="*", metavar="CASE", help=f"some of {', '.join(cases)} [all]")
    for name, count in counts.items():
        ask.add_argument(f"--{name}", type=int, default=count)
    ask.add_argument("--json", type=Path)
    asked = ask.parse_args()
    if unknown := [name for name in asked.cases if name not in cases]:
        ask.error(f"unknown: {', '.join(unknown)}; one of {', '.join(cases)}")
    asked.cases = asked.cases or list(cases)
    facts = {"machine": machine(), "at": time.strftime("%Y-%m-%d %H:%M")}
    commits = {"here": commit(), "other": commit(asked.other)}
    return asked, {**facts, **commits, **{name: getattr(asked, name) for name in counts}, "cases": {}}


def judge(name: str, better: list[float], bar: float, asked: argparse.Namespace, record: dict[str, Any]) -> bool:
    """Print the ratio of a case, and write the record. Return True if the bar is met."""
    is_met = statistics.median(better) >= bar
    print(f"{name:<20} better {spread(better, digits=2)}  {'ok' if is_met else f'under {bar}'}", flush=True)
    if asked.json is not None:
        asked.json.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    return is_met


def main() -> int:
    asked, record = options(__doc__, CASES, pairs=4)
    all_met, say = True, partial(print, " ", file=sys.stderr, flush=True)
    for name in asked.cases:
        case = CASES[name]
        sides = {"here": partial(measure_side, ROOT, case), "other": partial(measure_side, asked.other, case)}
        figures = in_turns(sides, asked.pairs, say, lambda side, one: f"{side} {one:,.2f}")
        ours, theirs = figures["here"], figures["other"]
        better = ratios(ours, theirs) if case.more_is_better else ratios(theirs, ours)
        record["cases"][name] = {**figures, "better": better}
        print(f"{name:<20} here {spread(ours, digits=2)}  other {spread(theirs, digits=2)} {case.unit}")
        all_met &= judge(name, better, BAR, asked, record)
    return int(not all_met)


if __name__ == "__main__":
    if sys.argv[1:] == [_FACTS]:
        print(json.dumps(verify_claims(900)))
    else:
        sys.exit(main())
