"""What contexts and calls have cost so far, by recipe and device kind: the second run of a program plans with facts.

One SQLite file in the user's state folder, shared by every session on it. Each quantity is kept as count, mean and sum
of squared deviations (Welford), so that a row never grows and two writers only need to take turns. Measurements are a
help, never a need: a file that is damaged is moved aside and said; a disk that is full costs a warning.
"""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import threading
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS measured (
    recipe TEXT NOT NULL, kind TEXT NOT NULL, what TEXT NOT NULL, function TEXT NOT NULL DEFAULT '',
    count INTEGER NOT NULL, mean REAL NOT NULL, spread REAL NOT NULL, most REAL NOT NULL, at REAL NOT NULL,
    PRIMARY KEY (recipe, kind, what, function)
) WITHOUT ROWID;
"""
_ADD = """
INSERT INTO measured VALUES (?, ?, ?, ?, 1, ?, 0, ?, ?)
ON CONFLICT (recipe, kind, what, function) DO UPDATE SET
    spread = spread + (excluded.mean - mean) * (excluded.mean - mean) * count / (count + 1),
    mean = mean + (excluded.mean - mean) / (count + 1),
    count = count + 1, most = max(most, excluded.most), at = excluded.at
"""


class Measured(msgspec.Struct, frozen=True, array_like=True):
    """A quantity that was measured `count` times. Its unit is that of the field that holds it."""

    mean: float = 0.0
    sd: float = 0.0
    most: float = 0.0
    count: int = 0


class Estimate(msgspec.Struct, frozen=True):
    """What a recipe has cost on one kind of device. 0 = never measured; seconds and bytes.

    Memory is the most that was seen, times are means with their standard deviations. `run_s` is a call's time over all
    functions, `functions` by function (key or name).
    """

    load_s: float = 0.0
    load_sd: float = 0.0
    loads: int = 0
    start_s: float = 0.0
    resident_bytes: int = 0
    peak_bytes: int = 0
    device_bytes: int = 0
    run_s: float = 0.0
    run_sd: float = 0.0
    runs: int = 0
    functions: dict[str, Measured] = {}


class PerformanceStore:
    """The measurements in one file. Safe with several processes and threads; no method raises for want of a disk."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._db = self._open()

    def record_load(
        self,
        recipe_key: str,
        *,
        kind: str,
        load_s: float,
        start_s: float = 0.0,
        resident_bytes: int = 0,
        peak_bytes: int = 0,
        device_bytes: int = 0,
    ) -> None:
        """One load of a recipe on a device of this kind. What is 0, the load itself apart, was not measured."""
        sizes = {"resident_bytes": resident_bytes, "peak_bytes": peak_bytes, "device_bytes": device_bytes}
        known = {name: fact for name, fact in {**sizes, "start_s": start_s}.items() if fact > 0}
        facts = {"load_s": load_s, **known}
        self._add((recipe_key, kind, what, "", value) for what, value in facts.items())

    def record_runs(self, recipe_key: str, *, kind: str, function: str, run_s: Iterable[float]) -> None:
        """Calls of a function (its key or name) on a recipe's context, in seconds."""
        self._add((recipe_key, kind, "run_s", function, seconds) for seconds in run_s)

    def estimates(self, recipe_key: str) -> dict[str, Estimate]:
        """What is known of a recipe, by device kind."""
        with self._lock:
            if self._db is None:
                return {}
            try:
                rows = self._db.execute(
                    "SELECT kind, what, function, count, mean, spread, most FROM measured WHERE recipe = ?",
                    (recipe_key,),
                ).fetchall()
            except sqlite3.Error as error:
                self._trouble(error)
                return {}
        found: dict[str, dict[tuple[str, str], tuple[int, float, float, float]]] = {}
        for kind, what, function, *numbers in rows:
            found.setdefault(kind, {})[what, function] = tuple(numbers)
        return {kind: _estimate(facts) for kind, facts in found.items()}

    def close(self) -> None:
        """Close the file; later calls do nothing."""
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    def _add(self, facts: Iterable[tuple[str, str, str, str, float]]) -> None:
        now = time.time()
        rows = [
            (recipe, kind, what, function, value, value, now)
            for recipe, kind, what, function, value in facts
            if math.isfinite(value) and value >= 0
        ]
        with self._lock:
            if self._db is None or not rows:
                return
            try:
                with self._db:
                    self._db.executemany(_ADD, rows)
            except sqlite3.Error as error:
                self._trouble(error)

    def _open(self) -> sqlite3.Connection | None:
        for _ in range(2):
            try:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                db = sqlite3.connect(self.path, timeout=10, check_same_thread=False)
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = NORMAL")
                db.executescript(_SCHEMA)
                db.execute("SELECT recipe, kind, what, function, count, mean, spread, most, at FROM measured LIMIT 1")
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
        log.warning("%s was damaged (%s) and is now %s; loads are measured anew", self.path, error, aside.name)


def _estimate(facts: dict[tuple[str, str], tuple[int, float, float, float]]) -> Estimate:
    functions = {name: _measured(numbers) for (what, name), numbers in facts.items() if what == "run_s"}
    load = _measured(facts.get(("load_s", ""), (0, 0.0, 0.0, 0.0)))
    run = _together([numbers for (what, _), numbers in facts.items() if what == "run_s"])

    def most(what: str) -> int:
        return int(facts.get((what, ""), (0, 0.0, 0.0, 0.0))[3])

    return Estimate(
        load_s=load.mean,
        load_sd=load.sd,
        loads=load.count,
        start_s=facts.get(("start_s", ""), (0, 0.0, 0.0, 0.0))[1],
        resident_bytes=most("resident_bytes"),
        peak_bytes=most("peak_bytes"),
        device_bytes=most("device_bytes"),
        run_s=run.mean,
        run_sd=run.sd,
        runs=run.count,
        functions=functions,
    )


def _measured(numbers: tuple[int, float, float, float]) -> Measured:
    count, mean, spread, most = numbers
    sd = math.sqrt(max(0.0, spread) / (count - 1)) if count > 1 else 0.0
    return Measured(mean=mean, sd=sd, most=most, count=count)


def _together(groups: list[tuple[int, float, float, float]]) -> Measured:
    """Several groups' counts, means and squared deviations as one (Chan's parallel form of Welford's)."""
    count, mean, spread, most = 0, 0.0, 0.0, 0.0
    for n, m, s, top in groups:
        total = count + n
        spread += s + (m - mean) ** 2 * count * n / total
        mean += (m - mean) * n / total
        count, most = total, max(most, top)
    return _measured((count, mean, spread, most))
