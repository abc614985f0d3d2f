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
from live.peers import session_folder

import stoker
from stoker.errors import SessionError
from stoker.manager.executor import client, membership
from stoker.manager.factory import pilot_command
from stoker.protocol.session import SessionFolder

# ---- full disks


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
    """Run a program that fills the session's small disk and then runs the code `then`. Return result and disk."""
    disk = path / "disk"
    disk.mkdir()
    mount = 'mount -t tmpfs -o size=4m none "$0"; exec "$@"'
    program = [sys.executable, "-c", FILLS_ITS_DISK.format(then=then), str(disk)]
    command = ["unshare", "--mount", "sh", "-c", mount, str(disk), *program]
    return subprocess.run(command, capture_output=True, text=True, timeout=100), disk


@pytest.mark.long
@pytest.mark.skipif(not _can_mount(), reason="a small disk needs root and unshare(1)")
@pytest.mark.parametrize("then", ["os.kill(os.getpid(), signal.SIGKILL)", "session.stop()"])
def test_program_on_a_full_disk_leaves_nothing_when_it_ends(world, tmp_path, then):
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
while manager.pid == before or not trouble:  # the last page of the disk decides if the program is welcomed
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
def test_manager_killed_on_a_full_disk_restarts(world, tmp_path):
    ran, _ = filling_its_disk(tmp_path, KILLS_ITS_MANAGER)
    assert ran.returncode == 0, ran.stderr
    assert "is full; calls and results wait" in ran.stdout.splitlines()[-1]
    world.empty(limit_s=30)


@stoker.context(files=["path"])
def length(path):
    return os.path.getsize(path)


@pytest.mark.skipif(not _can_mount(), reason="a small disk needs root and unshare(1)")
def test_node_with_a_small_disk_loses_no_call_and_is_reported(session, tmp_path):
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

        def disks() -> list[tuple[str, str]]:  # only trouble with the disk: the session may also report a busy machine
            return [(name, said) for name, said in session.status().trouble.items() if "No space left" in said]

        [(name, said)] = until(disks, why="the small disk is reported")
        assert "No space left on device; free disk space there, or set [pilot] scratch to another disk" in said
        assert "cannot load length" in str(session.explain(name))
        go.touch()
        assert [future.result(60) for future in futures] == [8_000_000 + number for number in range(8)]
        status = session.status()
        assert (status.failed, status.lost_pilots) == (0, 0)
        session.stop()


# ---- removed folders


PROGRAM = """
import os, sys, time
import stoker

def remove(folder):
    # Rename the folder first: a removal file by file fails if a process writes another file meanwhile.
    os.rename(folder, f"{folder}.gone")

def wait(number):
    time.sleep(max(0.05, number - 500))
    return number

session = stoker.load(run_dir=sys.argv[1])
print(list(stoker.map(wait, range(3))), flush=True)
results = iter(stoker.map(wait, range(400)))
if sys.argv[2] == "in a loop":
    next(results)
    remove(sys.argv[1])
    for _ in results:
        pass
elif sys.argv[2] == "in a future":
    future = stoker.app(wait)(600)
    remove(sys.argv[1])
    try:
        future.result()
    except Exception as error:
        raise error.__cause__ or error
else:
    results.close()
    remove(sys.argv[1])
"""


@pytest.mark.parametrize("when", ["in a loop", "in a future", "before the end"])
def test_removed_run_folder_ends_the_session_with_its_reason(world, when):
    program = world.start(PROGRAM, str(world.runs), when)
    said, complaint = program.communicate(timeout=60)
    assert said == "[0, 1, 2]\n"
    world.empty()
    assert not world.runs.exists()
    assert "FileNotFoundError" not in complaint
    if when == "before the end":
        assert (program.returncode, complaint) == (0, "")
    else:
        assert program.returncode == 1
        last = complaint.splitlines()[-1]
        assert "SessionError: the session folder " in last
        assert " was removed while the session ran: the session is over" in last


def test_program_reports_that_its_session_folder_is_gone(world, tmp_path, monkeypatch):
    monkeypatch.setattr(membership, "AWAY_S", 1.0)
    folder = session_folder(tmp_path / "session")
    command = [sys.executable, "-m", "stoker.manager.main", "--session", str(folder.path), "--detached"]
    with subprocess.Popen(command) as manager:
        until(folder.file.exists)
        joined = client.Link(folder)
        try:
            joined.wait_joined(20)
            shutil.rmtree(folder.path)
            assert manager.wait(20) == 3
            question = joined.ask_status()
            with pytest.raises(SessionError, match="was removed while the session ran"):
                question.result(20)
        finally:
            manager.kill()
            joined.close()
