"""Read the input files of a run: a TOML file, and a data file with one item per row.

Every pass over the rows reads the data file again, so the file may be larger than memory. The first pass, `check_rows`,
keeps a checksum of each row (4 bytes). Later passes compare the checksums, so no changed row reaches a model.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stoker.datafile import Row, read_rows
from stoker.decoding import read_text
from stoker.errors import ConfigError
from stoker.toml_files import parse_toml, refuse_unknown

_SHOWN_PLACES = 5


class DataItem(msgspec.Struct, frozen=True):
    """One row of a data file. `id`: name of the row; `place`: position of the row in the file, such as `line 7`."""

    id: str
    fields: dict[str, Any]
    place: str = ""


class DataRows(msgspec.Struct, frozen=True):
    """The rows of a data file. Each iteration reads the file again, up to the last checked row.

    `column`: the column with row names (empty: row numbers serve as names); `digest`: digest of all rows, 16 hex
    digits; `notes`: warnings about the rows, which do not stop the run.
    """

    path: Path
    column: str
    digest: str
    checksums: array[int]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.checksums)

    def __iter__(self) -> Iterator[DataItem]:
        """Yield the rows in file order. Raises ConfigError if a row has changed since the check."""
        left = iter(self.checksums)
        for row in itertools.islice(read_rows(self.path), len(self.checksums)):
            item = _make_data_item(row, path=self.path, column=self.column)
            if zlib.crc32(_encode_item_for_digest(item)) != next(left):
                raise ConfigError(
                    f"{self.path}: {row.place}: has changed since the file was checked; run again, and do not"
                    " change the file meanwhile",
                    file=str(self.path),
                    line=row.number,
                )
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
    """Check the first `limit` rows of a file (0: all).

    Args:
        wanted: required columns, by the name of the part that requires them (`the prompt one`).
        texts: require text or empty cells in these columns.
        empty_means: the effect of an empty cell, for a note.

    Raises:
        ConfigError: for a file without rows, a row without a unique name, and a row without a required column.
    """
    digest, checksums = hashlib.sha256(b"["), array("I")
    names: dict[str, int] = {}
    empty = {name: _EmptyCells() for columns in wanted.values() for name in columns}
    for row in itertools.islice(read_rows(path), limit or None):
        item = _make_data_item(row, path=path, column=column)
        if column:
            _refuse_repeated_id(names, item, row, path=path, column=column)
        _check_columns(row, wanted, empty, path=path, texts=texts)
        text = _encode_item_for_digest(item)
        digest.update(b", " + text if checksums else text)
        checksums.append(zlib.crc32(text))
    if not checksums:
        raise ConfigError(f"{path}: has no rows", file=str(path))
    digest.update(b"]")
    notes = [
        cells.note(name, path=path, rows=len(checksums), means=empty_means)
        for name, cells in empty.items()
        if cells.count
    ]
    return DataRows(
        path=path, column=column, digest=digest.hexdigest()[:16], checksums=checksums, notes=tuple(notes)
    )  # fmt: skip


class _EmptyCells:
    def __init__(self) -> None:
        self.count = 0
        self.places: list[str] = []

    def add(self, place: str) -> None:
        self.count += 1
        if len(self.places) < _SHOWN_PLACES:
            self.places.append(place)

    def note(self, column: str, *, path: Path, rows: int, means: str) -> str:
        places = ", ".join(self.places) + (", …" if self.count > len(self.places) else "")
        found = f"{path}: {column} is empty in {self.count:,} of {rows:,} rows ({places})"
        return f"{found}: {means}" if means else found


def row_error(problem: str, row: Row, *, path: Path, key: str) -> ConfigError:
    return ConfigError(f"{path}: {row.place}: {problem}", file=str(path), line=row.number, key=key)


def _make_data_item(row: Row, *, path: Path, column: str) -> DataItem:
    name = row.number if not column else row.fields.get(column)
    if not isinstance(name, str | int) or name == "":
        raise row_error(
            f"{column} must be the row's name, a text or a whole number, and is {name!r:.40}",
            row,
            path=path,
            key=column,
        )
    return DataItem(id=str(name), fields=row.fields, place=row.place)


def _encode_item_for_digest(item: DataItem) -> bytes:
    return repr((item.id, sorted(item.fields.items()))).encode()


def _refuse_repeated_id(names: dict[str, int], item: DataItem, row: Row, *, path: Path, column: str) -> None:
    first = names.setdefault(item.id, row.number)
    if first != row.number:
        where = row.place.replace(str(row.number), str(first))  # `line 7` or `row 7`, depending on the file type
        raise row_error(f"{column} {item.id} was already used in {where}", row, path=path, key=column)


def _check_columns(
    row: Row, wanted: Mapping[str, Sequence[str]], empty: Mapping[str, _EmptyCells], *, path: Path, texts: bool
) -> None:
    for who, columns in wanted.items():
        for name in columns:
            if name not in row.fields:
                has = ", ".join(map(str, row.fields))
                problem = f"{name} is missing, and {who} needs it (the row has {has})"
                raise row_error(problem, row, path=path, key=name)
    for name, cells in empty.items():
        value = row.fields[name]
        if is_empty(value):
            cells.add(row.place)
        elif texts and not isinstance(value, str):
            options = " and ".join(who for who, columns in wanted.items() if name in columns)
            problem = f"{name} must be text, and is {value!r:.40}; name another column with {options}"
            raise row_error(problem, row, path=path, key=name)


def read_toml(path: Path, *, keys: Sequence[str]) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises ConfigError if the file is invalid or has unknown top-level keys."""
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file", file=str(path)) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", file=str(path)) from None
    whole = parse_toml(text, file=str(path))
    refuse_unknown(whole, keys, file=path, where="top")
    return whole


def is_empty(value: Any) -> bool:
    """Return True for null, for NaN (null in some tables) and for blank text."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and math.isnan(value))
