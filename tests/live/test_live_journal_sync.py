"""A journal that is synced: nothing is said that its disk does not have, and one sync serves many turns."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live.peers import Peer, until
from polling import PATIENCE_S

from stoker.config import load_sites
from stoker.contexts.recipe import BARE
from stoker.manager.core.events import TimerFired
from stoker.manager.executor.processes import manager_options
from stoker.manager.live import journal
from stoker.protocol import to_client, to_pilot
from stoker.protocol import to_manager as say
from stoker.protocol.calls import CallEnd, CallSpec
from stoker.protocol.session import SessionFolder

Peers = Callable[..., Peer]


class Disk:
    """A manager's disk."""

    def __init__(self, path: Path) -> None:
        self.go, self.log = path / "go", path / "synced"
        self.log.touch()

    @property
    def syncs(self) -> int:
        return len(self.log.read_text().splitlines())


@pytest.fixture
def start(folder: SessionFolder, tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    made: list[subprocess.Popen[bytes]] = []

    def started(*options: str) -> Disk:
        disk = Disk(tmp_path)
        here = Path(__file__).with_name("syncing_manager.py")
        command = [sys.executable, str(here), str(disk.go), str(disk.log), "--session", str(folder.path), "--name",
                   "test", "--heartbeat", "20", *options]  # fmt: skip
        made.append(subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(here.parents[1])}))
        until(folder.file.exists, what="manager listening")
        return disk

    yield started
    for process in made:
        process.kill()
        process.wait(5)


def test_nothing_is_said_before_it_is_synced_and_one_sync_serves_many_turns(
    start: Callable[..., Disk], peers: Peers
) -> None:
    disk = start("--detached")
    client = peers("client")
    assert client.silent(0.5), "its hello is on no disk yet"
    for _ in range(200):
        client.send(say.Received(0))
        assert client.silent(0.001)
    disk.go.touch()
    client.hear(to_client.ClientWelcome)
    client.hear(to_client.Ack, where=lambda ack: ack.sequence == 200)
    assert disk.syncs <= 10, "turns that came while a sync was under way share the next one"


def test_calls_go_to_pilots_before_the_sync_and_their_ends_to_nobody(start: Callable[..., Disk], peers: Peers) -> None:
    disk = start("--detached")
    disk.go.touch()
    client, pilot = peers("client"), peers("pilot")
    client.hear(to_client.ClientWelcome)
    client.send(say.DefineRecipe(BARE), say.DefineFunction("f", "f", b"code"))  # type: ignore[arg-type]
    client.send(say.Submit("f", "bare", [CallSpec(0, b"arguments")]))  # type: ignore[arg-type]
    library = pilot.hear(to_pilot.StartLibrary).library
    pilot.send(say.LibraryReady(library, 0.1, 0.2))
    pilot.hear(to_pilot.RunCalls)
    pilot.send(say.CallsEnded(library, [CallEnd(0, True, b"result", 0.01)]))  # type: ignore[arg-type]
    client.hear(to_client.Results)
    client.hear(to_client.Ack, where=lambda ack: ack.sequence == client.sequence)
    pilot.hear(to_pilot.Ack, where=lambda ack: ack.sequence == pilot.sequence)

    disk.go.unlink()
    client.send(say.Submit("f", "bare", [CallSpec(1, b"arguments")]))  # type: ignore[arg-type]
    assert [spec.call for spec in pilot.hear(to_pilot.RunCalls).calls] == [1]
    pilot.send(say.CallsEnded(library, [CallEnd(1, True, b"result", 0.01)]))  # type: ignore[arg-type]
    assert client.silent(0.5)
    assert pilot.silent(5.0), "not even an acknowledgement that waits for no other message"
    disk.go.touch()
    assert client.hear(to_client.Results).ends[0].call == 1


@pytest.mark.parametrize(
    ("options", "syncs"), [((), False), (("--sync", "yes"), True), (("--sync", "no", "--detached"), False)]
)
def test_who_syncs(start: Callable[..., Disk], peers: Peers, options: tuple[str, ...], syncs: bool) -> None:
    disk = start(*options)
    disk.go.touch()
    client = peers("client")
    client.hear(to_client.ClientWelcome)
    client.send(say.Received(0))
    client.hear(to_client.Ack)
    assert bool(disk.syncs) is syncs


@pytest.mark.parametrize(
    ("said", "options"), [("", []), ("sync = true", ["--sync", "yes"]), ("sync = false", ["--sync", "no"])]
)
def test_a_site_file_says_so(tmp_path: Path, said: str, options: list[str]) -> None:
    file = tmp_path / "site.toml"
    file.write_text(f'name = "here"\n[provider]\nkind = "local"\n[session]\n{said}\n')
    given = manager_options(load_sites(file))
    at = given.index("--sync") if "--sync" in given else len(given)
    assert given[at : at + 2] == options


def test_what_a_failed_sync_may_have_lost_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, really, fails = tmp_path / "journal", os.fdatasync, [False]

    def fdatasync(fd: int) -> None:
        if fails[0]:
            fails[0] = False
            raise OSError(5, "Input/output error")
        really(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    book = journal.Journal(path, sync=True)
    book.write(0.0, TimerFired("first"))
    assert book.settle()
    fails[0] = True
    book.write(1.0, TimerFired("second"))
    book.flush()
    until(lambda: book.flush() or book.trouble, what="the failure is seen")
    assert book.trouble == "Input/output error"
    assert book.safe < book.position
    assert [event for _, event in journal.read(path)] == [TimerFired("first")], "the kernel may have dropped the rest"
    assert book.settle()
    book.close()
    assert [event for _, event in journal.read(path)] == [TimerFired("first"), TimerFired("second")]


def test_a_sync_that_is_over_wakes_the_loop_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that looked between the thread's result and its wake-up took the result, and the descriptor stayed
    readable: the manager span until the next sync."""
    really, reached, go = os.eventfd_write, threading.Event(), threading.Event()

    def late(fd: int, value: int) -> None:
        reached.set()
        go.wait()
        really(fd, value)

    monkeypatch.setattr(os, "eventfd_write", late)
    sync = journal.Syncing()

    def is_woken(timeout_s: float) -> bool:
        return bool(select.select([sync.wake_fd], [], [], timeout_s)[0])

    with (tmp_path / "file").open("wb") as file:
        for position in (10, 20):
            reached.clear()
            go.clear()
            sync.begin(file.fileno(), position=position, turns=1)
            assert reached.wait(PATIENCE_S)
            early = sync.done()
            go.set()
            assert is_woken(PATIENCE_S)
            found = [early, sync.done()]
            assert [each for each in found if each and each.turns] == [journal.Synced(position, 1)]
            assert not is_woken(0)
            assert sync.done() == journal.Synced(position, 0)
    sync.close()
