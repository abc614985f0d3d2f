"""The requests of `benchmarks.serving.live_models`, and the same session in the simulator.

The eight models get requests by weights 1/1 to 1/8. A request meets its objectives if each token is in time (SLINFER
eq. 1).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from benchmarks.serving.live_models_policy import patient
from stoker.contexts.step_times import StepTable, StepTimes
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.log import Happened
from stoker.manager.sim.pilot import SimPilot
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.world import ContextModel, Delays, DeviceKind, EngineModel, SourceModel, World
from stoker.pilot.core.events import OfferWeighed
from stoker.protocol.blocks import Rule
from stoker.protocol.calls import Objective
from stoker.protocol.to_pilot import RunCalls
from stoker.site import Duration, Size

MODELS, DEVICES, A_DEVICE = 8, 2, 4
KIND = "cpu"
PROMPT_MEAN, PROMPT_MOST = 100, 400
OUTPUT_MEAN, OUTPUT_MOST = 40, 160
SPREAD = 0.8
"""Standard deviation of the logarithm of both lengths."""
TTFT_STEPS, TPOT_STEPS = 40.0, 8.0
"""Objectives in decode steps of four requests of 128 tokens."""
AIM = 0.75
"""The predicted share of requests in time, which decides the load."""
WITHIN = (0.6, 0.9)
LEAST_RATE, MOST_RATE, HALVINGS = 0.5, 64.0, 7
WARM_S = 120.0
"""Seconds before the first counted request, for each simulated model to load."""


_TOKENS = (Happened.TOKEN_LATE, Happened.TOKEN_FIRST, Happened.TOKEN_MEAN)


class Request(msgspec.Struct, frozen=True):
    """One request. `output`: maximum of new tokens."""

    at_s: float
    model: int
    prompt: int
    output: int


def requests_at(rate: float, *, seed: int, for_s: float, most: int = 1_000_000) -> list[Request]:
    """Return requests at `rate` per second. The seed alone decides lengths and models."""
    chance = random.Random(f"live-models/{seed}")
    weights = [1 / (1 + number) for number in range(MODELS)]
    found: list[Request] = []
    at_s = 0.0
    while len(found) < most:
        at_s += chance.expovariate(1.0) / rate
        [model] = chance.choices(range(MODELS), weights)
        prompt, output = _length(chance, PROMPT_MEAN, PROMPT_MOST), _length(chance, OUTPUT_MEAN, OUTPUT_MOST)
        if at_s >= for_s:
            break
        found.append(Request(at_s, model, prompt, output))
    return found


def _length(chance: random.Random, mean: int, most: int) -> int:
    drawn = chance.lognormvariate(0.0, SPREAD) * mean / math.exp(SPREAD**2 / 2)
    return max(4, min(most, round(drawn)))


def objective_of(times: StepTimes) -> Objective:
    step_s = StepTable(times.decode).seconds(4.0, 128.0)
    return Objective(ttft_s=TTFT_STEPS * step_s, tpot_s=TPOT_STEPS * step_s)


class Machine(msgspec.Struct, frozen=True):
    """Bytes of a device, of a library, of a cached token, of fixed memory; the models' step times."""

    times: StepTimes
    device_bytes: int
    library_bytes: int
    token_bytes: int
    fixed_bytes: int
    load_s: float = 5.0


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


def simulate(
    requests: Sequence[Request], outputs: Sequence[int], machine: Machine, objective: Objective, *, weighed: bool
) -> Simulated:
    warm = [Arrival(0.0, f"model-{number}", input_length=8, expected_output=4, output=4) for number in range(MODELS)]
    asked = [
        Arrival(
            WARM_S + request.at_s, f"model-{request.model}", input_length=request.prompt,
            expected_output=OUTPUT_MEAN, output=output, objective=objective,
        )
        for request, output in zip(requests, outputs, strict=True)
    ]  # fmt: skip
    with _judge_by_memory(weighed=weighed):
        simulation = Simulation(_world(machine), [*warm, *asked], patient(), seed=0)
        simulation.run()
    log = simulation.log
    came: list[int] = []
    told: dict[int, dict[int, float]] = {each: {} for each in _TOKENS}
    for what, call, value in zip(log.what, log.call, log.value, strict=True):
        if what == Happened.CALL_CAME:
            came.append(call)
        elif what in told:
            told[what][call] = value
    late, first, tpot = (told[each] for each in _TOKENS)
    counted = came[MODELS:]
    return Simulated(
        met=[late.get(call, math.inf) <= 2e-6 for call in counted],
        first_s=median_of(first[call] for call in counted if call in first),
        tpot_s=median_of(tpot[call] for call in counted if tpot.get(call)),
    )


def choose_rate(
    machine: Machine, objective: Objective, *, seed: int, for_s: float, weighed: bool
) -> tuple[float, float]:
    least, most = LEAST_RATE, MOST_RATE
    best = (least, 0.0)
    for _ in range(HALVINGS):
        rate = math.sqrt(least * most)
        requests = requests_at(rate, seed=seed, for_s=for_s)
        share = simulate(requests, [each.output for each in requests], machine, objective, weighed=weighed).share
        if abs(share - AIM) < abs(best[1] - AIM):
            best = (rate, share)
        least, most = (rate, most) if share > AIM else (least, rate)
    return best


def _world(machine: Machine) -> World:
    engine = EngineModel(
        machine.times, rows=64, prefill_tokens=512, mixes=True, token_bytes=Size(machine.token_bytes),
        weights_bytes=Size(machine.fixed_bytes), most_output=OUTPUT_MOST,
    )  # fmt: skip
    model = ContextModel(
        device_memory_bytes=Size(machine.library_bytes), kinds=(KIND,), slots=0,
        load_s={KIND: Duration(machine.load_s)}, engine={KIND: engine},
    )  # fmt: skip
    return World(
        devices={KIND: DeviceKind(memory_bytes=Size(machine.device_bytes))},
        sources=(SourceModel(KIND, KIND, capacity=1, max_blocks=1, init_blocks=1, rule=Rule.FIXED, devices=DEVICES),),
        contexts={f"model-{number}": model for number in range(MODELS)},
        delays=Delays(message_s=Duration(0.0005)),
    )


@contextmanager
def _judge_by_memory(*, weighed: bool) -> Iterator[None]:
    before = SimPilot._weighed
    if not weighed:
        SimPilot._weighed = _weigh_by_memory  # type: ignore[method-assign]
    try:
        yield
    finally:
        SimPilot._weighed = before  # type: ignore[method-assign]


def _weigh_by_memory(self: SimPilot, order: RunCalls) -> OfferWeighed:  # noqa: ARG001 # a method of the pilot
    return OfferWeighed(order)
