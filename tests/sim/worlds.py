from __future__ import annotations

from typing import Any

from stoker.contexts.recipe import Awareness
from stoker.manager.policies import default_policies
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.run import RunOutcome, Simulation
from stoker.manager.sim.world import ContextModel, Delays, DeviceKind, Links, SourceModel, World
from stoker.site import Duration, Size

GPU = DeviceKind(Size(24_000_000_000))
NOW = Delays(message_s=Duration(0.0), back_s=Duration(1.0), poll_s=Duration(0.0))


def model(
    *, memory_gb: int = 8, load_s: float = 10.0, item_s: float = 1.0, awareness: Awareness = Awareness.FULL, **more: Any
) -> ContextModel:
    return ContextModel(
        awareness=awareness,
        device_memory_bytes=Size(memory_gb * 1_000_000_000),
        load_s={"": Duration(load_s)},
        item_s={"": Duration(item_s)},
        **more,
    )


def source(blocks: Any, **more: Any) -> SourceModel:
    most = blocks if isinstance(blocks, int) else max(count for _, count in blocks)
    return SourceModel("pool", "gpu", capacity=blocks, **{"max_blocks": most, "keep_pending": most, **more})


def world(pool: SourceModel, context: ContextModel, *, links: Links | None = None, delays: Delays = NOW) -> World:
    links = links or Links()
    return World(devices={"gpu": GPU}, sources=(pool,), contexts={"llm": context}, links=links, delays=delays)


def calls(count: int, *, items: int = 1, every_s: float = 0.0) -> list[Arrival]:
    return [Arrival(n * every_s, "llm", items=items) for n in range(count)]


def simulate(world: World, arrivals: list[Arrival], *, seed: int = 0, **more: Any) -> tuple[Simulation, RunOutcome]:
    run = Simulation(world, arrivals, default_policies(), seed=seed)
    return run, run.run(**more)
