"""Under INFless and ElasticFlow every job ends once, and no job waits forever."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core.toy import Toy
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sim.worlds import model, source, world

from benchmarks.baselines.loading import policy
from stoker.manager.core.events import AdviceArrived, ContextAdvice, CostAdvice, OfContext
from stoker.manager.core.seams import Policies
from stoker.manager.policies.provisioning import ExternalPilots
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.run import Simulation
from stoker.protocol.calls import Objective
from stoker.protocol.ids import RecipeKey
from stoker.site import Duration

Make = Callable[..., Toy]
BASELINES = ("infless", "elastic-flow")

jobs = st.lists(
    st.tuples(
        st.floats(0.0, 60.0),  # arrival, in seconds
        st.sampled_from(("a", "b", "two")),
        st.sampled_from(((1, 1), (1, 4), (2, 2), (2, 8), (3, 3))),
        st.sampled_from((0.0, 5.0, 40.0, 200.0)),  # seconds until the deadline of the job; 0 = no deadline
        st.integers(1, 60),  # items
        st.booleans(),  # True if it reports its progress
    ),
    min_size=1,
    max_size=8,
)

SINGLE = [(0.0, "a", (1, 1), 0.0, 1, False)] * 4
PAIR = (0.0, "a", (2, 2), 0.0, 1, False)


def policies(name: str) -> Callable[[], Policies]:
    return lambda: policy(name).make(provisioning=ExternalPilots(elastic=True), period_s=0.5)


@pytest.mark.parametrize("name", BASELINES)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(  # two ranks end within the assumed time to connect; the learned pace must still be positive
    specs=[*SINGLE, (0.0, "a", (1, 1), 0.0, 3, False), PAIR, (6.0, "a", (1, 4), 5.0, 1, False)],
    lost_at=None,
    known=False,
)
@given(specs=jobs, lost_at=st.one_of(st.none(), st.floats(1.0, 60.0)), known=st.booleans())
def test_every_job_succeeds_under_each_baseline_policy(
    toy: Make, name: str, specs: list[tuple], lost_at: float | None, known: bool
) -> None:
    t = toy(policies=policies(name))
    for pilot in ("p1", "p2"):
        t.pilot(pilot, devices=4)
    for key, devices in (("a", 1), ("b", 1), ("two", 2)):
        t.context(key, load_s=3.0, devices=devices)
        if known:
            advice = ContextAdvice(load_s=3.0, paces={1: 1.0, 2: 0.5, 4: 0.25}, meet_s=1.0)
            t.give(AdviceArrived(OfContext(RecipeKey(key)), CostAdvice({"": advice})))
    if lost_at is not None:
        t.after(lost_at, lambda: t.kill("p1"))
        t.after(lost_at + 10.0, lambda: t.pilot("p3", devices=6))
    for n, (at, key, gang, due_s, items, says) in enumerate(specs):
        options = {"gang": gang, "objective": Objective(deadline_at=at + due_s if due_s else 0.0)}
        how = {"items": items, "run_s": float(items), "step_s": 1.0 if says else 0.0, **options}
        t.after(at, lambda n=n, key=key, how=how: t.call(f"j{n}", context=key, **how))  # type: ignore[misc]
    t.run(until=61.0)
    t.run(limit_s=2_000.0)
    assert len(t.ended) == len(specs)
    assert all(end.ok for end in t.ended.values())


@pytest.mark.parametrize("name", BASELINES)
def test_simulated_gang_jobs_all_complete_within_the_time_limit(name: str) -> None:
    lab = world(source(8), model(gang_s=Duration(2.0)))
    arrivals = [Arrival(40.0 * n, "llm", items=200, deadline_s=150.0, gang=(1, 8)) for n in range(10)]
    run = Simulation(lab, arrivals, policy(name).make())
    outcome = run.run()
    assert (outcome.complete, outcome.calls, outcome.failed) == (True, 10, {})
    assert outcome.ended_at < 10 * 40.0 + 150.0


@pytest.mark.parametrize("name", BASELINES)
def test_job_fails_if_its_context_cannot_be_loaded(toy: Make, name: str) -> None:
    t = toy(policies=policies(name))
    t.pilot("p1", devices=4)
    t.context("broken", broken="no such model").call("j", context="broken", gang=(2, 2)).run()
    assert not t.ended["j"].ok
