"""Write the sections on Figure 8: workers that share a disk, and the share of each kind of GPU.

Figure 6 gives the rate of all GPUs, and the text gives the time of each loss, so the result is linear in the share of
TITANs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from benchmarks.papers.pervasive import fit, paper, predict
from benchmarks.papers.pervasive.claims import verdict_text
from benchmarks.papers.pervasive.fit import FAIR, Fit, Parameters
from benchmarks.papers.pervasive.predict import BATCH, Found, Prediction, Preempted, Shared, range_text
from benchmarks.papers.pervasive.worlds import Sharing
from benchmarks.tables import head, paragraph, row
from stoker.contexts.recipe import Awareness

_PARTIAL = next(run for run in paper.RUNS if (run.awareness, run.batch) == (Awareness.DISK, BATCH))
_SAID = paper.FIGURE_8[Awareness.DISK]


class Case(NamedTuple):
    """A kind of node and the order of losses. `alone`: result with one GPU per node."""

    sharing: Sharing
    from_s: float
    sets: int
    alone: list[float]
    done: list[float]

    @property
    def includes_paper_number(self) -> bool:
        return min(self.done) <= _SAID <= max(self.done)


def cases(found: Found) -> Iterator[Case]:
    if not found.shared:
        return
    for place in range(len(predict.NODES)):
        mine = _fair_sets(found, place)
        for number in range(len(_runs_on_node(mine[0][0], place)) if mine else 0):
            runs = [_runs_on_node(shared, place)[number] for shared, _ in mine]
            alone = [
                one.value
                for _, predictions in mine
                for one in predictions
                if one.is_prediction_of("8", Awareness.DISK)
                and one.batch == BATCH
                and f"{runs[0].from_s:.0f} s" in one.variant
            ]
            yield Case(runs[0].sharing, runs[0].from_s, len(mine), alone, [run.done for run in runs])


def _fair_sets(found: Found, place: int) -> list[tuple[Shared, tuple[Prediction, ...]]]:
    return [
        (shared, predictions)
        for shared, predictions in zip(found.shared, found.predictions, strict=True)
        if abs(_PARTIAL.error(shared.static_s[place])) <= FAIR
    ]


def _runs_on_node(shared: Shared, place: int) -> list[Preempted]:
    nodes = predict.NODES[place]
    return [run for run in shared.runs if (run.sharing.gpus, run.sharing.reads) == (nodes.gpus, nodes.reads)]


def disks_summary(found: Found) -> str:
    every = list(cases(found))
    if not every:
        return ""
    inside = [case for case in every if case.includes_paper_number]
    starts = sorted({case.from_s for case in inside})
    when = f", all with the first GPU gone at {' or '.join(f'{at_s:.0f} s' for at_s in starts)}" if starts else ""
    values = [done for case in every for done in case.done]
    return f"""If workers of a node share its disk, partial does {range_text(values)} in calls of {BATCH}, and the
        paper's number is inside in {len(inside)} of {len(every)} cases{when}."""


def disks_section(found: Found) -> str:
    lines = head(
        "GPUs a node", "share of a load that reads the disk", "GPUs go", "first at, s", "sets",
        "done, one GPU a node", "done here", f"against the paper's {_SAID:,.0f}",
    )  # fmt: skip
    for case in cases(found):
        how = "from all nodes in turn" if case.sharing.spread else "node by node"
        cells = [
            f"{case.sharing.gpus}", f"{case.sharing.reads:.0%}", how, f"{case.from_s:.0f}", f"{case.sets}",
            range_text(case.alone), range_text(case.done), verdict_text(_SAID, case.done),
        ]  # fmt: skip
        lines.append(row(*cells))
    return "\n".join(lines)


_BANDS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 1.0)


def titan_share(parameters: Parameters, awareness: Awareness) -> float:
    a10_s, titan_s = (fit.worker_times_s(parameters, kind, awareness, BATCH)[1] for kind in (paper.A10, paper.TITAN))
    return a10_s / (a10_s + titan_s)


def required_titan_share(done: float, awareness: Awareness, *, begins_s: float, late_s: float = 0.0) -> float:
    """Return the share of TITANs with which Figure 8 ends with `done` inferences; above 1 is impossible.

    `begins_s`: start time of GPUs; `late_s`: delay of the first loss. Each GPU loses half a call.
    """
    [static] = [run for run in paper.RUNS if run.awareness is awareness and run.batch == BATCH]
    rate = paper.INFERENCES / (static.seconds - begins_s)
    lost = 2 * paper.EACH * BATCH / 2
    each_s = (done + lost) / rate + begins_s
    half_s = paper.PREEMPTED_EVERY_S * (paper.EACH - 1) / 2
    a10_s = paper.PREEMPTED_FROM_S + late_s + half_s
    return (each_s - a10_s) / (paper.PREEMPTED_EVERY_S * paper.EACH)


def shares_section(fits: Sequence[Fit], predictions: Sequence[Sequence[Prediction]]) -> str:
    said = _SAID
    begins = sorted(fit.worker_times_s(each.parameters, paper.A10, Awareness.DISK, BATCH)[0] for each in fits)
    least = required_titan_share(said, Awareness.DISK, begins_s=begins[0], late_s=paper.PREEMPTED_EVERY_S)
    most = required_titan_share(said, Awareness.DISK, begins_s=begins[-1])
    have = [titan_share(each.parameters, Awareness.DISK) for each in fits]
    rows = [
        (titan_share(each.parameters, Awareness.DISK), each.parameters, row)
        for each, row in zip(fits, predictions, strict=True)
    ]
    half_s = paper.PREEMPTED_EVERY_S * (paper.EACH - 1) / 2
    stays_s = [paper.PREEMPTED_FROM_S + half_s + turn * paper.PREEMPTED_EVERY_S * paper.EACH for turn in (0, 1)]
    text = f"""{said:,.0f} inferences by the end are many. A10s are there for {stays_s[0]:,.0f} s on the mean,
        TITANs for {stays_s[1]:,.0f} s, and both together do {paper.INFERENCES:,} in {_PARTIAL.seconds:,.0f}
        s; so TITANs must do {least:.0%} to {most:.0%} of the work while all are there, in calls of {BATCH} (the
        range: when GPUs begin, and whether the first goes at {paper.PREEMPTED_FROM_S:.0f} s or a minute later;
        half a call is lost with each GPU). The sets that explain Figures 6 and 7 give TITANs {min(have):.0%} to
        {max(have):.0%}: with a load for every call the older GPU is ahead only where it loads much faster than
        the newer one, and the other sizes of calls limit by how much."""
    lines = [
        paragraph(text),
        "",
        *head("TITANs' share, partial", "sets", "A10 load over TITAN load", "partial, done", "full, done"),
    ]
    for low, high in pairwise(_BANDS):
        inside = [(parameters, row) for share, parameters, row in rows if low <= share < high]
        if inside:
            loads = [parameters.load_a10_s / parameters.load_titan_s for parameters, _ in inside]
            done = [
                _completed_range([row for _, row in inside], awareness)
                for awareness in (Awareness.DISK, Awareness.FULL)
            ]
            shown = f"{len(inside)} | {min(loads):.2g} to {max(loads):.2g} | {' | '.join(done)}"
            lines.append(f"| {low:.0%} to {high:.0%} | {shown} |")
    return "\n".join(lines)


def _completed_range(rows: Sequence[Sequence[Prediction]], awareness: Awareness) -> str:
    return range_text(
        [one.value for row in rows for one in row if one.is_prediction_of("8", awareness) and one.batch == BATCH]
    )
