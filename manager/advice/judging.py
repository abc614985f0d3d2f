"""Whose fault a failure is, by logs, exceptions and the session's words, for `stoker explain` and the advisor."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from stoker.manager.advice.logs import Fault, Located, LogLine, classify, locate
from stoker.manager.advice.logs.classifier import GUESSED, frames_of
from stoker.manager.advice.logs.failures import JOB, OF_CALLS, SAID, FaultRule, matching_rules
from stoker.manager.advice.logs.reading import TRACEBACK
from stoker.manager.advice.secrets import masked

# ---- logs read as one text


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


# ---- judgements


_PLACE = re.compile(r"at (?P<file>.+):(?P<line>\d+) in (?P<name>.+)")


class ProofLine(msgspec.Struct, frozen=True):
    """A line that shows a fault. `source`: the log that has it, by the name that `stoker logs` takes; `number`: its
    line there (0: it is no line of a log, but what the call raised or what the session says)."""

    source: str
    number: int
    text: str


def fault_of_call(said: str, *, log: str = "", start: int = 0, end: int = 0) -> Fault | None:
    """Whose fault it was that a call, or a load, failed. `said`: what it raised, in short, with a line
    `at FILE:LINE in NAME` for each place in the user's code, or what its library's end was. `start`, `end`: the part of
    the log that it has written, in bytes; `end` is 0: to the log's end."""
    parts = [LogPart(Path(log).stem, path=Path(log), start=start, end=end or None)] if log else []
    raises = any(_PLACE.fullmatch(line.strip()) for line in said.splitlines())
    if said:
        parts.append(raised_part(said) if raises else told_part(said))
    found = judged(parts, [] if raises else said.splitlines()[:1], OF_CALLS)
    if found is None:
        return None
    fault, proof = found
    return msgspec.structs.replace(fault, proof=tuple(LogLine(line.number, line.text) for line in proof))


def told_part(text: str) -> LogPart:
    """A text in a log's place."""
    return LogPart("", text=text.encode(errors="replace") + b"\n")


def raised_part(raised: str) -> LogPart:
    """What a call raised, with the places in the user's code, as Python shows an exception."""
    said = [line for line in raised.splitlines() if not _PLACE.fullmatch(line.strip())]
    lines = [TRACEBACK + ":"]
    for line in raised.splitlines():
        hit = _PLACE.fullmatch(line.strip())
        if hit is not None:
            lines.append(f'  File "{hit["file"]}", line {hit["line"]}, in {hit["name"]}')
    return told_part("\n".join([*lines, *said]))


def judged(
    parts: list[LogPart], said: list[str], rules: tuple[FaultRule, ...]
) -> tuple[Fault, tuple[ProofLine, ...]] | None:
    """Whose fault it was by the logs, or by what the session says where that is surer, with the lines that show it;
    None where neither tells of a failure. `parts`: logs and texts, in the order in which they were written."""
    logs = LogParts(parts)
    try:
        located = locate(logs, rules=rules) if parts else None  # type: ignore[arg-type]  # all that it asks for is `read`
    finally:
        logs.close()
    by_log = classify(located, rules=rules) if located is not None else None
    by_word = _by_words(said, SAID if rules is OF_CALLS else (*JOB, *SAID))
    if by_word is not None and (by_log is None or by_word.sure > by_log.sure or by_log.means.startswith(GUESSED)):
        return by_word, tuple(ProofLine("", 0, line.text) for line in by_word.proof)
    if by_log is None or located is None:
        return None
    return by_log, tuple(ProofLine(*logs.place(line.number), line.text) for line in _proof(by_log, located))


def _by_words(said: Iterable[str], rules: tuple[FaultRule, ...]) -> Fault | None:
    """Whose fault it was by what the session says: the last line that tells counts, and a text's first line, which sums
    it up, is shown above that."""
    for text in said:
        lines = text.splitlines()
        for line in reversed(lines):
            rule = next(iter(matching_rules(line, rules)), None)
            if rule is not None:
                shown = dict.fromkeys(masked(one.strip()) for one in (lines[0], line))
                proof = tuple(LogLine(0, one) for one in shown)
                return Fault(rule.kind, rule.component, rule.sure, rule.means, proof)
    return None


def _proof(fault: Fault, located: Located) -> list[LogLine]:
    """The lines that show a fault, with the line of the user's code that is nearest to it."""
    frames = [line for line in located.traceback if line.text.lstrip().startswith('File "')]
    own = [line for line in frames if frames_of([line.text]) == ["user"]]
    chosen = {line.number: line for line in (*own[-1:], *fault.proof) if TRACEBACK not in line.text}
    lines = [chosen[number] for number in sorted(chosen)] or list(fault.proof)
    return list({line.text.strip(): LogLine(line.number, line.text.strip()) for line in lines}.values())
