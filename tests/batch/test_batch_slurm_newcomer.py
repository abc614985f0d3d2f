"""A first session: `init` in an empty folder, `up` with the written file, two programs, `down`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from batch.lab.commands import until

pytestmark = pytest.mark.long

PROGRAM = """
import os, sys
import stoker
from stoker import app, context

@context()
def library():
    return os.getpid()

@app(context=library())
def found_by(library, number):
    return library

if __name__ == "__main__":
    with stoker.load(session=sys.argv[1]):
        print(*set(stoker.map(found_by, range(int(sys.argv[2])))))
"""


def run(world, *command: str) -> str:
    process = world.spawn(list(command), folder=world.path / "empty")
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, out + err
    return out.strip()


def stoker(world, *arguments: str) -> str:
    return run(world, sys.executable, "-m", "stoker.manager.cli.entry", *arguments)


@pytest.mark.slow
def test_what_init_writes_is_all_that_it_takes(slurm, world):
    world.environ["PYTHONPATH"] = str(Path(__file__).parents[1] / "driver")  # the nodes have GPUs and a driver
    for node in slurm.shape.nodes:
        slurm.submit("sleep 1000", "--partition=main", "--exclusive", f"--nodelist={node}", "--time=60")
    until(lambda: all(line[2] == "RUNNING" for line in slurm.queue()), what="a full cluster")
    others = [line[0] for line in slurm.queue()]

    assert stoker(world, "init").startswith("wrote site.toml: Slurm, partition backfill")
    written = (world.path / "empty" / "site.toml").read_text()
    up = stoker(world, "up", "site.toml")
    began = re.match(r"session (\w{4}) is up: .* 1 block submitted to backfill \(job \d+\)\n  queued   1   (\w+)", up)
    assert began, up
    session, reason = began.groups()
    assert reason in ("Resources", "Priority")
    status = stoker(world, "status", session)
    assert re.search(rf"^  pilots +1 queued \({reason}; the first in about (\d+ min|1 h)", status, re.M), status

    slurm.cancel(*others)
    program = world.path / "program.py"
    program.write_text(PROGRAM)
    loaded_by_the_first = run(world, sys.executable, str(program), session, "1")
    used_by_the_second = run(world, sys.executable, str(program), session, "20")
    assert loaded_by_the_first in used_by_the_second.split(), "a loaded context is hot for the next program"
    status = stoker(world, "status", session)
    assert "21 calls done, 0 running, 0 queued" in status
    assert re.search(r"^  pilots +[1-9] here", status, re.M), status
    assert (world.path / "empty" / "site.toml").read_text() == written
    down = stoker(world, "down", session)
    assert re.search(r"21 calls done, .* nothing of it is left running", down), down
    until(lambda: not slurm.queue(), what="no job in the queue")
    assert world.left() == []
