"""Simulate the requests of a live session whose tiny language models share the CPU devices of one pilot."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from benchmarks.papers.common import fixed_source
from stoker.contexts.step_times import StepTimes
from stoker.manager.core.seams import Policies
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.log import LoggedEvent
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.world import ContextModel, Delays, DeviceKind, EngineModel, World
from stoker.pilot.devices import cpu
from stoker.site import Duration, Size

KIND, DEVICES = "cpu", 2
LAYERS = 24
TOKEN_BYTES = 2 * LAYERS * 64 * 4
"""Bytes of keys and values, 64 wide, 4 bytes each."""
FIXED_BYTES = 510_000_000
"""Bytes of a library without its cache (`contexts.inference.static`)."""
WARM_S = 120.0
"""Seconds before the first counted request, for each simulated model to load."""


class Delayed(msgspec.Struct, frozen=True):
    """Measured seconds: the models' steps, a load, and a message."""

    times: StepTimes
    load_s: float
    message_s: float


def simulated_lateness(
    requests: Sequence[Arrival],
    delayed: Delayed,
    policies: Policies,
    *,
    models: int,
    memory_bytes: int,
    rehearsed: int = 0,
) -> list[float]:
    """Return by how many seconds the latest token of each request is late (SLINFER eq. 1; infinity: refused).

    The contexts are `model-0`, `model-1`, ..., with `memory_bytes` for each library. As in the live session, a call
    checks each model, and a request of the first model waits for its load. The first `rehearsed` requests do not count.
    """
    checked = (0, *range(models))
    warm = [Arrival(0.0, f"model-{number}", input_length=8, expected_output=4, output=4) for number in checked]
    asked = [replace(each, at_s=WARM_S + each.at_s) for each in requests]
    simulation = Simulation(_world(delayed, models, memory_bytes), [*warm, *asked], policies, seed=0)
    simulation.run()
    log, came = simulation.log, list[int]()
    late: dict[int, float] = {}
    for what, call, value in zip(log.what, log.call, log.value, strict=True):
        if what == LoggedEvent.CALL_CAME:
            came.append(call)
        elif what == LoggedEvent.TOKEN_LATE:
            late[call] = value
    return [late.get(call, math.inf) for call in came[len(warm) + rehearsed :]]


def _world(delayed: Delayed, models: int, memory_bytes: int) -> World:
    engine = EngineModel(
        delayed.times, rows=64, prefill_tokens=512, mixes=True, token_bytes=Size(TOKEN_BYTES),
        weights_bytes=Size(FIXED_BYTES),
    )  # fmt: skip
    model = ContextModel(
        device_memory_bytes=Size(memory_bytes), kinds=(KIND,), slots=0, load_s={KIND: Duration(delayed.load_s)},
        engine={KIND: engine}, min_libraries=1,
    )  # fmt: skip
    device = DeviceKind(memory_bytes=Size(cpu.find_cpu_devices(DEVICES)[0].facts.memory_bytes))
    source = fixed_source(KIND, KIND, 1, devices=DEVICES)
    contexts = {f"model-{number}": model for number in range(models)}
    return World({KIND: device}, (source,), contexts, delays=Delays(message_s=Duration(delayed.message_s)))
