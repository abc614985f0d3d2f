"""A session that streams: `python -m benchmarks.streams_side --streams N --calls N --pieces N`.

Each piece bears the time at which it was yielded. CLOCK_MONOTONIC is one for all processes of a machine, so the program
knows how long each was on its way. Prints the milliseconds at two percentiles.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import threading
import time
from collections.abc import Iterator

import stoker

SLOTS = 8
EVERY_S = 0.02
"""A piece of each stream: 50 tokens a second."""
WARM_UP = 10
"""Pieces of each stream that do not count."""


@stoker.context(slots=SLOTS + 1)
def library() -> str:
    """A context that costs nothing."""
    return "loaded"


@stoker.app(context=library())
def pieces(context: str, count: int) -> Iterator[tuple[float, str]]:
    """So many pieces, one every `EVERY_S`."""
    due = time.monotonic()
    for _ in range(count):
        due += EVERY_S
        time.sleep(max(0.0, due - time.monotonic()))
        yield time.monotonic(), context


@stoker.app(context=library())
def nothing(context: str, number: int) -> int:  # noqa: ARG001
    """A call that does nothing."""
    return number


def measure(*, streams: int, calls: bool, count: int) -> list[float]:
    """How long each piece was on its way, in milliseconds. With `calls`, calls run in another slot all the time."""
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
    """Measure once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--calls", type=int, default=0)
    parser.add_argument("--pieces", type=int, default=500)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, stoker.load(run_dir=folder):
        found = measure(streams=asked.streams, calls=bool(asked.calls), count=asked.pieces)
    at = {f"p{percent}_ms": found[min(len(found) - 1, len(found) * percent // 100)] for percent in (50, 99)}
    print(json.dumps({**at, "pieces": len(found)}))


if __name__ == "__main__":
    main()
