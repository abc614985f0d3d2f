"""Tables in files: CSV with a header, plain or gzipped, row by row. A bad row is named by file, line and field."""

from __future__ import annotations

import csv
import difflib
import gzip
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from stoker.decoding import HEAD_BYTES, other_format, wrong_byte
from stoker.errors import ConfigError

_WHOLE = re.compile(r"\s*[0-9]{1,18}\s*")
_SIGNED = re.compile(r"\s*[+-]?[0-9]{1,18}\s*")
_NUMBER = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?\s*")
_SHOWN = 60


class TableRow:
    """One row: its cells by column, and where it stands."""

    __slots__ = ("_cells", "_columns", "line", "path")

    def __init__(self, path: Path, line: int, columns: Mapping[str, int], cells: list[str]) -> None:
        self.path = path
        self.line = line
        self._columns = columns
        self._cells = cells

    def __contains__(self, field: str) -> bool:
        return field in self._columns

    def wrong(self, field: str, what: str) -> ConfigError:
        """The error that says what is wrong with a field of this row."""
        return wrong(self.path, self.line, field, what)

    def text(self, field: str) -> str:
        """What stands there. Raises ConfigError for nothing."""
        text = self._cells[self._columns[field]].strip()
        if not text:
            raise self.wrong(field, "is empty")
        return text

    def whole(self, field: str, *, least: int = 0, most: int = 1_000_000_000) -> int:
        """A whole number within bounds. Raises ConfigError."""
        text = self._cells[self._columns[field]]
        pattern = _SIGNED if least < 0 else _WHOLE
        if not pattern.fullmatch(text) or not least <= int(text) <= most:
            raise self.wrong(field, f"{_shown(text)} is not a whole number from {least} to {most}")
        return int(text)

    def number(self, field: str) -> float:
        """A number that is not negative. Raises ConfigError."""
        text = self._cells[self._columns[field]]
        if not _NUMBER.fullmatch(text) or not 0.0 <= float(text) < math.inf:
            raise self.wrong(field, f"{_shown(text)} is not a number of at least 0")
        return float(text)

    def date(self, field: str) -> float:
        """A date with its time, as seconds since 1970; without a time zone it is taken for UTC. Raises ConfigError."""
        text = self._cells[self._columns[field]].strip()
        try:
            when = datetime.fromisoformat(text)
        except ValueError:
            raise self.wrong(field, f"{_shown(text)} is not a time; write it as 2023-11-16 18:17:03.98") from None
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def read_table(path: Path, *, needs: tuple[str, ...], knows: tuple[str, ...] | None = None) -> Iterator[TableRow]:
    """The rows of a CSV file, as they are read. `needs`: columns that must be there; `knows`: all that may be (None:
    any). Blank lines are passed over. Raises ConfigError with facts `file`, `line` and `key`, where known."""
    try:
        with open_bytes(path) as file:
            reader = csv.reader(_lines(file, path), strict=True)
            columns: dict[str, int] | None = None
            for cells in _rows(reader, path):
                if not cells or cells == [""]:
                    continue
                if columns is None:
                    columns = _header(path, reader.line_num, cells, needs=needs, knows=knows)
                elif len(cells) != len(columns):
                    what = f"has {len(cells)} fields where the header has {len(columns)}"
                    raise wrong(path, reader.line_num, "", what)
                else:
                    yield TableRow(path, reader.line_num, columns, cells)
            if columns is None:
                raise ConfigError(f"{show_path(path)}: the file is empty: there is not even a header", file=str(path))
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from None


def wrong(path: Path, line: int, field: str, what: str) -> ConfigError:
    """`file: line N: field: what is wrong`."""
    parts = (show_path(path), f"line {line}", field, what) if field else (show_path(path), f"line {line}", what)
    return ConfigError(": ".join(parts), file=str(path), line=line, key=field)


def unreadable(path: Path, error: Exception) -> ConfigError:
    """The error for a file that is not there, or whose bytes are not what they should be."""
    why = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
    return ConfigError(f"{show_path(path)}: {why}", file=str(path))


def show_path(path: Path) -> str:
    """A path as people write it: from the working folder, for what lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def open_bytes(path: Path) -> BinaryIO:
    """Open a text file as bytes, unpacked if it is gzipped. Raises ConfigError for another format, and OSError."""
    file = path.open("rb")
    head = file.read(HEAD_BYTES)
    file.seek(0)
    if not head.startswith(b"\x1f\x8b"):
        if what := other_format(head):
            file.close()
            raise ConfigError(f"{show_path(path)}: {what}", file=str(path))
        return file
    file.close()
    return gzip.open(path, "rb")  # type: ignore[return-value]


def _lines(file: BinaryIO, path: Path) -> Iterator[str]:
    for number, raw in enumerate(file, start=1):
        try:
            yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise wrong(path, number, "", wrong_byte(error.start + 1, raw[error.start])) from None


def _rows(reader: Iterator[list[str]], path: Path) -> Iterator[list[str]]:
    try:
        yield from reader
    except csv.Error as error:
        raise wrong(path, reader.line_num, "", f"is not CSV: {error}") from None  # type: ignore[attr-defined]


def _header(
    path: Path, line: int, cells: list[str], *, needs: tuple[str, ...], knows: tuple[str, ...] | None
) -> dict[str, int]:
    names = [cell.strip() for cell in cells]
    for name in names:
        if knows is not None and name not in knows:
            close = difflib.get_close_matches(name, knows, n=1, cutoff=0.6)
            meant = f"did you mean {close[0]}?" if close else f"there are {', '.join(knows)}"
            raise wrong(path, line, name or "header", f"is not a column that is known; {meant}")
        if names.count(name) > 1:
            raise wrong(path, line, name or "header", "stands twice in the header")
    for name in needs:
        if name not in names:
            raise wrong(path, line, name, f"the header lacks this column; it has {_shown(', '.join(names))}")
    return {name: place for place, name in enumerate(names)}


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")
