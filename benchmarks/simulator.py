"""How fast the simulator is: the deployed cores in virtual time, each case in a fresh process, processor time.

An event of the manager's core is what it is in `core_events`: a call that arrives or a call that ends; besides, all
else that it is told (pilots, libraries, blocks, timers). An event of a pilot's core is a call that comes to a library
or ends there. The bar is for both together; the line before it has the manager's alone. The cases are in
`simulator_side`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

from benchmarks.table import Bar, Line, Table

NAME, TITLE = "simulator", "the simulator: whole runs of the deployed cores in virtual time"
REPEATS = 5


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    """Every case as often as its bar asks for."""
    times = 1 if quick else REPEATS
    steady = _runs("steady", times, say, quick=quick)
    lines = [
        _line(
            "200 pilots, 100,000 calls of 1 s: the manager's core", steady, "events/s",
            lambda one: one["events"] / one["spent_s"],
        ),
        _line(
            "the same: all cores", steady, "events/s",
            lambda one: (one["events"] + one["pilot_events"]) / one["spent_s"],
            bar=Bar(at_least=40_000, repeats=times),
        ),
        _line(
            "150,000 inferences, pool of up to 186 GPUs", _runs("opportunistic", times, say, quick=quick), "s",
            lambda one: one["spent_s"], bar=Bar(at_most=30, repeats=times),
        ),
        _line(
            "1,000,000 calls, 2,000 pilots", _runs("million", 1, say, quick=quick), "peak, GB",
            lambda one: one["peak_gb"], bar=Bar(at_most=4, repeats=1),
        ),
        _line(
            "500,000 requests of 5 ms, counted", _runs("short", min(3, times), say, quick=quick), "millions a minute",
            lambda one: 60 * one["calls"] / one["spent_s"] / 1e6, bar=Bar(at_least=1, repeats=min(3, times)),
        ),
        _line(
            "20,000 requests to 64 language models, four a device", _runs("engines", min(3, times), say, quick=quick),
            "s a million steps",
            lambda one: one["spent_s"] / one["engine_steps"] * 1e6, bar=Bar(at_most=30, repeats=min(3, times)),
        ),
    ]  # fmt: skip
    return Table(name=NAME, title=TITLE, lines=lines)


def _runs(case: str, times: int, say: Callable[[str], None], *, quick: bool) -> list[dict[str, float]]:
    found = []
    for _ in range(times):
        asked = [sys.executable, "-m", "benchmarks.simulator_side", case, *(["--quick"] if quick else [])]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            raise RuntimeError(f"{case} failed ({done.returncode})\n{done.stderr[-4000:]}")
        found.append(json.loads(done.stdout))
        one = found[-1]
        say(
            f"{case}: {one['calls']:,.0f} calls in {one['spent_s']:.1f} s ({one['calls'] / one['spent_s']:,.0f}/s), "
            f"{one['virtual_s']:,.0f} s of virtual time, peak {one['peak_gb']:.2f} GB, {one['lost_pilots']} pilots lost"
        )
    return found


def _line(
    what: str,
    runs: list[dict[str, float]],
    unit: str,
    value: Callable[[dict[str, float]], float],
    *,
    bar: Bar | None = None,
) -> Line:
    cells = {"calls/s": [one["calls"] / one["spent_s"] for one in runs], unit: [value(one) for one in runs]}
    return Line(what=what, cells=cells, bar=bar)
