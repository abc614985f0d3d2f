"""The state of each tuning job, which its submitter writes to a file in the run folder, and the lines that show the
state.

    runs/facts-20261122-101502/
        run.json                 the submitted job, and the identity of the run
        state.json               this file
        checkpoint               the state for resuming; removed at the end
        adapter_model.safetensors, adapter_config.json, tuned.json      the result
        results.jsonl            the evaluations; marks a finished run

The submitter of a job locks the run folder. If an unfinished job's folder is not locked, its submitter has ended.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from stoker import console, run_folder
from stoker.apps.common.batch_state import read_json
from stoker.apps.common.command_line import format_count
from stoker.console import Screen
from stoker.errors import ConfigError
from stoker.run_folder import write_whole
from stoker.units import forecast_tolerance_s, show_margin, show_seconds

APP = "prompt_tuning"
RUNS = Path("runs")
_STATE, CHECKPOINT = "state.json", "checkpoint"


class JobPhase(enum.Enum):
    QUEUED = "queued"
    LOADING = "loading"
    TUNING = "tuning"
    DONE = "done"
    FAILED = "failed"
    DROPPED = "dropped"
    """The job could not meet its deadline (`--late drop`)."""
    STOPPED = "stopped"
    """The submitter has stopped; the checkpoint is kept."""

    @property
    def is_over(self) -> bool:
        return self not in (JobPhase.QUEUED, JobPhase.LOADING, JobPhase.TUNING)


class BoardEntry(msgspec.Struct, kw_only=True):
    """The state of one job. Times are seconds since the epoch on the submitter's clock; None if unknown.

    `missed_since`: when the missed deadline became known; `looks_up`: True if the job starts with a lookup of its
    prompt; `devices`: in use since `seen_at` and iteration `seen_iteration`; `measured_ends_at`: the end at the current
    pace; `loading_s`: seconds of loading before the first start; `loading_at`: start of the current load; `why`: why
    the job waits or failed.
    """

    name: str
    phase: JobPhase = JobPhase.QUEUED
    iterations: int = 0
    metric_name: str = ""
    reach: float | None = None
    submitted_at: float = 0.0
    deadline_at: float | None = None
    session: str = ""
    call: str = ""
    iteration: int = 0
    loss: float | None = None
    metric: float | None = None
    devices: tuple[str, ...] = ()
    ends_at: float | None = None
    missed_since: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    seen_at: float | None = None
    seen_iteration: int = 0
    measured_ends_at: float | None = None
    loading_at: float | None = None
    loading_s: float = 0.0
    looks_up: bool = False
    restarts: int = 0
    why: str = ""
    at: float = 0.0

    def meets_deadline(self, now: float) -> bool | None:
        """True if the job meets its deadline. None without a deadline, or while the forecast end is too close to the
        deadline to tell.
        """
        if self.deadline_at is None:
            return None
        if self.phase.is_over:
            return self.phase is JobPhase.DONE and self.ended_at is not None and self.ended_at <= self.deadline_at
        if self.deadline_at <= now:
            return False
        if self.ends_at is None:
            return None
        if self.ends_at <= self.deadline_at:
            return True
        return False if self.ends_at - self.deadline_at >= forecast_tolerance_s(self.ends_at - now) else None


class BoardRow(msgspec.Struct, frozen=True):
    """A job on the board. `abandoned`: True if the submitter ended before the job."""

    folder: str
    entry: BoardEntry
    abandoned: bool = False


def write_entry(folder: Path, entry: BoardEntry) -> None:
    said = msgspec.json.encode(msgspec.structs.replace(entry, at=time.time()))
    write_whole(folder, msgspec.json.format(said, indent=1), name=_STATE)


def read_entry(folder: Path) -> BoardEntry | None:
    return read_json(folder / _STATE, BoardEntry)


def read_board(root: Path = RUNS) -> list[BoardRow]:
    """Return every job in a folder, in order of submission. Raises ConfigError if the path is a file."""
    if root.exists() and not root.is_dir():
        raise ConfigError.in_file(root, "is not a folder of runs")
    folders = [root, *sorted(root.iterdir())] if root.is_dir() else []
    seen = []
    for folder in folders:
        entry = read_entry(folder) if folder.is_dir() else None
        if entry is not None:
            seen.append(BoardRow(str(folder), entry, not entry.phase.is_over and not run_folder.is_locked(folder)))
    return sorted(seen, key=lambda one: one.entry.submitted_at)


DEVICES = 8
"""Default maximum number of devices per job; more devices mostly add communication."""


class SubmissionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a submission. `bank`: folder; empty: the model's own; None: none. `serve`: name in the models file."""

    site: str = ""
    session: str = ""
    gang: tuple[int, int] = (1, DEVICES)
    late: str = "run"
    bank: str | None = ""
    out: Path = RUNS
    fresh: bool = False
    serve: str = ""
    models: Path = Path("models.toml")


def format_job_table(entries: Sequence[BoardEntry], *, now: float) -> list[str]:
    """Return a line per job, in columns. Below a waiting or failed job, add the reason."""
    rows = [_format_job_cells(entry, now=now) for entry in entries]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for entry, row in zip(entries, rows, strict=True):
        lines.append("  " + "  ".join(map(str.ljust, row, widths)).rstrip())
        lines += [f"      {line}" for line in entry.why.splitlines()]
    return lines


def format_job_board(seen: Sequence[BoardRow], *, now: float, most_over: int | None = None) -> list[str]:
    """Return the lines of `stoker tune status`. Of the ended jobs, only the latest `most_over` are shown."""
    if not seen:
        return ["no tuning job is known in this folder; `stoker tune submit job.toml` submits one"]
    counts = {phase: sum(one.entry.phase is phase for one in seen) for phase in JobPhase}
    said = ", ".join(f"{number} {phase.value}" for phase, number in counts.items() if number)
    lines = [f"{format_count(len(seen), 'tuning job')}: {said}", ""]
    over = [one for one in seen if one.entry.phase.is_over]
    older = over[: len(over) - most_over] if most_over is not None else []
    shown = [one for one in seen if one not in older]
    if older:
        lines.append(f"  … {len(older)} older (--all)")
    lines += format_job_table([one.entry for one in shown], now=now)
    for one in shown:
        if one.abandoned:
            why = "the submitting program has ended; submit the job again, and it continues from its last checkpoint"
            lines += ["", f"{one.entry.name}: {why} ({one.folder})"]
    return lines


def format_due_time(entry: BoardEntry, *, now: float) -> str:
    deadline, end = entry.deadline_at, entry.ended_at if entry.phase.is_over else entry.ends_at
    if entry.phase in (JobPhase.FAILED, JobPhase.DROPPED, JobPhase.STOPPED):
        return f"deadline {format_time_of_day(deadline, now=now)}" if deadline is not None else ""
    word = "ended" if entry.phase is JobPhase.DONE else "ends"
    if deadline is None:
        return f"{word} {format_time_of_day(end, now=now)}" if end is not None else ""
    by, at = f"(deadline {format_time_of_day(deadline, now=now)})", f"{word} {format_time_of_day(end, now=now)}"
    if entry.phase is JobPhase.DONE and end is not None:
        return f"{at}, {format_margin(deadline - end)} {by}"
    if deadline <= now and (end is None or end - now < 1.0):
        return f"late by {show_seconds(max(1.0, now - deadline))} so far {by}"
    if end is None:
        return by[1:-1]
    margin = (
        show_margin(deadline - end, left_s=end - now) if deadline > now else f"late by {show_seconds(end - deadline)}"
    )
    return f"{at}, {margin} {by}"


def format_margin(margin_s: float) -> str:
    apart = show_seconds(abs(margin_s)) if abs(margin_s) >= 1.0 else "less than a second"
    return f"in time by {apart}" if margin_s >= 0 else f"late by {apart}"


def format_time_of_day(at: float | None, *, now: float) -> str:
    """Return a time of day, with the date unless the date is today."""
    if at is None:
        return ""
    moment, today = datetime.datetime.fromtimestamp(at), datetime.datetime.fromtimestamp(now).date()
    return f"{moment:%H:%M:%S}" if moment.date() == today else f"{moment:%Y-%m-%d %H:%M}"


def format_late_notice(entry: BoardEntry, *, now: float, drops_late_jobs: bool) -> str:
    deadline, ends_at = entry.deadline_at or 0.0, entry.ends_at or 0.0
    if deadline <= now:
        what = f"{entry.name} is late: its deadline, {format_time_of_day(deadline, now=now)}, has passed"
    else:
        what = (
            f"{entry.name} cannot meet its deadline, {format_time_of_day(deadline, now=now)}: the earliest that can be"
            f" met is {format_time_of_day(ends_at, now=now)}, {show_seconds(ends_at - deadline)} later"
        )
    how = "it runs when no other job needs its devices (--late drop drops such jobs)"
    if entry.phase is JobPhase.TUNING or drops_late_jobs:
        how = "it runs anyway" if entry.phase is JobPhase.TUNING else "it is dropped (--late drop)"
    return f"{what}; {how}"


def _format_job_cells(entry: BoardEntry, *, now: float) -> tuple[str, ...]:
    tunes = entry.phase is JobPhase.TUNING
    steps = f"{entry.iteration}/{entry.iterations}" if entry.iteration or tunes else ""
    if tunes and 0 < entry.iterations <= entry.iteration:
        steps += ", measuring"
    if tunes and not entry.iteration and entry.seen_at is None:
        steps = "looks up its prompt" if entry.looks_up else "begins"
    loss = f"loss {entry.loss:.3f}" if entry.loss is not None and entry.iteration else ""
    metric = ""
    if entry.metric is not None and entry.metric_name != "loss":
        wanted = f" of {entry.reach:g}" if entry.reach is not None else ""
        metric = f"{entry.metric_name} {entry.metric:.2f}{wanted}"
    devices = format_count(len(entry.devices), "device") if entry.devices and not entry.phase.is_over else ""
    return entry.name, entry.phase.value, steps, loss, metric, devices, format_due_time(entry, now=now)


_LINE_EVERY_S = 10.0


class JobDisplay:
    """Shows the changing state of jobs in the terminal. `drops_late_jobs`: True if late jobs are dropped."""

    def __init__(self, screen: Screen, *, drops_late_jobs: bool, place: console.Redrawn | None) -> None:
        self._screen = screen
        self._drops_late = drops_late_jobs
        self._place = place
        self._before: dict[str, BoardEntry] = {}
        self._shown_at: dict[str, float] = {}
        self._late: dict[str, str] = {}
        self._shown_lines: set[str] = set()

    def show_jobs(self, entries: Sequence[BoardEntry]) -> None:
        now = time.time()
        for entry in entries:
            if entry.phase.is_over or entry.meets_deadline(now) is not False:
                self._late.pop(entry.name, None)
            else:
                self._report_late_job(entry, now=now)
        if self._place is not None:
            self._place.show([*format_job_table(entries, now=now), *(f"  {line}" for line in self._late.values())])
            return
        for entry in entries:
            before = self._before.get(entry.name)
            aged = time.monotonic() - self._shown_at.get(entry.name, 0.0) >= _LINE_EVERY_S
            moved = before is not None and entry.iteration != before.iteration
            if before is None or before.phase is not entry.phase or (moved and aged and entry.phase is JobPhase.TUNING):
                self._before[entry.name], self._shown_at[entry.name] = entry, time.monotonic()
                why = entry.why.splitlines()[:1]
                self._screen.line(f"  {'  '.join(filter(None, (*_format_job_cells(entry, now=now), *why)))}")

    def show_once(self, line: str) -> None:
        if line not in self._shown_lines:
            self._shown_lines.add(line)
            self._screen.line(f"  {line}")

    def _report_late_job(self, entry: BoardEntry, *, now: float) -> None:
        if entry.name not in self._late:
            self._late[entry.name] = line = format_late_notice(entry, now=now, drops_late_jobs=self._drops_late)
            if self._place is None and entry.name not in self._shown_lines:
                self._screen.line(f"  {line}")
            self._shown_lines.add(entry.name)


@contextlib.contextmanager
def open_job_display(screen: Screen, *, drops_late_jobs: bool, json: bool) -> Iterator[JobDisplay]:
    with console.redrawn() if console.is_terminal() and not json else contextlib.nullcontext() as place:
        yield JobDisplay(screen, drops_late_jobs=drops_late_jobs, place=place)
