"""Measure the overhead of Stoker per concurrent request to one library with 32 slots, without the function time.

A request waits 50 ms or returns at once. 32 requests run at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import stoker
from benchmarks.harness import in_turns, ratios, run_side
from benchmarks.starting import local_session
from benchmarks.tables import Bar, Line, Table

SLOTS = 32


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    repeats, sizes = (1, (32, 64)) if quick else (5, (100, 1000, 10_000))
    found: dict[tuple[int, int], list[float]] = {}
    sides = {ms: partial(run_side, side, request_ms=ms, calls=sizes) for ms in (50, 0)}
    for ms, several in in_turns(sides, repeats, say).items():
        for size in sizes:
            found[ms, size] = [one["own_ms"][str(size)] for one in several]
    lines = [
        Line(
            what=f"{size:,} requests that {f'wait for {ms} ms' if ms else 'do nothing'}", cells={"ms": numbers},
            bar=Bar(at_most=1.0), last_digits=3,
        )
        for (ms, size), numbers in found.items()
    ]  # fmt: skip
    least, most = sizes[1], sizes[-1]
    for ms in (50, 0):
        cells = {"ratio": ratios(found[ms, most], found[ms, least])}
        what = f"flat ({ms} ms): {most:,} against {least:,} requests"
        lines.append(Line(what=what, cells=cells, bar=Bar(at_most=1.2), digits=2))
    return Table(lines=lines)


def side(calls: list[int], request_ms: float) -> dict[str, dict[int, float]]:
    request_s = request_ms / 1000

    @stoker.context(slots=SLOTS, memory="200 MB")
    def engine() -> float:
        return request_s

    @stoker.app(context=engine())
    def request(seconds: float, number: int) -> float:
        del number
        began = time.perf_counter()
        if seconds:
            time.sleep(seconds)
        return time.perf_counter() - began

    own_ms = {}
    with local_session():
        list(stoker.map(request, range(4 * SLOTS)))
        for count in calls:
            began = time.perf_counter()
            took = list(stoker.map(request, range(count), window=count))
            wall_s = time.perf_counter() - began
            rounds = math.ceil(count / SLOTS) if request_s else count
            own_ms[count] = 1000 * (wall_s - rounds * sum(took) / count) / count
    return {"own_ms": own_ms}
