"""What becomes of calls, into the log: a row for each of them, or counts for all of them together.

A call with a story takes three rows, which anything can be computed from later. A minute of short requests has
millions of calls, and nobody asks for the story of one: `CountedCalls` keeps sums, writes them every so often, and at
the end how long calls waited and took, in classes of 1 % width. `stoker.manager.study.measures` reads both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from stoker.manager.protocol.calls import CallSpec
from stoker.manager.sim.log import Happened, Log

EVERY_S = 1.0
"""Counts are written so often; they are exact at these moments."""

_CLASSES = 100.0
"""Classes of times for each factor of e."""
_SHORTEST_S = 1e-6
_AT_ONCE = 50_000


class CallsLog(Protocol):
    """Hears what becomes of calls. Times in seconds; an entry of `began` pairs a call with when it began."""

    def came(self, at_s: float, call: int, *, items: int) -> None:
        """A program has it."""

    def began(self, at_s: float, spec: CallSpec, *, library: int, pilot: int) -> None:
        """It runs."""

    def ended(self, at_s: float, spec: CallSpec, *, library: int, pilot: int) -> None:
        """It has run to its end."""

    def failed(self, at_s: float, call: int, *, items: int) -> None:
        """Its program was told so."""

    def stopped(self, at_s: float, calls: Iterable[int]) -> None:
        """They ran, and do not any more: their library is over, or they were evicted."""

    def close(self, at_s: float) -> None:
        """Nothing follows."""


class EachCall:
    """A row for everything that happens to a call."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def came(self, at_s: float, call: int, *, items: int) -> None:
        """A program has it."""
        self._log.note(at_s, Happened.CALL_CAME, call=call, value=items)

    def began(self, at_s: float, spec: CallSpec, *, library: int, pilot: int) -> None:
        """It runs."""
        self._log.note(
            at_s, Happened.CALL_BEGAN, call=spec.call, library=library, pilot=pilot, value=items_of(spec)
        )  # fmt: skip

    def ended(self, at_s: float, spec: CallSpec, *, library: int, pilot: int) -> None:
        """It has run to its end."""
        self._log.note(
            at_s, Happened.CALL_ENDED, call=spec.call, library=library, pilot=pilot, value=items_of(spec)
        )  # fmt: skip

    def failed(self, at_s: float, call: int, *, items: int) -> None:
        """Its program was told so."""
        self._log.note(at_s, Happened.CALL_FAILED, call=call, value=items)

    def stopped(self, at_s: float, calls: Iterable[int]) -> None:
        """The end of their library says it."""

    def close(self, at_s: float) -> None:
        """Nothing follows."""


class CountedCalls:
    """Sums, written every second of virtual time, and classes of times at the end."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._open: dict[int, float] = {}
        """Calls that have not ended, and when they came."""
        self._fresh: set[int] = set()
        """Those of them that never began."""
        self._running: dict[int, float] = {}
        self._sums = [0.0] * len(Happened)
        self._ends = 0
        self._waits, self._takes = _Times(), _Times()
        self._write_at = 0.0
        self._first = True
        """No call has come: the row for the first says when."""

    def came(self, at_s: float, call: int, *, items: int) -> None:  # noqa: ARG002 (CallsLog)
        """A program has it."""
        self._open[call] = at_s
        self._fresh.add(call)
        self._add(at_s, Happened.CALLS_CAME)
        if self._first:
            self._first = False
            self._write(at_s)

    def began(self, at_s: float, spec: CallSpec, *, library: int, pilot: int) -> None:  # noqa: ARG002 (CallsLog)
        """It runs."""
        call = spec.call
        self._running[call] = at_s
        if call in self._fresh:
            self._fresh.discard(call)
            self._waits.add(at_s - self._open[call])
        if call in self._open:
            self._add(at_s, Happened.CALLS_BEGAN)

    def ended(self, at_s: float, spec: CallSpec, *, library: int, pilot: int) -> None:  # noqa: ARG002 (CallsLog)
        """It has run to its end; what ran before was for nothing if it had ended already."""
        call = spec.call
        ran_s, came_at = at_s - self._running.pop(call), self._open.pop(call, None)
        if came_at is None:
            self._add(at_s, Happened.SECONDS_LOST, ran_s)
            return
        self._takes.add(at_s - came_at)
        self._add(at_s, Happened.SECONDS_USED, ran_s)
        self._add(at_s, Happened.CALLS_ENDED, items_of(spec))
        self._ends += 1

    def failed(self, at_s: float, call: int, *, items: int) -> None:  # noqa: ARG002 (CallsLog)
        """Its program was told so."""
        if self._open.pop(call, None) is None:
            return
        began_at = self._running.pop(call, None)
        if began_at is None:
            self._add(at_s, Happened.CALLS_BEGAN)  # it does not wait any more
        else:
            self._add(at_s, Happened.SECONDS_LOST, at_s - began_at)
        self._fresh.discard(call)
        self._add(at_s, Happened.CALLS_FAILED)

    def stopped(self, at_s: float, calls: Iterable[int]) -> None:
        """They wait again."""
        for call in calls:
            self._add(at_s, Happened.SECONDS_LOST, at_s - self._running.pop(call, at_s))
            if call in self._open:
                self._add(at_s, Happened.CALLS_BACK)

    def close(self, at_s: float) -> None:
        """Write what was not written, and the classes of times. What never began has waited until now."""
        self._write(at_s)
        for call in self._fresh:
            self._waits.add(at_s - self._open[call])
        for what, times in ((Happened.WAITED, self._waits), (Happened.TOOK, self._takes)):
            for seconds, count in times.counts():
                self._log.note(at_s, what, call=count, value=seconds)

    def _add(self, at_s: float, what: Happened, more: float = 1.0) -> None:
        if at_s >= self._write_at:
            self._write(at_s)
        self._sums[what] += more

    def _write(self, at_s: float) -> None:
        if len(self._log):
            at_s = max(at_s, self._log.at_s[-1])  # requests that were gathered came before what has happened since
        for what, value in zip(Happened, self._sums, strict=True):
            if value:
                self._log.note(at_s, what, call=self._ends if what is Happened.CALLS_ENDED else -1, value=value)
        self._sums = [0.0] * len(Happened)
        self._ends = 0
        self._write_at = at_s + EVERY_S


def items_of(spec: CallSpec) -> int:
    """The items of a call; one that says nothing has one."""
    return spec.features.items if spec.features is not None else 1


class _Times:
    """How often each class of times was seen. Times are kept as they come, and sorted into classes many at once."""

    def __init__(self) -> None:
        self.new: list[float] = []
        self._counts: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        """One more."""
        new = self.new
        new.append(seconds)
        if len(new) >= _AT_ONCE:
            self._sort()

    def counts(self) -> list[tuple[float, int]]:
        """The middle of each class, in seconds, and how many are in it, by length."""
        self._sort()
        return [(_middle_s(number), count) for number, count in sorted(self._counts.items())]

    def _sort(self) -> None:
        log = math.log
        self._counts.update([round(log(max(seconds, _SHORTEST_S)) * _CLASSES) for seconds in self.new])
        self.new.clear()


def _middle_s(number: int) -> float:
    return math.exp(number / _CLASSES) if number > round(math.log(_SHORTEST_S) * _CLASSES) else 0.0
