from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cli.command_line import Stoker
from live.peers import until
from polling import PATIENCE_S

from stoker.manager.cli import apps, runs
from stoker.manager.cli.runs import DetachedRun, RunFile, find_detached_run

WAITS = """
import os, sys, time
print("began", *sys.argv[1:], flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
print("done", flush=True)
sys.exit(3)
"""


@pytest.fixture
def waits(tmp_path: Path) -> Iterator[Path]:
    program = tmp_path / "waits.py"
    program.write_text(WAITS)
    yield program
    (tmp_path / "go").touch()
    for run in runs.list_runs():
        facts = run.facts
        if run.is_alive_here() and facts is not None:
            os.kill(facts.pid, signal.SIGKILL)
        until(lambda run=run: not run.is_running())


def detach(*arguments: str) -> DetachedRun:
    before = {run.name for run in runs.list_runs()}
    Stoker().ok("run", "--detach", *arguments)
    (run,) = [run for run in runs.list_runs() if run.name not in before]
    until(lambda: "began" in run.log.read_text())
    return run


def attach(run: DetachedRun) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "stoker.manager.cli.entry", "attach", run.name]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_attach_follows_a_detached_run_to_its_exit_status(stoker: Stoker, waits: Path, tmp_path: Path):
    done = stoker.ok("run", "--detach", "waits.py", "--epochs", "3")
    run = find_detached_run("waits-1")
    first, *ways = done.stdout.splitlines()
    assert first.startswith(f"waits-1 runs on {run.facts.host} (pid {run.facts.pid}) and continues after you log out")
    assert str(run.log) in first
    assert [" ".join(way.split()[:4]) for way in ways] == [
        "follow stoker logs waits-1", "attach stoker attach waits-1", "stop stoker down waits-1",
    ]  # fmt: skip
    attached = attach(run)
    assert attached.stdout.readline() == "began --epochs 3\n"
    attached.send_signal(signal.SIGINT)
    _, err = attached.communicate(timeout=PATIENCE_S)
    assert "waits-1 keeps running; stoker attach waits-1 shows it, stoker down" in err
    assert attached.returncode == 0
    assert run.is_running()
    attached = attach(run)
    assert attached.stdout.readline() == "began --epochs 3\n"
    (tmp_path / "go").touch()
    assert attached.communicate(timeout=PATIENCE_S)[0] == "done\n"
    assert attached.returncode == 3
    again = stoker("attach", "waits-1")
    assert (again.stdout, again.exit_code) == ("began --epochs 3\ndone\n", 3)
    assert "waits-1: exit status 3 after" in again.stderr


def test_run_survives_hangups_and_the_end_of_its_shell(waits: Path, tmp_path: Path):
    line = f"{sys.executable} -m stoker.manager.cli.entry run --detach waits.py; kill -HUP 0; kill -9 0"
    subprocess.run(["bash", "-c", line], start_new_session=True, capture_output=True, timeout=120, check=False)
    run = find_detached_run("waits-1")
    until(lambda: "began" in run.log.read_text())
    program = psutil.Process(run.facts.pid)
    keeper = program.parent()
    assert os.getsid(program.pid) == os.getsid(keeper.pid) == keeper.pid
    program.send_signal(signal.SIGHUP)
    keeper.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    until(lambda: run.end)
    assert run.log.read_text() == "began\ndone\n"
    assert run.describe_state() == "exit status 3"


def test_down_stops_a_detached_run_with_sigterm(stoker: Stoker, waits: Path, tmp_path: Path):
    (tmp_path / "click.py").write_text("raise SystemExit('a module next to the program hides no other')")
    run = detach("waits.py")
    ended = f"{run.name} {{}}: exit status 143 (ended by signal 15)\n"
    assert stoker("down", run.name).stdout == ended.format("was stopped")
    assert stoker("down", run.name).stdout == ended.format("is over")


def test_detached_run_continues_after_its_supervisor_is_killed(stoker: Stoker, waits: Path):
    run = detach("waits.py")
    program = psutil.Process(run.facts.pid)
    keeper = program.parent()
    keeper.kill()
    until(lambda: not keeper.is_running() or keeper.status() == psutil.STATUS_ZOMBIE)
    assert run.is_running()
    program.kill()
    until(lambda: not run.is_running())
    attached = stoker("attach", run.name)
    assert attached.exit_code == 1
    words = "ended without an exit status (process killed or host restarted)"
    assert f"{run.name}: {words}" in attached.stderr
    assert words in stoker("sessions").stdout


def test_run_that_cannot_be_recorded_is_stopped(tmp_path: Path):
    folder = tmp_path / "run"
    (folder / "run.json").mkdir(parents=True)
    (tmp_path / "long.py").write_text("import time\ntime.sleep(600)\n")
    line = [sys.executable, "-m", "stoker.manager.cli.run_keeper", str(folder), "run", str(tmp_path / "long.py")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "run.json: cannot be written: Is a directory; the program was stopped" in done.stderr
    assert not [
        each for each in psutil.process_iter(["cmdline"]) if str(tmp_path / "long.py") in (each.info["cmdline"] or ())
    ]


def test_run_from_before_a_reboot_is_not_running(tmp_path: Path):
    run = runs.create_run("", what="long.py")
    facts = RunFile(run.name, ("stoker", "run", "long.py"), "/", "n1", "another boot/pid:[1]", os.getpid(), 1, 0.0)
    run.file.write_bytes(runs.msgspec.json.encode(facts))
    run.lock.touch()
    assert not run.is_running()
    assert "without an exit status" in run.describe(now=100.0)


def test_detached_runs_are_listed_and_found_by_name(stoker: Stoker, waits: Path, tmp_path: Path):
    run = detach("--name", "nightly", "waits.py")
    assert run.name == "nightly"
    listed = stoker("sessions").output
    assert "detached runs\n  nightly  running  for " in listed
    assert "stoker run waits.py" in listed
    (one,) = json.loads(stoker("sessions", "--json").output)["runs"]
    assert (one["run"], one["running"], one["status"]) == ("nightly", True, None)
    assert stoker("logs", "nightly").output == "began\n"
    assert stoker("status", "nightly").output.startswith("nightly  running  for ")
    assert "has loaded no session yet" in str(stoker("calls", "nightly").exception)
    assert "detached runs are known by their names: nightly" in str(stoker("attach").exception)
    assert "there is a run nightly (running); choose another name" in str(
        stoker("run", "--detach", "--name", "nightly", "waits.py").exception
    )
    for name in ("attach", "status", "down"):
        assert str(stoker(name, "nigtly").exception).endswith("did you mean the run nightly?")
    (tmp_path / "go").touch()
    until(lambda: not run.is_running())
    assert "nightly  exit status 3  ended " in stoker("sessions").output
    stoker.ok("sessions", "--prune", "--older", "0 s")
    assert find_detached_run("nightly") is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--detach"], "--detach needs a program or an application"),
        (["--detach", "embd"], "did you mean embed?"),
        (["--name", "a", "waits.py"], "write --detach too"),
        (["--detach", "--name", "a/b", "waits.py"], "is not a valid name"),
        (["--detach", "waits.py", "--session", "zz"], "no session 'zz' on this machine"),
    ],
)
def test_invalid_detach_options_are_refused(stoker: Stoker, waits: Path, arguments: list[str], words: str):
    result = stoker("run", *arguments)
    assert words in (str(result.exception) if result.exit_code == 1 else result.output)
    assert result.exit_code != 0
    assert runs.list_runs() == []


def test_detach_option_after_the_program_prints_a_note(stoker: Stoker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ran: list[tuple[Path, tuple[str, ...]]] = []
    monkeypatch.setattr(apps, "run_program", lambda *program: ran.append(program))
    done = stoker.ok("run", "quick.py", "--detach")
    assert ran == [(Path("quick.py"), ("--detach",))]
    assert "to detach the program write stoker run --detach quick.py" in done.stderr.replace("\n", " ")


def test_detached_program_that_fails_at_once_shows_its_output(stoker: Stoker, tmp_path: Path):
    (tmp_path / "fails.py").write_text("raise SystemExit('no model here')\n")
    done = stoker("run", "--detach", "fails.py")
    if done.exit_code == 0:  # on a busy machine the start takes longer than `--detach` waits
        done = stoker("attach", "fails-1")
        assert done.stdout == "no model here\n"
    else:
        assert str(done.exception) == "run fails-1 ended at once: exit status 1\n  no model here"
    assert done.exit_code == 1


PROGRAM = """
import os, time
import stoker

def work(item):
    while not os.path.exists(GO):
        time.sleep(0.02)
    return item

if __name__ == "__main__":
    with stoker.load(progress=False) as session:
        print("began", session.id, flush=True)
        print(list(stoker.map(work, range(4))), flush=True)
"""


def test_run_has_a_session_and_leaves_no_process_when_killed(stoker: Stoker, tmp_path: Path):
    (tmp_path / "works.py").write_text(PROGRAM.replace("GO", repr(str(tmp_path / "go"))))
    run = detach("works.py")
    until(lambda: run.session)
    session = run.log.read_text().split()[1]
    assert f"\nsession {session} · up " in stoker("status", run.name).output
    stoker.ok("calls", run.name)
    os.kill(run.facts.pid, signal.SIGKILL)
    until(lambda: run.end)
    assert run.describe_state() == "exit status 137 (ended by signal 9)"
    assert stoker("attach", run.name).exit_code == 137

    def is_left(process: psutil.Process) -> bool:
        words = process.info["cmdline"] or []
        return process.info["status"] != psutil.STATUS_ZOMBIE and any(str(tmp_path) in word for word in words)

    until(lambda: not any(map(is_left, psutil.process_iter(["cmdline", "status"]))))
