"""Errors for folders that cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.command_line import Stoker

import stoker as package
from stoker.errors import SessionError
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
