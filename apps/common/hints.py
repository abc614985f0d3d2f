"""What to type next, in the way in which the run was started: through make, or by name."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from stoker.console import Screen


def command(app: str, arguments: str, *, through_make: bool = False) -> str:
    """The command line that runs `app` with these arguments. Only the app that `make run` runs can go through it."""
    if through_make and "MAKELEVEL" in os.environ:
        escaped = arguments.replace("$", "$$").replace('"', '\\"')
        return f'make run ARGS="{escaped}"'
    return f"stoker run {app} {arguments}"


def say_kept(
    screen: Screen, *, folder: Path, kept: int, total: int, app: str, through_make: bool = False, failed: bool = False
) -> None:
    """After a run that was stopped or failed: what is kept, and how to go on."""
    again = command(app, f"--resume {shlex.quote(str(folder))}", through_make=through_make)
    screen.line()
    if not kept:
        screen.line("stopped before the first result; the same command starts again")
        return
    screen.line(f"{'failed' if failed else 'stopped'}: {kept} of {total} results are kept in {folder}")
    screen.line(f"  {'when the cause is mended' if failed else 'go on'}:  {again}")


def columns(lines: Sequence[tuple[str, str]]) -> list[str]:
    """The `next:` block: commands on the left, what each does on the right."""
    wide = max((len(line) for line, _ in lines), default=0)
    return [
        f"  {'next: ' if number == 0 else '      '}{line:{wide}}   {why}" for number, (line, why) in enumerate(lines)
    ]


def count(number: int, noun: str) -> str:
    """`1 call`, `2 calls`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def show_minutes(seconds: float) -> str:
    """A wait that is only guessed: `a minute`, `7 min`, `3 h`."""
    if seconds < 55:
        return "a minute"
    return f"{max(1, round(seconds / 60))} min" if seconds < 5400 else f"{round(seconds / 3600)} h"
