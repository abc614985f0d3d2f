"""The numbers of the paper that are predicted, and where they are against what was found.

Figure 8's ratio of full to partial awareness takes pairs of runs with the same parameters, size of calls and first
loss. Figure 9's section tells whether completed inferences follow the capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median

import msgspec

from benchmarks.papers.pervasive import paper, worlds
from benchmarks.papers.pervasive.drawing import NAMES
from benchmarks.papers.pervasive.predict import BATCH, BATCHES, NONE_LOST, Distance, Found, Prediction, between
from benchmarks.tables import head, row
from stoker.contexts.recipe import Awareness


def called(awareness: Awareness) -> str:
    return f"{NAMES[awareness]} (`{worlds.POLICIES[awareness]}`)"


class Variant(msgspec.Struct, frozen=True):
    """One assumption about what the text leaves open, and the interval that all sets give under it."""

    name: str
    low: float
    high: float

    def holds(self, said: float) -> bool:
        return self.low <= said <= self.high


class Claim(msgspec.Struct, frozen=True):
    """A predicted number of the paper. `text`: the paper's words on that run; `unit`: as it follows the number."""

    figure: str
    awareness: Awareness
    words: str
    said: float
    text: str = ""
    unit: str = ""

    def values(self, rows: Iterable[Sequence[Prediction]], *, batch: int = 0) -> list[float]:
        """Return the results of the runs that predict the claim, with `batch` inferences a call (0: all)."""
        return [one.value for each in rows for one in self._of(each, batch)]

    def variants(self, rows: Iterable[Sequence[Prediction]], *, batch: int) -> list[Variant]:
        found: dict[str, list[float]] = {}
        for each in rows:
            for one in self._of(each, batch):
                found.setdefault(one.variant, []).append(one.value)
        return [Variant(name, min(values), max(values)) for name, values in found.items()]

    def outside(self, rows: Iterable[Sequence[Prediction]], *, batch: int = 0) -> float:
        return outside(self.said, self.values(rows, batch=batch))

    def verdict(self, rows: Iterable[Sequence[Prediction]], *, batch: int = 0) -> str:
        return judged(self.said, self.values(rows, batch=batch))

    def _of(self, row: Sequence[Prediction], batch: int) -> list[Prediction]:
        return [one for one in row if one.is_of(self.figure, self.awareness) and batch in (0, one.batch)]


def outside(said: float, values: Sequence[float]) -> float:
    """Return how far a number is from an interval, as a part of the number; 0 inside."""
    nearest = min(max(said, min(values)), max(values))
    return abs(nearest / said - 1.0)


def judged(said: float, values: Sequence[float]) -> str:
    """Say where the number is. Sets are off by up to a tolerance, so the interval has it already."""
    if off := outside(said, values):
        return f"**outside** by {off:.1%}"
    return "inside, at its end" if said in (min(values), max(values)) else "inside"


CLAIMS = (
    Claim("8", Awareness.DISK, f"8, {called(Awareness.DISK)}: inferences done", paper.FIGURE_8[Awareness.DISK]),
    Claim("8", Awareness.FULL, f"8, {called(Awareness.FULL)}: inferences done", paper.FIGURE_8[Awareness.FULL]),
    Claim("9a", Awareness.FULL, "9a, from 4 to 20 GPUs: seconds", paper.FIGURE_9A_S, paper.FIGURE_9A_TEXT, " s"),
    Claim("9b", Awareness.FULL, "9b, up to 186 GPUs: seconds", paper.FIGURE_9B_S, paper.FIGURE_9B_TEXT, " s"),
)
PARTIAL, FULL = CLAIMS[:2]
"""Figure 8's."""


SAID = paper.FIGURE_8[Awareness.FULL] / paper.FIGURE_8[Awareness.DISK]


def pairs(rows: Iterable[Sequence[Prediction]], *, batch: int, none_lost: bool = False) -> dict[str, list[float]]:
    """Return ratios by when the first GPU goes. `none_lost`: without the three that full awareness lost early."""
    found: dict[str, list[float]] = {}
    for each in rows:
        runs = [one for one in each if one.figure == "8" and one.batch == batch]
        partial = {one.variant: one.value for one in runs if one.awareness is Awareness.DISK}
        for one in runs:
            if one.awareness is Awareness.FULL and (one.variant == NONE_LOST) is none_lost:
                start = one.variant.split(",")[0]
                found.setdefault(start, []).append(one.value / partial[start])
    return found


def gains_in_short(found: Found) -> str:
    told = []
    for batch in BATCHES:
        ratios = [one for values in pairs(found.predictions, batch=batch).values() for one in values]
        less, shown = sum(one < 1.0 for one in ratios), between(ratios, ".2f")
        told.append(
            f"in calls of {batch:,} it does {shown} times as much, less than partial in {less} of {len(ratios)}"
        )
    return f"""Under preemption full awareness does {SAID:.2f} times as much as partial in the paper. In pairs of runs
        with the same parameters and the same start: {"; ".join(told)}."""


def gains_section(found: Found) -> str:
    lines = head(
        "inferences a call", "first GPU goes", "pairs", "full over partial", "median", "full does less than partial"
    )
    for batch in BATCHES:
        groups = [(start, values) for start, values in pairs(found.predictions, batch=batch).items()]
        spared = pairs(found.predictions, batch=batch, none_lost=True)
        groups += [(f"{start}, none lost early (not the paper's case)", values) for start, values in spared.items()]
        for start, values in groups:
            less = f"in {sum(one < 1.0 for one in values)}"
            cells = [f"{batch:,}", start, f"{len(values)}", between(values, ".2f"), f"{median(values):.2f}", less]
            lines.append(row(*cells))
    return "\n".join(lines)


BAR = 0.05
"""Completed inferences count as proportional to capacity within this part of all. The bar is ours, not the paper's."""
_FIGURES = ("9a", "9b")


def _distances(found: Found, figure: str, of: Callable[[Distance], float]) -> list[float]:
    runs = [one for each in found.predictions for one in each if one.figure == figure and one.batch == BATCH]
    return [of(one.off) for one in runs if one.off]


def capacity_in_short(found: Found) -> str:
    told = []
    for figure in _FIGURES:
        values = _distances(found, figure, lambda off: off.connected)
        missed = sum(value > BAR for value in values)
        told.append(f"Figure {figure} fails in {missed} of {len(values)} runs (median distance {median(values):.1%})")
    return f"""Completed inferences in proportion to connected GPUs, as the paper's Figure 9 counts, in calls of
        {BATCH}, within {BAR:.0%} (our bar): {"; ".join(told)}."""


def capacity_section(found: Found) -> str:
    rules: tuple[tuple[str, Callable[[Distance], float]], ...] = (
        ("GPUs that are connected; inferences when their call ends (the paper's counting)", lambda off: off.connected),
        ("GPUs that hold the context, until the last call is handed out; the same", lambda off: off.hot),
        ("the same GPUs; inferences evenly from a call's beginning to its end", lambda off: off.evenly),
    )
    lines = head("what is integrated and counted", *_FIGURES)
    for words, of in rules:
        cells = []
        for figure in _FIGURES:
            values = _distances(found, figure, of)
            kept = sum(value <= BAR for value in values)
            cells.append(f"{median(values):.1%}, at most {max(values):.1%}; {kept} of {len(values)} within {BAR:.0%}")
        lines.append(row(words, *cells))
    return "\n".join(lines)
