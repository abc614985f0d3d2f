"""Disturbs a session on a cluster at seeded times: kills, freezes, cuts cables, preempts, stops the scheduler."""

from __future__ import annotations

import random
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from batch.lab.cluster import Cluster
from faults.world import World, command_of, count_lines, is_alive, kill

CUT_S = (0.5, 4.0)
"""A cable is out for so long: shorter and longer than the second after which a pilot is given up."""
MANAGERS_A_MINUTE = 3
"""A manager that dies five times within a minute rightly ends its session."""


class Chaos:
    """Does one thing after the other until time is up. `done` says what."""

    def __init__(self, cluster: Cluster, world: World, *, seed: int, log: Path) -> None:
        self.done: list[str] = []
        self._cluster = cluster
        self._world = world
        self._chance = random.Random(seed)
        self._log = log
        self._hangs = False
        self._managers: deque[float] = deque(maxlen=MANAGERS_A_MINUTE)
        self._undo: list[tuple[float, Callable[[], object]]] = []
        self._ways: dict[str, Callable[[], bool]] = {
            "library": self._kill_library,
            "pilot": self._kill_pilot,
            "frozen pilot": self._freeze_pilot,
            "manager": self._kill_manager,
            "factory": self._kill_factory,
            "cable": self._cut,
            "preemption": self._preempt,
            "scancel": self._cancel,
            "slurmctld": self._stop_scheduler,
        }

    def run(self, seconds: float) -> None:
        """Disturb for so long, then put everything back."""
        until, bag = time.monotonic() + seconds, list[str]()
        try:
            while time.monotonic() < until:
                time.sleep(self._chance.uniform(0.3, 1.5))
                self._restore(time.monotonic())
                if not bag:
                    bag = sorted(self._ways)
                    self._chance.shuffle(bag)
                what = bag.pop()
                if self._ways[what]():
                    self.done.append(what)
        finally:
            self._restore(float("inf"))

    def _later(self, seconds: float, what: Callable[[], object]) -> None:
        self._undo.append((time.monotonic() + seconds, what))

    def _restore(self, now: float) -> None:
        due = [what for at, what in self._undo if at <= now]
        self._undo = [(at, what) for at, what in self._undo if at > now]
        for what in due:
            what()

    # ---- what it does; whether it could

    def _kill_library(self) -> bool:
        """Only one whose call runs for the first time: a call that is in two killed libraries is a poison call."""
        libraries = sorted(pid for pid in self._world.processes() if _is_library(pid))
        if not libraries:
            return False
        victim = self._chance.choice(libraries)
        kill([victim], signal.SIGSTOP)
        mine = (_node(victim), _inner_pid(victim))
        ran = [line.split() for line in count_lines(self._log)]
        last = next((number for number, *where in reversed(ran) if tuple(where) == mine), "")
        innocent = bool(last) and sum(number == last for number, *_ in ran) == 1
        kill([victim], signal.SIGKILL if innocent else signal.SIGCONT)
        return innocent

    def _kill_pilot(self) -> bool:
        return self._signal(self._world.pilots(), signal.SIGKILL)

    def _freeze_pilot(self) -> bool:
        pilots = sorted(self._world.pilots())
        if not pilots:
            return False
        victim = self._chance.choice(pilots)
        kill([victim], signal.SIGSTOP)
        self._later(self._chance.uniform(1.0, 6.0), lambda: kill([victim], signal.SIGCONT))
        return True

    def _kill_manager(self) -> bool:
        full = len(self._managers) == MANAGERS_A_MINUTE
        if full and time.monotonic() - self._managers[0] < 60:
            return False
        self._managers.append(time.monotonic())
        return self._signal(self._world.of("stoker.manager.main"), signal.SIGKILL)

    def _kill_factory(self) -> bool:
        return self._signal(self._world.of("stoker.manager.factory.main"), signal.SIGKILL)

    def _signal(self, pids: list[int], how: int) -> bool:
        if not pids:
            return False
        kill([self._chance.choice(sorted(pids))], how)
        return True

    def _cut(self) -> bool:
        node = self._chance.choice(self._cluster.shape.nodes)
        self._cluster.cut(node)
        self._later(self._chance.uniform(*CUT_S), lambda: self._cluster.heal(node))
        return True

    def _preempt(self) -> bool:
        if self._hangs:
            return False
        node = self._chance.choice(self._cluster.shape.nodes)
        done = self._cluster.ask(
            "sbatch", "--partition=main", "--gres=gpu:1", f"--nodelist={node}", "--output=/dev/null", "--wrap=sleep 2"
        )
        return done.returncode == 0

    def _cancel(self) -> bool:
        if self._hangs:
            return False
        jobs = [line[0] for line in self._cluster.queue() if line[1:] and "stoker" in " ".join(line)]
        if not jobs:
            return False
        self._cluster.ask("scancel", self._chance.choice(sorted(jobs)))
        return True

    def _stop_scheduler(self) -> bool:
        def go_on() -> None:
            self._cluster.thaw("slurmctld")
            self._hangs = False

        if self._hangs:
            return False
        self._hangs = True
        self._cluster.freeze("slurmctld")
        self._later(self._chance.uniform(1.0, 5.0), go_on)
        return True


def _is_library(pid: int) -> bool:
    """A fork of a zygote that is not one itself."""
    if "stoker.pilot.zygote" not in command_of(pid):
        return False
    status = _status(pid)
    return "stoker.pilot.zygote" in command_of(int(status.get("PPid", "0"))) and is_alive(pid)


def _inner_pid(pid: int) -> str:
    return _status(pid).get("NSpid", str(pid)).split()[-1]


def _node(pid: int) -> str:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((entry.partition(b"=")[2].decode() for entry in environ if entry.startswith(b"SLURMD_NODENAME=")), "")


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return dict(line.split(":", 1) for line in lines if ":" in line)
