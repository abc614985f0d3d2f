"""Figure 8's full awareness over partial: how many times as many inferences, in pairs of runs.

A pair has the same parameters, the same size of calls, and loses its first GPU at the same time. Both numbers are the
paper's, so their ratio is a third claim, which both intervals may hold and no pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from benchmarks.papers.pervasive import paper
from benchmarks.papers.pervasive.found import Found, between
from benchmarks.papers.pervasive.predict import BATCHES, NONE_LOST, Prediction
from benchmarks.tables import head, paragraph, row
from stoker.contexts.recipe import Awareness

SAID = paper.FIGURE_8[Awareness.FULL] / paper.FIGURE_8[Awareness.DISK]


def pairs(rows: Iterable[Sequence[Prediction]], *, batch: int, none_lost: bool = False) -> dict[str, list[float]]:
    """Ratios, by when the first GPU goes. `none_lost`: without the three that full awareness lost early, which is not
    what the paper's figure has."""
    found: dict[str, list[float]] = {}
    for each in rows:
        runs = [one for one in each if one.figure == "8" and one.batch == batch]
        partial = {one.variant: one.value for one in runs if one.awareness is Awareness.DISK}
        for one in runs:
            if one.awareness is Awareness.FULL and (one.variant == NONE_LOST) is none_lost:
                start = one.variant.split(",")[0]
                found.setdefault(start, []).append(one.value / partial[start])
    return found


def in_short(found: Found) -> str:
    """The span by the size of calls, and in how many pairs full awareness does less."""
    told = []
    for batch in BATCHES:
        ratios = [one for values in pairs(found.predictions, batch=batch).values() for one in values]
        less, shown = sum(one < 1.0 for one in ratios), between(ratios, ".2f")
        told.append(
            f"in calls of {batch:,} it does {shown} times as much, less than partial in {less} of {len(ratios)}"
        )
    return f"""Under preemption full awareness does {SAID:.2f} times as much as partial in the paper. In pairs of runs
        with the same parameters and the same start: {"; ".join(told)}."""


def section(found: Found) -> str:
    """The part of the page about it."""
    lines = [
        "### Full over partial under preemption",
        "",
        paragraph(f"""The paper has {SAID:.2f}, with three GPUs lost early under full awareness only. Each pair has the
            same parameters, the same size of calls and the same start."""),
        "",
        *head(
            "inferences a call", "first GPU goes", "pairs", "full over partial", "median", "full does less than partial"
        ),
    ]
    for batch in BATCHES:
        groups = [(start, values) for start, values in pairs(found.predictions, batch=batch).items()]
        spared = pairs(found.predictions, batch=batch, none_lost=True)
        groups += [(f"{start}, none lost early (not the paper's case)", values) for start, values in spared.items()]
        for start, values in groups:
            less = f"in {sum(one < 1.0 for one in values)}"
            cells = [f"{batch:,}", start, f"{len(values)}", between(values, ".2f"), f"{median(values):.2f}", less]
            lines.append(row(*cells))
    return "\n".join([*lines, ""])
