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
    """One pair of runs: loads cost the same however many requests there are, so it wants many."""
    if why := missing("torch", "transformers"):
        return Table(name=NAME, title=TITLE, skipped=why)
    requests = 150 if quick else 20_000
    run: dict[str, Any] = run_side(SIDE, "--requests", str(requests), timeout_s=3600, environment=_TESTS)
    say(", ".join(f"{name} {value:,.2f}" for name, value in run.items()))
    names = {"s": "seconds", "pilot-seconds": "pilot_s", "requests/s of a device": "per_device_s", "useful": "useful"}
    cells = {heading: [run[name]] for heading, name in names.items()}
    what = f"{requests:,} requests of 16 to 48 tokens, two pilots and the manager killed"
    return Table(name=NAME, title=TITLE, lines=[Line(what=what, cells=cells, bar=Bar(at_least=0.85, repeats=1))])
