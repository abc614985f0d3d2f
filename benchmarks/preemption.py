"""Calls over pilots in the preemptible partition of a real Slurm, while every five seconds one of them is pushed aside.

*Goodput* is the time that calls take by themselves (their number times what one takes, here a fixed sleep) divided by
the pilot-seconds that there were: from each pilot's arrival to its end, summed, as the manager saw it, from the first
pilot to the last result. What a pilot spends on loading its context, on waiting for calls, on calls that it does
not finish and on ending counts as lost; the time in which a preempted job waits in the queue and starts again does not:
nobody could have worked in it.

The side fails unless every call has one result, and the right one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from benchmarks.paired import ROOT, run_side
from benchmarks.table import Bar, Line, Table

NAME, TITLE = "preemption", "calls on pilots of a real Slurm that are preempted one after the other"
SIDE = "benchmarks.preemption_side"
_LAB = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    """The same run, once or three times."""
    calls, repeats = (600, 1) if quick else (10_000, 3)
    runs: list[dict[str, Any]] = []
    for number in range(1, repeats + 1):
        found = run_side(SIDE, "--calls", str(calls), "--seed", str(number), environment=_LAB)
        if why := found.get("skipped"):
            return Table(name=NAME, title=TITLE, skipped=why)
        runs.append(found)
        say(f"run {number} of {repeats}: {', '.join(f'{name} {value:,.2f}' for name, value in found.items())}")
    cells = {
        "s": [run["seconds"] for run in runs],
        "preempted": [run["preempted"] for run in runs],
        "pilot-seconds": [run["pilot_s"] for run in runs],
        "goodput": [run["goodput"] for run in runs],
    }
    what = f"{calls:,} calls of {runs[0]['call_s']:g} s on 8 nodes, a pilot preempted every 5 s"
    return Table(name=NAME, title=TITLE, lines=[Line(what=what, cells=cells, bar=Bar(at_least=0.85))])
