"""Libraries on one device compute iterations of a fixed length; prints JSON: seconds in all, what they computed, and
how long the device was idle between two iterations (`gap_us`, the median, and `gaps_s`, all of them together). Each
library writes at each iteration what an engine with eight requests has to do, as engines do.

python -m benchmarks.turns_side --libraries 2 --iterations 200 --step-ms 20

An iteration keeps a core busy until its length has passed, so what the whole takes beyond the iterations is what
handing turns on has cost, and what the machine has taken from the iterations. With `--bare` the processes have no
board: each sends the next one a datagram when its iteration has ended, which is the least that a hand-over can cost.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import dataclasses
import json
import multiprocessing
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.synchronize import Barrier
from pathlib import Path

from stoker.contexts.device_turns import work_of
from stoker.pilot.library.library_turns import LibraryTurns
from stoker.protocol.ids import DeviceId, LibraryId


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--libraries", type=int, default=2)
    ask.add_argument("--iterations", type=int, default=200, help="of each library")
    ask.add_argument("--step-ms", type=float, default=20.0)
    ask.add_argument("--bare", action="store_true", help="hand on by a datagram alone")
    asked = ask.parse_args()
    here = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="turns-") as folder:
        ready = here.Barrier(asked.libraries + 1)
        run = _bare if asked.bare else _library
        numbers = range(asked.libraries)
        arguments = (folder, asked.libraries, asked.iterations, asked.step_ms / 1e3, ready)
        each = [here.Process(target=run, args=(number, *arguments)) for number in numbers]
        for process in each:
            process.start()
        ready.wait()
        began = time.perf_counter()
        for process in each:
            process.join()
        seconds = time.perf_counter() - began
        if any(process.exitcode for process in each):
            raise SystemExit("a library failed")
        gaps = _gaps([Path(folder, f"spans-{number}") for number in numbers])
    print(
        json.dumps(
            {
                "seconds": seconds,
                "computed_s": asked.libraries * asked.iterations * asked.step_ms / 1e3,
                "gap_us": 1e6 * statistics.median(gaps),
                "gaps_s": sum(gaps),
            }
        )
    )


def _gaps(files: list[Path]) -> list[float]:
    """Seconds between the end of each iteration and the beginning of the next one, of whichever process."""
    spans = list[tuple[float, float]]()
    for file in files:
        numbers = array.array("d", file.read_bytes())
        spans += zip(numbers[::2], numbers[1::2], strict=True)
    return [after[0] - before[1] for before, after in pairwise(sorted(spans))]


@dataclasses.dataclass
class _Request:
    """A request of an engine, as `device_turns.OpenRequest` says."""

    made: int
    prompt_tokens: int
    first_due_at: float
    tpot_s: float


def _library(number: int, folder: str, libraries: int, iterations: int, step_s: float, ready: Barrier) -> None:
    del libraries
    turns = LibraryTurns(Path(folder, "turns"), LibraryId(number + 1), [DeviceId("gpu:0")])
    turns.begin()
    turns.end()
    ready.wait()
    requests = [_Request(made, 200, time.monotonic() + 100.0, 0.25) for made in range(8)]

    def begin() -> None:
        now = time.monotonic()
        turns.publish(work_of(requests, now=now, taken_up=8, mean_output=50.0))
        turns.begin(due_at=now + 1.0, step_s=step_s)

    _compute(folder, number, iterations, step_s, begin)
    turns.end()
    turns.close()


def _bare(number: int, folder: str, libraries: int, iterations: int, step_s: float, ready: Barrier) -> None:
    waker = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    waker.bind(str(Path(folder, f"waker-{number}")))
    following = str(Path(folder, f"waker-{(number + 1) % libraries}"))
    ready.wait()
    if not number:
        waker.sendto(b"", str(Path(folder, "waker-0")))

    def wake() -> None:
        with contextlib.suppress(OSError):  # the last one: the other has ended
            waker.sendto(b"", following)

    _compute(folder, number, iterations, step_s, begin=lambda: waker.recv(1), end=wake)


def _compute(
    folder: str,
    number: int,
    iterations: int,
    step_s: float,
    begin: Callable[[], object],
    end: Callable[[], object] = lambda: None,
) -> None:
    """The iterations of one process; writes when each began and ended."""
    spans = array.array("d")
    for _ in range(iterations):
        begin()
        began = time.monotonic()
        until = began + step_s
        while (now := time.monotonic()) < until:
            pass
        spans.append(began)
        spans.append(now)
        end()
    Path(folder, f"spans-{number}").write_bytes(spans)


if __name__ == "__main__":
    main()
