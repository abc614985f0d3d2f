"""One side of `vanishing`: pilots that are killed one after the other until none is left; prints JSON.

python -m benchmarks.vanishing_side --awareness full
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from itertools import count
from typing import Any

import psutil

import stoker
from stoker.contexts.recipe import Awareness
from stoker.site import Pilot, Site


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--awareness", choices=["disk", "full"], required=True)
    ask.add_argument("--pilots", type=int, default=20)
    ask.add_argument("--call-s", type=float, default=5.0, help="seconds that a call's inferences take")
    ask.add_argument("--load", type=float, default=0.8, help="what a load takes, in calls")
    ask.add_argument("--from-s", type=float, default=40.0, help="when the first pilot is killed")
    ask.add_argument("--every-s", type=float, default=8.0, help="the time between two kills")
    asked = ask.parse_args()
    load_s, call_s = asked.load * asked.call_s, asked.call_s

    @stoker.context(memory="200 MB", awareness=Awareness(asked.awareness))
    def model() -> float:
        time.sleep(load_s)
        return call_s

    @stoker.app(context=model())
    def infer(seconds: float, _number: int) -> float:
        time.sleep(seconds)
        return seconds

    done = 0
    site = Site(pilot=Pilot(devices="cpu:1", init_blocks=asked.pilots, max_blocks=asked.pilots))
    with tempfile.TemporaryDirectory(prefix="vanishing-") as folder:
        session = stoker.load(site, run_dir=folder, strategy="none")
        try:
            pilots = _wait_for_pilots(session, asked.pilots)
            futures = [infer(number) for number in range(asked.pilots * 60)]
            began = time.monotonic()
            for number in count():
                due = began + asked.from_s + number * asked.every_s
                time.sleep(max(0.0, due - time.monotonic()))
                if number == len(pilots):
                    break
                with contextlib.suppress(psutil.NoSuchProcess):
                    pilots[number].kill()
            done = sum(future.done() and future.exception() is None for future in futures)
        finally:
            session.stop()
    print(json.dumps({"calls": done}))


def _wait_for_pilots(session: Any, number: int) -> list[psutil.Process]:
    """The pilots' processes, once all have joined."""
    deadline = time.monotonic() + 120
    while len(session.status().pilots) < number:
        if time.monotonic() > deadline:
            raise SystemExit(f"{len(session.status().pilots)} of {number} pilots joined within 120 s")
        time.sleep(0.2)
    mine = psutil.Process().children(recursive=True)
    return [each for each in mine if "stoker.pilot.main" in each.cmdline() and "bash" not in each.cmdline()[0]]


if __name__ == "__main__":
    main()
