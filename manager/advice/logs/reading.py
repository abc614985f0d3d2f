"""Read the lines of a log of any size and content, in bounded memory.

A log is a file, a pipe, a text, or any iterable of lines. It may be binary, end without a line break, mix encodings, or
have one line of a gigabyte. Lines are split at line breaks and at carriage returns (a progress bar writes over itself);
a line longer than `LONGEST_BYTES` keeps its beginning and its end. NUL bytes are dropped, which also makes ASCII of
UTF-16.
"""

from __future__ import annotations

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
