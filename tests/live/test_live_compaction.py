from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from faults.world import is_alive
from live.peers import Manager, Peers, pilot_hello, until

from stoker.contexts.recipe import BARE
from stoker.errors import SessionError
from stoker.manager.cli.session_choice import find_story_of_subject
from stoker.manager.core import story
from stoker.manager.core.reactor import Core
from stoker.manager.live import records
from stoker.manager.live.replay import (
    find_journal_and_session,
    status_of_ended_session,
    story_of_ended_session,
    verify_replay,
)
from stoker.manager.live.restore import JournalReplay
from stoker.manager.policies import default_policies
from stoker.manager.sim.validate import check_state
from stoker.protocol import to_client, to_pilot, wire
from stoker.protocol import to_manager as say
from stoker.protocol.calls import CallEnd, CallSpec
from stoker.protocol.session import SessionFolder

PAYLOAD = b"x" * 300
STEPS = (
    "before the segment", "between the segments", "before the fork", "half a snapshot", "no name", "before removal",
)  # fmt: skip


def replay(folder: SessionFolder) -> Core | None:
    past = JournalReplay(folder.journal, "test")
    for now, event in past.read_events():
        past.handle(event, now)
    return past.core


PAUSING = Path(__file__).with_name("pausing_manager.py").read_text()


class Compacting(Manager):
    """A manager that compacts early and stops at `step`."""

    def __init__(self, folder: SessionFolder, step: str) -> None:
        self.mark = folder.path.parent / "mark"
        super().__init__(folder, patch=f"{PAUSING}stop_at({step!r}, Path({str(self.mark)!r}))\n")

    @property
    def stopped(self) -> int:
        return int(self.mark.read_text() or 0) if self.mark.exists() else 0

    def start_without_stops(self) -> None:
        self.patch = PAUSING
        self.start()


@pytest.fixture
def compacting(folder: SessionFolder) -> Iterator[Callable[[str], Compacting]]:
    with ExitStack() as made:

        def make(step: str) -> Compacting:
            manager = Compacting(folder, step)
            made.callback(manager.close)
            return manager

        yield make


class Work:
    """A client and a pilot that run calls while the manager restarts."""

    def __init__(self, peers: Peers) -> None:
        self.client, self.pilot = peers("client"), peers("pilot")
        self.client.hear(to_client.ClientWelcome)
        self.pilot.hear(to_pilot.PilotWelcome)
        self.results: dict[int, bytes] = {}
        self.received = self.submitted = self.acked = 0
        self.frames: list[bytes] = []
        """Unacknowledged frames of the client."""
        self.ended: list[tuple[int, bytes, list[int]]] = []
        """Unacknowledged frames of the pilot, with the calls that end in each frame."""
        self.library = 0
        self.held: list[int] = []
        self.hold = False
        self.submit_frame(say.DefineRecipe(BARE), say.DefineFunction("f", "f", b"code"))  # type: ignore[arg-type]

    def submit_frame(self, *messages: object) -> None:
        self.frames.append(self.client.send(*messages))

    def submit(self, count: int) -> None:
        specs = [CallSpec(self.submitted + n, PAYLOAD) for n in range(count)]  # type: ignore[arg-type]
        self.submitted += count
        self.submit_frame(say.Submit("f", "bare", specs))  # type: ignore[arg-type]

    def run(self, count: int) -> None:
        """Submit calls, and wait until all calls are done."""
        self.submit(count)
        self.until(lambda: len(self.results) == self.submitted, what="its calls are done")

    def turn(self) -> None:
        for message in self.pilot.listen(0.01):
            if isinstance(message, to_pilot.StartLibrary):
                self.library = message.library
                self.pilot.send(say.LibraryReady(message.library, 0.1, 0.2))
            elif isinstance(message, to_pilot.RunCalls):
                self.held += [spec.call for spec in message.calls]
            elif isinstance(message, to_pilot.CancelCalls):  # calls of frames that were read but not acknowledged
                self.held = [call for call in self.held if call not in message.calls]
                frame = self.pilot.send(say.CallsReturned(message.library, message.calls))
                self.ended.append((self.pilot.sequence, frame, []))
            elif isinstance(message, to_pilot.Ack):
                self.ended = [each for each in self.ended if each[0] > message.sequence]
            elif isinstance(message, to_pilot.HelloAgain):
                self.ended = [each for each in self.ended if each[0] > message.acknowledged]
                self.greet()
        if self.held and not self.hold:
            ends = [CallEnd(call, True, b"result %d" % call, 0.01) for call in self.held]  # type: ignore[arg-type]
            frame = self.pilot.send(say.CallsEnded(self.library, ends))  # type: ignore[arg-type]
            self.ended.append((self.pilot.sequence, frame, self.held))
            self.held = []
        for message in self.client.listen(0.01):
            if isinstance(message, to_client.Results):
                for number, end in enumerate(message.ends, message.first):
                    if number == self.received:
                        assert end.call not in self.results, "each call ends once"
                        self.results[end.call] = end.payload  # type: ignore[assignment]
                        self.received += 1
            elif isinstance(message, to_client.Ack):
                del self.frames[: message.sequence - self.acked]
                self.acked = message.sequence

    def confirm(self) -> None:
        self.submit_frame(say.Received(self.received))

    def until(self, true: Callable[[], object], *, what: str) -> None:
        until(lambda: self.turn() or true(), what=what)

    def come_back(self) -> None:
        """Connect to a new manager process: all peers say hello, and resend unacknowledged frames."""
        self.client.send(say.ClientHello(wire.VERSION, self.client.session, self.received), numbered=False)
        for frame in self.frames:
            self.client.socket.send(frame)
        self.greet()

    def greet(self) -> None:
        calls = [call for _, _, ended in self.ended for call in ended] + self.held
        facts = say.LibraryFacts(self.library, "bare", ("cpu:0",), True, tuple(calls))  # type: ignore[arg-type]
        acknowledged = self.ended[0][0] - 1 if self.ended else self.pilot.sequence
        hello = pilot_hello(self.pilot.session, libraries=(facts,), acknowledged=acknowledged)
        self.pilot.send(hello, numbered=False, as_it_is=True)
        for _, frame, _ in self.ended:
            self.pilot.socket.send(frame)


def test_journal_is_compacted_while_its_session_runs(
    compacting: Callable[[str], Compacting], peers: Peers, folder: SessionFolder
) -> None:
    manager = compacting("none")
    work = Work(peers)
    for _ in range(12):
        work.run(20)
        work.confirm()
    work.until(lambda: "was compacted" in folder.manager_log.read_text(), what="compaction")
    work.hold = True
    work.submit(5)
    work.until(lambda: work.held, what="a call is sent")
    assert [path for path in folder.path.glob("journal.*") if not records.list_snapshots(folder.journal)] == []
    work.until(lambda: len(records.list_snapshots(folder.journal)) == 1, what="the running compaction has finished")
    (snapshot,) = [path for _, path in records.list_snapshots(folder.journal)]
    assert sum(path.stat().st_size for path in (snapshot, folder.journal)) < 60_000, "ended calls are not kept"
    _, live, over = find_story_of_subject(str(folder.path), "3")
    assert not over
    assert "compacted" in live.headline, "also during the session, and each named journal has the call"

    manager.kill()
    found = verify_replay(
        folder.journal, session=find_journal_and_session(folder.journal)[1], policies=default_policies()
    )
    assert found.difference is None
    assert found.since > 0
    core = replay(folder)
    check_state(core.state)
    assert (core.state.done, len(core.state.calls)) == (240, 5)
    told = story_of_ended_session(folder, "3")
    assert "compacted" in told.headline
    assert status_of_ended_session(folder).done == 240
    assert story.tell_story(core.state, "242").found

    manager.start()
    work.come_back()
    work.hold = False
    work.run(20)
    assert work.results == {n: b"result %d" % n for n in range(265)}
    again = verify_replay(folder.journal, session="test", policies=default_policies())
    assert again.difference is None
    assert again.restarts <= 1


@pytest.mark.long
@pytest.mark.parametrize("step", STEPS)
def test_manager_killed_while_it_compacts_loses_nothing(
    compacting: Callable[[str], Compacting], peers: Peers, folder: SessionFolder, step: str
) -> None:
    manager = compacting(step)
    work = Work(peers)

    def busy() -> bool:
        if work.submitted == len(work.results) + len(work.held) and work.submitted < 600:
            work.submit(15)
            if work.submitted % 2:
                work.confirm()
        work.hold = work.submitted > 90 and work.submitted % 3 == 0
        return bool(manager.stopped)

    work.until(busy, what=f"it stops {step}")
    stopped = manager.stopped
    work.submit(3)  # the manager reads these calls before the kill only if the stopped process is its child
    manager.kill()
    until(lambda: not is_alive(stopped), what="the child ends with its parent")
    before = sorted(path.name for path in folder.path.glob("journal*"))

    manager.start_without_stops()
    work.hold = False
    work.come_back()
    work.until(lambda: len(work.results) == work.submitted, what=f"all calls are done, from {before}")
    assert work.results == {n: b"result %d" % n for n in range(work.submitted)}
    work.client.send(say.EndSession("test is over"))
    assert manager.ended() == 0
    assert not list(folder.path.glob("*.draft")), "incomplete files are removed"
    assert not (folder.path / "journal.next").exists()
    found = verify_replay(folder.journal, session="test", policies=default_policies())
    assert found.difference is None


def test_killed_snapshot_process_loses_no_call(
    compacting: Callable[[str], Compacting], peers: Peers, folder: SessionFolder
) -> None:
    manager = compacting("half a snapshot")
    work = Work(peers)
    for _ in range(8):
        work.run(20)
    os.kill(until(lambda: manager.stopped, what="the child stops"), signal.SIGKILL)
    until(lambda: "was not compacted" in folder.manager_log.read_text(), what="the manager notices it")
    work.run(20)
    assert len(records.list_segments(folder.journal)) == 2
    work.client.send(say.EndSession("test is over"))
    assert manager.ended() == 0
    core = replay(folder)
    assert core.state.done == 180


def test_missing_beginning_of_a_compacted_journal_is_reported(tmp_path: Path, folder: SessionFolder) -> None:
    from stoker.manager.core.events import TimerFired
    from stoker.manager.live import journal

    book = journal.Journal(folder.journal)
    book.add_event(1.0, TimerFired("a"))
    book.begin_segment()
    book.add_event(2.0, TimerFired("b"))
    book.close()
    assert len(records.list_segments(folder.journal)) == 2
    records.numbered_segment_path(folder.journal, 1).unlink()
    with pytest.raises(SessionError, match="lacks the beginning of the session"):
        replay(folder)
