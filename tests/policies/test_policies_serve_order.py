"""Which libraries are offered the calls that wait, and in which order: a policy says."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from core.builders import Cluster, recipe

from stoker.manager.core.nouns import Call, Context, Library
from stoker.manager.core.seams import Action, Policies, View
from stoker.manager.policies import HottestFirst, KeepBlocks, LoadWhereWanted
from stoker.protocol.ids import LibraryId

Make = Callable[..., Cluster]


class ColdestFirst(HottestFirst):
    """A user's order: what has been idle for longest works next, and nothing else is asked."""

    def serve_order(self, view: View, context: Context) -> Iterable[Library]:
        return tuple(context.idle.values())


class NeverPlaces(HottestFirst):
    places_one_by_one_up_to = 0

    def place(self, view: View, call: Call) -> LibraryId | Action | None:
        raise AssertionError("it was asked about a call")


def hot(cluster: Make, dispatch: HottestFirst, *, slots: int = 1) -> Cluster:
    """Libraries on three pilots, of which `p3` has ended a call last, and `p2` first."""
    c = cluster(pilots=3, policies=lambda: Policies(dispatch, LoadWhereWanted(), KeepBlocks()))
    c.define(recipe("a", slots=slots)).calls(3 * slots, context="a").ready()
    for name in ("p2", "p1", "p3"):
        c.wait(1).end(*c.held(name, "a"))
    return c


@pytest.mark.parametrize(("dispatch", "order"), [(HottestFirst(), "p3 p1 p2"), (ColdestFirst(), "p2 p1 p3")])
def test_calls_that_come_together_are_offered_in_the_order_of_the_policy(
    cluster: Make, dispatch: HottestFirst, order: str
) -> None:
    c = hot(cluster, dispatch).call("c1", "c2", "c3", "c4", "c5", context="a")
    assert [c.held(name, "a") for name in order.split()] == [["c1"], ["c2"], ["c3"]]
    assert c.waiting("a") == ["c4", "c5"]


def test_libraries_of_several_slots_that_are_free_share_what_waits(cluster: Make) -> None:
    """Calls that run at once in one library share its device; another device would stand idle meanwhile."""
    c = hot(cluster, HottestFirst(), slots=4).call("c1", "c2", "c3", "c4", "c5", context="a")
    assert [c.held(name, "a") for name in ("p3", "p1", "p2")] == [["c1", "c2"], ["c3"], ["c4", "c5"]]
    c.call("c6", context="a")
    assert c.held("p1", "a") == ["c3", "c6"]  # one that comes alone goes where the least is
    c.calls(20, context="a")
    assert [len(c.held(name, "a")) for name in ("p3", "p1", "p2")] == [4, 4, 4]


def test_calls_that_come_back_are_offered_in_that_order_too(cluster: Make) -> None:
    c = hot(cluster, ColdestFirst()).call("c1", context="a")
    assert c.held("p3", "a") == ["c1"]  # it was placed by itself
    c.lose("p3")
    assert c.held("p2", "a") == ["c1"]


def test_a_policy_that_places_no_call_by_itself_is_not_asked_to(cluster: Make) -> None:
    c = hot(cluster, NeverPlaces()).call("c1", context="a")
    assert c.held("p3", "a") == ["c1"]
