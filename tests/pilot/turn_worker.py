"""A library process for turn tests that logs start and end of each iteration: `python turn_worker.py BOARD LIBRARY
DEVICE,DEVICE OUT ITERATIONS STEP_S DUE_S`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from stoker.pilot.library.library_turns import LibraryTurns
from stoker.protocol.ids import DeviceId, LibraryId

FORECAST_S = 10.0
"""Announced seconds of an iteration: far more than a step takes on a busy machine, so that no worker is overdue."""


def main(board: str, library: str, devices: str, out: str, iterations: str, step_s: str, due_s: str) -> None:
    turns = LibraryTurns(Path(board), LibraryId(int(library)), [DeviceId(name) for name in devices.split(",")])
    with Path(out).open("a") as written:
        for _ in range(int(iterations)):
            turns.begin(due_at=time.monotonic() + float(due_s), step_s=FORECAST_S)
            began = time.monotonic()
            written.write(f"began {began}\n")
            written.flush()
            time.sleep(float(step_s))
            written.write(f"{library} {began} {time.monotonic()}\n")
            written.flush()
        turns.end()
    turns.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
