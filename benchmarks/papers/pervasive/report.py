"""Write `docs/reproduction/context-paper.md`: paper, fitted times, predictions and unknowns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks import quoted_records
from benchmarks.harness import spread
from benchmarks.papers import common
from benchmarks.papers.pervasive import claims, fit, paper, predict, worlds
from benchmarks.papers.pervasive.claims import CLAIMS, Rows, awareness_name
from benchmarks.papers.pervasive.drawing import NAMES
from benchmarks.papers.pervasive.predict import BATCH, BATCHES, PEAKS, Found, range_text, rounded_up_percent
from benchmarks.reliability.vanishing import LOAD_IN_CALLS
from stoker.contexts.recipe import Awareness
from stoker.units import show_bytes

PAGE = Path(__file__).with_name("page.template")
_ROUNDED = next(run for run in paper.RUNS if (run.awareness, run.batch) == (Awareness.FULL, paper.RUNS[0].batch))


def write(found: Found) -> str:
    texts = (f'of Figure {claim.figure} that the application "{claim.text}"' for claim in CLAIMS if claim.text)
    inside = [claim for claim in CLAIMS if not claim.distance_outside(found.predictions, batch=BATCH)]
    return common.page(
        PAGE, paper=paper, fit=fit, predict=predict, claims=claims, found=found,
        partial=claims.PARTIAL.said, full=claims.FULL.said, longest=max(BATCHES),
        static_times=", ".join(f"{run.seconds:,.0f} s" for run in paper.RUNS if run.figure.startswith("6")),
        fitting=fit_summary(found), predicted=len(CLAIMS), inside=len(inside),
        figure_8=claims.figure_8_text(found), gains_short=claims.gains_in_short(found),
        disks_short=claims.disks_summary(found), made=found.facts.line(), searched=_search_text(found),
        rounded_s=_ROUNDED.seconds, rounded=paper.ROUNDED_S / 2 / _ROUNDED.seconds, vanishing=_vanishing_text(found),
        apart=rounded_up_percent(_largest_deviation(found)), static=static_rows(found), ratios=ratio_rows(found),
        sets=len(found.fits), unknown=len(fit.BOUNDS), close=sum(each.close for each in found.fits),
        last_search=found.starts - 1, unknowns=parameter_rows(found), intervals=claims.interval_rows(found),
        held=claims.including_variants_rows(found), grew=" and ".join(texts), variants=claims.variants_rows(found),
        gains=claims.gains_rows(found), share=claims.shares_facts(found), shares=claims.shares_rows(found),
        disks=claims.disks_rows(found), capacity=claims.capacity_rows(found),
        in_calls=paper.FIGURE_9B_GPUS * predict.BATCH, kinds=gpu_kind_rows(found),
    )  # fmt: skip


def quotation(found: Found) -> str:
    inside, outside, known = list[str](), list[str](), list[str]()
    for claim in CLAIMS:
        values = claim.values(found.predictions, batch=BATCH)
        which = f" {NAMES[claim.awareness]}" if claim.figure == "8" else ""
        name = f"Figure {claim.figure}{which}, {claim.said:,.0f}{claim.unit}"
        if off := claim.distance_outside(found.predictions, batch=BATCH):
            outside.append(f"{name} against {range_text(values)}, by {off:.1%}")
            continue
        holding, total = claim.holding_variants(found.predictions, batch=BATCH)
        hold = f"{len(holding)} of {total} variants {'holds' if len(holding) == 1 else 'hold'} it"
        if claim.figure.startswith("9") and holding:
            known.append(claim.figure)
        inside.append(f"{name} in {range_text(values)} (a factor of {max(values) / min(values):.1f}; {hold})")
    fitting = f"Figures 6 and 7 of the context paper are fitted: {fit_summary(found)}"
    said = f"Of {len(CLAIMS)} numbers that are predicted, in calls of {BATCH}, {len(inside)} are inside wide intervals"
    those = f"{', '.join(inside) or 'none'}; outside: {', '.join(outside) or 'none'}"
    variant = "A variant is one assumption about a detail that the paper leaves open, with all sets of the unknowns"
    figures = (
        f"We wrote or kept the variants that hold Figures {' and '.join(known)} when we knew the paper's numbers. "
    )
    return f"{fitting}. {said}: {those}. {variant}. {figures if known else ''}{claims.figure_8_text(found)}"


def fit_summary(found: Found) -> str:
    worst = max(abs(run.error(seconds)) for run, seconds in found.simulated)
    limits = sum(run.most > 0.0 and run.error(seconds) == 0.0 for run, seconds in found.simulated)
    numbers = f"{len(found.simulated) - limits} numbers within {rounded_up_percent(worst)}"
    if limits:
        numbers += f", and lie between the paper's limits for {limits} more"
    return f"{len(fit.BOUNDS)} unknowns reproduce {numbers}"


def _vanishing_text(found: Found) -> str:
    line = quoted_records.read("vanishing").line("calls done")
    (*_, ratios) = line.cells.values()
    real = f"""With sleeping calls and loads on real pilots, none lost early, `make bench ARGS=vanishing` (results:
        `benchmarks/RESULTS.md`) completes {spread(ratios, digits=line.last_digits)} times as many calls with full
        awareness as with partial."""
    simulated = [one for each in claims.pairs(found.predictions, batch=BATCH, none_lost=True).values() for one in each]
    if simulated:
        real += f""" Its loads take {LOAD_IN_CALLS:g} of a call by design. So compare this ratio with the
            simulator's of that case, {range_text(simulated, ".2f")} in calls of {BATCH}, and not with the
            paper's {claims.SAID:.2f}."""
    return " ".join(real.split())


def _search_text(found: Found) -> str:
    kept = "" if found.searched.startswith(found.facts.at) else ", and kept since"
    again = f", and found the same sets on {found.repeated}" if found.repeated else ""
    return f"""{found.searched}, with seed {fit.SEED} and starts 0 to {found.starts - 1}{kept}:
        `python -m benchmarks.papers.pervasive` without `--keep-fits` searches anew{again}."""


def static_rows(found: Found) -> Rows:
    for run, seconds in found.simulated:
        values = [fit.static_run_s(each.parameters, run.awareness, run.batch) for each in found.fits]
        yield [*static_cells(run, seconds), range_text(values)]


def static_cells(run: paper.Run, seconds: float) -> list[str]:
    said = f"{run.seconds:,.0f} to {run.most:,.0f}" if run.most else f"{run.seconds:,.0f}"
    name = awareness_name(run.awareness)
    return [run.figure, name, f"{run.batch:,}", said, f"{seconds:,.0f}", f"{run.error(seconds):+.1%}"]


def _largest_deviation(found: Found) -> float:
    """Return the largest relative difference between closed form and simulator."""
    first = found.fits[0].parameters
    return max(abs(fit.static_run_s(first, run.awareness, run.batch) / s - 1.0) for run, s in found.simulated)


def ratio_rows(found: Found) -> Rows:
    runs = [run for run, _ in found.simulated]
    simulated = {(run.awareness, run.batch): seconds for run, seconds in found.simulated}
    every = [
        {(run.awareness, run.batch): fit.static_run_s(each.parameters, run.awareness, run.batch) for run in runs}
        for each in found.fits
    ]

    def reduction(times: Mapping[tuple[Awareness, int], float], one: Awareness, against: Awareness) -> float:
        return 1.0 - times[one, BATCH] / times[against, BATCH]

    def batch_spread(times: Mapping[tuple[Awareness, int], float]) -> float:
        full = [seconds for (awareness, _), seconds in times.items() if awareness is Awareness.FULL]
        return max(full) / min(full) - 1.0

    for one, against, part in paper.REDUCTIONS:
        words = f"RQ1: {NAMES[one]} takes less time than {NAMES[against]}, calls of {BATCH}, by"
        values = [reduction(times, one, against) for times in every]
        yield [words, f"{part:.1%}", f"{reduction(simulated, one, against):.1%}", range_text(values, ".1%")]
    if len(runs) == len(paper.RUNS):  # A quick run omits the smallest calls.
        words = "RQ2: full takes longer with its worst size of calls than with its best, by"
        values = [batch_spread(times) for times in every]
        yield [words, f"{paper.SPREAD:.1%}", f"{batch_spread(simulated):.1%}", range_text(values, ".1%")]


def parameter_rows(found: Found) -> Rows:
    for name, bound in fit.BOUNDS.items():
        values = [getattr(each.parameters, name) for each in found.fits]
        shown = [_parameter_text(name, value) for value in (bound.low, bound.high, values[0], min(values), max(values))]
        yield [name, f"{shown[0]} to {shown[1]}", shown[2], f"{shown[3]} to {shown[4]}", bound.why]


def _parameter_text(name: str, value: float) -> str:
    if name.endswith("bytes_per_s"):
        return f"{show_bytes(value)}/s"
    if name == "warm_items":
        return f"{value:.0f}"
    return f"{value:.2g} s" if 0.001 <= value < 1 else f"{value:.3g} s" if value >= 1 else "0 s"


def gpu_kind_rows(found: Found) -> Rows:
    for kind, count in paper.TABLE_1.items():
        cells = [f"{kind} (fitted)" if kind in (paper.A10, paper.TITAN) else kind, f"{count:.0f}"]
        for _, peaks in PEAKS:
            values = [worlds.item_s(each.parameters, kind, peaks=peaks) for each in found.fits]
            cells += [f"{peaks[kind]:g}", f"{values[0]:.2g} ({min(values):.2g} to {max(values):.2g})"]
        yield [*cells, "TITAN X" if kind in paper.OLD else "A10"]
