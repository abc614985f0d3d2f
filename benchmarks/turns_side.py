"""Libraries on one device compute iterations of a fixed length; prints JSON: seconds in all, and what they computed.

python -m benchmarks.turns_side --libraries 2 --iterations 200 --step-ms 20

An iteration keeps a core busy until its length has passed, so what the whole takes beyond the iterations is what
handing turns on has cost.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

from stoker.manager.protocol.ids import DeviceId, LibraryId
from stoker.pilot.library.library_turns import LibraryTurns


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--libraries", type=int, default=2)
    ask.add_argument("--iterations", type=int, default=200, help="of each library")
    ask.add_argument("--step-ms", type=float, default=20.0)
    asked = ask.parse_args()
    here = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="turns-") as folder:
        ready = here.Barrier(asked.libraries + 1)
        board = str(Path(folder) / "turns")
        each = [
            here.Process(target=_library, args=(board, number + 1, asked.iterations, asked.step_ms / 1e3, ready))
            for number in range(asked.libraries)
        ]
        for process in each:
            process.start()
        ready.wait()
        began = time.perf_counter()
        for process in each:
            process.join()
        seconds = time.perf_counter() - began
    if any(process.exitcode for process in each):
        raise SystemExit("a library failed")
    print(json.dumps({"seconds": seconds, "computed_s": asked.libraries * asked.iterations * asked.step_ms / 1e3}))


def _library(board: str, number: int, iterations: int, step_s: float, ready: Barrier) -> None:
    turns = LibraryTurns(Path(board), LibraryId(number), [DeviceId("gpu:0")])
    turns.begin()
    turns.end()
    ready.wait()
    for _ in range(iterations):
        turns.begin(due_at=time.monotonic() + 1.0, step_s=step_s)
        until = time.perf_counter() + step_s
        while time.perf_counter() < until:
            pass
    turns.end()
    turns.close()


if __name__ == "__main__":
    main()
