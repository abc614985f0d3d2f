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

from stoker.config_errors import did_you_mean
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

    def wrong(self, field: str, what: str) -> ConfigError:
        return wrong(self.path, self.line, field, what)

    def text(self, field: str) -> str:
        text = self.cells[self.columns[field]].strip()
        if not text:
            raise self.wrong(field, "is empty")
        return text

    def whole(self, field: str, otherwise: int | None = None, *, least: int = 0, most: int = _MOST) -> int:
        if otherwise is not None and field not in self.columns:
            return otherwise
        text = self.cells[self.columns[field]]
        if not _WHOLE.fullmatch(text) or not least <= int(text) <= most:
            raise self.wrong(field, f"{_shown(text)} is not a whole number from {least} to {most}")
        return int(text)

    def number(self, field: str, otherwise: float | None = None) -> float:
        if otherwise is not None and field not in self.columns:
            return otherwise
        text = self.cells[self.columns[field]]
        if not _NUMBER.fullmatch(text) or not 0.0 <= float(text) < math.inf:
            raise self.wrong(field, f"{_shown(text)} is not a number of at least 0")
        return float(text)

    def date(self, field: str) -> float:
        """Return a field's date as seconds since 1970. A date without a time zone is in UTC. Raises ConfigError."""
        text = self.cells[self.columns[field]].strip()
        try:
            when = datetime.fromisoformat(text)
        except ValueError:
            raise self.wrong(field, f"{_shown(text)} is not a time; write the time as 2023-11-16 18:17:03.98") from None
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def read_table(path: Path, *, needs: tuple[str, ...], knows: tuple[str, ...] | None = None) -> Iterator[TableRow]:
    """Yield the rows of a CSV file. `needs`: required columns. `knows`: allowed columns; None allows any."""
    reader, columns = csv.reader(()), dict[str, int]()
    try:
        with open_bytes(path) as file:
            reader = csv.reader(_lines(file, path), strict=True)
            for cells in reader:
                if not cells or cells == [""]:
                    continue
                if not columns:
                    columns = _header(path, reader.line_num, cells, needs=needs, knows=knows)
                elif len(cells) != len(columns):
                    what = f"has {len(cells)} fields where the header has {len(columns)}"
                    raise wrong(path, reader.line_num, "", what)
                else:
                    yield TableRow(path, reader.line_num, columns, cells)
            if not columns:
                raise ConfigError(f"{_relative(path)}: the file is empty: there is not even a header", file=str(path))
    except csv.Error as error:
        raise wrong(path, reader.line_num, "", f"is not CSV: {error}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from None


def wrong(path: Path, line: int, field: str, what: str) -> ConfigError:
    parts = filter(None, (_relative(path), f"line {line}", field, what))
    return ConfigError(": ".join(parts), file=str(path), line=line, key=field)


def unreadable(path: Path, error: Exception) -> ConfigError:
    why = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
    return ConfigError(f"{_relative(path)}: {why}", file=str(path))


def _relative(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def open_bytes(path: Path) -> BinaryIO:
    """Open a plain or gzipped text file as bytes. Raises ConfigError for another format, and OSError."""
    file = path.open("rb")
    head = file.read(HEAD_BYTES)
    file.seek(0)
    if head.startswith(b"\x1f\x8b"):
        file.close()
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if what := describe_non_text_format(head):
        file.close()
        raise ConfigError(f"{_relative(path)}: {what}", file=str(path))
    return file


def _lines(file: BinaryIO, path: Path) -> Iterator[str]:
    for number, raw in enumerate(file, start=1):
        try:
            yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise wrong(path, number, "", invalid_byte_message(error.start + 1, raw[error.start])) from None


def _header(
    path: Path, line: int, cells: list[str], *, needs: tuple[str, ...], knows: tuple[str, ...] | None
) -> dict[str, int]:
    names = [cell.strip() for cell in cells]
    for name in names:
        if knows is not None and name not in knows:
            raise wrong(path, line, name or "header", f"is not a known column; {did_you_mean(name, knows)}")
        if names.count(name) > 1:
            raise wrong(path, line, name or "header", "is in the header twice")
    for name in needs:
        if name not in names:
            raise wrong(path, line, name, f"the header lacks this column; it has {_shown(', '.join(names))}")
    return {name: place for place, name in enumerate(names)}


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


_MOST_GPUS = 10_000
_MOST_MEMBERS = 1_000_000
_OTHERWISE = frozenset({"gang", "objective", "variants"})
_COLUMNS = (*(name for name in Arrival.__struct_fields__ if name not in _OTHERWISE), "gang_least", "gang_most")


def read_trace(trace: Trace, *, folder: Path, contexts: Collection[str] = ()) -> Iterator[Arrival]:
    """Return the calls of a trace in order of time. Raises ConfigError; for a faulty later row, during the
    iteration.
    """
    path = (folder / Path(trace.file).expanduser()).absolute()
    is_plain = trace.format is TraceFormat.CSV
    found = _plain(path, trace, contexts) if is_plain else _READERS[trace.format](path, trace, _TraceContexts(trace))
    calls = _cut(found, trace)
    first = next(calls, None)
    if first is None:
        cut = trace.start_s or trace.for_s or trace.cluster
        why = "no call matches start, for and cluster" if cut else "the file contains no calls"
        raise ConfigError(f"{_relative(path)}: {why}", file=str(path))
    return chain((first,), calls)


def _cut(calls: Iterable[Arrival], trace: Trace) -> Iterator[Arrival]:
    start_s, end_s = float(trace.start_s), trace.start_s + trace.for_s if trace.for_s else math.inf

    def wanted() -> Iterator[Arrival]:
        for call in calls:
            if call.at_s >= end_s:
                return
            if call.at_s >= start_s:
                yield msgspec.structs.replace(call, at_s=(call.at_s - start_s) / trace.speedup)

    return islice(wanted(), trace.count or None)


class _TraceContexts:
    def __init__(self, trace: Trace) -> None:
        given = (trace.context,) if isinstance(trace.context, str) else trace.context
        self._turns = cycle(given) if all(given) else None
        self._known = dict(trace.contexts)

    def context(self, name: str) -> str | None:
        known = self._known.get(name)
        if known is None and self._turns is not None:
            known = self._known[name] = next(self._turns)
        return known

    def of(self, row: TableRow, field: str) -> str:
        name = row.text(field)
        context = self.context(name)
        if context is None:
            hint = "name a context in contexts, or a context for all other functions in context"
            raise row.wrong(field, f"{name!r} has no context; {hint}")
        return context


class _RowClock:
    """Converts the times of rows to seconds since the first row. Rejects decreasing times."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._first: float | None = None
        self._last = -math.inf

    def at(self, row: TableRow, time_s: float, *, since_first: bool = True) -> float:
        if time_s < self._last:
            raise row.wrong(self._field, f"the time is {self._last - time_s:g} s earlier than in the row before")
        self._last = time_s
        if self._first is None:
            self._first = time_s if since_first else 0.0
        return round(time_s - self._first, 6)


def _read_philly_trace(path: Path, trace: Trace, names: _TraceContexts) -> Iterator[Arrival]:
    rows = read_table(path, needs=("timestamp", "duration", "num_gpus", "cluster"))
    wanted = (row for row in rows if trace.cluster in ("", row.text("cluster")))
    clock = _RowClock("timestamp")
    for time_s, row in sorted(((row.date("timestamp"), row) for row in wanted), key=lambda each: each[0]):
        yield from _job(row, trace, at_s=clock.at(row, time_s), context=names.of(row, "cluster"))


def _read_elasticflow_trace(path: Path, trace: Trace, names: _TraceContexts) -> Iterator[Arrival]:
    clock = _RowClock("submission_time")
    for row in read_table(path, needs=("submission_time", "model_name", "deadline", "num_gpu", "duration")):
        submitted_s, deadline_s = row.number("submission_time"), row.number("deadline")
        if deadline_s <= submitted_s:
            raise row.wrong("deadline", f"{deadline_s:g} s is not after the submission at {submitted_s:g} s")
        yield from _job(
            row, trace, at_s=clock.at(row, submitted_s), context=names.of(row, "model_name"), gpus="num_gpu",
            deadline_s=deadline_s - submitted_s,
        )  # fmt: skip


def _job(
    row: TableRow, trace: Trace, *, at_s: float, context: str, gpus: str = "num_gpus", deadline_s: float = 0.0
) -> Iterator[Arrival]:
    duration_s, number = row.number("duration"), row.whole(gpus, least=1, most=_MOST_GPUS)
    items = math.ceil(duration_s / trace.item_s)
    if not 1 <= items <= _MOST:
        raise row.wrong("duration", f"{duration_s:g} s is {items} items of {trace.item_s:g} s, not 1 to {_MOST}")
    deadline_s = deadline_s or float(trace.deadline_s)
    for _ in range(number):
        yield Arrival(at_s, context, items, priority=trace.priority, deadline_s=deadline_s)


def _read_azure_llm_trace(path: Path, trace: Trace, names: _TraceContexts) -> Iterator[Arrival]:
    context, clock = names.context("") or "", _RowClock("TIMESTAMP")
    for row in read_table(path, needs=("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        at_s = clock.at(row, row.date("TIMESTAMP"))
        yield _request(trace, at_s, context, row.whole("ContextTokens"), row.whole("GeneratedTokens"))


def _request(trace: Trace, at_s: float, context: str, input_length: int, output: int) -> Arrival:
    return Arrival(
        at_s, context, trace.items, input_length, 0, trace.priority, float(trace.deadline_s), trace.gang,
        output=output, objective=trace.tokens.objective,
    )  # fmt: skip


def _plain(path: Path, trace: Trace, contexts: Collection[str]) -> Iterator[Arrival]:
    clock, objective = _RowClock("at_s"), trace.tokens.objective
    context = trace.context if isinstance(trace.context, str) else ""
    for row in read_table(path, needs=("at_s",), knows=_COLUMNS):
        if "context" in row.columns:
            context = row.text("context")
            if contexts and context not in contexts:
                meant = did_you_mean(context, sorted(contexts))
                raise row.wrong("context", f"{context!r} is not a context of this scenario; {meant}")
        elif not context:
            raise row.wrong("context", "the header lacks this column, and the scenario names no context")
        items = row.whole("items", trace.items, least=1)
        bound, number, whole = 1_000_000, row.number, row.whole
        yield Arrival(
            clock.at(row, row.number("at_s"), since_first=False), context, items, whole("input_length", 0),
            whole("expected_output", 0), whole("priority", trace.priority, least=-bound, most=bound),
            number("deadline_s", float(trace.deadline_s)), _gang(row, trace), number("fixed_s", 0.0),
            whole("items_done", 0, most=items), whole("output", 0), objective, shared_s=number("shared_s", 0.0),
        )  # fmt: skip


def _gang(row: TableRow, trace: Trace) -> tuple[int, int]:
    least, most = trace.gang
    if "gang_most" in row.columns:
        most = row.whole("gang_most", least=1, most=_MOST_MEMBERS)
        least = min(least, most)
    if "gang_least" in row.columns:
        least = row.whole("gang_least", least=1, most=most if "gang_most" in row.columns else _MOST_MEMBERS)
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


def _slinfer(path: Path, trace: Trace, names: _TraceContexts) -> Iterator[Arrival]:
    def first_s(function: _TracedFunction) -> float:
        return next(iter(function.timestamps), math.inf)

    functions = _functions(path)
    taken = {function.name: names.context(function.name) for function in sorted(functions, key=first_s)}

    def requests(place: int, function: _TracedFunction) -> Iterator[Arrival]:
        def wrong(field: str, what: str) -> ConfigError:
            where = f"{_relative(path)}: function {place} ({function.name[:12]}): {field}"
            return ConfigError(f"{where}: {what}", file=str(path), key=field)

        context, last_s = taken[function.name], 0.0
        for number, at_s in enumerate(function.timestamps):
            field, sizes = f"timestamps[{number}]", (function.input[number], function.output[number])
            if context is None:
                raise wrong("HashFunction", "the call has no context; name a context in contexts")
            if not last_s <= at_s < math.inf:
                raise wrong(field, f"the time decreases from {last_s:g} s to {at_s:g} s")
            if not all(0 <= size <= _MOST for size in sizes):
                raise wrong(f"input[{number}]", f"{sizes} are not lengths in tokens")
            last_s = at_s
            yield _request(trace, at_s, context, *sizes)

    streams = [requests(place, function) for place, function in enumerate(functions)]
    return heapq.merge(*streams, key=lambda call: call.at_s)


def _functions(path: Path) -> list[_TracedFunction]:
    try:
        with open_bytes(path) as file:
            text = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from None
    try:
        return msgspec.json.decode(text, type=list[_TracedFunction])
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `$")
        at = where.rstrip("`") or "the file"
        raise ConfigError(f"{_relative(path)}: {at}: {problem}", file=str(path)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if where := describe_invalid_utf8(text):
            raise ConfigError(f"{_relative(path)}: {where}", file=str(path)) from None
        found = re.search(r"\(byte (\d+)\)", str(error))
        line = text.count(b"\n", 0, int(found[1])) + 1 if found else 1
        raise wrong(path, line, "", f"is not JSON: {error}") from None


_READERS: dict[TraceFormat, Callable[[Path, Trace, _TraceContexts], Iterator[Arrival]]] = {
    TraceFormat.PHILLY: _read_philly_trace,
    TraceFormat.ELASTICFLOW: _read_elasticflow_trace,
    TraceFormat.AZURE_LLM: _read_azure_llm_trace,
    TraceFormat.SLINFER: _slinfer,
}
