"""Recorded workloads as calls, from CSV and JSON files, plain or gzipped.

In formats with dates or clocks, times count from the first row. Rows must be in order of time. The reader sorts only
the rows of the Philly trace. A job on n GPUs (Philly, ElasticFlow) becomes n independent calls of its length. A request
(Azure, SLINFER) is one item, and policies know only its input length.
"""

from __future__ import annotations

import csv
import gzip
import heapq
import math
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, cycle, islice
from pathlib import Path
from typing import BinaryIO

import msgspec

from stoker.config_errors import suggest_similar_name
from stoker.decoding import HEAD_BYTES, describe_invalid_utf8, describe_non_text_format, invalid_byte_message
from stoker.errors import ConfigError
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.workload import Trace, TraceFormat

_WHOLE = re.compile(r"\s*[+-]?[0-9]{1,18}\s*")
_NUMBER = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?\s*")
_SHOWN = 60
_MOST = 1_000_000_000


@dataclass(slots=True)
class TableRow:
    """A row of a CSV file, whose cells are checked when they are read."""

    path: Path
    line: int
    columns: Mapping[str, int]
    cells: list[str]

    def make_error(self, field: str, what: str) -> ConfigError:
        return make_row_error(self.path, self.line, field, what)

    def read_text(self, field: str) -> str:
        text = self.cells[self.columns[field]].strip()
        if not text:
            raise self.make_error(field, "is empty")
        return text

    def read_whole_number(self, field: str, otherwise: int | None = None, *, least: int = 0, most: int = _MOST) -> int:
        if otherwise is not None and field not in self.columns:
            return otherwise
        text = self.cells[self.columns[field]]
        if not _WHOLE.fullmatch(text) or not least <= int(text) <= most:
            raise self.make_error(field, f"{_quote_shortened(text)} is not a whole number from {least} to {most}")
        return int(text)

    def read_number(self, field: str, otherwise: float | None = None) -> float:
        if otherwise is not None and field not in self.columns:
            return otherwise
        text = self.cells[self.columns[field]]
        if not _NUMBER.fullmatch(text) or not 0.0 <= float(text) < math.inf:
            raise self.make_error(field, f"{_quote_shortened(text)} is not a number of at least 0")
        return float(text)

    def read_date(self, field: str) -> float:
        """Return a field's date as seconds since 1970. A date without a time zone is in UTC. Raises ConfigError."""
        text = self.cells[self.columns[field]].strip()
        try:
            when = datetime.fromisoformat(text)
        except ValueError:
            raise self.make_error(
                field, f"{_quote_shortened(text)} is not a time; write the time as 2023-11-16 18:17:03.98"
            ) from None
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def read_csv_rows(
    path: Path, *, required: tuple[str, ...], allowed: tuple[str, ...] | None = None
) -> Iterator[TableRow]:
    """Yield the rows of a CSV file. `allowed`: allowed column names; None = any."""
    reader, columns = csv.reader(()), dict[str, int]()
    try:
        with open_plain_or_gzipped(path) as file:
            reader = csv.reader(_decode_lines(file, path), strict=True)
            for cells in reader:
                if not cells or cells == [""]:
                    continue
                if not columns:
                    columns = _read_header(path, reader.line_num, cells, required=required, allowed=allowed)
                elif len(cells) != len(columns):
                    what = f"has {len(cells)} fields where the header has {len(columns)}"
                    raise make_row_error(path, reader.line_num, "", what)
                else:
                    yield TableRow(path, reader.line_num, columns, cells)
            if not columns:
                raise ConfigError(f"{_relative_path(path)}: the file is empty; it needs a header", file=str(path))
    except csv.Error as error:
        raise make_row_error(path, reader.line_num, "", f"is not CSV: {error}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise make_unreadable_error(path, error) from None


def make_row_error(path: Path, line: int, field: str, what: str) -> ConfigError:
    parts = filter(None, (_relative_path(path), f"line {line}", field, what))
    return ConfigError(": ".join(parts), file=str(path), line=line, key=field)


def make_unreadable_error(path: Path, error: Exception) -> ConfigError:
    why = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
    return ConfigError(f"{_relative_path(path)}: {why}", file=str(path))


def _relative_path(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def open_plain_or_gzipped(path: Path) -> BinaryIO:
    """Open a plain or gzipped text file as bytes. Raises ConfigError for another format, and OSError."""
    file = path.open("rb")
    head = file.read(HEAD_BYTES)
    file.seek(0)
    if head.startswith(b"\x1f\x8b"):
        file.close()
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if what := describe_non_text_format(head):
        file.close()
        raise ConfigError(f"{_relative_path(path)}: {what}", file=str(path))
    return file


def _decode_lines(file: BinaryIO, path: Path) -> Iterator[str]:
    for number, raw in enumerate(file, start=1):
        try:
            yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise make_row_error(path, number, "", invalid_byte_message(error.start + 1, raw[error.start])) from None


def _read_header(
    path: Path, line: int, cells: list[str], *, required: tuple[str, ...], allowed: tuple[str, ...] | None
) -> dict[str, int]:
    names = [cell.strip() for cell in cells]
    for name in names:
        if allowed is not None and name not in allowed:
            raise make_row_error(
                path, line, name or "header", f"is not a known column; {suggest_similar_name(name, allowed)}"
            )
        if names.count(name) > 1:
            raise make_row_error(path, line, name or "header", "is in the header twice")
    for name in required:
        if name not in names:
            raise make_row_error(
                path, line, name, f"the header lacks this column; it has {_quote_shortened(', '.join(names))}"
            )
    return {name: place for place, name in enumerate(names)}


def _quote_shortened(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


_MOST_GPUS = 10_000
_MOST_MEMBERS = 1_000_000
_FIELDS_WITHOUT_COLUMN = frozenset({"gang", "objective", "variants"})
_COLUMNS = (
    *(name for name in Arrival.__struct_fields__ if name not in _FIELDS_WITHOUT_COLUMN),
    "gang_least",
    "gang_most",
)


def read_trace(trace: Trace, *, folder: Path, contexts: Collection[str] = ()) -> Iterator[Arrival]:
    """Return the calls of a trace in order of time. Raises ConfigError, possibly during the iteration."""
    path = (folder / Path(trace.file).expanduser()).absolute()
    is_plain = trace.format is TraceFormat.CSV
    found = (
        _read_csv_trace(path, trace, contexts)
        if is_plain
        else _READERS[trace.format](path, trace, _ContextAssignment(trace))
    )
    calls = _select_calls(found, trace)
    first = next(calls, None)
    if first is None:
        cut = trace.start_s or trace.for_s or trace.cluster
        why = "no call matches start, for and cluster" if cut else "the file contains no calls"
        raise ConfigError(f"{_relative_path(path)}: {why}", file=str(path))
    return chain((first,), calls)


def _select_calls(calls: Iterable[Arrival], trace: Trace) -> Iterator[Arrival]:
    start_s, end_s = float(trace.start_s), trace.start_s + trace.for_s if trace.for_s else math.inf

    def wanted() -> Iterator[Arrival]:
        for call in calls:
            if call.at_s >= end_s:
                return
            if call.at_s >= start_s:
                yield msgspec.structs.replace(call, at_s=(call.at_s - start_s) / trace.speedup)

    return islice(wanted(), trace.count or None)


class _ContextAssignment:
    def __init__(self, trace: Trace) -> None:
        given = (trace.context,) if isinstance(trace.context, str) else trace.context
        self._turns = cycle(given) if all(given) else None
        self._known = dict(trace.contexts)

    def assign_context(self, name: str) -> str | None:
        known = self._known.get(name)
        if known is None and self._turns is not None:
            known = self._known[name] = next(self._turns)
        return known

    def context_of_row(self, row: TableRow, field: str) -> str:
        name = row.read_text(field)
        context = self.assign_context(name)
        if context is None:
            hint = "name a context in contexts, or a context for all other functions in context"
            raise row.make_error(field, f"{name!r} has no context; {hint}")
        return context


class _RowClock:
    """Converts the times of rows to seconds since the first row. Rejects decreasing times."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._first: float | None = None
        self._last = -math.inf

    def seconds_of_row(self, row: TableRow, time_s: float, *, since_first: bool = True) -> float:
        if time_s < self._last:
            raise row.make_error(self._field, f"the time is {self._last - time_s:g} s before that of the previous row")
        self._last = time_s
        if self._first is None:
            self._first = time_s if since_first else 0.0
        return round(time_s - self._first, 6)


def _read_philly_trace(path: Path, trace: Trace, names: _ContextAssignment) -> Iterator[Arrival]:
    rows = read_csv_rows(path, required=("timestamp", "duration", "num_gpus", "cluster"))
    wanted = (row for row in rows if trace.cluster in ("", row.read_text("cluster")))
    clock = _RowClock("timestamp")
    for time_s, row in sorted(((row.read_date("timestamp"), row) for row in wanted), key=lambda each: each[0]):
        yield from _job_calls(
            row, trace, at_s=clock.seconds_of_row(row, time_s), context=names.context_of_row(row, "cluster")
        )


def _read_elasticflow_trace(path: Path, trace: Trace, names: _ContextAssignment) -> Iterator[Arrival]:
    clock = _RowClock("submission_time")
    for row in read_csv_rows(path, required=("submission_time", "model_name", "deadline", "num_gpu", "duration")):
        submitted_s, deadline_s = row.read_number("submission_time"), row.read_number("deadline")
        if deadline_s <= submitted_s:
            raise row.make_error("deadline", f"{deadline_s:g} s is not after the submission at {submitted_s:g} s")
        yield from _job_calls(
            row, trace, at_s=clock.seconds_of_row(row, submitted_s), context=names.context_of_row(row, "model_name"),
            gpus="num_gpu", deadline_s=deadline_s - submitted_s,
        )  # fmt: skip


def _job_calls(
    row: TableRow, trace: Trace, *, at_s: float, context: str, gpus: str = "num_gpus", deadline_s: float = 0.0
) -> Iterator[Arrival]:
    duration_s, number = row.read_number("duration"), row.read_whole_number(gpus, least=1, most=_MOST_GPUS)
    items = math.ceil(duration_s / trace.item_s)
    if not 1 <= items <= _MOST:
        raise row.make_error(
            "duration", f"{duration_s:g} s is {items} items of {trace.item_s:g} s; allowed are 1 to {_MOST}"
        )
    deadline_s = deadline_s or float(trace.deadline_s)
    for _ in range(number):
        yield Arrival(at_s, context, items, priority=trace.priority, deadline_s=deadline_s)


def _read_azure_llm_trace(path: Path, trace: Trace, names: _ContextAssignment) -> Iterator[Arrival]:
    context, clock = names.assign_context("") or "", _RowClock("TIMESTAMP")
    for row in read_csv_rows(path, required=("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        at_s = clock.seconds_of_row(row, row.read_date("TIMESTAMP"))
        yield _make_request(
            trace, at_s, context, row.read_whole_number("ContextTokens"), row.read_whole_number("GeneratedTokens")
        )


def _make_request(trace: Trace, at_s: float, context: str, input_length: int, output: int) -> Arrival:
    return Arrival(
        at_s, context, trace.items, input_length, 0, trace.priority, float(trace.deadline_s), trace.gang,
        output=output, objective=trace.tokens.objective,
    )  # fmt: skip


def _read_csv_trace(path: Path, trace: Trace, contexts: Collection[str]) -> Iterator[Arrival]:
    clock, objective = _RowClock("at_s"), trace.tokens.objective
    context = trace.context if isinstance(trace.context, str) else ""
    for row in read_csv_rows(path, required=("at_s",), allowed=_COLUMNS):
        if "context" in row.columns:
            context = row.read_text("context")
            if contexts and context not in contexts:
                meant = suggest_similar_name(context, sorted(contexts))
                raise row.make_error("context", f"{context!r} is not a context of this scenario; {meant}")
        elif not context:
            raise row.make_error("context", "the header lacks this column, and the scenario names no context")
        items = row.read_whole_number("items", trace.items, least=1)
        bound, number, whole = 1_000_000, row.read_number, row.read_whole_number
        yield Arrival(
            clock.seconds_of_row(row, row.read_number("at_s"), since_first=False), context, items,
            whole("input_length", 0), whole("expected_output", 0),
            whole("priority", trace.priority, least=-bound, most=bound),
            number("deadline_s", float(trace.deadline_s)), _read_gang(row, trace), number("fixed_s", 0.0),
            whole("items_done", 0, most=items), whole("output", 0), objective, shared_s=number("shared_s", 0.0),
        )  # fmt: skip


def _read_gang(row: TableRow, trace: Trace) -> tuple[int, int]:
    least, most = trace.gang
    if "gang_most" in row.columns:
        most = row.read_whole_number("gang_most", least=1, most=_MOST_MEMBERS)
        least = min(least, most)
    if "gang_least" in row.columns:
        least = row.read_whole_number("gang_least", least=1, most=most if "gang_most" in row.columns else _MOST_MEMBERS)
        most = max(least, most)
    return least, most


class _TracedFunction(msgspec.Struct, frozen=True):
    name: str = msgspec.field(name="HashFunction")
    timestamps: tuple[float, ...]
    input: tuple[int, ...]
    output: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = {len(self.timestamps), len(self.input), len(self.output)}
        if len(lengths) > 1:
            raise ValueError(f"input, output and timestamps need equal lengths, not {lengths}")


def _read_slinfer_trace(path: Path, trace: Trace, names: _ContextAssignment) -> Iterator[Arrival]:
    def first_s(function: _TracedFunction) -> float:
        return next(iter(function.timestamps), math.inf)

    functions = _read_slinfer_functions(path)
    taken = {function.name: names.assign_context(function.name) for function in sorted(functions, key=first_s)}

    def requests(place: int, function: _TracedFunction) -> Iterator[Arrival]:
        def wrong(field: str, what: str) -> ConfigError:
            where = f"{_relative_path(path)}: function {place} ({function.name[:12]}): {field}"
            return ConfigError(f"{where}: {what}", file=str(path), key=field)

        context, last_s = taken[function.name], 0.0
        for number, at_s in enumerate(function.timestamps):
            field, sizes = f"timestamps[{number}]", (function.input[number], function.output[number])
            if context is None:
                raise wrong("HashFunction", "the call has no context; name a context in contexts")
            if not last_s <= at_s < math.inf:
                raise wrong(field, f"the time decreases from {last_s:g} s to {at_s:g} s")
            if not all(0 <= size <= _MOST for size in sizes):
                raise wrong(f"input[{number}]", f"{sizes} are not numbers of tokens from 0 to {_MOST}")
            last_s = at_s
            yield _make_request(trace, at_s, context, *sizes)

    streams = [requests(place, function) for place, function in enumerate(functions)]
    return heapq.merge(*streams, key=lambda call: call.at_s)


def _read_slinfer_functions(path: Path) -> list[_TracedFunction]:
    try:
        with open_plain_or_gzipped(path) as file:
            text = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise make_unreadable_error(path, error) from None
    try:
        return msgspec.json.decode(text, type=list[_TracedFunction])
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `$")
        at = where.rstrip("`") or "the file"
        raise ConfigError(f"{_relative_path(path)}: {at}: {problem}", file=str(path)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if where := describe_invalid_utf8(text):
            raise ConfigError(f"{_relative_path(path)}: {where}", file=str(path)) from None
        found = re.search(r"\(byte (\d+)\)", str(error))
        line = text.count(b"\n", 0, int(found[1])) + 1 if found else 1
        raise make_row_error(path, line, "", f"is not JSON: {error}") from None


_READERS: dict[TraceFormat, Callable[[Path, Trace, _ContextAssignment], Iterator[Arrival]]] = {
    TraceFormat.PHILLY: _read_philly_trace,
    TraceFormat.ELASTICFLOW: _read_elasticflow_trace,
    TraceFormat.AZURE_LLM: _read_azure_llm_trace,
    TraceFormat.SLINFER: _read_slinfer_trace,
}
