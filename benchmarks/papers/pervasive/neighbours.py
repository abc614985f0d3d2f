"""Figure 8's partial run where the workers of a node share its disk, in the simulator.

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

import msgspec

from benchmarks.baselines.loading import policy
from benchmarks.papers.pervasive import paper, worlds
from benchmarks.papers.pervasive.parameters import Parameters
from benchmarks.papers.pervasive.predict import BATCH
from benchmarks.papers.pervasive.worlds import SharedDisks, Sharing
from stoker.contexts.recipe import Awareness
from stoker.manager.sim.awareness import limited
from stoker.manager.sim.workload import arrivals

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
