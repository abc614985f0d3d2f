"""`docs/reproduction/context-paper.md`: paper and prediction side by side, and what cannot be known."""

from __future__ import annotations

from benchmarks import quoted_records
from benchmarks.harness import spread
from benchmarks.papers.pervasive import claims, disks, fitted, kinds, paper, predicted
from benchmarks.papers.pervasive.claims import CLAIMS
from benchmarks.papers.pervasive.drawing import NAMES
from benchmarks.papers.pervasive.fit import CLOSE, FAIR, FIRST_COMMIT, FIRST_SEARCHED, SEARCHED_AGAIN, SEED
from benchmarks.papers.pervasive.found import Found, between
from benchmarks.papers.pervasive.predict import BATCH, BATCHES, RAMPS_WRITTEN
from benchmarks.reliability.vanishing import LOAD_IN_CALLS
from benchmarks.tables import paragraph
from stoker.contexts.recipe import Awareness


def write(found: Found) -> str:
    parts = (
        HEAD,
        _made(found),
        _short(found),
        _index(found),
        fitted.static(found),
        fitted.ratios(found),
        fitted.unknowns(found),
        predicted.section(found),
        disks.shares_section(found.fits, found.predictions),
        disks.disks_section(found),
        claims.capacity_section(found),
        kinds.section(found),
        _UNKNOWABLE,
    )
    return "\n".join(parts)


def quote(found: Found) -> str:
    inside: list[str] = []
    outside: list[str] = []
    known: list[str] = []
    for claim in CLAIMS:
        values = claim.values(found.predictions, batch=BATCH)
        which = f" {NAMES[claim.awareness]}" if claim.figure == "8" else ""
        name = f"Figure {claim.figure}{which}, {claim.said:,.0f}{claim.unit}"
        if off := claim.outside(found.predictions, batch=BATCH):
            outside.append(f"{name} against {between(values)}, by {off:.1%}")
        else:
            variants = claim.variants(found.predictions, batch=BATCH)
            hold = predicted.hold(claim, variants)
            if any(variant.holds(claim.said) and predicted.decided(claim, variant.name) for variant in variants):
                known.append(claim.figure)
            inside.append(f"{name} in {between(values)} (a factor of {max(values) / min(values):.1f}; {hold})")
    fit = f"Of the context paper Figures 6 and 7 are fitted: {fitted.in_short(found)}"
    said = f"Of {len(CLAIMS)} numbers that are predicted, in calls of {BATCH}, {len(inside)} are inside wide intervals"
    those = f"{', '.join(inside) or 'none'}; outside: {', '.join(outside) or 'none'}"
    variant = "A variant is one assumption where the text leaves something open, over all sets of the unknowns"
    figures = f"The variants that hold Figures {' and '.join(known)} were written or kept when the answers were known. "
    return f"{fit}. {said}: {those}. {variant}. {figures if known else ''}{predicted.together(found)}"


ROUNDED = next(run for run in paper.RUNS if (run.awareness, run.batch) == (Awareness.FULL, paper.RUNS[0].batch))
HEAD = f"""# Pervasive Context Management §4, in the simulator

The paper is Thanh Son Phung and Douglas Thain, *Efficiently Executing High-throughput Lightweight LLM Inference
Applications on Heterogeneous Opportunistic GPU Clusters with Pervasive Context Management* (University of Notre Dame);
its sections and figures are meant where this page names one. What it calls context-agnostic, partial and full is here
`no-awareness`, `disk-only` and `default`.

`make reproduce` writes this page, its plots, the parameters and the scenarios anew. The manager and its policies are
those of a live session (`default`, and for the paper's lesser versions `disk-only` and `no-awareness` of
`benchmarks/baselines`); models of what carries out their commands are in `manager/sim`.

Parameters are fitted on Figures 6 and 7 alone, under bounds of what is physically possible, and written to
[context-paper-parameters.json](context-paper-parameters.json) before anything is predicted. Nothing is refitted for
Figures 8 and 9. Many parameter sets explain Figures 6 and 7 as well as one another, so a prediction is an interval
over all of them, and over what the text leaves open of each run. A set is *close* when no number is off by more than
{CLOSE:.0%} in the closed form that sets are searched with (the text rounds {ROUNDED.seconds:,.0f} s to
{paper.ROUNDED_S / 2 / ROUNDED.seconds:.1%}), *fair* when none is by more than {FAIR:.0%} (each run was done once, on
a cluster that others used as well). So the interval of close sets has a tolerance of {CLOSE:.0%} in it and that of all
sets one of {FAIR:.0%}: a paper's number beyond the end of an interval is outside, by however little. The simulator
itself is off by a little more or less than the closed form.

`stoker simulate context-paper-6` (or `-7`, `-8`, `-9a`, `-9b`) runs one of them with the most central set; its file
says how the lesser versions are set beside it.
"""
_INDEX = """## Every figure and table of the paper

| paper | what it has | here |
|---|---|---|
| Figures 1, 2, 4 | drawings | nothing to measure |
| Figures 3, 5 | the program without and with a context | `apps/fact_verification`, which runs on real pilots: \
`stoker run fact_verification --awareness none` and `--awareness full` |
| Table 1 | the GPUs of the cluster | *Table 1: the speeds of the kinds*, which are assumed |
| Figures 6, 7 | seconds on 20 static GPUs, by awareness and by inferences a call | *Figures 6 and 7: fitted*; \
real runs of a small model on two cores: `make bench ARGS="awareness fact_batches"` (found: `benchmarks/RESULTS.md`) |
| §4.2, §4.3 (RQ1, RQ2) | ratios of the times of Figures 6 and 7 | *The ratios of §4.2 and §4.3* |
| Figure 8 | inferences done while GPUs go one by one | *Figures 8 and 9: predicted*, and the two sections that \
follow. That full awareness "consistently has a higher inference completion rate at any given time" is drawn, and not \
compared. {vanishing} |
| Figure 9 | a pool that grows to 20 and to 186 GPUs | *Figures 8 and 9: predicted*, and the section on capacity |
"""


def _index(found: Found) -> str:
    return _INDEX.replace("{vanishing}", _vanishing(found))


def _vanishing(found: Found) -> str:
    line = quoted_records.read("vanishing").line("calls done")
    (*_, ratios) = line.cells.values()
    times = f"{spread(ratios, digits=line.last_digits)} times as many calls"
    real = f"""Real pilots whose calls and loads sleep, none lost early: `make bench ARGS=vanishing` (found:
        `benchmarks/RESULTS.md`) has {times} with full awareness as with partial."""
    simulated = [one for each in claims.pairs(found.predictions, batch=BATCH, none_lost=True).values() for one in each]
    if simulated:
        real += f""" Its loads take {LOAD_IN_CALLS:g} of a call because that is put in, so this may be compared with
            what the simulator has of that case, {between(simulated, ".2f")} in calls of {BATCH}, and not with the
            paper's {claims.SAID:.2f}."""
    return " ".join(real.split())


def _made(found: Found) -> str:
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
    return paragraph(f"Made by {found.facts.line()}; {record}. {searched} {known} {seeds}") + "\n"


def _short(found: Found) -> str:
    told = [
        f"Figures 6 and 7 are fitted: {fitted.in_short(found)}.",
        *predicted.in_short(found),
        claims.gains_in_short(found),
        *disks.in_short(found),
        claims.capacity_in_short(found),
    ]
    return "\n".join(["## In short", "", *(paragraph(each, bullet=True) for each in told), ""])


_UNKNOWABLE = """## What cannot be known from the text

- *How long an inference takes on each kind of GPU, and how long a load.* Times of whole runs on a half-and-half pool
  give combinations of the two. Which kind does more of the work decides Figure 8, where one kind goes first.
- *Disks and GPUs a node.* Workers of one node share its disk; what that does to Figure 8 has a section above.
- *How many inferences a call of Figures 8 and 9 has.*
- *When the first GPU of Figure 8 went*, at once or a minute later; *when three more dropped out, and of which kind*.
- *How the pools of Figure 9 grew, and of which kinds they were.* The figures show it, the text does not. Whether any
  GPU was taken back meanwhile is unknown as well; here none is.
- *How fast the other six kinds of Table 1 are.* They have speeds by their makers' peak rates, along a power law through
  the two kinds that were fitted: good enough for a mix, wrong for each. The section above has them.
- *How much two runs of the same program differ on that cluster.* Each was done once.
- *Whether the first inferences of a process are slower.* Sets with and without explain Figures 6 and 7 alike.
"""
