"""A full disk on a pilot is told as what it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake_manager import FakeManager, recipe

from stoker.errors import SessionError
from stoker.manager.protocol.calls import FailureKind
from stoker.pilot.agent.scratch import base_folder


def can_mount() -> bool:
    if os.geteuid() or shutil.which("unshare") is None:
        return False
    mount = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return not subprocess.run(mount, capture_output=True).returncode


@pytest.mark.skipif(not can_mount(), reason="a small disk needs root and unshare(1)")
def test_a_full_scratch_disk_is_told(manager: FakeManager, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    small_disk = 'mount -t tmpfs -o size=64k none scratch; head -c 1M /dev/zero > scratch/filled 2>/dev/null; exec "$@"'
    command = [sys.executable, "-m", "stoker.pilot.main", "--session", str(manager.folder.path), "--devices", "cpu:1"]
    pilot = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", small_disk, "sh", *command, "--scratch", "scratch"], cwd=tmp_path
    )
    manager.pilots.append(pilot)
    manager.start(recipe())
    left = manager.gone()
    assert left.loading
    assert left.failure is not None
    assert left.failure.kind is FailureKind.CONTEXT
    assert "the scratch disk is full" in left.failure.message
    assert "give [pilot] scratch another disk" in left.failure.message


def test_a_log_that_cannot_be_opened_is_told(served: FakeManager) -> None:
    [folder] = served.folder.path.glob("pilots/*")
    (folder / "lib-1.log").mkdir()
    served.start(recipe())
    left = served.gone()
    assert left.failure is not None
    assert "could not open its log" in left.failure.message
    assert left.failure.exit_code
    served.ready(recipe(), library=2)


def test_a_scratch_that_a_node_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_DISK", str(tmp_path))
    monkeypatch.delenv("NO_DISK", raising=False)
    assert base_folder("$NODE_DISK").parent == tmp_path
    with pytest.raises(SessionError, match=r"sets no \$NO_DISK"):
        base_folder("$NO_DISK")
