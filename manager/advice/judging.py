"""Find the party at fault for a failure, from logs, exceptions and messages."""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from stoker.manager.advice.logs import Fault, LocatedFailure, LogLine, classify_failure, locate_failure
from stoker.manager.advice.logs.classifier import NO_RULE_MATCHES, find_frame_owners
from stoker.manager.advice.logs.failures import (
    CALL_RULES,
    JOB_START_RULES,
    MESSAGE_RULES,
    FaultRule,
    find_matching_rules,
)
from stoker.manager.advice.logs.opinion import OPINION_BELOW
from stoker.manager.advice.logs.reading import TRACEBACK
from stoker.manager.advice.secrets import mask_secrets

# ---- several logs, read as one text


MOST_BYTES = 16 << 20
"""Maximum bytes to read from the end of each log."""


class LogPart(NamedTuple):
    """A byte range (`start` to `end`) of a log, or lines of text. `source`: name shown to users."""

    source: str
    text: bytes = b""
    path: Path | None = None
    start: int = 0
    end: int | None = None


class LogParts:
    """Iterates once over the lines of several log parts."""

    def __init__(self, parts: Iterable[LogPart]) -> None:
        self._parts = parts
        self._begun: list[tuple[int, LogPart, int]] = []
        """For each part: its first line's number in the iteration, the part, and the number of lines before it in its
        file (-1: unknown).
        """

    def __iter__(self) -> Iterator[bytes]:
        number = 0
        for part in self._parts:
            opened = _open_log_part(part) if part.path is not None else (io.BytesIO(part.text), len(part.text), 0)
            if opened is None:
                continue
            file, left, skipped = opened
            self._begun.append((number + 1, part, skipped))
            with file, suppress(OSError, ValueError):
                while line := file.readline(left):
                    left, number = left - len(line), number + 1
                    yield line

    def find_line_source(self, number: int) -> tuple[str, int]:
        """Return the source of a line, and the line's number in this source, counted from 1 (0: unknown)."""
        for first, part, skipped in reversed(self._begun):
            if number >= first:
                is_counted = part.path is not None and skipped >= 0
                return part.source, number - first + 1 + skipped if is_counted else 0
        return "", 0


def _open_log_part(part: LogPart) -> tuple[IO[bytes], int, int] | None:
    """Return the open file, the number of bytes to read, and the number of lines before them (-1: unknown). Return None
    if the file is unreadable or not a regular file.
    """
    assert part.path is not None
    with suppress(OSError, ValueError):
        file = os.fdopen(os.open(part.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
        facts = os.fstat(file.fileno())
        if stat.S_ISREG(facts.st_mode):
            end = facts.st_size if part.end is None else min(part.end, facts.st_size)
            first = max(part.start, end - MOST_BYTES, 0)
            skipped = -1
            if first <= MOST_BYTES:  # counting the lines of a larger file takes too long
                skipped = sum(file.read(min(1 << 20, first - at)).count(b"\n") for at in range(0, first, 1 << 20))
            file.seek(first)
            return file, max(0, end - first), skipped
        file.close()
    return None


# ---- judgements


Opinion = Callable[[LocatedFailure, Fault], Fault]
"""Function that receives a failure and an uncertain verdict, and returns a new or unchanged verdict."""
_PLACE = re.compile(r"at (?P<file>.+):(?P<line>\d+) in (?P<name>.+)")


class ProofLine(msgspec.Struct, frozen=True):
    """A line that shows the fault. `source`: the log's name for `stoker logs`. `number`: 0 for messages."""

    source: str
    number: int
    text: str


def diagnose_failed_call(
    said: str, *, log: str = "", start: int = 0, end: int = 0, opinion: Opinion | None = None
) -> Fault | None:
    """Return the party at fault for a failed call or context load. `said`: how the library ended, or an exception with
    a line `at FILE:LINE in NAME` for each frame of the user's code. `start`, `end`: the bytes of `log`, the library's
    log file, that belong to the call. `opinion`: called if the verdict is uncertain.
    """
    parts = [LogPart(Path(log).stem, path=Path(log), start=start, end=end or None)] if log else []
    raises = any(_PLACE.fullmatch(line.strip()) for line in said.splitlines())
    if said:
        parts.append(make_log_part_of_exception(said) if raises else make_log_part_of_text(said))
    found = find_fault(parts, [] if raises else said.splitlines()[:1], CALL_RULES, opinion=opinion)
    if found is None:
        return None
    fault, proof = found
    return msgspec.structs.replace(fault, proof=tuple(LogLine(line.number, line.text) for line in proof))


def make_log_part_of_text(text: str) -> LogPart:
    return LogPart("", text=text.encode(errors="replace") + b"\n")


def make_log_part_of_exception(raised: str) -> LogPart:
    hits = [(_PLACE.fullmatch(line.strip()), line) for line in raised.splitlines()]
    frames = [f'  File "{hit["file"]}", line {hit["line"]}, in {hit["name"]}' for hit, _ in hits if hit]
    return make_log_part_of_text("\n".join([TRACEBACK + ":", *frames, *(line for hit, line in hits if not hit)]))


def find_fault(
    parts: list[LogPart], said: list[str], rules: tuple[FaultRule, ...], *, opinion: Opinion | None = None
) -> tuple[Fault, tuple[ProofLine, ...]] | None:
    """Return the fault and the lines that prove it. `parts`: logs, oldest first. `said`: messages of the session. Of
    the verdicts from the logs and from the messages, the more certain one is returned.
    """
    logs = LogParts(parts)
    located = locate_failure(logs, rules=rules)
    by_log = classify_failure(located, rules=rules) if located is not None else None
    by_word = _find_fault_in_messages(
        said, MESSAGE_RULES if rules is CALL_RULES else (*JOB_START_RULES, *MESSAGE_RULES)
    )
    if by_word is not None and (
        by_log is None or by_word.sure > by_log.sure or by_log.means.startswith(NO_RULE_MATCHES)
    ):
        return by_word, tuple(ProofLine("", 0, line.text) for line in by_word.proof)
    if by_log is None or located is None:
        return None
    if opinion is not None and by_log.sure < OPINION_BELOW:
        by_log = opinion(located, by_log)
    return by_log, tuple(
        ProofLine(*logs.find_line_source(line.number), line.text) for line in _collect_proof_lines(by_log, located)
    )


def _find_fault_in_messages(said: Iterable[str], rules: tuple[FaultRule, ...]) -> Fault | None:
    for text in said:
        lines = text.splitlines()
        for line in reversed(lines):
            if found := find_matching_rules(line, rules):
                shown = dict.fromkeys(mask_secrets(one.strip()) for one in (lines[0], line))
                proof = tuple(LogLine(0, one) for one in shown)
                return Fault(found[0].kind, found[0].component, found[0].sure, found[0].means, proof)
    return None


def _collect_proof_lines(fault: Fault, located: LocatedFailure) -> list[LogLine]:
    frames = [line for line in located.traceback if line.text.lstrip().startswith('File "')]
    own = [line for line in frames if find_frame_owners([line.text]) == ["user"]]
    chosen = {line.number: line for line in (*own[-1:], *fault.proof) if TRACEBACK not in line.text}
    lines = [chosen[number] for number in sorted(chosen)] or list(fault.proof)
    return list({line.text.strip(): LogLine(line.number, line.text.strip()) for line in lines}.values())
