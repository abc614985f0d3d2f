"""A run's event log as a Parquet file: the columns of `stoker.manager.sim.log.EventLog`, and facts on the run.

The same log gives the same bytes, on any machine that has the same pyarrow: no time, name or path is written, the
encodings are said here and not chosen by what the data looks like, and the facts are sorted. `what` is a text
(`call_began`), the other columns are numbers, -1 where an event does not concern any. Any reader of Parquet opens it:

    polars.read_parquet(path).filter(pl.col("what") == "call_ended")["value"].sum()
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from stoker.errors import ConfigError
from stoker.manager.sim.log import EventLog, Happened
from stoker.whole_files import draft_of

Facts = Mapping[str, str | int | float | bool]

_FACTS = b"stoker"
_ROWS_A_GROUP = 1 << 20
_INTEGERS = {"call": "int64", "library": "int32", "pilot": "int32", "block": "int32"}
_ENCODINGS = {
    "at_s": "BYTE_STREAM_SPLIT", "call": "DELTA_BINARY_PACKED", "library": "DELTA_BINARY_PACKED",
    "pilot": "DELTA_BINARY_PACKED", "block": "DELTA_BINARY_PACKED", "value": "BYTE_STREAM_SPLIT",
}  # fmt: skip
_NAMES = tuple(happened.name.lower() for happened in Happened)
_NUMBERS = {happened.name.lower(): int(happened) for happened in Happened}


def write_log(path: Path, log: EventLog, meta: Facts) -> None:
    """Write a log, whole or not at all. `meta`: what the run was, such as its scenario, policy and seed."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = [_numbers(log.at_s, "float64"), _texts(log.what)]
    columns += [_numbers(getattr(log, name), type) for name, type in _INTEGERS.items()]
    columns.append(_numbers(log.value, "float64"))
    table = pa.table(columns, names=["at_s", "what", *_INTEGERS, "value"])
    facts = msgspec.json.encode(dict(meta), order="deterministic")
    with draft_of(path) as draft:
        pq.write_table(
            table.replace_schema_metadata({_FACTS: facts}), draft, version="2.6", compression="zstd",
            compression_level=3, use_dictionary=["what"], column_encoding=_ENCODINGS, write_statistics=False,
            row_group_size=_ROWS_A_GROUP, data_page_version="1.0",
        )  # fmt: skip


def read_log(path: Path) -> tuple[EventLog, dict[str, Any]]:
    """A log that `write_log` wrote, and its facts. Raises ConfigError for any other file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, read_dictionary=["what"], memory_map=True)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file", file=str(path)) from None
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{path}: not an event log: {error}", file=str(path)) from None
    facts = (table.schema.metadata or {}).get(_FACTS)
    if facts is None or table.column_names != ["at_s", "what", *_INTEGERS, "value"]:
        raise ConfigError(f"{path}: not an event log of a simulation: it has other columns", file=str(path))
    log = EventLog()
    for name in ("at_s", *_INTEGERS, "value"):
        column: array[Any] = getattr(log, name)
        for chunk in table.column(name).cast(_arrow_type(column)).chunks:
            column.frombytes(_bytes(chunk, column.itemsize))
    for chunk in table.column("what").chunks:
        log.what.extend(_happened(chunk, path))
    return log, msgspec.json.decode(facts, type=dict[str, Any])


def _numbers(column: array[Any], type: str) -> Any:
    """A column without a copy, where it has the type already."""
    import pyarrow as pa

    whole = pa.Array.from_buffers(_arrow_type(column), len(column), [None, pa.py_buffer(column)])
    return whole.cast(type)


def _texts(what: array[int]) -> Any:
    import pyarrow as pa

    numbers = pa.Array.from_buffers(pa.int8(), len(what), [None, pa.py_buffer(what)])
    return pa.DictionaryArray.from_arrays(numbers, pa.array(_NAMES))


def _happened(chunk: Any, path: Path) -> list[int]:
    try:
        here = [_NUMBERS[name] for name in chunk.dictionary.to_pylist()]
    except KeyError as error:
        raise ConfigError(f"{path}: {error} is no event that is known: another version wrote this log") from None
    return [here[index] for index in chunk.indices.to_pylist()]


def _arrow_type(column: array[Any]) -> Any:
    import pyarrow as pa

    return pa.float64() if column.typecode == "d" else {4: pa.int32(), 8: pa.int64()}[column.itemsize]


def _bytes(chunk: Any, width: int) -> bytes:
    values = chunk.buffers()[1]
    return bytes(values.slice(chunk.offset * width, len(chunk) * width)) if values is not None else b""
