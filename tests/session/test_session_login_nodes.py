"""Two login nodes share only the session folder: managers run in namespaces with separate host names, process ids,
clocks and locks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.world import World, until
from live.peers import session_folder
from polling import PATIENCE_S

from stoker.manager.live import lease
from stoker.protocol.session import SessionFolder

MANAGER = """
import sys
from stoker.manager.live import lease
lease.take_lease.__kwdefaults__.update(patience_s=float(sys.argv.pop(1)), settle_s=1.5, renew_s=0.2)
from stoker.manager.main import main
sys.exit(main())
"""
ALONE = ("--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
A_DAY_APART = ("--time", "--monotonic", "86400", "--boottime", "86400")


def allowed(*namespaces: str) -> bool:
    if os.geteuid() or shutil.which("unshare") is None:
        return False
    return not subprocess.run(["unshare", *ALONE, *namespaces, "true"], capture_output=True).returncode


pytestmark = pytest.mark.skipif(not allowed(), reason="login nodes of their own need root and unshare(1)")


class LoginNodes:
    def __init__(self, folder: SessionFolder, place: Path) -> None:
        self.folder = folder
        self.lease = folder.lease
        self.lock = self.lease.with_suffix(".lock")
        self.lock.touch()
        self._place = place
        self._started: list[subprocess.Popen[str]] = []

    def start(self, host: str, *namespaces: str, patience_s: float = PATIENCE_S) -> subprocess.Popen[str]:
        """Start a manager on a host with its own lock file. `patience_s`: seconds to wait for the previous manager."""
        mine = self._place / f"lock-{host}"
        mine.touch()
        settle = 'hostname "$0" && mount --bind "$1" "$2" && shift 2 && exec "$@"'
        manager = [sys.executable, "-c", MANAGER, str(patience_s), "--session", str(self.folder.path), "--name", "test"]
        process = subprocess.Popen(
            ["unshare", *ALONE, *namespaces, "sh", "-c", settle, host, str(mine), str(self.lock), *manager],
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def first(self, host: str) -> subprocess.Popen[str]:
        process = self.start(host)
        until(lambda: process.poll() is not None or self.folder.file.exists(), why="the manager listens")
        assert self.holder() == host
        return process

    def holder(self) -> str:
        there = lease.read_lease(self.lease)
        return there.host if there is not None else ""

    def crash(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait(10)

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def nodes(world: World, tmp_path: Path) -> Iterator[LoginNodes]:
    nodes = LoginNodes(session_folder(tmp_path / "session"), tmp_path)
    yield nodes
    nodes.close()


def refused(process: subprocess.Popen[str], *, by: str) -> None:
    _, said = process.communicate(timeout=60)
    assert process.returncode == 3
    assert f"already has a manager (pid 1 on {by}); a session can have only one manager" in said


@pytest.mark.long
def test_one_of_two_successors_gets_the_session_without_file_locks(nodes: LoginNodes) -> None:
    nodes.crash(nodes.first("login1"))
    both = {host: nodes.start(host, patience_s=3.0) for host in ("login2", "login3")}
    loser = until(
        lambda: next((h for h in both if both[h].poll() is not None), ""), limit_s=60, why="one manager gives up"
    )
    [winner] = both.keys() - {loser}
    refused(both[loser], by=winner)
    assert nodes.holder() == winner
    counter = lease.read_lease(nodes.lease)
    until(lambda: lease.read_lease(nodes.lease) != counter, why="the winner renews")
    assert both[winner].poll() is None


@pytest.mark.long
@pytest.mark.skipif(not allowed(*A_DAY_APART), reason="a separate clock needs unshare --time")
def test_different_or_jumping_clocks_start_no_second_manager(nodes: LoginNodes) -> None:
    first = nodes.first("login1")
    second = nodes.start("login2", *A_DAY_APART)
    jumps = iter([0, 4_000_000_000, 86_400] * 1000)

    def tried() -> bool:
        os.utime(nodes.lease, (at := next(jumps), at))  # set the file time of the lease like a host with a wrong clock
        return second.poll() is not None

    until(tried, limit_s=60, why="the second gives up")
    refused(second, by="login1")
    assert first.poll() is None
    nodes.crash(first)
    nodes.start("login3", *A_DAY_APART, patience_s=3.0)
    until(lambda: nodes.holder() == "login3", limit_s=60, why="a manager with another clock takes over")
