"""Write the sections on Figures 6 and 7."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.papers.pervasive import fit, paper, worlds
from benchmarks.papers.pervasive.claims import awareness_name
from benchmarks.papers.pervasive.drawing import NAMES
from benchmarks.papers.pervasive.fit import BOUNDS
from benchmarks.papers.pervasive.predict import BATCH, PEAKS, Found, range_text, rounded_up_percent
from benchmarks.tables import head, row
from stoker.contexts.recipe import Awareness
from stoker.units import show_bytes

_Times = Mapping[tuple[Awareness, int], float]


def fit_summary(found: Found) -> str:
    worst = max(abs(run.error(seconds)) for run, seconds in found.simulated)
    limits = sum(run.most > 0.0 and run.error(seconds) == 0.0 for run, seconds in found.simulated)
    numbers = f"{len(found.simulated) - limits} numbers within {rounded_up_percent(worst)}"
    if limits:
        numbers += f", and lie between the paper's limits for {limits} more"
    return f"{len(BOUNDS)} unknowns reproduce {numbers}"


def static_table(found: Found) -> str:
    lines = head("figure", "context", "inferences a call", "paper, s", "simulated, s", "error", "all sets, s")
    for run, seconds in found.simulated:
        values = [fit.static_run_s(each.parameters, run.awareness, run.batch) for each in found.fits]
        lines.append(f"{static_row(run, seconds)} {range_text(values)} |")
    return "\n".join(lines)


def static_row(run: paper.Run, seconds: float) -> str:
    said = f"{run.seconds:,.0f} to {run.most:,.0f}" if run.most else f"{run.seconds:,.0f}"
    times = f"{said} | {seconds:,.0f} | {run.error(seconds):+.1%}"
    return f"| {run.figure} | {awareness_name(run.awareness)} | {run.batch:,} | {times} |"


def largest_deviation(found: Found) -> float:
    first = found.fits[0].parameters
    return max(
        abs(fit.static_run_s(first, run.awareness, run.batch) / seconds - 1.0) for run, seconds in found.simulated
    )


def ratio_table(found: Found) -> str:
    runs = [run for run, _ in found.simulated]
    simulated = {(run.awareness, run.batch): seconds for run, seconds in found.simulated}
    every = [
        {(run.awareness, run.batch): fit.static_run_s(each.parameters, run.awareness, run.batch) for run in runs}
        for each in found.fits
    ]
    lines = head("ratio", "paper", "simulated", "all sets")
    for one in paper.REDUCTIONS:
        words = f"RQ1: {NAMES[one.awareness]} takes less time than {NAMES[one.against]}, calls of {BATCH}, by"
        values = [_reduction(times, one) for times in every]
        lines.append(row(words, f"{one.part:.1%}", f"{_reduction(simulated, one):.1%}", range_text(values, ".1%")))
    if len(runs) == len(paper.RUNS):  # A quick run omits the smallest calls.
        words = "RQ2: full takes longer with its worst size of calls than with its best, by"
        values = [_batch_spread(times) for times in every]
        lines.append(row(words, f"{paper.SPREAD:.1%}", f"{_batch_spread(simulated):.1%}", range_text(values, ".1%")))
    return "\n".join(lines)


def _reduction(times: _Times, one: paper.Reduction) -> float:
    return 1.0 - times[one.awareness, BATCH] / times[one.against, BATCH]


def _batch_spread(times: _Times) -> float:
    full = [seconds for (awareness, _), seconds in times.items() if awareness is Awareness.FULL]
    return max(full) / min(full) - 1.0


def parameter_table(found: Found) -> str:
    lines = head("parameter", "possible", "most central", "all", "why these bounds")
    for name, bound in BOUNDS.items():
        values = [getattr(each.parameters, name) for each in found.fits]
        shown = [_parameter_text(name, value) for value in (bound.low, bound.high, values[0], min(values), max(values))]
        lines.append(f"| {name} | {shown[0]} to {shown[1]} | {shown[2]} | {shown[3]} to {shown[4]} | {bound.why} |")
    return "\n".join(lines)


def _parameter_text(name: str, value: float) -> str:
    if name.endswith("bytes_per_s"):
        return f"{show_bytes(value)}/s"
    if name == "warm_items":
        return f"{value:.0f}"
    return f"{value:.2g} s" if 0.001 <= value < 1 else f"{value:.3g} s" if value >= 1 else "0 s"


_FITTED = (paper.A10, paper.TITAN)


def gpu_kind_table(found: Found) -> str:
    lines = head(
        "kind", "GPUs", *(f"{what}: {words}" for words, _ in PEAKS for what in ("peak", "seconds")), "loads as"
    )
    for kind, count in paper.TABLE_1.items():
        cells = [f"{kind} (fitted)" if kind in _FITTED else kind, f"{count:.0f}"]
        for _, peaks in PEAKS:
            values = [worlds.item_s(each.parameters, kind, peaks=peaks) for each in found.fits]
            cells += [f"{peaks[kind]:g}", f"{values[0]:.2g} ({min(values):.2g} to {max(values):.2g})"]
        lines.append(row(*cells, "TITAN X" if kind in paper.OLD else "A10"))
    return "\n".join(lines)
