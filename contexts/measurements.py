"""A file of measurements: SQLite, shared by everything of one user, and never in the way.

Measurements are a help, never a need: a file that is damaged, or of another shape, is moved aside and said; where none
can be made nothing is remembered; a disk that is full costs a warning. Several processes and threads may use one file.
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
        """The rows that a query finds; none where nothing is remembered."""
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
        """The file went bad while it was open. The lock is held."""
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
