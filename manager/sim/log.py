"""What happened in a simulated run, one row an event, in columns: small enough for millions of calls.

A row has a time in seconds, what happened, and whom it concerns: a call, a library, a pilot, a block, each by number
(-1 = none); `value` depends on the event. Whoever wants text gets it from `Happened` and the tables of names.

What a program sees of a call to an engine: when its tokens come, and how that compares with what it wants.

A token is due as SLINFER has it (§VI-A, eq. 1): the first when the call has come and its time to first token is over,
each further one a time per output token later. A call has met its objective if none of its tokens was late. So tokens
that come early are a reserve for later ones, as they are for somebody who reads; `worst_gap_s` tells how long the
longest pause between two tokens was.

A call that runs again, because its library was lost, hands on only what its program does not have: the tokens of the
second run count from there.

What becomes of calls, into the log: a row for each of them, or counts for all of them together.

A call with a story takes three rows, which anything can be computed from later, and one that a gang runs two more for
each other member. A minute of short requests has
millions of calls, and nobody asks for the story of one: `CountedCalls` keeps sums, writes them every so often, and at
the end how long calls waited and took, in classes of 1 % width. `stoker.manager.study.measures` reads both.
"""

from __future__ import annotations

import enum
import math
from array import array
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple, Protocol

import msgspec

from stoker.protocol.calls import CallSpec

# ---- log


class Happened(enum.IntEnum):
    """Events of a run, and what `value` is."""

    CALL_CAME = 0
    """Its items."""
    CALL_BEGAN = 1
    """Its items."""
    CALL_ENDED = 2
    """Its items: they are done."""
    CALL_FAILED = 3
    """Its items."""
    LIBRARY_STARTED = 4
    """Its devices; 0 in old logs, where it has one."""
    LIBRARY_READY = 5
    """Seconds from the order to load."""
    LIBRARY_ENDED = 6
    PILOT_CAME = 7
    """Devices."""
    PILOT_WENT = 8
    """Devices."""
    BLOCK_ASKED = 9
    BLOCK_STARTED = 10
    BLOCK_OVER = 11
    CAPACITY = 12
    """Blocks that a source may have, from now on; `block` is the source's number."""
    BYTES_SHARED = 13
    """Bytes that were read from the shared file system."""
    BYTES_PEER = 14
    """Bytes that came from another pilot."""
    CALLS_CAME = 15
    """Where calls are counted: calls since the row of this kind before. So for those that follow."""
    CALLS_BEGAN = 16
    """Calls."""
    CALLS_BACK = 17
    """Calls that ran and wait again."""
    CALLS_ENDED = 18
    """Their items; `call` is their number."""
    CALLS_FAILED = 19
    """Calls."""
    SECONDS_USED = 20
    """Device-seconds of calls that ended."""
    SECONDS_LOST = 21
    """Device-seconds of calls that were cut off."""
    WAITED = 22
    """Seconds that `call` calls waited before they began, in the last rows of a run."""
    TOOK = 23
    """Seconds from the coming of `call` calls to their end, in the last rows of a run."""
    CALL_DUE = 24
    """When its deadline is, in seconds: a row beside that of its coming, for calls that have one."""
    CALL_LEFT = 25
    """Seconds of its run that were not for nothing: it runs no more, and goes on from a checkpoint, or from its
    beginning (0)."""
    PART_BEGAN = 26
    """The rank of another member of the gang that runs it; rank 0 has the rows of a call that runs alone."""
    PART_ENDED = 27
    """As above."""
    PART_LEFT = 28
    """As CALL_LEFT."""
    TOKEN_FIRST = 29
    """A call's time to first token, in seconds. This row and the next two stand beside the end of a call to an engine;
    one that failed has none."""
    TOKEN_MEAN = 30
    """Its mean time per output token, of those after the first."""
    TOKEN_GAP = 31
    """Its longest time from one token to the next."""
    TOKEN_LATE = 32
    """How late its latest token was, in seconds; 0 or less: it has met its objective. For calls that have one; infinity
    for one that failed. Where calls are counted, `call` calls of a class."""


class EventLog:
    """Rows, in order of time."""

    def __init__(self) -> None:
        self.at_s = array("d")
        self.what = array("B")
        self.call = array("q")
        self.library = array("l")
        self.pilot = array("l")
        self.block = array("l")
        self.value = array("d")

    def note(
        self, at_s: float, what: Happened, *, call: int = -1, library: int = -1, pilot: int = -1, block: int = -1,
        value: float = 0.0,
    ) -> None:  # fmt: skip
        """Add a row."""
        self.at_s.append(at_s)
        self.what.append(what)
        self.call.append(call)
        self.library.append(library)
        self.pilot.append(pilot)
        self.block.append(block)
        self.value.append(value)

    def __len__(self) -> int:
        """Rows."""
        return len(self.at_s)

    def digest(self) -> str:
        """The same for two runs in which the same happened."""
        digest = blake2b(digest_size=16)
        for column in (self.at_s, self.what, self.call, self.library, self.pilot, self.block, self.value):
            digest.update(column.tobytes())
        return digest.hexdigest()


# ---- token times


_ROUNDING_S = 2e-6
"""The agenda rounds to microseconds: a token that is so late is not late."""


class TokenTimes(msgspec.Struct):
    """The tokens of one call. Seconds of the simulation's clock.

    `prompt`: tokens that go in; `output`: those that come out, which the simulated engine alone knows beforehand.
    `due_at`: when the first is due, infinity if nobody waits for it; `tpot_s`: how much later each further one is, 0 if
    nobody waits for those.
    `grace_s`: the load of a library that the call had to wait for; the whole call may be so much later (§IX-A).
    """

    came_at: float
    prompt: int
    output: int
    due_at: float = math.inf
    tpot_s: float = 0.0
    grace_s: float = 0.0
    seen: int = 0
    """Tokens that its program has."""
    first_at: float = 0.0
    last_at: float = 0.0
    worst_gap_s: float = 0.0
    late_s: float = -math.inf
    """How late its latest token was against `due_at` and `tpot_s`; below zero: early."""

    @property
    def ttft_s(self) -> float:
        """Its time to first token."""
        return self.first_at - self.came_at

    @property
    def mean_tpot_s(self) -> float:
        """The mean time of its tokens after the first; 0 where there is none."""
        return (self.last_at - self.first_at) / (self.seen - 1) if self.seen > 1 else 0.0

    @property
    def has_objective(self) -> bool:
        """True if somebody waits for its tokens."""
        return self.due_at < math.inf

    @property
    def is_met(self) -> bool:
        """True if it has all of its tokens, and none came late (but for `grace_s`)."""
        return self.seen >= self.output and self.late_s <= self.grace_s + _ROUNDING_S

    def add(self, ends: Sequence[float], *, made: int) -> None:
        """A run of the call, which had made so many tokens, has made one more at each of these times."""
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


# ---- calls log


EVERY_S = 1.0
"""Counts are written so often; they are exact at these moments."""

_CLASSES = 100.0
"""Classes of times for each factor of e."""
_SHORTEST_S = 1e-6
_AT_ONCE = 50_000


class LibraryPlace(NamedTuple):
    """A library and its pilot, by number, and how many devices it has."""

    library: int
    pilot: int
    devices: int


class CallsLog(Protocol):
    """Hears what becomes of calls. Times in seconds. The members of a gang are told apart by their rank; the call is
    that of rank 0, which a call that runs alone has as well."""

    def came(self, at_s: float, call: int, *, items: int, due_at: float = 0.0) -> None:
        """A program has it. `due_at`: its deadline, 0 = none."""

    def began(self, at_s: float, spec: CallSpec, where: LibraryPlace, *, rank: int) -> None:
        """It runs."""

    def ended(self, at_s: float, spec: CallSpec, where: LibraryPlace, *, rank: int, items: int) -> None:
        """It has run to its end, which came after so many items."""

    def stopped(self, at_s: float, spec: CallSpec, where: LibraryPlace, *, rank: int, kept_s: float) -> None:
        """It ran, and does not any more. So many seconds of the run were not for nothing."""

    def failed(self, at_s: float, call: int, *, items: int) -> None:
        """Its program was told so."""

    def tokens(self, at_s: float, call: int, times: TokenTimes, *, ok: bool) -> None:
        """A call to an engine has ended for its program: when its tokens came."""

    def close(self, at_s: float) -> None:
        """Nothing follows."""


class EachCall:
    """A row for everything that happens to a call."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def came(self, at_s: float, call: int, *, items: int, due_at: float = 0.0) -> None:
        """A program has it."""
        self._log.note(at_s, Happened.CALL_CAME, call=call, value=items)
        if due_at:
            self._log.note(at_s, Happened.CALL_DUE, call=call, value=due_at)

    def began(self, at_s: float, spec: CallSpec, where: LibraryPlace, *, rank: int) -> None:
        """It runs."""
        what, value = (Happened.PART_BEGAN, rank) if rank else (Happened.CALL_BEGAN, items_of(spec))
        self._log.note(at_s, what, call=spec.call, library=where.library, pilot=where.pilot, value=value)

    def ended(self, at_s: float, spec: CallSpec, where: LibraryPlace, *, rank: int, items: int) -> None:
        """It has run to its end."""
        what, value = (Happened.PART_ENDED, rank) if rank else (Happened.CALL_ENDED, items)
        self._log.note(at_s, what, call=spec.call, library=where.library, pilot=where.pilot, value=value)

    def stopped(self, at_s: float, spec: CallSpec, where: LibraryPlace, *, rank: int, kept_s: float) -> None:
        """It ran, and does not any more."""
        what = Happened.PART_LEFT if rank else Happened.CALL_LEFT
        self._log.note(at_s, what, call=spec.call, library=where.library, pilot=where.pilot, value=kept_s)

    def failed(self, at_s: float, call: int, *, items: int) -> None:
        """Its program was told so."""
        self._log.note(at_s, Happened.CALL_FAILED, call=call, value=items)

    def tokens(self, at_s: float, call: int, times: TokenTimes, *, ok: bool) -> None:
        """A call to an engine has ended for its program."""
        note = self._log.note
        if ok:
            note(at_s, Happened.TOKEN_FIRST, call=call, value=times.ttft_s)
            if times.seen > 1:
                note(at_s, Happened.TOKEN_MEAN, call=call, value=times.mean_tpot_s)
                note(at_s, Happened.TOKEN_GAP, call=call, value=times.worst_gap_s)
        if times.has_objective:
            note(at_s, Happened.TOKEN_LATE, call=call, value=times.late_s - times.grace_s if ok else math.inf)

    def close(self, at_s: float) -> None:
        """Nothing follows."""


class CountedCalls:
    """Sums, written every second of virtual time, and classes of times at the end."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._open: dict[int, float] = {}
        """Calls that have not ended, and when they came."""
        self._fresh: set[int] = set()
        """Those of them that never began."""
        self._running: dict[int, float] = {}
        self._parts: dict[tuple[int, int], float] = {}
        """Other members of gangs that run a call, by its number and their rank."""
        self._again: set[int] = set()
        """Calls that have run to their end more than once."""
        self._sums = [0.0] * len(Happened)
        self._ends = 0
        self._waits, self._takes = _Times(), _Times()
        self._tokens = {what: _Times() for what in (Happened.TOKEN_FIRST, Happened.TOKEN_MEAN, Happened.TOKEN_GAP)}
        self._objectives = [0, 0]
        """Calls that have missed theirs, and that have met it."""
        self._write_at = 0.0
        self._first = True
        """No call has come: the row for the first says when."""

    def came(self, at_s: float, call: int, *, items: int, due_at: float = 0.0) -> None:  # noqa: ARG002 (CallsLog)
        """A program has it."""
        self._open[call] = at_s
        self._fresh.add(call)
        self._add(at_s, Happened.CALLS_CAME)
        if self._first:
            self._first = False
            self._write(at_s)

    def began(self, at_s: float, spec: CallSpec, where: LibraryPlace, *, rank: int) -> None:  # noqa: ARG002 (CallsLog)
        """It runs."""
        call = spec.call
        if rank:
            self._parts[call, rank] = at_s
            return
        self._running[call] = at_s
        if call in self._fresh:
            self._fresh.discard(call)
            self._waits.add(at_s - self._open[call])
        if call in self._open:
            self._add(at_s, Happened.CALLS_BEGAN)

    def ended(self, at_s: float, spec: CallSpec, where: LibraryPlace, *, rank: int, items: int) -> None:
        """It has run to its end; what ran before was for nothing if it had ended already."""
        call = spec.call
        if rank:
            what = Happened.SECONDS_LOST if call in self._again else Happened.SECONDS_USED
            self._add(at_s, what, (at_s - self._parts.pop((call, rank))) * where.devices)
            return
        used_s, came_at = (at_s - self._running.pop(call)) * where.devices, self._open.pop(call, None)
        if came_at is None:
            self._again.add(call)
            self._add(at_s, Happened.SECONDS_LOST, used_s)
            return
        self._takes.add(at_s - came_at)
        self._add(at_s, Happened.SECONDS_USED, used_s)
        self._add(at_s, Happened.CALLS_ENDED, items)
        self._ends += 1

    def stopped(self, at_s: float, spec: CallSpec, where: LibraryPlace, *, rank: int, kept_s: float) -> None:
        """It waits again, if its program has not heard of its end."""
        call = spec.call
        began_at = self._parts.pop((call, rank)) if rank else self._running.pop(call, at_s - kept_s)
        self._add(at_s, Happened.SECONDS_USED, kept_s * where.devices)
        self._add(at_s, Happened.SECONDS_LOST, (at_s - began_at - kept_s) * where.devices)
        if not rank and call in self._open:
            self._add(at_s, Happened.CALLS_BACK)

    def failed(self, at_s: float, call: int, *, items: int) -> None:  # noqa: ARG002 (CallsLog)
        """Its program was told so."""
        if self._open.pop(call, None) is None:
            return
        if call not in self._running:
            self._add(at_s, Happened.CALLS_BEGAN)  # it does not wait any more
        self._fresh.discard(call)
        self._add(at_s, Happened.CALLS_FAILED)

    def tokens(self, at_s: float, call: int, times: TokenTimes, *, ok: bool) -> None:  # noqa: ARG002 (CallsLog)
        """A call to an engine has ended for its program."""
        if ok:
            self._tokens[Happened.TOKEN_FIRST].add(times.ttft_s)
            if times.seen > 1:
                self._tokens[Happened.TOKEN_MEAN].add(times.mean_tpot_s)
                self._tokens[Happened.TOKEN_GAP].add(times.worst_gap_s)
        if times.has_objective:
            self._objectives[ok and times.is_met] += 1

    def close(self, at_s: float) -> None:
        """Write what was not written, and the classes of times. What never began has waited until now."""
        self._write(at_s)
        for call in self._fresh:
            self._waits.add(at_s - self._open[call])
        for what, times in ((Happened.WAITED, self._waits), (Happened.TOOK, self._takes), *self._tokens.items()):
            for seconds, count in times.counts():
                self._log.note(at_s, what, call=count, value=seconds)
        for count, late_s in zip(self._objectives, (math.inf, 0.0), strict=True):
            if count:
                self._log.note(at_s, Happened.TOKEN_LATE, call=count, value=late_s)

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
