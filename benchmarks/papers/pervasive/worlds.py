"""Build simulator worlds for runs of the paper."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from benchmarks.papers.pervasive import paper
from benchmarks.papers.pervasive.fit import Parameters
from stoker.contexts.recipe import Awareness
from stoker.manager.core.seams import Policies
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.flows import SharedLink
from stoker.manager.sim.pilot import SimPilot
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.workload import SweepCalls
from stoker.manager.sim.world import ContextModel, Delays, DeviceKind, Files, Links, Rate, SourceModel, World
from stoker.protocol.blocks import ProvisioningRule
from stoker.site import Duration, Size

Steps = tuple[tuple[float, int], ...]
Pools = Mapping[str, Steps]
"""GPUs by kind, as pairs (start in seconds, number)."""
POLICIES = {Awareness.NONE: "no-awareness", Awareness.DISK: "disk-only", Awareness.FULL: "default"}
"""Policies for the three versions in the paper (§4.2)."""
_GPU_BYTES = Size(12_000_000_000)
_DIGITS = 4
_STEP_S = 20.0
"""Seconds between two steps of a growing pool."""


class Sharing(msgspec.Struct, frozen=True):
    """Nodes whose workers, one per GPU, share a disk. `reads`: share of a load that reads the disk; `spread`: all nodes
    lose GPUs in turn.
    """

    gpus: int
    reads: float
    spread: bool = True


def world(
    parameters: Parameters, pools: Pools, *, peaks: Mapping[str, float] = paper.SINGLE, sharing: Sharing | None = None
) -> World:
    """Return a cluster. `peaks`: peak rates that scale the unfitted kinds."""
    p, reads = parameters, 0.0 if sharing is None else sharing.reads
    context = ContextModel(
        files=(Files("model", Size(paper.MODEL_BYTES)), Files("environment", Size(paper.ENVIRONMENT_BYTES))),
        device_memory_bytes=Size(paper.LOADED_BYTES), call_s={"": Duration(p.call_s)},
        load_s={kind: Duration((1.0 - reads) * load_s(p, kind)) for kind in pools},
        item_s={kind: Duration(item_s(p, kind, peaks=peaks)) for kind in pools}, warm_items=int(p.warm_items),
        warm_item_s=Duration(p.warm_item_s),
        page_cache=sharing is None,  # The files exceed the 10 GB of worker memory (§4.1).
    )  # fmt: skip
    sources = tuple(
        SourceModel(
            name=f"pool-{number}", kind=kind, capacity=steps, boot_s=Duration(p.boot_s), rule=ProvisioningRule.FIXED,
            init_blocks=max(count for _, count in steps), max_blocks=max(count for _, count in steps),
        )
        for number, (kind, steps) in enumerate(pools.items())
    )  # fmt: skip
    shared, node, network = map(Rate, (paper.SHARED_BYTES_PER_S, p.shared_node_bytes_per_s, p.network_bytes_per_s))
    links = Links(shared=shared, shared_node=node, network=network)
    devices = dict.fromkeys(pools, DeviceKind(_GPU_BYTES))
    return World(devices=devices, sources=sources, contexts={"llm": context}, links=links, delays=Delays())


def sweep_calls(batch: int) -> SweepCalls:
    return SweepCalls(context="llm", inputs=paper.INFERENCES, items=batch)


def load_s(parameters: Parameters, kind: str) -> float:
    return parameters.load_titan_s if kind in paper.OLD else parameters.load_a10_s


class SharedDisks(Simulation):
    def __init__(
        self, world: World, calls: Iterable[Arrival], policies: Policies, *, parameters: Parameters, sharing: Sharing
    ) -> None:
        super().__init__(world, calls, policies)
        self._parameters, self._sharing = parameters, sharing
        self._disks: dict[tuple[str, int], SharedLink] = {}
        self._made: Counter[str] = Counter()

    def create_pilot(self, source: SourceModel, *, block: str, ends_at: float) -> SimPilot:
        pilot = super().create_pilot(source, block=block, ends_at=ends_at)
        gpus, kind = self._sharing.gpus, source.kind
        number = self._made[kind]
        self._made[kind] += 1
        node = number % (source.max_blocks // gpus) if self._sharing.spread else number // gpus
        alone_s = self._sharing.reads * load_s(self._parameters, kind) / gpus
        rate = (paper.MODEL_BYTES + paper.ENVIRONMENT_BYTES) / alone_s
        pilot.machine.disk = self._disks.setdefault((kind, node), SharedLink(f"disk {node} of {kind}", rate))
        return pilot


def item_s(parameters: Parameters, kind: str, *, peaks: Mapping[str, float] = paper.SINGLE) -> float:
    """Return seconds per inference: fitted for two kinds, else a power of the peak rate."""
    fitted = {paper.A10: parameters.item_a10_s, paper.TITAN: parameters.item_titan_s}
    if kind in fitted:
        return fitted[kind]
    power = math.log(fitted[paper.TITAN] / fitted[paper.A10]) / math.log(peaks[paper.A10] / peaks[paper.TITAN])
    return float(f"{fitted[paper.A10] * (peaks[paper.A10] / peaks[kind]) ** power:.{_DIGITS}g}")


def static_pools() -> Pools:
    return {paper.A10: ((0.0, paper.EACH),), paper.TITAN: ((0.0, paper.EACH),)}


def vanishing_pools(
    *, from_s: float = paper.PREEMPTED_FROM_S, lost: Mapping[str, int] | None = None, lost_at_s: float = 0.0
) -> Pools:
    """Lose one GPU a minute from `from_s`, A10s first (§4.4). `lost`: GPUs of each kind lost at `lost_at_s`."""
    pools, goes_at = {}, from_s
    for kind in (paper.A10, paper.TITAN):
        here, steps = paper.EACH - (lost or {}).get(kind, 0), [(0.0, paper.EACH)]
        if here < paper.EACH:
            steps.append((lost_at_s, here))
        for left in reversed(range(here)):
            steps.append((goes_at, left))
            goes_at += paper.PREEMPTED_EVERY_S
        pools[kind] = tuple(steps)
    return pools


def last_loss_s(pools: Pools) -> float:
    return max(at_s for steps in pools.values() for at_s, _ in steps)


def growing_pools(shares: Mapping[str, float], *, first: int, last: int, until_s: float, bend: float = 1.0) -> Pools:
    order = _gpu_order(shares, last)
    pools: dict[str, list[tuple[float, int]]] = {kind: [] for kind in order}
    steps = round(until_s / _STEP_S)
    for step in range(steps + 1):
        at_s = round(until_s * step / steps, 1)
        here = order[: round(first + (last - first) * (step / steps) ** bend)]
        for kind, found in pools.items():
            count = here.count(kind)
            if not found or found[-1][1] != count:
                found.append((at_s, count))
    return {kind: tuple(found) for kind, found in pools.items()}


def _gpu_order(shares: Mapping[str, float], count: int) -> list[str]:
    have = dict.fromkeys(shares, 0)
    order = []
    for _ in range(count):
        kind = max(shares, key=lambda kind: shares[kind] / (2 * have[kind] + 1))
        have[kind] += 1
        order.append(kind)
    return order
