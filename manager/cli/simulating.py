"""`stoker simulate`: simulate a scenario under several policies, and compare the policies."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from stoker.errors import ConfigError, StokerError
from stoker.folders import working_folder
from stoker.manager.cli import console
from stoker.manager.live.session_policies import find_policy
from stoker.manager.policies import SHIPPED
from stoker.manager.sim.check import find_world_warnings
from stoker.manager.sim.workload import SweepCalls, context_names_of_workload, expand_family_names
from stoker.manager.study import run_folder
from stoker.manager.study.comparison import (
    SPEED,
    Column,
    PolicyRow,
    choose_columns,
    choose_ranking_criterion,
    compare_policies,
    copy_bounds_to_all_runs,
    write_verdicts,
)
from stoker.manager.study.run_folder import SCENARIO, WrittenFiles
from stoker.manager.study.running import FinishedRun, simulate_all_runs
from stoker.manager.study.scenario import (
    Scenario,
    check_policies,
    find_scenario,
    load_scenario,
    policy_label,
    shipped_scenarios,
)
from stoker.manager.study.statistics import MeanEstimate
from stoker.progress_display import ProgressBar
from stoker.site import make_policy_path_absolute
from stoker.units import show_seconds

# ---- results in words


_NARROW_INTERVAL_SHARE = 0.02


def format_table(rows: Sequence[PolicyRow], columns: Sequence[Column]) -> list[str]:
    """Return a line per policy, with each mean and the half width of its 95 % confidence interval."""
    shown = []
    for column in columns:
        found = [estimate for row in rows if (estimate := row.estimates[column.key]) is not None]
        if any(each.mean or each.half_width for each in found) if column.hides_zeros else found:
            shown.append(column)
    titles = {column.key: column.title for column in shown}
    scales = {column.key: column.scale for column in shown}
    if any(SPEED in row.estimates for row in rows):
        titles[SPEED] = f"speed (x {policy_label(rows[0].policy)})"
    cells = [["policy", *titles.values()]]
    cells += [
        [policy_label(row.policy), *(format_estimate(row.estimates[key], scale=scales.get(key, 1.0)) for key in titles)]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  " + "   ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]).rstrip()
        for first, *rest in cells
    ]


def format_estimate(found: MeanEstimate | None, *, scale: float = 1.0) -> str:
    if found is None:
        return "–"
    mean, half_width = found.mean * scale, (found.half_width or 0.0) * scale
    digits = next((digits for digits, least in enumerate((100.0, 10.0, 1.0)) if abs(mean) >= least), 3)
    if mean.is_integer() and not half_width:
        digits = 0
    return f"{mean:,.{digits}f}" + (f" ± {half_width:,.{digits}f}" if half_width else "")


def summarize_simulation_results(
    runs: Sequence[FinishedRun], rows: Sequence[PolicyRow], scenario: Scenario
) -> list[str]:
    out = write_verdicts(runs, rows, scenario=scenario)
    for row in rows:
        if row.cut_off:
            end = show_seconds(scenario.until_s)
            out.append(f"{policy_label(row.policy)}: {row.cut_off} of {row.runs} runs were cut off after {end} (until)")
        if row.failed_calls:
            why: Counter[str] = sum((Counter(r.outcome.failed) for r in runs if r.policy == row.policy), Counter())
            reason, _ = why.most_common(1)[0]
            out.append(f"{policy_label(row.policy)}: {row.failed_calls:,} calls failed, most of them because: {reason}")
    return out


def describe_written_files(what: WrittenFiles) -> str:
    if not what.paths:
        return f"  {what.what:9} none: {what.about}"
    first, *more = what.paths
    names = [os.path.basename(path) for path in what.paths]
    if len(names) > 8:
        names = [f"{names[0]} … {names[-1]} ({len(names)} files)"]
    place = f"{os.path.dirname(first)}/   {' '.join(names)}" if more else first
    return f"  {what.what:9} {place}   {what.about}"


def suggest_next_commands(
    scenario: Scenario, runs: Sequence[FinishedRun], rows: Sequence[PolicyRow], *, asked: list[str], folder: Path
) -> list[str]:
    simulate = ["stoker", "simulate", *asked]
    steps: list[tuple[list[str], str]] = []
    others = [policy for policy in SHIPPED if policy not in {row.policy for row in rows}]
    if len(rows) == 1 and others:
        more = "another policy" + (f"; or {', '.join(others[1:])}" if others[1:] else "")
        this = [] if "--policy" in simulate else ["--policy", rows[0].policy]
        steps.append(([*simulate, *this, "--policy", others[0]], more))
    key = choose_ranking_criterion(scenario, runs).key
    found = [estimate for row in rows if (estimate := row.estimates.get(key)) is not None]
    if any(each.half_width is None or each.half_width > _NARROW_INTERVAL_SHARE * abs(each.mean) for each in found):
        steps.append(([*simulate, "--seeds", str(4 * max(row.runs for row in rows))], "narrower intervals"))
    source = scenario.world.sources[0]
    half = f"sources.{source.name}.max_blocks={max(1, source.max_blocks // 2)}"
    steps.append(([*simulate, "--set", half], "another world"))
    steps.append((["stoker", "simulate", str(folder / SCENARIO)], "exactly this again"))
    commands = [shlex.join(words) for words, _ in steps]
    wide = max(map(len, commands))
    heads = ["next:", *[""] * (len(steps) - 1)]
    return [f"{head:6}{command:{wide}}   {why}" for head, command, (_, why) in zip(heads, commands, steps, strict=True)]


_DRAW_EVERY_S = 0.2
_LINE_EVERY_S = 10.0
_MOST_RUNS_WITH_OWN_LINE = 20
_LEAST_SHARE_FOR_FORECAST = 0.03


class SimulationProgress:
    """Shows the progress of all runs: a bar on a terminal, one line per run on a pipe."""

    def __init__(self, *, total: int, calls: int, shown: bool) -> None:
        self._total = total
        self._calls = calls
        self._done = 0
        self._running: dict[tuple[str, int], tuple[float, int]] = {}
        self._began = time.monotonic()
        self._drawn = 0.0
        self.bar = (
            console.progress_bar("runs", total=total, facts=self._format_counts, below=self._format_running_runs)
            if shown
            else None
        )

    def update_run(self, policy: str, seed: int, now_s: float, ended: int) -> None:
        self._running[policy, seed] = now_s, ended
        if self.bar is not None and time.monotonic() - self._drawn >= _DRAW_EVERY_S:
            self._draw(self.bar)

    def record_finished_run(self, run: FinishedRun) -> None:
        self._done += 1
        self._running.pop((run.policy, run.seed), None)
        if self.bar is not None:
            self._draw(self.bar)
        elif (
            self._total <= _MOST_RUNS_WITH_OWN_LINE
            or self._done == self._total
            or time.monotonic() - self._drawn >= _LINE_EVERY_S
        ):
            self._drawn = time.monotonic()
            how = "done" if run.outcome.complete else "cut off"
            after = f"{how} after {show_seconds(run.outcome.ended_at)}, simulated in {show_seconds(run.wall_s)}"
            left = f"; {left} left" if (left := self._time_left()) else ""
            console.note(f"{self._done}/{self._total} runs: {policy_label(run.policy)}, seed {run.seed}, {after}{left}")

    def _draw(self, bar: ProgressBar) -> None:
        self._drawn = time.monotonic()
        bar.set_done(self._finished_share() * self._total, refresh=True)

    def _format_counts(self) -> str:
        left = self._time_left()
        return f"{self._done}/{self._total}" + (f"   left {left}" if left else "")

    def _format_running_runs(self) -> list[str]:
        wide, of = max((len(policy_label(policy)) for policy, _ in self._running), default=0), f" of {self._calls:,}"
        return [
            f"    {policy_label(policy):{wide}}  seed {seed}   {ended:,}{of if self._calls else ''} calls,"
            f" {show_seconds(now_s)} simulated"
            for (policy, seed), (now_s, ended) in self._running.items()
        ]

    def _finished_share(self) -> float:
        going = sum(min(1.0, ended / self._calls) for _, ended in self._running.values()) if self._calls else 0.0
        return min(1.0, (self._done + going) / self._total)

    def _time_left(self) -> str:
        part, passed_s = self._finished_share(), time.monotonic() - self._began
        return show_seconds(passed_s * (1 - part) / part) if _LEAST_SHARE_FOR_FORECAST < part < 1 else ""


# ---- runs


EXIT_CODE_INTERRUPTED = 130
_EXAMPLE_SCENARIO = "static-pool"


def simulate(
    given: str,
    *,
    policies: tuple[str, ...],
    seeds: int | None,
    changes: tuple[str, ...],
    jobs: int | None,
    out: Path | None,
    as_json: bool,
) -> int:
    scenario = _load_checked_scenario(given, policies=policies, seeds=seeds, changes=changes)
    total = len(scenario.policies) * scenario.seeds
    jobs = min(jobs or len(os.sched_getaffinity(0)), total)
    folder = run_folder.create_study_folder(scenario.name, out=out)
    run_folder.copy_policies(folder, scenario.policies)
    if not as_json:
        console.lines(_header_lines(scenario, total=total, jobs=jobs))
    began = time.monotonic()
    runs, stopped = _run(scenario, folder, jobs=jobs, total=total, quiet=as_json)
    if stopped is not None:
        run_folder.remove_incomplete_results(folder, runs)
    if runs:
        rows = compare_policies(
            runs, choose_columns(scenario), policies=scenario.policies,
            compares_speeds=isinstance(scenario.workload, SweepCalls),
        )  # fmt: skip
        results = run_folder.make_results(scenario, runs, rows, complete=len(runs) == total)
        if as_json:
            outputs = {each.what: each.paths for each in run_folder.write_study(folder, scenario, runs, results)}
            console.json({"results": results, "outputs": outputs})
        else:
            if len(runs) < total:
                console.line(f"stopped: {len(runs)} of {console.format_count(total, 'run')} were done, and are kept")
            events, seconds = sum(run.outcome.core_events for run in runs), sum(run.wall_s for run in runs)
            rate = f", {events / seconds:,.0f} core events/s each" if seconds else ""
            many = f"{jobs} processes" if jobs > 1 else "one process"
            took = (
                f"{console.format_count(len(runs), 'run')} in {show_seconds(time.monotonic() - began)} on {many}{rate}"
            )
            notes = [f"  {text}" for text in [*summarize_simulation_results(runs, rows, scenario), took]]
            console.lines(["", *format_table(rows, choose_columns(scenario)), "", *notes, ""])
            for each in run_folder.write_study(folder, scenario, runs, results):
                console.line(describe_written_files(each))
            options = [("--set", change) for change in changes] + [("--policy", policy) for policy in policies]
            asked = [given, *(word for option in options for word in option)]
            console.lines(["", *suggest_next_commands(scenario, runs, rows, asked=asked, folder=folder)])
    if isinstance(stopped, StokerError):
        raise stopped
    if stopped is not None and not runs:
        console.note("stopped before a run was done; nothing was kept")
    return EXIT_CODE_INTERRUPTED if stopped is not None else 0


def _load_checked_scenario(
    given: str, *, policies: tuple[str, ...], seeds: int | None, changes: tuple[str, ...]
) -> Scenario:
    scenario = load_scenario(find_scenario(given), changes=changes)
    named = tuple(make_policy_path_absolute(policy, working_folder()) for policy in dict.fromkeys(policies))
    try:
        check_policies(named or scenario.policies, setting="--policy")
    except ValueError as error:
        raise ConfigError(str(error), key="policy") from None
    for policy in named or scenario.policies:  # check all policies before the first run
        find_policy(policy)
    return replace(scenario, policies=named or scenario.policies, seeds=seeds or scenario.seeds)


def _run(
    scenario: Scenario, folder: Path, *, jobs: int, total: int, quiet: bool
) -> tuple[list[FinishedRun], StokerError | KeyboardInterrupt | None]:
    """Return the finished runs, and the error that stopped the other runs."""
    runs, work, stopped = list[FinishedRun](), scenario.workload, None
    calls = -(-work.inputs // work.items) if isinstance(work, SweepCalls) else 0
    shown = SimulationProgress(total=total, calls=calls, shown=not quiet and console.is_terminal())
    going = simulate_all_runs(
        scenario, policies=scenario.policies, seeds=range(scenario.seeds), folder=folder / run_folder.LOGS,
        jobs=jobs, tell=shown.update_run,
    )  # fmt: skip
    with shown.bar or contextlib.nullcontext():
        try:
            with contextlib.closing(going):
                for run in going:
                    runs.append(run)
                    shown.record_finished_run(run)
        except (KeyboardInterrupt, StokerError) as error:
            stopped = error
    place = {policy: number for number, policy in enumerate(scenario.policies)}
    return sorted(copy_bounds_to_all_runs(runs), key=lambda run: (place[run.policy], run.seed)), stopped


def _header_lines(scenario: Scenario, *, total: int, jobs: int) -> list[str]:
    facts = [
        ", ".join(map(policy_label, scenario.policies)),
        console.format_count(scenario.seeds, "seed"),
        console.format_count(total, "run"),
    ]
    facts += [f"{jobs} at a time"] if jobs > 1 else []
    about = [scenario.about] if scenario.about else []
    wanted = expand_family_names(scenario.world, context_names_of_workload(scenario.workload))
    doubts = [f"note: {doubt}" for doubt in find_world_warnings(scenario.world, wanted=wanted)]
    return [f"scenario {scenario.name} · {' · '.join(facts)}", *about, *doubts]


def print_scenarios_and_policies(*, as_json: bool) -> None:
    known = {
        "scenarios": {name: load_scenario(path).about for name, path in shipped_scenarios().items()},
        "policies": {policy.name: policy.about for policy in SHIPPED.values()},
    }
    if as_json:
        console.json(known)
        return
    for kind, entries in known.items():
        wide = max(map(len, entries))
        console.lines([kind, *(f"  {name:{wide}}  {about}" for name, about in entries.items()), ""])
    example = min(known["scenarios"], key=lambda name: name != _EXAMPLE_SCENARIO)
    console.line(f"next: stoker simulate {example} --seeds 3")
    console.line(f"      write your own scenario from a copy of one: {shipped_scenarios()[example]}")
