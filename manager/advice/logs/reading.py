"""The lines of a log of any size and content, and Python's tracebacks in them, in bounded memory.

A log may be binary, end without a line break, mix encodings, or have one line of a gigabyte. Lines are split at line
breaks and at carriage returns (a progress bar writes over itself); a line longer than `LONGEST_BYTES` keeps its
beginning and its end. NUL bytes are dropped, which also makes ASCII of UTF-16.

A launcher writes a rank's mark before each line (`[rank3]: `, `3: `): a traceback has the mark of the line that began
it. Chained tracebacks are one. A recursion without end keeps its beginning and its end.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import IO, Any

from stoker.manager.advice.logs.signs import TRACEBACK

# ---- lines


LONGEST_BYTES = 4096
_HEAD, _TAIL, _LEFT_OUT = 1536, 2048, b" [...] "
_BLOCK_BYTES = 256 << 10
_MOST_PARTS = 100
_DIGITS = b"0123456789"
_CONTROLS = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")

LogSource = os.PathLike[str] | str | bytes | IO[bytes] | IO[str] | Iterable[str | bytes]
"""A path, a text, an open file or pipe, or lines. A `str` is the text itself; a file's name is a `Path`."""


class LineReader:
    """The lines of a log as bytes, one pass. `number` is that of the line that came last, from 1, as an editor counts.

    Iterating raises OSError where a path cannot be opened; where a read fails later, the log ends there.
    """

    def __init__(self, source: LogSource) -> None:
        self.number = 0
        self._source = source

    def __iter__(self) -> Iterator[bytes]:
        rest = b""
        for block in blocks_of(self._source):
            block = block.translate(None, b"\0") if b"\0" in block else block
            lines = (rest + block).split(b"\n")
            rest = lines.pop()
            if b"\r" not in block and b"\r" not in rest and not (lines and b"\r" in lines[0]):
                for line in lines:
                    self.number += 1
                    yield line if len(line) <= LONGEST_BYTES else clipped(line)
            else:
                for line in lines:
                    self.number += 1
                    yield from _overwritten(line)
                if b"\r" in rest[:-1]:
                    self.number += 1  # the parts of a line that has not ended yet
                    done, rest = rest[:-1].rsplit(b"\r", 1)[0], rest[rest[:-1].rindex(b"\r") + 1 :]
                    yield from _overwritten(done)
                    self.number -= 1
            if len(rest) > LONGEST_BYTES:
                rest = clipped(rest)
        if rest:
            self.number += 1
            yield from _overwritten(rest)


def masked_line(line: bytes) -> bytes:
    """The line without its digits. Lines of a loop that differ in numbers alone become the same."""
    return line.translate(None, _DIGITS)


def clipped(line: bytes) -> bytes:
    """The beginning and the end of a long line."""
    return line[:_HEAD] + _LEFT_OUT + line[-_TAIL:] if len(line) > LONGEST_BYTES else line


def shown(line: bytes) -> str:
    """The line as text, without colours and control characters; what is not UTF-8 becomes U+FFFD."""
    text = line.decode("utf-8", "replace")
    return text.rstrip() if text.isprintable() else _CONTROLS.sub("", text).rstrip()


def blocks_of(source: LogSource) -> Iterator[bytes]:
    """The log in pieces of some hundred kilobytes. Raises OSError for a path that cannot be opened.

    Of a file by its path what it held when it was opened: a program that writes faster than this reads would have no
    end. A file without a size (a pipe, one of /proc) is read to its end.
    """
    if isinstance(source, os.PathLike):
        with open(source, "rb", buffering=0) as file:
            yield from _blocks_of_file(file, os.fstat(file.fileno()).st_size or sys.maxsize)
    elif isinstance(source, str | bytes):
        for at in range(0, len(source), _BLOCK_BYTES):
            yield _encoded(source[at : at + _BLOCK_BYTES])
    elif hasattr(source, "read"):
        yield from _blocks_of_file(source)
    else:
        yield from _blocks_of_lines(source)


def _blocks_of_file(file: Any, most_bytes: int = sys.maxsize) -> Iterator[bytes]:
    with suppress(OSError, ValueError):
        while block := file.read(min(_BLOCK_BYTES, most_bytes)):
            most_bytes -= len(block)
            yield _encoded(block)


def _blocks_of_lines(lines: Iterable[str | bytes]) -> Iterator[bytes]:
    waiting: list[bytes] = []
    size = 0
    for line in lines:
        if len(line) > _BLOCK_BYTES:
            yield b"\n".join([*waiting, b""])
            waiting, size = [], 0
            for at in range(0, len(line), _BLOCK_BYTES):
                yield _encoded(line[at : at + _BLOCK_BYTES])
            if line[-1:] not in ("\n", b"\n"):
                yield b"\n"
            continue
        part = _encoded(line).removesuffix(b"\n")
        waiting.append(part)
        size += len(part) + 50
        if size > _BLOCK_BYTES:
            yield b"\n".join([*waiting, b""])
            waiting, size = [], 0
    if waiting:
        yield b"\n".join([*waiting, b""])


def _encoded(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "replace")


def _overwritten(line: bytes) -> Iterator[bytes]:
    """The parts of a line between carriage returns, clipped; an empty line stays one. Of a progress bar, which may
    write over itself a million times, each form comes once."""
    parts = line.split(b"\r")
    if len(parts) > _MOST_PARTS:
        parts = list(dict(zip(masked_line(line).split(b"\r"), parts, strict=True)).values())
    parts = [part for part in parts if part]
    for part in parts or [b""]:
        yield clipped(part)


# ---- tracebacks


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
