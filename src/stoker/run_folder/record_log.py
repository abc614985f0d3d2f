"""An append-only log of results that survives the death of its writer at any moment.

One JSON object a line. A batch of records is written with one `write(2)`, so what a killed process wrote is there;
only the last line can be torn (a full disk, a crashed host), and a torn line is cut off when the log is opened again.
Nothing is fsynced: after a crash of the host some of the last records may be missing, and their inferences run again.

A record whose key is already in the log is not written again, so whatever is interrupted and repeated, each key is
there once. Memory holds where each record lies, not the record: results may be larger than memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from stoker.errors import ConfigError, StokerError
from stoker.whole_files import append_whole

Record = dict[str, Any]


class RecordLog:
    """The log at `path`, made when it is not there. `key` names the fields that identify a record.

    Raises ConfigError naming the line when something other than the last line is damaged.
    """

    def __init__(self, path: Path, *, key: tuple[str, ...]) -> None:
        self.path = path
        self._fields = key
        self._places: dict[tuple[Any, ...], int] = {}
        """The byte at which each record begins."""
        self.dropped_bytes = 0
        self._reader: BinaryIO | None = None
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        at = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    os.ftruncate(self._file, at)
                    self.dropped_bytes = len(line)
                    return
                try:
                    self._places.setdefault(self.key_of(json.loads(line)), at)
                except (ValueError, RecursionError, KeyError, TypeError):
                    raise ConfigError(
                        f"{self.path}: line {number}: is not a result of this run; remove the line, and its result is"
                        " made again",
                        file=str(self.path),
                        line=number,
                    ) from None
                at += len(line)

    def key_of(self, record: Record) -> tuple[Any, ...]:
        """What identifies the record. Raises KeyError when a field of the key is missing."""
        return tuple(record[field] for field in self._fields)

    def append(self, records: Iterable[Record]) -> int:
        """Writes the records whose keys are new, all with one write. How many they were.

        Raises StokerError when the disk refuses, and then none of them is in the log.
        """
        fresh: dict[tuple[Any, ...], bytes] = {}
        for record in records:
            key = self.key_of(record)
            if key not in self._places and key not in fresh:
                text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
                fresh[key] = text.encode() + b"\n"
        before = os.fstat(self._file).st_size
        try:
            append_whole(self._file, b"".join(fresh.values()), at=before)
        except OSError as error:
            raise StokerError(
                f"{self.path}: cannot be written: {error.strerror}; the {len(self._places)} results before are kept",
                file=str(self.path),
            ) from error
        for key, line in fresh.items():
            self._places[key] = before
            before += len(line)
        return len(fresh)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Record]:
        """The records, in the order in which they were written."""
        return (self._record_at(place) for place in list(self._places.values()))

    def get(self, key: tuple[Any, ...]) -> Record | None:
        """The record of this key, if it is there."""
        place = self._places.get(key)
        return None if place is None else self._record_at(place)

    def _record_at(self, place: int) -> Record:
        if self._reader is None:
            self._reader = self.path.open("rb")
        self._reader.seek(place)
        record: Record = json.loads(self._reader.readline())
        return record

    def close(self) -> None:
        """Closes the file; twice is fine."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
