from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from cli.command_line import Stoker
from live.peers import Manager

from stoker.config import parse_site, write_sites
from stoker.contexts.folders import state_folder
from stoker.manager.cli import session_remains
from stoker.manager.executor import new_sessions
from stoker.manager.executor.processes import register_session
from stoker.manager.live import lease
from stoker.protocol.session import SessionFile, SessionFolder

DAY_S = 86400.0


def a_session(name: str, *, days: float = 20.0, place: Path | None = None, over: bool = True) -> SessionFolder:
    folder = new_sessions.create_session(
        new_sessions.load_listed_sites(()), place=str(place or state_folder() / "sessions.d" / name)
    )
    folder.write(SessionFile(name, 1, "tcp://127.0.0.1:1", "key"))
    folder.manager_log.write_bytes(b"x" * 1000)
    if over:
        held = lease.take_lease(folder.lease)
        held.release(over="stoker down")
    aged(folder, days)
    return folder


def aged(folder: SessionFolder, days: float) -> None:
    then = time.time() - days * DAY_S
    for path in (*folder.path.iterdir(), folder.path):
        os.utime(path, (then, then))


def kept(stoker: Stoker) -> str:
    told = msgspec.json.decode(stoker("sessions", "--prune", "--json").output)
    assert told["removed"] == []
    [one] = told["kept"]
    assert Path(one["folder"]).is_dir()
    return str(one["kept"])


def test_sessions_command_lists_known_sessions_with_their_state(stoker: Stoker, manager: Manager):
    a_session("old1")
    a_session("lost", days=1, over=False)
    shown = stoker.ok("sessions")
    states = {line.split()[0]: line.split()[1] for line in shown.output.splitlines() if "/" in line}
    assert states == {"test": "up", "lost": "lost", "old1": "over"}
    assert "stoker attach ID restarts it" in shown.output
    told = msgspec.json.decode(stoker("sessions", "--json").output)["sessions"]
    assert {(each["session"], each["state"]) for each in told} == set(states.items())


def test_prune_removes_old_ended_sessions_and_lists_them(stoker: Stoker, manager: Manager):
    old, young, lost = a_session("old1"), a_session("new1", days=3), a_session("lost", over=False)
    register_session(old)
    aged(manager.folder, 20)
    size = session_remains.size_bytes(old.path)
    shown = stoker.ok("sessions", "--prune")
    assert "removed  old1" in shown.output
    assert "removed 1 session, " in shown.output
    assert size > 1000
    assert not old.path.exists()
    assert not (state_folder() / "sessions" / "old1").is_symlink()
    assert all(folder.file.exists() for folder in (young, lost, manager.folder))
    told = msgspec.json.decode(stoker("sessions", "--prune", "--older", "2d", "--json").output)
    assert [(each["session"], each["folder"]) for each in told["removed"]] == [("new1", str(young.path))]
    assert told["removed"][0]["bytes"] > 1000
    assert "no session ended 2d ago or earlier" in stoker("sessions", "--prune", "--older", "2d").output


def test_prune_removes_an_ended_session_whose_port_was_reused(stoker: Stoker, manager: Manager):
    old = a_session("old1")
    old.write(SessionFile("old1", 1, manager.folder.read().address, old.read_key("server").public))
    aged(old, 20)
    told = msgspec.json.decode(stoker("sessions", "--json").output)["sessions"]
    assert {each["session"]: each["state"] for each in told} == {"test": "up", "old1": "over"}
    assert "removed  old1" in stoker("sessions", "--prune").output
    assert not old.path.exists()


@pytest.mark.parametrize("name", ["journal", "factory.lock", "commands.lock"])
def test_locked_session_is_kept_by_prune(stoker: Stoker, name: str):
    old = a_session("old1")
    with (old.path / name).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        aged(old, 20)
        assert f"{name} is locked" in kept(stoker)


def test_prune_keeps_a_session_with_a_process_on_this_machine(stoker: Stoker):
    old = a_session("old1")
    script = "import time; print('here', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", script, "-m", "stoker.pilot.main", "--session", str(old.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        try:
            assert f"left behind: its pilot (pid {process.pid})" in kept(stoker)
        finally:
            process.kill()


def test_prune_keeps_a_session_whose_manager_may_run_elsewhere(stoker: Stoker):
    old = a_session("old1", over=False)
    (old.path / "manager.json").unlink()  # without this file the session cannot be queried
    holder = lease.LeaseHolder("n7", "another boot", 42, 1, "token")
    old.lease.write_bytes(msgspec.json.encode(holder))
    aged(old, 20)
    assert "its manager was pid 42 on n7, and may still run" in kept(stoker)


def test_prune_keeps_a_session_if_its_batch_system_is_unreachable(stoker: Stoker, monkeypatch: pytest.MonkeyPatch):
    old = a_session("old1")
    write_sites(old.sites, [parse_site('name = "lsf"\n[provider]\nkind = "lsf"', file="lsf")])
    aged(old, 20)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "the session's jobs at site lsf are unknown: " in kept(stoker)
    (old.path / "jobs-left").write_text("site lsf: 88\n")
    aged(old, 20)
    assert "the session's jobs at site lsf are unknown: " in kept(stoker)
    (old.path / "jobs-left").write_text("")  # the factory has seen all jobs end
    aged(old, 20)
    assert "removed 1 session" in stoker("sessions", "--prune").output


def test_prune_keeps_a_session_folder_with_files_of_the_user(stoker: Stoker, tmp_path: Path):
    old = a_session("old1", place=tmp_path / "mine")
    register_session(old)
    (old.path / "thesis.tex").write_text("years of work")
    aged(old, 20)
    assert kept(stoker) == "the folder contains files that do not belong to a session: thesis.tex"
    (old.path / "thesis.tex").unlink()
    aged(old, 20)
    assert "removed 1 session" in stoker("sessions", "--prune").output
    assert not old.path.exists()
