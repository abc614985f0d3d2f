from __future__ import annotations

import json
import os
import signal
import sys
from typing import IO

import pytest
from faults.world import World, command_of, until
from session.test_session_up import stoker

from stoker.manager.live.advisor import ADVISOR

PROGRAM = """
import stoker


@stoker.context
def numbers(count=100, batch_size=4):
    return list(range(count))


@stoker.app(context=numbers(50))
def add(numbers, x):
    return sum(numbers) + x


@stoker.app
def lose(x):
    print("writing the checkpoint")
    raise RuntimeError("no checkpoint was written") from OSError(28, "No space left on device", "/scratch/out.pt")


@stoker.app
def misspell(x):
    return {}["labels"]


with stoker.load(site="one.toml") as session:
    assert add(1).result(60) == 1226
    print(session.folder, flush=True)
    for line in open("commands"):
        call = {"lose": lose, "misspell": misspell, "add": add}[line.strip()](1)
        print(repr(call.exception(60)), flush=True)
"""


@pytest.mark.long
def test_killed_advisor_is_replaced_and_delays_no_call(world: World) -> None:
    (world.path / "one.toml").write_text('[pilot]\ndevices = "cpu:2"\n')
    (world.path / "program.py").write_text(PROGRAM)
    os.mkfifo(world.path / "commands")
    program = world.spawn([sys.executable, "program.py"], folder=world.path)
    assert program.stdout is not None
    said: IO[str] = program.stdout
    folder = said.readline().strip()
    commands = (world.path / "commands").open("w", buffering=1)

    def call(what: str) -> str:
        commands.write(f"{what}\n")
        return said.readline()

    assert "no checkpoint was written" in call("lose")
    pid = until(lambda: next(iter(world.of(ADVISOR)), 0), why="an advisor")
    assert "--session" in command_of(pid)
    os.kill(pid, signal.SIGKILL)
    assert call("add") == "None\n"
    assert "KeyError" in call("misspell")
    why = until(lambda: _why(world, "c-3", folder), why="the verdict of the second")
    assert "why it failed: user (code)" in why
    document = stoker(world, "explain", "c-3", "--session", folder, "--json").stdout
    assert "why it failed" in json.dumps(json.loads(document))
    commands.close()
    out, err = program.communicate(timeout=60)
    assert program.returncode == 0, err
    until(lambda: not world.of(ADVISOR), why="the advisor to end with its session")
    assert out == ""


def _why(world: World, call: str, folder: str) -> str:
    story = stoker(world, "explain", call, "--session", folder).stdout
    return next((line for line in story.splitlines() if "why it failed" in line), "")
