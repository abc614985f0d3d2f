"""Everything at once on a real cluster: at the end every call has exactly one outcome, and nothing is left running.

A session that outlives its programs, nodes with networks and disks of their own, pilots whose environment travels. Two
programs use it, of which one is killed again and again, and somebody looks on (`stoker attach`).

It runs for STOKER_CHAOS_S seconds (default 30; 180 where CI is true), with the seed STOKER_CHAOS_SEED (default: by
chance; it is printed).
"""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from batch.chaos import Chaos, plan
from batch.lab.cluster import Cluster
from batch.lab.commands import until
from batch.lab.shape import Shape
from batch.sessions import write_site
from environment.small import SmallEnvironment
from faults.world import World, count_lines

LONG_S = 180.0
SECONDS = float(os.environ.get("STOKER_CHAOS_S") or (LONG_S if os.environ.get("CI") == "true" else 30))
SEED = int(os.environ.get("STOKER_CHAOS_SEED") or secrets.randbelow(10**6))
PROGRAM = Path(__file__).with_name("chaos_program.py")


class Scene:
    """The session, and those that use it: programs on the head, which write what they found when all is over."""

    def __init__(self, cluster: Cluster, world: World, python: str) -> None:
        self.ran, self.stop = world.path / "ran", world.path / "stop"
        self.started: dict[str, subprocess.Popen[str]] = {}
        self._cluster, self._world, self._python = cluster, world, python
        up = self.stoker("up", "lab.toml")
        found = re.match(r"session (\w{4}) is up", up.stdout)
        assert found, up.stdout + up.stderr
        self.session = found.group(1)

    def stoker(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """What a command says."""
        process = self._world.spawn(self._command(*arguments), folder=self._world.path)
        out, err = process.communicate(timeout=180)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def start(self, name: str) -> None:
        """`attach`, or a program of that name; what it prints is kept."""
        command = self._command("attach", self.session)
        if name != "attach":
            files = (self.ran, self.stop, self.result(name))
            command = [self._python, str(PROGRAM), self.session, name, *map(str, files)]
            command = self._cluster.on_head(*command)
        log = self._world.path / f"{name}.log"
        self.started[name] = self._world.spawn(
            ["sh", "-c", 'exec "$@" >>"$0" 2>&1', str(log), *command], folder=self._world.path
        )

    def check(self) -> None:
        """Nobody ends but who was killed."""
        for name, process in self.started.items():
            assert process.poll() is None, f"{name} has ended by itself ({process.returncode})"

    def result(self, name: str) -> Path:
        """What a program writes when it has ended well."""
        return self._world.path / f"{name}.json"

    def said(self, name: str) -> str:
        """The end of what a client has printed."""
        return (self._world.path / f"{name}.log").read_text()[-4000:]

    def calls(self) -> int:
        """How many lines calls have written."""
        return len(count_lines(self.ran))

    def _command(self, *arguments: str) -> list[str]:
        return self._cluster.on_head(self._python, "-m", "stoker.manager.cli.entry", *arguments)


@pytest.fixture
def small(tmp_path: Path) -> SmallEnvironment:
    """An environment that holds what `stoker up` and programs need, and that is quickly packed."""
    made = SmallEnvironment(tmp_path / "venv", tmp_path / "home")
    made.bring_all("parsl", "rich", "click")
    return made


def test_a_seed_decides_what_is_done_and_when_and_to_whom():
    ways = ["pilot", "cable", "seed", "manager"]
    steps = list(itertools.islice(plan(5, ways), 40))
    assert steps == list(itertools.islice(plan(5, ways[::-1]), 40))
    assert steps != list(itertools.islice(plan(6, ways), 40))
    for turn in range(0, 40, len(ways)):
        assert sorted(step.way for step in steps[turn : turn + len(ways)]) == sorted(ways)


@pytest.mark.slow
def test_every_call_ends_once_whatever_dies(make_cluster: Callable[[Shape], Cluster], world, small, capfd, monkeypatch):
    monkeypatch.chdir(world.path)  # commands on the head begin where this process is
    with capfd.disabled():
        sys.stderr.write(f"\nchaos for {SECONDS:g} s; to do the same again: STOKER_CHAOS_SEED={SEED}\n")
    cluster = make_cluster(Shape(gpus=("a10:1", "a10:1", "titanx:1"), namespaces=True))
    write_site(
        world.path,
        provider={"gpus": "1"},
        pilot={"init_blocks": 3, "max_blocks": 3, "scratch": f"{world.scratch}/$SLURMD_NODENAME"},
        session={"interface": "10.77.0.1"},
        environment={"kind": "packed"},
    )
    scene = Scene(cluster, world, small.python)
    for name in ("main", "guest", "attach"):
        scene.start(name)
    chaos = Chaos(cluster, world, seed=SEED, ran=scene.ran, restart=scene.start, check=scene.check)
    try:
        _disturb(chaos, scene)
        _every_call_ended_once(scene)
        _nothing_is_left(scene, cluster, world)
        _the_journal_replays(scene)
    except BaseException as error:
        error.add_note("\n".join([f"STOKER_CHAOS_SEED={SEED}", *chaos.log, *map(scene.said, scene.started)]))
        raise
    missing = set(chaos.ways) - set(chaos.done)
    assert not missing or SECONDS < LONG_S, f"never done in {SECONDS:g} s: {missing}"
    assert len(missing) <= len(chaos.ways) // 2, chaos.log


def _disturb(chaos: Chaos, scene: Scene) -> None:
    main = scene.started["main"]
    until(lambda: scene.calls() > 50 or main.poll() is not None, limit_s=150, what="first calls")
    chaos.run(SECONDS)
    calm = scene.calls()
    until(lambda: scene.calls() > calm + 100 or main.poll() is not None, limit_s=90, what="calls again")
    scene.stop.touch()
    for name in ("main", "guest"):
        assert scene.started[name].wait(timeout=120) == 0, f"{name} failed"
    assert scene.started["attach"].poll() is None, "who looks on stays"


def _every_call_ended_once(scene: Scene) -> None:
    found = {name: json.loads(scene.result(name).read_text()) for name in ("main", "guest")}
    assert [found[name]["wrong"] for name in found] == [[], []]
    ran = Counter(line.split()[0] for line in count_lines(scene.ran))
    names = {f"main-{number}" for number in range(found["main"]["calls"])}
    assert names == {name for name in ran if name.startswith("main-")}
    asked = scene.stoker("status", scene.session, "--json")
    status = json.loads(asked.stdout)["status"]
    assert (status["queued"], status["running"], status["failed"]) == (0, 0, 0)
    assert status["done"] - status["cancelled"] >= sum(one["calls"] for one in found.values())


def _nothing_is_left(scene: Scene, cluster: Cluster, world: World) -> None:
    ended = scene.stoker("down", scene.session)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not [line for line in cluster.queue() if "stoker" in " ".join(line)]
    until(lambda: not world.processes(), limit_s=30, what="no process left")
    assert not list(world.scratch.glob("*/stoker-*/pilot-*"))


def _the_journal_replays(scene: Scene) -> None:
    """What every manager decided, the killed ones too, is decided again."""
    said = scene.stoker("replay", scene.session, "--json")
    assert said.returncode == 0, said.stdout + said.stderr
    found = json.loads(said.stdout)["replayed"]
    assert found["difference"] is None
    assert found["checked"] > 0.8 * found["events"], found  # but for the last moments of those that were killed
