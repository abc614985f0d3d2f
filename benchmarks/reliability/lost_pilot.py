"""Kill or freeze one of two pilots during a call; print the seconds until the call runs on the other pilot.

python -m benchmarks.reliability.lost_pilot killed
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Literal

import psutil

import stoker
from benchmarks.harness import until
from benchmarks.starting import local_session, print_side

LIMIT_S = 120.0


@stoker.context(memory="100 MB")
def model() -> int:
    return 1


@stoker.app(context=model())
def run_briefly(_one: int, _number: int) -> int:
    time.sleep(0.2)
    return os.getpid()


@stoker.app(context=model())
def run_until_killed(_one: int, path: str) -> None:
    with open(path, "a") as file:
        file.write(f"{time.time()} {os.getpid()}\n")
    time.sleep(LIMIT_S)


def side(how: Literal["killed", "frozen"]) -> dict[str, float]:
    frozen: list[psutil.Process] = []
    with local_session(init_blocks=2, max_blocks=2) as session:
        path = Path(session.folder, "starts")
        try:
            until(lambda: len(set(stoker.map(run_briefly, range(20)))) == 2, LIMIT_S, "the context on two pilots")
            run_until_killed(str(path))
            _, pid = _line(path, 0)
            pilot = next(each for each in psutil.Process(pid).parents() if "stoker.pilot.main" in each.cmdline())
            frozen = [pilot, *pilot.children(recursive=True)] if how == "frozen" else []
            lost_at = time.time()
            for process in frozen or [pilot]:
                process.send_signal(signal.SIGSTOP if frozen else signal.SIGKILL)
            again_at, _ = _line(path, 1)
        finally:
            for process in frozen:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
    return {"seconds": again_at - lost_at}


def _line(path: Path, number: int) -> tuple[float, int]:
    def lines() -> list[str]:
        return path.read_text().splitlines()[number:] if path.exists() else []

    at, pid = until(lines, LIMIT_S, f"beginning {number + 1} of the call")[0].split()
    return float(at), int(pid)


if __name__ == "__main__":
    print_side(side, __doc__)
