"""Whose fault a failure is: by what it said, and by the log around it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from stoker.manager.advice.logs import Fault, classify, locate

MOST_BYTES = 4 << 20
"""So much of the end of a log is read."""
_PLACE = re.compile(r"at (?P<file>.+):(?P<line>\d+) in (?P<name>.+)")


def judged(said: str, *, log: str = "", start: int = 0, end: int = 0) -> Fault | None:
    """The verdict; None where neither tells of a failure. `said`: what the call raised, in short, with a line
    `at FILE:LINE in NAME` for each place, or what its library's end was. `start`, `end`: the part of the log that the
    call has written, in bytes; `end` is 0: not known."""
    lines = [*(tail(Path(log), start=start, end=end or None) if log else ()), *raised_lines(said)]
    located = locate(lines) if lines else None
    return classify(located) if located is not None else None


def raised_lines(said: str) -> Iterator[bytes]:
    """What a failure said, as Python shows an exception where it has places in the user's code."""
    lines = said.splitlines()
    places = [hit for line in lines if (hit := _PLACE.fullmatch(line.strip()))]
    if places:
        yield b"Traceback (most recent call last):"
        for hit in places:
            yield f'  File "{hit["file"]}", line {hit["line"]}, in {hit["name"]}'.encode(errors="replace")
    for line in lines:
        if not _PLACE.fullmatch(line.strip()):
            yield line.encode(errors="replace")


def tail(path: Path, *, start: int = 0, end: int | None = None, most: int = MOST_BYTES) -> list[bytes]:
    """The lines of a file, or of its last part; none of one that cannot be read here."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe has nobody who writes
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return []
            last = file.seek(0, 2) if end is None else end
            file.seek(max(start, last - most))
            return file.read(max(0, last - file.tell())).splitlines()
    except OSError:
        return []
