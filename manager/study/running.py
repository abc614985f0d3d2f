"""A scenario's runs: every policy under every seed, over as many processes as are wanted.

Runs know nothing of each other, so each is done by a worker process that is given one after another. A run's log is
written by the worker, whole or not at all; what comes back is small. Seeds come first and policies second: who stops
half-way has the policies beside each other on the seeds that were done. With one job there is no other process.

A worker that dies (killed for memory, say) is told by its connection, which breaks; workers whose parent is gone learn
it in the same way, and end.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec

from stoker.errors import StokerError
from stoker.manager.policies.named import named
from stoker.manager.sim.awareness import limited
from stoker.manager.sim.check import in_order
from stoker.manager.sim.run import Outcome, Simulation, SimulationError
from stoker.manager.study.log_file import write_log
from stoker.manager.study.scenario import Scenario
from stoker.manager.study.traces import arrivals_of

Tell = Callable[[str, int, float, int], None]
"""Hears of a run that goes on: its policy, its seed, the time in its world in seconds, calls that have ended."""


class Finished(msgspec.Struct, frozen=True):
    """One run that is done. `log`: where its event log lies; `wall_s`: how long it took here."""

    policy: str
    seed: int
    outcome: Outcome
    log: str
    wall_s: float = 0.0


def run_all(
    scenario: Scenario,
    *,
    policies: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
    jobs: int = 1,
    tell: Tell | None = None,
) -> Iterator[Finished]:
    """Simulate the scenario with every policy under every seed, and give back each run as it is done. Event logs go
    into `folder`, which is there.

    Raises SimulationError, naming policy and seed, at the first run that cannot go on; others are then given up. So
    are they when the caller stops asking.
    """
    todo = list(itertools.product(seeds, policies))
    if jobs <= 1 or len(todo) == 1:
        for seed, policy in todo:
            yield run_one(scenario, policy=policy, seed=seed, folder=folder, tell=tell)
        return
    with _Workers(scenario, folder, count=min(jobs, len(todo))) as workers:
        yield from workers.do(todo, tell)


def run_one(scenario: Scenario, *, policy: str, seed: int, folder: Path, tell: Tell | None = None) -> Finished:
    """Simulate a scenario once, here. Raises SimulationError; ConfigError for a policy or a trace that is none."""
    began = time.perf_counter()
    chosen = named(policy)
    world = limited(scenario.world, chosen.awareness)
    calls = in_order(world, arrivals_of(scenario.workload, seed=seed, folder=folder, contexts=world.contexts))

    def hear(now_s: float, ended: int) -> None:
        if tell is not None:
            tell(policy, seed, now_s, ended)

    simulation = Simulation(world, calls, chosen.make(), seed=seed)
    try:
        outcome = simulation.run(until_s=scenario.until_s or math.inf, tell=hear)
    except SimulationError as error:
        raise SimulationError(f"policy {policy}, seed {seed}: {error}", policy=policy, seed=seed) from error
    path = folder / log_name(policy, seed)
    write_log(path, simulation.log, {"scenario": scenario.name, "policy": policy, "seed": str(seed)})
    return Finished(policy, seed, outcome, str(path), time.perf_counter() - began)


def log_name(policy: str, seed: int) -> str:
    """What the event log of a run is called: `default-0.parquet`."""
    return f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', policy).strip('-.')}-{seed}.parquet"


class _Workers:
    """Processes that simulate. Used as a context manager: when it is left, none of them is there any more."""

    def __init__(self, scenario: Scenario, folder: Path, *, count: int) -> None:
        spawning = multiprocessing.get_context("spawn")  # a fork would share locks with threads of this process
        self._processes: dict[Connection, BaseProcess] = {}
        self._runs: dict[Connection, tuple[int, str]] = {}
        with _no_interrupts():
            for _ in range(count):
                ours, theirs = spawning.Pipe()
                process = spawning.Process(target=_work, args=(theirs, scenario, folder), daemon=True)
                process.start()
                theirs.close()
                self._processes[ours] = process

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for connection, process in self._processes.items():
            connection.close()
            if connection in self._runs:
                process.terminate()
        for process in self._processes.values():
            process.join()

    def do(self, todo: list[tuple[int, str]], tell: Tell | None) -> Iterator[Finished]:
        """The runs, as they are done."""
        left = iter(todo)
        for connection in self._processes:
            self._give(connection, left)
        while self._runs:
            ready = set(wait(list(self._runs)))
            for connection in [each for each in self._runs if each in ready]:
                said = self._hear(connection)
                if isinstance(said, StokerError):
                    raise said
                if isinstance(said, Finished):
                    self._give(connection, left)
                    yield said
                elif tell is not None:
                    tell(*said)

    def _give(self, connection: Connection, left: Iterator[tuple[int, str]]) -> None:
        self._runs.pop(connection, None)
        run = next(left, None)
        if run is not None:
            self._runs[connection] = run
            with contextlib.suppress(OSError):  # it is gone: hearing it will tell
                connection.send(run)

    def _hear(self, connection: Connection) -> Any:
        try:
            return connection.recv()
        except (EOFError, OSError):
            seed, policy = self._runs[connection]
            process = self._processes[connection]
            process.join()
            code = process.exitcode or 0
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            memory = "; it may have wanted more memory than there is: try fewer --jobs" if code == -9 else ""
            raise SimulationError(
                f"policy {policy}, seed {seed}: the process that simulated it died ({how}){memory}",
                policy=policy, seed=seed,
            ) from None  # fmt: skip


@contextlib.contextmanager
def _no_interrupts() -> Iterator[None]:
    """Processes that are started meanwhile never hear of Ctrl-C: that is the parent's to answer, which keeps what is
    done. One that comes meanwhile is heard here afterwards."""
    resource_tracker.ensure_running()  # as starting a process does, which would end the blocking below
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _work(connection: Connection, scenario: Scenario, folder: Path) -> None:
    """A worker process: run after run, until nobody asks for another."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            seed, policy = connection.recv()
            connection.send(_outcome_of(connection, scenario, policy=policy, seed=seed, folder=folder))


def _outcome_of(
    connection: Connection, scenario: Scenario, *, policy: str, seed: int, folder: Path
) -> Finished | StokerError:
    def tell(*progress: Any) -> None:
        connection.send(progress)

    try:
        return run_one(scenario, policy=policy, seed=seed, folder=folder, tell=tell)
    except StokerError as error:
        return error
    except OSError:
        raise
    except Exception:
        return SimulationError(f"policy {policy}, seed {seed} failed:\n{traceback.format_exc()}")
