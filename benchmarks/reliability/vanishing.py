"""Kill pilots one by one until no pilot is left (Pervasive Context Management §4.4).

The paper removed one of 20 GPUs a minute after 900 s: 62,900 inferences with pervasive contexts, 46,000 with partial
contexts (Figure 8). Here a call takes 5 s, a load 0.8 of a call (from Figure 6), and one of 20 pilots is killed every
8 s after 40 s. These lengths determine the ratio, so the only bar is that no call fails.

    python -m benchmarks.reliability.vanishing full|disk
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil

import stoker
from benchmarks.harness import in_turns, processes, ratios, run_side, side_options, until
from benchmarks.tables import Bar, Line, Table
from stoker.contexts.recipe import Awareness
from stoker.site import Pilot, Site

LOAD_IN_CALLS = 0.8
NAME, TITLE = "vanishing", "calls done when 20 pilots have been killed one by one, awareness full against disk"


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    small = ("--pilots", "3", "--call-s", "0.5", "--from-s", "4", "--every-s", "1") if quick else ()
    sides = {name: partial(run_side, "benchmarks.reliability.vanishing", name, *small) for name in ("full", "disk")}
    found = in_turns(sides, 1 if quick else 3, say, lambda name, one: f"{name} {one['calls']:.0f}")
    done, failed = (
        {name: [float(one[what]) for one in several] for name, several in found.items()} for what in ("calls", "failed")
    )
    cells = {f"{name}, calls": numbers for name, numbers in done.items()}
    lines = [Line(what="calls done", cells={**cells, "full / disk": ratios(done["full"], done["disk"])})]
    lines += [
        Line(what=f"calls that were lost, {name}", cells={"calls": numbers}, bar=Bar(at_most=0), last_digits=0)
        for name, numbers in failed.items()
    ]
    return Table(name=NAME, title=TITLE, lines=lines)


def main() -> None:
    asked = side_options(
        __doc__, awareness=("disk", "full"), pilots=20, call_s=5.0, load=LOAD_IN_CALLS, from_s=40.0, every_s=8.0
    )  # fmt: skip
    call_s = float(asked.call_s)
    load_s = asked.load * call_s
    done = failed = 0
    site = Site(pilot=Pilot(devices="cpu:1", init_blocks=asked.pilots, max_blocks=asked.pilots))
    with tempfile.TemporaryDirectory(prefix="vanishing-") as folder:
        session = stoker.load(site, run_dir=folder, strategy="none")
        try:
            pilots = _wait_for_pilots(session, asked.pilots, folder)
            device = session.status().pilots[0].devices[0]

            # Only one context fits on a device, as in the paper. Otherwise the next load overlaps with a running
            # call.
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
            ended = [future for future in futures if future.done()]  # The other calls still wait for a pilot.
            failed = sum(future.exception() is not None for future in ended)
            done = len(ended) - failed
        finally:
            session.stop()
    print(json.dumps({"calls": done, "failed": failed}))


def _wait_for_pilots(session: Any, number: int, folder: str) -> list[psutil.Process]:
    until(lambda: len(session.status().pilots) == number, 120, f"{number} pilots", every_s=0.2)
    found = list(processes("stoker.pilot.main", folder))
    if len(found) != number:
        raise SystemExit(f"{number} pilots have joined, and {len(found)} processes are pilots")
    return found


if __name__ == "__main__":
    main()
