"""The page's section on whether completed inferences follow the capacity that there was (Figure 9)."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from benchmarks.papers.pervasive import paper
from benchmarks.papers.pervasive.found import Found
from benchmarks.papers.pervasive.predict import BATCH
from benchmarks.papers.pervasive.proportion import Distance
from benchmarks.tables import head, paragraph, row

BAR = 0.05
"""Completed inferences count as proportional to capacity within this part of all. The bar is ours, not the paper's."""
_FIGURES = ("9a", "9b")


def _distances(found: Found, figure: str, of: Callable[[Distance], float]) -> list[float]:
    runs = [one for each in found.predictions for one in each if one.figure == figure and one.batch == BATCH]
    return [of(one.off) for one in runs if one.off]


def in_short(found: Found) -> str:
    """By the paper's own counting."""
    told = []
    for figure in _FIGURES:
        values = _distances(found, figure, lambda off: off.connected)
        missed = sum(value > BAR for value in values)
        told.append(f"Figure {figure} fails in {missed} of {len(values)} runs (median distance {median(values):.1%})")
    return f"""Completed inferences in proportion to connected GPUs, as the paper's Figure 9 counts, in calls of
        {BATCH}, within {BAR:.0%} (our bar): {"; ".join(told)}."""


def section(found: Found) -> str:
    """The part of the page about it."""
    rules: tuple[tuple[str, Callable[[Distance], float]], ...] = (
        ("GPUs that are connected; inferences when their call ends (the paper's counting)", lambda off: off.connected),
        ("GPUs that hold the context, until the last call is handed out; the same", lambda off: off.hot),
        ("the same GPUs; inferences evenly from a call's beginning to its end", lambda off: off.evenly),
    )
    lines = [
        "## Completed inferences against the integral of capacity (Figure 9)",
        "",
        paragraph(f"""Each GPU counts with the inferences a second that its kind does. Given is how far completed
            inferences ever are from a line through the origin and the end, as a part of all {paper.INFERENCES:,}:
            the median over sets and variants, in calls of {BATCH}, and the most. Within {BAR:.0%} is our bar for
            what may be called proportional; the paper names none, and says of Figure 9a that the rate "scales
            linearly with the amount of opportunistically connected GPUs" (§4.5)."""),
        "",
        *head("what is integrated and counted", *_FIGURES),
    ]
    for words, of in rules:
        cells = []
        for figure in _FIGURES:
            values = _distances(found, figure, of)
            kept = sum(value <= BAR for value in values)
            cells.append(f"{median(values):.1%}, at most {max(values):.1%}; {kept} of {len(values)} within {BAR:.0%}")
        lines.append(row(words, *cells))
    lines += [
        "",
        paragraph(f"""The first rule is the paper's figure: GPUs that load count, and do nothing yet. The second leaves
            loads out, and the tail, in which GPUs have nothing to do. What it still shows is calls that run: with
            {paper.FIGURE_9B_GPUS} GPUs up to {paper.FIGURE_9B_GPUS * BATCH:,} inferences are in calls that run, and
            those of them that are done are not yet reported. The third spreads a call's inferences over its time. It
            is nearly an identity: a GPU's rate times the time that it is busy is its inferences. So a small distance
            by the third rule says that GPUs that hold the context are busy, and is no evidence that completed
            inferences follow capacity."""),
        "",
    ]
    return "\n".join(lines)
