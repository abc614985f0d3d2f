"""The open calls of a client: the waiter of each, and the files of their large arguments.

Any thread adds and gives up calls; the I/O thread settles them. There is no lock: each step is one operation on a
dictionary, and only the thread that removes a call's waiter from it calls that waiter.
"""

from __future__ import annotations

import logging
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from stoker.contexts.recipe import ObjectRef
from stoker.errors import ProtocolError
from stoker.manager.executor.outgoing import Waiter
from stoker.manager.executor.packing import LargeArguments, discard_result
from stoker.manager.executor.piece_inbox import PieceInbox
from stoker.protocol.calls import CallEnd, CallForecast, CallProgress, CallSpec, LeftFiles, Payload
from stoker.protocol.ids import CallId, show_call

logger = logging.getLogger(__name__)


class WaitingCalls:
    """`waiters` maps each open call to its waiter; `large` holds the large arguments of calls."""

    def __init__(self, large: LargeArguments) -> None:
        self.waiters: dict[CallId, Waiter] = {}
        self._large = large
        self.inboxes: dict[CallId, PieceInbox] = {}
        """Where the pieces of open calls go that give their results in pieces."""
        self._files: dict[CallId, ObjectRef] = {}
        self._given_up: set[CallId] = set()
        """Calls whose results no one will read: their files are removed. A call that is neither here nor in
        `waiters` has ended twice: the file of its result may still be read."""
        self._gangs: dict[CallId, int] = {}
        """Calls that want several devices at once, and how many."""
        self._told_of: set[str] = set()
        """Functions whose calls have left files where they are lost, once that was said."""

    def __len__(self) -> int:
        return len(self.waiters)

    @property
    def slots(self) -> int:
        """Slots that the calls take or want: one a call, and one a member of a gang."""
        over = [call for call in tuple(self._gangs) if call not in self.waiters]
        for call in over:
            self._gangs.pop(call, None)
        return len(self.waiters) + sum(members - 1 for members in tuple(self._gangs.values()))

    def add(
        self, call: CallId, payload: Payload, waiter: Waiter, *, members: int = 1, inbox: PieceInbox | None = None
    ) -> None:
        """Wait for a call that is about to be sent, and for its pieces if it has an `inbox`."""
        self.waiters[call] = waiter
        if inbox is not None:
            inbox.begin(call)
            self.inboxes[call] = inbox
        if members > 1:
            self._gangs[call] = members
        if isinstance(payload, ObjectRef):
            self._files[call] = payload

    def add_all(self, specs: Sequence[CallSpec], waiter: Waiter) -> list[CallId]:
        """Wait for calls that are about to be sent, with one waiter for all of them. Returns their ids."""
        calls = [spec.call for spec in specs]
        self.waiters.update(dict.fromkeys(calls, waiter))
        self._files.update((spec.call, spec.payload) for spec in specs if isinstance(spec.payload, ObjectRef))
        return calls

    def give_up(self, calls: Iterable[CallId]) -> list[CallId]:
        """Stop waiting for these calls, without a call of their waiters. Returns those that had not ended."""
        gone = [call for call in calls if self.waiters.pop(call, None) is not None]
        self._given_up.update(gone)
        self._tidy(gone)
        return gone

    def report(self, reports: Iterable[CallProgress | CallForecast]) -> None:
        """Pass reports on running calls to their waiters."""
        for report in reports:
            waiter = self.waiters.get(report.call)
            if waiter is not None:
                waiter.report(report)

    def settle(self, ends: Sequence[CallEnd]) -> None:
        """Pass the ends of a frame to their waiters."""
        pop = self.waiters.pop
        touched: set[Waiter] = set()
        self._tidy(end.call for end in ends)
        for end in ends:
            if end.left is not None:
                self._tell_left(end.left)
            waiter = pop(end.call, None)
            if waiter is None:
                if end.call in self._given_up:
                    self._given_up.discard(end.call)
                    discard_result(end)
                continue
            try:
                if waiter.settle(end):
                    touched.add(waiter)
            except BaseException:  # a callback raised an error that is no Exception; other calls still wait
                logger.exception("a callback of call %s failed", show_call(end.call))
        for waiter in touched:
            waiter.flush()

    def _tell_left(self, left: LeftFiles) -> None:
        """Warn of lost files, once for each function."""
        if left.function in self._told_of:
            return
        self._told_of.add(left.function)
        files = ", ".join(left.names) + (f" and {left.count - len(left.names)} more" * (left.count > len(left.names)))
        seen = f"; its pilot does not see {left.home}, where the program runs" if left.home else ""
        logger.warning(
            "%s left files in its working folder that are lost (%s)%s: return what is in them, or write them to a"
            " folder that pilots see, by its absolute path (said once for each function)",
            left.function,
            files,
            seen,
        )

    def reject(self, calls: Iterable[CallId], reason: str) -> None:
        """Fail calls that the manager has refused."""
        for call in calls:
            waiter = self.waiters.pop(call, None)
            self._tidy([call])
            if waiter is not None:
                waiter.fail(call, ProtocolError(f"the manager did not accept this call: {reason}"))
                waiter.flush()

    def fail_all(self, error: Exception) -> None:
        """Fail all open calls."""
        for call, waiter in self._popped():
            self._tidy([call])
            waiter.fail(call, error)
            waiter.flush()

    def _popped(self) -> Iterator[tuple[CallId, Waiter]]:
        while True:
            try:
                yield self.waiters.popitem()
            except KeyError:
                return

    def _tidy(self, calls: Iterable[CallId]) -> None:
        """Remove the files of the large arguments of ended calls, and expect no more pieces of them."""
        if self._files or self.inboxes:
            for call in calls:
                self.inboxes.pop(call, None)
                ref = self._files.pop(call, None)
                if ref is not None:
                    self._large.drop(ref)


class MapInbox:
    """The waiter of a `stoker.map`: the link's thread appends each end to `arrived` and rings `bell`; the stream reads.

    The link keeps this and not the stream, so that the stream is collected when its loop is left."""

    def __init__(self) -> None:
        self.arrived: deque[Any] = deque()
        self.bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.on_ended: Callable[[int], None] = lambda _calls: None
        """Hears, on the link's thread, how many calls of a frame have ended."""
        self._ended = 0

    def settle(self, end: CallEnd) -> bool:
        """A call has ended."""
        self._ended += 1
        self.arrived.append(end)
        return True

    def fail(self, call: CallId, error: Exception) -> None:
        """A call will have no end."""
        self.arrived.append((call, error))

    def flush(self) -> None:
        """Ring once for all that came together."""
        self.count()
        self.bell.put(None)

    def count(self) -> None:
        """Report the calls that have ended since the last time."""
        if ended := self._ended:
            self._ended = 0
            self.on_ended(ended)

    def report(self, said: CallProgress | CallForecast) -> None:
        """Reports of single calls are not shown."""
