"""Run an application: open or resume its run folder, make calls, keep results, and report.

An application passes a `RunSpec` and a function that returns an `ApplicationOutcome`:

    def run(given, choice: RunChoice) -> int:
        spec = RunSpec(app=APP, prefix="mine", parameters=..., options=..., key=("id",), total=len(items), ...)
        return execute_run(spec, lambda work: _results(work, items), choice)

    def _results(work: OpenRun, items: ...) -> Outcome:
        work.infer([(app, requests)], contexts={"": recipe}, take=keep, noun="items")
        results = work.folder.finish(name="results.jsonl", write=...)
        return Outcome(summary={...}, files={"results": results}, report=[...])

A run that stops or fails keeps its results and prints the command that resumes the run.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import stoker
from stoker.apps.common.calls import INTERRUPTED, Job, StoppedBySignal, format_session_line, raise_on_signals, run_calls
from stoker.apps.common.command_line import RunChoice, format_command, format_count
from stoker.config import load_site
from stoker.console import Screen
from stoker.contexts import Recipe
from stoker.errors import StokerError
from stoker.run_folder import Record, RecordLog, RunFolder, open_run
from stoker.sessions import ContextFacts, facts_of
from stoker.units import show_seconds

Records = RecordLog | Mapping[tuple[Any, ...], Record]


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A run. Runs of an `app` with equal `parameters` are the same run. `again`: resume command, if not `--resume`."""

    app: str
    prefix: str
    parameters: dict[str, Any]
    options: msgspec.Struct
    key: tuple[str, ...]
    total: int
    headline: Sequence[str]
    noun: str = "result"
    site: str = ""
    session: str = ""
    again: str = ""
    through_make: bool = False


class RunAttempt(msgspec.Struct):
    """One attempt to complete a run. `kept`: number of results from earlier attempts; `made`: number of new results;
    `origin`: where the model was loaded from.
    """

    wall_s: float = 0.0
    made: int = 0
    kept: int = 0
    calls: int = 0
    infer_s: float = 0.0
    facts: ContextFacts = ContextFacts()
    origin: str = ""
    tokens: int = 0
    by_context: dict[str, ContextFacts] = {}

    @property
    def results_per_second(self) -> float:
        """Results per second. The time includes the session start and model loads."""
        return self.made / self.wall_s if self.wall_s else 0.0

    @property
    def summary_fields(self) -> dict[str, Any]:
        return {
            "kept": self.kept, "wall_s": self.wall_s, "infer_s": self.infer_s, "load_s": self.facts.load_total_s,
            "loads": self.facts.loads, "devices": self.facts.devices,
        }  # fmt: skip

    def format_throughput_line(self, noun: str) -> str:
        facts, wall_s = self.facts, self.wall_s
        return (
            f"  {format_count(self.made, noun)} in {show_seconds(wall_s)}, {self.made / wall_s:,.1f} {noun}s/s and"
            f" {self.tokens / wall_s:,.0f} tokens/s on {format_count(facts.devices, 'device')};"
            f" {format_count(facts.loads, 'load')} of {show_seconds(facts.load_s)}"
        )


class ApplicationOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a run. `summary` and `files` are for programs, `report` for people, `failure` for both.

    A run with `errors` exits with 1. Report lines that end with `bold` are printed in bold.
    """

    summary: dict[str, Any]
    files: dict[str, Path]
    report: Iterable[str]
    errors: int = 0
    failure: Sequence[str] = ()
    bold: str = ""


class OpenRun:
    """A run with an open folder. `failed`: failed results of this attempt, which the next attempt retries."""

    def __init__(self, spec: RunSpec, folder: RunFolder, log: RecordLog, failed: RecordLog, screen: Screen) -> None:
        self.spec, self.folder, self.log, self.failed = spec, folder, log, failed
        self.attempt = RunAttempt(kept=len(log))
        self._screen = screen

    def run_jobs(
        self, jobs: Sequence[Job], *, contexts: Mapping[str, Recipe], take: Callable[[Any], int], noun: str,
        also: str = "", results: Callable[[Sequence[Job]], Iterator[Any]] = run_calls,
    ) -> None:  # fmt: skip
        """Run the jobs in a session. `take`: stores a call's result and returns the number of results in it."""
        attempt, begun = self.attempt, time.perf_counter()
        if not jobs:
            return
        with stoker.load(self.spec.site or None, session=self.spec.session or None, progress=False) as session:
            self._screen.line(format_session_line(session))
            ask = facts_of(session, {recipe.key for recipe in contexts.values()})
            several = contexts if len(contexts) > 1 else {}
            ask_each = {name: facts_of(session, {recipe.key}) for name, recipe in several.items()}
            with self._screen.progress(
                total=self.spec.total, done=attempt.kept, noun=noun, facts=ask, also=also
            ) as progress:
                for found in results(jobs):
                    before = attempt.tokens
                    progress.advance(take(found), also=attempt.tokens - before)
                    attempt.calls += 1
            attempt.facts = ask()
            asked = {name: ask_one() for name, ask_one in ask_each.items()}
            attempt.by_context = asked or dict.fromkeys(contexts, attempt.facts)
        attempt.wall_s, attempt.made = time.perf_counter() - begun, len(self.log) - attempt.kept

    def write_row_results(
        self, name: str, write: Callable[[Path], None], *, noun: str, lacks: str, first: str, more: dict[str, Any],
        figures: dict[str, Any], report: Iterable[str],
    ) -> ApplicationOutcome:  # fmt: skip
        """Write the summary, and a results file with one row per item.

        `lacks`: name of the missing result in the error; `more`, `figures`: more fields of the summary and the attempt.
        """
        errors, total = len(self.failed), self.spec.total
        summary = {f"{noun}s": total, "errors": errors, **more, "attempt": {**figures, **self.attempt.summary_fields}}
        self.folder.write_json("summary.json", summary)
        results = self.folder.finish(name=name, write=write, complete=not errors)
        failure = [
            "",
            f"failed: {errors:,} of {total:,} {noun}s have no {lacks}; the column `error` says why. The first:",
            f"  {first}",
            f"  try them again:  {format_resume_command(self.spec, self.folder.path)}",
        ]
        return ApplicationOutcome(
            summary=summary, files={"results": results}, report=["", *report, f"  results  {results}"], errors=errors,
            failure=failure if errors else (),
        )  # fmt: skip


def find_result(key: tuple[Any, ...], *logs: Records, what: str) -> Record:
    """Return the record of a result from the first log that has it. `what`: names the result in an error."""
    for log in logs:
        if (record := log.get(key)) is not None:
            return record
    raise StokerError(f"there is no result for {what}; run again")


def execute_run(spec: RunSpec, make: Callable[[OpenRun], ApplicationOutcome], choice: RunChoice) -> int:
    """Run, report, and return the exit code: 0, 1 (results with errors) or 130 (Ctrl-C). Results so far are kept."""
    screen = Screen(json_only=choice.json)
    load_site(spec.site or None)  # report an invalid site file before the run folder exists
    folder = open_run(
        Path("runs"), app=spec.app, prefix=spec.prefix, parameters=spec.parameters,
        options=msgspec.to_builtins(spec.options), folder=choice.resume or choice.out, fresh=choice.fresh,
    )  # fmt: skip
    with (
        contextlib.closing(folder),
        folder.log(key=spec.key) as log,
        folder.attempt_log(key=spec.key) as failed,
        raise_on_signals(),
    ):
        try:
            for line in spec.headline:
                screen.line(line)
            if len(log):
                screen.line(f"  continuing {folder.path}: {len(log):,} of {spec.total:,} are kept")
            outcome = make(OpenRun(spec, folder, log, failed, screen))
        except StoppedBySignal:
            _print_kept_results(screen, spec, folder.path, kept=len(log))
            return INTERRUPTED
        except BaseException:
            if len(log):
                _print_kept_results(screen, spec, folder.path, kept=len(log), failed=True)
            raise
    if choice.json:
        files = {name: str(path) for name, path in outcome.files.items()}
        screen.json({**outcome.summary, "run": str(folder.path), **files})
    else:
        for line in outcome.report:
            screen.line(line, style="bold" if outcome.bold and line.endswith(outcome.bold) else "")
    for line in outcome.failure:
        screen.line(line)
    return 1 if outcome.errors else 0


def format_resume_command(spec: RunSpec, folder: Path) -> str:
    resume = f"--resume {shlex.quote(str(folder))}"
    return spec.again or format_command(spec.app, resume, through_make=spec.through_make)


def _print_kept_results(screen: Screen, spec: RunSpec, folder: Path, *, kept: int, failed: bool = False) -> None:
    screen.line()
    if not kept:
        screen.line(f"stopped before the first {spec.noun}; run the same command to start again")
        return
    how = "once the cause is fixed" if failed else "to continue" if spec.again else "continue"
    how += ", the same command" if spec.again else ""
    screen.line(f"{'failed' if failed else 'stopped'}: {kept:,} of {spec.total:,} {spec.noun}s are kept in {folder}")
    screen.line(f"  {how}:  {format_resume_command(spec, folder)}")
