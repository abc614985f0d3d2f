"""The manager and its factory: one that dies, one that lives without a word, and what people are told meanwhile."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import psutil
import pytest
from live.peers import Peer, until

from stoker.config import write_sites
from stoker.manager.live.attendants import FACTORY, TOLD_S, Attendant
from stoker.protocol import to_client, wire
from stoker.protocol import to_manager as say
from stoker.protocol.session import SessionFolder
from stoker.site import Provider, ProviderKind, Site

Peers = Callable[..., Peer]
LIMIT_S = 100.0


@pytest.fixture
def site(folder: SessionFolder) -> Site:
    site = Site(name="lab", provider=Provider(kind=ProviderKind.SLURM))
    write_sites(folder.sites, [site])
    return site


def factories(folder: SessionFolder) -> list[psutil.Process]:
    """Living factories of a session, of whatever parent."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if FACTORY in words and str(folder.path) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


@pytest.fixture
def _nobody_stays(folder: SessionFolder) -> Iterator[None]:
    yield
    for process in factories(folder):
        with suppress(psutil.NoSuchProcess):  # it has ended since it was looked for
            process.kill()


class Turned:
    """A factory's attendant, and the clock that it is told."""

    def __init__(self, folder: SessionFolder) -> None:
        self.is_heard = False
        self.now = 1000.0
        self.attendant = Attendant(folder, FACTORY, is_heard=lambda: self.is_heard, hello_limit_s=LIMIT_S)
        self.look()

    @property
    def pid(self) -> int:
        """The factory's process id. One that cannot begin has ended before all processes are looked through."""
        process = self.attendant._process
        assert process is not None
        return process.pid

    def look(self, after_s: float = 0.0) -> str:
        """Turn the clock and look; what is told then."""
        self.now += after_s
        self.attendant.keep_up(self.now)
        return self.attendant.trouble(self.now)


@pytest.mark.usefixtures("site", "_nobody_stays")
def test_a_factory_that_lives_without_a_word_is_told_of_killed_and_followed(
    folder: SessionFolder, caplog: pytest.LogCaptureFixture
) -> None:
    turned = Turned(folder)
    pid = turned.pid
    os.kill(pid, signal.SIGSTOP)
    assert turned.look(TOLD_S - 1) == ""
    assert f"the factory (pid {pid}) lives and has not said hello; its log says" in turned.look(2)
    turned.look(LIMIT_S - TOLD_S - 2)
    until(lambda: [each.pid for each in factories(folder)] == [pid], what="/proc shows its command line")
    assert f"pid {pid}" in turned.look(2)  # it is killed, and still all that there is
    assert f"the factory (pid {pid}) lives and has not said hello" in caplog.text
    assert "it is killed" in caplog.text
    until(lambda: pid not in [each.pid for each in factories(folder)], what="its end")
    turned.look(3)
    other = turned.pid
    assert other != pid
    os.kill(other, signal.SIGSTOP)  # it would find no manager, and end
    assert f"pid {other}" in turned.look(1)  # nobody has said hello since the first was started
    turned.is_heard = True
    assert turned.look(10 * LIMIT_S) == ""
    assert turned.pid == other


@pytest.mark.usefixtures("site", "_nobody_stays")
def test_what_is_told_is_what_the_factory_waits_for(folder: SessionFolder) -> None:
    with (folder.path / "factory.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        turned = Turned(folder)
        pid = turned.pid
        log = folder.path / "factory.log"
        until(lambda: "another factory" in log.read_text(), what="its word", seconds=30)
        words = turned.look(TOLD_S + 1)
        assert f"(pid {pid}) lives and has not said hello; its log says: another factory of the session is" in words
        assert f"there, pid {os.getpid()} (" in words
        assert words.endswith("waiting for it to leave, for 1 min at most")


@pytest.mark.usefixtures("_nobody_stays")
def test_a_factory_that_cannot_begin_is_told_with_its_last_word(folder: SessionFolder) -> None:
    folder.sites.mkdir(exist_ok=True)
    (folder.sites / "lab.toml").write_text('[provider]\n"one GPU node" = "x"\n')
    turned = Turned(folder)
    pid = turned.pid
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, what="its end", seconds=30)
    assert turned.look(1) == ""
    turned.now += TOLD_S
    words = turned.attendant.trouble(turned.now)
    assert f"(pid {pid}) has ended (1) and will be started again; its log says: " in words
    assert "line 2: [provider] one GPU node is not a setting" in words


IMPATIENT = """
import sys
from stoker.manager.live import attendants
attendants.TOLD_S = 1.0
from stoker.manager.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def impatient(folder: SessionFolder, site: Site) -> Iterator[subprocess.Popen[bytes]]:
    """A manager that tells of a silent factory soon, and whose factory does not get the session's lock."""
    with (folder.path / "factory.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "-c", IMPATIENT, "--session", str(folder.path), "--name", "test", "--detached"]
        process = subprocess.Popen(command)
        until(folder.file.exists, seconds=30, what="manager listening")
        yield process
        process.kill()
        process.wait(5)


@pytest.mark.usefixtures("_nobody_stays", "impatient")
def test_status_and_stories_tell_why_no_block_is_submitted(peers: Peers) -> None:
    client = peers("client")
    client.hear(to_client.ClientWelcome)

    def trouble() -> str:
        client.send(say.AskStatus(), numbered=False)
        return str(client.hear(to_client.Status).trouble.get("factory", ""))

    until(lambda: "another factory" in trouble(), what="the trouble in the status", seconds=30)
    assert trouble().startswith("blocks are not submitted: the factory (pid ")
    client.send(say.AskStory("b1"), numbered=False)
    story = client.hear(to_client.Story)
    assert "asked" in story.headline
    assert story.lines[-1].text == trouble()
    factory = peers("client", hello=False)
    factory.send(say.ClientHello(wire.VERSION, "test", observer=True, factory=True), numbered=False)
    assert [block.block for block in factory.hear(to_client.KnownBlocks).blocks] == ["b1"]
    until(lambda: trouble() == "", what="the end of the trouble")


@pytest.mark.usefixtures("site", "_nobody_stays")
def test_a_log_of_another_time_is_not_told(folder: SessionFolder) -> None:
    """What an earlier factory wrote is not why this one is silent."""
    (folder.path / "factory.log").write_text("2026-01-01 00:00:00,000 INFO somebody else's word\n")
    turned = Turned(folder)
    os.kill(turned.pid, signal.SIGSTOP)
    words = turned.look(TOLD_S + 1)
    assert "lives and has not said hello" in words
    assert "somebody else's word" not in words
