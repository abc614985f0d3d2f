"""A switch between two models of which only one fits: from the request for the other one until its first token.

Model A is hot and idle when model B is asked for. B comes from its original file ("nothing"), from a snapshot on the
local disk, or was asleep. Both are SmolLM2-135M in float32, as two contexts that may not be together; its file and its
snapshot are in the page cache of the machine.

"nothing" and "snapshot" are whole sessions: the manager has A unloaded, and the pilot loads B in a fork of its zygote.
Sessions do not let libraries sleep (docs/decisions/066), so "asleep" is measured without one: two processes, as
libraries are, which a third one tells to sleep and to wake (`CausalLM.sleep`, `wake`). Add what a session takes beside
the model, which the hot request shows. On a CPU a model that sleeps gives up its cache and keeps its weights, for they
are in host memory already: that is what a switch costs at least. "asleep, copied" is nearer to a GPU: the process that
falls asleep copies its weights once, and so does the one that wakes. That column is judged.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable

from benchmarks.paired import MODEL, missing, ratios, run_side
from benchmarks.table import Bar, Line, Table

NAME, TITLE = "model_switch", "from the request for a model until its first token, while another is hot in its place"
SIDE = "benchmarks.model_switch_side"


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    """The three ways in turn, each in a fresh process; the median of its switches counts for a repeat."""
    if reason := missing(*MODEL):
        return Table(name=NAME, title=TITLE, skipped=reason)
    repeats, switches = (1, 1) if quick else (3, 3)
    found: dict[str, list[float]] = {name: [] for name in ("nothing", "snapshot", "copied", "asleep", "hot")}
    weights = 0
    with tempfile.TemporaryDirectory(prefix="model-switch-") as folder:
        for repeat in range(repeats):
            asleep = run_side(SIDE, "asleep", "--switches", str(switches), "--snapshots", folder)
            snapshot = run_side(SIDE, "snapshot", "--switches", str(switches), "--snapshots", folder)
            nothing = run_side(SIDE, "nothing", "--switches", "1", "--snapshots", folder)
            sides = {
                "nothing": nothing["seconds"], "snapshot": snapshot["seconds"], "copied": asleep["copied"],
                "asleep": asleep["asleep"], "hot": snapshot["hot"],
            }  # fmt: skip
            for name, numbers in sides.items():
                found[name].append(statistics.median(numbers))
            weights = asleep["weights_bytes"]
            say(f"repeat {repeat + 1} of {repeats}: " + ", ".join(f"{n} {s[-1]:.3f} s" for n, s in found.items()))
    nothing_s = found["nothing"]
    lines = [
        Line(
            what="asleep, weights copied",
            cells={"s": found["copied"], "from nothing, s": nothing_s, "ratio": ratios(nothing_s, found["copied"])},
            bar=Bar(at_least=10.0),
            digits=3,
            last_digits=0,
        ),
        *(
            Line(
                what=what,
                cells={"s": found[name], "from nothing, s": nothing_s, "ratio": ratios(nothing_s, found[name])},
                digits=3,
                last_digits=last,
            )
            for what, name, last in (("asleep", "asleep", 0), ("from a snapshot, in a session", "snapshot", 1))
        ),
        Line(what="the same model once more, in a session", cells={"s": found["hot"]}, last_digits=3),
    ]
    note = (
        "Asleep is without a session, which has no such state; on a CPU a model that sleeps keeps its weights"
        f" ({weights / 1e6:.0f} MB), and 'copied' has those of both models copied once in memory."
    )
    return Table(name=NAME, title=TITLE, lines=lines, notes=[note])
