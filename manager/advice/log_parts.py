"""Logs read one behind the other, as one text, in bounded memory: what `stoker explain` judges.

A log may be of any size and hold anything. Of a long one its last part counts. One that vanishes, is cut short or
cannot be read here costs its lines alone. What is no regular file is not opened: a pipe would be waited for.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

MOST_BYTES = 16 << 20
"""Of each log the last bytes that are read: a second of reading."""


class LogPart(NamedTuple):
    """A log, or a few lines of text in its place. `source`: what people call it. A byte range is of the file."""

    source: str
    text: bytes = b""
    path: Path | None = None
    start: int = 0
    end: int | None = None


class LogPlace(NamedTuple):
    """Where a line of the whole text stands. `number`: its number there, from 1; 0: it is no line of a file."""

    source: str
    number: int


class LogParts:
    """The parts as one file that can be read once."""

    def __init__(self, parts: Iterable[LogPart]) -> None:
        self._parts = list(parts)
        self._file: IO[bytes] | None = None
        self._left = 0
        self._lines = 0
        self._begun: list[tuple[int, LogPart, int]] = []
        """Each part that was read: the number of its first line here, and the lines of its file before that."""
        self._ended_well = True

    def read(self, size: int) -> bytes:
        """The next bytes; none at the end."""
        while True:
            block = self._next(size)
            if block is not None:
                self._lines += block.count(b"\n")
                self._ended_well = not block or block.endswith(b"\n")
                return block

    def place(self, number: int) -> LogPlace:
        """Where a line of the whole text stands."""
        for first, part, skipped in reversed(self._begun):
            if number >= first:
                is_counted = part.path is not None and skipped >= 0
                return LogPlace(part.source, number - first + 1 + skipped if is_counted else 0)
        return LogPlace("", 0)

    def close(self) -> None:
        """Close what is open."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _next(self, size: int) -> bytes | None:
        """The next bytes of the part that is read; None if it is over, and another one is to be tried."""
        if self._file is None:
            return self._begin()
        block = b""
        with suppress(OSError, ValueError):
            block = self._file.read(min(size, self._left))
        self._left -= len(block)
        if block:
            return block
        self.close()
        return None

    def _begin(self) -> bytes | None:
        if not self._parts:
            return b""
        if not self._ended_well:
            return b"\n"
        part = self._parts.pop(0)
        skipped = 0
        if part.path is not None:
            opened = _open(part)
            if opened is None:
                return None
            self._file, self._left, skipped = opened
        self._begun.append((self._lines + 1, part, skipped))
        return part.text or None


def _open(part: LogPart) -> tuple[IO[bytes], int, int] | None:
    """A log's file, the bytes of it that count, and the lines before them, as far as these are counted."""
    if part.path is None:
        return None
    try:
        file = os.fdopen(os.open(part.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0)
    except (OSError, ValueError):
        return None
    try:
        facts = os.fstat(file.fileno())
        if stat.S_ISREG(facts.st_mode):
            end = facts.st_size if part.end is None else min(part.end, facts.st_size)
            first = max(part.start, end - MOST_BYTES, 0)
            skipped = _lines_before(file, first)
            file.seek(first)
            return file, max(0, end - first), skipped
    except OSError:
        pass
    file.close()
    return None


def _lines_before(file: IO[bytes], end: int) -> int:
    """How many lines a file has before a byte, so that numbers are an editor's; -1 where counting takes too long."""
    if end > MOST_BYTES:
        return -1
    return sum(file.read(min(1 << 20, end - at)).count(b"\n") for at in range(0, end, 1 << 20))
