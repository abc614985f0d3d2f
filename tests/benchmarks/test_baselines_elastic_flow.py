from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from core.toy import Toy

from benchmarks.baselines.elastic_flow import ElasticFlow
from benchmarks.baselines.replicas import ByOrder
from stoker.manager.core.events import AdviceArrived, ContextAdvice, CostAdvice, OfContext
from stoker.manager.core.seams import Policies
from stoker.manager.policies.provisioning import ExternalPilots
from stoker.protocol.calls import Objective
from stoker.protocol.ids import RecipeKey

Make = Callable[..., Toy]


def elastic_flow(**how: Any) -> Callable[[], Policies]:
    def make() -> Policies:
        residency = ByOrder()
        return Policies(ElasticFlow(residency, **{"slot_s": 1.0, "period_s": 0.2, **how}), residency, ExternalPilots())

    return make


def starts(t: Toy, name: str) -> list[tuple[float, int]]:
    return sorted(
        (at, size) for p in t.pilots.values() for at, call, rank, size in p.began if (call, rank) == (t.ids[name], 0)
    )


@pytest.fixture
def lab(toy: Make) -> Make:
    """Return a function that makes four devices. Contexts `a` and `b` load in 10 s; an item takes 1 s on one replica,
    0.5 s on two.
    """

    def make(*, devices: int = 4, **how: Any) -> Toy:
        t = toy(policies=elastic_flow(**how))
        t.pilot("p1", devices=devices)
        for key in ("a", "b"):
            t.context(key, load_s=10.0)
            known = ContextAdvice(load_s=10.0, paces={1: 1.0, 2: 0.5, 4: 0.25, 8: 0.125}, meet_s=2.0)
            t.give(AdviceArrived(OfContext(RecipeKey(key)), CostAdvice({"": known})))
        return t

    return make


def job(
    t: Toy, name: str, at: float, *, items: int = 100, run_s: float = 20.0, gang: tuple[int, int] = (1, 4), **how: Any
) -> Toy:
    objective = Objective(deadline_at=at, drop_late=bool(how.pop("drop_late", False)))
    options = {"context": "a", "step_s": 1.0, **how}
    return t.call(name, items=items, run_s=run_s, gang=gang, objective=objective, **options)


def test_rejected_job_gets_spare_devices_and_is_notified(lab: Make) -> None:
    t = lab(devices=2)
    job(t, "first", 75.0, gang=(2, 2), run_s=50.0).run(until=2.0)
    job(t, "late", 55.0, gang=(2, 2), run_s=50.0).run(until=4.0)
    said = t.core.state.forecasts
    assert said[t.ids["first"]].in_time
    assert not said[t.ids["late"]].in_time
    t.run()
    assert starts(t, "late")[0][0] >= t.ended_at["first"]
    assert t.ended["late"].ok


def test_running_job_gives_devices_to_an_urgent_job_and_resumes(lab: Make) -> None:
    t = job(lab(), "long", 0.0, items=1000, run_s=200.0).run(until=60.0)
    assert [size for _, size in starts(t, "long")] == [4]
    job(t, "tight", 60.0 + 75.0)
    t.run()
    sizes = [size for _, size in starts(t, "long")]
    assert sizes[0] == 4
    assert len(sizes) > 1
    assert sizes[1] < 4
    assert t.ended["long"].ok
    assert t.ended_at["long"] < 60.0 + 200.0 + 100.0, "its work so far was not done again"
