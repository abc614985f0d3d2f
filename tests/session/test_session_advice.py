"""The advisor of a real session: it answers, is killed, and nothing waits for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import IO

from faults.world import World, command_of, until

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


def stoker(world: World, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "stoker.manager.cli.main", *words], cwd=world.path, capture_output=True, text=True,
        env={**os.environ, **world.environ}, check=False, timeout=60,
    )  # fmt: skip
    return done.stdout


def test_an_advisor_answers_late_is_killed_and_nothing_waits_for_it(world: World) -> None:
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
    why = until(lambda: _why(stoker(world, "explain", "c-1", "--session", folder)), why="the verdict of the first")
    assert "why it failed" in why
    os.kill(pid, signal.SIGKILL)
    assert call("add") == "None\n"
    assert "KeyError" in call("misspell")
    why = until(lambda: _why(stoker(world, "explain", "c-3", "--session", folder)), why="the verdict of the second")
    assert "why it failed: user (code)" in why
    document = stoker(world, "explain", "c-3", "--session", folder, "--json")
    assert "why it failed" in json.dumps(json.loads(document))
    commands.close()
    out, err = program.communicate(timeout=60)
    assert program.returncode == 0, err
    until(lambda: not world.of(ADVISOR), why="the advisor to end with its session")
    assert out == ""


def _why(story: str) -> str:
    return next((line for line in story.splitlines() if "why it failed" in line), "")
