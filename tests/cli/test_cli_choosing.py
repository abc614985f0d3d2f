from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import msgspec
import pytest
from cli.command_line import Stoker
from live.peers import Manager

from stoker.config import write_sites
from stoker.contexts.folders import state_folder
from stoker.errors import SessionError
from stoker.manager.cli import session_choice
from stoker.manager.executor.processes import link_joined_session, register_session
from stoker.manager.live import lease
from stoker.protocol.session import SessionFile, SessionFolder
from stoker.site import Site

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    listeners: list[socket.socket] = []

    def session(name: str, place: str, *, up: bool, stays: bool = False) -> Path:
        folder = SessionFolder(tmp_path / place)
        folder.create_folders()
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        folder.write(SessionFile(name, 4, f"tcp://127.0.0.1:{listener.getsockname()[1]}", "key"))
        made_at = 2e9 + len(listeners)
        os.utime(folder.file, (made_at, made_at))
        if up:
            lease.take_lease(folder.lease)
        else:
            listener.close()
            holder = lease.LeaseHolder("here", "machine", 1, 1, "token", over="it was ended")
            folder.lease.write_bytes(msgspec.json.encode(holder))
        if stays:
            folder.launch.write_bytes(b"{}")
        register_session(folder)
        return folder.path

    yield session
    for listener in listeners:
        listener.close()


def looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(folder)
    return session_choice.session_to_show().read().session, capsys.readouterr().err.replace("\n", " ")


def test_current_folder_session_is_chosen_before_a_newer_session(make, tmp_path, monkeypatch, capsys):
    own = make("own", "mine/runinfo/000/stoker", up=True)
    make("other", "elsewhere/runinfo/000/stoker", up=True)
    for place in (tmp_path / "mine", tmp_path / "mine/runinfo", own, own / "pilots"):
        session, said = looked_at(place, monkeypatch, capsys)
        assert session == "own"
        assert "this is session own; other is up too (--session other)" in said
    assert looked_at(tmp_path / "third", monkeypatch, capsys)[0] == "other"


def test_ended_session_of_this_folder_is_chosen_before_other_sessions(make, tmp_path, monkeypatch, capsys):
    make("first", "mine/runinfo/000/stoker", up=False)
    make("own", "mine/runinfo/001/stoker", up=False)
    make("other", "elsewhere/runinfo/000/stoker", up=True)
    session, said = looked_at(tmp_path / "mine", monkeypatch, capsys)
    assert session == "own"
    assert "this is session own, which is over; other is up (--session other)" in said


def test_session_joined_by_a_program_here_belongs_to_this_folder(make, tmp_path, monkeypatch, capsys):
    joined = make("joined", "elsewhere/joined", up=True)
    make("older", "mine/runinfo/000/stoker", up=False)
    make("other", "third/runinfo/000/stoker", up=True)
    (tmp_path / "mine/runinfo/001").mkdir()
    link_joined_session(SessionFolder(joined), tmp_path / "mine/runinfo/001/stoker")
    os.utime(tmp_path / "mine/runinfo/001/stoker", (3e9, 3e9), follow_symlinks=False)
    assert looked_at(tmp_path / "mine", monkeypatch, capsys)[0] == "joined"


def test_session_of_stoker_up_belongs_to_its_creation_folder(make, tmp_path, monkeypatch, capsys):
    make("older", "mine/runinfo/000/stoker", up=False)
    kept = make("kept", "state/kept", up=True, stays=True)
    make("other", "third/runinfo/000/stoker", up=True)
    write_sites(SessionFolder(kept).sites, [Site.default()], python_path=f"{tmp_path / 'mine'}:/packages")
    assert looked_at(tmp_path / "mine", monkeypatch, capsys)[0] == "kept"


def test_ended_session_of_another_folder_is_named(make, tmp_path, monkeypatch, capsys):
    make("over", "elsewhere/runinfo/000/stoker", up=False)
    make("newer", "elsewhere/runinfo/001/stoker", up=False)
    session, said = looked_at(tmp_path / "third", monkeypatch, capsys)
    assert (session, said.strip()) == ("newer", f"this is session newer, which ran in {tmp_path / 'elsewhere'}")


def test_session_without_a_state_folder_link_is_found(make, tmp_path, monkeypatch, capsys):
    make("own", "mine/session", up=True)
    (state_folder() / "sessions" / "own").unlink()
    for place in (tmp_path / "mine", tmp_path / "mine/session/pilots"):
        assert looked_at(place, monkeypatch, capsys)[0] == "own"


def test_repeated_lookup_returns_the_same_session_and_prints_once(make, tmp_path, monkeypatch, capsys):
    make("first", "a/runinfo/000/stoker", up=True)
    make("second", "b/runinfo/000/stoker", up=True)
    monkeypatch.chdir(tmp_path / "a")
    with click.Context(click.Command("status")):
        before = session_choice.session_to_show()
        monkeypatch.chdir(tmp_path / "b")
        assert session_choice.session_to_show().path == before.path
    assert capsys.readouterr().err.count("this is session") == 1


def test_commands_that_change_a_session_refuse_an_ambiguous_choice(make, tmp_path, monkeypatch):
    make("program", "mine/runinfo/000/stoker", up=True)
    make("ours", "mine/session", up=True, stays=True)
    make("theirs", "elsewhere/session", up=True, stays=True)
    make("ended", "mine/ended", up=False, stays=True)
    monkeypatch.chdir(tmp_path / "mine")
    assert session_choice.session_to_change().read().session == "ours"
    (tmp_path / "third").mkdir()
    monkeypatch.chdir(tmp_path / "third")
    with pytest.raises(SessionError, match="sessions ours, theirs are up; name one of them"):
        session_choice.session_to_change()


def test_removed_folder_belongs_to_no_session(make, tmp_path, monkeypatch):
    make("one", "elsewhere/session", up=True)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert session_choice.session_to_show().read().session == "one"


def test_all_commands_choose_the_same_session(
    manager: Manager, make: Make, stoker: Stoker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make("newer", "elsewhere/session", up=True)
    monkeypatch.chdir(manager.folder.path)
    for command in (["status"], ["calls"], ["explain", "c-7"], ["logs"]):
        result = stoker(*command)
        said = f"{result.stdout} {result.exception}"
        assert "session test" in said or str(manager.folder.path) in said or "c-7" in said
        assert "this is session test; newer is up too" in result.stderr.replace("\n", " ")


def test_printed_hint_for_another_session_is_a_valid_command(
    make: Make, stoker: Stoker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make("one", "mine/session", up=True)
    make("two", "elsewhere/session", up=True)
    monkeypatch.chdir(tmp_path / "mine")
    said = stoker("replay").stderr.replace("\n", " ")
    assert "this is session one; two is up too (stoker replay two)" in said
    assert "elsewhere/session" in str(stoker("replay", "two").exception), "session two has no journal"
