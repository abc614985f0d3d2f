"""Inject faults into a session on a cluster: processes, sockets, disks, clocks, batch system."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from batch.chaos_victims import Victims
from batch.lab.cluster import Cluster
from faults.world import World

T = TypeVar("T")

TRY_S = 0.5
"""Maximum seconds to find a victim; a step without a victim is skipped."""


class Step(NamedTuple):
    """A pause, and the fault after the pause. `rank` (0 to 1) selects the victim, `length` (0 to 1) the duration."""

    pause_s: float
    way: str
    rank: float
    length: float

    def between(self, span: tuple[float, float]) -> float:
        return span[0] + self.length * (span[1] - span[0])

    def of(self, candidates: Sequence[T]) -> T:
        return candidates[int(self.rank * len(candidates))]


class Way(NamedTuple):
    """A kind of fault. `share`: expected faults of this kind per ten thousand faults. `do` injects the fault; returns
    the victim or "".
    """

    share: int
    do: Callable[[Step], str]


def plan(seed: int, shares: Mapping[str, int], *, every_s: float) -> Iterator[Step]:
    """Yield endless steps, on average every `every_s` seconds: first each kind of fault once, then random kinds
    weighted by share.
    """
    chance = random.Random(seed)
    names = sorted(shares)
    weights = [shares[name] for name in names]
    once = chance.sample(names, len(names))
    while True:
        way = once.pop() if once else chance.choices(names, weights)[0]
        yield Step(chance.expovariate(1 / every_s), way, chance.random(), chance.random())


class Stage:
    """The targets of steps. `restart` restarts a killed client; `session`: the session folder."""

    def __init__(
        self, cluster: Cluster, world: World, *, ran: Path, session: Path, restart: Callable[[str], object]
    ) -> None:
        self.cluster = cluster
        self.world = world
        self.session = session
        self.restart = restart
        self.victims = Victims(world, ran)
        self._held: dict[str, tuple[float, Callable[[], object]]] = {}

    def is_free(self, *keys: str) -> bool:
        return not any(key in self._held for key in keys)

    def hold(self, key: str, seconds: float, undo: Callable[[], object]) -> None:
        """Register `undo` under `key`, to be called after `seconds`."""
        self._held[key] = time.monotonic() + seconds, undo

    def restore(self, now: float) -> None:
        for key, (at, undo) in list(self._held.items()):
            if at <= now:
                del self._held[key]
                undo()


class Chaos:
    def __init__(
        self,
        stage: Stage,
        ways: Mapping[str, Way],
        *,
        seed: int,
        every_s: float,
        check: Callable[[], object],
        write: Callable[[str], object] = lambda _line: None,
    ) -> None:
        self.done = Counter[str]()
        self.missed = Counter[str]()
        self.log: list[str] = []
        self.steps = 0
        self._stage = stage
        self._ways = ways
        self._plan = plan(seed, {name: way.share for name, way in ways.items()}, every_s=every_s)
        self._check = check
        self._write = write
        self._began = time.monotonic()

    def run(self, *, seconds: float = float("inf"), faults: int | None = None) -> None:
        """Inject faults for `seconds` or until `faults` are done; then revert all of them."""
        end = time.monotonic() + seconds
        due = time.monotonic()
        try:
            while faults is None or self.done.total() < faults:
                step = next(self._plan)
                self.steps += 1
                due = max(due + step.pause_s, time.monotonic() - 5.0)  # after a delay, catch up at most 5 s of steps
                if not self._sleep_until(due, end):
                    return
                self._check()
                self._note(step, self._do(step))
        finally:
            self._stage.restore(float("inf"))
            time.sleep(0.5)
            self._stage.restore(float("inf"))  # undoing a step may register another undo

    def _sleep_until(self, due: float, end: float) -> bool:
        while (now := time.monotonic()) < due:
            if now > end:
                return False
            time.sleep(min(0.05, due - now))
            self._stage.restore(time.monotonic())
        return now <= end

    def _do(self, step: Step) -> str:
        until = time.monotonic() + TRY_S
        while True:
            self._stage.restore(time.monotonic())
            whom = self._ways[step.way].do(step)
            if whom or time.monotonic() > until:
                return whom
            time.sleep(0.1)

    def _note(self, step: Step, whom: str) -> None:
        (self.done if whom else self.missed)[step.way] += 1
        line = f"{time.monotonic() - self._began:8.2f} s  {step.way:<16}  {whom or '(there was none)'}"
        self.log.append(line)
        del self.log[:-400]
        self._write(line)
