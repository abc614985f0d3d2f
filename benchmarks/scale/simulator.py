"""Measure the speed of the simulator (real cores in virtual time) by processor time, each case in a new process.

An event is the arrival or end of a call, in the manager core or in a library.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.harness import in_turns, run_side
from benchmarks.tables import Bar, Line, Table
from stoker.chance import Stream
from stoker.contexts.recipe import Awareness
from stoker.contexts.step_times import StepCell, StepTimes
from stoker.manager.policies import default_policies
from stoker.manager.sim import world
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.run import Simulation
from stoker.protocol.blocks import ProvisioningRule
from stoker.protocol.calls import Objective
from stoker.site import Duration, Size

GB = 1_000_000_000
BOOT_S, LOAD_S = 5.0, 10.0


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    times = 1 if quick else 5
    few = min(3, times)
    runs: dict[str, list[dict[str, float]]] = {}
    for case, count in (("steady", times), ("opportunistic", times), ("million", 1), ("short", few), ("engines", few)):
        runs |= in_turns({case: partial(run_side, side, case=case, quick=quick, timeout_s=1800)}, count, say)
    kinds: tuple[tuple[str, str, str, Callable[[dict[str, float]], float], dict[str, float]], ...] = (
        ("200 pilots, 100,000 calls of 1 s: the manager's core", "steady", "events/s",
         lambda one: one["events"] / one["spent_s"], {}),
        ("the same: all cores", "steady", "events/s",
         lambda one: (one["events"] + one["pilot_events"]) / one["spent_s"], {"at_least": 40_000}),
        ("150,000 inferences, pool of up to 186 GPUs", "opportunistic", "s",
         lambda one: one["spent_s"], {"at_most": 30}),
        ("1,000,000 calls, 2,000 pilots", "million", "peak, GB", lambda one: one["peak_gb"], {"at_most": 4}),
        ("500,000 requests of 5 ms, counted", "short", "millions a minute",
         lambda one: 60 * one["calls"] / one["spent_s"] / 1e6, {"at_least": 1}),
        ("20,000 requests to 64 language models, four a device", "engines", "s a million steps",
         lambda one: one["spent_s"] / one["engine_steps"] * 1e6, {"at_most": 30}),
    )  # fmt: skip
    lines = []
    for what, case, unit, value, limit in kinds:
        rates = [one["calls"] / one["spent_s"] for one in runs[case]]
        cells = {"calls/s": rates, unit: [value(one) for one in runs[case]]}
        bar = Bar(**limit, repeats=len(rates)) if limit else None
        lines.append(Line(what=what, cells=cells, bar=bar))
    return Table(lines=lines)


def side(case: str, quick: bool) -> dict[str, float]:
    simulation = CASES[case](100 if quick else 1)
    began = time.process_time()
    outcome = simulation.run()
    spent_s = time.process_time() - began
    if not outcome.complete or outcome.failed:
        raise RuntimeError(f"{case}: not every call ended well: {outcome}")
    return {
        "spent_s": spent_s, "calls": outcome.calls,
        "events": outcome.core_events + outcome.calls - 1,  # All calls of a sweep arrive in one event.
        "pilot_events": 2 * (outcome.calls + outcome.rerun_calls), "engine_steps": outcome.engine_steps,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GB,
    }  # fmt: skip


def opportunistic(part: int) -> Simulation:
    """Simulate 150,000 inferences on a pool of up to 186 GPUs that keeps losing and gaining GPUs."""
    steps = [(0.0, 20), *((10.0 + 5.0 * n, min(186, 20 + 10 * n)) for n in range(1, 18))]
    steps += [(120.0 + 20.0 * n, 186 - 12 * (n % 2)) for n in range(100)]
    pool = _pool(186, capacity=tuple(steps))
    return Simulation(_world(186, item_s=0.5, pool=pool), _sweep(150_000 // part), default_policies(), seed=1)


def short(part: int) -> Simulation:
    delays = world.Delays(frame_s=Duration(0.0125))  # The dispatch policy estimates this frame time at this rate.
    made = _world(200, item_s=0.005, delays=delays)
    return Simulation(made, _poisson(500_000 // part, per_s=25_000.0), default_policies(), seed=1, counted=True)


def engines(part: int) -> Simulation:
    prefill = tuple(StepCell(2**power, 2 ** (power - 1), 0.02 + 0.0001 * 2**power) for power in range(13))
    decode = tuple(
        StepCell(rows, length, 0.014 + 0.0003 * rows + 2e-7 * rows * length)
        for rows in (1, 2, 4, 8, 16, 32)
        for length in (512, 1024, 2048, 4096)
    )
    context = world.ContextModel(
        device_memory_bytes=Size(6 * GB), load_s={"": Duration(LOAD_S)}, slots=0,
        engine={"": world.EngineModel(StepTimes(prefill, decode), prefill_tokens=4096)},
    )  # fmt: skip
    pool = _pool(16)
    names = [f"llm-{number}" for number in range(64)]
    made = world.World(
        devices={"gpu": world.DeviceKind(Size(24 * GB))}, sources=(pool,), contexts=dict.fromkeys(names, context)
    )  # fmt: skip
    return Simulation(made, _requests(20_000 // part, names, per_s=11.0), default_policies(), seed=1)


CASES: dict[str, Callable[[int], Simulation]] = {
    "steady": lambda part: Simulation(_world(200, item_s=1.0), _sweep(100_000 // part), default_policies(), seed=1),
    "opportunistic": opportunistic, "short": short, "engines": engines,
    "million": lambda part: Simulation(_world(2000, item_s=10.0), _sweep(10**6 // part), default_policies(), seed=1),
}  # fmt: skip


def _requests(count: int, names: list[str], *, per_s: float) -> Iterator[Arrival]:
    gaps, which = Stream(1, "benchmark/gaps"), Stream(1, "benchmark/models")
    inputs, outputs, at_s = Stream(1, "benchmark/inputs"), Stream(1, "benchmark/outputs"), 0.0
    objective = Objective(ttft_s=0.5, ttft_per_token_s=1 / 512, ttft_most_s=8.0, tpot_s=0.25)
    for number in range(count):
        at_s += gaps.exponential(number, mean=1 / per_s)
        name = names[int(which.uniform(number) ** 2 * len(names))]
        prompt, output = (
            max(1, round(each.exponential(number, mean=mean))) for each, mean in ((inputs, 870.0), (outputs, 220.0))
        )
        yield Arrival(at_s, name, input_length=min(4096, prompt), output=output, objective=objective)


def _pool(blocks: int, *, capacity: int | tuple[tuple[float, int], ...] = 0) -> world.SourceModel:
    return world.SourceModel(
        name="pool", kind="gpu", capacity=capacity or blocks, boot_s=Duration(BOOT_S), rule=ProvisioningRule.FIXED,
        init_blocks=blocks, max_blocks=blocks,
    )  # fmt: skip


def _world(
    blocks: int, *, item_s: float, pool: world.SourceModel | None = None,
    delays: world.Delays = world.Delays(),  # noqa: B008 (frozen)
) -> world.World:  # fmt: skip
    context = world.ContextModel(
        files=(world.Files("weights", Size(4 * GB)),), awareness=Awareness.FULL, device_memory_bytes=Size(8 * GB),
        load_s={"": Duration(LOAD_S)}, item_s={"": Duration(item_s)}, item_cv=0.3,
    )  # fmt: skip
    links = world.Links(shared=world.Rate(10.0 * GB), network=world.Rate(1.25 * GB))
    devices = {"gpu": world.DeviceKind(Size(24 * GB))}
    return world.World(devices, (pool or _pool(blocks),), {"model": context}, links, delays)


def _sweep(calls: int) -> Iterator[Arrival]:
    return (Arrival(0.0, "model") for _ in range(calls))


def _poisson(calls: int, *, per_s: float) -> Iterator[Arrival]:
    chance, at_s = Stream(1, "arrivals"), 60.0
    yield Arrival(0.0, "model")
    for number in range(calls):
        at_s += chance.exponential(number, mean=1.0 / per_s)
        yield Arrival(at_s, "model")
