from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake_manager import FakeManager, carried_session, recipe

from stoker.contexts.loading import ObjectPath
from stoker.contexts.objects import make_object_ref
from stoker.contexts.recipe import Needs
from stoker.errors import SessionError
from stoker.pilot.agent.scratch import base_folder
from stoker.protocol.calls import FailureKind
from stoker.protocol.to_manager import CallsReturned
from stoker.protocol.to_pilot import StopLibrary


def can_mount() -> bool:
    if os.geteuid() or shutil.which("unshare") is None:
        return False
    mount = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return not subprocess.run(mount, capture_output=True).returncode


small_disks = pytest.mark.skipif(not can_mount(), reason="a small disk needs root and unshare(1)")


def start_on_disk(manager: FakeManager, size: str, *, filled: bool = False, session: Path | None = None) -> None:
    (manager.base / "scratch").mkdir(exist_ok=True)
    fill = "head -c 1G /dev/zero > scratch/filled 2>/dev/null; " if filled else ""
    small_disk = f'mount -t tmpfs -o size={size} none scratch; {fill}exec "$@"'
    folder = str(session or manager.folder.path)
    command = [sys.executable, "-m", "stoker.pilot.main", "--session", folder, "--devices", "cpu:1"]
    on_disk = ["unshare", "--mount", "sh", "-c", small_disk, "sh", *command, "--scratch", "scratch"]
    manager.pilots.append(subprocess.Popen(on_disk, cwd=manager.base))
    manager.hello()


def blamed(manager: FakeManager, library: int = 1) -> str:
    left = manager.gone(library)
    assert left.loading
    assert left.failure.kind is FailureKind.PILOT
    return left.failure.message


def length(path: str) -> int:
    return os.path.getsize(path)


def fill_the_disk() -> None:
    with open("filled", "wb") as file:
        file.write(bytes(1 << 30))


@small_disks
def test_full_scratch_disk_is_reported(manager: FakeManager) -> None:
    start_on_disk(manager, "64k", filled=True)
    manager.start(recipe())
    said = blamed(manager)
    assert "the scratch disk is full" in said
    assert "set [pilot] scratch to another disk" in said


@small_disks
def test_unused_objects_are_evicted_if_the_disk_limits_the_cache(manager: FakeManager) -> None:
    start_on_disk(manager, "8m")
    contexts = []
    for number in range(4):
        weights = manager.base / f"weights-{number}"
        weights.write_bytes(os.urandom(2_500_000))
        ref = make_object_ref(weights, digest_cache_file=manager.base / "memo")
        contexts.append(recipe(length, ObjectPath(ref.name), objects=(ref,)))
    for number, made in enumerate(contexts[:3], start=1):
        manager.ready(made, library=number)
        if number < 3:
            manager.send(StopLibrary(library=number, reason="it is idle"))  # type: ignore[arg-type]
            manager.gone(number)
    manager.ready(contexts[3], library=4)
    manager.ready(contexts[0], library=5)  # the object of library 5 replaces the last unused object
    manager.start(contexts[1], library=6)
    left = manager.gone(6)
    assert left.failure.kind is FailureKind.PILOT
    assert "running libraries use 7.5 MB of it" in left.failure.message
    assert 0 < left.cache_lacks_bytes <= 2_500_000, "the manager ends an idle library for it"


@small_disks
def test_loader_that_finds_a_full_disk_is_not_blamed(manager: FakeManager) -> None:
    start_on_disk(manager, "4m")
    manager.start(recipe(fill_the_disk))
    said = blamed(manager)
    assert "raised OSError: [Errno 28] No space left on device" in said
    assert "the scratch disk is full" in said
    manager.ready(recipe(), library=2)  # the folder of the ended library was removed, so space is free again


def double(data: bytes) -> bytes:
    return data + data


@small_disks
def test_large_arguments_without_disk_space_move_to_another_pilot(keyed: FakeManager, tmp_path: Path) -> None:
    with carried_session(keyed, tmp_path / "sandbox") as session:
        start_on_disk(keyed, "2m", session=session)
        keyed.ready(recipe())
        (small,) = keyed.run(double, [(b"small",)])
        (large,) = keyed.run(double, [(os.urandom(3_000_000),)])
        back = keyed.wait_for(CallsReturned)
        assert back.calls == (large,)
        assert "No space left on device; free disk space there" in back.refused
        assert keyed.results([small]) == [b"smallsmall"]
        keyed.send(StopLibrary(library=1, reason=back.refused))  # type: ignore[arg-type]  # the manager does the same
        left = keyed.gone()
        assert not left.loading
        assert left.failure.kind is FailureKind.PILOT


def test_log_that_cannot_be_opened_is_reported(alone: FakeManager) -> None:
    [folder] = alone.folder.path.glob("pilots/*")
    (folder / "lib-1.log").mkdir()
    alone.start(recipe())
    left = alone.gone()
    assert left.failure.kind is FailureKind.PILOT
    assert "could not open its log" in left.failure.message
    assert left.failure.exit_code
    alone.ready(recipe(), library=2)


def test_scratch_folder_may_name_an_environment_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_DISK", str(tmp_path))
    monkeypatch.delenv("NO_DISK", raising=False)
    assert base_folder("$NODE_DISK").parent == tmp_path
    with pytest.raises(SessionError, match=r"scratch is \$NO_DISK, a variable that is not set"):
        base_folder("$NO_DISK")


def test_library_fails_to_start_if_the_free_disk_is_too_small(served: FakeManager) -> None:
    served.start(recipe(needs=Needs(disk_bytes=1 << 60)))
    said = blamed(served)
    assert "free on its scratch disk" in said
    assert "(@context(disk=...)); free disk space there, or set [pilot] scratch to another disk" in said
    served.ready(recipe(needs=Needs(disk_bytes=1)), library=2)
