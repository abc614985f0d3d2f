"""Disturbs a session on a cluster: kills, freezes, cuts cables, preempts, wipes disks, stops the scheduler.

A seed decides what is done, when and to whom: a plan of steps is drawn from it that does not depend on what happens.
Each step has a way, a rank and a length; the victim is the one of that rank among the candidates, in an order that
depends on their places and ages and not on process ids. A cluster is never twice the same, so a replay is the same plan
over a session that goes a little differently.
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from batch.chaos_victims import Victims
from batch.lab.cluster import Cluster
from faults.world import World, kill

T = TypeVar("T")

PAUSE_S = (0.2, 1.2)
CUT_S = (0.5, 4.0)
"""A cable is out for so long: shorter and longer than the second after which a pilot is given up."""
FROZEN_S = (1.0, 6.0)
HANGS_S = (1.0, 5.0)
TRY_S = 2.0
"""A step that finds no victim looks for so long, and is left out then."""
MANAGERS_A_MINUTE = 3
"""A manager that dies five times within a minute rightly ends its session."""


class Step(NamedTuple):
    """What is done after a pause. `rank` and `length` are shares, from 0 to 1."""

    pause_s: float
    way: str
    rank: float
    length: float


def plan(seed: int, ways: Sequence[str]) -> Iterator[Step]:
    """Steps without end: every way once, in some order, and again."""
    chance = random.Random(seed)
    while True:
        order = sorted(ways)
        chance.shuffle(order)
        for way in order:
            yield Step(chance.uniform(*PAUSE_S), way, chance.random(), chance.random())


class Chaos:
    """Does one thing after the other until time is up. `done`: the ways in which it could; `log`: what was done to
    whom, for people. `restart` starts a client (`guest`, `attach`) again that was killed; `check` raises when it makes
    no sense to go on."""

    def __init__(
        self,
        cluster: Cluster,
        world: World,
        *,
        seed: int,
        ran: Path,
        restart: Callable[[str], object],
        check: Callable[[], object],
    ) -> None:
        self.done: list[str] = []
        self.log: list[str] = []
        self._cluster = cluster
        self._seed = seed
        self._victims = Victims(world, ran)
        self._scratch = world.scratch
        self._restart = restart
        self._check = check
        self._hangs = False
        self._managers: deque[float] = deque(maxlen=MANAGERS_A_MINUTE)
        self._undo: list[tuple[float, Callable[[], object]]] = []
        victims = self._victims
        self.ways: dict[str, Callable[[Step], str]] = {
            "library": self._kill_library,
            "zygote": self._kill_zygote,
            "pilot": lambda step: self._kill(victims.pilots(), step),
            "frozen pilot": self._freeze_pilot,
            "wiped node": self._wipe_node,
            "manager": self._kill_manager,
            "keeper": lambda step: self._kill(victims.keepers(), step),
            "factory": lambda step: self._kill(victims.of("stoker.manager.factory.main"), step),
            "seed": lambda step: self._kill(victims.of("stoker.pilot.transfer.seed"), step),
            "guest": lambda _step: self._kill_client("guest"),
            "attach": lambda _step: self._kill_client("attach"),
            "cable": self._cut,
            "preemption": self._preempt,
            "scancel": self._cancel,
            "slurmctld": self._stop_scheduler,
        }

    def run(self, seconds: float) -> None:
        """Disturb for so long, then put everything back."""
        began = time.monotonic()
        try:
            for step in plan(self._seed, list(self.ways)):
                time.sleep(step.pause_s)
                if time.monotonic() > began + seconds:
                    return
                self._check()
                whom = self._do(step)
                if whom:
                    self.done.append(step.way)
                self.log.append(f"{time.monotonic() - began:7.2f} s  {step.way:<12}  {whom or '(there was none)'}")
        finally:
            self._restore(float("inf"))

    def _do(self, step: Step) -> str:
        until = time.monotonic() + TRY_S
        while True:
            self._restore(time.monotonic())
            whom = self.ways[step.way](step)
            if whom or time.monotonic() > until:
                return whom
            time.sleep(0.05)

    def _later(self, seconds: float, what: Callable[[], object]) -> None:
        self._undo.append((time.monotonic() + seconds, what))

    def _restore(self, now: float) -> None:
        due = [what for at, what in self._undo if at <= now]
        self._undo = [(at, what) for at, what in self._undo if at > now]
        for what in due:
            what()

    # ---- what it does; to whom, empty if it could not

    def _kill(self, candidates: Sequence[tuple[str, int]], step: Step) -> str:
        if not candidates:
            return ""
        name, pid = _of_rank(candidates, step.rank)
        kill([pid])
        return name

    def _kill_library(self, step: Step) -> str:
        candidates = self._victims.libraries()
        if not candidates:
            return ""
        name, pid = _of_rank(candidates, step.rank)
        return name if self._end_if_innocent([pid], victim=pid) else ""

    def _kill_zygote(self, step: Step) -> str:
        """Only where none of its libraries is loading: a context that dies twice on its way is given up."""
        candidates = [(name, pid) for name, pid in self._victims.zygotes() if self._victims.libraries_of(pid)]
        if not candidates:
            return ""
        name, pid = _of_rank(candidates, step.rank)
        return name if self._end_if_innocent(self._victims.libraries_of(pid), victim=pid) else ""

    def _end_if_innocent(self, libraries: Sequence[int], *, victim: int) -> bool:
        """Only where each call runs for the first time: a call that is in two killed libraries is a poison call. They
        are stopped for the look, so that none begins another call meanwhile."""
        kill(libraries, signal.SIGSTOP)
        innocent = all(map(self._victims.is_innocent, libraries))
        if innocent:
            kill([victim])
        kill(libraries, signal.SIGCONT)
        return innocent

    def _freeze_pilot(self, step: Step) -> str:
        candidates = self._victims.pilots()
        if not candidates:
            return ""
        name, pid = _of_rank(candidates, step.rank)
        kill([pid], signal.SIGSTOP)
        self._later(_between(FROZEN_S, step.length), lambda: kill([pid], signal.SIGCONT))
        return f"{name} for {_between(FROZEN_S, step.length):.1f} s"

    def _wipe_node(self, step: Step) -> str:
        """A node that is made anew: what pilots kept on its disk is gone, and comes from others again."""
        name = self._kill(self._victims.pilots(), step)
        if name:
            gone = self._scratch / f"{name}-{len(self.log)}"
            (self._scratch / name).rename(gone)  # at once: the next pilot may be coming
            shutil.rmtree(gone, ignore_errors=True)
        return name

    def _kill_manager(self, step: Step) -> str:
        full = len(self._managers) == MANAGERS_A_MINUTE
        if full and time.monotonic() - self._managers[0] < 60:
            return ""
        found = self._kill(self._victims.managers(), step)
        if found:
            self._managers.append(time.monotonic())
        return found

    def _kill_client(self, name: str) -> str:
        pids = self._victims.clients(name)
        kill(pids)
        if pids:
            self._restart(name)
        return name if pids else ""

    def _cut(self, step: Step) -> str:
        node = _of_rank(self._cluster.shape.nodes, step.rank)
        self._cluster.cut(node)
        self._later(_between(CUT_S, step.length), lambda: self._cluster.heal(node))
        return f"{node} for {_between(CUT_S, step.length):.1f} s"

    def _preempt(self, step: Step) -> str:
        if self._hangs:
            return ""
        node = _of_rank(self._cluster.shape.nodes, step.rank)
        done = self._cluster.ask(
            "sbatch", "--partition=main", "--gres=gpu:1", f"--nodelist={node}", "--output=/dev/null", "--wrap=sleep 2"
        )
        return node if done.returncode == 0 else ""

    def _cancel(self, step: Step) -> str:
        if self._hangs:
            return ""
        jobs = sorted((int(job), name) for job, name, *_ in self._cluster.queue() if "stoker" in name)
        if not jobs:
            return ""
        job, name = _of_rank(jobs, step.rank)
        self._cluster.ask("scancel", str(job))
        return f"{job} {name}"

    def _stop_scheduler(self, step: Step) -> str:
        def go_on() -> None:
            self._cluster.thaw("slurmctld")
            self._hangs = False

        if self._hangs:
            return ""
        self._hangs = True
        self._cluster.freeze("slurmctld")
        self._later(_between(HANGS_S, step.length), go_on)
        return f"for {_between(HANGS_S, step.length):.1f} s"


def _of_rank(candidates: Sequence[T], rank: float) -> T:
    return candidates[int(rank * len(candidates))]


def _between(span: tuple[float, float], share: float) -> float:
    return span[0] + share * (span[1] - span[0])
