"""Sessions are known by their ids: those that are over while there are few of them, those that live for ever."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from stoker.contexts.state import state_folder
from stoker.errors import SessionError
from stoker.manager.cli import choosing
from stoker.manager.executor.processes import KEPT_SESSIONS, register
from stoker.manager.live import lease
from stoker.manager.protocol.session import SessionFile, SessionFolder, find_session, holds_session


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "home"))


def session(path: Path, name: str, *, over: str = "", up: bool = False, pid: int = 0) -> None:
    """A session that is registered: over, or held by a process (`pid`), or one of `stoker up` (`up`)."""
    folder = SessionFolder(path / name)
    folder.make()
    folder.write(SessionFile(name, 4, "tcp://127.0.0.1:1", "key"))
    if over or pid:
        started = lease.locks.started(pid or os.getpid()) or 1
        holder = lease.Holder("here", lease.locks.machine(), pid or os.getpid(), started, "token", over=over)
        lease.lease_file(folder).write_bytes(msgspec.json.encode(holder))
    if up:
        folder.launch.write_bytes(b"{}")
    register(folder)


def known() -> set[str]:
    return {link.name for link in (state_folder() / "sessions").iterdir()}


def test_a_session_that_lives_is_known_after_any_number_of_others(tmp_path: Path) -> None:
    session(tmp_path, "runs", pid=os.getpid())
    session(tmp_path, "up", up=True)
    session(tmp_path, "down", up=True, over="it was ended")
    session(tmp_path, "died", pid=2**22 - 1)
    for number in range(KEPT_SESSIONS + 5):
        session(tmp_path, f"s{number}", over="its client ended it")
    assert {"runs", "up"} <= known()
    assert not {"down", "died", "s0"} & known()
    assert f"s{KEPT_SESSIONS + 4}" in known()
    assert len(known()) <= KEPT_SESSIONS + 3


@pytest.fixture
def as_nobody(tmp_path: Path) -> Iterator[None]:
    """What this test does is done by a user who may not enter the folder `closed`."""
    closed = tmp_path / "closed"
    closed.mkdir()
    session(closed, "mine", over="done")
    closed.chmod(0)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    yield
    if is_root:
        os.seteuid(0)
    closed.chmod(0o700)


@pytest.mark.usefixtures("as_nobody")
def test_a_folder_that_another_user_has_closed_is_named_and_hides_no_other(tmp_path: Path) -> None:
    folder = tmp_path / "closed" / "mine"
    assert not holds_session(folder)
    refused = r"mine cannot be read \(.*\): only the user who began a session can use it"
    for look in (find_session, choosing.session_to_show):
        with pytest.raises(SessionError, match=refused):
            look(str(folder))


def test_a_session_whose_folder_is_gone_is_forgotten(tmp_path: Path) -> None:
    session(tmp_path, "gone", up=True)
    SessionFolder(tmp_path / "gone").file.unlink()
    session(tmp_path, "next", over="done")
    assert known() == {"next"}


def test_sessions_that_begin_and_end_at_the_same_time_do_not_disturb_each_other(tmp_path: Path) -> None:
    """A program found the link that another one was just renaming, and did not start."""
    folders = [SessionFolder(tmp_path / f"s{number}") for number in range(4)]
    for folder in folders:
        folder.make()
        folder.write(SessionFile(folder.path.name, 4, "tcp://127.0.0.1:1", "key"))
    register(folders[0])

    def begin(folder: SessionFolder) -> None:
        for _ in range(150):
            register(folder)
            assert find_session().path in {each.path for each in folders}

    with ThreadPoolExecutor(len(folders)) as threads:
        for done in [threads.submit(begin, folder) for folder in folders]:
            done.result()
    assert known() == {folder.path.name for folder in folders}
