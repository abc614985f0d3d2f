"""Errors for folders that cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli.command_line import Stoker

import stoker as package
from stoker.errors import SessionError
from stoker.folders import FOLDER_REMOVED, folders_here, is_working_folder_removed, working_folder
from stoker.manager.executor.processes import new_session_id


@pytest.fixture
def a_file(tmp_path: Path) -> Path:
    path = tmp_path / "taken"
    path.write_text("")
    return path


def test_a_run_folder_that_cannot_be_written(a_file: Path):
    with pytest.raises(SessionError, match=r"the session cannot start: .*taken.*stoker\.load\(run_dir=") as caught:
        package.load(run_dir=str(a_file), progress=False)
    assert str(a_file) in str(caught.value)
    with package.load(run_dir=str(a_file.parent / "runs"), progress=False) as session:
        assert session.status().failed == 0, "the next one is loaded as if nothing had been"


def test_a_state_folder_that_cannot_be_written(a_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STOKER_HOME", str(a_file))
    with pytest.raises(SessionError, match=r"state folder .*taken cannot be written: .*; set .* STOKER_HOME"):
        package.load(run_dir=str(a_file.parent / "runs"), progress=False)


def test_up_names_its_own_options(stoker: Stoker, a_file: Path):
    refused = stoker("up", "--folder", str(a_file / "s"))
    assert isinstance(refused.exception, SessionError)
    assert "stoker up --folder DIR" in str(refused.exception)
    assert "run_dir" not in str(refused.exception)


def test_a_state_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / ("far too long " * 30)))
    with pytest.raises(SessionError, match=r"state folder .* cannot be read: .*; set .* STOKER_HOME"):
        new_session_id()


def run_in_removed(folder: Path, home: Path, *command: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    shell = ["sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(folder), sys.executable, *command]
    return subprocess.run(
        shell, capture_output=True, text=True, timeout=100, env={**os.environ, "STOKER_HOME": str(home)}
    )


def stoker(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_in_removed(tmp_path / "gone", tmp_path / "home", "-m", "stoker.manager.cli.entry", *arguments)


def test_sessions_are_listed(tmp_path: Path):
    said = stoker(tmp_path, "sessions")
    assert said.returncode == 0, said.stderr
    assert "no session is known here" in said.stdout


@pytest.mark.parametrize("command", [["status"], ["replay"], ["calls"], ["logs"], ["explain", "c-1"]])
def test_a_command_finds_the_sessions_of_the_state_folder(tmp_path: Path, command: list[str]):
    said = stoker(tmp_path, *command)
    assert said.returncode == 1
    assert said.stderr.startswith("no session on this machine; ")


@pytest.mark.parametrize("command", [["up"], ["up", "--dry-run"], ["run", "fact_verification"]])
def test_a_command_that_needs_the_folder_says_so(tmp_path: Path, command: list[str]):
    said = stoker(tmp_path, *command)
    assert said.returncode in (1, 2)
    assert "Traceback" not in said.stderr
    assert "removed" in said.stderr or "cannot be made: No such file or directory" in said.stderr


@pytest.mark.parametrize("options", ["", "run_dir='{runs}'", "run_dir='{runs}', working_dir='{runs}'"])
def test_a_program_is_refused_with_what_to_do(tmp_path: Path, options: str):
    program = f"import stoker\nstoker.load({options.format(runs=tmp_path)})"
    said = run_in_removed(tmp_path / "gone", tmp_path / "home", "-c", program)
    assert said.returncode == 1
    assert said.stderr.splitlines()[-1] == f"stoker.errors.SessionError: {FOLDER_REMOVED}"


def test_places_to_search_are_none_where_the_folder_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert folders_here() == (str(working_folder()),) == (str(folder),)
    folder.rmdir()
    assert is_working_folder_removed()
    assert folders_here() == ()
    with pytest.raises(SessionError, match="has been removed; change to another one"):
        working_folder()
