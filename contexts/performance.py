"""Stored measurements: costs of contexts, calls and engine steps; waits, lifetimes and counts of a site's pilots.

All sessions share one SQLite file. Each quantity is stored as count, mean and sum of squared deviations (Welford).
"""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stoker.contexts.speeds import compute_relative_speeds
from stoker.contexts.step_times import MOST_SAMPLES, StepCell, StepError, StepTimes, rounded_log2

log = logging.getLogger(__name__)

T = TypeVar("T")


class MeasurementFile:
    """An SQLite file that several processes and threads use. Disk errors are logged and not raised.

    `shape`: a query that fails if the file's tables have other columns.
    """

    def __init__(self, path: str | os.PathLike[str], *, schema: str, shape: str) -> None:
        self.path = Path(path)
        self._schema = schema
        self._shape = shape
        self._lock = threading.Lock()
        self._db = self._open()

    @property
    def is_open(self) -> bool:
        return self._db is not None

    def write(self, *changes: tuple[str, Iterable[Sequence[Any]]]) -> int | None:
        def execute_changes(db: sqlite3.Connection) -> int:
            with db:
                return sum(db.executemany(statement, rows).rowcount for statement, rows in changes)

        return self._run_or_log(execute_changes)

    def read(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._run_or_log(lambda db: db.execute(query, values).fetchall()) or []

    def _run_or_log(self, run: Callable[[sqlite3.Connection], T]) -> T | None:
        with self._lock:
            if self._db is None:
                return None
            try:
                return run(self._db)
            except sqlite3.Error as error:
                self._handle_error(error)
                return None

    def close(self) -> None:
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    def _open(self) -> sqlite3.Connection | None:
        for _ in range(2):
            try:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                os.close(os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
                db = sqlite3.connect(self.path, timeout=10, check_same_thread=False)
                db.executescript(f"PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; {self._schema}")
                db.execute(self._shape)
                return db
            except (OSError, sqlite3.DatabaseError) as error:
                if not _is_database_damage(error) and "no such column" not in str(error):
                    log.warning("%s cannot be opened (%s); measurements are not stored", self.path, error)
                    return None
                self._rename_damaged_database(error)
        return None

    def _handle_error(self, error: sqlite3.Error) -> None:
        if self._db is not None and _is_database_damage(error):
            with closing(self._db):
                self._db = None
            self._rename_damaged_database(error)
            self._db = self._open()
        else:
            log.warning("a measurement cannot be stored in %s: %s", self.path, error)

    def _rename_damaged_database(self, error: Exception) -> None:
        aside = self.path.with_name(f"{self.path.name}.damaged-{int(time.time())}")
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                self.path.with_name(self.path.name + suffix).replace(aside.with_name(aside.name + suffix))
        log.warning(
            "%s was damaged (%s) and is renamed to %s; new measurements go into a new file",
            self.path,
            error,
            aside.name,
        )


def _is_database_damage(error: Exception) -> bool:
    return isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)


_MAX_ROWS = {"waits": 2_000, "stays": 5_000, "counts": 20_000}
"""Maximum rows of each table for one configured source of blocks."""
_TRIM_EVERY = 100

_HISTORY_SCHEMA = """
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
_HISTORY_SHAPE = """
SELECT wait_s, boot_s, kind, devices, memory_bytes, waits.at, stay_s, ended, stays.at, session, pilots, counts.at
FROM waits, stays, counts LIMIT 1
"""
_TRIM_QUERY = """
DELETE FROM {table} WHERE source = ? AND id <= (
    SELECT id FROM {table} WHERE source = ? ORDER BY id DESC LIMIT 1 OFFSET {rows}
)
"""


class DeviceSet(msgspec.Struct, frozen=True):
    """The devices of a pilot. `memory_bytes` is per device."""

    kind: str
    count: int
    memory_bytes: int


class BlockWait(msgspec.Struct, frozen=True):
    """`wait_s`: seconds that a block waited in the queue. `boot_s`: seconds from its start to its first pilot."""

    wait_s: float
    boot_s: float
    devices: DeviceSet


class PilotLifetime(msgspec.Struct, frozen=True):
    """How long a pilot ran, how it ended (a value of `PilotEnd`), and why it was lost (a value of `LossReason`)."""

    stay_s: float
    ended: str
    why: str = ""


class PilotCount(msgspec.Struct, frozen=True):
    at: float
    session: str
    pilots: int


class Availability(msgspec.Struct, frozen=True):
    """The records of one configured source of blocks, oldest first."""

    source: str
    waits: tuple[BlockWait, ...] = ()
    stays: tuple[PilotLifetime, ...] = ()
    counts: tuple[PilotCount, ...] = ()

    @property
    def max_pilots(self) -> int:
        return max((each.pilots for each in self.counts), default=0)


class AvailabilityStore:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = MeasurementFile(path, schema=_HISTORY_SCHEMA, shape=_HISTORY_SHAPE)
        self._written = dict.fromkeys(_MAX_ROWS, 0)

    def record_pilot_wait(self, source: str, *, wait_s: float, boot_s: float, devices: DeviceSet) -> None:
        self._add("waits", source, max(0.0, wait_s), max(0.0, boot_s), *msgspec.structs.astuple(devices))

    def record_pilot_stay(self, source: str, *, stay_s: float, ended: str, why: str = "") -> None:
        self._add("stays", source, max(0.0, stay_s), f"{ended}: {why}" if why else ended)

    def record_session_pilot_count(self, source: str, *, session: str, pilots: int) -> None:
        self._add("counts", source, session, pilots)

    def availability_of_source(self, source: str) -> Availability:
        def read_rows(table: str, columns: str) -> list[tuple[Any, ...]]:
            return self._file.read(f"SELECT {columns} FROM {table} WHERE source = ? ORDER BY id", (source,))

        waits = read_rows("waits", "wait_s, boot_s, kind, devices, memory_bytes")
        return Availability(
            source,
            tuple(BlockWait(wait_s, boot_s, DeviceSet(*of)) for wait_s, boot_s, *of in waits),
            # `record_pilot_stay` stores how and why a pilot ended as one text, for example `lost: preempted`.
            tuple(
                PilotLifetime(stay_s, *ended.partition(": ")[::2])
                for stay_s, ended in read_rows("stays", "stay_s, ended")
            ),
            tuple(PilotCount(*row) for row in read_rows("counts", "at, session, pilots")),
        )

    def close(self) -> None:
        self._file.close()

    def _add(self, table: str, source: str, *values: object) -> None:
        row = (None, source, time.time(), *values)
        changes = [(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", [row])]
        self._written[table] += 1
        if self._written[table] % _TRIM_EVERY == 1:
            changes.append((_TRIM_QUERY.format(table=table, rows=_MAX_ROWS[table]), [(source, source)]))
        self._file.write(*changes)


_STEPS_SCHEMA = """
CREATE TABLE IF NOT EXISTS steps (
    recipe TEXT NOT NULL, kind TEXT NOT NULL, stage TEXT NOT NULL, tokens_power INTEGER NOT NULL,
    length_power INTEGER NOT NULL, tokens REAL NOT NULL, length REAL NOT NULL, value REAL NOT NULL,
    count INTEGER NOT NULL, at REAL NOT NULL,
    PRIMARY KEY (recipe, kind, stage, tokens_power, length_power)
) WITHOUT ROWID;
"""
_ADD_STEPS = f"""
INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (recipe, kind, stage, tokens_power, length_power) DO UPDATE SET
    tokens = tokens + (excluded.tokens - tokens) * excluded.count / (count + excluded.count),
    length = length + (excluded.length - length) * excluded.count / (count + excluded.count),
    value = value + (excluded.value - value) * excluded.count / (count + excluded.count),
    count = min({MOST_SAMPLES}, count + excluded.count), at = excluded.at
"""
READ_STEPS_QUERY = (
    "SELECT kind, stage, tokens, length, value, count FROM steps WHERE recipe = ? ORDER BY kind, tokens, length"
)
_ERROR_SUFFIX = " error"


def rows_from_step_times(times: StepTimes, recipe: str, kind: str, *, at: float) -> Iterator[tuple[Any, ...]]:
    for stage, cells in (("prefill", times.prefill), ("decode", times.decode)):
        for cell in cells:
            place = rounded_log2(cell.tokens), rounded_log2(cell.length)
            yield recipe, kind, stage, *place, cell.tokens, cell.length, cell.seconds, cell.count, at
    for stage, error in (("prefill", times.prefill_error), ("decode", times.decode_error)):
        if error.count:
            yield recipe, kind, stage + _ERROR_SUFFIX, 0, 0, 0.0, 0.0, error.mean, error.count, at


def step_times_from_rows(rows: Iterable[tuple[Any, ...]]) -> dict[str, StepTimes]:
    cells: dict[str, dict[str, list[StepCell]]] = {}
    errors: dict[tuple[str, str], StepError] = {}
    for kind, stage, tokens, length, value, count in rows:
        of_kind = cells.setdefault(kind, {})
        if stage.endswith(_ERROR_SUFFIX):
            errors[kind, stage.removesuffix(_ERROR_SUFFIX)] = StepError(value, count)
        else:
            of_kind.setdefault(stage, []).append(StepCell(tokens, length, value, count))
    return {
        kind: StepTimes(
            tuple(found.get("prefill", ())), tuple(found.get("decode", ())),
            errors.get((kind, "prefill"), StepError()), errors.get((kind, "decode"), StepError()),
        )
        for kind, found in cells.items()
    }  # fmt: skip


_MEASURED_SCHEMA = """
CREATE TABLE IF NOT EXISTS measured (
    recipe TEXT NOT NULL, kind TEXT NOT NULL, what TEXT NOT NULL, function TEXT NOT NULL DEFAULT '',
    count INTEGER NOT NULL, mean REAL NOT NULL, spread REAL NOT NULL, most REAL NOT NULL, at REAL NOT NULL,
    PRIMARY KEY (recipe, kind, what, function)
) WITHOUT ROWID;
"""
_MEASURED_SHAPE = "SELECT recipe, kind, what, function, count, mean, spread, most, at FROM measured LIMIT 1"
_ADD_MEASUREMENT = """
INSERT INTO measured VALUES (?, ?, ?, ?, 1, ?, 0, ?, ?)
ON CONFLICT (recipe, kind, what, function) DO UPDATE SET
    spread = spread + (excluded.mean - mean) * (excluded.mean - mean) * count / (count + 1),
    mean = mean + (excluded.mean - mean) / (count + 1),
    count = count + 1, most = max(most, excluded.most), at = excluded.at
"""


class Measured(msgspec.Struct, frozen=True, array_like=True):
    mean: float = 0.0
    sd: float = 0.0
    most: float = 0.0
    count: int = 0


class Estimate(msgspec.Struct, frozen=True):
    """The cost of a recipe on one device kind, in seconds and bytes; 0 = not measured.

    Memory sizes are maxima; times are means. `calls`: by function. `paces`: seconds per unit of work, by gang size.
    `speed`: relative to the fastest device kind.
    """

    load_s: float = 0.0
    load_sd: float = 0.0
    loads: int = 0
    start_s: float = 0.0
    resident_bytes: int = 0
    peak_bytes: int = 0
    device_bytes: int = 0
    run_s: float = 0.0
    runs: int = 0
    functions: dict[str, Measured] = {}
    calls: dict[str, int] = {}
    paces: dict[int, Measured] = {}
    slots: int = 0
    speed: float = 0.0


class RecipeRecord(msgspec.Struct, frozen=True):
    recipe: str
    kinds: tuple[str, ...]
    at: float


class PerformanceStore:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = MeasurementFile(path, schema=_MEASURED_SCHEMA + _STEPS_SCHEMA, shape=_MEASURED_SHAPE)

    def record_load(self, recipe_key: str, *, kind: str, load_s: float, **facts: float) -> None:
        """Record a load. `facts`: start_s, resident_bytes, peak_bytes, device_bytes, slots; 0 = unknown."""
        known = {"load_s": load_s, **{name: fact for name, fact in facts.items() if fact > 0}}
        self._add((recipe_key, kind, what, "", value) for what, value in known.items())

    def record_runs(
        self, recipe_key: str, *, kind: str, function: str, run_s: Iterable[float], calls: int = 1, items: float = 1.0
    ) -> None:
        """Record calls of a function. Each time in `run_s` is the mean of `calls` calls with `items` items."""
        more = [("calls", float(calls))] if calls > 1 else []
        more += [("items", items)] if items > 1 else []
        facts = [fact for seconds in run_s for fact in (("run_s", seconds), *more)]
        self._add((recipe_key, kind, what, function, value) for what, value in facts)

    def record_pace(self, recipe_key: str, *, kind: str, size: int, pace_s: float) -> None:
        """Record how many seconds a gang of `size` libraries needs per unit of work."""
        self._add([(recipe_key, kind, "pace_s", str(size), pace_s)])

    def record_time_ratio(self, recipe_key: str, *, kind: str, other: str, ratio: float) -> None:
        """Record a ratio: the time of a call on `kind` divided by the time of an equal call on `other`."""
        self._add([(recipe_key, kind, "time_ratio", other, ratio)])

    def record_step_times(self, recipe_key: str, *, kind: str, times: StepTimes) -> None:
        self._file.write((_ADD_STEPS, rows_from_step_times(times, recipe_key, kind, at=time.time())))

    def step_times(self, recipe_key: str) -> dict[str, StepTimes]:
        return step_times_from_rows(self._file.read(READ_STEPS_QUERY, (recipe_key,)))

    def estimates(self, recipe_key: str) -> dict[str, Estimate]:
        rows = self._file.read(
            "SELECT kind, what, function, count, mean, spread, most FROM measured WHERE recipe = ?", (recipe_key,)
        )
        found: dict[str, dict[tuple[str, str], Measured]] = {}
        for kind, what, function, *sums in rows:
            found.setdefault(kind, {})[what, function] = _measured_from_sums(*sums)
        ratios = {
            (kind, other): (ratio.mean, float(ratio.count))
            for kind, facts in found.items()
            for (what, other), ratio in facts.items()
            if what == "time_ratio" and ratio.mean > 0
        }
        speeds = compute_relative_speeds(ratios)
        return {kind: _build_estimate(found.get(kind, {}), speed=speeds.get(kind, 0.0)) for kind in {**found, **speeds}}

    def recipes_of(self, function: str) -> list[RecipeRecord]:
        rows = self._file.read(
            "SELECT recipe, group_concat(kind, char(10)), max(at) FROM measured WHERE what = 'run_s' AND function = ?"
            " GROUP BY recipe ORDER BY max(at) DESC",
            (function,),
        )
        return [RecipeRecord(recipe, tuple(sorted(kinds.split("\n"))), at) for recipe, kinds, at in rows]

    def list_functions(self) -> list[str]:
        rows = self._file.read(
            "SELECT function FROM measured WHERE what = 'run_s' GROUP BY function ORDER BY max(at) DESC"
        )
        return [function for (function,) in rows]

    def list_device_kinds(self) -> list[str]:
        return [kind for (kind,) in self._file.read("SELECT DISTINCT kind FROM measured ORDER BY kind")]

    def items_per_call(self, function: str) -> int:
        rows = self._file.read(
            "SELECT what, sum(count), sum(count * (mean - 1)) FROM measured"
            " WHERE what IN ('items', 'run_s') AND function = ? GROUP BY what",
            (function,),
        )
        found = {what: (count, beyond_one) for what, count, beyond_one in rows}
        records, (_, more) = found.get("run_s", (0, 0.0))[0], found.get("items", (0, 0.0))
        return 1 + round(more / records) if records else 1

    def close(self) -> None:
        self._file.close()

    def _add(self, facts: Iterable[tuple[str, str, str, str, float]]) -> None:
        now = time.time()
        rows = [
            (recipe, kind, what, function, value, value, now)
            for recipe, kind, what, function, value in facts
            if math.isfinite(value) and value >= 0
        ]
        if rows:
            self._file.write((_ADD_MEASUREMENT, rows))


def _measured_from_sums(count: int, mean: float, spread: float, most: float) -> Measured:
    """Build a `Measured`. `spread`: sum of squared deviations."""
    sd = math.sqrt(max(0.0, spread) / (count - 1)) if count > 1 else 0.0
    return Measured(mean=mean, sd=sd, most=most, count=count)


def _build_estimate(facts: dict[tuple[str, str], Measured], *, speed: float) -> Estimate:
    def measured_by_function(what: str) -> dict[str, Measured]:
        return {name: found for (each, name), found in facts.items() if each == what}

    def measured_overall(what: str) -> Measured:
        return facts.get((what, ""), Measured())

    load, functions = measured_overall("load_s"), measured_by_function("run_s")
    runs = sum(each.count for each in functions.values())
    run_s = sum(each.mean * each.count for each in functions.values()) / runs if runs else 0.0
    more = {name: round(each.count * (each.mean - 1.0)) for name, each in measured_by_function("calls").items()}
    return Estimate(
        load_s=load.mean, load_sd=load.sd, loads=load.count, start_s=measured_overall("start_s").mean,
        resident_bytes=int(measured_overall("resident_bytes").most),
        peak_bytes=int(measured_overall("peak_bytes").most),
        device_bytes=int(measured_overall("device_bytes").most), slots=round(measured_overall("slots").mean),
        run_s=run_s, runs=runs, functions=functions,
        calls={name: each.count + more.get(name, 0) for name, each in functions.items()},
        paces={int(size): pace for size, pace in measured_by_function("pace_s").items()}, speed=speed,
    )  # fmt: skip
