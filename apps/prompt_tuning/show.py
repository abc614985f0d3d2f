"""Jobs as lines for people: `stoker tune status`, what a submitter shows while it waits. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from stoker.apps.prompt_tuning.board import BoardEntry, BoardRow, Phase
from stoker.units import show_margin, show_seconds


def table(entries: Sequence[BoardEntry], *, now: float, indent: str = "  ") -> list[str]:
    """A line a job, in columns; under one that waits or has failed, why."""
    rows = [_row(entry, now=now) for entry in entries]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for entry, row in zip(entries, rows, strict=True):
        cells = "  ".join(map(str.ljust, row, widths)).rstrip()
        lines.append(indent + cells)
        if entry.why:
            lines += [f"{indent}    {line}" for line in entry.why.splitlines()]
    return lines


def one_line(entry: BoardEntry, *, now: float) -> str:
    """A job in a line, for logs."""
    why = f"  {entry.why.splitlines()[0]}" if entry.why else ""
    return "  ".join(cell for cell in _row(entry, now=now) if cell) + why


def board(seen: Sequence[BoardRow], *, now: float, most_over: int | None = None) -> list[str]:
    """The lines of `stoker tune status`. Of the jobs that are over only the last `most_over` are shown."""
    if not seen:
        return ["no tuning job is known in this folder; `stoker tune submit job.toml` submits one"]
    counts = {phase: sum(one.entry.phase is phase for one in seen) for phase in Phase}
    said = ", ".join(f"{number} {phase.value}" for phase, number in counts.items() if number)
    lines = [f"{len(seen)} tuning job{'s' * (len(seen) != 1)}: {said}", ""]
    over = [one for one in seen if one.entry.phase.is_over]
    older = over[: len(over) - most_over] if most_over is not None else []
    shown = [one for one in seen if one not in older]
    if older:
        lines.append(f"  … {len(older)} older (--all)")
    lines += table([one.entry for one in shown], now=now)
    for one in shown:
        if one.abandoned:
            lines += ["", f"{one.entry.name}: whoever submitted it is gone; submit it again, and it goes on from"]
            lines[-1] += f" its last checkpoint ({one.folder})"
    return lines


def due(entry: BoardEntry, *, now: float) -> str:
    """When it ends, and what that is to its deadline."""
    deadline, end = entry.deadline_at, entry.end_at
    if entry.phase in (Phase.FAILED, Phase.DROPPED, Phase.STOPPED):
        return f"deadline {clock(deadline, now=now)}" if deadline is not None else ""
    word = "ended" if entry.phase is Phase.DONE else "ends"
    if deadline is None:
        return f"{word} {clock(end, now=now)}" if end is not None else ""
    by = f"deadline {clock(deadline, now=now)}"
    if entry.phase is Phase.DONE and end is not None:
        return f"{word} {clock(end, now=now)}, {ended_by(deadline - end)} ({by})"
    if deadline <= now and (end is None or end - now < 1.0):
        return f"late by {show_seconds(max(1.0, now - deadline))} so far ({by})"
    if end is None:
        return by
    if deadline <= now:
        return f"{word} {clock(end, now=now)}, late by {show_seconds(end - deadline)} ({by})"
    return f"{word} {clock(end, now=now)}, {show_margin(deadline - end, left_s=end - now)} ({by})"


def ended_by(margin_s: float) -> str:
    """What the end of a job that is done was to its deadline, so much later."""
    apart = show_seconds(abs(margin_s)) if abs(margin_s) >= 1.0 else "less than a second"
    return f"in time by {apart}" if margin_s >= 0 else f"late by {apart}"


def clock(at: float | None, *, now: float) -> str:
    """A moment as people write it: with its day where that is not today."""
    if at is None:
        return ""
    moment, today = datetime.datetime.fromtimestamp(at), datetime.datetime.fromtimestamp(now).date()
    return f"{moment:%H:%M:%S}" if moment.date() == today else f"{moment:%Y-%m-%d %H:%M}"


def told_late(entry: BoardEntry, *, now: float, drops: bool) -> str:
    """What is said at once of a job that cannot make its deadline."""
    deadline, ends_at = entry.deadline_at or 0.0, entry.ends_at or 0.0
    if deadline <= now:
        what = f"{entry.name} is late: its deadline, {clock(deadline, now=now)}, is over"
    else:
        what = (
            f"{entry.name} cannot make its deadline, {clock(deadline, now=now)}: the earliest that can be met is"
            f" {clock(ends_at, now=now)}, {show_seconds(ends_at - deadline)} later"
        )
    if entry.phase is Phase.TUNING:
        return f"{what}; it runs all the same"
    if drops:
        return f"{what}; it is dropped, as --late drop wants it"
    return f"{what}; it runs when nobody else needs its devices (--late drop gives such jobs up)"


def _row(entry: BoardEntry, *, now: float) -> tuple[str, ...]:
    steps = f"{entry.iteration}/{entry.iterations}" if entry.iteration or entry.phase is Phase.TUNING else ""
    if entry.phase is Phase.TUNING and 0 < entry.iterations <= entry.iteration:
        steps += ", measuring"
    if entry.phase is Phase.TUNING and not entry.iteration and entry.seen_at is None:
        steps = "looks its prompt up" if entry.looks_up else "begins"
    loss = f"loss {entry.loss:.3f}" if entry.loss is not None and entry.iteration else ""
    return entry.name, entry.phase.value, steps, loss, _metric(entry), _devices(entry), due(entry, now=now)


def _metric(entry: BoardEntry) -> str:
    if entry.metric is None or entry.metric_name == "loss":
        return ""
    wanted = f" of {entry.reach:g}" if entry.reach is not None else ""
    return f"{entry.metric_name} {entry.metric:.2f}{wanted}"


def _devices(entry: BoardEntry) -> str:
    count = len(entry.devices)
    return f"{count} device{'s' * (count != 1)}" if count and not entry.phase.is_over else ""
