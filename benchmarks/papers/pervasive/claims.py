"""Compare predicted numbers of Figures 8 and 9 with the paper.

The ratio of Figure 8 divides runs with full awareness by partial runs with equal parameters, call size and first loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product
from statistics import median
from typing import Any, NamedTuple

import msgspec

from benchmarks.papers.pervasive import fit, paper, predict, worlds
from benchmarks.papers.pervasive.drawing import NAMES
from benchmarks.papers.pervasive.predict import BATCH, BATCHES, NONE_LOST, Found, Prediction, range_text
from stoker.contexts.recipe import Awareness

Predicted = Iterable[Sequence[Prediction]]
"""Predictions by parameter set."""
Rows = Iterator[list[str]]


def awareness_name(awareness: Awareness) -> str:
    return f"{NAMES[awareness]} (`{worlds.POLICIES[awareness]}`)"


def distance_outside(said: float, values: Sequence[float]) -> float:
    nearest = min(max(said, min(values)), max(values))
    return abs(nearest / said - 1.0)


def verdict_text(said: float, values: Sequence[float]) -> str:
    if off := distance_outside(said, values):
        return f"**outside** by {off:.1%}"
    return "inside, at its end" if said in (min(values), max(values)) else "inside"


class Claim(msgspec.Struct, frozen=True):
    """A predicted number of the paper. `text`: quotation; `unit`: text after the number."""

    figure: str
    awareness: Awareness
    words: str
    said: float
    text: str = ""
    unit: str = ""

    def values(self, rows: Predicted, *, batch: int) -> list[float]:
        return [one.value for each in rows for one in self._predictions_in(each, batch)]

    def variants(self, rows: Predicted, *, batch: int) -> dict[str, tuple[float, float]]:
        """Return the interval of values over all parameter sets, for each assumption about an unspecified detail."""
        found: dict[str, list[float]] = defaultdict(list)
        for each in rows:
            for one in self._predictions_in(each, batch):
                found[one.variant].append(one.value)
        return {name: (min(values), max(values)) for name, values in found.items()}

    def holding_variants(self, rows: Predicted, *, batch: int) -> tuple[list[str], int]:
        """Return the variants whose interval contains the paper's number, and the number of all variants."""
        variants = self.variants(rows, batch=batch)
        return [name for name, (low, high) in variants.items() if low <= self.said <= high], len(variants)

    def distance_outside(self, rows: Predicted, *, batch: int) -> float:
        return distance_outside(self.said, self.values(rows, batch=batch))

    def _predictions_in(self, row: Sequence[Prediction], batch: int) -> list[Prediction]:
        return [one for one in row if one.is_prediction_of(self.figure, self.awareness) and one.batch == batch]


CLAIMS = (
    Claim("8", Awareness.DISK, f"8, {awareness_name(Awareness.DISK)}: inferences done", paper.FIGURE_8[Awareness.DISK]),
    Claim("8", Awareness.FULL, f"8, {awareness_name(Awareness.FULL)}: inferences done", paper.FIGURE_8[Awareness.FULL]),
    Claim("9a", Awareness.FULL, "9a, from 4 to 20 GPUs: seconds", paper.FIGURE_9A_S, paper.FIGURE_9A_TEXT, " s"),
    Claim("9b", Awareness.FULL, "9b, up to 186 GPUs: seconds", paper.FIGURE_9B_S, paper.FIGURE_9B_TEXT, " s"),
)
PARTIAL, FULL = CLAIMS[:2]
SAID = FULL.said / PARTIAL.said


def figure_8_text(found: Found) -> str:
    missed: dict[int, list[str]] = {batch: [] for batch in BATCHES}
    for batch, claim in product(BATCHES, (PARTIAL, FULL)):
        if off := claim.distance_outside(found.predictions, batch=batch):
            missed[batch].append(f"{NAMES[claim.awareness]} by {off:.1%}")
    whole = [f"{batch:,}" for batch in BATCHES if not missed[batch]]
    said = f"Both numbers of Figure 8 are inside in calls of {' and '.join(whole)}"
    said = said if whole else "No size of calls puts both numbers of Figure 8 inside"
    misses = [f"calls of {batch:,} miss {' and '.join(those)}" for batch, those in missed.items() if those]
    return f"{said}{': ' if misses else ''}{', '.join(misses)}."


def interval_rows(found: Found) -> Rows:
    for claim, batch in product(CLAIMS, BATCHES):
        near, every = claim.values(found.close, batch=batch), claim.values(found.predictions, batch=batch)
        holding, total = claim.holding_variants(found.predictions, batch=batch)
        yield [
            claim.words, f"{batch:,}", f"{claim.said:,.0f}", range_text(near), verdict_text(claim.said, near),
            range_text(every), f"{median(every):,.0f}", verdict_text(claim.said, every), f"{len(holding)} of {total}",
        ]  # fmt: skip


def including_variants_rows(found: Found) -> Rows:
    for claim, batch in product(CLAIMS, BATCHES):
        holding, total = claim.holding_variants(found.predictions, batch=batch)
        intervals = claim.variants(found.predictions, batch=batch).values()
        below, above = (
            [high for _, high in intervals if high < claim.said],
            [low for low, _ in intervals if low > claim.said],
        )
        if claim.figure.startswith("9"):  # All variants of Figure 9 were written after the first predictions.
            kept = {name: "kept" if name in predict.KEPT_VARIANTS else "written" for name in holding}
            holding = [f"{name}: {how} when the answer was known" for name, how in kept.items()]
        yield [
            claim.words, f"{batch:,}", f"{claim.said:,.0f}", f"{len(holding)} of {total} variants",
            "; ".join(holding) or "none",
            f"{len(below)}, at most {max(below):,.0f}" if below else "none",
            f"{len(above)}, at least {min(above):,.0f}" if above else "none",
        ]  # fmt: skip


def variants_rows(found: Found) -> Rows:
    for place, first in enumerate(found.predictions[0]):
        values = [each[place].value for each in found.predictions]
        name = f"{first.figure}, {awareness_name(first.awareness)}" if first.figure == "8" else first.figure
        [said] = [claim.said for claim in CLAIMS if (claim.figure, claim.awareness) == (first.figure, first.awareness)]
        where = "above" if said > max(values) else "below" if said < min(values) else "inside"
        where = "not counted" if first.variant == NONE_LOST else where
        yield [name, f"{first.batch:,}", first.variant, f"{first.value:,.0f}", range_text(values), where]


def pairs(rows: Predicted, *, batch: int, none_lost: bool = False) -> dict[str, list[float]]:
    """Return ratios of full to partial awareness, by the time of the first loss."""
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
        shown = f"in calls of {batch:,} full completes {range_text(ratios, '.2f')} times as many"
        told.append(f"{shown}, fewer than partial in {sum(one < 1.0 for one in ratios)} of {len(ratios)} pairs")
    return "; ".join(told)


def gains_rows(found: Found) -> Rows:
    for batch in BATCHES:
        spared = pairs(found.predictions, batch=batch, none_lost=True)
        groups = pairs(found.predictions, batch=batch)
        groups |= {f"{start}, none lost early (not the paper's case)": values for start, values in spared.items()}
        for start, values in groups.items():
            less = f"in {sum(one < 1.0 for one in values)}"
            yield [f"{batch:,}", start, f"{len(values)}", range_text(values, ".2f"), f"{median(values):.2f}", less]


BAR = 0.05
"""Our bar: maximum deviation from proportionality to capacity, as a share of all inferences."""
_RULES = {
    "connected": "GPUs that are connected; inferences when their call ends (the paper's counting)",
    "hot": "GPUs that hold the context, until the last call is dispatched; inferences as above",
    "evenly": "GPUs as above; inferences evenly over their call's duration",
}


def capacity_rows(found: Found) -> Rows:
    for rule, words in _RULES.items():
        cells = []
        for figure in ("9a", "9b"):
            runs = [one for each in found.predictions for one in each if (one.figure, one.batch) == (figure, BATCH)]
            values = [getattr(one.off, rule) for one in runs if one.off]
            kept = sum(value <= BAR for value in values)
            cells.append(f"{median(values):.1%}, at most {max(values):.1%}; {kept} of {len(values)} within {BAR:.0%}")
        yield [words, *cells]


_STATIC = next(run for run in paper.RUNS if (run.awareness, run.batch) == (Awareness.DISK, BATCH))


class Case(NamedTuple):
    """Results for one kind of node and one order of losses. `alone`: results with one GPU per node."""

    run: predict.Preempted
    alone: list[float]
    done: list[float]


def disk_cases(found: Found) -> list[Case]:
    """Return the partial runs of Figure 8 on nodes with shared disks, for sets that explain Figure 6 on such nodes."""
    cases = []
    for place, nodes in enumerate(predict.NODES):
        mine = [
            (
                [run for run in shared.runs if (run.sharing.gpus, run.sharing.reads) == (nodes.gpus, nodes.reads)],
                predictions,
            )
            for shared, predictions in zip(found.shared, found.predictions, strict=True)
            if abs(_STATIC.error(shared.static_s[place])) <= fit.FAIR
        ]
        for number, first in enumerate(mine[0][0] if mine else ()):
            every = (one for _, predictions in mine for one in PARTIAL._predictions_in(predictions, BATCH))
            alone = [one.value for one in every if f"{first.from_s:.0f} s" in one.variant]
            cases.append(Case(first, alone, [runs[number].done for runs, _ in mine]))
    return cases


def disks_summary(found: Found) -> str:
    every = disk_cases(found)
    inside = [case.run for case in every if not distance_outside(PARTIAL.said, case.done)]
    starts = sorted({run.from_s for run in inside})
    when = f", all with the first GPU gone at {' or '.join(f'{at_s:.0f} s' for at_s in starts)}" if starts else ""
    values = [done for case in every for done in case.done]
    return f"""If a node's workers share its disk, partial completes {range_text(values)} in calls of {BATCH}. The
        paper's number is inside in {len(inside)} of {len(every)} cases{when}."""


def disks_rows(found: Found) -> Rows:
    for run, alone, done in disk_cases(found):
        how = "from all nodes in turn" if run.sharing.spread else "node by node"
        yield [
            f"{run.sharing.gpus}", f"{run.sharing.reads:.0%}", how, f"{run.from_s:.0f}", f"{len(done)}",
            range_text(alone), range_text(done), verdict_text(PARTIAL.said, done),
        ]  # fmt: skip


def titan_share(parameters: fit.Parameters) -> float:
    a10_s, titan_s = (
        fit.worker_times_s(parameters, kind, Awareness.DISK, BATCH)[1] for kind in (paper.A10, paper.TITAN)
    )
    return a10_s / (a10_s + titan_s)


def shares_facts(found: Found) -> dict[str, Any]:
    """Return the values for the text about the share of TITANs in the partial run of Figure 8."""
    begins = [fit.worker_times_s(each.parameters, paper.A10, Awareness.DISK, BATCH)[0] for each in found.fits]
    a10_s = paper.PREEMPTED_FROM_S + paper.PREEMPTED_EVERY_S * (paper.EACH - 1) / 2
    have = [titan_share(each.parameters) for each in found.fits]

    def required(begins_s: float, late_s: float) -> float:
        """Return the share of TITANs that gives the paper's number in Figure 8, if each GPU loses half a call.

        `begins_s`: seconds before a GPU's first call; `late_s`: delay of the first loss.
        """
        rate, lost = paper.INFERENCES / (_STATIC.seconds - begins_s), 2 * paper.EACH * BATCH / 2
        return ((PARTIAL.said + lost) / rate + begins_s - a10_s - late_s) / (paper.PREEMPTED_EVERY_S * paper.EACH)

    return {
        "said": PARTIAL.said, "static_s": _STATIC.seconds, "a10_s": a10_s,
        "titan_s": a10_s + paper.PREEMPTED_EVERY_S * paper.EACH,
        "least": required(min(begins), paper.PREEMPTED_EVERY_S), "most": required(max(begins), 0.0),
        "least_here": min(have), "most_here": max(have),
    }  # fmt: skip


def shares_rows(found: Found) -> Rows:
    shares = [(titan_share(each.parameters), each.parameters) for each in found.fits]
    for low, high in pairwise((0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 1.0)):
        pairs = zip(shares, found.predictions, strict=True)
        inside = [(parameters, row) for (share, parameters), row in pairs if low <= share < high]
        if inside:
            loads = [parameters.load_a10_s / parameters.load_titan_s for parameters, _ in inside]
            done = (range_text(claim.values([row for _, row in inside], batch=BATCH)) for claim in (PARTIAL, FULL))
            yield [f"{low:.0%} to {high:.0%}", f"{len(inside)}", f"{min(loads):.2g} to {max(loads):.2g}", *done]
