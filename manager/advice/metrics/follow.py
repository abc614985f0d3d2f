"""The end of a log that grows, in bounded memory.

A look reads at most `LOOK_BYTES` from the end, from the newest to the oldest, and only as far as its reader asks. What
the log holds before that is never read, so a log of gigabytes, a line of a hundred megabytes and binary output cost no
more than others. A log that was truncated or replaced (rotated) is simply another file at the next look.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from stoker.manager.advice.metrics.lines import LONGEST_LINE, redraws, stated_totals
from stoker.manager.advice.metrics.tracker import MetricTracker, Tracked

LOOK_BYTES = 262_144
"""A look reads no more than this."""
_BLOCK_BYTES = 16_384
_HEAD_BYTES = 65_536
"""The first lines may say how long the program is going to run."""
_LONGEST_BYTES = 4 * LONGEST_LINE

_BINARY = 10
"""A line of which more than one character in so many is none in UTF-8 is binary."""


class FollowedLog:
    """The log of one program. Each look gives the progress by its end. `start`: what is before this byte was written
    by others. Not thread-safe."""

    def __init__(self, path: str | Path, *, start: int = 0) -> None:
        self._path = path
        self._start = start
        self._tracker = MetricTracker()
        self._identity: tuple[int, int] | None = None
        self._state: tuple[int, int] | None = None
        self._tracked = Tracked(None, "the log was not read yet")
        self._head_bytes = 0

    def track(self, *, at_s: float) -> Tracked:
        """The progress by now. `at_s`: the time, on any clock that goes on. A log that cannot be read has no progress,
        and the reason says so."""
        try:
            with open(self._path, "rb", buffering=0) as log:
                status = os.fstat(log.fileno())
                self._begin_anew_if_replaced((status.st_dev, status.st_ino), status.st_size)
                state = status.st_size, status.st_mtime_ns
                if state != self._state:
                    descriptor = log.fileno()
                    self._read_head(descriptor, status.st_size)
                    self._tracked = self._tracker.track(
                        newest_lines(descriptor, status.st_size, start=self._start), at_s=at_s
                    )
                    self._state = state
        except OSError as error:
            return Tracked(None, f"the log {self._path} cannot be read: {error.strerror or error}")
        return self._tracked

    def _begin_anew_if_replaced(self, identity: tuple[int, int], size: int) -> None:
        truncated = self._state is not None and size < self._state[0]
        if identity != self._identity or truncated:
            self._identity, self._state, self._head_bytes = identity, None, 0
            self._tracker = MetricTracker()

    def _read_head(self, descriptor: int, size: int) -> None:
        """What the first lines say of the length of the run. They are read once, and again while the log is short."""
        if self._head_bytes < min(size - self._start, _HEAD_BYTES):
            head = os.pread(descriptor, _HEAD_BYTES, self._start)
            self._head_bytes = len(head)
            self._tracker.totals = stated_totals(redraws(head.decode("utf-8", "replace")))


def newest_lines(descriptor: int, size: int, *, look_bytes: int = LOOK_BYTES, start: int = 0) -> Iterator[str]:
    """The lines at the end of a file, from byte `start` on, newest first; each redraw of a bar is a line. Left out are
    a line that is too long, one of which the start is out of reach, and one that is not printed to its end."""
    return _lines(lambda count, offset: os.pread(descriptor, count, offset), size, look_bytes, first=start)


def _lines(read_at: Callable[[int, int], bytes], size: int, look_bytes: int, *, first: int) -> Iterator[str]:
    start = max(first, size - look_bytes)
    rest, end, at_end = b"", size, True
    too_long = False
    while end > start:
        begin = max(start, end - _BLOCK_BYTES)
        block = read_at(end - begin, begin)
        if len(block) < end - begin:
            return  # The file was truncated meanwhile.
        end = begin
        parts = block.replace(b"\r", b"\n").replace(b"\0", b"\n").split(b"\n")
        if len(parts) == 1:
            rest = b"" if too_long else block + rest
        else:
            newest = b"" if too_long else parts[-1] + rest
            too_long = False
            if not at_end or _is_printed_to_its_end(newest):
                yield from _texts(newest)
            at_end = False
            for part in reversed(parts[1:-1]):
                yield from _texts(part)
            rest = parts[0]
        if len(rest) > _LONGEST_BYTES:
            rest, too_long, at_end = b"", True, False
    if start == first and not too_long and (not at_end or _is_printed_to_its_end(rest)):
        yield from _texts(rest)


def _texts(line: bytes) -> Iterator[str]:
    if line and len(line) <= _LONGEST_BYTES and not line.isspace():
        text = line.decode("utf-8", "replace")
        if _BINARY * text.count("\ufffd") <= len(text):
            yield text


def _is_printed_to_its_end(last: bytes) -> bool:
    """True if the last line, which no line end follows, is whole: a bar ends with a bracket."""
    return last.rstrip(b" ").endswith((b"]", b"}"))
