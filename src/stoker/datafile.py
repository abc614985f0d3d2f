"""Read rows of data files and saved data sets, and write rows.

The file suffix decides the format: `.csv`, `.tsv`, `.jsonl`, `.ndjson` (these also with `.gz` or `.xz`), `.parquet`,
`.arrow`, `.feather`, `.ipc`. A folder of Hugging Face's `save_to_disk` is read without `datasets`. Rows are read
lazily, so a file may be larger than memory.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from stoker.decoding import (
    HEAD_BYTES,
    UNREADABLE,
    describe_invalid_utf8,
    describe_non_text_format,
    invalid_byte_message,
)
from stoker.errors import ConfigError

__all__ = ["Line", "Row", "digest_file", "read_lines", "read_rows", "text_field", "write_rows"]


class Row(msgspec.Struct, frozen=True):
    """A row of a file. `number`: line (CSV, JSONL) or index, from 1. `place`: the number in words (`line 3`)."""

    number: int
    place: str
    fields: dict[str, Any]


class Line(msgspec.Struct, frozen=True):
    """A line of a file. `number`: line number, from 1. `data`: bytes without the line end."""

    number: int
    data: bytes


def refuse_duplicate_columns(names: Sequence[str], *, path: Path, where: str) -> None:
    if twice := next((name for name in names if name and names.count(name) > 1), ""):
        raise ConfigError.in_file(path, f"{where}: two columns are called {twice}; give each its own name", key=twice)


_TEXT_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson")
_ARROW_SUFFIXES = (".arrow", ".feather", ".ipc")
_TABLE_SUFFIXES = (".parquet", *_ARROW_SUFFIXES)


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a data file or saved data set, without blank lines.

    Args:
        path: The file or folder.

    Raises:
        ConfigError: A row is unreadable, or the file is missing, damaged or of an unknown format.
    """
    if path.is_dir():
        return _read_saved_data_set(path)
    _check_file_exists(path)
    kind = _file_format(path)
    if kind in _TABLE_SUFFIXES:
        return _read_table_rows([path], kind=kind)
    return _read_text_rows(path, kind=kind)


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the non-blank lines of a text file.

    Args:
        path: The file; `.gz` and `.xz` are decompressed.

    Raises:
        ConfigError: The file is missing or damaged.
    """
    if path.is_dir():
        raise ConfigError.in_file(path, "is a folder; give the path of a file")
    _check_file_exists(path)
    return _read_lines(path)


def digest_file(path: Path) -> str:
    """Return the first 16 hex digits of the SHA-256 of a file.

    Args:
        path: The file.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def text_field(row: Row, field: str, *, file: Path) -> str:
    """Return a field that must be non-blank text.

    Args:
        row: A row of the file.
        field: Name of the field.
        file: The file, for the error.

    Raises:
        ConfigError: The field is missing, blank or not text. The error has file, line and field.
    """
    value = row.fields.get(field)
    if isinstance(value, str) and value.strip():
        return value
    problem = f"{field} must be text, and is {'empty' if value is None or isinstance(value, str) else f'{value!r:.40}'}"
    if field not in row.fields:
        problem = f"{field} is missing (the row has {', '.join(map(str, row.fields)) or 'nothing'})"
    raise ConfigError(f"{file}: {row.place}: {problem}", file=str(file), line=row.number, key=field)


def _check_file_exists(path: Path) -> None:
    if not path.exists():
        raise ConfigError.in_file(path, "no such file")


def _file_format(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = bool(suffixes) and suffixes[-1] in (".gz", ".xz")
    kind = "".join(suffixes[-2:-1] if packed else suffixes[-1:])
    if packed and kind in _TABLE_SUFFIXES:
        problem = f"is compressed; decompress it, because only {', '.join(_TEXT_SUFFIXES)} files may be compressed"
        raise ConfigError.in_file(path, problem)
    if kind not in (*_TEXT_SUFFIXES, *_TABLE_SUFFIXES):
        known = ", ".join((*_TEXT_SUFFIXES, *_TABLE_SUFFIXES))
        raise ConfigError.in_file(path, f"its suffix names no known format; give the file one of the suffixes {known}")
    return kind


_DELIMITERS = {".csv": ",", ".tsv": "\t"}
# Python's csv module refuses cells of more than 131,072 characters, but a document may be longer.
_LONGEST_CELL = 2**31 - 1
_SURROGATE = re.compile("[\\ud800-\\udfff]")
_DAMAGED = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""Exceptions from truncated or damaged files."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def _read_text_rows(path: Path, *, kind: str) -> Iterator[Row]:
    rows = _read_csv_rows(path, delimiter=_DELIMITERS[kind]) if kind in _DELIMITERS else _read_jsonl_rows(path)
    last = ""
    try:
        for row in rows:
            last = row.place
            yield row
    except UnicodeDecodeError:
        raise _invalid_utf8_error(path) from None
    except _DAMAGED as error:
        raise _damaged_file_error(path, error, last=last) from None


def _read_lines(path: Path) -> Iterator[Line]:
    last = ""
    try:
        with _open_bytes(path) as file:
            for number, data in enumerate(file, start=1):
                text = data.removeprefix(_BYTE_ORDER_MARK) if number == 1 else data
                if text.strip():
                    last = f"line {number}"
                    yield Line(number=number, data=text.rstrip(b"\r\n"))
    except _DAMAGED as error:
        raise _damaged_file_error(path, error, last=last) from None


def _open_bytes(path: Path) -> IO[bytes]:
    ending = path.suffix.lower()
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    file = openers.get(ending, open)(path, "rb")
    try:
        if what := describe_non_text_format(file.peek(HEAD_BYTES)[:HEAD_BYTES], suggest_suffix=ending not in openers):
            raise ConfigError.in_file(path, what)
    except BaseException as error:
        file.close()
        if isinstance(error, gzip.BadGzipFile | lzma.LZMAError) and _is_plain_text(path):
            problem = f"its name ends in {path.suffix}, but it is plain text; rename it to {path.stem}"
            raise ConfigError.in_file(path, problem) from None
        raise
    return cast("IO[bytes]", file)


def _is_plain_text(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.readline(HEAD_BYTES)
    return bool(head.strip()) and not describe_non_text_format(head) and not describe_invalid_utf8(head)


def _open_text(path: Path, *, errors: str = "strict") -> IO[str]:
    return io.TextIOWrapper(_open_bytes(path), encoding="utf-8-sig", errors=errors, newline="")


def _read_jsonl_rows(path: Path) -> Iterator[Row]:
    with _open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
            except UNREADABLE as error:
                raise ConfigError.in_file(path, f"is not JSON: {error}", line=number) from None
            if not isinstance(fields, dict):
                raise ConfigError.in_file(path, f"is a {type(fields).__name__}, but must be a JSON object", line=number)
            if ("\\ud" in line or "\\uD" in line) and (
                half := _SURROGATE.search(json.dumps(fields, ensure_ascii=False))
            ):
                what = f"contains \\u{ord(half[0]):04x}, half of a character; write the whole character or remove it"
                raise ConfigError.in_file(path, what, line=number)
            yield Row(number=number, place=f"line {number}", fields=fields)


def _read_csv_rows(path: Path, *, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
    with _open_text(path) as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        header: list[str] = []
        try:
            for cells in reader:
                number = reader.line_num
                if not cells:
                    continue
                if not header:
                    header = [cell.strip() for cell in cells]
                    refuse_duplicate_columns(header, path=path, where=f"line {number}")
                    continue
                if len(cells) != len(header):
                    what = f"has {len(cells)} cells, the header has {len(header)} (quote a cell that holds a comma)"
                    raise ConfigError.in_file(path, what, line=number)
                yield Row(number=number, place=f"line {number}", fields=dict(zip(header, cells, strict=True)))
        except csv.Error as error:
            raise ConfigError.in_file(path, str(error), line=reader.line_num) from None


def _damaged_file_error(path: Path, error: Exception, *, last: str) -> ConfigError:
    if isinstance(error, OSError) and error.errno is not None:
        return ConfigError.in_file(path, f"cannot be read: {error.strerror}")
    what = "is truncated" if isinstance(error, EOFError) else "is damaged"
    where = f"after {last}" if last else "before its first row"
    why = " ".join(str(error).split()).rstrip(".")
    return ConfigError.in_file(path, f"{what} {where} ({why}); copy or create the file again")


def _invalid_utf8_error(path: Path) -> ConfigError:
    number = 0
    try:
        with _open_text(path, errors="surrogateescape") as file:
            for number, line in enumerate(file, start=1):
                try:
                    line.encode("utf-8", "surrogateescape").decode("utf-8")
                except UnicodeDecodeError as error:
                    what = invalid_byte_message(error.start + 1, error.object[error.start])
                    return ConfigError.in_file(path, what, line=number)
    except _DAMAGED as error:  # the rest of the file is unreadable
        return _damaged_file_error(path, error, last=f"line {number}" if number else "")
    return ConfigError.in_file(path, "is not UTF-8 text")


_FILE_MAGIC, _OLD_FEATHER_MAGIC = b"ARROW1", b"FEA1"


def _read_saved_data_set(folder: Path) -> Iterator[Row]:
    """Yield the rows of a folder that `Dataset.save_to_disk` wrote. The folder must have one split."""
    if (folder / "dataset_dict.json").is_file():
        splits = _read_name_list(folder / "dataset_dict.json", "splits")
        if len(splits) != 1:
            have = f"has the splits {', '.join(splits)}; give the path of one split" if splits else "lists no split"
            near = f", such as {folder / splits[0]}" if splits else ""
            raise ConfigError.in_file(folder, f"{have}{near}")
        folder = folder / splits[0]
    state = folder / "state.json"
    if not state.is_file():
        what = "has no state.json, which Dataset.save_to_disk writes; give the path of a file"
        raise ConfigError.in_file(folder, what)
    files = [folder / name for name in _read_name_list(state, "_data_files", "filename")]
    if lost := next((file for file in files if not file.is_file()), None):
        raise ConfigError.in_file(lost, f"no such file, although {state} lists it; copy the whole folder")
    return _read_table_rows(files, kind=".arrow")


def _read_name_list(file: Path, *keys: str) -> list[str]:
    try:
        values = json.loads(file.read_bytes())[keys[0]]
        texts = [value[keys[1]] if len(keys) > 1 else value for value in values]
        if not all(isinstance(text, str) and text == Path(text).name for text in texts):
            raise TypeError
    except (OSError, KeyError, TypeError, *UNREADABLE):
        raise ConfigError.in_file(file, f"is not a list of {keys[0]} as save_to_disk writes it") from None
    return texts


def _read_table_rows(files: list[Path], *, kind: str) -> Iterator[Row]:
    import pyarrow

    read, name = (_iter_parquet_row_dicts, "Parquet") if kind == ".parquet" else (_iter_arrow_row_dicts, "Arrow")
    number = 0
    for path in files:
        first = number
        try:
            for fields in read(path):
                number += 1
                yield Row(number=number, place=f"row {number}", fields=fields)
        except (pyarrow.ArrowException, OSError, *UNREADABLE) as error:
            where = f"after row {number - first}" if number > first else "from its beginning"
            why = " ".join(str(error).split())
            raise ConfigError.in_file(path, f"cannot be read as {name} {where}: {why}") from None


def _iter_parquet_row_dicts(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as table:
        refuse_duplicate_columns(table.schema_arrow.names, path=path, where="its schema")
        for batch in table.iter_batches(batch_size=_CHUNK_ROWS):
            yield from batch.to_pylist()


def _iter_arrow_row_dicts(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow

    with closing(pyarrow.memory_map(str(path))) as source:
        magic = source.read(len(_FILE_MAGIC))
        source.seek(0)
        if magic.startswith(_OLD_FEATHER_MAGIC):
            raise ConfigError.in_file(path, "is a file of Feather version 1; convert it to version 2")
        if magic == _FILE_MAGIC:
            file = pyarrow.ipc.open_file(source)
            schema = file.schema
            batches = (file.get_batch(number) for number in range(file.num_record_batches))
        else:
            batches = pyarrow.ipc.open_stream(source)
            schema = batches.schema
        refuse_duplicate_columns(schema.names, path=path, where="its schema")
        for batch in batches:
            for start in range(0, batch.num_rows, _CHUNK_ROWS):
                yield from batch.slice(start, _CHUNK_ROWS).to_pylist()


_CHUNK_ROWS = 4096
_ARROW_TYPES: dict[type, str] = {str: "string", int: "int64", float: "double"}


def write_rows(
    rows: Iterable[Mapping[str, Any]], path: Path, *, kind: str, columns: Mapping[str, type] | None = None
) -> None:
    """Write rows into a file.

    Args:
        rows: Rows, each with fields by name.
        path: The file, with any suffix.
        kind: `parquet` or `jsonl`.
        columns: Name and type (str, int or float) of each Parquet column. If None, the first row decides the columns,
            and memory holds all rows instead of 4,096.
    """
    if kind == "jsonl":
        with path.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        return
    import pyarrow
    import pyarrow.parquet

    if columns is None:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, compression="zstd")
        return
    schema = pyarrow.schema([(name, pyarrow.type_for_alias(_ARROW_TYPES[of])) for name, of in columns.items()])
    left = iter(rows)
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as file:
        while chunk := list(itertools.islice(left, _CHUNK_ROWS)):
            file.write_table(pyarrow.Table.from_pylist(chunk, schema=schema))
            del chunk  # free memory before the next chunk
