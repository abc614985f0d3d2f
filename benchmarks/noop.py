"""No-op calls on a hot context: Stoker against Parsl's HighThroughputExecutor, 2 slots each, in turn, fresh processes.

Both have `initialize_logging=False`, except where the line says otherwise: the records that Parsl's own log writes
about each task cap any executor.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.paired import ratios, run_side
from benchmarks.table import Bar, Line, Table

NAME, TITLE = "noop", "no-op calls on a hot context against Parsl's HighThroughputExecutor (HTEX)"
SIDE = "benchmarks.noop_side"


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    """All sides once per repeat."""
    pairs, calls = (1, 300) if quick else (5, 10_000)
    found: dict[str, list[float]] = {name: [] for name in ("app", "htex", "map", "seq", "htex_seq", "log", "htex_log")}
    for pair in range(pairs):
        found["app"].append(_rate("stoker", "app", calls))
        found["htex"].append(_rate("htex", "app", calls))
        found["map"].append(_rate("stoker", "map", 10 * calls))
        for name, executor in (("seq", "stoker"), ("htex_seq", "htex")):
            one = run_side(SIDE, "--executor", executor, "--how", "sequential", "--calls", str(calls))
            found[name].append(one["p50_ms"])
        found["log"].append(_rate("stoker", "app", calls, "--log"))
        found["htex_log"].append(_rate("htex", "app", calls, "--log"))
        latest = ", ".join(f"{name} {numbers[-1]:,.2f}" for name, numbers in found.items())
        say(f"pair {pair + 1} of {pairs}: {latest}")
    lines = []
    for what, ours, theirs, digits, bar in (
        ("python_app, calls/s", "app", "htex", 0, Bar(at_least=4)),
        ("stoker.map with batch_size=1, calls/s, against HTEX's python_app", "map", "htex", 0, Bar(at_least=25)),
        ("python_app, one after another, p50 in ms", "seq", "htex_seq", 2, Bar(at_most=0.6)),
        ("python_app with Parsl's default logging, calls/s", "log", "htex_log", 0, None),
    ):
        cells = {
            "Stoker": found[ours],
            "HTEX": found[theirs],
            "Stoker / HTEX": ratios(found[ours], found[theirs]),
        }
        lines.append(Line(what=what, cells=cells, bar=bar, digits=digits))
    return Table(name=NAME, title=TITLE, lines=lines)


def _rate(executor: str, how: str, calls: int, *more: str) -> float:
    found = run_side(SIDE, "--executor", executor, "--how", how, "--calls", str(calls), *more)
    return float(found["calls_per_s"])
