from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faults.world import is_alive, until

CONFTEST = """
import suite_guard

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        guard = suite_guard.Guard()
        config.pluginmanager.register(guard)
        config.add_cleanup(guard.close)
"""

STARTS_CHILDREN = """
import pathlib, subprocess, time
import pytest

@pytest.fixture
def last():
    yield
    time.sleep(AFTER_S)

def test_that_starts_children(last):
    children = [subprocess.Popen(words) for words in WORDS]
    pathlib.Path("part").write_text(" ".join(str(child.pid) for child in children))
    pathlib.Path("part").rename("children")
    time.sleep(WAIT_S)
"""


ORDINARY = [["sleep", "600"], ["setsid", "sleep", "600"]]
STUBBORN = [["sh", "-c", "trap '' TERM INT HUP; while :; do sleep 1; done"]]


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    return tmp_path


def _start(
    folder: Path, *, wait_s: float, options: list[str], words: list[list[str]], after_s: float = 0.0
) -> subprocess.Popen[bytes]:
    """Run a test that starts processes and waits; the teardown of its fixture takes `after_s` seconds."""
    text = STARTS_CHILDREN.replace("WAIT_S", str(wait_s)).replace("AFTER_S", str(after_s)).replace("WORDS", repr(words))
    (folder / "test_children.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "test_children.py"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ["PYTHONPATH"]])}
    return subprocess.Popen(command, cwd=folder, env=environ, start_new_session=True, stdout=subprocess.DEVNULL)


def _children(folder: Path, run: subprocess.Popen[bytes]) -> list[int]:
    until(lambda: (folder / "children").exists() or run.poll() is not None, limit_s=60)
    return [int(pid) for pid in (folder / "children").read_text().split()]


@pytest.mark.parametrize("options", [[], pytest.param(["-n", "2"], marks=pytest.mark.long)], ids=["alone", "workers"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_terminated_or_killed_pytest_leaves_no_process(tests: Path, number: signal.Signals, options: list[str]) -> None:
    run = _start(tests, wait_s=600, options=options, words=ORDINARY)
    children = _children(tests, run)
    assert all(map(is_alive, children))
    run.send_signal(number)
    run.wait(timeout=60)
    until(lambda: not any(map(is_alive, children)), limit_s=60)


def test_finished_pytest_leaves_no_process(tests: Path) -> None:
    run = _start(tests, wait_s=0, options=[], words=[*ORDINARY, *STUBBORN])
    children = _children(tests, run)
    assert run.wait(timeout=60) == 0
    assert not any(map(is_alive, children))


@pytest.mark.parametrize("options", [pytest.param([], marks=pytest.mark.long), ["-n", "2"]], ids=["alone", "workers"])
def test_interrupted_pytest_ends_although_a_fixture_hangs(tests: Path, options: list[str]) -> None:
    run = _start(tests, wait_s=600, options=options, words=[*ORDINARY, *STUBBORN], after_s=600)
    children = _children(tests, run)
    run.send_signal(signal.SIGINT)
    run.wait(timeout=60)
    assert not any(map(is_alive, children))
