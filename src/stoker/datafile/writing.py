"""Rows written as Parquet or JSONL."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_CHUNK_ROWS = 4096
_ARROW_TYPES: dict[type, str] = {str: "string", int: "int64", float: "double"}


def write_rows(
    rows: Iterable[Mapping[str, Any]], path: Path, *, kind: str, columns: Mapping[str, type] | None = None
) -> None:
    """Write the rows as `parquet` or `jsonl`, whatever `path` is called.

    `columns`: the name and the type (str, int or float) of each column of a Parquet file. With it, at most 4,096 rows
    are held at a time. Without it all rows are: the columns are those of the first row, their types fit all values.
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
            del chunk  # before the next one is made
