"""Read the lines of a log of any size and content, their severity, and Python tracebacks, in bounded memory.

Words such as "error" and "failed" determine the severity of a line. Metric names (`val_error=0.2`), settings
(`timeout=60`) and zero counts (`0 errors`) do not count. A warning, or the announcement of a retry, has the severity
`NOTICE`: it can be part of a failure, but a failure never begins with it.
"""

from __future__ import annotations

import enum
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import IO, Any

LONGEST_BYTES = 4096
_HEAD, _TAIL, _LEFT_OUT = 1536, 2048, b" [...] "
_BLOCK_BYTES = 256 << 10
_MOST_PARTS = 100
_DIGITS = b"0123456789"
_CONTROLS = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")

LogSource = os.PathLike[str] | str | bytes | IO[bytes] | IO[str] | Iterable[str | bytes]
"""A `Path`, the text of a log, an open file or pipe, or lines. A `str` is never a file name."""


class LineReader:
    """Iterates once over the lines of a log, without NUL bytes. Lines end at line breaks and carriage returns. Only the
    beginning and the end of a long line are kept. `number`: how many lines were read so far. Raises OSError if a path
    cannot be opened; a later read error ends the iteration.
    """

    def __init__(self, source: LogSource) -> None:
        self.number = 0
        self._source = source

    def __iter__(self) -> Iterator[bytes]:
        rest = b""
        for block in read_log_blocks(self._source):
            block = block.translate(None, b"\0") if b"\0" in block else block
            returns = b"\r" in block or b"\r" in rest
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                self.number += 1
                if returns:
                    yield from _split_at_carriage_returns(line)
                else:
                    yield line if len(line) <= LONGEST_BYTES else shorten_line(line)
            if len(rest) > LONGEST_BYTES:
                rest = shorten_line(rest)
        if rest:
            self.number += 1
            yield from _split_at_carriage_returns(rest)


def remove_digits(line: bytes) -> bytes:
    return line.translate(None, _DIGITS)


def shorten_line(line: bytes) -> bytes:
    return line[:_HEAD] + _LEFT_OUT + line[-_TAIL:] if len(line) > LONGEST_BYTES else line


def printable_text(line: bytes) -> str:
    """Return the line as text, without colours and control characters."""
    text = line.decode("utf-8", "replace")
    return text.rstrip() if text.isprintable() else _CONTROLS.sub("", text).rstrip()


def read_log_blocks(source: LogSource) -> Iterator[bytes]:
    """Yield the log in blocks. Read a file only up to its initial size: its program may write faster than this function
    reads. Raises OSError.
    """
    if isinstance(source, os.PathLike):
        with open(source, "rb", buffering=0) as file:
            yield from _read_file_blocks(file, os.fstat(file.fileno()).st_size or sys.maxsize)
    elif isinstance(source, str | bytes):
        for at in range(0, len(source), _BLOCK_BYTES):
            yield _encode_if_text(source[at : at + _BLOCK_BYTES])
    elif hasattr(source, "read"):
        yield from _read_file_blocks(source)
    else:
        yield from (_encode_if_text(line).removesuffix(b"\n") + b"\n" for line in source)


def _read_file_blocks(file: Any, most_bytes: int = sys.maxsize) -> Iterator[bytes]:
    with suppress(OSError, ValueError):
        while block := file.read(min(_BLOCK_BYTES, most_bytes)):
            most_bytes -= len(block)
            yield _encode_if_text(block)


def _encode_if_text(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "replace")


def _split_at_carriage_returns(line: bytes) -> Iterator[bytes]:
    """Yield the parts of a line, shortened. If the line has more than 100 parts, yield only the last of those that
    differ only in digits.
    """
    parts = line.split(b"\r")
    if len(parts) > _MOST_PARTS:
        parts = list(dict(zip(remove_digits(line).split(b"\r"), parts, strict=True)).values())
    yield from map(shorten_line, [part for part in parts if part] or [b""])


# ---- severity of a line


_LETTERS = re.compile(r"\\.|[A-Z]+", re.DOTALL)


def compile_lowercase_pattern(pattern: str, flags: int = 0) -> re.Pattern[str]:
    """Compile a pattern for lines in lower case. Its letters become lower case, except in classes (`\\S`)."""
    return re.compile(_LETTERS.sub(lambda hit: hit[0] if hit[0].startswith("\\") else hit[0].lower(), pattern), flags)


class LogSeverity(enum.IntEnum):
    PLAIN = 0
    NOTICE = 1
    ERROR = 2
    FATAL = 3


_ANY_STEM = re.compile(
    b"err|exception|fail|critical|abort|panic|cannot|can't|denied|refused|unreachable|timed|timeout|kill|corrupt|"
    b"lost|invalid|unhandled|segfault|segmentation|terminat|broken|exceed|stale|lockup|lock-up|stall|dead|crash|"
    b"evict|preempt|held|shutdown|down|expire|mismatch|incompatible|undefined|missing|unsupported|disconnect|reboot|"
    rb"full|degraded|unexpected|rejected|fatal|emerg|dumped|oom|uncorrectable|unrecoverable|cancelled|node_fail|\*\*\*|"
    b"traceback|interrupt|warn|deprecat|nvrm|could not|unable to|time out|time-out|no such|reset by|out of memory|"
    b"not found|not responding|not available|not ready|not valid|not enough|giving up|improper"
)
"""Stems of words in error messages. A line without a stem matches no pattern below."""

TRACEBACK = "Traceback (most recent call last)"

_HARMLESS = compile_lowercase_pattern(
    r"""
      (?:error|err|fail(?:ed|ures?)?|timeout|lost|abort(?:ed)?|invalid|exception)s?[\w/.-]{0,60}+['"]?\s*+[=:]\s*+
          (?:[-+]?[\d.]+(?:e[-+]?\d+)?(?:\s?(?:%|s|ms|seconds))?|none|null|false|true|''|"")(?![\w:.])
    | \b(?:0|no|zero|without(?:\ any)?)\s+(?:\w+\s+)?(?:errors?|failures?|failed|exceptions?|timeouts?)\b
    | \berrors?\ (?:by|per)\ \w+
    | \b(?:mean|absolute|squared|word|character|reconstruction|error|failure)[\s_-]
          (?:absolute\ |squared\ )?(?:error|failure|rate|analysis|handling)s?\b(?:\s+rate\b)?
    | \bon[_-](?:error|failure)\b | \berror[_-]?(?:bars?|handler|correct\w*)\b | \bfail[-_]?(?:fast|over|safe)\b
    | (?:set|raise|use|disable|enable|ignore)[\w_-]*(?:_|-)errors?\b
    """,
    re.VERBOSE,
)
_FATAL = compile_lowercase_pattern(
    r"""
      Traceback\ \(most\ recent\ call\ last\) | \b(?:FATAL|CRITICAL|PANIC|EMERG)\b | \bfatal(?:\ \w+)?\ error | \bfatal:
    | \bSegmentation\ fault | core\ dumped | \bBus\ error | ^(?:\S+:\s|\S+\[\d+\]:\s)?(?:Killed|Aborted|Terminated)\b
    | \boom[-_ ]kill | \bout\ of\ memory\b | terminate\ called | \buncorrectable\b | \bunrecoverable\b
    | \bCANCELLED\b | \bNODE_FAIL\b | \b(?:kernel|hardware|machine\ check)\b.*\berror\b | \*\*\*.*\*\*\*
    | ^(?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?::\s|$)
    """,
    re.VERBOSE,
)
_ERROR = compile_lowercase_pattern(
    r"""
      error | \berr\b | \berrno | exception | \bfail(?:ed|ure|s|ing)?\b | \bcritical\b | abort | \bpanic
    | \bcan(?:not|'t)\b | \bcould\ not\b | \bunable\ to\b | \bdenied\b | \brefused\b | \bunreachable\b
    | \btimed?[\s-]?out\b
    | \bkill(?:ed|ing)\b | \bcorrupt | \blost\b | \binvalid\b | \bnot\ (?:found|responding|available|ready|valid)\b
    | \bno\ such\b | \bnot\ enough\b | \bgiving\ up\b | \bimproper
    | \bunhandled\b | \bsegfault | \bterminat(?:ed|ing)\b | \breset\ by\b | \bbroken\b | \bexceed(?:ed|s)\b
    | \bstale\b | \block-?up\b | \bstall(?:ed)?\b | \bdead\b | \bcrash | \bevict | \bpreempt | \bheld\b | \bshutdown\b
    | \bdown\b | \bexpired?\b | \bmismatch | \bincompatible\b | \bundefined\b | \bmissing\b | \bunsupported\b
    | \bNVRM: | \bdisconnect | \breboot | \bfull\b | \bdegraded\b | \bunexpected | \brejected\b
    """,
    re.VERBOSE,
)
_WARNING = compile_lowercase_pattern(r"\bwarn(?:ing)?s?\b|\wWarning\b|\bdeprecat")
_CALM_LEVEL = re.compile(r"\b(?:DEBUG|INFO|NOTICE|TRACE)\b")
_OVERCOME = compile_lowercase_pattern(
    r"""
      \b(?:will\ (?:retry|try\ again)|retry(?:ing)?|retries\ left|retried|attempt\ \#?\d+|trying\
      again|recovered|resolved|resuming|succeeded)\b
    | \bfall(?:ing|s)?\ ?back\b | \bignor(?:ed|ing)\b | \bskipp(?:ed|ing)\b | \bcontinu(?:e|ing)\b
    | \breconnect(?:ed|ing)\b
    | \bcorrected\b | \bnon-?fatal\b | \bbacking\ off\b | \bnot\ critical\b | \bharmless\b
    """,
    re.VERBOSE,
)
_GIVEN_UP = compile_lowercase_pattern(
    r"retries\ exceeded|max(?:imum)?\ (?:number\ of\ )?retries|giv(?:ing|en)\ up|no\ more\ retries"
    r"|after\ \d+\ (?:attempts|retries)|retries\ exhausted|retry (?:count|limit) exceeded",
)  # fmt: skip


def may_report_error(line: bytes) -> bool:
    return _ANY_STEM.search(line.lower()) is not None


def assess_severity(line: str) -> LogSeverity:
    lower = line.lower()
    if _ERROR.search(lower) or _FATAL.search(lower):
        lower = _HARMLESS.sub(" ", lower)
        if announces_recovery(lower):
            return LogSeverity.NOTICE
        if _FATAL.search(lower):
            return LogSeverity.FATAL
        if _ERROR.search(lower):
            return LogSeverity.NOTICE if _WARNING.search(lower) or _CALM_LEVEL.search(line) else LogSeverity.ERROR
    return LogSeverity.NOTICE if _WARNING.search(lower) else LogSeverity.PLAIN


def announces_recovery(line: str) -> bool:
    lower = line.lower()
    return _OVERCOME.search(lower) is not None and _GIVEN_UP.search(lower) is None


# ---- tracebacks


_HEAD_LINES, _TAIL_LINES = 160, 80
_CHAINS = ("During handling of the above exception", "The above exception was the direct cause")
_MESSAGE_LINES = 12
"""Maximum number of lines of an exception's message at the end of a traceback."""
_LONGEST_MARK = 48
_LEVEL = re.compile(r"ERROR|CRITICAL|WARN|INFO|Exception Group")
_CLOCK = re.compile(r"\d")
_LONG_MESSAGE = re.compile(r"nccl\w+: |Last error:|CUDA kernel errors|For debugging|Compile with|Device-side")
"""Matches the unindented continuation lines of NCCL and CUDA error messages."""
RANK_MARK = re.compile(r"^(?:\[(?:rank|default)?\d+\]:? ?|\d{1,5}: )")


class TracebackLines:
    """Collects the lines of a traceback or of several chained tracebacks. `exceptions`: the line of each exception.
    `has_rank_mark`: each line begins with a rank's mark (`[rank3]: `).
    """

    def __init__(self, number: int, line: str) -> None:
        at = line.index(TRACEBACK)
        self.number = number
        self.is_complete = False
        self.exceptions: list[tuple[int, str]] = []
        self._mark = _replace_digits_by_zeros(line[:at].strip("\ufeff\ufffd"))
        self._width = at
        self.has_rank_mark = 0 < len(self._mark) < _LONGEST_MARK and not _LEVEL.search(self._mark)
        self._head: list[tuple[int, str]] = [(number, line)]
        self._tail: list[tuple[int, str]] = []
        self._in_frames = True
        self._further = 0

    @property
    def lines(self) -> list[tuple[int, str]]:
        return self._head + self._tail

    def add_if_part(self, number: int, line: str) -> bool:
        body = self._strip_rank_mark(line) if not self.is_complete else None
        if body is None or not self._is_part_of_traceback(number, body):
            return False
        (self._head if len(self._head) < _HEAD_LINES else self._tail).append((number, line))
        del self._tail[:-_TAIL_LINES]
        return True

    def _is_part_of_traceback(self, number: int, body: str) -> bool:
        indented = body[:1] in (" ", "\t")
        if self._in_frames:
            if indented or not body or body.startswith("[Previous line repeated"):
                return True
            if TRACEBACK in body:
                self.is_complete = not self.exceptions
                return not self.is_complete
            self._in_frames, self._further = False, 0
            self.exceptions.append((number, body))
            return True
        self._further += 1
        if TRACEBACK in body and any(chain in line for _, line in self.lines[-3:] for chain in _CHAINS):
            self._in_frames = True
        elif body.startswith(_CHAINS):
            self._further = 0
        elif body.strip() or self._further > 2:
            self.is_complete = self._further > _MESSAGE_LINES or not (indented or _LONG_MESSAGE.match(body))
        return not self.is_complete

    def _strip_rank_mark(self, line: str) -> str | None:
        if not self._mark:
            return line[self._width :] if self._width == 0 or line[: self._width].isspace() else line
        if _replace_digits_by_zeros(line[: self._width].rstrip()) == self._mark.rstrip():
            return line[self._width :]
        return None if self.has_rank_mark else line


def _replace_digits_by_zeros(mark: str) -> str:
    return mark if len(mark) < 16 else _CLOCK.sub("0", mark)
