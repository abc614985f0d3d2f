"""The requests of `gateway_objectives` in the simulator, with the step times and delays of the live session.

The session without objectives measures its models' steps and loads, and the delay of a message. A request has two
messages on its way to its library, so the delay, with the gateway's part, is half of what the first token of a single
request takes beyond its prefill.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.serving.live_models import FIXED_BYTES, TOKEN_BYTES
from stoker.contexts.performance import READ, times_of
from stoker.contexts.step_times import StepTable, StepTimes
from stoker.manager.core.seams import Policies
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.log import Happened
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.world import ContextModel, Delays, DeviceKind, EngineModel, SourceModel, World
from stoker.pilot.devices import cpu
from stoker.protocol.blocks import Rule
from stoker.protocol.calls import Objective
from stoker.site import Duration, Size

KIND, DEVICES = "cpu", 2
WARM_S = 120.0
"""Seconds before the first counted request, for each simulated model to load."""


class Delayed(msgspec.Struct, frozen=True):
    """Measured seconds: the models' steps, a load, and a message."""

    times: StepTimes
    load_s: float
    message_s: float


class Length(msgspec.Struct, frozen=True):
    """A request: seconds since the first, number of its model, tokens of its prompt and answer."""

    at_s: float
    model: int
    prompt: int
    output: int


def measured_delays(file: Path, *, ttft_s: float, prompt: int) -> Delayed:
    """Read a session's measurements. `ttft_s`: time to the first token of a single request with `prompt` tokens."""
    times = StepTimes()
    with sqlite3.connect(file, timeout=30.0) as store:
        for (recipe,) in store.execute("SELECT DISTINCT recipe FROM steps").fetchall():
            for each in times_of(store.execute(READ, (recipe,)).fetchall()).values():
                times = times.joined(each)
        [(load_s,)] = store.execute("SELECT avg(mean) FROM measured WHERE what = 'load_s'").fetchall()
    prefill_s = StepTable(times.prefill).seconds(prompt, prompt / 2)
    return Delayed(times, float(load_s), max(0.0, (ttft_s - prefill_s) / 2))


def simulated_lateness(
    requests: Sequence[Length], delayed: Delayed, objective: Objective, policies: Policies, *, models: int,
    memory_bytes: int,
) -> list[float]:  # fmt: skip
    """Return by how many seconds the latest token of each request is late (negative: early; infinity: refused)."""
    warm = [Arrival(0.0, f"model-{number}", input_length=8, expected_output=4, output=4) for number in range(models)]
    asked = [
        Arrival(
            WARM_S + each.at_s, f"model-{each.model}", input_length=each.prompt, output=each.output,
            objective=objective, most_output=each.output,
        )
        for each in requests
    ]  # fmt: skip
    world = _world(delayed, models=models, memory_bytes=memory_bytes)
    simulation = Simulation(world, [*warm, *asked], policies, seed=0)
    simulation.run()
    log, came = simulation.log, list[int]()
    late: dict[int, float] = {}
    for what, call, value in zip(log.what, log.call, log.value, strict=True):
        if what == Happened.CALL_CAME:
            came.append(call)
        elif what == Happened.TOKEN_LATE:
            late[call] = value
    return [late.get(call, math.inf) for call in came[models:]]


def simulated_met(requests: Sequence[Length], *of_run: Any, **sizes: int) -> float:
    """Return the percentage of requests whose tokens are all in time (`simulated_lateness`)."""
    late = simulated_lateness(requests, *of_run, **sizes)
    return 100 * sum(each <= 0 for each in late) / max(1, len(late))


def _world(delayed: Delayed, *, models: int, memory_bytes: int) -> World:
    engine = EngineModel(
        delayed.times, rows=64, prefill_tokens=512, mixes=True, token_bytes=Size(TOKEN_BYTES),
        weights_bytes=Size(FIXED_BYTES),
    )  # fmt: skip
    model = ContextModel(
        device_memory_bytes=Size(memory_bytes), kinds=(KIND,), slots=0, load_s={KIND: Duration(delayed.load_s)},
        engine={KIND: engine}, min_libraries=1,
    )  # fmt: skip
    device = DeviceKind(memory_bytes=Size(cpu.find(DEVICES)[0].facts.memory_bytes))
    return World(
        devices={KIND: device},
        sources=(SourceModel(KIND, KIND, capacity=1, max_blocks=1, init_blocks=1, rule=Rule.FIXED, devices=DEVICES),),
        contexts={f"model-{number}": model for number in range(models)},
        delays=Delays(message_s=Duration(delayed.message_s)),
    )
