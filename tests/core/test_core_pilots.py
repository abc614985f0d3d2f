from __future__ import annotations

from typing import get_args

import pytest
from core.builders import Make, recipe

from stoker.manager.core import reactor
from stoker.manager.core.events import FromPilot, ManagerRestarted, RecordRuns, TimerFired
from stoker.manager.core.nouns import LibraryState, PilotState
from stoker.manager.core.pilot_reports import RUN_TIME_RECORD_INTERVAL_S, is_heartbeat, needs_heartbeat_record
from stoker.manager.core.seams import Resize
from stoker.protocol import to_manager as say
from stoker.protocol import to_pilot, wire
from stoker.protocol.calls import CallEnd


def test_peer_with_a_wrong_key_is_refused(cluster: Make) -> None:
    c = cluster()
    c.hello("p1", session="other")
    assert "this is session k3v9" in c.hears("p1", to_pilot.PilotRefused).reason
    c.hello("p2", protocol=99)
    assert f"protocol {wire.VERSION}" in c.hears("p2", to_pilot.PilotRefused).reason
    c.report("p3", say.Heartbeat())
    assert c.core.state.pilots == {}
    c.nothing_else_was_said()


def test_every_message_of_a_pilot_has_one_handler() -> None:
    steps = [*reactor._PILOT_STEPS, *reactor._LIBRARY_STEPS]
    assert set(steps) == set(get_args(say.FromPilot))
    assert len(steps) == len(set(steps))


def test_pilot_that_reconnects_with_all_its_calls_continues(cluster: Make) -> None:
    c = cluster(pilots=1).calls(2).ready().cut("p1").come_back("p1", lib1=("1",))
    c.nothing_else_was_said()
    assert c.held() == ["1"]
    c.end("1")
    assert c.runs("p1") == ["2"]


def test_undelivered_calls_are_sent_again_with_their_function(cluster: Make) -> None:
    c = cluster(pilots=1).call("1").ready().cut("p1").come_back("p1", lib1=())
    run = c.hears("p1", to_pilot.RunCalls)
    assert [c.names[spec.call] for spec in run.calls] == ["1"]
    assert run.function_blob is not None


def test_call_cancelled_during_a_disconnect_keeps_its_slot_until_gone(cluster: Make) -> None:
    c = cluster(pilots=1).calls(2).ready().cut("p1")
    c.tell("ana", say.Cancel([c.ids["1"]], running=True)).forget()
    c.come_back("p1", lib1=("1",))
    told = c.hears("p1", to_pilot.CancelCalls)
    assert (told.calls, told.running) == ((c.ids["1"],), True)
    c.nothing_else_was_said()
    c.report("p1", say.CallsReturned(1, (c.ids["1"],)))
    assert c.runs("p1") == ["2"]


def test_library_of_an_unknown_context_is_stopped(cluster: Make) -> None:
    c = cluster(pilots=1)
    facts = say.LibraryFacts(9, "strange", ("cpu:0",), True)
    c.cut("p1").hello("p1", libraries=(facts,))
    c.hears("p1", to_pilot.PilotWelcome)
    assert c.hears("p1", to_pilot.StopLibrary).library == 9


def test_pilot_that_loaded_while_disconnected_gets_calls(cluster: Make) -> None:
    c = cluster(pilots=1).call("1").cut("p1").come_back("p1", lib1=())
    assert c.runs("p1") == ["1"]


@pytest.mark.parametrize("given_up", [False, True])
def test_stop_order_lost_with_the_connection_is_sent_again(cluster: Make, given_up: bool) -> None:
    c = cluster(pilots=1).define(recipe("big", memory="8 GB")).call("1").ready().end("1").call("2", context="big")
    c.cut("p1")
    if given_up:
        c.lose("p1")
    c.come_back("p1", lib1=())
    assert c.hears("p1", to_pilot.StopLibrary).library == 1
    c.die(c.library(), failure=None)
    assert c.lives_on("big") == ["p1"]


def test_resize_order_lost_with_the_connection_is_sent_again(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a")).call("1", context="a").ready(memory="2 GB")
    c.by_hand = True
    c.apply([Resize(1, 10**9)], seam="residency")
    c.core.manager.commands.clear()
    c.cut("p1").come_back("p1", lib1=("1",))
    size = c.hears("p1", to_pilot.ResizeLibrary).device_memory_bytes
    assert c.library(context="a").unanswered_resizes == [size]
    c.report("p1", say.LibraryResized(1, size))
    assert c.library(context="a").promised_bytes == size == 10**9
    assert c.library(context="a").unanswered_resizes == []


def test_pilot_that_already_left_is_refused_when_it_reconnects(cluster: Make) -> None:
    c = cluster(pilots=1).report("p1", say.PilotLeaving("its walltime is over"))
    c.report("p1", say.Heartbeat(), numbered=False)
    assert "counted this pilot as lost" in c.hears("p1", to_pilot.PilotRefused).reason
    c.come_back("p1")
    assert "counted this pilot as lost" in c.hears("p1", to_pilot.PilotRefused).reason


def test_context_of_a_disconnected_pilot_is_soon_loaded_elsewhere(cluster: Make) -> None:
    c = cluster(pilots=1).call("1").ready().end("1").join("p2").cut("p1").call("2")
    assert c.lives_on() == ["p1"]
    c.wait(2.5)
    assert c.lives_on() == ["p1"]
    c.wait(2.5)
    assert c.lives_on() == ["p1", "p2"]


def test_repeated_frame_is_processed_once(cluster: Make) -> None:
    c = cluster(pilots=1).calls(3).ready()
    c.end("1")
    c._frames["p1"] -= 1
    c.report("p1", say.CallsEnded(1, [CallEnd(c.ids["2"], True)]))
    assert "2" not in c.ended
    c._frames["p1"] += 5
    c.report("p1", say.CallsEnded(1, [CallEnd(c.ids["2"], True)]))
    assert "2" not in c.ended
    assert c.refused == {"repeated or early frame of a pilot": 2}


def test_messages_of_unknown_libraries_are_refused_and_counted(cluster: Make) -> None:
    c = cluster(pilots=2).call("1").ready()
    other = "p2" if c.lives_on() == ["p1"] else "p1"
    for message in (
        say.LibraryReady(1, 0.1, 0.1),
        say.CallsEnded(1, [CallEnd(c.ids["1"], True)]),
        say.LibraryGone(1),
        say.CallsReturned(99, ()),
        say.LibraryResized(99, 1),
    ):
        c.report(other, message)
    assert c.refused == {"message of a library that the pilot does not have": 5}
    c.report(c.lives_on()[0], say.LibraryReady(1, 0.1, 0.1))
    assert c.refused["library ready twice"] == 1
    c.end("1")
    assert c.ended["1"].ok


def test_reconnected_draining_pilot_gets_its_drain_order_again(cluster: Make) -> None:
    c = cluster().join("p1", block="b").call("1").ready().tell("ana", say.ReleaseBlock("b"))
    c.cut("p1").come_back("p1", lib1=("1",))
    assert c.hears("p1", to_pilot.Exit).drain
    c.lose("p1")
    assert c.core.state.lost_pilots == 0


def test_restarted_manager_waits_for_all_pilots_and_continues(cluster: Make) -> None:
    c = cluster(pilots=2).calls(3).ready().forget()
    c.event(ManagerRestarted()).call("4")
    c.nothing_else_was_said()
    assert {p.state for p in c.core.state.pilots.values()} == {PilotState.CUT}
    c.come_back("p1", lib1=("1",)).come_back("p2", lib2=("2",))
    c.end("1", "2").end("3", "4")
    assert c.ended == {}  # the calls' client has not reconnected
    c.client("ana")
    assert len(c.ended) == 4


@pytest.mark.parametrize("batch", [1, 16])
def test_heartbeats_report_memory_and_record_call_run_times(cluster: Make, batch: int) -> None:
    c = cluster(pilots=1).calls(2, batch=batch).ready().end("1", run_s=2.0).end("2", run_s=4.0)
    c.report("p1", say.Heartbeat((say.LibraryUse(1, 123),), 55, 3), numbered=False)
    runs = c.commands(RecordRuns)
    assert [(x.function, x.kind, x.calls, x.run_s, x.items) for x in runs] == [("f", "cpu", 2, 6.0, 2 * batch)]
    assert c.library().memory_bytes == 123
    assert c.status().refused == {"frames refused by pilots": 3}
    c.report("p1", say.Heartbeat(), numbered=False)
    assert len(c.commands(RecordRuns)) == 1


def test_call_run_times_are_recorded_when_the_session_ends(cluster: Make) -> None:
    c = cluster(pilots=1).calls(2).ready().end("1", run_s=2.0).end("2", run_s=4.0)
    c.tell("ana", say.EndSession("done"))
    runs = c.commands(RecordRuns)
    assert [(x.function, x.calls, x.run_s) for x in runs] == [("f", 2, 6.0)]


def test_library_that_refuses_an_assigned_call_counts_as_stopping(cluster: Make) -> None:
    c = cluster(pilots=2).call("1").ready()
    first = c.lives_on()[0]
    c.give_back("1", refused="lib-1 is about to end")
    assert c.library(first).state is LibraryState.STOPPING
    c.die(c.library(first), failure=None).ready().end("1")
    assert c.ended["1"].ok


def test_pilot_that_refuses_a_load_without_fault_is_draining(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a", memory="1 GB")).call("1").ready().call("2", context="a").join("p2")
    c.die(c.library(context="a"), failure=None, loading=True)
    assert c.pilot("p1").state is PilotState.DRAINING
    assert c.lives_on("a") == ["p2"]
    c.end("1").report("p1", say.PilotLeaving("walltime"))
    assert c.core.state.lost_pilots == 0


def test_walltime_timer_that_fires_early_still_drains_the_pilot(cluster: Make) -> None:
    """A timer is rounded to microseconds and may fire too early. A timer set again for the same time would fire
    forever.
    """
    c = cluster().join("p1", ends_in_s=150.0000004)
    for _ in range(100):
        if c.pilot().state is not PilotState.HERE:
            break
        c.now = max(c.now, round(c.core.state.timers["walltime/p1"], 6))
        c.event(TimerFired("walltime/p1"))
    assert 100.0 < c.now < 150.0
    assert "its walltime is over" in c.hears("p1", to_pilot.Exit).reason


def test_welcome_names_the_hello_that_it_answers(cluster: Make) -> None:
    c = cluster(pilots=1).forget()
    for number in (3, 4):
        c.hello("p1", number=number)
        assert c.hears("p1", to_pilot.PilotWelcome).hello == number


GB = 10**9


def beat(pilot: str = "p1", *uses: say.LibraryUse, **more: int) -> FromPilot:
    return FromPilot(pilot, 0, [say.Heartbeat(uses, **more)])


def use(memory: int = 0, device: int = 0, cpu_s: float = 0.0) -> say.LibraryUse:
    return say.LibraryUse(1, memory, device, cpu_s)


@pytest.mark.parametrize(
    ("heartbeat", "is_news"),
    [
        (beat("p1", use(4 * GB, 8 * GB, 99.0), cache_bytes=GB, refused_frames=3), False),
        (beat("p1", use(4 * GB + 200_000_000, 8 * GB - 300_000_000), cache_bytes=GB + 4096, refused_frames=3), False),
        (beat("p1", cache_bytes=GB, refused_frames=3), False),
        (beat("p1", use(5 * GB, 8 * GB), cache_bytes=GB, refused_frames=3), True),
        (beat("p1", use(4 * GB, 7 * GB), cache_bytes=GB, refused_frames=3), True),
        (beat("p1", use(4 * GB, 8 * GB), cache_bytes=GB, refused_frames=4), True),
        (beat("p1", use(4 * GB, 8 * GB), cache_bytes=2 * GB, refused_frames=3), True),
    ],
)
def test_heartbeat_is_journaled_only_if_it_changes_a_fact(cluster: Make, heartbeat: FromPilot, is_news: bool) -> None:
    c = cluster(pilots=1).calls(1).ready()
    c.report("p1", say.Heartbeat((use(4 * GB, 8 * GB),), GB, 3), numbered=False)
    assert is_heartbeat(heartbeat)
    assert needs_heartbeat_record(c.core.state, heartbeat, c.now) is is_news


def test_call_run_times_are_recorded_once_per_period(cluster: Make) -> None:
    c = cluster(pilots=1).calls(2).ready().end("1", run_s=2.0)
    state = c.core.state
    assert needs_heartbeat_record(state, beat(), state.runs_recorded_at + RUN_TIME_RECORD_INTERVAL_S)
    c.wait(RUN_TIME_RECORD_INTERVAL_S).report("p1", say.Heartbeat(), numbered=False).end("2", run_s=2.0)
    assert not needs_heartbeat_record(state, beat(), c.now + 0.9 * RUN_TIME_RECORD_INTERVAL_S)
    assert needs_heartbeat_record(state, beat(), c.now + RUN_TIME_RECORD_INTERVAL_S)


def test_numbered_or_mixed_frame_does_not_count_as_a_heartbeat(cluster: Make) -> None:
    numbered = FromPilot("p1", 4, [say.Heartbeat()])
    among = FromPilot("p1", 0, [say.Heartbeat(), say.PilotLeaving("bye")])
    assert not is_heartbeat(numbered)
    assert not is_heartbeat(among)
