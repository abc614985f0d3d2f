"""No-op calls: Stoker's python_app against TaskVine's FunctionCall, 2 slots each, in turn, each in a fresh process.

TaskVine in both ways in which it runs functions: `direct` (in the library's process, as Stoker does) and `fork` (its
default, a fork a call). Each in the shape in which it was the faster: for direct two workers of one core, for fork one
worker of two cores whose library has two slots. It needs `ndcctools`, which conda-forge has and PyPI has not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.paired import ratios, run_side, take_turns
from benchmarks.table import Bar, Line, Table
from benchmarks.taskvine_side import why_not

NAME, TITLE = "taskvine", "no-op calls against TaskVine's FunctionCall"
OURS, THEIRS = "benchmarks.noop_side", "benchmarks.taskvine_side"
SHAPES = {"direct": ("--workers", "2", "--slots", "1"), "fork": ("--workers", "1", "--slots", "2")}


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    """One pair per mode and repeat."""
    if reason := why_not():
        return Table(name=NAME, title=TITLE, skipped=reason)
    repeats, calls, theirs_calls = (
        (1, 500, {"direct": 200, "fork": 50}) if quick else (5, 10_000, {"direct": 4000, "fork": 1000})
    )
    sequential = 20 if quick else 300
    found: dict[str, list[float]] = {name: [] for name in ("app", "seq", "direct", "direct_seq", "fork", "fork_seq")}

    def ours() -> dict[str, float]:
        rate = run_side(OURS, "--executor", "stoker", "--how", "app", "--calls", str(calls))["calls_per_s"]
        one = run_side(OURS, "--executor", "stoker", "--how", "sequential", "--calls", str(calls))
        return {"app": rate, "seq": one["p50_ms"]}

    def theirs(mode: str) -> dict[str, float]:
        size = ("--calls", str(theirs_calls[mode]), "--sequential", str(sequential))
        one = run_side(THEIRS, "--mode", mode, *SHAPES[mode], *size)
        return {mode: one["calls_per_s"], f"{mode}_seq": one["p50_ms"]}

    for repeat in range(repeats):
        sides = {"ours": ours, "direct": partial(theirs, "direct"), "fork": partial(theirs, "fork")}
        for side in take_turns(repeat, sides).values():
            for name, number in side.items():
                found[name].append(number)
        latest = ", ".join(f"{name} {numbers[-1]:,.2f}" for name, numbers in found.items())
        say(f"pair {repeat + 1} of {repeats}: {latest}")
    lines = [
        Line(
            what=f"calls/s, TaskVine {mode}",
            cells={
                "Stoker": found["app"],
                "TaskVine": found[mode],
                "Stoker / TaskVine": ratios(found["app"], found[mode]),
            },
            bar=Bar(at_least=10, repeats=3) if mode == "direct" else None,
            last_digits=1,
        )
        for mode in ("direct", "fork")
    ]
    lines += [
        Line(
            what=f"one call after another, p50 in ms, TaskVine {mode}",
            cells={
                "Stoker": found["seq"],
                "TaskVine": found[f"{mode}_seq"],
                "Stoker / TaskVine": ratios(found["seq"], found[f"{mode}_seq"]),
            },
            digits=2,
        )
        for mode in ("direct", "fork")
    ]
    return Table(name=NAME, title=TITLE, lines=lines)
