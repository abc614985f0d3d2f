from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from core.toy import Toy

from benchmarks.baselines.infless import Infless, Traffic
from benchmarks.baselines.replicas import ByOrder
from stoker.manager.core.events import AdviceArrived, ContextAdvice, CostAdvice, OfContext
from stoker.manager.core.seams import Policies
from stoker.manager.policies.provisioning import TakeWhatComes
from stoker.protocol.calls import Objective
from stoker.protocol.ids import RecipeKey

Make = Callable[..., Toy]


def infless(**how: Any) -> Callable[[], Policies]:
    def make() -> Policies:
        residency = ByOrder()
        return Policies(Infless(residency, **{"window_s": 0.0, "period_s": 0.2, **how}), residency, TakeWhatComes())

    return make


def due(at: float, **how: Any) -> Objective:
    return Objective(deadline_at=at, **how)


def starts(t: Toy, name: str) -> list[tuple[float, int]]:
    return sorted((at, size) for p in t.pilots.values() for at, call, _, size in p.began if call == t.ids[name])


@pytest.fixture
def lab(toy: Make) -> Make:
    """Return pilots of four devices; contexts load in 10 s; a job takes 100 s on one replica, 50 s on two."""

    def make(*, pilots: int = 2, **how: Any) -> Toy:
        t = toy(policies=infless(**how))
        for n in range(pilots):
            t.pilot(f"p{n + 1}", devices=4)
        for key in ("a", "b"):
            t.context(key, load_s=10.0)
            known = ContextAdvice(load_s=10.0, paces={1: 1.0, 2: 0.5, 4: 0.25, 8: 0.125}, meet_s=2.0)
            t.give(AdviceArrived(OfContext(RecipeKey(key)), CostAdvice({"": known})))
        return t

    return make


def job(
    t: Toy, name: str, at: float, *, run_s: float = 20.0, gang: tuple[int, int] = (1, 8), context: str = "a"
) -> Toy:
    return t.call(name, context=context, items=100, run_s=run_s, gang=gang, objective=due(at) if at else Objective())


@pytest.mark.parametrize(("at", "size"), [(130.0, 1), (119.0, 2), (60.0, 3), (45.0, 4)])
def test_job_gets_the_fewest_instances_that_meet_its_deadline(lab: Make, at: float, size: int) -> None:
    t = job(lab(), "j", at).run()
    assert {n for _, n in starts(t, "j")} == {size}


def test_late_job_runs_on_one_instance_or_is_dropped(lab: Make) -> None:
    t = job(lab(), "j", 15.0).run()
    assert [size for _, size in starts(t, "j")] == [1]
    assert t.ended["j"].ok
    t = lab()
    t.call("j", context="a", items=100, gang=(1, 8), objective=due(15.0, drop_late=True)).run()
    assert t.ended["j"].failure.message == "it would be late on as many devices as it may have"  # type: ignore[union-attr]


def test_keep_alive_combines_a_long_and_a_short_histogram() -> None:
    traffic = Traffic(long_s=1000.0, short_s=100.0)
    assert traffic.keep_s(0.0, gamma=0.5, tail=0.99) is None
    for n in range(10):
        traffic.add_arrival(40.0 * n)
    for n in range(10):
        traffic.add_arrival(400.0 + 5.0 * n)
    assert traffic.keep_s(450.0, gamma=1.0, tail=0.99) == 40.0
    assert traffic.keep_s(450.0, gamma=0.0, tail=0.99) == pytest.approx(40.0)
    assert traffic.keep_s(500.0, gamma=0.0, tail=0.99) == 5.0
    assert traffic.keep_s(500.0, gamma=0.5, tail=0.99) == pytest.approx(22.5)
