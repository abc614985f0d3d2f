"""Test pilots that return with libraries after being declared lost, and pilots whose walltime ends."""

from __future__ import annotations

import pytest
from core.builders import Cluster, Make, recipe

from stoker.manager.core import pilot_reports
from stoker.manager.core.events import FromPilot
from stoker.manager.core.nouns import LibraryState, PilotState
from stoker.protocol import to_manager as say
from stoker.protocol import to_pilot


def test_loaded_context_survives_if_a_lost_pilot_returns(cluster: Make) -> None:
    c = cluster(pilots=1).call("c1").ready().end("c1").cut("p1").lose("p1")
    assert not c.core.state.libraries
    c.come_back("p1", lib1=()).forget()
    assert c.library().state is LibraryState.READY
    assert (c.core.state.lost_pilots, c.core.state.pilots_gone) == (0, 0)
    c.call("c2")
    assert c.runs("p1") == ["c2"]
    c.nothing_else_was_said()


def test_requeued_call_continues_on_a_lost_pilot_that_returns(cluster: Make) -> None:
    c = cluster(pilots=1).call("c1").ready().cut("p1").lose("p1")
    assert c.waiting() == ["c1"]
    c.come_back("p1", lib1=("c1",)).forget()
    assert c.held() == ["c1"]
    c.end("c1")
    assert c.ended["c1"].ok
    c.nothing_else_was_said()


def test_first_result_counts_if_a_call_runs_on_two_pilots(cluster: Make) -> None:
    c = cluster(pilots=2).define(recipe("a")).call("c1", context="a").ready()
    first = c.holders("c1")[0]
    lost, other = first.pilot.id, {"p1": "p2", "p2": "p1"}[first.pilot.id]
    c.cut(lost).lose(lost).ready()
    assert c.held(other, "a") == ["c1"]
    c.come_back(lost, **{f"lib{first.id}": ("c1",)})
    assert first.withdrawn_calls
    c.report(lost, say.CallsEnded(first.id, [_end(c, "c1")]))
    assert c.ended["c1"].ok
    second = c.library(other, "a")
    c.report(other, say.CallsEnded(second.id, [_end(c, "c1")]))  # `c.end` would fail, because c1 has already ended
    assert not second.withdrawn_calls


def test_lost_pilot_that_sends_again_is_asked_for_a_hello(cluster: Make) -> None:
    c = cluster(pilots=1).call("c1").ready().lose("p1").forget()
    c.report("p1", say.CallsEnded(1, [_end(c, "c1")]))
    c.hears("p1", to_pilot.HelloAgain)
    assert (c.ended, c.waiting()) == ({}, ["c1"])
    assert "silent for 15 s" in c.story("p1")
    c.come_back("p1", lib1=())
    assert (c.pilot().state, c.lives_on()) == (PilotState.HERE, ["p1"])


# ---- quarantine
def test_faulty_device_gets_no_calls_and_its_calls_run_elsewhere(cluster: Make) -> None:
    c = cluster(pilots=1).call("c1").ready().join("p2").forget()
    c.report("p1", say.DeviceFault("cpu:0", "it gave a wrong matrix product, twice"))
    assert c.library().state is LibraryState.STOPPING
    assert c.status().pilots[0].devices[0].fault == "it gave a wrong matrix product, twice"
    c.ready(only="p2")
    assert c.held("p2") == ["c1"]
    c.report("p1", say.CallsEnded(c.library("p1").id, [_end(c, "c1")]))
    assert "c1" not in c.ended  # the result does not count, because the quarantined device may compute wrongly
    c.end("c1")
    assert c.ended["c1"].ok
    assert "quarantined" in c.story("p1")


# ---- walltime
@pytest.mark.parametrize(("run_s", "margin_s"), [(1.0, 20.0), (60.0, 92.0)])
def test_pilot_is_drained_before_its_walltime_ends(cluster: Make, run_s: float, margin_s: float) -> None:
    c = cluster().join("p1", ends_in_s=600.0).call("c1").hot(run_s=run_s).wait(599.0 - margin_s)
    assert c.pilot().state is PilotState.HERE
    c.wait(2.0)
    assert f"its walltime is over in {margin_s:.0f} s" in c.hears("p1", to_pilot.Exit).reason


def _end(c: Cluster, name: str) -> say.CallEnd:
    return say.CallEnd(c.ids[name], True, name.encode(), 1.0)


@pytest.mark.parametrize("given_up", [False, True])
def test_outdated_hello_of_a_pilot_does_not_revive_an_ended_library(cluster: Make, given_up: bool) -> None:
    """The manager read that the library ended, but its acknowledgement was lost."""
    c = cluster(pilots=1).call("c1").ready()
    library = c.library()
    before = c.taken("p1")
    c.report("p1", say.LibraryGone(library.id, None, False, (c.ids["c1"],)))
    c.cut("p1").forget()
    if given_up:
        c.lose("p1")
    facts = say.LibraryFacts(
        library.id, library.context.recipe.key, tuple(d.id for d in library.devices), True, (c.ids["c1"],)
    )
    c.hello("p1", libraries=(facts,), acknowledged=before)
    assert c.hears("p1", to_pilot.HelloAgain).acknowledged == c.taken("p1") == before + 1
    assert c.waiting() == ["c1"]

    c.event(FromPilot("p1", before + 2, [say.LibraryUpdate(library.id, say.LibraryPhase.LOADING)]))
    assert c.taken("p1") == before + 1, "no frame is taken before the hello"
    c.come_back("p1")
    assert c.pilot().state is PilotState.HERE
    c.ready()
    assert c.held() == ["c1"]
    assert c.library().id != library.id


def test_outdated_hello_of_a_pilot_does_not_claim_a_returned_call(cluster: Make) -> None:
    c = cluster(pilots=1).call("c1").ready()
    library = c.library()
    before = c.taken("p1")
    c.report("p1", say.CallsReturned(library.id, (c.ids["c1"],), refused="lib-1 is about to end"))
    c.cut("p1").forget()
    c.come_back("p1", acknowledged=before, **{f"lib{library.id}": ("c1",)})
    assert c.hears("p1", to_pilot.HelloAgain).acknowledged == before + 1
    c.come_back("p1", **{f"lib{library.id}": ()})
    assert c.waiting() == ["c1"], "the library does not have it"


def test_pilot_is_accepted_after_several_outdated_hellos(cluster: Make) -> None:
    c = cluster(pilots=1).call("c1").ready().end("c1").cut("p1").forget()
    for _ in range(pilot_reports.MAX_HELLO_REQUESTS):
        c.come_back("p1", acknowledged=0, lib1=())
        c.hears("p1", to_pilot.HelloAgain)
    c.come_back("p1", acknowledged=0, lib1=())
    assert c.pilot().state is PilotState.HERE
