"""The events of a simulated run: one row per event, in columns.

A row has a time in seconds, an event, the numbers of a call, library, pilot and block (-1 = none), and a value.
`EachCallLog` writes every event of a call. `CountedCallsLog` writes sums every second, and histograms of times at the
end.
"""

from __future__ import annotations

import enum
import math
from array import array
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

import msgspec

from stoker.protocol.calls import CallSpec


class LoggedEvent(enum.IntEnum):
    """Kinds of log rows. The comments describe the column `value`. `CALLS_...` rows count calls since the last row of
    their kind.
    """

    CALL_CAME = 0  # Number of items
    CALL_BEGAN = 1  # Number of items
    CALL_ENDED = 2  # Number of items done
    CALL_FAILED = 3  # Number of items
    LIBRARY_STARTED = 4  # Number of devices
    LIBRARY_READY = 5  # Seconds from the order to load until the library was ready
    LIBRARY_ENDED = 6
    PILOT_CAME = 7  # Number of devices
    PILOT_WENT = 8  # Number of devices
    BLOCK_ASKED = 9
    BLOCK_STARTED = 10
    BLOCK_OVER = 11
    CAPACITY = 12  # New maximum number of blocks of a source; `block` holds the source's number
    BYTES_SHARED = 13  # Bytes read from the shared file system
    BYTES_PEER = 14  # Bytes received from another pilot
    CALLS_CAME = 15  # Number of calls
    CALLS_BEGAN = 16  # Number of calls
    CALLS_BACK = 17  # Number of calls that were interrupted and wait again
    CALLS_ENDED = 18  # Number of items of ended calls; `call` is the number of calls
    CALLS_FAILED = 19  # Number of calls
    SECONDS_USED = 20  # Device-seconds of ended calls
    SECONDS_LOST = 21  # Device-seconds of interrupted calls
    WAITED = 22  # Seconds that `call` calls waited before they began
    TOOK = 23  # Seconds from arrival to end, for `call` calls
    CALL_DUE = 24  # Deadline of the call in seconds; this row follows the call's arrival row
    CALL_LEFT = 25  # Useful seconds of an interrupted run; 0 = the call starts from the beginning
    PART_BEGAN = 26  # Rank of a gang member other than rank 0
    PART_ENDED = 27  # Rank of the gang member
    PART_LEFT = 28  # Useful seconds, as for CALL_LEFT
    TOKEN_FIRST = 29  # Time to first token in seconds; token rows are written when a call to an engine ends
    TOKEN_MEAN = 30  # Mean seconds per output token after the first token
    TOKEN_GAP = 31  # Longest time between two tokens, in seconds
    TOKEN_LATE = 32
    """Seconds by which the most delayed token was late (0 or less = in time; infinity = the call failed). In counted
    logs, `call` is the number of calls.
    """


class EventLog:
    def __init__(self) -> None:
        self.at_s = array("d")
        self.what = array("B")
        self.call = array("q")
        self.library = array("l")
        self.pilot = array("l")
        self.block = array("l")
        self.value = array("d")

    def add_row(
        self, at_s: float, what: LoggedEvent, *, call: int = -1, library: int = -1, pilot: int = -1, block: int = -1,
        value: float = 0.0,
    ) -> None:  # fmt: skip
        self.at_s.append(at_s)
        self.what.append(what)
        self.call.append(call)
        self.library.append(library)
        self.pilot.append(pilot)
        self.block.append(block)
        self.value.append(value)

    def __len__(self) -> int:
        return len(self.at_s)

    def digest(self) -> str:
        digest = blake2b(digest_size=16)
        for column in (self.at_s, self.what, self.call, self.library, self.pilot, self.block, self.value):
            digest.update(column.tobytes())
        return digest.hexdigest()


_ROUNDING_S = 2e-6  # A token that is late by at most this number of seconds counts as in time


class TokenTimes(msgspec.Struct):
    """The tokens of one call to an engine, in seconds of the simulation's clock (SLINFER §VI-A, eq. 1).

    The first token is due one TTFT after the arrival, each further token one TPOT later. A rerun delivers only tokens
    that the program lacks. `due_at`: deadline of the first token (infinity = none). `load_grace_s`: duration of the
    load that the call waited for, which moves every deadline (§IX-A). `most`: tokens of the longest answer (0 = unknown
    to policies). `seen`: number of tokens that the program has received. `late_s`: maximum lateness of a token;
    negative if all tokens were early.
    """

    came_at: float
    prompt: int
    output: int
    due_at: float = math.inf
    tpot_s: float = 0.0
    load_grace_s: float = 0.0
    most: int = 0
    seen: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    worst_gap_s: float = 0.0
    late_s: float = -math.inf

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.came_at

    @property
    def mean_tpot_s(self) -> float:
        """Mean seconds per token after the first token; 0 if there is only one token."""
        return (self.last_at - self.first_at) / (self.seen - 1) if self.seen > 1 else 0.0

    @property
    def has_objective(self) -> bool:
        return self.due_at < math.inf

    @property
    def is_met(self) -> bool:
        return self.seen >= self.output and self.late_s <= self.load_grace_s + _ROUNDING_S

    def record_tokens(self, ends: Sequence[float], *, made: int) -> None:
        """Record tokens that a run wrote at the times `ends`. The run wrote `made` tokens before them."""
        new = ends[max(0, self.seen - made) :]
        if not new:
            return
        if self.seen:
            self.worst_gap_s = max(self.worst_gap_s, new[0] - self.last_at)
        else:
            self.first_at = new[0]
        if len(new) > 1:
            self.worst_gap_s = max(self.worst_gap_s, max(after - before for before, after in pairwise(new)))
        if self.due_at < math.inf and (self.tpot_s or not self.seen):
            due_at, tpot_s = self.due_at + self.seen * self.tpot_s, self.tpot_s
            due = new if tpot_s else new[:1]
            self.late_s = max(self.late_s, max(at - number * tpot_s for number, at in enumerate(due)) - due_at)
        self.seen += len(new)
        self.last_at = new[-1]


COUNT_INTERVAL_S = 1.0  # Seconds between two rows of counts
_CLASSES = 100.0  # Number of histogram classes per factor of e in time; each class is 1 % wide
_SHORTEST_S = 1e-6
_VALUES_PER_BATCH = 50_000


class LibraryPlace(NamedTuple):
    library: int
    pilot: int
    devices: int


class EachCallLog:
    """Writes a row for every event of a call and of every gang member."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def log_arrival(self, at_s: float, call: int, *, items: int, due_at: float = 0.0) -> None:
        self._log.add_row(at_s, LoggedEvent.CALL_CAME, call=call, value=items)
        if due_at:
            self._log.add_row(at_s, LoggedEvent.CALL_DUE, call=call, value=due_at)

    def _add_call_row(self, at_s: float, what: LoggedEvent, spec: CallSpec, where: LibraryPlace, value: float) -> None:
        self._log.add_row(at_s, what, call=spec.call, library=where.library, pilot=where.pilot, value=value)

    def log_start(self, at_s: float, spec: CallSpec, where: LibraryPlace, *, rank: int) -> None:
        what, value = (LoggedEvent.PART_BEGAN, rank) if rank else (LoggedEvent.CALL_BEGAN, count_items(spec))
        self._add_call_row(at_s, what, spec, where, value)

    def log_end(self, at_s: float, spec: CallSpec, where: LibraryPlace, *, rank: int, items: int) -> None:
        what, value = (LoggedEvent.PART_ENDED, rank) if rank else (LoggedEvent.CALL_ENDED, items)
        self._add_call_row(at_s, what, spec, where, value)

    def log_stop(self, at_s: float, spec: CallSpec, where: LibraryPlace, *, rank: int, kept_s: float) -> None:
        self._add_call_row(at_s, LoggedEvent.PART_LEFT if rank else LoggedEvent.CALL_LEFT, spec, where, kept_s)

    def log_failure(self, at_s: float, call: int, *, items: int) -> None:
        self._log.add_row(at_s, LoggedEvent.CALL_FAILED, call=call, value=items)

    def log_token_times(self, at_s: float, call: int, times: TokenTimes, *, ok: bool) -> None:
        note = self._log.add_row
        if ok:
            note(at_s, LoggedEvent.TOKEN_FIRST, call=call, value=times.ttft_s)
            if times.seen > 1:
                note(at_s, LoggedEvent.TOKEN_MEAN, call=call, value=times.mean_tpot_s)
                note(at_s, LoggedEvent.TOKEN_GAP, call=call, value=times.worst_gap_s)
        if times.has_objective:
            note(at_s, LoggedEvent.TOKEN_LATE, call=call, value=times.late_s - times.load_grace_s if ok else math.inf)

    def close(self, at_s: float) -> None: ...


class CountedCallsLog:
    """Writes sums for each second of virtual time and, at the end of the run, histograms of times."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._open: dict[int, float] = {}  # Arrival times of open calls
        self._fresh: set[int] = set()  # Open calls that have never begun
        self._running: dict[int, float] = {}
        self._parts: dict[tuple[int, int], float] = {}
        self._completed_again: set[int] = set()  # Calls that have completed more than once
        self._sums = [0.0] * len(LoggedEvent)
        self._ends = 0
        self._waits, self._takes = _TimeHistogram(), _TimeHistogram()
        self._tokens = {
            what: _TimeHistogram() for what in (LoggedEvent.TOKEN_FIRST, LoggedEvent.TOKEN_MEAN, LoggedEvent.TOKEN_GAP)
        }
        self._objectives = [0, 0]
        self._write_at = 0.0
        self._first = True

    def log_arrival(self, at_s: float, call: int, *, items: int, due_at: float = 0.0) -> None:  # noqa: ARG002 (CallsLog)
        self._open[call] = at_s
        self._fresh.add(call)
        self._count(at_s, LoggedEvent.CALLS_CAME)
        if self._first:
            self._first = False
            self._write_counts(at_s)

    def log_start(self, at_s: float, spec: CallSpec, where: LibraryPlace, *, rank: int) -> None:  # noqa: ARG002 (CallsLog)
        call = spec.call
        if rank:
            self._parts[call, rank] = at_s
            return
        self._running[call] = at_s
        if call in self._fresh:
            self._fresh.discard(call)
            self._waits.add(at_s - self._open[call])
        if call in self._open:
            self._count(at_s, LoggedEvent.CALLS_BEGAN)

    def log_end(self, at_s: float, spec: CallSpec, where: LibraryPlace, *, rank: int, items: int) -> None:
        """Count a completion. If the call has completed before, count the work of this run as lost."""
        call = spec.call
        if rank:
            what = LoggedEvent.SECONDS_LOST if call in self._completed_again else LoggedEvent.SECONDS_USED
            self._count(at_s, what, (at_s - self._parts.pop((call, rank))) * where.devices)
            return
        used_s, came_at = (at_s - self._running.pop(call)) * where.devices, self._open.pop(call, None)
        if came_at is None:
            self._completed_again.add(call)
            self._count(at_s, LoggedEvent.SECONDS_LOST, used_s)
            return
        self._takes.add(at_s - came_at)
        self._count(at_s, LoggedEvent.SECONDS_USED, used_s)
        self._count(at_s, LoggedEvent.CALLS_ENDED, items)
        self._ends += 1

    def log_stop(self, at_s: float, spec: CallSpec, where: LibraryPlace, *, rank: int, kept_s: float) -> None:
        call = spec.call
        began_at = self._parts.pop((call, rank)) if rank else self._running.pop(call, at_s - kept_s)
        self._count(at_s, LoggedEvent.SECONDS_USED, kept_s * where.devices)
        self._count(at_s, LoggedEvent.SECONDS_LOST, (at_s - began_at - kept_s) * where.devices)
        if not rank and call in self._open:
            self._count(at_s, LoggedEvent.CALLS_BACK)

    def log_failure(self, at_s: float, call: int, *, items: int) -> None:  # noqa: ARG002 (CallsLog)
        if self._open.pop(call, None) is None:
            return
        if call not in self._running:
            self._count(at_s, LoggedEvent.CALLS_BEGAN)  # otherwise the failed call would still count as waiting
        self._fresh.discard(call)
        self._count(at_s, LoggedEvent.CALLS_FAILED)

    def log_token_times(self, at_s: float, call: int, times: TokenTimes, *, ok: bool) -> None:  # noqa: ARG002 (CallsLog)
        if ok:
            self._tokens[LoggedEvent.TOKEN_FIRST].add(times.ttft_s)
            if times.seen > 1:
                self._tokens[LoggedEvent.TOKEN_MEAN].add(times.mean_tpot_s)
                self._tokens[LoggedEvent.TOKEN_GAP].add(times.worst_gap_s)
        if times.has_objective:
            self._objectives[ok and times.is_met] += 1

    def close(self, at_s: float) -> None:
        self._write_counts(at_s)
        for call in self._fresh:
            self._waits.add(at_s - self._open[call])
        for what, times in ((LoggedEvent.WAITED, self._waits), (LoggedEvent.TOOK, self._takes), *self._tokens.items()):
            for seconds, count in times.counts():
                self._log.add_row(at_s, what, call=count, value=seconds)
        for count, late_s in zip(self._objectives, (math.inf, 0.0), strict=True):
            if count:
                self._log.add_row(at_s, LoggedEvent.TOKEN_LATE, call=count, value=late_s)

    def _count(self, at_s: float, what: LoggedEvent, more: float = 1.0) -> None:
        if at_s >= self._write_at:
            self._write_counts(at_s)
        self._sums[what] += more

    def _write_counts(self, at_s: float) -> None:
        if len(self._log):
            # Rows must be in time order, but a call's arrival time may be before the time of the last row.
            at_s = max(at_s, self._log.at_s[-1])
        for what, value in zip(LoggedEvent, self._sums, strict=True):
            if value:
                self._log.add_row(at_s, what, call=self._ends if what is LoggedEvent.CALLS_ENDED else -1, value=value)
        self._sums = [0.0] * len(LoggedEvent)
        self._ends = 0
        self._write_at = at_s + COUNT_INTERVAL_S


CallsLog = EachCallLog | CountedCallsLog


def count_items(spec: CallSpec) -> int:
    return spec.features.items if spec.features is not None else 1


class _TimeHistogram:
    """A histogram of times. New values are collected and counted in bulk."""

    def __init__(self) -> None:
        self.new: list[float] = []
        self._counts: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        self.new.append(seconds)
        if len(self.new) >= _VALUES_PER_BATCH:
            self._add_to_histogram()

    def counts(self) -> list[tuple[float, int]]:
        self._add_to_histogram()
        none = round(math.log(_SHORTEST_S) * _CLASSES)
        return [
            (math.exp(number / _CLASSES) if number > none else 0.0, count)
            for number, count in sorted(self._counts.items())
        ]

    def _add_to_histogram(self) -> None:
        log = math.log
        self._counts.update([round(log(max(seconds, _SHORTEST_S)) * _CLASSES) for seconds in self.new])
        self.new.clear()
