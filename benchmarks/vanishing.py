"""Pilots are taken away one after the other until none is left (Pervasive Context Management §4.4).

The paper ran inferences on 20 GPUs, lost one a minute from the 900th second on, and counted what was done when none was
left: 62,900 inferences with pervasive contexts, 46,000 with partial ones (Figure 8), 1.37 times as many. Here 20
pilots on this machine sleep: a call takes 5 s, a load 0.8 of that, the ratio that the paper's Figure 6 implies; one
pilot is killed every 8 s from the 40th second on. With awareness disk each call starts a process and loads again, as
the paper's partial contexts do. How long a load takes is put in, and the ratio of the two sides follows from it, so the
ratio has no bar. The bar is that neither side loses a call, that is, that none ends with an error, though pilots die
under calls that run. Sleeping pilots do not compete for this machine's cores; starting a process for each call does
cost it something, which is why calls are not shorter, and why the two sides do not run at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.paired import ratios, run_side, take_turns
from benchmarks.table import Bar, Line, Table

LOAD_IN_CALLS = 0.8
NAME, TITLE = "vanishing", "calls done when 20 pilots have been killed one by one, awareness full against disk"


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    """Calls done in pairs, and calls that each side gave up."""
    small = ("--pilots", "3", "--call-s", "0.5", "--from-s", "4", "--every-s", "1") if quick else ()
    done: dict[str, list[float]] = {"full": [], "disk": []}
    failed: dict[str, list[float]] = {"full": [], "disk": []}
    repeats = 1 if quick else 3
    for repeat in range(repeats):
        sides = {name: partial(run_side, "benchmarks.vanishing_side", "--awareness", name, *small) for name in done}
        for name, found in take_turns(repeat, sides).items():
            done[name].append(float(found["calls"]))
            failed[name].append(float(found["failed"]))
        say(f"pair {repeat + 1} of {repeats}: " + ", ".join(f"{name} {some[-1]:.0f}" for name, some in done.items()))
    cells = {f"{name}, calls": numbers for name, numbers in done.items()}
    lines = [Line(what="calls done", cells={**cells, "full / disk": ratios(done["full"], done["disk"])})]
    lines += [
        Line(what=f"calls that were lost, {name}", cells={"calls": numbers}, bar=Bar(at_most=0), last_digits=0)
        for name, numbers in failed.items()
    ]
    return Table(name=NAME, title=TITLE, lines=lines)
