"""Tables as items of `stoker.map`: a data frame or an Arrow table gives its rows, each a dict by column name.

Python's own iteration over these gives column names (pandas) or columns (polars, Arrow), which no user of a map means.
Rows are made a chunk at a time, so a table of millions of rows is not held twice. None of the three libraries is
imported here: a table can only come from a program that has imported its library.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from stoker.errors import ConfigError

CHUNK_ROWS = 1024


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


def rows_of(items: Any) -> Rows | None:
    """The rows of a pandas or polars DataFrame, or of an Arrow Table or RecordBatch; None for anything else.

    Raises ConfigError for a polars LazyFrame, which has no rows yet, and for a table with two columns of one name.
    """
    if _is_a(items, "pandas", "DataFrame"):
        _check_names(items.columns)
        starts = range(0, len(items), CHUNK_ROWS)
        return Rows((items.iloc[start : start + CHUNK_ROWS].to_dict("records") for start in starts), len(items))
    if _is_a(items, "polars", "LazyFrame"):
        raise ConfigError("stoker.map: a LazyFrame has no rows yet; write stoker.map(function, frame.collect())")
    if _is_a(items, "polars", "DataFrame"):
        return Rows((part.to_dicts() for part in items.iter_slices(CHUNK_ROWS)), items.height)
    if _is_a(items, "pyarrow", "Table"):
        _check_names(items.column_names)
        return Rows((part.to_pylist() for part in items.to_batches(max_chunksize=CHUNK_ROWS)), items.num_rows)
    if _is_a(items, "pyarrow", "RecordBatch"):
        _check_names(items.schema.names)
        starts = range(0, items.num_rows, CHUNK_ROWS)
        return Rows((items.slice(start, CHUNK_ROWS).to_pylist() for start in starts), items.num_rows)
    return None


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
