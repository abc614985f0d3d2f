from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from factory.fake_slurm import FakeSlurm
from factory.manager_end import ManagerEnd
from live.peers import until

from stoker.config import write_sites
from stoker.manager.factory import factory as factory_factory
from stoker.manager.factory import main
from stoker.manager.factory.factory import BatchJobFactory, FactoryEnd
from stoker.protocol import to_client
from stoker.protocol.blocks import BlockPhase, KnownBlock
from stoker.protocol.ids import BlockId
from stoker.protocol.session import SessionFolder
from stoker.site import Duration, Environment, EnvironmentKind, Provider, ProviderKind, Session, Site

ASKED = (KnownBlock(BlockId("b0"), "lab", BlockPhase.ASKED),)


def site(kind: ProviderKind = ProviderKind.SLURM, *, packed: bool = False, **provider: object) -> Site:
    quick = {"command_limit_s": Duration(4), "poll_s": Duration(0.2), "listing_lag_s": Duration(1), **provider}
    return Site(
        name="lab",
        provider=Provider(kind=kind, **quick),  # type: ignore[arg-type]
        session=Session(heartbeat_s=Duration(0.5), lease_s=Duration(30)),
        environment=Environment(kind=EnvironmentKind.PACKED if packed else EnvironmentKind.SHARED),
    )


@pytest.fixture(autouse=True)
def _sites(folder: SessionFolder, slurm: FakeSlurm) -> None:
    write_sites(folder.sites, [site()])


def said(folder: SessionFolder, *parts: str) -> None:
    log = folder.path / "factory.log"
    until(
        lambda: log.exists() and any(all(map(line.__contains__, parts)) for line in log.read_text().splitlines()),
        what=f"a line with {parts}",
        seconds=60,
    )


def gone_parent() -> str:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(30)
    return str(process.pid)


def test_factory_reports_its_activity_from_its_start(manager: ManagerEnd, folder: SessionFolder) -> None:
    factory = manager.start_factory()
    said(folder, "the factory starts", f"pid {factory.pid}", f"started by pid {os.getpid()}")
    assert manager.sockets is not None
    said(folder, "sending a hello", manager.sockets.address)
    said(folder, "reports 0 blocks")


def test_waiting_factory_logs_the_running_factory_and_exits(manager: ManagerEnd, folder: SessionFolder) -> None:
    first = manager.start_factory()
    second = manager.start_factory("--parent", gone_parent(), wait=False)
    assert manager.ended(second) == FactoryEnd.OVER
    said(folder, "another factory", f"pid {first.pid} (", "for 1 min at most")
    said(folder, "is gone: this factory exits")
    assert first.poll() is None
    assert len(manager.hellos) == 1


def test_stopped_factory_is_killed_by_the_next_factory(manager: ManagerEnd, folder: SessionFolder) -> None:
    first = manager.start_factory()
    os.kill(first.pid, signal.SIGSTOP)
    manager.start_factory("--turn-limit-s", "1")
    assert first.wait(10) == -signal.SIGKILL
    said(folder, f"pid {first.pid}", "it is killed")
    said(folder, "the other factory is gone")


def test_lock_held_by_another_process_ends_the_factory_with_a_note(manager: ManagerEnd, folder: SessionFolder) -> None:
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    words = [sys.executable, "-c", code, str(folder.path / "factory.lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        factory = manager.start_factory("--turn-limit-s", "0.5", wait=False)
        assert manager.ended(factory) == FactoryEnd.FAILED
        said(folder, "CRITICAL", f"factory.lock is held by pid {other.pid} (", "kill the holder by hand")
        assert other.poll() is None
        other.communicate(b"\n", timeout=10)


def test_factory_of_a_dead_manager_leaves_without_a_hello(manager: ManagerEnd) -> None:
    orphan = manager.start_factory("--parent", gone_parent(), wait=False)
    assert manager.ended(orphan) == FactoryEnd.OVER
    assert manager.hellos == []


def test_command_that_outlives_its_factory_is_killed_at_its_limit(
    manager: ManagerEnd, folder: SessionFolder, slurm: FakeSlurm
) -> None:
    first = manager.start_factory()
    slurm.fault("sbatch", hang="before")
    manager.submit("b0")
    [hanging] = until(slurm.hanging, what="sbatch", seconds=60)
    os.kill(first.pid, signal.SIGKILL)
    first.wait(10)
    manager.start_factory()
    said(
        folder, "a command of the previous factory", f"pid {hanging} (", "sbatch", "until it ends or has run for 4.0 s"
    )
    said(folder, f"pid {hanging} (", "has run for longer than 4.0 s: it is killed")
    said(folder, "that command has ended")
    slurm.fault("sbatch")
    manager.tell(to_client.KnownBlocks(ASKED))
    manager.hear("b0", BlockPhase.PENDING)


def test_time_limit_of_an_old_command_counts_from_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "commands.lock"
    with file.open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = subprocess.Popen(["sleep", "100"], pass_fds=[lock.fileno()], start_new_session=True)
    try:
        time.sleep(0.6)
        waits: list[float] = []
        wait = main._wait_for_lock
        monkeypatch.setattr(
            main, "_wait_for_lock", lambda lock, *, limit_s: (waits.append(limit_s), wait(lock, limit_s=limit_s))[1]
        )
        main.acquire_command_lock(file, limit_s=0.5)
        assert waits[0] == 0.0, "the command's time was used up before"
        assert command.wait(10) == -signal.SIGKILL
    finally:
        command.kill()
        command.wait()


# ---- in this process with shorter limits


class Running:
    """A factory on a thread that ends with the session."""

    def __init__(self, manager: ManagerEnd, *sites: Site) -> None:
        self._manager = manager
        named = {each.name: each for each in sites}
        self._factory = BatchJobFactory(manager.folder, sites=named, parent=os.getppid(), end_limit_s=0.5)
        self._thread = threading.Thread(target=self._factory.run)
        self._thread.start()

    def end(self) -> None:
        self._manager.tell(to_client.SessionOver("the test is done"))
        self._manager.until(lambda: not self._thread.is_alive(), what="its end")
        self._thread.join()
        for worker in threading.enumerate():  # wait for the workers, because a busy worker sends one more message
            if worker.name.startswith("stoker-source-"):
                worker.join(60)
        self._factory.close()


def test_factory_repeats_a_hello_that_the_manager_does_not_answer(
    manager: ManagerEnd, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(factory_factory, "HELLO_ANSWER_LIMIT_S", 0.5)
    manager.answers = False
    running = Running(manager, site())
    manager.until(lambda: len(manager.hellos) > 1, what="two hellos")
    assert "has not answered a hello" in caplog.text
    manager.answers = True
    count = len(manager.hellos)
    manager.until(lambda: len(manager.hellos) > count, what="an answered hello")
    running.end()


@pytest.fixture
def hanging_file(folder: SessionFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "condor").mkdir()
    (tmp_path / "condor" / "condor_submit").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "condor" / "condor_submit").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'condor'}:{os.environ['PATH']}")
    file = folder.path / "seed.address"
    os.mkfifo(file)
    (folder.path / "carried" / "lab" / "session" / "keys").mkdir(parents=True)
    yield file
    let_go(file)


def let_go(file: Path) -> None:
    """Release threads that wait for content of the file. The threads read an empty file and continue."""
    writer = os.open(file, os.O_RDWR)
    file.unlink()
    file.touch()
    os.close(writer)


def test_slow_start_of_the_batch_interface_is_reported(
    manager: ManagerEnd, hanging_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factory_factory, "OPENING_LIMIT_S", 0.5)
    manager.known = ASKED
    running = Running(manager, site(ProviderKind.CONDOR, packed=True, shared_files=False))
    manager.hear_trouble("its batch system has not been ready")
    let_go(hanging_file)
    manager.until(lambda: "not been ready" not in manager.troubles[-1].text, what="the batch system to be ready")
    running.end()
