"""Measure the overhead of turns on one device: iterations of 20 ms by one, two and eight libraries.

The overhead in % is the time that turns add to the iterations. A single library takes no lock. `bare`: two processes
pass the turn by a datagram. `idle us`: median idle time of the device between two iterations.
"""

from __future__ import annotations

import array
import contextlib
import multiprocessing
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.harness import in_turns, run_side
from benchmarks.tables import Bar, Line, Table
from stoker.contexts.inference.adapter import summarize_work
from stoker.pilot.library.library_turns import LibraryTurns
from stoker.protocol.ids import DeviceId, LibraryId

STEP_S = 0.02
CASES = {
    "a lone library": (1, False), "two processes, by a bare datagram": (2, True), "2 libraries": (2, False),
    "8 libraries": (8, False),
}  # fmt: skip
"""Number of processes, and if they are bare."""


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    repeats, total = (1, 40) if quick else (5, 800)
    sides = {
        case: partial(run_side, side, libraries=count, iterations=total // count, bare=bare)
        for case, (count, bare) in CASES.items()
    }
    lines = []
    for case, several in in_turns(sides, repeats, say).items():
        cells = {"idle us": [one["gap_us"] for one in several], "%": [one["overhead_percent"] for one in several]}
        lines.append(Line(what=case, cells=cells, bar=Bar(at_most=2.0) if "libraries" in case else None))
    return Table(lines=lines)


def side(libraries: int, iterations: int, bare: bool) -> dict[str, float]:
    here = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="turns-") as folder:
        ready = here.Barrier(libraries + 1)
        run = _run_without_turns if bare else _library
        arguments = (folder, libraries, iterations, ready)
        each = [here.Process(target=run, args=(number, *arguments)) for number in range(libraries)]
        for process in each:
            process.start()
        ready.wait()
        began = time.perf_counter()
        for process in each:
            process.join()
        seconds = time.perf_counter() - began
        if any(process.exitcode for process in each):
            raise SystemExit("a library failed")
        gaps = _gaps([Path(folder, f"spans-{number}") for number in range(libraries)])
    overhead_percent = 100 * (seconds / (libraries * iterations * STEP_S) - 1)
    return {"overhead_percent": overhead_percent, "gap_us": 1e6 * statistics.median(gaps)}


def _gaps(files: list[Path]) -> list[float]:
    spans = list[tuple[float, float]]()
    for file in files:
        numbers = array.array("d", file.read_bytes())
        spans += zip(numbers[::2], numbers[1::2], strict=True)
    return [after[0] - before[1] for before, after in pairwise(sorted(spans))]


def _library(number: int, folder: str, _: int, iterations: int, ready: Barrier) -> None:
    turns = LibraryTurns(Path(folder, "turns"), LibraryId(number + 1), [DeviceId("gpu:0")])
    turns.begin()
    turns.end()
    ready.wait()
    due_at = time.monotonic() + 100.0
    requests: list[Any] = [
        SimpleNamespace(made=made, prompt_tokens=200, first_due_at=due_at, tpot_s=0.25, most=500) for made in range(8)
    ]

    def begin() -> None:
        now = time.monotonic()
        turns.publish(summarize_work(requests, now=now, accepted_requests=8, mean_output=50.0))
        turns.begin(due_at=now + 1.0, step_s=STEP_S)

    _compute(folder, number, iterations, begin)
    turns.end()
    turns.close()


def _run_without_turns(number: int, folder: str, libraries: int, iterations: int, ready: Barrier) -> None:
    waker = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    waker.bind(str(Path(folder, f"waker-{number}")))
    following = str(Path(folder, f"waker-{(number + 1) % libraries}"))
    ready.wait()
    if not number:
        waker.sendto(b"", str(Path(folder, "waker-0")))

    def wake() -> None:
        with contextlib.suppress(OSError):  # The other process has ended.
            waker.sendto(b"", following)

    _compute(folder, number, iterations, begin=lambda: waker.recv(1), end=wake)


def _compute(
    folder: str, number: int, iterations: int, begin: Callable[[], object], end: Callable[[], object] = lambda: None
) -> None:
    spans = array.array("d")
    for _ in range(iterations):
        begin()
        began = time.monotonic()
        while (now := time.monotonic()) < began + STEP_S:
            pass
        spans.extend((began, now))
        end()
    Path(folder, f"spans-{number}").write_bytes(spans)
