"""Measure the milliseconds from `yield` in a library until the program receives the piece."""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import stoker
from benchmarks.harness import in_turns, percentile, run_side
from benchmarks.tables import Bar, Line, Table

SLOTS = 8
EVERY_S = 0.02
"""Seconds between pieces: 50 tokens a second."""
WARM_UP = 10


@stoker.context(slots=SLOTS + 1)
def library() -> str:
    return "loaded"


@stoker.app(context=library())
def pieces(context: str, count: int) -> Iterator[tuple[float, str]]:
    due = time.monotonic()
    for _ in range(count):
        due += EVERY_S
        time.sleep(max(0.0, due - time.monotonic()))
        yield time.monotonic(), context


@stoker.app(context=library())
def nothing(context: str, number: int) -> int:  # noqa: ARG001
    return number


def delays_ms(*, streams: int, calls: bool, count: int) -> list[float]:
    found: list[float] = []
    done = threading.Event()

    def read() -> None:
        mine = []
        for at, _ in stoker.stream(pieces, count + WARM_UP):
            mine.append((time.monotonic() - at) * 1000)
        found.extend(mine[WARM_UP:])

    def call() -> None:
        for _ in stoker.map(nothing, itertools.count(), window=4):
            if done.is_set():
                return

    assert nothing(1).result() == 1
    with ThreadPoolExecutor(streams + 1) as threads:
        beside = [threads.submit(call)] if calls else []
        wait([threads.submit(read) for _ in range(streams)])
        done.set()
        wait(beside)
    return sorted(found)


def side(pieces: int, streams: int = 1, calls: bool = False) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, stoker.load(run_dir=folder):
        found = delays_ms(streams=streams, calls=calls, count=pieces)
    return {f"p{percent}_ms": percentile(found, percent) for percent in (50, 99)}


CASES: dict[str, dict[str, Any]] = {
    "one stream": {}, f"{SLOTS} streams of one library": {"streams": SLOTS},
    "one stream, calls in another slot": {"calls": True},
}  # fmt: skip


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    pieces, repeats = (25, 1) if quick else (500, 5)
    cases = {case: partial(run_side, side, pieces=pieces, **options) for case, options in CASES.items()}
    lines = [
        Line(what=f"{case}, {name}, ms", cells={"ms": [run[f"{name}_ms"] for run in runs]}, bar=Bar(at_most=bar))
        for case, runs in in_turns(cases, repeats, say).items()
        for name, bar in (("p50", 2), ("p99", 5))
    ]
    return Table(lines=lines)
