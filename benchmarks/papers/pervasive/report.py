"""Write `docs/reproduction/context-paper.md`: paper, predictions and unknowns."""

from __future__ import annotations

from pathlib import Path

from benchmarks import quoted_records
from benchmarks.harness import spread
from benchmarks.papers.common import page
from benchmarks.papers.pervasive import claims, disks, fit, fitted, paper, predict
from benchmarks.papers.pervasive.claims import CLAIMS
from benchmarks.papers.pervasive.drawing import NAMES
from benchmarks.papers.pervasive.fit import BOUNDS, FIRST_COMMIT, FIRST_SEARCHED, SEARCHED_AGAIN, SEED
from benchmarks.papers.pervasive.predict import BATCH, BATCHES, RAMPS_WRITTEN, Found, range_text, rounded_up_percent
from benchmarks.reliability.vanishing import LOAD_IN_CALLS
from benchmarks.tables import paragraph
from stoker.contexts.recipe import Awareness


def write(found: Found) -> str:
    texts = (f'of Figure {claim.figure} that the application "{claim.text}"' for claim in CLAIMS if claim.text)
    return page(
        PAGE, paper=paper, fit=fit, predict=predict, made=_origin_text(found), short=_summary(found),
        rounded_s=ROUNDED.seconds, rounded=paper.ROUNDED_S / 2 / ROUNDED.seconds, vanishing=_vanishing_text(found),
        apart=rounded_up_percent(fitted.largest_deviation(found)), static=fitted.static_table(found),
        ratios=fitted.ratio_table(found),
        sets=len(found.fits), unknown=len(BOUNDS), close=sum(each.close for each in found.fits),
        searches=found.starts, last_search=found.starts - 1, unknowns=fitted.parameter_table(found),
        intervals=claims.interval_table(found), panels=claims.panels_caption(found),
        held=claims.including_variants_table(found),
        grew=" and ".join(texts),
        variants=claims.variants_table(found), said=claims.SAID, gains=claims.gains_section(found),
        shares=disks.shares_section(found.fits, found.predictions), disks=disks.disks_section(found),
        bar=claims.BAR, capacity=claims.capacity_section(found), in_calls=paper.FIGURE_9B_GPUS * predict.BATCH,
        kinds=fitted.gpu_kind_table(found),
    )  # fmt: skip


def quotation(found: Found) -> str:
    inside: list[str] = []
    outside: list[str] = []
    known: list[str] = []
    for claim in CLAIMS:
        values = claim.values(found.predictions, batch=BATCH)
        which = f" {NAMES[claim.awareness]}" if claim.figure == "8" else ""
        name = f"Figure {claim.figure}{which}, {claim.said:,.0f}{claim.unit}"
        if off := claim.distance_outside(found.predictions, batch=BATCH):
            outside.append(f"{name} against {range_text(values)}, by {off:.1%}")
        else:
            variants = claim.variants(found.predictions, batch=BATCH)
            hold = claims.including_variants_text(claim, variants)
            if any(variant.includes(claim.said) and claims.decision_text(claim, variant.name) for variant in variants):
                known.append(claim.figure)
            inside.append(f"{name} in {range_text(values)} (a factor of {max(values) / min(values):.1f}; {hold})")
    fitting = f"Of the context paper Figures 6 and 7 are fitted: {fitted.fit_summary(found)}"
    said = f"Of {len(CLAIMS)} numbers that are predicted, in calls of {BATCH}, {len(inside)} are inside wide intervals"
    those = f"{', '.join(inside) or 'none'}; outside: {', '.join(outside) or 'none'}"
    variant = "A variant is one assumption where the text leaves something open, over all sets of the unknowns"
    figures = f"The variants that hold Figures {' and '.join(known)} were written or kept when the answers were known. "
    return f"{fitting}. {said}: {those}. {variant}. {figures if known else ''}{claims.figure_8_text(found)}"


PAGE = Path(__file__).with_name("page.template")
ROUNDED = next(run for run in paper.RUNS if (run.awareness, run.batch) == (Awareness.FULL, paper.RUNS[0].batch))


def _vanishing_text(found: Found) -> str:
    line = quoted_records.read("vanishing").line("calls done")
    (*_, ratios) = line.cells.values()
    times = f"{spread(ratios, digits=line.last_digits)} times as many calls"
    real = f"""Real pilots whose calls and loads sleep, none lost early: `make bench ARGS=vanishing` (found:
        `benchmarks/RESULTS.md`) has {times} with full awareness as with partial."""
    simulated = [one for each in claims.pairs(found.predictions, batch=BATCH, none_lost=True).values() for one in each]
    if simulated:
        real += f""" Its loads take {LOAD_IN_CALLS:g} of a call because that is put in, so this may be compared with
            what the simulator has of that case, {range_text(simulated, ".2f")} in calls of {BATCH}, and not with the
            paper's {claims.SAID:.2f}."""
    return " ".join(real.split())


def _origin_text(found: Found) -> str:
    record = "record: [context-paper.json](context-paper.json)"
    kept = found.searched != found.facts.at
    first = again = ""
    if found.searched == FIRST_SEARCHED:
        first, again = f" by commit {FIRST_COMMIT}", f", and found the same sets on {SEARCHED_AGAIN}"
    searched = f"""The parameter sets were searched on {found.searched}{first}, with seed {SEED} and starts 0 to
        {found.starts - 1}{", and kept since" if kept else ""}: `python -m benchmarks.papers.pervasive` without
        `--keep-fits` searches anew{again}."""
    answers = f"{paper.FIGURE_9A_S:,.0f} s and {paper.FIGURE_9B_S:,.0f} s"
    known = f"""The ramps of Figure 9 were written anew on {RAMPS_WRITTEN}, when the predictions with the first ones
        were known: some of the first ones ended at the paper's own {answers}.
        Calls of {max(BATCHES):,} and nodes that share a disk were added on the same day."""
    seeds = "Nothing is drawn by chance but where searches begin: the same code gives the same page."
    return paragraph(f"Made by {found.facts.line()}; {record}. {searched} {known} {seeds}")


def _summary(found: Found) -> str:
    times = ", ".join(f"{run.seconds:,.0f} s" for run in paper.RUNS if run.figure.startswith("6"))
    partial, full = (paper.FIGURE_8[each] for each in (Awareness.DISK, Awareness.FULL))
    inside = [claim for claim in CLAIMS if not claim.distance_outside(found.predictions, batch=BATCH)]
    told = [
        f"""*The paper*: a task may keep nothing, its files on disk (partial), or a loaded model on its GPU (full).
        {paper.INFERENCES:,} inferences then take {times} on 20 GPUs. While GPUs go, partial does {partial:,.0f} and
        full {full:,.0f}. Full takes {paper.FIGURE_9A_S:,.0f} s and {paper.FIGURE_9B_S:,.0f} s on pools that grow to
        20 and {paper.FIGURE_9B_GPUS} GPUs.""",
        f"""*Found*: for Figures 6 and 7, {fitted.fit_summary(found)}. Of {len(CLAIMS)} predicted numbers of Figures 8
        and 9, {len(inside)} are inside wide intervals, in calls of {BATCH}.""",
        f"*Differs*: {claims.figure_8_text(found)} {claims.gains_in_short(found)}",
        f"""*Why*: the text does not say how many inferences a call has, when GPUs go, how pools grow, and how fast each
        kind of GPU is. Assumptions for Figure 9 that hold its numbers were written or kept when the answers were
        known. {disks.disks_summary(found)}""",
    ]  # fmt: skip
    return "\n".join(paragraph(" ".join(each.split()), bullet=True) for each in told)
