from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from faults.world import World, count_lines, kill, until
from session.held import MANAGER, Held, hold_lease, output_of

from stoker.errors import SessionError
from stoker.manager.cli.main import main
from stoker.manager.cli.session_choice import read_session_status
from stoker.manager.executor import detached
from stoker.manager.live import lease
from stoker.protocol.session import SessionFolder, find_session
from stoker.protocol.to_client import Status

SITE = """
name = "one"
[pilot]
devices = "cpu:1"
[session]
heartbeat = "20 s"
"""
"""Heartbeat interval. A pilot is lost after three missing heartbeats, so with 1 s a busy machine repeats calls."""
PROGRAM = """
import sys, time
import stoker
from helper import note
from stoker import app, context

@context()
def words(log):
    note(log, "loaded")
    return {"pilot": 5, "call": 4}

@app(context=words(sys.argv[1]))
def measure(table, log, word, wait_s=0):
    note(log, word)
    time.sleep(wait_s)
    return table[word]

def main():
    with stoker.load(session=sys.argv[2]) as session:
"""
HELPER = """
import os

def note(path, line):
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, f"{line}\\n".encode())
    os.close(descriptor)
"""


def program(body: str) -> str:
    lines = "".join(f"        {line}\n" for line in body.strip().splitlines())
    return f'{PROGRAM}{lines}\nif __name__ == "__main__":\n    main()\n'


class Up:
    """A running session shared by tests. Each test has its own log and context."""

    def __init__(self, world: World, name: str, *, log: Path) -> None:
        self.world = world
        self.name = name
        self.folder: SessionFolder = find_session(name)
        self.log = log

    def status(self) -> Status:
        return read_session_status(self.name)[1].status

    def holder(self) -> lease.LeaseHolder:
        holder = lease.read_lease(self.folder.lease)
        assert holder is not None
        return holder

    def start(self, body: str) -> subprocess.Popen[str]:
        return self.world.start(program(body), str(self.log), self.name)

    def run(self, body: str) -> str:
        return output_of(self.start(body))

    def kill_managers(self) -> None:
        while managers := self.world.of(MANAGER):  # a keeper may have started another manager meanwhile
            kill(managers)
        until(lambda: not detached.is_manager_up(self.folder))


def stoker(world: World, *arguments: str) -> subprocess.CompletedProcess[str]:
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(world.path), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):  # fmt: skip
        main(arguments)
    return subprocess.CompletedProcess(arguments, int(ended.value.code or 0), out.getvalue(), err.getvalue())


def start(world: World) -> str:
    (world.path / "one.toml").write_text(SITE)
    (world.path / "helper.py").write_text(HELPER)
    said = stoker(world, "up", "one.toml", "--json")
    assert said.returncode == 0, said.stderr
    return str(json.loads(said.stdout)["session"])


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, str]]:
    with World(tmp_path_factory.mktemp("session") / "world").entered() as world:
        name = start(world)
        yield world, name
        said = stoker(world, "down", name)
        assert said.returncode == 0, said.stderr


@pytest.fixture
def up(shared: tuple[World, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Up:
    world, name = shared
    for variable, value in world.environ.items():
        monkeypatch.setenv(variable, value)
    return Up(world, name, log=tmp_path / "calls.log")


def test_second_program_uses_contexts_loaded_by_the_first(up: Up) -> None:
    body = "print(sum(measure(sys.argv[1], word).result() for word in ('pilot', 'call', 'pilot')))"
    assert up.run(body) == "14\n"
    before = up.status()
    assert up.run(body) == "14\n"
    after = up.status()
    assert loads(after) - loads(before) == 0
    assert count_lines(up.log) == {"loaded": 1, "pilot": 4, "call": 2}
    assert (after.done - before.done, after.queued + after.running) == (3, 0)


LAZY = """
import sys
import stoker

@stoker.app
def width():
    import edited
    return edited.WIDTH

@stoker.context
def net():
    from parts import layer
    return layer.DEPTH

@stoker.app(context=net())
def depth(net):
    from parts.layer import DEPTH
    return net, DEPTH

class Model:
    def height(self):
        import below
        return below.HEIGHT

@stoker.app
def height(model):
    return model.height()

with stoker.load(session=sys.argv[1]):
    heights = list(stoker.map(height, [Model()] * 5, window=1))
    assert len(set(heights)) == 1
    print(heights[0], height(Model()).result(60), width().result(60), *depth().result(60))
"""


def test_module_edited_between_programs_is_reloaded(up: Up, tmp_path: Path) -> None:
    def write(number: int, folder: Path) -> None:
        (folder / "parts").mkdir(parents=True, exist_ok=True)
        (folder / "parts" / "__init__.py").touch()
        (folder / "parts" / "layer.py").write_text(f"DEPTH = {number}\n")
        (folder / "edited.py").write_text(f"WIDTH = {number}\n")
        (folder / "below.py").write_text(f"HEIGHT = {number}\n")

    def run(folder: Path) -> str:
        return output_of(up.world.start(LAZY, up.name, folder=folder))

    other = tmp_path / "other"
    for number, folder in ((1, up.world.path), (2, up.world.path), (3, other)):
        write(number, folder)
        assert run(folder) == " ".join([str(number)] * 5) + "\n"


def test_leaving_program_ends_only_its_own_calls(up: Up) -> None:
    before = up.status()
    out = up.run(
        """
future = measure(sys.argv[1], "pilot", 600)
while not session.status().running:
    time.sleep(0.05)
session.stop()
try:
    print(type(future.exception()).__name__)
    session.status()
except stoker.StokerError as error:
    print("was stopped" in str(error))
"""
    )
    assert out == "CallCancelledError\nTrue\n"
    status = up.status()
    assert (status.cancelled - before.cancelled, status.queued + status.running) == (1, 0)
    assert len(status.pilots) == 1


def test_killed_manager_restarts_during_a_running_program(up: Up) -> None:
    running = up.start("print([measure(sys.argv[1], 'pilot', 2).result(), measure(sys.argv[1], 'call').result()])")
    until(lambda: count_lines(up.log).get("pilot"), limit_s=60)
    before = up.holder()
    kill([before.pid])
    out, err = running.communicate(timeout=120)
    assert out == "[5, 4]\n", err
    assert count_lines(up.log) == {"loaded": 1, "pilot": 1, "call": 1}
    assert up.holder().token != before.token


@pytest.mark.long
def test_attach_restarts_a_manager_whose_keeper_is_dead(up: Up) -> None:
    assert up.run("print(measure(sys.argv[1], 'pilot').result())") == "5\n"
    up.kill_managers()
    gone = stoker(up.world, "status", up.name)
    assert f"has ended; `stoker attach {up.name}` restarts the manager" in gone.stdout
    attached = up.world.spawn(
        [sys.executable, "-m", "stoker.manager.cli.entry", "attach", up.name], folder=up.world.path
    )
    until(lambda: detached.is_manager_up(up.folder), limit_s=60)
    assert attached.stdout is not None
    assert until(attached.stdout.readline, limit_s=60).startswith(f"session {up.name} · up ")
    attached.send_signal(signal.SIGINT)
    out, err = attached.communicate(timeout=60)
    assert attached.returncode == 0, err
    assert out.splitlines()[-1] == f"session {up.name} stays up; `stoker down {up.name}` ends it"
    assert "the manager had ended; it is restarted here" in err
    assert up.run("print(measure(sys.argv[1], 'call').result())") == "4\n"
    assert count_lines(up.log) == {"loaded": 1, "pilot": 1, "call": 1}


@pytest.mark.long
def test_start_is_repeated_if_the_first_manager_is_killed(up: Up) -> None:
    up.kill_managers()
    with hold_lease(up.folder.lease) as first, ThreadPoolExecutor(1) as aside:
        log = up.folder.manager_log
        begun = log.stat().st_size
        coming = aside.submit(detached.start_session_manager, up.folder, on_wait=lambda _: None)
        until(lambda: b"already has a manager" in log.read_bytes()[begun:], limit_s=60)
        time.sleep(0.5)
        first.kill()
        assert coming.result(90).token == up.holder().token


def test_down_ends_everything_and_the_session_stays_ended(world: World, tmp_path: Path) -> None:
    up = Up(world, start(world), log=tmp_path / "calls.log")
    program = up.start("print(measure(sys.argv[1], 'pilot', 600).result())")
    until(lambda: count_lines(up.log).get("pilot"), limit_s=60)
    said = stoker(world, "down")
    assert said.returncode == 0, said.stderr
    assert said.stdout == (
        f"session {up.name} has ended: 0 calls done, 1 cancelled, 1 pilot released, 1 job ended; "
        "no process or job remains\n"
    )
    assert "stay on their nodes" in said.stderr
    assert (world.scratch / f"stoker-{os.getuid()}" / "cache").is_dir()
    assert "bytes" in json.loads(stoker(world, "caches", "--clear", "--json").stdout)
    _, err = program.communicate(timeout=60)
    assert program.returncode == 1
    assert "stoker down" in err
    assert world.left() == []
    again = stoker(world, "down", up.name)
    assert (again.returncode, again.stdout) == (
        0,
        f"session {up.name} has ended already; no process or job remains\n",
    )
    assert "no session is up; `stoker up SITE` starts one" in stoker(world, "attach").stderr
    assert "is over: stoker down" in stoker(world, "attach", up.name).stderr
    with pytest.raises(SessionError, match="is over: stoker down"):
        detached.find_and_restart_session(up.name)


@pytest.mark.parametrize("damaged", ["lease", "site"])
def test_down_ends_a_session_with_damaged_files(world: World, tmp_path: Path, damaged: str) -> None:
    up = Up(world, start(world), log=tmp_path / "calls.log")
    until(lambda: up.status().pilots, limit_s=60)
    (file,) = [up.folder.lease] if damaged == "lease" else up.folder.sites.glob("*.toml")
    file.write_bytes(b"\0" * 40)
    said = stoker(world, "down", "--wait", "60" if damaged == "lease" else "1")
    if damaged == "lease":
        assert said.returncode == 0, said.stderr
        assert said.stdout.startswith(f"session {up.name} has ended")
    else:
        assert said.returncode == 1
        assert "perhaps jobs " in said.stdout
        assert "is damaged: it begins with zero bytes" in said.stdout
    world.empty()


@pytest.mark.long
@pytest.mark.parametrize("is_dead", [False, True])
def test_concurrent_down_commands_all_report_the_end(world: World, tmp_path: Path, is_dead: bool) -> None:
    name = start(world)
    if is_dead:
        Up(world, name, log=tmp_path / "calls.log").kill_managers()
    command = [sys.executable, "-m", "stoker.manager.cli.entry", "down", name]
    downs = [world.spawn(command, folder=world.path) for _ in range(3)]
    said = [process.communicate(timeout=100) for process in downs]
    assert [process.returncode for process in downs] == [0, 0, 0], said
    assert any(f"session {name} has ended: " in out for out, _ in said)
    assert all(f"session {name} has ended" in out and "no process or job remains" in out for out, _ in said)
    assert not any("does not answer" in err or "exit code" in err for _, err in said)
    world.empty()


def begin(world: World, held: Held, *arguments: str) -> subprocess.Popen[str]:
    """Run a command in a process until the held process pauses."""
    (world.path / "one.toml").write_text(SITE)
    command = [sys.executable, "-m", "stoker.manager.cli.entry", *arguments]
    begun = world.spawn(command, folder=world.path, **held.environ)
    held.wait()
    return begun


@pytest.mark.long
def test_ctrl_c_before_the_manager_listens_leaves_nothing(world: World) -> None:
    coming = begin(world, Held(world, MANAGER), "up", "one.toml")
    kill(pids := world.of(MANAGER), signal.SIGSTOP)
    coming.send_signal(signal.SIGINT)
    _, err = coming.communicate(timeout=60)
    assert coming.returncode == 130, err
    assert "Traceback" not in err
    kill(pids, signal.SIGCONT)
    world.empty()
    assert not list(world.home.glob("sessions.d/*"))
    assert not list(world.home.glob("sessions/*"))


def test_ctrl_c_after_up_reports_that_the_session_is_up(world: World) -> None:
    coming = begin(world, factory := Held(world, "stoker.manager.factory.main"), "up", "one.toml")
    [link] = until(lambda: list(world.home.glob("sessions/*")), limit_s=60)
    up = psutil.Process(coming.pid)
    until(
        lambda: any(one.status == psutil.CONN_ESTABLISHED for one in up.net_connections()),
        why="the command queries the manager",
    )
    coming.send_signal(signal.SIGINT)
    _, err = coming.communicate(timeout=60)
    assert coming.returncode == 130, err
    assert "Traceback" not in err
    assert f"session {link.name} is up; its queues: stoker status {link.name}" in err
    factory.let_go()
    assert stoker(world, "down", link.name).returncode == 0
    world.empty()


@pytest.mark.long
def test_idle_session_ends_and_leaves_nothing(world: World) -> None:
    (world.path / "one.toml").write_text(SITE)
    stoker(world, "up", "one.toml", "--idle", "4 s")
    world.empty(limit_s=60)
    status = stoker(world, "status")
    assert re.search(r"ended at [\d:]+ \(no program has used it for", status.stdout)


def loads(status: Status) -> int:
    return sum(context.loads for context in status.contexts)
