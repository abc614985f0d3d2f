"""From what calls bring back to the final file: Parquet with a row for each text, or a NumPy array in their order.

The log keeps each vector as base64 of its float32 numbers. Both files are written as the data is read once more, a few
thousand rows at a time. A text without a vector has an `error`, and in a NumPy array NaN.
"""

from __future__ import annotations

import base64
import itertools
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from stoker.apps.common.data_rows import DataItem
from stoker.apps.embed.functions import EmbeddedTexts
from stoker.errors import StokerError
from stoker.run_folder import Record

KEY = ("id",)
"""What identifies a result: the row's id."""
_CHUNK_ROWS = 4096
_FLOAT_BYTES = 4
_NPY_ALIGNED = 64


class EmbeddingRecords(Protocol):
    """Records by their keys: a log of them, or a dict."""

    def get(self, key: tuple[Any, ...], /) -> Record | None:
        """The record of this key, if it is there."""


def make_records(ids: tuple[str, ...], found: EmbeddedTexts) -> tuple[list[Record], list[Record]]:
    """The records of one call for the log, and those of the texts that the model could not take.

    Raises StokerError when the call brought back another number of vectors.
    """
    if not len(found.vectors) == len(found.errors) == len(ids):
        raise StokerError(f"{len(ids)} texts went out and {len(found.vectors)} vectors came back")
    made, failed = [], []
    for id, vector, error in zip(ids, found.vectors, found.errors, strict=True):
        if error:
            failed.append({"id": id, "error": error})
        else:
            made.append({"id": id, "vector": base64.b64encode(vector).decode()})
    return made, failed


def write_parquet(path: Path, items: Iterable[DataItem], log: EmbeddingRecords, failed: EmbeddingRecords) -> None:
    """Columns `id`, `embedding` (a list of float32; null without one) and `error` (empty with one)."""
    import pyarrow  # it takes a quarter of a second to import
    import pyarrow.parquet

    schema = pyarrow.schema(
        [("id", pyarrow.string()), ("embedding", pyarrow.list_(pyarrow.float32())), ("error", pyarrow.string())]
    )
    left = _pairs(items, log, failed)
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as file:
        while chunk := list(itertools.islice(left, _CHUNK_ROWS)):
            ids, vectors, errors = zip(*chunk, strict=True)
            offsets = [0, *itertools.accumulate(len(vector) // _FLOAT_BYTES for vector in vectors)]
            numbers = pyarrow.Array.from_buffers(
                pyarrow.float32(), offsets[-1], [None, pyarrow.py_buffer(b"".join(vectors))]
            )
            starts = [at if vector else None for at, vector in zip(offsets, vectors, strict=False)]
            lists = pyarrow.ListArray.from_arrays(pyarrow.array([*starts, offsets[-1]], pyarrow.int32()), numbers)
            columns = [pyarrow.array(ids, pyarrow.string()), lists, pyarrow.array(errors, pyarrow.string())]
            file.write_table(pyarrow.Table.from_arrays(columns, schema=schema))


def write_npy(
    path: Path, items: Iterable[DataItem], log: EmbeddingRecords, failed: EmbeddingRecords, *, rows: int
) -> None:
    """An array `[rows, width]` of float32 in NumPy's format (version 1.0), in the order of the data."""
    pairs = _pairs(items, log, failed)
    before: list[tuple[str, bytes, str]] = []
    for pair in pairs:  # the width is that of the first vector
        before.append(pair)
        if pair[1]:
            break
    width = len(before[-1][1]) // _FLOAT_BYTES if before else 0
    missing = struct.pack("<f", float("nan")) * width
    with path.open("wb") as file:
        file.write(_npy_header(rows, width))
        for _, vector, _ in itertools.chain(before, pairs):
            file.write(vector or missing)


def first_error(items: Iterable[DataItem], failed: EmbeddingRecords, *, file: Path) -> str:
    """The first row that failed, with its place and reason; empty if none did."""
    for item in items:
        if (record := failed.get((item.id,))) is not None:
            return f"{file}: {item.place}: row {item.id}: {record['error']}"
    return ""


def _pairs(
    items: Iterable[DataItem], log: EmbeddingRecords, failed: EmbeddingRecords
) -> Iterator[tuple[str, bytes, str]]:
    """The id, the vector's bytes and the error of each row. Raises StokerError for one without a result."""
    for item in items:
        if (record := log.get((item.id,))) is not None:
            yield item.id, base64.b64decode(record["vector"]), ""
        elif (record := failed.get((item.id,))) is not None:
            yield item.id, b"", record["error"]
        else:
            raise StokerError(f"there is no result for row {item.id}; run again")


def _npy_header(rows: int, width: int) -> bytes:
    """As https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html says."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {width}), }}"
    fixed = len(b"\x93NUMPY\x01\x00") + 2
    padded = text + " " * (-(fixed + len(text) + 1) % _NPY_ALIGNED) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded.encode("latin1")
