"""Which reader a path wants, and what a row must have."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from stoker.datafile import tables, text
from stoker.datafile.row import Line, Row
from stoker.errors import ConfigError

_TEXTS = (".csv", ".tsv", ".jsonl", ".ndjson")
_ARROW = (".arrow", ".feather", ".ipc")
_TABLES = (".parquet", *_ARROW)


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of `path`, lazily. Blank lines are skipped.

    Raises ConfigError naming file and line when the file is missing, of an unknown ending, cut off or damaged, or has a
    row that cannot be read.
    """
    if path.is_dir():
        return tables.read_saved_data_set(path)
    _check_file(path)
    kind = _kind(path)
    if kind == ".parquet":
        return tables.read_parquet(path)
    if kind in _ARROW:
        return tables.read_arrow(path)
    return text.read_text_rows(path, kind=kind)


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a text file, lazily, without blank ones; the file may be packed (`.gz`, `.xz`).

    Raises ConfigError when the file is missing, or cut off or damaged.
    """
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; name a file", file=str(path))
    _check_file(path)
    return text.read_lines(path)


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


def _check_file(path: Path) -> None:
    if not path.exists():
        raise ConfigError(f"{path}: no such file", file=str(path))


def _kind(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = bool(suffixes) and suffixes[-1] in (".gz", ".xz")
    kind = "".join(suffixes[-2:-1] if packed else suffixes[-1:])
    if packed and kind in _TABLES:
        raise ConfigError(f"{path}: unpack it first; only {', '.join(_TEXTS)} are read packed", file=str(path))
    if kind not in (*_TEXTS, *_TABLES):
        raise ConfigError(f"{path}: cannot tell its format; name it {', '.join((*_TEXTS, *_TABLES))}", file=str(path))
    return kind
