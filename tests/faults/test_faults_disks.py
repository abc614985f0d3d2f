from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time

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
        contextlib.ExitStack() as at_the_end,
    ):
        at_the_end.callback(small.kill)
        until(lambda: len(session.status().pilots) == 2, why="both pilots")
        futures = [wait(number) for number in range(8)]

        def disks() -> list[tuple[str, str]]:  # omit other trouble, because the session may also report a busy machine
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
else:
    results.close()
    remove(sys.argv[1])
"""


@pytest.mark.parametrize("when", ["in a loop", "before the end"])
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
    monkeypatch.setattr(membership, "ABSENCE_REPORT_S", 1.0)
    folder = session_folder(tmp_path / "session")
    command = [sys.executable, "-m", "stoker.manager.main", "--session", str(folder.path), "--detached"]
    with subprocess.Popen(command) as manager:
        until(folder.file.exists)
        joined = client.ClientLink(folder)
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
