"""Find the processes of a session and run programs that fault tests kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
from polling import PATIENCE_S, polls

T = TypeVar("T")

STAYS = frozenset({"cache", "environments", "snapshots", "alive"})
"""Names on pilot disks that outlive a session: the caches (`stoker caches`) and the lock file."""
ROOT = Path(__file__).resolve().parents[2]


def site_file(folder: Path, *, devices: str = "cpu:1", pilots: int = 1) -> str:
    path = folder / "site.toml"
    path.write_text(f'[pilot]\ndevices = "{devices}"\nmax_blocks = {pilots}\ninit_blocks = {pilots}\n')
    return str(path)


def until(true: Callable[[], T], *, limit_s: float = PATIENCE_S, why: str = "") -> T:
    for more in polls(limit_s):
        if value := true():
            return value
        assert more, f"not within {limit_s:g} s: {why or true}"
    raise AssertionError


def command_of(pid: int) -> list[str]:
    with suppress(psutil.Error):
        return list(psutil.Process(pid).cmdline())
    return []


def is_alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def kill(pids: Iterable[int], how: int = signal.SIGKILL) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, how)


class World:
    """The scratch folder and state folder of a test, and the processes that use these folders."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.scratch = path / "scratch"
        self.home = path / "home"
        self.runs = path / "runinfo"
        for folder in (self.scratch, self.home):
            folder.mkdir(parents=True, exist_ok=True)
        self.environ = {"STOKER_SCRATCH": str(self.scratch), "STOKER_HOME": str(self.home)}

    def processes(self) -> list[int]:
        there = [(each.pid, each.info["environ"] or {}) for each in psutil.process_iter(["environ"])]
        ours = [pid for pid, environ in there if environ.get("STOKER_SCRATCH") == str(self.scratch)]
        return [pid for pid in ours if pid != os.getpid() and is_alive(pid)]

    def of(self, module: str) -> list[int]:
        return [pid for pid in self.processes() if module in command_of(pid)]

    def manager(self) -> int:
        return until(lambda: _only(self.of("stoker.manager.main")), why="one manager")

    def pilot(self) -> int:
        return until(lambda: _only(self.of("stoker.pilot.main")), why="one pilot")

    def pilots(self) -> list[int]:
        return _leaders(self.of("stoker.pilot.main"))

    def pilot_folders(self) -> list[Path]:
        return list(self.scratch.glob("stoker-*/pilot-*"))

    def left(self, *, folders: bool = True) -> list[str]:
        """Return leftover processes and, with `folders`, leftover files on pilot disks."""
        there = [f"{pid}: {' '.join(command_of(pid))}" for pid in self.processes()]
        places = [str(place) for place in self.scratch.glob("stoker-*/*") if place.name not in STAYS]
        return there + (places if folders else [])

    @contextmanager
    def entered(self, *, limit_s: float = PATIENCE_S, folders: bool = True) -> Iterator[World]:
        """Use this world in the current process. On exit, every process and file must be gone (see `empty`)."""
        before = {name: os.environ.get(name) for name in self.environ}
        os.environ.update(self.environ)
        try:
            yield self
            self.empty(limit_s=limit_s, folders=folders)
        finally:
            self.clear()
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def empty(self, *, limit_s: float = PATIENCE_S, folders: bool = True) -> None:
        """Wait until no process is left and, with `folders`, no file."""
        for more in polls(limit_s, longest_s=0.1):
            if not (left := self.left(folders=folders)):
                return
            assert more, f"still there after {limit_s:g} s: {left}"

    def clear(self) -> None:
        """Kill leftover processes, so that a failing test does not disturb the next."""
        for _ in range(50):
            left = self.processes()
            if not left:
                return
            kill(left)
            time.sleep(0.02)

    def start(self, code: str, *arguments: str, folder: Path | None = None, **environ: str) -> subprocess.Popen[str]:
        """Run this program text from a file in another process, as a user does."""
        place = folder or self.path
        file = place / "program.py"
        file.write_text(code)
        return self.spawn([sys.executable, str(file), *arguments], folder=place, **environ)

    def spawn(self, command: list[str], *, folder: Path, **environ: str) -> subprocess.Popen[str]:
        folder.mkdir(parents=True, exist_ok=True)
        return subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **self.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


def _only(pids: list[int]) -> int:
    """Return the process that forked the other processes; 0 if no or several processes did."""
    leaders = _leaders(pids)
    return leaders[0] if len(leaders) == 1 else 0


def _leaders(pids: list[int]) -> list[int]:
    """Omit processes whose parent is in the list: a child shows the command line of its parent until it runs its
    own program.
    """
    return [pid for pid in pids if _parent(pid) not in pids]


def _parent(pid: int) -> int:
    with suppress(psutil.NoSuchProcess):
        return int(psutil.Process(pid).ppid())
    return 0


def count_lines(path: Path) -> dict[str, int]:
    """Return the count of each line in a file to which calls append lines."""
    found: dict[str, int] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        found[line] = found.get(line, 0) + 1
    return found


def note(path: str, line: Any) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)
