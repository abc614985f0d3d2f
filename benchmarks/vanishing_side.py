"""One side of `vanishing`: pilots that are killed one after the other until none is left; prints JSON.

python -m benchmarks.vanishing_side --awareness full
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from typing import Any

import psutil

import stoker
from benchmarks.vanishing import LOAD_IN_CALLS
from stoker.contexts.recipe import Awareness
from stoker.site import Pilot, Site


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--awareness", choices=["disk", "full"], required=True)
    ask.add_argument("--pilots", type=int, default=20)
    ask.add_argument("--call-s", type=float, default=5.0, help="seconds that a call's inferences take")
    ask.add_argument("--load", type=float, default=LOAD_IN_CALLS, help="what a load takes, in calls")
    ask.add_argument("--from-s", type=float, default=40.0, help="when the first pilot is killed")
    ask.add_argument("--every-s", type=float, default=8.0, help="the time between two kills")
    asked = ask.parse_args()
    load_s, call_s = asked.load * asked.call_s, asked.call_s
    done = failed = 0
    site = Site(pilot=Pilot(devices="cpu:1", init_blocks=asked.pilots, max_blocks=asked.pilots))
    with tempfile.TemporaryDirectory(prefix="vanishing-") as folder:
        session = stoker.load(site, run_dir=folder, strategy="none")
        try:
            pilots = _wait_for_pilots(session, asked.pilots, folder)
            device = session.status().pilots[0].devices[0]

            # One at a time on a device, as on the paper's GPUs: else the next load hides behind the call that runs.
            @stoker.context(memory=f"{int(0.6 * device.memory_bytes)} B", awareness=Awareness(asked.awareness))
            def model() -> float:
                time.sleep(load_s)
                return call_s

            @stoker.app(context=model())
            def infer(seconds: float, _number: int) -> float:
                time.sleep(seconds)
                return seconds

            futures = [infer(number) for number in range(asked.pilots * 60)]
            began = time.monotonic()
            for number, pilot in enumerate(pilots):
                time.sleep(max(0.0, began + asked.from_s + number * asked.every_s - time.monotonic()))
                with contextlib.suppress(psutil.NoSuchProcess):
                    pilot.kill()
            time.sleep(asked.every_s)
            ended = [future for future in futures if future.done()]  # the others wait for a pilot still
            failed = sum(future.exception() is not None for future in ended)
            done = len(ended) - failed
        finally:
            session.stop()
    print(json.dumps({"calls": done, "failed": failed}))


def _wait_for_pilots(session: Any, number: int, folder: str) -> list[psutil.Process]:
    """The processes of the session in this folder that are pilots, once all have joined."""
    deadline = time.monotonic() + 120
    while len(session.status().pilots) < number:
        if time.monotonic() > deadline:
            raise SystemExit(f"{len(session.status().pilots)} of {number} pilots joined within 120 s")
        time.sleep(0.2)
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "stoker.pilot.main" in words and any(word.startswith(folder) for word in words):
                found.append(process)
    if len(found) != number:
        raise SystemExit(f"{number} pilots have joined, and {len(found)} processes are pilots")
    return found


if __name__ == "__main__":
    main()
