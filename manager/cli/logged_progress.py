"""How far a running call is, for `stoker explain`: by the lines that its program prints into its library's log."""

from __future__ import annotations

import time

from stoker.manager.advice.metrics import FollowedLog, LoggedProgress
from stoker.manager.cli.logs import files, is_call
from stoker.protocol.session import SessionFolder
from stoker.protocol.to_client import Story
from stoker.units import show_about, show_seconds


def progress_of(folder: SessionFolder, story: Story) -> LoggedProgress | None:
    """What a running call has printed of its progress into the log of its library.

    None if it has printed nothing of the kind, if the log is on another machine, or if the library runs several calls
    at once: it writes their lines when they have ended.
    """
    if not is_call(story.subject) or len(story.runs_in) != 1 or story.waits_for or story.runs_from < 0:
        return None
    own = [file for file in files(folder) if file.name.rpartition("/")[2] == story.runs_in[0]]
    if len(own) != 1:
        return None
    return FollowedLog(own[0].path, start=story.runs_from).track(at_s=time.time()).progress


def show(progress: LoggedProgress) -> str:
    """One line: `90 of 200 steps, 3.0 steps/s, about 36 s left, loss 0.31`."""
    of = f" of {progress.total:,g}" if progress.total else ""
    parts = [f"{progress.done:,g}{of} {progress.unit}s"]
    if progress.rate_per_s:
        slow = progress.rate_per_s < 1
        parts.append(
            f"{show_seconds(1 / progress.rate_per_s)} each"
            if slow
            else f"{progress.rate_per_s:,.1f} {progress.unit}s/s"
        )
    if progress.seconds_left is not None:
        part = "" if progress.whole else f" of this {'epoch' if progress.epoch is not None else 'part'}"
        parts.append(f"about {show_about(progress.seconds_left)} left{part}")
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:g}")
    return f"  progress  {', '.join(parts)} (by what it prints)"
