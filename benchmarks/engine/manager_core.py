"""The manager's core by itself: `core_events` and `memory_per_call`, each in a fresh process, with their bars."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from benchmarks.harness import run_side
from benchmarks.tables import Bar, Line, Table

EVENTS, EVENTS_TITLE = "core_events", "events a second of the pure core at 1,000 pilots"
MEMORY, MEMORY_TITLE = "memory_per_call", "the manager's memory for each queued call with 64 bytes of arguments"


def events(say: Callable[[str], None], *, quick: bool = False) -> Table:
    """By the number of queued calls; and how flat that is."""
    sizes, repeats = ((1000, 4000), 1) if quick else ((1000, 100_000, 1_000_000), 5)
    small = ("--pilots", "50", "--events", "20000") if quick else ()
    rates: dict[int, list[float]] = {size: [] for size in sizes}
    for repeat in range(repeats):
        for size in sizes:  # in turn, each in a fresh process: a machine that drifts does so for all
            found = run_side("benchmarks.engine.core_events", "--json", "--queued", str(size), "--repeats", "1", *small)
            rates[size] += found["events_per_second"][str(size)]
        say(
            f"{repeat + 1} of {repeats}: "
            + ", ".join(f"{size:,} queued {some[-1]:,.0f}" for size, some in rates.items())
        )
    lines = []
    for queued, numbers in rates.items():
        bar = Bar(at_least=200_000)
        lines.append(Line(what=f"{queued:,} queued", cells={"events/s": numbers}, bar=bar, last_digits=0))
    medians = [statistics.median(numbers) for numbers in rates.values()]
    lines.append(
        Line(
            what="the slowest of these against the fastest (medians)",
            cells={"slowest / fastest": [min(medians) / max(medians)]},
            bar=Bar(at_least=0.8, repeats=1),
        )
    )
    return Table(name=EVENTS, title=EVENTS_TITLE, lines=lines)


def memory(say: Callable[[str], None], *, quick: bool = False) -> Table:
    """Bytes a call, as the process grew."""
    calls, repeats = (5000, 1) if quick else (200_000, 3)
    found = [run_side("benchmarks.engine.memory_per_call", "--json", "--calls", str(calls)) for _ in range(repeats)]
    say(", ".join(f"{one['resident_bytes_per_call']:.0f} bytes" for one in found))
    cells = {
        "traced bytes": [one["traced_bytes_per_call"] for one in found],
        "resident bytes": [one["resident_bytes_per_call"] for one in found],
    }
    line = Line(what=f"{calls:,} queued", cells=cells, bar=Bar(at_most=1000), last_digits=0)
    return Table(name=MEMORY, title=MEMORY_TITLE, lines=[line])
