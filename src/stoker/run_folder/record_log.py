"""An append-only log of results that survives the death of its writer at any moment.

One JSON object a line. A batch of records is written with one `write(2)`, so what a killed process wrote is there;
only the last line can be torn (a full disk, a crashed host), and a torn line is cut off when the log is opened again.
Nothing is fsynced: after a crash of the host some of the last records may be missing, and their inferences run again.

A record whose key is already in the log is not written again, so whatever is interrupted and repeated, each key is
there once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

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
        self._records: dict[tuple[Any, ...], Record] = {}
        self.dropped_bytes = 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._read()
        except BaseException:
            os.close(self._file)
            raise

    def _read(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            try:
                record = json.loads(line)
                self._records.setdefault(self.key_of(record), record)
            except (ValueError, RecursionError, KeyError, TypeError):
                raise ConfigError(
                    f"{self.path}: line {number}: is not a result of this run; remove the line, and its result is"
                    " made again",
                    file=str(self.path),
                    line=number,
                ) from None
        if whole < len(data):
            os.ftruncate(self._file, whole)
            self.dropped_bytes = len(data) - whole

    def key_of(self, record: Record) -> tuple[Any, ...]:
        """What identifies the record. Raises KeyError when a field of the key is missing."""
        return tuple(record[field] for field in self._fields)

    def append(self, records: Iterable[Record]) -> int:
        """Writes the records whose keys are new, all with one write. How many they were.

        Raises StokerError when the disk refuses, and then none of them is in the log.
        """
        fresh: dict[tuple[Any, ...], Record] = {}
        for record in records:
            key = self.key_of(record)
            if key not in self._records:
                fresh.setdefault(key, record)
        data = b"".join(
            json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n" for record in fresh.values()
        )
        before = os.fstat(self._file).st_size
        try:
            append_whole(self._file, data, at=before)
        except OSError as error:
            raise StokerError(
                f"{self.path}: cannot be written: {error.strerror}; the {len(self._records)} results before are kept",
                file=str(self.path),
            ) from error
        self._records.update(fresh)
        return len(fresh)

    def __contains__(self, key: object) -> bool:
        return key in self._records

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        """The records, in the order in which they were written."""
        return iter(self._records.values())

    def get(self, key: tuple[Any, ...]) -> Record | None:
        """The record of this key, if it is there."""
        return self._records.get(key)

    def close(self) -> None:
        """Closes the file; twice is fine."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
