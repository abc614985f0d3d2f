"""What the chaos test disturbs: a program on the head that maps over numbers until a file appears.

python chaos_program.py SITE RUN_DIR LOG STOP RESULT
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import stoker

site, runs, log, stop, result = sys.argv[1:]


@stoker.context(memory="200 MB")
def model(log: str) -> str:
    time.sleep(0.3)
    return log


@stoker.app(context=model(log))
def work(log: str, number: int) -> int:
    line = f"{number} {os.environ['SLURMD_NODENAME']} {os.getpid()}\n"
    with open(log, "a") as file:
        file.write(line)
    time.sleep(0.05)
    return 3 * number


def numbers() -> Iterator[int]:
    number = 0
    while not os.path.exists(stop):
        yield number
        number += 1


def main() -> None:
    found: dict[str, Any] = {}
    with stoker.load(site, run_dir=runs) as session:
        got = list(stoker.map(work, numbers(), window=200))
        status = session.status(60)
        found["calls"] = len(got)
        found["wrong"] = [number for number, value in enumerate(got) if value != 3 * number]
        found["done"], found["failed"], found["lost"] = status.done, status.failed, status.lost_pilots
        found["ended_blocks"] = status.ended_blocks
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
