"""Writes a simulated run's event log as a Parquet file and as a timeline for Perfetto."""

from __future__ import annotations

import gzip
from array import array
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from stoker.errors import ConfigError
from stoker.manager.sim.log import EventLog, LoggedEvent
from stoker.manager.study.plots import Curves
from stoker.whole_files import draft_file

Facts = Mapping[str, str | int | float | bool]

_FACTS = b"stoker"
_ROWS_A_GROUP = 1 << 20
_INTEGERS = {"call": "int64", "library": "int32", "pilot": "int32", "block": "int32"}
_ENCODINGS = {
    "at_s": "BYTE_STREAM_SPLIT", "call": "DELTA_BINARY_PACKED", "library": "DELTA_BINARY_PACKED",
    "pilot": "DELTA_BINARY_PACKED", "block": "DELTA_BINARY_PACKED", "value": "BYTE_STREAM_SPLIT",
}  # fmt: skip
_NAMES = tuple(happened.name.lower() for happened in LoggedEvent)
_NUMBERS = {happened.name.lower(): int(happened) for happened in LoggedEvent}


def write_event_log(path: Path, log: EventLog, meta: Facts) -> None:
    """Write an event log to a file atomically. `meta`: facts about the run, which are also stored in the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = pa.Array.from_buffers(pa.int8(), len(log.what), [None, pa.py_buffer(log.what)])
    columns = [_make_arrow_array(log.at_s, "float64"), pa.DictionaryArray.from_arrays(numbers, pa.array(_NAMES))]
    columns += [_make_arrow_array(getattr(log, name), type) for name, type in _INTEGERS.items()]
    columns.append(_make_arrow_array(log.value, "float64"))
    table = pa.table(columns, names=["at_s", "what", *_INTEGERS, "value"])
    facts = msgspec.json.encode(dict(meta), order="deterministic")
    with draft_file(path) as draft:
        pq.write_table(
            table.replace_schema_metadata({_FACTS: facts}), draft, version="2.6", compression="zstd",
            compression_level=3, use_dictionary=["what"], column_encoding=_ENCODINGS, write_statistics=False,
            row_group_size=_ROWS_A_GROUP, data_page_version="1.0",
        )  # fmt: skip


def read_event_log(path: Path) -> tuple[EventLog, dict[str, Any]]:
    """Return the event log and the facts that `write_event_log` wrote. Raises ConfigError for any other file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, read_dictionary=["what"], memory_map=True)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file", file=str(path)) from None
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{path}: not an event log: {error}", file=str(path)) from None
    facts = (table.schema.metadata or {}).get(_FACTS)
    if facts is None or table.column_names != ["at_s", "what", *_INTEGERS, "value"]:
        raise ConfigError(f"{path}: not an event log of a simulation: the columns differ", file=str(path))
    log = EventLog()
    for name in ("at_s", *_INTEGERS, "value"):
        column: array[Any] = getattr(log, name)
        for chunk in table.column(name).cast(_arrow_type(column)).chunks:
            width, values = column.itemsize, chunk.buffers()[1]
            if values is not None:
                column.frombytes(bytes(values.slice(chunk.offset * width, len(chunk) * width)))
    for chunk in table.column("what").chunks:
        log.what.extend(_decode_event_numbers(chunk, path))
    return log, msgspec.json.decode(facts, type=dict[str, Any])


def _make_arrow_array(column: array[Any], type: str) -> Any:
    import pyarrow as pa

    return pa.Array.from_buffers(_arrow_type(column), len(column), [None, pa.py_buffer(column)]).cast(type)


def _decode_event_numbers(chunk: Any, path: Path) -> list[int]:
    try:
        here = [_NUMBERS[name] for name in chunk.dictionary.to_pylist()]
    except KeyError as error:
        raise ConfigError(f"{path}: {error} is not a known event: another version wrote this log") from None
    return [here[index] for index in chunk.indices.to_pylist()]


def _arrow_type(column: array[Any]) -> Any:
    import pyarrow as pa

    return pa.float64() if column.typecode == "d" else {4: pa.int32(), 8: pa.int64()}[column.itemsize]


MOST_CALLS = 200_000  # Maximum number of calls in a run for which each call has a separate bar

_RUN, _BLOCKS, _FIRST_PILOT = 1, 2, 10
_OWN_ROW = 0
_SHORT_GAP_S = 0.002  # A gap between calls is drawn if it is longer than this, and longer than a tenth of a call

TraceEvent = dict[str, Any]


def write_timeline(path: Path, log: EventLog, curves: Curves) -> None:
    """Write the timeline of a run atomically, gzipped if the name ends in `.gz`."""
    write_timeline_events(path, make_timeline_events(log, curves))


def write_timeline_events(path: Path, events: Iterable[TraceEvent]) -> None:
    encode = msgspec.json.Encoder().encode
    with draft_file(path) as draft, _open_plain_or_gzipped(draft) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, event in enumerate(events):
            file.write((b",\n" if number else b"") + encode(event))
        file.write(b"\n]}\n")


def make_timeline_events(log: EventLog, curves: Curves, *, most_calls: int = MOST_CALLS) -> Iterator[TraceEvent]:
    yield make_name_event("process_name", "run", pid=_RUN)
    yield from _make_counter_events("calls that wait", curves.queue.at_s, curves.queue.values)
    yield from _make_counter_events("devices", curves.devices.at_s, curves.devices.values)
    yield from _make_counter_events("items done", curves.completed.at_s, curves.completed.values)
    began = Counter(log.what)[LoggedEvent.CALL_BEGAN]
    yield from _TimelineRows(log, calls_per_bar=max(1, -(-began // most_calls))).draw()


@dataclass(slots=True)
class _CallBar:
    """A bar of one or more calls, in one timeline row of a library."""

    first: int
    began_at: float
    ended_at: float
    calls: int = 0
    items: float = 0.0

    def is_adjacent_to(self, began_at: float) -> bool:
        gap_s = (self.ended_at - self.began_at) / (10 * self.calls)
        return began_at - self.ended_at <= max(gap_s, _SHORT_GAP_S)

    def make_event(self, pilot: int, row: int) -> TraceEvent:
        name = f"call {self.first}" if self.calls == 1 else f"{self.calls} calls"
        args = {"calls": self.calls, "items": self.items, "first": self.first}
        return make_slice_event(name, self.began_at, self.ended_at, pid=_FIRST_PILOT + pilot, tid=row, args=args)


@dataclass(slots=True)
class _LibraryRows:
    """The timeline rows of a library. `running_calls`: row, start and rank of each call. `unfinished_bars`: by row."""

    pilot: int
    ordered_at: float
    is_ready: bool = False
    rows: list[int] = field(default_factory=list)
    running_calls: dict[int, tuple[int, float, int]] = field(default_factory=dict)
    unfinished_bars: dict[int, _CallBar] = field(default_factory=dict)


_PHASES = {LoggedEvent.BLOCK_ASKED: "in the queue", LoggedEvent.BLOCK_STARTED: "running", LoggedEvent.BLOCK_OVER: ""}


class _TimelineRows:
    """Draws the rows of libraries, pilots and blocks. `calls_per_bar`: number of calls per bar."""

    def __init__(self, log: EventLog, *, calls_per_bar: int) -> None:
        self._log = log
        self._calls_per_bar = calls_per_bar
        self._libraries: dict[int, _LibraryRows] = {}
        self._pilots: dict[int, float] = {}
        self._rows: Counter[int] = Counter()  # Number of library rows drawn for each pilot
        self._blocks: dict[int, tuple[str, float]] = {}

    def draw(self) -> Iterator[TraceEvent]:
        log, at_s = self._log, 0.0
        yield make_name_event("process_name", "blocks", pid=_BLOCKS)
        columns = zip(log.what, log.at_s, log.call, log.library, log.pilot, log.block, log.value, strict=True)
        for what, at_s, call, number, pilot, block, value in columns:
            library = self._libraries.get(number)
            match what:
                case LoggedEvent.CALL_BEGAN | LoggedEvent.PART_BEGAN if library is not None:
                    row = yield from self._find_free_row(number, library)
                    library.running_calls[call] = row, at_s, int(value) if what == LoggedEvent.PART_BEGAN else 0
                case LoggedEvent.CALL_ENDED if library is not None and call in library.running_calls:
                    yield from self._add_to_bar(library, call, at_s, value)
                case LoggedEvent.PART_ENDED if library is not None and call in library.running_calls:
                    yield self._draw_interrupted_call(library, call, at_s, "")
                case LoggedEvent.CALL_LEFT | LoggedEvent.PART_LEFT if (
                    library is not None and call in library.running_calls
                ):
                    yield self._draw_interrupted_call(library, call, at_s, ", checkpointed" if value else ", lost")
                case LoggedEvent.LIBRARY_STARTED:
                    self._libraries[number] = _LibraryRows(pilot, at_s)
                case LoggedEvent.LIBRARY_READY if library is not None and not library.is_ready:
                    library.is_ready = True
                    yield from self._draw_load(number, library, at_s, "load")
                case LoggedEvent.LIBRARY_ENDED if library is not None:
                    yield from self._draw_ended_library(number, at_s, was_cut_off=True)
                case LoggedEvent.PILOT_CAME:
                    self._pilots[pilot] = at_s
                    yield make_name_event("process_name", f"pilot {pilot}", pid=_FIRST_PILOT + pilot)
                    yield make_name_event("thread_name", "pilot", pid=_FIRST_PILOT + pilot, tid=_OWN_ROW)
                case LoggedEvent.PILOT_WENT if pilot in self._pilots:
                    yield self._draw_ended_pilot(pilot, at_s)
                case LoggedEvent.BLOCK_ASKED | LoggedEvent.BLOCK_STARTED | LoggedEvent.BLOCK_OVER:
                    yield self._draw_block_phase(block, at_s, _PHASES[LoggedEvent(what)])
        for number in list(self._libraries):
            yield from self._draw_ended_library(number, at_s, was_cut_off=False)
        for pilot in list(self._pilots):
            yield self._draw_ended_pilot(pilot, at_s)
        for block in list(self._blocks):
            yield self._draw_block_phase(block, at_s, "")

    def _add_to_bar(self, library: _LibraryRows, call: int, at_s: float, items: float) -> Iterator[TraceEvent]:
        """Add an ended call to the bar of its row, and draw the bar when it has enough calls."""
        row, began_at, _ = library.running_calls.pop(call)
        span = library.unfinished_bars.get(row)
        if span is not None and not span.is_adjacent_to(began_at):
            yield library.unfinished_bars.pop(row).make_event(library.pilot, row)
            span = None
        if span is None:
            span = library.unfinished_bars[row] = _CallBar(call, began_at, began_at)
        span.calls, span.items, span.ended_at = span.calls + 1, span.items + items, at_s
        if span.calls >= self._calls_per_bar:
            yield library.unfinished_bars.pop(row).make_event(library.pilot, row)

    def _draw_interrupted_call(self, library: _LibraryRows, call: int, at_s: float, suffix: str) -> TraceEvent:
        row, began_at, rank = library.running_calls.pop(call)
        text = f"call {call}{f', rank {rank}' if rank else ''}{suffix}"
        color = {"cname": "terrible"} if suffix == ", lost" else {}
        return make_slice_event(text, began_at, at_s, pid=_FIRST_PILOT + library.pilot, tid=row, **color)

    def _find_free_row(self, number: int, library: _LibraryRows) -> Generator[TraceEvent, None, int]:
        taken = {row for row, _, _ in library.running_calls.values()}
        for row in library.rows:
            if row not in taken:
                return row
        self._rows[library.pilot] += 1
        row = self._rows[library.pilot]
        library.rows.append(row)
        place = len(library.rows)
        text = f"lib-{number}" if place == 1 else f"lib-{number}, call {place} at once"
        yield make_name_event("thread_name", text, pid=_FIRST_PILOT + library.pilot, tid=row)
        return row

    def _draw_load(self, number: int, library: _LibraryRows, at_s: float, text: str) -> Iterator[TraceEvent]:
        row = yield from self._find_free_row(number, library)
        yield make_slice_event(text, library.ordered_at, at_s, pid=_FIRST_PILOT + library.pilot, tid=row, cname="grey")

    def _draw_ended_library(self, number: int, at_s: float, *, was_cut_off: bool) -> Iterator[TraceEvent]:
        library = self._libraries.pop(number)
        if not library.is_ready:
            yield from self._draw_load(number, library, at_s, "load, cut off" if was_cut_off else "load")
        for row, span in library.unfinished_bars.items():
            yield span.make_event(library.pilot, row)
        for call in tuple(library.running_calls):
            yield self._draw_interrupted_call(library, call, at_s, ", lost" if was_cut_off else "")

    def _draw_ended_pilot(self, pilot: int, at_s: float) -> TraceEvent:
        return make_slice_event("connected", self._pilots.pop(pilot), at_s, pid=_FIRST_PILOT + pilot, tid=_OWN_ROW)

    def _draw_block_phase(self, block: int, at_s: float, now: str) -> TraceEvent:
        before = self._blocks.pop(block, None)
        if now:
            self._blocks[block] = now, at_s
        if before is None:
            return make_name_event("thread_name", f"block {block}", pid=_BLOCKS, tid=block)
        return make_slice_event(before[0], before[1], at_s, pid=_BLOCKS, tid=block)


def make_slice_event(name: str, began_at: float, ended_at: float, *, pid: int, tid: int, **more: Any) -> TraceEvent:
    began_us = round(began_at * 1e6)
    length_us = round(ended_at * 1e6) - began_us
    return {"ph": "X", "name": name, "ts": began_us, "dur": length_us, "pid": pid, "tid": tid, **more}


def _make_counter_events(name: str, at_s: Iterable[float], values: Iterable[float]) -> Iterator[TraceEvent]:
    for moment, value in zip(at_s, values, strict=True):
        yield {"ph": "C", "name": name, "ts": round(moment * 1e6), "pid": _RUN, "args": {name: value}}


def make_name_event(kind: str, name: str, *, pid: int, tid: int = 0) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


@contextmanager
def _open_plain_or_gzipped(path: Path) -> Iterator[BinaryIO]:
    with path.open("wb") as file:
        if path.suffix != ".gz":
            yield file
            return
        with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0) as packed:
            yield packed  # type: ignore[misc]
