"""What `stoker simulate` does: a scenario under one or several policies, and how they compare."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec
from msgspec.structs import replace

from stoker.errors import ConfigError, StokerError
from stoker.manager.cli import console, simulate_table
from stoker.manager.cli.simulate_progress import SimulationProgress, progress
from stoker.manager.cli.simulate_table import count
from stoker.manager.live.own_policies import find
from stoker.manager.policies.named import SHIPPED
from stoker.manager.sim.check import doubtful
from stoker.manager.sim.families import contexts_named
from stoker.manager.sim.workload import SweepCalls, contexts_of
from stoker.manager.study import run_folder
from stoker.manager.study.comparison import columns_for, compare, with_bounds
from stoker.manager.study.running import FinishedRun, run_all
from stoker.manager.study.scenario import Scenario, check_policies, find_scenario, label, load_scenario, shipped
from stoker.site import absolute_policy
from stoker.working_folder import working_folder

INTERRUPTED = 130
"""The exit code after Ctrl-C."""
_FIRST = "static-pool"
"""What to try first."""


class SimulationRequest(msgspec.Struct, frozen=True):
    """What was asked for; what is empty or None is as the scenario or the machine has it."""

    given: str
    policies: tuple[str, ...] = ()
    seeds: int | None = None
    changes: tuple[str, ...] = ()
    jobs: int | None = None
    out: Path | None = None

    @property
    def words(self) -> list[str]:
        """What to write to ask for the same world and policies again."""
        options = [("--set", change) for change in self.changes] + [("--policy", policy) for policy in self.policies]
        return [self.given, *(word for option in options for word in option)]


class SimulationPlan(msgspec.Struct, frozen=True):
    """What is to be simulated, where it goes, and how many runs at a time."""

    scenario: Scenario
    folder: Path
    jobs: int

    @property
    def total(self) -> int:
        """Runs."""
        return len(self.scenario.policies) * self.scenario.seeds


class SimulationOutcome(msgspec.Struct):
    """What came of it. `stopped`: why it is not all."""

    runs: list[FinishedRun]
    stopped: StokerError | KeyboardInterrupt | None = None
    wall_s: float = 0.0


def simulate(asked: SimulationRequest, *, as_json: bool) -> int:
    """Simulate, and say what came of it; the exit code. Raises StokerError, after what was done until then is kept."""
    plan = _plan(asked)
    if not as_json:
        console.lines(_header(plan))
    done = _run(plan, quiet=as_json)
    if done.stopped is not None:
        run_folder.clean(plan.folder, done.runs)
    if done.runs:
        _report(asked, plan, done, as_json=as_json)
    if isinstance(done.stopped, StokerError):
        raise done.stopped
    if done.stopped is not None and not done.runs:
        console.note("stopped before a run was done; nothing was kept")
    return INTERRUPTED if done.stopped is not None else 0


def _plan(asked: SimulationRequest) -> SimulationPlan:
    scenario = load_scenario(find_scenario(asked.given), changes=asked.changes)
    policies = tuple(absolute_policy(policy, working_folder()) for policy in dict.fromkeys(asked.policies))
    policies = policies or scenario.policies
    try:
        check_policies(policies, setting="--policy")
    except ValueError as error:
        raise ConfigError(str(error), key="policy") from None
    for policy in policies:  # before anything is done for those that are sound
        find(policy)
    scenario = replace(scenario, policies=policies, seeds=asked.seeds or scenario.seeds)
    jobs = asked.jobs or len(os.sched_getaffinity(0))
    folder = run_folder.make(scenario.name, out=asked.out)
    run_folder.keep_policies(folder, policies)
    return SimulationPlan(scenario, folder, min(jobs, len(policies) * scenario.seeds))


def _run(plan: SimulationPlan, *, quiet: bool) -> SimulationOutcome:
    """Simulate until all is done, something fails, or Ctrl-C."""
    scenario, done, began = plan.scenario, SimulationOutcome([]), time.monotonic()
    with progress(scenario.workload, total=plan.total, quiet=quiet) as shown:
        try:
            _collect(plan, done.runs, shown)
        except (KeyboardInterrupt, StokerError) as stopped:
            done.stopped = stopped
    place = {policy: number for number, policy in enumerate(scenario.policies)}
    done.runs = sorted(with_bounds(done.runs), key=lambda run: (place[run.policy], run.seed))
    done.wall_s = time.monotonic() - began
    return done


def _collect(plan: SimulationPlan, runs: list[FinishedRun], shown: SimulationProgress) -> None:
    scenario = plan.scenario
    going = run_all(
        scenario, policies=scenario.policies, seeds=range(scenario.seeds), folder=plan.folder / run_folder.LOGS,
        jobs=plan.jobs, tell=shown.goes_on,
    )  # fmt: skip
    with contextlib.closing(going):
        for run in going:
            runs.append(run)
            shown.done(run)


def _report(asked: SimulationRequest, plan: SimulationPlan, done: SimulationOutcome, *, as_json: bool) -> None:
    """The table, and everything that is written. What was done before a stop gets all of it as well."""
    scenario, runs = plan.scenario, done.runs
    columns = columns_for(scenario)
    all_at_once = isinstance(scenario.workload, SweepCalls)
    rows = compare(runs, columns, policies=scenario.policies, all_at_once=all_at_once)
    results = run_folder.results_of(scenario, runs, rows, complete=len(runs) == plan.total)
    if as_json:
        outputs = {each.what: each.paths for each in run_folder.write(plan.folder, scenario, runs, results)}
        console.json({"results": results, "outputs": outputs})
        return
    if len(runs) < plan.total:
        console.line(f"stopped: {len(runs)} of {count(plan.total, 'run')} were done, and are kept")
    notes = simulate_table.notes(runs, rows, scenario)
    took = simulate_table.summary(runs, wall_s=done.wall_s, jobs=plan.jobs)
    console.lines(["", *simulate_table.table(rows, columns), "", *(f"  {text}" for text in [*notes, took]), ""])
    for each in run_folder.write(plan.folder, scenario, runs, results):
        console.line(simulate_table.written(each))
    steps = simulate_table.next_steps(
        scenario, runs, rows, asked=asked.words, folder=plan.folder, known=tuple(SHIPPED)
    )  # fmt: skip
    console.lines(["", *steps])


def _header(plan: SimulationPlan) -> list[str]:
    scenario = plan.scenario
    facts = [", ".join(map(label, scenario.policies)), count(scenario.seeds, "seed"), count(plan.total, "run")]
    if plan.jobs > 1:
        facts.append(f"{plan.jobs} at a time")
    about = [scenario.about] if scenario.about else []
    wanted = contexts_named(scenario.world, contexts_of(scenario.workload))
    doubts = [f"note: {doubt}" for doubt in doubtful(scenario.world, wanted=wanted)]
    return [f"scenario {scenario.name} · {' · '.join(facts)}", *about, *doubts]


def show_known(*, as_json: bool) -> None:
    """Which scenarios and which policies ship."""
    if as_json:
        console.json(_shipped_names())
    else:
        console.lines(_listed())


def _shipped_names() -> dict[str, dict[str, str]]:
    return {
        "scenarios": {name: load_scenario(path).about for name, path in shipped().items()},
        "policies": {policy.name: policy.about for policy in SHIPPED.values()},
    }


def _listed() -> list[str]:
    known = _shipped_names()
    out = []
    for kind, entries in known.items():
        wide = max(map(len, entries))
        out += [kind, *(f"  {name:{wide}}  {about}" for name, about in entries.items()), ""]
    example = min(known["scenarios"], key=lambda name: name != _FIRST)
    return [
        *out,
        f"next: stoker simulate {example} --seeds 3",
        f"      a scenario of your own begins as a copy of one: {shipped()[example]}",
    ]
