"""Which deadlines were met, and why not: `stoker tune report`, and what a submitter ends with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from stoker.apps.prompt_tuning.board import Entry, Phase, read_entry
from stoker.apps.prompt_tuning.show import clock, ended_by
from stoker.apps.prompt_tuning.tuning.result import RESULT
from stoker.units import show_seconds

_SHOWN_PARTS = 4
_LONGEST_TEXT = 100


class Result(msgspec.Struct, frozen=True):
    """What `tuned.json` says, as far as a report wants it."""

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


class Outcome(msgspec.Struct, frozen=True):
    """One job, and what came of it so far."""

    folder: str
    entry: Entry
    result: Result | None = None


def read_outcome(folder: Path) -> Outcome | None:
    """What a run folder tells; None for one of another kind."""
    entry = read_entry(folder)
    if entry is None:
        return None
    result = None
    if entry.phase is Phase.DONE:
        try:
            result = msgspec.json.decode((folder / RESULT).read_bytes(), type=Result)
        except (OSError, msgspec.MsgspecError):
            pass
    return Outcome(str(folder), entry, result)


def render(outcomes: Sequence[Outcome], *, now: float) -> list[str]:
    """The lines of a report."""
    due = [one.entry for one in outcomes if one.entry.deadline_at is not None]
    over = [entry for entry in due if entry.phase.is_over]
    met = sum(entry.in_time(now) is True for entry in over)
    head = f"{len(outcomes)} tuning job{'s' * (len(outcomes) != 1)}"
    if due:
        head += f" · {met} of {len(over)} deadlines met"
        head += f", {len(due) - len(over)} not over yet" if len(over) < len(due) else ""
    lines = [head]
    for one in outcomes:
        lines += ["", *_job(one, now=now)]
    return lines


def facts(outcome: Outcome, *, now: float) -> dict[str, Any]:
    """An outcome for programs."""
    entry = outcome.entry
    return {
        "folder": outcome.folder, "in_time": entry.in_time(now), "why": why(entry), "job": msgspec.to_builtins(entry),
        "result": msgspec.to_builtins(outcome.result),
    }  # fmt: skip


def why(entry: Entry) -> str:
    """Where a job's time went, and what that has to do with its deadline."""
    if not entry.phase.is_over or entry.ended_at is None:
        return entry.why
    if entry.phase is not Phase.DONE:
        return entry.why
    started = entry.started_at if entry.started_at is not None else entry.submitted_at
    waited_s, ran_s = max(0.0, started - entry.submitted_at), max(0.0, entry.ended_at - started)
    count = len(entry.devices)
    on = f" on {count} device{'s' * (count != 1)}" if count else ""
    said = f"it waited {show_seconds(waited_s)} for its model and devices and ran {show_seconds(ran_s)}{on}"
    if entry.restarts:
        said += f"; it was started again {entry.restarts} time{'s' * (entry.restarts != 1)}, from its last checkpoint"
    if entry.deadline_at is None or entry.ended_at <= entry.deadline_at:
        return said
    had_s = entry.deadline_at - entry.submitted_at
    if ran_s > had_s:
        said += f"; {show_seconds(had_s)} were too few for its iterations alone"
    if entry.first_ends_at is not None and entry.first_ends_at > entry.deadline_at:
        said += "; that it would be late was told when it was submitted"
    return said


def _job(one: Outcome, *, now: float) -> list[str]:
    entry, result = one.entry, one.result
    lines = [f"  {entry.name}   {_verdict(entry, now=now)}"]
    lines += [f"    {line}" for line in why(entry).splitlines()]
    if result is None:
        return lines
    lines += [f"    {line}" for line in _result_lines(result)]
    lines.append(f"    adapter  {one.folder} (for peft.PeftModel.from_pretrained)")
    return lines


def _verdict(entry: Entry, *, now: float) -> str:
    if not entry.phase.is_over:
        return f"{entry.phase.value}, {entry.iteration}/{entry.iterations} iterations"
    if entry.phase is not Phase.DONE or entry.ended_at is None:
        return f"{entry.phase.value}: no tuned prompt"
    ended = f"done at {clock(entry.ended_at, now=now)}"
    if entry.deadline_at is None:
        return ended
    return f"{ended}, {ended_by(entry.deadline_at - entry.ended_at)} (deadline {clock(entry.deadline_at, now=now)})"


def _result_lines(result: Result) -> list[str]:
    reached = result.iterations_to_accuracy
    if result.end == "diverged":
        how = "its loss became no number; a smaller learning_rate helps"
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
    whole_s = sum(result.spent_s.values())
    parts = sorted(result.spent_s.items(), key=lambda part: -part[1])[:_SHOWN_PARTS]
    time = ", ".join(f"{name} {show_seconds(spent)}" for name, spent in parts if spent >= 0.01 * whole_s)
    return [
        f"held out: {measured}; {how}",
        f"time     {time}" + (f" ({result.communication_share:.0%} exchange)" if result.devices > 1 else ""),
        f"began as {_short(result.initial)} from {result.initial_from}",
        f"reads as {_short(result.text)}",
    ]


def _short(text: str) -> str:
    shown = " ".join(text.split())
    return repr(shown if len(shown) <= _LONGEST_TEXT else shown[: _LONGEST_TEXT - 1] + "…")
