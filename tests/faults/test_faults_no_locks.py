"""Sessions on file systems without locks: Lustre without `flock`, NFS without a lock daemon."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from stoker import locks
from stoker.apps.prompt_tuning.board import BoardEntry, read_board, write_entry
from stoker.errors import SessionError
from stoker.manager.live.journal import Journal
from stoker.pilot.agent.scratch import Scratch
from stoker.run_folder import open_run

NO_FLOCK = """
import errno, fcntl
def flock(descriptor, how):
    raise OSError(errno.ENOSYS, "Function not implemented")
fcntl.flock = flock
"""
PROGRAM = """
import os, time
import stoker

@stoker.context
def loaded():
    return os.getpid()

@stoker.app(context=loaded())
def work(context, number):
    time.sleep(0.01)
    return number * number

with stoker.load() as session:
    print([work(number).result(60) for number in range(5)], flush=True)
    print(session.status().failed, flush=True)
"""


@pytest.fixture
def _without(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    yield process
    _end(process)


@pytest.mark.usefixtures("_without")
def test_run_folder_is_created_and_resumed_without_locks(tmp_path):
    for _ in range(2):
        with contextlib.closing(open_run(tmp_path, app="a", prefix="a", parameters={}, options={})) as run:
            assert [run.path] == list(tmp_path.iterdir())
    assert run.resumed


@pytest.mark.usefixtures("_without")
def test_tuning_job_whose_submitter_died_is_abandoned_without_locks(tmp_path):
    with contextlib.closing(open_run(tmp_path, app="a", prefix="a", parameters={}, options={})) as run:
        write_entry(run.path, BoardEntry(name="job"))
        assert not read_board(tmp_path)[0].abandoned
    (run.path / ".lock.holder").unlink()
    if not (submitter := os.fork()):
        os._exit(not locks.try_lock(os.open(run.path / ".lock", os.O_RDWR)))
    assert os.waitpid(submitter, 0)[1] == 0
    assert read_board(tmp_path)[0].abandoned


def test_program_runs_on_a_file_system_without_locks(world, tmp_path):
    patched = tmp_path / "patched"
    patched.mkdir()
    (patched / "sitecustomize.py").write_text(NO_FLOCK)
    program = world.start(PROGRAM, PYTHONPATH=str(patched))
    out, err = program.communicate(timeout=100)
    assert out.splitlines() == ["[0, 1, 4, 9, 16]", "0"], err


@pytest.mark.usefixtures("_without")
def test_journal_without_file_locks_refuses_a_second_manager(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    Journal(tmp_path / "journal").close()
    _name(tmp_path / "journal", other.pid)
    with pytest.raises(SessionError, match="already has a manager"):
        Journal(tmp_path / "journal")
    _end(other)
    Journal(tmp_path / "journal").close()


@pytest.mark.usefixtures("_without")
def test_lock_that_names_its_holder_ends_with_that_process(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    file = tmp_path / "factory.lock"
    file.touch()
    assert locks.is_locked(file) is None, "without locks this is unknown"
    _name(file, other.pid)
    assert locks.is_locked(file) is True
    with file.open("rb+") as mine:
        assert not locks.try_lock(mine.fileno())
    _end(other)
    assert locks.is_locked(file) is False
    with file.open("rb+") as mine:
        assert locks.try_lock(mine.fileno())
        locks.wait_for_lock(mine.fileno())
    assert locks.is_locked(file) is True


@pytest.mark.usefixtures("_without")
def test_pilot_removes_folders_of_dead_pilots_only(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    dead, living = tmp_path / "pilot-dead", tmp_path / "pilot-living"
    for folder in (dead, living):
        folder.mkdir()
        (folder / "alive").touch()
        _name(folder / "alive", other.pid if folder is living else 2**22 - 1)
    Scratch(tmp_path, pilot="new")
    assert living.exists()
    assert not dead.exists()


def test_lock_error_other_than_missing_support_is_raised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def flock(descriptor: object, how: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", flock)
    with (tmp_path / "lock").open("wb") as file, pytest.raises(OSError, match="Input/output"):
        locks.try_lock(file.fileno())


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _name(file: Path, pid: int) -> None:
    holder = locks._HolderRecord(locks.machine_id(), pid, locks.process_start_ticks(pid) or 1, file.stat().st_ino)
    locks._holder_file(file).write_bytes(msgspec.json.encode(holder))
