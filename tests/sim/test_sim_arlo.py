"""`arlo` in virtual time: families in scenarios, devices that follow the lengths, blocks that follow the latency."""

from __future__ import annotations

import pytest
from sim.worlds import GPU, NOW, model, source

from stoker.chance import Stream
from stoker.errors import ConfigError
from stoker.manager.policies.arlo import arlo
from stoker.manager.policies.named import named
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.workload import contexts_named, of_lengths
from stoker.manager.sim.world import SourceModel, World
from stoker.protocol.blocks import Rule
from stoker.protocol.calls import Objective

SOON = Objective(latency_s=2.0)


def encoders(pool: SourceModel, **lengths: float) -> World:
    """Runtimes of `bert` by their length; a call takes so many seconds in each."""
    contexts = {
        name: model(item_s=seconds, load_s=1.0, family="bert", longest_input=int(name[1:]))
        for name, seconds in lengths.items()
    }
    return World(devices={"gpu": GPU}, sources=(pool,), contexts=contexts, delays=NOW)


def asked(rate: float, *, from_s: float, to_s: float, long: float = 0.3) -> list[Arrival]:
    """Independent calls at this rate, of 20 tokens, or of 200 in this share."""
    gaps, lengths = Stream(1, f"gaps/{from_s}"), Stream(1, f"lengths/{from_s}")
    found, at = list[Arrival](), from_s
    while at < to_s:
        tokens = 200 if lengths.uniform(len(found)) < long else 20
        found.append(Arrival(at, "bert", input_length=tokens, objective=SOON))
        at += gaps.exponential(len(found), mean=1 / rate)
    return found


def test_a_call_to_a_family_wants_the_runtimes_that_are_long_enough() -> None:
    world = encoders(source(1), r256=0.2, r64=0.05)
    assert contexts_named(world, ["bert"]) == ("r64", "r256")
    short, long = of_lengths(world, [Arrival(0.0, "bert", input_length=64), Arrival(0.0, "bert", input_length=65)])
    assert (short.context, short.variants) == ("r64", ("r256",))
    assert (long.context, long.variants) == ("r256", ())
    with pytest.raises(ConfigError, match="call 0 is 257 tokens long, and bert takes 256"):
        list(of_lengths(world, [Arrival(0.0, "bert", input_length=257)]))


def test_a_policy_that_knows_no_variants_serves_each_call_in_its_own_runtime() -> None:
    world = encoders(source(2), r64=0.05, r256=0.2)
    run = Simulation(world, of_lengths(world, asked(2.0, from_s=0.0, to_s=60.0)), named("default").make())
    outcome = run.run()
    assert not outcome.failed
    contexts = run.core.state.contexts
    assert contexts["r64"].served > contexts["r256"].served > 0


def test_more_blocks_come_when_the_latency_nears_its_limit_and_leave_when_it_is_far_below() -> None:
    """Ten short and four long calls a second are 1.3 devices' work; then nearly nothing comes."""
    pool = source(6, init_blocks=1, min_blocks=1, keep_pending=1, rule=Rule.OPPORTUNISTIC)
    world = encoders(pool, r64=0.05, r256=0.2)
    calls = [*asked(14.0, from_s=0.0, to_s=300.0), *asked(1.0, from_s=300.0, to_s=700.0)]
    busy, whole = (Simulation(world, of_lengths(world, calls), arlo()) for _ in range(2))
    busy.run(until_s=280.0)
    assert 2 <= len(busy.core.state.pilots) <= 4
    outcome = whole.run()
    assert outcome.complete
    assert not outcome.failed
    assert len(whole.core.state.pilots) == 1
