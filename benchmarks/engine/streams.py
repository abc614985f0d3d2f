"""Measure the milliseconds from `yield` in a library until the program receives the piece.

`python -m benchmarks.engine.streams --streams N --calls N --pieces N` runs this side alone.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import stoker
from benchmarks.harness import in_turns, run_side, side_options
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


def side(*, streams: int, calls: bool, count: int) -> list[float]:
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
    beside = threading.Thread(target=call)
    if calls:
        beside.start()
    readers = [threading.Thread(target=read) for _ in range(streams)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    done.set()
    if calls:
        beside.join()
    return sorted(found)


def main() -> None:
    asked = side_options(__doc__, streams=1, calls=0, pieces=500)
    with tempfile.TemporaryDirectory() as folder, stoker.load(run_dir=folder):
        found = side(streams=asked.streams, calls=bool(asked.calls), count=asked.pieces)
    at = {f"p{percent}_ms": found[min(len(found) - 1, len(found) * percent // 100)] for percent in (50, 99)}
    print(json.dumps({**at, "pieces": len(found)}))


SIDE = "benchmarks.engine.streams"
NAME, TITLE = "streams", "from `yield` in a library until its program has the piece, 50 pieces a second and stream"
CASES = {
    "one stream": ("1", "0"),
    f"{SLOTS} streams of one library": (str(SLOTS), "0"),
    "one stream, calls in another slot": ("1", "1"),
}
P50_MS, P99_MS = 2, 5


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    pieces, repeats = (25, 1) if quick else (500, 5)
    sides = {
        case: partial(run_side, SIDE, "--streams", streams, "--calls", calls, "--pieces", str(pieces))
        for case, (streams, calls) in CASES.items()
    }
    found = in_turns(sides, repeats, say, lambda case, side: f"{case} {side['p50_ms']:.2f} and {side['p99_ms']:.2f} ms")
    lines = [
        Line(what=f"{case}, {name}, ms", cells={"ms": [side[f"{name}_ms"] for side in sides]}, bar=Bar(at_most=bar))
        for case, sides in found.items()
        for name, bar in (("p50", P50_MS), ("p99", P99_MS))
    ]
    return Table(name=NAME, title=TITLE, lines=lines)


if __name__ == "__main__":
    main()
