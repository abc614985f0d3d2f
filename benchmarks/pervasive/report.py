"""`docs/reproduction/context-paper.md`: paper and prediction side by side, and what cannot be known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

import msgspec

from benchmarks.facts import Facts
from benchmarks.pervasive import neighbours, paper, quick, shares
from benchmarks.pervasive.claims import CLAIMS, called, judged
from benchmarks.pervasive.fit import CLOSE, FAIR, Fit
from benchmarks.pervasive.neighbours import Preempted, Shared
from benchmarks.pervasive.parameters import BOUNDS
from benchmarks.pervasive.predict import BATCH, BATCHES, Prediction
from benchmarks.pervasive.proportion import Distance
from benchmarks.words import head, paragraph
from stoker.contexts.recipe import Awareness
from stoker.units import show_bytes

BAR = 0.05
"""Completed inferences count as proportional to capacity within this part of all. The bar is ours, not the paper's."""


class Found(msgspec.Struct, frozen=True):
    """What the reproduction came to. `simulated`: the static runs with the first, most central of the `fits`; of
    `predictions` and `shared` there is one row for each fit. `starts`: of searches that the fits came from."""

    facts: Facts
    starts: int
    fits: tuple[Fit, ...]
    simulated: tuple[tuple[paper.Run, float], ...]
    predictions: tuple[tuple[Prediction, ...], ...]
    shared: tuple[Shared, ...] = ()

    def without_looks(self) -> Found:
        """As the record keeps it: what is drawn is left out."""
        rows = [[msgspec.structs.replace(one, looks=()) for one in row] for row in self.predictions]
        return msgspec.structs.replace(self, predictions=tuple(map(tuple, rows)))


def write(found: Found) -> str:
    """The page, in Markdown."""
    parts = (
        HEAD,
        _made(found),
        _short(found),
        INDEX,
        _static(found),
        _unknowns(found),
        _predicted(found),
        _variants(found),
    )
    more = (shares.section(found.fits, found.predictions), _neighbours(found), _proportion(found), _UNKNOWABLE)
    return "\n".join([*parts, *more])


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
a cluster that others used as well). A prediction of close sets may be off by as much as they, one of all sets by as
much as these. The simulator itself is off by a little more or less than the closed form.

`stoker simulate context-paper-6` (or `-7`, `-8`, `-9a`, `-9b`) runs one of them with the most central set; its file
says how the lesser versions are set beside it.
"""
INDEX = """## Every figure and table of the paper

| paper | what it has | here |
|---|---|---|
| Figures 1, 2, 4 | drawings | nothing to measure |
| Figures 3, 5 | the program without and with a context | `apps/fact_verification`, which runs on real pilots |
| Table 1 | the GPUs of the cluster | speeds by kind: *What cannot be known from the text* |
| Figures 6, 7 | seconds on 20 static GPUs, by awareness and by inferences a call | *Figures 6 and 7: fitted* |
| Figure 8 | inferences done while GPUs go one by one | *Figures 8 and 9: predicted*, and the two sections that follow |
| Figure 9 | a pool that grows to 20 and to 186 GPUs | *Figures 8 and 9: predicted*, and the section on capacity |
"""


def _made(found: Found) -> str:
    seeds = "Nothing is drawn by chance but where searches begin: the same code gives the same page."
    record = "record: [context-paper.json](context-paper.json)"
    return paragraph(f"Made by {found.facts.line()}; {record}. {seeds}") + "\n"


def _short(found: Found) -> str:
    worst = max(abs(run.error(seconds)) for run, seconds in found.simulated)
    lines = [
        "## In short",
        "",
        f"- Figures 6 and 7: one parameter set gives all {len(found.simulated)} numbers within {at_most(worst)}.",
    ]
    for claim in CLAIMS:
        told = [
            f"in calls of {batch:,} {_between(claim.values(found.predictions, batch=batch))}:"
            f" {claim.verdict(found.predictions, batch=batch)}"
            for batch in BATCHES
        ]
        lines.append(
            paragraph(f"Figure {claim.words}. The paper has {claim.said:,.0f}; {'; '.join(told)}.", bullet=True)
        )
    lines += [
        paragraph(
            f"""Under preemption full awareness does {_gains(found)} times as much as partial, in calls of {BATCH}; the
            paper has {paper.FIGURE_8[Awareness.FULL] / paper.FIGURE_8[Awareness.DISK]:.2f}.""",
            bullet=True,
        ),
        *_neighbours_in_short(found),
    ]
    return "\n".join([*lines, ""])


# ---- Figures 6 and 7


def _static(found: Found) -> str:
    lines = [
        "## Figures 6 and 7: fitted",
        "",
        paragraph(f"""{paper.INFERENCES:,} inferences on ten A10 and ten TITAN X (Pascal). *Simulated* is the most
            central parameter set; what all sets give is from the closed form that they were searched with, which is
            within {at_most(_apart(found))} of the simulator here."""),
        "",
        "| figure | context | inferences a call | paper, s | simulated, s | error | all sets, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for run, seconds in found.simulated:
        values = [quick.seconds(each.parameters, run.awareness, run.batch) for each in found.fits]
        lines.append(f"{static_row(run, seconds)} {_between(values)} |")
    lines += ["", "![Figures 6 and 7](context-paper-figures-6-7.png)", ""]
    return "\n".join(lines)


def static_row(run: paper.Run, seconds: float) -> str:
    """A run of Figure 6 or 7, beside the paper's, without what all sets give."""
    said = f"{run.seconds:,.0f} to {run.most:,.0f}" if run.most else f"{run.seconds:,.0f}"
    times = f"{said} | {seconds:,.0f} | {run.error(seconds):+.1%}"
    return f"| {run.figure} | {called(run.awareness)} | {run.batch:,} | {times} |"


def _apart(found: Found) -> float:
    """How far the closed form is from the simulator, at most."""
    first = found.fits[0].parameters
    return max(abs(quick.seconds(first, run.awareness, run.batch) / seconds - 1.0) for run, seconds in found.simulated)


def _unknowns(found: Found) -> str:
    close = sum(each.close for each in found.fits)
    lines = [
        f"## The unknowns: {len(found.fits)} sets of parameters, {close} of them close",
        "",
        f"From {found.starts} searches that began anywhere within the bounds. Of the sets found, those that lie",
        "farthest apart.",
        "",
        "| parameter | possible | most central | all | why these bounds |",
        "|---|---|---|---|---|",
    ]
    for name, bound in BOUNDS.items():
        values = [getattr(each.parameters, name) for each in found.fits]
        shown = [_show(name, value) for value in (bound.low, bound.high, values[0], min(values), max(values))]
        lines.append(f"| {name} | {shown[0]} to {shown[1]} | {shown[2]} | {shown[3]} to {shown[4]} | {bound.why} |")
    return "\n".join([*lines, ""])


def _show(name: str, value: float) -> str:
    if name.endswith("bytes_per_s"):
        return f"{show_bytes(value)}/s"
    if name == "warm_items":
        return f"{value:.0f}"
    return f"{value:.2g} s" if 0.001 <= value < 1 else f"{value:.3g} s" if value >= 1 else "0 s"


# ---- Figures 8 and 9


def _predicted(found: Found) -> str:
    lines = [
        "## Figures 8 and 9: predicted",
        "",
        *head("figure", "inferences a call", "paper", "close sets", "judged", "all sets", "median", "judged"),
    ]
    close = [row for each, row in zip(found.fits, found.predictions, strict=True) if each.close]
    for claim in CLAIMS:
        for batch in BATCHES:
            near, every = claim.values(close, batch=batch), claim.values(found.predictions, batch=batch)
            cells = [
                claim.words, f"{batch:,}", f"{claim.said:,.0f}", _between(near),
                claim.verdict(close, batch=batch, within=CLOSE), _between(every), f"{median(every):,.0f}",
                claim.verdict(found.predictions, batch=batch),
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"§4.2 has calls of {BATCH}; of the runs of Figures 8 and 9 the text does not say how many a call had.",
        "",
        "![Figure 8](context-paper-figures-8.png)",
        "![Figure 9](context-paper-figures-9.png)",
        "",
        "Lines: the most central set, with the first variant of each below. Bands: all sets and variants.",
        "",
    ]
    return "\n".join(lines)


def _gains(found: Found) -> str:
    """Full awareness over partial, with the same parameters."""
    partial, full = CLAIMS[:2]
    values = [
        value / least
        for row in found.predictions
        for least in partial.values([row], batch=BATCH)
        for value in full.values([row], batch=BATCH)
    ]
    return f"{min(values):.2f} to {max(values):.2f}"


def _variants(found: Found) -> str:
    lines = [
        "### By what the text leaves open",
        "",
        "| figure | inferences a call | assumed | most central set | all sets |",
        "|---|---|---|---|---|",
    ]
    for place, first in enumerate(found.predictions[0]):
        values = [row[place].value for row in found.predictions]
        name = f"{first.figure}, {called(first.awareness)}" if first.figure == "8" else first.figure
        lines.append(variant_row(name, first, _between(values)))
    return "\n".join([*lines, ""])


def variant_row(name: str, first: Prediction, every: str) -> str:
    """A run with the most central set, and what all sets give."""
    return f"| {name} | {first.batch:,} | {first.variant} | {first.value:,.0f} | {every} |"


# ---- nodes of several GPUs


def _kept(found: Found) -> list[tuple[int, Shared, tuple[Prediction, ...]]]:
    """Of each kind of node and each set, those whose static run stays within the limit of the fit: the node's place."""
    return [
        (place, shared, row)
        for shared, row in zip(found.shared, found.predictions, strict=True)
        for place, seconds in enumerate(shared.static_s)
        if abs(_PARTIAL.error(seconds)) <= FAIR
    ]


_PARTIAL = next(run for run in paper.RUNS if (run.awareness, run.batch) == (Awareness.DISK, BATCH))


def _of_node(shared: Shared, place: int) -> list[Preempted]:
    nodes = neighbours.NODES[place]
    return [run for run in shared.runs if (run.sharing.gpus, run.sharing.reads) == (nodes.gpus, nodes.reads)]


def _neighbours_in_short(found: Found) -> list[str]:
    if not found.shared:
        return []
    values = [run.done for place, shared, _ in _kept(found) for run in _of_node(shared, place)]
    said = paper.FIGURE_8[Awareness.DISK]
    verdict = judged(said, values, within=FAIR)
    text = f"""On nodes whose workers share a disk, simulated, partial does {_between(values)} in calls of {BATCH}; the
    paper's {said:,.0f} is {verdict}."""
    return [paragraph(text, bullet=True)]


def _neighbours(found: Found) -> str:
    lines = [
        "## Loads that depend on their neighbours, simulated",
        "",
        paragraph(f"""Workers of one node share its disk; when neighbours are preempted, the loads of those that stay
            get faster. Simulated is the most that this can do: the workers of a node load at the same time, a load
            with all its neighbours takes what was fitted, and its reading gets faster with each that goes. Figure
            8, partial, in calls of {BATCH}; sets whose Figure 6 is off by more than {FAIR:.0%} on such nodes are
            left out."""),
        "",
        *head(
            "GPUs a node", "of a load, reading", "GPUs go", "first at, s", "sets", "done, one GPU a node", "done here",
            f"{paper.FIGURE_8[Awareness.DISK]:,.0f}",
        ),
    ]  # fmt: skip
    kept = _kept(found)
    for place, nodes in enumerate(neighbours.NODES):
        mine = [(shared, row) for where, shared, row in kept if where == place]
        for number in range(len(_of_node(mine[0][0], place)) if mine else 0):
            runs = [_of_node(shared, place)[number] for shared, _ in mine]
            alone = [
                one.value
                for _, row in mine
                for one in row
                if one.is_of("8", Awareness.DISK) and one.batch == BATCH and f"{runs[0].from_s:.0f} s" in one.variant
            ]
            how = "from all nodes in turn" if runs[0].sharing.spread else "node by node"
            done = [run.done for run in runs]
            verdict = judged(paper.FIGURE_8[Awareness.DISK], done, within=FAIR)
            cells = [f"{nodes.gpus}", f"{nodes.reads:.0%}", how, f"{runs[0].from_s:.0f}", f"{len(mine)}"]
            lines.append(f"| {' | '.join([*cells, _between(alone), _between(done), verdict])} |")
    return "\n".join([*lines, ""])


# ---- Figure 9 and the integral of capacity


def _proportion(found: Found) -> str:
    rules: tuple[tuple[str, Callable[[Distance], float]], ...] = (
        ("GPUs that are connected; inferences when their call ends", lambda off: off.connected),
        ("GPUs that hold the context, until the last call is handed out; the same", lambda off: off.hot),
        ("the same GPUs; inferences evenly from a call's beginning to its end", lambda off: off.evenly),
    )
    lines = [
        "## Completed inferences against the integral of capacity (Figure 9)",
        "",
        paragraph(f"""Each GPU counts with the inferences a second that its kind does. Given is how far completed
            inferences ever are from a line through the origin and the end, as a part of all {paper.INFERENCES:,}:
            the median over sets and variants, in calls of {BATCH}, and the most. Within {BAR:.0%} is our bar for
            what may be called proportional; the paper names none."""),
        "",
        "| what is integrated and counted | 9a | 9b |",
        "|---|---|---|",
    ]
    for words, of in rules:
        cells = []
        for figure in ("9a", "9b"):
            runs = [one for row in found.predictions for one in row if one.figure == figure and one.batch == BATCH]
            values = [of(one.off) for one in runs if one.off]
            kept = sum(value <= BAR for value in values)
            cells.append(f"{median(values):.1%}, at most {max(values):.1%}; {kept} of {len(values)} within {BAR:.0%}")
        lines.append(f"| {words} | {' | '.join(cells)} |")
    lines += [
        "",
        paragraph(f"""The first rule is the paper's figure: GPUs that load count, and do nothing yet. The second leaves
            loads out, and the tail, in which GPUs have nothing to do. What it still shows is calls that run: with
            {paper.FIGURE_9B_GPUS} GPUs {paper.FIGURE_9B_GPUS * BATCH:,} inferences are under way, half of them done
            on the mean, and nobody has been told. The third counts these as they are done; what is left is slower
            first inferences, where a set has them, and time in which a GPU that holds the context waits."""),
        "",
    ]
    return "\n".join(lines)


def at_most(part: float) -> str:
    """A limit in percent: rounded up, so that it holds."""
    return f"{math.ceil(part * 1000.0) / 10.0:.1f}%"


def _between(values: Sequence[float]) -> str:
    return f"{min(values):,.0f} to {max(values):,.0f}"


_UNKNOWABLE = """## What cannot be known from the text

- *How long an inference takes on each kind of GPU, and how long a load.* Times of whole runs on a half-and-half pool
  give combinations of the two. Which kind does more of the work decides Figure 8, where one kind goes first.
- *Disks and GPUs a node.* Workers of one node share its disk; what that does to Figure 8 has a section above.
- *How many inferences a call of Figures 8 and 9 has.*
- *When the first GPU of Figure 8 went*, at once or a minute later; *when three more dropped out, and of which kind*.
- *How the pools of Figure 9 grew, and of which kinds they were.* The figures show it, the text does not. Whether any
  GPU was taken back meanwhile is unknown as well; here none is.
- *How fast the other six kinds of Table 1 are.* They have speeds by their makers' peak rates, along a power law through
  the two kinds that were fitted: good enough for a mix, wrong for each. The older ones load as a TITAN X does, the
  newer ones as an A10.
- *How much two runs of the same program differ on that cluster.* Each was done once.
- *Whether the first inferences of a process are slower.* Sets with and without explain Figures 6 and 7 alike.
"""
