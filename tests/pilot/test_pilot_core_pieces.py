from __future__ import annotations

from typing import Any

import pytest
from core.pilot_shell import CoreShell

from stoker.pilot.core import commands
from stoker.pilot.core.events import HelloDue, UnacknowledgedFacts
from stoker.pilot.core.lifecycle import MOST_GRACE_S
from stoker.protocol import to_agent, to_library
from stoker.protocol import to_pilot as order
from stoker.protocol.calls import WINDOW_PIECES, CallProgress
from stoker.protocol.ids import CallId, LibraryId

RUN = 7


@pytest.fixture
def pilot() -> CoreShell:
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
    said: list[Any] = [command.message for command in pilot.all(commands.PassOn)]
    return [(message.first, message.items, message.waits) for message in said]


def test_pieces_are_forwarded_and_kept_until_acknowledged(pilot: CoreShell) -> None:
    yielded(pilot, 0, b"a", b"b")
    yielded(pilot, 2, b"c")
    assert passed(pilot) == [(0, [b"a", b"b"], False), (2, [b"c"], False)]
    taken(pilot, 2)
    assert pilot.take(to_library.Taken) == to_library.Taken(CallId(1), RUN, 2)
    taken(pilot, 2, again=True)
    assert not pilot.all(to_library.Taken)
    assert passed(pilot) == [(2, [b"c"], True)]


def test_unacknowledged_pieces_are_sent_again_after_each_welcome(pilot: CoreShell) -> None:
    yielded(pilot, 0, b"a", b"b")
    taken(pilot, 1).forget()
    pilot.give(HelloDue(UnacknowledgedFacts(), 0, ()))
    yielded(pilot, 2, b"c")
    assert passed(pilot) == []  # the manager may not know this pilot yet
    pilot.hear(order.PilotWelcome("s", 5.0, 60.0))
    assert passed(pilot) == [(1, [b"b", b"c"], True)]


def test_another_run_starts_with_its_first_piece(pilot: CoreShell) -> None:
    yielded(pilot, 0, b"a", b"b")
    pilot.say(1, to_agent.RunEvicted(CallProgress(CallId(1))))
    yielded(pilot, 2, b"late")
    assert len(passed(pilot)) == 1
    stream(pilot, 1)
    yielded(pilot, 0, b"A", run=RUN + 1)
    assert passed(pilot) == [(0, [b"A"], False)]
    taken(pilot, 1)
    assert not pilot.all(to_library.Taken)
    taken(pilot, 1, run=RUN + 1)
    assert pilot.take(to_library.Taken).upto == 1


@pytest.mark.parametrize("wrong", [(1, [b"a"]), (0, [b"x"] * (WINDOW_PIECES + 1))])
def test_library_with_misordered_or_excess_pieces_ends(pilot: CoreShell, wrong: Any) -> None:
    first, items = wrong
    yielded(pilot, first, *items)
    assert pilot.take(commands.KillProcess).library == 1
    assert passed(pilot) == []


@pytest.mark.parametrize("running", [True, False])
def test_cancelled_generator_call_is_asked_to_end_then_stopped(pilot: CoreShell, running: bool) -> None:
    yielded(pilot, 0, b"a")
    pilot.hear(order.CancelCalls(LibraryId(1), (CallId(1),), running=running))
    assert pilot.take(to_library.Evict).call == 1
    pilot.observe(c1=1.0)
    assert not pilot.all(commands.KillProcess)
    pilot.wait(MOST_GRACE_S + 1).observe(c1=MOST_GRACE_S + 2)
    assert len(pilot.all(commands.KillProcess)) == running
