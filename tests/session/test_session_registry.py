from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from stoker.contexts.folders import state_folder
from stoker.errors import SessionError
from stoker.manager.cli import session_choice
from stoker.manager.cli.main import cli
from stoker.manager.cli.sessions import SessionState
from stoker.manager.cli.sessions import list_sessions as list_sessions
from stoker.manager.executor import detached
from stoker.manager.executor.detached import is_session_starting
from stoker.manager.executor.processes import KEPT_SESSIONS, register_session
from stoker.manager.live import lease
from stoker.protocol.session import SessionFile, SessionFolder, find_session, is_session_folder


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)  # programs search sessions in the folder where they start


def session(path: Path, name: str, *, over: str = "", up: bool = False, pid: int = 0) -> None:
    folder = SessionFolder(path / name)
    folder.create_folders()
    folder.write(SessionFile(name, 4, "tcp://127.0.0.1:1", "key"))
    if over or pid:
        started = lease.locks.process_start_ticks(pid or os.getpid()) or 1
        holder = lease.LeaseHolder("here", lease.locks.machine_id(), pid or os.getpid(), started, "token", over=over)
        folder.lease.write_bytes(msgspec.json.encode(holder))
    if up:
        folder.launch.write_bytes(b"{}")
    register_session(folder)


def known() -> set[str]:
    return {link.name for link in (state_folder() / "sessions").iterdir()}


def test_live_session_stays_known_after_many_later_sessions(tmp_path: Path) -> None:
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
    """Run the test as a user who may not enter the folder `closed`."""
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
def test_unreadable_session_folder_of_another_user_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "closed" / "mine"
    assert not is_session_folder(folder)
    refused = r"mine cannot be read \(.*\): only the user who started the session can use it"
    for look in (find_session, session_choice.session_to_show):
        with pytest.raises(SessionError, match=refused):
            look(str(folder))


def test_session_with_a_removed_folder_is_forgotten(tmp_path: Path) -> None:
    session(tmp_path, "gone", up=True)
    shutil.rmtree(tmp_path / "gone")
    session(tmp_path, "next", over="done")
    assert known() == {"next"}


def begun(path: Path, *, ago_s: float = 0.0) -> SessionFolder:
    folder = SessionFolder(path)
    folder.create_folders()
    folder.launch.write_bytes(msgspec.json.encode(detached.LaunchOptions(path.name, ())))
    for place in (folder.launch, *path.iterdir(), path):
        os.utime(place, (time.time() - ago_s,) * 2)
    register_session(folder, name=path.name)
    return folder


def test_starting_session_is_awaited_and_found_by_name(tmp_path: Path) -> None:
    folder = begun(tmp_path / "soon")
    session(tmp_path, "other", over="done")  # another registration cleans up the links
    assert "soon" in known()

    def listen() -> None:
        time.sleep(0.3)
        folder.write(SessionFile("soon", 4, "tcp://127.0.0.1:1", "key"))

    with ThreadPoolExecutor(1) as threads:
        threads.submit(listen)
        assert session_choice.session_to_show("soon").path == folder.path


def test_session_that_never_started_is_not_awaited_and_is_pruned(tmp_path: Path) -> None:
    home = state_folder()
    begun(home / "sessions.d" / "dead", ago_s=3600)
    # the command was killed before it registered the session
    SessionFolder(home / "sessions.d" / "half").create_folders()
    for place in ((half := home / "sessions.d" / "half"), *half.iterdir()):
        os.utime(place, (time.time() - 3600,) * 2)
    assert not any(is_session_starting(home / "sessions.d" / name) for name in ("dead", "half"))
    with pytest.raises(SessionError, match="no session 'dead'"):
        session_choice.session_to_show("dead")
    assert {(each.session, each.state) for each in list_sessions()} == {
        ("dead", SessionState.OVER),
        ("half", SessionState.OVER),
    }
    said = CliRunner().invoke(cli, ["sessions", "--prune", "--older", "10min"])
    assert said.stdout.count("removed  ") == 2
    assert known() == set()
    assert list((home / "sessions.d").iterdir()) == []


def test_many_sessions_that_never_started_are_forgotten(tmp_path: Path) -> None:
    for number in range(KEPT_SESSIONS + 5):
        begun(tmp_path / f"s{number}", ago_s=3600)
    assert len(known()) <= KEPT_SESSIONS + 1


def test_concurrent_sessions_do_not_disturb_each_other(tmp_path: Path) -> None:
    folders = [SessionFolder(tmp_path / f"s{number}") for number in range(4)]
    for folder in folders:
        folder.create_folders()
        folder.write(SessionFile(folder.path.name, 4, "tcp://127.0.0.1:1", "key"))
    register_session(folders[0])

    def begin(folder: SessionFolder) -> None:
        for _ in range(150):
            register_session(folder)
            assert find_session().path in {each.path for each in folders}

    with ThreadPoolExecutor(len(folders)) as threads:
        for done in [threads.submit(begin, folder) for folder in folders]:
            done.result()
    assert known() == {folder.path.name for folder in folders}
