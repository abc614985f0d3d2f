from __future__ import annotations

import json
import os
import secrets
import sys
from pathlib import Path

import pytest
from batch import soak
from batch.chaos_scene import PROGRAMS
from batch.lab import commands

SECONDS = float(os.environ.get("STOKER_SOAK_S") or 20)
SEED = int(os.environ.get("STOKER_SOAK_SEED") or secrets.randbelow(10**6))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 900)
def test_every_call_ends_once_under_any_fault(tmp_path: Path, capfd, monkeypatch):
    if why := commands.missing_for_namespaces():
        pytest.skip(why)
    monkeypatch.chdir(tmp_path)  # commands on the head begin in this process's folder
    with capfd.disabled():
        sys.stderr.write(f"\nchaos for {SECONDS:g} s; to do the same again: STOKER_SOAK_SEED={SEED}\n")
    # a short run cannot afford to pack an environment and unpack it on three nodes
    packed = "STOKER_SOAK_S" in os.environ
    run = soak.Soak(tmp_path / "record", seed=SEED, every_s=soak.EVERY_S, stall_s=soak.STALL_S, packed=packed)
    record = run.run(seconds=SECONDS)
    said = "\n".join(
        [*soak.told(record), json.dumps(record, indent=1), (tmp_path / "record" / "faults.log").read_text()]
    )
    assert record["ok"], said
    assert len(record["faults"]) >= run.ways // 2, said
    programs = [record["programs"][name] for name in PROGRAMS]
    kinds = {kind for program in programs for kind, count in program["results"].items() if count}
    assert kinds == {"map", "plain", "steps", "gang"}, said
    assert [program["results"] for program in programs] == [program["asked"] for program in programs], said
