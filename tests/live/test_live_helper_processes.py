from __future__ import annotations

import fcntl
import logging
import os
import queue
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
from live.peers import Manager, Peers, until, welcomed
from polling import PATIENCE_S

from stoker.config import write_sites
from stoker.errors import SessionError
from stoker.manager.executor.processes import ManagerProcess
from stoker.manager.live import keeper
from stoker.manager.live.helper_processes import FACTORY, PAUSE_S, SILENCE_REPORT_S, HelperSupervisor
from stoker.manager.live.keeper import MOST_DEATHS, RestartLimiter, RestartProgress
from stoker.protocol import to_client
from stoker.protocol import to_manager as say
from stoker.protocol.session import SessionFolder
from stoker.site import Provider, ProviderKind, Site

# ---- helper processes


LIMIT_S = 100.0


@pytest.fixture
def site(folder: SessionFolder) -> Site:
    site = Site(name="lab", provider=Provider(kind=ProviderKind.SLURM))
    write_sites(folder.sites, [site])
    return site


def factories(folder: SessionFolder) -> list[psutil.Process]:
    wanted, there = {FACTORY, str(folder.path)}, psutil.process_iter(["cmdline", "status"])
    alive = [process for process in there if process.info["status"] != psutil.STATUS_ZOMBIE]
    return [process for process in alive if wanted <= set(process.info["cmdline"] or ())]


@pytest.fixture
def _nobody_stays(folder: SessionFolder) -> Iterator[None]:
    yield
    for process in factories(folder):
        with suppress(psutil.NoSuchProcess):  # the process has ended since the search
            process.kill()


class HelperHarness:
    """The supervisor of a factory process with a test clock."""

    def __init__(self, folder: SessionFolder) -> None:
        self.has_sent_hello = False
        self.now = 1000.0
        self.attendant = HelperSupervisor(
            folder, FACTORY, has_sent_hello=lambda: self.has_sent_hello, hello_limit_s=LIMIT_S
        )
        self.look()

    @property
    def pid(self) -> int:
        process = self.attendant._process
        return process.pid

    def look(self, after_s: float = 0.0) -> str:
        self.now += after_s
        self.attendant.restart_or_kill_process(self.now)
        return self.attendant.describe_trouble(self.now)


@pytest.mark.usefixtures("site", "_nobody_stays")
def test_silent_factory_is_reported_killed_and_replaced(
    folder: SessionFolder, caplog: pytest.LogCaptureFixture
) -> None:
    turned = HelperHarness(folder)
    pid = turned.pid
    os.kill(pid, signal.SIGSTOP)
    assert turned.look(SILENCE_REPORT_S - 1) == ""
    assert f"the factory (pid {pid}) runs but has not connected; its log says" in turned.look(2)
    turned.look(LIMIT_S - SILENCE_REPORT_S - 2)
    until(lambda: [each.pid for each in factories(folder)] == [pid], what="/proc shows its command line")
    assert f"pid {pid}" in turned.look(2)  # the manager kills the factory and has not started another factory
    assert f"the factory (pid {pid}) runs but has not connected" in caplog.text
    assert "it is killed" in caplog.text
    until(lambda: pid not in [each.pid for each in factories(folder)], what="the factory's end")
    turned.look(3)
    other = turned.pid
    assert other != pid
    os.kill(other, signal.SIGSTOP)  # stop this factory, which would find no manager and exit
    assert f"pid {other}" in turned.look(1)  # the report is immediate, because no factory has said hello
    turned.has_sent_hello = True
    assert turned.look(10 * LIMIT_S) == ""
    assert turned.pid == other


@pytest.mark.usefixtures("_nobody_stays")
def test_factory_that_cannot_start_is_reported_with_its_last_line(folder: SessionFolder) -> None:
    folder.sites.mkdir(exist_ok=True)
    (folder.sites / "lab.toml").write_text('[provider]\n"one GPU node" = "x"\n')
    turned = HelperHarness(folder)
    pid = turned.pid
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, what="the factory's end", seconds=30)
    assert turned.look(1) == ""
    turned.now += SILENCE_REPORT_S
    words = turned.attendant.describe_trouble(turned.now)
    assert f"(pid {pid}) has ended (1) and will be started again; its log says: " in words
    assert "line 2: [provider] one GPU node is not a setting" in words


IMPATIENT = "from stoker.manager.live import helper_processes\nhelper_processes.SILENCE_REPORT_S = 1.0"


@pytest.fixture
def impatient(folder: SessionFolder, site: Site) -> Iterator[Manager]:
    """Yield a manager that soon reports a silent factory, and whose factory cannot get the session lock."""
    with (folder.path / "factory.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with closing(Manager(folder, "--detached", patch=IMPATIENT)) as manager:
            yield manager


@pytest.mark.usefixtures("_nobody_stays", "impatient")
def test_status_and_stories_show_why_no_block_is_submitted(peers: Peers) -> None:
    [client] = welcomed(peers, "client")

    def trouble() -> str:
        return str(client.status().trouble.get("factory", ""))

    until(lambda: "another factory" in trouble(), what="the trouble in the status", seconds=30)
    assert trouble().startswith("blocks are not submitted: the factory (pid ")
    client.send(say.AskStory("b1"), numbered=False)
    story = client.hear(to_client.Story)
    assert "asked" in story.headline
    assert story.lines[-1].text == trouble()
    factory = peers("client", observer=True, factory=True)
    assert [block.block for block in factory.hear(to_client.KnownBlocks).blocks] == ["b1"]
    until(lambda: trouble() == "", what="the end of the trouble")


@pytest.mark.usefixtures("site", "_nobody_stays")
def test_report_leaves_out_log_lines_of_an_earlier_factory(folder: SessionFolder) -> None:
    (folder.path / "factory.log").write_text("2026-01-01 00:00:00,000 INFO somebody else's word\n")
    turned = HelperHarness(folder)
    os.kill(turned.pid, signal.SIGSTOP)
    words = turned.look(SILENCE_REPORT_S + 1)
    assert "runs but has not connected" in words
    assert "somebody else's word" not in words


# ---- restarts


def lives(restarts: RestartLimiter, file: Path, *, does: bool) -> float | None:
    restarts.mark_start()
    progress = RestartProgress(file, done=7)
    progress.mark_first_completed_call(7)
    if does:
        progress.mark_first_completed_call(8)
        os.utime(file, ns=(0, restarts._before + 1))  # set a later time: file systems may have coarse times
    return restarts.record_death()


def test_helper_without_progress_is_abandoned_after_growing_pauses(tmp_path: Path) -> None:
    restarts = RestartLimiter(tmp_path / "progress", clock=lambda: 100.0)
    pauses = [lives(restarts, tmp_path / "progress", does=False) for _ in range(MOST_DEATHS)]
    assert pauses == [0.0, 1.0, 2.0, 4.0, None]


def test_manager_with_progress_is_always_restarted(tmp_path: Path) -> None:
    restarts = RestartLimiter(tmp_path / "progress", clock=lambda: 100.0)
    assert [lives(restarts, tmp_path / "progress", does=True) for _ in range(50)] == [0.0] * 50


def test_helper_that_dies_rarely_is_always_restarted(tmp_path: Path) -> None:
    now = 100.0
    restarts = RestartLimiter(tmp_path / "progress", clock=lambda: now)
    for _ in range(20):
        assert lives(restarts, tmp_path / "progress", does=False) is not None
        now += 20.0


def test_unwritable_progress_file_is_ignored(tmp_path: Path) -> None:
    RestartProgress(tmp_path / "no folder" / "progress", done=0).mark_first_completed_call(1)


@pytest.mark.parametrize("says_hello", [True, False])
def test_factory_that_connected_before_it_died_restarts_at_once(folder: SessionFolder, says_hello: bool) -> None:
    attendant = HelperSupervisor(folder, "this", has_sent_hello=lambda: says_hello, hello_limit_s=100.0)
    now, pids = 1000.0, set()
    for _ in range(4):
        attendant.restart_or_kill_process(now)
        process = attendant._process
        process.wait(PATIENCE_S)
        pids.add(process.pid)
        now += PAUSE_S + 0.01
    assert len(pids) == (4 if says_hello else 3)


SLEEPS = (sys.executable, "-S", "-c", "import time; time.sleep(600)")


@pytest.fixture
def lost() -> queue.SimpleQueue[SessionError]:
    return queue.SimpleQueue()


@pytest.fixture
def sleeper(folder: SessionFolder, lost: queue.SimpleQueue[SessionError]) -> Iterator[ManagerProcess]:
    folder.file.touch()
    manager = ManagerProcess(folder, on_lost=lost.put, command=SLEEPS)
    yield manager
    manager.end_process(grace_s=0)


def forbid_start(folder: SessionFolder) -> None:
    folder.manager_log.unlink()
    folder.manager_log.mkdir()


def test_manager_start_is_retried(
    folder: SessionFolder, sleeper: ManagerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    first = sleeper.pid
    forbid_start(folder)
    os.kill(first, signal.SIGKILL)
    first_said, then_said = until(lambda: len(caplog.messages) >= 2 and caplog.messages[:2], what="two log lines")
    assert "was killed by signal 9; it is started again with" in first_said
    assert "the manager could not be started" in then_said
    assert "it is started again in 1 s" in then_said
    folder.manager_log.rmdir()
    until(lambda: sleeper.pid != first and sleeper.is_running())


def test_manager_that_never_starts_is_given_up(
    folder: SessionFolder,
    sleeper: ManagerProcess,
    lost: queue.SimpleQueue[SessionError],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper, "PAUSE_S", 0.01)
    forbid_start(folder)
    os.kill(sleeper.pid, signal.SIGKILL)
    assert "the manager could not be started ([Errno 21]" in str(lost.get(timeout=PATIENCE_S))


@pytest.fixture
def _sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_sigterm")
@pytest.mark.parametrize("comes", [True, False])
def test_keeper_retries_a_failed_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, comes: bool
) -> None:
    monkeypatch.setattr(keeper, "PAUSE_S", 0.01)
    program = tmp_path / "manager"

    class Mends(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if comes:
                program.symlink_to("/bin/true")

    log, mends = logging.getLogger("stoker.manager"), Mends()
    log.addHandler(mends)
    try:
        assert keeper.run_with_restarts([str(program)], progress=tmp_path / "progress") == (0 if comes else 1)
    finally:
        log.removeHandler(mends)
    assert caplog.text.count("the manager could not be started") == (1 if comes else MOST_DEATHS)
