"""In the pilot core: calls that are stopped or time out, and pieces of results."""

from __future__ import annotations

from typing import Any

import pytest
from core.pilot_shell import CoreShell

from stoker.pilot.core import commands
from stoker.pilot.core.events import HelloDue, TimerFired, UnacknowledgedFacts
from stoker.pilot.core.lifecycle import LEAST_GRACE_S, MOST_GRACE_S, UNSTARTED_RETURN_S, stop_grace_s
from stoker.protocol import to_agent, to_library
from stoker.protocol import to_manager as told
from stoker.protocol import to_pilot as order
from stoker.protocol.calls import WINDOW_PIECES, CallEnd, CallProgress, FailureKind
from stoker.protocol.ids import CallId, LibraryId


@pytest.fixture
def pilot() -> CoreShell:
    return CoreShell().join().forget()


def cancel(pilot: CoreShell, *calls: int, **how: Any) -> CoreShell:
    ids = tuple(CallId(call) for call in calls)
    return pilot.hear(order.CancelCalls(LibraryId(1), ids, running=True, **how))


def evicted(pilot: CoreShell, call: int) -> CoreShell:
    return pilot.say(1, to_agent.RunEvicted(CallProgress(CallId(call))))


def over(pilot: CoreShell) -> float:
    return stop_grace_s(pilot.library()) + 0.1


def test_library_that_runs_only_an_unresponsive_call_is_killed(pilot: CoreShell) -> None:
    pilot.ready().run(1).forget()
    cancel(pilot, 1, grace_s=10.0)
    timer = pilot.take(commands.SetTimer)
    pilot.observe(c1=3.0)
    assert not pilot.all(commands.KillProcess)
    pilot.wait(10).give(TimerFired(timer.key))
    assert pilot.take(commands.ObserveLibrary).library == 1
    pilot.observe(c1=13.0).observe(c1=13.1)
    assert pilot.take(commands.KillProcess).library == 1
    pilot.die(signal=9, running=(CallId(1),))
    gone = pilot.take(told.LibraryGone)
    assert (gone.failure.kind, gone.running) == (FailureKind.CANCELLED, (1,))
    assert "did not stop within" in gone.failure.message


def test_unresponsive_cancelled_call_does_not_also_time_out(pilot: CoreShell) -> None:
    pilot.ready().run(1, limit_s=5.0).run(2).forget()
    cancel(pilot, 1)
    pilot.wait(over(pilot)).observe(c1=2.0, c2=2.0).forget()
    pilot.wait(10).observe(c1=12.0, c2=12.0).wait(10).observe(c1=22.0, c2=22.0)
    assert not pilot.all(told.CallsEnded)
    assert not pilot.all(to_library.Evict)


def test_other_calls_end_or_are_returned_before_a_library_is_killed(pilot: CoreShell) -> None:
    pilot.ready().run(1, 2, 3).forget()
    cancel(pilot, 1)
    pilot.wait(over(pilot)).observe(c1=2.0, c2=2.0)
    assert pilot.take(to_library.Stop)
    pilot.run(4)
    assert "about to end" in pilot.take(told.CallsReturned).refused
    pilot.say(1, to_agent.GivenBack((CallId(3),)))
    assert pilot.take(told.CallsReturned).calls == (3,)
    pilot.wait(3600).observe(c1=3600.0, c2=3600.0)
    assert not pilot.all(commands.KillProcess), "the other call still runs"
    pilot.end(2).observe(c1=3600.1)
    assert pilot.take(commands.KillProcess)
    pilot.die(signal=9, running=(CallId(1),))
    assert (pilot.take(told.LibraryGone).running, pilot.all(told.CallsReturned)) == ((1,), [])


def test_unstarted_calls_of_an_unresponsive_library_run_elsewhere(pilot: CoreShell) -> None:
    pilot.ready().run(1, 2).forget()
    cancel(pilot, 1)
    pilot.wait(over(pilot)).observe(c1=2.0)
    assert not pilot.all(commands.KillProcess)
    pilot.wait(UNSTARTED_RETURN_S + 0.1).observe(c1=3.0)
    assert pilot.take(commands.KillProcess)
    pilot.die(signal=9, running=(CallId(1),))
    assert pilot.take(told.LibraryGone).unstarted == (2,)


def test_call_that_reacts_late_prevents_the_kill_of_its_library(pilot: CoreShell) -> None:
    pilot.ready().run(1, 2).forget()
    cancel(pilot, 1)
    pilot.wait(over(pilot)).observe(c1=2.0, c2=2.0)
    evicted(pilot, 1).observe(c2=2.1).end(2).observe()
    assert not pilot.all(commands.KillProcess)
    pilot.die()
    assert pilot.take(told.LibraryGone).running == ()


def test_call_over_its_limit_is_told_to_stop_and_times_out(pilot: CoreShell) -> None:
    pilot.ready().run(1, limit_s=2.0).run(2).forget()
    pilot.observe(c1=1.9, c2=1.9)
    assert not pilot.all(to_library.Evict)
    pilot.observe(c1=2.1, c2=2.1).observe(c1=2.3, c2=2.3)
    assert pilot.take(to_library.Evict).call == 1
    assert not pilot.all(told.CallsEnded), "the call may still return a result"
    evicted(pilot, 1)
    (end,) = pilot.take(told.CallsEnded).ends
    assert (end.call, end.failure.kind) == (1, FailureKind.TIMEOUT)
    assert "its limit is 2 s" in end.failure.message
    assert not pilot.all(told.CallEvicted), "the call's one end was reported"
    pilot.wait(over(pilot)).observe(c2=9.0).end(2)
    assert not pilot.all(commands.KillProcess)


@pytest.mark.parametrize("ok", [True, False])
def test_result_in_the_grace_time_counts_and_an_error_times_out(pilot: CoreShell, ok: bool) -> None:
    pilot.ready().run(1, limit_s=2.0).observe(c1=2.1).forget()
    pilot.say(1, to_agent.RunsEnded([CallEnd(CallId(1), ok=ok, payload=b"its own")]))
    (end,) = pilot.take(told.CallsEnded).ends
    assert (end.ok, end.payload) == (ok, b"its own" if ok else b"")
    assert (end.failure is None) == ok


def test_unresponsive_call_over_its_limit_times_out_once(pilot: CoreShell) -> None:
    pilot.ready().run(1, limit_s=2.0).run(2).observe(c1=2.1, c2=2.1).forget()
    pilot.wait(over(pilot)).observe(c1=9.0, c2=9.0)
    (end,) = pilot.take(told.CallsEnded).ends
    assert (end.call, end.failure.kind) == (1, FailureKind.TIMEOUT)
    evicted(pilot, 1)
    assert not pilot.all(told.CallsEnded)
    assert not pilot.all(commands.KillProcess), "the other call still runs"
    pilot.end(2).observe(c1=9.1).forget()
    pilot.die(signal=9, running=(CallId(1),))
    gone = pilot.take(told.LibraryGone)
    assert (gone.failure.kind, gone.running) == (FailureKind.TIMEOUT, ())


def test_limits_apply_in_a_library_that_finishes_its_calls(pilot: CoreShell) -> None:
    pilot.ready().run(1, limit_s=2.0).hear(order.StopLibrary(LibraryId(1), "enough")).forget()
    pilot.observe(c1=2.1)
    assert pilot.take(to_library.Evict).call == 1
    pilot.wait(over(pilot)).observe(c1=9.0)
    (end,) = pilot.take(told.CallsEnded).ends
    assert end.call == 1
    assert pilot.take(commands.KillProcess)


def test_eviction_never_kills_the_library(pilot: CoreShell) -> None:
    pilot.ready().run(1).forget().hear(order.EvictCall(LibraryId(1), CallId(1)))
    assert pilot.take(to_library.Evict).call == 1
    pilot.wait(3600).observe(c1=3600.0)
    assert not pilot.all(commands.KillProcess)


@pytest.mark.parametrize(
    ("load_s", "expected"), [(0.2, LEAST_GRACE_S), (4.0, 4.0), (600.0, MOST_GRACE_S)], ids=["quick", "usual", "slow"]
)
def test_grace_time_equals_the_load_time_within_bounds(pilot: CoreShell, load_s: float, expected: float) -> None:
    pilot.start().wait(load_s).load().run(1)
    assert stop_grace_s(pilot.library()) == pytest.approx(expected)


# ---- pieces of results

RUN = 7


@pytest.fixture
def streaming() -> CoreShell:
    """A pilot with a library that runs call 1, which yields pieces."""
    pilot = CoreShell().join().ready()
    return stream(pilot, 1).forget()


def stream(pilot: CoreShell, *calls: int) -> CoreShell:
    return pilot.run(*calls, stream=True)


def yielded(pilot: CoreShell, first: int, *items: bytes, call: int = 1, run: int = RUN) -> CoreShell:
    return pilot.say(1, to_agent.Yielded(CallId(call), run, first, list(items)))


def taken(pilot: CoreShell, upto: int, *, run: int = RUN, again: bool = False) -> CoreShell:
    return pilot.hear(order.AckPieces(LibraryId(1), CallId(1), run, upto, again))


def passed(pilot: CoreShell) -> list[tuple[int, list[bytes], bool]]:
    """Return sent pieces as (number of the first piece, pieces, True if an acknowledgement is expected)."""
    said: list[Any] = [command.message for command in pilot.all(commands.SendPieces)]
    return [(message.first, message.items, message.waits) for message in said]


def test_pieces_are_forwarded_and_kept_until_acknowledged(streaming: CoreShell) -> None:
    yielded(streaming, 0, b"a", b"b")
    yielded(streaming, 2, b"c")
    assert passed(streaming) == [(0, [b"a", b"b"], False), (2, [b"c"], False)]
    taken(streaming, 2)
    assert streaming.take(to_library.PiecesReceived) == to_library.PiecesReceived(CallId(1), RUN, 2)
    taken(streaming, 2, again=True)
    assert not streaming.all(to_library.PiecesReceived)
    assert passed(streaming) == [(2, [b"c"], True)]


def test_unacknowledged_pieces_are_sent_again_after_each_welcome(streaming: CoreShell) -> None:
    yielded(streaming, 0, b"a", b"b")
    taken(streaming, 1).forget()
    streaming.give(HelloDue(UnacknowledgedFacts(), 0, ()))
    yielded(streaming, 2, b"c")
    assert passed(streaming) == []  # the manager may not know this pilot yet
    streaming.hear(order.PilotWelcome("s", 5.0, 60.0))
    assert passed(streaming) == [(1, [b"b", b"c"], True)]


def test_rerun_of_a_stream_starts_with_its_first_piece(streaming: CoreShell) -> None:
    yielded(streaming, 0, b"a", b"b")
    streaming.say(1, to_agent.RunEvicted(CallProgress(CallId(1))))
    yielded(streaming, 2, b"late")
    assert len(passed(streaming)) == 1
    stream(streaming, 1)
    yielded(streaming, 0, b"A", run=RUN + 1)
    assert passed(streaming) == [(0, [b"A"], False)]
    taken(streaming, 1)
    assert not streaming.all(to_library.PiecesReceived)
    taken(streaming, 1, run=RUN + 1)
    assert streaming.take(to_library.PiecesReceived).upto == 1


@pytest.mark.parametrize("wrong", [(1, [b"a"]), (0, [b"x"] * (WINDOW_PIECES + 1))])
def test_library_with_misordered_or_excess_pieces_ends(streaming: CoreShell, wrong: Any) -> None:
    first, items = wrong
    yielded(streaming, first, *items)
    assert streaming.take(commands.KillProcess).library == 1
    assert passed(streaming) == []


@pytest.mark.parametrize("running", [True, False])
def test_cancelled_generator_call_is_asked_to_end_then_stopped(streaming: CoreShell, running: bool) -> None:
    yielded(streaming, 0, b"a")
    streaming.hear(order.CancelCalls(LibraryId(1), (CallId(1),), running=running))
    assert streaming.take(to_library.Evict).call == 1
    streaming.observe(c1=1.0)
    assert not streaming.all(commands.KillProcess)
    streaming.wait(MOST_GRACE_S + 1).observe(c1=MOST_GRACE_S + 2)
    assert len(streaming.all(commands.KillProcess)) == running
