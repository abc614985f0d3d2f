"""Kill or freeze one of two pilots during a call; print the seconds until the call runs on the other pilot.

python -m benchmarks.reliability.lost_pilot killed
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
from pathlib import Path

import psutil

import stoker
from benchmarks.harness import side_options, until
from stoker.site import Pilot, Site

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


def main() -> None:
    asked = side_options(__doc__, how=("killed", "frozen"))
    site = Site(pilot=Pilot(devices="cpu:1", init_blocks=2, max_blocks=2))
    with tempfile.TemporaryDirectory(prefix="lost-") as folder:
        path = Path(folder) / "starts"
        session = stoker.load(site, run_dir=folder, strategy="none")
        frozen: list[psutil.Process] = []
        try:
            until(lambda: len(set(stoker.map(run_briefly, range(20)))) == 2, LIMIT_S, "the context on two pilots")
            run_until_killed(str(path))
            _, pid = _line(path, 0)
            pilot = next(each for each in psutil.Process(pid).parents() if ("stoker.pilot.main" in each.cmdline()))
            everything = [pilot, *pilot.children(recursive=True)]
            if asked.how == "frozen":
                frozen = everything
            lost_at = time.time()
            for process in everything if frozen else [pilot]:
                process.send_signal(signal.SIGSTOP if frozen else signal.SIGKILL)
            again_at, _ = _line(path, 1)
        finally:
            for process in frozen:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
            session.stop()
    print(json.dumps({"seconds": again_at - lost_at}))


def _line(path: Path, number: int) -> tuple[float, int]:
    def lines() -> list[str]:
        return path.read_text().splitlines()[number:] if path.exists() else []

    at, pid = until(lines, LIMIT_S, f"beginning {number + 1} of the call")[0].split()
    return float(at), int(pid)


if __name__ == "__main__":
    main()
