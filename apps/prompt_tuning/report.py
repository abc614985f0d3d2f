"""Report which deadlines were met or missed and why, for `stoker tune report` and at the end of a submission."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from stoker.apps.common.batch_state import read_json
from stoker.apps.common.command_line import format_count
from stoker.apps.prompt_tuning.board import BoardEntry, JobPhase, format_margin, format_time_of_day, read_entry
from stoker.tuning import RESULT
from stoker.units import show_seconds

_LONGEST_TEXT = 100


class TuningResult(msgspec.Struct, frozen=True):
    """The fields of `tuned.json` that a report shows."""

    metric: str
    reach: float | None
    end: str
    iterations: int
    iterations_to_accuracy: int | None
    initial: str
    initial_from: str
    text: str
    held_out: dict[str, float]
    devices: int
    communication_share: float
    spent_s: dict[str, float]


class JobOutcome(msgspec.Struct, frozen=True):
    folder: str
    entry: BoardEntry
    result: TuningResult | None = None


def read_outcome(folder: Path) -> JobOutcome | None:
    """Return the outcome of the job in a run folder, or None without a job."""
    entry = read_entry(folder)
    if entry is None:
        return None
    result = read_json(folder / RESULT, TuningResult) if entry.phase is JobPhase.DONE else None
    return JobOutcome(str(folder), entry, result)


def format_report(outcomes: Sequence[JobOutcome], *, now: float) -> list[str]:
    due = [one.entry for one in outcomes if one.entry.deadline_at is not None]
    over = [entry for entry in due if entry.phase.is_over]
    met = sum(entry.meets_deadline(now) is True for entry in over)
    head = format_count(len(outcomes), "tuning job")
    if due:
        head += f" · {met} of {format_count(len(over), 'deadline')} met"
        head += f", {len(due) - len(over)} not over yet" if len(over) < len(due) else ""
    targets = [one.result for one in outcomes if one.result is not None and one.result.reach is not None]
    if targets:
        reached = sum(result.iterations_to_accuracy is not None for result in targets)
        head += f" · {reached} of {format_count(len(targets), 'target')} reached"
    lines = [head]
    for one in outcomes:
        lines += ["", *_format_job(one, now=now)]
    return lines


def job_outcome_to_json(outcome: JobOutcome, *, now: float) -> dict[str, Any]:
    entry = outcome.entry
    return {
        "folder": outcome.folder, "in_time": entry.meets_deadline(now), "why": "; ".join(explain_outcome(outcome)),
        "job": msgspec.to_builtins(entry), "result": msgspec.to_builtins(outcome.result),
    }  # fmt: skip


def explain_outcome(outcome: JobOutcome) -> list[str]:
    """Return how a finished job spent its time, or why a job waits or failed."""
    entry, result = outcome.entry, outcome.result
    if entry.phase is not JobPhase.DONE or entry.ended_at is None:
        return entry.why.splitlines()
    started = entry.started_at if entry.started_at is not None else entry.submitted_at
    waited_s, ran_s = max(0.0, started - entry.submitted_at), max(0.0, entry.ended_at - started)
    loading_s, spent = min(entry.loading_s, waited_s), result.spent_s if result is not None else {}
    bank_s, evaluating_s = spent.get("bank", 0.0), spent.get("evaluation", 0.0)
    iterating_s = sum(spent.get(part, 0.0) for part in ("data", "compute", "communication"))
    lost_s = max(0.0, ran_s - bank_s - iterating_s - evaluating_s)
    said = [f"waited {show_seconds(waited_s - loading_s)} for devices"]
    if loading_s:
        said[0] += f", and {show_seconds(loading_s)} for its model to load"
    devices = len(entry.devices) or (result.devices if result is not None else 0)
    on = f" on {format_count(devices, 'device')}" if devices else ""
    parts = [f"{show_seconds(bank_s)} with the prompt bank"] if spent and bank_s >= 0.01 * ran_s else []
    if result is not None and result.iterations:
        parts.append(
            f"{format_count(result.iterations, 'iteration')} of {show_seconds(iterating_s / result.iterations)}"
        )
    parts += [f"{show_seconds(evaluating_s)} of evaluations"] if spent and evaluating_s >= 0.01 * ran_s else []
    said.append(f"ran {show_seconds(ran_s)}{on}" + (f": {', '.join(parts)}" if parts else ""))
    if entry.restarts:
        said.append(f"was started again {format_count(entry.restarts, 'time')}, from its last checkpoint")
        if lost_s >= 1.0:
            said[-1] += f"; {show_seconds(lost_s)} were lost between its starts"
    if entry.deadline_at is not None and entry.ended_at > entry.deadline_at:
        had_s, late_s = max(0.0, entry.deadline_at - entry.submitted_at), entry.ended_at - entry.deadline_at
        said.append(f"late: it had {show_seconds(had_s)}")
        if iterating_s > had_s:
            said[-1] += ", which is less than its iterations need"
        elif entry.restarts and lost_s >= late_s:
            said[-1] += ", and would have been in time if it had not been interrupted"
        elif waited_s >= late_s:
            said[-1] += f", and would have been in time without the wait of {show_seconds(waited_s)}"
        if entry.missed_since is not None:
            said[-1] += f"; that was known after {show_seconds(max(0.0, entry.missed_since - entry.submitted_at))}"
    return said


def _format_job(one: JobOutcome, *, now: float) -> list[str]:
    entry, result = one.entry, one.result
    lines = [
        f"  {entry.name}   {_describe_job_outcome(entry, now=now)}",
        *(f"    {line}" for line in explain_outcome(one)),
    ]
    if result is not None:
        lines += [f"    {line}" for line in _format_result(result)]
        lines.append(f"    adapter  {one.folder} (for peft.PeftModel.from_pretrained)")
    return lines


def _describe_job_outcome(entry: BoardEntry, *, now: float) -> str:
    if not entry.phase.is_over:
        return f"{entry.phase.value}, {entry.iteration}/{entry.iterations} iterations"
    if entry.phase is not JobPhase.DONE or entry.ended_at is None:
        return f"{entry.phase.value}: no tuned prompt"
    ended = f"done at {format_time_of_day(entry.ended_at, now=now)}"
    if entry.deadline_at is None:
        return ended
    deadline = format_time_of_day(entry.deadline_at, now=now)
    return f"{ended}, {format_margin(entry.deadline_at - entry.ended_at)} (deadline {deadline})"


def _format_result(result: TuningResult) -> list[str]:
    reached = result.iterations_to_accuracy
    if result.end == "diverged":
        how = "its loss is NaN or infinite; set a smaller learning_rate"
    elif result.reach is None:
        how = f"{result.iterations} iterations, no target was set"
    elif reached is not None:
        how = f"the target {result.reach:g} was reached after {reached} iterations"
    else:
        how = f"the target {result.reach:g} was not reached in {result.iterations} iterations"
    value, loss = result.held_out.get("metric"), result.held_out.get("loss")
    measured = f"{result.metric} {value:.3g}" if value is not None else ""
    if result.metric != "loss" and loss is not None:
        measured += f", loss {loss:.3g}"
    if result.devices > 1:
        how += f"; ranks exchanged gradients for {result.communication_share:.0%} of that time"
    return [
        f"held out: {measured}; {how}",
        f"began as {_shorten(result.initial)} from {result.initial_from}",
        f"reads as {_shorten(result.text)}",
    ]


def _shorten(text: str) -> str:
    shown = " ".join(text.split())
    return repr(shown if len(shown) <= _LONGEST_TEXT else shown[: _LONGEST_TEXT - 1] + "…")
