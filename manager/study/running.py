"""Simulate a scenario's policies, each with each seed, in separate processes."""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import re
import signal
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from stoker.errors import StokerError
from stoker.manager.live.session_policies import find_policy
from stoker.manager.sim.bound import compute_lower_bound
from stoker.manager.sim.check import check_arrivals, raise_for_impossible_setting
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.run import RunOutcome, Simulation, SimulationError
from stoker.manager.sim.workload import (
    Trace,
    choose_contexts_by_length,
    context_names_of_workload,
    expand_family_names,
    generate_arrivals,
)
from stoker.manager.sim.world import World, limit_awareness
from stoker.manager.study.log_files import write_event_log
from stoker.manager.study.measures import RunFigures, compute_run_figures, measure_run
from stoker.manager.study.plots import Curves, make_run_curves
from stoker.manager.study.scenario import CallDetail, Scenario, policy_label
from stoker.manager.study.traces import read_trace
from stoker.tracebacks import user_traceback_lines
from stoker.units import show_seconds

Task = TypeVar("Task")
Result = TypeVar("Result")
Tell = Callable[..., None]


class WorkerDiedError(StokerError):
    """A worker process died during a task. Attributes: `task`, `how` (signal or exit code), `code`."""


class Workers(Generic[Task, Result]):
    """Processes that call `do(task, tell)`, which may raise only StokerErrors. The `with` block ends the processes."""

    def __init__(self, do: Callable[[Task, Tell], Result], *, count: int) -> None:
        spawning = multiprocessing.get_context("spawn")  # a forked process would inherit locks that other threads hold
        self._processes: dict[Connection, BaseProcess] = {}
        self._tasks: dict[Connection, Task] = {}
        with _block_interrupts():
            for _ in range(count):
                ours, theirs = spawning.Pipe()
                process = spawning.Process(target=_run_tasks, args=(theirs, do), daemon=True)
                process.start()
                theirs.close()
                self._processes[ours] = process

    def __enter__(self) -> Workers[Task, Result]:
        return self

    def __exit__(self, *_: object) -> None:
        for connection, process in self._processes.items():
            connection.close()
            if connection in self._tasks:
                process.terminate()
        for process in self._processes.values():
            process.join()

    def iterate_results(self, todo: Sequence[Task], *, on_progress: Tell) -> Iterator[Result]:
        """Yield each result when its task ends. `on_progress` receives progress. Raises the errors of `do`."""
        left = iter(todo)
        for connection in self._processes:
            self._send_next_task(connection, left)
        while self._tasks:
            ready = set(wait(list(self._tasks)))
            for connection in [each for each in self._tasks if each in ready]:
                kind, said = self._receive(connection)
                if kind is StokerError:
                    raise said
                if kind is None:
                    on_progress(*said)
                else:
                    self._send_next_task(connection, left)
                    yield said

    def _send_next_task(self, connection: Connection, left: Iterator[Task]) -> None:
        self._tasks.pop(connection, None)
        for task in left:
            self._tasks[connection] = task
            with contextlib.suppress(OSError):  # if the process has ended, `_receive` raises later
                connection.send(task)
            return

    def _receive(self, connection: Connection) -> Any:
        try:
            return connection.recv()
        except (EOFError, OSError):
            process = self._processes[connection]
            process.join()
            code = process.exitcode or 0
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            task = self._tasks[connection]
            raise WorkerDiedError(f"the process that ran {task} died ({how})", task=task, how=how, code=code) from None


@contextlib.contextmanager
def _block_interrupts() -> Iterator[None]:
    resource_tracker.ensure_running()  # otherwise the first worker process starts the tracker and unblocks SIGINT
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _run_tasks(connection: Connection, do: Callable[[Any, Tell], Any]) -> None:
    def send(kind: type | None, what: Any) -> None:
        try:
            connection.send((kind, what))
        except OSError:
            raise SystemExit from None  # the parent process has ended, so end this process too

    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        try:
            send(object, do(task, lambda *progress: send(None, progress)))
        except StokerError as error:
            send(StokerError, error)


TellProgress = Callable[[str, int, float, int], None]  # Policy, seed, simulated time in seconds, number of ended calls
MOST_SECONDS_WITHOUT_END = 10 * 86_400.0  # A run is stopped if no call ends for this many simulated seconds
MOST_REPORTS_AT_SAME_TIME = 200
"""A run is stopped after this number of progress reports (4 million events) at the same simulated time."""


class FinishedRun(msgspec.Struct, frozen=True):
    """A finished run. `log`: path of the run's event log. `wall_s`: real seconds that the run took."""

    policy: str
    seed: int
    outcome: RunOutcome
    log: str
    figures: RunFigures
    curves: Curves
    wall_s: float


def _ignore_progress(*_: Any) -> None:
    pass


def simulate_all_runs(
    scenario: Scenario, *, policies: Sequence[str], seeds: Sequence[int], folder: Path, jobs: int = 1,
    tell: TellProgress = _ignore_progress,
) -> Generator[FinishedRun, None, None]:  # fmt: skip
    """Simulate every policy and seed, and yield each run at its end. Only the first policy's runs get a lower bound."""
    todo = [_PlannedRun(policy, seed, number == 0) for seed in seeds for number, policy in enumerate(policies)]
    do = functools.partial(_simulate_run, scenario=scenario, folder=folder)
    if jobs <= 1 or len(todo) == 1:
        yield from (do(run, tell) for run in todo)
        return
    try:
        with Workers(do, count=min(jobs, len(todo))) as workers:
            yield from workers.iterate_results(todo, on_progress=tell)
    except WorkerDiedError as error:
        memory = "; perhaps the memory was full: try fewer --jobs" if error.code == -9 else ""
        raise SimulationError(f"{error.task}: the process that simulated it died ({error.how}){memory}") from None


class _PlannedRun(msgspec.Struct, frozen=True):
    policy: str
    seed: int
    needs_bound: bool

    def __str__(self) -> str:
        return f"policy {policy_label(self.policy)}, seed {self.seed}"


def _simulate_run(run: _PlannedRun, tell: TellProgress, *, scenario: Scenario, folder: Path) -> FinishedRun:
    try:
        return simulate_once(
            scenario, policy=run.policy, seed=run.seed, folder=folder, needs_bound=run.needs_bound, tell=tell
        )
    except (SimulationError, OSError) as error:
        raise SimulationError(f"{run}: {error}", policy=run.policy, seed=run.seed) from error
    except StokerError:
        raise
    except Exception as error:  # a user's policy may raise any exception
        lines = "\n".join(user_traceback_lines(error)) or traceback.format_exc()
        raise SimulationError(f"{run} failed:\n{lines}", policy=run.policy, seed=run.seed) from error


def simulate_once(
    scenario: Scenario, *, policy: str, seed: int, folder: Path, needs_bound: bool = False,
    tell: TellProgress = _ignore_progress,
) -> FinishedRun:  # fmt: skip
    """Simulate one policy with one seed. Raises SimulationError and ConfigError."""
    began = time.perf_counter()
    policies = find_policy(policy).make()
    world = limit_awareness(scenario.world, policies.awareness)
    wanted = expand_family_names(world, context_names_of_workload(scenario.workload))
    raise_for_impossible_setting(world, wanted=wanted, until_s=scenario.until_s)
    counted = scenario.outputs.calls is CallDetail.COUNTED
    simulation = Simulation(
        world, _read_or_generate_calls(scenario, world, seed=seed), policies, seed=seed, counted=counted
    )
    until_s = float(scenario.until_s) or math.inf
    outcome = simulation.run(until_s=until_s, tell=StallWatch(functools.partial(tell, policy, seed)))
    measured = measure_run(simulation.log, until_s=outcome.ended_at)
    calls = _read_or_generate_calls(scenario, scenario.world, seed=seed)
    bound_s = compute_lower_bound(scenario.world, calls, seed=seed).ends_at if needs_bound else math.inf
    known_s = bound_s if 0.0 < bound_s < math.inf else None
    figures = compute_run_figures(simulation.log, outcome, measured, bound_s=known_s)
    path = folder / log_file_name(policy, seed)
    write_event_log(path, simulation.log, {"scenario": scenario.name, "policy": policy_label(policy), "seed": seed})
    wall_s = time.perf_counter() - began
    return FinishedRun(policy, seed, outcome, str(path), figures, make_run_curves(measured), wall_s)


def _read_or_generate_calls(scenario: Scenario, world: World, *, seed: int) -> Iterator[Arrival]:
    workload, known = scenario.workload, {*world.contexts, *(model.family for model in world.contexts.values())}
    if isinstance(workload, Trace):
        calls = read_trace(workload, folder=Path(), contexts=known)
    else:
        calls = generate_arrivals(workload, seed=seed)
    return check_arrivals(world, choose_contexts_by_length(world, calls))


class StallWatch:
    """Reports progress, and stops a run whose calls or clock no longer advance."""

    def __init__(self, tell: Callable[[float, int], None]) -> None:
        self._tell = tell
        self._ended = self._still = 0
        self._since_s = self._now_s = 0.0

    def __call__(self, now_s: float, ended: int) -> None:
        if ended != self._ended:
            self._ended, self._since_s = ended, now_s
        if now_s - self._since_s > MOST_SECONDS_WITHOUT_END:
            since = show_seconds(self._since_s) if self._ended else "the beginning"
            raise SimulationError(
                f"no call has ended since {since}, and the simulated time is {show_seconds(now_s)}: either "
                'calls are lost repeatedly, or the policy forgets them; until = "…" cuts a run off'
            )
        self._still = self._still + 1 if now_s == self._now_s else 0
        self._now_s = now_s
        if self._still > MOST_REPORTS_AT_SAME_TIME:
            raise SimulationError(
                f"simulated time stays at {now_s:.6f} s, with {ended} calls ended: a timer repeats without end"
            )
        self._tell(now_s, ended)


def log_file_name(policy: str, seed: int) -> str:
    return f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', policy_label(policy)).strip('-.')}-{seed}.parquet"
