"""Check that no shipped policy changes the state of the manager. Compare the state before and after each answer."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec
import pytest
from sim.worlds import model, source, world

from benchmarks.baselines.loading import policy
from stoker.manager.core import state
from stoker.manager.core.call_queue import Queue
from stoker.manager.core.nouns import Context, Library
from stoker.manager.core.seams import Action, Policies, View
from stoker.manager.live import snapshot
from stoker.manager.live.session_policies import COMMON_MEMBERS, SEAM_MEMBERS
from stoker.manager.policies import SHIPPED, HottestFirst, KeepBlocks, LoadWhereWanted
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.run import Simulation
from stoker.site import BASELINES, Duration


class WriteError(Exception):
    """Raised when a policy changes the state of the manager."""


class ReadOnly:
    """Wrap policies: an answer that changes the state raises an error."""

    def __init__(self) -> None:
        self.questions: set[str] = set()

    def policies(self, given: Policies) -> Policies:
        watched = {seam: _Watched(getattr(given, seam), seam, self) for seam in SEAM_MEMBERS}
        return msgspec.structs.replace(given, **watched)

    def ask(self, question: str, answer: Callable[..., Any], view: View, *rest: Any) -> Any:
        assert isinstance(view, state.State)
        before = _content(view)
        self.questions.add(question)
        found = answer(view, *rest)
        found = list(found) if isinstance(found, list | tuple) else found
        if _content(view) != before:
            raise WriteError(f"{question} has changed the state")
        return self._one_by_one(question, found, view) if isinstance(found, Iterator) else found

    def _one_by_one(self, question: str, answer: Iterator[Any], view: View) -> Iterator[Any]:
        """Yield actions one by one: the core carries out each action before the policy computes the next action."""
        while True:
            found = self.ask(question, lambda _: tuple(islice(answer, 1)), view)
            if not found:
                return
            yield found[0]


class _Watched:
    def __init__(self, policy: Any, seam: str, guard: ReadOnly) -> None:
        self._policy, self._seam, self._guard = policy, seam, guard

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._policy, name)
        if not callable(found) or name not in (*SEAM_MEMBERS[self._seam], *COMMON_MEMBERS):
            return found
        return lambda view, *rest: self._guard.ask(f"{self._seam}.{name}", found, view, *rest)


class _Pickler(snapshot._GraphPickler):
    """Pickle only the waiting calls of a queue: reading a queue removes other calls without changing its state."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Queue):
            return snapshot.deque, ([obj.count, [call.id for call in obj], list(obj.set_aside_calls)],)
        return super().reducer_override(obj)


def _content(view: state.State) -> bytes:
    file = io.BytesIO()
    pickler = _Pickler(file, ())
    pickler.dump(view)
    written = 0
    while written < len(pickler.nouns):
        some = pickler.nouns[written:]
        written += len(some)
        pickler.dump([pickler.field_values(each) for each in some])
    return file.getvalue()


ASKED = {"dispatch.place", "dispatch.pull", "dispatch.on_out_of_calls", "dispatch.window", "residency.on_waiting_calls",
         "residency.reservation_after_load", "provisioning.demand"}  # fmt: skip


@pytest.fixture
def guard() -> ReadOnly:
    return ReadOnly()


def run(guard: ReadOnly, policies: Policies, arrivals: Sequence[Arrival]) -> None:
    for seam in (policies.dispatch, policies.residency, policies.provisioning):
        if seam.period_s:
            seam.period_s = max(seam.period_s, 1.0)  # each answer compares the state twice
    pool = source([(0.0, 4), (60.0, 2), (80.0, 5)])
    lab = world(pool, model(gang_s=Duration(1.0), item_cv=0.3))
    outcome = Simulation(lab, arrivals, guard.policies(policies)).run(until_s=150.0)
    assert outcome.calls


@pytest.mark.parametrize("name", [*SHIPPED, *BASELINES])
def test_policies_do_not_modify_their_view_of_the_state(guard: ReadOnly, name: str) -> None:
    plain = [Arrival(2.0 * n, "llm", items=2) for n in range(4)]
    jobs = [Arrival(10.0 * n, "llm", items=20, deadline_s=60.0, gang=(1, 4)) for n in range(2)]
    run(guard, policy(name).make(), sorted([*plain, *jobs], key=lambda each: each.at_s))
    only_without_rounds = {"dispatch.on_out_of_calls", "dispatch.place"}
    assert ASKED - guard.questions <= only_without_rounds


class Counts(HottestFirst):
    def pull(self, view: View, library: Library) -> int | Sequence[Action]:
        library.context.idle.clear()
        return super().pull(view, library)


class Marks(LoadWhereWanted):
    def on_waiting_calls(self, view: View, context: Context) -> Sequence[Action]:
        context.failed_loads_by_pilot["p1"] = 3
        return super().on_waiting_calls(view, context)


@pytest.mark.parametrize(
    ("dispatch", "residency", "said"),
    [
        (Counts, LoadWhereWanted, r"dispatch\.pull has changed the state"),
        (HottestFirst, Marks, r"residency\.on_waiting_calls has changed the state"),
    ],
)
def test_policy_that_modifies_its_view_of_the_state_is_detected(
    guard: ReadOnly, dispatch: Callable[[], Any], residency: Callable[..., Any], said: str
) -> None:
    asked = KeepBlocks()
    policies = Policies(dispatch(), residency(provisioning=asked), asked)
    with pytest.raises(WriteError, match=said):
        run(guard, policies, [Arrival(3.0 * n, "llm", items=2) for n in range(12)])
