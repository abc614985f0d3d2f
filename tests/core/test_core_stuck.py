"""Short calls do not wait behind a long call if another library can run them."""

from __future__ import annotations

from collections.abc import Callable

from core.builders import Make, recipe

from stoker.manager.core.nouns import Library
from stoker.manager.core.seams import Policies, View
from stoker.manager.policies.dispatch import HottestFirst
from stoker.manager.policies.provisioning import KeepBlocks
from stoker.manager.policies.residency import LoadWhereWanted
from stoker.protocol import to_manager as say
from stoker.protocol import to_pilot

SHORT_S = 0.001


def test_calls_prefetched_behind_a_long_call_run_elsewhere(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a")).call("x", context="a").hot(context="a", run_s=SHORT_S).join("p2")
    c.call("long", context="a").forget().call("s1", "s2", context="a")
    assert c.held(context="a") == ["long", "s1", "s2"]
    c.forget().wait(1.1)
    assert c.hears("p1", to_pilot.TakeBack).count == 2
    c.give_back("s1", "s2")
    assert c.held(context="a") == ["long"]
    assert c.lives_on("a") == ["p1", "p2"]
    c.ready()
    assert c.held("p2", "a")[0] == "s1"


def test_new_calls_go_to_a_free_library_and_not_to_a_stuck_library(cluster: Make) -> None:
    c = cluster(pilots=2).calls(2).hot(run_s=SHORT_S)
    c.call("long").forget().call("s1")
    assert c.held("p2") == ["long"]
    assert c.held("p1") == ["s1"]
    c.end("s1", run_s=SHORT_S).wait(2).call("s2", "s3", "s4")  # p1 gets all three calls and queues two of them
    assert c.held("p2") == ["long"]
    assert c.held("p1") == ["s2", "s3", "s4"]


def test_no_call_waits_behind_a_call_of_unknown_length(cluster: Make) -> None:
    c = cluster(pilots=2).define(recipe("a")).call("long", "quick", context="a").ready()
    c.end("quick", run_s=SHORT_S).wait(60).call("s1", context="a").call("s2", context="a")
    assert (c.held("p1", "a"), c.held("p2", "a")) == (["long"], ["s1", "s2"])
    c.calls(8, context="a")  # calls that arrive together are offered in turn
    assert c.held("p1", "a") == ["long"]
    assert len(c.held("p2", "a")) > 2


def test_library_is_not_stuck_after_its_long_call_is_cancelled(cluster: Make) -> None:
    c = cluster(pilots=1).calls(1).hot(run_s=SHORT_S).call("long").call("s1").wait(1.1).give_back("s1")
    library, long = c.library(), c.ids["long"]
    c.tell("ana", say.Cancel([long], running=True))
    assert c.waiting() == ["s1"]
    c.report("p1", say.CallsReturned(library.id, (long,)))
    assert c.call("s2", "s3").held() == ["s1", "s2", "s3"]
    assert not library.is_stuck


def test_library_that_progresses_with_its_backlog_keeps_it(cluster: Make) -> None:
    c = cluster(pilots=1).calls(1).hot(run_s=SHORT_S).calls(60).forget()
    for _ in range(20):
        c.wait(0.4).end(*c.held()[:2], run_s=SHORT_S)
    assert c.now > 8
    assert not c.library().is_stuck
    assert not [said for said in c.mail["p1"] if isinstance(said, to_pilot.TakeBack)]


def test_library_with_a_free_slot_is_not_stuck(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a", slots=2)).call("x", context="a").hot(context="a", run_s=SHORT_S)
    c.call("long", context="a").call("s1", context="a").wait(0.9).end("s1", run_s=SHORT_S)
    c.calls(5, context="a").wait(0.9)
    assert not c.library(context="a").is_stuck
    assert len(c.held(context="a")) == 6
    c.forget().wait(1.2)  # by now a second call also runs for a long time
    assert c.library(context="a").is_stuck
    assert c.hears("p1", to_pilot.TakeBack).count == 4


def test_context_is_loaded_elsewhere_for_a_call_behind_a_long_call(cluster: Make) -> None:
    """Calls of 1 s are never prefetched, and one call of 1 s does not justify a load of 10 s."""
    c = cluster(pilots=1).define(recipe("a")).call("x", context="a").hot(context="a", run_s=1.0, load_s=9.9).join("p2")
    c.call("long", context="a").call("s1", context="a").wait(9)
    assert c.lives_on("a") == ["p1"]
    c.wait(2)
    assert c.lives_on("a") == ["p1", "p2"]


def test_less_used_context_is_evicted_if_no_device_is_free(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a"), recipe("b")).call("x", context="a").hot(context="a", run_s=SHORT_S)
    c.join("p2").call("z", context="b").ready().end("z").call("long", context="a").call("s1", context="a").wait(1.1)
    c.forget().give_back("s1").wait(1.1)
    assert c.hears("p2", to_pilot.StopLibrary).reason.startswith("idle, and room is needed for a")


def by(dispatch: HottestFirst) -> Callable[[], Policies]:
    return lambda: Policies(dispatch, LoadWhereWanted(), KeepBlocks())


class GivesFive(HottestFirst):
    """A user-defined dispatch policy that ignores stuck libraries."""

    def window(self, view: View, library: Library) -> int:
        return 5

    def pull(self, view: View, library: Library) -> int:
        return 5 - library.load


def test_stuck_library_gets_no_backlog_under_any_policy(cluster: Make) -> None:
    c = cluster(pilots=1, policies=by(GivesFive())).calls(1).hot(run_s=SHORT_S).call("long").call("s1", "s2").wait(1.1)
    c.give_back("s1", "s2").call("s3").wait(5)
    assert c.held() == ["long"]
    assert c.waiting() == ["s1", "s2", "s3"]
    c.end("long")
    assert c.held() == ["s1", "s2", "s3"]
