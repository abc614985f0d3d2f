"""Rows and lines of text files: CSV, TSV and JSONL, packed or not."""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from stoker.datafile.row import Line, Row, check_columns
from stoker.decoding import HEAD_BYTES, UNREADABLE, not_utf8, other_format, wrong_byte
from stoker.errors import ConfigError

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
# Python's csv module refuses cells of more than 131,072 characters, and whole documents are longer.
_LONGEST_CELL = 2**31 - 1
_SURROGATE = re.compile("[\\ud800-\\udfff]")
_DAMAGED = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""What reading a file that is cut off or damaged raises. (Of EOFError click says nothing: it takes it for Ctrl-D.)"""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_text_rows(path: Path, *, kind: str) -> Iterator[Row]:
    """The rows of a file of this kind (`.csv`, `.jsonl`, …). Raises ConfigError naming file and line."""
    rows = _csv(path, delimiter=_DELIMITERS[kind]) if kind in _DELIMITERS else _jsonl(path)
    last = ""
    try:
        for row in rows:
            last = row.place
            yield row
    except UnicodeDecodeError:
        raise _not_text(path) from None
    except _DAMAGED as error:
        raise _damaged(path, error, last=last) from None


def read_lines(path: Path) -> Iterator[Line]:
    """The lines that are not blank, as bytes. Raises ConfigError for a file that is cut off or damaged."""
    last = ""
    try:
        with _open_bytes(path) as file:
            for number, data in enumerate(file, start=1):
                text = data.removeprefix(_BYTE_ORDER_MARK) if number == 1 else data
                if text.strip():
                    last = f"line {number}"
                    yield Line(number=number, data=text.rstrip(b"\r\n"))
    except _DAMAGED as error:
        raise _damaged(path, error, last=last) from None


def _open_bytes(path: Path) -> IO[bytes]:
    """Open a text file, packed or not. Raises ConfigError for another format than its name says."""
    ending = path.suffix.lower()
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    file = openers.get(ending, open)(path, "rb")
    try:
        if what := other_format(file.peek(HEAD_BYTES)[:HEAD_BYTES], renamed=ending not in openers):
            raise ConfigError(f"{path}: {what}", file=str(path))
    except BaseException as error:
        file.close()
        if isinstance(error, gzip.BadGzipFile | lzma.LZMAError) and _is_plain_text(path):
            problem = f"its name ends in {path.suffix}, and it is plain text; call it {path.stem}"
            raise ConfigError(f"{path}: {problem}", file=str(path)) from None
        raise
    return cast("IO[bytes]", file)


def _is_plain_text(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.readline(HEAD_BYTES)
    return bool(head.strip()) and not other_format(head) and not not_utf8(head)


def _open(path: Path, *, errors: str = "strict") -> IO[str]:
    return io.TextIOWrapper(_open_bytes(path), encoding="utf-8-sig", errors=errors, newline="")


def _jsonl(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
            except UNREADABLE as error:
                raise ConfigError(f"{path}: line {number}: is not JSON: {error}", file=str(path), line=number) from None
            if not isinstance(fields, dict):
                raise ConfigError(
                    f"{path}: line {number}: is {type(fields).__name__}, must be an object", file=str(path), line=number
                )
            if "\\ud" in line or "\\uD" in line:
                _check_whole(fields, path=path, number=number)
            yield Row(number=number, place=f"line {number}", fields=fields)


def _check_whole(fields: dict[str, Any], *, path: Path, number: int) -> None:
    """Raise ConfigError for a text with half of a character: it could be neither sent nor written."""
    broken = _SURROGATE.search(json.dumps(fields, ensure_ascii=False))
    if broken:
        problem = f"holds \\u{ord(broken[0]):04x}, half of a character; write it whole or leave it out"
        raise ConfigError(f"{path}: line {number}: {problem}", file=str(path), line=number)


def _csv(path: Path, *, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
    with _open(path) as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        header: list[str] = []
        try:
            for cells in reader:
                number = reader.line_num
                if not cells:
                    continue
                if not header:
                    header = [cell.strip() for cell in cells]
                    check_columns(header, path=path, where=f"line {number}")
                    continue
                if len(cells) != len(header):
                    raise ConfigError(
                        f"{path}: line {number}: has {len(cells)} cells, the header has {len(header)}"
                        " (quote a cell that holds a comma)",
                        file=str(path),
                        line=number,
                    )
                yield Row(number=number, place=f"line {number}", fields=dict(zip(header, cells, strict=True)))
        except csv.Error as error:
            raise ConfigError(
                f"{path}: line {reader.line_num}: {error}", file=str(path), line=reader.line_num
            ) from None


def _damaged(path: Path, error: Exception, *, last: str) -> ConfigError:
    """The error for a file that gave no more than the rows up to `last` (empty: none at all)."""
    if isinstance(error, OSError) and error.errno is not None:
        return ConfigError(f"{path}: cannot be read: {error.strerror}", file=str(path))
    what = "is cut off" if isinstance(error, EOFError) else "is damaged"
    where = f"after {last}" if last else "before its first row"
    why = " ".join(str(error).split()).rstrip(".")
    return ConfigError(f"{path}: {what} {where} ({why}); copy it or make it again", file=str(path))


def _not_text(path: Path) -> ConfigError:
    """Which line it is: the decoder that failed was given pieces of the file, and knows of no lines."""
    number = 0
    try:
        with _open(path, errors="surrogateescape") as file:
            for number, line in enumerate(file, start=1):
                try:
                    line.encode("utf-8", "surrogateescape").decode("utf-8")
                except UnicodeDecodeError as error:
                    where = f"line {number}: {wrong_byte(error.start + 1, error.object[error.start])}"
                    return ConfigError(f"{path}: {where}", file=str(path), line=number)
    except _DAMAGED as error:  # the end is missing, too
        return _damaged(path, error, last=f"line {number}" if number else "")
    return ConfigError(f"{path}: is not UTF-8 text", file=str(path))
