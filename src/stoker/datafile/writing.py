"""Rows written as Parquet or JSONL."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_rows(rows: Iterable[Mapping[str, Any]], path: Path, *, kind: str) -> None:
    """Writes the rows as `parquet` or `jsonl`, whatever `path` is called. The columns are those of the first row."""
    if kind == "jsonl":
        with path.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        return
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, compression="zstd")
