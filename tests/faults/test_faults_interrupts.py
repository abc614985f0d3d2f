"""Ctrl-C at any moment ends a program soon and leaves no process or partial file; the next run continues."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import sys
import time

import pytest
from faults.world import World, until
from tiny_model import write_tiny_model

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
    """Press Ctrl-C `times` times; return the program's further output, and the seconds until it ends."""
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


CLAIMS = 2000
"""Number of claims in a run of ten seconds that the test interrupts after a hundred claims."""


@pytest.fixture(scope="module")
def model_world(tmp_path_factory):
    for needed in ("torch", "transformers"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    world = World(tmp_path_factory.mktemp("world"))
    write_tiny_model(world.path / "tiny")
    with open(world.path / "claims.jsonl", "w") as file:
        for number in range(CLAIMS):
            label = ("SUPPORTS", "REFUTES", "NOT ENOUGH INFO")[number % 3]
            file.write(json.dumps({"id": number, "claim": f"The number {number} is even.", "label": label}) + "\n")
    (world.path / "prompts.toml").write_text('[[prompts]]\nname = "one"\ntext = "Claim: {claim} This claim is"\n')
    yield world
    world.clear()


def start_run(world):
    return world.spawn(
        [
            *(sys.executable, "-m", "stoker.manager.cli.main", "run", "fact_verification", "--all", "--model", "tiny"),
            *("--claims", "claims.jsonl", "--prompts", "prompts.toml", "--batch-size", "2", "--format", "jsonl"),
        ],
        folder=world.path,
    )


def kept(world):
    found = []
    for file in world.path.glob("runs/*/results.jsonl.part"):
        found += [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return found


def whole(world):
    return list(world.path.glob("runs/*/results.jsonl"))


@pytest.mark.long
@pytest.mark.slow
def test_repeatedly_interrupted_run_resumes(model_world):
    world, chance = model_world, random.Random(11)
    most, busy = 0, 0
    moments = [chance.uniform(0.1, 0.8), chance.uniform(1.0, 4.0), "hundred more"]
    for moment in moments:
        program = start_run(world)
        if isinstance(moment, float):
            end = time.monotonic() + moment
            until(lambda: time.monotonic() >= end or program.poll() is not None)  # noqa: B023
        else:
            until(lambda: len(kept(world)) >= most + 100 or program.poll() is not None, limit_s=120)  # noqa: B023
        finished = program.poll() is not None
        out, err, took = interrupt(program)
        assert not finished, err
        assert took < SOON_S
        assert program.returncode in (130, -signal.SIGINT) or "Aborted" in err, (program.returncode, err)
        assert "Traceback" not in err or not out, "Python itself prints the interrupt during the command's imports"
        world.empty()
        assert not whole(world), "a results file exists only when it is complete"
        text = "".join(file.read_text() for file in world.path.glob("runs/*/results.jsonl.part"))
        assert text.endswith("\n") or not text, "no half-written line"
        assert len(kept(world)) >= most, "no recorded result is lost"
        most = len(kept(world))
        if program.returncode == 130 and most:
            assert f"{most:,} of {CLAIMS:,}" in out + err
            busy += 1
    assert busy >= 1
    program = start_run(world)
    out, err = program.communicate(timeout=120)
    assert program.returncode == 0, err
    assert f"{most:,} of {CLAIMS:,} are kept" in out + err
    [results] = whole(world)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(rows) == CLAIMS
    assert len({row["claim"] for row in rows}) == CLAIMS
    world.empty()
