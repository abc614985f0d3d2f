from __future__ import annotations

from typing import Any

import pytest
from sim.engines import SLINFER, engine

from benchmarks.papers.slinfer.sllm import sllm
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.log import LoggedEvent
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.world import ContextModel, Delays, DeviceKind, SourceModel, World
from stoker.protocol.blocks import ProvisioningRule
from stoker.site import Duration, Size

GB = 1_000_000_000
LIMIT = 2


def _world(*, gpus: int = 1, cpus: int = 0, models: int = 1, parts: int = 1) -> World:
    kinds = tuple(kind for kind, count in (("cpu", cpus), ("gpu", gpus)) if count)
    context = ContextModel(
        device_memory_bytes=Size(8 * GB // parts), kinds=kinds, slots=0, load_s={"": Duration(1.0)},
        engine={"": engine(rows=LIMIT)},
    )  # fmt: skip
    counts = {"cpu": cpus, "gpu": gpus}
    sources = (
        SourceModel(kind, kind, capacity=n, max_blocks=n, init_blocks=n, rule=ProvisioningRule.FIXED)
        for kind, n in counts.items()
        if n
    )
    return World(
        devices={kind: DeviceKind(Size(8 * GB)) for kind in kinds}, sources=tuple(sources),
        contexts={f"m{number}": context for number in range(models)}, delays=Delays(message_s=Duration(0.0)),
    )  # fmt: skip


def _ask(at_s: float, model: int = 0, *, output: int = 50, prompt: int = 100) -> Arrival:
    return Arrival(at_s, f"m{model}", input_length=prompt, output=output, objective=SLINFER)


def _run(world: World, arrivals: list[Arrival], *, parts: int = 1, **settings: Any) -> Simulation:
    names = [(name, kind) for name in world.contexts for kind in world.devices]
    policies = sllm(limits=dict.fromkeys(names, LIMIT), parts=dict.fromkeys(names, parts), **settings)
    simulation = Simulation(world, arrivals, policies)
    simulation.run()
    return simulation


def _rows(simulation: Simulation, what: LoggedEvent) -> list[tuple[float, int]]:
    log = simulation.log
    found = zip(log.at_s, log.what, log.pilot, strict=True)
    return [(round(at_s, 3), pilot) for at_s, kind, pilot in found if kind == what]


def test_instance_serves_up_to_its_limit_before_another_loads() -> None:
    two = _run(_world(gpus=3), [_ask(10.0), _ask(10.0)])
    assert len(_rows(two, LoggedEvent.LIBRARY_STARTED)) == 1
    three = _run(_world(gpus=3), [_ask(10.0), _ask(10.0), _ask(10.0)])
    assert [at_s for at_s, _ in _rows(three, LoggedEvent.LIBRARY_STARTED)] == [10.0, 10.0]


def test_cpus_are_used_first_and_gpus_when_no_cpu_is_free() -> None:
    simulation = _run(_world(gpus=1, cpus=1, models=2), [_ask(10.0, 0), _ask(10.2, 1)])
    kinds = {pilot.number: pilot.kind for pilot in simulation.pilots.values()}
    assert [kinds[pilot] for _, pilot in _rows(simulation, LoggedEvent.LIBRARY_STARTED)] == ["cpu", "gpu"]


def test_idle_instance_is_kept_for_its_keep_alive_before_eviction() -> None:
    simulation = _run(_world(models=2), [_ask(10.0, 0, output=10), _ask(20.0, 1, output=10)])
    [(ended_at, _)] = _rows(simulation, LoggedEvent.LIBRARY_ENDED)
    last_token_at = _rows(simulation, LoggedEvent.CALL_ENDED)[0][0]
    assert ended_at == pytest.approx(last_token_at + 1.0, abs=0.01)


def test_request_without_room_is_dropped_when_late() -> None:
    asked = [_ask(10.0, 0, output=400), _ask(12.0, 1)]
    assert [at_s for at_s, _ in _rows(_run(_world(models=2), asked), LoggedEvent.CALL_FAILED)] == [12.5]
