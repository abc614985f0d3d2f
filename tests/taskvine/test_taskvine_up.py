from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.world import World, command_of, count_lines, kill, until

from stoker.manager.cli.session_choice import read_session_status
from stoker.manager.executor import detached
from stoker.protocol.session import SessionFolder, find_session
from stoker.protocol.to_client import Status

SITE = """
name = "pool"
engine = "taskvine"
[pilot]
devices = "cpu:2"
[session]
heartbeat = "1 s"
"""
PROGRAM = """
import os, sys
import stoker
from helper import note

@stoker.context
def words(log):
    note(log, "loaded")
    return {"pilot": 5, "call": 4}

@stoker.app(context=words(sys.argv[1]))
def measure(table, log, word):
    note(log, word)
    return table[word]

@stoker.app(context=words(sys.argv[1]), deadline="1 h")
def soon(table):
    return table

def main():
    with stoker.load(session=sys.argv[2]):
        try:
            print(soon().result())
        except stoker.StokerError as error:
            print(str(error).partition(": ")[2].split(" (")[0])
        print(sum(measure(sys.argv[1], word).result() for word in ("pilot", "call", "pilot")))

if __name__ == "__main__":
    main()
"""
HELPER = """
import os

def note(path, line):
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, f"{line}\\n".encode())
    os.close(descriptor)
"""
SAID = 'engine = "taskvine" cannot honour deadline: TaskVine runs calls in the order of their submission\n14\n'


class Up:
    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.folder: SessionFolder = find_session(name)
        self.log = world.path / "calls.log"

    def status(self) -> Status:
        return read_session_status(self.name)[1].status

    def run(self) -> str:
        process = self.world.start(PROGRAM, str(self.log), self.name)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        return out

    def of(self, program: str) -> list[int]:
        return [pid for pid in self.world.processes() if Path((command_of(pid) or [""])[0]).name == program]


def stoker(world: World, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stoker.manager.cli.entry", *arguments]
    process = world.spawn(command, folder=world.path)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.fixture
def up(taskvine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Up]:
    world = World(tmp_path / "world")
    for name, value in world.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("STOKER_SESSION", raising=False)
    (world.path / "pool.toml").write_text(SITE)
    (world.path / "helper.py").write_text(HELPER)
    try:
        said = stoker(world, "up", "pool.toml", "--json")
        assert said.returncode == 0, said.stderr
        yield Up(world, str(json.loads(said.stdout)["session"]))
        world.empty()
    finally:
        world.clear()


def test_programs_use_contexts_loaded_by_other_programs(up: Up) -> None:
    assert up.run() == SAID
    assert up.run() == SAID
    assert count_lines(up.log)["loaded"] <= 2  # each slot loads once, for any number of programs
    assert count_lines(up.log)["pilot"] == 4
    status = stoker(up.world, "status", up.name).stdout
    assert "6 calls done" in status
    assert "cpu:0 cpu (TaskVine)" in status
    said = stoker(up.world, "down", up.name)
    assert said.returncode == 0, said.stderr
    assert said.stdout == (
        f"session {up.name} has ended: 6 calls done, 1 pilot released, 1 job ended; no process or job remains\n"
    )
    assert up.world.left() == []


def test_restarted_manager_reconnects_to_its_pool(up: Up) -> None:
    assert up.run() == SAID
    [before] = up.status().pilots
    kill([pid for pid in up.world.of("stoker.manager.main") if "--kept" in command_of(pid)])
    kill(up.world.of("stoker.manager.main"))
    until(lambda: not detached.is_manager_up(up.folder))
    attached = up.world.spawn(
        [sys.executable, "-m", "stoker.manager.cli.entry", "attach", up.name], folder=up.world.path
    )
    until(lambda: detached.is_manager_up(up.folder), limit_s=60)
    until(lambda: up.status().pilots, limit_s=60)
    attached.send_signal(signal.SIGINT)
    attached.communicate(timeout=60)
    loaded = count_lines(up.log)["loaded"]
    assert up.run() == SAID
    assert [pilot.pilot for pilot in up.status().pilots] == [before.pilot]
    assert count_lines(up.log)["loaded"] <= max(2, loaded)
    assert stoker(up.world, "down", up.name).returncode == 0


def test_remaining_processes_are_named_with_the_command_to_end_them(up: Up) -> None:
    until(lambda: up.status().pilots, limit_s=60)
    until(lambda: up.of("vine_worker"), limit_s=60)
    kill(up.of("vine_factory"), signal.SIGSTOP)
    kill(up.world.of("stoker.pilot.taskvine.main"))
    [stopped] = up.of("vine_factory")
    said = stoker(up.world, "down", up.name, "--wait", "5")
    assert said.returncode == 1
    assert f"left  its vine_factory (pid {stopped}); end it: kill {stopped}" in said.stdout
    assert up.folder.end_reason() == "stoker down"
    doctor = stoker(up.world, "doctor").stdout
    assert f"vine_factory {stopped} of {up.folder.path}" in doctor
    kill(up.of("vine_factory"), signal.SIGCONT)
    until(lambda: not up.world.left(), limit_s=60)
    again = stoker(up.world, "down", up.name)
    assert again.stdout == f"session {up.name} has ended already; no process or job remains\n"
