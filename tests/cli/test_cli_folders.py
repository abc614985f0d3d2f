from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli.command_line import Stoker

import stoker as package
from stoker.errors import SessionError
from stoker.folders import FOLDER_REMOVED
from stoker.manager.cli.main import main


@pytest.fixture
def a_file(tmp_path: Path) -> Path:
    path = tmp_path / "taken"
    path.write_text("")
    return path


def test_unwritable_run_folder_is_reported(a_file: Path):
    with pytest.raises(SessionError, match=r"the session cannot start: .*taken.*stoker\.load\(run_dir=") as caught:
        package.load(run_dir=str(a_file), progress=False)
    assert str(a_file) in str(caught.value)
    with package.load(run_dir=str(a_file.parent / "runs"), progress=False) as session:
        assert session.status().failed == 0, "the next session loads as usual"


def test_unwritable_state_folder_is_reported(a_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STOKER_HOME", str(a_file))
    with pytest.raises(SessionError, match=r"state folder .*taken cannot be written: .*; set .* STOKER_HOME"):
        package.load(run_dir=str(a_file.parent / "runs"), progress=False)


def test_up_error_names_options_of_the_up_command(stoker: Stoker, a_file: Path):
    refused = stoker("up", "--folder", str(a_file / "s"))
    assert isinstance(refused.exception, SessionError)
    assert "stoker up --folder DIR" in str(refused.exception)
    assert "run_dir" not in str(refused.exception)


@pytest.fixture
def removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    return folder


def test_process_started_in_a_removed_folder_lists_sessions(tmp_path: Path):
    (tmp_path / "gone").mkdir()
    script = 'cd "$0" && rmdir "$0" && exec "$@"'
    command = [sys.executable, "-m", "stoker.manager.cli.entry", "sessions"]
    shell = ["sh", "-c", script, str(tmp_path / "gone"), *command]
    said = subprocess.run(shell, capture_output=True, text=True, timeout=100)
    assert said.returncode == 0, said.stderr
    assert "no session is known here" in said.stdout


@pytest.mark.usefixtures("removed")
@pytest.mark.parametrize("command", [["status"], ["replay"], ["calls"], ["logs"], ["explain", "c-1"]])
def test_session_commands_work_in_a_removed_folder(stoker: Stoker, command: list[str]):
    assert str(stoker(*command).exception).startswith("no session on this machine; ")


@pytest.mark.usefixtures("removed")
@pytest.mark.parametrize("command", [["up"], ["up", "--dry-run"], ["run", "fact_verification"]])
def test_command_that_needs_the_working_folder_reports_its_removal(
    capsys: pytest.CaptureFixture[str], command: list[str]
):
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code in (1, 2)
    said = capsys.readouterr().err
    assert "removed" in said or "cannot be made: No such file or directory" in said


@pytest.mark.usefixtures("removed")
@pytest.mark.parametrize("given", [[], ["run_dir"], ["run_dir", "working_dir"]], ids=" ".join)
def test_program_in_a_removed_folder_is_refused_with_advice(tmp_path: Path, given: list[str]):
    with pytest.raises(SessionError) as caught:
        package.load(**dict.fromkeys(given, str(tmp_path)))  # type: ignore[arg-type]
    assert str(caught.value) == FOLDER_REMOVED
