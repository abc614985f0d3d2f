"""Calls that wait longer than their objective for the first token are dropped. The wait for a load is allowed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from core.builders import Cluster, recipe
from policies import stubs

from benchmarks.papers.slinfer.sllm import LateDrops
from stoker.manager.core.nouns import Call
from stoker.manager.core.seams import Action, Policies, View
from stoker.manager.policies import HottestFirst
from stoker.protocol.calls import FailureKind, Features, Objective
from stoker.protocol.ids import LibraryId

Make = Callable[..., Cluster]
SOON = Objective(ttft_s=0.5, ttft_per_token_s=1 / 512, ttft_most_s=8.0)


class Drops(LateDrops):
    """`LateDrops` in this module, because snapshots accept only classes of the policy's module."""


class NeverLate(HottestFirst):
    honours = frozenset({"ttft_s"})
    asks_every_call = True

    def __init__(self) -> None:
        super().__init__()
        self.late_drops = Drops()

    def place(self, view: View, call: Call) -> LibraryId | Action | None:
        library = super().place(view, call)
        if library is not None:
            return library
        return next(iter(self.late_drops.waits(view, call)), None)

    def on_timer(self, view: View, key: str) -> Sequence[Action]:
        return self.late_drops.handle_timer(view, key)


def _policies() -> Policies:
    return stubs.policies(dispatch=NeverLate())


@pytest.fixture
def busy(cluster: Make) -> Cluster:
    c = cluster(pilots=1, policies=_policies).define(recipe("a")).call("first", context="a").wait(1.0)
    return c.ready().wait(1.0)


def _dropped(c: Cluster) -> list[str]:
    failures = {name: end.failure for name, end in c.ended.items()}
    return sorted(name for name, why in failures.items() if why is not None and why.kind is FailureKind.DROPPED)


def _ask(c: Cluster, name: str, prompt: int, **how: object) -> None:
    c.call(name, context="a", objective=SOON, features=Features(input_length=prompt), **how)


def test_waiting_call_is_dropped_after_a_prompt_dependent_deadline(busy: Cluster) -> None:
    _ask(busy, "long", 2048)
    _ask(busy, "short", 16)
    _ask(busy, "endless", 100_000)
    assert _dropped(busy.wait(0.49)) == []
    assert _dropped(busy.wait(0.02)) == ["short"]
    assert _dropped(busy.wait(3.4)) == ["short"]
    assert _dropped(busy.wait(0.2)) == ["long", "short"]
    assert _dropped(busy.wait(4.0)) == ["endless", "long", "short"]
    assert "wanted within 0.5 s" in busy.ended["short"].failure.message
