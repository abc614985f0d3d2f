from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from faults.world import World, count_lines, is_alive, kill, note, until

import stoker
from stoker.protocol.session import SessionFolder

# ---- random kills


CALLS = 2_000


class Chaos(threading.Thread):
    """A thread that kills a library, the pilot or the manager at random intervals until `stop`."""

    def __init__(self, world: World, *, log: Path) -> None:
        super().__init__(name="chaos", daemon=True)
        self.done: list[str] = []
        self._world = world
        self._chance = random.Random(1)
        self._log = log
        self._over = threading.Event()

    def run(self) -> None:
        plan = ["library", "manager", "library", "pilot", "library", "manager", "library", "pilot", "manager"]
        self._chance.shuffle(plan)
        while not self._over.wait(self._chance.uniform(0.2, 1.0)):
            what = plan[-1] if plan else "library"
            if getattr(self, f"_kill_{what}")():
                self.done.append(what)
                del plan[-1:]

    def stop(self) -> None:
        self._over.set()
        self.join()

    def _kill_library(self) -> bool:
        ran = [line.split() for line in count_lines(self._log) if not line.startswith("loaded")]
        libraries = [pid for pid in {int(pid) for _, pid in ran} if is_alive(pid)]
        if not libraries:
            return False
        library = self._chance.choice(sorted(libraries))
        kill([library], signal.SIGSTOP)  # a stopped library starts no other call while the test examines it
        ran = [line.split() for line in count_lines(self._log) if not line.startswith("loaded")]
        last = next(number for number, pid in reversed(ran) if int(pid) == library)
        innocent = sum(number == last for number, _ in ran) == 1
        kill([library], signal.SIGKILL if innocent else signal.SIGCONT)
        return innocent

    def _kill_pilot(self) -> bool:
        pilots = self._world.pilots()
        kill(pilots)
        return bool(pilots)

    def _kill_manager(self) -> bool:
        managers = self._world.of("stoker.manager.main")
        kill(managers)
        return bool(managers)


@stoker.context
def slow_to_load(log):
    note(log, "loaded")
    time.sleep(0.05)
    return 3


@pytest.mark.long
@pytest.mark.slow
def test_every_call_ends_once_while_all_processes_are_killed(session, world, tmp_path):
    log = str(tmp_path / "log")

    def work(context, number):
        note(log, f"{number} {os.getpid()}")
        time.sleep(0.004)
        return number * context, b"x" * (number % 7) * 1000

    app = stoker.app(context=slow_to_load(log))(work)
    chaos = Chaos(world, log=tmp_path / "log")
    results = stoker.map(app, range(CALLS), window=500)
    got = [next(results)]
    chaos.start()
    try:
        got += results
    finally:
        chaos.stop()
    assert got == [(number * 3, b"x" * (number % 7) * 1000) for number in range(CALLS)]
    assert set(chaos.done) == {"library", "manager", "pilot"}, chaos.done
    runs = Counter(line.split()[0] for line in count_lines(tmp_path / "log"))
    runs.pop("loaded")
    assert len(runs) == CALLS
    assert runs.total() - CALLS <= 3 * len(chaos.done), "only calls that ran during a kill run again"
    status = session.status()
    assert status.failed == 0
    assert status.done == CALLS
    assert session.executor.outstanding() == 0


# ---- chosen kills


def test_pilot_started_by_hand_serves_and_leaves_no_key(session, world, tmp_path):
    @stoker.app
    def where(number):
        time.sleep(0.05)
        return os.environ.get("BY_HAND", "")

    folder = SessionFolder(session.folder)
    keys = set(folder.block_keys.iterdir())
    command = [sys.executable, "-m", "stoker.pilot.main", "--session", str(folder.path), "--devices", "cpu:1"]
    pilot = world.spawn(command, folder=tmp_path / "elsewhere", BY_HAND="by hand")
    until(lambda: len(session.status().pilots) == 2, why="both pilots")
    [mine] = set(folder.block_keys.iterdir()) - keys
    assert mine.stat().st_mode & 0o777 == 0o600
    assert {each.block for each in session.status().pilots} >= {mine.stem}
    until(lambda: "by hand" in set(stoker.map(where, range(20))), limit_s=30, why="a call on it")
    pilot.terminate()
    assert pilot.wait(20) == 0
    assert set(folder.block_keys.iterdir()) == keys
