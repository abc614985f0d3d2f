from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest
from faults.world import is_alive, until
from pytest_inside import run_pytest, write_suite

LIMIT = "--timeout=3"
"""Maximum seconds of an empty test on a busy machine."""

HANGS = """
import os, signal, subprocess, threading, time
import pytest

def helper():
    threading.Event().wait()

def test_that_hangs_with_a_child_and_a_thread():
    threading.Thread(target=helper, name="the-helper", daemon=True).start()
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    open("child", "w").write(str(child.pid))
    child.wait()

def test_after_it():
    pass
"""

HANGS_IN_C = """
import signal, time

def test_that_no_signal_reaches():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(600)

def test_after_it():
    pass
"""

IGNORES = """
import signal, subprocess, sys

SHOW = "from signal import *; print(getsignal(SIGHUP).name, getsignal(SIGINT) is not SIG_IGN)"

def test_inherited_settings_of_test_programs_are_fixed():
    assert subprocess.check_output([sys.executable, "-c", SHOW], text=True).split() == ["SIG_DFL", "True"]
    signal.raise_signal(signal.SIGHUP)  # nohup makes the process ignore SIGHUP
"""


@pytest.fixture
def suite(tmp_path):
    return write_suite(tmp_path, {})


def run(suite: Path, text: str, *options: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    (suite / "tests" / "test_one.py").write_text(text)
    return run_pytest(suite, "-p", "no:randomly", *options, before=before)


def test_every_test_has_a_time_limit(request):
    assert 0 < float(request.config.getini("timeout")) <= 300
    assert request.config.getini("faulthandler_exit_on_timeout") is True
    assert float(request.config.getini("faulthandler_timeout")) > 0


@pytest.mark.parametrize(
    "workers", [pytest.param([], marks=pytest.mark.long), ["-n", "1"]], ids=["alone", "under xdist"]
)
def test_hung_test_ends_with_stacks_and_the_run_continues(suite, workers):
    ran = run(suite, HANGS, LIMIT, *workers)
    assert ran.returncode == 1, ran.stdout
    assert "1 failed, 1 passed" in ran.stdout
    assert re.search(r"Timeout \(>3\.0s\)", ran.stdout)
    assert "child.wait()" in ran.stdout, "where the test hangs"
    assert "the-helper" in ran.stdout + ran.stderr, "the stacks of other threads"
    pid = int((suite / "child").read_text())
    assert re.search(rf"{pid} \w+ sleep 600", ran.stdout), "the processes below it"
    until(lambda: not is_alive(pid), why="the process of the test that hung is killed")


@pytest.mark.long
def test_hung_test_that_no_signal_reaches_ends_only_its_worker(suite):
    ran = run(suite, HANGS_IN_C, LIMIT, "-o", "faulthandler_timeout=6", "-n", "1")
    assert "1 failed, 1 passed" in ran.stdout, ran.stdout + ran.stderr
    assert "crashed while running 'tests/test_one.py::test_that_no_signal_reaches'" in ran.stdout
    assert "time.sleep(600)" in ran.stderr or "test_that_no_signal_reaches" in ran.stderr


def test_signals_ignored_under_nohup_are_not_inherited_by_programs(suite):
    ignored = ("sh", "-c", 'trap "" HUP INT; exec "$@"', "sh")
    ran = run(suite, IGNORES, before=ignored)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
