from __future__ import annotations

import pytest
from core.builders import DIED, Make, recipe

from stoker.manager.core.seams import PolicyError, SendGang
from stoker.protocol import show_status, to_client, to_pilot
from stoker.protocol import to_manager as say
from stoker.protocol.calls import CallEnd, CallSpec, FailureKind
from stoker.protocol.ids import make_call_id


def test_call_loads_its_context_runs_and_ends_once(cluster: Make) -> None:
    c = cluster(pilots=1).call("c1")
    start = c.hears("p1", to_pilot.StartLibrary)
    assert (start.library, start.recipe.key, start.devices) == (1, "bare", ("cpu:0",))
    c.nothing_else_was_said()
    c.report("p1", say.LibraryReady(start.library, 0.1, 0.5))
    run = c.hears("p1", to_pilot.RunCalls)
    assert [spec.call for spec in run.calls] == [c.ids["c1"]]
    assert run.function_blob is not None
    c.nothing_else_was_said()
    c.end("c1")
    assert c.ended["c1"] == CallEnd(c.ids["c1"], True, b"c1", 1.0)
    assert c.core.state.calls == {}
    c.nothing_else_was_said()


def test_function_is_sent_again_only_to_a_library_that_requests_it(cluster: Make) -> None:
    c = cluster(pilots=1).call("c1").hot(run_s=0)
    c.end("c1").forget().call("c2")
    assert c.hears("p1", to_pilot.RunCalls).function_blob is None
    c.report("p1", say.CallsReturned(1, (c.ids["c2"],), need_function=True))
    assert c.hears("p1", to_pilot.RunCalls).function_blob is not None


def test_calls_wait_in_order_of_priority_then_of_arrival(cluster: Make) -> None:
    c = cluster().call("low").call("high", priority=5).call("low2", "low3").call("high2", priority=5)
    assert c.waiting() == ["high", "high2", "low", "low2", "low3"]
    c.join("p1").ready().end("high")
    assert c.held() == ["high2"]


def test_requeued_calls_keep_their_place_in_the_queue(cluster: Make) -> None:
    c = cluster(pilots=2).calls(2).ready().calls(3)
    assert c.waiting() == ["3", "4", "5"]
    first, second = c.library("p1"), c.library("p2")
    c.die(second, failure=None).die(first, failure=None)
    assert c.waiting() == ["1", "2", "3", "4", "5"]


def test_short_calls_are_prefetched_and_long_calls_are_not(cluster: Make) -> None:
    c = cluster(pilots=1).call("x").hot(run_s=0.001).calls(100)
    assert 10 < len(c.held()) < 30
    c = cluster(pilots=1).call("x").hot(run_s=0.5).calls(100)
    assert len(c.held()) == 1


def test_function_that_never_ran_is_not_prefetched(cluster: Make) -> None:
    c = cluster(pilots=1).call("x").hot(run_s=0.001)
    c.tell("ana", say.DefineFunction("g", "g", b"code")).calls(9, function="g")
    assert len(c.held()) == 1


def test_very_short_calls_submitted_together_share_a_frame(cluster: Make) -> None:
    c = cluster(pilots=3).calls(3).hot(run_s=0.0001).calls(50)
    assert sorted(len(c.held(pilot)) for pilot in ("p1", "p2", "p3")) == [10, 20, 20]
    c.wait(1.0).end(*[c.names[id] for id in c.core.state.calls], run_s=0.0001).calls(1).calls(1).calls(1)
    assert sorted(len(c.held(pilot)) for pilot in ("p1", "p2", "p3")) == [0, 0, 3]


def test_logging_of_a_call_changes_no_decision(cluster: Make) -> None:
    """A replay that logs the history of a call must reach the same state as the manager."""
    seen = []
    for watch in (frozenset(), frozenset({make_call_id(client=0, sequence=3)})):
        c = cluster(pilots=1, watch=watch).calls(1).hot(run_s=0.001).calls(40)
        library = c.library()
        for count in (1, 5, 3):
            ends = [CallEnd(id, True, b"", 0.0004 * id) for id in list(library.held)[:count]]
            c.report("p1", say.CallsEnded(library.id, ends))
        seen.append((c.context().run_s, len(c.waiting()), list(library.held)))
    assert seen[0] == seen[1]


def test_idle_library_takes_half_the_backlog_of_another_library(cluster: Make) -> None:
    c = cluster(pilots=2).calls(2).hot(run_s=0.001)
    c.calls(1).calls(20)
    full, other = (c.library("p1"), c.library("p2"))
    if len(other.held) > len(full.held):
        full, other = other, full
    c.forget()
    while other.held:  # end the calls of the library, including calls that it receives meanwhile
        c.end(*[c.names[id] for id in other.held], run_s=0.001)
    before = len(full.held)
    back = c.hears(full.pilot.id, to_pilot.TakeBack)
    assert back.count == before // 2
    newest = [c.names[id] for id in full.held][-back.count :]
    c.give_back(*newest)
    assert [c.names[id] for id in other.held][:2] == newest[:2]
    assert not full.calls_requested_back


def test_library_is_replaced_after_its_calls_per_library_limit(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("once", calls_per_library=1)).calls(2, context="once")
    c.ready()
    assert c.held(context="once") == ["1"]
    c.end("1")
    assert c.waiting("once") == ["2"]
    first = c.library(context="once")
    c.forget().die(first, failure=None)
    assert c.hears("p1", to_pilot.StartLibrary).library == 2


def test_call_that_kills_its_library_twice_is_a_poison_call(cluster: Make) -> None:
    c = cluster(pilots=1).call("bad").call("good").ready()
    c.die(c.library(), "bad").ready()
    assert c.held() == ["bad"]
    c.die(c.library(), "bad").ready().end("good")
    end = c.ended["bad"]
    assert end.failure is not None
    assert end.failure.kind is FailureKind.POISON
    assert (end.failure.signal, end.failure.tail) == (9, "last words")
    assert c.ended["good"].ok


def test_late_and_repeated_call_ends_are_ignored(cluster: Make) -> None:
    c = cluster(pilots=1).calls(2).ready().end("1")
    c.report("p1", say.CallsEnded(1, [CallEnd(c.ids["1"], True, b"again")]))
    c.report("p1", say.CallsEnded(1, [CallEnd(999, True, b"never was")]))
    assert c.refused == {"late or repeated end of a call": 2}
    assert c.ended["1"].payload == b"1"
    assert c.held() == ["2"]


def test_repeated_call_id_is_refused(cluster: Make) -> None:
    c = cluster().call("c1")
    c.tell("ana", say.Submit("f", "bare", [CallSpec(c.ids["c1"], b"again")]))
    assert c.waiting() == ["c1"]
    assert c.refused == {"repeated call": 1}


def test_submit_with_unknown_names_fails_with_the_reason(cluster: Make) -> None:
    c = cluster(pilots=1).call("a", context="nothing").call("b", function="nothing").call("c", gang=(3, 2))
    assert "context nothing was not defined" in c.failure("a").message
    assert "function nothing was not defined" in c.failure("b").message
    assert "a gang of 3 to 2" in c.failure("c").message
    c.nothing_else_was_said()


def test_waiting_call_ends_at_once_when_it_is_cancelled(cluster: Make) -> None:
    c = cluster(pilots=1).calls(3).ready().forget()
    c.tell("ana", say.Cancel([c.ids["2"]]))
    assert c.failure("2").kind is FailureKind.CANCELLED
    c.nothing_else_was_said()
    c.end("1").end("3")
    assert c.core.state.calls == {}


def test_call_cancelled_while_waiting_did_not_use_its_context(cluster: Make) -> None:
    c = cluster(pilots=1).call("c1").ready().end("c1").calls(4)
    c.tell("ana", say.Cancel(tuple(c.ids[name] for name in ("3", "4", "5"))))
    c.end("2")
    [context] = c.status().contexts
    assert (context.loads, context.ended, context.served) == (1, 5, 2)
    assert any("used 2 times a load" in line for line in show_status.render(c.status()))


def test_cancelled_running_call_keeps_its_slot_until_its_run_ends(cluster: Make) -> None:
    c = cluster(pilots=1).calls(2).ready().forget()
    c.tell("ana", say.Cancel([c.ids["1"]], running=True))
    assert c.failure("1").kind is FailureKind.CANCELLED
    told = c.hears("p1", to_pilot.CancelCalls)
    assert (told.calls, told.running) == ((c.ids["1"],), True)
    c.nothing_else_was_said()
    c.report("p1", say.CallsEnded(1, [CallEnd(c.ids["1"], True, b"too late")]))
    assert c.held() == ["2"]
    assert c.refused == {}


def test_call_cancelled_before_it_is_sent_is_never_sent(cluster: Make) -> None:
    c = cluster(pilots=1).call("x").hot(run_s=1)
    spec = CallSpec(77, b"")
    c.ids["y"], c.names[77] = 77, "y"
    c.tell("ana", say.Submit("f", "bare", [spec]), say.Cancel([77]))
    c.nothing_else_was_said()
    assert c.failure("y").kind is FailureKind.CANCELLED


def test_progress_reaches_the_client_and_is_kept_for_the_next_try(cluster: Make) -> None:
    c = cluster(pilots=1).call("c1").ready().forget()
    c.progress("c1", 3, 10, state=b"checkpoint")
    assert c.hears("ana", to_client.ProgressReports).reports[0].done == 3
    assert "3 of 10 done" in c.story("c-1")
    c.die(c.library(), "c1", failure=DIED).ready()
    assert c.hears("p1", to_pilot.RunCalls).calls[0].progress == b"checkpoint"


def test_call_that_arrives_with_a_block_release_stays_queued(cluster: Make) -> None:
    c = cluster().join("p1", block="b").call("1").ready().end("1").forget()
    c.ids["2"], c.names[2] = 2, "2"
    c.tell("ana", say.Submit("f", "bare", [CallSpec(2, b"")]), say.ReleaseBlock("b"))
    assert c.waiting() == ["2"]
    c.hears("p1", to_pilot.Exit)
    c.nothing_else_was_said()


def test_call_is_not_assigned_to_a_library_still_cancelling_the_call(cluster: Make) -> None:
    c = cluster(pilots=2).define(recipe("a", slots=2)).call("w", context="a").ready().end("w", run_s=50.0)
    c.calls(3, context="a").wait(1).ready()  # p2 also loads the context, because the calls are long
    assert c.lives_on("a") == ["p1", "p2"]
    c.end("2", "3", "4").call("g", context="a", gang=(2, 2)).forget()
    c.lose("p2")
    c.hears("p1", to_pilot.CancelCalls)
    c.join("p3").ready()
    assert c.waiting("a") == ["g"]  # p1 has two slots, and the first run of `g` still occupies one
    c.by_hand = True
    members = (c.library("p1", "a").id, c.library("p3", "a").id)
    with pytest.raises(PolicyError, match="load 1"):
        c.apply([SendGang(c.ids["g"], members)], seam="dispatch")
    c.report("p1", say.CallsReturned(1, (c.ids["g"],)))
    assert {library.pilot.id for library in c.holders("g")} == {"p1", "p3"}
