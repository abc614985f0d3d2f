"""Tables and data files as items of `stoker.map`: each gives its rows, a dict by column name.

Python's own iteration over a table gives column names (pandas), columns (polars, Arrow) or batches (Arrow's readers),
which no user of a map means. Rows are made a chunk at a time, so a table of millions of rows is not held twice, and a
file's are read as calls are sent. None of the libraries is imported here: a table can only come from a program that has
imported its library.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from stoker.datafile import read_rows
from stoker.errors import ConfigError

CHUNK_ROWS = 1024
_FILES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".arrow", ".feather", ".jsonl.gz", ".csv.gz")


class Rows:
    """The rows of a table, in order. `len` is their number."""

    def __init__(self, chunks: Iterator[list[dict[str, Any]]], count: int) -> None:
        self._chunks = chunks
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for chunk in self._chunks:
            yield from chunk


def rows_of(items: Any) -> Iterable[dict[str, Any]] | None:
    """The rows of a data frame (pandas, polars), of Arrow's tables, batches, readers and data sets, or of the data file
    that a Path names; None for anything else. Only some know their number (`Rows`).

    Raises ConfigError for a polars LazyFrame, which has no rows yet, for a table with two columns of one name, for
    several splits at once, for a file that cannot be read, and for a file's name as a text.
    """
    if isinstance(items, Path):
        return (row.fields for row in read_rows(items))
    if isinstance(items, str) and items.endswith(_FILES):
        raise ConfigError(f"stoker.map: a text is mapped letter by letter; for the file's rows write Path({items!r})")
    if _is_a(items, "pandas", "DataFrame"):
        _check_names(items.columns)
        starts = range(0, len(items), CHUNK_ROWS)
        return Rows((items.iloc[start : start + CHUNK_ROWS].to_dict("records") for start in starts), len(items))
    if _is_a(items, "polars", "LazyFrame"):
        raise ConfigError("stoker.map: a LazyFrame has no rows yet; write stoker.map(function, frame.collect())")
    if _is_a(items, "polars", "DataFrame"):
        return Rows((part.to_dicts() for part in items.iter_slices(CHUNK_ROWS)), items.height)
    if _is_a(items, "datasets", "DatasetDict") or _is_a(items, "datasets", "IterableDatasetDict"):
        raise ConfigError(
            f"stoker.map: a data set of the splits {', '.join(items)} has no rows itself; name one of them"
        )
    return _arrow_rows(items)


def _arrow_rows(items: Any) -> Iterable[dict[str, Any]] | None:
    if _is_a(items, "pyarrow", "Table"):
        _check_names(items.column_names)
        return Rows((part.to_pylist() for part in items.to_batches(max_chunksize=CHUNK_ROWS)), items.num_rows)
    if _is_a(items, "pyarrow", "RecordBatch"):
        _check_names(items.schema.names)
        return Rows(_chunks(items), items.num_rows)
    if _is_a(items, "pyarrow", "RecordBatchReader"):
        _check_names(items.schema.names)
        return (row for batch in items for chunk in _chunks(batch) for row in chunk)
    if _is_a(items, "pyarrow.dataset", "Dataset"):
        _check_names(items.schema.names)
        return (row for batch in items.to_batches(batch_size=CHUNK_ROWS) for row in batch.to_pylist())
    return None


def _chunks(batch: Any) -> Iterator[list[dict[str, Any]]]:
    """The rows of an Arrow RecordBatch, which may be a whole table."""
    return (batch.slice(start, CHUNK_ROWS).to_pylist() for start in range(0, batch.num_rows, CHUNK_ROWS))


def _check_names(names: Iterable[Any]) -> None:
    """Raise ConfigError if a row as a dict would lose a column."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(
            f"stoker.map: the table has two columns {twice[0]!r}, and a row, as a dict, has room for one; rename one"
        )


def _is_a(value: Any, library: str, kind: str) -> bool:
    """True for an instance of a library's class; the library is not imported for it."""
    module = sys.modules.get(library)
    wanted = getattr(module, kind, None)
    return isinstance(wanted, type) and isinstance(value, wanted)
