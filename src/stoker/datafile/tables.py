"""Rows of tables: Parquet and Arrow files, and the folders that Hugging Face's `save_to_disk` writes.

Record batches are turned into rows a piece at a time: whoever wrote the file chose how large a batch is, and it may be
the whole table. Arrow files are mapped into memory, so what is not read takes none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from stoker.datafile.row import Row, check_columns
from stoker.decoding import UNREADABLE
from stoker.errors import ConfigError

_CHUNK_ROWS = 4096
_FILE_MAGIC, _OLD_FEATHER_MAGIC = b"ARROW1", b"FEA1"


def read_parquet(path: Path) -> Iterator[Row]:
    """The rows of a Parquet file. Raises ConfigError naming the row after which it cannot be read."""
    return _numbered(path, _parquet_fields(path), kind="Parquet")


def read_arrow(path: Path) -> Iterator[Row]:
    """The rows of an Arrow file or stream; Feather files are Arrow files. Raises ConfigError as `read_parquet`."""
    return _numbered(path, _arrow_fields(path), kind="Arrow")


def read_saved_data_set(folder: Path) -> Iterator[Row]:
    """The rows of a folder that `Dataset.save_to_disk` wrote. Raises ConfigError for any other folder, and for one of
    several splits: each is a folder in it."""
    if (folder / "dataset_dict.json").is_file():
        splits = _listed(folder / "dataset_dict.json", "splits")
        if len(splits) != 1:
            near = f"; name one, as {folder / splits[0]}" if splits else ""
            raise ConfigError(f"{folder}: holds the splits {', '.join(splits) or 'of none'}{near}", file=str(folder))
        folder = folder / splits[0]
    state = folder / "state.json"
    if not state.is_file():
        raise ConfigError(
            f"{folder}: is a folder, and none that a data set's save_to_disk wrote; name a file", file=str(folder)
        )
    files = [folder / name for name in _listed(state, "_data_files", "filename")]
    if lost := next((file for file in files if not file.is_file()), None):
        raise ConfigError(f"{lost}: no such file, and {state} names it; copy the whole folder", file=str(lost))
    return _in_turn(files)


def _in_turn(files: list[Path]) -> Iterator[Row]:
    """The rows of all files, numbered throughout."""
    number = 0
    for file in files:
        for row in read_arrow(file):
            number += 1
            yield Row(number=number, place=f"row {number}", fields=row.fields)


def _listed(file: Path, *keys: str) -> list[str]:
    """The texts of a list in a JSON file; with two keys, what each of its objects has under the second."""
    try:
        values = json.loads(file.read_bytes())[keys[0]]
        texts = [value[keys[1]] if len(keys) > 1 else value for value in values]
        if not all(isinstance(text, str) and text == Path(text).name for text in texts):
            raise TypeError
    except (OSError, KeyError, TypeError, *UNREADABLE):
        raise ConfigError(f"{file}: is no list of {keys[0]} as save_to_disk writes it", file=str(file)) from None
    return texts


def _numbered(path: Path, fields: Iterator[dict[str, Any]], *, kind: str) -> Iterator[Row]:
    import pyarrow

    number = 0
    try:
        for number, each in enumerate(fields, start=1):
            yield Row(number=number, place=f"row {number}", fields=each)
    except (pyarrow.ArrowException, OSError, *UNREADABLE) as error:
        where = f"after row {number}" if number else "from its beginning"
        why = " ".join(str(error).split())
        raise ConfigError(f"{path}: cannot be read as {kind} {where}: {why}", file=str(path)) from None


def _parquet_fields(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as table:
        check_columns(table.schema_arrow.names, path=path, where="its schema")
        for batch in table.iter_batches(batch_size=_CHUNK_ROWS):
            yield from batch.to_pylist()


def _arrow_fields(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow

    with closing(pyarrow.memory_map(str(path))) as source:
        magic = source.read(len(_FILE_MAGIC))
        source.seek(0)
        if magic.startswith(_OLD_FEATHER_MAGIC):
            raise ConfigError(f"{path}: is of Feather's version 1; write it again as version 2", file=str(path))
        if magic == _FILE_MAGIC:
            file = pyarrow.ipc.open_file(source)
            schema = file.schema
            batches = (file.get_batch(number) for number in range(file.num_record_batches))
        else:
            batches = pyarrow.ipc.open_stream(source)
            schema = batches.schema
        check_columns(schema.names, path=path, where="its schema")
        for batch in batches:
            for start in range(0, batch.num_rows, _CHUNK_ROWS):
                yield from batch.slice(start, _CHUNK_ROWS).to_pylist()
