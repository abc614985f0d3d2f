"""Count requests and tokens per key, model and day, in an SQLite file that all gateways of a user share.

A thread writes the counts every second, so a killed gateway loses the counts of about one second. For each batch, the
file stores the totals that are already counted. When the totals grow, a gateway adds only the difference.
"""

from __future__ import annotations

import datetime
import os
import re
import sqlite3
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from stoker.apps.common.batch_state import OK, read_json_lines
from stoker.apps.common.openai_requests import RequestRefused
from stoker.apps.gateway.failures import log
from stoker.contexts import may_be_shared, state_folder

NOBODY = "-"
"""The name for clients without a key. No key can have this name."""
KEPT_DAYS = 400
COLUMNS = ("key", "model", "day")
DEFAULT_BY = ("key", "model")
DEFAULT_SINCE = "7d"
_EVERY_S = 1.0
_LOCKED_S = 2.0
"""Seconds to wait while another process locks the database file."""
_LOG_INTERVAL_S = 60.0


class UsageCount(msgspec.Struct):
    """Requests and tokens. `refused`: requests over a limit or too late; `failed`: requests with another error."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    refused: int = 0
    failed: int = 0

    def add_counts(self, other: UsageCount) -> None:
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


COUNTS = UsageCount.__struct_fields__
CountLabels = tuple[str, str, str]
"""The day, the name of the API key, and the model for which requests are counted."""
UsageRow = dict[str, Any]
"""A row of a usage report: the values of the chosen columns, then the counts."""
BatchTotals = tuple[str, dict[str, UsageCount]]
"""The name of the API key that submitted a batch, and the batch's totals so far by model."""


class UsageQuery(msgspec.Struct, frozen=True):
    """A query for a usage report. `since`: first day; `by`: columns; an empty `key` or `model` selects all."""

    since: str
    key: str = ""
    model: str = ""
    by: tuple[str, ...] = DEFAULT_BY


def parse_usage_query(given: Mapping[str, str]) -> UsageQuery:
    """Parse the URL parameters of `/v1/usage`. Raises RequestRefused."""
    for name in given:
        if name not in ("key", "model", "since", "by"):
            raise RequestRefused(f"{name:.80} is not a filter of usage", param=name[:80], code="unknown_parameter")
    by = tuple(dict.fromkeys(given.get("by", ",".join(DEFAULT_BY)).split(",")))
    if unknown := set(by) - set(COLUMNS):
        said = f"by is {min(unknown)!r:.80}; the columns are {', '.join(COLUMNS)}"
        raise RequestRefused(said, param="by", code="invalid_value")
    try:
        since = parse_first_day(given.get("since", DEFAULT_SINCE))
    except ValueError as error:
        raise RequestRefused(f"since: {error}", param="since", code="invalid_value") from None
    return UsageQuery(since, given.get("key", ""), given.get("model", ""), by)


def parse_first_day(text: str) -> str:
    """Return the first day of a period: `7d` (today and six days before), or a date. Raises ValueError."""
    today = datetime.date.today()
    if found := re.fullmatch(r"([1-9][0-9]{0,3})d", text):
        return (today - datetime.timedelta(days=int(found[1]) - 1)).isoformat()
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise ValueError(f"{text!r:.40} is not a time; write a number of days (7d) or a date ({today})") from None


def format_today() -> str:
    return time.strftime("%Y-%m-%d")


_NUMBERS = ", ".join(f"{name} INTEGER NOT NULL" for name in COUNTS)
_NAMES = ", ".join(COUNTS)
_TABLES = (
    f"CREATE TABLE IF NOT EXISTS usage (day TEXT, key TEXT, model TEXT, {_NUMBERS}, PRIMARY KEY (day, key, model))"
    " WITHOUT ROWID",
    f"CREATE TABLE IF NOT EXISTS batches (batch TEXT, model TEXT, day TEXT, {_NUMBERS}, PRIMARY KEY (batch, model))"
    " WITHOUT ROWID",
)
_PLACEHOLDERS = ", ".join("?" for _ in COUNTS)
_ADD_USAGE = (
    f"INSERT INTO usage (day, key, model, {_NAMES}) VALUES (?, ?, ?, {_PLACEHOLDERS})"
    " ON CONFLICT (day, key, model) DO UPDATE SET " + ", ".join(f"{name} = {name} + excluded.{name}" for name in COUNTS)
)
_COUNTED = f"SELECT {_NAMES} FROM batches WHERE batch = ? AND model = ?"
_REPLACE_BATCH = f"INSERT OR REPLACE INTO batches (batch, model, day, {_NAMES}) VALUES (?, ?, ?, {_PLACEHOLDERS})"


class UsageFile:
    """The usage counts in an SQLite file. The methods may raise OSError and sqlite3.Error."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def at_default_path(cls) -> UsageFile:
        return cls(state_folder() / "serve" / "usage.sqlite")

    def add_counts(
        self, counts: Mapping[CountLabels, UsageCount], batches: Mapping[str, BatchTotals] | None = None
    ) -> None:
        """Add counts, and the increase of each batch's totals, in one transaction."""
        with self._open_transaction() as database:
            for place, count in counts.items():
                database.execute(_ADD_USAGE, (*place, *msgspec.structs.astuple(count)))
            for id, (key, models) in (batches or {}).items():
                for model, total in models.items():
                    _add_batch_totals(database, id, model, total, key=key)

    def read_report(self, query: UsageQuery) -> list[UsageRow]:
        if not self.path.exists() or not self.path.stat().st_size:
            return []
        columns = ", ".join(query.by)
        sums = ", ".join(f"SUM({name})" for name in COUNTS)
        asked = (
            f"SELECT {columns}, {sums} FROM usage WHERE day >= ? AND ? IN ('', key) AND ? IN ('', model)"
            f" GROUP BY {columns} ORDER BY {columns}"
        )
        address = f"{self.path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(address, uri=True, timeout=_LOCKED_S)) as database:
            found = database.execute(asked, (query.since, query.key, query.model)).fetchall()
        return [dict(zip((*query.by, *COUNTS), row, strict=True)) for row in found]

    @contextmanager
    def _open_transaction(self) -> Iterator[sqlite3.Connection]:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        with closing(sqlite3.connect(self.path, timeout=_LOCKED_S, isolation_level=None)) as database:
            # A write-ahead log needs shared memory, which network file systems lack.
            mode = "DELETE" if may_be_shared(self.path) else "WAL"
            database.execute(f"PRAGMA journal_mode = {mode}")
            database.execute("BEGIN IMMEDIATE")
            for table in _TABLES:
                database.execute(table)
            yield database
            oldest = parse_first_day(f"{KEPT_DAYS}d")
            for name in ("usage", "batches"):
                database.execute(f"DELETE FROM {name} WHERE day < ?", (oldest,))
            database.execute("COMMIT")


def _add_batch_totals(database: sqlite3.Connection, id: str, model: str, total: UsageCount, *, key: str) -> None:
    new = msgspec.structs.astuple(total)
    counted = database.execute(_COUNTED, (id, model)).fetchone() or (0,) * len(new)
    more = [max(0, now - before) for now, before in zip(new, counted, strict=True)]
    if any(more):
        database.execute(_ADD_USAGE, (format_today(), key, model, *more))
        database.execute(_REPLACE_BATCH, (id, model, format_today(), *new))


class UsageRecorder:
    """Collects the usage counts of a gateway. A thread writes them to the usage file every second."""

    def __init__(self, file: UsageFile) -> None:
        self._file = file
        self._counts: dict[CountLabels, UsageCount] = {}
        self._batches: dict[str, BatchTotals] = {}
        self._changing = threading.Lock()
        self._writing = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._logged_at = float("-inf")

    def start_writing(self) -> None:
        self._thread = threading.Thread(target=self._write_repeatedly, name="usage", daemon=True)
        self._thread.start()

    def stop_writing(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def add_count(self, count: UsageCount, *, key: str, model: str) -> None:
        with self._changing:
            self._add_count((format_today(), key or NOBODY, model), count)

    def set_batch_totals(self, id: str, models: Mapping[str, UsageCount], *, key: str) -> None:
        if models:
            with self._changing:
                self._batches[id] = key or NOBODY, dict(models)

    def read_report(self, query: UsageQuery) -> list[UsageRow]:
        """Write the counts, and return the rows of a report. Raises OSError and sqlite3.Error."""
        self.write_counts()
        return self._file.read_report(query)

    def write_counts(self) -> None:
        with self._writing:
            with self._changing:
                counts, self._counts = self._counts, {}
                batches, self._batches = self._batches, {}
            if not counts and not batches:
                return
            try:
                self._file.add_counts(counts, batches)
            except (OSError, sqlite3.Error) as error:
                with self._changing:
                    for place, count in counts.items():
                        self._add_count(place, count)
                    self._batches = {**batches, **self._batches}
                if time.monotonic() >= self._logged_at + _LOG_INTERVAL_S:
                    self._logged_at, path = time.monotonic(), self._file.path
                    log.warning("%s: usage cannot be written: %s; it is kept in memory and written later", path, error)

    def _add_count(self, place: CountLabels, count: UsageCount) -> None:
        self._counts.setdefault(place, UsageCount()).add_counts(count)

    def _write_repeatedly(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self.write_counts()
        self.write_counts()
        if self._counts or self._batches:
            lost = sum(count.requests for count in self._counts.values())
            log.warning("the usage of %d requests is lost: it could not be written", lost)


# ---- batches

_MOST_BYTES = 8_000_000


class _TokenCounts(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _AnswerBody(msgspec.Struct):
    model: str = ""
    usage: _TokenCounts | None = None


class _AnswerResponse(msgspec.Struct):
    status_code: int
    body: _AnswerBody


class _OutputLine(msgspec.Struct):
    """A line of a batch's output file or log. In a log, the field `line` contains the output line."""

    custom_id: str | None = None
    response: _AnswerResponse | None = None
    line: _OutputLine | None = None


class _BatchRequest(msgspec.Struct):
    body: dict[str, Any]
    custom_id: str | None = None


class BatchUsageReader:
    """Counts the requests and tokens of a batch. `requests`: the input file; `log`: the file of answers so far;
    `models`: the models to count.
    """

    def __init__(self, requests: Path, log: Path, *, models: Collection[str]) -> None:
        self.totals: dict[str, UsageCount] = {}
        self._requests = requests
        self._log = log
        self._models = models
        self._at = 0
        self._requested_models: dict[str, str] | None = None

    def read_new_log_lines(self) -> bool:
        """Count the answers in new lines of the log. Return True if the log may have more lines."""
        lines = []
        with suppress(FileNotFoundError), self._log.open("rb") as log:
            log.seek(self._at)
            lines = [line for line in log.readlines(_MOST_BYTES) if line.endswith(b"\n")]
            self._at += sum(map(len, lines))
        for line in lines:
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                found = msgspec.json.decode(line, type=_OutputLine)
                self._count_line(found.line or found)
        return bool(lines)

    def count_output_files(self, *files: Path) -> None:
        """Replace the totals by those of the batch's final output files."""
        self.totals = {}
        for file in files:
            for line in read_json_lines(file, _OutputLine):
                self._count_line(line)

    def _count_line(self, line: _OutputLine) -> None:
        if (response := line.response) is None:
            return
        body, failed = response.body, response.status_code != OK
        model = self._find_requested_model(line.custom_id or "") if failed else body.model
        if model in self._models:
            tokens = body.usage or _TokenCounts()
            count = UsageCount(1, tokens.prompt_tokens, tokens.completion_tokens, failed=failed)
            self.totals.setdefault(model, UsageCount()).add_counts(count)

    def _find_requested_model(self, custom_id: str) -> str:
        """Look up the model of a failed request in the input file, because the error does not name the model."""
        if self._requested_models is None:
            requests = read_json_lines(self._requests, _BatchRequest)
            self._requested_models = {each.custom_id or "": str(each.body.get("model", "")) for each in requests}
        return self._requested_models.get(custom_id, "")
