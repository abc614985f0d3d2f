"""Read the input files of a run: a TOML file, and a data file with one item per row.

Every pass reads the data file again, so the file may be larger than memory. The first pass, `check_rows`, keeps a
4-byte checksum of each row. Later passes refuse a changed row.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from stoker.datafile import Row, read_rows
from stoker.decoding import read_text
from stoker.errors import ConfigError
from stoker.toml_files import read_struct

_SHOWN_PLACES = 5
S = TypeVar("S", bound=msgspec.Struct)
Text = Annotated[str, msgspec.Meta(min_length=1)]


class DataItem(msgspec.Struct, frozen=True):
    """A row. `id`: the row's name; `place`: the row's position in the file (`line 7`)."""

    id: str
    fields: dict[str, Any]
    place: str = ""


class DataRows(msgspec.Struct, frozen=True):
    """The rows of a data file. `column`: the column with row names, empty to name rows by number; `notes`: warnings."""

    path: Path
    column: str
    digest: str
    checksums: array[int]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.checksums)

    def __iter__(self) -> Iterator[DataItem]:
        """Yield the rows. Raises ConfigError if a row has changed since the file was checked."""
        left = iter(self.checksums)
        for row in itertools.islice(read_rows(self.path), len(self.checksums)):
            item = _make_data_item(row, path=self.path, column=self.column)
            if zlib.crc32(_encode_item_for_digest(item)) != next(left):
                problem = "has changed since the file was checked; run again, and do not change the file meanwhile"
                raise make_row_error(problem, row, path=self.path, key="")
            yield item
        if missing := sum(1 for _ in left):
            raise ConfigError(
                f"{self.path}: its last {missing:,} of {len(self):,} rows were removed since the file was checked;"
                " run again, and do not change the file meanwhile",
                file=str(self.path),
            )


def check_rows(
    path: Path, *, column: str, wanted: Mapping[str, Sequence[str]], limit: int = 0, empty_means: str = "",
    texts: bool = False,
) -> DataRows:  # fmt: skip
    """Check the first `limit` rows (0: all). Raises ConfigError.

    `wanted`: required columns, keyed by the prompt or option that requires them; `texts`: require text or empty cells;
    `empty_means`: effect of an empty cell, for a note.
    """
    digest, checksums = hashlib.sha256(b"["), array("I")
    names: dict[str, int] = {}
    empty: dict[str, list[str]] = {}
    counts: Counter[str] = Counter()
    for row in itertools.islice(read_rows(path), limit or None):
        item = _make_data_item(row, path=path, column=column)
        if column:
            first = names.setdefault(item.id, row.number)
            if first != row.number:
                where = row.place.replace(str(row.number), str(first))  # `place` is for example `line 7`
                raise make_row_error(f"{column} {item.id} was already used in {where}", row, path=path, key=column)
        for name in _find_empty_columns(row, wanted, path=path, texts=texts):
            counts[name] += 1
            if counts[name] <= _SHOWN_PLACES:
                empty.setdefault(name, []).append(row.place)
        text = _encode_item_for_digest(item)
        digest.update(b", " + text if checksums else text)
        checksums.append(zlib.crc32(text))
    if not checksums:
        raise ConfigError(f"{path}: has no rows", file=str(path))
    digest.update(b"]")
    notes = []
    for name, places in empty.items():
        shown = ", ".join(places) + (", …" if counts[name] > len(places) else "")
        found = f"{path}: {name} is empty in {counts[name]:,} of {len(checksums):,} rows ({shown})"
        notes.append(f"{found}: {empty_means}" if empty_means else found)
    return DataRows(path, column, digest.hexdigest()[:16], checksums, tuple(notes))


def make_row_error(problem: str, row: Row, *, path: Path, key: str) -> ConfigError:
    return ConfigError(f"{path}: {row.place}: {problem}", file=str(path), line=row.number, key=key)


def _make_data_item(row: Row, *, path: Path, column: str) -> DataItem:
    name = row.number if not column else row.fields.get(column)
    if not isinstance(name, str | int) or name == "":
        problem = f"{column} must be a text or a whole number (the row's name), and is {name!r:.40}"
        raise make_row_error(problem, row, path=path, key=column)
    return DataItem(id=str(name), fields=row.fields, place=row.place)


def _encode_item_for_digest(item: DataItem) -> bytes:
    return repr((item.id, sorted(item.fields.items()))).encode()


def _find_empty_columns(row: Row, wanted: Mapping[str, Sequence[str]], *, path: Path, texts: bool) -> Iterator[str]:
    """Yield the required columns whose cell is empty. Raises ConfigError if a column is missing."""
    for who, columns in wanted.items():
        for name in columns:
            if name not in row.fields:
                has = ", ".join(map(str, row.fields))
                problem = f"{name} is missing, and {who} needs it (the row has {has})"
                raise make_row_error(problem, row, path=path, key=name)
    for name in dict.fromkeys(name for columns in wanted.values() for name in columns):
        value = row.fields[name]
        if is_empty(value):
            yield name
        elif texts and not isinstance(value, str):
            options = " and ".join(who for who, columns in wanted.items() if name in columns)
            problem = f"{name} must be text, and is {value!r:.40}; name another column with {options}"
            raise make_row_error(problem, row, path=path, key=name)


def read_toml(path: Path, shape: type[S]) -> S:
    """Read a TOML file into a struct. Raises ConfigError."""
    return read_struct(read_text_file(path), shape, file=str(path))


def read_text_file(path: Path, *, hint: str = "") -> str:
    """Return the text of a file. `hint`: advice in the error if the file is missing. Raises ConfigError."""
    try:
        return read_text(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{hint}", file=str(path)) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", file=str(path)) from None


def refuse_duplicates(table: str, entries: Iterable[tuple[str, object]], *, file: Path) -> None:
    """Raise ConfigError if two entries have the same name, or the same content."""
    names: dict[object, str] = {}
    for number, (name, content) in enumerate(entries, start=1):
        if name in names.values():
            problem = f"{name} is used twice"
        elif content in names:
            problem = f"{name} and {names[content]} are the same; leave one of them out"
        else:
            names[content] = name
            continue
        raise ConfigError(f"{file}: {table} {number}: {problem}", file=str(file), key=table)


def is_empty(value: Any) -> bool:
    """True for null, NaN (null in some tables) and blank text."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and math.isnan(value))
