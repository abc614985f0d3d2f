"""Calls that slow each other down on a device: the one that came later goes to a free device, once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core.builders import Cluster, devices, recipe

from stoker.manager.core.events import AdviceArrived, OfPace, PaceAdvice
from stoker.manager.policies.reactions import LIMIT
from stoker.protocol import to_client, to_pilot
from stoker.protocol import to_manager as say
from stoker.protocol.calls import CallProgress

Make = Callable[..., Cluster]
SMALL = 1 << 30


@pytest.fixture
def packed(cluster: Make) -> Cluster:
    """Two calls on one device, that of b came later; then a second pilot joins, which is free."""
    c = cluster(pilots=1).define(recipe("a", device_memory_bytes=SMALL), recipe("b", device_memory_bytes=SMALL))
    c.call("1", context="a").ready().wait(30.0).call("2", context="b").ready()
    assert c.library(context="a").devices == c.library(context="b").devices
    c.join("p2", of=devices(1))
    keeps(c, "2")
    return c.wait(40.0).forget()


def keeps(c: Cluster, name: str) -> None:
    """A call has kept its progress."""
    library = c.holders(name)[0]
    c.report(library.pilot.id, say.CallsProgress(library.id, [CallProgress(c.ids[name], 9.0, state=b"saved")]))  # type: ignore[arg-type]


def slows(c: Cluster, name: str, share: float, *, best_ago_s: float = 50.0) -> Cluster:
    library = c.holders(name)[0]
    pace = PaceAdvice(50.0, 100.0, "step", 1.0, 50.0, share, best_ago_s)
    c.event(AdviceArrived(OfPace(library.id, c.ids[name]), pace))  # type: ignore[arg-type]
    if name == "1":  # the other one says itself how far it is
        assert c.hears("ana", to_client.ProgressReports).reports[0].done == 50.0
    return c


def ordered(c: Cluster, pilot: str) -> list[str]:
    return [type(message).__name__ for message in c.mail.get(pilot, ())]


def test_the_newcomer_goes_to_a_free_device(packed: Cluster) -> None:
    c = slows(packed, "1", LIMIT + 0.01)
    old = c.library("p1", "b")
    assert ordered(c, "p2") == ["StartLibrary"]
    assert ordered(c, "p1") == ["EvictCall", "StopLibrary"]
    assert c.hears("p1", to_pilot.EvictCall).call == c.ids["2"]
    c.report("p1", say.CallEvicted(old.id, CallProgress(c.ids["2"], 3.0, state=b"saved")))  # type: ignore[arg-type]
    c.report("p1", say.LibraryGone(old.id, None, False, (), ()))
    c.ready(only="p2")
    assert c.held("p2", "b") == ["2"]
    assert c.held("p1", "a") == ["1"]
    assert "it slows lib-1 on the same device by 36%; its call goes elsewhere" in c.story(f"lib-{old.id}")
    c.end("1", "2")
    assert c.core.state.failures == 0


def test_the_one_that_was_there_first_stays_if_the_newcomer_is_slow(packed: Cluster) -> None:
    slows(packed, "2", 0.9)
    packed.nothing_else_was_said()


def test_a_small_slowdown_moves_nobody(packed: Cluster) -> None:
    slows(packed, "1", LIMIT)
    packed.nothing_else_was_said()


def test_one_that_keeps_no_progress_stays(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a", device_memory_bytes=SMALL), recipe("b", device_memory_bytes=SMALL))
    c.call("1", context="a").ready().wait(30.0).call("2", context="b").ready().join("p2", of=devices(1)).wait(40.0)
    slows(c.forget(), "1", 0.9).nothing_else_was_said()


def test_one_that_was_there_when_the_other_was_at_its_best_is_not_to_blame(packed: Cluster) -> None:
    slows(packed, "1", 0.9, best_ago_s=5.0).nothing_else_was_said()


def test_without_a_free_device_nobody_goes(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a", device_memory_bytes=SMALL), recipe("b", device_memory_bytes=SMALL))
    c.call("1", context="a").ready().wait(30.0).call("2", context="b").ready().forget()
    slows(c, "1", 0.9).nothing_else_was_said()


def test_a_call_is_moved_once(packed: Cluster) -> None:
    slows(packed, "1", 0.5).forget()
    slows(packed, "1", 0.5).nothing_else_was_said()
