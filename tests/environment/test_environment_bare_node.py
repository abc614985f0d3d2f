"""Pilots run on nodes without the folders of project, environment and session, and perhaps without Python. A mount
namespace hides the folders.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from environment.small import ROOT, SmallEnvironment
from environment.test_environment_packing import PACK
from fake_manager import FakeManager, recipe

from stoker.manager.environment.carrying import (
    PackedEnvironment,
    pilot_starter_command,
    refresh_pilot_files,
    write_pilot_files,
)
from stoker.manager.factory import pilot_command
from stoker.pilot.transfer.fetch import SEED_FILE
from stoker.protocol.to_manager import ObjectsCached
from stoker.site import Environment, EnvironmentKind, Provider, ProviderKind, Site

PYTHONS = [path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if os.path.exists(path)]


def can_hide() -> bool:
    if os.geteuid() or shutil.which("unshare") is None:
        return False
    return not subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True
    ).returncode


pytestmark = [pytest.mark.long, pytest.mark.skipif(not can_hide(), reason="mount namespaces need root and unshare(1)")]


def _in_sight(manager: FakeManager, small: SmallEnvironment) -> list[str]:
    places = [ROOT, Path(sys.prefix), small.path, small.home, manager.folder.path]
    if Path(sys.base_prefix) not in (Path("/usr"), Path("/")):
        places.append(Path(sys.base_prefix))
    return sorted({str(place) for place in places}, key=len, reverse=True)  # nested paths come first


class Node:
    def __init__(self, folder: Path, *, hidden: list[str], has_python: bool = True) -> None:
        self.folder = folder
        folder.mkdir()
        covers = [f"mount -t tmpfs none {shlex.quote(place)}" for place in hidden]
        if not has_python:
            covers += [f"mount --bind /dev/null {python}" for python in PYTHONS]
        self._script = "\n".join(["set -e", *covers, f"cd {shlex.quote(str(folder))}", 'exec "$@"'])

    def start(self, command: list[str]) -> subprocess.Popen[bytes]:
        log = (self.folder / "log").open("ab")
        environ = {"PATH": "/usr/bin:/bin", "HOME": str(self.folder), "TMPDIR": str(self.folder)}
        return subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", self._script, "sh", *command],
            env=environ,
            stdout=log,
            stderr=log,
        )

    def said(self) -> str:
        return (self.folder / "log").read_text()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[FakeManager]:
    made = FakeManager(tmp_path)
    key = made.folder.key_file("transfer")
    key.write_text(json.dumps({"public": "", "secret": os.urandom(32).hex()}))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def seed(manager: FakeManager) -> Iterator[subprocess.Popen[bytes]]:
    with (manager.folder.path / "seed.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "stoker.pilot.transfer.seed", "--session", str(manager.folder.path)],
            stdout=log,
            stderr=log,
        )
    until = time.monotonic() + 30
    while not (manager.folder.path / SEED_FILE).exists():
        assert process.poll() is None
        assert time.monotonic() < until, "the seed does not listen"
        time.sleep(0.01)
    yield process
    process.send_signal(signal.SIGTERM)
    process.wait(10)


def brought(manager: FakeManager, small: SmallEnvironment, node: Node, *, python: str = "") -> list[str]:
    """Copy files like a batch system without a shared file system; return the command to run."""
    site = Site(
        name="bare",
        provider=Provider(kind=ProviderKind.CONDOR, shared_files=False),
        environment=Environment(kind=EnvironmentKind.PACKED, python=python),
    )
    packed = msgspec.json.decode(small.run(PACK, python), type=PackedEnvironment)
    write_pilot_files(manager.folder, site, packed)
    for path in refresh_pilot_files(manager.folder, site):
        shutil.copytree(path, node.folder / path.name, dirs_exist_ok=True)
    pilot_command.issue_block_key(manager.folder, "b7")
    assert not list((node.folder / "session").rglob("pilot.json")), "a node gets only the key of its block"
    shutil.copy(manager.folder.block_key_file("b7"), node.folder)
    options = ["--devices", "cpu:1", "--scratch", str(node.folder), "--block", "b7", "--walltime-s", "600"]
    return pilot_starter_command(manager.folder, site, options)


@pytest.mark.parametrize("has_python", [True, False], ids=["a Python", "no Python"])
def test_call_runs_on_a_node_without_stoker_installed(
    manager: FakeManager, small: SmallEnvironment, seed: object, tmp_path: Path, has_python: bool
):
    node = Node(tmp_path / "node", hidden=_in_sight(manager, small), has_python=has_python)
    root = str(ROOT / "setup.cfg")

    def look() -> tuple[str, str, bool]:
        import stoker

        return sys.prefix, str(stoker.__file__), os.path.exists(root)

    manager.pilots.append(node.start(brought(manager, small, node)))
    hello = manager.until(lambda: manager.hellos and manager.hellos[-1], what=f"hello: {node.said()}", wait_s=90)
    assert hello.block == "b7"
    assert 400 < hello.ends_in_s < 599  # 600 s minus the duration of the start
    if not hello.objects:  # the archive of the environment, which the pilot offers to other pilots
        manager.wait_for(ObjectsCached)
    assert hello.folder.partition(":")[2].startswith(str(node.folder))
    manager.ready(recipe())
    [(prefix, package, sees)] = manager.results(manager.run(look, [()]))
    # this large result returns through the seed
    assert manager.results(manager.run(lambda: b"x" * 3_000_000, [()])) == [b"x" * 3_000_000]
    assert prefix.startswith(str(node.folder))
    assert package.startswith(prefix)
    assert not sees
    assert not list(node.folder.glob("stoker-begin.*"))


def test_second_pilot_on_a_node_reuses_the_unpacked_environment(
    manager: FakeManager, small: SmallEnvironment, seed: subprocess.Popen[bytes], tmp_path: Path
):
    node = Node(tmp_path / "node", hidden=_in_sight(manager, small))
    command = brought(manager, small, node)
    manager.pilots.append(node.start(command))
    manager.until(lambda: manager.hellos, what="hello", wait_s=90)
    seed.terminate()
    seed.wait(10)
    manager.pilots.append(node.start(command))
    manager.until(lambda: len(manager.hellos) == 2, what=f"second hello: {node.said()}", wait_s=90)


def test_missing_source_of_the_archive_is_reported_in_a_sentence(
    manager: FakeManager, small: SmallEnvironment, tmp_path: Path
):
    node = Node(tmp_path / "node", hidden=_in_sight(manager, small))
    process = node.start(brought(manager, small, node))
    assert process.wait(60) == 1
    assert "cannot get the environment" in node.said()
    assert "does not exist on this node" in node.said()
