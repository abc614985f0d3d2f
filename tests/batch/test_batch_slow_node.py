"""A node behind a slow link: what it says comes late and in pieces, and it is neither given up nor asked too much."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from batch.lab.shape import Shape
from batch.sessions import write_site

pytestmark = pytest.mark.long

RATE = ["root", "tbf", "rate", "800kbit", "burst", "16kb", "latency", "20s"]
ANSWER_BYTES = 40_000
CALLS = 80

PROGRAM = """
import json, os, sys, time
from collections import Counter
import stoker

@stoker.app()
def answer(number):
    time.sleep(0.05)
    return os.environ["SLURMD_NODENAME"], bytes([number]) * {size}

with stoker.load(sys.argv[1], run_dir=sys.argv[2]) as session:
    while len(session.status(60).pilots) < 2:
        time.sleep(0.1)
    got = list(stoker.map(answer, range({calls})))
    status = session.status(60)
assert [content for _, content in got] == [bytes([number]) * {size} for number in range({calls})]
nodes = Counter(node for node, _ in got)
print(json.dumps([nodes, status.lost_pilots, status.rerun_calls, status.failed]))
"""


def test_a_node_that_answers_slowly_is_kept_and_the_other_does_the_most(make_cluster, world, monkeypatch):
    monkeypatch.chdir(world.path)  # commands on the head begin where this process is
    cluster = make_cluster(Shape(gpus=("a10:1", "a10:1"), namespaces=True))
    slow = cluster.machines["n1"].inside("tc", "qdisc", "add", "dev", "eth0", *RATE)
    subprocess.run(slow, check=True, capture_output=True)
    subprocess.run(cluster.on_head("tc", "qdisc", "add", "dev", "vn1", *RATE), check=True, capture_output=True)
    site = write_site(
        world.path,
        provider={"gpus": "1"},
        pilot={"init_blocks": 2, "max_blocks": 2},
        session={"interface": "10.77.0.1", "heartbeat": "5 s"},
    )
    (world.path / "program.py").write_text(PROGRAM.format(size=ANSWER_BYTES, calls=CALLS))
    python = [sys.executable, str(world.path / "program.py"), str(site), str(world.runs)]
    program = world.spawn(cluster.on_head(*python), folder=world.path)
    out, err = program.communicate(timeout=180)
    assert program.returncode == 0, err
    nodes, lost, again, failed = json.loads(out.splitlines()[-1])
    assert (lost, again, failed) == (0, 0, 0)
    assert set(nodes) == {"n1", "n2"}
    assert nodes["n1"] < nodes["n2"]
