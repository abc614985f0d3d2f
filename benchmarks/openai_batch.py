"""`stoker batch` over two pilots of this machine, while the manager and every pilot are killed once.

*Useful* is the device time that the requests take where nothing is disturbed: their number, divided by what one device
answers a second in the middle of an undisturbed run just before, hot and busy. It is divided by the pilot-seconds that
there were in the disturbed run: from the start of each pilot's process to its end, summed, until the last answer. What
a pilot spends on starting, on loading, on waiting while the manager is gone and on requests that it does not finish
counts as lost; the time in which a killed pilot is not there yet does not.

The model is small and of random weights, so requests are short and the machinery around them is what is measured. The
side fails unless each `custom_id` is answered once, and alike in both runs but for rounding.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from benchmarks.paired import ROOT, missing, run_side
from benchmarks.table import Bar, Line, Table

NAME, TITLE = "openai_batch", "an OpenAI batch file while the manager and every pilot are killed once"
SIDE = "benchmarks.openai_batch_side"
_TESTS = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    """The same pair of runs, once or three times."""
    if why := missing("torch", "transformers"):
        return Table(name=NAME, title=TITLE, skipped=why)
    requests, repeats = (150, 1) if quick else (2_000, 3)
    runs: list[dict[str, Any]] = []
    for number in range(1, repeats + 1):
        runs.append(run_side(SIDE, "--requests", str(requests), environment=_TESTS))
        say(f"run {number} of {repeats}: {', '.join(f'{name} {value:,.2f}' for name, value in runs[-1].items())}")
    names = {"s": "seconds", "pilot-seconds": "pilot_s", "requests/s of a device": "per_device_s", "useful": "useful"}
    cells = {heading: [run[name] for run in runs] for heading, name in names.items()}
    what = f"{requests:,} requests of 4 to 16 tokens, two pilots and the manager killed"
    return Table(name=NAME, title=TITLE, lines=[Line(what=what, cells=cells, bar=Bar(at_least=0.85))])
