"""No policy writes into what it is shown: every one that ships, and every baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from policies.read_only import ReadOnly, WriteError
from sim.worlds import model, source, world

from benchmarks.baselines.loading import policy
from stoker.manager.core.nouns import Call, Context, Library
from stoker.manager.core.seams import Action, Policies, View
from stoker.manager.policies import SHIPPED, HottestFirst, KeepBlocks, LoadWhereWanted
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.run import Simulation
from stoker.site import BASELINES, Duration

ASKED = {"dispatch.place", "dispatch.pull", "dispatch.dry", "dispatch.window", "residency.wanted", "residency.measured",
         "provisioning.demand"}  # fmt: skip


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> ReadOnly:
    return ReadOnly(monkeypatch)


def run(guard: ReadOnly, policies: Policies, arrivals: Sequence[Arrival]) -> None:
    pool = source([(0.0, 4), (60.0, 2), (80.0, 5)])
    lab = world(pool, model(gang_s=Duration(1.0), item_cv=0.3))
    outcome = Simulation(lab, arrivals, guard.policies(policies)).run(until_s=150.0)
    assert outcome.calls


@pytest.mark.parametrize("name", [*SHIPPED, *BASELINES])
def test_no_policy_writes_into_the_view(guard: ReadOnly, name: str) -> None:
    plain = [Arrival(2.0 * n, "llm", items=2) for n in range(4)]
    jobs = [Arrival(10.0 * n, "llm", items=20, deadline_s=60.0, gang=(1, 4)) for n in range(2)]
    run(guard, policy(name).make(), sorted([*plain, *jobs], key=lambda each: each.at_s))
    assert ASKED - guard.questions <= {"dispatch.dry", "dispatch.place"}  # rounds decide about all, under some


class Notes(HottestFirst):
    def place(self, view: View, call: Call) -> Any:
        call.spec = call.spec
        return super().place(view, call)


class Counts(HottestFirst):
    def pull(self, view: View, library: Library) -> int | Sequence[Action]:
        library.context.idle.clear()
        return super().pull(view, library)


class Marks(LoadWhereWanted):
    def wanted(self, view: View, context: Context) -> Sequence[Action]:
        context.failed_on["p1"] = 3
        return super().wanted(view, context)


@pytest.mark.parametrize(
    ("dispatch", "residency", "said"),
    [
        (Notes, LoadWhereWanted, r"dispatch\.place writes Call\.spec"),
        (Counts, LoadWhereWanted, r"dispatch\.pull has changed the state"),
        (HottestFirst, Marks, r"residency\.wanted has changed the state"),
    ],
)
def test_a_policy_that_writes_is_found(
    guard: ReadOnly, dispatch: Callable[[], Any], residency: Callable[..., Any], said: str
) -> None:
    asked = KeepBlocks()
    policies = Policies(dispatch(), residency(provisioning=asked), asked)
    with pytest.raises(WriteError, match=said):
        run(guard, policies, [Arrival(3.0 * n, "llm", items=2) for n in range(12)])
