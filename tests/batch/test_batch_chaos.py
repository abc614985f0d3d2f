from __future__ import annotations

import itertools
import json
import os
import secrets
import sys
from pathlib import Path

import pytest
from batch import soak
from batch.chaos import Chaos, Way, plan
from batch.chaos_scene import PROGRAMS
from batch.chaos_victims import Ran
from batch.chaos_watch import MORE_BYTES, MORE_FDS, YOUNG_S, Growth
from batch.lab import commands

SECONDS = float(os.environ.get("STOKER_SOAK_S") or 20)
SEED = int(os.environ.get("STOKER_SOAK_SEED") or secrets.randbelow(10**6))


def test_chaos_seed_determines_each_fault_its_time_and_its_target():
    shares = {"pilot": 3, "cable": 1, "seed": 1, "manager": 5}
    steps = list(itertools.islice(plan(5, shares, every_s=0.1), 4000))
    assert steps == list(itertools.islice(plan(5, dict(reversed(shares.items())), every_s=0.1), 4000))
    assert steps != list(itertools.islice(plan(6, shares, every_s=0.1), 4000))
    assert sorted(step.way for step in steps[:4]) == sorted(shares), (
        "each way occurs once, so that a short run has all of them"
    )
    counts = {way: sum(step.way == way for step in steps) for way in shares}
    assert 0.4 < counts["manager"] / 4000 < 0.6
    assert 0.05 < counts["cable"] / 4000 < 0.15
    assert 0.09 < sum(step.pause_s for step in steps) / 4000 < 0.11


class Idle:
    def restore(self, now: float) -> None:
        pass


def test_resumed_chaos_plan_continues_at_its_last_step():
    seen: list[str] = []
    ways = {name: Way(1, lambda step, name=name: seen.append(name) or name) for name in "abcdefgh"}

    def run(faults: int, *, skip: int = 0) -> Chaos:
        chaos = Chaos(Idle(), ways, seed=3, every_s=0.0001, check=lambda: None)  # type: ignore[arg-type]
        chaos.skip(skip)
        chaos.run(faults=faults)
        return chaos

    run(20)
    whole, seen[:] = list(seen), []
    run(10, skip=run(10).steps)
    assert seen == whole


def test_innocent_calls_are_identified_by_their_output_files(tmp_path: Path):
    file = tmp_path / "ran"
    ran = Ran(file)
    assert not ran.is_innocent("n1", "7"), "the library may be loading"
    file.write_text("a n1 7 begins\n")
    assert ran.is_innocent("n1", "7")
    with file.open("a") as more:
        more.write("a n1 7 ends\nb n2 8 begins\nb n1 7 begins\na n1")
    assert not ran.is_innocent("n1", "7"), "call b began in another library before"
    with file.open("a") as more:
        more.write(" 9 begins\nb n1 7 ends\n")
    assert ran.is_innocent("n1", "7"), "its call has ended"
    assert not ran.is_innocent("n1", "9")
    assert (ran.begun(), ran.ends, ran.names()) == (4, 2, {"a", "b"})


@pytest.mark.parametrize(
    ("more_fds", "more_rss", "said"), [(0, 0, ""), (MORE_FDS + 1, 0, "descriptors"), (0, MORE_BYTES, "MB later")]
)
def test_process_with_growing_memory_is_reported(more_fds: int, more_rss: int, said: str):
    growth = Growth("manager")
    growth.sample(fds=30, rss=50 << 20, age_s=YOUNG_S / 2)
    growth.sample(fds=30 + more_fds, rss=(80 << 20) + more_rss, age_s=YOUNG_S + 1)
    assert not growth.too_much(), "the process is young"
    growth.sample(fds=30, rss=50 << 20, age_s=2 * YOUNG_S)
    assert said in growth.too_much()
    assert bool(said) == bool(growth.too_much())


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
