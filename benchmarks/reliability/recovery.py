"""Measure a live manager with thousands of connected fake pilots, under load and after kill -9.

python -m benchmarks.reliability.recovery rate --pilots 2000      calls/s, and the manager's memory
python -m benchmarks.reliability.recovery restart                 seconds from kill -9 to recovery
python -m benchmarks.reliability.recovery killed|frozen           seconds until a lost pilot's call runs elsewhere
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil

import stoker
from benchmarks.harness import in_turns, ratios, run_side, until
from benchmarks.starting import cpu_s, keep_state_in, local_session, print_side
from benchmarks.tables import Bar, Line, Table
from stoker.contexts.recipe import BARE
from stoker.manager.executor.client import Link
from stoker.manager.executor.outgoing import Submission
from stoker.manager.executor.processes import make_folder
from stoker.protocol.calls import CallEnd, CallForecast, CallOptions, CallProgress
from stoker.protocol.ids import CallId, FunctionKey
from stoker.protocol.session import SessionFolder
from stoker.protocol.to_client import Status
from stoker.protocol.to_manager import EndSession
from stoker.protocol.to_pilot import FunctionBlob

SIDE = "benchmarks.reliability.recovery"
MANY, MANY_TITLE = "many_pilots", "one live manager with 2,000 connected pilots against one pilot"
LOST, LOST_TITLE = "lost_pilot", "from the loss of a pilot until the call that it ran runs on another"
RESTART, RESTART_TITLE = "restart", "kill -9 of the manager with 100,000 calls queued and 200 running"


def many_pilots(say: Callable[[str], None], *, quick: bool = False) -> Table:
    pilots, calls, repeats = (50, 5000, 1) if quick else (2000, 200_000, 3)
    sides = {
        number: partial(run_side, SIDE, "rate", "--pilots", number, "--calls", str(calls))
        for number in ("1", str(pilots))
    }
    found = in_turns(sides, repeats, say, lambda number, side: f"{number} pilots {side['calls_per_s']:,.0f}/s")
    one, many = found.values()
    name = f"{pilots:,} pilots"
    rates = {name: [side["calls_per_s"] for side in many], "one pilot": [side["calls_per_s"] for side in one]}
    memory = {name: [side["manager_bytes"] / 1e6 for side in many]}
    lost = {name: [float(side["lost_pilots"]) for side in many]}
    lines = [
        Line(what="calls/s", cells={**rates, "many / one": ratios(*rates.values())}, bar=Bar(at_least=0.5)),
        Line(what="memory of the manager, MB", cells=memory, bar=Bar(at_most=500), last_digits=0),
        Line(what="pilots lost meanwhile", cells=lost, bar=Bar(at_most=0), last_digits=0),
    ]
    return Table(name=MANY, title=MANY_TITLE, lines=lines)


def restart(say: Callable[[str], None], *, quick: bool = False) -> Table:
    queued, repeats = (2000, 1) if quick else (100_000, 3)
    sides = {"restart": partial(run_side, SIDE, "restart", "--queued", str(queued))}
    [found] = in_turns(sides, repeats, say, lambda _, one: f"{one['at_work_s']:.1f} s").values()
    again = {"calls": [float(one["ran_again"] + one["ended_twice"]) for one in found]}
    what = "calls that had ended and were run again, or ended twice"
    lines = [
        Line(what="until it is back at work, s", cells={"s": [one["at_work_s"] for one in found]}, bar=Bar(at_most=10)),
        Line(what=what, cells=again, bar=Bar(at_most=0), last_digits=0),
    ]
    return Table(name=RESTART, title=RESTART_TITLE, lines=lines)


def lost_pilot(say: Callable[[str], None], *, quick: bool = False) -> Table:
    lines = []
    for how, bar, repeats in (("killed", 1.5, 1),) if quick else (("killed", 1.5, 5), ("frozen", 16.0, 3)):
        seconds = [run_side(SIDE, how)["seconds"] for _ in range(repeats)]
        say(f"{how}: " + ", ".join(f"{one:.2f} s" for one in seconds))
        lines.append(Line(what=f"the pilot is {how}", cells={"s": seconds}, bar=Bar(at_most=bar)))
    return Table(name=LOST, title=LOST_TITLE, lines=lines)


LIMIT_S = 300.0


class Counter:
    """Counts ended calls."""

    def __init__(self) -> None:
        self.ended: set[int] = set()
        self.twice = 0
        self.changed = threading.Condition()

    def settle(self, end: CallEnd) -> bool:
        with self.changed:
            self.twice += end.call in self.ended
            self.ended.add(end.call)
            self.changed.notify_all()
        return False

    def fail(self, call: CallId, error: Exception) -> None:
        raise SystemExit(f"call {call} failed: {error}")

    def flush(self) -> None: ...

    def report(self, said: CallProgress | CallForecast) -> None: ...

    def wait(self, count: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: len(self.ended) >= count, LIMIT_S):
                raise SystemExit(f"{len(self.ended)} of {count} calls ended within {LIMIT_S:g} s")


class Ended(Counter):
    """Counts ended calls; other calls may fail at the session's end."""

    def fail(self, call: CallId, error: Exception) -> None: ...


class World:
    def __init__(self, folder: Path, *, pilots: int, devices: int, hold_after: int = -1) -> None:
        self.folder = SessionFolder(folder)
        make_folder(self.folder)
        self.start_manager()
        _wait_until(self.folder.file.exists, "the manager listens")
        self.link = Link(self.folder)
        self.link.wait_joined(60)
        command = [
            sys.executable, "-m", "benchmarks.reliability.fake_pilots", "--session", str(folder), "--pilots",
            str(pilots), "--devices", str(devices), "--hold-after", str(hold_after),
        ]  # fmt: skip
        self.pilots = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        _wait_until(lambda: len(self.status().pilots) == pilots, "all pilots have joined")

    def start_manager(self) -> None:
        command = [sys.executable, "-P", "-m", "stoker.manager.main", "--session", str(self.folder.path)]
        self.manager = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def status(self) -> Status:
        return self.link.ask_status().result(60)

    def submit(self, count: int, waiter: Counter) -> None:
        submission = Submission(FunctionBlob(FunctionKey("nothing"), "nothing", b"code"), BARE, CallOptions())
        for _ in range(count):
            self.link.submit(submission, b"x" * 64, waiter)

    def wait_until_accepted(self, count: int, waiter: Counter) -> None:
        """Wait until the manager has all of `count` submitted calls."""

        def accepted() -> bool:
            status = self.status()
            return status.queued + status.running >= count - len(waiter.ended)

        _wait_until(accepted, "all calls are accepted")

    def end(self) -> dict[str, Any]:
        self.link.tell(EndSession("measured"))
        said, _ = self.pilots.communicate(timeout=120)
        self.manager.wait(60)
        self.link.close()
        found: dict[str, Any] = json.loads(said)
        return found


def rate(folder: Path, *, pilots: int, calls: int) -> dict[str, Any]:
    world, warm = World(folder, pilots=pilots, devices=2), Counter()
    manager = psutil.Process(world.manager.pid)
    joined = manager.memory_info().rss
    world.submit(20 * pilots + 2000, warm)  # Every library has received and run the function.
    warm.wait(20 * pilots + 2000)
    counter = Counter()
    before, began = cpu_s(manager), time.perf_counter()
    world.submit(calls, counter)
    counter.wait(calls)
    seconds = time.perf_counter() - began
    busy_s, memory = cpu_s(manager) - before, manager.memory_info().rss
    lost = world.status().lost_pilots
    found = world.end()
    return {
        "calls_per_s": calls / seconds, "manager_bytes": memory, "lost_pilots": lost,
        "manager_cpu_us_per_call": 1e6 * busy_s / calls, "joined_bytes": joined,
        "calls_per_frame": found["given"] / found["frames"],
        "pilots_cpu_us_per_call": 1e6 * found["cpu_s"] / found["given"],
    }  # fmt: skip


def measure_restart(folder: Path, *, queued: int, running: int, finished: int) -> dict[str, Any]:
    world = World(folder, pilots=running // 2, devices=2, hold_after=finished)
    counter = Counter()
    total = finished + running + queued
    world.submit(total, counter)
    counter.wait(finished)
    world.wait_until_accepted(total, counter)
    done, began = len(counter.ended), time.perf_counter()
    world.manager.kill()
    world.manager.wait()
    world.start_manager()
    _wait_until(lambda: len([p for p in world.status().pilots if p.state == "here"]) == running // 2, "pilots are back")
    back = time.perf_counter() - began
    world.pilots.send_signal(signal.SIGUSR1)
    counter.wait(done + 2 * running)  # more calls than ran before, so queued calls ran too
    at_work = time.perf_counter() - began
    counter.wait(total)
    found = world.end()
    return {"pilots_back_s": back, "at_work_s": at_work, "ran_again": found["again"], "ended_twice": counter.twice}


def _wait_until(true: Callable[[], Any], what: str) -> None:
    def asked() -> Any:
        with suppress(TimeoutError):
            return true()

    until(asked, LIMIT_S, what, every_s=0.02)


@stoker.context(memory="100 MB")
def model() -> int:
    return 1


@stoker.app(context=model())
def run_briefly(_one: int, _number: int) -> int:
    time.sleep(0.2)
    return os.getpid()


@stoker.app(context=model())
def run_until_killed(_one: int, path: str) -> None:
    with open(path, "a") as file:
        file.write(f"{time.time()} {os.getpid()}\n")
    time.sleep(LIMIT_S)


def lose_pilot(*, frozen: bool) -> dict[str, float]:
    """Kill or freeze one of two pilots during a call. Return the seconds until the call runs on the other pilot."""
    stopped: list[psutil.Process] = []
    with local_session(init_blocks=2, max_blocks=2) as session:
        path = Path(session.folder, "starts")
        try:
            until(lambda: len(set(stoker.map(run_briefly, range(20)))) == 2, LIMIT_S, "the context on two pilots")
            run_until_killed(str(path))
            _, pid = _line(path, 0)
            pilot = next(each for each in psutil.Process(pid).parents() if "stoker.pilot.main" in each.cmdline())
            stopped = [pilot, *pilot.children(recursive=True)] if frozen else []
            lost_at = time.time()
            for process in stopped or [pilot]:
                process.send_signal(signal.SIGSTOP if frozen else signal.SIGKILL)
            again_at, _ = _line(path, 1)
        finally:
            for process in stopped:
                with suppress(psutil.NoSuchProcess):
                    process.resume()
    return {"seconds": again_at - lost_at}


def _line(path: Path, number: int) -> tuple[float, int]:
    def lines() -> list[str]:
        return path.read_text().splitlines()[number:] if path.exists() else []

    at, pid = until(lines, LIMIT_S, f"beginning {number + 1} of the call")[0].split()
    return float(at), int(pid)


def side(
    what: Literal["rate", "restart", "killed", "frozen"], pilots: int = 1, calls: int = 200_000, queued: int = 100_000,
    running: int = 200,
) -> dict[str, Any]:  # fmt: skip
    if what in ("killed", "frozen"):
        return lose_pilot(frozen=what == "frozen")
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        keep_state_in(folder)
        place = Path(folder) / "session"
        if what == "rate":
            return rate(place, pilots=pilots, calls=calls)
        return measure_restart(place, queued=queued, running=running, finished=1000)


if __name__ == "__main__":
    print_side(side, __doc__)
