"""Compare predicted numbers with the paper.

The ratio of Figure 8 divides full by partial runs with equal parameters, call size and first loss. The section on
Figure 9 compares completed inferences with capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median

import msgspec

from benchmarks.papers.pervasive import paper, worlds
from benchmarks.papers.pervasive.drawing import NAMES
from benchmarks.papers.pervasive.predict import (
    BATCH,
    BATCHES,
    KEPT_VARIANTS,
    NONE_LOST,
    Distance,
    Found,
    Prediction,
    range_text,
)
from benchmarks.tables import head, paragraph, row
from stoker.contexts.recipe import Awareness


def awareness_name(awareness: Awareness) -> str:
    return f"{NAMES[awareness]} (`{worlds.POLICIES[awareness]}`)"


class Variant(msgspec.Struct, frozen=True):
    """An assumption about an unspecified detail, and the interval of all parameter sets with this assumption."""

    name: str
    low: float
    high: float

    def includes(self, said: float) -> bool:
        return self.low <= said <= self.high


class Claim(msgspec.Struct, frozen=True):
    """A predicted number of the paper. `text`: quotation; `unit`: text after the number."""

    figure: str
    awareness: Awareness
    words: str
    said: float
    text: str = ""
    unit: str = ""

    def values(self, rows: Iterable[Sequence[Prediction]], *, batch: int = 0) -> list[float]:
        return [one.value for each in rows for one in self._predictions_in(each, batch)]

    def variants(self, rows: Iterable[Sequence[Prediction]], *, batch: int) -> list[Variant]:
        found: dict[str, list[float]] = {}
        for each in rows:
            for one in self._predictions_in(each, batch):
                found.setdefault(one.variant, []).append(one.value)
        return [Variant(name, min(values), max(values)) for name, values in found.items()]

    def distance_outside(self, rows: Iterable[Sequence[Prediction]], *, batch: int = 0) -> float:
        return distance_outside(self.said, self.values(rows, batch=batch))

    def verdict(self, rows: Iterable[Sequence[Prediction]], *, batch: int = 0) -> str:
        return verdict_text(self.said, self.values(rows, batch=batch))

    def _predictions_in(self, row: Sequence[Prediction], batch: int) -> list[Prediction]:
        return [one for one in row if one.is_prediction_of(self.figure, self.awareness) and batch in (0, one.batch)]


def distance_outside(said: float, values: Sequence[float]) -> float:
    nearest = min(max(said, min(values)), max(values))
    return abs(nearest / said - 1.0)


def verdict_text(said: float, values: Sequence[float]) -> str:
    """Return whether the number is inside the interval."""
    if off := distance_outside(said, values):
        return f"**outside** by {off:.1%}"
    return "inside, at its end" if said in (min(values), max(values)) else "inside"


CLAIMS = (
    Claim("8", Awareness.DISK, f"8, {awareness_name(Awareness.DISK)}: inferences done", paper.FIGURE_8[Awareness.DISK]),
    Claim("8", Awareness.FULL, f"8, {awareness_name(Awareness.FULL)}: inferences done", paper.FIGURE_8[Awareness.FULL]),
    Claim("9a", Awareness.FULL, "9a, from 4 to 20 GPUs: seconds", paper.FIGURE_9A_S, paper.FIGURE_9A_TEXT, " s"),
    Claim("9b", Awareness.FULL, "9b, up to 186 GPUs: seconds", paper.FIGURE_9B_S, paper.FIGURE_9B_TEXT, " s"),
)
PARTIAL, FULL = CLAIMS[:2]


SAID = paper.FIGURE_8[Awareness.FULL] / paper.FIGURE_8[Awareness.DISK]


def pairs(rows: Iterable[Sequence[Prediction]], *, batch: int, none_lost: bool = False) -> dict[str, list[float]]:
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
        less, shown = sum(one < 1.0 for one in ratios), range_text(ratios, ".2f")
        told.append(
            f"in calls of {batch:,} it does {shown} times as much, less than partial in {less} of {len(ratios)}"
        )
    return f"While GPUs go, full does {SAID:.2f} times as much as partial in the paper; here, {'; '.join(told)}."


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
            cells = [f"{batch:,}", start, f"{len(values)}", range_text(values, ".2f"), f"{median(values):.2f}", less]
            lines.append(row(*cells))
    return "\n".join(lines)


BAR = 0.05
"""Our bar: maximum deviation from proportionality to capacity, as a share of all inferences."""
_FIGURES = ("9a", "9b")


def _capacity_distances(found: Found, figure: str, of: Callable[[Distance], float]) -> list[float]:
    runs = [one for each in found.predictions for one in each if one.figure == figure and one.batch == BATCH]
    return [of(one.off) for one in runs if one.off]


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
            values = _capacity_distances(found, figure, of)
            kept = sum(value <= BAR for value in values)
            cells.append(f"{median(values):.1%}, at most {max(values):.1%}; {kept} of {len(values)} within {BAR:.0%}")
        lines.append(row(words, *cells))
    return "\n".join(lines)


_PANELS = (
    "Lines: the most central set, with the variant that has the middle result. Bands: all sets and variants. Number of"
    " GPUs: calls of both sizes."
)


def decision_text(claim: Claim, name: str) -> str:
    """Return text that says if a variant of Figure 9 was written before or after the answer was known."""
    if not claim.figure.startswith("9"):
        return ""
    return f": {'kept' if name in KEPT_VARIANTS else 'written'} when the answer was known"


def count_including_variants(claim: Claim, variants: Sequence[Variant]) -> str:
    return f"{sum(variant.includes(claim.said) for variant in variants)} of {len(variants)}"


def including_variants_text(claim: Claim, variants: Sequence[Variant]) -> str:
    count = count_including_variants(claim, variants)
    return f"{count} variants {'holds' if count.startswith('1 ') else 'hold'} it"


def figure_8_text(found: Found) -> str:
    claims = [claim for claim in CLAIMS if claim.figure == "8"]
    missed = {
        batch: [
            f"{NAMES[claim.awareness]} by {off:.1%}"
            for claim in claims
            if (off := claim.distance_outside(found.predictions, batch=batch))
        ]
        for batch in BATCHES
    }
    whole = [f"{batch:,}" for batch in BATCHES if not missed[batch]]
    if whole:
        said = f"Both numbers of Figure 8 are inside in calls of {' and '.join(whole)}"
    else:
        said = "No size of calls puts both numbers of Figure 8 inside"
    misses = [f"calls of {batch:,} miss {' and '.join(those)}" for batch, those in missed.items() if those]
    return f"{said}{': ' if misses else ''}{', '.join(misses)}."


def interval_table(found: Found) -> str:
    lines = head(
        "figure", "inferences a call", "paper", "close sets", "judged", "all sets", "median", "judged",
        "variants that hold it",
    )  # fmt: skip
    for claim in CLAIMS:
        for batch in BATCHES:
            near, every = claim.values(found.close, batch=batch), claim.values(found.predictions, batch=batch)
            cells = [
                claim.words, f"{batch:,}", f"{claim.said:,.0f}", range_text(near),
                claim.verdict(found.close, batch=batch), range_text(every), f"{median(every):,.0f}",
                claim.verdict(found.predictions, batch=batch),
                count_including_variants(claim, claim.variants(found.predictions, batch=batch)),
            ]  # fmt: skip
            lines.append(row(*cells))
    return "\n".join(lines)


def panels_caption(found: Found) -> str:
    return paragraph(_PANELS if found.panels else _mixed_panels_caption(found))


def _mixed_panels_caption(found: Found) -> str:
    drawn, *others = (
        one.value for one in found.predictions[0] if one.is_prediction_of("8", Awareness.FULL) and one.batch == BATCH
    )
    least = f" (of full in Figure 8 the one that does least in calls of {BATCH})" if drawn < min(others) else ""
    return f"""Lines: the most central set in calls of {BATCH}, with the first variant of each below{least}. Bands: all
        sets and variants, calls of both sizes together."""


def including_variants_table(found: Found) -> str:
    lines = head("figure", "inferences a call", "paper", "held by", "which", "below it", "above it")
    for claim in CLAIMS:
        for batch in BATCHES:
            variants = claim.variants(found.predictions, batch=batch)
            held = [variant.name for variant in variants if variant.includes(claim.said)]
            which = "; ".join(name + decision_text(claim, name) for name in held) or "none"
            below = [variant.high for variant in variants if variant.high < claim.said]
            above = [variant.low for variant in variants if variant.low > claim.said]
            cells = [
                claim.words, f"{batch:,}", f"{claim.said:,.0f}",
                f"{count_including_variants(claim, variants)} variants", which,
                f"{len(below)}, at most {max(below):,.0f}" if below else "none",
                f"{len(above)}, at least {min(above):,.0f}" if above else "none",
            ]  # fmt: skip
            lines.append(row(*cells))
    return "\n".join(lines)


def variants_table(found: Found) -> str:
    lines = head("figure", "inferences a call", "assumed", "most central set", "all sets", "the paper's number is")
    for place, first in enumerate(found.predictions[0]):
        values = [each[place].value for each in found.predictions]
        name = f"{first.figure}, {awareness_name(first.awareness)}" if first.figure == "8" else first.figure
        [said] = [claim.said for claim in CLAIMS if (claim.figure, claim.awareness) == (first.figure, first.awareness)]
        where = "above" if said > max(values) else "below" if said < min(values) else "inside"
        where = "not counted" if first.variant == NONE_LOST else where
        shown = f"{first.value:,.0f}"
        lines.append(row(name, f"{first.batch:,}", first.variant, shown, range_text(values), where))
    return "\n".join(lines)
