"""What a round of the `prompt-tuner` policy costs: dispatch and residency together, carried out by the manager's core.

Processor time of `Core.handle` for the timers of both rounds: what changed is taken in, who starts and what is warmed
is decided, and all that is done. 96 GPUs work through arrivals of three models in virtual time, so most rounds find
little to do, and some much. At 1,000 GPUs 10,000 jobs wait: `from scratch` is the first round of a policy that knows
nothing yet; then one job comes, or one ends and others start, and that round is measured. The cases are in
`scheduling_rounds_side`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

from benchmarks.table import Bar, Line, Table

NAME, TITLE = "scheduling_rounds", "rounds of the scheduler for jobs with deadlines (prompt-tuner)"
REPEATS = 5


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    """Every case as often as its bar asks for, each in a fresh process."""
    times = 1 if quick else REPEATS
    lines = []
    for case, what in (("steady", "96 GPUs, three models: rounds, mean"),):
        runs = [_run(case, say, quick=quick) for _ in range(times)]
        cells = {"ms": [one["mean_ms"] for one in runs], "longest, ms": [one["longest_ms"] for one in runs]}
        lines.append(
            Line(what=what, cells={"longest, ms": cells["longest, ms"], "ms": cells["ms"]}, bar=_bar(2, times))
        )
    for case, what in (("warm", "all of them busy"), ("mixed", "a tenth of them cold")):
        runs = [_run(case, say, quick=quick) for _ in range(times)]
        title = f"1,000 GPUs, 10,000 jobs wait, {what}"
        lines += [
            Line(what=f"{title}: from scratch", cells={"ms": [one["scratch_ms"] for one in runs]}, bar=_bar(50, times)),
            Line(what="  one job has come", cells={"ms": [one["comes_ms"] for one in runs]}, bar=_bar(2, times)),
            Line(what="  one job has ended", cells={"ms": [one["ends_ms"] for one in runs]}, bar=_bar(2, times)),
        ]
    return Table(name=NAME, title=TITLE, lines=lines)


def _bar(most_ms: float, times: int) -> Bar:
    return Bar(at_most=most_ms, repeats=times)


def _run(case: str, say: Callable[[str], None], *, quick: bool) -> dict[str, float]:
    asked = [sys.executable, "-m", "benchmarks.scheduling_rounds_side", case, *(["--quick"] if quick else [])]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"{case} failed ({done.returncode})\n{done.stderr[-4000:]}")
    found: dict[str, float] = json.loads(done.stdout)
    say(f"{case}: " + ", ".join(f"{name} {value:.3g}" for name, value in found.items()))
    return found
