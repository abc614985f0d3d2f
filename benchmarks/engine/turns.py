"""Measure the overhead of turns on one device: iterations of 20 ms by one, two and eight libraries.

The overhead is the time in addition to the iterations, in %. A single library takes no lock. `--bare`: two processes
pass the turn by a datagram. `idle us`: median idle time of the device between two iterations.

    python -m benchmarks.engine.turns --libraries 2 --iterations 200 --step-ms 20
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
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

from benchmarks.harness import in_turns, run_side
from benchmarks.starting import print_side
from benchmarks.tables import Bar, Line, Table
from stoker.contexts.inference.adapter import work_of
from stoker.pilot.library.library_turns import LibraryTurns
from stoker.protocol.ids import DeviceId, LibraryId

NAME, TITLE = "turns", "libraries on one device take turns: time beside their iterations of 20 ms, in %"
SIDE = "benchmarks.engine.turns"
_CASES = {
    "a lone library": (1, ()), "two processes, by a bare datagram": (2, ("--bare",)), "2 libraries": (2, ()),
    "8 libraries": (8, ()),
}  # fmt: skip


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    repeats, total = (1, 40) if quick else (5, 800)
    sides = {
        case: partial(run_side, SIDE, "--libraries", str(count), "--iterations", str(total // count), *how)
        for case, (count, how) in _CASES.items()
    }
    found = in_turns(
        sides, repeats, say, lambda case, one: f"{case} {overhead_percent(one):.2f} % ({one['gap_us']:.0f} us)"
    )
    lines = []
    for case, several in found.items():
        cells = {"idle us": [one["gap_us"] for one in several], "%": [overhead_percent(one) for one in several]}
        lines.append(Line(what=case, cells=cells, bar=Bar(at_most=2.0) if "libraries" in case else None))
    return Table(name=NAME, title=TITLE, lines=lines)


def overhead_percent(run: dict[str, float]) -> float:
    return 100 * (run["seconds"] / run["computed_s"] - 1)


def side(libraries: int = 2, iterations: int = 200, step_ms: float = 20.0, bare: bool = False) -> dict[str, float]:
    here = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="turns-") as folder:
        ready = here.Barrier(libraries + 1)
        run = _run_without_turns if bare else _library
        arguments = (folder, libraries, iterations, step_ms / 1e3, ready)
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
    computed_s = libraries * iterations * step_ms / 1e3
    return {
        "seconds": seconds, "computed_s": computed_s, "gap_us": 1e6 * statistics.median(gaps), "gaps_s": sum(gaps),
    }  # fmt: skip


def _gaps(files: list[Path]) -> list[float]:
    spans = list[tuple[float, float]]()
    for file in files:
        numbers = array.array("d", file.read_bytes())
        spans += zip(numbers[::2], numbers[1::2], strict=True)
    return [after[0] - before[1] for before, after in pairwise(sorted(spans))]


@dataclasses.dataclass
class _Request:
    made: int
    prompt_tokens: int
    first_due_at: float
    tpot_s: float
    most: int


def _library(number: int, folder: str, _: int, iterations: int, step_s: float, ready: Barrier) -> None:
    turns = LibraryTurns(Path(folder, "turns"), LibraryId(number + 1), [DeviceId("gpu:0")])
    turns.begin()
    turns.end()
    ready.wait()
    requests = [_Request(made, 200, time.monotonic() + 100.0, 0.25, 500) for made in range(8)]

    def begin() -> None:
        now = time.monotonic()
        turns.publish(work_of(requests, now=now, accepted_requests=8, mean_output=50.0))
        turns.begin(due_at=now + 1.0, step_s=step_s)

    _compute(folder, number, iterations, step_s, begin)
    turns.end()
    turns.close()


def _run_without_turns(
    number: int, folder: str, libraries: int, iterations: int, step_s: float, ready: Barrier
) -> None:
    waker = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    waker.bind(str(Path(folder, f"waker-{number}")))
    following = str(Path(folder, f"waker-{(number + 1) % libraries}"))
    ready.wait()
    if not number:
        waker.sendto(b"", str(Path(folder, "waker-0")))

    def wake() -> None:
        with contextlib.suppress(OSError):  # The other process has ended.
            waker.sendto(b"", following)

    _compute(folder, number, iterations, step_s, begin=lambda: waker.recv(1), end=wake)


def _compute(
    folder: str, number: int, iterations: int, step_s: float, begin: Callable[[], object],
    end: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    spans = array.array("d")
    for _ in range(iterations):
        begin()
        began = time.monotonic()
        while (now := time.monotonic()) < began + step_s:
            pass
        spans.extend((began, now))
        end()
    Path(folder, f"spans-{number}").write_bytes(spans)


if __name__ == "__main__":
    print_side(side, __doc__)
