"""Measure a live manager with thousands of connected fake pilots, under load and after kill -9, and lost pilots."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

import stoker
from benchmarks.harness import in_turns, ratios, run_side, until
from benchmarks.starting import keep_state_in, local_session
from benchmarks.tables import Bar, Line, Table
from stoker.contexts.recipe import BARE
from stoker.manager.executor.client import ClientLink
from stoker.manager.executor.outgoing import Submission
from stoker.manager.executor.processes import create_session_folder
from stoker.protocol.calls import CallEnd, CallForecast, CallOptions, CallProgress
from stoker.protocol.ids import CallId, FunctionKey
from stoker.protocol.session import SessionFolder
from stoker.protocol.to_client import Status
from stoker.protocol.to_manager import EndSession
from stoker.protocol.to_pilot import FunctionBlob

LIMIT_S = 300.0


def many_pilots(say: Callable[[str], None], *, quick: bool = False) -> Table:
    pilots, calls, repeats = (50, 5000, 1) if quick else (2000, 200_000, 3)
    sides = {number: partial(run_side, rate, pilots=number, calls=calls) for number in (1, pilots)}
    one, many = in_turns(sides, repeats, say).values()
    name = f"{pilots:,} pilots"
    rates = {name: [side["calls_per_s"] for side in many], "one pilot": [side["calls_per_s"] for side in one]}
    memory = {name: [side["manager_bytes"] / 1e6 for side in many]}
    lost = {name: [float(side["lost_pilots"]) for side in many]}
    lines = [
        Line(what="calls/s", cells={**rates, "many / one": ratios(*rates.values())}, bar=Bar(at_least=0.5)),
        Line(what="memory of the manager, MB", cells=memory, bar=Bar(at_most=500), last_digits=0),
        Line(what="pilots lost meanwhile", cells=lost, bar=Bar(at_most=0), last_digits=0),
    ]
    return Table(lines=lines)


def restart(say: Callable[[str], None], *, quick: bool = False) -> Table:
    queued, repeats = (2000, 1) if quick else (100_000, 3)
    [found] = in_turns({"restart": partial(run_side, restart_manager, queued=queued)}, repeats, say).values()
    again = {"calls": [float(one["ran_again"] + one["ended_twice"]) for one in found]}
    what = "calls that had ended and were run again, or ended twice"
    lines = [
        Line(what="until it is back at work, s", cells={"s": [one["at_work_s"] for one in found]}, bar=Bar(at_most=10)),
        Line(what=what, cells=again, bar=Bar(at_most=0), last_digits=0),
    ]
    return Table(lines=lines)


def lost_pilot(say: Callable[[str], None], *, quick: bool = False) -> Table:
    lines = []
    for how, bar, repeats in (("killed", 1.5, 1),) if quick else (("killed", 1.5, 5), ("frozen", 16.0, 3)):
        [runs] = in_turns({how: partial(run_side, lose_pilot, frozen=how == "frozen")}, repeats, say).values()
        seconds = [run["seconds"] for run in runs]
        lines.append(Line(what=f"the pilot is {how}", cells={"s": seconds}, bar=Bar(at_most=bar)))
    return Table(lines=lines)


class Ended:
    """Counts ended calls. Calls may fail at the session's end."""

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

    def fail(self, call: CallId, error: Exception) -> None: ...

    def flush(self) -> None: ...

    def report(self, said: CallProgress | CallForecast) -> None: ...

    def wait(self, count: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: len(self.ended) >= count, LIMIT_S):
                raise SystemExit(f"{len(self.ended)} of {count} calls ended within {LIMIT_S:g} s")


class World:
    def __init__(self, folder: Path, *, pilots: int, devices: int, hold_after: int = -1) -> None:
        self.folder = SessionFolder(folder)
        create_session_folder(self.folder)
        self.start_manager()
        _wait_until(self.folder.file.exists, "the manager listens")
        self.link = ClientLink(self.folder)
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

    def submit(self, count: int, waiter: Ended) -> None:
        submission = Submission(FunctionBlob(FunctionKey("nothing"), "nothing", b"code"), BARE, CallOptions())
        for _ in range(count):
            self.link.submit(submission, b"x" * 64, waiter)

    def wait_until_accepted(self, count: int, waiter: Ended) -> None:
        """Wait until the manager has all of `count` submitted calls."""

        def accepted() -> bool:
            status = self.status()
            return status.queued + status.running >= count - len(waiter.ended)

        _wait_until(accepted, "all calls are accepted")

    def end(self) -> dict[str, Any]:
        self.link.send_message(EndSession("measured"))
        said, _ = self.pilots.communicate(timeout=120)
        self.manager.wait(60)
        self.link.close()
        found: dict[str, Any] = json.loads(said)
        return found


@contextmanager
def fake_world(*, pilots: int, devices: int, hold_after: int = -1) -> Iterator[World]:
    """Start a manager with fake pilots in a new folder."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        keep_state_in(folder)
        yield World(Path(folder) / "session", pilots=pilots, devices=devices, hold_after=hold_after)


def rate(pilots: int, calls: int = 200_000) -> dict[str, float]:
    with fake_world(pilots=pilots, devices=2) as world:
        warm, counter = Ended(), Ended()
        world.submit(20 * pilots + 2000, warm)  # Every library has received and run the function.
        warm.wait(20 * pilots + 2000)
        began = time.perf_counter()
        world.submit(calls, counter)
        counter.wait(calls)
        seconds = time.perf_counter() - began
        memory, lost = psutil.Process(world.manager.pid).memory_info().rss, world.status().lost_pilots
        world.end()
    return {"calls_per_s": calls / seconds, "manager_bytes": memory, "lost_pilots": lost}


def restart_manager(queued: int = 100_000, running: int = 200, finished: int = 1000) -> dict[str, float]:
    with fake_world(pilots=running // 2, devices=2, hold_after=finished) as world:
        counter, total = Ended(), finished + running + queued
        world.submit(total, counter)
        counter.wait(finished)
        world.wait_until_accepted(total, counter)
        done, began = len(counter.ended), time.perf_counter()
        world.manager.kill()
        world.manager.wait()
        world.start_manager()
        _wait_until(
            lambda: len([p for p in world.status().pilots if p.state == "here"]) == running // 2, "pilots are back"
        )
        world.pilots.send_signal(signal.SIGUSR1)
        counter.wait(done + 2 * running)  # this exceeds the calls that ran before, so queued calls ran too
        at_work = time.perf_counter() - began
        counter.wait(total)
        found = world.end()
    return {"at_work_s": at_work, "ran_again": found["again"], "ended_twice": counter.twice}


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


def lose_pilot(frozen: bool) -> dict[str, float]:
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
