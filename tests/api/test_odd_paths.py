"""Folder names that are not valid UTF-8 are refused with advice."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import parsl
import pytest
from parsl.config import Config
from parsl.dataflow.rundirs import make_rundir

import stoker
from stoker.errors import SessionError
from stoker.manager.executor import new_sessions, session
from stoker.manager.executor.processes import create_session_folder
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
        create_session_folder(SessionFolder(odd), elsewhere="stoker up --folder DIR")
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
        new_sessions.build_session_python_path()


def test_non_utf_8_scratch_folder_is_refused(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_SCRATCH", str(odd))
    with pytest.raises(SessionError, match=r"scratch folder.*not valid UTF-8.*STOKER_SCRATCH"):
        base_folder()
    assert list(odd.iterdir()) == []


# ---- run folders


def test_parent_of_the_run_folders_may_appear_while_parsl_creates_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, looked = tmp_path / "runinfo", os.path.exists

    def look(path: object) -> bool:
        found = looked(path)  # type: ignore[arg-type]
        if path == str(folder):
            folder.mkdir(exist_ok=True)
        return found

    monkeypatch.setattr(os.path, "exists", look)
    monkeypatch.setattr(parsl, "load", lambda config: make_rundir(config.run_dir))
    assert session._load_parsl(Config(run_dir=str(folder))) == str(folder / "000")


def test_unrelated_file_exists_error_during_load_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(config: Config) -> None:
        raise FileExistsError(17, "File exists", "submit")

    monkeypatch.setattr(parsl, "load", load)
    with pytest.raises(FileExistsError):
        session._load_parsl(Config(run_dir=str(tmp_path)))
