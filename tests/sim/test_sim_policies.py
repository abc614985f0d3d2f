from __future__ import annotations

import math
from typing import Any

import pytest
from sim.engines import SLINFER, engine
from sim.worlds import GPU, NOW, model, source

from stoker.chance import Stream
from stoker.errors import ConfigError
from stoker.manager.policies import default_policies
from stoker.manager.policies.arlo import arlo
from stoker.manager.policies.slinfer import slinfer
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.log import LoggedEvent
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.workload import choose_contexts_by_length, expand_family_names
from stoker.manager.sim.world import ContextModel, DeviceKind, SourceModel, World
from stoker.protocol.blocks import ProvisioningRule
from stoker.protocol.calls import Objective
from stoker.site import Duration, Size

SOON = Objective(latency_s=2.0)


def encoders(pool: SourceModel, **lengths: float) -> World:
    contexts = {
        name: model(item_s=seconds, load_s=1.0, family="bert", longest_input=int(name[1:]))
        for name, seconds in lengths.items()
    }
    return World(devices={"gpu": GPU}, sources=(pool,), contexts=contexts, delays=NOW)


def asked(rate: float, *, from_s: float, to_s: float, long: float = 0.3) -> list[Arrival]:
    gaps, lengths = Stream(1, f"gaps/{from_s}"), Stream(1, f"lengths/{from_s}")
    found, at = list[Arrival](), from_s
    while at < to_s:
        tokens = 200 if lengths.uniform(len(found)) < long else 20
        found.append(Arrival(at, "bert", input_length=tokens, objective=SOON))
        at += gaps.exponential(len(found), mean=1 / rate)
    return found


def test_call_to_a_family_may_use_runtimes_that_are_long_enough() -> None:
    world = encoders(source(1), r256=0.2, r64=0.05)
    assert expand_family_names(world, ["bert"]) == ("r64", "r256")
    short, long = choose_contexts_by_length(
        world, [Arrival(0.0, "bert", input_length=64), Arrival(0.0, "bert", input_length=65)]
    )
    assert (short.context, short.variants) == ("r64", ("r256",))
    assert (long.context, long.variants) == ("r256", ())
    with pytest.raises(ConfigError, match="call 0 is 257 tokens long, but bert takes at most 256"):
        list(choose_contexts_by_length(world, [Arrival(0.0, "bert", input_length=257)]))


def test_number_of_blocks_follows_the_tail_latency() -> None:
    pool = source(6, init_blocks=1, min_blocks=1, keep_pending=1, rule=ProvisioningRule.OPPORTUNISTIC)
    world = encoders(pool, r64=0.05, r256=0.2)
    calls = [*asked(14.0, from_s=0.0, to_s=150.0), *asked(1.0, from_s=150.0, to_s=450.0)]
    run = Simulation(world, choose_contexts_by_length(world, calls), arlo())
    outcome = run.run()
    assert (outcome.complete, outcome.failed) == (True, {})
    assert 2 <= list(run.log.what).count(LoggedEvent.PILOT_CAME) <= 4
    assert len(run.core.state.pilots) == 1


GB = 1_000_000_000
LOAD_S = 0.5


def models(count: int, *, devices: int = 1, memory_gb: int = 20, resize_s: float = 0.03) -> World:
    made = engine(
        token_bytes=Size(1_000_000), weights_bytes=Size(4 * GB), page_tokens=16, prefill_tokens=4096,
        prefill_requests=1, most_output=512,
    )  # fmt: skip
    context = ContextModel(
        device_memory_bytes=Size(5 * GB), load_s={"": Duration(LOAD_S)}, engine={"": made}, slots=0,
        resize_s=Duration(resize_s),
    )  # fmt: skip
    return World(
        devices={"gpu": DeviceKind(memory_bytes=Size(memory_gb * GB))},
        sources=(source(devices, max_blocks=devices, init_blocks=devices),),
        contexts={f"model-{number}": context for number in range(count)},
    )


def traffic(models: int, *, seconds: float, every_s: float, prompt: int = 100, output: int = 40) -> list[Arrival]:
    """Return a request every `every_s` seconds to each model in turn; every second request is sent twice."""
    found = []
    for number in range(int(seconds / every_s)):
        context = f"model-{number % models}"
        for part in range(1 + number % 2):
            at_s = 30.0 + number * every_s + 0.01 * part
            found.append(Arrival(at_s, context, input_length=prompt, output=output, objective=SLINFER))
    return found


def late(run: Simulation) -> list[float]:
    log = run.log
    return [value for what, value in zip(log.what, log.value, strict=True) if what == LoggedEvent.TOKEN_LATE]


def run(world: World, arrivals: list[Arrival], **settings: Any) -> Simulation:
    simulation = Simulation(world, arrivals, slinfer(**settings), seed=0)
    assert simulation.run().complete
    return simulation


def test_nearly_all_accepted_calls_are_in_time_under_heavy_load() -> None:
    arrivals = traffic(4, seconds=8, every_s=0.06, output=60)
    found = [value for value in late(run(models(4, resize_s=0.0, memory_gb=200), arrivals)) if value < math.inf]
    assert sum(value <= 0 for value in found) >= 0.97 * len(found)
    by_default = Simulation(models(4, resize_s=0.0, memory_gb=200), arrivals, default_policies(), seed=0)
    assert by_default.run().complete
    assert sum(value <= 0 for value in late(by_default)) < 0.97 * len(arrivals)


def test_requests_that_outgrow_their_estimates_get_a_larger_cache() -> None:
    short = [Arrival(30.0 + 0.3 * n, "model-0", input_length=100, output=10, objective=SLINFER) for n in range(20)]
    long = [Arrival(36.0 + 0.02 * n, "model-0", input_length=30, output=500, objective=SLINFER) for n in range(20)]
    simulation = run(models(1), short + long)
    ended = simulation.engine_steps.evictions
    evictions = ended + sum(
        counts.evictions for pilot in simulation.pilots.values() for counts in pilot.engine_step_counts()
    )
    assert evictions <= 10  # without growth, requests lose their cache 90 times


def test_repeated_run_is_identical() -> None:
    arrivals = traffic(6, seconds=5, every_s=0.1)
    digests = {run(models(6, memory_gb=12), arrivals).log.digest() for _ in range(2)}
    assert len(digests) == 1


def test_each_model_has_its_own_device_without_sharing() -> None:
    arrivals = traffic(2, seconds=20, every_s=2.0)
    shared, alone = (run(models(2, devices=2), arrivals, sharing=sharing) for sharing in (True, False))
    assert len(_pilots_used(shared)) == 1
    assert len(_pilots_used(alone)) == 2


def _pilots_used(simulation: Simulation) -> set[int]:
    log = simulation.log
    return {pilot for what, pilot in zip(log.what, log.pilot, strict=True) if what == LoggedEvent.LIBRARY_STARTED}
