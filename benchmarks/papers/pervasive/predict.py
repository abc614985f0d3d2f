"""Figures 8, 9a and 9b from parameters that were fitted on 6 and 7, with nothing refitted.

What the text leaves open beyond the parameters is varied instead:

- Figure 8: whether the first GPU goes at 900 s or a minute later ("1 GPU per minute from the 900-second mark"); with
  full awareness also when three of them dropped out "early", and of which kind they were.
- Figure 9a: how soon the pool has grown from 4 to 20 GPUs ("gradually": one more GPU every one, two or four minutes),
  whether evenly or slowly at first, and whether it is half A10s and half TITANs or as mixed as the cluster.
- Figure 9b: how soon 186 GPUs are there ("quickly grabs up to": after 100 to 600 s), and how fast the six kinds are
  that no static run used.
- Figures 8 and 9: how many inferences a call has. §4.2 has 100, §4.3 has 1,000 as well; of these runs nothing is said.

None of these values is taken from when the paper's runs ended.

A prediction is therefore a range, over parameter sets and all of these.

Figure 8's partial run where the workers of a node share its disk, in the simulator.

With a load for every call, neighbours that load at the same time make a load longer than it is alone; when neighbours
are preempted, the loads of those that stay get faster, and more is done than on nodes of one GPU. How many GPUs a node
has, and which part of a load reads its disk, is not in the text.

What is simulated is the most that this can do: the workers of a node begin together and load together, so that a load
that has all its neighbours takes what was fitted on Figures 6 and 7 (the static runs stay nearly as they were; the
simulator checks that), and one that has none takes `reads / gpus` of its reading. GPUs go from all nodes in turn, or
node by node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice

import msgspec

from benchmarks.baselines.loading import policy
from benchmarks.papers.pervasive import paper, worlds
from benchmarks.papers.pervasive.parameters import Parameters
from benchmarks.papers.pervasive.proportion import Distance, distance
from benchmarks.papers.pervasive.worlds import SharedDisks, Sharing
from stoker.contexts.recipe import Awareness
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.workload import arrivals
from stoker.manager.sim.world import limited
from stoker.manager.study.measures import measure

EARLY_S = (60.0, 600.0)
"""When the three GPUs of Figure 8 may have dropped out."""
HALVES: Mapping[str, float] = {paper.A10: 1.0, paper.TITAN: 1.0}
NONE_LOST = "from 900 s, none lost early (for comparison, not counted)"
"""What Figure 8 would be without the loss, for comparison."""
RAMPS_9A: tuple[tuple[str, float, float, Mapping[str, float]], ...] = (
    ("a GPU more every 2 min, half and half", 1920.0, 1.0, HALVES),
    ("a GPU more every minute, half and half", 960.0, 1.0, HALVES),
    ("a GPU more every 4 min, half and half", 3840.0, 1.0, HALVES),
    ("slowly at first, 20 after 64 min, half and half", 3840.0, 2.0, HALVES),
    ("a GPU more every 2 min, as the cluster", 1920.0, 1.0, paper.TABLE_1),
)
"""What it is called, how long it takes, how bent it is, and the kinds."""
RAMPS_9B_S = (200.0, 100.0, 400.0, 600.0)
RAMPS_WRITTEN = "2026-11-26"
"""When the ramps of both were written anew (commit 4995f9b, which added calls of 1,000 and nodes that share a disk as
well). The first ones, of commit 95c044e, ended when the paper's runs do, among others. What they predicted was known by
then."""
_FIRST_RAMPS_9B = ((200.0, 0), (400.0, 0), (600.0, 0), (200.0, 1))
"""The ramps of Figure 9b that were kept when the others were written anew: seconds, and which of `PEAKS` each uses. No
ramp of Figure 9a was kept."""
PEAKS = (("32-bit arithmetic", paper.SINGLE), ("tensor cores", paper.TENSOR))
KEPT_VARIANTS = frozenset(
    f"evenly in {until_s:.0f} s, kinds by {PEAKS[which][0]}" for until_s, which in _FIRST_RAMPS_9B
)
BATCH = 100
BATCHES = (BATCH, 1000)
LOOK_S = 10.0
"""Figures 8 and 9 are drawn from what there is every so many seconds."""

Look = tuple[float, float]
"""Inferences that are completed, and GPUs, at a moment."""


class Prediction(msgspec.Struct, frozen=True):
    """One simulated run. `value`: seconds (Figures 9a, 9b) or inferences (8). `variant`: what was assumed beyond the
    parameters, and `batch` inferences a call. `looks`: every `LOOK_S` from 0 on. `off`: see there; of Figure 9 only."""

    figure: str
    awareness: Awareness
    variant: str
    batch: int
    value: float
    looks: tuple[Look, ...]
    off: Distance | None = None

    def is_of(self, figure: str, awareness: Awareness) -> bool:
        """Whether this run predicts what the paper has in a figure. In Figure 8 three GPUs were lost early."""
        return (self.figure, self.awareness) == (figure, awareness) and self.variant != NONE_LOST


def static(parameters: Parameters, run: paper.Run) -> float:
    """A run of Figure 6 or 7, in the simulator: its seconds."""
    return _simulated(parameters, worlds.static(), run.awareness, batch=run.batch)[1]


def figure_8(parameters: Parameters, *, batch: int = BATCH) -> Iterator[Prediction]:
    """How many inferences are done when the last GPU is gone."""
    first = paper.PREEMPTED_FROM_S
    starts = {"from 900 s": first, "from 960 s": first + paper.PREEMPTED_EVERY_S}
    for variant, from_s in starts.items():
        yield _vanishing(parameters, Awareness.DISK, variant, batch=batch, from_s=from_s)
    for variant, from_s in starts.items():
        for kind, short in ((paper.A10, "A10"), (paper.TITAN, "TITAN X")):
            for at_s in EARLY_S:
                what = f"{variant}, {paper.LOST_EARLY} {short} lost at {at_s:.0f} s"
                lost = {kind: paper.LOST_EARLY}
                yield _vanishing(
                    parameters, Awareness.FULL, what, batch=batch, from_s=from_s, lost=lost, lost_at_s=at_s
                )
    yield _vanishing(parameters, Awareness.FULL, NONE_LOST, batch=batch, from_s=first)


def figure_9(parameters: Parameters, *, batch: int = BATCH) -> Iterator[Prediction]:
    """When all inferences are done, on pools that grow."""
    low, high = paper.FIGURE_9A_GPUS
    for words, until_s, bend, shares in RAMPS_9A:
        pools = worlds.ramp(shares, first=low, last=high, until_s=until_s, bend=bend)
        yield _growing("9a", words, parameters, pools, batch=batch)
    ramps = [(until_s, *PEAKS[0]) for until_s in RAMPS_9B_S]
    ramps += [(until_s, *PEAKS[1]) for until_s in (RAMPS_9B_S[0], RAMPS_9B_S[-1])]
    for until_s, words, peaks in ramps:
        pools = worlds.ramp(paper.TABLE_1, first=0, last=paper.FIGURE_9B_GPUS, until_s=until_s)
        variant = f"evenly in {until_s:.0f} s, kinds by {words}"
        yield _growing("9b", variant, parameters, pools, batch=batch, peaks=peaks)


def everything(parameters: Parameters) -> list[Prediction]:
    """Figures 8 and 9, in all variants."""
    return [
        one for batch in BATCHES for one in (*figure_8(parameters, batch=batch), *figure_9(parameters, batch=batch))
    ]


def a_look(parameters: Parameters) -> list[Prediction]:
    """Some variants of each, for whoever cannot wait."""
    return [
        one
        for batch in BATCHES
        for one in (*islice(figure_8(parameters, batch=batch), 4), *islice(figure_9(parameters, batch=batch), 6))
    ]


def _vanishing(
    parameters: Parameters,
    awareness: Awareness,
    variant: str,
    *,
    batch: int,
    from_s: float,
    lost: Mapping[str, int] | None = None,
    lost_at_s: float = 0.0,
) -> Prediction:
    pools = worlds.vanishing(from_s=from_s, lost=lost, lost_at_s=lost_at_s)
    until_s = max(at_s for steps in pools.values() for at_s, _ in steps) + paper.PREEMPTED_EVERY_S
    simulation, _ = _simulated(parameters, pools, awareness, batch=batch, until_s=until_s)
    return Prediction("8", awareness, variant, batch, float(simulation.client.items_done), _looks(simulation, until_s))


def _growing(
    figure: str,
    variant: str,
    parameters: Parameters,
    pools: worlds.Pools,
    *,
    batch: int,
    peaks: Mapping[str, float] = paper.SINGLE,
) -> Prediction:
    simulation, ended_at = _simulated(parameters, pools, Awareness.FULL, batch=batch, peaks=peaks)
    rates = {
        pilot.number: batch / (parameters.call_s + batch * worlds.item_s(parameters, pilot.kind, peaks=peaks))
        for pilot in simulation.pilots.values()
    }
    off = distance(simulation.log, rates)
    return Prediction(figure, Awareness.FULL, variant, batch, ended_at, _looks(simulation, ended_at), off)


def _simulated(
    parameters: Parameters,
    pools: worlds.Pools,
    awareness: Awareness,
    *,
    batch: int = BATCH,
    until_s: float = math.inf,
    peaks: Mapping[str, float] = paper.SINGLE,
) -> tuple[Simulation, float]:
    """A run that is over, and when it was."""
    policies = policy(worlds.POLICIES[awareness]).make()
    world = limited(worlds.world(parameters, pools, peaks=peaks), policies.awareness)
    simulation = Simulation(world, arrivals(worlds.sweep(batch), seed=0), policies)
    return simulation, simulation.run(until_s=until_s).ended_at


def _looks(simulation: Simulation, until_s: float) -> tuple[Look, ...]:
    measured = measure(simulation.log, until_s=until_s)
    moments = (number * LOOK_S for number in range(int(until_s / LOOK_S) + 2))
    return tuple((measured.completed.value(at_s), measured.devices.value(at_s)) for at_s in moments)


NODES = (Sharing(2, 1.0), Sharing(5, 0.5), Sharing(5, 1.0))
"""Nodes of two GPUs and of five (ten of a kind make whole ones), whose loads read for half of their time, or all."""
_ENDS_S = paper.PREEMPTED_FROM_S + paper.PREEMPTED_EVERY_S * 2 * paper.EACH


class Preempted(msgspec.Struct, frozen=True):
    """A simulated Figure 8, partial: inferences that are done when the first GPU goes at `from_s`."""

    sharing: Sharing
    from_s: float
    done: float


class Shared(msgspec.Struct, frozen=True):
    """What a parameter set gives on such nodes: Figure 6's partial run by the nodes, in seconds, and Figure 8's."""

    static_s: tuple[float, ...]
    runs: tuple[Preempted, ...]


def simulate(parameters: Parameters) -> Shared:
    """A set's runs."""
    first = paper.PREEMPTED_FROM_S
    later, by_node = first + paper.PREEMPTED_EVERY_S, msgspec.structs.replace
    asked = [
        case for nodes in NODES for case in ((nodes, first), (nodes, later), (by_node(nodes, spread=False), first))
    ]
    return Shared(
        tuple(_ran(parameters, nodes, worlds.static())[1] for nodes in NODES),
        tuple(Preempted(nodes, from_s, _preempted(parameters, nodes, from_s)) for nodes, from_s in asked),
    )


def _preempted(parameters: Parameters, nodes: Sharing, from_s: float) -> float:
    until_s = _ENDS_S + from_s - paper.PREEMPTED_FROM_S
    return _ran(parameters, nodes, worlds.vanishing(from_s=from_s), until_s=until_s)[0]


def _ran(
    parameters: Parameters, nodes: Sharing, pools: worlds.Pools, *, until_s: float = math.inf
) -> tuple[float, float]:
    """Inferences that were done, and when it ended."""
    policies = policy(worlds.POLICIES[Awareness.DISK]).make()
    world = limited(worlds.world(parameters, pools, sharing=nodes), policies.awareness)
    calls = arrivals(worlds.sweep(BATCH), seed=0)
    simulation = SharedDisks(world, calls, policies, parameters=parameters, sharing=nodes)
    ended_at = simulation.run(until_s=until_s).ended_at
    return float(simulation.client.items_done), ended_at
