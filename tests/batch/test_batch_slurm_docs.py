from __future__ import annotations

import re
import sys

import pytest
from docs.pages import ROOT, programs
from docs.test_docs_commands import CLUSTER
from faults.world import World

pytestmark = pytest.mark.long


def test_documented_cluster_commands_run_unchanged(slurm, world: World) -> None:
    world.environ["PYTHONPATH"] = str(ROOT / "tests" / "driver")  # stand-in driver for the GPUs of the nodes
    program = programs("docs/contexts.md")[0].text
    (world.path / "my_program.py").write_text(program)
    session = "rwcz"
    for command in CLUSTER:
        arguments = command.replace("rwcz", session).split()[1:]
        process = world.spawn([sys.executable, "-m", "stoker.manager.cli.entry", *arguments], folder=world.path)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, f"$ {command}\n{out}{err}"
        if arguments == ["up", "site.toml"]:
            session = re.findall(r"^session (\w{4}) is up: .* submitted to backfill", out, re.MULTILINE)[0]
        if arguments[0] == "run":
            assert out.split() == ["5", "4", "7", "5", "7"]
        if arguments[0] == "status":
            assert re.search(r"5 calls done, 0 running, 0 queued", out), out
    assert world.left() == []
