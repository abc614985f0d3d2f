"""The folder of a study: its scenario and its results.

scenario.toml     the scenario with all changes, as input for `stoker simulate`
results.json      each run, and a table over all runs
logs/             an event log per run, POLICY-SEED.parquet
*.png, *.svg      plots
timeline.json.gz  the first run, for Perfetto
policies/         copies of the user's policy files, which scenario.toml names
packages/         copies of these policies' packages
"""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import msgspec
from msgspec.structs import replace

from stoker.errors import ConfigError, StokerError
from stoker.manager.live.session_policies import PACKAGES, copy_policy, name_of_policy_copy
from stoker.manager.sim.run import RunOutcome
from stoker.manager.study.comparison import PolicyRow
from stoker.manager.study.log_files import read_event_log, write_timeline
from stoker.manager.study.measures import RunFigures
from stoker.manager.study.plots import write_plots
from stoker.manager.study.running import FinishedRun
from stoker.manager.study.scenario import Scenario, policy_label, scenario_to_toml
from stoker.startup import RELEASE
from stoker.whole_files import draft_file

LOGS, SCENARIO, RESULTS, TIMELINE, POLICIES = "logs", "scenario.toml", "results.json", "timeline.json.gz", "policies"


class WrittenFiles(msgspec.Struct, frozen=True):
    """Written files of one kind and their purpose, or the reason why they are missing."""

    what: str
    paths: tuple[str, ...]
    about: str = ""


class RunFacts(msgspec.Struct, frozen=True):
    """The facts about one run in `results.json`. `log`: path of the event log, relative to the folder."""

    policy: str
    seed: int
    outcome: RunOutcome
    figures: RunFigures
    log: str
    wall_s: float


class StudyResults(msgspec.Struct, frozen=True):
    stoker: str
    scenario: str
    complete: bool
    policies: tuple[PolicyRow, ...]
    runs: tuple[RunFacts, ...]


def create_study_folder(name: str, *, out: Path | None) -> Path:
    """Create a folder for a study: `out`, which must be empty, or a new folder in `runs`. Raises ConfigError."""
    folder = out or _choose_new_folder(Path("runs"), name)
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"--out: {folder} is not empty; name a new folder", file=str(folder), key="out")
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made: {error.strerror}", file=str(folder)) from None
    return folder


def copy_policies(folder: Path, policies: Sequence[str]) -> None:
    """Copy policy files into `folder` for reruns. Raises ConfigError."""
    for number, policy in enumerate(policies):
        try:
            copy_policy(policy, folder, single_file_folder=f"{POLICIES}/{number}")
        except OSError as error:
            raise ConfigError(f"policy {policy}: cannot be copied into {folder}: {error.strerror}") from None


def remove_incomplete_results(folder: Path, runs: Sequence[FinishedRun]) -> None:
    of_runs = {Path(run.log).name for run in runs}
    for path in (folder / LOGS).iterdir():
        if path.name not in of_runs:
            path.unlink(missing_ok=True)
    if not runs:
        for copies in (POLICIES, PACKAGES):
            shutil.rmtree(folder / copies, ignore_errors=True)
    for each in () if runs else (folder / LOGS, folder):
        try:
            each.rmdir()
        except OSError:  # keep a folder that contains other files
            return


def make_results(
    scenario: Scenario, runs: Sequence[FinishedRun], rows: Sequence[PolicyRow], *, complete: bool
) -> StudyResults:
    facts = [
        RunFacts(run.policy, run.seed, run.outcome, run.figures, f"{LOGS}/{Path(run.log).name}", run.wall_s)
        for run in runs
    ]
    return StudyResults(RELEASE, scenario.name, complete, tuple(rows), tuple(facts))


def write_study(
    folder: Path, scenario: Scenario, runs: Sequence[FinishedRun], results: StudyResults
) -> Iterator[WrittenFiles]:
    yield WrittenFiles("logs", tuple(sorted(run.log for run in runs)), "one event per row, for polars or pandas")
    names = (
        name_of_policy_copy(name, single_file_folder=f"{POLICIES}/{number}")
        for number, name in enumerate(scenario.policies)
    )
    kept = replace(scenario, policies=tuple(names))
    yield WrittenFiles("scenario", (_write_text(folder / SCENARIO, scenario_to_toml(kept)),), "what was simulated")
    text = msgspec.json.format(msgspec.json.encode(results), indent=1).decode() + "\n"
    yield WrittenFiles("results", (_write_text(folder / RESULTS, text),), "the table and each run")
    if scenario.outputs.plots:
        policies = dict.fromkeys(run.policy for run in runs)
        curves = {policy_label(policy): [run.curves for run in runs if run.policy == policy] for policy in policies}
        try:
            paths = write_plots(folder, curves, title=scenario.name)
            about = "items done, devices and queue over time; wait and turnaround times"
            yield WrittenFiles("plots", tuple(map(str, paths)), about)
        except StokerError as error:
            yield WrittenFiles("plots", (), str(error))
    if scenario.outputs.timeline:
        first = runs[0]
        log, _ = read_event_log(Path(first.log))
        write_timeline(folder / TIMELINE, log, first.curves)
        about = f"{policy_label(first.policy)}, seed {first.seed}: open it in Perfetto"
        yield WrittenFiles("timeline", (str(folder / TIMELINE),), about)


def _write_text(path: Path, text: str) -> str:
    with draft_file(path) as draft:
        draft.write_text(text, encoding="utf-8")
    return str(path)


def _choose_new_folder(root: Path, name: str) -> Path:
    stem = f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    paths = (root / f"{stem}{f'-{number}' if number > 1 else ''}" for number in count(1))
    return next(path for path in paths if not path.exists())
