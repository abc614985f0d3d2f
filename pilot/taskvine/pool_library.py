"""A library of a TaskVine pool: what the orders of the pilot's core reach.

It stands for the right to have one order of its context in TaskVine at a time; which worker carries that out, and
whether a process there still holds the context, is TaskVine's business. (An order without calls, sent ahead, has it
loaded.) TaskVine gets one process for each library of a context that the manager starts.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import assert_never

import msgspec

from stoker.pilot.core.events import Event, FromLibrary, ProcessEnded
from stoker.pilot.taskvine import messages
from stoker.pilot.taskvine.orders import OrderOutcome, Orders
from stoker.pilot.taskvine.verdict import verdict
from stoker.protocol import to_agent, to_library
from stoker.protocol.calls import CallEnd, CallSpec, Failure, FailureKind
from stoker.protocol.ids import CallId
from stoker.protocol.to_pilot import StartLibrary

log = logging.getLogger("stoker.pilot")

TRIES = 3
"""An order that TaskVine gave up on before it began is sent again so often."""


class PoolLibrary:
    """One of them, from its order until the core forgets it. `tell` tells the core of an event."""

    def __init__(self, ordered: StartLibrary, orders: Orders, tell: Callable[[Event], None]) -> None:
        self.number = ordered.library
        self.devices = ordered.devices
        self.memory_bytes = 0
        """Host memory that its process was measured to take last; 0 = not known."""
        self._ordered = ordered
        self._orders = orders
        self._tell = tell
        self._queue: deque[tuple[to_library.Run, CallSpec]] = deque()
        """Calls that TaskVine has not been given."""
        self._order: messages.PoolOrder | None = None
        """What TaskVine works on for it."""
        self._tries = 0
        """How often TaskVine gave that order up before it began."""
        self._ordered_at = time.monotonic()
        self._stops = False
        self._is_over = False

    @property
    def sent(self) -> tuple[CallId, ...]:
        """Its calls that TaskVine has."""
        return tuple(spec.call for spec in self._order.calls) if self._order is not None else ()

    # ---- what its core says

    def load(self) -> None:
        """Its slots are its own: have TaskVine load its context."""
        self._say(to_agent.Hello(self.number, 0))
        self._submit(self._orders.load())

    def hear(self, message: to_library.ToLibrary) -> None:
        """Do what the core says. What runs in TaskVine cannot be looked into, and reports nothing."""
        match message:
            case to_library.Run():
                self._run(message)
            case to_library.GiveBack(count=count, calls=calls, order=order):
                back = self._drop(calls) if calls else self._newest(count)
                if back or not calls:
                    self._say(to_agent.GivenBack(tuple(back), order=order))
            case to_library.Stop():
                self._stops = True
                if self._queue:
                    self._say(to_agent.GivenBack(tuple(self._newest(len(self._queue)))))
                if self._order is None:
                    self._end()
            case to_library.Resize(device_memory_bytes=size):
                self._say(to_agent.Resized(size))
            case to_library.Evict(call=call):
                self.interrupt({call})
            case to_library.Meet() | to_library.Load() | to_library.Taken():
                pass
            case _:
                assert_never(message)

    def interrupt(self, calls: set[CallId]) -> None:
        """Have those of these calls stopped that TaskVine has; their context stays loaded."""
        if self._order is not None:
            self._orders.interrupt(self._order, [call for call in self.sent if call in calls])

    def kill(self) -> None:
        """End it now, and have what it runs stopped. TaskVine keeps the context as long as it likes."""
        self.interrupt(set(self.sent))
        self._end(running=self.sent)

    def _run(self, run: to_library.Run) -> None:
        calls = tuple(spec.call for spec in run.calls)
        if run.function_blob is not None:
            self._orders.take_function(run.function_blob)
        elif not self._orders.knows(run.function):
            self._say(to_agent.GivenBack(calls, need_function=True))
            return
        if run.gang is not None and run.gang.size > 1:
            text = f'it wants {run.gang.size} devices at once, and engine = "taskvine" runs no gangs'
            failure = Failure(FailureKind.NO_DEVICE, text, library=self.number)
            self._say(to_agent.RunsEnded([CallEnd(call, ok=False, failure=failure) for call in calls]))
            return
        self._queue.extend((run, spec) for spec in run.calls)
        self._feed()

    def _drop(self, calls: tuple[CallId, ...]) -> list[CallId]:
        """Take out those of these calls that TaskVine has not been given."""
        wanted = set(calls)
        dropped = [spec.call for _, spec in self._queue if spec.call in wanted]
        self._queue = deque((run, spec) for run, spec in self._queue if spec.call not in wanted)
        return dropped

    def _newest(self, count: int) -> list[CallId]:
        """Take out up to `count` calls that TaskVine has not been given, newest first."""
        return [self._queue.pop()[1].call for _ in range(min(count, len(self._queue)))]

    # ---- TaskVine

    def _feed(self) -> None:
        """Give TaskVine the next calls, if it has none; end if there are none and there are to be no more."""
        if self._order is not None or self._is_over:
            return
        if self._stops:
            self._end()
        elif self._queue:
            self._tries = 0
            self._submit(self._orders.next_of(self._queue))

    def _submit(self, order: messages.PoolOrder) -> None:
        self._order = order
        self._orders.submit(order, self._ordered, then=self._finished)

    def _finished(self, outcome: OrderOutcome) -> None:
        """TaskVine is done with the order."""
        self._order = None
        if self._is_over:
            return
        answer, order = outcome.answer, outcome.order
        if answer is None:
            self._failed(outcome)
            return
        self.memory_bytes = answer.held.resident_bytes
        if answer.held.failure is not None:
            self._end(msgspec.structs.replace(answer.held.failure, library=self.number))
        elif order.calls:
            self._ended(order, answer)
        else:
            self._loaded(answer.held)

    def _loaded(self, held: messages.LibraryReport) -> None:
        log.info("lib-%d (%s) is on %s", self.number, self._ordered.recipe.name, held.host)
        # What it took of memory is not told: the manager would plan to have several contexts in one slot.
        start_s = max(0.0, time.monotonic() - self._ordered_at - held.load_s)
        self._say(to_agent.Loaded(held.load_s, resident_bytes=0, peak_bytes=0, start_s=start_s))

    def _ended(self, order: messages.PoolOrder, answer: messages.PoolAnswer) -> None:
        self._say(to_agent.RunsEnded(answer.ends))
        for end in answer.ends:
            self._orders.measured(order.function, end.run_s)
        held = answer.held
        if not held.orders:
            name = self._ordered.recipe.name
            log.info("TaskVine had %s loaded once more, on %s: %.2f s", name, held.host, held.load_s)
        self._feed()

    def _failed(self, outcome: OrderOutcome) -> None:
        """TaskVine has no answer: the process that should have given it has ended, or was never there."""
        order, note = outcome.order, outcome.note
        if note is None and order.calls and self._tries < TRIES:
            self._tries += 1
            self._send_again(order, without=outcome.stopped)
            return
        failure = verdict(
            self._ordered, note, said=outcome.result, loading=not order.calls, pilot=self._orders.setup.pilot
        )
        self._end(failure, running=(CallId(note.call),) if note is not None else ())

    def _send_again(self, order: messages.PoolOrder, *, without: frozenset[CallId]) -> None:
        """Send an order that never began once more; calls that were stopped meanwhile go back to the manager."""
        if without:
            self._say(to_agent.GivenBack(tuple(without)))
        calls = [spec for spec in order.calls if spec.call not in without]
        if calls:
            self._submit(self._orders.again(order, calls))
        else:
            self._feed()

    # ---- what it says

    def _say(self, message: to_agent.ToAgent) -> None:
        self._tell(FromLibrary(self.number, (message,)))

    def _end(self, failure: Failure | None = None, *, running: tuple[CallId, ...] = ()) -> None:
        if not self._is_over:
            self._is_over = True
            self._tell(ProcessEnded(self.number, running=running, verdict=failure))
