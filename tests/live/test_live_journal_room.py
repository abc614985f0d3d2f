"""A journal that cannot be written costs a pause: the manager lives, answers questions, and goes on by itself."""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from live.peers import Manager, Peer, until

from stoker.contexts.recipe import BARE
from stoker.manager.cli import ask, down
from stoker.manager.core.events import FromClient, TimerFired
from stoker.manager.live import journal, lease
from stoker.manager.live.journal import explain_journal_trouble
from stoker.manager.live.peer_watch import Patience
from stoker.protocol import to_client, to_pilot, wire
from stoker.protocol import to_manager as say
from stoker.protocol.calls import CallEnd, CallSpec
from stoker.protocol.session import SessionFolder
from stoker.protocol.status import JOURNAL

Peers = Callable[..., Peer]
ENDLESS = resource.RLIM_INFINITY
CODE = bytes(20_000)
"""It makes the journal longer than the manager's log, which has the same limit."""


def limit(pid: int, size: int) -> None:
    """No file that this process writes may grow beyond so many bytes: the kernel takes a part of a write, then none."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, ENDLESS))


def test_a_full_disk_is_waited_for(manager: Manager, peers: Peers, folder: SessionFolder) -> None:
    assert manager.process is not None
    client, pilot = peers("client"), peers("pilot")
    client.hear(to_client.ClientWelcome)
    client.send(say.DefineRecipe(BARE), say.DefineFunction("f", "f", CODE))  # type: ignore[arg-type]
    client.send(say.Submit("f", "bare", [CallSpec(0, b"arguments")]))  # type: ignore[arg-type]
    library = pilot.hear(to_pilot.StartLibrary).library
    pilot.send(say.LibraryReady(library, 0.1, 0.2))
    pilot.hear(to_pilot.RunCalls)
    client.hear(to_client.Ack, where=lambda ack: ack.sequence == client.sequence)
    pilot.hear(to_pilot.Ack, where=lambda ack: ack.sequence == pilot.sequence)

    client.heard.clear()  # what was said of each frame before: the manager may have read them one by one
    pilot.heard.clear()
    room = folder.journal.stat().st_size + 40  # a part of the next record
    limit(manager.process.pid, room)
    pilot.send(say.CallsEnded(library, [CallEnd(0, True, b"result" * 100, 0.01)]))  # type: ignore[arg-type]
    client.send(say.Submit("f", "bare", [CallSpec(1, b"arguments")]))  # type: ignore[arg-type]

    def notices() -> list[str]:
        client.send(say.AskStatus(), numbered=False)
        return [line.text for line in client.hear(to_client.Status).notices]

    until(lambda: any("cannot be written" in text for text in notices()), what="status tells of the full disk")
    observer = peers("client", hello=False)
    observer.send(say.ClientHello(wire.VERSION, observer.session, observer=True), say.AskStatus(), numbered=False)
    assert observer.hear(to_client.Status).pilots, "one who comes just then is answered as well"
    heard = [type(message) for message in (*client.heard, *pilot.heard)]
    assert to_client.Results not in heard, "what is not in the journal is not said"
    assert to_pilot.RunCalls not in heard
    assert to_client.Ack not in heard
    assert "cannot be written" in folder.manager_log.read_text()

    limit(manager.process.pid, ENDLESS)
    assert client.hear(to_client.Results).ends[0].payload == b"result" * 100
    assert [spec.call for spec in pilot.hear(to_pilot.RunCalls).calls] == [1]
    until(lambda: any("can be written again" in text for text in notices()), what="status tells that there is room")
    assert manager.process.poll() is None
    pilot.send(say.CallsEnded(library, [CallEnd(1, True, b"more", 0.01)]))  # type: ignore[arg-type]
    assert client.hear(to_client.Results).ends[0].payload == b"more"
    submits = [
        message
        for _, event in journal.read(folder.journal)
        if isinstance(event, FromClient)
        for message in event.messages
        if isinstance(message, say.Submit)
    ]
    assert len(submits) == 2, "nothing is in it twice"


@pytest.mark.long
def test_a_manager_that_is_killed_while_the_disk_is_full_loses_nothing(
    manager: Manager, peers: Peers, folder: SessionFolder
) -> None:
    assert manager.process is not None
    client = peers("client")
    client.hear(to_client.ClientWelcome)
    client.send(say.DefineRecipe(BARE), say.DefineFunction("f", "f", CODE))  # type: ignore[arg-type]
    client.hear(to_client.Ack, where=lambda ack: ack.sequence == 1)
    limit(manager.process.pid, folder.journal.stat().st_size + 30)
    frame = client.send(say.Submit("f", "bare", [CallSpec(0, b"arguments")]))  # type: ignore[arg-type]
    until(lambda: "cannot be written" in folder.manager_log.read_text(), what="the log tells of it")
    manager.kill()
    manager.start()
    client.send(say.ClientHello(wire.VERSION, client.session), numbered=False)
    client.socket.send(frame)  # it was not acknowledged
    client.hear(to_client.Ack, where=lambda ack: ack.sequence == 2)
    pilot = peers("pilot")
    assert pilot.hear(to_pilot.StartLibrary)


def fill_up(manager: Manager, peers: Peers, folder: SessionFolder) -> tuple[Peer, Peer]:
    """A client with a call that waits for a pilot, and that pilot, when the journal cannot be written any more."""
    assert manager.process is not None
    client, pilot = peers("client"), peers("pilot")
    client.hear(to_client.ClientWelcome)
    client.send(say.DefineRecipe(BARE), say.DefineFunction("f", "f", CODE))  # type: ignore[arg-type]
    client.hear(to_client.Ack, where=lambda ack: ack.sequence == 1)
    pilot.hear(to_pilot.PilotWelcome)
    limit(manager.process.pid, folder.journal.stat().st_size + 30)
    client.send(say.Submit("f", "bare", [CallSpec(0, b"arguments")]))  # type: ignore[arg-type]
    until(lambda: "cannot be written" in folder.manager_log.read_text(), what="the log tells of it")
    return client, pilot


def test_a_session_ends_with_its_program_though_the_disk_is_full(
    manager: Manager, peers: Peers, folder: SessionFolder
) -> None:
    """Its manager and its pilots waited for room for as long as the disk was full, with no program any more."""
    client, pilot = fill_up(manager, peers, folder)
    client.close()
    assert pilot.hear(to_pilot.Exit).reason == "its client is gone"
    assert manager.ended() == 0, "it is not to be started again"
    holder = lease.read(lease.lease_file(folder))
    assert holder is not None
    assert (holder.over, holder.unwritten) == ("its client is gone", "File too large")
    assert "the last records of the session's journal are not written" in folder.manager_log.read_text()


@pytest.mark.long
def test_an_observer_ends_a_session_though_the_disk_is_full(
    manager: Manager, peers: Peers, folder: SessionFolder
) -> None:
    """As `stoker down` does, which waits 5 s for an answer."""
    client, pilot = fill_up(manager, peers, folder)
    observer = peers("client", hello=False)
    hello = say.ClientHello(wire.VERSION, observer.session, observer=True)
    observer.send(hello, numbered=False)
    observer.hear(to_client.ClientWelcome)
    observer.send(say.EndSession("stoker down"), numbered=False)
    assert observer.hear(to_client.SessionOver).reason == "stoker down"
    pilot.hear(to_pilot.Exit)
    [end] = client.hear(to_client.Results).ends
    assert not end.ok
    assert manager.ended() == 0
    assert lease.unwritten(lease.lease_file(folder)) == "File too large"


def test_down_ends_a_session_whose_manager_reads_nothing_for_want_of_room(folder: SessionFolder, peers: Peers) -> None:
    """So much waits for room that it takes no more messages: it heard of no `stoker down`."""
    manager = Manager(folder, script=Path(__file__).with_name("brimful_manager.py"))
    try:
        client, pilot = fill_up(manager, peers, folder)
        client.send(say.Submit("f", "bare", [CallSpec(1, bytes(5000))]))  # type: ignore[arg-type]
        until(lambda: not answers(folder), what="it reads nothing any more")
        assert down.end(folder) is None
        assert pilot.hear(to_pilot.Exit).reason == "stoker down"
        assert manager.ended() == 0
        assert folder.over() == "stoker down"
        assert not folder.asked_to_end.exists()
    finally:
        manager.close()


def test_a_pilot_is_not_given_up_while_the_manager_does_not_read_which_peer_has_come(
    folder: SessionFolder, peers: Peers
) -> None:
    """It was given up a second after its connection broke: it had come back, and its hello waited unread."""
    manager = Manager(folder, script=Path(__file__).with_name("brimful_manager.py"))
    try:
        client, pilot = fill_up(manager, peers, folder)
        unread = peers("client", hello=False)
        client.send(say.Submit("f", "bare", [CallSpec(1, bytes(5000))]))  # type: ignore[arg-type]
        until(lambda: not answers(folder), what="it reads nothing any more")
        pilot.close()
        broke = f"connection to pilot {pilot.name} broke"
        until(lambda: broke in folder.manager_log.read_text(), what="it notices that the connection broke")
        time.sleep(Patience().pilot_back_s + 0.5)
        given_up = f"pilot {pilot.name} did not come back"
        assert given_up not in folder.manager_log.read_text()
        unread.close()
        until(lambda: given_up in folder.manager_log.read_text(), what="it is given up, as no connection is left")
    finally:
        manager.close()


def test_a_file_that_a_killed_down_left_ends_no_session(folder: SessionFolder, peers: Peers) -> None:
    """A manager that was short of room, days after the kill, ended the session."""
    folder.asked_to_end.touch()
    manager = Manager(folder, script=Path(__file__).with_name("brimful_manager.py"))
    try:
        client, pilot = fill_up(manager, peers, folder)
        client.send(say.Submit("f", "bare", [CallSpec(1, bytes(5000))]))  # type: ignore[arg-type]
        until(lambda: not answers(folder), what="it reads nothing any more")
        time.sleep(1.0)
        assert not folder.over()
        assert down.end(folder) is None  # another one, that is not killed
        assert pilot.hear(to_pilot.Exit).reason == "stoker down"
        assert manager.ended() == 0
        assert not folder.asked_to_end.exists()
    finally:
        manager.close()


def test_down_that_is_interrupted_leaves_nothing_that_ends_the_session_later(
    folder: SessionFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manager that was short of room once more, days later, found the file and ended the session."""
    there: list[bool] = []

    def ctrl_c(_: float) -> None:
        there.append(folder.asked_to_end.exists())
        raise KeyboardInterrupt

    monkeypatch.setattr("stoker.manager.cli.down.time.sleep", ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        down._end_by_file(folder)
    assert there == [True]
    assert not folder.asked_to_end.exists()


def answers(folder: SessionFolder) -> bool:
    try:
        with ask.Observer(folder, timeout_s=0.5):
            return True
    except ask.NoAnswerError:
        return False


def test_programs_hear_unasked_that_the_journal_cannot_be_written(
    manager: Manager, peers: Peers, folder: SessionFolder
) -> None:
    """Their calls would wait without a word."""
    assert manager.process is not None
    client, _ = fill_up(manager, peers, folder)
    text = client.hear(to_client.Status).trouble[JOURNAL]
    assert f"{folder.journal} is as large as this user's files may be (ulimit -f)" in text
    assert f"prlimit --pid {manager.process.pid} --fsize=unlimited" in text
    late = peers("client")
    assert late.hear(to_client.Status).trouble == {JOURNAL: text}, "one who joins is told as well"
    limit(manager.process.pid, ENDLESS)
    for each in (client, late):
        each.hear(to_client.Status, where=lambda status: not status.trouble)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ENOSPC, "the disk of {folder} is full; calls and results wait until it has room: make room there"),
        (errno.EDQUOT, "the disk of {folder} is full; calls and results wait until it has room: make room there"),
        (errno.EIO, "calls and results wait until {folder}/journal can be written"),
    ],
)
def test_what_is_wrong_with_the_disk_is_said_with_what_to_do(tmp_path: Path, code: int, said: str) -> None:
    book = journal.Journal(tmp_path / "journal")
    book._failed(OSError(code, os.strerror(code)))
    assert explain_journal_trouble(book, tmp_path).endswith(f"({os.strerror(code)}): {said.format(folder=tmp_path)}")
    book.close()


@pytest.mark.parametrize("sync", [False, True])
def test_what_could_not_be_written_is_written_once(tmp_path: Path, sync: bool) -> None:
    """The same in one process, with every number of bytes that a write may take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for more in range(1, 50, 7):
        path = tmp_path / f"journal-{more}"
        book = journal.Journal(path, sync=sync)
        book.write(0.0, TimerFired("first"))
        assert book.settle()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (os.stat(path).st_size + more, hard))
            for number in range(3):
                book.write(1.0 + number, TimerFired(f"key {number} " + "x" * 30))
                book.flush()
            assert book.trouble
            assert book.safe < book.position
            assert [event for _, event in journal.read(path)] == [TimerFired("first")]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert book.settle()
        assert not book.trouble
        book.close()
        assert [now for now, _ in journal.read(path)] == [0.0, 1.0, 2.0, 3.0]
