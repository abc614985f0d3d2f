"""Rows of a CSV, JSONL or Parquet file, read with the place of each, so that a bad row can be named; and rows written.

The ending decides the format (`.csv`, `.tsv`, `.jsonl`, `.ndjson`, `.parquet`; `.csv.gz`, `.jsonl.gz` and `.xz` too).
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import lzma
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from stoker.decoding import UNREADABLE
from stoker.errors import ConfigError

__all__ = ["Row", "digest_file", "read_rows", "text_field", "write_rows"]

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
# Python's csv module refuses cells of more than 131,072 characters, and whole documents are longer.
_LONGEST_CELL = 2**31 - 1
_KINDS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
_SURROGATE = re.compile("[\\ud800-\\udfff]")
_DAMAGED = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""What reading a file that is cut off or damaged raises. (Of EOFError click says nothing: it takes it for Ctrl-D.)"""


class Row(msgspec.Struct, frozen=True):
    """One row: `number` is its line in the file (CSV, JSONL) or its row, both from 1; `place` says so to people."""

    number: int
    place: str
    fields: dict[str, Any]


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of `path`, lazily. Blank lines are skipped.

    Raises ConfigError naming file and line when the file is missing, of an unknown ending, cut off or damaged, or has a
    row that cannot be read.
    """
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; name a file", file=str(path))
    if not path.exists():
        raise ConfigError(f"{path}: no such file", file=str(path))
    kind = _kind(path)
    if kind == ".parquet":
        rows = _parquet(path)
    elif kind in _DELIMITERS:
        rows = _csv(path, delimiter=_DELIMITERS[kind])
    else:
        rows = _jsonl(path)
    last = ""
    try:
        for row in rows:
            last = row.place
            yield row
    except UnicodeDecodeError:
        raise _not_text(path) from None
    except _DAMAGED as error:
        raise _damaged(path, error, last=last) from None


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path, *, kind: str) -> None:
    """Writes the rows as `parquet` or `jsonl`, whatever `path` is called. The columns are those of the first row."""
    if kind == "jsonl":
        with path.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        return
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, compression="zstd")


def _damaged(path: Path, error: Exception, *, last: str) -> ConfigError:
    """The error for a file that gave no more than the rows up to `last` (empty: none at all)."""
    if isinstance(error, OSError) and error.errno is not None:
        return ConfigError(f"{path}: cannot be read: {error.strerror}", file=str(path))
    what = "is cut off" if isinstance(error, EOFError) else "is damaged"
    where = f"after {last}" if last else "before its first row"
    why = " ".join(str(error).split()).rstrip(".")
    return ConfigError(f"{path}: {what} {where} ({why}); copy it or make it again", file=str(path))


def digest_file(path: Path) -> str:
    """The first 16 hex digits of the SHA-256 of the file's bytes: which data a run was made from."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def text_field(row: Row, field: str, *, file: Path) -> str:
    """A field that must be text and not blank. Raises ConfigError naming file, line and field."""
    if field not in row.fields:
        has = ", ".join(map(str, row.fields)) or "nothing"
        raise ConfigError(
            f"{file}: {row.place}: {field} is missing (the row has {has})", file=str(file), line=row.number, key=field
        )
    value = row.fields[field]
    if not isinstance(value, str) or not value.strip():
        shown = "empty" if value in (None, "") or isinstance(value, str) else f"{value!r:.40}"
        raise ConfigError(
            f"{file}: {row.place}: {field} must be text, and is {shown}", file=str(file), line=row.number, key=field
        )
    return value


def _kind(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in (".gz", ".xz"):
        suffixes.pop()
    kind = suffixes[-1] if suffixes else ""
    if kind not in _KINDS:
        raise ConfigError(f"{path}: cannot tell its format; name it {', '.join(_KINDS)}", file=str(path))
    return kind


def _open(path: Path, *, errors: str = "strict") -> IO[str]:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", errors=errors, newline="")
    if path.suffix.lower() == ".xz":
        return lzma.open(path, "rt", encoding="utf-8-sig", errors=errors, newline="")
    return path.open(encoding="utf-8-sig", errors=errors, newline="")


def _not_text(path: Path) -> ConfigError:
    """Which line it is: the decoder that failed was given pieces of the file, and knows of no lines."""
    number = 0
    try:
        with _open(path, errors="surrogateescape") as file:
            for number, line in enumerate(file, start=1):
                try:
                    line.encode("utf-8", "surrogateescape").decode("utf-8")
                except UnicodeDecodeError as error:
                    where = f"line {number}: is not UTF-8 text ({error.reason} at byte {error.start + 1} of the line)"
                    return ConfigError(f"{path}: {where}", file=str(path), line=number)
    except _DAMAGED as error:  # the end is missing, too
        return _damaged(path, error, last=f"line {number}" if number else "")
    return ConfigError(f"{path}: is not UTF-8 text", file=str(path))


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
                    _check_columns(header, path=path, where=f"line {number}")
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


def _check_columns(names: Sequence[str], *, path: Path, where: str) -> None:
    """Raise ConfigError for two columns of one name: a row would keep the last one only. Columns may have no name."""
    twice = next((name for name in names if name and names.count(name) > 1), "")
    if twice:
        problem = f"two columns are called {twice}; give each a name of its own"
        raise ConfigError(f"{path}: {where}: {problem}", file=str(path), key=twice)


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            _check_columns(table.schema_arrow.names, path=path, where="its schema")
            for batch in table.iter_batches(batch_size=4096):
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(number=number, place=f"row {number}", fields=fields)
    except (pyarrow.ArrowException, *UNREADABLE) as error:
        where = f"after row {number}" if number else "from its beginning"
        why = " ".join(str(error).split())
        raise ConfigError(f"{path}: cannot be read as Parquet {where}: {why}", file=str(path)) from None
