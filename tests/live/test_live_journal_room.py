"""An unwritable journal pauses the session. The manager answers queries, and continues when writes succeed."""

from __future__ import annotations

import errno
import os
import resource
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import journal_files
import pytest
from live.peers import Manager, Peer, Peers, until, welcomed
from polling import PATIENCE_S

from stoker.config import load_sites
from stoker.manager.cli import ask, down
from stoker.manager.core.events import FromClient, TimerFired
from stoker.manager.executor.processes import manager_command_options
from stoker.manager.live import journal, lease
from stoker.manager.live.journal import explain_journal_trouble
from stoker.manager.live.peer_watch import PeerTimeLimits
from stoker.protocol import to_client, to_pilot, wire
from stoker.protocol import to_manager as say
from stoker.protocol.session import SessionFolder
from stoker.protocol.status import JOURNAL

# ---- full disks


ENDLESS = resource.RLIM_INFINITY
CODE = bytes(20_000)
"""Bytes that make the journal longer than the manager log, to which the limit also applies."""


def limit(pid: int, size: int) -> None:
    """Limit the file sizes of a process: the kernel writes a part of the data, then nothing."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, ENDLESS))


def test_manager_waits_on_a_full_disk(manager: Manager, peers: Peers, folder: SessionFolder) -> None:
    client, pilot = welcomed(peers, "client", "pilot")
    client.define(CODE)
    client.submit(0)
    library = pilot.serve()
    pilot.hear(to_pilot.RunCalls)
    client.hear(to_client.Ack, where=lambda ack: ack.sequence == client.sequence)
    pilot.hear(to_pilot.Ack, where=lambda ack: ack.sequence == pilot.sequence)

    client.heard.clear()  # forget earlier results, because their grouping into frames varies
    pilot.heard.clear()
    room = folder.journal.stat().st_size + 40  # space for a part of the next record
    limit(manager.process.pid, room)
    pilot.end(0, library=library, payload=b"result" * 100)
    client.submit(1)

    def notices() -> list[str]:
        return [line.text for line in client.status().notices]

    until(lambda: any("cannot be written" in text for text in notices()), what="status reports the full disk")
    assert peers("client", observer=True).status().pilots, "a new observer is answered as well"
    heard = [type(message) for message in (*client.heard, *pilot.heard)]
    assert to_client.Results not in heard, "events outside the journal are not announced"
    assert to_pilot.RunCalls not in heard
    assert to_client.Ack not in heard
    assert "cannot be written" in folder.manager_log.read_text()

    limit(manager.process.pid, ENDLESS)
    assert client.hear(to_client.Results).ends[0].payload == b"result" * 100
    assert [spec.call for spec in pilot.hear(to_pilot.RunCalls).calls] == [1]
    until(
        lambda: any("can be written again" in text for text in notices()),
        what="status reports that the journal can be written",
    )
    assert manager.process.poll() is None
    pilot.end(1, library=library, payload=b"more")
    assert client.hear(to_client.Results).ends[0].payload == b"more"
    submits = [
        message
        for _, event in journal_files.read(folder.journal)
        if isinstance(event, FromClient)
        for message in event.messages
        if isinstance(message, say.Submit)
    ]
    assert len(submits) == 2, "the journal has no event twice"


@pytest.mark.long
def test_manager_killed_on_a_full_disk_loses_nothing(manager: Manager, peers: Peers, folder: SessionFolder) -> None:
    client, pilot, frame = fill_up(manager, peers, folder)
    pilot.close()
    manager.kill()
    manager.start()
    client.send(say.ClientHello(wire.VERSION, client.session), numbered=False)
    client.socket.send(frame)  # the client repeats the unacknowledged frame
    client.hear(to_client.Ack, where=lambda ack: ack.sequence == 2)
    pilot = peers("pilot")
    assert pilot.hear(to_pilot.StartLibrary)


def fill_up(manager: Manager, peers: Peers, folder: SessionFolder) -> tuple[Peer, Peer, bytes]:
    """Fill the disk of a manager; return a client, a pilot, and the client's frame that the journal lacks."""
    client, pilot = welcomed(peers, "client", "pilot")
    client.define(CODE)
    client.hear(to_client.Ack, where=lambda ack: ack.sequence == 1)
    limit(manager.process.pid, folder.journal.stat().st_size + 30)
    frame = client.submit(0)
    until(lambda: "cannot be written" in folder.manager_log.read_text(), what="the log reports the full disk")
    return client, pilot, frame


def test_client_that_leaves_ends_its_session_on_a_full_disk(
    manager: Manager, peers: Peers, folder: SessionFolder
) -> None:
    client, pilot, _ = fill_up(manager, peers, folder)
    client.close()
    assert pilot.hear(to_pilot.Exit).reason == "its client is gone"
    assert manager.ended() == 0, "this exit code prevents a restart"
    holder = lease.read_lease(folder.lease)
    assert (holder.over, holder.unwritten) == ("its client is gone", "File too large")
    assert "the last records of the session's journal are not written" in folder.manager_log.read_text()


@pytest.mark.long
def test_observer_ends_a_session_on_a_full_disk(manager: Manager, peers: Peers, folder: SessionFolder) -> None:
    client, pilot, _ = fill_up(manager, peers, folder)
    observer = peers("client", observer=True)
    observer.hear(to_client.ClientWelcome)
    observer.send(say.EndSession("stoker down"), numbered=False)
    assert observer.hear(to_client.SessionOver).reason == "stoker down"
    pilot.hear(to_pilot.Exit)
    [end] = client.hear(to_client.Results).ends
    assert not end.ok
    assert manager.ended() == 0
    assert lease.why_journal_is_incomplete(folder.lease) == "File too large"


@pytest.fixture
def manager_with_full_buffer(folder: SessionFolder) -> Iterator[Manager]:
    """Yield a manager that reads no messages while its disk is full; a killed `stoker down` has left a request file."""
    folder.end_request.touch()
    with closing(
        Manager(folder, patch="from stoker.manager.live import server\nserver.PAUSE_READING_BYTES = 4000")
    ) as manager:
        yield manager


def test_down_command_ends_a_session_whose_manager_reads_nothing(
    manager_with_full_buffer: Manager, folder: SessionFolder, peers: Peers
) -> None:
    client, pilot, _ = fill_up(manager_with_full_buffer, peers, folder)
    client.submit(1, payload=bytes(5000))
    until(lambda: not answers(folder), what="the manager stops reading")
    time.sleep(1.0)
    assert not folder.end_reason()
    assert down.end_session(folder) is None
    assert pilot.hear(to_pilot.Exit).reason == "stoker down"
    assert manager_with_full_buffer.ended() == 0
    assert folder.end_reason() == "stoker down"
    assert not folder.end_request.exists()


def test_pilot_is_not_declared_lost_while_its_hello_is_unread(
    manager_with_full_buffer: Manager, folder: SessionFolder, peers: Peers
) -> None:
    client, pilot, _ = fill_up(manager_with_full_buffer, peers, folder)
    unread = peers("client", hello=False)
    client.submit(1, payload=bytes(5000))
    until(lambda: not answers(folder), what="the manager stops reading")
    pilot.close()
    broke = f"connection to pilot {pilot.name} broke"
    until(lambda: broke in folder.manager_log.read_text(), what="the manager notices the broken connection")
    time.sleep(PeerTimeLimits().pilot_back_s + 0.5)
    given_up = f"pilot {pilot.name} did not reconnect"
    assert given_up not in folder.manager_log.read_text()
    unread.close()
    until(
        lambda: given_up in folder.manager_log.read_text(), what="the pilot is given up, because no connection is left"
    )


def test_interrupted_down_leaves_no_end_request(folder: SessionFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[bool] = []

    def ctrl_c(_: float) -> None:
        there.append(folder.end_request.exists())
        raise KeyboardInterrupt

    monkeypatch.setattr("stoker.manager.cli.down.time.sleep", ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        down._end_by_file(folder)
    assert there == [True]
    assert not folder.end_request.exists()


def answers(folder: SessionFolder) -> bool:
    try:
        with ask.Observer(folder, timeout_s=0.5):
            return True
    except ask.NoAnswerError:
        return False


def test_programs_are_notified_of_a_full_disk(manager: Manager, peers: Peers, folder: SessionFolder) -> None:
    client, _, _ = fill_up(manager, peers, folder)
    text = client.hear(to_client.Status).trouble[JOURNAL]
    assert f"{folder.journal} has reached this user's limit of file sizes (ulimit -f)" in text
    assert f"prlimit --pid {manager.process.pid} --fsize=unlimited" in text
    late = peers("client")
    assert late.hear(to_client.Status).trouble == {JOURNAL: text}, "a new client is informed as well"
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
def test_disk_trouble_is_reported_with_advice(tmp_path: Path, code: int, said: str) -> None:
    book = journal.Journal(tmp_path / "journal")
    book._handle_write_error(OSError(code, os.strerror(code)))
    assert explain_journal_trouble(book, tmp_path).endswith(f"({os.strerror(code)}): {said.format(folder=tmp_path)}")
    book.close()


@pytest.mark.parametrize("sync", [False, True])
def test_records_that_failed_to_write_are_later_written_once(tmp_path: Path, sync: bool) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for more in range(1, 50, 7):
        path = tmp_path / f"journal-{more}"
        book = journal.Journal(path, sync=sync)
        book.add_event(0.0, TimerFired("first"))
        assert book.flush_until_safe()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (os.stat(path).st_size + more, hard))
            for number in range(3):
                book.add_event(1.0 + number, TimerFired(f"key {number} " + "x" * 30))
                book.flush()
            assert book.trouble
            assert book.safe < book.position
            assert [event for _, event in journal_files.read(path)] == [TimerFired("first")]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert book.flush_until_safe()
        assert not book.trouble
        book.close()
        assert [now for now, _ in journal_files.read(path)] == [0.0, 1.0, 2.0, 3.0]


# ---- synced writes


SYNCING = """
import os, time
from pathlib import Path

go, log, really = Path({go!r}), Path({log!r}), os.fdatasync

def fdatasync(fd):
    while not go.exists():
        time.sleep(0.01)
    really(fd)
    with log.open("a") as file:
        file.write("once\\n")

os.fdatasync = fdatasync
"""


class Disk:
    """A disk whose syncs wait for the file `go`."""

    def __init__(self, path: Path) -> None:
        self.go, self.log = path / "go", path / "synced"
        self.log.touch()
        self.patch = SYNCING.format(go=str(self.go), log=str(self.log))

    @property
    def syncs(self) -> int:
        return len(self.log.read_text().splitlines())


@pytest.fixture
def start(folder: SessionFolder, tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    with ExitStack() as made:

        def started(*options: str) -> Disk:
            disk = Disk(tmp_path)
            made.callback(Manager(folder, *options, patch=disk.patch).close)
            return disk

        yield started


def test_messages_of_many_turns_wait_for_one_disk_sync(start: Callable[..., Disk], peers: Peers) -> None:
    disk = start("--detached")
    client = peers("client")
    assert client.silent(0.5), "its hello is not on the disk yet"
    for _ in range(200):
        client.send(say.Received(0))
        assert client.silent(0.001)
    disk.go.touch()
    client.hear(to_client.ClientWelcome)
    client.hear(to_client.Ack, where=lambda ack: ack.sequence == 200)
    assert disk.syncs <= 10, "iterations during a sync share the next sync"


def test_calls_are_sent_before_the_sync_and_results_after_it(start: Callable[..., Disk], peers: Peers) -> None:
    disk = start("--detached")
    disk.go.touch()
    client, pilot = welcomed(peers, "client", "pilot")
    client.define()
    client.submit(0)
    library = pilot.serve()
    pilot.hear(to_pilot.RunCalls)
    pilot.end(0, library=library)
    client.hear(to_client.Results)
    client.hear(to_client.Ack, where=lambda ack: ack.sequence == client.sequence)
    pilot.hear(to_pilot.Ack, where=lambda ack: ack.sequence == pilot.sequence)

    disk.go.unlink()
    client.submit(1)
    assert [spec.call for spec in pilot.hear(to_pilot.RunCalls).calls] == [1]
    pilot.end(1, library=library)
    assert client.silent(0.5)
    assert pilot.silent(5.0), "not even an acknowledgement that waits for no other message"
    disk.go.touch()
    assert client.hear(to_client.Results).ends[0].call == 1


@pytest.mark.parametrize(
    ("options", "syncs"), [((), False), (("--sync", "yes"), True), (("--sync", "no", "--detached"), False)]
)
def test_sync_option_sets_whether_the_journal_syncs(
    start: Callable[..., Disk], peers: Peers, options: tuple[str, ...], syncs: bool
) -> None:
    disk = start(*options)
    disk.go.touch()
    [client] = welcomed(peers, "client")
    client.send(say.Received(0))
    client.hear(to_client.Ack)
    assert bool(disk.syncs) is syncs


@pytest.mark.parametrize(
    ("said", "options"), [("", []), ("sync = true", ["--sync", "yes"]), ("sync = false", ["--sync", "no"])]
)
def test_site_file_sets_the_sync_mode(tmp_path: Path, said: str, options: list[str]) -> None:
    file = tmp_path / "site.toml"
    file.write_text(f'name = "here"\n[provider]\nkind = "local"\n[session]\n{said}\n')
    given = manager_command_options(load_sites(file))
    at = given.index("--sync") if "--sync" in given else len(given)
    assert given[at : at + 2] == options


def test_records_of_a_failed_sync_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, really, fails = tmp_path / "journal", os.fdatasync, [False]

    def fdatasync(fd: int) -> None:
        if fails[0]:
            fails[0] = False
            raise OSError(5, "Input/output error")
        really(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    book = journal.Journal(path, sync=True)
    book.add_event(0.0, TimerFired("first"))
    assert book.flush_until_safe()
    fails[0] = True
    book.add_event(1.0, TimerFired("second"))
    book.flush()
    until(lambda: book.flush() or book.trouble, what="the failure is seen")
    assert book.trouble == "Input/output error"
    assert book.safe < book.position
    assert [event for _, event in journal_files.read(path)] == [TimerFired("first")], (
        "the kernel may have dropped the rest"
    )
    assert book.flush_until_safe()
    book.close()
    assert [event for _, event in journal_files.read(path)] == [TimerFired("first"), TimerFired("second")]


def test_finished_sync_wakes_the_loop_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really, reached, go = os.eventfd_write, threading.Event(), threading.Event()

    def late(fd: int, value: int) -> None:
        reached.set()
        go.wait()
        really(fd, value)

    monkeypatch.setattr(os, "eventfd_write", late)
    sync = journal.SyncThread()

    def is_woken(timeout_s: float) -> bool:
        return bool(select.select([sync.wake_fd], [], [], timeout_s)[0])

    with (tmp_path / "file").open("wb") as file:
        for position in (10, 20):
            reached.clear()
            go.clear()
            sync.start_sync(file.fileno(), position=position, turns=1)
            assert reached.wait(PATIENCE_S)
            early = sync.take_result()
            go.set()
            assert is_woken(PATIENCE_S)
            found = [early, sync.take_result()]
            assert [each for each in found if each and each.turns] == [journal.SyncResult(position, 1)]
            assert not is_woken(0)
            assert sync.take_result() == journal.SyncResult(0, 0)
    sync.close()
