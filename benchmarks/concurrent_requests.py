"""Requests at once into one library with 32 slots: time in Stoker a request, beside the function's own.

A request waits for 50 ms, as one that an engine has in its batch, or does nothing. The time in Stoker is what the whole
takes beyond the requests themselves, which run 32 at a time, divided by their number. A new session for each repeat.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.paired import ratios, run_side
from benchmarks.table import Bar, Line, Table

NAME, TITLE = "concurrent_requests", "requests at once into one library with 32 slots: ms in Stoker a request"
SIDE = "benchmarks.concurrent_requests_side"


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    """Both kinds of requests once per repeat, each with all numbers of requests in one session."""
    repeats, sizes = (1, (32, 64)) if quick else (5, (100, 1000, 10_000))
    found: dict[tuple[int, int], list[float]] = {(ms, size): [] for ms in (50, 0) for size in sizes}
    for repeat in range(repeats):
        for request_ms in (50, 0):
            one = run_side(SIDE, "--request-ms", str(request_ms), "--calls", *map(str, sizes))
            for size in sizes:
                found[request_ms, size].append(one["own_ms"][str(size)])
        latest = ", ".join(f"{ms} ms x {size:,}: {numbers[-1]:.3f}" for (ms, size), numbers in found.items())
        say(f"repeat {repeat + 1} of {repeats}: {latest}")
    lines = [
        Line(
            what=f"{size:,} requests that {f'wait for {ms} ms' if ms else 'do nothing'}",
            cells={"ms": numbers},
            bar=Bar(at_most=1.0),
            last_digits=3,
        )
        for (ms, size), numbers in found.items()
    ]
    least, most = sizes[1], sizes[-1]
    for ms in (50, 0):
        cells = {"ratio": ratios(found[ms, most], found[ms, least])}
        what = f"flat ({ms} ms): {most:,} against {least:,} requests"
        lines.append(Line(what=what, cells=cells, bar=Bar(at_most=1.2), digits=2))
    return Table(name=NAME, title=TITLE, lines=lines)
