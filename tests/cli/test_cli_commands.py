from __future__ import annotations

import importlib.metadata
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import click
import msgspec
import pytest
from cli.command_line import Stoker
from click.testing import CliRunner
from live.peers import Manager

import stoker as package
from stoker.contexts.folders import state_folder
from stoker.manager.cli import apps, doctor, doctor_machine, main
from stoker.manager.cli.doctor_machine import Finding, FindingLevel
from stoker.manager.cli.main import cli
from stoker.manager.executor import new_sessions
from stoker.manager.executor.processes import register_session
from stoker.protocol.session import SessionFile, SessionFolder


def command_line(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stoker.manager.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_version_is_the_package_version(stoker: Stoker):
    assert stoker("--version").output == f"stoker {package.__version__}\n"
    assert importlib.metadata.version("stoker") == package.__version__


def test_help_lists_every_command(stoker: Stoker):
    shown = stoker("--help").output
    for command in ("run", "init", "up", "down", "attach", "doctor", "status", "calls", "explain", "logs", "sessions"):
        assert f"\n  {command} " in shown


@pytest.mark.parametrize("command", ["status", "attach", "down", "calls", "explain", "logs"])
def test_every_command_accepts_its_session_as_argument_and_option(stoker: Stoker, command: str):
    first = ["c-0"] if command in ("explain", "logs") else []
    for form in (["zz"], ["--session", "zz"], ["zz", "--session", "zz"]):
        assert str(stoker(command, *first, *form).exception).startswith("no session 'zz' on this machine")
    both = stoker(command, *first, "zz", "--session", "yy")
    assert both.exit_code == 2
    assert "SESSION is zz and --session is yy; use only one of them" in both.output
    shown = " ".join(stoker(command, "--help").output.split())
    assert "[SESSION]" in shown.partition(" Options: ")[0]
    assert (
        "--session SESSION The same as the argument SESSION: the session's id, a prefix of the id, or its folder. [the"
        in shown
    )


def test_unknown_application_error_names_the_nearest_name(stoker: Stoker):
    result = stoker("run", "fact_verifcation")
    assert result.exit_code == 2
    assert "no application 'fact_verifcation'; did you mean fact_verification?" in result.output
    assert (
        "there are batch_inference, embed, encoder_lengths, fact_verification, inference_sweep"
        in stoker("run", "zzzzzz").output
    )


def known_session(folder: Path) -> str:
    session = SessionFolder(folder / "known")
    session.create_folders()
    session.write(SessionFile("k3v9", 1, "tcp://127.0.0.1:1", "key"))
    register_session(session)
    return "k3v9"


def test_application_joins_the_named_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    known_session(tmp_path)
    seen: list[tuple[str, str | None]] = []

    @click.command()
    @click.option("--site")
    def app(site: str | None) -> None:
        seen.append((os.environ.get("STOKER_SESSION", ""), site))

    monkeypatch.setenv("STOKER_SESSION", "")
    command = apps.add_session_option(apps.add_session_option(app))
    assert CliRunner().invoke(command, ["--session", "k3v9"]).exit_code == 0
    assert seen == [("k3v9", None)]
    both = CliRunner().invoke(command, ["--site", "s.toml", "--session", "k3v9"])
    assert both.exit_code == 2
    assert "--session and --site exclude each other" in both.output
    assert "--session ID" in CliRunner().invoke(cli, ["run", "fact_verification", "--help"]).output
    unknown = CliRunner().invoke(command, ["--session", "zz"])
    assert str(unknown.exception).startswith("no session 'zz' on this machine")


def test_up_refuses_invalid_options_and_starts_nothing(stoker: Stoker, tmp_path: Path):
    (tmp_path / "a.toml").write_text('name = "a"\n[pilot]\ndevices = "cpu:1"')
    (tmp_path / "b.toml").write_text('name = "a"\n[pilot]\ndevices = "cpu:2"')
    (tmp_path / "vine.toml").write_text('engine = "taskvine"')
    for arguments, words in (
        (["nowhere.toml"], "no such file"),
        (["a.toml", "b.toml"], "two sites are called a"),
        (["a.toml", "vine.toml"], 'a session with engine = "taskvine" has one site'),
        (["a.toml", "--folder", str(tmp_path)], "is not empty; name a new or empty folder"),
        (["a.toml", "--idle", "1 ms"], "too short for a program to join"),
    ):
        assert words in str(stoker("up", *arguments).exception)
    assert not state_folder().exists()


def test_ctrl_c_during_python_imports_prints_no_traceback(tmp_path: Path):
    (tmp_path / "click.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "stoker.manager.cli.entry", "--version"]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ) as starting:
        assert starting.stdout.readline() == b"importing\n"
        starting.send_signal(signal.SIGINT)
        _, said = starting.communicate(timeout=30)
    assert (starting.returncode, said) == (-signal.SIGINT, b"")


@pytest.mark.parametrize(("command", "code", "lines"), [("statsu", 2, 4), ("status", 1, 1)])
def test_errors_go_to_stderr(command: str, code: int, lines: int, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main.main([command])
    said = capsys.readouterr()
    assert (ended.value.code, said.out, said.err.count("\n")) == (code, "", lines), said.err
    assert ("status" if code == 2 else "no session") in said.err


HEAVY = ("torch", "transformers", "parsl", "pyarrow", "sqlalchemy", "importlib.metadata", "zipfile", "tarfile")


@pytest.mark.parametrize("module", ["stoker.manager.cli.main", "stoker.manager.factory.main"])
def test_process_starts_without_heavy_imports(module: str):
    script = f"import sys, {module}; print([name for name in {HEAVY} if sys.modules.get(name)])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_doctor_completes_all_checks_on_this_machine(stoker: Stoker):
    result = stoker.ok("doctor")
    assert "could not be checked" not in result.output
    assert f"Python {sys.version.split()[0]}" in result.output
    told = msgspec.json.decode(stoker("doctor", "--json").output, type=dict[str, list[Finding]])["findings"]
    topics = {finding.topic for finding in told}
    assert topics >= {"python", "packages", "devices", "disks", "limits", "sockets", "clock", "store", "sessions"}


def test_doctor_fails_if_a_requirement_is_missing(stoker: Stoker, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        importlib.metadata,
        "requires",
        lambda name: ["msgspec>=0.1", "no-such-package>=2", "rich<1", "nope; extra == 'x'"],
    )
    result = stoker("doctor")
    assert result.exit_code == 1
    assert "need  missing: no-such-package >=2, rich <1" in result.output
    assert 'pip install "no-such-package >=2" "rich <1"' in result.output


def test_doctor_check_that_raises_is_reported_as_a_finding():
    def unlucky() -> list[Finding]:
        raise OSError("no such luck")

    (finding,) = doctor.run_checks([doctor.Check("unlucky", "Is there luck?", unlucky)])
    assert finding.text == "unlucky could not be checked (Is there luck?): OSError: no such luck"


def test_torch_build_is_read_without_importing_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    torch = tmp_path / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for line, built in (("cuda: Optional[str] = '12.8'", "12.8"), ("cuda: Optional[str] = None", "")):
        (torch / "version.py").write_text(f"debug = False\n{line}\n")
        assert doctor_machine._cuda_version_of_torch() == built


def test_damaged_measurement_database_is_reported():
    state_folder().mkdir(parents=True)
    path = state_folder() / doctor.MEASUREMENT_FILE
    assert next(doctor.check_measurement_store()).level is FindingLevel.OK
    path.write_bytes(b"not a database at all, whatever it says" * 100)
    damaged = next(doctor.check_measurement_store())
    assert damaged.level is FindingLevel.WARN
    assert damaged.fix == f"move the file away, and Stoker creates a new file: mv {path} {path}.damaged"
    path.unlink()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE measured (recipe TEXT)")
        db.execute("INSERT INTO measured VALUES ('a')")
    db.close()
    assert "measurements of 1 context in" in next(doctor.check_measurement_store()).text


def test_doctor_counts_live_ended_and_removed_sessions(manager: Manager, tmp_path: Path):
    over = SessionFolder(tmp_path / "over")
    over.create_folders()
    over.write(SessionFile("k1", 1, "tcp://127.0.0.1:1", "key"))
    register_session(over)
    (state_folder() / "sessions" / "k0").symlink_to(tmp_path / "nowhere")
    texts = [finding.text for finding in doctor.check_earlier_sessions()]
    assert texts[0] == "1 live session: test"
    assert texts[1].startswith("1 ended session with ")
    assert texts[2].startswith("1 link to sessions whose folders are gone")


def test_doctor_warns_about_a_session_that_lost_its_manager(tmp_path: Path):
    folder = new_sessions.create_session(new_sessions.load_listed_sites(()))
    folder.write(SessionFile("k1", 1, "tcp://127.0.0.1:1", "key"))
    register_session(folder)
    lost = [finding for finding in doctor.check_earlier_sessions() if finding.level is FindingLevel.WARN]
    assert [finding.text for finding in lost] == ["session k1 is not over, but has no manager"]
    assert "stoker attach k1" in lost[0].fix


# ---- stoker run ./my_app.py


def run_program(tmp_path: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "helper.py").write_text("NAME = 'helper'\n")
    (tmp_path / "my_app.py").write_text(text)
    return command_line("run", str(tmp_path / "my_app.py"), *arguments)


def test_user_program_runs_as_under_python(tmp_path: Path):
    text = """
import os, sys
from helper import NAME
if __name__ == "__main__":
    print(NAME, __file__.endswith("my_app.py"), sys.argv[1:], os.environ.get("STOKER_SESSION"))
    sys.exit(3)
"""
    known_session(tmp_path)
    ran = run_program(tmp_path, text, "--fast", "a", "--help", "--session", "k3v9", "-n", "2")
    assert ran.stdout.strip() == "helper True ['--fast', 'a', '--help', '-n', '2'] k3v9", ran.stderr
    assert ran.returncode == 3


def test_click_command_of_a_user_program_is_run_once(tmp_path: Path):
    text = """
import click
@click.command()
@click.option("--count", type=int)
def command(*, count):
    print("count", count)
"""
    assert run_program(tmp_path, text, "--count", "4").stdout == "count 4\n"
    wrong = run_program(tmp_path, text, "--count", "four")
    assert wrong.returncode == 2
    assert "--count" in wrong.stderr
    both = run_program(tmp_path, f"{text}\nif __name__ == '__main__':\n    command()\n", "--count", "5")
    assert both.stdout == "count 5\n", "once"


def test_error_of_a_user_program_is_printed_as_by_python(tmp_path: Path):
    ran = run_program(tmp_path, "import stoker\n\nraise stoker.StokerError('no luck')\n")
    assert ran.returncode == 1
    lines = ran.stderr.strip().splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert 'my_app.py", line 3, in <module>' in lines[1]
    assert lines[-1] == "stoker.errors.StokerError: no luck"


def test_functions_of_a_user_program_can_be_sent(tmp_path: Path):
    text = """
import stoker
from helper import NAME
OFFSET = 10
@stoker.app
def add(x):
    return NAME, x + OFFSET
if __name__ == "__main__":
    with stoker.load(progress=False, run_dir="RUNS") as session:
        print(add(1).result(60), list(stoker.map(add, [2])))
""".replace("RUNS", str(tmp_path / "runs"))
    ran = run_program(tmp_path, text)
    assert ran.stdout.strip() == "('helper', 11) [('helper', 12)]", ran.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tests"], "--tests needs a site file, which describes the job: stoker doctor site.toml --tests"),
        (["here.toml", "--tests", "--probe"], "--probe and --tests: use only one of these options"),
    ],
)
def test_doctor_refuses_invalid_site_suite_options(stoker: Stoker, tmp_path: Path, options: list[str], said: str):
    (tmp_path / "here.toml").write_text('name = "here"\n')
    told = stoker("doctor", *(option.replace("here.toml", str(tmp_path / "here.toml")) for option in options))
    assert (told.exit_code, said in told.output) == (2, True), told.output


def test_eof_error_inside_a_command_is_not_taken_for_ctrl_d(tmp_path: Path):
    """click treats every EOFError like Ctrl-D."""
    program = tmp_path / "program.py"
    lines = ["import click", "@click.command()", "def command():", "    raise EOFError('the archive is cut off')"]
    program.write_text("\n".join(lines))
    ended = command_line("run", str(program))
    assert ended.returncode == 1
    assert "EOFError: the archive is cut off" in ended.stderr


FULL = "the output cannot be written: No space left on device; make room on that disk, or use another disk\n"


@pytest.mark.parametrize(("output", "ended"), [(">/dev/full", (1, FULL)), (">&-", (0, ""))])
def test_unwritable_output_is_an_error_and_closed_output_is_not(output: str, ended: tuple[int, str]):
    command = ["sh", "-c", f'exec "$@" {output}', "sh", sys.executable, "-m", "stoker.manager.cli.main", "sessions"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == ended


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["explain"], "name a call, pilot, library, context or block; `stoker calls` lists calls"),
        (["replay", "c-2"], "c-2 is a call, and stoker replay requires a session; `stoker explain c-2` shows the call"),
        (["run", "mine"], "did you mean ./mine.py?"),
        (["serve", "models.toml", "--max-body", "32"], 'the unit of 32 is missing; write "32 GB" or "32 MB"'),
        (["serve", "models.toml", "--max-body", "0 MB"], "is not a valid size"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_incomplete_command_error_suggests_a_valid_command(stoker: Stoker, words: list[str], said: str):
    Path("mine.py").touch()
    Path("models.toml").touch()
    done = stoker(*words)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
