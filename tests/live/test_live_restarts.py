"""How often a manager that dies is started again."""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live.peers import until
from polling import PATIENCE_S

from stoker.errors import SessionError
from stoker.manager.executor.processes import ManagerProcess
from stoker.manager.live import keeper
from stoker.manager.live.attendants import PAUSE_S, Attendant
from stoker.manager.live.keeper import MOST_DEATHS, RestartProgress, Restarts
from stoker.protocol.session import SessionFolder


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lives(restarts: Restarts, file: Path, *, does: bool) -> float | None:
    """A manager starts, perhaps does something, and dies."""
    restarts.started()
    progress = RestartProgress(file, done=7)
    progress.report_first_end(7)
    if does:
        progress.report_first_end(8)
        os.utime(file, ns=(0, restarts._before + 1))  # file systems may be coarse
    return restarts.died()


def test_one_that_does_nothing_is_left_alone_after_growing_pauses(tmp_path: Path) -> None:
    restarts = Restarts(tmp_path / "progress", clock=Clock())
    pauses = [lives(restarts, tmp_path / "progress", does=False) for _ in range(MOST_DEATHS)]
    assert pauses == [0.0, 1.0, 2.0, 4.0, None]


def test_one_that_does_something_between_its_deaths_is_started_as_often_as_it_dies(tmp_path: Path) -> None:
    restarts = Restarts(tmp_path / "progress", clock=Clock())
    assert [lives(restarts, tmp_path / "progress", does=True) for _ in range(50)] == [0.0] * 50


def test_deaths_that_are_long_ago_do_not_count(tmp_path: Path) -> None:
    clock = Clock()
    restarts = Restarts(tmp_path / "progress", clock=clock)
    for _ in range(20):
        assert lives(restarts, tmp_path / "progress", does=False) is not None
        clock.now += 20.0


def test_progress_is_said_once_in_a_life(tmp_path: Path) -> None:
    file = tmp_path / "progress"
    progress = RestartProgress(file, done=3)
    progress.report_first_end(3)
    assert not file.exists()
    progress.report_first_end(4)
    file.unlink()
    progress.report_first_end(5)
    assert not file.exists()


def test_a_disk_without_room_for_the_word_harms_nothing(tmp_path: Path) -> None:
    RestartProgress(tmp_path / "no folder" / "progress", done=0).report_first_end(1)


@pytest.mark.parametrize("says_hello", [True, False])
def test_a_factory_that_says_hello_before_it_dies_is_followed_as_soon_as_the_first_time(
    folder: SessionFolder, says_hello: bool
) -> None:
    attendant = Attendant(folder, "this", is_heard=lambda: says_hello, hello_limit_s=100.0)
    now, pids = 1000.0, set()
    for _ in range(4):
        attendant.keep_up(now)
        process = attendant._process
        assert process is not None
        process.wait(PATIENCE_S)
        pids.add(process.pid)
        now += PAUSE_S + 0.01
    assert len(pids) == (4 if says_hello else 3)


SLEEPS = (sys.executable, "-S", "-c", "import time; time.sleep(600)")


@pytest.fixture
def lost() -> queue.SimpleQueue[SessionError]:
    """Why the manager cannot be kept running."""
    return queue.SimpleQueue()


@pytest.fixture
def sleeper(folder: SessionFolder, lost: queue.SimpleQueue[SessionError]) -> Iterator[ManagerProcess]:
    """The process of a manager that has listened, which only sleeps."""
    folder.file.touch()
    manager = ManagerProcess(folder, on_lost=lost.put, command=SLEEPS)
    yield manager
    manager.end(grace_s=0)


class Heard(logging.Handler):
    """Puts what is logged into a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.said: queue.SimpleQueue[str] = queue.SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        self.said.put(record.getMessage())


@pytest.fixture
def heard() -> Iterator[Heard]:
    heard, log = Heard(), logging.getLogger("stoker")
    log.addHandler(heard)
    yield heard
    log.removeHandler(heard)


def forbid_start(folder: SessionFolder) -> None:
    """Let no manager start: its log cannot be opened."""
    folder.manager_log.unlink()
    folder.manager_log.mkdir()


def test_a_manager_that_cannot_be_started_for_a_while_is_tried_again(
    folder: SessionFolder, sleeper: ManagerProcess, heard: Heard
) -> None:
    """The thread that watches it died of the error, and the session had no manager any more."""
    first = sleeper.pid
    forbid_start(folder)
    os.kill(first, signal.SIGKILL)
    assert "was killed by signal 9; it is started again with" in heard.said.get(timeout=PATIENCE_S)
    said = heard.said.get(timeout=PATIENCE_S)
    assert "the manager could not be started" in said
    assert "it is started again in 1 s" in said
    folder.manager_log.rmdir()
    until(lambda: sleeper.pid != first and sleeper.is_running())


def test_a_manager_that_cannot_be_started_again_and_again_is_given_up(
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
def test_a_keeper_tries_again_when_a_manager_cannot_be_started(
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
        assert keeper.keep([str(program)], progress=tmp_path / "progress") == (0 if comes else 1)
    finally:
        log.removeHandler(mends)
    assert caplog.text.count("the manager could not be started") == (1 if comes else MOST_DEATHS)
