"""The items of a `stoker.map`: futures, batches, tables and data files, slow inputs.

If `SLOW_ITEMS` items each take longer than `SLOW_S` seconds, a thread reads the input, so results do not wait for it.
Quick inputs stay on the consumer's thread, because SQLite cursors work only on one thread.
"""

from __future__ import annotations

import contextvars
import itertools
import math
import queue
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from stoker.datafile import read_rows
from stoker.errors import ConfigError

# ---- futures and batches


class FailedInput(NamedTuple):
    error: Exception


def resolve_futures(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        if not isinstance(item, Future):
            yield item
            continue
        try:
            result = item.result()
        except Exception as error:
            result = FailedInput(error)
        yield result


def split_into_batches(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    return iter(lambda: list(itertools.islice(items, size)), [])


# ---- tables and data files


CHUNK_ROWS = 1024
_DATA_FILE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".arrow", ".feather", ".jsonl.gz", ".csv.gz")


class TableRows:
    def __init__(self, chunks: Iterator[list[dict[str, Any]]], count: int) -> None:
        self._chunks = chunks
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return itertools.chain.from_iterable(self._chunks)


def read_table_rows(items: Any) -> Any:
    """Return the rows of a pandas, polars or Arrow table, or of a data file (a Path); return other values unchanged."""
    if isinstance(items, Path):
        return (row.fields for row in read_rows(items))
    if isinstance(items, str) and items.endswith(_DATA_FILE_SUFFIXES):
        raise ConfigError(
            f"stoker.map: a text would be mapped letter by letter; to map the rows of the file write Path({items!r})"
        )
    if _is_library_instance(items, "pandas", "DataFrame"):
        _refuse_duplicate_columns(items.columns)
        starts = range(0, len(items), CHUNK_ROWS)
        return TableRows((items.iloc[start : start + CHUNK_ROWS].to_dict("records") for start in starts), len(items))
    if _is_library_instance(items, "polars", "LazyFrame"):
        raise ConfigError("stoker.map: a LazyFrame has no rows yet; write stoker.map(function, frame.collect())")
    if _is_library_instance(items, "polars", "DataFrame"):
        return TableRows((part.to_dicts() for part in items.iter_slices(CHUNK_ROWS)), items.height)
    if _is_library_instance(items, "datasets", "DatasetDict", "IterableDatasetDict"):
        raise ConfigError(
            f"stoker.map: a data set of the splits {', '.join(items)} has no rows of its own; pass one of the splits"
        )
    if _is_library_instance(items, "pyarrow", "Table", "RecordBatch"):
        _refuse_duplicate_columns(items.schema.names)
        batches = items.to_batches(max_chunksize=CHUNK_ROWS) if hasattr(items, "to_batches") else [items]
        return TableRows(_row_chunks(batches), items.num_rows)
    if _is_library_instance(items, "pyarrow", "RecordBatchReader"):
        _refuse_duplicate_columns(items.schema.names)
        return itertools.chain.from_iterable(_row_chunks(items))
    if _is_library_instance(items, "pyarrow.dataset", "Dataset"):
        _refuse_duplicate_columns(items.schema.names)
        return itertools.chain.from_iterable(_row_chunks(items.to_batches(batch_size=CHUNK_ROWS)))
    return items


def _row_chunks(batches: Iterable[Any]) -> Iterator[list[dict[str, Any]]]:
    for batch in batches:
        for start in range(0, batch.num_rows, CHUNK_ROWS):
            yield batch.slice(start, CHUNK_ROWS).to_pylist()


def _refuse_duplicate_columns(names: Iterable[Any]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(
            f"stoker.map: the table has two columns {twice[0]!r}, but a row becomes a dict with only one of them;"
            " rename one column"
        )


def _is_library_instance(value: Any, library: str, *kinds: str) -> bool:
    """Return True if the value is an instance of these library classes, without importing the library."""
    wanted = (getattr(sys.modules.get(library), kind, None) for kind in kinds)
    return isinstance(value, tuple(kind for kind in wanted if isinstance(kind, type)))


# ---- slow inputs


SLOW_S = 0.1
SLOW_ITEMS = 2
FORGOTTEN_S = 60.0
_JOIN_S = 0.2


class ItemNotArrived(Exception):
    """The next item has not arrived yet. The consumer wakes when the item arrives."""


class SlowInputDetector:
    def __init__(self) -> None:
        self._count = 0
        self._last_at = -math.inf

    def count_slow_item(self, began: float, ended: float) -> bool:
        self._count = self._count + 1 if began - self._last_at < FORGOTTEN_S else 1
        self._last_at = ended
        return self._count >= SLOW_ITEMS


class ThreadedInputs(Iterator[Any]):
    """The items of a slow input, read on a thread. Instead of blocking, `next` raises ItemNotArrived."""

    def __init__(self, inputs: Iterator[Any], *, wake_queue: queue.SimpleQueue[None]) -> None:
        self._wake_queue = wake_queue
        self._items_ahead: deque[Any] = deque()
        self._end: BaseException | None = None
        self._read_ahead = 0
        self._closed = False
        self._changed = threading.Condition()
        run = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=run, args=(self._read_inputs_ahead, inputs), name="stoker-map-input", daemon=True
        )
        self._thread.start()

    def set_read_ahead(self, count: int) -> None:
        with self._changed:
            self._read_ahead = count
            self._changed.notify()

    @property
    def is_ready(self) -> bool:
        return bool(self._items_ahead) or self._end is not None

    def __next__(self) -> Any:
        if not self._items_ahead:
            if self._end is None:
                raise ItemNotArrived
            if not self._items_ahead:  # check again: an item may have arrived since the first check
                raise self._end
        self._read_ahead -= 1
        return self._items_ahead.popleft()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _read_inputs_ahead(self, inputs: Iterator[Any]) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._items_ahead) < self._read_ahead)
                if self._closed:
                    return
                self._items_ahead.append(next(inputs))
                if len(self._items_ahead) == 1:
                    self._wake_queue.put(None)
        except BaseException as error:  # `next` raises this error instead of returning an item
            if "thread" in str(error):
                error.add_note(
                    "stoker.map: this input is slow, so a separate thread reads it; if the input cannot be used there,"
                    " make a list of it first, or give window=1"
                )
            self._end = error
            self._wake_queue.put(None)
