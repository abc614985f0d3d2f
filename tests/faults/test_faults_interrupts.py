"""Ctrl-C at any moment ends a program soon and leaves no process or partial file; the next run continues."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from faults.world import until

SOON_S = 30.0
"""Maximum seconds from Ctrl-C to the exit: pilots get five seconds, and the machine may be busy."""

# An option of this program makes one call endless, so the program is busy at any interrupt.
PROGRAM = """
import os, sys, time
print("begins", flush=True)
import stoker

@stoker.context
def slow_to_load():
    time.sleep(0.3)
    return 5

@stoker.app(context=slow_to_load())
def work(context, number):
    while number == {held}:
        time.sleep(0.02)
    time.sleep(0.02)
    return number

with stoker.load() as session:
    print("loaded", flush=True)
    for number in stoker.map(work, range(200)):
        print(number, flush=True)
print("ended", flush=True)
"""


def interrupt(program, *, times=1):
    """Send Ctrl-C `times` times. Return the further output of the program, and the seconds until its end."""
    started = time.monotonic()
    for turn in range(times):
        try:
            os.killpg(program.pid, signal.SIGINT)
        except ProcessLookupError:
            break
        if turn + 1 < times:
            time.sleep(0.15)
    out, err = program.communicate(timeout=60)
    return out, err, time.monotonic() - started


def wait_until_busy(program):
    for line in program.stdout:
        if line.strip() == "20":
            return


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
def test_program_interrupted_at_a_random_moment_leaves_nothing(world, seed):
    program = world.start(PROGRAM.format(held=None))
    program.stdout.readline()
    moment = random.Random(seed).uniform(0.0, 3.5)
    end = time.monotonic() + moment
    until(lambda: time.monotonic() >= end or program.poll() is not None)
    out, err, took = interrupt(program)
    assert took < SOON_S
    assert "ended" in out or "KeyboardInterrupt" in err
    assert "[y/n]" not in (out + err).lower()
    numbers = [int(line) for line in out.split() if line.isdigit()]
    assert numbers == list(range(len(numbers)))
    world.empty()
    assert not list((world.path / "runinfo").glob("*/stoker/objects/*"))


@pytest.mark.parametrize("times", [1, 3])
def test_interrupted_map_reports_kept_results_and_how_to_resume(world, times):
    program = world.start(PROGRAM.format(held=100))
    wait_until_busy(program)
    _, err, took = interrupt(program, times=times)
    assert took < SOON_S
    assert program.returncode in (-signal.SIGINT, 130, 1)
    if times == 1:
        assert "stoker.map stopped: " in err
        assert "of 200 results were taken" in err
    world.empty()
