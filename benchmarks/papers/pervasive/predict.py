"""Predict Figures 8, 9a and 9b from parameters fitted only to Figures 6 and 7.

A prediction is a range over parameter sets, sizes of calls and unspecified details. No assumption uses the end times of
the paper's runs.

- Figure 8: the first GPU is lost at 900 s or a minute later. Under full awareness three GPUs of one kind leave early.
- Figure 9a: from 4 to 20 GPUs in a ramp; half A10s and half TITANs, or mixed as in the cluster.
- Figure 9b: 186 GPUs after 100 to 600 s; assumed speeds of six kinds.

The partial run of Figure 8 is also simulated on nodes whose workers share a disk, as an upper limit of this effect. A
worker that loads alone reads for `reads / gpus` of the usual load time.

The *distance* in Figure 9 is the maximum difference between completed inferences and a line proportional to capacity,
as a share of all inferences. Capacity counts each GPU by its inferences per second. *Connected*: from the connection
of a worker to the end of the run. *Hot*: while the context is loaded, until the last dispatch. *Evenly*: like *hot*,
with the inferences of a call spread over its run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.baselines.loading import policy
from benchmarks.harness import Facts
from benchmarks.papers.pervasive import paper, worlds
from benchmarks.papers.pervasive.fit import Fit, Parameters
from benchmarks.papers.pervasive.worlds import SharedDisks, Sharing
from stoker.contexts.recipe import Awareness
from stoker.manager.sim.log import EventLog, LoggedEvent
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.workload import generate_arrivals
from stoker.manager.sim.world import limit_awareness
from stoker.manager.study import scenario
from stoker.manager.study.measures import measure_run
from stoker.manager.study.scenario import Scenario, scenario_to_toml
from stoker.site import BASELINES, Duration


class Distance(msgspec.Struct, frozen=True):
    connected: float
    hot: float
    evenly: float


def distance_from_capacity(log: EventLog, rates: Mapping[int, float]) -> Distance:
    """Return the distances of a run without lost pilots. `rates`: inferences per second by pilot number."""
    connected, hot, ends, paces = (list[tuple[float, float]]() for _ in range(4))
    begun: dict[int, float] = {}
    handed_out_s = 0.0
    for at_s, what, call, pilot, items in zip(log.at_s, log.what, log.call, log.pilot, log.value, strict=True):
        if what == LoggedEvent.PILOT_CAME:
            connected.append((at_s, rates[pilot]))
        elif what == LoggedEvent.LIBRARY_READY:
            hot.append((at_s, rates[pilot]))
        elif what == LoggedEvent.CALL_BEGAN:
            begun[call] = handed_out_s = at_s
        elif what == LoggedEvent.CALL_ENDED:
            ends.append((at_s, items))
            pace = items / (at_s - begun[call])
            paces += [(begun[call], pace), (at_s, -pace)]
    end_s = log.at_s[-1]
    return Distance(
        connected=_farthest_from_capacity(connected, jumps=ends, until_s=end_s),
        hot=_farthest_from_capacity(hot, jumps=ends, until_s=handed_out_s),
        evenly=_farthest_from_capacity(hot, paces=paces, until_s=handed_out_s),
    )


def _farthest_from_capacity(
    capacity: Iterable[tuple[float, float]], *, jumps: Iterable[tuple[float, float]] = (),
    paces: Iterable[tuple[float, float]] = (), until_s: float,
) -> float:  # fmt: skip
    changes = sorted([
        *((at_s, 0, change) for at_s, change in capacity),
        *((at_s, 1, change) for at_s, change in paces),
        *((at_s, 2, change) for at_s, change in jumps),
    ])  # fmt: skip
    points: list[tuple[float, float]] = []
    rate = pace = integral = done = before_s = 0.0
    for at_s, kind, change in [*changes, (until_s, 3, 0.0)]:
        until = min(at_s, until_s)
        integral += rate * max(0.0, until - before_s)
        done += pace * max(0.0, until - before_s)
        before_s = max(before_s, until)
        if at_s > until_s:
            break
        points.append((integral, done))
        if kind == 0:
            rate += change
        elif kind == 1:
            pace += change
        elif kind == 2:
            done += change
            points.append((integral, done))
    last_integral, last_done = points[-1]
    slope = last_done / last_integral
    return max(abs(done - slope * integral) for integral, done in points) / last_done


EARLY_S = (60.0, 600.0)
HALVES: Mapping[str, float] = {paper.A10: 1.0, paper.TITAN: 1.0}
NONE_LOST = "from 900 s, none lost early (for comparison, not counted)"
RAMPS_9A: tuple[tuple[str, float, float, Mapping[str, float]], ...] = (
    ("a GPU more every 2 min, half and half", 1920.0, 1.0, HALVES),
    ("a GPU more every minute, half and half", 960.0, 1.0, HALVES),
    ("a GPU more every 4 min, half and half", 3840.0, 1.0, HALVES),
    ("slowly at first, 20 after 64 min, half and half", 3840.0, 2.0, HALVES),
    ("a GPU more every 2 min, as the cluster", 1920.0, 1.0, paper.TABLE_1),
)
"""Ramps of Figure 9a: name, seconds, curvature, kinds of GPU."""
RAMPS_9B_S = (200.0, 100.0, 400.0, 600.0)
RAMPS_WRITTEN = "2026-11-26"
"""Date on which both ramps were rewritten (commit 4995f9b), after the predictions with the first ramps (95c044e). Some
of the first ramps ended when the runs in the paper ended.
"""
_FIRST_RAMPS_9B = ((200.0, 0), (400.0, 0), (600.0, 0), (200.0, 1))
"""The kept ramps of Figure 9b: seconds, and an index into `PEAKS`. No ramp of Figure 9a was kept."""
PEAKS = (("32-bit arithmetic", paper.SINGLE), ("tensor cores", paper.TENSOR))
KEPT_VARIANTS = frozenset(
    f"evenly in {until_s:.0f} s, kinds by {PEAKS[which][0]}" for until_s, which in _FIRST_RAMPS_9B
)
BATCH = 100
BATCHES = (BATCH, 1000)
LOOK_S = 10.0

Look = tuple[float, float]
"""Completed inferences and number of GPUs at one time."""


class Prediction(msgspec.Struct, frozen=True):
    """A simulated run. `value`: seconds (Figures 9a, 9b) or inferences (Figure 8). `variant`: assumption. `off`:
    distances, only in Figure 9.
    """

    figure: str
    awareness: Awareness
    variant: str
    batch: int
    value: float
    looks: tuple[Look, ...]
    off: Distance | None = None

    def is_prediction_of(self, figure: str, awareness: Awareness) -> bool:
        return (self.figure, self.awareness) == (figure, awareness) and self.variant != NONE_LOST


def simulate_static_run(parameters: Parameters, run: paper.Run) -> float:
    return _simulated(parameters, worlds.static_pools(), run.awareness, batch=run.batch)[1]


def figure_8(parameters: Parameters, *, batch: int = BATCH) -> Iterator[Prediction]:
    first = paper.PREEMPTED_FROM_S
    starts = {"from 900 s": first, "from 960 s": first + paper.PREEMPTED_EVERY_S}
    for variant, from_s in starts.items():
        yield _predict_vanishing_pool(parameters, Awareness.DISK, variant, batch=batch, from_s=from_s)
    kinds = {paper.A10: "A10", paper.TITAN: "TITAN X"}
    for (variant, from_s), kind, at_s in product(starts.items(), kinds, EARLY_S):
        what = f"{variant}, {paper.LOST_EARLY} {kinds[kind]} lost at {at_s:.0f} s"
        losses = {"from_s": from_s, "lost": {kind: paper.LOST_EARLY}, "lost_at_s": at_s}
        yield _predict_vanishing_pool(parameters, Awareness.FULL, what, batch=batch, **losses)
    yield _predict_vanishing_pool(parameters, Awareness.FULL, NONE_LOST, batch=batch, from_s=first)


def figure_9(parameters: Parameters, *, batch: int = BATCH) -> Iterator[Prediction]:
    low, high = paper.FIGURE_9A_GPUS
    for words, until_s, bend, shares in RAMPS_9A:
        pools = worlds.growing_pools(shares, first=low, last=high, until_s=until_s, bend=bend)
        yield _predict_growing_pool("9a", words, parameters, pools, batch=batch)
    ramps = [(until_s, *PEAKS[0]) for until_s in RAMPS_9B_S]
    ramps += [(until_s, *PEAKS[1]) for until_s in (RAMPS_9B_S[0], RAMPS_9B_S[-1])]
    for until_s, words, peaks in ramps:
        pools = worlds.growing_pools(paper.TABLE_1, first=0, last=paper.FIGURE_9B_GPUS, until_s=until_s)
        variant = f"evenly in {until_s:.0f} s, kinds by {words}"
        yield _predict_growing_pool("9b", variant, parameters, pools, batch=batch, peaks=peaks)


def predictions(parameters: Parameters, *, quick: bool = False) -> list[Prediction]:
    found: list[Prediction] = []
    for batch in BATCHES:
        found += islice(figure_8(parameters, batch=batch), 4 if quick else None)
        found += islice(figure_9(parameters, batch=batch), 6 if quick else None)
    return found


def _predict_vanishing_pool(
    parameters: Parameters, awareness: Awareness, variant: str, *, batch: int, **losses: Any
) -> Prediction:
    """`losses`: arguments of `vanishing_pools`."""
    pools = worlds.vanishing_pools(**losses)
    until_s = worlds.last_loss_s(pools) + paper.PREEMPTED_EVERY_S
    simulation, _ = _simulated(parameters, pools, awareness, batch=batch, until_s=until_s)
    done = float(simulation.client.items_done)
    return Prediction("8", awareness, variant, batch, done, _sample_run(simulation, until_s))


def _predict_growing_pool(
    figure: str, variant: str, parameters: Parameters, pools: worlds.Pools, *, batch: int,
    peaks: Mapping[str, float] = paper.SINGLE,
) -> Prediction:  # fmt: skip
    simulation, ended_at = _simulated(parameters, pools, Awareness.FULL, batch=batch, peaks=peaks)
    rates = {
        pilot.number: batch / (parameters.call_s + batch * worlds.item_s(parameters, pilot.kind, peaks=peaks))
        for pilot in simulation.pilots.values()
    }
    off = distance_from_capacity(simulation.log, rates)
    return Prediction(figure, Awareness.FULL, variant, batch, ended_at, _sample_run(simulation, ended_at), off)


def _simulated(
    parameters: Parameters, pools: worlds.Pools, awareness: Awareness, *, batch: int = BATCH, until_s: float = math.inf,
    peaks: Mapping[str, float] = paper.SINGLE, sharing: Sharing | None = None,
) -> tuple[Simulation, float]:  # fmt: skip
    # the manager in the paper does not compare kinds of GPUs
    policies = msgspec.structs.replace(policy(worlds.POLICIES[awareness]).make(), compares_kinds=False)
    world = limit_awareness(worlds.world(parameters, pools, peaks=peaks, sharing=sharing), policies.awareness)
    calls = generate_arrivals(worlds.sweep_calls(batch), seed=0)
    if sharing is None:
        simulation = Simulation(world, calls, policies)
    else:
        simulation = SharedDisks(world, calls, policies, parameters=parameters, sharing=sharing)
    return simulation, simulation.run(until_s=until_s).ended_at


def _sample_run(simulation: Simulation, until_s: float) -> tuple[Look, ...]:
    measured = measure_run(simulation.log, until_s=until_s)
    moments = (number * LOOK_S for number in range(int(until_s / LOOK_S) + 2))
    return tuple((measured.completed.value_at(at_s), measured.devices.value_at(at_s)) for at_s in moments)


NODES = (Sharing(2, 1.0), Sharing(5, 0.5), Sharing(5, 1.0))
"""Nodes of two or five GPUs. A load reads the disk for half or all of its time."""


class Preempted(msgspec.Struct, frozen=True):
    """Completed inferences in the partial run of Figure 8, with the first loss at `from_s`."""

    sharing: Sharing
    from_s: float
    done: float


class Shared(msgspec.Struct, frozen=True):
    """Partial runs of Figures 6 and 8 on nodes with shared disks, for one parameter set."""

    static_s: tuple[float, ...]
    runs: tuple[Preempted, ...]


def simulate_shared_disks(parameters: Parameters) -> Shared:
    def preempted(nodes: Sharing, from_s: float) -> Preempted:
        pools, until_s = worlds.vanishing_pools(from_s=from_s), from_s + paper.PREEMPTED_EVERY_S * 2 * paper.EACH
        simulation, _ = _simulated(parameters, pools, Awareness.DISK, until_s=until_s, sharing=nodes)
        return Preempted(nodes, from_s, float(simulation.client.items_done))

    first, later = paper.PREEMPTED_FROM_S, paper.PREEMPTED_FROM_S + paper.PREEMPTED_EVERY_S
    cases = ((nodes, by_node, from_s) for nodes in NODES for by_node, from_s in ((0, first), (0, later), (1, first)))
    runs = [preempted(msgspec.structs.replace(nodes, spread=not by_node), from_s) for nodes, by_node, from_s in cases]
    static = (_simulated(parameters, worlds.static_pools(), Awareness.DISK, sharing=nodes)[1] for nodes in NODES)
    return Shared(tuple(static), tuple(runs))


CAPTION = """Lines: the most central set, with the variant that has the middle result. Bands: all sets and variants.
Number of GPUs: calls of both sizes."""


class Found(msgspec.Struct, frozen=True):
    """The record. `simulated`: static runs of the most central fit. `predictions`, `shared`: results by fit."""

    facts: Facts
    starts: int
    fits: tuple[Fit, ...]
    simulated: tuple[tuple[paper.Run, float], ...]
    predictions: tuple[tuple[Prediction, ...], ...]
    shared: tuple[Shared, ...]
    searched: str
    repeated: str = ""
    caption: str = CAPTION

    def without_looks(self) -> Found:
        rows = [[msgspec.structs.replace(one, looks=()) for one in row] for row in self.predictions]
        return msgspec.structs.replace(self, predictions=tuple(map(tuple, rows)))

    @property
    def close(self) -> list[tuple[Prediction, ...]]:
        return [row for each, row in zip(self.fits, self.predictions, strict=True) if each.close]


def rounded_up_percent(part: float) -> str:
    return f"{math.ceil(part * 1000.0) / 10.0:.1f}%"


def range_text(values: Sequence[float], shown: str = ",.0f") -> str:
    return f"{min(values):{shown}} to {max(values):{shown}}"


FOLDER = Path(scenario.__file__).parent / "scenarios"
_HEAD = "# Written by `make reproduce`, which says what of it is known: docs/reproduction/context-paper.md\n"
_LESSER = {"6": (Awareness.DISK, Awareness.NONE), "7": (Awareness.DISK,), "8": (Awareness.DISK,)}


def scenario_texts(parameters: Parameters) -> dict[str, str]:
    """Return the runs as scenarios: `stoker simulate context-paper-8`."""
    found = {}
    for figure, about, pools, batch, until_s in _figure_runs():
        name, comment = f"context-paper-{figure}", ""
        made = Scenario(
            name=name, about=f"Figure {figure} of the context paper: {about}", world=worlds.world(parameters, pools),
            workload=worlds.sweep_calls(batch), seeds=1, until_s=Duration(until_s),
        )  # fmt: skip
        if figure in _LESSER:
            lesser = [f"  --policy {BASELINES[worlds.POLICIES[level]]}" for level in _LESSER[figure]]
            command = " \\\n#   ".join([f"stoker simulate {name} --policy default", *lesser])
            comment = f"# The paper's lesser versions beside it, in a clone of Stoker's repository:\n#   {command}\n"
        found[f"{name}.toml"] = _HEAD + comment + scenario_to_toml(made)
    return found


def _figure_runs() -> Iterator[tuple[str, str, worlds.Pools, int, float]]:
    static, batch = worlds.static_pools(), BATCH
    yield "6", "150,000 inferences on twenty GPUs that stay, in calls of 100", static, batch, 0.0
    yield "7", "the same in calls of one; --set workload.items=100 or 1000 for the others", static, 1, 0.0
    vanishing = worlds.vanishing_pools()
    until_s = worlds.last_loss_s(vanishing) + paper.PREEMPTED_EVERY_S
    yield "8", "from 900 s on one GPU is lost every minute, until none is left", vanishing, batch, until_s
    low, high = paper.FIGURE_9A_GPUS
    _, ramp_s, bend, shares = RAMPS_9A[0]
    pools = worlds.growing_pools(shares, first=low, last=high, until_s=ramp_s, bend=bend)
    yield "9a", f"a pool that grows from {low} GPUs to {high}", pools, batch, 0.0
    pools = worlds.growing_pools(paper.TABLE_1, first=0, last=paper.FIGURE_9B_GPUS, until_s=RAMPS_9B_S[0])
    yield "9b", f"a pool that grows to {paper.FIGURE_9B_GPUS} GPUs of eight kinds", pools, batch, 0.0
