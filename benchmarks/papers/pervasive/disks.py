"""The page's section on Figure 8's partial run where the workers of a node share its disk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.papers.pervasive import neighbours, paper
from benchmarks.papers.pervasive.claims import judged
from benchmarks.papers.pervasive.fit import FAIR
from benchmarks.papers.pervasive.found import Found, between
from benchmarks.papers.pervasive.neighbours import Preempted, Shared
from benchmarks.papers.pervasive.predict import BATCH, Prediction
from benchmarks.papers.pervasive.worlds import Sharing
from benchmarks.tables import head, paragraph, row
from stoker.contexts.recipe import Awareness

_PARTIAL = next(run for run in paper.RUNS if (run.awareness, run.batch) == (Awareness.DISK, BATCH))
_SAID = paper.FIGURE_8[Awareness.DISK]


class Case(NamedTuple):
    """A kind of node and a way in which its GPUs go, over the sets that fit such nodes. `alone`: what these sets give
    with one GPU a node."""

    sharing: Sharing
    from_s: float
    sets: int
    alone: list[float]
    done: list[float]

    @property
    def inside(self) -> bool:
        """Whether the paper's number is."""
        return min(self.done) <= _SAID <= max(self.done)


def cases(found: Found) -> Iterator[Case]:
    """All of them for which there is a set; none where nothing was simulated."""
    if not found.shared:
        return
    for place in range(len(neighbours.NODES)):
        mine = _kept(found, place)
        for number in range(len(_of_node(mine[0][0], place)) if mine else 0):
            runs = [_of_node(shared, place)[number] for shared, _ in mine]
            alone = [
                one.value
                for _, predictions in mine
                for one in predictions
                if one.is_of("8", Awareness.DISK) and one.batch == BATCH and f"{runs[0].from_s:.0f} s" in one.variant
            ]
            yield Case(runs[0].sharing, runs[0].from_s, len(mine), alone, [run.done for run in runs])


def _kept(found: Found, place: int) -> list[tuple[Shared, tuple[Prediction, ...]]]:
    """The sets whose static run on such nodes stays within the limit of the fit. `place`: of the kind of node."""
    return [
        (shared, predictions)
        for shared, predictions in zip(found.shared, found.predictions, strict=True)
        if abs(_PARTIAL.error(shared.static_s[place])) <= FAIR
    ]


def _of_node(shared: Shared, place: int) -> list[Preempted]:
    nodes = neighbours.NODES[place]
    return [run for run in shared.runs if (run.sharing.gpus, run.sharing.reads) == (nodes.gpus, nodes.reads)]


def in_short(found: Found) -> list[str]:
    """Nothing where nothing was simulated."""
    every = list(cases(found))
    if not every:
        return []
    inside = [case for case in every if case.inside]
    starts = sorted({case.from_s for case in inside})
    when = f", all with the first GPU gone at {' or '.join(f'{at_s:.0f} s' for at_s in starts)}" if starts else ""
    values = [done for case in every for done in case.done]
    return [
        f"""On nodes whose workers share a disk, simulated, partial does {between(values)} in calls of {BATCH}, over
        {len(every)} cases; the paper's {_SAID:,.0f} is inside in {len(inside)} of them{when}."""
    ]


def section(found: Found) -> str:
    """The part of the page about it."""
    lines = [
        "## Loads that depend on their neighbours, simulated",
        "",
        paragraph(f"""Workers of one node share its disk. When some are preempted, the others load faster.
            Simulated is the most that this can do: the workers of a node load at the same time, a load
            with all its neighbours takes what was fitted, and its reading gets faster with each that goes. Figure
            8, partial, in calls of {BATCH}; sets whose Figure 6 is off by more than {FAIR:.0%} on such nodes are
            left out."""),
        "",
        *head(
            "GPUs a node", "share of a load that reads the disk", "GPUs go", "first at, s", "sets",
            "done, one GPU a node", "done here", f"against the paper's {_SAID:,.0f}",
        ),
    ]  # fmt: skip
    for case in cases(found):
        how = "from all nodes in turn" if case.sharing.spread else "node by node"
        cells = [
            f"{case.sharing.gpus}", f"{case.sharing.reads:.0%}", how, f"{case.from_s:.0f}", f"{case.sets}",
            between(case.alone), between(case.done), judged(_SAID, case.done),
        ]  # fmt: skip
        lines.append(row(*cells))
    return "\n".join([*lines, ""])
