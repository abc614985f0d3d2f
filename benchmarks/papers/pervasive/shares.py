"""What Figure 8 depends on: which kind of GPU does the work.

Everything else of it is fixed. When A10s and TITANs are taken away is said, so it is known how long each is there on
the mean; how much all of them do together is known from Figure 6. So what is done by the end is a
straight line in the share that TITANs have of the work, and the share that a number asks for can be read off it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from benchmarks.papers.pervasive import paper, quick
from benchmarks.papers.pervasive.fit import Fit
from benchmarks.papers.pervasive.parameters import Parameters
from benchmarks.papers.pervasive.predict import BATCH, Prediction
from benchmarks.tables import paragraph
from stoker.contexts.recipe import Awareness

_BANDS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 1.0)


def of_titans(parameters: Parameters, awareness: Awareness) -> float:
    """The share of all inferences that TITANs do while all GPUs are there, in calls of a hundred."""
    a10_s, titan_s = (quick.worker(parameters, kind, awareness, BATCH)[1] for kind in (paper.A10, paper.TITAN))
    return a10_s / (a10_s + titan_s)


def wanted(done: float, awareness: Awareness, *, begins_s: float, late_s: float = 0.0) -> float:
    """The share of TITANs with which so many inferences would be done by the end of Figure 8. More than 1: none would
    do. `begins_s`: when GPUs begin; `late_s`: how much later than at 900 s the first one goes. With each GPU half a
    call is lost."""
    [static] = [run for run in paper.RUNS if run.awareness is awareness and run.batch == BATCH]
    rate = paper.INFERENCES / (static.seconds - begins_s)
    lost = 2 * paper.EACH * BATCH / 2
    each_s = (done + lost) / rate + begins_s
    half_s = paper.PREEMPTED_EVERY_S * (paper.EACH - 1) / 2
    a10_s = paper.PREEMPTED_FROM_S + late_s + half_s
    return (each_s - a10_s) / (paper.PREEMPTED_EVERY_S * paper.EACH)


def section(fits: Sequence[Fit], predictions: Sequence[Sequence[Prediction]]) -> str:
    """The part of the page about it."""
    said = paper.FIGURE_8[Awareness.DISK]
    begins = sorted(quick.worker(each.parameters, paper.A10, Awareness.DISK, BATCH)[0] for each in fits)
    least = wanted(said, Awareness.DISK, begins_s=begins[0], late_s=paper.PREEMPTED_EVERY_S)
    most = wanted(said, Awareness.DISK, begins_s=begins[-1])
    have = [of_titans(each.parameters, Awareness.DISK) for each in fits]
    rows = [
        (of_titans(each.parameters, Awareness.DISK), each.parameters, row)
        for each, row in zip(fits, predictions, strict=True)
    ]
    half_s = paper.PREEMPTED_EVERY_S * (paper.EACH - 1) / 2
    stays_s = [paper.PREEMPTED_FROM_S + half_s + turn * paper.PREEMPTED_EVERY_S * paper.EACH for turn in (0, 1)]
    [static_run] = [run for run in paper.RUNS if (run.awareness, run.batch) == (Awareness.DISK, BATCH)]
    lines = [
        "## What Figure 8's partial run asks for",
        "",
        paragraph(f"""{said:,.0f} inferences by the end are many. A10s are there for {stays_s[0]:,.0f} s on the mean,
            TITANs for {stays_s[1]:,.0f} s, and both together do {paper.INFERENCES:,} in {static_run.seconds:,.0f}
            s; so TITANs must do {least:.0%} to {most:.0%} of the work while all are there, in calls of {BATCH} (the
            range: when GPUs begin, and whether the first goes at {paper.PREEMPTED_FROM_S:.0f} s or a minute later;
            half a call is lost with each GPU). The sets that explain Figures 6 and 7 give TITANs {min(have):.0%} to
            {max(have):.0%}: with a load for every call the older GPU is ahead only where it loads much faster than
            the newer one, and the other sizes of calls limit by how much."""),
        "",
        "| TITANs' share, partial | sets | A10 load over TITAN load | partial, done | full, done |",
        "|---|---|---|---|---|",
    ]
    for low, high in pairwise(_BANDS):
        inside = [(parameters, row) for share, parameters, row in rows if low <= share < high]
        if inside:
            loads = [parameters.load_a10_s / parameters.load_titan_s for parameters, _ in inside]
            done = [_done([row for _, row in inside], awareness) for awareness in (Awareness.DISK, Awareness.FULL)]
            shown = f"{len(inside)} | {min(loads):.2g} to {max(loads):.2g} | {' | '.join(done)}"
            lines.append(f"| {low:.0%} to {high:.0%} | {shown} |")
    return "\n".join([*lines, ""])


def _done(rows: Sequence[Sequence[Prediction]], awareness: Awareness) -> str:
    values = [one.value for row in rows for one in row if one.is_of("8", awareness) and one.batch == BATCH]
    return _range(values)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):,.0f} to {max(values):,.0f}"
