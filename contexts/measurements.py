"""A file of measurements in SQLite, and the history of sources of pilots that is kept in one.

Measurements are never needed: a damaged file is moved aside with a warning, and where no file can be made nothing is
remembered. Several processes and threads may use one file.

`stoker plan` forecasts with the history: how long blocks waited, how long pilots stayed and how they ended, and how
many ran over time. Only the last rows of each source are kept.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

# ---- measurements


log = logging.getLogger(__name__)


class Measurements:
    """One file. `schema` makes its tables where they are not, `shape` is a query that fails where they are others. No
    method raises for want of a disk."""

    def __init__(self, path: str | os.PathLike[str], *, schema: str, shape: str) -> None:
        self.path = Path(path)
        self._schema = schema
        self._shape = shape
        self._lock = threading.Lock()
        self._db = self._open()

    def write(self, *changes: tuple[str, Iterable[Sequence[Any]]]) -> None:
        """Carry out statements, each for all of its rows: together or not at all."""
        with self._lock:
            if self._db is None:
                return
            try:
                with self._db:
                    for statement, rows in changes:
                        self._db.executemany(statement, rows)
            except sqlite3.Error as error:
                self._trouble(error)

    def read(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query; empty without a file."""
        with self._lock:
            if self._db is None:
                return []
            try:
                return self._db.execute(query, values).fetchall()
            except sqlite3.Error as error:
                self._trouble(error)
                return []

    def close(self) -> None:
        """Close the file; later calls do nothing."""
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    def _open(self) -> sqlite3.Connection | None:
        for _ in range(2):
            try:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                os.close(os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))  # for nobody else to read
                db = sqlite3.connect(self.path, timeout=10, check_same_thread=False)
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = NORMAL")
                db.executescript(self._schema)
                db.execute(self._shape)
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError) and "no such column" not in str(error):
                    log.warning("%s can't be opened (%s); measurements are not remembered", self.path, error)
                    return None
                self._move_aside(error)
            except OSError as error:
                log.warning("%s can't be made (%s); measurements are not remembered", self.path, error)
                return None
            else:
                return db
        return None

    def _trouble(self, error: sqlite3.Error) -> None:
        """Handle a file that failed while it was open. The lock is held."""
        damaged = isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)
        if self._db is not None and damaged:
            with closing(self._db):
                self._db = None
            self._move_aside(error)
            self._db = self._open()
        else:
            log.warning("a measurement was not kept in %s: %s", self.path, error)

    def _move_aside(self, error: sqlite3.Error) -> None:
        aside = self.path.with_name(f"{self.path.name}.damaged-{int(time.time())}")
        for suffix in ("", "-wal", "-shm"):
            part = self.path.with_name(self.path.name + suffix)
            try:
                part.replace(aside.with_name(aside.name + suffix))
            except FileNotFoundError:
                continue
        log.warning("%s was damaged (%s) and is now %s; it is measured anew", self.path, error, aside.name)


# ---- availability


WAITS, STAYS, COUNTS = 2_000, 5_000, 20_000
"""So many rows of each are kept a source."""
_TRIM_EVERY = 100

_SCHEMA = """
CREATE TABLE IF NOT EXISTS waits (
    id INTEGER PRIMARY KEY, source TEXT NOT NULL, at REAL NOT NULL, wait_s REAL NOT NULL, boot_s REAL NOT NULL,
    kind TEXT NOT NULL, devices INTEGER NOT NULL, memory_bytes INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS stays (
    id INTEGER PRIMARY KEY, source TEXT NOT NULL, at REAL NOT NULL, stay_s REAL NOT NULL, ended TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS counts (
    id INTEGER PRIMARY KEY, source TEXT NOT NULL, at REAL NOT NULL, session TEXT NOT NULL, pilots INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS waits_of ON waits (source, id);
CREATE INDEX IF NOT EXISTS stays_of ON stays (source, id);
CREATE INDEX IF NOT EXISTS counts_of ON counts (source, id);
"""
_SHAPE = """
SELECT wait_s, boot_s, kind, devices, memory_bytes, waits.at, stay_s, ended, stays.at, session, pilots, counts.at
FROM waits, stays, counts LIMIT 1
"""
_TRIM = """
DELETE FROM {table} WHERE source = ? AND id <= (
    SELECT id FROM {table} WHERE source = ? ORDER BY id DESC LIMIT 1 OFFSET {rows}
)
"""


class DeviceSet(msgspec.Struct, frozen=True):
    """The devices of a pilot: their kind, their number, and the memory of each in bytes."""

    kind: str
    count: int
    memory_bytes: int


class Wait(msgspec.Struct, frozen=True):
    """A block that came: seconds in the queue, and from the start of its job until its first pilot connected."""

    wait_s: float
    boot_s: float
    devices: DeviceSet


class Stay(msgspec.Struct, frozen=True):
    """The seconds of a pilot's stay. `ended`: the value of a `stoker.protocol.blocks.PilotEnd`; `why`: the value of the
    `LossReason`, empty if the pilot was not lost, or was recorded before reasons existed."""

    stay_s: float
    ended: str
    why: str = ""


def _stay(stay_s: float, ended: str) -> Stay:
    """Return a stay from `ended` as `record_stay` wrote it: `lost: preempted`."""
    how, _, why = ended.partition(": ")
    return Stay(stay_s, how, why)


class PilotCount(msgspec.Struct, frozen=True):
    """From `at` (seconds since the epoch) on, a session had this number of pilots."""

    at: float
    session: str
    pilots: int


class Availability(msgspec.Struct, frozen=True):
    """The history of a source, oldest first."""

    source: str
    waits: tuple[Wait, ...] = ()
    stays: tuple[Stay, ...] = ()
    counts: tuple[PilotCount, ...] = ()

    @property
    def most(self) -> int:
        """The most pilots that one session had at once."""
        return max((each.pilots for each in self.counts), default=0)


class AvailabilityStore:
    """The history of sources, in one file. Safe with several processes; no method raises because of a disk."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = Measurements(path, schema=_SCHEMA, shape=_SHAPE)
        self._written = dict.fromkeys(("waits", "stays", "counts"), 0)

    def record_wait(self, source: str, *, wait_s: float, boot_s: float, devices: DeviceSet) -> None:
        """A block's first pilot has come."""
        of = msgspec.structs.astuple(devices)
        self._add("waits", WAITS, source, max(0.0, wait_s), max(0.0, boot_s), *of)

    def record_stay(self, source: str, *, stay_s: float, ended: str, why: str = "") -> None:
        """A pilot is here no longer; `why` it was lost, if it was."""
        self._add("stays", STAYS, source, max(0.0, stay_s), f"{ended}: {why}" if why else ended)

    def record_count(self, source: str, *, session: str, pilots: int) -> None:
        """Record that a session has this number of the source's pilots now."""
        self._add("counts", COUNTS, source, session, pilots)

    def of(self, source: str) -> Availability:
        """Return the history of a source."""

        def rows(table: str, columns: str) -> list[tuple[Any, ...]]:
            return self._file.read(f"SELECT {columns} FROM {table} WHERE source = ? ORDER BY id", (source,))

        return Availability(
            source,
            tuple(
                Wait(wait_s, boot_s, DeviceSet(*of))
                for wait_s, boot_s, *of in rows("waits", "wait_s, boot_s, kind, devices, memory_bytes")
            ),
            tuple(_stay(*row) for row in rows("stays", "stay_s, ended")),
            tuple(PilotCount(*row) for row in rows("counts", "at, session, pilots")),
        )

    def close(self) -> None:
        """Close the file; later calls do nothing."""
        self._file.close()

    def _add(self, table: str, most: int, source: str, *values: object) -> None:
        row = (source, time.time(), *values)
        columns = {
            "waits": "source, at, wait_s, boot_s, kind, devices, memory_bytes", "stays": "source, at, stay_s, ended",
            "counts": "source, at, session, pilots",
        }[table]  # fmt: skip
        marks = ", ".join("?" * len(row))
        changes = [(f"INSERT INTO {table} ({columns}) VALUES ({marks})", [row])]
        self._written[table] += 1
        if self._written[table] % _TRIM_EVERY == 1:
            changes.append((_TRIM.format(table=table, rows=most), [(source, source)]))
        self._file.write(*changes)
