"""A library process for turn tests that logs start and end of each iteration: `python turn_worker.py BOARD LIBRARY
DEVICE,DEVICE OUT ITERATIONS STEP_S DUE_S SAYS_S`. SAYS_S: the forecast of an iteration in seconds.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from stoker.pilot.library.library_turns import LibraryTurns
from stoker.protocol.ids import DeviceId, LibraryId


def main(
    board: str, library: str, devices: str, out: str, iterations: str, step_s: str, due_s: str, says_s: str
) -> None:
    turns = LibraryTurns(Path(board), LibraryId(int(library)), [DeviceId(name) for name in devices.split(",")])
    with Path(out).open("a") as written:
        for _ in range(int(iterations)):
            turns.begin(due_at=time.monotonic() + float(due_s), step_s=float(says_s))
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
