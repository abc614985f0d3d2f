"""A node whose disk is too small, in a session: it is left alone, others do its work, and it is told why."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.world import until

import stoker
from stoker.manager.factory import pilot_command
from stoker.protocol.session import SessionFolder


def _can_mount() -> bool:
    if os.geteuid() or shutil.which("unshare") is None:
        return False
    mount = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return not subprocess.run(mount, capture_output=True).returncode


@contextlib.contextmanager
def ended_if_it_fails(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        process.kill()
        raise


FILLS_ITS_DISK = """
import contextlib, os, signal, sys, time
from pathlib import Path
import stoker
from stoker.errors import StokerError
from stoker.manager.cli.ask import Observer

runs = Path(sys.argv[1])

@stoker.app
def wait(number, more):
    import time
    time.sleep(0.1)
    return number

session = stoker.load(run_dir=str(runs / "runinfo"), progress=False)
assert wait(1, b"").result(60) == 1
with open(runs / "fill", "wb", 0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
calls = [wait(number, bytes(500)) for number in range(200)]
while not session.executor.link.journal_trouble:
    time.sleep(0.1)
print(session.id, session.status().trouble["journal"], flush=True)
time.sleep(3)
{then}
"""


def filling_its_disk(path: Path, then: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A program fills the small disk that its session lies on, and does `then`. How it ended, and the disk."""
    disk = path / "disk"
    disk.mkdir()
    mount = 'mount -t tmpfs -o size=4m none "$0"; exec "$@"'
    program = [sys.executable, "-c", FILLS_ITS_DISK.format(then=then), str(disk)]
    command = ["unshare", "--mount", "sh", "-c", mount, str(disk), *program]
    return subprocess.run(command, capture_output=True, text=True, timeout=100), disk


@pytest.mark.long
@pytest.mark.skipif(not _can_mount(), reason="a small disk needs root and unshare(1)")
@pytest.mark.parametrize("then", ["os.kill(os.getpid(), signal.SIGKILL)", "session.stop()"])
def test_nothing_stays_when_a_program_whose_disk_is_full_is_killed_or_ends(world, tmp_path, then):
    """Its manager and its pilot stayed until somebody made room."""
    ran, disk = filling_its_disk(tmp_path, then)
    assert f"the disk of {disk}/runinfo/000/stoker is full" in ran.stdout, ran.stderr
    assert f"stoker: the journal cannot be written (No space left on device): the disk of {disk}" in ran.stderr
    assert ran.returncode == (-signal.SIGKILL if "KILL" in then else 0), ran.stderr
    world.empty(limit_s=30)


KILLS_ITS_MANAGER = """
manager = session.executor._manager
before = manager.pid
os.kill(before, signal.SIGKILL)
trouble = ""
while manager.pid == before or not trouble:  # whether the program is welcomed depends on the last page of the disk
    time.sleep(0.05)
    with contextlib.suppress(StokerError), Observer(session.executor.folder) as observer:
        trouble = observer.status().trouble.get("journal", "")
print(trouble, flush=True)
(runs / "fill").unlink()
assert sorted(call.result(60) for call in calls) == list(range(200))
session.stop()
"""


@pytest.mark.long
@pytest.mark.skipif(not _can_mount(), reason="a small disk needs root and unshare(1)")
def test_a_manager_that_is_killed_while_the_disk_is_full_comes_back(world, tmp_path):
    """It waited for room to write its lease, and its program lost all calls if that took minutes."""
    ran, _ = filling_its_disk(tmp_path, KILLS_ITS_MANAGER)
    assert ran.returncode == 0, ran.stderr
    assert "is full; calls and results wait" in ran.stdout.splitlines()[-1]
    world.empty(limit_s=30)


@stoker.context(files=["path"])
def length(path):
    return os.path.getsize(path)


@pytest.mark.skipif(not _can_mount(), reason="a small disk needs root and unshare(1)")
def test_a_node_with_a_small_disk_costs_no_call_and_is_told(session, tmp_path):
    go, disk, weights = tmp_path / "go", tmp_path / "disk", tmp_path / "weights"
    disk.mkdir()
    weights.write_bytes(os.urandom(8_000_000))

    @stoker.app(context=length(str(weights)))
    def wait(context, number):
        while not go.exists():
            time.sleep(0.01)
        return context + number

    mount = 'mount -t tmpfs -o size=4m none "$0"; exec "$@"'
    pilot_command.issue_block_key(SessionFolder(session.folder), "small")
    pilot = [sys.executable, "-m", "stoker.pilot.main", "--session", str(session.folder), "--devices", "cpu:1"]
    pilot += ["--block", "small"]
    with (
        subprocess.Popen(["unshare", "--mount", "sh", "-c", mount, str(disk), *pilot, "--scratch", str(disk)]) as small,
        ended_if_it_fails(small),
    ):
        until(lambda: len(session.status().pilots) == 2, why="both pilots")
        futures = [wait(number) for number in range(8)]

        def disks() -> list[tuple[str, str]]:  # a machine that is busy may be told of besides
            return [(name, said) for name, said in session.status().trouble.items() if "No space left" in said]

        [(name, said)] = until(disks, why="the small disk is told")
        assert "No space left on device; make room there, or give [pilot] scratch another disk" in said
        assert "cannot hold length" in str(session.explain(name))
        go.touch()
        assert [future.result(60) for future in futures] == [8_000_000 + number for number in range(8)]
        status = session.status()
        assert (status.failed, status.lost_pilots) == (0, 0)
        session.stop()
