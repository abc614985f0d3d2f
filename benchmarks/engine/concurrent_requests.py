"""Measure the overhead of Stoker per concurrent request to one library with 32 slots, without the function time.

A request waits 50 ms or returns at once. 32 requests run at a time.

    python -m benchmarks.engine.concurrent_requests --slots 32 --calls 100 1000 10000 --request-ms 50
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable
from functools import partial

import stoker
from benchmarks.harness import in_turns, ratios, run_side, side_options
from benchmarks.tables import Bar, Line, Table
from stoker.site import Pilot, Site

NAME, TITLE = "concurrent_requests", "requests at once into one library with 32 slots: ms in Stoker a request"
SIDE = "benchmarks.engine.concurrent_requests"


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    repeats, sizes = (1, (32, 64)) if quick else (5, (100, 1000, 10_000))
    found: dict[tuple[int, int], list[float]] = {}
    sides = {ms: partial(run_side, SIDE, "--request-ms", str(ms), "--calls", *map(str, sizes)) for ms in (50, 0)}
    for ms, several in in_turns(sides, repeats, say, lambda ms, one: f"{ms} ms: {one['own_ms']}").items():
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
    return Table(name=NAME, title=TITLE, lines=lines)


def main() -> None:
    asked = side_options(__doc__, slots=32, calls=[100, 1000, 10_000], request_ms=50.0)
    request_s: float = asked.request_ms / 1000

    @stoker.context(slots=asked.slots, memory="200 MB")
    def engine() -> float:
        return request_s

    @stoker.app(context=engine())
    def request(seconds: float, number: int) -> float:
        del number
        began = time.perf_counter()
        if seconds:
            time.sleep(seconds)
        return time.perf_counter() - began

    site = Site(pilot=Pilot(devices="cpu:1", max_blocks=1))
    own_ms = {}
    with (
        tempfile.TemporaryDirectory(prefix="concurrent-") as folder,
        stoker.load(site, run_dir=folder, strategy="none", initialize_logging=False),
    ):
        list(stoker.map(request, range(4 * asked.slots)))
        for calls in asked.calls:
            began = time.perf_counter()
            took = list(stoker.map(request, range(calls), window=calls))
            wall_s = time.perf_counter() - began
            rounds = math.ceil(calls / asked.slots) if request_s else calls
            own_ms[calls] = 1000 * (wall_s - rounds * sum(took) / calls) / calls
    print(json.dumps({"own_ms": own_ms}))


if __name__ == "__main__":
    main()
