"""Kill pilots one by one until no pilot is left (Pervasive Context Management §4.4).

A call takes 5 s, and a load takes 0.8 of a call (from Figure 6). After 40 s, one of 20 pilots is killed every 8 s.
These lengths determine the ratio, so the only bar is that no call fails.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil

import stoker
from benchmarks.harness import in_turns, processes, ratios, run_side, until
from benchmarks.starting import local_session
from benchmarks.tables import Bar, Line, Table
from stoker.contexts.recipe import Awareness

LOAD_IN_CALLS = 0.8


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    small: dict[str, Any] = {"pilots": 3, "call_s": 0.5, "from_s": 4.0, "every_s": 1.0} if quick else {}
    sides = {name: partial(run_side, side, awareness=name, **small) for name in ("full", "disk")}
    found = in_turns(sides, 1 if quick else 3, say)
    done, failed = (
        {name: [float(one[what]) for one in several] for name, several in found.items()} for what in ("calls", "failed")
    )
    cells = {f"{name}, calls": numbers for name, numbers in done.items()}
    lines = [Line(what="calls done", cells={**cells, "full / disk": ratios(done["full"], done["disk"])})]
    lines += [
        Line(what=f"calls that were lost, {name}", cells={"calls": numbers}, bar=Bar(at_most=0), last_digits=0)
        for name, numbers in failed.items()
    ]
    return Table(lines=lines)


def side(
    awareness: str, pilots: int = 20, call_s: float = 5.0, from_s: float = 40.0, every_s: float = 8.0
) -> dict[str, int]:
    load_s = LOAD_IN_CALLS * call_s
    with local_session(init_blocks=pilots, max_blocks=pilots) as session:
        until(lambda: len(session.status().pilots) == pilots, 120, f"{pilots} pilots", every_s=0.2)
        here = list(processes("stoker.pilot.main", session.folder))
        if len(here) != pilots:
            raise SystemExit(f"{pilots} pilots have joined, and {len(here)} processes are pilots")
        device = session.status().pilots[0].devices[0]

        # Only one context fits on a device, as in the paper. Otherwise the next load overlaps with a running call.
        @stoker.context(memory=f"{int(0.6 * device.memory_bytes)} B", awareness=Awareness(awareness))
        def model() -> float:
            time.sleep(load_s)
            return call_s

        @stoker.app(context=model())
        def infer(seconds: float, _number: int) -> float:
            time.sleep(seconds)
            return seconds

        futures = [infer(number) for number in range(pilots * 60)]
        began = time.monotonic()
        for number, pilot in enumerate(here):
            time.sleep(max(0.0, began + from_s + number * every_s - time.monotonic()))
            with contextlib.suppress(psutil.NoSuchProcess):
                pilot.kill()
        time.sleep(every_s)
        ended = [future for future in futures if future.done()]  # The other calls still wait for a pilot.
        failed = sum(future.exception() is not None for future in ended)
    return {"calls": len(ended) - failed, "failed": failed}
