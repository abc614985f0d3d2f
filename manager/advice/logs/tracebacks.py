"""Collect Python tracebacks from lines that come one by one, from several ranks at once.

A launcher writes a rank's mark before each line (`[rank3]: `, `3: `, `[default1]:`). A traceback has the mark of the
line that began it; lines with other marks pass by. Chained tracebacks ("During handling of the above exception") are
one. A recursion without end keeps its beginning and its end.
"""

from __future__ import annotations

import re

from stoker.manager.advice.logs.signs import TRACEBACK

_HEAD_LINES, _TAIL_LINES = 160, 80
_CHAINS = ("During handling of the above exception", "The above exception was the direct cause")
_MESSAGE_LINES = 12
"""A message of several lines counts up to here, where its lines are indented or it is not closed by a blank line."""
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?::.*|)$|(?:[A-Za-z_]\w*\.)+\w+: ")
_LONGEST_MARK = 48
_LEVEL = re.compile(r"ERROR|CRITICAL|WARN|INFO|Exception Group")
_CLOCK = re.compile(r"\d")


RANK_MARK = re.compile(r"^(?:\[(?:rank|default)?\d+\]:? ?|\d{1,5}: )")


class TracebackLines:
    """One traceback while it is read. `number`: its first line. `done`: no further line belongs to it."""

    def __init__(self, number: int, line: str) -> None:
        at = line.index(TRACEBACK)
        self.number = number
        self.done = False
        self.exceptions: list[tuple[int, str]] = []
        """The line of each exception of the chain; the last one is what ended the program."""
        self._mark = _unmarked(line[:at].strip("\ufeff\ufffd"))
        self._width = at
        self._marks_ranks = len(self._mark) < _LONGEST_MARK and not _LEVEL.search(self._mark)
        """True if what stands before the traceback marks each line, and is no clock or level of one message."""
        self.mark = (at, self._mark.rstrip()) if self._mark and self._marks_ranks else None
        """The width of the mark that each of its lines has, and the mark; None: its lines have none."""
        self._head: list[tuple[int, str]] = [(number, line)]
        self._tail: list[tuple[int, str]] = []
        self._in_frames = True
        self._further = 0

    @property
    def lines(self) -> list[tuple[int, str]]:
        """Its lines with their numbers; of a very long one the beginning and the end."""
        return self._head + self._tail

    def add(self, number: int, line: str) -> bool:
        """Take in the next line of the log. Returns False for a line that is not of this traceback."""
        if self.done:
            return False
        body = self._body(line)
        if body is None:
            return False
        if self._in_frames:
            if body[:1] in (" ", "\t") or not body or body.startswith("[Previous line repeated"):
                return self._keep(number, line)
            if TRACEBACK in body:  # another one begins before this one has ended
                self.done = not self.exceptions
                return not self.done and self._keep(number, line)
            self._in_frames = False
            self._further = 0
            self.exceptions.append((number, body))
            return self._keep(number, line)
        self._further += 1
        if TRACEBACK in body and self._chained:
            self._in_frames = True
            return self._keep(number, line)
        if body.startswith(_CHAINS):
            self._further = 0
            return self._keep(number, line)
        if not body.strip() and self._further <= 2:
            return self._keep(number, line)
        if self._further <= _MESSAGE_LINES and (body[:1] in (" ", "\t") or self._is_message(body)):
            return self._keep(number, line)
        self.done = True
        return False

    @property
    def _chained(self) -> bool:
        return any(chain in line for _, line in self.lines[-3:] for chain in _CHAINS)

    def _is_message(self, body: str) -> bool:
        """True for lines of NCCL's and CUDA's long messages, which stand at the left margin."""
        return bool(re.match(r"nccl\w+: |Last error:|CUDA kernel errors|For debugging|Compile with|Device-side", body))

    def _body(self, line: str) -> str | None:
        if not self._mark:
            return line[self._width :] if self._width == 0 or line[: self._width].isspace() else line
        if _unmarked(line[: self._width].rstrip()) == self._mark.rstrip():
            return line[self._width :]
        return None if self._marks_ranks else line

    def _keep(self, number: int, line: str) -> bool:
        if len(self._head) < _HEAD_LINES:
            self._head.append((number, line))
        else:
            self._tail.append((number, line))
            if len(self._tail) > _TAIL_LINES:
                del self._tail[0]
        return True


class OpenTracebacks:
    """The tracebacks that have not ended. Those of marked ranks are looked up by the mark of a line: a hundred ranks
    that fail at once would each be asked for each line."""

    def __init__(self) -> None:
        self._marked: dict[tuple[int, str], list[TracebackLines]] = {}
        self._loose: list[TracebackLines] = []
        self._widths: tuple[int, ...] = ()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, traceback: TracebackLines) -> None:
        """One more has begun."""
        place = self._loose if traceback.mark is None else self._marked.setdefault(traceback.mark, [])
        place.append(traceback)
        self._changed(1)

    def remove(self, traceback: TracebackLines) -> None:
        """One has ended."""
        if traceback.mark is None:
            self._loose.remove(traceback)
        else:
            place = self._marked[traceback.mark]
            place.remove(traceback)
            if not place:
                del self._marked[traceback.mark]
        self._changed(-1)

    def candidates(self, line: str) -> list[TracebackLines]:
        """Those to which a line may belong: first those whose mark it has."""
        found: list[TracebackLines] = []
        for width in self._widths:
            found += self._marked.get((width, _unmarked(line[:width].rstrip())), ())
        return found + self._loose

    def _changed(self, by: int) -> None:
        self._count += by
        self._widths = tuple({width for width, _ in self._marked})


def _unmarked(mark: str) -> str:
    """The mark of a line; a clock in it may run."""
    return mark if len(mark) < 16 else _CLOCK.sub("0", mark)
