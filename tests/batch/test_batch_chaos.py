"""Everything at once on a real cluster: at the end every call has exactly one outcome, and nothing is left running.

It runs for STOKER_CHAOS_S seconds (default 30), with the seed STOKER_CHAOS_SEED (default: by chance; it is printed).
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from batch.chaos import Chaos
from batch.lab.commands import until
from batch.lab.shape import Shape
from batch.sessions import write_site
from faults.world import count_lines

SECONDS = float(os.environ.get("STOKER_CHAOS_S", "30"))
SEED = int(os.environ.get("STOKER_CHAOS_SEED", secrets.randbelow(10**6)))
PROGRAM = Path(__file__).with_name("chaos_program.py")


@pytest.mark.slow
def test_every_call_ends_once_whatever_dies(make_cluster, world, capfd):
    with capfd.disabled():
        sys.stderr.write(f"\nchaos for {SECONDS:g} s; to do the same again: STOKER_CHAOS_SEED={SEED}\n")
    cluster = make_cluster(Shape(gpus=("a10:1", "a10:1", "titanx:1"), namespaces=True))
    site = write_site(
        world.path,
        provider={"gpus": "1"},
        pilot={"init_blocks": 3, "max_blocks": 3},
        session={"interface": "10.77.0.1"},
    )
    log, stop, result = (world.path / name for name in ("ran", "stop", "result.json"))
    arguments = [str(place) for place in (PROGRAM, site, world.runs, log, stop, result)]
    program = world.spawn(cluster.on_head(sys.executable, *arguments), folder=world.path)
    try:
        until(lambda: len(count_lines(log)) > 50 or program.poll() is not None, limit_s=60, what="first calls")
        chaos = Chaos(cluster, world, seed=SEED, log=log)
        chaos.run(SECONDS)
        calm = len(count_lines(log))
        until(lambda: len(count_lines(log)) > calm + 100 or program.poll() is not None, limit_s=60, what="calls again")
        stop.touch()
        out, err = program.communicate(timeout=120)
    finally:
        program.kill()
    assert program.returncode == 0, f"{chaos.done}\n{out[-2000:]}\n{err[-6000:]}"
    found = json.loads(result.read_text())
    assert found["wrong"] == []
    assert (found["done"], found["failed"]) == (found["calls"], 0)
    runs = Counter(int(line.split()[0]) for line in count_lines(log))
    assert set(runs) == set(range(found["calls"]))
    assert len(set(chaos.done)) >= 5, chaos.done
    until(lambda: not _jobs(cluster), limit_s=30, what="no job left")
    deadline = time.monotonic() + 30
    while left := world.processes():
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.1)


def _jobs(cluster):
    return [line for line in cluster.queue() if "stoker" in " ".join(line)]
