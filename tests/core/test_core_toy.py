from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from core.toy import Toy

from stoker.manager.core.report import device_seconds_by_tier
from stoker.protocol import to_manager as say

Make = Callable[..., Toy]


def test_context_is_loaded_once_per_device_and_serves_many_calls(toy: Make) -> None:
    t = toy()
    t.pilot("p1", devices=2)
    t.context("llm", load_s=5.0).call(*(f"c{n}" for n in range(20)), context="llm", run_s=1.0).run()
    assert t.core.state.contexts["llm"].loads == 2
    assert t.now == pytest.approx(15.0, abs=0.5)


def test_prefetched_short_calls_hide_the_round_trip(toy: Make) -> None:
    t = toy(latency_s=0.002)
    t.pilot("p1")
    t.call("first", run_s=0.0005).run()
    before = t.now
    t.call(*(f"c{n}" for n in range(400)), run_s=0.0005).run()
    assert t.now - before < 0.0005 * 400 + 4 * 0.002 + 0.02


def test_surplus_calls_of_one_library_are_taken_by_another(toy: Make) -> None:
    t = toy()
    t.pilot("p1", devices=2)
    t.call("warm1", "warm2", run_s=0.001).run()
    t.call(*(f"c{n}" for n in range(40)), run_s=0.001)
    # these calls share the function of short calls, so the core expects short calls
    t.call(*(f"slow{n}" for n in range(4)), run_s=1.0)
    before = t.now
    t.run()
    assert t.now - before < 2.2


def test_pilot_that_leaves_by_itself_gets_no_calls(toy: Make) -> None:
    t = toy()
    leaver = t.pilot("p1")
    t.call("long", run_s=50.0).call("c1", "c2", "c3", run_s=1.0)
    t.run(until=2.0)
    leaver.leave()
    t.pilot("p2")
    before = len(t.past)
    t.run()
    assert len(t.past) - before < 80
    assert all(end.ok for end in t.ended.values())
    assert max(t.ended_at[name] for name in ("c1", "c2", "c3")) < 10


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


@pytest.mark.parametrize("seed", range(3))
def test_every_call_ends_once_on_a_day_of_many_faults(toy: Make, seed: int) -> None:
    """Lose pilots at random times: every call ends once, and only bad calls fail."""
    chance = random.Random(seed)
    t = toy(latency_s=chance.choice((0.0005, 0.02)))
    for n in range(4):
        t.pilot(f"p{n}", devices=chance.randint(1, 3), memory="8 GB")
    t.context("a", load_s=2, memory="3 GB").context("b", load_s=1, memory="6 GB", slots=3)
    t.context("once", load_s=0.5, calls_per_library=2)
    for n in range(120):
        how = {"context": chance.choice(("a", "b", "once", "bare")), "priority": chance.randint(0, 2)}
        run_s = chance.choice((0.001, 0.01, 0.5, 3.0))
        bad = chance.random() < 0.03
        t.after(chance.random() * 20, lambda n=n, how=how, run_s=run_s, bad=bad: _submit(t, n, how, run_s, bad))  # type: ignore[misc]
    for _ in range(12):
        name, at, gap = f"p{chance.randrange(4)}", chance.random() * 25, chance.choice((0.1, 2.0))
        t.after(at, lambda name=name, gap=gap: _blip(t, name, gap))  # type: ignore[misc]
    for n in range(4, 7):
        t.after(chance.random() * 20, lambda n=n: (t.kill(chance.choice([*t.core.state.pilots])), t.pilot(f"p{n}")))  # type: ignore[func-returns-value,misc,arg-type]
    t.run(until=25.0)
    t.run()
    for name, end in t.ended.items():
        assert end.ok != name.startswith("bad"), end


def _submit(t: Toy, n: int, how: dict[str, object], run_s: float, bad: bool) -> None:
    t.call(f"{'bad' if bad else 'c'}{n}", run_s=run_s, kills=bad, **how)  # type: ignore[arg-type]


def _blip(t: Toy, name: str, gap: float) -> None:
    if name in t.core.state.pilots and t.links[name]:
        t.cut(name, back_after=gap)
