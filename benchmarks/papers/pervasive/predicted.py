"""The page's sections on Figures 8 and 9: intervals, and what each variant of what the text leaves open gives."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from benchmarks.papers.pervasive.claims import CLAIMS, Claim, Variant, called
from benchmarks.papers.pervasive.drawing import NAMES
from benchmarks.papers.pervasive.predict import BATCH, BATCHES, KEPT_VARIANTS, NONE_LOST, Found, Prediction, between
from benchmarks.tables import head, paragraph, row
from stoker.contexts.recipe import Awareness

_NAMED = 2
"""`In short` names up to this many of the variants that hold a number. If more hold it, it only counts them."""
_PANELS = (
    "Lines: the most central set, with the variant that has the middle result. Bands: all sets and variants. Number of"
    " GPUs: calls of both sizes."
)


def in_short(found: Found) -> list[str]:
    lines = [together(found)]
    lines.append(
        """Below, a variant is one assumption where the text leaves something open; it *holds* a number that lies in its
        own interval over all sets."""
    )
    for claim in CLAIMS:
        told = " ".join(f"In calls of {batch:,} {_told(found, claim, batch)}." for batch in BATCHES)
        text = f', with a pool that "{claim.text}"' if claim.text else ""
        lines.append(f"Figure {claim.words}. The paper has {claim.said:,.0f}{text}. {told}")
    return lines


def _told(found: Found, claim: Claim, batch: int) -> str:
    variants = claim.variants(found.predictions, batch=batch)
    held = [variant.name for variant in variants if variant.holds(claim.said)]
    which = f" ({'; '.join(name + decided(claim, name) for name in held)})" if 0 < len(held) <= _NAMED else ""
    interval = between(claim.values(found.predictions, batch=batch))
    verdict = claim.verdict(found.predictions, batch=batch)
    verdict = "inside the span of all variants only" if verdict == "inside" and not held else verdict
    return f"{interval}: {verdict}; {hold(claim, variants)}{which}"


def decided(claim: Claim, name: str) -> str:
    """Whether a variant of Figure 9 was written anew, or kept, when the paper's number and predictions were known."""
    if not claim.figure.startswith("9"):
        return ""
    return f": {'kept' if name in KEPT_VARIANTS else 'written'} when the answer was known"


def holders(claim: Claim, variants: Sequence[Variant]) -> str:
    return f"{sum(variant.holds(claim.said) for variant in variants)} of {len(variants)}"


def hold(claim: Claim, variants: Sequence[Variant]) -> str:
    count = holders(claim, variants)
    return f"{count} variants {'holds' if count.startswith('1 ') else 'hold'} it"


def together(found: Found) -> str:
    """Whether one size of calls has both numbers of Figure 8 inside, and by how much each misses."""
    claims = [claim for claim in CLAIMS if claim.figure == "8"]
    missed = {
        batch: [
            f"{NAMES[claim.awareness]} by {off:.1%}"
            for claim in claims
            if (off := claim.outside(found.predictions, batch=batch))
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


def intervals(found: Found) -> str:
    lines = head(
        "figure", "inferences a call", "paper", "close sets", "judged", "all sets", "median", "judged",
        "variants that hold it",
    )  # fmt: skip
    for claim in CLAIMS:
        for batch in BATCHES:
            near, every = claim.values(found.close, batch=batch), claim.values(found.predictions, batch=batch)
            cells = [
                claim.words, f"{batch:,}", f"{claim.said:,.0f}", between(near),
                claim.verdict(found.close, batch=batch), between(every), f"{median(every):,.0f}",
                claim.verdict(found.predictions, batch=batch),
                holders(claim, claim.variants(found.predictions, batch=batch)),
            ]  # fmt: skip
            lines.append(row(*cells))
    return "\n".join(lines)


def panels(found: Found) -> str:
    return paragraph(_PANELS if found.panels else _mixed(found))


def _mixed(found: Found) -> str:
    drawn, *others = (
        one.value for one in found.predictions[0] if one.is_of("8", Awareness.FULL) and one.batch == BATCH
    )
    least = f" (of full in Figure 8 the one that does least in calls of {BATCH})" if drawn < min(others) else ""
    return f"""Lines: the most central set in calls of {BATCH}, with the first variant of each below{least}. Bands: all
        sets and variants, calls of both sizes together."""


def held(found: Found) -> str:
    lines = head("figure", "inferences a call", "paper", "held by", "which", "below it", "above it")
    for claim in CLAIMS:
        for batch in BATCHES:
            variants = claim.variants(found.predictions, batch=batch)
            held = [variant.name for variant in variants if variant.holds(claim.said)]
            which = "; ".join(name + decided(claim, name) for name in held) or "none"
            below = [variant.high for variant in variants if variant.high < claim.said]
            above = [variant.low for variant in variants if variant.low > claim.said]
            cells = [
                claim.words, f"{batch:,}", f"{claim.said:,.0f}", f"{holders(claim, variants)} variants", which,
                f"{len(below)}, at most {max(below):,.0f}" if below else "none",
                f"{len(above)}, at least {min(above):,.0f}" if above else "none",
            ]  # fmt: skip
            lines.append(row(*cells))
    return "\n".join(lines)


def variants(found: Found) -> str:
    lines = head("figure", "inferences a call", "assumed", "most central set", "all sets", "the paper's number is")
    for place, first in enumerate(found.predictions[0]):
        values = [each[place].value for each in found.predictions]
        name = f"{first.figure}, {called(first.awareness)}" if first.figure == "8" else first.figure
        [said] = [claim.said for claim in CLAIMS if (claim.figure, claim.awareness) == (first.figure, first.awareness)]
        where = "above" if said > max(values) else "below" if said < min(values) else "inside"
        where = "not counted" if first.variant == NONE_LOST else where
        lines.append(variant_row(name, first, between(values), where))
    return "\n".join(lines)


def variant_row(name: str, first: Prediction, every: str, where: str) -> str:
    return row(name, f"{first.batch:,}", first.variant, f"{first.value:,.0f}", every, where)
