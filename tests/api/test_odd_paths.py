"""Folder names that are not valid UTF-8 are refused with advice."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import stoker
from stoker.errors import SessionError
from stoker.manager.executor import new_sessions
from stoker.manager.executor.processes import make_folder
from stoker.pilot.agent.scratch import base_folder
from stoker.protocol.session import SessionFolder


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system takes no such name")
    return folder


def test_non_utf_8_run_folder_is_refused(odd: Path) -> None:
    with pytest.raises(SessionError, match=r"caf\\xe9.*not valid UTF-8.*stoker\.load\(run_dir="):
        stoker.load(run_dir=str(odd))


def test_non_utf_8_folder_of_a_kept_session_is_refused(odd: Path) -> None:
    with pytest.raises(SessionError, match=r"not valid UTF-8.*stoker up --folder DIR"):
        make_folder(SessionFolder(odd), elsewhere="stoker up --folder DIR")
    assert list(odd.iterdir()) == []


def test_non_utf_8_folder_of_a_program_is_refused(odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(odd)
    with pytest.raises(SessionError, match=r"not valid UTF-8.*start the program in another"):
        stoker.load(run_dir=str(tmp_path / "runs"))


def test_non_utf_8_folder_of_modules_is_refused(odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(odd), *sys.path])
    with pytest.raises(SessionError, match=r"imports from.*not valid UTF-8.*remove it from PYTHONPATH"):
        stoker.load(run_dir=str(tmp_path / "runs"))
    monkeypatch.setenv("PYTHONPATH", str(odd))
    with pytest.raises(SessionError, match=r"imports from.*not valid UTF-8.*remove it from PYTHONPATH"):
        new_sessions.python_path()


def test_non_utf_8_scratch_folder_is_refused(odd: Path) -> None:
    with pytest.raises(SessionError, match=r"scratch folder.*not valid UTF-8.*STOKER_SCRATCH"):
        base_folder(environ={"STOKER_SCRATCH": str(odd)})
    assert list(odd.iterdir()) == []
