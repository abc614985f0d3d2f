"""The paper's runs as worlds of the simulator."""

from __future__ import annotations

import math
from collections.abc import Mapping

from stoker.contexts.recipe import Awareness
from stoker.manager.protocol.blocks import Rule
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.world import ContextModel, Delays, DeviceKind, Files, Links, Rate, SourceModel, World
from stoker.manager.study.reproduce import paper
from stoker.manager.study.reproduce.parameters import Parameters
from stoker.site import Duration, Size

Steps = tuple[tuple[float, int], ...]
_GPU_BYTES = Size(12_000_000_000)
"""The smallest of them; one context fills it."""
_OLD_BELOW_TERAFLOPS = 50.0


def world(parameters: Parameters, awareness: Awareness, pools: Mapping[str, Steps]) -> World:
    """A cluster with these pools of GPUs, by kind: how many there are, from when on."""
    p = parameters
    context = ContextModel(
        files=(
            Files("model", Size(paper.MODEL_BYTES)),
            Files("environment", Size(paper.ENVIRONMENT_BYTES)),
        ),
        awareness=awareness,
        device_memory_bytes=Size(paper.LOADED_BYTES),
        load_s={kind: Duration(_load_s(p, kind)) for kind in pools},
        call_s={"": Duration(p.call_s)},
        item_s={kind: Duration(item_s(p, kind)) for kind in pools},
        warm_items=int(p.warm_items),
        warm_item_s=Duration(p.warm_item_s),
    )
    sources = tuple(
        SourceModel(
            name=f"pool-{number}",
            kind=kind,
            capacity=steps,
            boot_s=Duration(p.boot_s),
            rule=Rule.FIXED,
            init_blocks=max(count for _, count in steps),
            max_blocks=max(count for _, count in steps),
        )
        for number, (kind, steps) in enumerate(pools.items())
    )
    links = Links(
        shared=Rate(paper.SHARED_BYTES_PER_S),
        shared_node=Rate(p.shared_node_bytes_per_s),
        network=Rate(1.25e9),
    )
    devices = dict.fromkeys(pools, DeviceKind(_GPU_BYTES))
    return World(devices=devices, sources=sources, contexts={"llm": context}, links=links, delays=Delays())


def item_s(parameters: Parameters, kind: str) -> float:
    """Seconds an inference: fitted for the two kinds of the static runs; for the others a power of their peak rate that
    goes through these two."""
    ratio = parameters.item_titan_s / parameters.item_a10_s
    power = math.log(ratio) / math.log(paper.TERAFLOPS[paper.A10] / paper.TERAFLOPS[paper.TITAN])
    return parameters.item_a10_s * float((paper.TERAFLOPS[paper.A10] / paper.TERAFLOPS[kind]) ** power)


def _load_s(parameters: Parameters, kind: str) -> float:
    """GPUs of the older kinds stand in older hosts."""
    old = paper.TERAFLOPS[kind] < _OLD_BELOW_TERAFLOPS
    return parameters.load_titan_s if old else parameters.load_a10_s


def calls(batch: int) -> list[Arrival]:
    """All inferences, in calls of so many."""
    return [Arrival(0.0, "llm", items=batch) for _ in range(paper.INFERENCES // batch)]


# ---- pools


def static() -> dict[str, Steps]:
    """§4.1: ten of each."""
    return {paper.A10: ((0.0, paper.EACH),), paper.TITAN: ((0.0, paper.EACH),)}


def vanishing(*, lost_early: int = 0, lost_at_s: float = 0.0) -> dict[str, Steps]:
    """§4.4: one a minute from 900 s, A10s first. `lost_early`: so many A10s go before that, at `lost_at_s`."""
    start, every, each = paper.PREEMPTED_FROM_S, paper.PREEMPTED_EVERY_S, paper.EACH
    left = each - lost_early
    a10 = [(0.0, each), (max(lost_at_s, 1.0), left)] if lost_early else [(0.0, each)]
    a10 += [(start + every * n, left - 1 - n) for n in range(left)]
    first = start + every * left
    return {
        paper.A10: tuple(a10),
        paper.TITAN: ((0.0, each), *((first + every * n, each - 1 - n) for n in range(each))),
    }


def ramp(
    shares: Mapping[str, float], *, first: int, last: int, until_s: float, every_s: float = 10.0
) -> dict[str, Steps]:
    """From `first` GPUs to `last` in a straight line; each kind has its share of them, as whole GPUs."""
    pools: dict[str, list[tuple[float, int]]] = {kind: [] for kind in shares}
    steps = max(1, round(until_s / every_s))
    for step in range(steps + 1):
        at_s = until_s * step / steps if until_s else float(step)
        wanted = first + (last - first) * step / steps
        for kind, count in _apportioned(shares, round(wanted)).items():
            if not pools[kind] or pools[kind][-1][1] != count:
                pools[kind].append((at_s, count))
    return {kind: tuple(found) for kind, found in pools.items() if any(count for _, count in found)}


def _apportioned(shares: Mapping[str, float], count: int) -> dict[str, int]:
    """Whole numbers in these proportions: by largest remainder."""
    total = sum(shares.values())
    exact = {kind: count * share / total for kind, share in shares.items()}
    whole = {kind: math.floor(value) for kind, value in exact.items()}
    for kind in sorted(exact, key=lambda kind: whole[kind] - exact[kind])[: count - sum(whole.values())]:
        whole[kind] += 1
    return whole
