"""Two sessions of one user on one host share only the disk of the pilots; the end of one does not affect the other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from faults.world import World, count_lines, is_alive, kill, until
from session.test_session_up import start, stoker

from stoker.protocol.session import find_session
from stoker.protocol.to_client import Status

pytestmark = pytest.mark.long

PROGRAM = """
import sys, time
import stoker
from helper import note
from stoker import app, context

session, log, path, wait_s = sys.argv[1:]

@context(files=["path"])
def words(log, path):
    note(log, "loaded")
    with open(path, "rb") as file:
        return len(file.read())

@app(context=words(log, path))
def measure(size, log, wait_s):
    note(log, "called")
    time.sleep(wait_s)
    return size

with stoker.load(session=session) as session:
    print(measure(log, float(wait_s)).result(120))
"""
SIZE = 5_000_000


class Neighbour:
    """A session on a shared disk, with its own log."""

    def __init__(self, world: World, tmp_path: Path) -> None:
        self.world, self.name = world, start(world)
        self.log = tmp_path / f"{self.name}.log"
        self.file = tmp_path / "words.bin"

    def start(self, *, wait_s: float = 0.0) -> subprocess.Popen[str]:
        (self.world.path / "use.py").write_text(PROGRAM)
        words = [self.name, str(self.log), str(self.file), str(wait_s)]
        return self.world.spawn([sys.executable, str(self.world.path / "use.py"), *words], folder=self.world.path)

    def run(self) -> int:
        program = self.start()
        out, err = program.communicate(timeout=120)
        assert program.returncode == 0, err
        return int(out)

    def lines(self, line: str) -> int:
        return count_lines(self.log).get(line, 0)

    def status(self) -> Status:
        from stoker.manager.cli.session_choice import read_session_status

        return read_session_status(self.name)[1].status

    def processes(self) -> list[int]:
        folder = str(find_session(self.name).path)
        named = [pid for pid in self.world.processes() if folder in _arguments(pid)]
        return [pid for pid in named if is_alive(pid)]

    def pilot(self) -> int:
        return min(pid for pid in self.processes() if "stoker.pilot.main" in _arguments(pid))


def _arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


@pytest.fixture
def both(world: World, tmp_path: Path) -> tuple[Neighbour, Neighbour]:
    (tmp_path / "words.bin").write_bytes(os.urandom(SIZE))
    return Neighbour(world, tmp_path), Neighbour(world, tmp_path)


@pytest.mark.long
def test_sessions_of_one_host_share_fetched_files(world: World, both: tuple[Neighbour, Neighbour]) -> None:
    first, second = both
    assert first.run() == SIZE
    assert second.run() == SIZE
    [objects] = world.scratch.glob("stoker-*/cache/objects")
    assert len(list(objects.iterdir())) == 1, "one copy of the file for both"
    assert len(world.pilot_folders()) == 2
    program = second.start(wait_s=6.0)
    until(lambda: second.lines("called") == 2, limit_s=60, why="the second's long call")

    kill([first.pilot()])  # the next pilot of the first session removes only the files of the dead pilot
    until(lambda: first.status().lost_pilots == 1 and first.status().pilots, limit_s=60, why="another pilot")
    assert first.run() == SIZE
    ended = stoker(world, "down", first.name)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert first.processes() == []

    out, err = program.communicate(timeout=60)
    assert (program.returncode, out) == (0, f"{SIZE}\n"), err
    assert second.run() == SIZE
    assert (second.lines("loaded"), second.status().lost_pilots, second.status().rerun_calls) == (1, 0, 0)
    assert len(world.pilot_folders()) == 1
    assert stoker(world, "down", second.name).returncode == 0
