"""A journal that cannot be written costs a pause: the manager lives, answers questions, and goes on by itself."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from live.peers import Manager, Peer, until

from stoker.contexts.recipe import BARE
from stoker.manager.core.events import FromClient, TimerFired
from stoker.manager.live import journal
from stoker.manager.protocol import to_client, to_pilot, wire
from stoker.manager.protocol import to_manager as say
from stoker.manager.protocol.calls import CallEnd, CallSpec
from stoker.manager.protocol.session import SessionFolder

Peers = Callable[..., Peer]
ENDLESS = resource.RLIM_INFINITY


def limit(pid: int, size: int) -> None:
    """No file that this process writes may grow beyond so many bytes: the kernel takes a part of a write, then none."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, ENDLESS))


def test_a_full_disk_is_waited_for(manager: Manager, peers: Peers, folder: SessionFolder) -> None:
    assert manager.process is not None
    client, pilot = peers("client"), peers("pilot")
    client.hear(to_client.ClientWelcome)
    client.send(say.DefineRecipe(BARE), say.DefineFunction("f", "f", b"code"))  # type: ignore[arg-type]
    client.send(say.Submit("f", "bare", [CallSpec(0, b"arguments")]))  # type: ignore[arg-type]
    library = pilot.hear(to_pilot.StartLibrary).library
    pilot.send(say.LibraryReady(library, 0.1, 0.2))
    pilot.hear(to_pilot.RunCalls)
    client.hear(to_client.Ack, where=lambda ack: ack.sequence == client.sequence)
    pilot.hear(to_pilot.Ack, where=lambda ack: ack.sequence == pilot.sequence)

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


def test_a_manager_that_is_killed_while_the_disk_is_full_loses_nothing(
    manager: Manager, peers: Peers, folder: SessionFolder
) -> None:
    assert manager.process is not None
    client = peers("client")
    client.hear(to_client.ClientWelcome)
    client.send(say.DefineRecipe(BARE), say.DefineFunction("f", "f", b"code"))  # type: ignore[arg-type]
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
