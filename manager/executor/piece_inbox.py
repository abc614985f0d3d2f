"""The pieces of one call as they come to the program: the link's thread adds them, the program's threads take them.

A call may run more than once: its pilot was lost, its program tries it again. Each run gives its pieces from the first
one, so only those count that are new. A piece that was handed on has to be the same in a later run (`piece_log`); one
that still waits here is replaced by what the later run gives, since nobody has seen it.

The inbox of a stream is bounded. What is over the bound is not acknowledged until the reader has taken some, and the
call waits. The inbox of a future keeps every piece for its result, and acknowledges all.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

from stoker.errors import CallError, StreamDiffersError
from stoker.manager.executor.piece_log import PieceLog, Rerun
from stoker.protocol.calls import CallEnd
from stoker.protocol.ids import CallId, show_call
from stoker.protocol.to_client import Pieces
from stoker.protocol.to_manager import PiecesTaken

MOST_PIECES, MOST_BYTES = 4_096, 16_000_000
"""A stream's inbox acknowledges nothing while it holds more."""
ACK_PIECES, ACK_BYTES = 64, 250_000
"""So many pieces, or bytes of them, are acknowledged together, unless the call waits for that."""
Taken = tuple[Any, bool, PiecesTaken | None]
"""A piece: its bytes, or (True) its value, and what is to be acknowledged now."""


class _Run:
    """What has come of one run."""

    def __init__(self, log: PieceLog) -> None:
        self.next = 0
        """The number of its piece that comes next."""
        self.rerun = Rerun(log)


class PieceInbox:
    """With `keeps_all` the pieces stay for the call's result. `may_differ`: a later run may give other pieces."""

    def __init__(self, *, keeps_all: bool, may_differ: bool = False) -> None:
        self.keeps_all = keeps_all
        self.call: CallId | None = None
        self._may_differ = may_differ
        self._items: list[Any] | deque[Any] = [] if keeps_all else deque()
        self._holds_values = False
        """Whether the items are the pieces themselves and not their bytes any more."""
        self._bytes = 0
        self._handed = 0
        """How many were handed on: those before it are in the log."""
        self._log = PieceLog()
        self._runs: dict[int, _Run] = {}
        self._run = 0
        self._acknowledged = 0
        self._unacknowledged_bytes = 0
        self._owes = False
        """Whether the call waits for an acknowledgement."""
        self._is_over = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._waiters: list[asyncio.Future[None]] = []
        """Tasks of programs that wait, each in an event loop of its own."""

    # ---- the link's side

    def begin(self, call: CallId) -> None:
        """The pieces of this call are expected: the first one, or one that tries again what another has begun."""
        with self._changed:
            self.call = call

    def add(self, message: Pieces) -> PiecesTaken | None:
        """Take what has come; returns what is to be acknowledged now. Raises StreamDiffersError. Tasks that wait are
        left to the caller (`take_waiters`), who wakes those of many streams together."""
        with self._changed:
            if self._is_over:
                return None
            run = self._runs.setdefault(message.run, _Run(self._log))
            if message.run != self._run:
                self._run, self._acknowledged, self._unacknowledged_bytes = message.run, run.next, 0
            for number, item in enumerate(message.items, message.first):
                if number > run.next:  # those between were lost with a connection, and come again
                    break
                if number == run.next:
                    run.next += 1
                    self._unacknowledged_bytes += len(item)
                    self._add(run, number, item)
            self._owes |= message.waits
            self._changed.notify_all()
            return self._acknowledgement()

    def take_waiters(self) -> list[asyncio.Future[None]]:
        """The tasks that wait for what has come: for `wake_tasks`."""
        with self._changed:
            waiters, self._waiters = self._waiters, []
        return waiters

    def ask_again(self) -> PiecesTaken | None:
        """What to say to a manager that has just welcomed this program: pieces may have been lost."""
        with self._changed:
            if self.call is None or self._is_over:
                return None
            if not self._is_full():
                self._note_acknowledged()
            return PiecesTaken(self.call, self._run, self._acknowledged, again=True)

    def _add(self, run: _Run, number: int, item: bytes) -> None:
        if number < self._handed:
            at = None if self._may_differ else run.rerun.first_difference(number, item)
            if at is not None:
                self._differ(f"piece {at:,} (counted from 0) of its new run is not the one", at)
            return
        place = number - self._base
        if place < len(self._items):
            if self._items[place] == item:
                return
            self._cut(place)
        self._items.append(item)
        self._bytes += len(item)

    def _acknowledgement(self) -> PiecesTaken | None:
        fresh = self._runs[self._run].next - self._acknowledged if self._run in self._runs else 0
        is_due = self._owes or fresh >= ACK_PIECES or self._unacknowledged_bytes >= ACK_BYTES
        if not is_due or self.call is None or self._is_full():
            return None
        self._note_acknowledged()
        return PiecesTaken(self.call, self._run, self._acknowledged)

    def _note_acknowledged(self) -> None:
        if self._run in self._runs:
            self._acknowledged = self._runs[self._run].next
        self._owes, self._unacknowledged_bytes = False, 0

    # ---- the end

    def values_at_end(self, end: CallEnd) -> list[bytes]:
        """The bytes of all pieces of the run that has ended well. Raises StreamDiffersError, CallError."""
        with self._changed:
            self._check_count(end)
            return list(self._items)

    def finish(self, error: BaseException | None = None, *, end: CallEnd | None = None) -> None:
        """The call has ended: readers get what is here, then this error, if there is one."""
        with self._changed:
            if end is not None and end.ok:
                try:
                    self._check_count(end)
                except CallError as wrong:
                    error = wrong
            self._is_over, self._error = True, self._error or error
            self._wake()

    def close(self) -> None:
        """Nobody reads on: drop what is here."""
        with self._changed:
            self._is_over = True
            self._cut(0)
            self._wake()

    def finish_with(self, values: list[Any]) -> None:
        """The call has ended, and these are its pieces."""
        with self._changed:
            self._items, self._holds_values, self._is_over = values, True, True
            self._wake()

    def _check_count(self, end: CallEnd) -> None:
        here = self._base + len(self._items)
        if end.pieces > here:
            raise CallError(
                f"call {show_call(end.call)}: {end.pieces - here} of its {end.pieces} pieces did not come: call again",
                call=show_call(end.call),
            )
        if end.pieces < self._handed and not self._may_differ:
            self._differ(f"its new run ended after {end.pieces:,}", end.pieces)
        self._cut(max(0, end.pieces - self._base))

    def _differ(self, what: str, at: int) -> None:
        call, handed = show_call(self.call or 0), self._handed
        self._cut(max(0, handed - self._base))
        error = StreamDiffersError(
            f"call {call} ran again, as it does when its pilot is lost, and {what}; {handed:,} pieces were handed on by"
            " then. Have the function yield the same each time (a seed, greedy decoding), or say that another run may"
            " differ: stoker.stream(..., rerun_may_differ=True)",
            call=call,
            piece=at,
            handed_on=handed,
        )
        self._is_over, self._error = True, error
        self._wake()
        raise error

    # ---- the program's side

    def take(self, number: int) -> Taken | None:
        """The piece of this number; None if it has not come. Raises StopIteration behind the last one, and the error
        that the call ended with."""
        with self._changed:
            if self._is_here(number):
                return self._take(number)
            if self._error is not None:
                raise self._error
            if self._is_over:
                raise StopIteration
            return None

    def take_arrived(self, number: int, *, most: int) -> list[Taken]:
        """The pieces that have come from this number on, at most so many."""
        found: list[Taken] = []
        with self._changed:
            while len(found) < most and self._is_here(number + len(found)):
                found.append(self._take(number + len(found)))
        return found

    def _take(self, number: int) -> Taken:
        item = self._items[number - self._base]
        if number == self._handed:
            self._handed += 1
            if not self._holds_values:
                self._log.add(item)
            if isinstance(self._items, deque):
                self._items.popleft()
                self._bytes -= len(item)
                return item, False, self._acknowledgement()
        return item, self._holds_values, None

    def wait(self, number: int) -> None:
        """Wait until `take` has an answer."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_answer(number))

    def when_changed(self, number: int) -> asyncio.Future[None] | None:
        """A future of the loop that runs, which ends when `take` may have an answer; None if it has one now."""
        with self._changed:
            if self._has_answer(number):
                return None
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            return waiter

    def _has_answer(self, number: int) -> bool:
        return self._is_over or self._is_here(number)

    def _is_here(self, number: int) -> bool:
        return number - self._base < len(self._items)

    # ---- the rest; the caller holds the lock

    @property
    def _base(self) -> int:
        """The number of the first item."""
        return 0 if self.keeps_all else self._handed

    def _is_full(self) -> bool:
        return not self.keeps_all and (len(self._items) > MOST_PIECES or self._bytes > MOST_BYTES)

    def _cut(self, place: int) -> None:
        """Drop the items from this place on."""
        while len(self._items) > place:
            self._bytes -= len(self._items.pop())

    def _wake(self) -> None:
        self._changed.notify_all()
        waiters, self._waiters = self._waiters, []
        wake_tasks(waiters)


def wake_tasks(waiters: Iterable[asyncio.Future[None]]) -> None:
    """Wake these tasks from any thread: each event loop once, however many of its tasks are among them."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for waiter in waiters:
        by_loop.setdefault(waiter.get_loop(), []).append(waiter)
    for loop, theirs in by_loop.items():
        try:
            loop.call_soon_threadsafe(_end_all, theirs)
        except RuntimeError:  # the loop is closed, and its tasks have ended
            pass


def _end_all(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
