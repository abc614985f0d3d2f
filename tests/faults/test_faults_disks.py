"""A node whose disk is too small, in a session: it is left alone, others do its work, and it is told why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import pytest
from faults.world import until

import stoker
from stoker.manager.factory import block_keys
from stoker.manager.protocol.session import SessionFolder


def _can_mount() -> bool:
    if os.geteuid() or shutil.which("unshare") is None:
        return False
    mount = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return not subprocess.run(mount, capture_output=True).returncode


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
    block_keys.issue(SessionFolder(session.folder), "small")
    pilot = [sys.executable, "-m", "stoker.pilot.main", "--session", str(session.folder), "--devices", "cpu:1"]
    pilot += ["--block", "small"]
    with subprocess.Popen(["unshare", "--mount", "sh", "-c", mount, str(disk), *pilot, "--scratch", str(disk)]):
        until(lambda: len(session.status().pilots) == 2, why="both pilots")
        futures = [wait(number) for number in range(8)]
        [(name, said)] = until(lambda: session.status().trouble.items(), why="the small disk is told")
        assert "No space left on device; make room there, or give [pilot] scratch another disk" in said
        assert "cannot hold length" in str(session.explain(name))
        go.touch()
        assert [future.result(60) for future in futures] == [8_000_000 + number for number in range(8)]
        status = session.status()
        assert (status.failed, status.lost_pilots) == (0, 0)
        session.stop()
