"""Store job ads of queue and history in SQLite; commands and the schedd change them atomically."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import classad

_TABLES = """
CREATE TABLE IF NOT EXISTS jobs (cluster INTEGER, proc INTEGER, ad TEXT, vacate INTEGER DEFAULT 0,
                                 PRIMARY KEY (cluster, proc));
CREATE TABLE IF NOT EXISTS history (number INTEGER PRIMARY KEY AUTOINCREMENT, cluster INTEGER, proc INTEGER, ad TEXT);
CREATE TABLE IF NOT EXISTS clusters (cluster INTEGER PRIMARY KEY AUTOINCREMENT);
"""
NOBODY = "Failed to connect to <127.0.0.1:9618?addrs=127.0.0.1-9618&alias=submit.pool>"
DOWN = f"CEDAR:6001:{NOBODY}"
"""Error of a command if the schedd is dead but its address is known."""


class Id(NamedTuple):
    cluster: int
    proc: int

    def __str__(self) -> str:
        return f"{self.cluster}.{self.proc}"


def id_of(ad: classad.ClassAd) -> Id:
    return Id(int(ad["ClusterId"]), int(ad["ProcId"]))


class Queue:
    def __init__(self, folder: Path) -> None:
        self._db = sqlite3.connect(folder / "queue.db", timeout=60, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.executescript(_TABLES)

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def new_cluster(self) -> int:
        """Return the number of a new cluster. Numbers are never reused."""
        return int(self._db.execute("INSERT INTO clusters DEFAULT VALUES").lastrowid or 0)

    def put(self, ad: classad.ClassAd) -> None:
        self._db.execute(
            "INSERT INTO jobs (cluster, proc, ad) VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET ad = excluded.ad",
            (*id_of(ad), str(ad)),
        )

    def jobs(self) -> list[classad.ClassAd]:
        rows = self._db.execute("SELECT ad FROM jobs ORDER BY cluster, proc")
        return [classad.parseOne(text) for (text,) in rows]

    def history(self) -> list[classad.ClassAd]:
        rows = self._db.execute("SELECT ad FROM history ORDER BY number DESC")
        return [classad.parseOne(text) for (text,) in rows]

    def leave(self, ad: classad.ClassAd) -> None:
        self._db.execute("DELETE FROM jobs WHERE cluster = ? AND proc = ?", id_of(ad))
        self._db.execute("INSERT INTO history (cluster, proc, ad) VALUES (?, ?, ?)", (*id_of(ad), str(ad)))

    def order_vacate(self, job: Id, *, wanted: bool) -> None:
        self._db.execute("UPDATE jobs SET vacate = ? WHERE cluster = ? AND proc = ?", (wanted, *job))

    def vacating(self) -> set[Id]:
        return {Id(*row) for row in self._db.execute("SELECT cluster, proc FROM jobs WHERE vacate")}


def hold_lock(folder: Path) -> int:
    lock = os.open(folder / "schedd.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def schedd_is_up(folder: Path) -> bool:
    with open(folder / "schedd.lock", "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
