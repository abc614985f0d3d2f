from __future__ import annotations

from collections.abc import Callable

import pytest
from core.toy import Toy

from stoker.manager.core.report import device_seconds_by_tier
from stoker.protocol import to_manager as say

Make = Callable[..., Toy]


def test_prefetched_short_calls_hide_the_round_trip(toy: Make) -> None:
    t = toy(latency_s=0.002)
    t.pilot("p1")
    t.call("first", run_s=0.0005).run()
    before = t.now
    t.call(*(f"c{n}" for n in range(400)), run_s=0.0005).run()
    assert t.now - before < 0.0005 * 400 + 4 * 0.002 + 0.02


def test_device_seconds_are_accounted_by_tier(toy: Make) -> None:
    t = toy()
    t.pilot("p1")
    t.pilot("p2")
    t.context("llm", load_s=4.0).call("c1", context="llm", run_s=6.0).run(until=20.0)
    t.tell(say.AskStatus(), numbered=False)  # any event: it tells the core the time
    tiers = device_seconds_by_tier(t.core.state)
    assert tiers["warm"] == pytest.approx(16.0, abs=0.1)
    assert tiers["cold"] == pytest.approx(24.0, abs=0.1)
    t.kill("p1")
    t.kill("p2")
    assert sum(device_seconds_by_tier(t.core.state).values()) == pytest.approx(40.0, abs=0.1)
