"""Simulate the requests of a live session whose language models share the CPU devices of one pilot.

The models are the tests' tiny models. A request meets its objectives if each token is in time (SLINFER eq. 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from stoker.contexts.step_times import StepTimes
from stoker.manager.core.seams import Policies
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.log import Happened
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.world import ContextModel, Delays, DeviceKind, EngineModel, SourceModel, World
from stoker.protocol.blocks import Rule
from stoker.site import Duration, Size

KIND, DEVICES = "cpu", 2
TOKEN_BYTES = 2 * 6 * 64 * 4
"""Keys and values of 6 layers, 64 wide, 4 bytes each."""
FIXED_BYTES = 510_000_000
"""A library's memory without its cache (`contexts.inference.static`)."""
WARM_S = 120.0
"""Seconds before the first counted request, for each simulated model to load."""
_ROUNDING_S = 2e-6
_TOKENS = (Happened.TOKEN_LATE, Happened.TOKEN_FIRST, Happened.TOKEN_MEAN)


class Machine(msgspec.Struct, frozen=True):
    """The models' step times, and bytes of a device, a library, a cached token, and a library without its cache.

    `most_output`: tokens reserved per request (0: its own). `min_libraries`: libraries that each model keeps.
    """

    times: StepTimes
    device_bytes: int
    library_bytes: int
    token_bytes: int = TOKEN_BYTES
    fixed_bytes: int = FIXED_BYTES
    load_s: float = 5.0
    message_s: float = 0.0005
    most_output: int = 0
    min_libraries: int = 0


class Simulated(msgspec.Struct, frozen=True):
    """Whether each request was in time; medians in seconds."""

    met: list[bool]
    first_s: float
    tpot_s: float

    @property
    def share(self) -> float:
        return sum(self.met) / max(1, len(self.met))


def median_of(numbers: Iterable[float]) -> float:
    found = sorted(numbers)
    return found[len(found) // 2] if found else 0.0


def simulate(requests: Sequence[Arrival], machine: Machine, policies: Policies, *, models: int) -> Simulated:
    """Simulate requests to the contexts `model-0`, `model-1`, ..., which are loaded before the first request."""
    warm = [Arrival(0.0, f"model-{number}", input_length=8, expected_output=4, output=4) for number in range(models)]
    asked = [replace(each, at_s=WARM_S + each.at_s) for each in requests]
    simulation = Simulation(_world(machine, models=models), [*warm, *asked], policies, seed=0)
    simulation.run()
    log, came = simulation.log, list[int]()
    told: dict[int, dict[int, float]] = {each: {} for each in _TOKENS}
    for what, call, value in zip(log.what, log.call, log.value, strict=True):
        if what == Happened.CALL_CAME:
            came.append(call)
        elif what in told:
            told[what][call] = value
    late, first, tpot = (told[each] for each in _TOKENS)
    counted = came[models:]
    return Simulated(
        met=[late.get(call, math.inf) <= _ROUNDING_S for call in counted],
        first_s=median_of(first[call] for call in counted if call in first),
        tpot_s=median_of(tpot[call] for call in counted if tpot.get(call)),
    )


def _world(machine: Machine, *, models: int) -> World:
    engine = EngineModel(
        machine.times, rows=64, prefill_tokens=512, mixes=True, token_bytes=Size(machine.token_bytes),
        weights_bytes=Size(machine.fixed_bytes), most_output=machine.most_output,
    )  # fmt: skip
    model = ContextModel(
        device_memory_bytes=Size(machine.library_bytes), kinds=(KIND,), slots=0,
        load_s={KIND: Duration(machine.load_s)}, engine={KIND: engine}, min_libraries=machine.min_libraries,
    )  # fmt: skip
    source = SourceModel(KIND, KIND, capacity=1, max_blocks=1, init_blocks=1, rule=Rule.FIXED, devices=DEVICES)
    return World(
        devices={KIND: DeviceKind(memory_bytes=Size(machine.device_bytes))},
        sources=(source,),
        contexts={f"model-{number}": model for number in range(models)},
        delays=Delays(message_s=Duration(machine.message_s)),
    )
