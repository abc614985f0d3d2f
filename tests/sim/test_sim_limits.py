"""Limits of a context's libraries in virtual time: what is loaded, and for how long devices are held."""

from __future__ import annotations

import pytest
from sim.worlds import calls, model, simulate, source, world

from stoker.manager.policies.prompt_tuner import prompt_tuner
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.run import Simulation
from stoker.site import Duration


def test_one_library_serves_a_queue_where_a_second_would_pay() -> None:
    _, free = simulate(world(source(2), model(load_s=1.0)), calls(100))
    run, bounded = simulate(world(source(2), model(load_s=1.0, max_libraries=1)), calls(100))
    assert run.core.state.contexts["llm"].loads == 1
    assert bounded.ended_at == pytest.approx(1.0 + 100.0, abs=1.0)
    assert free.ended_at < 60.0


@pytest.mark.parametrize(("keep_alive_s", "least", "loads"), [(30.0, 0, 2), (30.0, 1, 1), (3600.0, 0, 1), (None, 0, 1)])
def test_a_context_is_loaded_again_after_its_keep_alive(keep_alive_s: float | None, least: int, loads: int) -> None:
    kept = None if keep_alive_s is None else Duration(keep_alive_s)
    context = model(load_s=10.0, keep_alive_s=kept, min_libraries=least)
    run, outcome = simulate(world(source(1), context), [Arrival(0.0, "llm"), Arrival(100.0, "llm")])
    assert run.core.state.contexts["llm"].loads == loads
    assert outcome.ended_at == pytest.approx(101.0 + 10.0 * (loads - 1), abs=0.1)


def test_a_policy_that_does_not_honour_limits_has_the_calls_refused() -> None:
    run = Simulation(world(source(1), model(max_libraries=1)), calls(3), prompt_tuner())
    run.run()
    [(why, count)] = run.client.failed.items()
    assert "leave max_libraries away" in why
    assert count == 3
